"""Formats of tool calls: text that follows a format declaration gives the same calls, however it is divided."""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from localllm.chat.calls.argument_types import ArgumentTypes
from localllm.chat.calls.detection import ARGUMENTS, NAME, detected_format
from localllm.chat.calls.formats import FORMATS
from localllm.chat.calls.json_text import JSONReader
from localllm.chat.calls.patterns import tool_name
from localllm.chat.calls.writer import written
from localllm.chat.reply import ReplyParser, ToolCall
from localllm.chat.thinking import CALL, END_OF_CALL, Piece

M3 = "]<]minimax[>["

STRING: dict[str, Any] = {"type": "string"}
PROPERTIES: dict[str, Any] = {
    "a": {"type": "integer"},
    "note": STRING,
    "texts": {"type": "array", "items": STRING},
    "parts": {"type": "object", "properties": {"x": STRING, "y": {"type": "array", "items": {"type": "number"}}}},
    "is_it": {"type": ["boolean", "null"]},
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "later"}},
]


def parse(reply: str, step: int | random.Random = 10_000, *, tools: Any = TOOLS, opened: str = "") -> Any:
    """Return reasoning, text, calls and warnings of a reply."""
    parser, events, at = ReplyParser(tools, opened), list[Any](), 0
    while at < len(reply):
        n = step if isinstance(step, int) else step.randint(1, 20)
        events += parser.feed(reply[at : at + n])
        at += n
    events += parser.finish()
    pieces = [event for event in events if isinstance(event, Piece)]
    calls = [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, ToolCall)]
    text, reasoning = ("".join(piece.text for piece in pieces if piece.thinking is kind) for kind in (False, True))
    return reasoning, text, calls, parser.warnings


def calls_of(reply: str, step: int | random.Random = 10_000) -> Any:
    return parse(reply.replace(CALL, "<|start|>assistant<|channel|>commentary to="), step, opened=opened_of(reply))[
        1:
    ]


def opened_of(reply: str) -> str:
    return "<|start|>assistant" if CALL in reply else ""


VALUES: dict[str, dict[str, Any]] = {
    "empty": {},
    "nested": {"parts": {"x": "1", "y": [1, 2.5, -3e4]}, "texts": ["12", "a, b"], "is_it": None, "a": 0},
    "unicode": {"note": "日本 🙂 é \u2028 ｜", "texts": ["ß", "🙂"]},
    "quotes": {"note": "it's \"so\" `x` \\n \\ '''y''' {z} [1] (2), a: b", "texts": ["'", '"']},
    "lines": {"note": "one\n\n  two\tthree\n", "is_it": True},
}
STEPS = {"whole": 10_000, "by characters": 1, "random": 0}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_every_format(name: str, values: dict[str, Any], step: int) -> None:
    calls = [("add", values), ("now", {}), ("add", {"a": 1, "note": "x"})]
    for some in (calls, calls[:1]):
        assert calls_of(written(FORMATS[name], some), step or random.Random(1)) == ("", some, [])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_detected_from_a_rendered_call(name: str) -> None:
    header = "<|im_start|>user\nzqfirst<|im_end|>\n<|im_start|>assistant\n"
    call = written(FORMATS[name], [(NAME, ARGUMENTS)])
    assert detected_format(header, f"{header}{call}<|im_end|>\n") == FORMATS[name]
    assert detected_format(header, header + call.replace("\n", " \n  ")) is not None
    assert detected_format(header, header + call.replace(NAME, "other")) is None


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_may_contain_the_tags_of_their_format(name: str) -> None:
    format_ = FORMATS[name]
    tags = set(re.findall(r"<[^<>\s\"]+>|\[[A-Z_]+\]|```", written(format_, [("add", {"a": 1, "note": "x"})])))
    for tag in sorted(tags - {'<|"|>', END_OF_CALL, "<|message|>", "<|channel|>"}):
        calls = [("add", {"a": 1, "note": f"so {tag} it"}), ("now", {})]
        for step in (1, 10_000):
            assert calls_of(written(format_, calls), step) == ("", calls, []), tag


@pytest.mark.parametrize("name", FORMATS)
def test_long_arguments_are_read_in_linear_time(name: str) -> None:
    tag = "</function>" if FORMATS[name].closing.startswith(M3) else FORMATS[name].closing or "</function>"
    for n, step in ((3000, 5000), (300, 1)):
        values = {"note": f'<p>{tag}</p> "x" it\'s {{y}} \\ \n' * n + "z", "texts": ["ab"] * n}
        calls = [("add", values if CALL not in FORMATS[name].head else {"note": "x" * 30 * n})]
        assert calls_of(written(FORMATS[name], calls), step) == ("", calls, [])


@pytest.mark.parametrize(
    ("start", "repeated"),
    [
        ("<tool_call>", " "),
        ("<tool_call>", "["),
        ("<tool_call>", "```"),
        ('<tool_call>{"name": "add", "arguments": {}}', "}"),
        ('<tool_call>{"name": "add", "arguments": {}}', "</function>"),
        ('<tool_call>{"name": "add", "arguments": {"note": "x"', " "),
        ('<tool_call>{"name": "add", "arguments": {"note": "x",', " "),
        ('<tool_call>{"name": "add", "arguments": {"note": x', "\n"),
        ('<tool_call>{"name": "add", "arguments": {"note": ', "1"),
        ('<tool_call>{"name": "add", "arguments": {', "x"),
        ("<tool_call>{", '"a": {}, '),
        ("add\n", " "),
    ],
)
def test_endless_repetitions_are_read_in_linear_time(start: str, repeated: str) -> None:
    parser, reply = ReplyParser(TOOLS), start + repeated * (100_000 // len(repeated))
    for at in range(0, len(reply), 3):
        parser.feed(reply[at : at + 3])
    parser.finish()


@pytest.mark.parametrize(
    "reply",
    [
        # An unclosed tag, and the next argument at the start of a line.
        "<tool_call>later\n<arg_key>note</arg_key>\n<arg_value>x</arg_valu\n<arg_key>b</arg_key>\n<arg_value>1"
        "</arg_value>\n</tool_call>",
        '<minimax:tool_call>\n<invoke name="later">\n<parameter name="a>\n<parameter name="b">1</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        'functools[{"name": "later" ":arguments": {"note": later", ":arguments": {"note": "x"}',
        "[later(a=1), later()</function>] text",
        'Hi Action: ```json\nHi Action: ```json\n[\n{"tool_name": "add", "parameters": {"a": 1}}\n]```',
        '{"tool_name": "now", "parameters": {}} and',
        '{"x": "y", "name": "add", "arguments": {"a": 1}}',
        "[add(a=1), now()]]<]mi",
        f"[add(a=1), now()]{M3}<tool_call>",
    ],
)
def test_damaged_calls_are_the_same_however_they_are_cut(reply: str) -> None:
    assert calls_of(reply, 1) == calls_of(reply, random.Random(1)) == calls_of(reply)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("step", [1, 10_000])
def test_white_space_around_calls(name: str, step: int) -> None:
    format_ = FORMATS[name]
    if format_.is_bare or CALL in format_.head:
        return
    call = written(format_, [("now", {})])
    assert calls_of(f"Before {call}", step)[0] == "Before"
    assert calls_of(f"Before.\n\n{call}\n", step)[0] == "Before."
    if format_.closing or format_.tail.startswith("<"):
        assert calls_of(f"Before {call} after", step)[0] == "Before after"
        assert calls_of(f"Before.\n\n{call} \nAfter.", step)[0] == "Before.\n\nAfter."
        assert calls_of(f"Before{call} {call}\nafter", step)[0] == "Before\nafter"
        assert calls_of(f"\n{call}\n After. ", step)[0] == "After. "


#: A call without arguments, with each text that a format allows after the name.
EMPTY = {
    "hermes": [
        "",
        ', "arguments": {}',
        ', "arguments": ""',
        ', "arguments": null',
        ', "arguments": "{}"',
        ', "parameters": {}',
    ],
    "mistral": ["", ', "arguments": {}', ', "arguments": ""', ', "arguments": null'],
    "command": ["", ', "parameters": {}', ', "parameters": null'],
    "llama 3": ["", ', "parameters": {}', ', "parameters": ""'],
    "llama 3, bare": ["", ', "parameters": {}', ', "parameters": null'],
}


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize("tool", ["now", "later", "add"])
@pytest.mark.parametrize(("name", "rest"), [(name, rest) for name, rests in EMPTY.items() for rest in rests])
def test_json_calls_without_arguments(name: str, rest: str, tool: str, step: int) -> None:
    format_ = FORMATS[name]
    key = "tool_name" if "tool_name" in format_.head else "name"
    call = f'{{"{key}": "{tool}"{rest}}}'
    reply = format_.opening + format_.inside[0] + call + format_.inside[1] + format_.closing
    assert calls_of(reply, step) == ("", [(tool, {})], [])


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize(
    "reply",
    [
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call><function=now/></tool_call>",
        "<tool_call><function=now></tool_call>",
        "<function=now></function>",
        "<function=now>{}</function>",
        "<tool_call>now</tool_call>",
        "<tool_call>now\n</tool_call>",
        '<minimax:tool_call><invoke name="now"/></minimax:tool_call>',
        '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
        f'{M3}<tool_call>{M3}<invoke name="now">{M3}</invoke>{M3}</tool_call>',
        "<tool_calls:opensource><tool_call:opensource>now</tool_call:opensource></tool_calls:opensource>",
        '<function name="now"></function>',
        '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>',
        '<|tools_prefix|>[{"now": null}]<|tools_suffix|>',
        '<|tools_prefix|>[{"now": ""}]<|tools_suffix|>',
        "<|tool_calls|><|tool_call:begin|>c<|tool_call:name|>now<|tool_call:args|><|tool_call:end|><|calls|>",
        "<|tool_calls|><|tool_call:begin|>c<|tool_call:name|>now<|tool_call:end|><|calls|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_end|><|tool_calls_section_end|>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "[TOOL_CALLS]now[ARGS]{}",
        "[TOOL_CALLS]now[ARGS]",
        "[TOOL_CALLS]now",
        "<|tool_call>call:now{}<tool_call|>",
        "<|tool_call>call:now<tool_call|>",
        "<|tool_call_start|>[now()]<|tool_call_end|>",
        "<|tool_call_start|>[now]<|tool_call_end|>",
        "[now()]",
        f"{CALL}functions.now<|message|>{{}}<|call|>",
        f"{CALL}functions.now<|message|><|call|>",
        f"{CALL}functions.now<|message|>",
    ],
)
def test_calls_without_arguments(reply: str, step: int) -> None:
    assert calls_of(reply, step) == ("", [("now", {})], [])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("<parameter=note>\nx\n<parameter=a>\n1\n</parameter>\n", {"note": "x", "a": 1}),
        ("<parameter=note>x<parameter=a>1", {"note": "x", "a": 1}),
        ("<parameter=note>\nx </parameter> y\n</parameter>\n", {"note": "x </parameter> y"}),
        (
            "<parameter=note>\nx\n</function>\n</tool_call>\ny\n</parameter>\n",
            {"note": "x\n</function>\n</tool_call>\ny"},
        ),
        ("<parameter = 'note' >\nx\n</parameter >\n", {"note": "x"}),
        ("<parameter=texts>\n['1', \"2\",]\n</parameter>\n", {"texts": ["1", "2"]}),
        ("<parameter=parts>\n{'x': 'it is', 'y': (1)}\n</parameter>\n", {"parts": {"x": "it is", "y": "(1)"}}),
        ("<parameter=is_it>\nnull\n</parameter>\n", {"is_it": None}),
        ("<parameter=is_it>\nNone\n</parameter>\n", {"is_it": None}),
        ("<parameter=is_it>\nTrue\n</parameter>\n", {"is_it": True}),
        ("<parameter=a>\n1e999\n</parameter>\n", {"a": sys.float_info.max}),
        ("<parameter=other>\n1e999\n</parameter>\n", {"other": "1e999"}),
        ("<parameter=other>\n[1, 2\n</parameter>\n", {"other": "[1, 2"}),
    ],
)
def test_values_between_tags_are_repaired(form: str, expected: object) -> None:
    reply = f"<tool_call>\n<function=add>\n{form}</function>\n</tool_call>"
    both = [("add", expected), ("now", {})]
    for step in (1, 10_000):
        assert calls_of(reply, step)[:2] == ("", [("add", expected)])
        assert calls_of(f"{reply}\n{written(FORMATS['qwen coder'], [('now', {})])}", step)[:2] == ("", both)


GLM_A = "<arg_key>a</arg_key><arg_value>1"
GLM_NOTE = "<arg_key>note</arg_key><arg_value>x"
DSML_PARAMETER = '<｜DSML｜parameter name="%s" string="%s">'


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize(
    "reply",
    [
        f"<tool_call>add{GLM_NOTE}{GLM_A}</arg_value></tool_call>",
        f"<tool_call>add{GLM_A}</arg_value>{GLM_NOTE}</tool_call>",
        "<minimax:tool_call><invoke name=add><parameter name=a>1<parameter name=note>x</invoke></minimax:tool_call>",
        '<function name="add"><param name="note">x<param name="a">1</function>',
        f'{M3}<tool_call>{M3}<invoke name="add">{M3}<a>1{M3}</a>{M3}<note>x{M3}</tool_call>',
        f'{M3}<tool_call>{M3}<invoke name="add">{M3}<a>1{M3}</b>{M3}<note>x{M3}</note>{M3}</invoke>{M3}</tool_call>',
        f'<｜DSML｜tool_calls><｜DSML｜invoke name="add">{DSML_PARAMETER % ("a", "false")}1'
        f"{DSML_PARAMETER % ('note', 'false')}x</｜DSML｜invoke></｜DSML｜tool_calls>",
        "<|tool_call>call: add {note:'x' a:1}<tool_call|>",
        '<|tool_call>call:add{"note": "x", "a": 1<tool_call|>',
        '[TOOL_CALLS]add[ARGS]{"a": 1, "note": "x"',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "note": "x"}',
        '[add(a=1, note="x")',
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "note": "x",},},]',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1, "note": "x"<|tool_call_end|><|tool_calls_section_end|>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "note": "x"\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ],
)
def test_almost_correct_calls_are_whole(reply: str, step: int) -> None:
    assert calls_of(reply, step)[:2] == ("", [("add", {"a": 1, "note": "x"})])


def test_the_markup_and_the_schema_decide_what_is_a_string() -> None:
    values = [
        DSML_PARAMETER % each + "7</｜DSML｜parameter>" for each in (("note", "false"), ("b", "true"), ("c", "false"))
    ]
    reply = f'<｜DSML｜tool_calls><｜DSML｜invoke name="add">{"".join(values)}</｜DSML｜invoke></｜DSML｜tool_calls>'
    assert calls_of(reply)[1] == [("add", {"note": "7", "b": "7", "c": 7})]


@pytest.mark.parametrize("name", [name for name, format_ in FORMATS.items() if format_.is_control])
def test_a_control_token_before_calls_ends_reasoning(name: str) -> None:
    for step in (1, 10_000):
        reply = f"I must look.{written(FORMATS[name], [('now', {})])}"
        assert parse(reply, step, opened="<think>") == ("I must look.", "", [("now", {})], [])
        assert parse(reply, step, opened="<think>", tools=[])[0] == reply
        if FORMATS[name].closing:
            _, text, calls, _ = parse(f"{reply}</think>Yes </think>", step, opened="<think>")
            assert (text, calls) == ("Yes </think>", [("now", {})])


@pytest.mark.parametrize("name", ["hermes", "qwen coder", "glm 4.7", "minimax m2", "seed"])
def test_a_reply_that_ends_with_a_call_in_its_reasoning_calls(name: str) -> None:
    call = written(FORMATS[name], [("add", {"a": 1}), ("now", {})])
    for step in (1, 10_000):
        for end in ("", "\n", "</think>"):
            assert parse(f"So.\n{call}{end}", step, opened="<think>")[2] == [("add", {"a": 1}), ("now", {})]
        assert parse(f"So.\n{call} No, later.", step, opened="<think>")[2] == []
        assert parse(f"So.\n{call}</think>Yes.", step, opened="<think>")[1:3] == ("Yes.", [])
        unknown = parse(f"So.\n{call}".replace("now", "what"), step, opened="<think>")[2]
        assert [name for name, _ in unknown] == ["add", "what"]


NAMES = ["read_file", "read", "look"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, name) for name in NAMES),
        *((form, "look") for form in ("functions.look:0", "functions_look_12", "functionslook1", "functions:look:3")),
        *((form, "look") for form in ("look:0", "default_api.look", "robot:look", "a.b/look", '"look"', " look ")),
        *((form, "read_file") for form in ("functions_read_file_0", "functions.read_file", "api.read_file")),
        ("functions_read_1", "read"),
        ("functions.what:0", "what"),
        ("lock", "lock"),
        ("look2", "look2"),
    ],
)
def test_names_of_tools(name: str, expected: str) -> None:
    assert tool_name(name, NAMES) == expected


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"properties": {"x": {"type": "integer"}}}, {"integer", "number"}),
        ({"properties": {"x": {"type": ["string", "null"]}}}, {"string", "null"}),
        ({"properties": {"x": {"type": "string", "nullable": True}}}, {"string", "null"}),
        ({"properties": {"x": {"enum": ["a", None]}}}, {"string", "null"}),
        ({"properties": {"x": {"const": True}}}, {"boolean"}),
        ({"properties": {"x": {"items": {}}}}, {"array"}),
        ({"properties": {"x": {}}}, set()),
        ({"properties": {"x": {"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}}}, {"string"}),
        ({"properties": {"x": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, {"string", "null"}),
        ({"oneOf": [{"properties": {"y": STRING}}, {"properties": {"x": {"type": "null"}}}]}, {"null"}),
        (
            {"if": {}, "then": {"properties": {"x": STRING}}, "else": {"properties": {"x": {"type": "null"}}}},
            {"string", "null"},
        ),
        (
            {
                "allOf": [{"anyOf": [{"$ref": "#/$defs/a~1b~0%20"}]}],
                "$defs": {"a/b~ ": {"properties": {"x": STRING}}},
            },
            {"string"},
        ),
        ({"$ref": "#/anyOf/0", "anyOf": [{"properties": {"x": STRING}}]}, {"string"}),
        ({"additionalProperties": STRING}, {"string"}),
        ({"properties": {"x": {"type": "null"}}, "additionalProperties": STRING}, {"null"}),
        ({"patternProperties": {"^x": STRING, "^y": {"type": "null"}}}, {"string"}),
        ({"patternProperties": {"(x+)+$": STRING}}, {"string"}),
        ({"patternProperties": {"(x|x)" * 30 + "y": STRING}}, {"string"}),
        ({"patternProperties": {"x?" * 30 + "y": STRING}}, {"string"}),
        ({"patternProperties": {"x{1000000000000}": STRING}}, {"string"}),
        ({"allOf": [{"$ref": "#/allOf/" + "9" * 5000}, {"properties": {"x": STRING}}]}, {"string"}),
        ({"$ref": "#"}, set()),
        ({"allOf": [{"$ref": "#"}, {"properties": {"x": STRING}}]}, {"string"}),
        ({"$ref": "#/nowhere/0"}, set()),
        ({"properties": 5, "anyOf": 5, "items": 5, "$ref": 5}, set()),
        ([], set()),
        (None, set()),
    ],
    ids=lambda value: str(value)[:60] if not isinstance(value, set) else " ".join(sorted(value)),
)
def test_types_of_arguments(schema: Any, types: set[str]) -> None:
    assert ArgumentTypes(schema).of("x") == types


def test_types_of_parts() -> None:
    types = ArgumentTypes(
        {"properties": {"a": {"properties": {"b": {"items": {"type": "null"}}}}, "c": {"$ref": "#"}}}
    )
    assert types.of("a", "b", "item") == {"null"}
    assert types.of("c", "c", "a") == {"object"}
    assert types.names == ["a", "c"]


def read_json(text: str, step: int) -> tuple[str, int]:
    """Return the JSON of a text that arrives in chunks, and the number of repaired errors."""
    reader, out, held = JSONReader(), "", ""
    for at in range(0, len(text), step):
        held += text[at : at + step]
        json_, end = reader.read(held, 0, len(held), is_whole=at + step >= len(text))
        out, held = out + json_, held[end:]
        if reader.has_closed:
            return out, reader.n_repairs
    return out + reader.close(), reader.n_repairs


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
    max_leaves=8,
)


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(), JSON) | st.lists(JSON), st.integers(1, 9), st.booleans(), st.sampled_from([None, 1])
)
def test_valid_json_stays_as_it_is(value: object, step: int, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    out, n_repairs = read_json(text, step)
    assert (json.loads(out), n_repairs) == (value, 0)


@settings(max_examples=300)
@given(st.text(alphabet="{}[]:,\"'ab1 \\\n<|>u=\u2028\xa0", max_size=30), st.integers(1, 9))
def test_any_text_becomes_valid_json(text: str, step: int) -> None:
    out = read_json("{" + text, 1000)
    assert read_json("{" + text, step) == out
    json.loads(out[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2,], "b": "x",\n}', {"a": [1, 2], "b": "x"}),
        ('{"a": "x" "b": 2}', {"a": "x", "b": 2}),
        ("{a: left\n b: 2}", {"a": "left", "b": 2}),
        ('{to:<|"|>left<|"|>angle:90}', {"to": "left", "angle": 90}),
        ("{to:to the left, or right,angle:90}", {"to": "to the left, or right", "angle": 90}),
        ("{'a': 'it's', 'b': None, 'c': True}", {"a": "it's", "b": None, "c": True}),
        ('{"a": "say "hi", now", "b": 1}', {"a": 'say "hi", now', "b": 1}),
        (r'{"a": "C:\dir\u00"}', {"a": r"C:\dir\u00"}),
        (r'{"a": "\ud83d\ude00\ud83d"}', {"a": "😀\ufffd"}),
        ('{"a": [1, {"b": 2]}', {"a": [1, {"b": 2}]}),
        ('{"a": , "b": }', {"a": None, "b": None}),
        ('{"a": NaN, "b": -Infinity}', {"a": "NaN", "b": "-Infinity"}),
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
        ('{\u2028"a":\u3000[1,\xa02]\x0c}', {"a": [1, 2]}),
        ('{"a": 1e999, "b": [' + "1" * 5000 + "]}", {"a": sys.float_info.max, "b": ["1" * 5000]}),
        ('{"a": "x" ":b": "y"}', {"a": "x", ":b": "y"}),
    ],
)
def test_errors_in_json_are_repaired(text: str, expected: object) -> None:
    for step in (1, 2, 1000):
        assert json.loads(read_json(text, step)[0]) == expected


FRAGMENTS = ['"', "'", ",", "}", "{", "]", "<", "\n", " ", "\\", "`", "</parameter>", "</function>", "</tool_call>"]


@pytest.mark.parametrize("seed", range(8))
def test_calls_with_random_errors(seed: int) -> None:
    """However it is divided, a reply gives the same events, and each call has valid JSON."""
    source = random.Random(seed)
    for _ in range(25):
        calls = [source.choice([("add", source.choice([*VALUES.values()])), ("now", {})]) for _ in range(2)]
        characters = list("Let me see.\n" * source.randint(0, 1) + written(source.choice([*FORMATS.values()]), calls))
        for _ in range(source.randint(1, 4)):
            at, end = source.randrange(len(characters)), source.randrange(len(characters))
            characters[at:at] = source.choice([list(source.choice(FRAGMENTS)), characters[end : end + 12]])
            del characters[end : end + source.randint(0, 6)]
        reply, opened = "".join(characters), source.choice(["", "<think>"])
        whole = parse(reply, opened=opened)
        assert parse(reply, 1, opened=opened) == whole, reply
        assert parse(reply, source, opened=opened) == whole, reply
