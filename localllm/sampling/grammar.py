"""Constrains text to a JSON schema, a regular expression or a grammar, by masking logits.

llguidance (https://github.com/guidance-ai/llguidance) computes the allowed tokens. Reasoning before an answer is not
constrained; the grammar applies after the end of the reasoning.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from localllm.cancellation import check_cancelled
from localllm.chat.calls.values import JSON_OPTIONS
from localllm.chat.thinking import TAGS
from localllm.errors import Argument, GrammarError, UsageError, warn
from localllm.kernels import process
from localllm.nesting import check_nesting, parse_json
from localllm.parallel import in_thread
from localllm.sampling.call_constraint import CallConstraint, CallSearch
from localllm.sampling.constraint import Constraint, first_line
from localllm.sampling.json_schema import enforceable_schema

if TYPE_CHECKING:
    from localllm.chat.calls.grammar import CallGrammar
    from localllm.options.declared import Sampling
    from localllm.tokenizer import Tokenizer

#: Without this, each mask would spell and tokenize any forced text, which takes seconds for a long literal.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'

#: Warnings of llguidance (part of the text), and our wording.
_OF_LLGUIDANCE = (
    ("oneOf not fully", "oneOf, where several alternatives fit"),
    ("min/maxProperties", "minProperties and maxProperties together with optional properties"),
)

#: Keywords that combine schemas, except allOf.
_COMBINE = {"$ref", "anyOf", "oneOf"}

#: Limits of a grammar: characters, rules and references, patterns in combined schemas, optional properties, and
#: patterns of one object. In llguidance a chain of rules uses stack, and the process crashes when the stack is full.
#: Each combined pattern doubles time and memory. More optional properties compile for many seconds, and then no text
#: matches. Twice the patterns of one object's properties take 50 times as long.
_MAX_CHARACTERS, _MAX_RULES, _MAX_COMBINED, _MAX_OPTIONAL, _MAX_PATTERNS = 512 << 10, 500, 10, 500, 100

#: Most schemas after alternatives are combined, which llguidance does one by one.
_MAX_SCHEMAS = 20_000

#: Most occurrences of %json in Lark's notation without valid JSON.
_MAX_INVALID = 10

#: Deepest nesting of a JSON schema. llguidance reads schemas recursively, with 4 KB of stack per level.
_MAX_SCHEMA_NESTING = 64

#: Matches strings and regular expressions of Lark's notation, which contain no operators; "and"; and "not". The
#: closing quote is optional: without it a search that restarts at every quote takes quadratic time.
_LARK_OPERATORS = re.compile(r'"(?:[^"\\\n]++|\\.)*+"?|//[^\n]*|/(?:[^/\\\n]++|\\.)++/?|(&)|(~)(?!\s*\d)')

#: Most compiled grammars in the cache.
_MAX_KEPT = 32

#: A rule of llama.cpp's GBNF. Rules of Lark have only a colon.
_GBNF_RULE = re.compile(r"^[^\S\n]*+[\w-]++\s*+::=", re.MULTILINE)
#: A trailing backslash in a regular expression that escapes nothing; llguidance ignores it.
_LONE_BACKSLASH = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
#: Strings, classes, comments, names and single characters of GBNF. Strings and classes may be unterminated.
_GBNF_PIECE = re.compile(r'"(?:[^"\\]|\\.)*+"?|\[(?:[^\]\\]|\\.)*+\]?|#[^\n]*|[\w-]+|.', re.DOTALL)
#: An escape of GBNF. Groups 1 and 2 are the hexadecimal number in ``\u`` and ``\U`` escapes.
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _escaped(escape: re.Match[str]) -> str:
    r"""Return a character in a form that llguidance's GBNF reader supports, in place of ``\u`` and ``\U``."""
    if escape[1] is None and escape[2] is None:
        return escape[0]
    number = int(escape[1] or escape[2], 16)
    if number > sys.maxunicode or 0xD800 <= number <= 0xDFFF:
        raise ValueError(f"{escape[0]} is not a character")
    return chr(number) if number >= 0x80 else f"\\x{number:02x}"


#: Number of tokens at the end of a prompt that are searched for a reasoning tag.
_LAST_TOKENS = 16

#: Opening of reasoning at the end of a prompt, and its closing. In gpt-oss's format the answer is a separate message.
_OPENING = {**TAGS, "<|start|>assistant": "<|channel|>final<|message|>"}


def _with_groups(gbnf: str) -> str:
    """Prepare GBNF for llguidance's reader, which drops parentheses of ``(x+)*`` and reserves the name ``start``."""
    pieces, opened, last = list[str](), list[int](), ""
    for piece in _GBNF_PIECE.findall(gbnf):
        if piece == "(":
            opened.append(len(pieces))
        elif piece == ")" and opened and last in "+*?}":
            pieces[opened.pop()] = '("" '  # the reader keeps groups of two
        elif piece == ")" and opened:
            opened.pop()
        pieces.append("start-of-gbnf" if piece == "start" else piece)
        last = last if piece.isspace() or piece.startswith("#") else piece
    return "".join(pieces)


def check_grammar(sampling: Sampling) -> None:
    """Check a grammar as far as possible without a model."""
    if sampling.grammar_kind is not None:
        _raise_if(llguidance.LLMatcher.validate_grammar(_read(sampling)[0]), sampling)


def _read(sampling: Sampling) -> tuple[str, list[str]]:
    """Return the grammar in Lark's notation, and descriptions of the parts of its schemas that are not enforced."""
    matcher, complaint = llguidance.LLMatcher, "cannot be used"
    unenforced: list[str] = []
    try:
        _check_size(sampling)
        if sampling.json_schema is not None:
            with_options = {"x-guidance": JSON_OPTIONS, **parse_json(str(sampling.json_schema), _MAX_SCHEMA_NESTING)}
            schema, unenforced = _enforceable_schema(json.dumps(with_options))
            lark = f"start: %json {schema}"
        elif sampling.regex is not None:
            if _LONE_BACKSLASH.search(sampling.regex):
                raise ValueError("its last backslash escapes nothing: remove or double it")
            lark = json.loads(matcher.grammar_from_regex(sampling.regex))["grammars"][0]["lark_grammar"]
        else:
            lark = sampling.grammar or ""
            if _GBNF_RULE.search(lark):
                complaint = "is not valid GBNF"
                lark = gbnf_to_lark(_with_groups(_ESCAPE.sub(_escaped, lark)))
            for start, end in reversed([span for span, _ in _schemas(lark)]):
                schema, more = _enforceable_schema(lark[start:end])
                lark, unenforced = lark[:start] + schema + lark[end:], unenforced + more
        return lark + _NO_FORCING, unenforced
    except Exception as error:  # llguidance raises nothing more specific
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _error(sampling, complaint, reason) from None


@lru_cache(64)  # a schema may have 256 KiB
def _enforced_schema(text: str) -> Any:
    """Return the JSON schema of a tool's arguments in the form of `localllm.sampling.json_schema`.

    Raises:
        ValueError: llguidance cannot enforce the schema, or might need too much time or memory.
    """
    original = parse_json(text, _MAX_SCHEMA_NESTING)
    _check_schemas([original])
    schema = enforceable_schema(original)[0]
    if problem := llguidance.LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}"):
        raise ValueError(problem)
    return schema


@lru_cache(_MAX_KEPT)
def _enforceable_schema(text: str) -> tuple[str, list[str]]:
    """Return a JSON schema for Lark's notation, and the keywords that are not enforced."""
    original = parse_json(text, _MAX_SCHEMA_NESTING)
    validate = llguidance.LLMatcher.validate_grammar_with_warnings
    schema, unenforced = enforceable_schema(original)
    written = json.dumps(schema)
    is_wrong, messages = validate(f"start: %json {written}")
    if not is_wrong:
        if '"oneOf"' in text:  # some alternatives exclude each other only because objects are closed
            messages += validate(f"start: %json {json.dumps(enforceable_schema(original, may_close=False)[0])}")[1]
        unenforced += [words for sign, words in _OF_LLGUIDANCE if any(sign in message for message in messages)]
    return written, unenforced


def _schemas(lark: str) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield (start, end), schema of each JSON schema in Lark's notation."""
    n_invalid = 0
    for match in re.finditer(r"%json\s*", lark):
        check_cancelled()
        check_nesting(lark, _MAX_SCHEMA_NESTING, match.end())
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, match.end())
        except ValueError:  # in a string or a comment; llguidance reports errors elsewhere
            n_invalid += 1
            if n_invalid > _MAX_INVALID:  # each attempt may read to the end of the text
                raise ValueError(f"more than {_MAX_INVALID} schemas of %json are not valid JSON") from None
        else:
            yield (match.end(), end), schema


def _check_size(sampling: Sampling) -> None:
    """Raise a ValueError if the grammar might take too much time or memory to compile."""
    lark = sampling.grammar or ""
    if len(lark) + len(sampling.regex or "") + len(str(sampling.json_schema or "")) > _MAX_CHARACTERS:
        raise ValueError(f"it has more than {_MAX_CHARACTERS:,} characters: make it simpler")
    operators = [match.lastindex for match in _LARK_OPERATORS.finditer(lark if "&" in lark else "")]
    if 1 in operators and 2 in operators:
        raise ValueError("it has both & and ~, which may take forever to compile: use only one operator")
    n_rules = max(len(lark.splitlines()), lark.count("%json"))
    if n_rules > _MAX_RULES:
        raise ValueError(f"it has more than {_MAX_RULES} rules or schemas: use fewer")
    schemas = [parse_json(str(sampling.json_schema), _MAX_SCHEMA_NESTING)] if sampling.json_schema is not None else []
    _check_schemas([*schemas, *(schema for _, schema in _schemas(lark))], n_rules)


def _check_schemas(pending: list[Any], n_rules: int = 0) -> None:
    if _n_combined(pending) > _MAX_SCHEMAS:
        raise ValueError(f"it combines more than {_MAX_SCHEMAS:,} alternatives: use fewer")
    n_patterns, n_optional, is_combined = 0, 0, False
    while pending:
        check_cancelled()
        schema = pending.pop()
        pending += schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
        if isinstance(schema, dict):
            n_rules += "$ref" in schema
            n_optional = max(n_optional, _length(schema.get("properties")) - _length(schema.get("required")))
            n_of_object = _length(schema.get("patternProperties"))
            if n_of_object > _MAX_PATTERNS:
                raise ValueError(f"patternProperties has more than {_MAX_PATTERNS} patterns: use fewer")
            n_patterns += ("pattern" in schema) + n_of_object
            is_combined |= "allOf" in schema or ("pattern" in schema and not schema.keys().isdisjoint(_COMBINE))
    if n_rules > _MAX_RULES:
        raise ValueError(f"it has more than {_MAX_RULES} rules or references: make it simpler")
    if n_optional > _MAX_OPTIONAL:
        raise ValueError(f"an object has more than {_MAX_OPTIONAL} optional properties: require some of them")
    if is_combined and n_patterns > _MAX_COMBINED:
        raise ValueError(f"it combines more than {_MAX_COMBINED} patterns: make it simpler")


def _n_combined(schema: Any) -> int:
    """Return about the number of schemas after alternatives are combined with the properties next to them."""
    if isinstance(schema, list):
        return sum(map(_n_combined, schema))
    if not isinstance(schema, dict):
        return 0
    n_alternatives = sum(_length(schema.get(key)) for key in ("anyOf", "oneOf"))
    is_combined = n_alternatives and not schema.keys().isdisjoint(("properties", "items", "allOf", "$ref"))
    return (1 + sum(map(_n_combined, schema.values()))) * (n_alternatives if is_combined else 1)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, dict | list) else 0


def _raise_if(complaint: str, sampling: Sampling) -> None:
    if complaint and not complaint.startswith("WARNING"):
        raise _error(sampling, "cannot be used", complaint)


def _error(sampling: Sampling, problem: str, reason: str) -> GrammarError:
    return GrammarError(Argument(str(sampling.grammar_kind)), f" {problem}: {first_line(reason)}")


class Grammars:
    """Creates constraints for a model, and caches compiled grammars. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        """``n_vocab``: logits per token; may be larger than the vocabulary."""
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._vocabulary: Any = None
        self._texts: list[bytes] = []  # of the tokens; 0xFF starts the name of a control token
        self._matchers: OrderedDict[Hashable, Future[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, sampling: Sampling, prompt_ids: Sequence[int], template: str = "") -> Constraint:
        """Return the constraint for the grammar of the settings.

        Args:
            sampling: the settings.
            prompt_ids: the prompt. If it ends with a tag that opens reasoning, the reasoning is not constrained.
            template: for an answer, the chat template. The model may start with a reasoning tag of the template.
        """
        internal, unenforced = _read(sampling)
        for words in unenforced:
            warn(f"{sampling.grammar_kind}: {words}, which is not enforced")
        matcher = self._matcher(internal, lambda: internal).result()
        _raise_if(matcher.get_error(), sampling)
        return self._constraint(matcher, prompt_ids, template, _OPENING)

    def call_constraint(
        self, grammar: CallGrammar, search: CallSearch, prompt_ids: Sequence[int], template: str
    ) -> Constraint | CallConstraint:
        """Return the constraint of a reply that may call tools.

        Args:
            search: searches the reply for the first call.
            prompt_ids, template: as in `constraint`.
        """
        ends = [self._tokenizer.token_text(id_) for id_ in self._tokenizer.eog_ids]
        # Compiled while the prompt is evaluated.
        matcher = self._matcher(grammar, lambda: grammar.lark(_enforced_schema, ends) + _NO_FORCING)

        def start() -> Constraint | None:
            is_usable = not matcher.result().is_error()  # otherwise it exceeds a limit of llguidance
            return self._constraint(matcher.result(), (), "", {}) if is_usable else None

        if grammar.must_call:
            if problem := matcher.result().get_error():
                raise UsageError(f"the schemas of the tools cannot be enforced: {first_line(problem)}: simplify them")
            return self._constraint(matcher.result(), prompt_ids, template, TAGS)

        def texts() -> Sequence[bytes]:
            matcher.result()  # waits for `prepare`
            return self._texts

        return CallConstraint(start, search, self._tokenizer, texts)

    def _constraint(
        self, matcher: Any, prompt_ids: Sequence[int], template: str, tags: Mapping[str, str]
    ) -> Constraint:
        end = self._tokenizer.decode(prompt_ids[-_LAST_TOKENS:], special=True).rstrip()
        closing = next((tags[tag].encode() for tag in tags if end.endswith(tag)), None)
        has_thought = closing is not None or end.endswith(tuple(TAGS.values()))
        opening = {} if has_thought else self._opening_tokens(template)
        return Constraint(matcher.deep_copy(), self._vocabulary, self._tokenizer, self._n_vocab, closing, opening)

    def _matcher(self, key: Hashable, lark: Callable[[], str]) -> Future[Any]:
        """Return the matcher of a grammar, which another thread compiles unless it is in the cache."""
        with self._lock:
            matcher = self._matchers.pop(key, None)
            if matcher is None:
                matcher = in_thread(partial(self._compiled, lark), "localllm-grammar")
            self._matchers[key] = matcher
            if len(self._matchers) > _MAX_KEPT:
                self._matchers.popitem(last=False)
        return matcher

    def _compiled(self, lark: Callable[[], str]) -> Any:
        with process.UnfinishedWork(process.workers):
            self.prepare()
            return llguidance.LLMatcher(self._vocabulary, lark(), log_level=0)

    def prepare(self) -> None:
        """Create llguidance's form of the vocabulary, once."""
        with self._lock:
            if self._vocabulary is None:
                adapter = _TokenizerAdapter(self._tokenizer, self._n_vocab)
                self._texts = adapter.tokens
                self._vocabulary = llguidance.LLTokenizer(
                    adapter,
                    # A vocabulary without an end token gets an extra one, which no mask contains.
                    eos_token=sorted(self._tokenizer.eog_ids) or [self._n_vocab],
                    # Slices save little, take half of the preparation time, and block other threads.
                    slices=[],
                )

    def _opening_tokens(self, template: str) -> dict[int, str]:
        """Return reasoning tags of a template that are one token, with their closing tags."""
        opening = {}
        for tag, closing in TAGS.items():
            if closing in template:
                ids = self._tokenizer.encode(tag, add_special=False, parse_special=True, continuation=True)
                if len(ids) == 1:
                    opening[ids[0]] = closing
        return opening


class _TokenizerAdapter:
    """The tokenizer interface of `llguidance.LLTokenizer`."""

    is_tokenizer_wrapper = True
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        # 0xFF never occurs in text, so it distinguishes names of control tokens from text.
        self.tokens = [
            b"\xff" * (tokenizer.is_special(id_) or id_ in tokenizer.eog_ids)
            + tokenizer.token_bytes(id_, special=tokenizer.is_special(id_))
            for id_ in range(tokenizer.n_vocab)
        ]
        self.tokens += [b""] * (n_vocab - tokenizer.n_vocab) + [b"\xff<end>"]

    def __call__(self, text: bytes | str) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(text, add_special=False, continuation=True)
