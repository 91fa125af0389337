"""The wheel holds what the folders hold."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.helpers.data import ROOT

ROOMS = ("kernels", "models", "quant", "tui")


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


def test_styles_of_the_chat_are_package_data() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    styles = {path.relative_to(ROOT / "tui").as_posix() for path in (ROOT / "tui").rglob("*.tcss")}
    assert "chat.tcss" in styles
    for name in styles:
        assert any(fnmatch(name, pattern) for pattern in patterns["localllm.tui"]), name


def cuda_sources() -> set[str]:
    return {path.name for path in (ROOT / "kernels" / "cuda").iterdir() if path.suffix not in (".py", "")}


def test_cuda_sources_are_package_data() -> None:
    # They are data to setuptools, which leaves out what no pattern names.
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "common.cuh" in cuda_sources()
    for name in cuda_sources():
        assert any(fnmatch(name, pattern) for pattern in patterns["localllm.kernels.cuda"]), name


def test_cuda_sources_are_built(tmp_path: Path) -> None:
    """By the step that a wheel is made of: it puts every file where the wheel has it."""
    pytest.importorskip("setuptools", minversion="77")  # which reads the form that the license has in pyproject.toml
    setup = [sys.executable, "-c", "from setuptools import setup; setup()"]
    subprocess.run(
        [*setup, "-q", "build_py", "--build-lib", str(tmp_path)], cwd=ROOT, capture_output=True, check=True
    )
    built = tmp_path / "localllm" / "kernels" / "cuda"
    assert {path.name for path in built.iterdir() if path.suffix not in (".py", "")} == cuda_sources()
