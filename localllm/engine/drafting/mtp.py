"""Drafts by the block behind the model's own last layer (`localllm.models.mtp`), or by an EAGLE-3 drafter, which is
such a block in a file of its own (`localllm.models.eagle3`).

The block has a cache of its own: what it makes of each token's hidden state, which the model has computed, and of the
token that follows.  So it needs no prompt of its own, but it must be given the hidden states of every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from localllm.engine.cache import common_prefix
from localllm.engine.drafting.cost import StepCost
from localllm.engine.drafting.model import FEW, DraftModel, ModelDrafter, likeliest
from localllm.engine.runner import BatchItem, ModelRunner

#: What is between hidden states and what reads them.
Norm = Callable[[NDArray[np.float32]], NDArray[np.float32]]

#: Rows of hidden states that wait for the block at most.
_MAX_ROWS = 64

#: Of sequences whose beginning the block has not seen; nobody may find them by their tokens.
_salts = count(1)


def n_right(step: BatchItem, tokens: Sequence[int]) -> int:
    """How many of a step's tokens the text has gone on with, and has a token behind."""
    start, stop = step.start, step.start + len(step.ids)
    return min(common_prefix(step.ids, tokens[start:stop]), len(tokens) - 1 - start)


class MTPModel(DraftModel):
    """The block that drafts for an engine."""

    def __init__(
        self,
        runner: ModelRunner,
        expected_cost: float,
        of_model: Norm = np.copy,
        of_block: Norm = np.copy,
        *,
        kind: Literal["draft", "mtp"] = "mtp",
        token_ids: NDArray[np.int64] | None = None,
    ) -> None:
        """``token_ids``: of the tokens that it drafts, if it has a vocabulary of its own."""
        super().__init__(runner, expected_cost=expected_cost)
        # of_model, of_block: norms of the hidden states of either
        self.of_model, self.of_block = of_model, of_block
        self.kind, self._token_ids = kind, token_ids

    def likeliest(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        """The most likely token, and its probability."""
        number, probability = likeliest(logits)
        return number if self._token_ids is None else int(self._token_ids[number]), probability

    def drafter(self, cost: StepCost, most: int, always: bool = False) -> ModelDrafter:
        return MTPDrafter(self, cost, most, always)


class MTPDrafter(ModelDrafter):
    """Drafts for one text."""

    _model: MTPModel

    def __init__(self, model: MTPModel, cost: StepCost, most: int, always: bool = False) -> None:
        super().__init__(model, cost, most, always)
        #: Hidden states that the block has not seen yet, up to that of position ``_end``.
        self._rows: list[NDArray[np.float32]] = []
        self._end = self._salt = 0
        self._is_lost = False

    def observe(self, step: BatchItem, rows: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """Takes note of the text's part in a step of the model.  ``rows``: the hidden states that it made;
        ``tokens``: the text by now; what it does not go on with was drafted and wrong."""
        start = step.start
        if self._sequence is None:
            self._begin(start, tokens)
        n = n_right(step, tokens)
        n_known = self._end - start
        if n_known < 0:  # it was preempted, and found in the cache what the block has not seen
            self._is_lost = True
        if self._is_lost or n <= n_known:
            return
        self._rows.append(self._model.of_model(rows[n_known:n]))
        self._end = start + n
        if sum(map(len, self._rows)) > _MAX_ROWS:
            self._evaluate(tokens, 0)

    def _begin(self, start: int, tokens: Sequence[int]) -> None:
        """Finds what an earlier text like this one left in the cache; else it begins in the midst of this one."""
        cache = self._runner.cache
        self._sequence, self._end = cache.begin(list(tokens[1 : start + 1])), start
        if len(self._sequence) < start:
            cache.release(self._sequence)
            self._sequence, self._salt = cache.begin([]), next(_salts) * self._runner.n_vocab

    def _evaluate(self, tokens: Sequence[int], n_outputs: int) -> NDArray[np.float32] | None:
        """Shows the block the hidden states that wait; None if there is no room for them, or it lacks a token."""
        assert self._sequence is not None
        runner, cache, sequence = self._runner, self._runner.cache, self._sequence
        rows, self._rows = np.concatenate(self._rows), []
        ids, logits = list(tokens[self._end + 1 - len(rows) : self._end + 1]), None
        if max(ids) >= runner.n_vocab:
            self._is_lost = True
            return None
        for at in range(0, len(ids), runner.max_tokens):
            part = ids[at : at + runner.max_tokens]
            if len(sequence) + len(part) > runner.context or not cache.reserve(sequence, len(part)):
                self._is_lost = True
                return None
            wanted = n_outputs if at + len(part) == len(ids) else 0
            chunk = BatchItem(sequence, part, wanted, len(sequence))
            logits = runner.continued([chunk], rows[at : at + len(part)])
            cache.append(sequence, [id_ + self._salt for id_ in part])
        return logits

    def _keep(self, right: Sequence[int]) -> None:
        """Nothing: the block has seen its drafts with hidden states of its own, which the model's replace."""

    def _draft(self, tokens: Sequence[int], n: int) -> list[int]:
        runner, sequence, ids = self._runner, self._sequence, list[int]()
        if self._is_lost or sequence is None or not self._rows or self._end != len(tokens) - 1:
            return []
        begin, n_rows = time.perf_counter(), sum(map(len, self._rows))
        logits = self._evaluate(tokens, 1)
        n = min(n, runner.context - len(sequence))
        if logits is None or not runner.cache.reserve(sequence, n):
            return []
        while len(ids) < n:
            id_, probability = self._model.likeliest(logits[-1])
            if not self._believes(probability):
                self._gave_up = True
                break
            ids.append(id_)
            if len(ids) < n:
                hidden = self._model.of_block(runner.hidden_rows()[-1:])
                logits = runner.continued([BatchItem(sequence, [id_], 1, len(sequence) + len(ids) - 1)], hidden)
        if n_rows <= FEW:
            self._model.measured((time.perf_counter() - begin) / max(1, len(ids) + self._gave_up))
        return ids
