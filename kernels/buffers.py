"""Where the buffers of a step lie in its memory: an arena, which those share that are not in use at the same time.

A backend lowers a graph to calls over buffers, those of its tensors and its own scratch alike, and `assign` gives
each its offset.  The arena's size is then what a step takes, exactly, before any of it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: What offsets are a multiple of: a page of memory, so that rows of different buffers do not share cache lines.
ALIGNMENT = 4096


@dataclass(eq=False)
class Buffer:
    """Memory that calls read and write."""

    n_bytes: int
    is_kept: bool = False  # whether its memory is its own from beginning to end, and zero at first
    offset: int = -1  # where it begins in the arena, once `assign` has said so
    # where memory begins that does not lie in the arena, such as a weight's; 0 before it is there
    address: int | None = None

    def at(self, n_bytes: int) -> Address:
        """The place so many bytes behind its beginning."""
        return Address(self, n_bytes)


@dataclass(frozen=True)
class Address:
    """A place in a buffer."""

    buffer: Buffer
    n_bytes: int


def assign(stages: Sequence[Iterable[Buffer]], kept: Iterable[Buffer] = ()) -> int:
    """Gives every buffer its offset, and returns the bytes of the arena.

    A buffer has its place from the first stage that it is in to the last one.  It gets the smallest gap that is large
    enough; only where there is none, the arena grows.

    Args:
        stages: of each, the buffers in use; calls of one stage may run at the same time.
        kept: further buffers that are in use all the time.
    """
    stages = [list(dict.fromkeys(stage)) for stage in stages]
    last = {buffer: i for i, stage in enumerate(stages) for buffer in stage}
    size, gaps = 0, list[tuple[int, int]]()
    for buffer in dict.fromkeys((*kept, *(buffer for buffer in last if buffer.is_kept))):
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
    """Where so many bytes go, the size of the arena then, and the gaps that are left."""
    fitting = [gap for gap in gaps if gap[1] - gap[0] >= n_bytes]
    if not fitting:  # at the end, which may be a gap that is too small
        fitting = [gaps[-1] if gaps and gaps[-1][1] == size else (size, size)]
    gap = min(fitting, key=lambda g: g[1] - g[0])
    begin, end = gap
    left = [g for g in gaps if g != gap]
    if begin + n_bytes < end:
        left = _with_gap(left, begin + n_bytes, end)
    return begin, max(size, begin + n_bytes), left


def _with_gap(gaps: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The gaps in order, with one more, which is joined to its neighbours."""
    for gap in gaps:
        if gap[1] == begin:
            begin = gap[0]
        elif gap[0] == end:
            end = gap[1]
    return sorted([*(g for g in gaps if g[1] < begin or g[0] > end), (begin, end)])
