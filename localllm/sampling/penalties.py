"""Lowers the logits of repeated tokens: repetition penalties and DRY.

Each step is called with the logits of one position, float32 ``[n_vocab]``, and returns new ones. ``accept`` adds each
token to its history. The computation is in the pure functions ``penalize`` and ``suffix_match_lengths``; the classes
only store history.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localllm.sampling.candidates import IntArray

Logits = npt.NDArray[np.float32]

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class History:
    """Token ids of a sequence: prompt and generated tokens."""

    def __init__(self, ids: Sequence[int] | IntArray) -> None:
        self._buffer: npt.NDArray[np.int32] = np.array(ids, dtype=np.int32)
        self._length = len(self._buffer)

    def append(self, id_: int) -> None:
        if self._length == len(self._buffer):
            # A new buffer, because np.resize in place would invalidate earlier views.
            grown = np.empty(max(256, 2 * self._length), np.int32)
            grown[: self._length] = self._buffer
            self._buffer = grown
        self._buffer[self._length] = id_
        self._length += 1

    def last(self, count: int) -> npt.NDArray[np.int32]:
        """Return the last ``count`` ids (all if there are fewer, or for -1) as a read-only view."""
        start = 0 if count < 0 else max(0, self._length - count)
        view = self._buffer[start : self._length]
        view.flags.writeable = False
        return view


def penalize(
    logits: Logits, ids: IntArray, counts: IntArray, *, repeat: float, presence: float, frequency: float
) -> Logits:
    """Return new logits with penalties for ``ids``, which occurred ``counts`` times.

    The repeat penalty (Keskar et al. 2019, CTRL, section 4.1) divides positive logits and multiplies others, so it
    always lowers them. Then ``presence + count * frequency`` is subtracted, as in the OpenAI API.
    """
    old = logits[ids].astype(np.float64)
    penalized = logits.copy()
    # A logit below float32's range becomes -inf, so the token is never drawn. The caller checks for +inf.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.where(old > 0, old / repeat, old * repeat)
        penalized[ids] = scaled - (presence + counts * frequency)
    return penalized


class RepetitionPenalties:
    """Repeat, presence and frequency penalties over the last ``window`` tokens (-1: all tokens)."""

    def __init__(
        self, prompt_ids: Iterable[int], *, window: int, repeat: float, presence: float, frequency: float
    ) -> None:
        self._strengths = {"repeat": repeat, "presence": presence, "frequency": frequency}
        self._window: deque[int] = deque(maxlen=None if window < 0 else min(window, sys.maxsize))
        self._counts: Counter[int] = Counter()
        for id_ in prompt_ids:
            self.accept(int(id_))

    def accept(self, id_: int) -> None:
        if len(self._window) == self._window.maxlen:
            leaving = self._window[0]
            self._counts[leaving] -= 1
            if not self._counts[leaving]:
                del self._counts[leaving]
        self._window.append(id_)
        self._counts[id_] += 1

    def __call__(self, logits: Logits) -> Logits:
        size = len(self._counts)
        ids, counts = (np.fromiter(values, np.int64, size) for values in (self._counts.keys(), self._counts.values()))
        return penalize(logits, ids, counts, **self._strengths)


class SequenceBreakers:
    """Finds strings that interrupt repetitions for DRY, also across tokens.

    ``breakers``: the strings, not empty. ``token_bytes``: returns the bytes of a token.
    """

    def __init__(self, breakers: Iterable[str], token_bytes: Callable[[int], bytes]) -> None:
        self._breakers = [text.encode("utf-8", "surrogatepass") for text in breakers]
        self._token_bytes = token_bytes
        self._n_tail = max(map(len, self._breakers)) - 1
        self._tail = b""
        self.tokens_since = 0
        """Number of tokens after the last breaker's last token; all tokens if there was no breaker."""

    def accept(self, id_: int) -> None:
        text = self._tail + self._token_bytes(id_)
        n = len(self._tail)  # breakers that end in the tail were counted before
        if any(text.find(breaker, max(0, n - len(breaker) + 1)) >= 0 for breaker in self._breakers):
            self.tokens_since = 0
        else:
            self.tokens_since += 1
        self._tail = text[max(0, len(text) - self._n_tail) :]

    def within(self, id_: int) -> bool:
        text = self._token_bytes(id_)
        return any(breaker in text for breaker in self._breakers)


def suffix_match_lengths(ids: IntArray) -> npt.NDArray[np.int32]:
    """Return, for each position except the last, the number of ids up to it that equal the end of ``ids``.

    Uses the Z-algorithm (Gusfield 1997, chapter 1) on the reversed ids, in linear time.

    ``ids``: ``[n]``. The result is int32 ``[max(0, n - 1)]``. For ``a b c x a b c`` it is ``0 0 3 0 0 0``.
    """
    backward = ids[::-1].tolist()
    n = len(backward)
    z = [0] * n
    start = end = 0
    for k in range(1, n):
        match = min(end - k, z[k - start]) if k < end else 0
        while k + match < n and backward[match] == backward[k + match]:
            match += 1
        z[k] = match
        if k + match > end:
            start, end = k, k + match
    return np.array(z[:0:-1], np.int32)


@dataclass
class DryPenalty:
    """DRY, "don't repeat yourself": penalizes tokens that would extend a repetition.

    If the last ``n`` tokens also occur earlier, followed by token ``t``, the logit of ``t`` is lowered by
    ``multiplier * base ** (n - allowed_length)``, for the largest such ``n`` of at least ``allowed_length``.
    Repetitions end at a sequence breaker, and a token that contains a breaker is never penalized.

    Designed by p-e-w (oobabooga/text-generation-webui pull request 5677). Details follow llama.cpp, except that
    breakers are found in the text, however it is tokenized.
    """

    history: History  # the sequence; its owner appends to it before calling ``accept``
    window: int  # number of last tokens to search, -1 for all
    multiplier: float
    base: float
    allowed_length: int
    breakers: SequenceBreakers | None  # a new object, or None for no breakers

    def __post_init__(self) -> None:
        recent = self.history.last(self.window)
        self._lengths = suffix_match_lengths(recent)
        if self.breakers is not None:
            for id_ in recent.tolist():
                self.breakers.accept(id_)

    def accept(self, id_: int) -> None:
        # A match grows by one if the new token follows it, and ends otherwise. This takes linear time for every text;
        # a new search could be quadratic.
        earlier = self.history.last(self.window)[:-1]
        grown = np.concatenate((np.zeros(1, np.int32), self._lengths)) + np.int32(1)
        self._lengths = np.where(earlier == id_, grown[len(grown) - len(earlier) :], np.int32(0))
        if self.breakers is not None:
            self.breakers.accept(id_)

    def __call__(self, logits: Logits) -> Logits:
        ids, lengths = self._continuations()
        if not len(ids):
            return logits
        penalized = logits.copy()
        with np.errstate(over="ignore"):
            penalty = self.multiplier * self.base ** (lengths - self.allowed_length).astype(np.float64)
            penalized[ids] = logits[ids] - np.minimum(penalty, _FLOAT32_MAX)
        return penalized

    def _continuations(self) -> tuple[IntArray, IntArray]:
        """Return ids that would extend a repetition, and the length of the longest repetition for each."""
        recent = self.history.last(self.window)
        limit = len(recent) if self.breakers is None else self.breakers.tokens_since
        in_window = np.arange(1, len(recent))  # matches cannot start before the window
        lengths = np.minimum(self._lengths, np.minimum(in_window, limit))
        repeated = np.flatnonzero(lengths >= self.allowed_length)
        ids, inverse = np.unique(recent[repeated + 1], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, inverse, lengths[repeated])
        if self.breakers is None:
            return ids, longest
        penalized = [i for i, id_ in enumerate(ids.tolist()) if not self.breakers.within(id_)]
        return ids[penalized], longest[penalized]
