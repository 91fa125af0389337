"""LlamaIndex's LLM over a scripted model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from localllm import UsageError
from tests.helpers.http_server import scripted

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")
pytestmark = pytest.mark.filterwarnings("default")


def script(prompt: str) -> str:
    return prompt.rpartition("user: ")[2].removesuffix("\nassistant:")


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    from localllm.integrations.llama_index import LocalLLM

    with scripted(script)(None, None) as model:
        yield LocalLLM(llm=model, options={"max_tokens": 60})


def test_texts_and_chats_are_answered(llm: Any) -> None:
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Say a b c")]
    reply = llm.chat(messages)
    assert (reply.message.role, reply.message.content) == ("assistant", "Say a b c")
    pieces = [*llm.stream_chat(messages)]
    assert "".join(piece.delta for piece in pieces) == pieces[-1].message.content == "Say a b c"
    assert len(pieces) > 1
    assert llm.complete("user: one two").text == "one two"
    assert [*llm.stream_complete("user: one two")][-1].text == "one two"
    assert llm.complete("user: one two", stop=["two"]).text == "one "
    assert asyncio.run(llm.achat(messages)).message.content == "Say a b c"
    assert llm.metadata.context_window == llm.llm.info.context
    assert (llm.metadata.is_chat_model, llm.metadata.num_output, llm.metadata.model_name) == (True, 60, "demo")


def test_images_and_unknown_options_are_errors(llm: Any) -> None:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

    blocks = [TextBlock(text="What is it?"), ImageBlock(image=b"\x89PNG")]
    with pytest.raises(UsageError, match=r"^LocalLLM accepts only text, but a message has the block ImageBlock: "):
        llm.chat([ChatMessage(role="user", blocks=blocks)])
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokens'"):
        llm.complete("Hi", tokens=7)


def test_a_path_is_not_a_model() -> None:
    from localllm.integrations.llama_index import LocalLLM

    path: Any = "model.gguf"
    with pytest.raises(ValueError, match="Input should be an instance of LLM"):
        LocalLLM(llm=path)
