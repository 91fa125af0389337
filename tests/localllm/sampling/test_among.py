"""Choices among the largest logits only must equal choices among all logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from localllm.errors import LocalLLMError
from localllm.sampling import Choice, Sampler, Sampling

N = 60


def largest(logits: np.ndarray, k: int) -> np.ndarray:
    """Return the ids of the k largest logits, lowest ids first among equal ones, NaN first."""
    return np.array(sorted(range(len(logits)), key=lambda i: (not math.isnan(logits[i]), -logits[i], i))[:k])


def outcome(sampler: Sampler, *given: Any) -> Choice | str:
    try:
        return sampler(*given) if len(given) == 1 else sampler.among(*given)
    except LocalLLMError as error:
        return f"{type(error).__name__}: {error}"


levels = st.sampled_from([-math.inf, -9.0, -1.5, -0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 2.0, 2.5, 30.0])
rows = st.lists(st.lists(levels, min_size=N, max_size=N), min_size=1, max_size=4)
biases = st.dictionaries(st.integers(0, N - 1), st.sampled_from([-math.inf, -1e300, -1.0, -0.5, 0.0]), max_size=4)
chosen = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.001, 0.7, 1.0, 5.0]),
        "top_k": st.integers(1, N - 5),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "typical_p": st.sampled_from([1.0, 0.6]),
        "xtc_probability": st.sampled_from([0.0, 0.5]),
        "logit_bias": biases,
        "seed": st.integers(0, 9),
    }
)


@given(rows, chosen, st.integers(0, 20), st.randoms(use_true_random=False))
@settings(max_examples=120)
def test_the_choice_is_that_of_all_logits(logits: Any, options: dict[str, Any], more: int, random: Any) -> None:
    """Several tokens with the same random numbers, with the largest logits in any order."""
    sampling = Sampling(**options)
    whole, part = Sampler(sampling, N), Sampler(sampling, N)
    assert part.n_enough == (sampling.top_k + 1 if sampling.temperature else 1) + len(sampling.logit_bias)
    for row in logits:
        x = np.array(row, np.float32)
        ids = largest(x, min(N, part.n_enough + more))
        random.shuffle(shuffled := ids.tolist())
        ids = np.array(shuffled, np.int32)
        assert outcome(part, ids, x[ids]) == outcome(whole, x)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 5}, {"top_k": 3, "logit_bias": {7: -math.inf}}])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused_in_the_same_words(options: dict[str, Any], wrong: float) -> None:
    sampling = Sampling(**options)
    x = np.full(N, wrong if wrong < 0 else 3.0, np.float32)
    x[[20, 11]] = wrong
    sampler = Sampler(sampling, N)
    ids = largest(x, sampler.n_enough)
    said = outcome(sampler, ids, x[ids])
    assert said == outcome(sampler, x)
    assert str(said).startswith("ModelError: the model's logits")


def test_nothing_is_left_where_all_are_banned() -> None:
    sampler = Sampler(Sampling(temperature=0, logit_bias=dict.fromkeys(range(4), -math.inf)), 5)
    x = np.array([3, 2, 1, 0, -math.inf], np.float32)
    assert sampler.n_enough == 5
    assert outcome(sampler, np.arange(5), x) == outcome(sampler, x)
    assert "for every token" in str(outcome(sampler, x))


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({}, 41),
        ({"top_k": 3}, 4),
        ({"temperature": 0, "top_k": 0}, 1),
        ({"temperature": 0, "mirostat": 2, "repeat_last_n": 0, "repeat_penalty": 2}, 1),
        ({"top_k": 0}, 0),
        ({"top_k": N}, 0),
        ({"mirostat": 2}, 0),
        ({"logprobs": 0}, 0),
        ({"temperature": 0, "logprobs": 3}, 0),
        ({"temperature": 0, "repeat_penalty": 1.1}, 0),
        ({"temperature": 0, "presence_penalty": 0.1}, 0),
        ({"temperature": 0, "frequency_penalty": -0.1}, 0),
        ({"temperature": 0, "dry_multiplier": 0.8, "dry_sequence_breakers": ()}, 0),
        ({"temperature": 0, "processors": (lambda ids, logits: logits,)}, 0),
        ({"temperature": 0, "logit_bias": {1: 0.5}}, 0),
        ({"temperature": 0, "logit_bias": {1: -0.5, 2: -math.inf}}, 3),
        ({"temperature": 0, "logit_bias": dict.fromkeys(range(N), -1.0)}, 0),
    ],
)
def test_which_settings_look_at_the_largest_alone(options: dict[str, Any], n: int) -> None:
    assert Sampler(Sampling(**options), N).n_enough == n
