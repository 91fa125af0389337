"""Compare the values of two runs of a model, and find the first value that differs by a new cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: An error is a jump if it is `JUMP` times as large as all errors before it.
JUMP = 5.0
#: Largest errors from rounding: of float products and caches of float16, and of products of eight-bit integers.
FLOAT_ROUNDING, INTEGER_ROUNDING = 2e-3, 5e-2
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Difference:
    """The relative error of a value, ‖actual - expected‖ / ‖expected‖."""

    name: str
    error: float


def differences(expected: Mapping[str, NDArray[Any]], actual: Mapping[str, NDArray[Any]]) -> list[Difference]:
    """Return the errors of the values that both runs have in the same shape, in the order of ``actual``.

    For numbers of chosen experts, the error is the share of different numbers.
    """
    result = []
    for name, rows in actual.items():
        if name not in expected or expected[name].shape != rows.shape:
            continue
        if rows.dtype == np.int32:
            error = float(np.mean(np.sort(rows, axis=1) != np.sort(expected[name], axis=1)))
        else:
            right = expected[name].astype(np.float64)
            error = float(np.linalg.norm(rows - right)) / max(float(np.linalg.norm(right)), 1e-30)
        result.append(Difference(name, error if np.isfinite(error) else np.inf))
    return result


def first_jump(errors: Sequence[Difference], rounding: float = FLOAT_ROUNDING) -> Difference | None:
    """Return the first value whose error is not explained by the errors before it; None without such a value.

    Args:
        rounding: errors up to this size are never a jump.
    """
    largest = 0.0
    for difference in errors:
        if difference.error > max(rounding, JUMP * largest):
            return difference
        largest = max(largest, difference.error)
    return None


def table(errors: Sequence[Difference]) -> Iterator[str]:
    """Yield lines with a row per layer and a column per name, between the values before and after the layers."""
    layers: dict[str, dict[str, float]] = {}
    for difference in errors:
        if match := _LAYER.fullmatch(difference.name):
            layers.setdefault(match[1], {})[match[2]] = difference.error
    columns = list(dict.fromkeys(name for row in layers.values() for name in row))
    widths = [max(len(column), 7) for column in columns]
    outside = [d for d in errors if not _LAYER.fullmatch(d.name)]
    yield from (_line(d) for d in outside if d.name == "embedding")
    yield "  ".join(["layer", *(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True))])
    for layer, row in layers.items():
        cells = (f"{row[c]:.1e}" if c in row else "" for c in columns)
        yield "  ".join([f"{layer:>5}", *(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))]).rstrip()
    yield from (_line(d) for d in outside if d.name != "embedding")


def _line(difference: Difference) -> str:
    return f"{difference.name}: {difference.error:.1e}"
