"""Frequencies of rotary embedding as `append.cu` takes them: exact at any position."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

#: 2^192 / (2 pi), rounded.
_INVERSE_TURN = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E410


def phases(frequencies: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Turns a position, in units of 2^-64, without whole ones.

    The product of a position and a phase, modulo 2^64, is then the angle's part of a turn, to position * 2^-64.

    Args:
        frequencies: radians a position.
    """
    exact = (round(Fraction(float(f)) * _INVERSE_TURN / 2**128) % 2**64 for f in frequencies)
    return np.array(list(exact), np.uint64)
