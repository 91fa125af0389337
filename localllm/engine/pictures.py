"""Pictures in a prompt: the ids that stand for their tokens, where those are, and the embeddings that they have.

A sound is the same, but its tokens are causal, as text.

A picture's tokens have embeddings of their own, and no ids of the vocabulary.  In a request, and in the cache, ids
made of what names the picture stand in their places, so that prompts with the same pictures share what the cache has.
Only what the cache lacks needs embeddings: they are kept by the pictures' names, those that were used last, and a
picture that has none is encoded when a prompt comes near it, a piece at a time between two steps.
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

#: Ids of pictures' tokens are below this, and hold so many bits of a key each.
_IDS_BELOW, _ID_BITS = -(1 << 62), 62

#: Bytes of embeddings that are kept at most, beside those of prompts under way.
KEPT_BYTES = 256 << 20
#: Tokens of pictures that are encoded at once, and of those that a prompt is given embeddings of ahead, unless one
#: picture alone has more.
_TOKENS_AT_ONCE, _TOKENS_AHEAD = 1024, 4096

#: Of each token of a picture an embedding, and those that layers add: float32 [n_tokens, k, d].
Embeddings = np.ndarray[tuple[int, int, int], np.dtype[np.float32]]


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as the model sees it, or a sound as it hears it."""

    key: bytes  # names it and how it is encoded, such as a SHA-256 of pixels, encoder and budget
    n_tokens: int
    grid: tuple[int, int] = (0, 0)  # rows and columns of those tokens, where they turn by them (M-RoPE)
    source: Any = None  # what its encoder makes the embeddings of
    is_causal: bool = False  # whether its tokens see none behind them, as those of a sound
    # whether tokens turn by their place in the picture, and its number among a prompt's; then one stands before its
    # grid and one behind it, which turn as text
    is_numbered: bool = False

    @cached_property
    def ids(self) -> list[int]:
        """Ids that stand for its tokens: numbers below 0, together all of the key."""
        n_words = min(self.n_tokens, -(-8 * len(self.key) // _ID_BITS))
        value, mask = int.from_bytes(self.key, "little"), (1 << _ID_BITS) - 1
        words = [_IDS_BELOW - 1 - (value >> _ID_BITS * i & mask) for i in range(n_words)]
        return [words[i % n_words] for i in range(self.n_tokens)]


def text_ids(ids: Sequence[int]) -> list[int]:
    """The ids of the vocabulary, without those that stand for pictures."""
    return [id_ for id_ in ids if id_ >= 0]


class PictureEncoder(Protocol):
    """Makes embeddings of pictures; used by the engine's thread alone."""

    def encode(self, pictures: Sequence[Picture]) -> Generator[None, None, list[Embeddings]]:
        """Yields after each piece of the work, which should take no longer than a step, and returns the embeddings.

        Errors are those of one of the pictures if there is one alone.
        """
        ...


class PictureTokens(NamedTuple):
    """Tokens of a picture at a position of a prompt: all of them, or so many where words stand between."""

    start: int
    picture: Picture
    first: int = 0  # of the picture's tokens
    n: int = 0  # tokens; 0 for all

    @property
    def stop(self) -> int:
        return self.start + (self.n or self.picture.n_tokens)


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of a prompt, in order."""

    placed: Sequence[PictureTokens] = ()
    starts: list[int] = field(init=False)
    stop: int = field(init=False)  # the position behind the last one
    #: Of each, by how much it and those before it bring what follows nearer than their tokens are many.
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

    def of(self, start: int, stop: int) -> Iterator[PictureTokens]:
        """The pictures with tokens at positions start : stop."""
        for i in range(max(0, bisect_right(self.starts, start) - 1), len(self.placed)):
            if self.placed[i].start >= stop:
                break
            if self.placed[i].stop > start:
                yield self.placed[i]

    def _seen_whole(self, start: int, stop: int) -> Iterator[PictureTokens]:
        """Those of `of` whose tokens see each other."""
        return (each for each in self.of(start, stop) if not each.picture.is_causal)

    def axes(self, start: int, stop: int) -> NDArray[np.int32]:
        """Where the tokens at positions start : stop are in time, by row and by column, and their pictures' numbers:
        int32 [4, stop - start].

        A picture's tokens are all in the time of its first one; what follows it begins behind its longer side.
        Source: Qwen2-VL (arXiv:2409.12191), section 2.1.  Those of one that is numbered keep their time.
        """
        places = np.tile(np.arange(start, stop, dtype=np.int32), (4, 1))
        places -= self._saved[bisect_right(self.starts, start)]
        for each in self.of(start, stop):
            if not any(each.picture.grid):  # as text
                continue
            i = bisect_right(self.starts, each.start)
            # the numbers of its tokens, those here
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
        """The position behind the last one that each token sees, where those of a picture see each other: int32."""
        behind = np.arange(start + 1, stop + 1, dtype=np.int32)
        for each in self._seen_whole(start, stop):
            behind[max(0, each.start - start) : each.stop - start] = each.stop
        return behind

    def whole(self, start: int, n: int, most: int) -> int:
        """How many of the ``n`` tokens from ``start`` on to evaluate so that pictures come as a whole: with a picture
        first more of them, if that is no more than ``most``."""
        last = next((each for each in self._seen_whole(start + n - 1, start + n) if each.stop > start + n), None)
        if last is None or last.start > start:
            return n if last is None else last.start - start
        return last.stop - start if last.stop - start <= most else 0

    def check(self, tokens: Sequence[int]) -> None:
        """Makes sure that they are where the tokens of a prompt say, and nowhere else."""
        end = 0
        for each in self.placed:
            start, picture, first, n = each
            own = picture.ids[first : first + n] if n else picture.ids
            if not end <= start < each.stop or tokens[start : each.stop] != own:
                raise UsageError(f"{len(own):,} tokens of a picture are not at position {start:,} of the prompt")
            end = each.stop


NO_PICTURES = Pictures()


class PictureCache:
    """The embeddings of pictures that were used last, by their keys.  Used by one thread."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes, self._n_bytes = max_bytes, 0
        self._embeddings: OrderedDict[bytes, Embeddings] = OrderedDict()

    def get(self, key: bytes) -> Embeddings | None:
        if key in self._embeddings:
            self._embeddings.move_to_end(key)
        return self._embeddings.get(key)

    def put(self, key: bytes, embeddings: Embeddings) -> None:
        """Keeps them, unless they alone are beyond the bound."""
        if key in self._embeddings or embeddings.nbytes > self._max_bytes:
            return
        self._embeddings[key] = embeddings
        self._n_bytes += embeddings.nbytes
        while self._n_bytes > self._max_bytes:
            self._n_bytes -= self._embeddings.popitem(last=False)[1].nbytes

    def items(self) -> list[tuple[bytes, Embeddings]]:
        """All of them, those last used at the end."""
        return list(self._embeddings.items())

    def clear(self) -> None:
        self._embeddings.clear()
        self._n_bytes = 0


class Encoding:
    """Gives requests the embeddings of pictures that they come to."""

    def __init__(self, encoder: PictureEncoder | None, cache: PictureCache) -> None:
        self.n_encoded = 0
        self.is_busy = False  # whether something was lacking
        self._encoder, self._cache = encoder, cache
        self._pictures: list[Picture] = []  # those under way
        self._work: Generator[None, None, list[Embeddings]] | None = None
        #: Those that failed among others: encoded again, each alone.
        self._alone: set[bytes] = set()

    def advance(self, requests: Iterable[Request], seconds: float) -> Mapping[Request, BaseException]:
        """Encodes a piece of what requests lack, and others for so many seconds; returns requests whose pictures
        cannot be encoded."""
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

    def _assign_embeddings(self, requests: Iterable[Request]) -> dict[bytes, tuple[Picture, list[Request]]]:
        """Gives requests what there is for the pictures that they come to next; returns what is lacking, and who
        lacks it."""
        lacking: dict[bytes, tuple[Picture, list[Request]]] = {}
        for request in requests:
            if request.sequence is None or request.pictures.stop <= len(request.sequence):
                request.embeddings.clear()
                continue
            near, n_tokens = list[Picture](), 0
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

    def _begin(self, wanted: Mapping[bytes, tuple[Picture, list[Request]]]) -> None:
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
