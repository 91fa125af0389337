"""Texts constrained by a JSON schema, a regular expression or a grammar."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

import localllm
from localllm import LLM, GrammarError, Sampling, UsageError
from localllm.engine.drafting.cost import StepCost
from localllm.sampling import Sampler, grammar as grammar_module
from localllm.sampling.constraint import Constraint
from localllm.sampling.grammar import Grammars, check_grammar
from localllm.tokenizer import Tokenizer
from tests.helpers.command_line import run_main
from tests.helpers.engines import in_engine
from tests.helpers.json_schemas import SCHEMAS
from tests.helpers.vocabularies import USER_DEFINED, FakeFile, bpe_metadata

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
}


def test_settings_that_are_not_grammars_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^regex and grammar each constrain the text to a grammar"):
        Sampling(regex="a", grammar="start: /a/")
    for schema in ("{", "3", 3, False, [], {"a": object()}, {"const": math.nan}):
        with pytest.raises(UsageError, match=r"^json_schema is .*, but must be a JSON schema: a dict"):
            Sampling(json_schema=schema)  # type: ignore[arg-type]
    for empty in ("", " \n"):
        with pytest.raises(UsageError, match=r"^regex is .* must be a non-empty regular expression"):
            Sampling(regex=empty)
    assert Sampling().grammar_kind is None
    assert Sampling(json_schema="{}").replace(temperature=0.5).grammar_kind == "json_schema"


def test_a_schema_is_a_dict_a_text_or_a_model_class() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Person", name=(str, ...), age=(int, 3))
    assert json.loads(str(Sampling(json_schema=model).json_schema)) == model.model_json_schema()
    assert Sampling(json_schema=PERSON) == Sampling(json_schema=json.dumps(PERSON))


# -- Tokens --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localllm.load(device="cpu", context=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    return llm.tokenizer


def bytes_tokenizer(*special: str, **changes: Any) -> Tokenizer:
    """Return a vocabulary with a token for each byte, and for each of some tags."""
    special_tokens = [("<end>", 3), *((text, USER_DEFINED) for text in special)]
    return Tokenizer.from_gguf(FakeFile(bpe_metadata(special=special_tokens, eos_token_id=256, **changes)))


def constraint(
    tokenizer: Tokenizer, prompt: str = "", template: str = "", more: int = 0, **grammar: Any
) -> Constraint:
    ids = tokenizer.encode(prompt, add_special=False, parse_special=True)
    return Grammars(tokenizer, tokenizer.n_vocab + more).constraint(Sampling(**grammar), ids, template)


def allowed(held: Constraint, n_vocab: int) -> list[int]:
    ids = np.flatnonzero(held.masked(np.zeros(n_vocab, np.float32)) == 0).tolist()
    assert ids == [id_ for id_ in range(n_vocab) if held.allows(id_)]
    return ids


def write(held: Constraint, ids: Sequence[int], n_vocab: int) -> None:
    for id_ in ids:
        assert id_ in allowed(held, n_vocab)
        held.accept(id_)


def test_every_schema_gives_json_that_is_valid(tokenizer: Tokenizer) -> None:
    """With random logits, which favour tokens that end a text."""
    jsonschema = pytest.importorskip("jsonschema")
    assert len({json.dumps(schema) for schema in SCHEMAS}) > 300
    formats = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])
    rng = np.random.default_rng(0)
    n_vocab = tokenizer.n_vocab + 3  # padded
    bias = np.zeros(n_vocab, np.float32)
    bias[[i for i in range(tokenizer.n_vocab) if tokenizer.token_bytes(i).strip() in (b'"', b"]", b"}")]] = 8
    bias[list(tokenizer.eog_ids)] = 8
    grammars = Grammars(tokenizer, n_vocab)
    for schema in SCHEMAS:
        sampling = Sampling(json_schema=schema, seed=1, top_k=0, top_p=1, min_p=0, temperature=1)
        sampler = Sampler(sampling, n_vocab, constraint=grammars.constraint(sampling, []))
        ids: list[int] = []
        while not sampler.is_complete and len(ids) < 2000:
            id_ = sampler((2 * rng.standard_normal(n_vocab) + bias).astype(np.float32)).id
            if id_ in tokenizer.eog_ids:
                break
            sampler.accept(id_)
            ids.append(id_)
        value = json.loads(tokenizer.decode(ids))
        jsonschema.Draft202012Validator(schema, format_checker=formats).validate(value)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema: minimum"),
        ({"json_schema": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "Unsatisfiable schema"),
        ({"json_schema": {"items": False, "minItems": 1, "type": "array"}}, "Unsatisfiable schema"),
        ({"json_schema": {"type": "strng"}}, "Invalid type: strng"),
        ({"json_schema": {"$ref": "https://example.com/x"}}, "does not exist in the schema"),
        ({"regex": "a("}, "regex cannot be used: unclosed group$"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "a\\\\\\"}, "regex cannot be used: its last backslash escapes nothing"),
        ({"regex": "\udcff"}, "regex cannot be used: .*surrogates not allowed"),
        ({"grammar": "start: foo"}, "grammar cannot be used: .*unknown name"),
        ({"grammar": "hello"}, "grammar cannot be used"),
        ({"grammar": "root ::= foo"}, "not valid GBNF: Rule 'foo' not found"),
        ({"grammar": 'other ::= "a"'}, "not valid GBNF: No 'root' rule"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    tokenizer: Tokenizer, grammar: dict[str, Any], words: str
) -> None:
    for attempt in (
        lambda: check_grammar(Sampling(**grammar)),
        lambda: constraint(tokenizer, **grammar),
    ):
        with pytest.raises(GrammarError, match=words) as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_the_text_ends_where_the_grammar_may_end_and_nowhere_else() -> None:
    tokenizer = bytes_tokenizer()
    held = constraint(tokenizer, regex="ab?c?", more=4)
    n_vocab = tokenizer.n_vocab + 4
    assert allowed(held, n_vocab) == tokenizer.encode("a")
    write(held, tokenizer.encode("a"), n_vocab)
    assert not held.is_complete
    assert allowed(held, n_vocab) == [*tokenizer.encode("b"), *tokenizer.encode("c"), 256]
    write(held, tokenizer.encode("c"), n_vocab)
    assert held.is_complete


def test_a_vocabulary_without_an_end_will_do() -> None:
    tokenizer = Tokenizer.from_gguf(FakeFile(bpe_metadata(special=[], eos_token_id=None)))
    assert not tokenizer.eog_ids
    held = constraint(tokenizer, regex="a+b")
    write(held, tokenizer.encode("aab"), tokenizer.n_vocab)
    assert held.is_complete


@pytest.mark.parametrize("settings", [{}, {"mirostat": 2, "mirostat_tau": 20.0}])
def test_what_is_allowed_is_as_likely_as_the_model_finds_it(settings: dict[str, Any]) -> None:
    """Only forbidden tokens are drawn again."""
    tokenizer = bytes_tokenizer()
    logits = np.full(257, -5, np.float32)
    a, b, other = (tokenizer.encode(text)[0] for text in "ab!")
    logits[[a, b, other]] = 1, 2, 2.5
    sampling = Sampling(regex="[ab]+", top_k=0, top_p=1, min_p=0, temperature=1, seed=1, **settings)
    sampler = Sampler(sampling, 257, constraint=constraint(tokenizer, regex="[ab]+"))
    drawn = [sampler(logits).id for _ in range(4000)]
    assert set(drawn) == {a, b}
    share, expected = drawn.count(b) / 4000, 1 / (1 + math.exp(-1))
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 4000)


def test_no_mask_is_made_where_the_choice_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bytes_tokenizer()
    sampler = Sampler(Sampling(temperature=0), 257, constraint=constraint(tokenizer, regex="[ab]+"))
    logits = np.zeros(257, np.float32)
    a, b = tokenizer.encode("ab")
    logits[[a, b]] = 1, 2
    monkeypatch.setattr(Constraint, "masked", None)
    assert sampler(logits).id == b


@pytest.mark.parametrize(
    "grammar",
    [
        'start: item ("," item)*\nitem: "x" | "(" start ")"',
        'root ::= item ("," item)*  # a list\nitem ::= "x" | "(" root ")"',
    ],
    ids=["lark", "gbnf"],
)
def test_lark_and_gbnf_are_told_apart(grammar: str) -> None:
    tokenizer = bytes_tokenizer()
    held = constraint(tokenizer, grammar=grammar)
    write(held, tokenizer.encode("x,((x),x"), 257)
    assert allowed(held, 257) == sorted(tokenizer.encode("),"))
    write(held, tokenizer.encode(")"), 257)
    assert 256 in allowed(held, 257)


@pytest.mark.parametrize(
    ("grammar", "text", "then"),
    [
        ('root ::= ("a"+ | "c")* "b"', "aacaa", "abc"),
        ('root ::= ("a"+)* "b"', "aaa", "ab"),
        ("root ::= ([0-9]{2})+ [+]", "1234", "+0123456789"),
        ("root ::= ([0-9]{2})+ [+]", "123", "0123456789"),
        ('root ::= (("a"? "b")*)+ ("(+)" | ["(+)]) # (x+)', "abb(", "+"),
        ('root ::= start+\nstart ::= "a" | "start"', "astart", "as"),
    ],
)
def test_groups_of_gbnf_may_be_repeated_whatever_they_have(grammar: str, text: str, then: str) -> None:
    tokenizer = bytes_tokenizer()
    held = constraint(tokenizer, "", grammar=grammar)
    write(held, tokenizer.encode(text), 257)
    assert {token for token in allowed(held, 257) if token < 256} == set(tokenizer.encode(then))


def test_characters_of_gbnf_by_their_numbers(llm: LLM) -> None:
    def written(grammar: str) -> str:
        return llm.generate("x", grammar=grammar, max_tokens=40, temperature=0).text

    assert written(r'root ::= "\u00e9\x41" "\U0001F600" [\u0042-\u0042]') == "éA😀B"
    assert written(r'root ::= "\\u00e9" "\u0022"') == r"\u00e9" + '"'
    for wrong in (r"\uD800", r"\U00110000"):
        with pytest.raises(GrammarError, match="is not a character"):
            written(f'root ::= "{wrong}"')


def test_a_grammar_begins_after_the_thought_that_the_prompt_opens() -> None:
    tokenizer = bytes_tokenizer("<think>", "</think>")
    held = constraint(tokenizer, "Why? <think>\n", regex="yes|no")
    thought = tokenizer.encode("no, 7! <think> </th")
    write(held, thought, 259)
    assert held.n_possible([1, 2, 3]) == 3
    assert 256 not in allowed(held, 259), "reasoning must end before the text does"
    write(held, tokenizer.encode("</think>"), 259)
    assert allowed(held, 259) == sorted(tokenizer.encode("ny"))
    assert held.n_possible(tokenizer.encode("yex")) == 2
    write(held, tokenizer.encode("yes"), 259)
    assert held.is_complete


def test_tags_may_be_spelled_with_many_tokens_and_share_the_last_one_with_the_answer() -> None:
    tokenizer = bytes_tokenizer(">\n4")
    held = constraint(tokenizer, "<think>", regex="[0-9]{2}")
    write(held, tokenizer.encode("hm</think"), 258)
    held.accept(257)
    assert allowed(held, 258) == sorted(tokenizer.encode("0123456789"))
    held = constraint(tokenizer, "<think>", regex="[0-3]{2}")
    write(held, tokenizer.encode("hm</think"), 258)
    with pytest.raises(UsageError, match="no longer matches its grammar"):
        held.accept(257)


def test_a_model_may_open_a_thought_where_its_template_knows_the_tag() -> None:
    tokenizer = bytes_tokenizer("<think>", "</think>")
    plain = tokenizer.encode("y")
    for prompt, template, first in [
        ("a: ", "", plain),
        ("a: ", "{{ text.split('</think>') }}", [*plain, 257]),
        ("a: <think>\n\n</think>\n\n", "</think>", plain),
    ]:
        held = constraint(tokenizer, prompt, template, regex="yy")
        assert allowed(held, 259) == first
    held = constraint(tokenizer, "a: ", "</think>", regex="yy")
    write(held, [257, *tokenizer.encode("hm"), 258, *plain, *plain], 259)
    assert held.is_complete
    held = constraint(tokenizer, "a: ", "</think>", regex="yy")
    held.accept(plain[0])
    assert allowed(held, 259) == plain, "later tags are text"


def test_the_answer_of_gpt_oss_is_its_last_message() -> None:
    tokenizer = bytes_tokenizer("<|start|>", "<|channel|>", "<|message|>")
    held = constraint(tokenizer, "<|start|>assistant", regex="y")
    before = "<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>"
    write(held, tokenizer.encode(before), 260)
    assert allowed(held, 260) == tokenizer.encode("y")


# -- In the library ------------------------------------------------------------------------------------------------


def valid(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "age"] and len(value["name"]) <= 9 and 0 <= value["age"] <= 99


def test_every_way_to_generate_takes_a_schema(llm: LLM) -> None:
    options: dict[str, Any] = {"json_schema": PERSON, "max_tokens": 200, "temperature": 1.5}
    done = [llm.generate("Once", seed=seed, **options) for seed in range(8)]
    done.append(llm.chat([{"role": "user", "content": "Who?"}], seed=0, **options))
    done += llm.generate_many(["The", "In", "A"], **options)
    assert all(each.finish_reason == "stop" and valid(each.text) for each in done)
    assert valid("".join(chunk.text for chunk in llm.stream("Once", **options)))
    # Texts without a grammar in the same batch are not constrained.
    together = [llm.stream("Once", temperature=0, max_tokens=20), llm.stream("Once", seed=3, **options)]
    free, held = [stream.read().text for stream in together]
    assert free == llm.generate("Once", temperature=0, max_tokens=20).text
    assert held == done[3].text


def test_objects_have_the_properties_that_their_schema_names(tokenizer: Tokenizer) -> None:
    one: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    two = {"type": "object", "properties": {"b": {"type": "integer"}}}

    def allows(schema: dict[str, Any], value: dict[str, Any]) -> bool:
        held = constraint(tokenizer, json_schema=schema)
        ids = tokenizer.encode(json.dumps(value), add_special=False, continuation=True)
        return held.n_possible(ids) == len(ids)

    more = {"a": 1, "b": 2}
    assert allows(one, {"a": 1})
    for schema in (one, {"$defs": {"x": one}, "$ref": "#/$defs/x"}, {"anyOf": [one, {"type": "null"}]}):
        assert not allows(schema, more)
    for schema in ({"items": one}, {"items": {"anyOf": [one, two]}}):
        assert not allows({"type": "object", "properties": {"list": {"type": "array", **schema}}}, {"list": [more]})
    for schema in (
        {**one, "additionalProperties": True},
        {**one, "required": ["a", "b"]},
        {"allOf": [one, two]},
        {**one, "anyOf": [two, {"type": "object", "properties": {"c": {"type": "integer"}}}]},
        {"type": "object"},
        {"type": "object", "properties": {"properties": two, "a": {}, "b": {}}},
    ):
        assert allows(schema, more)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_drafts_change_nothing(llm: LLM, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCost, "best", lambda self, rate, most, draft_s=0.0: most)
    in_engine(llm, lambda loop: loop._cost.add(1, 1.0))
    options: dict[str, Any] = {"regex": "(go on and |stop here ){12}", "temperature": temperature, "seed": 5}
    alone = llm.generate("Now", **options)
    drafted = llm.generate("Now", speculate="lookup", **options)
    assert re.fullmatch(options["regex"], alone.text)
    assert (drafted.text, drafted.ids, drafted.finish_reason) == (alone.text, alone.ids, alone.finish_reason)
    assert drafted.drafts is not None
    assert drafted.drafts.accepted > 10


def test_other_settings_hold_beside_a_grammar(llm: LLM) -> None:
    text = llm.generate("Once", regex="a{1,40}", ignore_eos=True, seed=1, repeat_penalty=1.3).text
    assert text == "a" * 40
    cut = llm.generate("Once", regex="[a-z]{50}", max_tokens=3)
    assert cut.finish_reason == "length"
    assert llm.generate("Once", regex="abc;def", stop=";").text == "abc"
    done = llm.generate("Once", regex="yes|no", logprobs=1)
    assert done.logprobs is not None
    assert done.logprobs[0].logprob is not None
    with pytest.raises(UsageError, match=r"after logit_bias, .* and grammar the logits are -inf for every token"):
        llm.generate("Once", regex="x", logit_bias=dict.fromkeys(range(llm.info.n_vocab), -np.inf))


# -- On the command line -------------------------------------------------------------------------------------------


def test_the_command_line_takes_grammars_as_texts_and_files(
    capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    schema, gbnf = tmp_path / "schema.json", tmp_path / "list.gbnf"
    schema.write_text(json.dumps(PERSON))
    gbnf.write_text('root ::= "one" | "two"')
    for flags, accepts in [
        (["-j", json.dumps(PERSON)], valid),
        (["-jf", schema], valid),
        (["--json-schema-file", schema], valid),
        (["--regex", "(ab){3}"], lambda text: text == "ababab"),
        (["--grammar", 'start: "one" | "two"'], lambda text: text in ("one", "two")),
        (["--grammar-file", gbnf], lambda text: text in ("one", "two")),
    ]:
        outcome = run_main(capfdbinary, "generate", "-m", "demo", "-p", "Say", "-q", "--device", "cpu", *flags)
        assert (outcome.code, outcome.err) == (0, "")
        assert accepts(outcome.out), outcome.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--regex", "a("], "regex cannot be used: unclosed group"),
        (["-j", "{"], "argument -j/--json-schema: '{' is not valid JSON (Expecting"),
        (["--regex", "a", "--grammar", "b"], "--regex and --grammar each constrain the text to a grammar"),
        (["-jf", "nowhere.json"], "nowhere.json cannot be read (No such file or directory)"),
    ],
)
def test_bad_flags_fail_before_a_model_is_loaded(
    capfdbinary: pytest.CaptureFixture[bytes], flags: list[str], words: str
) -> None:
    outcome = run_main(capfdbinary, "generate", "-m", "no-such-model.gguf", "-p", "Say", *flags)
    assert outcome.code == 2
    assert words in outcome.err


def _chain(n: int) -> dict[str, Any]:
    """Return a schema with ``n`` nested references."""
    defs: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{n}": {"const": 1}}}


PATTERNS = [{"type": "string", "pattern": f"a.{{{i}}}b.*c"} for i in range(40)]


def _alternatives(depth: int) -> dict[str, Any]:
    """Return a schema with 30 alternatives at each level, next to a property."""
    if not depth:
        return {"type": "integer"}
    alternatives = [{"required": [f"b{i}"], "properties": {f"b{i}": {"type": "null"}}} for i in range(30)]
    return {"type": "object", "properties": {"a": _alternatives(depth - 1)}, "anyOf": alternatives}


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": _chain(9_000)},
        {"grammar": "start: %json " + json.dumps(_chain(9_000))},
        {"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(9_000)) + 'r9000 ::= "a"'},
        {"grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(9_000)) + 'T9000: "a"'},
        {"json_schema": _alternatives(6)},
        {"grammar": "start: %json " + json.dumps(_alternatives(6))},
        {"json_schema": {"allOf": PATTERNS}},
        {"json_schema": {"$ref": "#/$defs/0", "$defs": {str(i): {**p, "$ref": "#"} for i, p in enumerate(PATTERNS)}}},
        {"json_schema": {"enum": ["a" * i for i in range(2_000)]}},
        {"regex": "a" * 1_000_000},
        {"json_schema": {"items": {"properties": {f"p{i}": {} for i in range(502)}, "required": ["p7"]}}},
        {"grammar": "start: T\nT: /(.*(a|x).{30}b.*)/ & ~/.*a.{30}.*/"},
        {"grammar": 'start: T U\nT: /a*/ & /(aa)*/\nU: "~" ~ /b/'},
    ],
)
def test_what_could_take_all_stack_time_or_memory_is_refused(given: dict[str, Any]) -> None:
    expected = r"it (has|combines) more than [\d,]+ .*: (make|use) .*|more than 500 optional|it has both & and ~"
    with pytest.raises(GrammarError, match=expected):
        check_grammar(Sampling(**given))


def test_the_vocabulary_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(*arguments: Any, **more: Any) -> Any:
        made.append(arguments)
        return LLTokenizer(*arguments, **more)

    monkeypatch.setattr(grammar_module.llguidance, "LLTokenizer", make)
    with localllm.load(device="cpu", context=64) as llm:
        llm.prepare_grammars()
        assert len(made) == 1
        llm.prepare_grammars()
        assert llm.generate("Say", regex="yes", max_tokens=9).text == "yes"
        assert len(made) == 1


def test_and_by_itself_is_no_trouble() -> None:
    for grammar in ("T: /a*/ & /(aa)*/ // not ~ b", 'T: "~" | /~&/ | /x/ & /x*/', "T: ~/a/"):
        check_grammar(Sampling(grammar=f"start: T\n{grammar}"))
    names = [f"p{i}" for i in range(600)]
    check_grammar(Sampling(json_schema={"properties": {name: {} for name in names}, "required": names[:100]}))


@pytest.mark.parametrize(
    "grammar",
    [
        {"grammar": f'start: "{"abc " * 100_000}"'},
        {"json_schema": {"const": "abc " * 100_000}},
        {"regex": "(abc ){100000}"},
        {"grammar": f'root ::= "{"abc " * 100_000}"'},
    ],
)
def test_a_long_literal_is_not_spelled_for_each_mask(
    grammar: dict[str, Any], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelled: list[str | bytes] = []
    monkeypatch.setattr(grammar_module._TokenizerAdapter, "__call__", lambda self, text: spelled.append(text) or [])
    held = constraint(tokenizer, **grammar)
    text, logits = b"", np.zeros(tokenizer.n_vocab, np.float32)
    for _ in range(20):
        allowed = np.flatnonzero(held.masked(logits) == 0)
        assert len({tokenizer.token_bytes(id_) for id_ in allowed.tolist()}) == 1
        held.accept(int(allowed[0]))
        text += tokenizer.token_bytes(int(allowed[0]))
    assert (b'"' * ("json_schema" in grammar) + b"abc " * 100).startswith(text)
    assert not spelled


def test_the_only_text_that_can_follow_is_spelled_in_the_longest_tokens(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    text = " the quick brown fox jumps over the lazy dog and then it is again in the house"
    held = constraint(tokenizer, grammar=f'start: "{text}" | "{text}!" | "{text}?"')
    ids = []
    for _ in text:
        logits = rng.normal(size=tokenizer.n_vocab).astype(np.float32)
        ids.append(int(held.masked(logits).argmax()))
        if tokenizer.token_bytes(ids[-1]) in (b"", b"!", b"?"):
            break  # if several tokens are allowed, the logits choose
        held.accept(ids[-1])
    assert tokenizer.decode(ids[:-1], continuation=True) == text
    assert len(ids) - 1 <= 1.1 * len(tokenizer.encode(text, add_special=False, continuation=True))
    either = constraint(tokenizer, grammar='start: "then" | "to"')
    allowed = np.flatnonzero(np.isfinite(either.masked(np.zeros(tokenizer.n_vocab, np.float32))))
    assert {b"t", b"th", b"to"} <= {tokenizer.token_bytes(id_) for id_ in allowed.tolist()}


def test_many_patterns_and_references_are_no_trouble_by_themselves() -> None:
    check_grammar(Sampling(json_schema={"type": "object", "properties": dict(enumerate(PATTERNS))}))
    check_grammar(Sampling(json_schema=_chain(400)))


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
ONE: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
CLOSED = {**ONE, "additionalProperties": False}
BOTH = {"a": 1, "b": 2}
IN_A = {"$defs": {"A": ONE, "B": {"properties": {"b": INTEGER}}}}


def takes(schema: dict[str, Any], value: Any) -> bool:
    tokenizer = bytes_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        held = constraint(tokenizer, json_schema=schema)
    ids = [*tokenizer.encode(json.dumps(value, ensure_ascii=False)), 256]
    return held.n_possible(ids) == len(ids)


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        # Schemas of older drafts, OpenAPI and careless programs.
        ({"items": [TEXT, INTEGER], "additionalItems": False, "type": "array"}, ["a", 1], ["a", 1, 1]),
        ({"type": "array", "prefixItems": INTEGER}, [1, 2], ["a"]),
        ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, 4, 3),
        ({"type": "string", "minLength": 2.0, "pattern": None, "enum": None, "title": None}, "ab", "a"),
        ({"type": "any", "properties": [], "required": None, "additionalProperties": None}, {"x": 1}, math.inf),
        ({"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", **INTEGER}, 1, "a"),
        ({"type": "number", "maximum": 1.7976931348623157e308, "minimum": -(2**63)}, -5.5, "a"),
        # References.
        ({"$defs": {"List[int]": INTEGER}, "$ref": "#/$defs/List[int]"}, 1, "a"),
        ({"definitions": {"é/~": INTEGER}, "$ref": "#/definitions/é~1~0"}, 1, "a"),
        ({"$defs": {"x": {"$anchor": "here", **INTEGER}}, "$ref": "#here"}, 1, "a"),
        ({"$id": "https://x.org/a", "$defs": {"x": {"$id": "b.json", **INTEGER}}, "$ref": "b.json"}, 1, "a"),
        ({"$id": "https://x.org/a", "x": [INTEGER], "$ref": "https://x.org/a#/x/0"}, 1, "a"),
        (
            {"$dynamicAnchor": "n", **CLOSED, "properties": {"a": {"items": {"$dynamicRef": "#n"}}}},
            {"a": [{"a": []}]},
            BOTH,
        ),
        # Patterns apply as far as possible.
        ({"type": "string", "pattern": "^(?=.*[A-Z(])(?!x)\\w{3}\\b$"}, "abc", "ab"),
        ({"type": "string", "pattern": r"^(a|b)\1$"}, "anything", 3),
        # Names of properties.
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER}, BOTH, {"c": 1}),
        ({"type": "object", "propertyNames": {"pattern": "^[ab]$"}}, BOTH, {"c": 1}),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, BOTH, {"cc": 1}),
        # Objects are closed only together with their neighbours' properties.
        ({**IN_A, "$ref": "#/$defs/A", "properties": {"b": INTEGER}}, {"b": 2, "a": 1}, {"a": 1, "c": 1}),
        (
            {**IN_A, "$ref": "#/$defs/A", "properties": {"b": {}}, "additionalProperties": False},
            {"b": 2, "a": 1},
            {**BOTH, "c": 3},
        ),
        ({**IN_A, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}, BOTH, {**BOTH, "c": 3}),
        (
            {**IN_A, "allOf": [{"$ref": "#/$defs/A"}], "required": ["b"], "unevaluatedProperties": False},
            BOTH,
            {"a": 1},
        ),
        (
            {**IN_A, "anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "required": ["a", "c"]},
            {"a": 1, "c": 3},
            {"b": 2},
        ),
        (
            {**IN_A, "properties": {"c": {}}, "anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
            {"a": 1, "c": 3},
            {**BOTH, "c": 3},
        ),
        (
            {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
            {"b": 2},
            {},
        ),
        ({"allOf": [CLOSED, {**CLOSED, "properties": {"b": {}}, "required": ["b"]}]}, BOTH, {**BOTH, "c": 3}),
        (
            {"allOf": [{"properties": {"x": ONE}}, {"properties": {"x": {"required": ["b"]}}}]},
            {"x": BOTH},
            {"x": {"a": 1}},
        ),
        ({**ONE, "if": {}, "then": {"required": ["b"]}}, BOTH, {**BOTH, "c": 3}),
        ({**ONE, "dependentSchemas": {"a": {"properties": {"b": {}}}}}, BOTH, {**BOTH, "c": 3}),
    ],
    ids=str,
)
def test_schemas_of_all_kinds_are_held_as_far_as_they_can_be(
    schema: dict[str, Any], taken: Any, not_taken: Any
) -> None:
    assert takes(schema, taken)
    assert not takes(schema, not_taken)


CLOSED_B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"], "additionalProperties": False}
REQUIRES_B = {"properties": {"b": INTEGER}, "required": ["b"]}
DEFINED: dict[str, Any] = {"$defs": {"A": CLOSED, "B": CLOSED_B, "AB": {"allOf": [{"$ref": "#/$defs/A"}, CLOSED_B]}}}


def x_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}}


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ({"allOf": [{"allOf": [CLOSED]}, CLOSED_B]}, {"b": 2, "a": 1}),
        ({**DEFINED, **x_of({"$ref": "#/$defs/AB"})}, {"x": BOTH}),
        ({**DEFINED, **x_of({"anyOf": [{"$ref": "#/$defs/AB"}, {"type": "null"}]})}, {"x": BOTH}),
        ({**DEFINED, "type": "array", "items": {"allOf": [{"$ref": "#/$defs/A"}, CLOSED_B]}}, [BOTH]),
        ({"anyOf": [{"allOf": [CLOSED, REQUIRES_B]}, {"type": "null"}]}, BOTH),
        ({**CLOSED, "oneOf": [REQUIRES_B, {"properties": {"c": {}}, "required": ["c"]}]}, BOTH),
        ({"allOf": [CLOSED], "anyOf": [CLOSED_B, {**CLOSED_B, "required": ["b", "c"]}]}, {"b": 2, "a": 1}),
        ({"allOf": [{"anyOf": [CLOSED, CLOSED_B]}, {"properties": {"c": {}}, "required": ["c"]}]}, {"c": 3, "b": 2}),
        ({"allOf": [x_of(CLOSED), x_of(CLOSED_B)]}, {"x": BOTH}),
        ({"allOf": [{"allOf": [x_of(CLOSED)]}, {"anyOf": [x_of(CLOSED_B), {"required": ["y"]}]}]}, {"x": BOTH}),
        ({**CLOSED, "allOf": [{"if": {}, "then": {"allOf": [REQUIRES_B]}}]}, BOTH),
        ({**DEFINED, **CLOSED, "if": {}, "then": {"$ref": "#/$defs/B"}}, BOTH),
        ({**DEFINED, **CLOSED, "dependentSchemas": {"a": {"$ref": "#/$defs/B"}}}, BOTH),
    ],
    ids=str,
)
def test_closed_objects_allow_what_a_schema_beside_them_requires(schema: dict[str, Any], taken: Any) -> None:
    """By the standard such schemas exclude each other; their authors want all their properties."""
    assert takes(schema, taken)
    more = {**taken, "z": 1} if isinstance(taken, dict) else [{**taken[0], "z": 1}]
    assert not takes(schema, more)


def test_a_closed_object_forbids_what_a_schema_beside_it_does_not_require() -> None:
    schema = {**CLOSED, "allOf": [{"properties": {"b": INTEGER}}]}
    assert takes(schema, {"a": 1})
    assert not takes(schema, BOTH)
    alternatives = {"anyOf": [CLOSED, CLOSED_B]}
    assert takes(alternatives, {"b": 2})
    assert not takes(alternatives, BOTH)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        *(({"type": "string", "format": name}, f"format '{name}'") for name in ("password", "uri-reference", "x")),
        ({"type": "integer", "format": "int64"}, ""),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "uniqueItems": False}, ""),
        ({"not": TEXT}, "not"),
        ({"type": "array", "contains": TEXT}, "contains"),
        ({"if": TEXT, "then": {"minLength": 3}}, "if"),
        ({"type": "object", "propertyNames": TEXT, "additionalProperties": INTEGER}, ""),
        ({"type": "object", "propertyNames": {"format": "email"}}, "format 'email'|propertyNames"),
        ({"type": "object", "unevaluatedProperties": True, "dependentRequired": {}}, ""),
        ({"type": "string", "pattern": "^(?!x)a"}, r"pattern '\^\(\?!x\)a' in full"),
        ({"oneOf": [TEXT, {"type": "string", "maxLength": 3}]}, "oneOf, where several"),
        ({"oneOf": [ONE, {**ONE, "properties": {"a": {}, "b": {}}}]}, "oneOf, where several"),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ""),
        ({**CLOSED, "allOf": [{"required": ["b"]}]}, "additionalProperties, which forbids"),
    ],
    ids=str,
)
def test_what_texts_are_not_held_to_is_a_warning(schema: dict[str, Any], words: str) -> None:
    tokenizer = bytes_tokenizer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            constraint(tokenizer, json_schema=schema)
    messages = [str(each.message) for each in caught]
    assert len(messages) == (2 if words else 0), messages
    assert all(re.match(rf"json_schema: ({words}).*, which is not enforced$", each) for each in messages)


def random_schema(rng: np.random.Generator, names: Iterator[str], depth: int, definitions: dict[str, Any]) -> Any:
    """Return a random schema of references, alternatives and other types, whose properties are all required."""

    def deeper() -> Any:
        return random_schema(rng, names, depth - 1, definitions)

    def an_object(is_open: bool) -> dict[str, Any]:
        properties = {next(names): deeper() for _ in range(rng.integers(1, 4))}
        found = {"type": "object", "properties": properties, "required": [*properties]}
        return found if is_open or rng.random() < 0.6 else {**found, "additionalProperties": bool(rng.random() < 0.4)}

    def a_reference(schema: Any) -> dict[str, Any]:
        definitions[name := f"D{len(definitions)}"] = schema
        return {"$ref": f"#/$defs/{name}"}

    kind = rng.integers(10) if depth else 9
    if kind < 2:
        return an_object(is_open=False)
    if kind < 7:
        found = an_object(is_open=True) if rng.random() < 0.7 else {"type": "object"}
        for key in rng.choice(["$ref", "allOf", "anyOf"], rng.integers(1, 3), replace=False).tolist():
            beside = [an_object(is_open=True) for _ in range(rng.integers(1, 4))]
            beside = [a_reference(each) if rng.random() < 0.5 else each for each in beside]
            found |= a_reference(beside[0]) if key == "$ref" else {key: beside}
        return found
    if kind < 9:
        return a_reference(deeper()) if kind < 8 else {"type": "array", "items": deeper(), "maxItems": 2}
    leaves: list[Any] = [
        {**INTEGER, "minimum": -5, "maximum": 12},
        {"type": "string", "maxLength": 3},
        {"enum": ["x", 1, None]},
        {"const": [7]},
    ]
    return leaves[rng.integers(len(leaves))]


def test_closed_objects_never_contradict_what_stands_beside_them() -> None:
    """Random schemas with a satisfying value: random texts that follow them are valid."""
    jsonschema = pytest.importorskip("jsonschema")
    tokenizer = bytes_tokenizer()
    grammars = Grammars(tokenizer, 257)
    rng = np.random.default_rng(1)
    bias = np.zeros(257, np.float32)
    bias[[*tokenizer.encode('"}]1'), 256]] = 6
    for _ in range(120):
        definitions: dict[str, Any] = {}
        schema = random_schema(rng, (f"p{i}" for i in range(10_000)), 3, definitions)
        schema = {**schema, "$defs": definitions}
        held = grammars.constraint(Sampling(json_schema=schema), [])
        ids: list[int] = []
        while not held.is_complete and len(ids) < 5000:
            id_ = int((held.masked(2 * rng.standard_normal(257).astype(np.float32) + bias)).argmax())
            if id_ == 256:
                break
            held.accept(id_)
            ids.append(id_)
        jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(ids)))
