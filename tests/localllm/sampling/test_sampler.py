"""Settings, the whole chain, greedy, log-probabilities, processors, random numbers and errors."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections import Counter
from statistics import pstdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from localllm.errors import ModelError, UsageError
from localllm.options.declared import CheckedOptions, LoadOptions, declared
from localllm.sampling import Sampler, Sampling, UniformNumbers, greedy

Logits = npt.NDArray[np.float32]

OFF = Sampling(temperature=1, top_k=0, top_p=1, min_p=0)
"""Draws from the model's own distribution."""


def random_logits(n: int, seed: int, scale: float = 3.0) -> Logits:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


# --- settings ---


def test_defaults_are_llama_cpps() -> None:
    s = Sampling()
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p) == (0.8, 40, 0.95, 0.05, 1.0)
    assert (s.repeat_penalty, s.repeat_last_n, s.presence_penalty, s.frequency_penalty) == (1.0, 64, 0.0, 0.0)
    assert (s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_penalty_last_n) == (0.0, 1.75, 2, -1)
    assert s.dry_sequence_breakers == ("\n", ":", '"', "*")
    assert (s.xtc_probability, s.xtc_threshold) == (0.0, 0.1)
    assert (s.mirostat, s.mirostat_tau, s.mirostat_eta) == (0, 5.0, 0.1)
    assert (s.logit_bias, s.seed, s.logprobs, s.processors) == ({}, None, None, ())


NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "0.5", [0.5], 1j, 10**400, np.ones(3)]
NOT_PROBABILITIES = [*NOT_NUMBERS, -1e-9, 1.0001, 2]
NOT_POSITIVE = [*NOT_NUMBERS, -1e-9, -1]
NOT_COUNTS = [-1, 1.0, True, "40", np.ones(2, int)]
NOT_WINDOWS = [-2, 64.0, False, "64"]
BAD: dict[str, list[Any]] = {
    "temperature": NOT_POSITIVE,
    "top_k": NOT_COUNTS,
    "top_p": NOT_PROBABILITIES,
    "min_p": NOT_PROBABILITIES,
    "typical_p": NOT_PROBABILITIES,
    "repeat_penalty": [*NOT_NUMBERS, 0, -1.0],
    "repeat_last_n": NOT_WINDOWS,
    "presence_penalty": NOT_NUMBERS,
    "top_n_sigma": NOT_NUMBERS,
    "frequency_penalty": NOT_NUMBERS,
    "json_schema": ["{", "7", 7, [1]],
    "regex": ["", 7, b"a"],
    "grammar": [" ", 7],
    "dry_multiplier": NOT_POSITIVE,
    "dry_base": [*NOT_NUMBERS, 0.999, 0],
    "dry_allowed_length": NOT_COUNTS,
    "dry_penalty_last_n": NOT_WINDOWS,
    "dry_sequence_breakers": ["\n", b"\n", ("",), ("\n", 5), 7],
    "xtc_probability": NOT_PROBABILITIES,
    "xtc_threshold": NOT_PROBABILITIES,
    "mirostat": [1, 3, -1, 2.0, True, "2"],
    "mirostat_tau": NOT_POSITIVE,
    "mirostat_eta": NOT_POSITIVE,
    "adaptive_target": [*NOT_NUMBERS, -1.1, 1.1],
    "adaptive_decay": [*NOT_NUMBERS, -0.1, 1, 0.995],
    "logit_bias": [[(1, 2.0)], {-1: 0}, {"1": 0}, {1.0: 0}, {True: 0}, {1: math.nan}, {1: math.inf}],
    "seed": [-1, 1 << 64, 1.0, True, "7"],
    "logprobs": [-1, 1.0, True, "5"],
    "post_sampling_probs": [1, 0, "yes"],
    "processors": [5, (None,), ("f",), "f"],
}


def test_none_is_the_default() -> None:
    names = declared(Sampling)
    assert Sampling(**dict.fromkeys(names)) == Sampling()
    given = CheckedOptions.of(dict.fromkeys([*names, *declared(CheckedOptions)]))
    assert given == CheckedOptions(speculate=None)  # None has a separate meaning
    own = Sampling(temperature=0.1, seed=5)
    assert CheckedOptions.of({"sampling": own, "temperature": None}).sampling == own
    assert LoadOptions(**dict.fromkeys(declared(LoadOptions))) == LoadOptions(parallel=None)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_setting_is_named_with_its_value(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(UsageError) as caught:
            Sampling(**{name: value})
        message = str(caught.value)
        assert message.startswith(f"{name} is ")
        assert ", but must be " in message
        assert "\n" not in message
        assert len(message) < 200
        if isinstance(value, float):
            assert repr(value) in message


def test_every_setting_is_checked() -> None:
    assert set(BAD) == {field.name for field in dataclasses.fields(Sampling)}


def test_numbers_of_numpy_and_ends_of_ranges_are_taken_and_kept_plain() -> None:
    bias: dict[Any, Any] = {np.int64(3): np.float32(-1.5), 4: -math.inf}
    given: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(0), "top_p": 0, "min_p": 1}
    given |= {
        "typical_p": 0.0,
        "repeat_last_n": -1,
        "dry_base": 1,
        "xtc_threshold": 1.0,
        "seed": (1 << 64) - 1,
    }
    given |= {"logit_bias": bias, "dry_sequence_breakers": ["###"], "processors": [lambda _, logits: logits]}
    s = Sampling(**given)
    assert type(s.temperature) is float
    assert type(s.top_p) is float
    assert type(s.top_k) is int
    assert s.logit_bias == {3: -1.5, 4: -math.inf}
    assert {type(key) for key in s.logit_bias} == {int}
    assert s.dry_sequence_breakers == ("###",)
    bias[np.int64(5)] = np.float32(1)
    assert 5 not in s.logit_bias


def test_settings_are_values() -> None:
    a, b = Sampling(top_k=5, logit_bias={1: 2}), Sampling(top_k=5, logit_bias={1: 2.0})
    assert a == b
    assert hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a
    assert a.replace(top_k=6) == Sampling(top_k=6, logit_bias={1: 2})
    assert a.top_k == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.top_k = 7  # type: ignore[misc]


def test_replace_checks_names_and_values() -> None:
    with pytest.raises(
        UsageError, match=r"'temprature' is not a sampling setting; the settings are temperature, top_k"
    ):
        Sampling().replace(temprature=1)
    with pytest.raises(UsageError, match=r"top_p is 1\.5, but must be a number from 0 to 1"):
        Sampling().replace(top_p=1.5)


# --- greedy ---


@pytest.mark.parametrize("n", [1, 2, 7, 50_000])
def test_greedy_takes_the_largest_logit(n: int) -> None:
    logits = random_logits(n, n)
    expected = max(range(n), key=lambda i: logits[i])
    assert Sampler(greedy, n)(logits).id == expected


def test_greedy_takes_the_lowest_of_equal_ids_whatever_else_is_set() -> None:
    s = greedy.replace(typical_p=0.1, xtc_probability=1, xtc_threshold=0, mirostat=2, top_p=0.1, top_k=1)
    assert Sampler(s, 5)(np.array([0, 2, -math.inf, 2, 1], np.float32)).id == 1


def test_greedy_heeds_bias_and_penalties() -> None:
    sampler = Sampler(greedy.replace(logit_bias={2: 1.5}, presence_penalty=1.0), 3)
    logits = np.array([1.2, 1.0, 0.3], np.float32)
    chosen = []
    for _ in range(4):
        chosen.append(sampler(logits).id)
        sampler.accept(chosen[-1])
    # 0.3 + 1.5 = 1.8; penalised once to 0.8; then 1.2 to 0.2; then 1.0 to 0.0; and presence counts but once.
    assert chosen == [2, 0, 1, 2]


# --- the whole chain ---


def plain_sample(logits: Logits, s: Sampling, text: list[int], uniform: Any, chance: Any) -> int:
    """Apply the chain without DRY in plain Python: sort everything, one term after another."""
    scores = [float(logit) for logit in logits]
    for id_, bias in s.logit_bias.items():
        scores[id_] += bias
    recent = text if s.repeat_last_n < 0 else text[max(0, len(text) - s.repeat_last_n) :]
    for id_, count in Counter(recent).items():
        scores[id_] = scores[id_] / s.repeat_penalty if scores[id_] > 0 else scores[id_] * s.repeat_penalty
        scores[id_] -= s.presence_penalty + count * s.frequency_penalty

    def probs() -> list[float]:
        weights = [math.exp(scores[i] - scores[left[0]]) for i in left]
        total = math.fsum(weights)
        return [weight / total for weight in weights]

    def reach(probabilities: list[float], p: float, *, strictly: bool) -> int:
        reached = 0.0
        for n, probability in enumerate(probabilities, start=1):
            reached += probability
            if reached > p or (reached == p and not strictly):
                return n
        return len(probabilities)

    left = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if s.top_n_sigma > 0:
        left = [i for i in left if scores[i] >= max(scores) - s.top_n_sigma * pstdev(scores)]
    if s.top_k:
        left = left[: s.top_k]
    if s.typical_p < 1:
        ps = probs()
        entropy = -sum(p * math.log(p) for p in ps if p)
        by_typicality = sorted(range(len(left)), key=lambda i: abs(-math.log(ps[i]) - entropy) if ps[i] else 9e9)
        n = reach([ps[i] for i in by_typicality], s.typical_p, strictly=True)
        left = [left[i] for i in sorted(by_typicality[:n])]
    if s.top_p < 1:
        left = left[: reach(probs(), s.top_p, strictly=False)]
    ps = probs()
    left = [i for i, p in zip(left, ps, strict=True) if p >= s.min_p * ps[0]]
    if s.xtc_probability and s.xtc_threshold <= 0.5 and len(left) > 1 and chance() < s.xtc_probability:
        n_viable = sum(p >= s.xtc_threshold for p in probs())
        left = left[max(0, n_viable - 1) :]
    scores = [score / s.temperature for score in scores]
    return left[reach(probs(), uniform(), strictly=True) - 1]


def random_settings(rng: np.random.Generator, n_vocab: int) -> Sampling:
    def one_of(*options: float) -> Any:
        return options[rng.integers(len(options))]

    return Sampling(
        temperature=float(rng.uniform(0.1, 3)),
        top_k=one_of(0, 0, 1, 2, 20, 10**6),
        top_p=one_of(1.0, 1.0, 0.0, rng.random(), 1 - 1e-4),
        min_p=one_of(0.0, 0.0, 0.1 * rng.random(), 0.999),
        top_n_sigma=one_of(-1.0, 0.0, 0.0, rng.uniform(0, 3)),
        typical_p=one_of(1.0, 1.0, rng.random()),
        repeat_penalty=one_of(1.0, rng.uniform(0.5, 2)),
        repeat_last_n=one_of(-1, 0, 1, 5),
        presence_penalty=one_of(0.0, rng.uniform(-2, 2)),
        frequency_penalty=one_of(0.0, rng.uniform(-2, 2)),
        xtc_probability=one_of(0.0, 0.5, 1.0),
        xtc_threshold=one_of(0.02, 0.1, 0.3, 0.6),
        logit_bias={int(id_): float(rng.normal()) for id_ in rng.integers(0, n_vocab, one_of(0, 3))},
        seed=int(rng.integers(1 << 32)),
    )


@pytest.mark.parametrize("n_vocab", [2, 9, 300, 4200])
def test_the_chain_equals_a_plain_one(n_vocab: int) -> None:
    rng = np.random.default_rng(n_vocab)
    disagreements = 0
    for _ in range({2: 100, 9: 100, 300: 20, 4200: 5}[n_vocab]):  # thousands of tokens take seconds
        s = random_settings(rng, n_vocab)
        text = rng.integers(0, n_vocab, rng.integers(0, 8)).tolist()
        sampler = Sampler(s, n_vocab, prompt_ids=text)
        assert s.seed is not None
        uniform, chance = UniformNumbers(s.seed), UniformNumbers(s.seed, is_single=True)
        for _ in range(5):
            logits = (rng.standard_normal(n_vocab) * rng.choice([0.3, 3, 10])).astype(np.float32)
            choice = sampler(logits)
            disagreements += choice.id != plain_sample(logits, s, text, uniform, chance)
            sampler.accept(choice.id)
            text.append(choice.id)
    # Above 4096 tokens weights are float32: a number within 1e-7 of a border may give another token.
    assert disagreements <= (n_vocab > 4096)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.6}, [0, 1]),
        ({"min_p": 0.45}, [0, 1, 2]),
        ({"top_n_sigma": 1.0}, [0, 1, 2]),
        ({"top_n_sigma": 1.0, "logit_bias": {5: -math.inf}}, [0, 1, 2]),
        ({"typical_p": 0.3}, [1, 2]),
        ({"logit_bias": {0: -math.inf, 5: -math.inf}}, [1, 2, 3, 4]),
    ],
)
def test_draws_have_the_frequencies_they_should(changes: dict[str, Any], kept: list[int]) -> None:
    probabilities = np.array([0.4, 0.25, 0.2, 0.08, 0.05, 0.02])
    s = OFF.replace(seed=12, **changes)
    sampler = Sampler(s, 6)
    logits = np.log(probabilities).astype(np.float32)
    n = 3000
    counts = Counter(sampler(logits).id for _ in range(n))
    expected = probabilities[kept] ** (1 / s.temperature)
    expected *= n / expected.sum()
    assert set(counts) <= set(kept)
    chi_squared = sum((counts[id_] - e) ** 2 / e for id_, e in zip(kept, expected, strict=True))
    assert chi_squared < 22  # exceeded once in 2,000 at 5 degrees of freedom, and less often at fewer


def test_xtc_acts_as_often_as_it_should() -> None:
    sampler = Sampler(OFF.replace(xtc_probability=0.3, xtc_threshold=0.1, seed=4), 3)
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    counts = Counter(sampler(logits).id for _ in range(3000))
    expected = [3000 * p for p in (0.7 * 0.5, 0.7 * 0.3, 0.7 * 0.2 + 0.3)]
    assert sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected)) < 15.2  # 1 in 2,000 at 2 degrees


def test_dry_and_the_prompt() -> None:
    # "1 2 3" was followed by 4; after "1 2 3" again, 4 loses 0.5 * 2 ** (3 - 2) = 1.
    s = greedy.replace(dry_multiplier=0.5, dry_base=2.0, dry_sequence_breakers=())
    logits = np.array([0, 0, 0, 0, 1.0, 0.5, 0.25, 0.0], np.float32)
    sampler = Sampler(s, 8, prompt_ids=[1, 2, 3, 4, 7, 1, 2])
    assert sampler(logits).id == 4
    sampler.accept(3)
    assert sampler(logits).id == 5
    sampler.accept(0)
    assert sampler(logits).id == 4


def test_dry_stops_at_a_breaker() -> None:
    s = greedy.replace(dry_multiplier=0.5, dry_base=2.0, dry_sequence_breakers=("stop",))
    logits = np.array([0, 0, 0, 0, 1.0, 0.5], np.float32)
    pieces = [b"a", b"b", b"st", b"op", b"x", b"y"]
    prompt = [0, 1, 0, 1, 4, 0, 1, 0, 1]
    assert Sampler(s, 6, prompt_ids=prompt, token_bytes=pieces.__getitem__)(logits).id == 5
    broken = [0, 1, 2, 3, 1, 4, 0, 1, 2, 3, 1]
    assert Sampler(s, 6, prompt_ids=broken, token_bytes=pieces.__getitem__)(logits).id == 4


def test_dry_breakers_need_the_text_of_tokens() -> None:
    with pytest.raises(UsageError, match="give Sampler token_bytes"):
        Sampler(Sampling(dry_multiplier=0.8), 6)
    Sampler(Sampling(dry_multiplier=0.8, dry_penalty_last_n=0), 6)


def test_mirostat_takes_the_place_of_the_truncations() -> None:
    s = Sampling(mirostat=2, mirostat_tau=3, seed=1, top_k=1, typical_p=0.01, xtc_probability=1, xtc_threshold=0)
    sampler = Sampler(s, 8)
    assert len({sampler(np.zeros(8, np.float32)).id for _ in range(300)}) == 8


# --- random numbers ---


def test_random_numbers_are_cpps() -> None:
    uniform = UniformNumbers(5489)
    number = [uniform() for _ in range(5000)][-1]
    assert int(number * 2**32) == 4123659995  # the 10,000th word, by the C++ standard ([rand.predef])
    single = UniformNumbers(5489, is_single=True)
    assert [single() for _ in range(10_000)][-1] == np.float32(4123659995) / np.float32(2**32)


def test_random_numbers_are_of_the_whole_seed() -> None:
    seeds = [0, 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 63]
    assert len({UniformNumbers(seed)() for seed in seeds}) == len(seeds)


def test_random_numbers_are_below_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.random, "RandomState", lambda seed: SimpleNamespace(bytes=lambda n: b"\xff" * n))
    for is_single in (False, True):
        assert 1 - 1e-7 < UniformNumbers(0, is_single=is_single)() < 1


#: Draws of llama.cpp's samplers (llama-cpp-python 0.3.36) for the same logits, by settings and seed.
LLAMA_CPPS: list[tuple[dict[str, Any], int, list[int]]] = [
    ({}, 42, [4, 47, 31, 0, 24, 2, 10, 47, 5, 31, 23, 23, 47, 17, 17]),
    ({}, 4294967294, [24, 10, 31, 31, 24, 2, 10, 0, 7, 31, 23, 23, 9, 6, 32]),
    ({"xtc_probability": 0.5}, 42, [28, 47, 31, 13, 24, 2, 10, 47, 11, 14, 23, 39, 47, 44, 17]),
    ({"xtc_probability": 0.5}, 4294967294, [24, 14, 31, 31, 24, 2, 10, 20, 7, 31, 23, 20, 9, 6, 22]),
    ({"mirostat": 2, "mirostat_tau": 2.0}, 42, [43, 47, 31, 0, 24, 2, 10, 47, 5, 31, 23, 0, 9, 28, 44]),
    ({"mirostat": 2, "mirostat_tau": 2.0}, 4294967294, [24, 0, 31, 31, 24, 2, 10, 0, 7, 31, 23, 23, 9, 17, 23]),
    ({"adaptive_target": 0.3}, 42, [3, 6, 31, 0, 36, 17, 21, 23, 7, 14, 25, 0, 47, 17, 27]),
    ({"adaptive_target": 0.3}, 4294967294, [24, 10, 31, 0, 36, 17, 8, 23, 7, 46, 18, 0, 47, 44, 44]),
]


@pytest.mark.parametrize(("given", "seed", "expected"), LLAMA_CPPS)
def test_a_seed_gives_what_it_gives_in_llama_cpp(given: dict[str, Any], seed: int, expected: list[int]) -> None:
    sampler = Sampler(Sampling(seed=seed, **given), 50)
    logits = [(np.random.RandomState(step).standard_normal(50) * 3).astype(np.float32) for step in range(15)]
    assert [sampler(each).id for each in logits] == expected


def test_a_seed_gives_the_same_ids_again() -> None:
    def ids(s: Sampling) -> list[int]:
        sampler = Sampler(s, 100)
        return [sampler(random_logits(100, step)).id for step in range(50)]

    assert ids(OFF.replace(seed=7)) == ids(OFF.replace(seed=7))
    assert ids(OFF.replace(seed=7)) != ids(OFF.replace(seed=8))


def test_a_fresh_seed_can_be_read_and_repeated() -> None:
    first, second = Sampler(OFF, 1000), Sampler(OFF, 1000)
    assert first.seed != second.seed
    again = Sampler(OFF.replace(seed=first.seed), 1000)
    logits = np.zeros(1000, np.float32)
    assert [first(logits).id for _ in range(20)] == [again(logits).id for _ in range(20)]


# --- log-probabilities ---


@pytest.mark.parametrize("n", [5, 6000])
@pytest.mark.parametrize("s", [greedy, Sampling(seed=3), OFF.replace(seed=3, logit_bias={2: 5.0})])
def test_logprobs_are_the_models_own(s: Sampling, n: int) -> None:
    logits = random_logits(n, 2)
    exact = logits.astype(np.float64)
    exact = exact - exact.max() - math.log(np.exp(exact - exact.max()).sum())
    best = sorted(range(n), key=lambda i: -exact[i])[:3]
    choice = Sampler(s.replace(logprobs=3), n)(logits)
    assert choice.logprob == pytest.approx(exact[choice.id], abs=1e-6)
    assert [id_ for id_, _ in choice.top] == best
    assert [logprob for _, logprob in choice.top] == pytest.approx(exact[best].tolist(), abs=1e-6)


def test_probabilities_after_sampling() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
    settings_ = Sampling(top_k=3, top_p=1, min_p=0, temperature=0.5, logprobs=9, post_sampling_probs=True, seed=1)
    choice = Sampler(settings_, 4)(logits)
    total = 0.4**2 + 0.3**2 + 0.2**2
    expected = {1: 0.4**2 / total, 2: 0.3**2 / total, 3: 0.2**2 / total}
    assert {id_: math.exp(p) for id_, p in choice.top} == pytest.approx(expected)
    assert math.exp(choice.logprob or 0) == pytest.approx(expected[choice.id])
    only = Sampler(settings_.replace(temperature=0), 4)(logits)
    assert (only.id, only.logprob, only.top) == (1, 0.0, ((1, 0.0),))


def test_how_many_logprobs() -> None:
    logits = np.array([0, -math.inf, 0, 1], np.float32)
    assert Sampler(greedy, 4)(logits)[1:] == (None, ())
    none = Sampler(greedy.replace(logprobs=0), 4)(logits)
    assert none.logprob == pytest.approx(1 - math.log(2 + math.e))
    assert none.top == ()
    assert [id_ for id_, _ in Sampler(greedy.replace(logprobs=99), 4)(logits).top] == [3, 0, 2]


# --- logits processors ---


def test_processors_see_the_text_and_act_in_turn() -> None:
    seen: list[list[int]] = []

    def forbid_last(ids: npt.NDArray[np.int32], logits: Logits) -> Logits:
        assert ids.dtype == np.int32
        seen.append(ids.tolist())
        logits[ids[-1]] = -math.inf
        return logits

    def double(ids: npt.NDArray[np.int32], logits: Logits) -> Logits:
        return logits * np.float32(2)

    # The bias comes first: (1 + 0.75) * 2 - presence 0.6 = 2.9 for token 1, and (1.3) * 2 = 2.6 for token 2.
    s = greedy.replace(processors=(forbid_last, double), logit_bias={1: 0.75}, presence_penalty=0.6)
    logits = np.array([9, 1, 1.3, 0], np.float32)
    kept = logits.copy()
    logits.flags.writeable = False
    sampler = Sampler(s, 4, prompt_ids=[1, 0])
    assert sampler(logits).id == 1
    sampler.accept(3)
    assert sampler(logits).id == 0
    assert seen == [[1, 0], [1, 0, 3]]
    assert (logits == kept).all()


def test_a_processor_may_change_its_logits_in_place() -> None:
    def forbid(ids: npt.NDArray[np.int32], logits: Logits) -> Logits:
        logits[:2] = -math.inf
        return logits

    logits = np.array([3, 2, 1], np.float32)
    choice = Sampler(greedy.replace(processors=(forbid,), logprobs=1), 3)(logits)
    assert choice.id == 2
    assert choice.top[0][0] == 0
    assert logits.tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "NoneType instead of a float32 array"),
        ([0.0, 1.0, 2.0], "list instead"),
        (np.zeros(3), "float64 of shape"),
        (np.zeros(4, np.float32), r"float32 of shape \(4,\), but must return float32 of shape \(3,\)"),
        (np.zeros((1, 3), np.float32), r"of shape \(1, 3\)"),
        (np.array([0, math.nan, math.nan], np.float32), "hold NaN, first for token 1"),
        (np.array([0, 1, math.inf], np.float32), "infinite for token 2"),
        (np.full(3, -math.inf, np.float32), "-inf for every token"),
    ],
)
def test_what_a_processor_may_not_return(result: Any, words: str) -> None:
    def broken(ids: npt.NDArray[np.int32], logits: Logits) -> Logits:
        return result  # type: ignore[no-any-return]

    sampler = Sampler(greedy.replace(processors=(broken,)), 3)
    with pytest.raises(UsageError, match=words) as caught:
        sampler(np.zeros(3, np.float32))
    assert str(caught.value).startswith("the logits processor broken returned ")


# --- bad input ---


@pytest.mark.parametrize("s", [greedy, Sampling(), OFF, Sampling(mirostat=2), greedy.replace(logit_bias={0: 1})])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([0, math.nan, math.inf], "hold NaN, first for token 1"),
        ([math.inf, 0, -math.inf], "infinite for token 0"),
        ([-math.inf] * 3, "-inf for every token"),
    ],
)
@pytest.mark.parametrize("n", [3, 6000])
def test_logits_that_cannot_be_sampled(s: Sampling, bad: list[float], words: str, n: int) -> None:
    logits = np.full(n, -math.inf, np.float32)
    logits[:3] = bad
    with pytest.raises(ModelError, match=f"the model's logits .*{words}"):
        Sampler(s, n)(logits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logit_bias": {0: -math.inf, 1: -math.inf}}, "-inf for every token"),
        ({"logit_bias": {1: 1e300}}, "infinite for token 1"),
        ({"repeat_penalty": 1e-300}, "infinite for token 1"),
        ({"repeat_penalty": 1e308, "presence_penalty": -1e308, "frequency_penalty": -1e308}, "NaN|infinite"),
    ],
)
def test_settings_that_leave_nothing_to_sample(changes: dict[str, Any], words: str) -> None:
    sampler = Sampler(Sampling(**changes), 2, prompt_ids=[0, 1, 1])
    with pytest.raises(UsageError, match=f"after logit_bias, processors, penalties, DRY and grammar .*{words}"):
        sampler(np.array([-2, 3], np.float32))


@pytest.mark.parametrize("shape", [(4,), (6,), (1, 5), ()])
def test_logits_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="given to a sampler for 5 tokens"):
        Sampler(greedy, 5)(np.zeros(shape, np.float32))


@pytest.mark.parametrize("id_", [-1, 5, 10**12])
def test_ids_outside_the_vocabulary(id_: int) -> None:
    with pytest.raises(UsageError, match=f"token {id_} in prompt_ids is outside the vocabulary of 5 tokens"):
        Sampler(greedy, 5, prompt_ids=[0, id_])
    with pytest.raises(UsageError, match=f"token {id_} is outside"):
        Sampler(greedy, 5).accept(id_)
    if id_ >= 0:
        with pytest.raises(UsageError, match=f"token {id_} in logit_bias"):
            Sampler(greedy.replace(logit_bias={id_: 1.0}), 5)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.data())
def test_no_settings_give_a_token_of_probability_0_or_change_the_logits(seed: int, data: st.DataObject) -> None:
    n_vocab = data.draw(st.sampled_from([1, 2, 7, 60]))
    values = st.sampled_from([-math.inf, -3e37, -90.0, -1.0, 0.0, 1.0, 3e37])
    logits = np.array(data.draw(st.lists(values, min_size=n_vocab, max_size=n_vocab)), np.float32)
    logits[seed % n_vocab] = 0.5
    kept = logits.copy()
    s = random_settings(np.random.default_rng(seed), n_vocab).replace(
        temperature=data.draw(st.sampled_from([0.0, 5e-324, 0.1, 1.0, 1e308])),
        mirostat=data.draw(st.sampled_from([0, 0, 2])),
        logit_bias={},
        logprobs=2,
    )
    sampler = Sampler(s, n_vocab, prompt_ids=[0])
    for _ in range(3):
        choice = sampler(logits)
        assert logits[choice.id] > -math.inf
        assert choice.logprob is not None
        assert not math.isnan(choice.logprob)
        sampler.accept(choice.id)
    np.testing.assert_array_equal(logits, kept)
