"""Items of the responses API: every type that agents send, and calls in the form of their tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.chat.conversation import Message, ToolCall
from localllm.errors import UsageError
from localllm.server.response_items import ToolItems, flat_name, read_items

CALL = {"call_id": "call_1"}


def read(*items: dict[str, Any]) -> tuple[list[Message], ToolItems, list[str]]:
    tools, skipped = ToolItems(), list[str]()
    return read_items(items, tools, skipped), tools, skipped


@pytest.mark.parametrize(
    ("item", "name", "arguments"),
    [
        ({"type": "function_call", "name": "now", "arguments": '{"a": 1}'}, "now", {"a": 1}),
        ({"type": "function_call", "name": "now", "namespace": "clock", "arguments": "{}"}, "clock__now", {}),
        ({"type": "custom_tool_call", "name": "patch", "input": "*** Begin"}, "patch", {"input": "*** Begin"}),
        (
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            "local_shell",
            {"command": ["ls"]},
        ),
        (
            {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": 5}},
            "shell",
            {"commands": ["ls"], "timeout_ms": 5},
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}, "status": "completed"},
            "apply_patch",
            {"type": "delete_file", "path": "a"},
        ),
        (
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "q"}},
            "tool_search",
            {"query": "q"},
        ),
    ],
)
def test_calls_of_every_type_and_their_results(item: dict[str, Any], name: str, arguments: Any) -> None:
    result = {"type": f"{item['type']}_output", **CALL, "output": "done"}
    if item["type"] == "tool_search_call":
        result = {"type": "tool_search_output", **CALL, "tools": [{"type": "function", "name": "found"}]}
    messages, tools, skipped = read({**item, **CALL}, result)
    (call,) = messages[0].calls
    assert (call.name, call.values, call.id) == (name, arguments, "call_1")
    assert (messages[1].role, messages[1].call_id) == ("tool", "call_1")
    assert messages[1].text == ('["found"]' if "search" in item["type"] else "done")
    assert [*tools.by_name] == (["found"] if "search" in item["type"] else [])
    assert not skipped


def test_the_output_of_a_shell_has_the_exit_code() -> None:
    output = [
        {"stdout": "a\n", "stderr": "b", "outcome": {"type": "exit", "exit_code": 2}},
        {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
    ]
    messages, *_ = read({"type": "shell_call_output", **CALL, "output": output})
    assert messages[0].text == "a\nb\n(exit code 2)\n\n(the time limit was exceeded)"


def test_calls_of_mcp_servers_have_their_output() -> None:
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "clock", "name": "now", "arguments": '{"a": 1}'}
    messages, *_ = read({**call, "output": "noon"}, {**call, "id": "mcp_2", "error": {"type": "http", "code": 500}})
    assert [call.name for message in messages for call in message.calls] == ["clock__now"] * 2
    assert (messages[1].text, messages[1].is_error) == ("noon", False)
    assert (messages[3].call_id, messages[3].is_error) == ("mcp_2", True)


@pytest.mark.parametrize(
    "item_type",
    [
        *("web_search_call", "file_search_call", "computer_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("compaction", "ghost_snapshot", "item_reference", "program"),
    ],
)
def test_other_items_are_skipped_and_named(item_type: str) -> None:
    hello = {"role": "user", "content": "hi"}
    messages, _, skipped = read(hello, {"type": item_type, "id": "x", "action": {}, "encrypted_content": "x"}, hello)
    assert [message.text for message in messages] == ["hi", "hi"]
    assert skipped == [item_type]


def test_encrypted_reasoning_and_parts_of_unknown_types() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
    content = [{"type": "input_text", "text": "hi"}, {"type": "input_video", "url": "u"}]
    messages, _, skipped = read(reasoning, {"type": "message", "role": "user", "content": content})
    assert [(message.role, message.text) for message in messages] == [("user", "hi")]
    assert skipped == ["input_video"]


def test_reasoning_text_and_calls_make_one_message() -> None:
    messages, *_ = read(
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "custom_tool_call", "name": "patch", "input": "a", "call_id": "call_1"},
        {"type": "local_shell_call", "action": {"command": ["ls"]}, "call_id": "call_2"},
    )
    (message,) = messages
    assert (message.reasoning, message.text, [call.name for call in message.calls]) == (
        "hm",
        "Wait.",
        ["patch", "local_shell"],
    )


def test_names_of_namespaces() -> None:
    assert [flat_name(*names) for names in (("", "a"), ("n", "a"), ("mcp__n__", "a"), ("n.", "a"))] == [
        "a",
        "n__a",
        "mcp__n__a",
        "n.a",
    ]


def all_tools() -> ToolItems:
    tools = ToolItems()
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools.add(
        [
            {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": True},
            {"type": "custom", "name": "patch", "description": "Change files.", "format": grammar},
            {
                "type": "namespace",
                "name": "clock",
                "description": "d",
                "tools": [{"type": "function", "name": "set"}],
            },
            {"type": "local_shell"},
            {"type": "shell"},
            {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
            {"type": "web_search"},
            {"type": "tool_search"},
        ]
    )
    return tools


def test_tools_are_functions_for_the_model() -> None:
    tools = all_tools()
    assert [*tools.by_name] == ["now", "patch", "clock__set", "local_shell", "shell", "tool_search"]
    assert tools.hosted == ["web_search", "tool_search"]
    patch = tools.by_name["patch"].function["function"]
    assert patch["parameters"]["required"] == ["input"]
    assert patch["description"] == 'Change files.\n\nThe input matches this lark grammar:\nstart: "a"'
    assert tools.choice({"type": "custom", "name": "patch"}) == {"type": "function", "name": "patch"}
    assert tools.choice({"type": "function", "name": "set", "namespace": "clock"})["name"] == "clock__set"  # type: ignore[index]
    assert tools.choice({"type": "local_shell"}) == {"type": "function", "name": "local_shell"}
    for faulty in ({"type": "custom"}, {"name": ""}, 5):
        with pytest.raises(UsageError):
            ToolItems().add([faulty])


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("now", {"a": 1}, {"type": "function_call", "name": "now", "arguments": '{"a": 1}'}),
        ("unknown", {}, {"type": "function_call", "name": "unknown", "arguments": "{}"}),
        ("patch", {"input": "*** Begin"}, {"type": "custom_tool_call", "name": "patch", "input": "*** Begin"}),
        ("clock__set", {}, {"type": "function_call", "name": "set", "namespace": "clock", "arguments": "{}"}),
        (
            "local_shell",
            {"command": ["ls"]},
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        ),
        ("shell", {"commands": ["ls"]}, {"type": "shell_call", "action": {"commands": ["ls"]}}),
        ("tool_search", {"q": 1}, {"type": "tool_search_call", "execution": "client", "arguments": {"q": 1}}),
    ],
)
def test_a_call_has_the_form_of_its_tool_and_is_read_back(
    name: str, arguments: Any, expected: dict[str, Any]
) -> None:
    tools, call = all_tools(), ToolCall(name, json.dumps(arguments), "call_1")
    item = tools.item(call)
    assert item.items() >= {**expected, "call_id": "call_1", "status": "completed"}.items()
    (message,), *_ = read(item)
    assert message.calls[0].values == call.values
    assert message.calls[0].name == name
