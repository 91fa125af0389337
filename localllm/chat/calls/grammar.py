"""Grammars of calls, in llguidance's notation, built from the declared formats and the tools' schemas.

A grammar starts where a call starts. Only calls of the offered tools follow it, with arguments that follow their
schemas; text is free between and after calls.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from localllm.chat.calls.declaration import Arguments, CallFormat, PythonArguments
from localllm.chat.calls.values import Rules, Schema, UnwritableError, arguments_rule, flexible, input_rule, literal
from localllm.errors import UsageError

#: Returns a schema in the form of `localllm.sampling.json_schema`, for its JSON.
Enforced = Callable[[str], Schema]

#: Maximum characters of all enforced schemas. The tools after them have any arguments.
MAX_CHARACTERS = 256 << 10

#: Terminals of the words in heads. ``header`` is the rest of a header of gpt-oss.
_PLACEHOLDERS = {
    "{id}": "/[A-Za-z0-9_-]{1,40}/",
    "{number}": "/[0-9]{1,3}/",
    "{header}": r'/( ?<\|constrain\|>json| json)?/ "<|message|>"',
}
#: Names of tools that tags and Python's calls can have.
_NAME = re.compile(r"[\w.-]{1,256}")

#: Starts of calls in gpt-oss.
_HEADERS = ("<|channel|>commentary to=functions.", "<|start|>assistant to=functions.")


@dataclass(frozen=True)
class CallGrammar:
    """The grammar of the calls in a reply.

    Attributes:
        call_format: The model's format.
        functions: JSON of the functions that may be called.
        openings: Texts that start a call.
        must_call: Whether the answer is one call, and nothing else.
        one_call: Whether a reply has at most one call.
    """

    call_format: CallFormat
    functions: str
    openings: tuple[str, ...]
    must_call: bool
    one_call: bool

    @property
    def is_bare(self) -> bool:
        """Whether a call can only be at the start of the answer."""
        return self.call_format.is_bare

    @property
    def is_anywhere(self) -> bool:
        """Whether calls may also start in the reasoning."""
        return self.call_format.is_control or self.call_format.is_harmony

    def lark(self, enforced: Enforced, ends: Collection[str]) -> str:
        """Return the grammar in llguidance's notation. Takes a while for large schemas.

        Args:
            enforced: converts the JSON of a schema to the form of `localllm.sampling.json_schema`; raises ValueError
                if the schema cannot be enforced.
            ends: names of the tokens that end a reply.
        """
        rules, functions = Rules(), json.loads(self.functions)
        if self.call_format.is_harmony:
            return f"start: {self._messages(functions, rules, enforced)}\n{rules}"
        form = _with_tags(self.call_format)
        if form.closing in ends:
            form = replace(form, closing="")
        block = _block(form, _calls(form, functions, rules, enforced), one_call=self.one_call)
        opening = literal(form.opening.strip()) if form.opening else ""
        start = f"{opening} {block}"
        if self.must_call:
            start = f"/[ \\n]{{1,4}}/? {start}"
        if form.opening and not self.one_call:
            if form.closing:
                start += f" ({rules.lazy(opening)} {block})* /(.|\\n)*/"
            elif form.repeats:
                start += f" ({flexible(form.between, spaces=True)} {opening} {block})*"
        return f"start: {start}\n{rules}"

    def _messages(self, functions: Sequence[Mapping[str, Any]], rules: Rules, enforced: Enforced) -> str:
        """Return a rule for a call in gpt-oss. A forced call follows the start of a message in the prompt."""
        calls = [
            _calls(
                replace(self.call_format, head=f"{{name}}{channel}{{header}}", tail=""), functions, rules, enforced
            )
            for channel in ("", "<|channel|>commentary")
        ]
        if not self.must_call:
            return f"{literal(_HEADERS[0])} {calls[0]} | {literal(_HEADERS[1])} {calls[1]}"
        reasoning = rules.lazy('"<|end|>"', '"<|channel|>analysis<|message|>" /(.|\\n)*/')
        start, to = literal("<|start|>assistant"), literal(" to=functions.")
        return f"({reasoning} {start})? ({literal(_HEADERS[0])} {calls[0]} | {to} {calls[1]})"


def call_grammar(
    call_format: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    custom: Mapping[str, tuple[str, str] | None] = MappingProxyType({}),
    *,
    must_call: bool = False,
    one_call: bool = False,
) -> CallGrammar:
    """Return the grammar of the calls of a reply.

    Args:
        call_format: the model's format.
        tools: the tools that may be called, as OpenAI's API describes them.
        custom: as in `localllm.chat.tool_choice.ChosenTools`.
        must_call, one_call: as in `CallGrammar`.

    Raises:
        UsageError: the format cannot express the name of a tool.
    """
    functions = [tool.get("function", tool) for tool in tools]
    names = [str(function["name"]) for function in functions]
    if not call_format.head.startswith("{"):
        for name in names:
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"the tool name {name!r:.80} cannot be written in the calls of this model: "
                    "use only letters, digits, '_', '-' and '.'"
                )
    schemas = json.dumps(
        [
            {"name": name, "parameters": function.get("parameters"), "input_grammar": custom.get(name)}
            for name, function in zip(names, functions, strict=True)
        ]
    )
    return CallGrammar(call_format, schemas, _openings(call_format, names), must_call, one_call or must_call)


def _with_tags(call_format: CallFormat) -> CallFormat:
    """Return the format with the tags around calls that are declared as a part of the call."""
    if not (tag := call_format.tag_of_head):
        return call_format
    head, end = call_format.head.removeprefix(tag), call_format.tail
    return replace(call_format, head=head, tail="", opening=tag, closing=end, repeats=True)


def _openings(form: CallFormat, names: Sequence[str]) -> tuple[str, ...]:
    if form.is_harmony:
        return _HEADERS
    if not form.is_bare:
        return (form.opening.strip() or form.tag_of_head,)
    openings = []
    for name in names:
        before, _, after = form.head.partition("{name}")
        first = "(" if isinstance(form.arguments, PythonArguments) else after[0]
        openings += [f"{form.inside[0]}{start}{name}{first}" for start in {before, before.replace(": ", ":")}]
    return tuple(openings)


def _block(form: CallFormat, calls: str, *, one_call: bool) -> str:
    """Return a rule for the calls between one pair of tags, after the opening tag."""
    space = form.opening[len(form.opening.rstrip()) :]
    before = f"{literal(space) if space else ''} {flexible(form.inside[0])}"
    more = "" if one_call or form.repeats else f"({flexible(form.between, spaces=True)} {calls})*"
    return f"{before} {calls} {more} {flexible(form.inside[1] + form.closing)}"


def _calls(form: CallFormat, functions: Sequence[Mapping[str, Any]], rules: Rules, enforced: Enforced) -> str:
    """Return a rule for a call of any of the tools, without the tags around it."""
    before, _, after = form.head.partition("{name}")
    is_json, n_left, calls = before.startswith("{"), MAX_CHARACTERS, []
    for function in functions:
        name, parameters = function["name"], function["parameters"]
        n_left -= len(json.dumps(parameters))
        head = f"{literal(json.dumps(name)[1:-1] if is_json else name)} {_terminals(after, is_json)}"
        grammar = function["input_grammar"]
        n_left -= 25 * len(grammar[1]) if grammar else 0  # escaping lengthens it
        if n_left < 0:
            parameters = grammar = None
        arguments = _arguments(form.arguments, parameters, grammar, rules, enforced)
        calls.append(f"{rules.add(head.strip(), is_terminal=True)} {arguments} {flexible(form.tail)}")
    # The names share one terminal for the text before them, because llguidance limits the size of all terminals.
    start = rules.add(_terminals(before, is_json), is_terminal=True) if before else ""
    return rules.add(f"{start} ({' | '.join(calls)})")


def _terminals(text: str, is_json: bool) -> str:
    pieces = filter(None, re.split(r"(\{\w+\})", text))
    return " ".join(
        _PLACEHOLDERS.get(piece) or (flexible(piece, spaces=True) if is_json else literal(piece)) for piece in pieces
    )


def _arguments(form: Arguments, parameters: Any, grammar: Any, rules: Rules, enforced: Enforced) -> str:
    """Return a rule for the arguments of a tool. All arguments are allowed if its schema cannot be enforced.

    ``grammar``: syntax and definition of the input of a custom tool; None for other tools.
    """
    if grammar is not None:
        with contextlib.suppress(ValueError):
            syntax, definition = grammar
            return input_rule(form, syntax, definition, rules)
    any_object = {"type": "object"}
    parameters = parameters if isinstance(parameters, dict) else any_object
    try:
        return arguments_rule(form, parameters, enforced(json.dumps({**parameters, "type": "object"})), rules)
    except (UnwritableError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return arguments_rule(form, any_object, any_object, rules)
