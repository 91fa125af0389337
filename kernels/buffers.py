"""Placement of a step's buffers in an arena. Buffers that are not in use at the same time share memory.

A backend lowers a graph to calls over buffers, which hold tensors and scratch data. `assign` computes the offset of
each buffer. The size of the arena is therefore known exactly before any memory is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Alignment of offsets: a memory page, so that rows of different buffers do not share cache lines.
ALIGNMENT = 4096


@dataclass(eq=False)
class Buffer:
    """Memory that calls read and write."""

    n_bytes: int
    is_kept: bool = False  # True: the memory is not shared with other buffers, and is zero at first
    offset: int = -1  # offset in the arena; -1 before `assign`
    # Address of memory outside the arena, such as a weight's; 0 before it is allocated. None: in the arena.
    address: int | None = None

    def at(self, n_bytes: int) -> Address:
        """Return the address ``n_bytes`` after the start."""
        return Address(self, n_bytes)


@dataclass(frozen=True)
class Address:
    buffer: Buffer
    n_bytes: int


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredRows:
    """A float32 matrix [rows, padded width] in a buffer."""

    buffer: Buffer
    width: int
    slot: int  # index in the batch's header of the number of rows

    @property
    def stride(self) -> int:
        """Distance between rows, in the unit of the backend's kernels."""
        raise NotImplementedError


def assign(stages: Sequence[Iterable[Buffer]], permanent: Iterable[Buffer] = ()) -> int:
    """Set the offset of every buffer. Return the size of the arena in bytes.

    A buffer occupies its memory from the first to the last stage that uses it. It is placed in the smallest gap that
    is large enough. The arena grows only if no gap is.

    Args:
        stages: buffers in use during each stage; calls of one stage may run at the same time.
        permanent: further buffers that are always in use.
    """
    stages = [list(dict.fromkeys(stage)) for stage in stages]
    last = {buffer: i for i, stage in enumerate(stages) for buffer in stage}
    size, gaps = 0, list[tuple[int, int]]()
    for buffer in dict.fromkeys((*permanent, *(buffer for buffer in last if buffer.is_kept))):
        buffer.offset, size = size, size + _aligned(buffer.n_bytes)
    placed = {buffer for buffer in last if buffer.is_kept}
    for i, stage in enumerate(stages):
        for buffer in sorted((b for b in stage if b not in placed), key=lambda b: -b.n_bytes):
            placed.add(buffer)
            buffer.offset, size, gaps = _placed(_aligned(buffer.n_bytes), size, gaps)
        for buffer in stage:
            if last[buffer] == i and not buffer.is_kept:
                gaps = _with_gap(gaps, buffer.offset, buffer.offset + _aligned(buffer.n_bytes))
    return size


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _placed(n_bytes: int, size: int, gaps: list[tuple[int, int]]) -> tuple[int, int, list[tuple[int, int]]]:
    """Return the offset of a new buffer, the new size of the arena, and the remaining gaps."""
    fitting = [gap for gap in gaps if gap[1] - gap[0] >= n_bytes]
    if not fitting:  # extend the arena, including a gap at its end that is too small
        fitting = [gaps[-1] if gaps and gaps[-1][1] == size else (size, size)]
    gap = min(fitting, key=lambda g: g[1] - g[0])
    begin, end = gap
    remaining = [g for g in gaps if g != gap]
    if begin + n_bytes < end:
        remaining = _with_gap(remaining, begin + n_bytes, end)
    return begin, max(size, begin + n_bytes), remaining


def _with_gap(gaps: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return the gaps in ascending order with a new one, merged with adjacent gaps."""
    for gap in gaps:
        if gap[1] == begin:
            begin = gap[0]
        elif gap[0] == end:
            end = gap[1]
    return sorted([*(g for g in gaps if g[1] < begin or g[0] > end), (begin, end)])
