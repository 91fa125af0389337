"""Images and audio in a prompt: placeholder ids, positions and embeddings.

"Image" includes audio here. Audio tokens are causal, like text; image tokens may see each other.

Image tokens have embeddings instead of ids of the vocabulary. In requests and in the cache, placeholder ids derived
from the image's key take their places, so prompts with the same images share cached pages. Embeddings are needed only
for tokens that are not cached. They are stored by key, and the least recently used are removed. An image without
embeddings is encoded shortly before the prompt reaches it, one piece of work at a time between two steps.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.engine.request import Request

#: Placeholder ids are below `_IDS_BELOW`. Each id holds `_ID_BITS` bits of a key.
_IDS_BELOW, _ID_BITS = -(1 << 62), 62

#: Capacity of the embeddings cache, in bytes. Embeddings of running prompts are not included.
KEPT_BYTES = 256 << 20
#: Most image tokens encoded at once, and most image tokens for which a prompt holds embeddings. A single image may
#: have more.
_TOKENS_AT_ONCE, _TOKENS_AHEAD = 1024, 4096

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


class MediaEmbedder(Protocol):
    """Computes embeddings of images. Only the engine thread uses it."""

    def encode(self, pictures: Sequence[PreparedMedia]) -> Generator[None, None, list[Embeddings]]:
        """Return the embeddings. Yields after each piece of work, which should take at most the time of a step.

        If a batch of several images fails, each image is encoded again on its own.
        """
        ...


class MediaTokens(NamedTuple):
    """Tokens of an image at a position of a prompt. An image has several entries if text separates its tokens."""

    start: int
    picture: PreparedMedia
    first: int = 0  # index of the first token in the image
    n: int = 0  # number of tokens; 0: all

    @property
    def stop(self) -> int:
        return self.start + (self.n or self.picture.n_tokens)


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """Images of a prompt, in order."""

    placed: Sequence[MediaTokens] = ()
    starts: list[int] = field(init=False)
    stop: int = field(init=False)  # position after the last image
    #: Per image: tokens minus positions, summed over it and the preceding images.
    _saved: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", [each.start for each in self.placed])
        object.__setattr__(self, "stop", self.placed[-1].stop if self.placed else 0)
        saved = (
            each.stop - each.start - max(each.picture.grid)
            if any(each.picture.grid) and not each.picture.is_numbered
            else 0
            for each in self.placed
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
        return (each for each in self.of(start, stop) if not each.picture.is_causal)

    def axes(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return time, row, column and image number of the tokens at start : stop, int32 [4, stop - start].

        All tokens of an image have the time of its first token. The next token's position is that time plus the
        longer side of the grid. Source: Qwen2-VL (arXiv:2409.12191), section 2.1. Tokens of a numbered image keep
        their time.
        """
        places = np.tile(np.arange(start, stop, dtype=np.int32), (4, 1))
        places -= self._saved[bisect_right(self.starts, start)]
        for each in self.of(start, stop):
            if not any(each.picture.grid):  # positions like text
                continue
            i = bisect_right(self.starts, each.start)
            # Indices in the image of its tokens at start : stop
            numbers = np.arange(max(each.start, start), min(each.stop, stop)) - each.start
            if each.picture.is_numbered:
                inner = numbers[(numbers > 0) & (numbers < each.picture.n_tokens - 1)]
                in_grid = *np.divmod(inner - 1, each.picture.grid[1]), np.full_like(inner, i - 1)
                places[1:, inner + each.start - start] = in_grid
                continue
            offsets = np.zeros_like(numbers), *np.divmod(numbers, each.picture.grid[1]), np.zeros_like(numbers)
            places[:, numbers + each.start - start] = each.start - self._saved[i - 1] + np.array(offsets)
            behind = max(0, each.stop - start)
            places[:, behind:] = np.arange(start + behind, stop) - self._saved[i]
        return places

    def ends(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return the end of each token's visible range, int32. Tokens of a non-causal image see the whole image."""
        behind = np.arange(start + 1, stop + 1, dtype=np.int32)
        for each in self._seen_whole(start, stop):
            behind[max(0, each.start - start) : each.stop - start] = each.stop
        return behind

    def whole(self, start: int, n: int, most: int) -> int:
        """Return the number of tokens to evaluate from ``start``, at most ``n``, so that no image is split.

        If an image comes first, the result may be larger than ``n``: at most ``most``, or 0 if it does not fit.
        """
        last = next((each for each in self._seen_whole(start + n - 1, start + n) if each.stop > start + n), None)
        if last is None or last.start > start:
            return n if last is None else last.start - start
        return last.stop - start if last.stop - start <= most else 0

    def check(self, tokens: Sequence[int]) -> None:
        """Raise a `UsageError` if the placeholder ids in ``tokens`` do not match the images."""
        end = 0
        for each in self.placed:
            start, picture, first, n = each
            own = picture.ids[first : first + n] if n else picture.ids
            if not end <= start < each.stop or tokens[start : each.stop] != own:
                raise UsageError(f"{len(own):,} tokens of an image are not at position {start:,} of the prompt")
            end = each.stop


NO_MEDIA = PromptMedia()


class EmbeddingCache:
    """Least recently used cache of embeddings by image key. Not thread-safe."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes, self._n_bytes = max_bytes, 0
        self._embeddings: OrderedDict[bytes, Embeddings] = OrderedDict()

    def get(self, key: bytes) -> Embeddings | None:
        if key in self._embeddings:
            self._embeddings.move_to_end(key)
        return self._embeddings.get(key)

    def put(self, key: bytes, embeddings: Embeddings) -> None:
        """Store the embeddings unless they are larger than the cache."""
        if key in self._embeddings or embeddings.nbytes > self._max_bytes:
            return
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


class Encoding:
    """Encodes images shortly before requests need their embeddings."""

    def __init__(self, encoder: MediaEmbedder | None, cache: EmbeddingCache) -> None:
        self.n_encoded = 0
        self.is_busy = False  # True if a request lacks embeddings
        self._encoder, self._cache = encoder, cache
        self._pictures: list[PreparedMedia] = []  # being encoded
        self._work: Generator[None, None, list[Embeddings]] | None = None
        #: Keys of images from a failed batch. Each is encoded again on its own.
        self._alone: set[bytes] = set()

    def advance(self, requests: Iterable[Request], seconds: float) -> Mapping[Request, BaseException]:
        """Encode at least one piece of missing work, and more until ``seconds`` have passed.

        Return requests with an image that cannot be encoded, and the error.
        """
        wanted = self._assign_embeddings(requests)
        if self._work is not None and not any(picture.key in wanted for picture in self._pictures):
            self._stop()
        end, self.is_busy = time.perf_counter() + seconds, bool(wanted)
        failed: dict[Request, BaseException] = {}
        while wanted:
            if self._work is None:
                self._begin(wanted)
            assert self._work is not None
            try:
                next(self._work)
            except StopIteration as done:
                for picture, embeddings in zip(self._pictures, done.value, strict=True):
                    self.n_encoded += 1
                    _, waiting = wanted.pop(picture.key, (picture, ()))
                    self._cache.put(picture.key, embeddings)
                    for request in waiting:
                        request.embeddings[picture.key] = embeddings
                self._stop()
            except BaseException as error:
                if len(self._pictures) > 1:
                    self._alone.update(picture.key for picture in self._pictures)
                else:
                    _, waiting = wanted.pop(self._pictures[0].key, (self._pictures[0], ()))
                    failed |= dict.fromkeys(waiting, error)
                self._stop()
            if time.perf_counter() >= end:
                break
        return failed

    def _assign_embeddings(self, requests: Iterable[Request]) -> dict[bytes, tuple[PreparedMedia, list[Request]]]:
        """Give requests the cached embeddings of their next images. Return missing images and requests, by key."""
        lacking: dict[bytes, tuple[PreparedMedia, list[Request]]] = {}
        for request in requests:
            if request.sequence is None or request.pictures.stop <= len(request.sequence):
                request.embeddings.clear()
                continue
            near, n_tokens = list[PreparedMedia](), 0
            for each in request.pictures.of(len(request.sequence), request.pictures.stop):
                if near and n_tokens + each.stop - each.start > _TOKENS_AHEAD:
                    break
                near.append(each.picture)
                n_tokens += each.stop - each.start
            for key in {*request.embeddings} - {picture.key for picture in near}:
                del request.embeddings[key]
            for picture in dict.fromkeys(near):
                if picture.key in request.embeddings:
                    continue
                if (found := self._cache.get(picture.key)) is not None and len(found) == picture.n_tokens:
                    request.embeddings[picture.key] = found
                else:
                    lacking.setdefault(picture.key, (picture, []))[1].append(request)
        return lacking

    def _begin(self, wanted: Mapping[bytes, tuple[PreparedMedia, list[Request]]]) -> None:
        n_tokens = 0
        for picture, _ in wanted.values():
            is_alone = picture.key in self._alone
            if self._pictures and (is_alone or n_tokens + picture.n_tokens > _TOKENS_AT_ONCE):
                break
            self._pictures.append(picture)
            n_tokens += picture.n_tokens
            if is_alone:
                self._alone.discard(picture.key)
                break
        assert self._encoder is not None
        self._work = self._encoder.encode(self._pictures)

    def _stop(self) -> None:
        if self._work is not None:
            self._work.close()
        self._work, self._pictures = None, []
