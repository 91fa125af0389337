"""Imports go one way and have no cycles: quant <- kernels <- models <- library <- server <- chat <- command line.

Every class name is defined in one module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.data import ROOT

#: Lowest first.  A module imports from its layer and from lower layers.
LAYERS = (
    "localllm.quant",
    "localllm.kernels",
    "localllm.models",
    "localllm",
    "localllm.server",
    "localllm.tui",
    "localllm.cli",
    "localllm.integrations",
)

#: Packages whose folders are next to localllm's folder.
FOLDERS = ("localllm.quant", "localllm.kernels", "localllm.models", "localllm.tui")

#: Modules that every layer may import.
FOUNDATION = {"localllm.cancellation", "localllm.errors", "localllm.parallel", "localllm.regular_file"}

#: Program entry points, which are above all layers.
ENTRANCES = {"localllm.__main__"}


def layer(module: str) -> int:
    """Return the number of a module's layer, counted from the lowest."""
    inner = [i for i, name in enumerate(LAYERS) if name != "localllm" and (module + ".").startswith(name + ".")]
    return inner[0] if inner else LAYERS.index("localllm")


def package(module: str) -> str:
    """Return the package directly below localllm that contains a module, or the module itself."""
    return ".".join(module.split(".")[:2])


def sources() -> dict[str, Path]:
    """Return the file of every module, by module name."""
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
    """Yields the modules of localllm that a file imports, also in functions and for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "localllm")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the layer"
            if node.module is not None and node.module.split(".")[0] == "localllm":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in modules else node.module
        else:
            yield from imports(node, modules)


SOURCES = sources()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def check_no_cycle(imported: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_all_layers_have_modules() -> None:
    assert {layer(name) for name in SOURCES} == set(range(len(LAYERS)))
    assert SOURCES["localllm.kernels.cpu.backend"] == ROOT / "kernels" / "cpu" / "backend.py"
    assert SOURCES["localllm.cli"] == ROOT / "localllm" / "cli" / "__init__.py"
    assert layer("localllm.cli.main") == 6
    assert layer("localllm.client") == layer("localllm.llm") == 3


@pytest.mark.parametrize("name", SOURCES)
def test_imports_go_down(name: str) -> None:
    if name in ENTRANCES:
        return
    upward = {other for other in imports(TREES[name], set(SOURCES)) if layer(other) > layer(name)} - FOUNDATION
    assert not upward, f"{name} is in a lower layer than {', '.join(sorted(upward))}"


def test_foundations_import_only_each_other() -> None:
    assert {other for name in FOUNDATION for other in imports(TREES[name], set(SOURCES))} <= FOUNDATION


def test_packages_have_no_import_cycle() -> None:
    imported: dict[str, set[str]] = {}
    for name, tree in TREES.items():
        others = {package(other) for other in imports(tree, set(SOURCES))}
        imported.setdefault(package(name), set()).update(others - {package(name)})
    check_no_cycle(imported)


def test_modules_import_in_no_cycle() -> None:
    """Imports for type checkers count, too."""
    imported = {name: {*imports(tree, set(SOURCES))} - {name} for name, tree in TREES.items()}
    check_no_cycle(imported)


def repeated_classes(trees: Mapping[str, ast.AST]) -> dict[str, list[str]]:
    """Return the modules of every class name that is defined more than once."""
    modules: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)
    return {name: names for name, names in modules.items() if len(names) > 1}


def test_class_names_are_defined_once() -> None:
    assert not repeated_classes(TREES)


def test_a_repeated_class_name_is_found() -> None:
    a, b = ast.parse("class X: ...\nclass Y: ..."), ast.parse("def f():\n    class X: ...")
    assert repeated_classes({"a": a, "b": b}) == {"X": ["a", "b"]}


def test_detects_an_upward_import() -> None:
    tree = ast.parse("def f():\n    from localllm.models import registry, x\n    import localllm.cli.main\n")
    assert set(imports(tree, set(SOURCES))) == {
        "localllm.models.registry",
        "localllm.models",
        "localllm.cli.main",
    }


def test_imports_in_functions_and_for_type_checkers_are_found() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    import localllm.llm\ndef f():\n    import localllm.cli.main\n")
    assert set(imports(tree, set(SOURCES))) == {"localllm.llm", "localllm.cli.main"}


def test_a_cycle_is_found() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"a <- b <- a|b <- a <- b"):
        check_no_cycle({"a": {"b"}, "b": {"a"}})
