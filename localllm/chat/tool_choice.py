"""Applies ``tool_choice``: the offered tools, forced calls, and the grammar that makes calls follow their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.errors import UsageError

Tools = list[dict[str, Any]]

#: llguidance's options for schemas.  JSON is on one line, because a model that may write white space between values
#: may write it endlessly.  Unknown parts of a schema are warnings, not errors.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": True}


@dataclass(frozen=True)
class ChosenTools:
    offered: Tools  # tools in the prompt, in OpenAI's format
    forced: Tools  # the model must call one of these tools; empty if it may answer in text


def choose_tools(tools: Tools | None, choice: object) -> ChosenTools:
    """Applies ``tool_choice``, in the format of OpenAI's or Anthropic's API."""
    tools = tools or []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise UsageError(f"tool {number} is not a function with a name: only such tools are called")
    choice_type = choice
    if isinstance(choice, Mapping):
        choice_type = choice.get("type", "function" if {"function", "name"} & choice.keys() else None)
    if choice_type in (None, "auto"):
        return ChosenTools(tools, [])
    if choice_type == "none":
        return ChosenTools([], [])
    if choice_type in ("required", "any"):
        forced = tools
    elif choice_type in ("function", "tool") and isinstance(choice, Mapping):
        function = choice.get("function", choice)
        forced = _named(tools, [function])
    elif choice_type == "allowed_tools" and isinstance(choice, Mapping):
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if not isinstance(listed, list):
            raise UsageError("tool_choice has no list of tools: write the allowed ones as 'tools'")
        tools = _named(tools, [item.get("function", item) if isinstance(item, Mapping) else item for item in listed])
        if allowed.get("mode", "auto") != "required":
            return ChosenTools(tools, [])
        forced = tools
    else:
        raise UsageError(
            f"tool_choice is {choice!r:.80}, but must be 'auto', 'none', 'required', or name a function as "
            '{"type": "function", "function": {"name": …}}'
        )
    if not forced:
        raise UsageError("tool_choice wants a call, but there are no tools: give some, or leave it out")
    return ChosenTools(tools, forced)


def _named(tools: Tools, functions: Sequence[object]) -> Tools:
    selected: Tools = []
    for function in functions:
        name = function.get("name") if isinstance(function, Mapping) else function
        matches = [tool for tool in tools if tool["function"]["name"] == name]
        if not matches:
            words = "no tool" if name is None else f"{name!r:.80}, which is none of the tools"
            raise UsageError(f"tool_choice names {words}: name one of them")
        selected += matches
    return selected


def call_schema(tools: Tools, *, only_strict: bool = False) -> dict[str, Any]:
    """Return the JSON schema of a call of any of the tools, ``{"name": …, "arguments": {…}}``.

    ``only_strict``: allow any arguments for tools that are not ``strict``.
    """
    calls = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        parameters = function.get("parameters") if not only_strict or function.get("strict") else None
        # With an id the schema is a separate resource, and its references are resolved inside it.
        arguments = {"$id": f"tool{number}", "type": "object", **(parameters or {})}
        properties = {"name": {"const": function["name"]}, "arguments": arguments}
        fixed = {"required": ["name", "arguments"], "additionalProperties": False}
        calls.append({"type": "object", "properties": properties, **fixed})
    return {"anyOf": calls}


def calls_grammar(tools: Tools) -> str:
    """Return a Lark grammar for any text.  The text between tags of calls must be a valid call."""
    schema = json.dumps({"x-guidance": JSON_OPTIONS, **call_schema(tools, only_strict=True)})
    return (
        "start: call* TEXT\n"
        'call: before "\\n"? json "\\n"? "</tool_call>"\n'
        'before[lazy]: TEXT "<tool_call>"\n'
        f"json: %json {schema}\n"
        "TEXT: /(.|\\n)*/\n"
    )
