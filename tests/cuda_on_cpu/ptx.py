"""Parse PTX from NVRTC into records: functions, variables, instructions and their source locations.

The grammar is the one of Nvidia's PTX ISA manual, without parts that NVRTC never emits.  Registers and labels of
nested scopes (inline assembly in braces) are renamed, so that a body is a flat list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.cuda_on_cpu.errors import PtxError

TYPE_BYTES = {
    "pred": 1,
    **{f"{kind}8": 1 for kind in "bus"},
    **{f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (16, 32, 64)},
    "bf16": 2,
    "f16x2": 4,
    "bf16x2": 4,
    "tf32": 4,
}


@dataclass(frozen=True)
class Location:
    """A place in the CUDA source, and the call that the code was inlined into, or None."""

    file: str
    line: int
    inlined_at: Location | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return place if self.inlined_at is None else f"{place} (inlined at {self.inlined_at})"


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``span`` is the range of its text in the PTX, with the semicolon."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    location: Location | None
    text: str
    span: tuple[int, int]


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class BranchTargets:
    """``name: .branchtargets L1, L2, …;``, the table of a ``brx.idx``."""

    name: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Variable:
    """A variable of a state space; ``n_bytes`` is None for dynamic shared memory (``extern``)."""

    name: str
    space: str
    type: str
    align: int
    n_bytes: int | None
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    n_bytes: int
    align: int
    is_array: bool


@dataclass
class Function:
    """A kernel (``.entry``) or a device function (``.func``)."""

    name: str
    is_kernel: bool
    parameters: list[Parameter]
    returns: list[Parameter]
    max_threads: int | None = None
    span: tuple[int, int] = (0, 0)  # of the whole function in the PTX
    registers: dict[str, str] = field(default_factory=dict)  # name -> type
    variables: list[Variable] = field(default_factory=list)
    body: list[Instruction | Label | BranchTargets] = field(default_factory=list)

    def instructions(self) -> Iterator[Instruction]:
        return (item for item in self.body if isinstance(item, Instruction))


@dataclass
class Module:
    target: str  # "sm_80"
    variables: list[Variable]
    functions: list[Function]

    def kernels(self) -> dict[str, Function]:
        return {f.name: f for f in self.functions if f.is_kernel}


NAME = r"[%$A-Za-z_][\w$]*"
_NAME = re.compile(NAME)
_VARIABLE = re.compile(
    rf"(?:\.(?:visible|extern|weak)\s+)*\.(shared|global|const|local|param)\s+(?:\.attribute\([^)]*\)\s*)?"
    rf"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+({NAME})(?:\s*\[\s*(\d*)\s*\])?\s*(?:=\s*(.*))?$",
    re.S,
)
_PARAMETER = re.compile(
    rf"\.(?:param|reg)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.(?:global|shared|const|local)\s+)?"
    rf"(?:\.align\s+\d+\s+)?)?({NAME})(?:\s*\[\s*(\d+)\s*\])?$"
)
_LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:\s*,\s*function_name\s+[^,\n]+,\s*inlined_at\s+(\d+)\s+(\d+)\s+\d+)?"
)
_LABEL = re.compile(rf"({NAME})\s*:(?!:)")
_FUNCTION = re.compile(
    rf"(?:\.(?:visible|extern|weak)\s+)*\.(entry|func)\s*(?:\(([^()]*)\)\s*)?({NAME})\s*(?:\(([^()]*)\))?\s*([^{{;]*)"
)


def parse(ptx: str) -> Module:
    """Parse a module.  Raises PtxError if the text is not understood."""
    text = _blank_comments(ptx)
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.M)
    if target is None:
        raise PtxError("there is no .target directive: this is not PTX")
    files = {int(m[1]): m[2] for m in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', ptx, re.M)}
    module = Module(target[1], [], [])
    position = 0
    while (start := _skip_space(text, position)) < len(text):
        position = _parse_top(text, start, module, files)
    return module


def split_operands(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text[start:].strip() else parts


def _blank_comments(ptx: str) -> str:
    """Replace comments by spaces, so that positions in the text do not change."""
    blank = lambda m: re.sub(r"[^\n]", " ", m[0])  # noqa: E731
    return re.sub(r"/\*.*?\*/|//[^\n]*", blank, ptx, flags=re.S)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _closing_brace(text: str, position: int) -> int:
    """Return the position after the closing brace; ``position`` is after the opening one."""
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, position):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.end()
    raise PtxError("a brace is never closed")


def _parse_top(text: str, start: int, module: Module, files: dict[int, str]) -> int:
    """Parse one directive at module level and return the position after it."""
    word = re.compile(r"[.\w]+").match(text, start)
    if word is None:
        raise PtxError(f"not understood at module level: {text[start : _end_of_line(text, start)]!r}")
    if word[0] in (".version", ".target", ".address_size", ".file", ".loc"):
        return _end_of_line(text, start)
    if word[0] == ".section":
        return _closing_brace(text, text.index("{", start) + 1)
    function = _FUNCTION.match(text, start)
    if function is not None:
        return _parse_function(text, function, module, files)
    end = text.find(";", start)
    module.variables.append(_variable(text[start : end if end >= 0 else len(text)]))
    return end + 1


def _parse_function(text: str, head: re.Match[str], module: Module, files: dict[int, str]) -> int:
    end = head.end()
    if text[end : end + 1] == ";":  # a declaration, whose definition follows or whose calls are refused
        return end + 1
    if text[end : end + 1] != "{":
        raise PtxError(f"function {head[3]} has no body")
    close = _closing_brace(text, end + 1)
    limit = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)\s*(?:,\s*(\d+))?\s*(?:,\s*(\d+))?", head[5])
    threads = int(limit[1]) * int(limit[2] or 1) * int(limit[3] or 1) if limit else None
    function = Function(
        head[3], head[1] == "entry", _parameters(head[4]), _parameters(head[2]), threads, (head.start(), close)
    )
    _BodyParser(text, end + 1, close - 1, function, files).run()
    module.functions.append(function)
    return close


def _parameters(text: str | None) -> list[Parameter]:
    parameters = []
    for part in split_operands(" ".join((text or "").split())):
        match = _PARAMETER.match(part)
        if match is None or match[2] not in TYPE_BYTES:
            raise PtxError(f"parameter not understood: {part}")
        size = TYPE_BYTES[match[2]]
        n_bytes = size * int(match[4] or 1)
        parameters.append(Parameter(match[3], match[2], n_bytes, int(match[1] or size), match[4] is not None))
    return parameters


def _variable(text: str) -> Variable:
    match = _VARIABLE.match(" ".join(text.split()))
    if match is None or match[3] not in TYPE_BYTES:
        raise PtxError(f"variable not understood: {' '.join(text.split())}")
    space, align, kind, name, count, values = match.groups()
    size = TYPE_BYTES[kind]
    n_bytes = None if count == "" else size * int(count or 1)
    numbers = tuple(split_operands(values.strip().removeprefix("{").removesuffix("}"))) if values else ()
    return Variable(name, space, kind, int(align or size), n_bytes, numbers)


class _BodyParser:
    """Parses the statements between the braces of a function."""

    def __init__(self, text: str, start: int, end: int, function: Function, files: dict[int, str]) -> None:
        self._text, self._position, self._end = text, start, end
        self._function, self._files = function, files
        self._location: Location | None = None
        self._scopes: list[dict[str, str]] = [{}]  # per open scope: declared names and their unique names
        self._n_scopes = 0

    def run(self) -> None:
        while (start := _skip_space(self._text, self._position)) < self._end:
            self._position = self._statement(start)

    def _statement(self, start: int) -> int:
        text = self._text
        if text[start] == "{":
            self._open_scope(start)
            return start + 1
        if text[start] == "}":
            self._scopes.pop()
            return start + 1
        if (location := _LOC.match(text, start)) is not None:
            self._set_location(location)
            return _end_of_line(text, start)
        if (label := _LABEL.match(text, start)) is not None:
            return self._label(label)
        end = text.find(";", start, self._end)
        if end < 0:
            raise PtxError(f"statement without an end: {text[start : start + 60]!r}")
        self._plain_statement(" ".join(text[start:end].split()), (start, end + 1))
        return end + 1

    def _open_scope(self, start: int) -> None:
        """Register the labels of a scope, which may be used before their position."""
        self._n_scopes += 1
        self._scopes.append({})
        inside = self._text[start + 1 : _closing_brace(self._text, start + 1) - 1]
        inside = re.sub(r"\{[^{}]*:[^{}]*\}", "", inside)
        for match in re.finditer(rf"(?:^|[;{{}}\n])\s*({NAME})\s*:(?!:)", inside):
            self._declare(match[1])

    def _declare(self, name: str) -> str:
        """Return the unique name: the name itself in the outermost scope, numbered in inner scopes."""
        unique = name if len(self._scopes) == 1 else f"{name}$scope{self._n_scopes}"
        self._scopes[-1][name] = unique
        return unique

    def _resolve(self, text: str) -> str:
        if len(self._scopes) == 1:
            return text
        return _NAME.sub(lambda match: self._lookup(match[0]), text)

    def _lookup(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), name)

    def _set_location(self, match: re.Match[str]) -> None:
        outer = Location(self._file(match[3]), int(match[4])) if match[3] else None
        self._location = Location(self._file(match[1]), int(match[2]), outer)

    def _file(self, number: str) -> str:
        return self._files.get(int(number), "?").rsplit("/", 1)[-1]

    def _label(self, match: re.Match[str]) -> int:
        after = _skip_space(self._text, match.end())
        if not self._text.startswith((".branchtargets", ".callprototype", ".calltargets"), after):
            self._function.body.append(Label(self._lookup(match[1])))
            return match.end()
        end = self._text.index(";", after)
        kind, _, targets = self._text[after:end].partition(" ")
        if kind.strip() != ".branchtargets":
            raise PtxError(f"{kind}: indirect calls are not supported")
        labels = tuple(self._lookup(name) for name in split_operands(targets))
        self._function.body.append(BranchTargets(self._lookup(match[1]), labels))
        return end + 1

    def _plain_statement(self, text: str, span: tuple[int, int]) -> None:
        if not text or text.startswith(".pragma"):
            return
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith("."):
            variable = _variable(text)
            unique = self._declare(variable.name)
            self._function.variables.append(
                Variable(unique, variable.space, variable.type, variable.align, variable.n_bytes, variable.values)
            )
        else:
            self._function.body.append(self._instruction(text, span))

    def _registers(self, text: str) -> None:
        """``.reg .b32 %r<5>, %x;``"""
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text)
        if match is None or match[1] not in TYPE_BYTES:
            raise PtxError(f"registers not understood: {text}")
        for name in split_operands(match[2]):
            many = re.fullmatch(r"(.+)<(\d+)>", name)
            names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
            for one in names:
                self._function.registers[self._declare(one)] = match[1]

    def _instruction(self, text: str, span: tuple[int, int]) -> Instruction:
        match = re.match(rf"(?:@(!?)({NAME})\s+)?([\w.:]+)\s*(.*)$", text)
        if match is None:
            raise PtxError(f"instruction not understood: {text}")
        negated, predicate, name, operands = match.groups()
        opcode, *modifiers = name.split(".")
        return Instruction(
            opcode,
            tuple(modifiers),
            tuple(split_operands(self._resolve(operands))),
            self._resolve(predicate) if predicate else None,
            negated == "!",
            self._location,
            text,
            span,
        )
