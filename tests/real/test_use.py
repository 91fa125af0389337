"""Typical use with real models: long chats, drafts, JSON, a server, and commands."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from localllm import LLM, Completion
from localllm.engine.cache import common_prefix
from localllm.engine.drafting.cost import StepCost
from tests.helpers.command_line import run_main

QUESTIONS = (
    "Hello! Who are you?",
    "What is the capital of France?",
    "Name three animals.",
    "Which of them is the largest?",
    "Write one sentence about the sea.",
    "Now say it in other words.",
    "What is 2 + 2?",
    "And what is the colour of snow?",
    "Thank you. What did I ask first?",
    "Goodbye!",
)

#: The schema permits several answers, but only one spelling of each.
CAPITAL = {
    "type": "object",
    "properties": {
        "capital": {"enum": ["Berlin", "Cairo", "Paris", "Tokyo"]},
        "continent": {"enum": ["Africa", "Asia", "Europe"]},
    },
    "required": ["capital", "continent"],
    "additionalProperties": False,
}
ANSWERS = {
    "France": {"capital": "Paris", "continent": "Europe"},
    "Japan": {"capital": "Tokyo", "continent": "Asia"},
    "Germany": {"capital": "Berlin", "continent": "Europe"},
    "Egypt": {"capital": "Cairo", "continent": "Africa"},
}

#: Options of deterministic decoding.
GREEDY: dict[str, Any] = {"temperature": 0.0}


def question(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Give the capital and the continent of {country} as JSON."}]


def check_evaluated(done: Completion, prompt: list[int], before: list[int]) -> None:
    """Check that only tokens after the common prefix with the previous prompt and reply were evaluated.

    The last token of a reply was chosen and never evaluated.
    """
    assert done.usage.prompt_tokens == len(prompt)
    assert done.usage.cached_tokens >= min(common_prefix(before, prompt), len(before) - 1)
    assert done.timings.prefill_tokens == len(prompt) - done.usage.cached_tokens


def test_ten_turns_of_a_chat_come_from_the_cache(smollm2: LLM) -> None:
    smollm2.forget()
    messages: list[dict[str, str]] = []
    before: list[int] = []
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        done = smollm2.chat(messages, max_tokens=20, **GREEDY)
        prompt = smollm2.tokenize_chat(messages)
        check_evaluated(done, prompt, before)
        turns.append((list(messages), done))
        messages.append({"role": "assistant", "content": done.text})
        before = [*prompt, *done.ids]
        # The template, the new message, and tokens of the last reply that are tokenised in another way as text.
        assert not turns[1:] or done.timings.prefill_tokens < 60
    for messages, done in turns[3::3]:
        smollm2.forget()
        alone = smollm2.chat(messages, max_tokens=20, **GREEDY)
        assert alone.usage.cached_tokens == 0
        assert (alone.ids, alone.text) == (done.ids, done.text)


def test_ten_turns_of_tokens_come_from_the_cache(gemma: LLM) -> None:
    """With a model that uses windowed attention."""
    gemma.forget()
    prompt: list[int] = []
    turns = []
    for question in QUESTIONS:
        new = gemma.tokenize(f"\nQuestion: {question}\nAnswer:", add_special=not prompt)
        before, prompt = prompt, [*prompt, *new]
        done = gemma.generate(prompt, max_tokens=12, stop=["\n"], **GREEDY)
        check_evaluated(done, prompt, before)
        turns.append((prompt, done))
        prompt = [*prompt, *done.ids]
    for prompt, done in turns[3::3]:
        gemma.forget()
        assert gemma.generate(prompt, max_tokens=12, stop=["\n"], **GREEDY).ids == done.ids


def test_drafts_by_lookup_change_no_token(name: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of number words, for which nearly all drafts are right, and a poem."""
    monkeypatch.setattr(StepCost, "best", lambda self, rate, most, draft_s=0.0: most)
    counting = "one two three four five six seven eight nine ten " * 3 + "one"
    for text, least in ((counting, 15), ("A poem about rain:\n", 0)):
        plain = llm.generate(text, max_tokens=32, ignore_eos=True, speculate=None, **GREEDY)
        drafted = llm.generate(text, max_tokens=32, ignore_eos=True, speculate="lookup", **GREEDY)
        assert drafted.ids == plain.ids
        assert drafted.drafts is not None
        assert drafted.drafts.accepted >= least


@pytest.mark.parametrize("country", ANSWERS)
def test_json_by_a_schema_has_the_answer(smollm2: LLM, country: str) -> None:
    done = smollm2.chat(question(country), json_schema=CAPITAL, max_tokens=40, **GREEDY)
    assert done.finish_reason == "stop"
    assert json.loads(done.text) == ANSWERS[country]


def test_the_most_likely_answer_is_right(name: str, llm: LLM) -> None:
    capitals = {"France": " Paris", "Japan": " Tokyo", "Germany": " Berlin", "Russia": " Moscow"}
    for country, capital in capitals.items():
        scores = llm.score(f"The capital of {country} is", list(capitals.values()))
        best = max(range(len(scores)), key=lambda i: scores[i].logprob)
        assert list(capitals.values())[best] == capital


@pytest.mark.skipif(not all(map(find_spec, ("starlette", "uvicorn", "httpx"))), reason="needs the extra dev")
def test_a_server_returns_the_same_texts(smollm2: LLM, smollm2_path: Path) -> None:
    """A chat of two turns and JSON in OpenAI's format; the second turn starts with the cached first one."""
    import httpx

    from tests.helpers.http_server import demo, serving

    def post(messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        body = {"model": "real", "messages": messages, "temperature": 0, **more}
        answer = httpx.post(started.url + "/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    schema = {"type": "json_schema", "json_schema": {"name": "capital", "schema": CAPITAL}}
    with serving(demo(path=smollm2_path, context=512), names=("real",)) as started:
        messages = [{"role": "user", "content": QUESTIONS[1]}]
        first = post(messages, max_tokens=20)
        text = first["choices"][0]["message"]["content"]
        assert text == smollm2.chat(messages, max_tokens=20, **GREEDY).text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": QUESTIONS[2]}]
        second = post(messages, max_tokens=20)
        assert second["choices"][0]["message"]["content"] == smollm2.chat(messages, max_tokens=20, **GREEDY).text
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
        answer = post(question("France"), response_format=schema)["choices"][0]["message"]["content"]
        assert json.loads(answer) == ANSWERS["France"]


def test_commands_print_the_same_texts(
    gemma: LLM, gemma_path: Path, smollm2_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    flags = "-q", "--device", "cpu", "--temp", 0
    prompt = "The capital of France is"
    done = run_main(capfdbinary, "generate", "-m", gemma_path, *flags, "-n", 8, "-p", prompt)
    assert done.code == 0, done.err
    assert done.out == gemma.generate(prompt, max_tokens=8, **GREEDY).text
    asked = question("Japan")[0]["content"]
    done = run_main(capfdbinary, "generate", "-m", smollm2_path, *flags, "-j", json.dumps(CAPITAL), "-p", asked)
    assert done.code == 0, done.err
    assert json.loads(done.out) == ANSWERS["Japan"]
