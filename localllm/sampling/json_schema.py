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
from dataclasses import dataclass
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
_UNENFORCED: dict[str, tuple[Any, ...]] = {
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
    reader = _SchemaReader(schema)
    root, definitions = reader.read_all()
    closing = _Closing(definitions, reader.unenforced, reader.required_in_branches)
    closing.loosen(root)
    if may_close:
        closing.close(root)
    if isinstance(root, dict) and definitions:
        root = {**root, "$defs": definitions}
    return root, list(dict.fromkeys(reader.unenforced))


class _SchemaReader:
    """Rewrites a schema in the common form."""

    def __init__(self, root: Any) -> None:
        self.unenforced: list[str] = []
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
            visited: set[str] = set()
            while isinstance(node, dict) and (name := node.get("$ref", "")):
                if name in visited:
                    raise ValueError("a $ref refers to itself: remove the cycle")
                visited.add(name)
                node = definitions[name.removeprefix("#/$defs/")]
        return root, definitions

    def _find_addresses(self) -> None:
        pending: list[tuple[Any, Any, str]] = [(self._root, self._root, "")]
        self._by_address[""] = pending[0]
        while pending:
            node, resource, base = pending.pop()
            if isinstance(node, list):
                pending += [(child, resource, base) for child in node]
            elif isinstance(node, dict):
                resource, base = self._resource(node, resource, base)
                self._by_address.setdefault(base, (node, resource, base))
                for key in ("$anchor", "$dynamicAnchor", "$id"):
                    name = node.get(key)
                    if isinstance(name, str) and (key != "$id" or name.startswith("#")):
                        self._by_address.setdefault(f"{base}#{name.removeprefix('#')}", (node, resource, base))
                pending += [(child, resource, base) for child in node.values()]

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
        target: tuple[Any, Any, str] | None = (resource, resource, base)
        if address:
            base = urljoin(base, address)
            target = self._by_address.get(base)
        if target is not None and fragment and not fragment.startswith("/"):
            target = self._by_address.get(f"{base}#{fragment}")
        elif target is not None:
            node, resource, base = target
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
            target = None
        if target is None:
            raise ValueError(f"the target of $ref {reference!r:.80} does not exist in the schema")
        return target

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

        converted: Node = {key: schema[key] for key in (*_DATA, *_ONE, *_LISTS) if key in schema}
        converted |= {key: read(converted[key]) for key in _ONE if key in converted}
        converted |= {key: [*map(read, value)] for key in _LISTS if isinstance(value := converted.get(key), list)}
        for key in _NAMED:
            if value := schema.get(key):  # some programs write [] for an empty object
                is_dict = isinstance(value, dict)
                converted[key] = {name: read(child) for name, child in value.items()} if is_dict else value
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(schema.get(key), str):
                converted["$ref"] = self._reference(schema[key], resource, base)
        self._read_items(schema, converted, read)
        self._read_numbers(converted)
        self._read_text(schema, converted)
        self._read_properties(schema, converted, read, (resource, base))
        for key, allow_all in _UNENFORCED.items():
            if key in schema and schema[key] not in allow_all:
                self.unenforced.append(key)
        return converted

    def _read_items(self, schema: Node, converted: Node, read: Any) -> None:
        first, following = schema.get("prefixItems"), schema.get("items")
        if isinstance(first, dict):  # like llama.cpp
            first, converted["items"] = None, read(first)
        elif isinstance(following, list):  # older drafts
            first, following = following, schema.get("additionalItems", True)
            converted["items"] = read(following)
        if first is not None:
            converted["prefixItems"] = [read(child) for child in first] if isinstance(first, list) else first

    def _read_numbers(self, converted: Node) -> None:
        kinds = converted.get("type")
        if "any" in (kinds if isinstance(kinds, list) else [kinds]):
            del converted["type"]
        for key, value in list(converted.items()):
            if key.startswith("exclusive") and isinstance(value, bool):  # draft 4
                del converted[key]
                limit = converted.pop(key[9:].lower(), None) if value else None
                if limit is not None:
                    converted[key] = value = limit
            if isinstance(value, float) and value.is_integer() and key.startswith(("min", "max")):
                converted[key] = value = int(value)
            if key.endswith("imum") and not isinstance(value, bool) and isinstance(value, int | float):
                is_low = key.lower().endswith("minimum")
                if value < -_MAX_BOUND if is_low else value > _MAX_BOUND:
                    converted[key] = -_MAX_BOUND if is_low else _MAX_BOUND

    def _read_text(self, schema: Node, converted: Node) -> None:
        kinds = schema.get("type", "string")
        if "format" in schema and "string" in (kinds if isinstance(kinds, list) else [kinds]):
            if schema["format"] in _FORMATS:
                converted["format"] = schema["format"]
            else:
                self.unenforced.append(f"format {schema['format']!r:.40}")
        if "pattern" in schema and (pattern := self._pattern(schema["pattern"])) is not None:
            converted["pattern"] = pattern
        if isinstance(patterns := converted.get("patternProperties"), dict):
            children = [(self._pattern(pattern), child) for pattern, child in patterns.items()]
            converted["patternProperties"] = {pattern: child for pattern, child in children if pattern is not None}

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
            self.unenforced.append(f"pattern {pattern!r:.60}" + ("" if wider is None else " in full"))
        return wider

    def _read_properties(self, schema: Node, converted: Node, read: Any, scope: tuple[Any, str]) -> None:
        names = schema.get("propertyNames")
        if isinstance(names, dict) and not {"properties", "patternProperties"} & converted.keys():
            names_schema = read(names)
            value = converted.get("additionalProperties", True)
            pattern = names_schema.get("pattern")
            if pattern is None and {"minLength", "maxLength"} & names_schema.keys():
                pattern = rf"^[\s\S]{{{names_schema.get('minLength', 0)},{names_schema.get('maxLength', '')}}}$"
            if isinstance(listed := names_schema.get("enum", [names_schema.get("const")]), list) and listed != [None]:
                converted["properties"] = {name: value for name in listed if isinstance(name, str)}
                converted["additionalProperties"] = False
                schema.pop("propertyNames")
            elif isinstance(pattern, str):
                converted |= {"patternProperties": {pattern: value}, "additionalProperties": False}
                schema.pop("propertyNames")
        if schema.get("unevaluatedProperties") is False:
            schema.pop("unevaluatedProperties")
            if {"$ref", *_LISTS} & converted.keys():
                converted["unevaluatedProperties"] = False  # for closing
            else:
                converted.setdefault("additionalProperties", False)
        if isinstance(converted.get("required", []), bool):  # draft 3
            del converted["required"]
        # Keywords that are not enforced may name further properties.
        more = [schema.get("then"), schema.get("else")]
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            more += schema[key].values() if isinstance(schema.get(key), dict) else ()
        branches = self._branches([{"required": item} if isinstance(item, list) else item for item in more], *scope)
        for name in dict.fromkeys(name for branch in branches for name in _names(branch)):
            converted.setdefault("properties", {}).setdefault(name, True)
        if required := [name for branch in branches for name in _required(branch)]:
            self.required_in_branches[id(converted)] = required

    def _branches(self, schemas: list[Any], resource: Any, base: str) -> list[Node]:
        """Return schemas that are not enforced, with all schemas that they refer to or combine."""
        pending, branches, visited = [(schema, resource, base) for schema in schemas], list[Node](), set[int]()
        for node, resource, base in pending:
            if not isinstance(node, dict) or id(node) in visited:
                continue
            visited.add(id(node))
            branches.append(node)
            resource, base = self._resource(node, resource, base)
            inner = [node.get("then"), node.get("else"), *(schema for key in _LISTS for schema in _listed(node, key))]
            pending += [(schema, resource, base) for schema in inner]
            if isinstance(reference := node.get("$ref"), str):
                pending.append(self._referred(reference, resource, base))
        return branches


@lru_cache(1024)
def _is_enforced(pattern: str) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    return not llguidance.LLMatcher.validate_grammar(grammar)


def _without_look(pattern: str) -> str:
    """Return a regular expression without look-arounds and word boundaries. It matches everything that it matched."""
    pieces, position, skipped = [], 0, 0  # skipped: depth of parentheses in a look-around
    for match in re.finditer(rf"{_LOOK.pattern}|[()]", pattern, re.DOTALL):
        text = match[0]
        if skipped:
            skipped += text.startswith("(") - (text == ")")
            position = match.end()
        elif text in (r"\b", r"\B") or text.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            pieces.append(pattern[position : match.start()])
            position, skipped = match.end(), int(text.startswith("("))
    return "".join([*pieces, pattern[position:]])


@dataclass(eq=False)
class _Closing:
    """Closes objects, unless that excludes a property that a combined schema names or requires."""

    definitions: dict[str, Any]
    unenforced: list[str]
    required_in_branches: dict[int, list[str]]  # by id() of the schema with ``then``, ``else`` etc.

    def __post_init__(self) -> None:
        self._pending: list[Any] = []
        self._open: set[int] = set()  # schemas that are combined with others
        self._plans: list[tuple[Node, list[tuple[Node, list[str]]]]] = []

    def close(self, root: Any) -> None:
        self._pending = [root]
        visited: set[int] = set()
        while self._pending:
            check_cancelled()
            node = self._pending.pop()
            if isinstance(node, dict) and id(node) not in visited:
                visited.add(id(node))
                self._visit(node)
        closed: set[int] = set()
        for owner, plan in self._plans:
            if id(owner) not in self._open:
                closed.add(id(owner))
                for node, names in plan:
                    properties = node.get("properties", {})
                    node["properties"] = {**properties, **{name: True for name in names if name not in properties}}
                    node["additionalProperties"] = False
        for node in [root, *self.definitions.values()]:
            self._forget_marks(node, closed)

    def loosen(self, root: Any) -> None:
        """Remove ``additionalProperties: false`` if it forbids a property that a combined schema requires.

        By the standard no value matches both schemas. Their authors mean ``unevaluatedProperties``.
        """
        groups: list[list[tuple[Node, _Choices]]] = [[(root, {})]] if isinstance(root, dict) else []
        visited: set[frozenset[int]] = set()
        while groups and len(visited) < _MAX_GROUPS:
            check_cancelled()
            group = self._with_siblings(groups.pop())
            key = frozenset(id(node) for node, _ in group)
            if key in visited:
                continue
            visited.add(key)
            required = [
                (name, choices)
                for node, choices in group
                for name in [*_required(node), *self.required_in_branches.get(id(node), ())]
            ]
            for node, choices in group:
                if node.get("additionalProperties") is False and "patternProperties" not in node:
                    properties = node.get("properties", {})
                    if any(
                        name not in properties and _may_combine(choices, other_choices)
                        for name, other_choices in required
                    ):
                        del node["additionalProperties"]
                        self.unenforced.append("additionalProperties, which forbids a property that is also required")
            locations: dict[str, list[tuple[Node, _Choices]]] = {}
            for node, choices in group:
                for location, child in _children(node):
                    if isinstance(child, dict):
                        locations.setdefault(location, []).append((child, choices))
            groups += locations.values()

    def _with_siblings(self, group: list[tuple[Node, _Choices]]) -> list[tuple[Node, _Choices]]:
        """Return all schemas that apply to the same value, each with its alternatives."""
        members, visited, pending = list[tuple[Node, _Choices]](), set[int](), group.copy()
        for node, choices in pending:
            if not isinstance(node, dict) or id(node) in visited:
                continue
            visited.add(id(node))
            members.append((node, choices))
            if "$ref" in node:
                pending.append((self.definitions[node["$ref"].removeprefix("#/$defs/")], choices))
            pending += [(schema, choices) for schema in _listed(node, "allOf")]
            for key in ("anyOf", "oneOf"):
                alternatives = _listed(node, key)
                pending += [(schema, {**choices, id(alternatives): n}) for n, schema in enumerate(alternatives)]
        return members

    def _forget_marks(self, node: Any, closed: set[int]) -> None:
        if isinstance(node, dict):
            if "unevaluatedProperties" in node:
                del node["unevaluatedProperties"]
                if id(node) not in closed:
                    self.unenforced.append("unevaluatedProperties")
            for _, child in _children(node):
                self._forget_marks(child, closed)
            for key in _LISTS:
                for child in _listed(node, key):
                    self._forget_marks(child, closed)

    def _siblings(self, node: Node) -> list[Node]:
        """Return the schemas that apply to the same value as ``node``."""
        siblings = [sibling for key in _LISTS for sibling in _listed(node, key)]
        if "$ref" in node:
            siblings.append(self.definitions[node["$ref"].removeprefix("#/$defs/")])
        return [sibling for sibling in siblings if isinstance(sibling, dict)]

    def _parts(self, node: Node, *, alternatives: bool = True) -> list[Node]:
        members, visited = [node], {id(node)}
        for member in members:
            if not alternatives:
                member = {key: value for key, value in member.items() if key not in ("anyOf", "oneOf")}
            for sibling in self._siblings(member):
                if id(sibling) not in visited:
                    visited.add(id(sibling))
                    members.append(sibling)
        return members

    def _visit(self, node: Node) -> None:
        siblings = self._siblings(node)
        n_kinds = sum(key in node for key in (*_LISTS, "$ref")) + max(len(_listed(node, "allOf")) - 1, 0)
        if n_kinds > 1 or (n_kinds and not node.keys().isdisjoint((*_OBJECT, "items", "prefixItems"))):
            self._visit_combined(node)
            return
        self._pending += [*siblings, *(child for _, child in _children(node))]
        properties = node.get("properties")
        is_named = isinstance(properties, dict) and properties.keys() >= set(_required(node))
        if is_named and not siblings and not _SAYS_ITSELF & node.keys():
            self._plans.append((node, [(node, [])]))

    def _visit_combined(self, node: Node) -> None:
        members = self._parts(node)
        self._open |= {id(member) for member in members[1:]}
        is_shared = any({"additionalProperties", "patternProperties"} & member.keys() for member in members)
        counts = Counter(
            location for member in members for location in {location for location, _ in _children(member)}
        )
        for location, child in (pair for member in members for pair in _children(member)):
            if counts[location] > 1 or (is_shared and location != "items"):
                self._keep_open(child)
            else:
                self._pending.append(child)
        if not any(_SAYS_ITSELF & member.keys() for member in members):
            plan: list[tuple[Node, list[str]]] = []
            self._distribute(node, [], plan)
            names = {name for member in members for name in member.get("properties", {})}
            if "unevaluatedProperties" in node and any(name not in names for p in members for name in _required(p)):
                self.unenforced.append("unevaluatedProperties, which forbids a property that is also required")
            if any(names or "unevaluatedProperties" in node for _, names in plan):
                self._plans.append((node, plan))

    def _distribute(self, node: Node, names: list[str], plan: list[tuple[Node, list[str]]]) -> None:
        """Plan the closing of each alternative of a schema, with ``names`` from schemas combined with it."""
        members = self._parts(node, alternatives=False)
        if any({"const", "enum"} & member.keys() for member in members):
            return
        names = [*names, *(name for member in members for name in _names(member))]
        alternatives = [(member, key) for member in members for key in ("anyOf", "oneOf") if _listed(member, key)]
        if len(alternatives) == 1 and alternatives[0][0] is node:
            for alternative in _listed(node, alternatives[0][1]):
                if isinstance(alternative, dict):
                    self._distribute(alternative, names, plan)
            return
        if alternatives:
            names += [name for member in self._parts(node) for name in _names(member)]
        plan.append((node, list(dict.fromkeys(names))))

    def _keep_open(self, node: Any) -> None:
        pending = [node]
        while pending:
            node = pending.pop()
            if isinstance(node, dict) and id(node) not in self._open:
                self._open.add(id(node))
                pending += [*self._siblings(node), *(child for _, child in _children(node))]


def _may_combine(choices: _Choices, other_choices: _Choices) -> bool:
    """Return whether two schemas can apply to the same value: they are not different alternatives."""
    return all(other_choices.get(alternatives, n) == n for alternatives, n in choices.items())


def _listed(node: Node, key: str) -> list[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else []


def _required(node: Node) -> list[str]:
    return [name for name in _listed(node, "required") if isinstance(name, str)]


def _names(node: Node) -> list[str]:
    properties = node.get("properties")
    return [*(properties if isinstance(properties, dict) else ()), *_required(node)]


def _children(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield (place, schema) for the schemas of properties and items."""
    for key in _NAMED:
        value = node.get(key)
        if isinstance(value, dict):
            yield from ((f"{key} {name}", child) for name, child in value.items())
    yield from (("items", child) for child in [node.get("items"), *_listed(node, "prefixItems")] if child is not None)
    if "additionalProperties" in node:
        yield "additionalProperties", node["additionalProperties"]
