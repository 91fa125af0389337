"""Tokens and chat templates of real models, compared with llama.cpp and transformers."""

from __future__ import annotations

import pytest

from localllm import LLM
from tests.real.conftest import recorded
from tests.real.record import CHATS, TEXTS


@pytest.mark.parametrize("parse_special", [False, True])
def test_tokens_equal_those_of_llama_cpp(name: str, llm: LLM, parse_special: bool) -> None:
    for text, ids in zip(TEXTS, recorded("llama_cpp")[name]["tokens"], strict=True):
        assert llm.tokenize(text, parse_special=parse_special) == ids[parse_special], text


def test_chats_are_rendered_as_by_transformers(smollm2: LLM) -> None:
    for chat, text in zip(CHATS, recorded("transformers")["chats"], strict=True):
        assert smollm2.chat_template.render(chat) == text
        if not any("<|im_" in message["content"] for message in chat):
            assert smollm2.tokenize_chat(chat) == smollm2.tokenize(text, parse_special=True)


def test_a_model_without_a_template_refuses_chats(gemma: LLM) -> None:
    with pytest.warns(UserWarning, match="has no chat template: ChatML is used"):
        ids = gemma.tokenize_chat(CHATS[0])
    assert gemma.detokenize(ids).startswith("<|im_start|>user\nHello<|im_end|>")
