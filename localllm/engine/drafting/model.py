"""Drafts by a smaller model with the same vocabulary.

Sources: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192); Chen et al.,
Accelerating Large Language Model Decoding with Speculative Sampling (arXiv:2302.01318).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from localllm.engine.cache import CachedSequence, common_prefix
from localllm.engine.drafting.cost import StepCost, moved_rate
from localllm.engine.runner import BatchItem, ModelRunner
from localllm.kernels.backend import TopK
from localllm.options.types import DEFAULT_DRAFTS

#: Drafting stops before a token with a lower probability in the draft model.
MIN_PROBABILITY = 0.4

#: Acceptance rate before it is measured.
_FIRST_RATE = 0.7

#: While drafts do not pay: tokens until the next trial, at first and at most, and drafts per trial.
_FIRST_PAUSE, _LONGEST_PAUSE, _TRIED = 16, 512, 4

#: Tokens of a reply before the first trial, if drafts are not expected to pay.
_FIRST_TRY = 64

#: Most prompt tokens that the draft model evaluates in one step of the engine.
_CHUNK = 128

#: Most new tokens in a draft model's step whose duration is used as a measurement.
FEW = 8

#: Number of top logits on a device. Probabilities are computed among them: the other logits add little.
_TOP_K = 64

#: Weight of one measurement of the time per draft.
_WEIGHT = 0.25


class DraftModel:
    """The draft model of an engine."""

    kind: Literal["draft", "mtp"] = "draft"  # value of ``speculate`` in requests

    def __init__(self, runner: ModelRunner, *, expected_cost: float) -> None:
        self.runner = runner
        self._expected_cost = expected_cost
        self._token_s = 0.0

    def token_s(self, cost: StepCost) -> float:
        """Return the seconds per draft. Before a measurement: ``expected_cost`` steps of the target model."""
        return self._token_s or self._expected_cost * cost.single_s

    def drafter(self, cost: StepCost, most: int, always: bool = False) -> ModelDrafter:
        """Return a drafter for one text.

        ``cost``: step costs of the target model. ``most``: most drafts per step. ``always``: make ``most`` drafts
        even if no gain is expected.
        """
        return ModelDrafter(self, cost, most, always)

    def measured(self, seconds: float) -> None:
        self._token_s += (_WEIGHT if self._token_s else 1.0) * (seconds - self._token_s)


class ModelDrafter:
    """Drafts the most likely tokens for one text.

    The draft model's cache records only tokens of the text. Drafts are evaluated at the following positions, and
    right drafts are recorded when the text contains them.
    """

    def __init__(self, model: DraftModel, cost: StepCost, most: int = DEFAULT_DRAFTS, always: bool = False) -> None:
        """See `DraftModel.drafter`."""
        self._always = always
        self._model = model
        self._runner = model.runner
        self._cost = cost
        self._most = most
        self._sequence: CachedSequence | None = None
        self._rate = _FIRST_RATE
        self._pause = _FIRST_PAUSE
        self._resume_at: int | None = None
        self._n_before = 0
        self._guess: list[int] = []
        self._gave_up = self._is_behind = False

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        self._learn(tokens)
        self._guess, self._gave_up = [], False
        n = self._how_many(len(tokens), min(most, self._most, self._runner.context - len(tokens)))
        if n > 0:
            self._guess = self._draft(tokens, n)
            self._n_before = len(tokens)
        return self._guess

    def close(self) -> None:
        if self._sequence is not None:
            self._runner.cache.release(self._sequence)
        del self._model, self._runner  # a caller that keeps the request must not keep the model in memory

    def _learn(self, tokens: Sequence[int]) -> None:
        """Compare the last drafts with the text. A round that stopped early also counts one wrong draft."""
        if not self._guess and not self._gave_up:
            return
        came = tokens[self._n_before : self._n_before + len(self._guess)]
        n_right = common_prefix(self._guess, came)
        self._rate = moved_rate(self._rate, n_right, then_wrong=n_right < len(came) or self._gave_up)
        if self._sequence is not None:
            # The last draft was not evaluated.
            self._keep(self._guess[: min(n_right, len(self._guess) - 1)])

    def _keep(self, right: Sequence[int]) -> None:
        """Record right drafts that were evaluated."""
        assert self._sequence is not None
        if self._runner.cache.has_states:
            self._runner.cache.rollback(self._sequence)
        else:
            self._runner.cache.append(self._sequence, right)

    def _believes(self, probability: float) -> bool:
        """Return whether a token is likely enough to verify. False for NaN."""
        return probability >= (0.0 if self._always else MIN_PROBABILITY)

    def _how_many(self, n_tokens: int, most: int) -> int:
        """Return the number of drafts. While drafts do not pay, a few are tried after increasingly long pauses."""
        if most < 1:
            return 0
        if self._always:
            return most
        if not self._cost.single_s:
            return 0
        if self._is_behind:
            return min(most, _TRIED)
        draft_s = self._model.token_s(self._cost)
        n = self._cost.best(self._rate, most, draft_s)
        if n:
            self._pause = _FIRST_PAUSE
        elif self._resume_at is None:  # the first round evaluates the whole prompt
            can_pay = self._cost.best(1.0, most, draft_s) > 0  # if all drafts were right
            self._resume_at = n_tokens + (_FIRST_TRY if can_pay else _LONGEST_PAUSE)
        elif n_tokens >= self._resume_at:
            can_pay = self._cost.best(1.0, most, draft_s) > 0
            self._pause = min(2 * self._pause, _LONGEST_PAUSE) if can_pay else _LONGEST_PAUSE
            n = min(most, _TRIED)
        if n:
            self._resume_at = n_tokens + self._pause
        return n

    def _draft(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return at most ``n`` drafts; none if the cache is full or the prompt is not completely evaluated yet.

        Prompts are evaluated in chunks, one per call.
        """
        runner, cache = self._runner, self._runner.cache
        if self._sequence is None and not cache.has_slot:
            return []
        if self._sequence is None:
            self._sequence = cache.begin(tokens[:-1])
        sequence = self._sequence
        missing = list(tokens[len(sequence) :])
        if not missing:  # no new token since the last call
            return []
        if max(missing) >= runner.n_vocab:
            self._most = 0  # permanent, because the token stays in the text
            return []
        chunk = missing[: min(_CHUNK, runner.max_tokens)]
        self._is_behind = len(chunk) < len(missing)
        if not cache.reserve(sequence, len(chunk) + n - 1):
            return []
        begin = time.perf_counter()
        logits = runner.run([BatchItem(sequence, chunk, int(not self._is_behind), len(sequence))], _TOP_K)
        cache.append(sequence, chunk)
        if not cache.save(sequence):
            return []
        ids: list[int] = []
        while not self._is_behind:
            id_, probability = _likeliest_of(logits)
            if not self._believes(probability):
                self._gave_up = True
                break
            ids.append(id_)
            if len(ids) == n:
                break
            logits = runner.run([BatchItem(sequence, [id_], 1, len(tokens) + len(ids) - 1)], _TOP_K)
        if len(chunk) <= FEW:
            self._model.measured((time.perf_counter() - begin) / max(1, len(ids) + self._gave_up))
        return ids


def _likeliest_of(logits: NDArray[np.float32] | TopK) -> tuple[int, float]:
    """Return the most likely token of the last row, and its probability."""
    if not isinstance(logits, TopK):
        return likeliest(logits[-1])
    index, probability = likeliest(logits.logits[-1])
    return int(logits.ids[-1, index]), probability


def likeliest(logits: NDArray[np.float32]) -> tuple[int, float]:
    """Return the most likely token and its probability, NaN if a logit is NaN."""
    id_ = int(logits.argmax())
    with np.errstate(invalid="ignore"):
        total = np.exp(logits - logits[id_]).sum()
    return id_, float(1 / total)
