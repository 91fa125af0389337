"""Deeply nested input raises a typed error on every version of Python, in a thread with a small stack."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localllm.chat import ChatTemplate
from localllm.chat.conversation import ToolCall
from localllm.chat.reply import ReplyParser
from localllm.errors import LocalLLMError, TemplateError
from localllm.nesting import (
    MAX_CALL_NESTING,
    MAX_NESTING,
    NestingError,
    check_expression,
    check_nesting,
    parse_json,
)
from localllm.options.declared import Sampling
from localllm.sampling.grammar import check_grammar
from localllm.tui.chat.export import from_json
from tests.helpers.data import ROOT

MARK = "]<]minimax[>["


def call(text: str, step: int = 1000) -> str:
    """Return the arguments of the tool call in a reply."""
    parser = ReplyParser([{"type": "function", "function": {"name": "add"}}])
    events = [event for i in range(0, len(text), step) for event in parser.feed(text[i : i + step])]
    (tool_call,) = (event for event in [*events, *parser.finish()] if isinstance(event, ToolCall))
    return tool_call.arguments


def json_call(n: int) -> str:
    return call('<tool_call>{"name": "add", "arguments": {"a": ' + "[" * n + "]" * n + "}}</tool_call>")


def python_call(value: str) -> str:
    return call(f"<|tool_call_start|>[add(a={value})]<|tool_call_end|>")


def marked_call(n: int) -> str:
    parts = f"{MARK}<a>" * n + "1" + f"{MARK}</a>" * n
    return call(f'{MARK}<tool_call>{MARK}<invoke name="add">{parts}{MARK}</invoke>{MARK}</tool_call>')


def schema(n: int) -> str:
    return '{"items": ' * n + "{}" + "}" * n


PARSERS: dict[str, Any] = {
    "branches of a template": lambda n: ChatTemplate("{% if 0 %}" + "{%elif 0%}" * min(n, 3000) + "{% endif %}"),
    "arguments from a client": lambda n: ToolCall("add", "[" * n + "]" * n).is_whole,
    "a call as JSON": json_call,
    "a call as Python": lambda n: python_call("[" * n + "]" * n),
    "operators": lambda n: python_call("-" * n + "1"),
    "words": lambda n: python_call("not " * n + "1"),
    "subscripts": lambda n: python_call("x" + "[0]" * n),
    "a call with marked parts": lambda n: marked_call(min(n, 3000)),
    "a schema": lambda n: check_grammar(Sampling(json_schema=schema(n))),
    "a schema in a grammar": lambda n: check_grammar(Sampling(grammar="start: %json " + schema(n))),
    "GBNF": lambda n: check_grammar(Sampling(grammar="root ::= " + "(" * n + '"a"' + ")" * n)),
    "a regular expression": lambda n: check_grammar(Sampling(regex="(" * n + "a" + ")" * n)),
    "an exported chat": lambda n: from_json('{"messages": ' * n + "[]" + "}" * n),
}


def parse_all() -> None:
    for name, parse in PARSERS.items():
        for n in (30, 60, 90, 120, 1000, 3000, 20_000):
            print(name, n, flush=True)
            try:
                parse(n)
            except LocalLLMError as error:
                print(error)


def test_no_nesting_ends_the_process() -> None:
    program = (
        "import threading, tests.localllm.test_nesting as t; threading.stack_size(512 << 10); "
        "thread = threading.Thread(target=t.parse_all); thread.start(); thread.join(); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "done", done.stdout[-1000:] + done.stderr[-1000:]
    assert done.stderr == ""


def test_branches_of_a_template_count_as_nesting() -> None:
    ChatTemplate("{% if 0 %}" + "{%elif 0%}" * 90 + "{% endif %}")
    with pytest.raises(TemplateError, match="nested too deeply"):
        ChatTemplate("{% if 0 %}" + "{%elif 0%}" * 120 + "{% endif %}")


@pytest.mark.parametrize("n", [MAX_CALL_NESTING - 2, MAX_CALL_NESTING + 2])
def test_calls_of_all_syntaxes_have_one_limit(n: int) -> None:
    is_accepted = n < MAX_CALL_NESTING
    lists = "[" * n + "]" * n
    assert (python_call(lists) == json.dumps({"a": json.loads(lists)})) is is_accepted
    for arguments, bracket in ((marked_call(n), "{"), (json_call(n - 1), "[")):
        parse_json(arguments, MAX_CALL_NESTING)
        assert (arguments.count(bracket) >= n - 1) is is_accepted  # deeper levels are omitted
    assert ToolCall("add", f'{{"a": {lists[1:-1]}}}').is_whole is is_accepted


def test_nesting_is_counted_outside_of_strings() -> None:
    assert parse_json("[" * MAX_NESTING + "]" * MAX_NESTING, parse_constant=str)
    for text in ('{"a": "' + "[" * 999 + '\\""}', "[" + "[], " * 999 + "[]]", json.dumps({"a": '"' + "{" * 999})):
        assert parse_json(text) == json.loads(text)
        assert parse_json(text.encode("utf-16")) == json.loads(text)
        check_nesting(text.encode())
    for text in ("[" * 101, '["\\"", ' * 101, '{"]": ' * 101):
        for encoded in (text, text.encode()):
            with pytest.raises(NestingError, match="at most 100 levels"):
                check_nesting(encoded)
    check_nesting("[[[]]] " + "[" * 999, limit=3)


EXPRESSIONS = ["(" * 9 + "1" + ")" * 9, "-" * 9 + "1", "x" + ".a" * 9, "x" + "()" * 9, "x" + "[0]" * 9]
EXPRESSIONS += ["1+" * 9 + "1", "not " * 9 + "1", "lambda: " * 9 + "1", "1 if 2 else " * 9 + "1", "1**" * 9 + "1"]
EXPRESSIONS += ["{1: " * 9 + "1" + "}" * 9, "f(-" * 5 + "1" + ")" * 5]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_operators_of_an_expression_nest(text: str) -> None:
    with pytest.raises(NestingError):
        check_expression(f"[{text}]", limit=8)
    check_expression(f"[{text}]", limit=40)


def test_items_of_an_expression_do_not_nest() -> None:
    text = "f(a=[" + "-1.5e-3, [2], 'it''s ((((((((', " * 99 + "], b={'c': -1, 'd': None})"
    check_expression(text, limit=8)
    ast.parse(text)
    with pytest.raises(SyntaxError):
        check_expression("f('''")


def test_a_checkpoint_with_deep_json_is_refused(tmp_path: Path) -> None:
    from localllm.convert.settings import read_json
    from localllm.errors import ModelError

    (tmp_path / "config.json").write_text("[" * 5000 + "]" * 5000)
    with pytest.raises(ModelError, match="nested too deeply"):
        read_json(tmp_path / "config.json")
