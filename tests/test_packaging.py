"""The wheel holds what the folders hold, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from localllm import __version__
from tests.helpers.data import ROOT

ROOMS = ("kernels", "models", "quant", "tui")


def test_a_checkout_without_symlinks_runs(tmp_path: Path) -> None:
    """As on Windows, where git may write them as files that hold their targets' names, and end lines with CR LF."""
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout")
    checkout = tmp_path / "checkout"
    settings = ["-c", "core.autocrlf=true", "-c", "core.symlinks=false"]
    subprocess.run(["git", *settings, "checkout-index", "-a", f"--prefix={checkout}/"], cwd=ROOT, check=True)
    for room in ROOMS:
        assert (checkout / "localllm" / room).read_text() == f"../{room}"
    assert b"\r\n" not in (checkout / "kernels" / "graph.py").read_bytes()
    code = "from localllm.kernels import graph; from localllm.tui import text; print(graph.__file__, text.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(checkout / "kernels" / "graph.py"), str(checkout / "tui" / "text.py")]


def sources(folder: Path, prefix: str) -> dict[str, bytes]:
    """The files of a package, as a wheel names them; rglob does not follow the links to the rooms."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in files}


def test_a_wheel_has_the_sources_and_no_stale_file(tmp_path: Path) -> None:
    """Whatever an earlier build left behind, such as a module that was deleted since."""
    pytest.importorskip("hatchling")
    checkout = tmp_path / "checkout"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests", ".*", "build", "dist")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left_out)
    for stale in ("build/lib/localllm/stale.py", "dist/stale.py", "quant/__pycache__/stale.cpython-311.pyc"):
        path = checkout / stale
        path.parent.mkdir(parents=True)
        path.write_text("stale = True\n")
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(tmp_path)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    name = done.stdout.split()[-1]
    assert name.startswith(f"localllm-{__version__}-")
    with zipfile.ZipFile(tmp_path / name) as wheel:
        built = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    expected = sources(checkout / "localllm", "localllm")
    for room in ROOMS:
        expected |= sources(checkout / room, f"localllm/{room}")
    assert built == expected
    assert {"localllm/py.typed", "localllm/data/demo.gguf", "localllm/tui/chat.tcss"} <= set(built)
    assert "localllm/kernels/cuda/common.cuh" in built
