"""Measure the cost of narrower numbers: a cache in FP8, and activations in FP8 or FP4 for block-scaled tensor cores.

    python -m tests.benchmarks.narrow_types [MODEL.gguf ...]

The first table has the mean KL divergence of a model's next tokens between a cache and an f16 cache, over 400 tokens
on the reference backend.  The second has the error of products of random activations and exact random weights.  Both
include the formats of localllm for comparison: Q8_0, and bytes with a scale per 32 columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from localllm import load
from localllm.kernels import reference
from tests.benchmarks.caches import log_probabilities

Array = NDArray[np.float64]
Rounding = Callable[[Array], Array]

TEXT = "Once upon a time there was a little girl named Lily. She liked to play outside in the big green park. " * 40
N_TOKENS = 400
#: Magnitudes of FP4 (e2m1); the largest power of two in FP4 and in FP8 (e4m3).
FP4, FP4_POWER, FP8_POWER = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]), 2, 8


def e4m3(x: Array) -> Array:
    power = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6)))
    return np.clip(np.rint(x / 2 ** (power - 3)) * 2 ** (power - 3), -448, 448)


def e2m1(x: Array) -> Array:
    nearest: Array = FP4[np.abs(np.abs(x)[..., None] - FP4).argmin(axis=-1)]
    return np.copysign(nearest, x)


def by_groups(x: Array, scale: Callable[[Array], Array], rounding: Rounding) -> Array:
    """Divide groups of 32 values by a scale of their largest value, round them, and multiply them again."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    largest = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), 1e-30)
    return (rounding(groups / scale(largest)) * scale(largest)).reshape(x.shape)


def int8(x: Array) -> Array:
    return by_groups(x, lambda largest: largest / 127, np.rint)


def mxfp8(x: Array) -> Array:
    return by_groups(x, lambda largest: 2 ** (np.floor(np.log2(largest)) - FP8_POWER), e4m3)


def mxfp4(x: Array) -> Array:
    return by_groups(x, lambda largest: 2 ** (np.floor(np.log2(largest)) - FP4_POWER), e2m1)


def cache_rows(path: Path) -> list[list[str]]:
    """Return the divergence by type of the cache."""

    def next_tokens(cache_type: str) -> Array:
        with load(path, device="reference", cache_type=cache_type) as llm:
            return np.concatenate([*log_probabilities(llm.logits(llm.tokenize(TEXT)[:N_TOKENS]))])

    f16, q8_0 = next_tokens("f16"), next_tokens("q8_0")
    with patch.object(reference, "in_q8_0", lambda x, kind: e4m3(x.astype(np.float64)).astype(np.float32)):
        fp8 = next_tokens("q8_0")
    return [
        [path.stem, name, f"{bits}", f"{np.mean((np.exp(f16) * (f16 - own)).sum(axis=-1)):.1e}"]
        for name, bits, own in (("Q8_0", 8.5, q8_0), ("FP8 (e4m3)", 8.0, fp8))
    ]


def product_rows() -> list[list[str]]:
    """Return the error of products by type of the activations."""
    random = np.random.default_rng(0)
    weights, plain = random.standard_normal((256, 4096)), random.standard_normal((64, 4096))
    outliers = plain * np.where(random.random(4096) < 0.01, 20, 1)
    rows = []
    for name, rounding in (("bytes", int8), ("MXFP8 (e4m3)", mxfp8), ("MXFP4 (e2m1)", mxfp4)):
        errors = [
            np.linalg.norm((rounding(x) - x) @ weights.T) / np.linalg.norm(x @ weights.T) for x in (plain, outliers)
        ]
        rows.append([name, *(f"{error:.2%}" for error in errors)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files; without files, print only the second table")
    rows = [row for path in parser.parse_args().models for row in cache_rows(path)]
    tables = [(["model", "cache", "bits a value", "KL divergence"], rows)] if rows else []
    tables.append((["activations", "error, normal", "error, 1% of columns 20 times as large"], product_rows()))
    for titles, lines in tables:
        print(*(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *lines)), "", sep="\n")


if __name__ == "__main__":
    main()
