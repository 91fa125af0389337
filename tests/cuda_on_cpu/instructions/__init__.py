"""PTX instructions in C++, grouped by family.  Importing this package fills the table of instructions."""

from tests.cuda_on_cpu.instructions import (
    control,
    conversion,
    floats,
    integers,
    memory,
    moves,
    tensor,
    warp,
)
from tests.cuda_on_cpu.instructions.table import HANDLERS

__all__ = ["HANDLERS", "control", "conversion", "floats", "integers", "memory", "moves", "tensor", "warp"]
