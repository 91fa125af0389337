"""Penalties and DRY compared with plain Python that scans the whole history for every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from localllm.sampling.penalties import (
    DryPenalty,
    History,
    RepetitionPenalties,
    SequenceBreakers,
    penalize,
    suffix_match_lengths,
)

N_VOCAB = 6
ids = st.lists(st.integers(0, N_VOCAB - 1), max_size=40)


def test_history_grows_and_its_views_stay() -> None:
    history = History([5, 6])
    early = history.last(-1)
    for id_ in range(1000):
        history.append(id_)
    assert early.tolist() == [5, 6]
    assert history.last(-1).tolist() == [5, 6, *range(1000)]
    assert history.last(3).tolist() == [997, 998, 999]
    assert history.last(0).tolist() == []
    assert history.last(5000).tolist() == history.last(-1).tolist()
    with pytest.raises(ValueError, match="read-only"):
        history.last(3)[0] = 1


def test_penalize_by_hand() -> None:
    logits = np.array([2.0, -2.0, 0.0, 4.0, 1.0], np.float32)
    original = logits.copy()
    penalized = penalize(logits, np.array([0, 1, 2]), np.array([1, 3, 2]), repeat=2.0, presence=0.5, frequency=0.25)
    assert penalized.tolist() == [2 / 2 - 0.75, -2 * 2 - 1.25, -1.0, 4.0, 1.0]
    assert penalized.dtype == np.float32
    assert (logits == original).all()


def test_penalize_keeps_impossible_tokens_impossible_and_overflows_in_silence() -> None:
    logits = np.array([-np.inf, -3e38, 1.0], np.float32)
    both: dict[str, Any] = {"ids": np.array([0, 1]), "counts": np.array([1, 1])}
    assert penalize(logits, **both, repeat=1.5, presence=-9.0, frequency=0).tolist() == [-np.inf, -np.inf, 1]


@given(st.lists(st.integers(0, 2), max_size=40))
def test_suffix_match_lengths(text: list[int]) -> None:
    expected = []
    for i in range(len(text) - 1):
        length = 0
        while length <= i and text[i - length] == text[-1 - length]:
            length += 1
        expected.append(length)
    assert suffix_match_lengths(np.array(text, np.int32)).tolist() == expected


# --- DRY.  Tokens are letters, so that a text is its own tokenization. ---

LETTERS = "abcd\n:"


def plain_dry(
    text: str, *, window: int, multiplier: float, base: float, allowed: int, breakers: str
) -> dict[str, float]:
    """Return the penalty of each letter, by the definition of the pull request that proposed DRY."""
    recent = text if window < 0 else text[-window:]
    longest: dict[str, int] = {}
    for end in range(len(recent) - 1):
        following = recent[end + 1]
        length = 0
        while length <= end and recent[end - length] == recent[-1 - length]:
            if recent[end - length] in breakers:
                break
            length += 1
        if following not in breakers and length >= allowed:
            longest[following] = max(longest.get(following, 0), length)
    return {letter: multiplier * base ** (length - allowed) for letter, length in longest.items()}


def dry_penalties(
    prompt: str, generated: str, *, window: int, multiplier: float, base: float, allowed: int, breakers: str
) -> dict[str, float]:
    history = History([LETTERS.index(letter) for letter in prompt])
    step = DryPenalty(
        history,
        window=window,
        multiplier=multiplier,
        base=base,
        allowed_length=allowed,
        breakers=SequenceBreakers(breakers, lambda id_: LETTERS[id_].encode()) if breakers else None,
    )
    for letter in generated:
        id_ = LETTERS.index(letter)
        history.append(id_)
        step.accept(id_)
    logits = np.zeros(len(LETTERS), np.float32)
    penalized = step(logits)
    assert not logits.any()
    return {LETTERS[i]: -float(penalized[i]) for i in np.flatnonzero(penalized)}


@settings(max_examples=200)
@given(
    prompt=st.text("ab", max_size=25) | st.text(LETTERS, max_size=25),
    generated=st.text("ab", max_size=25) | st.text(LETTERS, max_size=25),
    window=st.sampled_from([-1, 1, 2, 5, 20]),
    allowed=st.integers(0, 4),
    breakers=st.sampled_from(["", "\n", "\n:", "a"]),
)
def test_dry_is_as_described(prompt: str, generated: str, window: int, allowed: int, breakers: str) -> None:
    rules: dict[str, Any] = {
        "window": window,
        "multiplier": 0.75,
        "base": 1.5,
        "allowed": allowed,
        "breakers": breakers,
    }
    expected = plain_dry(prompt + generated, **rules)
    assert dry_penalties(prompt, generated, **rules) == pytest.approx(expected, rel=1e-6)


def test_dry_on_the_example_in_llama_cpp() -> None:
    # "abccbcyabc": c would extend a match of 3 tokens, b one of 1, y (here d) one of 2.
    rules: dict[str, Any] = {"window": -1, "multiplier": 1.0, "base": 2.0, "allowed": 1, "breakers": ""}
    assert dry_penalties("abccbcdabc", "", **rules) == {"c": 4.0, "b": 1.0, "d": 2.0}
    assert dry_penalties("", "abccbcdabc", **rules) == {"c": 4.0, "b": 1.0, "d": 2.0}


def test_a_window_longer_than_any_text() -> None:
    step = RepetitionPenalties([1], window=10**30, repeat=2.0, presence=0.0, frequency=0.0)
    assert step(np.array([1, 1], np.float32)).tolist() == [1, 0.5]


@pytest.mark.parametrize("base", [1.0, 1.75, 1e300])
def test_dry_on_endless_repetition_stays_a_number(base: float) -> None:
    rules: dict[str, Any] = {"window": -1, "multiplier": 1e10, "base": base, "allowed": 2, "breakers": ""}
    penalties = dry_penalties("a" * 3000, "a" * 10, **rules)
    assert list(penalties) == ["a"]
    assert 0 < penalties["a"] < np.inf


PIECES = (b"x", b"yes", b"<|", b"end|", b">", b" a", b"b<|end|> ", "é".encode(), b"\xc3", b"\xa9", b"")


def tokens_since_last(breakers: Sequence[str], pieces: Sequence[bytes]) -> int:
    """Find the breakers in the joined text, and the token that contains the end of the last one."""
    text = b"".join(pieces)
    ends = [end for breaker in breakers for end in range(len(text) + 1) if text[:end].endswith(breaker.encode())]
    if not ends:
        return len(pieces)
    length = 0
    for n, piece in enumerate(pieces, start=1):
        length += len(piece)
        if length >= max(ends):
            return len(pieces) - n
    raise AssertionError("unreachable")


@given(
    st.lists(st.sampled_from(range(len(PIECES))), max_size=12),
    st.lists(st.sampled_from(["<|end|>", "x", "é", "s<|", "a b"]), min_size=1, max_size=3),
)
def test_breakers_are_found_across_tokens(text: list[int], texts: list[str]) -> None:
    breakers = SequenceBreakers(texts, PIECES.__getitem__)
    for id_ in text:
        breakers.accept(id_)
    assert breakers.tokens_since == tokens_since_last(texts, [PIECES[id_] for id_ in text])


def test_a_short_breaker_beside_a_long_one_counts_once() -> None:
    breakers = SequenceBreakers(["x", "<|end|>"], PIECES.__getitem__)
    since = []
    for id_ in (0, 1, 10, 2, 3, 1, 2, 3, 4, 1):  # x yes "" <| end| yes <| end| > yes
        breakers.accept(id_)
        since.append(breakers.tokens_since)
    assert since == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


def test_a_token_that_holds_a_whole_breaker() -> None:
    breakers = SequenceBreakers(["<|end|>", "é"], PIECES.__getitem__)
    assert [id_ for id_ in range(len(PIECES)) if breakers.within(id_)] == [6, 7]


def test_lone_surrogates_in_a_breaker_are_no_error() -> None:
    breakers = SequenceBreakers(["\udcff"], lambda _: b"a")
    breakers.accept(0)
    assert breakers.tokens_since == 1


def as_array(text: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(text, np.int32)


def test_suffix_match_lengths_by_hand() -> None:
    assert suffix_match_lengths(as_array([1, 2, 3, 9, 1, 2, 3])).tolist() == [0, 0, 3, 0, 0, 0]
    assert suffix_match_lengths(as_array([])).tolist() == []
    assert suffix_match_lengths(as_array([7])).tolist() == []
