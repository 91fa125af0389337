"""Tensors without a file, and functions to run single operations of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.backend import Batch
from localllm.quant.types import GGMLType
from tests.helpers.recorder import CacheShape
from tests.helpers.run_model import make_batch

#: A cache for operations that do not use one.
NO_CACHE = CacheShape(n_layers=1, n_kv_heads=1, head_dim=16)


@dataclass(eq=False)
class Tensor:
    """A tensor with the attributes of a file's tensor."""

    type: GGMLType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    name: str = "tensor"

    def drop_pages(self) -> None: ...


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Return normally distributed values."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def f32(array: Any) -> Tensor:
    values = np.ascontiguousarray(array, "<f4")
    return Tensor(GGMLType.F32, values.shape, values.view(np.uint8))


def blocks(rows: NDArray[np.uint8], type: GGMLType, n_in: int) -> Tensor:
    """Return rows of blocks as a matrix of ``n_in`` columns."""
    return Tensor(type, (len(rows), n_in), rows)


def one_sequence(n: int) -> Batch:
    """Return a batch of the tokens 0 … n - 1 at positions 0 … n - 1; all rows are outputs."""
    return make_batch([(range(n), 0, range(-(-n // 16)))])


def run(
    ops: Any, forward: Callable[[], Any], batch: Batch, cache: Any = None, *, max_tokens: int = 0
) -> NDArray[np.float32]:
    """Run a forward pass on one batch and return a copy; ``max_tokens`` defaults to the size of the batch."""
    n = max(max_tokens, len(batch.ids))
    step = ops.compile(forward, cache or ops.new_cache(NO_CACHE, 64), max_tokens=n, max_outputs=n)
    return step(batch).copy()
