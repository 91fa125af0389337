"""Drafts of a whole block at once, by a DFlash drafter (`localllm.models.dflash`).

A block is the last token and one mask token per draft. The drafter's keys and values are in the target model's cache.
It is evaluated at the positions of the target model's next tokens, which then overwrite its keys and values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.engine.cache import PagedCache
from localllm.engine.drafting.assistant import AssistantDrafter
from localllm.engine.drafting.cost import StepCost
from localllm.engine.drafting.mtp import MTPDrafter, MTPModel
from localllm.engine.runner import BatchItem, ModelRunner


class BlockModel(MTPModel):
    """A DFlash drafter. Shares the cache of its target model. ``mask``: the token in place of a draft."""

    def __init__(
        self,
        runner: ModelRunner,
        expected_cost: float,
        *,
        cache: PagedCache,
        mask: int,
        block_size: int,
        token_ids: NDArray[np.int64] | None,
    ) -> None:
        super().__init__(runner, expected_cost, kind="draft", token_ids=token_ids)
        self.cache, self.mask = cache, mask
        self.most = min(block_size, runner.max_tokens, runner.max_outputs) - 1  # drafts per block

    def drafter(self, cost: StepCost, most: int, always: bool = False) -> MTPDrafter:
        return BlockDrafter(self, cost, min(most, self.most), always)


class BlockDrafter(AssistantDrafter):
    _model: BlockModel

    def _draft(self, tokens: Sequence[int], n: int) -> list[int]:
        text, ids, model = self._text, list[int](), self._model
        # A preempted text has no tokens in the cache.
        if text is None or len(text) != len(tokens) - 1 or tokens[-1] >= self._runner.n_vocab:
            return []
        if not model.cache.reserve(text, 1 + n):
            return []
        begin = time.perf_counter()
        block = [tokens[-1], *[model.mask] * n]
        for logits in self._runner.at_once(BatchItem(text, block, n, len(tokens) - 1)):
            id_, probability = model.likeliest(logits)
            if not self._believes(probability):
                self._gave_up = True
                break
            ids.append(id_)
        model.measured((time.perf_counter() - begin) / max(1, len(ids) + self._gave_up))
        return ids
