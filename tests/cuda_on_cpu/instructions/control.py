"""Branches, calls, returns and barriers."""

from __future__ import annotations

from tests.cuda_on_cpu.instructions.table import Operation, mangle, translates


def _jump(op: Operation, label: str) -> str:
    if label not in op.names.labels:
        raise op.refuse(f"label {label} is not known")
    counted = f"step({op.site}); " if op.is_backward(label) else ""
    return f"{{ {counted}goto {op.names.labels[label]}; }}"


@translates("bra")
def branch(op: Operation) -> str:
    op.count(1)
    op.flag("uni")
    return _jump(op, op.operands[0])


@translates("brx")
def branch_by_index(op: Operation) -> str:
    op.choice("idx")
    op.flag("uni")
    op.count(2)
    targets = op.names.branch_targets.get(op.operands[1])
    if targets is None:
        raise op.refuse("the table of targets is not there")
    cases = " ".join(f"case {i}: {_jump(op, label)}" for i, label in enumerate(targets))
    wild = f'default: fail("trap", "brx.idx outside of its table at <site %d>", {op.site});'
    return f"switch ({op.read(0, 'u32')}) {{ {cases} {wild} }}"


@translates("ret", "exit")
def leave(op: Operation) -> str:
    op.count(0)
    op.flag("uni")
    if op.instruction.opcode == "exit" and "" in op.names.functions:
        raise op.refuse("exit within a device function")
    return "return;"


@translates("trap")
def trap(op: Operation) -> str:
    op.count(0)
    return f'fail("trap", "at <site %d>", {op.site});'


@translates("call")
def call(op: Operation) -> str:
    """``call (returned), function, (arguments)``: all are variables in memory, passed by address."""
    op.flag("uni")
    name = next((operand for operand in op.operands if not operand.startswith("(")), "")
    if name not in op.names.functions:
        raise op.refuse("only functions of the module can be called")
    names = [item.strip() for operand in op.operands if operand.startswith("(") for item in operand[1:-1].split(",")]
    missing = [item for item in names if item and item not in op.names.addresses]
    if missing:
        raise op.refuse(f"{missing[0]} is not known")
    return f"{op.names.functions[name]}({', '.join(f'(u8*){mangle(item)}' for item in names if item)});"


@translates("bar", "barrier")
def barrier(op: Operation) -> str:
    if op.instruction.opcode == "bar" and op.flag("warp"):
        op.choice("sync")
        op.count(1)
        return f"warp_barrier({op.read(0, 'u32')}, {op.site});"
    op.ignore("cta", "aligned")
    kind = op.choice("sync", "arrive", "red")
    if kind == "red":
        return _reduction(op)
    op.count(1, 2)
    count = op.read(1, "u32") if len(op.operands) == 2 else "0"
    return f"block_{'barrier' if kind == 'sync' else 'arrive'}({op.read(0, 'u32')}, {count}, {op.site});"


def _reduction(op: Operation) -> str:
    """``bar.red.popc.u32 d, barrier{, count}, p`` or ``bar.red.and.pred``"""
    op.count(3, 4)
    type_ = op.type("u32", "pred")
    kind = op.choice("popc") if type_ == "u32" else op.choice("and", "or")
    reduce = {"popc": "population", "and": "all", "or": "any"}[kind]
    count = op.read(2, "u32") if len(op.operands) == 4 else "0"
    value = op.value(op.operands[-1], "pred")
    return op.result(type_, f"block_reduce(Reduce::{reduce}, {op.read(1, 'u32')}, {count}, {value}, {op.site})")
