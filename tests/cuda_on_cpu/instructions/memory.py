"""ld, st, atomics, cp.async, and instructions without effect on values: prefetches and fences."""

from __future__ import annotations

from tests.cuda_on_cpu.instructions.table import C_TYPES, Operation, translates
from tests.cuda_on_cpu.ptx import TYPE_BYTES

_TYPES = (*(f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)), "f32", "f64")
_SPACES = ("param", "param::func", "param::entry", "shared", "shared::cta", "global", "local", "const")
_CACHE_HINTS = (
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "uni"),
    *(f"L1::{policy}" for policy in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")),
    *(f"L2::{n}B" for n in (64, 128, 256)),
    *(f"L2::{policy}" for policy in ("evict_normal", "evict_first", "evict_last")),
)
_SCOPES = ("cta", "cluster", "gpu", "sys")


def _space(op: Operation) -> str:
    """Return the state space; ``generic`` if the instruction names none."""
    return op.choice(*_SPACES, default="generic").split("::")[0]


def _bits(type_: str) -> str:
    return f"u{8 * TYPE_BYTES[type_]}"


def _check(op: Operation, space: str, access: str, n_bytes: int) -> str:
    """Return the check before an access, or an empty string for memory of one thread."""
    if space in ("param", "const", "local"):
        return ""
    return f"before_access(Space::{space}, Access::{access}, address, {n_bytes}, {op.site}); "


def _hints(op: Operation, n_operands: int) -> None:
    """Remove the cache hints, and the operand of ``.L2::cache_hint``."""
    op.ignore(*_CACHE_HINTS)
    if op.flag("L2::cache_hint"):
        op.operands.pop()
    op.count(n_operands)


@translates("ld", "ldu")
def load(op: Operation) -> str:
    type_ = op.type(*_TYPES)
    op.choice("v2", "v4", "v8", default="")
    op.flag("nc")
    space = _space(op)
    atomic = op.choice("relaxed", "acquire", default="") != ""
    op.ignore("weak", "volatile", *_SCOPES)
    _hints(op, 2)
    targets = op.vector(op.operands[0])
    size = TYPE_BYTES[type_]
    value_type = type_ if type_[0] == "s" else _bits(type_)  # a wider register gets a signed value with its sign
    reads = [
        f"const {C_TYPES[value_type]} value_{i} = load<{C_TYPES[value_type]}>(address + {i * size});"
        for i in range(len(targets))
    ]
    writes = [op.write(target, value_type, f"value_{i}") for i, target in enumerate(targets)]
    check = _check(op, space, "atomic_read" if atomic else "read", size * len(targets))
    return (
        f"{{ const u64 address = {op.address(op.operands[1], space)}; {check}{' '.join(reads)} {' '.join(writes)} }}"
    )


@translates("st")
def store(op: Operation) -> str:
    type_ = op.type(*_TYPES)
    op.choice("v2", "v4", "v8", default="")
    space = _space(op)
    atomic = op.choice("relaxed", "release", default="") != ""
    op.ignore("weak", "volatile", *_SCOPES)
    _hints(op, 2)
    size, bits = TYPE_BYTES[type_], _bits(type_)
    values = [op.value(item, bits) for item in op.vector(op.operands[1])]
    writes = [f"store<{bits}>(address + {i * size}, {value});" for i, value in enumerate(values)]
    check = _check(op, space, "atomic" if atomic else "write", size * len(values))
    return f"{{ const u64 address = {op.address(op.operands[0], space)}; {check}{' '.join(writes)} }}"


_UPDATES = {
    "add": "old + value",
    "exch": "value",
    "min": "value < old ? value : old",
    "max": "value > old ? value : old",
    "and": "old & value",
    "or": "old | value",
    "xor": "old ^ value",
    "inc": "old >= value ? 0 : old + 1",
    "dec": "old == 0 || old > value ? value : old - 1",
}


@translates("atom", "red")
def atomic(op: Operation) -> str:
    if op.instruction.opcode == "red":
        op.operands.insert(0, "_")
    type_ = op.type("b16", "b32", "b64", "u32", "s32", "u64", "s64", "f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
    update = op.choice(*_UPDATES, "cas")
    op.ignore("relaxed", "acquire", "release", "acq_rel", *_SCOPES, "noftz")
    space = op.choice("shared", "shared::cta", "global", default="generic").split("::")[0]
    _hints(op, 4 if update == "cas" else 3)
    c_type = C_TYPES[type_]
    address = op.address(op.operands[1], space)
    value = op.read(2, type_)
    if update == "cas":
        body = f"const {c_type} wanted = {value}, value = {op.read(3, type_)}; return old == wanted ? value : old;"
    else:
        formula = _UPDATES[update]
        if type_ in ("f16", "bf16", "f16x2", "bf16x2"):
            if update != "add":
                raise op.refuse("halves can only be added")
            half = type_.removesuffix("x2")
            formula = f"each_half(add_{half}, old, value)" if type_.endswith("x2") else f"add_{half}(old, value)"
        elif type_ in ("f32", "f64") and update not in ("add", "exch"):
            raise op.refuse("floats can only be added")
        elif type_[0] == "s" and update == "add":
            formula = f"({c_type})((u{type_[1:]})old + (u{type_[1:]})value)"
        body = f"(void)old; const {c_type} value = {value}; return {formula};"
    function = f"[&]({c_type} old) -> {c_type} {{ {body} }}"
    return op.result(type_, f"atomic_update<{c_type}>(Space::{space}, {address}, {op.site}, {function})")


@translates("cp")
def async_copy(op: Operation) -> str:
    if not op.flag("async"):
        raise op.refuse("only cp.async is known")
    if op.flag("commit_group"):
        op.count(0)
        return "async_commit();"
    if op.flag("wait_all"):
        op.count(0)
        return "async_commit(); async_wait(0);"
    if op.flag("wait_group"):
        op.count(1)
        return f"async_wait({op.read(0, 'u32')});"
    op.choice("shared", "shared::cta")
    op.choice("global")
    op.choice("ca", "cg")
    op.ignore(*(f"L2::{n}B" for n in (64, 128, 256)))
    if op.flag("L2::cache_hint"):
        op.operands.pop()
    op.count(3, 4)
    n_bytes = int(op.operands[2], 0)
    if n_bytes not in (4, 8, 16) or ("cg" in op.instruction.modifiers and n_bytes != 16):
        raise op.refuse("cp.async copies 4, 8 or 16 bytes, and only 16 with .cg")
    n_from = str(n_bytes)
    if len(op.operands) == 4:
        ignores = op.names.registers.get(op.operands[3].lstrip("!")) == "pred"
        n_from = f"({op.value(op.operands[3], 'pred')} ? 0u : {n_bytes}u)" if ignores else op.read(3, "u32")
    to, source = op.address(op.operands[0], "shared"), op.address(op.operands[1], "global")
    return f"async_copy({to}, {source}, {n_bytes}, {n_from}, {op.site});"


@translates("prefetch", "prefetchu", "membar", "fence", "griddepcontrol", "nanosleep")
def without_effect(op: Operation) -> str:
    """Fences have no effect: blocks run in order, and threads see memory in order."""
    op.ignore(
        "global",
        "local",
        "L1",
        "L2",
        "gl",
        "sc",
        "acq_rel",
        "acquire",
        "release",
        *_SCOPES,
        "u32",
        "wait",
        "launch_dependents",
    )
    op.ignore("L2::evict_last", "L2::evict_normal")
    return ";"


@translates("createpolicy")
def create_policy(op: Operation) -> str:
    """A cache policy, whose value is only used by ``.L2::cache_hint``."""
    op.modifiers.clear()
    return op.write(op.operands[0], "b64", "0")
