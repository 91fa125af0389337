"""JSON types that a tool's schema allows for an argument.

Some formats write argument values as plain text. The schema then decides whether ``7`` is a number or a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

#: JSON types of the values in ``enum`` and ``const``; ``bool`` comes before its base class ``int``.
_TYPES_OF_VALUES = (
    (bool, "boolean"),
    ((int, float), "number"),
    (str, "string"),
    (list, "array"),
    (Mapping, "object"),
    (type(None), "null"),
)

#: Types that keywords suggest in a schema without ``type``.
_TYPES_OF_KEYWORDS = {
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems"), "array"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), "number"),
}

#: Quantifiers and alternatives, which make backtracking slow if a pattern has many or repeats a group.
_QUANTIFIER, _QUANTIFIED_GROUP = re.compile(r"[*+{?|]"), re.compile(r"\)[*+{]")
#: Characters of a pattern and of a name that are compared.
_MAX_PATTERN, _MAX_NAME = 256, 64

#: Schemas inside each other that are evaluated.
_MAX_DEPTH = 50

#: Path from the arguments of a call to a part of one: property names, and any name for the items of a list.
Path = tuple[str, ...]


class ArgumentTypes:
    """Types of the arguments of one tool, read from all of its schema.

    Combined schemas follow the standard: ``allOf`` and ``$ref`` narrow the types. ``anyOf``,
    ``oneOf``, ``then`` and ``else`` are alternatives. A value that is not a JSON schema specifies no types.
    """

    def __init__(self, schema: Any) -> None:
        self._root = schema
        #: Results by schema, path and whether ``additionalProperties`` counts; None while a schema is evaluated.
        self._results: dict[tuple[int, Path, bool], frozenset[str] | None] = {}

    @property
    def names(self) -> list[str]:
        """Arguments named by the schema or a schema that it is combined with, in order."""
        schemas, names, visited = [self._root], dict[str, None](), set[int]()
        for schema in schemas:
            if not isinstance(schema, Mapping) or id(schema) in visited:
                continue
            visited.add(id(schema))
            properties = schema.get("properties")
            names |= dict.fromkeys(properties if isinstance(properties, Mapping) else ())
            inner = [self._target(schema), *(schema.get(key) for key in ("if", "then", "else"))]
            schemas += inner + [item for key in ("allOf", "anyOf", "oneOf") for item in _listed(schema, key)]
        return list(names)

    def of(self, *path: str) -> frozenset[str]:
        """Return the types of an argument, or of its part at a path; empty if the schema specifies none.

        ``additionalProperties`` counts only for names without another description.
        """
        return self._types(self._root, path, False) or self._types(self._root, path, True) or frozenset()

    def _types(self, schema: Any, path: Path, with_additional: bool, depth: int = 0) -> frozenset[str] | None:
        """Return the types at a path; None if the schema specifies none."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        key = (id(schema), path, with_additional)
        if key not in self._results:
            self._results[key] = None  # also the result for a schema that refers to itself
            self._results[key] = self._evaluated(schema, path, with_additional, depth + 1)
        return self._results[key]

    def _evaluated(
        self, schema: Mapping[str, Any], path: Path, with_additional: bool, depth: int
    ) -> frozenset[str] | None:
        def types_of(schemas: list[Any], path: Path = path) -> list[frozenset[str] | None]:
            return [self._types(alternative, path, with_additional, depth) for alternative in schemas]

        own_types = [_own_types(schema)] if not path else types_of(_parts(schema, path[0], with_additional), path[1:])
        alternatives = (
            *(_listed(schema, key) for key in ("anyOf", "oneOf")),
            [schema.get(key) for key in ("if", "then", "else")],
        )
        return _narrowed(
            [
                *own_types,
                *types_of([self._target(schema), *_listed(schema, "allOf")]),
                *(_joined(types_of(schemas)) for schemas in alternatives),
            ]
        )

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """The schema that ``$ref`` points to (RFC 6901); None without a target."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target = self._root
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping):
                target = target.get(name)
            elif isinstance(target, list) and name.isdecimal() and int(name[:9]) < len(target):
                target = target[int(name)]
            else:
                return None
        return target


def _own_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Types that a schema's own keywords allow; None if they specify none."""
    declared = schema.get("type")
    types = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
    if "integer" in types:
        types.add("number")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        types_of_values = {_type_of(value) for value in values}
        types = types & types_of_values or types_of_values
    if not types:
        types = {name for key, name in _TYPES_OF_KEYWORDS.items() if key in schema}
    if types and schema.get("nullable") is True:
        types.add("null")
    return frozenset(types) or None


def _parts(schema: Mapping[str, Any], name: str, with_additional: bool) -> list[Any]:
    """Schemas of a property, or of the items of a list."""
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    schemas = [properties[name]] if isinstance(properties, Mapping) and name in properties else []
    if isinstance(patterns, Mapping):
        schemas += [part for pattern, part in patterns.items() if _may_match(str(pattern), name)]
    if not schemas and isinstance(schema.get("items"), Mapping):
        schemas.append(schema["items"])
    if not schemas and with_additional:
        schemas += [schema.get("additionalProperties"), schema.get("unevaluatedProperties")]
    return schemas


def _may_match(pattern: str, name: str) -> bool:
    """Whether a pattern of ``patternProperties`` matches a name; also True if finding out could take long."""
    if len(pattern) > _MAX_PATTERN or len(name) > _MAX_NAME:
        return True
    if len(_QUANTIFIER.findall(pattern)) > 2 or _QUANTIFIED_GROUP.search(pattern):
        return True
    try:
        return re.search(pattern, name) is not None
    except (re.error, OverflowError, RecursionError):  # not every ECMA-262 pattern is valid in Python
        return True


def _type_of(value: Any) -> str:
    return next((name for class_, name in _TYPES_OF_VALUES if isinstance(value, class_)), "")


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _joined(alternatives: list[frozenset[str] | None]) -> frozenset[str] | None:
    """Types of any alternative. Alternatives that specify none are ignored."""
    types: frozenset[str] = frozenset().union(*(each_types for each_types in alternatives if each_types is not None))
    return types or None


def _narrowed(conditions: list[frozenset[str] | None]) -> frozenset[str] | None:
    """Types that all conditions allow. Types of any condition if the conditions exclude each other."""
    types = [condition for condition in conditions if condition is not None]
    return frozenset.intersection(*types) or _joined(conditions) if types else None
