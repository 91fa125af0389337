"""Truncating the candidates for the next token, and drawing one of those that are left.

Every step is a pure function on ``Candidates``, but `Mirostat2` and `AdaptiveP`, which remember what they drew.
Vocabularies hold up to 262,144 tokens, so nothing sorts them whole: ``highest`` finds the first few thousand in two
passes, and where a step needs more of an order than that, ``reach`` sorts the end of it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.floating[Any]]

# Up to this many candidates are reckoned in float64; for a whole vocabulary that would take milliseconds, and
# sums are as good from float32 terms.
_FEW = 4096
# How many of the highest scores are looked at before all are; mostly they are enough.
_FIRST_LOOK = 256


class Candidates(NamedTuple):
    """Tokens still in the running, at least one of finite logit; of equal logits the lower id comes first."""

    ids: IntArray  # [n]
    logits: FloatArray  # [n]; -inf for a token of probability 0

    def take(self, positions: IntArray) -> Candidates:
        return Candidates(self.ids[positions], self.logits[positions])


def highest(values: FloatArray, count: int) -> IntArray:
    """The positions of the ``count`` highest values, highest first, equal ones by position.

    Values of -inf are left out, so there may be fewer.

    ``values``: ``[n]``, without NaN; ``count``: at least 1.
    """
    floor = _floor_of_highest(values, count) if count < len(values) else -math.inf
    positions = np.flatnonzero(values >= floor if floor > -math.inf else values > floor)
    return positions[_descending(values[positions])[:count]]


def _descending(values: FloatArray) -> IntArray:
    """The positions of all values, highest first, equal ones by position."""
    if values.dtype != np.float32:
        return np.argsort(-values, kind="stable")
    # One integer a value, which orders as (value falling, position rising): NumPy sorts integers an order of
    # magnitude faster than it argsorts.
    bits = _ascending_bits(values)
    keys = np.invert(bits, out=bits).astype(np.int64)
    keys <<= 32
    keys |= np.arange(len(values))
    keys.sort()
    keys &= 0xFFFFFFFF
    return keys


def _ascending_bits(values: FloatArray) -> npt.NDArray[np.int32]:
    """Integers in the same order as the float32 values, equal where these are."""
    bits = (values + 0).view(np.int32)  # + 0 makes one of the two zeros
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits


def _floor_of_highest(values: FloatArray, count: int) -> float:
    """A value that at least ``count`` values reach, and not many more."""
    n_groups = 16 * count
    depth = len(values) // n_groups
    if depth < 4:
        return float(np.partition(values, len(values) - count)[len(values) - count])
    # As many values reach the floor as groups hold one that does, or more; few groups hold two.  This is one
    # pass, where a partition of all values makes several.
    maxima = values[: depth * n_groups].reshape(depth, n_groups).max(axis=0)
    return float(np.partition(maxima, n_groups - count)[n_groups - count])


def _precision(values: FloatArray) -> type[np.float32] | type[np.float64]:
    return np.float64 if len(values) <= _FEW else np.float32


def relative_weights(logits: FloatArray) -> FloatArray:
    """``exp(logits - max)``: the probabilities but for their sum."""
    with np.errstate(over="ignore"):  # a difference beyond float32 is -inf, and that is a weight of 0
        weights: FloatArray = np.exp(np.subtract(logits, logits.max(), dtype=_precision(logits)))
    return weights


class Reach(NamedTuple):
    """How far down the scores a share of the weights lies: see `reach`."""

    above: IntArray  # positions, in their own order, that are passed for certain
    positions: IntArray  # those that come next, from the highest score on, equal ones by position
    shares: npt.NDArray[np.float64]  # of the total weight up to and with each of `positions`

    def until(self, mass: float, *, side: Literal["left", "right"]) -> IntArray:
        """The positions down to the one whose share reaches ("left") or exceeds ("right") ``mass``."""
        kept = self.positions[: int(self.shares.searchsorted(mass, side)) + 1]
        return np.concatenate([self.above, kept]) if len(self.above) else kept


def _reach_likeliest(logits: FloatArray, mass: float) -> Reach:
    """`reach` from the likeliest on."""
    weights = relative_weights(logits)
    n = len(logits)
    if n <= _FEW:
        return reach(logits, weights, mass)
    positions = highest(logits, _FIRST_LOOK)
    total = weights.sum(dtype=np.float64)
    shares = np.cumsum(weights[positions], dtype=np.float64) / total
    if shares[-1] > mass:
        return Reach(np.empty(0, np.intp), positions, shares)
    # All that weigh less than this have a share below 1 - mass together: the end comes before the first of them.
    positions = np.flatnonzero(weights >= np.float32((1 - mass) * total / n))
    logits, weights = logits[positions], weights[positions]
    part = weights.sum(dtype=np.float64) / total
    above, rest, shares = reach(logits, weights, min(mass / part, 1 - 2**-53))
    return Reach(positions[above], positions[rest], shares * part)


def reach(scores: FloatArray, weights: FloatArray, mass: float) -> Reach:
    """Goes down the scores until the share of the weights exceeds ``mass``.  ``scores``: ``[n]``, without NaN;
    ``weights``: ``[n]``, not negative; ``mass``: 0 <= mass < 1.  Returns the last share exceeds ``mass``, but for
    rounding.  There may be more positions than it takes."""
    none = np.empty(0, np.intp)
    if len(scores) > _FEW:
        return _reach_by_buckets(scores, weights, mass)
    positions = highest(scores, len(scores))
    sums = np.cumsum(weights[positions], dtype=np.float64)
    return Reach(none, positions, sums / sums[-1])


def _reach_by_buckets(scores: FloatArray, weights: FloatArray, mass: float) -> Reach:
    """`reach` for many scores: sorts only those of the same upper 16 bits, among which the end must be."""
    buckets = (_ascending_bits(scores.astype(np.float32, copy=False)) >> 16).astype(np.intp)
    buckets += 1 << 15
    sums = np.bincount(buckets, weights, 1 << 16)[::-1].cumsum()  # from the highest scores on
    # What rounding makes of the last shares must not lead to scores without any weight.
    last = int(np.searchsorted(sums, min(mass, 1 - 1e-9) * sums[-1], side="right"))
    bucket = len(sums) - 1 - last
    positions = np.flatnonzero(buckets == bucket)
    positions = positions[weights[positions] > 0]
    positions = positions[_descending(scores[positions])]
    before = sums[last - 1] if last else 0.0
    shares = (before + np.cumsum(weights[positions], dtype=np.float64)) / sums[-1]
    return Reach(np.flatnonzero(buckets > bucket), positions, shares)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keeps those whose logits are within ``n`` standard deviations of the highest (Tang et al. 2024)."""
    logits = candidates.logits
    floor = logits.max() - n * logits[logits > -math.inf].std(dtype=np.float64)
    return candidates.take(np.flatnonzero(logits >= floor))


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keeps the ``k`` likeliest."""
    return candidates.take(highest(candidates.logits, k)) if k < len(candidates.ids) else candidates


def typical(candidates: Candidates, p: float) -> Candidates:
    """Keeps those whose surprise is nearest to the entropy, until their probabilities exceed ``p``.

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
    """Keeps the likeliest, until their probabilities reach ``p`` (Holtzman et al. 2019)."""
    return candidates.take(_reach_likeliest(candidates.logits, p).until(p, side="left"))


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keeps those at least ``p`` times as likely as the likeliest (Nguyen et al. 2024)."""
    # A Python float leaves the comparison in float32, where numpy's own would make float64 of the whole vocabulary.
    floor = float(candidates.logits.max()) + math.log(p)
    return candidates.take(np.flatnonzero(candidates.logits >= floor))


def xtc(candidates: Candidates, probability: float, threshold: float, uniform: Callable[[], float]) -> Candidates:
    """Exclude top choices: of those at least ``threshold`` likely removes all but the least likely.

    It acts with the given probability.  Designed by p-e-w, oobabooga/text-generation-webui pull request 6335.
    """
    if len(candidates.ids) < 2 or uniform() >= probability:
        return candidates
    weights = relative_weights(candidates.logits)
    shares = weights / weights.sum(dtype=np.float64)
    viable = np.flatnonzero((shares >= threshold) & (shares > 0))
    if len(viable) < 2:
        return candidates
    spared = viable[::-1][np.argmin(shares[viable[::-1]])]  # of equal ones the last
    kept = np.ones(len(shares), np.bool_)
    kept[viable] = False
    kept[spared] = True
    return candidates.take(np.flatnonzero(kept))


def temper(candidates: Candidates, temperature: float) -> Candidates:
    """Divides the logits by the temperature, shifted so that the largest is 0 and none overflows upwards."""
    logits = candidates.logits
    # float32 would make 0 or infinity of the temperatures that nobody means.
    precision = _precision(logits) if 0.01 <= temperature <= 100 else np.float64
    with np.errstate(over="ignore"):
        tempered: FloatArray = np.subtract(logits, logits.max(), dtype=precision)
        tempered /= temperature
        return Candidates(candidates.ids, tempered.astype(_precision(logits), copy=False))


def draw(candidates: Candidates, u: float) -> int:
    """The position drawn by ``u``, 0 <= u < 1.

    It is the first, from the likeliest on and of equal ones from the lowest id, at which the running sum of
    the probabilities exceeds ``u``; so it is never one of probability 0.
    """
    _, positions, shares = _reach_likeliest(candidates.logits, u)
    return int(positions[min(int(shares.searchsorted(u, side="right")), len(positions) - 1)])


class Mirostat2:
    """Mirostat 2.0 (Basu et al. 2020): holds the surprise of the text near a target.

    Draws among the tokens whose surprise is at most ``mu`` bits, then lowers ``mu`` by ``eta`` times what the
    drawn token's surprise exceeds ``tau`` by.  As in llama.cpp, that surprise is taken in the distribution
    that was drawn from; the paper takes it before truncation.
    """

    def __init__(self, tau: float, eta: float, uniform: Callable[[], float]) -> None:
        self._tau = tau
        self._eta = eta
        self._uniform = uniform
        self.mu = 2 * tau  # the greatest surprise allowed to the next token, in bits; at first twice ``tau``

    def __call__(self, candidates: Candidates) -> int:
        """The id drawn."""
        logits = candidates.logits
        log_total = float(logits.max()) + math.log(relative_weights(logits).sum(dtype=np.float64))
        kept = np.flatnonzero(logits >= np.float64(log_total - self.mu * math.log(2)))
        if not len(kept):
            kept = np.array([logits.argmax()])
        candidates = candidates.take(kept)
        chosen = draw(candidates, self._uniform() if len(kept) > 1 else 0.0)  # as llama.cpp
        weights = relative_weights(candidates.logits)
        surprise = -math.log2(weights[chosen] / weights.sum(dtype=np.float64))
        self.mu -= self._eta * (surprise - self._tau)
        return int(candidates.ids[chosen])


class AdaptiveP:
    """Adaptive-p (https://github.com/ggml-org/llama.cpp/pull/17927): favours tokens near a target probability.

    The target of each draw makes up for what the tokens drawn before missed it by, the last ones most: these weigh
    ``decay`` to the power of how long ago they were drawn.
    """

    def __init__(self, target: float, decay: float, uniform: Callable[[], float]) -> None:
        self._target, self._decay, self._uniform = target, decay, uniform
        self._weight = 1 / (1 - decay)
        self._sum = target * self._weight  # of the probabilities, as if all had met the target before

    def __call__(self, candidates: Candidates) -> int:
        """The id drawn."""
        candidates = candidates.take(highest(candidates.logits, len(candidates.ids)))
        weights = relative_weights(candidates.logits)
        probabilities = weights / weights.sum(dtype=np.float64)
        target = min(1.0, max(0.0, 2 * self._target - self._sum / self._weight))
        # Quadratic near the target, to tell apart what is near it, and linear far from it.
        distances = np.abs(probabilities - target) / 0.3
        shares = relative_weights(-10 * distances**2 / (1 + distances)).cumsum(dtype=np.float64)
        u = self._uniform() if len(shares) > 1 else 0.0  # as llama.cpp
        chosen = min(int(shares.searchsorted(u * shares[-1], side="right")), len(shares) - 1)
        self._sum = float(probabilities[chosen]) + self._decay * self._sum
        self._weight = 1 + self._decay * self._weight
        return int(candidates.ids[chosen])
