"""Pictures in a prompt: the ids that stand for their tokens, and where those are.

A picture's tokens have embeddings of their own, and no ids of the vocabulary.  In a request, and in the cache, ids
made of what names the picture stand in their places, so that prompts with the same pictures share what the cache has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Ids of pictures' tokens are below this, and hold so many bits of a key each.
_IDS_BELOW, _ID_BITS = -(1 << 62), 62


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as the model sees it.

    Attributes:
        key: names it and how it is encoded, such as a SHA-256 of pixels, encoder and budget.
        n_tokens: that it takes.
        grid: rows and columns of those, where they turn by them (M-RoPE).
        source: what its encoder makes the embeddings of.
    """

    key: bytes
    n_tokens: int
    grid: tuple[int, int] = (0, 0)
    source: Any = None

    @cached_property
    def ids(self) -> list[int]:
        """What stands for its tokens: numbers below 0, together all of the key."""
        n_words = min(self.n_tokens, -(-8 * len(self.key) // _ID_BITS))
        value, mask = int.from_bytes(self.key, "little"), (1 << _ID_BITS) - 1
        words = [_IDS_BELOW - 1 - (value >> _ID_BITS * i & mask) for i in range(n_words)]
        return [words[i % n_words] for i in range(self.n_tokens)]


class Placed(NamedTuple):
    """A picture whose tokens begin at a position of a prompt."""

    start: int
    picture: Picture

    @property
    def stop(self) -> int:
        return self.start + self.picture.n_tokens


def axes(pictures: Sequence[Placed], start: int, stop: int) -> NDArray[np.int32]:
    """Where the tokens at positions start : stop are in time, by row and by column: int32 [3, stop - start].

    A picture's tokens are all in the time of its first one; what follows it begins behind its longer side.  Source:
    Qwen2-VL (arXiv:2409.12191), section 2.1.
    """
    places = np.tile(np.arange(start, stop, dtype=np.int32), (3, 1))
    saved = 0  # by how much what follows a picture is nearer than its tokens are many
    for at, picture in pictures:
        if at >= stop:
            break
        end, (rows, columns) = at + picture.n_tokens, picture.grid
        numbers = np.arange(max(at, start), min(end, stop)) - at  # of its tokens, those here
        if len(numbers):
            offsets = np.zeros_like(numbers), *np.divmod(numbers, columns)
            places[:, numbers + at - start] = at - saved + np.array(offsets)
        saved += picture.n_tokens - max(rows, columns)
        behind = max(0, end - start)
        places[:, behind:] = np.arange(start + behind, stop) - saved
    return places


def ends(pictures: Sequence[Placed], start: int, stop: int) -> NDArray[np.int32]:
    """The position behind the last one that tokens see, where a picture's see each other: int32 [stop - start]."""
    behind = np.arange(start + 1, stop + 1, dtype=np.int32)
    for each in pictures:
        if start < each.stop and each.start < stop:
            behind[max(0, each.start - start) : each.stop - start] = each.stop
    return behind
