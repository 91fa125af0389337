"""shfl, vote, redux, match."""

from __future__ import annotations

from tests.cuda_on_cpu.instructions.table import C_TYPES, Operation, translates

_SHUFFLES = {"up": "up", "down": "down", "bfly": "butterfly", "idx": "index"}
_FOLDS = {
    "add": "x + y",
    "min": "x < y ? x : y",
    "max": "x > y ? x : y",
    "and": "x & y",
    "or": "x | y",
    "xor": "x ^ y",
}


@translates("shfl")
def shuffle(op: Operation) -> str:
    op.choice("sync")
    mode = _SHUFFLES[op.choice(*_SHUFFLES)]
    op.type("b32")
    op.count(5)
    value, distance, clamp, mask = (op.read(i, "u32") for i in (1, 2, 3, 4))
    target, _, in_range = op.operands[0].partition("|")
    writes = op.write(target, "b32", "out.value") + (op.write(in_range, "pred", "out.in_range") if in_range else "")
    call = f"shuffle<Shuffle::{mode}>({value}, {distance}, {clamp}, {mask}, {op.site})"
    return f"{{ const ShuffleOutput out = {call}; {writes} }}"


@translates("vote")
def vote(op: Operation) -> str:
    op.choice("sync")
    type_ = op.type("b32", "pred")
    op.count(3)
    kind = op.choice("ballot") if type_ == "b32" else op.choice("all", "any", "uni")
    function = "vote_uniform" if kind == "uni" else f"vote_{kind}"
    return op.result(type_, f"{function}({op.read(2, 'u32')}, {op.value(op.operands[1], 'pred')}, {op.site})")


@translates("redux")
def redux(op: Operation) -> str:
    op.choice("sync")
    type_ = op.type("u32", "s32", "b32")
    op.count(3)
    fold = op.choice("and", "or", "xor") if type_ == "b32" else op.choice("add", "min", "max")
    c_type = "u32" if fold == "add" else C_TYPES[type_]
    function = f"[]({c_type} x, {c_type} y) -> {c_type} {{ return {_FOLDS[fold]}; }}"
    return op.result(
        type_, f"reduce<{c_type}>({op.read(2, 'u32')}, ({c_type}){op.read(1, type_)}, {op.site}, {function})"
    )


@translates("match")
def match(op: Operation) -> str:
    kind = op.choice("any", "all")
    op.choice("sync")
    type_ = op.type("b32", "b64")
    op.count(3)
    call = f"match_{kind}<{C_TYPES[type_]}>({op.read(2, 'u32')}, {op.read(1, type_)}, {op.site})"
    target, _, all_same = op.operands[0].partition("|")
    if not all_same:
        return op.write(target, "b32", call)
    return (
        f"{{ const u32 same = {call}; {op.write(target, 'b32', 'same')} {op.write(all_same, 'pred', 'same != 0')} }}"
    )
