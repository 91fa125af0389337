"""Operations with a memory on a CUDA device: the launches that they take of convolution.cu and recurrent.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from localllm.kernels.cuda.arena import Extent, StepLimits, Stored
from localllm.kernels.cuda.driver import Argument, DeviceMemory
from localllm.kernels.cuda.launch import Launch
from localllm.kernels.graph import RecurrentState

_NULL = np.uint64(0)
#: Columns and tokens of a block of `causal_conv`.
_CONV_COLUMNS, _CONV_TOKENS = 128, 32
#: Sequences that a launch has blocks for: these take the others in turn.
_MAX_SEQUENCES = 16


def _sequences(step: StepLimits, state: RecurrentState) -> tuple[Argument, ...]:
    """The first parameters of the kernels: what they read of a batch, and a state."""
    batch, cache = step.batch, step.cache
    return *batch.sequences, cache.state(state), np.int64(cache.slot_bytes // 4)


@dataclass(frozen=True, eq=False)
class CausalConv:
    """A convolution of each column with the inputs before it."""

    step: StepLimits
    x: Stored
    weight: DeviceMemory
    bias: DeviceMemory | None
    state: RecurrentState
    silu: bool
    y: Stored

    def launches(self, extent: Extent) -> Iterator[Launch]:
        x, n = self.x, extent.n_tokens
        grid = (-(-x.width // _CONV_COLUMNS), min(n, _MAX_SEQUENCES), -(-n // _CONV_TOKENS))
        arguments: tuple[Argument, ...] = (
            *_sequences(self.step, self.state),
            *(x.memory, np.int32(x.stride), np.int32(x.width), self.weight),
            *(_NULL if self.bias is None else self.bias, np.int32(self.silu), self.y.memory),
        )
        defines = {"KERNEL": self.state.shape[0] + 1}
        yield Launch("convolution", "causal_conv", defines, grid, (_CONV_COLUMNS,), arguments=arguments)


@dataclass(frozen=True, eq=False)
class Columns:
    """Some columns of rows, from the ``first`` on."""

    rows: Stored
    first: int = 0

    @property
    def arguments(self) -> tuple[Argument, Argument]:
        memory = self.rows.memory
        return memory.at(4 * self.first, memory.n_bytes - 4 * self.first), np.int32(self.rows.stride)


@dataclass(frozen=True, eq=False)
class Recurrence:
    """What each token adds to a state, and reads of it: `GatedDelta`, or without ``betas`` `Scan`.

    Attributes:
        rows: what the kernel reads and writes: of q, k, v, the steps, the result, and the betas if there are any.
        places: of q, k and v, the columns that they begin at.
    """

    step: StepLimits
    state: RecurrentState
    rows: tuple[Stored, ...]
    places: tuple[int, int, int]
    a: DeviceMemory
    dt_bias: DeviceMemory
    d: DeviceMemory | None
    n_groups: int
    per_group: int
    is_per_channel: bool
    eps: float
    scale: float

    def launches(self, extent: Extent) -> Iterator[Launch]:
        n_heads, n_rows, n_columns = self.state.shape
        columns = 32 if n_columns % 32 == 0 else 16
        q, k, v, steps, out, *betas = self.rows
        parts = (Columns(rows, first).arguments for rows, first in zip((q, k, v), self.places, strict=True))
        arguments: tuple[Argument, ...] = (
            *_sequences(self.step, self.state),
            *(argument for part in parts for argument in part),
            *Columns(steps).arguments,
            *(Columns(betas[0]).arguments if betas else (_NULL, np.int32(0))),
            *(self.a, self.dt_bias, _NULL if self.d is None else self.d),
            *map(np.int32, (self.n_groups, self.per_group, n_columns)),
            *(np.float32(self.eps), np.float32(self.scale)),
            *Columns(out).arguments,
        )
        defines = {
            "ROWS": n_rows,
            "COLUMNS": columns,
            "DELTA": int(bool(betas)),
            "PER_CHANNEL": int(self.is_per_channel),
        }
        grid = (n_heads * n_columns // columns, min(extent.n_tokens, _MAX_SEQUENCES))
        yield Launch("recurrent", "recurrence", defines, grid, (4 * columns,), arguments=arguments)
