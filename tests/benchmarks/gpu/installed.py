"""List packages of a run that are not installed.  This module imports only the standard library."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Packages in addition to the project's dependencies.
_TESTS = ("pytest", "pytest-timeout", "hypothesis", "packaging")
_PLATFORMS = " ".join(f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014"))
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def needs() -> list[str]:
    """Return the dependencies of the project, of its GPU support, and of its tests."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *_TESTS, *project["optional-dependencies"]["cuda12"]]


def missing() -> str:
    """Describe packages that are missing or have the wrong version, and how to install them; "" if none are."""
    wanted = [need for need in needs() if not re.match("cupy|cuda", need) and not _is_there(need)]
    if not wanted:
        return ""
    packages, everything = (" ".join(f"'{need}'" for need in each) for each in (wanted, needs()))
    return (
        f"not installed, or with another version: {packages}\n"
        "On a machine with a network, then on this machine:\n"
        f"  python -m pip download --dest wheels --only-binary=:all: --python-version {_PYTHON} {_PLATFORMS} "
        f"{everything}\n"
        "  python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=site"
    )


def _is_there(need: str) -> bool:
    """Return whether a package is installed, with the right version if versions can be compared."""
    match = re.match(r"[\w.-]+", need)
    assert match
    try:
        found = version(match[0])
    except PackageNotFoundError:
        return False
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(need).specifier.contains(found)
