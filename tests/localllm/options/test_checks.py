"""Arguments of the wrong type or out of range."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from localllm.errors import UsageError
from localllm.options import checks


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7)])
def test_integers_of_every_kind(value: Any) -> None:
    assert checks.as_int(value) == 7
    assert type(checks.as_int(value)) is int


@pytest.mark.parametrize("value", [True, np.True_, 7.0, np.float32(7), "7", None, np.array([7]), b"7", 7j])
def test_values_that_are_not_integers(value: Any) -> None:
    assert checks.as_int(value) is None
    with pytest.raises(UsageError, match="n is"):
        checks.whole_number("n", value, 0)
    with pytest.raises(UsageError, match="token 0"):
        checks.token_ids([value], 10)


def test_long_values_are_cut_in_messages() -> None:
    for check in (checks.text, checks.flag, checks.mappings):
        with pytest.raises(UsageError, match="argument") as caught:
            check("argument", b"x" * 10_000)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [2, 2.0, np.int64(2), np.float32(2), np.float64(2), Fraction(2)])
def test_seconds_of_every_kind(value: Any) -> None:
    assert checks.seconds("timeout", value) == 2.0
    assert type(checks.seconds("timeout", value)) is float


@pytest.mark.parametrize("value", [0, -1, True, "2", None, math.nan, math.inf, -math.inf, 10**400, np.array([2.0])])
def test_values_that_are_not_durations(value: Any) -> None:
    with pytest.raises(UsageError, match="must be a number of seconds above 0"):
        checks.seconds("timeout", value)


@pytest.mark.parametrize("ids", [[-1], [10], [0, 10**30], np.array([3, -5])])
def test_ids_outside_a_vocabulary(ids: Any) -> None:
    with pytest.raises(UsageError, match="in the prompt is outside the vocabulary of 10 tokens"):
        checks.in_vocabulary(ids, 10, " in the prompt")


def test_ids_of_a_vocabulary() -> None:
    checks.in_vocabulary([], 10)
    checks.in_vocabulary([0, 9], 10)
    assert checks.token_ids(np.array([0, 9], np.int16), 10) == [0, 9]
    assert checks.token_ids((), 10) == []
