"""Rewrites JSON schemas so that llguidance can enforce them.

Schemas come from many programs and drafts of the standard (https://json-schema.org/specification). They are rewritten
in one form: only enforced keywords, one definition per reference target, and null values removed. Keywords that
cannot be enforced are reported. Objects get only the properties that their schema names, unless the schema allows
others, because a small model would add properties without end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import llguidance

from localllm.cancellation import check_cancelled
from localllm.sampling.ecma_patterns import from_ecma

Node = dict[str, Any]

#: Alternatives that a schema is part of: the index of each, by the identity of the list of alternatives.
_Choices = dict[int, int]

#: Most combinations of schemas that are checked for contradictions.
_MAX_GROUPS = 10_000

#: Keywords by the type of their values: data, a schema, a list of schemas, or schemas by name.
_DATA = (
    *("type", "const", "enum", "required", "minProperties", "maxProperties", "minItems", "maxItems", "minLength"),
    *("maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "x-guidance"),
)
_ONE = ("items", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf")
_NAMED = ("properties", "patternProperties")

#: Keywords that are not enforced, with values that allow everything.
_NOT_HELD: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "contains": (True, {}),
    "maxContains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}

_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])

#: Keywords about the properties of an object, and those among them that rule out closing it.
_OBJECT = frozenset({"properties", "required", "additionalProperties", "patternProperties", "minProperties"})
_OBJECT |= {"maxProperties", "unevaluatedProperties"}
_SAYS_ITSELF = frozenset({"additionalProperties", "patternProperties", "minProperties", "maxProperties"})

#: Larger bounds are replaced by this one, because llguidance compares numbers digit by digit.
_MAX_BOUND = 10**18

#: Start of a look-around, or a word boundary. Both only exclude matches.
_LOOK = re.compile(r"\\[bB]|\(\?<?[=!]|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def enforceable_schema(schema: Any, *, may_close: bool = True) -> tuple[Any, list[str]]:
    """Return a schema in a form that llguidance accepts, and descriptions of the keywords that are not enforced.

    Args:
        schema: any JSON schema.
        may_close: restrict objects to the properties that their schema names.
    """
    reader = _Reader(schema)
    root, definitions = reader.read_all()
    closing = _Closing(definitions, reader.not_held, reader.required_in_branches)
    closing.loosen(root)
    if may_close:
        closing.close(root)
    if isinstance(root, dict) and definitions:
        root = {**root, "$defs": definitions}
    return root, list(dict.fromkeys(reader.not_held))


class _Reader:
    """Rewrites a schema in the common form."""

    def __init__(self, root: Any) -> None:
        self.not_held: list[str] = []
        self.required_in_branches: dict[int, list[str]] = {}  # names required by ``then`` etc., by id() of the schema
        self._root = root
        self._names: dict[int, str] = {}  # names of definitions, by id() of the target
        self._unread: list[tuple[str, Any, Node, str]] = []
        self._by_address: dict[str, tuple[Any, Node, str]] = {}  # (schema, resource, base address)

    def read_all(self) -> tuple[Any, dict[str, Any]]:
        self._find_addresses()
        definitions: dict[str, Any] = {}
        root = self._read(self._root, self._root, "")
        while self._unread:
            check_cancelled()
            name, schema, resource, base = self._unread.pop()
            definitions[name] = self._read(schema, resource, base)
        for node in definitions.values():
            seen: set[str] = set()
            while isinstance(node, dict) and (name := node.get("$ref", "")):
                if name in seen:
                    raise ValueError("a $ref refers to itself: remove the cycle")
                seen.add(name)
                node = definitions[name.removeprefix("#/$defs/")]
        return root, definitions

    def _find_addresses(self) -> None:
        left: list[tuple[Any, Any, str]] = [(self._root, self._root, "")]
        self._by_address[""] = left[0]
        while left:
            node, resource, base = left.pop()
            if isinstance(node, list):
                left += [(each, resource, base) for each in node]
            elif isinstance(node, dict):
                resource, base = self._resource(node, resource, base)
                self._by_address.setdefault(base, (node, resource, base))
                for key in ("$anchor", "$dynamicAnchor", "$id"):
                    name = node.get(key)
                    if isinstance(name, str) and (key != "$id" or name.startswith("#")):
                        self._by_address.setdefault(f"{base}#{name.removeprefix('#')}", (node, resource, base))
                left += [(each, resource, base) for each in node.values()]

    @staticmethod
    def _resource(node: Node, resource: Any, base: str) -> tuple[Any, str]:
        id_ = node.get("$id")
        if not isinstance(id_, str) or id_.startswith("#"):
            return resource, base
        return node, urljoin(base, urldefrag(id_)[0])

    def _referred(self, reference: str, resource: Any, base: str) -> tuple[Any, Any, str]:
        """Return the target of a reference, with its resource and address."""
        address, fragment = urldefrag(reference)
        fragment = unquote(fragment)
        found: tuple[Any, Any, str] | None = (resource, resource, base)
        if address:
            base = urljoin(base, address)
            found = self._by_address.get(base)
        if found is not None and fragment and not fragment.startswith("/"):
            found = self._by_address.get(f"{base}#{fragment}")
        elif found is not None:
            node, resource, base = found
            for step in fragment.split("/")[1:]:
                key: Any = step.replace("~1", "/").replace("~0", "~")
                if isinstance(node, list) and key.isdecimal():
                    key = int(key)
                try:
                    node = node[key]
                except (KeyError, IndexError, TypeError):
                    break
                if isinstance(node, dict):
                    resource, base = self._resource(node, resource, base)
            else:
                return node, resource, base
            found = None
        if found is None:
            raise ValueError(f"the target of $ref {reference!r:.80} does not exist in the schema")
        return found

    def _reference(self, reference: str, resource: Any, base: str) -> str:
        node, resource, base = self._referred(reference, resource, base)
        name = self._names.get(id(node))
        if name is None:
            name = self._names[id(node)] = str(len(self._names))
            self._unread.append((name, node, resource, base))
        return f"#/$defs/{name}"

    def _read(self, schema: Any, resource: Any, base: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        resource, base = self._resource(schema, resource, base)
        schema = {key: value for key, value in schema.items() if value is not None or key == "const"}

        def read(value: Any) -> Any:
            return self._read(value, resource, base)

        found: Node = {key: schema[key] for key in _DATA if key in schema}
        for key in _ONE:
            if key in schema:
                found[key] = read(schema[key])
        for key in _LISTS:
            if key in schema:
                found[key] = [read(each) for each in schema[key]] if isinstance(schema[key], list) else schema[key]
        for key in _NAMED:
            if value := schema.get(key):  # some programs write [] for an empty object
                found[key] = {name: read(each) for name, each in value.items()} if isinstance(value, dict) else value
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(schema.get(key), str):
                found["$ref"] = self._reference(schema[key], resource, base)
        self._read_items(schema, found, read)
        self._read_numbers(found)
        self._read_text(schema, found)
        self._read_properties(schema, found, read, (resource, base))
        for key, allow_all in _NOT_HELD.items():
            if key in schema and schema[key] not in allow_all:
                self.not_held.append(key)
        return found

    def _read_items(self, schema: Node, found: Node, read: Any) -> None:
        first, rest = schema.get("prefixItems"), schema.get("items")
        if isinstance(first, dict):  # like llama.cpp
            first, found["items"] = None, read(first)
        elif isinstance(rest, list):  # older drafts
            first, rest = rest, schema.get("additionalItems", True)
            found["items"] = read(rest)
        if first is not None:
            found["prefixItems"] = [read(each) for each in first] if isinstance(first, list) else first

    def _read_numbers(self, found: Node) -> None:
        kinds = found.get("type")
        if "any" in (kinds if isinstance(kinds, list) else [kinds]):
            del found["type"]
        for key, value in list(found.items()):
            if key.startswith("exclusive") and isinstance(value, bool):  # draft 4
                del found[key]
                limit = found.pop(key[9:].lower(), None) if value else None
                if limit is not None:
                    found[key] = value = limit
            if isinstance(value, float) and value.is_integer() and key.startswith(("min", "max")):
                found[key] = value = int(value)
            if key.endswith("imum") and not isinstance(value, bool) and isinstance(value, int | float):
                is_low = key.lower().endswith("minimum")
                if value < -_MAX_BOUND if is_low else value > _MAX_BOUND:
                    found[key] = -_MAX_BOUND if is_low else _MAX_BOUND

    def _read_text(self, schema: Node, found: Node) -> None:
        kinds = schema.get("type", "string")
        if "format" in schema and "string" in (kinds if isinstance(kinds, list) else [kinds]):
            if schema["format"] in _FORMATS:
                found["format"] = schema["format"]
            else:
                self.not_held.append(f"format {schema['format']!r:.40}")
        if "pattern" in schema and (pattern := self._pattern(schema["pattern"])) is not None:
            found["pattern"] = pattern
        if isinstance(patterns := found.get("patternProperties"), dict):
            held = [(self._pattern(pattern), each) for pattern, each in patterns.items()]
            found["patternProperties"] = {pattern: each for pattern, each in held if pattern is not None}

    def _pattern(self, pattern: Any) -> Any:
        """Return a pattern for llguidance; None if the pattern is not enforced."""
        if not isinstance(pattern, str):
            return pattern
        translated, has_references = from_ecma(pattern)
        wider: str | None = translated
        if not _is_enforced(translated):
            wider = _without_look(translated)
            if not _is_enforced(wider):
                try:
                    re.compile(translated)
                except (re.error, OverflowError, RecursionError):
                    return pattern  # llguidance reports the error
                wider = None
        if wider != translated or has_references:
            self.not_held.append(f"pattern {pattern!r:.60}" + ("" if wider is None else " in full"))
        return wider

    def _read_properties(self, schema: Node, found: Node, read: Any, place: tuple[Any, str]) -> None:
        names = schema.get("propertyNames")
        if isinstance(names, dict) and not {"properties", "patternProperties"} & found.keys():
            held = read(names)
            value = found.get("additionalProperties", True)
            pattern = held.get("pattern")
            if pattern is None and {"minLength", "maxLength"} & held.keys():
                pattern = rf"^[\s\S]{{{held.get('minLength', 0)},{held.get('maxLength', '')}}}$"
            if isinstance(listed := held.get("enum", [held.get("const")]), list) and listed != [None]:
                found["properties"] = {name: value for name in listed if isinstance(name, str)}
                found["additionalProperties"] = False
                schema.pop("propertyNames")
            elif isinstance(pattern, str):
                found |= {"patternProperties": {pattern: value}, "additionalProperties": False}
                schema.pop("propertyNames")
        if schema.get("unevaluatedProperties") is False:
            schema.pop("unevaluatedProperties")
            if {"$ref", *_LISTS} & found.keys():
                found["unevaluatedProperties"] = False  # for closing
            else:
                found.setdefault("additionalProperties", False)
        if isinstance(found.get("required", []), bool):  # draft 3
            del found["required"]
        # Keywords that are not enforced may name further properties.
        more = [schema.get("then"), schema.get("else")]
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            more += schema[key].values() if isinstance(schema.get(key), dict) else ()
        branches = self._branches([{"required": each} if isinstance(each, list) else each for each in more], *place)
        for name in dict.fromkeys(name for branch in branches for name in _names(branch)):
            found.setdefault("properties", {}).setdefault(name, True)
        if required := [name for branch in branches for name in _required(branch)]:
            self.required_in_branches[id(found)] = required

    def _branches(self, schemas: list[Any], resource: Any, base: str) -> list[Node]:
        """Return schemas that are not enforced, with all schemas that they refer to or combine."""
        left, found, seen = [(each, resource, base) for each in schemas], list[Node](), set[int]()
        for node, resource, base in left:
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            found.append(node)
            resource, base = self._resource(node, resource, base)
            inner = [node.get("then"), node.get("else"), *(each for key in _LISTS for each in _listed(node, key))]
            left += [(each, resource, base) for each in inner]
            if isinstance(reference := node.get("$ref"), str):
                left.append(self._referred(reference, resource, base))
        return found


@lru_cache(1024)
def _is_enforced(pattern: str) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    return not llguidance.LLMatcher.validate_grammar(grammar)


def _without_look(pattern: str) -> str:
    """Return a regular expression without look-arounds and word boundaries. It matches everything that it matched."""
    kept, place, skipped = [], 0, 0  # skipped: depth of parentheses in a look-around
    for found in re.finditer(rf"{_LOOK.pattern}|[()]", pattern, re.DOTALL):
        text = found[0]
        if skipped:
            skipped += text.startswith("(") - (text == ")")
            place = found.end()
        elif text in (r"\b", r"\B") or text.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            kept.append(pattern[place : found.start()])
            place, skipped = found.end(), int(text.startswith("("))
    return "".join([*kept, pattern[place:]])


class _Closing:
    """Closes objects, unless that excludes a property that a combined schema names or requires."""

    def __init__(
        self, definitions: dict[str, Any], not_held: list[str], required_in_branches: dict[int, list[str]]
    ) -> None:
        self._definitions = definitions
        self._required_in_branches = required_in_branches  # by id() of the schema with ``then``, ``else`` etc.
        self._not_held = not_held
        self._left: list[Any] = []
        self._open: set[int] = set()  # schemas that are combined with others
        self._plans: list[tuple[Node, list[tuple[Node, list[str]]]]] = []

    def close(self, root: Any) -> None:
        self._left = [root]
        seen: set[int] = set()
        while self._left:
            check_cancelled()
            node = self._left.pop()
            if isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                self._visit(node)
        closed: set[int] = set()
        for owner, plan in self._plans:
            if id(owner) not in self._open:
                closed.add(id(owner))
                for node, names in plan:
                    known = node.get("properties", {})
                    node["properties"] = {**known, **{name: True for name in names if name not in known}}
                    node["additionalProperties"] = False
        for node in [root, *self._definitions.values()]:
            self._forget_marks(node, closed)

    def loosen(self, root: Any) -> None:
        """Remove ``additionalProperties: false`` if it forbids a property that a combined schema requires.

        By the standard no value matches both schemas. Their authors mean ``unevaluatedProperties``.
        """
        groups: list[list[tuple[Node, _Choices]]] = [[(root, {})]] if isinstance(root, dict) else []
        seen: set[frozenset[int]] = set()
        while groups and len(seen) < _MAX_GROUPS:
            check_cancelled()
            group = self._with_siblings(groups.pop())
            key = frozenset(id(node) for node, _ in group)
            if key in seen:
                continue
            seen.add(key)
            required = [
                (name, choices)
                for node, choices in group
                for name in [*_required(node), *self._required_in_branches.get(id(node), ())]
            ]
            for node, choices in group:
                if node.get("additionalProperties") is False and "patternProperties" not in node:
                    known = node.get("properties", {})
                    if any(name not in known and _may_combine(choices, others) for name, others in required):
                        del node["additionalProperties"]
                        self._not_held.append("additionalProperties, which forbids a property that is also required")
            places: dict[str, list[tuple[Node, _Choices]]] = {}
            for node, choices in group:
                for place, child in _children(node):
                    if isinstance(child, dict):
                        places.setdefault(place, []).append((child, choices))
            groups += places.values()

    def _with_siblings(self, group: list[tuple[Node, _Choices]]) -> list[tuple[Node, _Choices]]:
        """Return all schemas that apply to the same value, each with its alternatives."""
        found, seen, left = list[tuple[Node, _Choices]](), set[int](), group.copy()
        for node, choices in left:
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            found.append((node, choices))
            if "$ref" in node:
                left.append((self._definitions[node["$ref"].removeprefix("#/$defs/")], choices))
            left += [(each, choices) for each in _listed(node, "allOf")]
            for key in ("anyOf", "oneOf"):
                alternatives = _listed(node, key)
                left += [(each, {**choices, id(alternatives): n}) for n, each in enumerate(alternatives)]
        return found

    def _forget_marks(self, node: Any, closed: set[int]) -> None:
        if isinstance(node, dict):
            if "unevaluatedProperties" in node:
                del node["unevaluatedProperties"]
                if id(node) not in closed:
                    self._not_held.append("unevaluatedProperties")
            for _, each in _children(node):
                self._forget_marks(each, closed)
            for key in _LISTS:
                for each in _listed(node, key):
                    self._forget_marks(each, closed)

    def _siblings(self, node: Node) -> list[Node]:
        """Return the schemas that apply to the same value as ``node``."""
        found = [each for key in _LISTS for each in _listed(node, key)]
        if "$ref" in node:
            found.append(self._definitions[node["$ref"].removeprefix("#/$defs/")])
        return [each for each in found if isinstance(each, dict)]

    def _parts(self, node: Node, *, alternatives: bool = True) -> list[Node]:
        parts, seen = [node], {id(node)}
        for part in parts:
            if not alternatives:
                part = {key: value for key, value in part.items() if key not in ("anyOf", "oneOf")}
            for each in self._siblings(part):
                if id(each) not in seen:
                    seen.add(id(each))
                    parts.append(each)
        return parts

    def _visit(self, node: Node) -> None:
        beside = self._siblings(node)
        n_kinds = sum(key in node for key in (*_LISTS, "$ref")) + max(len(_listed(node, "allOf")) - 1, 0)
        if n_kinds > 1 or (n_kinds and not node.keys().isdisjoint((*_OBJECT, "items", "prefixItems"))):
            self._visit_combined(node)
            return
        self._left += [*beside, *(each for _, each in _children(node))]
        known = node.get("properties")
        is_named = isinstance(known, dict) and known.keys() >= set(_required(node))
        if is_named and not beside and not _SAYS_ITSELF & node.keys():
            self._plans.append((node, [(node, [])]))

    def _visit_combined(self, node: Node) -> None:
        parts = self._parts(node)
        self._open |= {id(part) for part in parts[1:]}
        is_shared = any({"additionalProperties", "patternProperties"} & part.keys() for part in parts)
        counts = Counter(place for part in parts for place in {place for place, _ in _children(part)})
        for place, each in (each for part in parts for each in _children(part)):
            if counts[place] > 1 or (is_shared and place != "items"):
                self._keep_open(each)
            else:
                self._left.append(each)
        if not any(_SAYS_ITSELF & part.keys() for part in parts):
            plan: list[tuple[Node, list[str]]] = []
            self._distribute(node, [], plan)
            known = {name for part in parts for name in part.get("properties", {})}
            if "unevaluatedProperties" in node and any(name not in known for p in parts for name in _required(p)):
                self._not_held.append("unevaluatedProperties, which forbids a property that is also required")
            if any(names or "unevaluatedProperties" in node for _, names in plan):
                self._plans.append((node, plan))

    def _distribute(self, node: Node, names: list[str], plan: list[tuple[Node, list[str]]]) -> None:
        """Plan the closing of each alternative of a schema, with ``names`` from schemas combined with it."""
        parts = self._parts(node, alternatives=False)
        if any({"const", "enum"} & part.keys() for part in parts):
            return
        names = [*names, *(name for part in parts for name in _names(part))]
        alternatives = [(part, key) for part in parts for key in ("anyOf", "oneOf") if _listed(part, key)]
        if len(alternatives) == 1 and alternatives[0][0] is node:
            for each in _listed(node, alternatives[0][1]):
                if isinstance(each, dict):
                    self._distribute(each, names, plan)
            return
        if alternatives:
            names += [name for part in self._parts(node) for name in _names(part)]
        plan.append((node, list(dict.fromkeys(names))))

    def _keep_open(self, node: Any) -> None:
        left = [node]
        while left:
            node = left.pop()
            if isinstance(node, dict) and id(node) not in self._open:
                self._open.add(id(node))
                left += [*self._siblings(node), *(each for _, each in _children(node))]


def _may_combine(choices: _Choices, others: _Choices) -> bool:
    """Return whether two schemas can apply to the same value: they are not different alternatives."""
    return all(others.get(alternatives, n) == n for alternatives, n in choices.items())


def _listed(node: Node, key: str) -> list[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else []


def _required(node: Node) -> list[str]:
    return [name for name in _listed(node, "required") if isinstance(name, str)]


def _names(node: Node) -> list[str]:
    known = node.get("properties")
    return [*(known if isinstance(known, dict) else ()), *_required(node)]


def _children(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield (place, schema) for the schemas of properties and items."""
    for key in _NAMED:
        value = node.get(key)
        if isinstance(value, dict):
            yield from ((f"{key} {name}", each) for name, each in value.items())
    yield from (("items", each) for each in [node.get("items"), *_listed(node, "prefixItems")] if each is not None)
    if "additionalProperties" in node:
        yield "additionalProperties", node["additionalProperties"]
