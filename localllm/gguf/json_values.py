"""Metadata values as they are shown: as JSON values, and of long ones the beginning."""

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

#: Elements of an array, and characters of a text, that are shown of a long one.
_ELEMENTS = 8
_CHARACTERS = 80


@dataclass(frozen=True)
class Value:
    """A metadata value, as far as it is shown."""

    type: str  # in words: "integer", "text", "array of 32,000 texts", …
    shown: Any  # a JSON value; of an array its first elements
    left_out: int = 0  # elements, or characters of a text, that are not shown

    def __str__(self) -> str:
        text = json.dumps(self.shown, ensure_ascii=False)
        return text + f" … {self.left_out:,} more" if self.left_out else text


def value_of(file: GGUFFile, key: str, *, full: bool = False) -> Value:
    """The value of ``key``; with ``full`` all of it."""
    try:
        value = file.metadata[key]
    except GGUFError:  # a text that is not UTF-8; it is shown nevertheless
        return _text(file.metadata.raw(key).decode("utf-8", "backslashreplace"), full, "text, not valid UTF-8")
    if isinstance(value, str):
        return _text(value, full, "text")
    if isinstance(value, bool | int | float):
        kind = "bool" if isinstance(value, bool) else "integer" if isinstance(value, int) else "float"
        return Value(kind, _json_value(value))
    n = len(value) if full else _ELEMENTS
    kind = "texts" if isinstance(value, StringArray) else "arrays"
    if isinstance(value, np.ndarray):
        kind = str(value.dtype)
    return Value(f"array of {len(value):,} {kind}", _first(value, n), max(0, len(value) - n))


def _text(text: str, full: bool, kind: str) -> Value:
    n = len(text) if full else _CHARACTERS
    return Value(kind, text[:n], max(0, len(text) - n))


def _first(value: Any, n: int) -> list[Any]:
    """The first ``n`` elements as JSON values."""
    if isinstance(value, StringArray):
        return [_string(value, i) for i in range(min(n, len(value)))]
    return [_first(v, n) if isinstance(v, Sequence | np.ndarray) else _json_value(v) for v in islice(value, n)]


def _string(strings: StringArray, i: int) -> str:
    try:
        return strings[i]
    except GGUFError:
        return strings.raw(i).decode("utf-8", "backslashreplace")


def _json_value(value: Any) -> Any:
    """A number or bool as JSON has it, which knows neither infinity nor NaN."""
    plain = value.item() if isinstance(value, np.generic) else value
    if not isinstance(plain, float):
        return plain
    if not math.isfinite(plain):
        return str(plain)
    # Most are float32: 1e-05 then, rather than the digits of the float64 that is nearest to it.
    with np.errstate(over="ignore"):
        narrow = np.float32(plain)
    return float(str(narrow)) if narrow == plain else plain
