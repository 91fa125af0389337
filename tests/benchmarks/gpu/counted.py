"""Evaluate a prompt and a token on a GPU, for ncu: `python -m tests.benchmarks.gpu.counted MODEL N_TOKENS`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import localllm


def main(path: str, n_tokens: int, profiler: Any) -> None:
    """Count the first steps, which launch their kernels one by one, without a graph."""
    with localllm.load(path, device="cuda:0", context=n_tokens + 8) as llm:
        ids = [int(i) for i in np.random.default_rng(0).integers(3, llm.info.n_vocab, n_tokens + 1)]
        profiler.profilerStart()
        llm.logits(ids[:-1], last=1)
        llm.logits(ids, last=1)  # one more token
        profiler.profilerStop()


if __name__ == "__main__":
    from cupy.cuda import runtime

    main(sys.argv[1], int(sys.argv[2]), runtime)
