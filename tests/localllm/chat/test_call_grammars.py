"""Grammars of tool calls: whatever a model would write, its calls follow their format and the tools' schemas."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from localllm.chat.calls.formats import FORMATS
from localllm.chat.calls.grammar import CallGrammar, call_grammar
from localllm.chat.calls.writer import written
from localllm.chat.reply import ReplyParser, ToolCall
from localllm.chat.thinking import CALL
from localllm.errors import UsageError
from localllm.sampling import Sampler, Sampling
from localllm.sampling.call_constraint import CallConstraint, CallSearch
from localllm.sampling.constraint import Constraint
from localllm.sampling.grammar import Grammars
from localllm.tokenizer import Tokenizer
from tests.helpers.vocabularies import USER_DEFINED, FakeFile, bpe_metadata

#: Random replies per format. The suite samples few; LOCALLLM_TEST_REPLIES=10000 samples many.
N_REPLIES = int(os.environ.get("LOCALLLM_TEST_REPLIES", "4"))

STRING: dict[str, Any] = {"type": "string"}
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a", "b c", "d'\"e"]},
        "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "edit": {
        "type": "object",
        "properties": {
            "path": STRING,
            "line": {"type": "integer", "minimum": 0, "maximum": 99},
            "mode": {"enum": ["read", "write it"]},
            "flags": {"type": "array", "items": {"enum": ["x", "y", 3]}, "minItems": 1, "maxItems": 3},
            "options": {
                "type": "object",
                "properties": {
                    "ratio": {"type": "number", "maximum": 1, "minimum": -1},
                    "note": {"type": ["string", "null"]},
                },
                "required": ["ratio"],
                "additionalProperties": False,
            },
            "is_new": {"type": "boolean"},
        },
        "required": ["path", "mode", "options"],
        "additionalProperties": False,
    },
    "tree": {
        "type": "object",
        "properties": {
            "root": {"$ref": "#/$defs/node"},
            "depth": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]},
            "size": {"type": "number"},  # may have an exponent beyond float64
        },
        "required": ["root", "size"],
        "$defs": {"node": NODE},
    },
    "find": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 7}},
                "required": ["id"],
            },
            {
                "type": "object",
                "properties": {"text": {"type": "string", "minLength": 2, "maxLength": 5}},
                "required": ["text"],
            },
        ]
    },
    "now": {"type": "object", "properties": {}},
    "later": None,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": p}} for name, p in PARAMETERS.items()]
END = 256
ENDS_OF_VALUES = ('"', "'", "}", "]", ")", '<|"|>', "]<]minimax[>[", "<|end|>")


@cache
def vocabulary(name: str) -> tuple[Tokenizer, np.ndarray[Any, Any]]:
    """A token for each byte and for each tag of a format, and the logits of a model that ends values soon."""
    call = written(FORMATS[name], [("edit", {"path": "x", "line": 1}), ("now", {})])
    tags = sorted(set(re.findall(r"<[^<>\s\"=]+>|\]<\]minimax\[>\[|</[^<>]+>|<\|\"\|>", call)))
    ends = ("<|return|>", "<|call|>", "<|end|>") if CALL in FORMATS[name].head else ()
    tokens = [("<end>", 3), *((tag, USER_DEFINED) for tag in tags), *((end, 3) for end in ends)]
    tokenizer = Tokenizer.from_gguf(FakeFile(bpe_metadata(special=tokens, eos_token_id=END)))
    bias = np.zeros(tokenizer.n_vocab, np.float32)
    for id_ in range(tokenizer.n_vocab):
        text = tokenizer.token_bytes(id_).decode(errors="replace")
        if text in ENDS_OF_VALUES or re.fullmatch(r"</.*(parameter|param|arg_value\S*)>", text):
            bias[id_] = 7
        elif text == "</invoke>":  # some formats allow any number of arguments before it
            bias[id_] = 2
        elif len(text) > 1:
            bias[id_] = -4
    bias[END] = 9
    return tokenizer, bias


def sampled(constraint: Constraint | CallConstraint, name: str, seed: int, start: str = "") -> str:
    """A reply of a random model, which begins with a text."""
    tokenizer, bias = vocabulary(name)
    rng, ids = np.random.default_rng(seed), tokenizer.encode(start, add_special=False, parse_special=True)
    for id_ in ids:
        assert constraint.allows(id_)
        constraint.accept(id_)
    while not constraint.is_complete and len(ids) < 3000:
        id_ = int(constraint.masked(2 * rng.standard_normal(len(bias)).astype(np.float32) + bias).argmax())
        assert constraint.allows(id_)
        if id_ in tokenizer.eog_ids:
            break
        constraint.accept(id_)
        ids.append(id_)
    return tokenizer.decode(ids)


def constraint_of(name: str, opened: str = "", tools: Any = TOOLS, **options: Any) -> Constraint | CallConstraint:
    tokenizer, _ = vocabulary(name)
    grammar = call_grammar(FORMATS[name], tools, **options)
    ids = tokenizer.encode(opened, add_special=False)
    return Grammars(tokenizer, tokenizer.n_vocab).call_constraint(grammar, CallSearch(grammar, opened), ids, "")


def parsed(reply: str, opened: str = "", tools: Any = TOOLS) -> tuple[list[ToolCall], str, list[str]]:
    parser = ReplyParser(tools, opened)
    events = parser.feed(reply) + parser.finish()
    text = "".join(event.text for event in events if isinstance(event, tuple) and not event.thinking)
    return [event for event in events if isinstance(event, ToolCall)], text, parser.warnings


def opened_of(name: str) -> str:
    return "<|start|>assistant" if CALL in FORMATS[name].head else ""


def check(call: ToolCall) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(call.arguments), {"type": "object", **(PARAMETERS[call.name] or {})})


@pytest.mark.parametrize("name", FORMATS)
def test_random_calls_follow_their_format_and_schemas(name: str) -> None:
    opened = opened_of(name)
    called = set()
    for seed in range(N_REPLIES):
        for must_call in (True, False):
            start = "" if must_call else call_grammar(FORMATS[name], TOOLS).openings[0]
            reply = sampled(constraint_of(name, opened, must_call=must_call), name, seed, start)
            calls, _, warnings = parsed(reply, opened)
            assert calls, reply
            assert not warnings, reply
            for call in calls[: 1 if must_call else None]:
                check(call)
            called |= {call.name for call in calls}
            assert len(calls) == 1 or not must_call
    assert called <= PARAMETERS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_texts_follow_limits_and_patterns(name: str) -> None:
    pattern = {"type": "string", "pattern": "^[a-f]{2,4}$"}
    properties = {"long": {"type": "string", "minLength": 4}, "hex": pattern, "line": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    for seed in range(4):
        tools = [tool("find", parameters)]
        reply = sampled(constraint_of(name, opened_of(name), tools, must_call=True), name, seed)
        (call,) = parsed(reply, opened_of(name), tools)[0]
        assert call.values.keys() == properties.keys(), reply
        assert len(call.values["long"]) >= 4
        assert re.fullmatch("[a-f]{2,4}", call.values["hex"])


# -- The start of a call -------------------------------------------------------------------------------------------


def accepts(constraint: Constraint | CallConstraint, tokenizer: Tokenizer, text: str) -> bool:
    """Write a text; return whether every token of it is allowed."""
    for id_ in tokenizer.encode(text, add_special=False, continuation=True):
        if not constraint.allows(id_):
            return False
        constraint.accept(id_)
    return True


def accepted(name: str, text: str, opened: str = "", **options: Any) -> bool:
    return accepts(constraint_of(name, opened, **options), vocabulary(name)[0], text)


def test_text_before_a_call_is_free() -> None:
    constraint, (tokenizer, _) = constraint_of("ministral"), vocabulary("ministral")
    for text, is_free in (("So [", False), ("TOOL", False), ("x] is", True), (" [TOOL_CALLS", False)):
        assert accepts(constraint, tokenizer, text)
        assert constraint.is_free is is_free
    assert accepts(constraint, tokenizer, "]")
    assert not constraint.is_free
    assert not accepts(constraint, tokenizer, "x")


HERMES_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_calls_start_after_the_reasoning() -> None:
    wrong = "<tool_call>what"
    assert not accepted("hermes", wrong)
    assert not accepted("hermes", f"<think>So.</think>{wrong}")
    assert accepted("hermes", f"<think>So {wrong}</think>Yes.")
    assert accepted("hermes", f"So {wrong}</think>Yes.", "<think>")
    assert not accepted("hermes", f"So {wrong}</think>Yes.{wrong}", "<think>")
    assert not accepted("gemma", "So <|tool_call>what", "<think>")  # a control token


def test_calls_without_tags_start_the_answer() -> None:
    assert not accepted("described", '{"name": "now", "arguments": [')
    assert not accepted("described", '\n{"name":"now", "arguments": [')
    assert not accepted("described", 'So.</think>{"name": "now", "arguments": [', "<think>")
    for text in ('{"name": "Alice", "age": [', 'So {"name": "now", "arguments": ['):
        assert accepted("described", text)
    constraint = constraint_of("described", "<think>")
    accepts(constraint, vocabulary("described")[0], "So")
    assert constraint.is_free
    accepts(constraint, vocabulary("described")[0], "</think>")
    assert not constraint.is_free
    assert not accepted("llama 4", "[now(1")
    assert accepted("llama 4", "[nowhere(1")
    assert not accepted("chatglm", "now\n[")


def test_messages_of_gpt_oss() -> None:
    opened, thought = "<|start|>assistant", "<|channel|>analysis<|message|>to=functions.what<|end|>"
    starts = (
        (" to=functions.", "<|channel|>commentary json"),
        (f"{thought}<|start|>assistant to=functions.", "<|channel|>commentary json"),
        ("<|channel|>commentary to=functions.", " <|constrain|>json"),
        (f"{thought}<|start|>assistant<|channel|>commentary to=functions.", ""),
    )
    for start, rest in starts:
        for must_call in (True, False):
            assert accepted("gpt-oss", f"{start}now{rest}<|message|>{{}}", opened, must_call=must_call), start
            assert not accepted("gpt-oss", f"{start}what", opened, must_call=must_call)
    assert accepted("gpt-oss", f"{thought}<|start|>assistant<|channel|>final<|message|>Yes.", opened)
    assert not accepted("gpt-oss", "<|channel|>final", opened, must_call=True)


def test_a_token_may_contain_the_end_of_a_tag() -> None:
    names = [">{", '>\n{"name": "', '>\n{"what', "a>{"]
    tokens = [("<end>", 3), *((name, USER_DEFINED) for name in names)]
    tokenizer = Tokenizer.from_gguf(FakeFile(bpe_metadata(special=tokens, eos_token_id=END)))
    grammar = call_grammar(FORMATS["hermes"], TOOLS)
    constraint = Grammars(tokenizer, tokenizer.n_vocab).call_constraint(grammar, CallSearch(grammar), [], "")
    assert accepts(constraint, tokenizer, "Well <tool_call")
    ids = [tokenizer.encode(name, add_special=False)[0] for name in names]
    expected = [True, True, False, True]
    assert [constraint.allows(id_) for id_ in ids] == expected
    logits = constraint.masked(np.zeros(tokenizer.n_vocab, np.float32))
    assert [logit == 0 for logit in logits[ids].tolist()] == expected
    assert np.isinf(logits).sum() == 1
    constraint.accept(ids[1])
    assert not constraint.allows(tokenizer.encode("x", add_special=False)[0])
    assert accepts(constraint, tokenizer, HERMES_CALL.partition('"name": "')[2] + " Done.")


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.closing and name != "solar"])
def test_text_and_more_calls_may_follow_a_call(name: str) -> None:
    call = written(FORMATS[name], [("now", {})])
    assert accepted(name, f"So. {call} And {call}\nDone.")
    assert accepted(name, written(FORMATS[name], [("now", {}), ("now", {})]))
    assert not accepted(name, f"{call} And {call.replace('now', 'what')}")
    constraint = constraint_of(name, one_call=True)
    assert accepts(constraint, vocabulary(name)[0], f"So. {call}")
    assert constraint.is_complete


def test_free_text_needs_only_the_largest_logits() -> None:
    (tokenizer, _), constraint = vocabulary("ministral"), constraint_of("ministral")
    sampler = Sampler(Sampling(top_k=5), tokenizer.n_vocab, constraint=constraint)
    for text, is_free in (("So ", True), ("[TOOL", False), ("! ", True), ("[TOOL_CALLS]", False), ("now", False)):
        for id_ in tokenizer.encode(text, add_special=False, continuation=True):
            sampler.accept(id_)
        assert (sampler.n_enough, sampler.is_slow) == ((6, False) if is_free else (0, True)), text
        assert bool(sampler.draws(1)) is is_free


def test_drafts_are_checked() -> None:
    tokenizer, _ = vocabulary("hermes")
    for text, n in (("So it is", 8), ("So <b> it is", 4), ("<tool_call>x", 1)):
        assert constraint_of("hermes").n_possible(tokenizer.encode(text, add_special=False)) == n, text
    constraint = constraint_of("hermes")
    accepts(constraint, tokenizer, "<tool_call>")
    ids = tokenizer.encode('{"name": "nox', add_special=False)
    assert constraint.n_possible(ids) == len(ids) - 1


# -- Requests that a grammar cannot hold ---------------------------------------------------------------------------


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_names_that_a_format_cannot_express_are_refused() -> None:
    tools = [tool('look "up"', {})]
    with pytest.raises(UsageError, match=r"^the tool name .* cannot be written in the calls of this model"):
        call_grammar(FORMATS["qwen coder"], tools)
    reply = sampled(constraint_of("hermes", tools=tools, must_call=True), "hermes", 0)
    assert parsed(reply, tools=tools)[0][0].name == 'look "up"'


NESTED: dict[str, Any] = {"type": "integer"}
for _ in range(6):  # each level has 30 alternatives, which all have the same property
    required = [{"required": [f"b{i}"], "properties": {f"b{i}": {"type": "null"}}} for i in range(30)]
    NESTED = {"type": "object", "properties": {"a": NESTED}, "required": ["a"], "anyOf": required}


@pytest.mark.parametrize("name", ["hermes", "qwen coder", "lfm2", "gemma", "minimax m3"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "object", "properties": {"a": {"type": "what"}}},
        {"type": "object", "properties": {f"a{i}": STRING for i in range(600)}},
        {"type": "object", "properties": {"a": {"enum": ["x" * 1000] * 1000}}},
        {"type": "object", "required": ["a b\n"]},
        NESTED,
        {"type": "object", "properties": []},
        {"type": "array"},
        [],
        5,
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_arguments_of_unusable_schemas_are_free(name: str, parameters: Any) -> None:
    tools = [tool("f", parameters)]
    reply = sampled(constraint_of(name, tools=tools, must_call=True), name, 1)
    assert [call.name for call in parsed(reply, tools=tools)[0]] == ["f"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_without_a_schema_gets_any_arguments(name: str) -> None:
    arguments = {"note": "red"}
    start = written(FORMATS[name], [("later", arguments)]).removesuffix("<|call|>")  # gpt-oss's end of a reply
    reply = sampled(constraint_of(name, opened_of(name)), name, 0, start)
    assert json.loads(parsed(reply, opened_of(name))[0][0].arguments) == arguments


class BrokenGrammar(CallGrammar):
    def lark(self, *_: object) -> str:
        return "start: missing"


def test_a_grammar_that_llguidance_refuses_allows_any_call() -> None:
    tokenizer, _ = vocabulary("hermes")
    for must_call in (False, True):
        options = vars(call_grammar(FORMATS["hermes"], TOOLS, must_call=must_call))
        grammar, grammars = BrokenGrammar(**options), Grammars(tokenizer, tokenizer.n_vocab)
        if must_call:
            with pytest.raises(UsageError, match=r"^the schemas of the tools cannot be enforced: .*: simplify them$"):
                grammars.call_constraint(grammar, CallSearch(grammar), [], "")
        else:
            constraint = grammars.call_constraint(grammar, CallSearch(grammar), [], "")
            assert constraint.n_possible(tokenizer.encode("<tool_call>x", add_special=False)) == 1
            assert accepts(constraint, tokenizer, "<tool_call>what</tool_call>")


def test_many_tools() -> None:
    for name, tool_name in (("hermes", "tool_{}"), ("qwen coder", "tool_{}"), ("command", "server_{}_do_thing")):
        tools = [tool(tool_name.format(i), PARAMETERS["edit"]) for i in range(500)]
        (call,) = parsed(sampled(constraint_of(name, tools=tools, must_call=True), name, 0), tools=tools)[0]
        assert re.fullmatch(tool_name.format(r"\d+"), call.name)
