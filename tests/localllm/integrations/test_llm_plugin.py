"""localllm's models in the program llm."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("llm", reason="llm is not installed")


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("llm.plugins._loaded", True)  # no other plugins
    from llm.plugins import pm

    from localllm.integrations import llm_plugin

    pm.register(llm_plugin, "localllm")
    yield llm_plugin
    pm.unregister(llm_plugin)


def test_a_prompt_is_answered() -> None:
    import llm

    import localllm

    response = llm.get_model("localllm/demo").prompt(
        "What is localllm?", system="Be brief.", max_tokens=8, temperature=0
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is localllm?"}]
    with localllm.load() as model:
        expected = model.chat(messages, max_tokens=8, temperature=0)
    assert "".join(response) == expected.text
    assert response.usage().input == expected.usage.prompt_tokens
    assert response.usage().output == expected.usage.completion_tokens


def test_a_conversation_goes_on_and_a_schema_holds() -> None:
    import llm

    conversation = llm.get_model("localllm/demo").conversation()
    first = conversation.prompt("My name is Tom.", max_tokens=4, temperature=0)
    n = first.usage().input
    second = conversation.prompt("Who am I?", max_tokens=4, temperature=0)
    assert second.usage().input > n + 4
    schema = {"type": "object", "properties": {"is_day": {"type": "boolean"}}, "required": ["is_day"]}
    response = llm.get_model("localllm/demo").prompt("Is it day?", schema=schema, seed=1)
    assert json.loads(response.text())["is_day"] in (True, False)


def test_what_is_wrong_is_said() -> None:
    import llm

    model = llm.get_model("localllm/demo")
    with pytest.raises(ValueError, match="top_p is 7"):
        model.prompt("hi", top_p=7).text()
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        model.prompt("hi", mood="good").text()
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    with pytest.raises(ValueError, match="without an encoder of images"):
        model.prompt("hi", attachments=[llm.Attachment(type="image/png", content=file.getvalue())]).text()


def test_messages_keep_calls_and_results(plugin: Any) -> None:
    from llm.parts import Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart

    call = Message("assistant", [ReasoningPart("hm"), ToolCallPart(name="add", arguments={"a": 1}, tool_call_id="7")])
    results = Message("tool", [ToolResultPart(name="add", output="3", tool_call_id=i) for i in ("7", "8")])
    assert list(plugin._as_openai(call)) == [
        {
            "role": "assistant",
            "content": [],
            "reasoning": "hm",
            "tool_calls": [{"id": "7", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        }
    ]
    assert [each["tool_call_id"] for each in plugin._as_openai(results)] == ["7", "8"]
    (said,) = plugin._as_openai(Message("user", [TextPart("hi")]))
    assert said == {"role": "user", "content": [{"type": "text", "text": "hi"}]}


def test_a_call_of_a_tool_is_told(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import llm

    from localllm.chat.conversation import ToolCall
    from localllm.chat.reply import CallDelta
    from localllm.generation.completion import Chunk

    class Reply(list[Chunk]):
        def __enter__(self) -> Reply:
            return self

        def __exit__(self, *_: object) -> None: ...

    class Model:
        def stream_chat(self, messages: Any, *, tools: Any, **options: Any) -> Reply:
            assert tools[0]["function"]["parameters"]["properties"]["a"] == {"type": "integer"}
            begun, written = (CallDelta(0, "c1", "double", **more) for more in ({"begins": True}, {"arguments": "{"}))
            return Reply(Chunk("", call=call) for call in (begun, written, ToolCall("double", '{"a": 1}', "c1")))

    def double(a: int) -> int:
        return 2 * a

    monkeypatch.setattr(plugin, "_loaded", lambda name: Model())
    response = llm.get_model("localllm/demo").prompt("double 1", tools=[double])
    assert [(call.name, call.arguments, call.tool_call_id) for call in response.tool_calls()] == [
        ("double", {"a": 1}, "c1")
    ]
    assert response.execute_tool_calls()[0].output == "2"
