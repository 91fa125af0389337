"""Scores of given tokens: their logits, and how likely they are."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.engine.request import Request
from localllm.errors import QueueFullError
from localllm.sampling import Choice

#: Takes the position of a token, and the logits [n, n_vocab] after it and those that follow.
OnRows = Callable[[int, NDArray[np.float32]], object]

#: Texts that are evaluated at once.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is.

    Attributes:
        logprob: the natural logarithm of its probability after the prompt.
        ids: its tokens.
        logprobs: that of each token, after the prompt and those before it.
        is_greedy: whether each is the likeliest token at its place.
        top: the likeliest tokens at each place with their log-probabilities, the best first, if they were asked for.
    """

    logprob: float
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool
    top: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Its tokens, each with the likeliest ones at its place."""
        return tuple(map(Choice, self.ids, self.logprobs, self.top or ((),) * len(self.ids)))


class Evaluation:
    """A request for logits, which hands them over as they come."""

    is_full = False

    def __init__(self, engine: Engine, ids: Sequence[int], first: int, on_rows: OnRows) -> None:
        """Begins to evaluate ``ids``.  ``first``: position of the first token whose logits are wanted; ``on_rows``:
        called in the engine's thread as they come, with memory that is used again for the next ones."""
        self._engine = engine
        self._on_rows = on_rows
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._request = Request(list(ids), self, logits_from=first)
        engine.submit(self._request)

    def cancel(self) -> None:
        """Ends it, if it goes on."""
        self._engine.cancel(self._request)

    def wait(self) -> None:
        """Returns when all were handed over."""
        try:
            error = self._engine.wait_for(self._ended)
        except BaseException:
            self.cancel()
            raise
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: what it holds would stay

    # -- What the engine calls (`Output`) --------------------------------------------------------------------------

    def progress(self, n_evaluated: int) -> None: ...

    def token(self, choice: Choice) -> bool:
        raise AssertionError("logits are wanted, no tokens")

    def logits(self, position: int, rows: NDArray[np.float32]) -> None:
        self._on_rows(position, rows)

    def flush(self) -> None: ...

    def end(self, error: BaseException | None) -> None:
        self._ended.put(error)


def last_logits(engine: Engine, ids: Sequence[int], n: int) -> NDArray[np.float32]:
    """The logits [n, n_vocab] after the last ``n`` tokens."""
    first = len(ids) - n
    logits = np.empty((n, engine.width), np.float32)

    def keep(position: int, rows: NDArray[np.float32]) -> None:
        logits[position - first : position - first + len(rows)] = rows

    Evaluation(engine, ids, first, keep).wait()
    return logits


_Item = TypeVar("_Item")
_Begun = TypeVar("_Begun", bound="Evaluation | _Scoring")
_Result = TypeVar("_Result")


def evaluate_all(
    begin: Callable[[_Item], _Begun], finish: Callable[[_Begun], _Result], items: Iterable[_Item]
) -> list[_Result]:
    """Results of ``finish`` for each evaluation, in order; `_AT_ONCE` run at once, or fewer if the queue is full."""
    under_way: deque[_Begun] = deque()
    results: list[_Result] = []
    try:
        for item in items:
            while True:
                try:
                    under_way.append(begin(item))
                    break
                except QueueFullError:
                    if not under_way:
                        raise
                    results.append(finish(under_way.popleft()))
            if len(under_way) == _AT_ONCE:
                results.append(finish(under_way.popleft()))
        while under_way:
            results.append(finish(under_way.popleft()))
        return results
    finally:
        for each in under_way:
            each.cancel()


class _Scoring:
    """Adds up how likely the tokens from position ``first`` on are, as logits come."""

    def __init__(self, engine: Engine, ids: Sequence[int], first: int, n_top: int) -> None:
        self._ids = ids
        self._first = first
        self._n_top = min(n_top, engine.n_vocab)
        self._top: list[tuple[tuple[int, float], ...]] = []
        self._logprobs: list[float] = []
        self._is_greedy = True
        # The logits after the last token are not needed.
        self._evaluation = Evaluation(engine, ids[:-1], first - 1, self._add) if first < len(ids) else None

    def _add(self, position: int, rows: NDArray[np.float32]) -> None:
        for row, id_ in zip(rows, self._ids[position + 1 :], strict=False):
            peak = float(row.max())
            log_total = float(np.log(np.exp(row - np.float32(peak), dtype=np.float64).sum()))
            self._logprobs.append(float(row[id_]) - peak - log_total)
            self._is_greedy &= int(row.argmax()) == id_
            if self._n_top:
                best = np.argpartition(-row, self._n_top - 1)[: self._n_top]
                best = best[np.lexsort((best, -row[best]))]
                self._top.append(tuple((int(each), float(row[each]) - peak - log_total) for each in best))

    def cancel(self) -> None:
        if self._evaluation is not None:
            self._evaluation.cancel()

    def score(self) -> Score:
        if self._evaluation is not None:
            self._evaluation.wait()
        ids = tuple(self._ids[self._first :])
        return Score(sum(self._logprobs, 0.0), ids, tuple(self._logprobs), self._is_greedy, tuple(self._top))


def scores(engine: Engine, texts: Sequence[tuple[Sequence[int], int]], n_top: int = 0) -> list[Score]:
    """How likely the tokens of each text are from a position on, which is at least 1.  ``texts``: the tokens of each,
    and the position; ``n_top``: how many of the likeliest tokens to tell of each place."""
    return evaluate_all(lambda text: _Scoring(engine, *text, n_top), _Scoring.score, texts)
