"""What of the packages that a run needs is not installed; nothing here needs one of them."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Beside the project's dependencies.
_TESTS = ("pytest", "hypothesis", "packaging")
_DOWNLOAD = "pip download --only-binary=:all: --no-deps -d wheels"
_PLATFORMS = " ".join(f"--platform manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014"))


def missing() -> str:
    """What is missing or of another version, and how it comes to a machine without a network; "" if nothing is."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [need for need in (*project["dependencies"], *_TESTS) if not _is_there(need)]
    if not wanted:
        return ""
    packages = " ".join(f"'{need}'" for need in wanted)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"not installed, or of another version: {packages}\n"
        "Where there is a network, and then here:\n"
        f"  python -m {_DOWNLOAD} --python-version {python} {_PLATFORMS} {packages}\n"
        "  python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=site"
    )


def _is_there(need: str) -> bool:
    """As far as versions can be compared."""
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
