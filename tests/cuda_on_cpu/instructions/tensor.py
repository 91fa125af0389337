"""ldmatrix, stmatrix and mma."""

from __future__ import annotations

from tests.cuda_on_cpu.instructions.table import Operation, translates

_ELEMENTS = {"f16": "F16", "bf16": "BF16", "tf32": "TF32", "s8": "S8", "u8": "U8"}
# (M, K) of the supported shapes with 8 columns, by element type
_SHAPES = {
    "f16": {"m16n8k16": (16, 16), "m16n8k8": (16, 8)},
    "bf16": {"m16n8k16": (16, 16), "m16n8k8": (16, 8)},
    "tf32": {"m16n8k8": (16, 8), "m16n8k4": (16, 4)},
    "s8": {"m16n8k32": (16, 32), "m16n8k16": (16, 16), "m8n8k16": (8, 16)},
}
_SHAPES["u8"] = _SHAPES["s8"]
_PER_REGISTER = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4, "u8": 4}


@translates("mma")
def mma(op: Operation) -> str:
    op.choice("sync")
    op.choice("aligned")
    op.choice("row")
    op.choice("col")
    op.count(4)
    c_type = op.type("f32", "s32")
    b_type = op.type(*_ELEMENTS)
    a_type = op.type(*_ELEMENTS)
    op.type(c_type)
    is_int = a_type in ("s8", "u8")
    if is_int != (c_type == "s32") or (a_type != b_type and not (is_int and b_type in ("s8", "u8"))):
        raise op.refuse("these types do not go together")
    m, k = _SHAPES[a_type][op.choice(*_SHAPES[a_type])]
    b_count = k // (4 * _PER_REGISTER[a_type])
    counts = (m // 4, b_count * (m // 8), b_count, m // 4)
    d, a, b, c = (op.vector(operand) for operand in op.operands)
    if tuple(map(len, (d, a, b, c))) != counts:
        raise op.refuse(f"the fragments should have {counts} registers")
    # an accumulator can be a literal
    lists = [[op.value(item, "u32") for item in a], [op.value(item, "u32") for item in b]]
    lists.append([f"bits_of({op.value(item, 'f32')})" if c_type == "f32" else op.value(item, "u32") for item in c])
    fragments = ", ".join("{" + ", ".join(items) + "}" for items in lists)
    inputs = f"const Fragments<{counts[1]}, {counts[2]}, {counts[3]}> in{{{fragments}}}"
    call = f"mma<{_ELEMENTS[a_type]}, {_ELEMENTS[b_type]}, {m}, {k}>(in, {op.site})"
    writes = " ".join(op.write(target, "u32", f"out.r[{i}]") for i, target in enumerate(d))
    return f"{{ {inputs}; const auto out = {call}; {writes} }}"


def _matrices(op: Operation) -> tuple[int, str]:
    op.choice("sync")
    op.choice("aligned")
    op.type("b16")
    op.choice("m8n8")
    op.choice("shared", "shared::cta")
    op.count(2)
    return int(op.choice("x1", "x2", "x4")[1:]), str(op.flag("trans")).lower()


@translates("ldmatrix")
def load_matrix(op: Operation) -> str:
    n, transposed = _matrices(op)
    targets = op.vector(op.operands[0])
    if len(targets) != n:
        raise op.refuse(f"{n} registers were expected")
    call = f"load_matrix<{n}, {transposed}>({op.address(op.operands[1], 'shared')}, {op.site})"
    writes = " ".join(op.write(target, "u32", f"out.r[{i}]") for i, target in enumerate(targets))
    return f"{{ const auto out = {call}; {writes} }}"


@translates("stmatrix")
def store_matrix(op: Operation) -> str:
    n, transposed = _matrices(op)
    values = op.vector(op.operands[1])
    if len(values) != n:
        raise op.refuse(f"{n} registers were expected")
    fragment = ", ".join(op.value(item, "u32") for item in values)
    address = op.address(op.operands[0], "shared")
    return f"store_matrix<{n}, {transposed}>({address}, Registers<{n}>{{{{{fragment}}}}}, {op.site});"
