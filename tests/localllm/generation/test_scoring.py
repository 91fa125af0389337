"""Logits of the last tokens, and probabilities of continuations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM
from localllm.errors import ContextLengthError, UsageError
from tests.helpers.devices import DEVICES
from tests.helpers.engines import eventually, in_engine, n_requests
from tests.helpers.tiny_models import tiny_gguf

IDS = [1, *range(40, 60)]


@pytest.fixture(scope="module", params=DEVICES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny_gguf(tmp_path_factory.mktemp("scoring") / "tiny.gguf")
    with localllm.load(path, device=request.param, context=96) as llm:
        yield llm


@pytest.fixture
def llm(loaded: LLM) -> LLM:
    loaded.forget()
    return loaded


def expected_logprobs(llm: LLM, ids: list[int], first: int) -> list[float]:
    llm.forget()
    logits = llm.logits(ids).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return [float(logprobs[i - 1, ids[i]]) for i in range(first, len(ids))]


def n_evaluated(llm: LLM, call: Any) -> int:
    """Return the number of tokens that a call evaluates."""

    def patched(loop: Any) -> None:
        loop.runner.run = lambda chunks, *rest: (sizes.extend(len(c.ids) for c in chunks), run(chunks, *rest))[1]

    sizes: list[int] = []
    run = in_engine(llm, lambda loop: loop.runner.run)
    in_engine(llm, patched)
    call()
    in_engine(llm, lambda loop: loop.runner.__dict__.pop("run"))
    return sum(sizes)


def test_the_last_logits_are_those_of_all(llm: LLM) -> None:
    full = llm.logits(IDS)
    assert full.shape == (len(IDS), llm.info.n_vocab)
    for last in (1, 5, len(IDS)):
        llm.forget()
        assert np.allclose(llm.logits(IDS, last=last), full[-last:], rtol=0, atol=1e-4)


def test_the_last_logits_use_what_is_cached(llm: LLM) -> None:
    assert n_evaluated(llm, lambda: llm.logits(IDS, last=1)) == len(IDS)
    assert n_evaluated(llm, lambda: llm.logits(IDS, last=1)) == 1
    assert n_evaluated(llm, lambda: llm.logits([*IDS, 7, 8], last=2)) == 2
    assert n_evaluated(llm, lambda: llm.logits(IDS)) == len(IDS), "all rows are needed"


@pytest.mark.parametrize("last", [0, -1, 22, 1.5, True])
def test_numbers_of_logits_out_of_range(llm: LLM, last: Any) -> None:
    with pytest.raises(UsageError, match="last is"):
        llm.logits(IDS, last=last)


def test_scores_are_sums_of_log_probabilities(llm: LLM) -> None:
    continuations = [[70], [70, 71, 72], [5] * 20, []]
    scores = llm.score(IDS, continuations)
    for score, continuation in zip(scores, continuations, strict=True):
        expected = expected_logprobs(llm, IDS + continuation, len(IDS))
        assert score.ids == tuple(continuation)
        assert score.logprobs == pytest.approx(expected, abs=1e-3)
        assert score.logprob == pytest.approx(sum(expected), abs=1e-3)


def test_the_greedy_continuation_is_marked(llm: LLM) -> None:
    written = list(llm.generate(IDS, temperature=0, max_tokens=5, ignore_eos=True).ids)
    other = [*written[:-1], (written[-1] + 1) % 300]
    assert [score.is_greedy for score in llm.score(IDS, [written, other])] == [True, False]


def test_the_prompt_is_evaluated_once(llm: LLM) -> None:
    """The row after a continuation's last token is not evaluated."""
    continuations = [[70 + i, 5] for i in range(6)]
    n = n_evaluated(llm, lambda: llm.score(IDS, continuations))
    assert n <= len(IDS) + 6 * (1 + 32), "except each continuation's part of a page"
    assert n_evaluated(llm, lambda: llm.score(IDS, [[70]] * 3)) <= 3


def test_more_continuations_than_run_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.generation.scoring._AT_ONCE", 2)
    together = llm.score([1, 5], [[i, 7] for i in range(9)])
    assert [score.ids for score in together] == [(i, 7) for i in range(9)]
    assert [llm.score([1, 5], [[i, 7]])[0].logprob for i in range(9)] == pytest.approx(
        [score.logprob for score in together], abs=1e-4
    )


def test_scores_wait_if_the_queue_is_full(tmp_path: Path) -> None:
    with localllm.load(tiny_gguf(tmp_path / "m.gguf"), device="reference", context=96, max_waiting=2) as small:
        scores = small.score([1, 5], [[i, 7] for i in range(12)])
    assert [score.ids for score in scores] == [(i, 7) for i in range(12)]


def test_an_error_ends_all_scores_under_way(llm: LLM) -> None:
    def fail() -> None:
        go_on = threading.Event()
        llm._opened()._inbox.put(lambda loop: go_on.wait(60))
        with pytest.raises(ContextLengthError):
            llm.score([1, 5], [[6, 7], [8, 9], [10] * 200])
        go_on.set()
        assert eventually(lambda: n_requests(llm) == 0)

    assert n_evaluated(llm, fail) == 0


def test_an_empty_continuation_is_certain(llm: LLM) -> None:
    [score] = llm.score("a", [""])
    assert (score.ids, score.is_greedy, repr(score.logprob)) == ((), True, "0.0")


def test_a_word_across_the_end_of_the_prompt_is_tokenized_as_one(llm: LLM) -> None:
    """A text is tokenized together with the prompt; spaces at the end of the prompt belong to the continuation."""
    whole = tuple(llm.tokenize("a hen the end"))
    before = tuple(llm.tokenize("a hen"))
    for prompt, continuation in (("a hen", " the end"), ("a hen ", "the end")):
        [score] = llm.score(prompt, [continuation])
        assert before + score.ids == whole
    [plain] = llm.score("a hen", [" the end"], add_special=False)
    assert plain.ids == score.ids
    assert plain.logprob != score.logprob, "without BOS"
    [of_bos] = llm.score("", ["a hen"])
    assert of_bos.logprob == pytest.approx(sum(expected_logprobs(llm, list(before), 1)), abs=1e-3)


def test_bad_arguments(llm: LLM) -> None:
    for continuations in ("text", b"bytes", 5, None, iter(["a"])):
        with pytest.raises(UsageError, match="must be a list of texts"):
            llm.score("a", continuations)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        llm.score("a", [[300]])
    with pytest.raises(ContextLengthError):
        llm.score([5] * 90, [[6], [7] * 8])
    assert llm.score("a", []) == []
    llm.score("a", ["b"])
    assert n_requests(llm) == 0
