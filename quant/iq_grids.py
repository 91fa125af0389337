"""Codebooks of the IQ formats: rows of 4 or 8 values, one row per index.

GGML's authors found the rows by a search on lattices (E8 and D4), so no formula produces them. They are read from the
``gguf`` package on first use, because importing it takes a third of a second.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from localllm.quant.bits import Bytes, Floats, Ints
from localllm.quant.types import GGMLType


@cache
def grid(type: GGMLType) -> Floats:
    """Return the codebook of a format: float32 [entries, 4 or 8]."""
    import gguf.quants

    table = getattr(gguf.quants, type.name)
    table.init_grid()
    values: Floats = np.ascontiguousarray(table.grid.reshape(table.grid_shape), dtype=np.float32)
    values.flags.writeable = False
    return values


def _signs(masks: Ints) -> Floats:
    """Return 1 for each clear bit of the uint8 masks and -1 for each set bit: float32 [len(masks), 8]."""
    bits = np.unpackbits(masks[:, None], axis=1, bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


# Signs by mask, and the complete mask for seven sign bits. The eighth bit makes the number of negative values even.
SIGNS = _signs(np.arange(256, dtype=np.uint8))  # [256, 8]
# The shift leaves only the lowest bit of the count, the parity.
_SEVEN = np.arange(128, dtype=np.uint8)
MASKS_OF_7: Bytes = (_SEVEN | np.bitwise_count(_SEVEN) << 7).astype(np.uint8)
