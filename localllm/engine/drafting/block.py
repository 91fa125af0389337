"""Drafts of a whole block at once, by a DFlash drafter of any kind (`localllm.models.dflash`).

A block is the last token followed by mask tokens. The drafter's keys and values are in the target model's cache. The
block is evaluated at the positions of the target model's next tokens, which then overwrite its keys and values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from localllm.engine.cache import PagedCache
from localllm.engine.drafting.assistant import AssistantDrafter
from localllm.engine.drafting.cost import StepCost
from localllm.engine.drafting.model import likeliest
from localllm.engine.drafting.mtp import MTPDrafter, MTPModel
from localllm.engine.runner import BatchItem, ModelRunner
from localllm.sampling.candidates import highest

Array = NDArray[np.float32]

#: Yields a block's drafts and their probabilities, from the model, the last token and the logits of the drafts.
ChooseDrafts: TypeAlias = "Callable[[BlockModel, int, Array], Iterator[tuple[int, float]]]"


def choose_likeliest(model: BlockModel, last: int, logits: Array) -> Iterator[tuple[int, float]]:
    """Yield the most likely token of each row."""
    return map(model.likeliest, logits)


@dataclass(frozen=True)
class ChooseWithBias:
    """Adds a bias to the logits of each draft, which depends on the token before it (DSpark).

    Attributes:
        confidence: weights of the confidence head, for the hidden state and for the embedding of the token before the
            draft, and a bias. None: a draft's probability is the softmax.
    """

    confidence: Array | None

    def __call__(self, model: BlockModel, last: int, logits: Array) -> Iterator[tuple[int, float]]:
        for i, row in enumerate(logits):
            embedding, bias = model.runner.of_tokens([last])
            if self.confidence is None:
                last, probability = model.likeliest(row + bias[0])
            else:
                last = model.id_of(int((row + bias[0]).argmax()))
                features = np.concatenate([model.runner.hidden_rows()[i], embedding[0], np.ones(1, np.float32)])
                probability = float(1 / (1 + np.exp(-np.dot(features, self.confidence))))
            yield last, probability


@dataclass(frozen=True)
class ChooseCandidates:
    """Chooses among the most likely candidates of each draft, by the draft before it (DFlash 2).

    A candidate's score is its logit plus the sum over a product of three vectors: its embedding, the embedding of the
    token before it, and values computed from the hidden state. Probabilities are among the candidates.
    """

    n_candidates: int

    def __call__(self, model: BlockModel, last: int, logits: Array) -> Iterator[tuple[int, float]]:
        n = min(self.n_candidates, logits.shape[1])
        rows = [highest(row, n) for row in logits]
        if min(map(len, rows)) < n:  # NaN or infinite logits
            return
        columns = np.array(rows)
        ids = columns if model.token_ids is None else model.token_ids[columns]
        before, after = model.runner.of_tokens([last, *ids.reshape(-1).tolist()])
        chosen = 0  # row of ``before``
        for i, values in enumerate(model.runner.hidden_rows()):
            candidates = slice(1 + i * n, 1 + (i + 1) * n)
            scores = logits[i, columns[i]] + after[candidates] @ (before[chosen] * values)
            number, probability = likeliest(scores)
            chosen = candidates.start + number
            yield int(ids[i, number]), probability


class BlockModel(MTPModel):
    """A drafter of blocks. Shares the cache of its target model.

    Attributes:
        mask: the token in place of a draft.
        most: most drafts per block.
        from_last: whether the last token's row also predicts a draft.
    """

    def __init__(
        self,
        runner: ModelRunner,
        expected_cost: float,
        *,
        cache: PagedCache,
        mask: int,
        n_drafts: int,
        from_last: bool,
        token_ids: NDArray[np.int64] | None,
        choose: ChooseDrafts,
    ) -> None:
        super().__init__(runner, expected_cost, kind="draft", token_ids=token_ids)
        self.cache, self.mask, self.from_last, self.choose = cache, mask, from_last, choose
        self.most = min(n_drafts, runner.max_tokens - (not from_last), runner.max_outputs)

    def drafter(self, cost: StepCost, most: int, always: bool = False) -> MTPDrafter:
        return BlockDrafter(self, cost, min(most, self.most), always)


class BlockDrafter(AssistantDrafter):
    _model: BlockModel

    def _draft(self, tokens: Sequence[int], n: int) -> list[int]:
        text, ids, model = self._text, list[int](), self._model
        # A preempted text has no tokens in the cache.
        if text is None or len(text) != len(tokens) - 1 or tokens[-1] >= self._runner.n_vocab:
            return []
        block = [tokens[-1], *[model.mask] * (n - model.from_last)]
        if not model.cache.reserve(text, len(block)):
            return []
        begin = time.perf_counter()
        logits = self._runner.at_once(BatchItem(text, block, n, len(tokens) - 1))
        for id_, probability in model.choose(model, tokens[-1], logits):
            if not self._believes(probability):
                self._gave_up = True
                break
            ids.append(id_)
        model.measured((time.perf_counter() - begin) / max(1, len(ids) + self._gave_up))
        return ids
