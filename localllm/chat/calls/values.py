"""Rules for the arguments of calls, in llguidance's notation, for each form of arguments in the declared formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import llguidance

from localllm.chat.calls import declaration as forms
from localllm.chat.calls.argument_types import ArgumentTypes
from localllm.chat.calls.declaration import Arguments
from localllm.chat.calls.json_strings import escaped_grammar, rule_of

#: llguidance's options for schemas. JSON is on one line, because a model that may write white space between values
#: may write it endlessly. Unknown parts of a schema are warnings, not errors.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": True}

Schema = Any  #: a JSON schema in the form of `localllm.sampling.json_schema`: a dict or a boolean

#: Most alternatives of a schema; a schema with more allows any value.
_MAX_VARIANTS = 32
#: Deepest combination of schemas, and most schemas of one tool, each counted for every alternative of its parents.
_MAX_DEPTH, _MAX_SCHEMAS = 40, 20_000
#: Names of arguments that tags and Python's calls can have.
_NAME, _PYTHON_NAME = re.compile(r"[^\s<>\"'/]{1,256}"), re.compile(r"[A-Za-z_]\w{0,255}", re.ASCII)
#: Names of arguments that a schema allows without naming them.
_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_ANY_TEXT = "/(.|\\n)*/"
_JSON_WORDS = {True: "true", False: "false", None: "null"}
#: Keywords about numbers.
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class UnwritableError(ValueError):
    """A schema that the rules cannot express."""


def literal(text: str) -> str:
    """Return a string in llguidance's notation."""
    return json.dumps(text, ensure_ascii=False)


def flexible(text: str, *, spaces: bool = False) -> str:
    """Return terminals for a string whose line breaks, and ``spaces``, a model may omit or double."""
    terminals = []
    for piece in re.split(r"([ \n]+)" if spaces else r"(\n[ \n]*)", text):
        if piece.strip(" \n"):
            terminals.append(literal(piece))
        elif piece:
            white = "".join(sorted(set(piece))).replace("\n", "\\n")
            terminals.append(f"/[{white}]{{1,{len(piece) + 1}}}/?")
    return " ".join(terminals)


def json_rule(schema: Schema, definitions: Mapping[str, Schema] | None = None) -> str:
    """Return a rule for JSON that follows a schema. ``definitions``: added to the schema as ``$defs``."""
    schema = schema if isinstance(schema, dict) else {}
    more = {"$defs": definitions} if schema and definitions else {}
    return "%json " + json.dumps({"x-guidance": JSON_OPTIONS, **schema, **more})


class Rules:
    """Rules of a grammar, by name."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._names: dict[str, str] = {}

    def add(self, expression: str, *, is_terminal: bool = False, options: str = "") -> str:
        """Return the name of a rule. Equal rules share a name."""
        key = f"{options}{is_terminal}{expression}"
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"{'T' if is_terminal else 'r'}{len(self._rules)}"
            self._rules.append(f"{name}{options}: {expression}")
        return name

    def reserve(self) -> str:
        """Return the name of a rule that `define` adds, for rules that refer to themselves."""
        self._rules.append("")
        return f"r{len(self._rules) - 1}"

    def define(self, name: str, expression: str) -> None:
        self._rules[int(name[1:])] = f"{name}: {expression}"

    def include(self, grammar: str) -> None:
        """Add a grammar's rules, whose names start with `new_prefix`."""
        self._rules.append(grammar)

    @property
    def new_prefix(self) -> str:
        """A start for the names of further rules."""
        return f"g{len(self._rules)}_"

    def lazy(self, end: str, text: str = _ANY_TEXT) -> str:
        """Return a rule for text up to and including its first ``end``."""
        return self.add(f"{text} {end}", options="[lazy]")

    def without(self, text: str, pattern: str = _ANY_TEXT) -> str:
        """Return a terminal for strings that follow a pattern and do not contain ``text``."""
        escaped = re.escape(text).replace("/", "\\/")
        return self.add(f"{pattern} & ~/(.|\\n)*{escaped}(.|\\n)*/", is_terminal=True)

    def listed(self, items: Sequence[tuple[str, bool]], separator: str, extra: str) -> str:
        """Return an expression for items in their order, with a separator between them.

        Args:
            items: expression of each item, and whether it is required.
            extra: expression of any number of further items; empty for none.
        """
        rest = f"({separator} {extra})*" if extra else ""
        firsts, may_be_empty = [f"{extra} {rest}"] if extra else [], True
        for item, is_required in reversed(items):
            expression = self.add(item)
            if is_required:
                firsts, may_be_empty = [], False
            firsts.insert(0, f"{expression} {rest}")
            following = f"{separator} {expression}"
            rest = self.add(f"{following if is_required else f'({following})?'} {rest}")
        return f"({' | '.join(firsts)}){'?' if may_be_empty else ''}" if firsts else ""

    def __str__(self) -> str:
        return "\n".join(rule for rule in self._rules if rule)


def arguments_rule(form: Arguments, parameters: Any, schema: Schema, rules: Rules) -> str:
    """Return the expression of arguments that follow a schema.

    Args:
        parameters: the schema in the request.
        schema: the same schema in the form of `localllm.sampling.json_schema`.
    """
    if isinstance(form, forms.JSONArguments) and form.quote == '"':
        return rules.add(json_rule(schema))
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    values: _Values
    if isinstance(form, forms.JSONArguments):
        values = _QuotedValues(rules, definitions, form.quote)
    elif isinstance(form, forms.PythonArguments):
        values = _PythonValues(rules, definitions)
    elif isinstance(form, forms.NestedArguments):
        values = _NestedValues(rules, definitions, form.mark)
    else:
        values = _TaggedValues(rules, definitions, form, ArgumentTypes(parameters))
    return f"({' | '.join(map(values.arguments, values.variants(schema)))})"


def input_rule(form: Arguments, syntax: str, definition: str, rules: Rules) -> str:
    """Return the expression of the arguments of a custom tool, ``{"input": TEXT}``.

    Args:
        syntax, definition: grammar of the text, "lark" or "regex".

    Raises:
        UnwritableError: the form has no JSON strings.
    """
    if not isinstance(form, forms.JSONArguments) or form.quote != '"':
        raise UnwritableError("its input is not in a JSON string")
    if syntax == "regex":
        text = rules.add(rule_of(definition))
    else:
        prefix = rules.new_prefix
        escaped = escaped_grammar(definition, prefix)
        if llguidance.LLMatcher.validate_grammar(f"start: {prefix}start\n{escaped}"):
            raise UnwritableError("its grammar cannot be escaped")
        rules.include(escaped)
        text = f"{prefix}start"
    return f'"{{" {literal(json.dumps("input"))} ":" " "? {literal(chr(34))} {text} {literal(chr(34))} "}}"'


class _Values:
    """Rules of values that follow schemas."""

    words: ClassVar[Mapping[bool | None, str]] = _JSON_WORDS
    separator = '"," " "?'

    # Methods of the subclasses.
    arguments: Callable[[dict[str, Any]], str]  # for a schema without combinations
    string: Callable[[dict[str, Any]], str]
    constant_string: Callable[[str], str]
    key: Callable[[str], str]  # with the separator before the value
    any_key: Callable[[], str]

    def __init__(self, rules: Rules, definitions: Mapping[str, Schema]) -> None:
        self._rules, self._definitions = rules, definitions
        self._references: dict[str, str] = {}  # names of rules
        self._n_schemas = 0

    # -- Schemas -----------------------------------------------------------------------------------------------------

    def variants(self, schema: Schema, depth: int = 0) -> list[dict[str, Any]]:
        """Return the alternatives of a schema, without ``$ref``, ``allOf``, ``anyOf`` and ``oneOf``."""
        self._n_schemas += 1
        if depth > _MAX_DEPTH or self._n_schemas > _MAX_SCHEMAS:
            raise UnwritableError("its schema is too complex")
        if schema is False:
            return []
        if not isinstance(schema, dict):
            return [{}]
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", "anyOf", "oneOf", "$defs")}
        groups = [[own]]
        if "$ref" in schema:
            groups.append(self.variants(self._target(schema), depth + 1))
        groups += [self.variants(part, depth + 1) for part in schema.get("allOf", ())]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                groups.append([variant for part in schema[key] for variant in self.variants(part, depth + 1)])
        variants: list[dict[str, Any]] = [{}]
        for group in groups:
            if len(variants) * len(group) > _MAX_VARIANTS:
                raise UnwritableError("its schema has too many alternatives")
            variants = [_merged(a, b) for a, b in product(variants, group)]
        return variants

    def _target(self, schema: Mapping[str, Any]) -> Schema:
        return self._definitions[schema["$ref"].removeprefix("#/$defs/")]

    # -- Values ------------------------------------------------------------------------------------------------------

    def value(self, schema: Schema) -> str:
        if isinstance(schema, dict) and schema.keys() == {"$ref"}:
            name = self._references.get(schema["$ref"])
            if name is None:
                name = self._references[schema["$ref"]] = self._rules.reserve()
                self._rules.define(name, self.value(self._target(schema)))
            return name
        variants = self.variants(schema)
        if not variants:
            raise UnwritableError("no value follows its schema")
        return "(" + " | ".join(self._variant(variant) for variant in variants) + ")"

    def _variant(self, schema: dict[str, Any]) -> str:
        constants = [schema["const"]] if "const" in schema else schema.get("enum")
        if constants is not None:
            return " | ".join(self.constant(value) for value in constants)
        types = schema_types(schema)
        if not types:
            return self.any_value()
        return " | ".join(self._of_type(name, schema) for name in types)

    def _of_type(self, name: str, schema: dict[str, Any]) -> str:
        if name == "object":
            return self.object(schema)
        if name == "array":
            return self.array(schema)
        if name == "string":
            return self.string(schema)
        if name == "boolean":
            return f"{literal(self.words[True])} | {literal(self.words[False])}"
        if name == "null":
            return literal(self.words[None])
        limits = {key: schema[key] for key in _NUMERIC if key in schema}
        return self._rules.add(json_rule({**limits, "type": name}))

    def any_value(self) -> str:
        if "" not in self._references:
            self._references[""] = name = self._rules.reserve()
            types = ("string", "number", "boolean", "null", "array", "object")
            self._rules.define(name, " | ".join(self._of_type(type_, {}) for type_ in types))
        return self._references[""]

    def constant(self, value: Any) -> str:
        if isinstance(value, dict):
            members = [f"{self.key(key)} {self.constant(item)}" for key, item in value.items()]
            return f'"{{" {f" {self.separator} ".join(members)} "}}"'
        if isinstance(value, list):
            return f'"[" {f" {self.separator} ".join(self.constant(item) for item in value)} "]"'
        if isinstance(value, str):
            return self.constant_string(value)
        return literal(self.words[value] if isinstance(value, bool | None) else json.dumps(value))

    def object(self, schema: dict[str, Any]) -> str:
        pairs = [(f"{self.key(name)} {self.value(item)}", needed) for name, item, needed in properties(schema)]
        value = self.extra_value(schema)
        return f'"{{" {self._rules.listed(pairs, self.separator, value and f"{self.any_key()} {value}")} "}}"'

    def extra_value(self, schema: dict[str, Any]) -> str:
        """Return a rule for the value of a property that the schema does not name; empty for none."""
        return self.value(schema.get("additionalProperties", True)) if has_extra(schema) else ""

    def array(self, schema: dict[str, Any]) -> str:
        item = "" if schema.get("items") is False else self._rules.add(self.value(schema.get("items", True)))
        first = [self.value(part) for part in schema.get("prefixItems", ())]
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if first or not item or most == 0:
            first = first if most is None else first[:most]
            items = [(expression, i < least) for i, expression in enumerate(first)]
            return f'"[" {self._rules.listed(items, self.separator, item if most is None else "")} "]"'
        limits = f"{max(0, least - 1)},{'' if most is None else most - 1}"
        items_rule = f"{item} ({self.separator} {item}){{{limits}}}"
        return f'"[" {items_rule} "]"' if least else f'"[" ({items_rule})? "]"'


class _PythonValues(_Values):
    """Python's literals, and keyword arguments."""

    words: ClassVar[Mapping[bool | None, str]] = {True: "True", False: "False", None: "None"}

    def arguments(self, schema: dict[str, Any]) -> str:
        pairs = [
            (f"{literal(f'{name}=')} {self.value(item)}", is_required)
            for name, item, is_required in properties(schema, _PYTHON_NAME)
        ]
        value = self.extra_value(schema)
        extra = value and f'{_ANY_NAME} "=" {value}'
        return f'"(" {self._rules.listed(pairs, self.separator, extra)} ")"'

    def string(self, schema: dict[str, Any]) -> str:
        if "pattern" in schema and (pattern := text_pattern(schema)) != _ANY_TEXT:
            simple = self._rules.add(rf"{pattern} & /[^\"\\\x00-\x1f\x7f]*/", is_terminal=True)
            return f"{literal(chr(34))} {simple} {literal(chr(34))}"
        n = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        ends = ((quote, rf"/([^{quote}\\\x00-\x1f\x7f]|\\[\\\"'nrt]){n}/") for quote in "\"'")
        strings = (f"{literal(quote)} {characters} {literal(quote)}" for quote, characters in ends)
        return self._rules.add(" | ".join(strings), is_terminal=True)

    def constant_string(self, value: str) -> str:
        return f"({literal(repr(value))} | {literal(json.dumps(value, ensure_ascii=False))})"

    def key(self, name: str) -> str:
        return f'{self.constant_string(name)} ":" " "?'

    def any_key(self) -> str:
        return f'{self.string({})} ":" " "?'


class _QuotedValues(_Values):
    """JSON with another quotation mark, and keys without quotation marks."""

    separator = literal(",")

    def __init__(self, rules: Rules, definitions: Mapping[str, Schema], quote: str) -> None:
        super().__init__(rules, definitions)
        self._quote = quote

    def arguments(self, schema: dict[str, Any]) -> str:
        return self.object(schema)

    def string(self, schema: dict[str, Any]) -> str:
        quote, pattern = literal(self._quote), text_pattern(schema)
        # Text of a minimum length must not contain its own end.
        text = pattern if pattern == _ANY_TEXT else self._rules.without(self._quote, pattern)
        return f"{quote} {self._rules.lazy(quote, text)}"

    def constant_string(self, value: str) -> str:
        return literal(f"{self._quote}{value}{self._quote}")

    def key(self, name: str) -> str:
        return literal(f"{name if _PYTHON_NAME.fullmatch(name) else self._quote + name + self._quote}:")

    def any_key(self) -> str:
        return f'{_ANY_NAME} ":"'


class _TextValues(_Values):
    """Arguments between tags, whose strings have no quotation marks."""

    # Methods of the subclasses: rules for the tags of an argument or of a nested value, with the value between them.
    tag: Callable[[str, Schema], str]
    any_tag: Callable[[], str]

    def arguments(self, schema: dict[str, Any]) -> str:
        tags = [(self.tag(name, item), is_required) for name, item, is_required in properties(schema, _NAME)]
        return self._rules.listed(tags, "", self.any_tag() if has_extra(schema) else "")

    def _text(self, schema: Schema, end: str, excluded: str) -> str:
        """Return a rule for a string, or null, up to the tag that ends it. Strings do not contain ``excluded``."""
        texts: list[str] = []
        for variant in self.variants(schema):
            constants = [variant["const"]] if "const" in variant else variant.get("enum")
            types = schema_types(variant)
            if constants is not None:
                # Text is a string if the schema allows strings, unless it is null.
                values = ["null" if value is None else value for value in constants]
                texts += [f"{literal(value)} {end}" for value in values if isinstance(value, str)]
            elif not types or "string" in types:
                pattern = text_pattern(variant)
                is_certain = pattern == _ANY_TEXT and literal(excluded) == end  # the first end ends any text
                texts.append(self._rules.lazy(end, pattern if is_certain else self._rules.without(excluded, pattern)))
            elif "null" in types:
                texts.append(f'"null" {end}')
        if not texts:
            raise UnwritableError("no text follows its schema")
        return f"({' | '.join(texts)})"


class _TaggedValues(_TextValues):
    """One pair of tags per argument, around a string or the JSON of another value."""

    def __init__(
        self, rules: Rules, definitions: Mapping[str, Schema], form: forms.TaggedArguments, types: ArgumentTypes
    ) -> None:
        super().__init__(rules, definitions)
        self._form, self._types = form, types
        self._end, self._between = literal(form.end.lstrip("\n")), '"\\n"?' if form.between else ""

    def tag(self, name: str, schema: Schema) -> str:
        types = self._types.of(name)
        if not types or "string" in types:
            text = self._text(schema, self._end, self._form.end.lstrip("\n"))
            return f"{self._begin(literal(name), True)} {text} {self._between}"
        value = self._rules.add(json_rule(schema, self._definitions))
        if types == {"boolean"}:
            value = f'({value} | "True" | "False")'
        end = self._rules.add(flexible(self._form.end), is_terminal=True)
        return f"{self._begin(literal(name), False)} {value} {end} {self._between}"

    def any_tag(self) -> str:
        return f"{self._begin(_ANY_NAME, True)} {self._rules.lazy(self._end)} {self._between}"

    def _begin(self, key: str, is_string: bool) -> str:
        before, _, after = self._form.begin.replace("{is_string}", _JSON_WORDS[is_string]).partition("{key}")
        # A second line break would belong to the value.
        after_key = ' "\\n"? '.join(literal(piece) if piece else "" for piece in after.split("\n"))
        return self._rules.add(f"{literal(before)} {key} {after_key}", is_terminal=True)


class _NestedValues(_TextValues):
    """One pair of tags per argument and per nested value, each after a mark."""

    separator = ""

    def __init__(self, rules: Rules, definitions: Mapping[str, Schema], mark: str) -> None:
        super().__init__(rules, definitions)
        self._mark = mark

    def tag(self, name: str, schema: Schema) -> str:
        begin, end = literal(f"{self._mark}<{name}>"), literal(f"{self._mark}</{name}>")
        types = [schema_types(variant) for variant in self.variants(schema)]
        if any(not variant_types or "string" in variant_types for variant_types in types):
            return f"{begin} {self._text(schema, end, self._mark[:4])}"
        return f"({begin} {self.value(schema)} {end})"

    def any_tag(self) -> str:
        # A grammar cannot compare the two names. Tags of calls would end the call.
        name = self._rules.add(f"{_ANY_NAME} & ~/invoke|tool_call/", is_terminal=True)
        begin, end = (f"{literal(self._mark + bracket)} {name} {literal('>')}" for bracket in ("<", "</"))
        return self._rules.add(f"{begin} {self._text({}, end, self._mark[:4])}")

    def object(self, schema: dict[str, Any]) -> str:
        return self.arguments(schema)

    def array(self, schema: dict[str, Any]) -> str:
        item = self.tag("item", schema.get("items", True))
        return f"{item}{{{schema.get('minItems', 0)},{schema.get('maxItems', '')}}}"

    def constant(self, value: Any) -> str:
        return literal(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


# -- Schemas without combinations ----------------------------------------------------------------------------------


def schema_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema allows; empty for any type."""
    types = sorted(ArgumentTypes(schema).of())
    narrower = "integer" if "number" in schema.get("type", ()) else "number"  # integers are also numbers
    return [name for name in types if name != narrower or not {"integer", "number"} <= set(types)]


def properties(schema: Mapping[str, Any], name: re.Pattern[str] | None = None) -> Iterable[tuple[str, Schema, bool]]:
    """Yield name, schema and whether it is required, for each property. Omit optional ones without a valid name."""
    named, required = schema.get("properties", {}), schema.get("required", ())
    for key in dict.fromkeys([*named, *required]):
        if name is None or name.fullmatch(key):
            yield key, named.get(key, True), key in required
        elif key in required:
            raise UnwritableError(f"the format cannot express its argument {key!r:.80}")


def has_extra(schema: Mapping[str, Any]) -> bool:
    """Return whether an object may have properties that the schema does not name."""
    return schema.get("additionalProperties", not schema.get("properties")) is not False


def text_pattern(schema: Mapping[str, Any]) -> str:
    """Return a terminal for a string that is written without quotation marks."""
    pattern = schema.get("pattern", "")
    inner = pattern[1:-1]
    if pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith("\\$") and "|" not in inner:
        expression = "/" + re.sub(r"(?<!\\)/", r"\/", inner) + "/"
        if not llguidance.LLMatcher.validate_grammar(f"start: {expression}"):
            return expression
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not low and high is None:
        return _ANY_TEXT
    if high is not None and high < 2:
        return f"/[^\\n]{{{low},{high}}}/"
    # A line break at the start or the end might belong to the tags.
    middle = f"(.|\\n){{{max(0, low - 2)},{'' if high is None else high - 2}}}"
    last = f"({middle}[^\\n]){'?' if low < 2 else ''}"
    return f"/([^\\n]{last}){'?' if not low else ''}/"


def _merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema for values that follow both schemas."""
    merged = {**a, **b}
    for key in a.keys() & b.keys():
        if key == "properties":
            both = {name: {"allOf": [a[key][name], b[key][name]]} for name in a[key].keys() & b[key].keys()}
            merged[key] = {**a[key], **b[key], **both}
        elif key == "required":
            merged[key] = [*a[key], *(name for name in b[key] if name not in a[key])]
        elif key in ("type", "enum"):
            options = [value if isinstance(value, list) else [value] for value in (a[key], b[key])]
            merged[key] = [value for value in options[0] if value in options[1]] or options[1]
        elif key == "additionalProperties" and a[key] is False:
            merged[key] = False
    return merged
