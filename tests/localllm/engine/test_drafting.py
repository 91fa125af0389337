"""Drafts change only the number of steps; the fake backend's logits identify the cache's tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from localllm.engine.drafting import Drafts
from localllm.engine.request import Request
from localllm.sampling import Sampling
from tests.helpers.fake_backend import N_VOCAB, greedy_after
from tests.helpers.requests import GREEDY, FakeDrafter, SteppedEngine, results, writing
from tests.helpers.samplings import SAMPLINGS

Guess = Callable[[list[int], int], list[int]]

PROMPT = [5, 6, 7]


def right(tokens: list[int], most: int) -> list[int]:
    return greedy_after(tokens, min(most, 5))


def wrong(tokens: list[int], most: int) -> list[int]:
    return [(id_ + 1) % N_VOCAB for id_ in right(tokens, most)]


GUESSES: dict[str, Guess] = {
    "right": right,
    "wrong": wrong,
    "half": lambda tokens, most: right(tokens, most)[: most // 2] + wrong(tokens, most)[most // 2 :],
    "outside": lambda tokens, most: [*greedy_after(tokens, 1), N_VOCAB, 1 << 40],
    "too many": lambda tokens, most: greedy_after(tokens, most + 10),
    "none": lambda tokens, most: [],
    "now and then": lambda tokens, most: right(tokens, min(most, 3)) if len(tokens) % 3 else [],
}


def write(
    guess: Guess | None,
    max_tokens: int | None = None,
    *,
    context: int = 64,
    sampling: Sampling = GREEDY,
    stop_ids: frozenset[int] = frozenset(),
) -> tuple[Request, SteppedEngine]:
    engine = SteppedEngine(context, max_tokens=16)
    drafter = None if guess is None else FakeDrafter(guess)
    request = writing(PROMPT, max_tokens, sampling=sampling, drafter=drafter, stop_ids=stop_ids)
    engine.run(request)
    engine.check_all_pages_are_back()
    assert drafter is None or drafter.n_closed
    return request, engine


def check_same(request: Request, expected: Request) -> None:
    assert results(request).choices == results(expected).choices
    assert (request.finish_reason, request.usage) == (expected.finish_reason, expected.usage)


@pytest.mark.parametrize(
    ("guess", "sampling"), [*((g, "sampled") for g in GUESSES), *(("half", s) for s in SAMPLINGS if s != "sampled")]
)
def test_any_drafts_and_any_sampler_give_the_same_text(guess: str, sampling: str) -> None:
    expected, _ = write(None, 40, sampling=SAMPLINGS[sampling])
    written, _ = write(GUESSES[guess], 40, sampling=SAMPLINGS[sampling])
    check_same(written, expected)


@pytest.mark.parametrize(
    ("guess", "drafts", "sizes"),
    [
        ("right", Drafts(25, 25, 5), [6] * 5),
        ("wrong", Drafts(5 * 30 - 5 - 10, 0, 30), [6] * 25 + [5, 4, 3, 2, 1]),
        ("none", Drafts(0, 0, 30), [1] * 30),
        ("outside", Drafts(15, 15, 15), [2] * 15),
        ("too many", Drafts(28, 28, 2), [16, 14]),
    ],
)
def test_right_drafts_save_steps(guess: str, drafts: Drafts, sizes: list[int]) -> None:
    """Thirty tokens after the prompt.  A step evaluates at most 16 tokens, and at most the remaining number."""
    request, engine = write(GUESSES[guess], 31)
    assert request.draft_counts == drafts
    assert engine.sizes == [3, *sizes]
    counts = engine.loop.counts
    assert (counts.drafted, counts.accepted) == (drafts.drafted, drafts.accepted)
    assert counts.draft_steps == sum(size > 1 for size in sizes)
    assert (counts.decode_tokens, counts.longest) == (30, 3 + 31)


def test_the_share_of_accepted_drafts() -> None:
    assert Drafts(8, 6, 3).share == 0.75
    assert Drafts(0, 0, 3).share == 0.0
    request, _ = write(None, 3)
    assert request.draft_counts is None


@pytest.mark.parametrize("guess", ["right", "half", "too many"])
def test_the_end_of_the_context(guess: str) -> None:
    expected, _ = write(None, context=21)
    written, _ = write(GUESSES[guess], context=21)
    check_same(written, expected)
    assert written.finish_reason == "length"


@pytest.mark.parametrize("n", range(1, 12))
def test_an_end_inside_the_accepted_drafts(n: int) -> None:
    stop = frozenset({greedy_after(PROMPT, 12)[n]})
    check_same(write(right, stop_ids=stop)[0], write(None, stop_ids=stop)[0])
    check_same(write(right, n)[0], write(None, n)[0])


def test_cancelling_keeps_only_accepted_drafts() -> None:
    engine = SteppedEngine(max_tokens=16)
    drafter = FakeDrafter(GUESSES["half"])
    request = writing(PROMPT, None, drafter=drafter)
    engine.submit(request)
    engine.step(3)
    request.is_cancelled = True
    engine.step()
    text = results(request).ids
    assert text == greedy_after(PROMPT, len(text))
    assert drafter.n_closed
    again = writing([*PROMPT, *text, 8], 1)
    engine.run(again)
    assert again.n_cached == len(PROMPT) + len(text) - 1
    assert results(again).ids == greedy_after([*PROMPT, *text, 8], 1)


def test_drafts_of_several_requests_in_one_batch() -> None:
    """A request never uses another's drafts, and the available pages suffice."""
    engine = SteppedEngine(48, parallel=4, max_tokens=16)
    requests = [writing([n, 2], 40, drafter=FakeDrafter(guess)) for n, guess in enumerate(GUESSES.values())]
    engine.run(*requests)
    assert [results(request).ids for request in requests] == [greedy_after([n, 2], 40) for n in range(len(requests))]
    engine.check_all_pages_are_back()


def test_drafts_use_the_rest_of_a_step() -> None:
    """Drafts take no row or token from a request that decodes or has a prompt, and no page from any request."""
    engine = SteppedEngine(32, parallel=2, max_tokens=8)
    drafting, plain = writing(PROMPT, 20, drafter=FakeDrafter(GUESSES["too many"])), writing([9], 20)
    engine.submit(drafting, plain)
    engine.step(2)
    assert engine.sizes[-1] == 8
    assert len(results(plain).ids) == 2, "the request decodes in each step"
    engine.run()
    assert results(plain).ids == greedy_after([9], 20)
    assert results(drafting).ids == greedy_after(PROMPT, 20)


def test_a_slow_reader_gets_no_drafts() -> None:
    engine = SteppedEngine()
    proposals: list[int] = []

    def count(tokens: list[int], most: int) -> list[int]:
        proposals.append(most)
        return []

    request = writing(PROMPT, 20, drafter=FakeDrafter(count))
    engine.submit(request)
    engine.step(3)
    n_before = len(proposals)
    results(request).is_full = True
    assert not engine.step()
    assert len(proposals) == n_before


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_drafts_by_chance(data: st.DataObject) -> None:
    few = st.lists(st.integers(0, N_VOCAB + 2), max_size=5)

    def guess(tokens: list[int], most: int) -> list[int]:
        return right(tokens, data.draw(st.integers(0, most)))[:4] + data.draw(few)

    written, _ = write(guess, 25)
    assert results(written).ids == greedy_after(PROMPT, 25)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_an_error_of_a_drafter_ends_its_request_alone(error: BaseException) -> None:
    def fail(tokens: list[int], most: int) -> list[int]:
        raise error

    engine = SteppedEngine(parallel=2)
    drafter = FakeDrafter(fail)
    bad, good = writing([1], 9, drafter=drafter), writing([2], 9)
    engine.run(bad, good)
    assert results(bad).error is error
    assert results(bad).ids == greedy_after([1], 1)
    assert drafter.n_closed
    assert results(good).ids == greedy_after([2], 9)
    engine.check_all_pages_are_back()


def test_a_preempted_request_proposes_anew() -> None:
    """Drafts from before a preemption are not used at a later position."""
    engine = SteppedEngine(32, parallel=1, max_tokens=16)
    old = writing([1] * 8, 20, drafter=FakeDrafter(GUESSES["half"]))
    young = writing([2] * 8, 20, drafter=FakeDrafter(GUESSES["now and then"]))
    engine.run(old, young)
    assert results(old).ids == greedy_after([1] * 8, 20)
    assert results(young).ids == greedy_after([2] * 8, 20)
