"""What backends share of the matrices of experts: how they are packed one after the other."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.graph import Weight


def matrices_to_pack(weight: Weight, group: int) -> NDArray[np.uint8]:
    """Raw rows [matrices, n_out, bytes of a row] of a matrix [n_out, n_in] or of experts' [E, n_out, n_in].

    Packed matrices are whole groups of ``group`` rows.  Where experts' are so without padding, they are one large
    matrix.
    """
    *_, n_out, _ = weight.shape
    n = 1 if n_out % group == 0 else prod(weight.shape[:-2])
    return weight.data.reshape(n, prod(weight.shape[:-1]) // n, -1)
