"""Drafts by a model's multi-token prediction block (`localllm.models.mtp`), or by an EAGLE-3 drafter, a similar block
in a separate file (`localllm.models.eagle3`).

The block has its own cache. Its input is the target model's hidden state of each token, together with the next token.
So it evaluates no prompt, but it needs the hidden states of every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from localllm.engine.cache import common_prefix
from localllm.engine.drafting.cost import StepCost
from localllm.engine.drafting.model import FEW, DraftModel, ModelDrafter, likeliest
from localllm.engine.runner import BatchItem, ModelRunner

#: Norm applied to hidden states before they are read.
Norm = Callable[[NDArray[np.float32]], NDArray[np.float32]]

#: Most rows of hidden states that wait for evaluation by the block.
_MAX_ROWS = 64


def n_right(step: BatchItem, tokens: Sequence[int]) -> int:
    """Return the number of leading tokens of a step that are in the text and followed by another token."""
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
        """``token_ids``: ids in the target model's vocabulary, if the block has a smaller vocabulary."""
        super().__init__(runner, expected_cost=expected_cost)
        # Norms of the target model's and of the block's hidden states
        self.of_model, self.of_block = of_model, of_block
        self.kind, self.token_ids = kind, token_ids

    def likeliest(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        """Return the most likely token, as an id of the target model, and its probability."""
        number, probability = likeliest(logits)
        return self.id_of(number), probability

    def id_of(self, number: int) -> int:
        """Return the target model's id of a token of the block."""
        return number if self.token_ids is None else int(self.token_ids[number])

    def drafter(self, cost: StepCost, most: int, always: bool = False) -> ModelDrafter:
        return MTPDrafter(self, cost, most, always)


class MTPDrafter(ModelDrafter):
    """Drafts for one text."""

    _model: MTPModel

    def __init__(self, model: MTPModel, cost: StepCost, most: int, always: bool = False) -> None:
        super().__init__(model, cost, most, always)
        #: Hidden states to evaluate; the last one has position ``_end - 1``.
        self._rows: list[NDArray[np.float32]] = []
        self._end = 0
        self._is_lost = False

    def observe(self, step: BatchItem, rows: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """Record the text's part in a step of the target model.

        ``rows``: hidden states of the step. ``tokens``: the current text, without rejected drafts.
        """
        start = step.start
        if self._sequence is None:
            self._begin(start, tokens)
        n = n_right(step, tokens)
        n_known = self._end - start
        if n_known < 0:  # preempted; the prefix then found in the cache includes tokens unknown to the block
            self._is_lost = True
        if self._is_lost or n <= n_known:
            return
        self._rows.append(self._model.of_model(rows[n_known:n]))
        self._end = start + n
        if sum(map(len, self._rows)) > _MAX_ROWS:
            self._evaluate(tokens, 0)

    def _begin(self, start: int, tokens: Sequence[int]) -> None:
        """Start with the prefix of an earlier text, or, if it is not completely cached, at position ``start``."""
        cache = self._runner.cache
        self._sequence, self._end = cache.begin(list(tokens[1 : start + 1])), start
        if len(self._sequence) < start:
            cache.release(self._sequence)
            # Not shareable, because its keys and values lack the tokens before ``start``.
            self._sequence = cache.begin([], shareable=False)

    def _evaluate(self, tokens: Sequence[int], n_outputs: int) -> NDArray[np.float32] | None:
        """Evaluate the waiting hidden states. Return None if the cache is full or the block lacks a token."""
        assert self._sequence is not None
        runner, cache, sequence = self._runner, self._runner.cache, self._sequence
        rows, self._rows = np.concatenate(self._rows), []
        ids, logits = list(tokens[self._end + 1 - len(rows) : self._end + 1]), None
        if max(ids) >= runner.n_vocab:
            self._is_lost = True
            return None
        for at in range(0, len(ids), runner.max_tokens):
            chunk_ids = ids[at : at + runner.max_tokens]
            if len(sequence) + len(chunk_ids) > runner.context or not cache.reserve(sequence, len(chunk_ids)):
                self._is_lost = True
                return None
            n_rows = n_outputs if at + len(chunk_ids) == len(ids) else 0
            chunk = BatchItem(sequence, chunk_ids, n_rows, len(sequence))
            logits = runner.continued([chunk], rows[at : at + len(chunk_ids)])
            cache.append(sequence, chunk_ids)
        return logits

    def _keep(self, right: Sequence[int]) -> None:
        """Do nothing: the target model's hidden states will replace the drafts in the block's cache."""

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
