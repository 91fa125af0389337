"""Replies in the formats of all families, parsed in chunks of any size."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from localllm.chat.conversation import ToolCall
from localllm.chat.reply import CallDelta, ReplyParser
from localllm.chat.thinking import Piece

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
        },
    }
]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TAGS = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)

ARGUMENTS = '{"a": 1, "note": "x, {y: 2}\\n\\"z\\""}'
BOTH = json.loads(ARGUMENTS)
NOTE = BOTH["note"]

#: A call in each family's format.
M3 = "]<]minimax[>["
FAMILIES = {
    "hermes": f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen coder, nemotron 3": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n"
    f"{NOTE}\n</parameter>\n</function>\n</tool_call>",
    "nemotron 2": f'<TOOLCALL>[{{"name": "add", "arguments": {ARGUMENTS}}}]</TOOLCALL>',
    "glm 4.6": f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>note</arg_key>\n"
    f"<arg_value>{NOTE}</arg_value>\n</tool_call>",
    "glm 4.7": f"<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>note</arg_key>"
    f"<arg_value>{NOTE}</arg_value></tool_call>",
    "minimax m1": f'<tool_calls>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_calls>',
    "minimax m2": f'<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    f'<parameter name="note">{NOTE}</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax m3": f'{M3}<tool_call>\n{M3}<invoke name="add">{M3}<a>1{M3}</a>{M3}<note>{NOTE}{M3}</note>'
    f"{M3}</invoke>\n{M3}</tool_call>",
    "deepseek v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    f"{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" '
    f'string="false">1</｜DSML｜parameter>\n<｜DSML｜parameter name="note" string="true">{NOTE}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
    f'</｜DSML｜parameter>\n<｜DSML｜parameter name="note" string="true">{NOTE}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "hunyuan 3": "<tool_calls:opensource>\n<tool_call:opensource>add<tool_sep:opensource>\n<arg_key:opensource>a"
    "</arg_key:opensource>\n<arg_value:opensource>1</arg_value:opensource>\n<arg_key:opensource>note"
    f"</arg_key:opensource>\n<arg_value:opensource>{NOTE}</arg_value:opensource>\n</tool_call:opensource>\n"
    "</tool_calls:opensource>",
    "muse glimmer": '<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n'
    f'<atem:parameter name="note">{NOTE}</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    "seed": "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=note>"
    f"{NOTE}</parameter>\n</function>\n</seed:tool_call>",
    "minicpm 5": f'<function name="add"><param name="a">1</param><param name="note">{NOTE}</param></function>',
    "command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": '
    f"{ARGUMENTS}}}\n]<|END_ACTION|>",
    "apertus": f'<|tools_prefix|>[{{"add": {ARGUMENTS}}}]<|tools_suffix|>',
    "solar": "<|tool_calls|><|tool_call:begin|>call_0<|tool_call:name|>add<|tool_call:args|>"
    f"{ARGUMENTS}<|tool_call:end|><|calls|>",
    "gigachat 3": f'<|function_call|>{{"name": "add", "arguments": {ARGUMENTS}}}',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "mistral": f'[TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}}}]',
    "mistral small": f"[TOOL_CALLS]add[CALL_ID]abc123456[ARGS]{ARGUMENTS}",
    "ministral": f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}",
    "gemma": f'<|tool_call>call:add{{a:1,note:<|"|>{NOTE}<|"|>}}<tool_call|>',
    "hunyuan a13b, jamba": f'<tool_calls>[{{"name": "add", "arguments": {ARGUMENTS}}}]</tool_calls>',
    "phi 4 mini": f'<|tool_call|>[{{"name": "add", "arguments": {ARGUMENTS}}}]<|/tool_call|>',
    "internlm 2.5": f'<|action_start|><|plugin|>\n{{"name": "add", "parameters": {ARGUMENTS}}}<|action_end|>',
    "command r+": f'Action:\n```json\n[\n    {{\n        "tool_name": "add",\n        "parameters": {ARGUMENTS}\n'
    "    }\n]```",
    "firefunction": f' functools[{{"name": "add", "arguments": {ARGUMENTS}}}]',
    "gigachat 3 of 2025": "<|message_sep|>\n\nfunction call<|role_sep|>\n"
    f'{{"name": "add", "arguments": {ARGUMENTS}}}<|message_sep|>',
    "llama 3": f'<|python_tag|>{{"type": "function", "name": "add", "parameters": {ARGUMENTS}}}',
    "llama 3.1": f"<function=add>{ARGUMENTS}</function>",
}

#: Reasoning before an answer, and the answer.
THOUGHTS = {
    "tags": "<think>\nSo <b>?</think>\n\nLet me see.\n",
    "gemma": "<|channel>thought\nSo <b>?<channel|>Let me see.\n",
    "mistral": "[THINK]So <b>?[/THINK]Let me see.",
}

HARMONY = (
    "<|channel|>analysis<|message|>So <b>?<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
)
HARMONY_CALLS = {
    "in the channel": "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|>",
    "in the role": f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
    "without an end": f"<|start|>assistant<|channel|>commentary to=functions.add<|message|>{ARGUMENTS}",
}

#: Replies, with their reasoning, text and calls.
CASES = [
    *(
        (f"{begun}{call}", ("So <b>?", "Let me see.", [BOTH]))
        for begun in THOUGHTS.values()
        for call in FAMILIES.values()
    ),
    *((f"{call}\n{call}", ("", "", [BOTH, BOTH])) for call in FAMILIES.values()),
    *((HARMONY + call, ("So <b>?", "Let me see.", [BOTH])) for call in HARMONY_CALLS.values()),
    (
        HARMONY_CALLS["in the role"].removeprefix("<|start|>assistant") + HARMONY_CALLS["in the channel"],
        ("", "", [BOTH, BOTH]),
    ),
    ("<|channel|>final<|message|>Hello <|b|>.<|return|>", ("", "Hello <|b|>.", [])),
    ("<|channel|>analysis<|message|>Hm", ("Hm", "", [])),
    ("<|chan", ("", "<|chan", [])),
    ("[TOOL", ("", "[TOOL", [])),
    ("Yes. \n", ("", "Yes. \n", [])),
    ("Hello.", ("", "Hello.", [])),
    (CALL, ("", "", [{"a": 1}])),
    (f"<think>So?</think>\n\nLet me see.\n{CALL}\n{CALL}\n", ("So?", "Let me see.", [{"a": 1}, {"a": 1}])),
    (TAGS, ("", "", [{"a": 1, "note": "2"}])),
    (CALL.removesuffix("</tool_call>"), ("", "", [{"a": 1}])),
    ('{"name": "add", "parameters": {"a": 1}}', ("", "", [{"a": 1}])),
    ('[{"name": "add", "arguments": "{\\"a\\": 1}"}, {"name": "add", "arguments": {}}]', ("", "", [{"a": 1}, {}])),
    ('{"a": 1}', ("", '{"a": 1}', [])),
    ("a < b, <tool", ("", "a < b, <tool", [])),
    (f"{CALL}\nThere.", ("", "There.", [{"a": 1}])),
]


def read(parser: ReplyParser, pieces: list[str], is_cut: bool = False) -> tuple[str, str, list[ToolCall]]:
    """Return reasoning, text and calls of a reply; checks that each call starts and ends once, in order."""
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish(is_cut=is_cut)
    said = [event for event in events if isinstance(event, Piece)]
    calls, own = list[ToolCall](), list[CallDelta]()
    for event in events:
        if isinstance(event, CallDelta):
            own.append(event)
        elif isinstance(event, ToolCall):
            assert [each.begins for each in own] == [True] + [False] * (len(own) - 1)
            assert {(each.index, each.id, each.name) for each in own} == {(len(calls), event.id, event.name)}
            assert "".join(each.arguments for each in own) == event.arguments
            calls.append(event)
            own = []
    assert not own
    assert "".join(event.text for event in events if not isinstance(event, ToolCall)) == "".join(p.text for p in said)
    return (
        "".join(event.text for event in said if event.thinking),
        "".join(event.text for event in said if not event.thinking),
        calls,
    )


def parsed(parser: ReplyParser, pieces: list[str]) -> tuple[str, str, list[Any]]:
    thinking, text, calls = read(parser, pieces)
    return thinking, text, [json.loads(call.arguments) for call in calls]


def cut(text: str, lengths: list[int]) -> list[str]:
    pieces = []
    for n in lengths:
        pieces.append(text[:n])
        text = text[n:]
    return [*pieces, text]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0][:40])
def test_replies_are_taken_apart(case: tuple[str, object]) -> None:
    text, expected = case
    opened = "<|start|>assistant" if text.startswith((" to=", "<|channel|>")) else ""
    for pieces in ([text], list(text)):
        parser = ReplyParser(TOOLS, opened)
        assert parsed(parser, pieces) == expected
        assert not parser.warnings


#: Fragments of replies, as a faulty model may combine them.
FRAGMENTS = [
    *FAMILIES.values(),
    *HARMONY_CALLS.values(),
    *THOUGHTS.values(),
    HARMONY,
    "<|end|>",
    "\n",
    " ",
    "text",
    "{",
    "[",
]


def arguments(calls: list[ToolCall]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(FRAGMENTS).flatmap(lambda text: st.tuples(st.just(text), st.integers(1, len(text)))),
        max_size=4,
    ),
    st.lists(st.integers(1, 12), max_size=60),
    st.sampled_from(["", "<think>", "<|start|>assistant"]),
    st.booleans(),
)
def test_the_pieces_do_not_matter(
    parts: list[tuple[str, int]], lengths: list[int], opened: str, is_cut: bool
) -> None:
    text = "".join(part[:n] if n % 3 else part for part, n in parts)
    whole, piecewise = ReplyParser(TOOLS, opened), ReplyParser(TOOLS, opened)
    *said, calls = read(whole, [text], is_cut)
    *said_piecewise, calls_piecewise = read(piecewise, cut(text, lengths), is_cut)
    assert (said_piecewise, arguments(calls_piecewise)) == (said, arguments(calls))
    assert piecewise.warnings == whole.warnings


@pytest.mark.parametrize(
    "body", ['{"name": ["add"], "arguments": {}}', '{"a": 1}', "[" * 100_000, "[]", "3", "", "so it is"]
)
def test_text_between_tags_that_is_no_call_stays_text_with_a_warning(body: str) -> None:
    text = f"So: <tool_call>{body}</tool_call> Yes."
    parser = ReplyParser(TOOLS)
    assert parsed(parser, [text]) == ("", text, [])
    assert len(parser.warnings) == 1


@pytest.mark.parametrize(
    ("body", "text", "arguments", "n_warnings"),
    [
        ('{"name": "add", "arguments": [1]}', "", {"arguments": [1]}, 1),
        ('{"name": "add", "arguments": "x"}', "", {"arguments": "x"}, 1),
        ('{"name": "add", "arguments": "{\\"a\\": 1,}"}', "", {"a": 1}, 0),
        ('{"name": "add", "a": 1, "note": "x"}', "", {"a": 1, "note": "x"}, 0),
        ('{"function": {"name": "add", "arguments": {"a": 1}}}', "", {"a": 1}, 0),
        ("{'name': 'add', 'arguments': {'a': 1, 'note': 'it\\'s'}}", "", {"a": 1, "note": "it's"}, 0),
        ('{name: "add", arguments: {a: 1}}', "", {"a": 1}, 0),
        ('{"arguments": {"a": 1}, "name": "add"}', "", {"a": 1}, 0),
        ('{"name": "add", "arguments": {"a": 1}', "", {"a": 1}, 0),
        ('{"name": "add", "arguments": {"a": 1, "note": "x', "", {"a": 1, "note": "x"}, 1),
        ("<function=add>what", "what ", {}, 1),
        ("<function=add><parameter=a>1</parameter>what", "what ", {"a": 1}, 1),
        ("<function=add><parameter=a>1", "", {"a": 1}, 0),
        ("<function=add><parameter=a>1</parameter>", "", {"a": 1}, 0),
        ("<function=add/>", "", {}, 0),
    ],
)
def test_errors_in_a_call_are_repaired(body: str, text: str, arguments: object, n_warnings: int) -> None:
    reply = f"So: <tool_call>{body}</tool_call> Yes."
    for pieces in ([reply], list(reply)):
        parser = ReplyParser(TOOLS)
        _, said, calls = parsed(parser, pieces)
        assert (said, calls, len(parser.warnings)) == (f"So: {text}Yes.", [arguments], n_warnings)


@pytest.mark.parametrize("family", [*FAMILIES, *HARMONY_CALLS])
def test_a_call_that_is_cut_off_is_a_call(family: str) -> None:
    """At any point of the stream, the received arguments are a prefix of JSON."""
    call = {**FAMILIES, **HARMONY_CALLS}[family]
    opened = "<|start|>assistant" if family in HARMONY_CALLS else ""
    call = call.removeprefix("<|start|>assistant")
    n_begun = 0
    for n in range(len(call)):
        parser = ReplyParser(TOOLS, opened)
        _, text, calls = read(parser, list(call[:n]), is_cut=True)
        if calls:
            n_begun += 1
            (found,) = calls
            assert found.name == "add"
            assert json.dumps(BOTH).replace(" ", "").startswith(found.arguments.replace(" ", ""))
            assert not text.strip()
            assert not parser.warnings
        else:
            assert n_begun == 0
    assert n_begun >= len(ARGUMENTS) - 1


@pytest.mark.parametrize("family", [*FAMILIES, *HARMONY_CALLS])
def test_arguments_come_while_they_are_written(family: str) -> None:
    call = {**FAMILIES, **HARMONY_CALLS}[family].removeprefix("<|start|>assistant")
    parser = ReplyParser(TOOLS, "<|start|>assistant" if family in HARMONY_CALLS else "")
    begun = call.index("y: 2") if "<" not in NOTE and "arg_" not in call and "param" not in call else call.index("2}")
    events = parser.feed(call[:begun])
    deltas = [event for event in events if isinstance(event, CallDelta)]
    assert deltas[0].begins
    assert '"a": 1' in "".join(delta.arguments for delta in deltas).replace('"a":1', '"a": 1')


@pytest.mark.parametrize(
    ("prefix", "rest", "expected"),
    [
        ("", " there.", ("", " there.", [])),
        ("Hello ", "there.", ("", "there.", [])),
        ("Hello", " there.", ("", " there.", [])),
        ("<think>So", " I think.</think>Yes.", (" I think.", "Yes.", [])),
        ("<think>So</think>", "Yes.", ("", "Yes.", [])),
        ("So: <tool", " of mine", ("", " of mine", [])),
        ("So: <tool", CALL.removeprefix("<tool"), ("", "", ['{"a": 1}'])),
        (CALL[:45], CALL[45:], ("", "", ['{"a": 1}'])),
        ("{", '"b": 2}', ("", '"b": 2}', [])),
    ],
)
def test_what_a_reply_begins_with_is_not_told_again(prefix: str, rest: str, expected: object) -> None:
    tokenizer: Any = SimpleNamespace(decode=lambda ids, special: "user: ? assistant:")
    for pieces in ([rest], list(rest)):
        thinking, text, calls = read(ReplyParser.after([1], tokenizer, TOOLS, prefix), pieces)
        assert (thinking, text, [call.arguments for call in calls]) == expected


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_arguments_between_tags_may_have_parts(step: int) -> None:
    def tagged(name: str, *values: str) -> str:
        return "".join(f"{M3}<{name}>{value}{M3}</{name}>" for value in values)

    texts = {"type": "array", "items": {"type": "string"}}
    parts = {"a": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/texts"}}}}
    parameters = {"type": "object", "properties": {**parts, "empty": texts}, "$defs": {"texts": texts}}
    arguments = tagged("a", tagged("a", "1") + tagged("b", tagged("item", "2", "x < y")) + tagged("c", "true"))
    arguments += tagged("empty", "") + tagged("rows", tagged("item", tagged("x", "1.5"), tagged("x", "two")))
    reply = f'{M3}<tool_call>\n{M3}<invoke name="add">{arguments}{M3}</invoke>\n{M3}</tool_call>'
    parser = ReplyParser([{"function": {"name": "add", "parameters": parameters}}])
    _, text, (call,) = read(parser, [reply[i : i + step] for i in range(0, len(reply), step)])
    assert json.loads(call.arguments) == {
        "a": {"a": "1", "b": ["2", "x < y"], "c": True},
        "empty": [],
        "rows": [{"x": 1.5}, {"x": "two"}],
    }
    assert (text, parser.warnings) == ("", [])


def nested(n: int) -> str:
    return "[" * n + "1" + "]" * n


def nested_json(n: int) -> str:
    return f'{{"note": {nested(n)}, "a": 1}}'


#: A call with an argument of ``n`` nested lists, and a second argument.
DEEP: dict[str, Callable[[int], str]] = {
    "json": lambda n: f'<tool_call>{{"name": "add", "arguments": {nested_json(n)}}}</tool_call>',
    "json, name last": lambda n: f'<tool_call>{{"arguments": {nested_json(n)}, "name": "add"}}</tool_call>',
    "json in a string": lambda n: (
        f"<tool_call>{json.dumps({'name': 'add', 'arguments': nested_json(n)})}</tool_call>"
    ),
    "gemma": lambda n: f"<|tool_call>call:add{{note:{nested(n)},a:1}}<tool_call|>",
    "python": lambda n: f"<|tool_call_start|>[add(note={nested(n)}, a=1)]<|tool_call_end|>",
    "between tags": lambda n: (
        f"<tool_call><function=add><parameter=note>{nested(n)}</parameter><parameter=a>1</parameter></function>"
        "</tool_call>"
    ),
    "nested tags": lambda n: (
        f'{M3}<tool_call>{M3}<invoke name="add">{M3}<note>'
        + f"{M3}<a>" * n
        + "1"
        + f"{M3}</a>" * n
        + f"{M3}</note>{M3}<a>1{M3}</a>{M3}</invoke>{M3}</tool_call>"
    ),
}


@pytest.mark.parametrize("form", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize("n", [101, 3000])
def test_the_depth_of_arguments_is_bounded(form: Callable[[int], str], n: int) -> None:
    tools = [{"function": {"name": "add", "parameters": {"properties": {"note": {"type": ["array", "object"]}}}}}]
    reply = form(n)
    for pieces in ([reply], [reply[i : i + 7] for i in range(0, len(reply), 7)]):
        parser = ReplyParser(tools)
        _, text, (call,) = read(parser, pieces)
        assert (call.name, text, list(call.values)) == ("add", "", ["note", "a"])
        assert (call.values["a"], len(parser.warnings)) == (1, 1)
        assert "inside each other" in parser.warnings[0]


ENDLESS = {
    "a key": "<tool_call><function=add><parameter=",
    "a value": "<tool_call><function=add><parameter=note>",
    "a value with an unconfirmed end": "<tool_call><function=add><parameter=note>x</function></tool_call>",
    "a number": "<tool_call><function=add><parameter=a>",
    "a marked value": f'{M3}<tool_call>{M3}<invoke name="add">{M3}<note>',
    "a name": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "a string of Python": '<|tool_call_start|>[add(note="',
    "a string before a name": '<tool_call>{"id": "',
    "a string": '<tool_call>{"name": "add", "arguments": {"note": "',
    "a string with a tag": '<tool_call>{"name": "add", "arguments": {"note": "</tool_call>',
    "a string without quotation marks": "<|tool_call>call:add{note:",
}


@pytest.mark.parametrize("begin", ENDLESS.values(), ids=ENDLESS)
def test_a_reply_that_never_ends_a_call_is_read_in_linear_time(begin: str) -> None:
    parser, text = ReplyParser(TOOLS), "so it is " * 4000
    _, said, calls = read(parser, [begin, *(text[i : i + 4] for i in range(0, len(text), 4))])
    assert text.strip() in said or text.strip() in calls[0].arguments
    assert all(call.is_whole for call in calls)
    assert len(parser.warnings) == 1 or begin.endswith("</function></tool_call>")


@pytest.mark.parametrize(
    "schema", [{"type": [["string"]]}, {"type": 5}, {"anyOf": 5}, {"enum": 5}, {"items": []}, [], 5], ids=str
)
@pytest.mark.parametrize("of_argument", [True, False])
def test_a_schema_may_be_none(schema: Any, of_argument: bool) -> None:
    parameters = {"properties": {"a": schema}} if of_argument else schema
    tools = [{"function": {"name": "add", "parameters": parameters}}]
    for reply in (
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        f'{M3}<tool_call>{M3}<invoke name="add">{M3}<a>1{M3}</a>{M3}</invoke>{M3}</tool_call>',
    ):
        assert parsed(ReplyParser(tools), [reply]) == ("", "", [{"a": 1}])


@pytest.mark.parametrize("line", ["", "\n"])
def test_a_broken_call_costs_the_next_one_nothing(line: str) -> None:
    broken = f'<tool_call>\n{{"name": "add", "arguments": {{"note": "x}}}}{line}</tool_call>'
    for pieces in ([broken + CALL], list(broken + CALL)):
        _, text, calls = read(ReplyParser(TOOLS), pieces)
        assert text == ""
        assert [call.arguments for call in calls] == ['{"note": "x}}' + line.replace("\n", "\\n") + '"}', '{"a": 1}']


@pytest.mark.parametrize(
    ("arguments", "expected", "n_warnings"),
    [
        ("a=1, note='x, (y) \\'z\\' ]<|tool_call_end|>'", {"a": 1, "note": "x, (y) 'z' ]<|tool_call_end|>"}, 0),
        ("a=[1, {'b': None}], note=\"é\"", {"a": [1, {"b": None}], "note": "é"}, 0),
        ("", {}, 0),
        ("a=((1, ((2))))", {"a": [1, 2]}, 0),
        ("a=[true, null,], note='''x\n\"y\"'''", {"a": [True, None], "note": 'x\n"y"'}, 0),
        (r"note='C:\dir', a=-1", {"note": r"C:\dir", "a": -1}, 0),
        ("1, 'x'", {"a": 1, "note": "x"}, 0),
        ("note=to the left, a=1", {"note": "to the left", "a": 1}, 0),
        ('note="so", a=(1 + 2j)', {"note": "so", "a": "(1 + 2j)"}, 0),
        ("a=1e999", {"a": sys.float_info.max}, 0),
        (r"note='\ud800'", {"note": r"'\ud800'"}, 0),
        ("a=open('x')", {"a": "open('x')"}, 0),
        ("**{'a': 1}", {}, 1),
    ],
)
def test_arguments_in_python(arguments: str, expected: object, n_warnings: int) -> None:
    reply = f"Yes. <|tool_call_start|>[add({arguments}), add(a=2)]<|tool_call_end|>"
    for pieces in ([reply], list(reply)):
        parser = ReplyParser(TOOLS)
        _, text, calls = parsed(parser, pieces)
        assert (calls[0], len(parser.warnings)) == (expected, n_warnings)
        assert n_warnings or (calls, text) == ([expected, {"a": 2}], "Yes.")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_of_a_tool_that_was_not_offered_is_a_call(family: str) -> None:
    """The program that runs tools reports an unknown tool; text instead would end the model's turn."""
    for pieces in ([FAMILIES[family]], list(FAMILIES[family])):
        parser = ReplyParser([{"type": "function", "function": {"name": "subtract"}}])
        _, text, (call,) = read(parser, pieces)
        assert (call.name, json.loads(call.arguments), text) == ("add", BOTH, "")
        assert parser.warnings == ["there is no tool 'add', but the model calls it"]


def test_without_tools_nothing_is_called() -> None:
    parser = ReplyParser()
    assert parsed(parser, [CALL]) == ("", CALL, [])
    assert not parser.warnings


def test_a_reply_that_begins_in_the_midst_of_thinking() -> None:
    assert parsed(ReplyParser(TOOLS, "<think>"), [f"Hm. {CALL} no </think>{CALL}"]) == (
        f"Hm. {CALL} no ",
        "",
        [{"a": 1}],
    )
