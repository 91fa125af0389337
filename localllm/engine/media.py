"""Images and audio in a prompt: placeholder ids, positions and embeddings.

"Image" includes audio here. Audio tokens are causal, like text; image tokens may see each other.

Image tokens have embeddings instead of ids of the vocabulary. In requests and in the cache, placeholder ids derived
from the image's key take their places, so prompts with the same images share cached pages. Embeddings are needed only
for tokens that are not cached. They are stored by key, and the least recently used are removed.
`localllm.engine.encoding` computes missing embeddings.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.errors import UsageError

#: Placeholder ids are below `_IDS_BELOW`. Each id holds `_ID_BITS` bits of a key.
_IDS_BELOW, _ID_BITS = -(1 << 62), 62

#: Capacity of the embeddings cache, in bytes. Embeddings of running prompts are not included.
KEPT_BYTES = 256 << 20

#: Embedding of each token, and additional embeddings for deeper layers: float32 [n_tokens, k, d].
Embeddings = np.ndarray[tuple[int, int, int], np.dtype[np.float32]]


@dataclass(frozen=True, eq=False)
class PreparedMedia:
    """An image or audio clip after preprocessing."""

    key: bytes  # identifies content and encoding, for example a SHA-256 of pixels, encoder and token budget
    n_tokens: int
    grid: tuple[int, int] = (0, 0)  # (rows, columns) of its tokens for M-RoPE; (0, 0): positions like text
    source: Any = None  # input of the encoder
    is_causal: bool = False  # True if a token does not see later tokens of the same image, as for audio
    # True if positions are the place in the image and the image's number in the prompt. The first and the last token
    # are then not part of the grid and have positions like text.
    is_numbered: bool = False
    text: Sequence[int] = ()  # tokens of a prompt that an encoder reads

    @cached_property
    def ids(self) -> list[int]:
        """Placeholder ids: negative numbers that together contain the key."""
        n_words = min(self.n_tokens, -(-8 * len(self.key) // _ID_BITS))
        value, mask = int.from_bytes(self.key, "little"), (1 << _ID_BITS) - 1
        words = [_IDS_BELOW - 1 - (value >> _ID_BITS * i & mask) for i in range(n_words)]
        return [words[i % n_words] for i in range(self.n_tokens)]


def text_ids(ids: Sequence[int]) -> list[int]:
    """Return ids of the vocabulary, without placeholder ids of images."""
    return [id_ for id_ in ids if id_ >= 0]


class MediaTokens(NamedTuple):
    """Tokens of an image at a position of a prompt. An image has several entries if text separates its tokens."""

    start: int
    media: PreparedMedia
    first: int = 0  # index of the first token in the image
    n: int = 0  # number of tokens; 0: all

    @property
    def stop(self) -> int:
        return self.start + (self.n or self.media.n_tokens)


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """Images of a prompt, in order."""

    placed: Sequence[MediaTokens] = ()
    starts: list[int] = field(init=False)
    stop: int = field(init=False)  # position after the last image
    #: Per image: tokens minus positions, summed over it and the preceding images.
    _saved: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", [span.start for span in self.placed])
        object.__setattr__(self, "stop", self.placed[-1].stop if self.placed else 0)
        saved = (
            span.stop - span.start - max(span.media.grid)
            if any(span.media.grid) and not span.media.is_numbered
            else 0
            for span in self.placed
        )
        object.__setattr__(self, "_saved", [*accumulate(saved, initial=0)])

    def of(self, start: int, stop: int) -> Iterator[MediaTokens]:
        """Yield images with tokens at positions start : stop."""
        for i in range(max(0, bisect_right(self.starts, start) - 1), len(self.placed)):
            if self.placed[i].start >= stop:
                break
            if self.placed[i].stop > start:
                yield self.placed[i]

    def _seen_whole(self, start: int, stop: int) -> Iterator[MediaTokens]:
        """Yield images of `of` whose tokens see each other."""
        return (span for span in self.of(start, stop) if not span.media.is_causal)

    def axes(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return time, row, column and image number of the tokens at start : stop, int32 [4, stop - start].

        All tokens of an image have the time of its first token. The next token's position is that time plus the
        longer side of the grid. Source: Qwen2-VL (arXiv:2409.12191), section 2.1. Tokens of a numbered image keep
        their time.
        """
        places = np.tile(np.arange(start, stop, dtype=np.int32), (4, 1))
        places -= self._saved[bisect_right(self.starts, start)]
        for span in self.of(start, stop):
            if not any(span.media.grid):  # positions like text
                continue
            i = bisect_right(self.starts, span.start)
            # Indices in the image of its tokens at start : stop
            numbers = np.arange(max(span.start, start), min(span.stop, stop)) - span.start
            if span.media.is_numbered:
                inner = numbers[(numbers > 0) & (numbers < span.media.n_tokens - 1)]
                in_grid = *np.divmod(inner - 1, span.media.grid[1]), np.full_like(inner, i - 1)
                places[1:, inner + span.start - start] = in_grid
                continue
            offsets = np.zeros_like(numbers), *np.divmod(numbers, span.media.grid[1]), np.zeros_like(numbers)
            places[:, numbers + span.start - start] = span.start - self._saved[i - 1] + np.array(offsets)
            behind = max(0, span.stop - start)
            places[:, behind:] = np.arange(start + behind, stop) - self._saved[i]
        return places

    def ends(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return the end of each token's visible range, int32. Tokens of a non-causal image see the whole image."""
        behind = np.arange(start + 1, stop + 1, dtype=np.int32)
        for span in self._seen_whole(start, stop):
            behind[max(0, span.start - start) : span.stop - start] = span.stop
        return behind

    def whole(self, start: int, n: int, most: int) -> int:
        """Return the number of tokens to evaluate from ``start``, at most ``n``, so that no image is split.

        If an image comes first, the result may be larger than ``n``: at most ``most``, or 0 if it does not fit.
        """
        last = next((span for span in self._seen_whole(start + n - 1, start + n) if span.stop > start + n), None)
        if last is None or last.start > start:
            return n if last is None else last.start - start
        return last.stop - start if last.stop - start <= most else 0

    def check(self, tokens: Sequence[int]) -> None:
        """Raise a `UsageError` if the placeholder ids in ``tokens`` do not match the images."""
        end = 0
        for span in self.placed:
            start, media, first, n = span
            ids = media.ids[first : first + n] if n else media.ids
            if not end <= start < span.stop or tokens[start : span.stop] != ids:
                raise UsageError(f"{len(ids):,} tokens of an image are not at position {start:,} of the prompt")
            end = span.stop


NO_MEDIA = PromptMedia()


class EmbeddingCache:
    """Least recently used cache of embeddings by image key. Not thread-safe."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes, self._n_bytes = max_bytes, 0
        self._embeddings: OrderedDict[bytes, Embeddings] = OrderedDict()
        self.stores_changes = False
        self.changed: dict[bytes, Embeddings] = {}  # that a `DiskTier` has not seen yet

    def __contains__(self, key: bytes) -> bool:
        return key in self._embeddings

    def get(self, key: bytes) -> Embeddings | None:
        if key in self._embeddings:
            self._embeddings.move_to_end(key)
        return self._embeddings.get(key)

    def put(self, key: bytes, embeddings: Embeddings, *, is_new: bool = True) -> None:
        """Store the embeddings unless they are larger than the cache."""
        if key in self._embeddings or embeddings.nbytes > self._max_bytes:
            return
        if is_new and self.stores_changes:
            self.changed[key] = embeddings
        self._embeddings[key] = embeddings
        self._n_bytes += embeddings.nbytes
        while self._n_bytes > self._max_bytes:
            self._n_bytes -= self._embeddings.popitem(last=False)[1].nbytes

    def items(self) -> list[tuple[bytes, Embeddings]]:
        """Return all entries, most recently used last."""
        return list(self._embeddings.items())

    def clear(self) -> None:
        self._embeddings.clear()
        self._n_bytes = 0
