"""Applies ``tool_choice``: the offered tools and forced calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.errors import UsageError

Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class ChosenTools:
    """Tools that a reply may call, in OpenAI's format."""

    offered: Tools = field(default_factory=list)
    forced: Tools = field(default_factory=list)  # the reply must call one of these; empty if it may be text
    one_call: bool = False  # whether the reply has at most one call
    #: Custom tools by name: syntax ("lark" or "regex") and definition of the input's grammar, or None.
    custom: Mapping[str, tuple[str, str] | None] = field(default_factory=dict)


def choose_tools(tools: Tools | None, choice: object = None, **more: Any) -> ChosenTools:
    """Apply ``tool_choice``, in the format of OpenAI's or Anthropic's API.  ``more``: other fields of the result."""

    def chosen(offered: Tools, forced: Tools) -> ChosenTools:
        return ChosenTools(offered, forced, **more)

    tools = tools or []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or "function" not in tool or not is_function(tool):
            raise UsageError(f"tool {number} is not a function with a name: only such tools are called")
    choice_type = choice
    if isinstance(choice, Mapping):
        choice_type = choice.get("type", "function" if {"function", "name"} & choice.keys() else None)
    if choice_type in (None, "auto"):
        return chosen(tools, [])
    if choice_type == "none":
        return chosen([], [])
    if choice_type in ("required", "any"):
        forced = tools
    elif choice_type in ("function", "tool", "custom") and isinstance(choice, Mapping):
        forced = _named(tools, [choice])
    elif choice_type == "allowed_tools" and isinstance(choice, Mapping):
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if not isinstance(listed, list):
            raise UsageError("tool_choice has no list of tools: write the allowed ones as 'tools'")
        tools = _named(tools, listed)
        if allowed.get("mode", "auto") != "required":
            return chosen(tools, [])
        forced = tools
    else:
        raise UsageError(
            f"tool_choice is {choice!r:.80}, but must be 'auto', 'none', 'required', or name a function as "
            '{"type": "function", "function": {"name": …}}'
        )
    if not forced:
        raise UsageError("tool_choice wants a call, but there are no tools: give some, or leave it out")
    return chosen(tools, forced)


def is_function(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool, in OpenAI's format or without its wrapper, is a function with a name."""
    function = tool.get("function", tool)
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])


def _named(tools: Tools, references: Sequence[object]) -> Tools:
    """Return the tools that the parts of a choice name, such as ``{"type": "custom", "custom": {"name": …}}``."""
    selected: Tools = []
    for reference in references:
        if isinstance(reference, Mapping):
            reference = reference.get("function", reference.get("custom", reference))
        name = reference.get("name") if isinstance(reference, Mapping) else reference
        matches = [tool for tool in tools if tool["function"]["name"] == name]
        if not matches:
            words = "no tool" if name is None else f"{name!r:.80}, which is none of the tools"
            raise UsageError(f"tool_choice names {words}: name one of them")
        selected += matches
    return selected
