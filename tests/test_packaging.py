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


def test_a_checkout_on_windows_is_the_same_files_and_runs(tmp_path: Path) -> None:
    """Where git writes a symlink as a file that holds its target's name, and would end lines with CR LF."""
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout")
    found: list[dict[str, bytes]] = []
    for flags in (["core.autocrlf=false"], ["core.autocrlf=true", "core.symlinks=false"]):
        folder = tmp_path / str(len(found))
        settings = [word for flag in flags for word in ("-c", flag)]
        subprocess.run(["git", *settings, "checkout-index", "-a", f"--prefix={folder}/"], cwd=ROOT, check=True)
        files = (path for path in folder.rglob("*") if path.is_file())
        found.append({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
    assert found[0] == found[1]
    code = "from localllm.kernels import graph; from localllm.models import registry; print(graph.__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path / "1", capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == tmp_path / "1" / "localllm" / "kernels" / "graph.py"


def test_a_wheel_has_the_sources_and_no_stale_file(tmp_path: Path) -> None:
    """Whatever an earlier build left behind, such as a module that was deleted since."""
    pytest.importorskip("hatchling")
    checkout = tmp_path / "checkout"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests", ".*", "build", "dist")
    shutil.copytree(ROOT, checkout, ignore=left_out)
    for stale in ("build/lib/localllm/stale.py", "dist/stale.py", "localllm/quant/__pycache__/stale.cpython-311.pyc"):
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
    package = (checkout / "localllm").rglob("*")
    files = [path for path in package if path.is_file() and "__pycache__" not in path.parts]
    assert built == {path.relative_to(checkout).as_posix(): path.read_bytes() for path in files}
    assert {"localllm/py.typed", "localllm/data/demo.gguf", "localllm/tui/chat.tcss"} <= set(built)
    assert "localllm/kernels/cuda/common.cuh" in built
