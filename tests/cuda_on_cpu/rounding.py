"""Exact rounding of fractions to binary float formats, for tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """A float format: fraction bits, least exponent of a normal number, largest exponent."""

    fraction_bits: int
    min_exponent: int
    max_exponent: int


F16 = Format(10, -14, 15)
BF16 = Format(7, -126, 127)
F32 = Format(23, -126, 127)


def rounded(exact: Fraction, to: Format, mode: str = "rn", *, sign_of_zero: float = 1.0) -> float:
    """Round a value to nearest (``rn``: ties to even) or in a direction (``rz rm rp``)."""
    if exact == 0:
        return math.copysign(0.0, sign_of_zero)
    magnitude, negative = abs(exact), exact < 0
    exponent = max(_floor_log2(magnitude), to.min_exponent)
    quantum = Fraction(2) ** (exponent - to.fraction_bits)
    units = magnitude / quantum
    down, remainder = math.floor(units), units - math.floor(units)
    away = mode == ("rm" if negative else "rp")
    if mode == "rn":
        up = remainder > Fraction(1, 2) or (remainder == Fraction(1, 2) and down % 2 == 1)
    else:
        up = remainder > 0 and away
    value = (down + up) * quantum
    largest = (2 - Fraction(1, 2**to.fraction_bits)) * Fraction(2) ** to.max_exponent
    if value > largest:
        return math.copysign(math.inf if mode == "rn" or away else float(largest), -1 if negative else 1)
    return math.copysign(float(value), -1 if negative else 1)


def _floor_log2(value: Fraction) -> int:
    estimate = value.numerator.bit_length() - value.denominator.bit_length()
    return estimate if Fraction(2) ** estimate <= value else estimate - 1
