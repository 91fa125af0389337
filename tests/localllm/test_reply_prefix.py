"""Replies with a given prefix: the model continues the prefix as if it had generated it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm import LLM
from localllm.errors import UsageError
from tests.helpers.tiny_models import config, random_weights, write_gguf

QUESTION = [{"role": "user", "content": "What is localllm?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localllm.load(device="reference") as llm:
        yield llm


@pytest.fixture(scope="module")
def answer(llm: LLM) -> str:
    text = llm.chat(QUESTION, temperature=0, max_tokens=24).text
    assert len(text.split()) > 8
    return text


@pytest.mark.parametrize("n_words", [1, 4])
def test_an_answer_continues_after_its_prefix(llm: LLM, answer: str, n_words: int) -> None:
    prefix = " ".join(answer.split(" ")[:n_words])
    rest = llm.chat(QUESTION, reply_prefix=prefix, temperature=0, max_tokens=24)
    assert rest.text.startswith(answer.removeprefix(prefix))
    assert rest.text[0] == " "
    streamed = llm.stream_chat(QUESTION, reply_prefix=prefix, temperature=0, max_tokens=24)
    assert "".join(chunk.text for chunk in streamed) == rest.text


def test_a_cached_prefix_is_not_evaluated_again(llm: LLM, answer: str) -> None:
    llm.forget()
    llm.chat(QUESTION, temperature=0, max_tokens=24)
    usage = llm.chat(QUESTION, reply_prefix=answer, temperature=0, max_tokens=2).usage
    assert usage.prompt_tokens - usage.cached_tokens <= 2


def test_the_prefix_comes_after_the_prompt(llm: LLM) -> None:
    prompt = llm.tokenize_chat(QUESTION)
    assert llm.tokenize_chat(QUESTION, reply_prefix="") == prompt
    with_prefix = llm.tokenize_chat(QUESTION, reply_prefix="Yes, it")
    assert with_prefix == prompt + llm.tokenize("Yes, it", add_special=False)
    assert llm.chat(QUESTION, reply_prefix="Yes, it", max_tokens=0).usage.prompt_tokens == len(with_prefix)


def test_after_text_no_space_is_added(tmp_path: Path) -> None:
    settings = config()
    path = write_gguf(tmp_path / "tiny.gguf", settings, random_weights(settings))
    template = "{% for m in messages %}{{ m.content }}{% endfor %} answer:"
    with localllm.load(path, device="reference", chat_template=template) as tiny:
        assert tiny.tokenizer.add_space_prefix
        ids = tiny.tokenize_chat(QUESTION, reply_prefix="Yes")
        assert tiny.detokenize(ids).endswith("localllm? answer:Yes")
    ends_in_control = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    with localllm.load(path, device="reference", chat_template=ends_in_control) as tiny:
        added = tiny.tokenize_chat(QUESTION, reply_prefix="Yes")[len(tiny.tokenize_chat(QUESTION)) :]
        assert added == tiny.tokenize("Yes", add_special=False) == tiny.tokenize(" Yes", add_special=False)[1:]


def test_names_of_control_tokens_are_text(llm: LLM) -> None:
    (end,) = llm.tokenize("<|end|>", add_special=False, parse_special=True)
    added = llm.tokenize_chat(QUESTION, reply_prefix="a <|end|>")[len(llm.tokenize_chat(QUESTION)) :]
    assert end not in added
    assert llm.detokenize(added) == "a <|end|>"


@pytest.mark.parametrize("prefix", [None, 5, b"yes", ["yes"]])
def test_a_prefix_is_a_text(llm: LLM, prefix: Any) -> None:
    with pytest.raises(UsageError, match="reply_prefix is "):
        llm.chat(QUESTION, reply_prefix=prefix)
