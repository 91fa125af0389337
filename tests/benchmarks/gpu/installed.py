"""Packages of a run, and those that are not installed.  This module imports only the standard library."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Packages that tests need in addition to the project's dependencies.
TESTS = ("pytest>=9.0.3", "pytest-timeout", "hypothesis", "packaging")
#: CuPy is called by the version of CUDA, and is checked by opening a device.
_ENVIRONMENT = (
    "numpy",
    "numba",
    "llvmlite",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
)


def needs() -> list[str]:
    """Return the dependencies of the project and of its tests."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *TESTS]


def missing() -> list[str]:
    """Return the needs that are not installed, or have the wrong version."""
    return [need for need in needs() if not _is_there(need)]


def versions() -> dict[str, str]:
    """Return the versions of packages that a machine with a GPU should have."""
    return {name: found for name in _ENVIRONMENT if (found := _version(name))}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _is_there(need: str) -> bool:
    """Return whether a package is installed, with the right version if versions can be compared."""
    match = re.match(r"[\w.-]+", need)
    assert match
    found = _version(match[0])
    if not found:
        return False
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(need).specifier.contains(found)
