"""Rounding of keys and values in a KV cache to few bits. Compiled kernels depend on these constants.

Heads are first multiplied by a Hadamard matrix. This rotation spreads the few large values of a head over all of its
values, so that the large ones cost less precision (QuaRot, arXiv:2404.00456). The matrix is its own inverse. Products
of rotated queries with rotated keys equal the plain products; sums of rotated values are rotated back.

Then 32 neighbours share a float16 scale, as in GGML's formats. In Q8_0 the largest magnitude becomes 127. In Q5_0 and
Q4_0 the value of largest magnitude becomes -16 or -8 for either sign, so the scale may be negative.
"""

from __future__ import annotations

import numpy as np

#: Bits per code, by type.
CODE_BITS = {"q8_0": 8, "q5_0": 5, "q4_0": 4}
#: Neighbours in a head per float16 scale, and the code of the largest magnitude in Q8_0.
VALUES_PER_SCALE, LARGEST_CODE = 32, np.float32(127)
#: Values up to this magnitude are rounded to 0: dividing the largest code by a smaller number can overflow.
NEGLIGIBLE = np.float32(1e-36)
#: Largest finite float16, which scales are clamped to.
LARGEST_HALF = np.float32(65504)
#: Smallest and largest number of values rotated together; the latter for keys and for values. A smaller group limits
#: the spread of a value's error.
LEAST_ROTATED, MOST_ROTATED = 16, (256, 64)


def rotation(type: str, dim: int, most: int) -> int:
    """Return the number of values rotated together: the largest power of two that divides ``dim``, or 0 for none."""
    size = min(dim & -dim, most)
    return size if type in CODE_BITS and size >= LEAST_ROTATED else 0
