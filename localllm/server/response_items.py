"""Items of OpenAI's responses API: converted to messages, and tool calls converted to items.

The API has tools that are not functions, such as custom tools and shells.  Models see every tool as a function.  A
`ToolItems` object stores the type of item that clients expect for a call of each tool.

Sources: https://platform.openai.com/docs/api-reference/responses, and the types of the package ``openai``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.chat.conversation import Message, ToolCall, read_calls, read_message
from localllm.chat.tool_choice import ChosenTools, Tools, choose_tools
from localllm.errors import UsageError, quoted
from localllm.openai_format import custom_input
from localllm.options.declared import Sampling

#: Parameters of tools that the API defines without a schema.
_TEXT_LIST = {"type": "array", "items": {"type": "string"}}
_LOCAL_SHELL = {
    "command": {**_TEXT_LIST, "description": "The program and its arguments."},
    "working_directory": {"type": "string"},
    "timeout_ms": {"type": "integer"},
}
_SHELL = {
    "commands": {**_TEXT_LIST, "description": "Commands, which run in this order."},
    "timeout_ms": {"type": "integer"},
    "max_output_length": {"type": "integer"},
}
_SEARCH = {"query": {"type": "string"}}


@dataclass(frozen=True)
class ItemTool:
    """A tool of a request, as a function for the model."""

    function: dict[str, Any]  # in the format of OpenAI's chat API
    name: str  # in items
    call_type: str = "function_call"  # type of its items
    namespace: str = ""
    grammar: tuple[str, str] | None = None  # of a custom tool's input: syntax and definition


@dataclass
class ToolItems:
    """The tools of a request by the names of their functions."""

    by_name: dict[str, ItemTool] = field(default_factory=dict)
    hosted: list[str] = field(default_factory=list)  # types and names of tools that only OpenAI's server runs

    def add(self, tools: object, namespace: str = "") -> None:
        """Add tools in the API's format.  Raises UsageError for a tool without a name."""
        for tool in tools if isinstance(tools, list) else ():
            if not isinstance(tool, Mapping):
                raise UsageError(f"a tool is {quoted(tool)}, but must be an object")
            tool_type = tool.get("type", "function")
            if tool_type == "custom" and isinstance(tool.get("custom"), Mapping):  # in the chat API
                tool = {**tool["custom"], "type": tool_type}
            if tool_type == "namespace":
                self.add(tool.get("tools"), str(tool.get("name") or ""))
            elif (read := _tool(tool_type, tool, namespace)) is not None:
                self.by_name[read.function["function"]["name"]] = read
            else:
                self.hosted.append(str(tool_type))

    def chosen(self, choice: object, functions: Tools | None = None, *, one_call: bool) -> ChosenTools:
        """Apply ``tool_choice``.  ``functions``: further tools, which are functions."""
        functions = [*(functions or ()), *(tool.function for tool in self.by_name.values())]
        custom = {name: tool.grammar for name, tool in self.by_name.items() if tool.call_type == "custom_tool_call"}
        return choose_tools(functions, self.choice(choice), one_call=one_call, custom=custom)

    def choice(self, choice: object) -> object:
        """Return a ``tool_choice`` with the names of functions."""
        if not isinstance(choice, Mapping):
            return choice
        if choice.get("type") == "allowed_tools":
            listed = choice.get("tools")
            return {**choice, "tools": [self.choice(tool) for tool in listed]} if isinstance(listed, list) else choice
        if choice.get("type") in (None, "function", "custom"):
            name = choice.get("name")
            return (
                {"type": "function", "name": flat_name(str(choice.get("namespace") or ""), name)} if name else choice
            )
        is_offered = isinstance(choice["type"], str) and choice["type"] in self.by_name
        return {"type": "function", "name": choice["type"]} if is_offered else choice

    def item(self, call: ToolCall) -> dict[str, Any]:
        """Return the item of a call, complete or not."""
        tool = self.by_name.get(call.name)
        call_type, name = ("function_call", call.name) if tool is None else (tool.call_type, tool.name)
        item: dict[str, Any] = {"id": _ID[call_type] + call.id.removeprefix("call_"), "type": call_type}
        item |= {"call_id": call.id, "status": "completed" if call.is_whole else "incomplete"}
        values = call.values if call.arguments else {}
        if call_type == "function_call":
            item |= {"name": name, "arguments": call.arguments}
        elif call_type == "custom_tool_call":
            item |= {"name": name, "input": custom_input(call)}
        elif call_type == "local_shell_call":
            item["action"] = {"command": [], "env": {}, **values, "type": "exec"}
        elif call_type == "shell_call":
            item["action"] = {"commands": [], **values}
        else:
            item |= {"execution": "client", "arguments": values}
        return item | ({"namespace": tool.namespace} if tool is not None and tool.namespace else {})


#: Starts of ids by the type of a call.
_ID = {
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "local_shell_call": "lsh_",
    "shell_call": "sh_",
    "tool_search_call": "tsc_",
}


def flat_name(namespace: str, name: object) -> str:
    """Return the name of a namespace's function for the model."""
    separator = "" if not namespace or namespace.endswith(("_", ".", "/")) else "__"
    return f"{namespace}{separator}{name}"


def _tool(tool_type: object, tool: Mapping[str, Any], namespace: str) -> ItemTool | None:
    """Return a tool; None if only OpenAI's server can run it."""
    if tool_type in ("function", "custom"):
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise UsageError(f"a tool of type {tool_type} has no name: give it one")
        function = {key: value for key, value in tool.items() if key != "type"}
        grammar = None
        if tool_type == "custom":
            grammar = _grammar(tool)
            function = {
                "description": _description(tool, grammar),
                "parameters": _object({"input": {"type": "string"}}),
            }
        function["name"] = flat_name(namespace, name)
        call_type = "function_call" if tool_type == "function" else "custom_tool_call"
        return ItemTool({"type": "function", "function": function}, name, call_type, namespace, grammar)
    if tool_type == "local_shell":
        return _built_in("local_shell", "Run a program on the user's computer.", _object(_LOCAL_SHELL, "command"))
    if tool_type == "shell":
        return _built_in("shell", "Run shell commands on the user's computer.", _object(_SHELL, "commands"))
    if tool_type == "tool_search" and tool.get("execution") == "client":
        description = tool.get("description") or "Search for further tools."
        return _built_in("tool_search", description, tool.get("parameters") or _object(_SEARCH))
    return None


def _built_in(name: str, description: str, parameters: dict[str, Any]) -> ItemTool:
    function = {"name": name, "description": description, "parameters": parameters}
    return ItemTool({"type": "function", "function": function}, name, f"{name}_call")


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of an object.  By default all properties are required."""
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _grammar(tool: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return syntax and definition of a custom tool's grammar, if any.  Raises UsageError for a faulty grammar."""
    input_format = tool.get("format")
    if not isinstance(input_format, Mapping) or input_format.get("type", "text") == "text":
        return None
    grammar = input_format["grammar"] if isinstance(input_format.get("grammar"), Mapping) else input_format
    syntax, definition = grammar.get("syntax", "lark"), grammar.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise UsageError(f"the format of the tool {quoted(tool['name'])} needs a lark or regex grammar")
    from localllm.sampling.grammar import check_grammar  # imported here because it imports llguidance

    check_grammar(Sampling(grammar=definition) if syntax == "lark" else Sampling(regex=definition))
    return syntax, definition


def _description(tool: Mapping[str, Any], grammar: tuple[str, str] | None) -> str:
    description = str(tool.get("description") or "")
    if grammar is None:
        return description
    return f"{description}\n\nThe input matches this {grammar[0]} grammar:\n{grammar[1]}".strip()


# -- Input ---------------------------------------------------------------------------------------------------------


def read_items(items: Iterable[Mapping[str, Any]], tools: ToolItems, skipped: list[str]) -> list[Message]:
    """Convert items to messages.  Consecutive reasoning, text and tool calls become one assistant message.

    Args:
        items: the input of a request.
        tools: gets the tools that items add.
        skipped: collects the types of unknown items and parts, which are omitted.
    """
    messages: list[Message] = []
    for number, item in enumerate(items):
        for message in _read(number, item, tools, skipped):
            last = messages[-1] if messages else message
            goes_on = bool(message.calls) or not (last.parts or last.calls)
            if messages and goes_on and last.role == message.role == "assistant":
                reasoning, calls = last.reasoning + message.reasoning, last.calls + message.calls
                messages[-1] = replace(last, parts=last.parts or message.parts, reasoning=reasoning, calls=calls)
            else:
                messages.append(message)
    return messages


def _read(number: int, item: Mapping[str, Any], tools: ToolItems, skipped: list[str]) -> Iterator[Message]:
    item_type = str(item.get("type") or ("message" if "role" in item else "item_reference"))
    if item_type == "message":
        content = {"role": item.get("role"), "content": item.get("content")}
        yield read_message(number, content, skipped=skipped)
    elif item_type == "reasoning":
        # Encrypted reasoning of another server has no text.
        parts = item.get("content") or item.get("summary") or []
        listed = parts if isinstance(parts, list) else [{"text": parts}]
        reasoning = "".join(str(part.get("text", "")) for part in listed if isinstance(part, Mapping))
        if reasoning:
            yield Message("assistant", reasoning=reasoning)
    elif item_type == "additional_tools":
        tools.add(item.get("tools"))
    elif item_type == "mcp_call":
        id_, server = str(item.get("id") or ""), str(item.get("server_label") or "")
        yield _call(number, id_, flat_name(server, item.get("name")), item.get("arguments"))
        error = item.get("error")
        output = item.get("output") if error is None else error if isinstance(error, str) else json.dumps(error)
        yield Message("tool", (str(output or ""),), call_id=id_, is_error=error is not None)
    elif item_type in _CALLS:
        name, arguments = _CALLS[item_type](item)
        yield _call(number, str(item.get("call_id") or item.get("id") or ""), name, arguments)
    elif item_type in _RESULTS:
        output = item.get("output")
        if item_type == "tool_search_output":
            tools.add(item.get("tools"))
            listed = item["tools"] if isinstance(item.get("tools"), list) else []
            output = json.dumps([tool.get("name") for tool in listed if isinstance(tool, Mapping)])
        elif item_type == "shell_call_output":
            output = _shell_output(output)
        elif output is not None and not isinstance(output, str | list):
            output = json.dumps(output, ensure_ascii=False)
        result = {"role": "tool", "tool_call_id": item.get("call_id") or item.get("id"), "content": output}
        yield read_message(number, result, skipped=skipped)
    else:
        skipped.append(item_type)


def _call(number: int, id_: str, name: object, arguments: object) -> Message:
    calls = read_calls(number, [{"id": id_, "function": {"name": name, "arguments": arguments}}])
    return Message("assistant", calls=calls)


def _function(item: Mapping[str, Any]) -> tuple[object, object]:
    name = item.get("name")
    flat = flat_name(str(item.get("namespace") or ""), name) if isinstance(name, str) else name
    return flat, item.get("arguments")


def _custom(item: Mapping[str, Any]) -> tuple[object, object]:
    return _function(item)[0], {"input": item.get("input") or ""}


def _action(name: str) -> Callable[[Mapping[str, Any]], tuple[object, object]]:
    def read(item: Mapping[str, Any]) -> tuple[object, object]:
        action = item.get("action") or item.get("operation")
        values = action if isinstance(action, Mapping) else {}
        omitted = "type" if name == "local_shell" else ""
        return name, {key: value for key, value in values.items() if key != omitted and value not in (None, {})}

    return read


#: Name and arguments of a call by the type of its item.
_CALLS: dict[str, Callable[[Mapping[str, Any]], tuple[object, object]]] = {
    "function_call": _function,
    "custom_tool_call": _custom,
    "local_shell_call": _action("local_shell"),
    "shell_call": _action("shell"),
    "apply_patch_call": _action("apply_patch"),
    "tool_search_call": lambda item: ("tool_search", item.get("arguments")),
}
_RESULTS = {f"{call_type}_output" for call_type in _CALLS} | {"tool_search_output"}


def _shell_output(output: object) -> str:
    """Return the output of shell commands as one text."""
    texts = []
    for part in output if isinstance(output, list) else ():
        if isinstance(part, Mapping):
            outcome = part["outcome"] if isinstance(part.get("outcome"), Mapping) else {}
            is_late = outcome.get("type") == "timeout"
            end = "the time limit was exceeded" if is_late else f"exit code {outcome.get('exit_code')}"
            texts.append("".join((str(part.get("stdout") or ""), str(part.get("stderr") or ""), f"\n({end})")))
    return "\n".join(texts) if isinstance(output, list) else str(output or "")
