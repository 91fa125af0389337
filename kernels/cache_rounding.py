"""How a KV cache rounds keys and values to few bits.  Compiled kernels depend on these numbers.

Heads are rotated first: multiplied by a Hadamard matrix, which spreads a head's few large values over all of them, so
that fewer digits go to what is large (QuaRot, arXiv:2404.00456).  It is its own inverse.  Products of rotated queries
with rotated keys are those of plain ones; sums of rotated values are rotated back.

Then 32 neighbours share a float16 scale, as in GGML's formats: in Q8_0 the largest magnitude becomes 127, in Q5_0 and
Q4_0 the value of the largest magnitude becomes -16 or -8, whatever its sign, and the scale may be negative.
"""

from __future__ import annotations

import numpy as np

#: Bits of a code in a type.
CODE_BITS = {"q8_0": 8, "q5_0": 5, "q4_0": 4}
#: So many neighbours in a head share a float16 scale, and in Q8_0 the one of largest magnitude becomes this code.
VALUES_PER_SCALE, LARGEST_CODE = 32, np.float32(127)
#: Values that share a scale are 0 if none is larger: the largest code divided by something smaller may be infinite.
NEGLIGIBLE = np.float32(1e-36)
#: The largest finite float16, which scales are clamped to.
LARGEST_HALF = np.float32(65504)
#: The values that are rotated together, at least and at most; the latter of keys and of values, whose error stays
#: where it is made if fewer are.
LEAST_ROTATED, MOST_ROTATED = 16, (256, 64)


def rotation(type: str, dim: int, most: int) -> int:
    """The values of a head that are rotated together: the largest power of two that divides it, or 0 for none."""
    size = min(dim & -dim, most)
    return size if type in CODE_BITS and size >= LEAST_ROTATED else 0
