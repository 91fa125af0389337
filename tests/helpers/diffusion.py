"""Tiny random models that write by diffusion, and their released loops in NumPy, without code of the project.

Sources: LLaDA (arXiv:2502.09992, algorithms 4 and 5), Dream (arXiv:2508.15487), llama.cpp's diffusion example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers import tiny_models
from tests.helpers.recorder import CPUOps
from tests.helpers.run_model import Runner

Array = NDArray[np.float64]

#: Mask token of the tiny models.
MASK = 299


@dataclass(frozen=True)
class TinyDiffusion:
    """A tiny model: ``architecture`` in GGUF, its equivalent in `tiny_models`, and its keys."""

    architecture: str
    model_type: str
    shifts: bool
    changes: dict[str, Any]


MODELS = {
    "llada": TinyDiffusion("llada", "llama", False, {"head_dim": 16}),
    "llada-moe": TinyDiffusion("llada-moe", "qwen3_moe", False, {"norm_topk_prob": False}),
    "dream": TinyDiffusion("dream", "qwen2", True, {}),
    "rnd1": TinyDiffusion("rnd1", "qwen3_moe", True, {}),
}


def settings_of(name: str) -> dict[str, Any]:
    model = MODELS[name]
    return tiny_models.config(model.model_type, **model.changes, causal=False)


def write(path: Path, name: str, **metadata: Any) -> Path:
    """Write a tiny model with a vocabulary of 300 tokens."""
    model, settings = MODELS[name], settings_of(name)
    theirs = tiny_models.gguf_architecture(settings)
    keys = {
        key.replace(f"{theirs}.", f"{model.architecture}."): value
        for key, value in tiny_models.gguf_metadata(settings).items()
    }
    keys |= tiny_models.spm_vocabulary(settings["vocab_size"])
    keys |= {f"{model.architecture}.attention.causal": False, "tokenizer.ggml.mask_token_id": MASK}
    if not model.shifts:
        keys["diffusion.shift_logits"] = False
    tensors = tiny_models.gguf_tensors(settings, tiny_models.random_weights(settings))
    encoded = {name: tiny_models.encode(array, tiny_models.GGMLType.F32) for name, array in tensors.items()}
    return tiny_models.write_file(path, model.architecture, keys | metadata, encoded)


def predictor(name: str, path: Path) -> Callable[[list[int]], Array]:
    """Return a function that computes the logits [T, n_vocab] which predict each token of a text.

    The logits are the CPU backend's, because the texts of float64 logits differ at near ties.
    """
    runner = Runner(path, CPUOps(threads=2))

    def predict(ids: list[int]) -> Array:
        logits = runner.logits(ids).astype(np.float64)
        logits[:, MASK] = -np.inf
        return np.concatenate([logits[:1], logits[:-1]]) if MODELS[name].shifts else logits

    return predict


def probabilities(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def drawn(shares: Array, u: float) -> int:
    """Return the token drawn by the uniform number ``u``, in descending order of probability."""
    order = np.argsort(-shares, kind="stable")
    return int(order[np.searchsorted(np.cumsum(shares[order]), u, side="right")])


def in_blocks(n: int, steps: int, block_length: int) -> Iterator[tuple[int, int, int | float]]:
    """Yield first and last token, and the number of tokens to keep, of LLaDA's steps; 1.0 keeps the rest."""
    n_blocks = n // block_length
    n_steps = steps // n_blocks
    base, rest = divmod(block_length, n_steps)
    for first in range(0, n, block_length):
        for i in range(n_steps):
            yield first, first + block_length, base + (i < rest) if i < n_steps - 1 else 1.0


def by_time(n: int, steps: int, eps: float = 1e-3) -> Iterator[tuple[int, int, float]]:
    """Yield first and last token, and the share of the masks to keep, of Dream's steps."""
    times = np.linspace(1, eps, steps + 1)
    for i in range(steps):
        yield 0, n, 1 - times[i + 1] / times[i] if i < steps - 1 else 1.0


def write_text(
    predict: Callable[[list[int]], Array],
    prompt: list[int],
    n: int,
    schedule: Iterator[tuple[int, int, int | float]],
    algorithm: str = "confidence",
    *,
    ends: Sequence[int] = (),
    seed: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    tempers: bool = False,
) -> list[int]:
    """Return a reply of n tokens.

    Args:
        ends: tokens that are never generated.
        tempers: whether temperature and truncation change the confidence.
    """
    text = [*prompt, *[MASK] * n]
    open_ = np.arange(len(text)) >= len(prompt)
    for number, (first, last, keep) in enumerate(schedule):
        noise = np.random.default_rng((seed, number)).random((2, n))
        places = [i for i in np.flatnonzero(open_).tolist() if first <= i - len(prompt) < last]
        count = int(len(places) * keep) if isinstance(keep, float) else keep
        if (not count and algorithm != "origin") or not places:
            continue
        logits = predict(text)
        logits[:, list(ends)] = -np.inf
        found: list[tuple[float, int, int]] = []
        for i in places:
            plain, u = probabilities(logits[i]), noise[0, i - len(prompt)]
            shares = probabilities(logits[i] / temperature) if temperature else plain
            if top_k:
                shares = np.where(shares >= np.sort(shares)[-top_k], shares, 0)
                shares = shares / shares.sum()
            token = drawn(shares, u) if temperature else int(shares.argmax())
            p = shares if tempers else plain
            best = np.sort(p)
            scores = {
                "confidence": p[token],
                "margin": best[-1] - best[-2],
                "entropy": (p[p > 0] * np.log(p[p > 0])).sum(),
                "random": noise[1, i - len(prompt)],
                "origin": 0.0,
            }
            found.append((scores[algorithm], -i, token))
        if algorithm == "origin":
            share = keep if isinstance(keep, float) else keep / len(places)
            kept = [item for item in found if noise[1, -item[1] - len(prompt)] < share]
        else:
            kept = sorted(found, reverse=True)[:count]
        for _, i, token in kept:
            text[-i], open_[-i] = token, False
    return text[len(prompt) :]
