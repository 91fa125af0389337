"""Drafts by a smaller model with the same vocabulary.

Sources: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192); Chen et al.,
Accelerating Large Language Model Decoding with Speculative Sampling (arXiv:2302.01318).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.cache import common_prefix
from localllm.drafting.costs import StepCosts, moved_share
from localllm.drafting.drafter import DEFAULT_DRAFTS
from localllm.engine import Engine, Run
from localllm.kernels.backend import TopK

#: Drafting ends before a token that the draft model itself believes in less than this.
LEAST_PROBABILITY = 0.4

#: How often a draft is thought to be right, until it was seen.
_FIRST_SHARE = 0.7

#: Where drafts do not pay: tokens until they are tried again, at first and at most, and how many then.
_FIRST_PAUSE, _LONGEST_PAUSE, _TRIED = 16, 512, 4

#: Where drafts are not even expected to pay: tokens of an answer until they are tried.
_FIRST_TRY = 64

#: Tokens that a draft model may have missed, for the time of its step to be that of any other.
_FEW = 8

#: Where a device finds the largest logits, a probability is that among so many: the rest adds little to it.
_LARGEST = 64

#: Weight of one measurement in the seconds that a draft takes.
_WEIGHT = 0.25


class ModelDrafter:
    """Drafts the most likely tokens of a model that has an engine, and so a cache and a context, of its own."""

    def __init__(
        self, engine: Engine, costs: StepCosts, most: int = DEFAULT_DRAFTS, *, expected_cost: float = 0.0
    ) -> None:
        """Drafts with the small model's engine.

        Args:
            costs: of the large model's steps.
            most: drafts a step at most.
            expected_cost: of a step of the small model, in steps of the large one, until it is measured.
        """
        self._engine = engine
        self._costs = costs
        self._most = most
        self._run: Run | None = None
        self._share = _FIRST_SHARE
        self._expected_cost = expected_cost
        self._pause = _FIRST_PAUSE
        self._resume_at: int | None = None
        self._n_before = 0
        self._guess: list[int] = []
        self._gave_up = self._is_behind = False

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        self._learn(tokens)
        self._guess, self._gave_up = [], False
        n = self._how_many(len(tokens), min(most, self._most, self._engine.context - len(tokens)))
        if n > 0:
            run = self._follow(tokens)
            if run is not None:
                self._n_before = len(tokens)
                self._guess = self._draft(run, n)
                self._is_behind = not self._guess and run.n_missing > 0
        return self._guess

    def measured(self, n_tokens: int, seconds: float) -> None:
        self._costs.add(n_tokens, seconds)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._engine.finish(run)

    def _learn(self, tokens: Sequence[int]) -> None:
        """Compares the last guess with what came.  To give up early is to know of no right token either."""
        came = tokens[self._n_before : self._n_before + len(self._guess)] if self._guess else []
        n_right = common_prefix(self._guess, came)
        wrong = n_right < len(came) or self._gave_up
        self._share = moved_share(self._share, n_right, then_wrong=wrong)

    def _how_many(self, n_tokens: int, most: int) -> int:
        """How many tokens to draft.  Where it does not pay, a few after ever longer pauses, in case that changed."""
        if most < 1 or self._costs.is_due:
            return 0
        if self._is_behind:
            return min(most, _TRIED)
        n = self._costs.best(self._share, most, self._costs.draft_s or self._expected_cost * self._costs.single_s)
        if n:
            self._pause = _FIRST_PAUSE
        elif self._resume_at is None:  # the first time it would have to evaluate all of the prompt
            self._resume_at = n_tokens + _FIRST_TRY
        elif n_tokens >= self._resume_at:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            n = min(most, _TRIED)
        if n:
            self._resume_at = n_tokens + self._pause
        return n

    def _follow(self, tokens: Sequence[int]) -> Run | None:
        """The draft model's run with these tokens in it; None if it has not all of them in its vocabulary."""
        if self._run is None:
            agreed = 0
        else:
            known = self._n_before
            agreed = min(known + common_prefix(self._run.tokens[known:], tokens[known:]), len(tokens) - 1)
        if max(tokens[agreed:]) >= self._engine.n_vocab:
            self._most = 0  # for good, as the text keeps that token
            return None
        if self._run is None:
            self._run = self._engine.start(tokens)
            self._run.n_best = min(_LARGEST, self._engine.n_vocab)
        else:
            self._run.cut(agreed)
            self._run.tokens += tokens[agreed:]
        return self._run

    def _draft(self, run: Run, n: int) -> list[int]:
        """At most ``n`` tokens.

        Of a long text that the model has not seen yet it evaluates one chunk, and the rest when it is asked again:
        so the text goes on meanwhile, and can be cancelled.  It never waits for room in its cache.
        """
        ids: list[int] = []
        is_typical = run.n_missing <= _FEW
        begin, n_steps = time.perf_counter(), 0
        while len(ids) < n and self._engine.advance(run, wait=False) and run.logits is not None:
            n_steps += 1
            id_, probability = _likeliest_of(run.logits)
            if not probability >= LEAST_PROBABILITY:  # a NaN is none either
                self._gave_up = True
                break
            ids.append(id_)
            run.tokens.append(id_)
        if n_steps and is_typical:
            seconds = (time.perf_counter() - begin) / n_steps
            known = self._costs.draft_s
            self._costs.draft_s += (_WEIGHT if known else 1.0) * (seconds - known)
        return ids


def _likeliest_of(logits: NDArray[np.float32] | TopK) -> tuple[int, float]:
    """The most likely token after the last row, and its probability."""
    if not isinstance(logits, TopK):
        return likeliest(logits[-1])
    place, probability = likeliest(logits.logits[-1])
    return int(logits.ids[-1, place]), probability


def likeliest(logits: NDArray[np.float32]) -> tuple[int, float]:
    """The most likely token, and its probability; NaN if the logits hold one."""
    id_ = int(logits.argmax())
    with np.errstate(invalid="ignore"):
        total = np.exp(logits - logits[id_]).sum()
    return id_, float(1 / total)
