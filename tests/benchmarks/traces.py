"""Compare the time of a prompt with the time of a trace of all layers' outputs, and with transformers.

    python -m tests.benchmarks.traces model.gguf [-t 2] [--prompt 512] [-n 32] [-r 3] [--without-transformers]

transformers runs the decoded weights of the same file in float32 on the CPU, and returns all hidden states. Its
reader accepts only some architectures, such as llama and qwen2. The programs take turns, because the machine's speed
drifts: rates are the best of all rounds, and ratios are the medians of the ratios to the plain prompt, or to plain
decoding, within a round. The last line has all results as JSON. The exit code is 1 if the error of a layer's output
jumps (`localllm.inspection.compare`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import localllm
from localllm import LLM
from localllm.inspection.compare import INTEGER_ROUNDING, differences, first_jump
from localllm.inspection.transformers_values import values_of

OUTPUTS = "layers.*.output"
PROMPT, TRACE, THEIR_TRACE = "prompt", "prompt with all layers' outputs", "transformers with all hidden states"
DECODE, THEIR_DECODE = "decoding", "transformers, decoding"
_COLUMNS = "{:<36} {:>10} {:>12} {:>10}"


class Transformers:
    """The decoded weights of a GGUF file in transformers."""

    def __init__(self, path: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        self.model.eval()

    def hidden_states(self, ids: Sequence[int]) -> Any:
        with self._torch.inference_mode():
            return self.model(self._torch.tensor([[*ids]]), output_hidden_states=True).hidden_states

    def decode(self, ids: Sequence[int], n: int) -> float:
        """Return the seconds for n tokens after a prompt and a first token."""
        prompt, times = self._torch.tensor([[*ids]]), Times()
        options = {"attention_mask": self._torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
        self.model.generate(prompt, min_new_tokens=n + 1, max_new_tokens=n + 1, streamer=times, **options)
        return times.seconds[-1] - times.seconds[-1 - n]


class Times:
    """Times at which transformers delivers tokens, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: object) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None: ...


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(llm: LLM, theirs: Transformers | None, ids: Sequence[int], n: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each measurement in each round."""

    def new(run: Callable[[], object]) -> Callable[[], float]:
        def timed() -> float:
            llm.forget()
            return seconds(run)

        return timed

    def decode() -> float:
        reply = llm.generate(ids[:32], max_tokens=n + 1, temperature=0, ignore_eos=True)
        return n / reply.timings.decode_tokens_per_s

    runs: dict[str, Callable[[], float]] = {
        PROMPT: new(lambda: llm.logits(ids, last=1)),
        TRACE: new(lambda: llm.trace(ids, OUTPUTS)),
        DECODE: decode,
    }
    if theirs is not None:
        runs[THEIR_TRACE] = lambda: seconds(lambda: theirs.hidden_states(ids))
        runs[THEIR_DECODE] = lambda: theirs.decode(ids[:32], n)
    for run in runs.values():
        run()  # warms up
    results: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            results[name].append(run())
    return results


def print_table(results: dict[str, list[float]], n_prompt: int, n: int) -> dict[str, Any]:
    """Print a line per measurement; return the rates and ratios."""
    report: dict[str, Any] = {}
    print(_COLUMNS.format("", "seconds", "tokens/s", "ratio"))
    for name, times in results.items():
        is_decode = name in (DECODE, THEIR_DECODE)
        rate = (n if is_decode else n_prompt) / min(times)
        ratio = statistics.median(
            t / base for t, base in zip(times, results[DECODE if is_decode else PROMPT], strict=True)
        )
        report[name] = {"tokens_per_s": rate, "ratio": ratio}
        print(_COLUMNS.format(name, f"{min(times):.3f}", f"{rate:.1f}", f"{ratio:.3f}"))
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("-n", type=int, default=32, help="decoded tokens")
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("--without-transformers", action="store_true")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        context = arguments.prompt + arguments.n + 64
        llm = stack.enter_context(localllm.load(arguments.model, context=context, threads=arguments.threads))
        ids = np.random.default_rng(0).integers(min(300, llm.info.n_vocab // 2), llm.info.n_vocab, arguments.prompt)
        prompt = ids.tolist()
        theirs = None if arguments.without_transformers else Transformers(arguments.model, arguments.threads)
        report = print_table(measure(llm, theirs, prompt, arguments.n, arguments.rounds), len(prompt), arguments.n)
        errors = []
        if theirs is not None:
            expected = values_of(theirs.model, prompt, llm.graph)
            errors = differences(expected, llm.trace(prompt, OUTPUTS))
            assert len(errors) == llm.info.n_layers
            print("relative errors of the layers' outputs:", *(f"{error.error:.1e}" for error in errors))
    jump = first_jump(errors, INTEGER_ROUNDING)
    print(json.dumps({"model": arguments.model.name, "errors": [error.error for error in errors]} | report))
    return int(jump is not None)


if __name__ == "__main__":
    sys.exit(main())
