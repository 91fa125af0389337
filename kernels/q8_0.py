"""How keys and values are rounded to bytes: as GGML's Q8_0.  Compiled kernels depend on these numbers."""

from __future__ import annotations

import numpy as np

#: So many neighbours in a head share a float16 scale, and the one of largest magnitude becomes this code.
VALUES_PER_SCALE, LARGEST_CODE = 32, np.float32(127)
#: Values that share a scale are 0 if none is larger: the largest code divided by something smaller may be infinite.
NEGLIGIBLE = np.float32(1e-36)
#: The largest magnitude that a code and a float16 scale can say.
LARGEST_SCALED = np.float32(127 * 65504)
