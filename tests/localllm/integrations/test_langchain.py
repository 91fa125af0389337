"""LangChain's chat model over a scripted model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from localllm import UsageError
from tests.helpers.http_server import scripted

pytest.importorskip("langchain_core", reason="langchain-core is not installed")
pytestmark = pytest.mark.filterwarnings("default")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def script(prompt: str) -> str:
    """Call the tool once, then repeat its result; repeat messages without tools."""
    if "tool: " in prompt:
        return "It is " + prompt.rpartition("tool: ")[2].partition("\n")[0]
    if "tools: " not in prompt:
        return prompt.rpartition("user: ")[2].removesuffix("\nassistant:")
    return CALL if "tools: add" in prompt else "an example of the schema"


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    from localllm.integrations.langchain import ChatLocal

    with scripted(script)(None, None) as llm:
        yield ChatLocal(llm=llm, options={"max_tokens": 60})


def test_a_message_is_answered(model: Any) -> None:
    reply = model.invoke([("system", "Be brief."), ("user", "Say a b c")])
    assert reply.content == "Say a b c"
    assert reply.usage_metadata["total_tokens"] == reply.usage_metadata["input_tokens"] + len(
        model.llm.tokenize("Say a b c", add_special=False)
    )
    assert reply.response_metadata["finish_reason"] == "stop"
    chunks = [*model.stream("Say a b c")]
    assert "".join(chunk.content for chunk in chunks) == "Say a b c"
    assert len([chunk for chunk in chunks if chunk.content]) > 1
    assert model.invoke("Say a b c", stop=["b"]).content == "Say a "
    assert model.bind(max_tokens=1).invoke("Say a b c").response_metadata["finish_reason"] == "length"
    assert asyncio.run(model.ainvoke("Say it")).content == "Say it"
    assert [reply.content for reply in model.batch(["Say a", "Say b"])] == ["Say a", "Say b"]


def test_tools_are_called(model: Any) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    with_tools, question = model.bind_tools([ADD]), HumanMessage("2 + 3?")
    reply = with_tools.invoke([question])
    (call,) = reply.tool_calls
    assert (call["name"], call["args"], reply.content) == ("add", {"a": 2, "b": 3}, "")
    result = with_tools.invoke([question, reply, ToolMessage("5", tool_call_id=call["id"])])
    assert result.content == "It is 5"
    blocks = AIMessage(content=[{"type": "reasoning", "reasoning": "Hm."}, *reply.content_blocks])
    blocks.tool_calls = reply.tool_calls
    result = with_tools.invoke([question, blocks, ToolMessage("5", tool_call_id=call["id"])])
    assert result.content == "It is 5"
    assert model.bind_tools([ADD], tool_choice="none").invoke([question]).tool_calls == []
    for choice in (True, "any", "add"):
        (call,) = model.bind_tools([ADD], tool_choice=choice).invoke([question]).tool_calls
        assert call["name"] == "add"


def test_structured_output_is_a_forced_call(model: Any) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        """A person."""

        name: str
        age: int

    assert model.with_structured_output(Person).invoke("Who?") == Person(name="some text", age=3)


def test_errors_are_those_of_the_model(model: Any) -> None:
    with pytest.raises(UsageError, match=r"^top_p is 7"):
        model.invoke("Hi", top_p=7)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokens'"):
        model.invoke("Hi", tokens=7)


def test_a_path_is_not_a_model() -> None:
    from localllm.integrations.langchain import ChatLocal

    path: Any = "model.gguf"
    with pytest.raises(ValueError, match="Input should be an instance of LLM"):
        ChatLocal(llm=path)
