"""What of the packages that a run needs is not installed; nothing here needs one of them.

    python -m tests.benchmarks.gpu.installed FOLDER [VERSION]

collects them, where there is a network, with all that they need, as wheels for Linux and that version of Python (or
this one).  On the machine with the GPU, `pip install --no-index --no-deps --target site FOLDER/*.whl` installs them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Beside the project's dependencies.
_TESTS = ("pytest", "pytest-timeout", "hypothesis", "packaging")
_PLATFORMS = [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014")]
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def needs() -> list[str]:
    """The project's dependencies, those for GPUs, and its tests'."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *_TESTS, *project["optional-dependencies"]["cuda12"]]


def missing() -> str:
    """What is missing or of another version, and how it comes to a machine without a network; "" if nothing is."""
    wanted = [need for need in needs() if not re.match("cupy|cuda", need) and not _is_there(need)]
    if not wanted:
        return ""
    packages = " ".join(f"'{need}'" for need in wanted)
    return (
        f"not installed, or of another version: {packages}\n"
        "Where there is a network, and then here:\n"
        f"  python -m tests.benchmarks.gpu.installed wheels {_PYTHON}\n"
        "  python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=site"
    )


def collect(folder: str, python: str = _PYTHON) -> int:
    """Downloads all needs as wheels; returns pip's exit code."""
    options = ["--only-binary=:all:", "--dest", folder, "--python-version", python, *_PLATFORMS]
    return subprocess.run([sys.executable, "-m", "pip", "download", *options, *needs()], check=False).returncode


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


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    sys.exit(collect(*sys.argv[1:]))
