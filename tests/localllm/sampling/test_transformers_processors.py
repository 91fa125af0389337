"""Logits processors of transformers: the same text as transformers writes, with drafts, and errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM, UsageError

torch = pytest.importorskip("torch", reason="needs the extra 'reference'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'reference'")

from tests.models.test_transformers import model_of  # noqa: E402
from tests.models.tiny import TINY, write  # noqa: E402

IDS = [5, 6, 7, 8, 9, 10, 11] * 3


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write(tmp_path_factory.mktemp("processors") / "m.gguf", TINY["llama"], model_of("llama"))
    options: dict[str, Any] = {"device": "reference", "context": 128, "parallel": 4, "chat_template": "chatml"}
    with localllm.load(path, draft_model=path, **options) as llm:
        yield llm


class Recorder(transformers.LogitsProcessor):  # type: ignore[misc]
    """Stores its arguments, and returns ``result`` of the scores."""

    def __init__(self, result: Any = lambda scores: scores) -> None:
        self.result, self.calls = result, list[Any]()

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls.append((input_ids, scores))
        return self.result(scores)


def processors() -> list[Any]:
    return [
        transformers.RepetitionPenaltyLogitsProcessor(1.3),
        transformers.NoRepeatNGramLogitsProcessor(2),
        transformers.SuppressTokensLogitsProcessor([*range(50)]),
    ]


@pytest.mark.parametrize("kind", [list, transformers.LogitsProcessorList])
def test_the_text_is_that_of_transformers(llm: LLM, kind: Any) -> None:
    model, n = model_of("llama"), 24
    arguments = {"do_sample": False, "max_new_tokens": n, "min_new_tokens": n, "pad_token_id": 0}
    with torch.no_grad():
        theirs = model.generate(
            torch.tensor([IDS]), logits_processor=transformers.LogitsProcessorList(processors()), **arguments
        )
    options: dict[str, Any] = {"temperature": 0, "max_tokens": n, "ignore_eos": True, "speculate": None}
    expected = theirs[0, len(IDS) :].tolist()
    ours = llm.generate(IDS, logits_processor=kind(processors()), **options)
    assert list(ours.ids) == expected
    assert list(ours.ids) != list(llm.generate(IDS, **options).ids)
    drafted = {**options, "speculate": "draft", "draft_always": True}
    reply = llm.generate(IDS, logits_processor=kind(processors()), **drafted)
    assert reply.drafts is not None
    assert reply.drafts.drafted > 0
    assert list(reply.ids) == expected
    assert [i for chunk in llm.stream(IDS, processors=kind(processors()), **options) for i in chunk.ids] == expected
    many = llm.generate_many([IDS, IDS], logits_processor=kind(processors()), **options)
    assert [list(each.ids) for each in many] == [expected] * 2


def test_arguments_are_tensors_of_one_sequence(llm: LLM) -> None:
    recorder = Recorder()
    seen = list[Any]()

    def with_arrays(ids: Any, logits: Any) -> Any:
        seen.append((ids.copy(), logits.copy()))
        return logits

    reply = llm.chat(
        [{"role": "user", "content": "hi"}],
        max_tokens=3,
        temperature=0,
        ignore_eos=True,
        logits_processor=[recorder, with_arrays],
    )
    assert len(recorder.calls) == len(seen) == 3
    for (ids, scores), (ids_array, logits) in zip(recorder.calls, seen, strict=True):
        assert (ids.dtype, scores.dtype) == (torch.int64, torch.float32)
        assert (ids.shape, scores.shape) == ((1, len(ids_array)), (1, llm.info.n_vocab))
        np.testing.assert_array_equal(ids[0].numpy(), ids_array)
        np.testing.assert_array_equal(scores[0].numpy(), logits)
    assert recorder.calls[2][0][0, -2:].tolist() == list(reply.ids[:2])


def test_half_precision_is_accepted(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 1}
    only = llm.generate(IDS, logits_processor=Recorder(lambda scores: scores.half()), **options)
    assert only.ids == llm.generate(IDS, **options).ids


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda scores: None, "^the logits processor Recorder returned NoneType instead of a tensor$"),
        (lambda scores: scores.numpy()[0], r"returned float32 of shape \(\d+,\), but must .* float32 of shape \(1, "),
        (lambda scores: scores[:, :-1], r"returned float32 of shape \(1, \d+\), but must return float32 of shape"),
        (lambda scores: scores[0], r"returned float32 of shape \(\d+,\), but must return float32 of shape \(1, "),
        (lambda scores: scores * math.nan, "returned logits that hold NaN, first for token 0: correct the function$"),
        (lambda scores: scores - math.inf, "returned logits that are -inf for every token"),
    ],
)
def test_bad_results_end_only_their_request(llm: LLM, result: Any, message: str) -> None:
    other = llm.stream(IDS, max_tokens=12, temperature=0, ignore_eos=True)
    with pytest.raises(UsageError, match=message):
        llm.generate(IDS, logits_processor=Recorder(result))
    assert len(other.read().ids) == 12


def test_an_exception_of_a_processor_reaches_the_caller(llm: LLM) -> None:
    def fail(scores: Any) -> Any:
        raise ZeroDivisionError("mine")

    other = llm.stream(IDS, max_tokens=12, temperature=0, ignore_eos=True)
    with pytest.raises(ZeroDivisionError, match=r"^mine$"):
        llm.generate(IDS, logits_processor=transformers.LogitsProcessorList([Recorder(fail)]))
    with pytest.raises(UsageError, match="call the model from another thread"):
        llm.generate(IDS, logits_processor=Recorder(lambda scores: llm.generate(IDS, max_tokens=1)))
    assert len(other.read().ids) == 12


def test_two_names_of_one_option(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"^logits_processor is another name of processors: use only one$"):
        llm.generate(IDS, processors=processors(), logits_processor=processors())
    for value in (3, "f", [3], [None]):
        with pytest.raises(UsageError, match=r"but must be a function or a list of functions$"):
            llm.generate(IDS, logits_processor=value)  # type: ignore[arg-type]
    assert llm.generate(IDS, logits_processor=None, max_tokens=1, ignore_eos=True).ids
