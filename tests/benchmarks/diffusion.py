"""Compare decode rates of models that write by diffusion with transformers, in turn, and the generated texts.

    python -m tests.benchmarks.diffusion [llada] [dream] [-n 64] [--steps 64] [--block-length 32] [-t 2] [-r 3]
    python -m tests.benchmarks.diffusion llada -n 16 --steps 8 --block-length 16 -r 1 --width 256 --layers 2  # short

The models are random, with the layers of the released ones. transformers contains the layers under other names, but
not the loops. So the loop for transformers is written here, in torch, as in LLaDA's release (arXiv:2502.09992): each
step evaluates prompt and reply, chooses the likeliest token for each mask of the block, and keeps the tokens with the
highest probability. Both sides compute in float32.

The machine's speed drifts, so both sides take turns. Rates are the best of all rounds, and the ratio is the median of
the ratios within a round. The exit code is 1 if the texts differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import localllm
from localllm import LLM
from localllm.models.registry import ARCHITECTURES
from tests.models.tiny import DIFFUSION, make_model, write

_COLUMNS = "{:<10} {:>8} {:>9} {:>13} {:>7}  {}"
#: Tokens that both sides never write: the end of the reply, and the mask.
_END, _MASK = 2, 299


@dataclass(frozen=True)
class Task:
    """A prompt and the schedule of its reply."""

    prompt: list[int]
    n: int
    steps: int
    block_length: int


def by_localllm(llm: LLM, task: Task) -> list[int]:
    options: dict[str, Any] = {"diffusion_steps": task.steps, "diffusion_block_length": task.block_length}
    options |= {"diffusion_algorithm": "confidence", "temperature": 0, "ignore_eos": True}
    return list(llm.generate(task.prompt, max_tokens=task.n, **options).ids)


def by_transformers(model: Any, task: Task, *, shifts: bool) -> list[int]:
    """Return the reply. ``shifts``: whether the logits of a token are computed at the position before the token."""
    import torch

    text = torch.tensor([[*task.prompt, *[_MASK] * task.n]])
    n_steps = task.steps * task.block_length // task.n
    for start in range(len(task.prompt), text.shape[1], task.block_length):
        block = slice(start, start + task.block_length)
        for i in range(n_steps):
            logits = model(text, use_cache=False).logits[0, slice(block.start - shifts, block.stop - shifts)]
            logits[:, [_END, _MASK]] = -torch.inf
            confidence, tokens = torch.softmax(logits.double(), dim=-1).max(dim=-1)
            confidence[text[0, block] != _MASK] = -1
            n_kept = task.block_length // n_steps + (i < task.block_length % n_steps)
            kept = torch.topk(confidence, n_kept).indices
            text[0, block][kept] = tokens[kept]
    reply: list[int] = text[0, len(task.prompt) :].tolist()
    return reply


def compare(name: str, task: Task, given: argparse.Namespace, folder: Path) -> bool:
    """Measure one model, print its line, and return whether the texts are equal."""
    import torch

    torch.set_num_threads(given.threads)
    sizes = {"hidden_size": given.width, "num_hidden_layers": given.layers, "num_attention_heads": given.width // 64}
    sizes |= {"num_key_value_heads": given.width // 64, "head_dim": 64, "intermediate_size": 3 * given.width}
    sizes["max_position_embeddings"] = 1024
    entry = replace(DIFFUSION[name], config={**DIFFUSION[name].config, **sizes})
    model = make_model(entry)
    path = write(folder / f"{name}.gguf", entry, model)
    diffusion = ARCHITECTURES[entry.architecture].diffusion
    assert diffusion is not None
    rates: dict[str, list[float]] = {"localllm": [], "transformers": []}
    texts = {}
    with localllm.load(path, device="cpu", threads=given.threads, context=1024) as llm, torch.no_grad():
        sides = {
            "localllm": lambda: by_localllm(llm, task),
            "transformers": lambda: by_transformers(model, task, shifts=diffusion.shifts),
        }
        for number in range(given.rounds + 1):  # the first round compiles kernels
            for side, write_text in sides.items():
                begin = time.perf_counter()
                texts[side] = write_text()
                if number:
                    rates[side].append(task.n / (time.perf_counter() - begin))
    ours, theirs = rates.values()
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    is_equal = texts["localllm"] == texts["transformers"]
    size = f"{sum(each.numel() for each in model.parameters()) / 1e6:.0f} M"
    verdict = "same text" if is_equal else "TEXTS DIFFER"
    print(_COLUMNS.format(name, size, f"{max(ours):.1f}", f"{max(theirs):.1f}", f"{ratio:.2f}", verdict), flush=True)
    return is_equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(DIFFUSION)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {known}; default llada and dream")
    parser.add_argument("-n", type=int, default=64, help="tokens of the reply")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=512, help="multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    names = given.names or ["llada", "dream"]
    if unknown := [name for name in names if name not in DIFFUSION]:
        parser.error(f"{unknown[0]} is unknown: give any of {known}")
    if given.width < 64 or given.width % 64:
        parser.error("--width must be a multiple of 64")
    if given.n % given.block_length or given.steps * given.block_length % given.n:
        parser.error("-n must be a multiple of --block-length, and --steps a multiple of the number of blocks")
    prompt = [int(id_) for id_ in np.random.default_rng(1).integers(3, 290, 32)]
    task = Task(prompt, given.n, given.steps, given.block_length)
    title = f"tokens/s, {given.n} tokens in {given.steps} steps"
    print(_COLUMNS.format("model", "size", "localllm", "transformers", "ratio", title))
    with tempfile.TemporaryDirectory() as folder:
        are_equal = [compare(name, task, given, Path(folder)) for name in names]
    return 0 if all(are_equal) else 1


if __name__ == "__main__":
    sys.exit(main())
