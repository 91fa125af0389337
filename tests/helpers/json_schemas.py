"""JSON schemas in the manner of JSON Schema's documentation (https://json-schema.org/understanding-json-schema).

Each keyword that grammars support occurs alone and in combination.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

Schema = dict[str, Any]

_STRINGS: list[Schema] = [
    {"type": "string"},
    *({"type": "string", "minLength": low} for low in (0, 1, 3, 8)),
    *({"type": "string", "maxLength": high} for high in (0, 1, 3, 8, 20)),
    *({"type": "string", "minLength": low, "maxLength": high} for low, high in ((2, 3), (1, 1), (4, 12), (0, 5))),
    *(
        {"type": "string", "pattern": pattern}
        for pattern in (
            "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$",
            "^[a-z]+$",
            "^[A-Z]{2,3}$",
            "^v[0-9]+\\.[0-9]+$",
            "^(red|green|blue)$",
            "^#[0-9a-f]{6}$",
            "^\\d{4}$",
            "^[^ ]{1,6}$",
            "^a?b*c$",
            "^S_",
        )
    ),
    *(
        {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "duration")
    ),
]

_NUMBERS: list[Schema] = [
    *({"type": kind} for kind in ("integer", "number", "boolean", "null")),
    *({"type": "integer", "minimum": low, "maximum": low + width} for low, width in product((-20, 0, 7, 95), (0, 9))),
    *({"type": "integer", "minimum": low} for low in (-5, 0, 1, 100)),
    *({"type": "integer", "maximum": high} for high in (-5, 0, 99)),
    *({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 12} for low in (-6, 0, 88)),
    *({"type": "integer", "multipleOf": step} for step in (2, 5, 10)),
    *({"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 100} for step in (3, 7, 25)),
    *({"type": "number", "minimum": low, "maximum": high} for low, high in ((0, 1), (-1.5, 1.5), (0, 100), (5, 5))),
    *({"type": "number", "exclusiveMinimum": low} for low in (0, -2.5)),
    *({"type": "number", "exclusiveMaximum": high} for high in (0, 10)),
]

_CHOICES: list[Schema] = [
    {"enum": ["red", "amber", "green"]},
    {"enum": ["red", "amber", "green", None, 42]},
    {"enum": [1, 2.5, True, [], {}]},
    {"enum": [{"a": 1}, ["b", 2]]},
    {"type": "string", "enum": ["Street", "Avenue", "Boulevard"]},
    {"const": "United States of America"},
    {"const": 7},
    {"const": None},
    {"const": {"k": [1, 2]}},
    {"type": ["string", "null"], "maxLength": 9},
    {"type": ["number", "boolean"]},
    {"type": ["integer", "array"], "items": {"const": 0}, "maxItems": 3},
    {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "number", "minimum": 0}]},
    {"anyOf": [{"type": "object", "required": ["a"], "properties": {"a": {"const": 1}}}, {"type": "null"}]},
    {"anyOf": [{"const": "x"}, {"enum": [1, 2]}, {"type": "boolean"}]},
    {"oneOf": [{"const": "cat"}, {"const": "dog"}]},
    {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}]},
    {"allOf": [{"type": "string"}, {"maxLength": 5}]},
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 9}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
]

#: Small schemas for use inside other schemas.
_LEAVES: list[Schema] = [
    {"type": "integer"},
    {"type": "number", "minimum": 0, "maximum": 10},
    {"type": "boolean"},
    {"type": "string", "maxLength": 6},
    {"enum": ["a", "b", None]},
    {"type": ["null", "integer"]},
]


def _arrays() -> Iterator[Schema]:
    yield {"type": "array"}
    for leaf in _LEAVES:
        yield {"type": "array", "items": leaf}
        yield {"type": "array", "items": leaf, "minItems": 2}
        yield {"type": "array", "items": leaf, "maxItems": 3}
        yield {"type": "array", "items": leaf, "minItems": 1, "maxItems": 2}
        yield {"type": "array", "items": {"type": "array", "items": leaf, "maxItems": 2}, "maxItems": 2}
    for first, second in product(_LEAVES[:5], repeat=2):
        yield {"type": "array", "prefixItems": [first, second], "items": False, "minItems": 2}
    for first in _LEAVES:
        yield {"type": "array", "prefixItems": [first], "items": {"type": "boolean"}, "maxItems": 4}
    yield {"type": "array", "maxItems": 0}


def _objects() -> Iterator[Schema]:
    yield {"type": "object"}
    yield {"type": "object", "additionalProperties": False}
    for a, b in product(_LEAVES, _LEAVES[:4]):
        closed = {"type": "object", "properties": {"first": a, "second one": b}, "additionalProperties": False}
        yield closed
        yield {**closed, "required": ["first"]}
        yield {**closed, "required": ["second one", "first"]}
    for leaf in _LEAVES:
        yield {"type": "object", "additionalProperties": leaf, "required": ["must"]}
        yield {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": leaf}
        yield {"type": "object", "patternProperties": {"^S_": leaf}, "additionalProperties": False}
        yield {
            "type": "object",
            "properties": {"list": {"type": "array", "items": {"type": "object", "properties": {"x": leaf}}}},
            "required": ["list"],
        }
        yield {
            "type": "object",
            "properties": {"inner": {"type": "object", "properties": {"deep": leaf}, "required": ["deep"]}},
            "required": ["inner"],
            "additionalProperties": False,
        }
    yield {
        "type": "object",
        "properties": {"a": {}, 'quo"te': {"const": 1}, "ü\n": {"const": "é"}},
        "required": ["a"],
    }


def _references() -> Iterator[Schema]:
    for leaf in _LEAVES:
        yield {"$defs": {"leaf": leaf}, "type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 4}
        yield {
            "$defs": {"node": {"type": "object", "properties": {"v": leaf, "next": {"$ref": "#/$defs/node"}}}},
            "$ref": "#/$defs/node",
        }
        yield {
            "type": "object",
            "properties": {"value": leaf, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
            "required": ["value"],
            "additionalProperties": False,
        }
    yield {"definitions": {"old": {"type": "boolean"}}, "properties": {"x": {"$ref": "#/definitions/old"}}}
    yield {}
    yield {"title": "anything", "description": "notes change nothing", "default": 3, "examples": [1]}


_STRING, _SHORT = {"type": "string"}, {"type": "string", "maxLength": 12}

#: Typical schemas of users.
_RECORDS: dict[str, tuple[Schema, list[str]]] = {
    "address": ({"street": _STRING, "city": _STRING, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, ["city"]),
    "person": ({"name": _STRING, "age": {"type": "integer", "minimum": 0}, "email": {"format": "email"}}, ["name"]),
    "place": (
        {
            "latitude": {"type": "number", "minimum": -90, "maximum": 90},
            "longitude": {"type": "number", "minimum": -180, "maximum": 180},
        },
        ["latitude", "longitude"],
    ),
    "product": (
        {
            "productId": {"type": "integer"},
            "price": {"type": "number", "exclusiveMinimum": 0},
            "tags": {"type": "array", "items": _SHORT, "minItems": 1},
        },
        ["productId", "price"],
    ),
    "event": ({"title": _SHORT, "day": {"type": "string", "format": "date"}, "rsvp": {"type": "boolean"}}, ["day"]),
    "answer": ({"reasoning": _STRING, "verdict": {"enum": ["yes", "no", "unsure"]}}, ["reasoning", "verdict"]),
    "call": ({"name": {"const": "search"}, "arguments": {"type": "object"}}, ["name", "arguments"]),
    "table": ({"rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}}, ["rows"]),
    "rating": ({"stars": {"type": "integer", "minimum": 1, "maximum": 5}, "note": _SHORT}, ["stars"]),
}


def _records() -> Iterator[Schema]:
    for title, (properties, required) in _RECORDS.items():
        record = {"title": title, "type": "object", "properties": properties}
        yield record
        yield {**record, "required": required, "additionalProperties": False}
        yield {"type": "array", "items": {**record, "required": required}, "minItems": 1, "maxItems": 2}


SCHEMAS: list[Schema] = [*_STRINGS, *_NUMBERS, *_CHOICES, *_arrays(), *_objects(), *_references(), *_records()]
