"""Multiple choice, and the interface of lm-evaluation-harness."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM, UsageError
from localllm.evaluate import Question, choices, read_questions
from tests.helpers.tiny_models import config, random_weights, write_gguf


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    settings = config(num_hidden_layers=1)
    path = write_gguf(tmp_path_factory.mktemp("choices") / "tiny.gguf", settings, random_weights(settings))
    with localllm.load(path, device="reference") as llm:
        yield llm


def likelihood(llm: LLM, prompt: str, continuation: str) -> float:
    """Return the log likelihood of a continuation, computed token by token."""
    before, ids = llm.tokenize(prompt), llm.tokenize(prompt + continuation)
    assert ids[: len(before)] == before
    rows = llm.logits(ids[:-1]).astype(np.float64)[len(before) - 1 :]
    return sum(row[id_] - math.log(np.exp(row).sum()) for row, id_ in zip(rows, ids[len(before) :], strict=True))


QUESTIONS = [
    Question("abc", ["d", "xyz", "q"], 1),
    Question("the cat", ["sat", "on a mat"], 0),
    Question("7", ["1", "22", "333", "4444"], 3),
]


def test_the_likeliest_answer_counts(llm: LLM) -> None:
    seen: list[tuple[int, int, float]] = []
    found = choices(llm, QUESTIONS, progress=lambda *each: seen.append(each))
    for question, (whole, by_length) in zip(QUESTIONS, found.answers, strict=True):
        values = [likelihood(llm, question.prompt, " " + choice) for choice in question.choices]
        assert whole == np.argmax(values)
        lengths = [len(choice) for choice in question.choices]
        assert by_length == np.argmax(np.array(values) / lengths)
    right = [question.answer == answer for question, (answer, _) in zip(QUESTIONS, found.answers, strict=True)]
    assert found.accuracy.value == pytest.approx(np.mean(right))
    assert found.accuracy.error == pytest.approx(np.std(right) / math.sqrt(2))
    assert found.chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 4) / 3)
    assert [each[:2] for each in seen] == [(1, 3), (2, 3), (3, 3)]
    assert seen[-1][2] == pytest.approx(found.accuracy.value)
    with pytest.raises(UsageError, match="there are no questions"):
        choices(llm, [])


def test_questions_are_read_from_lines(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a ", "choices": ["b", "c"], "answer": 1, "id": 7}\n\n')
    assert read_questions(path) == [Question("a", ["b", "c"], 1)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"choices": ["b", "c"], "answer": 1}', "line 2: prompt is None, but must be a string"),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "line 2: choices is .* at least two strings"),
        ('{"prompt": "a", "choices": ["b", ""], "answer": 0}', "line 2: choices is "),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "line 2: answer is 2, but must be a position"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": "b"}', "line 2: answer is 'b'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a", "choices": ["b", "c"], "answer": 1}\n' + line)
    with pytest.raises(UsageError, match=words):
        read_questions(path)


def test_files_without_questions(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n")
    with pytest.raises(UsageError, match="has no questions"):
        read_questions(path)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not valid UTF-8"):
        read_questions(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_questions(tmp_path / "nowhere.jsonl")


# -- lm-evaluation-harness -----------------------------------------------------------------------------------------


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the module, with a substitute for lm_eval if it is not installed."""
    try:
        import_module("lm_eval.api.model")
    except ImportError:
        stand_in = ModuleType("lm_eval.api.model")
        stand_in.LM = type("LM", (), {})  # type: ignore[attr-defined]
        for name in ("lm_eval", "lm_eval.api"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "lm_eval.api.model", stand_in)
    monkeypatch.delitem(sys.modules, "localllm.evaluate.lm_eval", raising=False)
    return import_module("localllm.evaluate.lm_eval")


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_the_harness_gets_likelihoods_in_its_order(llm: LLM, harness: ModuleType) -> None:
    pairs = [("the cat", " sat"), ("abc", " d"), ("the cat", " on"), ("abc", " xyz")]
    results = harness.HarnessModel(llm).loglikelihood(requests(*pairs))
    assert [each for each, _ in results] == pytest.approx([likelihood(llm, *pair) for pair in pairs], abs=1e-4)
    greedy = llm.generate("abc", temperature=0, max_tokens=1, ignore_eos=True)
    ids = [*llm.tokenize("abc"), *greedy.ids]
    assert llm.score("abc", [greedy.ids])[0].is_greedy
    assert [each for _, each in results] == [
        llm.score(prompt, [continuation])[0].is_greedy for prompt, continuation in pairs
    ]
    assert len(ids) > 1


def test_the_harness_gets_whole_texts_in_windows(llm: LLM, harness: ModuleType) -> None:
    model = harness.HarnessModel(llm)
    short, long = "abc", "the cat " * 60
    bos = llm.tokenizer.bos_id
    ids = llm.tokenize(long, add_special=False)
    assert len(ids) > llm.info.context
    step = llm.info.context - 1
    starts = range(0, len(ids), step)
    expected = sum(
        llm.score([ids[start - 1] if start else bos], [ids[start : start + step]])[0].logprob  # type: ignore[list-item]
        for start in starts
    )
    results = model.loglikelihood_rolling(requests((short,), (long,)))
    assert results[1] == pytest.approx(expected)
    alone = llm.score([bos], [llm.tokenize(short, add_special=False)])  # type: ignore[list-item]
    assert results[0] == pytest.approx(alone[0].logprob)


def test_the_harness_gets_texts(llm: LLM, harness: ModuleType) -> None:
    model = harness.HarnessModel(llm)
    whole = llm.generate("abc", temperature=0, max_tokens=12).text
    texts = model.generate_until(requests(("abc", {"max_gen_toks": 12}), ("abc", {"until": [whole[3]]})))
    assert texts == [whole, whole[: whole.index(whole[3])]]
    assert model.tokenizer_name == "tiny.gguf"


def test_the_harness_uses_the_models_chat_format(harness: ModuleType) -> None:
    with localllm.load(device="cpu", context=128) as llm:
        model = harness.HarnessModel(llm)
        chat = model.apply_chat_template([{"role": "user", "content": "Hi!"}])
        assert chat == llm.chat_template.render([{"role": "user", "content": "Hi!"}])
        (result,) = model.loglikelihood(requests((chat, "Hello")))
        expected = llm.score(llm.tokenize(chat, parse_special=True), ["Hello"])[0]
        assert result == (pytest.approx(expected.logprob), expected.is_greedy)


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "localllm.evaluate.lm_eval", raising=False)
    with pytest.raises(UsageError, match="pip install lm_eval"):
        import_module("localllm.evaluate.lm_eval")


def test_answers_can_be_kept_as_json(llm: LLM) -> None:
    assert json.loads(json.dumps(choices(llm, QUESTIONS).answers))
