"""The wheel holds what the folders hold."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.helpers.data import ROOT

ROOMS = ("kernels", "models", "quant")


def packages_on_disk() -> set[str]:
    """Every folder with an ``__init__.py``; rglob does not follow the links from localllm/ to the rooms."""
    found = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "localllm").rglob("__init__.py")}
    for room in ROOMS:
        for init in (ROOT / room).rglob("__init__.py"):
            found.add(".".join(("localllm", *init.parent.relative_to(ROOT).parts)))
    return found


def test_every_package_is_listed() -> None:
    # setuptools leaves out silently what is not listed.
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setuptools["packages"]) == packages_on_disk()
    for package, folder in setuptools["package-dir"].items():
        assert (ROOT / folder / "__init__.py").is_file(), package


def test_rooms_are_linked_into_the_package() -> None:
    for room in ROOMS:
        link = ROOT / "localllm" / room
        assert link.is_symlink()
        assert link.readlink() == Path("..") / room
