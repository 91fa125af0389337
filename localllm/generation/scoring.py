"""Scores of given tokens: logits and log-probabilities."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.engine.probe import Probe
from localllm.engine.request import Request
from localllm.errors import QueueFullError
from localllm.sampling import Choice

#: Receives the position of a token, and logits [n, n_vocab] for that token and the following ones.
OnRows = Callable[[int, NDArray[np.float32]], object]

#: Most texts evaluated at the same time.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability of a continuation.

    Attributes:
        logprob: Natural logarithm of its probability after the prompt.
        ids: Its tokens.
        logprobs: Log-probability of each token, given the prompt and the preceding tokens.
        is_greedy: True if every token is the most likely one.
        top: Most likely tokens at each position with their log-probabilities, best first. Empty unless requested.
    """

    logprob: float
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool
    top: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Tokens of the continuation, each with the most likely tokens at its position."""
        return tuple(map(Choice, self.ids, self.logprobs, self.top or ((),) * len(self.ids)))


class Evaluation:
    """A request for logits, which are passed on as they arrive."""

    is_full = False

    def __init__(
        self, engine: Engine, ids: Sequence[int], first: int, on_rows: OnRows, probe: Probe | None = None
    ) -> None:
        """Start the evaluation of ``ids``.

        ``first``: position of the first token whose logits are needed. ``on_rows``: called in the engine thread. It
        must copy the logits, because their memory is reused.
        """
        self._engine = engine
        self._on_rows = on_rows
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._request = Request(list(ids), self, logits_from=first, probe=probe)
        engine.submit(self._request)

    def cancel(self) -> None:
        """End the evaluation, if it is running."""
        self._engine.cancel(self._request)

    def wait(self) -> None:
        """Wait until all logits were delivered."""
        try:
            error = self._engine.wait_for(self._ended)
        except BaseException:
            self.cancel()
            raise
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame and would keep its variables in memory

    # -- Called by the engine (`RequestOutput`) --------------------------------------------------------------------

    def progress(self, n_evaluated: int) -> None: ...

    def token(self, choice: Choice) -> bool:
        raise AssertionError("a logits request received a token")

    def logits(self, position: int, rows: NDArray[np.float32]) -> None:
        self._on_rows(position, rows)

    def flush(self) -> None: ...

    def end(self, error: BaseException | None) -> None:
        self._ended.put(error)


def last_logits(engine: Engine, ids: Sequence[int], n: int, probe: Probe | None = None) -> NDArray[np.float32]:
    """Return logits [n, n_vocab] for the last ``n`` tokens."""
    first = len(ids) - n
    logits = np.empty((n, engine.width), np.float32)

    def keep(position: int, rows: NDArray[np.float32]) -> None:
        logits[position - first : position - first + len(rows)] = rows

    Evaluation(engine, ids, first, keep, probe).wait()
    return logits


_Item = TypeVar("_Item")
_Begun = TypeVar("_Begun", bound="Evaluation | _Scoring")
_Result = TypeVar("_Result")


def evaluate_all(
    begin: Callable[[_Item], _Begun], finish: Callable[[_Begun], _Result], items: Iterable[_Item]
) -> list[_Result]:
    """Return the result of ``finish`` for each item, in order. At most `_AT_ONCE` run at the same time."""
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
        for evaluation in under_way:
            evaluation.cancel()


class _Scoring:
    """Computes log-probabilities of the tokens from position ``first``, as logits arrive."""

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
                self._top.append(tuple((int(top_id), float(row[top_id]) - peak - log_total) for top_id in best))

    def cancel(self) -> None:
        if self._evaluation is not None:
            self._evaluation.cancel()

    def score(self) -> Score:
        if self._evaluation is not None:
            self._evaluation.wait()
        ids = tuple(self._ids[self._first :])
        return Score(sum(self._logprobs, 0.0), ids, tuple(self._logprobs), self._is_greedy, tuple(self._top))


def scores(engine: Engine, texts: Sequence[tuple[Sequence[int], int]], n_top: int = 0) -> list[Score]:
    """Return the score of each text's tokens from a position, which is at least 1.

    ``texts``: tokens and position of each text. ``n_top``: number of most likely tokens to include per position.
    """
    return evaluate_all(lambda text: _Scoring(engine, *text, n_top), _Scoring.score, texts)
