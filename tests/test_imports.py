"""Imports go one way: quant <- kernels <- models <- the library's core <- server <- chat <- command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.data import ROOT

#: The rooms, lowest first.  A module imports from its own room and from lower ones.
ROOMS = (
    "localllm.quant",
    "localllm.kernels",
    "localllm.models",
    "localllm",
    "localllm.server",
    "localllm.tui",
    "localllm.cli",
)

#: Rooms whose folders stand beside the package's.
FOLDERS = ("localllm.quant", "localllm.kernels", "localllm.models", "localllm.tui")

#: What every room may import.
FOUNDATION = {"localllm.errors", "localllm.parallel"}

#: Where a program begins stands above all rooms.
ENTRANCES = {"localllm.__main__"}


def room(module: str) -> int:
    """The number of the room that a module is in, counted from the lowest."""
    inner = [i for i, name in enumerate(ROOMS) if name != "localllm" and (module + ".").startswith(name + ".")]
    return inner[0] if inner else ROOMS.index("localllm")


def sources() -> dict[str, Path]:
    """The file of every module, by its name."""
    folders = {name: ROOT / name.rpartition(".")[2] for name in FOLDERS}
    found = {
        ".".join((name, *path.relative_to(folder).with_suffix("").parts)): path
        for name, folder in folders.items()
        for path in folder.rglob("*.py")
    }
    core = ROOT / "localllm"
    linked = {core / folder.name for folder in folders.values()}
    for path in core.rglob("*.py"):
        if not linked & set(path.parents):
            found[".".join(("localllm", *path.relative_to(core).with_suffix("").parts))] = path
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def imports(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Modules of localllm that a file imports anywhere, also inside functions and for type checkers alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "localllm")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the room"
            if node.module is not None and node.module.split(".")[0] == "localllm":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in modules else node.module


SOURCES = sources()


def test_all_rooms_have_modules() -> None:
    assert {room(name) for name in SOURCES} == set(range(len(ROOMS)))
    assert SOURCES["localllm.kernels.cpu.backend"] == ROOT / "kernels" / "cpu" / "backend.py"
    assert SOURCES["localllm.cli"] == ROOT / "localllm" / "cli" / "__init__.py"
    assert room("localllm.cli.main") == 6
    assert room("localllm.client") == room("localllm.llm") == 3


@pytest.mark.parametrize("name", SOURCES)
def test_imports_go_down(name: str) -> None:
    if name in ENTRANCES:
        return
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    upward = {other for other in imports(tree, set(SOURCES)) if room(other) > room(name) and other not in FOUNDATION}
    assert not upward, f"{name} is in a lower room than {', '.join(sorted(upward))}"


def test_an_import_upwards_is_found() -> None:
    tree = ast.parse("def f():\n    from localllm.models import registry, x\n    import localllm.cli.main\n")
    assert set(imports(tree, set(SOURCES))) == {
        "localllm.models.registry",
        "localllm.models",
        "localllm.cli.main",
    }
