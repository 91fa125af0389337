"""Drafts by a model that reads the target model's keys and values (`localllm.models.gemma4_assistant`).

It has no separate cache, so it evaluates nothing twice. All drafts of a round have the same position.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.engine.cache import CachedSequence
from localllm.engine.drafting.cost import StepCost
from localllm.engine.drafting.model import likeliest
from localllm.engine.drafting.mtp import MTPDrafter, MTPModel, Norm, n_right
from localllm.engine.runner import BatchItem, ModelRunner


class AssistantModel(MTPModel):
    def __init__(self, runner: ModelRunner, expected_cost: float, of_model: Norm) -> None:
        super().__init__(runner, expected_cost, of_model, kind="draft")

    def drafter(self, cost: StepCost, most: int, always: bool = False) -> MTPDrafter:
        return AssistantDrafter(self, cost, most, always)


class AssistantDrafter(MTPDrafter):
    #: The text's sequence in the target model's cache, and the hidden state [1, d] of its last token.
    _text: CachedSequence | None = None
    _hidden: NDArray[np.float32] | None = None

    def observe(self, step: BatchItem, rows: NDArray[np.float32], tokens: Sequence[int]) -> None:
        n = n_right(step, tokens)
        if n > 0:
            self._text, self._end = step.sequence, step.start + n
            self._hidden = self._model.of_model(rows[n - 1 : n])

    def close(self) -> None:
        super().close()
        self._text = self._hidden = None

    def _draft(self, tokens: Sequence[int], n: int) -> list[int]:
        hidden, text, ids = self._hidden, self._text, list[int]()
        if hidden is None or text is None or self._end != len(tokens) - 1:
            return []
        if tokens[-1] >= self._runner.n_vocab:
            return []
        begin, id_ = time.perf_counter(), tokens[-1]
        while len(ids) < n:
            # Position of the last cached token. The graph's rotation adds one.
            logits = self._runner.continued([BatchItem(text, [id_], 1, self._end - 1)], hidden)
            id_, probability = likeliest(logits[-1])
            if not self._believes(probability):
                self._gave_up = True
                break
            ids.append(id_)
            hidden = self._runner.hidden_rows()[-1:].copy()
        self._model.measured((time.perf_counter() - begin) / max(1, len(ids) + self._gave_up))
        return ids
