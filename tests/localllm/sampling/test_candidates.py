"""The truncation steps and the draw compared with plain Python that sorts everything and adds term by term."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from localllm.sampling import candidates as steps
from localllm.sampling.candidates import AdaptiveP, Candidates, Mirostat2

SIZES = (1, 2, 40, 4096, 6000)
"""Sizes around the threshold for float32, where only the end of an order is sorted."""

Pairs = list[tuple[int, float]]
"""(id, logit), the likeliest first, and the lowest id first among equal ones."""


def random_logits(n: int, seed: int, scale: float = 3.0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def whole(logits: npt.NDArray[np.floating]) -> Candidates:
    return Candidates(np.arange(len(logits)), logits)


def in_order(candidates: Candidates) -> Pairs:
    pairs = zip(candidates.ids.tolist(), candidates.logits.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


def probabilities(pairs: Pairs) -> list[float]:
    weights = [math.exp(logit - pairs[0][1]) for _, logit in pairs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def plain_draw(pairs: Pairs, u: float) -> int:
    reached = 0.0
    for (id_, _), probability in zip(pairs, probabilities(pairs), strict=True):
        reached += probability
        if reached > u:
            return id_
    raise AssertionError("the probabilities do not reach u")


values = st.lists(st.sampled_from([-math.inf, -2.5, -0.0, 0.0, 1e-30, 1.0, 3e38]), min_size=1, max_size=60)


@given(values, st.integers(1, 70), st.sampled_from([np.float32, np.float64]))
def test_highest_is_a_stable_sort(items: list[float], count: int, dtype: type[np.floating]) -> None:
    array = np.array(items, dtype)
    expected = sorted((i for i, v in enumerate(array) if v > -math.inf), key=lambda i: (-array[i], i))
    assert steps.highest(array, count).tolist() == expected[:count]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 40, 300, 5000, 19_999])
@pytest.mark.parametrize("n_levels", [1, 7, 10**6])  # all equal, many equal, few equal
def test_highest_of_many(dtype: type[np.floating], count: int, n_levels: int) -> None:
    array = np.random.default_rng(count).integers(-n_levels, n_levels, 20_000).astype(dtype) / 3
    array[::5] = -math.inf
    expected = sorted(np.flatnonzero(array > -math.inf).tolist(), key=lambda i: (-array[i], i))
    assert steps.highest(array, count).tolist() == expected[:count]


def test_highest_finds_the_few_that_a_mask_leaves() -> None:
    array = np.full(20_000, -math.inf, np.float32)
    array[[19_999, 3, 77]] = [1, 5, 5]
    assert steps.highest(array, 40).tolist() == [3, 77, 19_999]


def test_min_p_of_1_keeps_all_that_equal_the_likeliest() -> None:
    assert steps.min_p(whole(np.array([1, 2, 2, 0, 2], np.float32)), 1.0).ids.tolist() == [1, 2, 4]


@pytest.mark.parametrize(("p", "kept"), [(0.0, 1), (0.1, 1), (0.3, 3), (0.35, 4), (0.8, 8), (0.95, 10)])
def test_top_p_on_equal_probabilities_keeps_the_lowest_ids(p: float, kept: int) -> None:
    assert steps.top_p(whole(np.zeros(10, np.float32)), p).ids.tolist() == list(range(kept))


def test_xtc_on_the_published_example() -> None:
    # The pull request that introduced it removes all tokens above the threshold except the last.
    logits = np.log(np.array([0.05, 0.4, 0.25, 0.05, 0.15, 0.1]))
    assert steps.xtc(whole(logits), 1.0, 0.12, lambda: 0.0).ids.tolist() == [0, 3, 4, 5]


@pytest.mark.parametrize(("u", "acts"), [(0.0, True), (0.29, True), (0.3, False), (0.99, False)])
def test_xtc_acts_with_its_probability(u: float, acts: bool) -> None:
    candidates = whole(np.zeros(4, np.float32))
    assert steps.xtc(candidates, 0.3, 0.1, lambda: u).ids.tolist() == ([3] if acts else [0, 1, 2, 3])


def test_xtc_never_leaves_only_impossible_tokens() -> None:
    logits = np.array([0, 1, -math.inf, -math.inf], np.float32)
    kept = steps.xtc(whole(logits), 1.0, 0.0, lambda: 0.0)
    assert kept.logits.max() == 0


@pytest.mark.parametrize("n", [4, 6000])
@pytest.mark.parametrize(("temperature", "share"), [(5e-324, 1.0), (1e308, 0.25)])
def test_temper_at_the_ends_of_the_range(n: int, temperature: float, share: float) -> None:
    logits = np.full(n, -math.inf, np.float32)
    logits[:4] = [-3e38, 3e38, 0, 1]
    weights = steps.relative_weights(steps.temper(whole(logits), temperature).logits)
    assert weights[1] / weights.sum() == pytest.approx(share)
    assert weights[4:].sum() == 0


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("scale", [0.0, 3.0, 300.0])
def test_draw_with_the_largest_number_gives_one_of_the_last(n: int, scale: float) -> None:
    candidates = whole(random_logits(n, n, scale))
    pairs = in_order(candidates)
    drawn = int(candidates.ids[steps.draw(candidates, 1 - 2**-53)])
    rank = [id_ for id_, _ in pairs].index(drawn)
    assert probabilities(pairs)[rank] > 0
    assert math.fsum(probabilities(pairs)[rank + 1 :]) < 1e-6


@given(
    st.lists(st.sampled_from([-math.inf, -800.0, -5.0, 0.0, 0.5]), min_size=1, max_size=30),
    st.floats(0, 1, exclude_max=True),
)
def test_draw_gives_no_token_of_probability_0(items: list[float], u: float) -> None:
    logits = np.array([*items, 3.0], np.float32)
    drawn = steps.draw(whole(logits), u)
    assert math.exp(float(logits[drawn]) - 3.0) > 0


@pytest.mark.parametrize("mass", [0.0, 0.3, 0.95, 1 - 2**-53])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_reach_over_a_whole_vocabulary(scale: float, mass: float) -> None:
    """The candidates of the mass and the next one are the highest scores, sorted at the end."""
    scores = random_logits(130_000, 4, scale)
    scores[::3] = -math.inf
    weights = steps.relative_weights(scores)
    found = steps.reach(scores, weights, mass)
    order = sorted(np.flatnonzero(weights > 0).tolist(), key=lambda i: (-scores[i], i))
    n_above, n = len(found.above), len(found.above) + len(found.positions)
    assert sorted(found.above.tolist()) == sorted(order[:n_above])
    assert found.positions.tolist() == order[n_above:n]
    shares = np.cumsum(weights[order], dtype=np.float64)[n_above:n] / weights.sum(dtype=np.float64)
    np.testing.assert_allclose(found.shares, shares, rtol=1e-6)
    assert found.shares[-1] > min(mass, 1 - 1e-6)


def test_mirostat_follows_its_formula() -> None:
    tau, eta = 3.0, 0.3
    rng = np.random.default_rng(3)
    numbers = rng.random(300).tolist()
    queue, same = iter(numbers), iter(numbers)
    mirostat = Mirostat2(tau, eta, lambda: next(queue))
    mu = 2 * tau
    for step in range(250):
        logits = random_logits(50, step, scale=[0.5, 3.0, 8.0][step % 3])
        pairs = in_order(whole(logits))
        probs = probabilities(pairs)
        allowed = [pair for pair, q in zip(pairs, probs, strict=True) if -math.log2(q) <= mu] or pairs[:1]
        expected = plain_draw(allowed, next(same)) if len(allowed) > 1 else allowed[0][0]
        surprise = -math.log2(dict(zip([id_ for id_, _ in allowed], probabilities(allowed), strict=True))[expected])
        mu -= eta * (surprise - tau)
        assert mirostat(whole(logits)) == expected
        assert mirostat.mu == pytest.approx(mu, abs=1e-9)


def test_mirostat_steers_the_surprise_to_its_target() -> None:
    rng = np.random.default_rng(8)
    mirostat = Mirostat2(2.0, 0.1, rng.random)
    logits = random_logits(2000, 1, scale=2.0)
    probs = np.exp(logits.astype(np.float64))
    surprises = []
    for _ in range(1500):
        allowed = probs / probs.sum()
        allowed = np.where(-np.log2(allowed) <= mirostat.mu, probs, 0)
        drawn = mirostat(whole(logits))
        surprises.append(-math.log2(allowed[drawn] / allowed.sum()))
    assert np.mean(surprises[300:]) == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("target", [0.0, 0.3, 1.0])
def test_adaptive_p_follows_its_formula(target: float) -> None:
    numbers = np.random.default_rng(9).random(200).tolist()
    queue, same, drawn = iter(numbers), iter(numbers), list[float]()
    adaptive = AdaptiveP(target, 0.9, lambda: next(queue))
    for step in range(200):
        pairs = in_order(whole(random_logits(30, step)))
        probs = probabilities(pairs)
        # The mean of all earlier draws, the last one first, preceded by many that met the target.
        weights = [0.9**i for i in range(step + 500)]
        mean = np.dot([*drawn[::-1], *[target] * 500], weights) / sum(weights)
        aim = min(max(2 * target - mean, 0), 1)
        scores = [5 - 10 * (d := abs(p - aim) / 0.3) ** 2 / (1 + d) for p in probs]
        shares = np.exp(scores).cumsum() / np.exp(scores).sum()
        at = int((shares <= next(same)).sum())
        assert adaptive(whole(random_logits(30, step))) == pairs[at][0]
        drawn.append(probs[at])


def test_mirostat_with_absurd_settings_still_draws() -> None:
    mirostat = Mirostat2(0.0, 1e308, lambda: 0.999)
    logits = np.array([0, 1, 1, -math.inf], np.float32)
    assert {mirostat(whole(logits)) for _ in range(20)} <= {1, 2}
