"""The text of a request for a model that writes by diffusion: a prompt, followed by tokens that replace masks.

All tokens see each other, so keys and values of the prompt depend on the reply and are not cached: each step
evaluates prompt and reply. The step then chooses a token for each mask, and keeps the tokens with the highest
confidence. The other masks are chosen again in the next step. A token that replaced a mask never changes.

Schedules (tokens that a step keeps):

- in blocks (LLaDA, arXiv:2502.09992): the steps of a block keep equal numbers of tokens, the first ones one more;
- with ``block_length`` 0 (Dream, arXiv:2508.15487): the time falls from 1 to ``eps`` in equal steps, and the step
  from time t to s keeps the share 1 - s/t of the masks. The last step keeps all.

A step that keeps no token changes nothing and is omitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.sampling import Sampling, candidates as steps
from localllm.sampling.candidates import Candidates, FloatArray

#: Most mask tokens whose logits one step computes.
MAX_MASKS = 512


@dataclass(frozen=True, kw_only=True)
class DiffusionSettings:
    """How masks are replaced.

    ``algorithm`` defines the confidence in a token: its probability ("confidence"), the negative entropy of the
    distribution ("entropy"), the difference of the two largest probabilities ("margin") or a random number
    ("random"). With "origin", each mask is replaced with the same probability, in random order.
    """

    mask_id: int
    shifts: bool  # whether the logits of a token are computed at the position before the token
    steps: int  # of the whole text, at least 1
    block_length: int  # 0: no blocks
    algorithm: str
    eps: float = 1e-3
    tempers: bool = False  # whether temperature and truncation change the confidence in a token
    sampling: Sampling  # temperature, top_k, top_p, min_p and logit_bias
    seed: int  # of the random numbers of each step


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    start: int  # first position that may change
    stop: int
    n: int  # number of tokens to keep
    share: float  # share of the masks, for "origin"


class Canvas:
    """Prompt and unfinished reply of a request. Only the engine thread changes it."""

    def __init__(self, prompt: Sequence[int], n_tokens: int, settings: DiffusionSettings) -> None:
        """
        Args:
            prompt: at least one token. Masks in the prompt are kept.
            n_tokens: tokens of the reply.
        """
        self.ids = [*prompt, *[settings.mask_id] * n_tokens]
        self.n_prompt, self.n_steps = len(prompt), 0  # n_steps: number of finished steps
        self._settings = settings
        self._is_mask = np.arange(len(self.ids)) >= len(prompt)
        self._steps = self._schedule()
        self._step = self._next_step()

    @property
    def is_complete(self) -> bool:
        return self._step is None

    @property
    def masks(self) -> list[int]:
        """Positions of the masks that the next step may replace."""
        if self._step is None:
            return []
        return [i for i in range(self._step.start, self._step.stop) if self._is_mask[i]]

    @property
    def outputs(self) -> list[int]:
        """Positions whose logits the next step needs, in ascending order."""
        return [i - self._settings.shifts for i in self.masks]

    @property
    def n_settled(self) -> int:
        """Number of leading tokens of prompt and reply without a mask."""
        return int(self._is_mask.argmax()) if self._is_mask.any() else len(self.ids)

    def advance(self, logits: NDArray[np.float32]) -> None:
        """Finish a step with the logits [n, n_vocab] of its ``outputs``.

        Raises ModelError for logits that are not finite.
        """
        step, masks, self.n_steps = self._step, self.masks, self.n_steps + 1
        if step is None:
            return
        # The numbers depend on the step and the position alone.
        uniform = np.random.default_rng((self._settings.seed, step.number)).random((2, len(self.ids) - self.n_prompt))
        drawn, other = uniform[:, [i - self.n_prompt for i in masks]]
        choices = [self._choose(row, u) for row, u in zip(logits, drawn, strict=True)]
        if self._settings.algorithm == "origin":
            chosen = np.flatnonzero(other < step.share)
        else:
            confidence = other if self._settings.algorithm == "random" else np.array([c for _, c in choices])
            chosen = np.argsort(-confidence, kind="stable")[: step.n]
        for i in chosen.tolist():
            self.ids[masks[i]] = choices[i][0]
            self._is_mask[masks[i]] = False
        self._step = self._next_step()

    def _choose(self, logits: NDArray[np.float32], u: float) -> tuple[int, float]:
        """Return a token for a mask, and the confidence in it."""
        settings, sampling = self._settings, self._settings.sampling
        logits = logits.copy()
        if not math.isfinite(peak := float(logits.max())):
            raise ModelError(f"the logits of the model hold {peak}: the file is broken")
        for id_, bias in sampling.logit_bias.items():
            logits[id_] += bias
        logits[settings.mask_id] = -math.inf
        every = Candidates(np.arange(len(logits)), logits)
        tempered = _truncated(every, sampling)
        position = steps.draw(tempered, u) if sampling.temperature else int(tempered.logits.argmax())
        token = int(tempered.ids[position])
        if settings.tempers:
            return token, _confidence(tempered.logits, position, settings.algorithm)
        return token, _confidence(logits, token, settings.algorithm)

    def _next_step(self) -> _Step | None:
        """Return the next step that keeps tokens; None if no masks are left."""
        return next((step for step in self._steps if step.n or self._settings.algorithm == "origin"), None)

    def _schedule(self) -> Iterator[_Step]:
        """Yield the steps. Each depends on the number of masks that the step before left."""
        settings, first, stop, number = self._settings, self.n_prompt, len(self.ids), 0
        for start in range(first, stop, settings.block_length or max(1, stop - first)):
            end = min(stop, start + settings.block_length) if settings.block_length else stop
            n_tokens, n_steps = end - start, max(1, settings.steps * (end - start) // (stop - first))
            for i in range(n_steps):
                n_masks = int(self._is_mask[start:end].sum())
                if i == n_steps - 1:
                    n, share = n_masks, 1.0
                elif settings.block_length:
                    n = n_tokens // n_steps + (i < n_tokens % n_steps)
                    share = n / max(1, n_masks)
                else:
                    share = 1 - _time(i + 1, n_steps, settings.eps) / _time(i, n_steps, settings.eps)
                    n = int(n_masks * share)
                if n_masks:
                    yield _Step(number, start, end, n, share)
                number += 1


def _time(i: int, n_steps: int, eps: float) -> float:
    return 1 - i / n_steps * (1 - eps)


def _truncated(tokens: Candidates, sampling: Sampling) -> Candidates:
    """Return the tokens to draw from, with their tempered logits."""
    if sampling.temperature:
        tokens = steps.temper(tokens, sampling.temperature)
    if sampling.top_k:
        tokens = steps.top_k(tokens, sampling.top_k)
    if sampling.top_p < 1:
        tokens = steps.top_p(tokens, sampling.top_p)
    return steps.min_p(tokens, sampling.min_p) if sampling.min_p else tokens


def _confidence(logits: FloatArray, position: int, algorithm: str) -> float:
    """Return the confidence in the token at a position of ``logits``; 0 if the algorithm uses none."""
    weights = steps.relative_weights(logits)
    total = weights.sum(dtype=np.float64)
    if algorithm == "confidence":
        return float(weights[position] / total)
    if algorithm == "margin":
        best = np.partition(weights, len(weights) - 2)[-2:] if len(weights) > 1 else np.array([0, weights[0]])
        return float((float(best[1]) - float(best[0])) / total)
    if algorithm == "entropy":
        shares = weights[weights > 0] / total
        return float((shares * np.log(shares)).sum())
    return 0.0
