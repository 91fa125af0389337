"""Metadata values for display: as JSON values, with long values shortened."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from localllm.errors import GGUFError
from localllm.gguf import GGUFFile, StringArray

#: Maximum elements of an array, and maximum characters of a string, that are shown.
_ELEMENTS = 8
_CHARACTERS = 80


@dataclass(frozen=True)
class Value:
    """A metadata value for display."""

    type: str  # description: "integer", "text", "array of 32,000 texts", …
    shown: Any  # JSON value; for an array, its first elements
    left_out: int = 0  # number of elements or characters that are not shown

    def __str__(self) -> str:
        text = json.dumps(self.shown, ensure_ascii=False)
        return text + f" … {self.left_out:,} more" if self.left_out else text


def value_of(file: GGUFFile, key: str, *, full: bool = False) -> Value:
    """Return the value of ``key``, shortened unless ``full`` is true."""
    try:
        value = file.metadata[key]
    except GGUFError:  # invalid UTF-8 is shown with escapes
        return _text(file.metadata.raw(key).decode("utf-8", "backslashreplace"), full, "text, not valid UTF-8")
    if isinstance(value, str):
        return _text(value, full, "text")
    if isinstance(value, bool | int | float):
        type_name = "bool" if isinstance(value, bool) else "integer" if isinstance(value, int) else "float"
        return Value(type_name, _json_value(value))
    n = len(value) if full else _ELEMENTS
    type_name = "texts" if isinstance(value, StringArray) else "arrays"
    if isinstance(value, np.ndarray):
        type_name = str(value.dtype)
    return Value(f"array of {len(value):,} {type_name}", _first(value, n), max(0, len(value) - n))


def _text(text: str, full: bool, type_name: str) -> Value:
    n = len(text) if full else _CHARACTERS
    return Value(type_name, text[:n], max(0, len(text) - n))


def _first(value: Any, n: int) -> list[Any]:
    """Return the first ``n`` elements as JSON values."""
    if isinstance(value, StringArray):
        return [_string(value, i) for i in range(min(n, len(value)))]
    return [_first(v, n) if isinstance(v, Sequence | np.ndarray) else _json_value(v) for v in islice(value, n)]


def _string(strings: StringArray, i: int) -> str:
    try:
        return strings[i]
    except GGUFError:
        return strings.raw(i).decode("utf-8", "backslashreplace")


def _json_value(value: Any) -> Any:
    """Return a number or bool for JSON; infinity and NaN become strings, because JSON has no such numbers."""
    plain = value.item() if isinstance(value, np.generic) else value
    if not isinstance(plain, float):
        return plain
    if not math.isfinite(plain):
        return str(plain)
    # Most values are float32: show 1e-05, not the digits of the nearest float64.
    with np.errstate(over="ignore"):
        narrow = np.float32(plain)
    return float(str(narrow)) if narrow == plain else plain
