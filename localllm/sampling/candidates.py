"""Truncates the candidates for the next token, and draws a token.

Each step is a pure function of ``Candidates``, except `Mirostat2` and `AdaptiveP`, whose state depends on earlier
draws. Vocabularies have up to 262,144 tokens, so no function sorts all logits. ``highest`` finds the first few
thousand in two passes. If a step needs more of the order, ``reach`` sorts only the part around the end of its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.floating[Any]]

# Up to this number of candidates, weights are computed in float64. For a whole vocabulary float64 would take
# milliseconds, and sums of float32 terms are as precise.
_FEW = 4096
# Number of highest scores examined before all scores. Usually they suffice.
_FIRST_LOOK = 256


class Candidates(NamedTuple):
    """Remaining tokens, at least one with a finite logit. Among equal logits the lower id comes first."""

    ids: IntArray  # [n]
    logits: FloatArray  # [n]; -inf for a token of probability 0

    def take(self, positions: IntArray) -> Candidates:
        return Candidates(self.ids[positions], self.logits[positions])


def highest(values: FloatArray, count: int) -> IntArray:
    """Return the positions of the ``count`` highest values, highest first. Equal values are in order of position.

    Values of -inf are excluded, so the result may be shorter.

    ``values``: ``[n]``, without NaN; ``count``: at least 1.
    """
    floor = _floor_of_highest(values, count) if count < len(values) else -math.inf
    positions = np.flatnonzero(values >= floor if floor > -math.inf else values > floor)
    return positions[_descending(values[positions])[:count]]


def _descending(values: FloatArray) -> IntArray:
    """Return the positions of all values, highest first. Equal values are in order of position."""
    if values.dtype != np.float32:
        return np.argsort(-values, kind="stable")
    # One integer per value, ordered by (descending value, ascending position). NumPy sorts integers ten times faster
    # than it argsorts.
    bits = _ascending_bits(values)
    keys = np.invert(bits, out=bits).astype(np.int64)
    keys <<= 32
    keys |= np.arange(len(values))
    keys.sort()
    keys &= 0xFFFFFFFF
    return keys


def _ascending_bits(values: FloatArray) -> npt.NDArray[np.int32]:
    """Return integers with the same order and the same equalities as the float32 values."""
    bits = (values + 0).view(np.int32)  # + 0 converts -0 to 0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits


def _floor_of_highest(values: FloatArray, count: int) -> float:
    """Return a value that at least ``count`` values reach, and few more."""
    n_groups = 16 * count
    depth = len(values) // n_groups
    if depth < 4:
        return float(np.partition(values, len(values) - count)[len(values) - count])
    # The maxima of ``count`` groups reach the floor, so at least ``count`` values do. Few groups have a second such
    # value. This takes one pass; a partition of all values takes several.
    maxima = values[: depth * n_groups].reshape(depth, n_groups).max(axis=0)
    return float(np.partition(maxima, n_groups - count)[n_groups - count])


def _precision(values: FloatArray) -> type[np.float32] | type[np.float64]:
    return np.float64 if len(values) <= _FEW else np.float32


def relative_weights(logits: FloatArray) -> FloatArray:
    """Return ``exp(logits - max)``: unnormalized probabilities."""
    with np.errstate(over="ignore"):  # differences below the float32 range become -inf, a weight of 0
        weights: FloatArray = np.exp(np.subtract(logits, logits.max(), dtype=_precision(logits)))
    return weights


class Reach(NamedTuple):
    """Positions of the highest scores that together have a share of the weights: see `reach`."""

    above: IntArray  # positions, unsorted, that precede ``positions`` and are always included
    positions: IntArray  # next positions, highest score first, equal scores in order of position
    shares: npt.NDArray[np.float64]  # cumulative share of the total weight at each of ``positions``

    def until(self, mass: float, *, side: Literal["left", "right"]) -> IntArray:
        """Return the positions up to the one whose share reaches ("left") or exceeds ("right") ``mass``."""
        positions = self.positions[: int(self.shares.searchsorted(mass, side)) + 1]
        return np.concatenate([self.above, positions]) if len(self.above) else positions


def _reach_likeliest(logits: FloatArray, mass: float) -> Reach:
    """Return `reach` for logits as scores and probabilities as weights."""
    weights = relative_weights(logits)
    n = len(logits)
    if n <= _FEW:
        return reach(logits, weights, mass)
    positions = highest(logits, _FIRST_LOOK)
    total = weights.sum(dtype=np.float64)
    shares = np.cumsum(weights[positions], dtype=np.float64) / total
    if shares[-1] > mass:
        return Reach(np.empty(0, np.intp), positions, shares)
    # Weights below this have a total share of at most 1 - mass, so the end precedes the first of them.
    positions = np.flatnonzero(weights >= np.float32((1 - mass) * total / n))
    logits, weights = logits[positions], weights[positions]
    share = weights.sum(dtype=np.float64) / total
    above, following, shares = reach(logits, weights, min(mass / share, 1 - 2**-53))
    return Reach(positions[above], positions[following], shares * share)


def reach(scores: FloatArray, weights: FloatArray, mass: float) -> Reach:
    """Find the highest scores whose share of the weights exceeds ``mass``.

    ``scores``: ``[n]``, without NaN. ``weights``: ``[n]``, not negative. ``mass``: 0 <= mass < 1. The last share
    exceeds ``mass``, up to rounding. The result may include more positions than necessary.
    """
    none = np.empty(0, np.intp)
    if len(scores) > _FEW:
        return _reach_by_buckets(scores, weights, mass)
    positions = highest(scores, len(scores))
    sums = np.cumsum(weights[positions], dtype=np.float64)
    return Reach(none, positions, sums / sums[-1])


def _reach_by_buckets(scores: FloatArray, weights: FloatArray, mass: float) -> Reach:
    """Compute `reach` for many scores. Sorts only scores with the upper 16 bits that the end must have."""
    buckets = (_ascending_bits(scores.astype(np.float32, copy=False)) >> 16).astype(np.intp)
    buckets += 1 << 15
    sums = np.bincount(buckets, weights, 1 << 16)[::-1].cumsum()  # highest scores first
    # Rounding errors in the last shares must not include scores without weight.
    last = int(np.searchsorted(sums, min(mass, 1 - 1e-9) * sums[-1], side="right"))
    bucket = len(sums) - 1 - last
    positions = np.flatnonzero(buckets == bucket)
    positions = positions[weights[positions] > 0]
    positions = positions[_descending(scores[positions])]
    before = sums[last - 1] if last else 0.0
    shares = (before + np.cumsum(weights[positions], dtype=np.float64)) / sums[-1]
    return Reach(np.flatnonzero(buckets > bucket), positions, shares)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keep tokens whose logits are within ``n`` standard deviations of the highest (Tang et al. 2024)."""
    logits = candidates.logits
    floor = logits.max() - n * logits[logits > -math.inf].std(dtype=np.float64)
    return candidates.take(np.flatnonzero(logits >= floor))


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the ``k`` most likely tokens."""
    return candidates.take(highest(candidates.logits, k)) if k < len(candidates.ids) else candidates


def typical(candidates: Candidates, p: float) -> Candidates:
    """Keep tokens with a surprise closest to the entropy, until their probabilities exceed ``p``.

    Meister et al. 2022, "Locally Typical Sampling".
    """
    weights = relative_weights(candidates.logits)
    total = weights.sum(dtype=np.float64)
    possible = weights > 0
    logprobs = np.full(len(weights), -math.inf, weights.dtype)
    logprobs[possible] = candidates.logits[possible] - (np.float64(candidates.logits.max()) + math.log(total))
    entropy = -np.sum(weights[possible] / total * logprobs[possible])
    return candidates.take(reach(-np.abs(logprobs + entropy), weights, p).until(p, side="right"))


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the most likely tokens, until their probabilities reach ``p`` (Holtzman et al. 2019)."""
    return candidates.take(_reach_likeliest(candidates.logits, p).until(p, side="left"))


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep tokens at least ``p`` times as likely as the most likely token (Nguyen et al. 2024)."""
    # A Python float keeps the comparison in float32. A numpy float64 would convert the whole vocabulary.
    floor = float(candidates.logits.max()) + math.log(p)
    return candidates.take(np.flatnonzero(candidates.logits >= floor))


def xtc(candidates: Candidates, probability: float, threshold: float, uniform: Callable[[], float]) -> Candidates:
    """Exclude top choices: remove all tokens with at least probability ``threshold`` except the least likely of them.

    Applied with the given probability. Designed by p-e-w, oobabooga/text-generation-webui pull request 6335.
    """
    if len(candidates.ids) < 2 or uniform() >= probability:
        return candidates
    weights = relative_weights(candidates.logits)
    shares = weights / weights.sum(dtype=np.float64)
    viable = np.flatnonzero((shares >= threshold) & (shares > 0))
    if len(viable) < 2:
        return candidates
    spared = viable[::-1][np.argmin(shares[viable[::-1]])]  # the last of equal ones
    is_kept = np.ones(len(shares), np.bool_)
    is_kept[viable] = False
    is_kept[spared] = True
    return candidates.take(np.flatnonzero(is_kept))


def temper(candidates: Candidates, temperature: float) -> Candidates:
    """Divide the logits by the temperature, after a shift to a maximum of 0 that prevents overflow."""
    logits = candidates.logits
    # With extreme temperatures float32 would underflow or overflow.
    precision = _precision(logits) if 0.01 <= temperature <= 100 else np.float64
    with np.errstate(over="ignore"):
        tempered: FloatArray = np.subtract(logits, logits.max(), dtype=precision)
        tempered /= temperature
        return Candidates(candidates.ids, tempered.astype(_precision(logits), copy=False))


def draw(candidates: Candidates, u: float) -> int:
    """Return the position drawn by ``u``, 0 <= u < 1.

    This is the first position at which the cumulative probability exceeds ``u``, starting with the most likely token
    and, among equal tokens, the lowest id. So a token with probability 0 is never drawn.
    """
    _, positions, shares = _reach_likeliest(candidates.logits, u)
    return int(positions[min(int(shares.searchsorted(u, side="right")), len(positions) - 1)])


class Mirostat2:
    """Mirostat 2.0 (Basu et al. 2020): keeps the surprise of the text close to a target.

    Draws among tokens whose surprise is at most ``mu`` bits. Then ``mu`` decreases by ``eta`` times the excess of the
    drawn token's surprise over ``tau``. As in llama.cpp, this surprise is computed after truncation; the paper
    computes it before truncation.
    """

    def __init__(self, tau: float, eta: float, uniform: Callable[[], float]) -> None:
        self._tau = tau
        self._eta = eta
        self._uniform = uniform
        self.mu = 2 * tau  # largest surprise of the next token, in bits

    def __call__(self, candidates: Candidates) -> int:
        """Return the drawn id."""
        logits = candidates.logits
        log_total = float(logits.max()) + math.log(relative_weights(logits).sum(dtype=np.float64))
        allowed = np.flatnonzero(logits >= np.float64(log_total - self.mu * math.log(2)))
        if not len(allowed):
            allowed = np.array([logits.argmax()])
        candidates = candidates.take(allowed)
        position = draw(candidates, self._uniform() if len(allowed) > 1 else 0.0)  # like llama.cpp
        weights = relative_weights(candidates.logits)
        surprise = -math.log2(weights[position] / weights.sum(dtype=np.float64))
        self.mu -= self._eta * (surprise - self._tau)
        return int(candidates.ids[position])


class AdaptiveP:
    """Adaptive-p (https://github.com/ggml-org/llama.cpp/pull/17927): favours tokens near a target probability.

    The target of each draw compensates for the errors of earlier draws. A draw's weight is ``decay`` to the power of
    its age.
    """

    def __init__(self, target: float, decay: float, uniform: Callable[[], float]) -> None:
        self._target, self._decay, self._uniform = target, decay, uniform
        self._weight = 1 / (1 - decay)
        self._sum = target * self._weight  # of probabilities, starting as if all earlier draws met the target

    def __call__(self, candidates: Candidates) -> int:
        """Return the drawn id."""
        candidates = candidates.take(highest(candidates.logits, len(candidates.ids)))
        weights = relative_weights(candidates.logits)
        probabilities = weights / weights.sum(dtype=np.float64)
        target = min(1.0, max(0.0, 2 * self._target - self._sum / self._weight))
        # Quadratic near the target, to distinguish probabilities close to it, and linear far from it.
        distances = np.abs(probabilities - target) / 0.3
        shares = relative_weights(-10 * distances**2 / (1 + distances)).cumsum(dtype=np.float64)
        u = self._uniform() if len(shares) > 1 else 0.0  # like llama.cpp
        position = min(int(shares.searchsorted(u * shares[-1], side="right")), len(shares) - 1)
        self._sum = float(probabilities[position]) + self._decay * self._sum
        self._weight = 1 + self._decay * self._weight
        return int(candidates.ids[position])
