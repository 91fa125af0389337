"""Machine code as text: the innermost loops of a kernel and their register spills."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.kernels.cpu.compiler import Variant, assembly

#: Platforms whose code any machine can compile.
ARM_LINUX, X86_LINUX = "aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"

_VECTOR = re.compile(r"%[xyz]mm\d+|\b[vqdsbh]\d+\b")
#: A stack address.  Loops address the memory of `stack` through a separate register, or with an index.
_FRAME = re.compile(r"(?<![\w,])-?\d*\(%r[sb]p\)|\[(sp|x29)[],]")
_MULTIPLY = re.compile(r"vfn?m(add|sub)|v?mulps|fml[as]\b")


def triple_of(v: Variant) -> str:
    """Return a platform that has the kernel's target."""
    return ARM_LINUX if v.target.family == "aarch64" else X86_LINUX


def innermost_loops(text: str) -> list[list[str]]:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in map(str.strip, text.splitlines()):
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(code)
        elif line and not line.startswith((".", "/", "#")):
            code.append(line)
    ends = [(labels[m[0]], i) for i, line in enumerate(code) if (m := re.search(r"(?<=[\s,])\.LBB\w+$", line))]
    backward = [(first, last) for first, last in ends if first <= last]
    inner = [(a, z) for a, z in backward if not any(a <= c and d <= z for c, d in backward if (c, d) != (a, z))]
    return [code[a : z + 1] for a, z in inner]


def loops_of(v: Variant) -> list[list[str]]:
    """Return the innermost loops of a kernel for its target, on any processor."""
    return innermost_loops(assembly(v, triple_of(v)))


def vector_instructions(loop: Sequence[str]) -> list[str]:
    return [line for line in loop if _VECTOR.search(line)]


def float_products(loop: Sequence[str]) -> int:
    """Return the number of instructions that multiply vectors of floats."""
    return sum(bool(_MULTIPLY.match(line)) for line in loop)


def spills(loop: Sequence[str]) -> list[str]:
    """Return the instructions that store a vector in the frame, or load it from there."""
    return [line for line in vector_instructions(loop) if _FRAME.search(line)]


def spilled(loop: Sequence[str]) -> list[str]:
    """Return the spills that store a vector.  A load costs nothing as an operand of a product."""
    return [line for line in spills(loop) if re.match(r"v?mov\w*\s+%|st[rp]\b", line)]
