"""Tensors as if from a file, and single operations of a backend run on them."""

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

#: A cache for operations that use none.
NO_CACHE = CacheShape(n_layers=1, n_kv_heads=1, head_dim=16)


@dataclass(eq=False)
class Tensor:
    """A tensor as it lies in a file."""

    type: GGMLType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    name: str = "tensor"

    def drop_pages(self) -> None: ...


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Normally distributed."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def f32(array: Any) -> Tensor:
    """An array as a float32 tensor."""
    values = np.ascontiguousarray(array, "<f4")
    return Tensor(GGMLType.F32, values.shape, values.view(np.uint8))


def blocks(rows: NDArray[np.uint8], type: GGMLType, n_in: int) -> Tensor:
    """Rows of blocks as a matrix of ``n_in`` columns."""
    return Tensor(type, (len(rows), n_in), rows)


def one_sequence(n: int) -> Batch:
    """The tokens 0 … n - 1, from the beginning, all of them outputs."""
    return make_batch([(range(n), 0, range(-(-n // 16)))])


def run(
    ops: Any, forward: Callable[[], Any], batch: Batch, cache: Any = None, *, max_tokens: int = 0
) -> NDArray[np.float32]:
    """What a forward pass gives for one batch, compiled for ``max_tokens`` or as many as the batch has; a copy."""
    n = max(max_tokens, len(batch.ids))
    step = ops.compile(forward, cache or ops.new_cache(NO_CACHE, 64), max_tokens=n, max_outputs=n)
    return step(batch).copy()
