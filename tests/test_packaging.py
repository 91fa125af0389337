"""The wheel contains exactly the files of the folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from localllm import __version__
from tests.helpers.data import ROOT

ROOMS = ("kernels", "models", "quant", "tui")


def test_a_checkout_without_symlinks_runs(tmp_path: Path) -> None:
    """On Windows, git may write symbolic links as files that contain the link's target, and end lines with CR LF."""
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


def test_dependencies_exclude_versions_with_known_vulnerabilities() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    requirements = {requirement.name: requirement for requirement in map(Requirement, texts)}
    vulnerabilities = tomllib.loads((ROOT / "tests/data/vulnerabilities.toml").read_text("utf-8"))
    assert vulnerabilities.keys() <= requirements.keys()
    for name, first_fixed in vulnerabilities.items():
        for version in first_fixed:
            (bound,) = (part.version for part in requirements[name].specifier if part.operator == ">=")
            assert Version(bound) >= Version(version), f"{name} before {version}: {first_fixed[version]}"


def sources(folder: Path, prefix: str) -> dict[str, bytes]:
    """Return the files of a package by their names in a wheel; rglob does not follow the links to other folders."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in files}


def build(kind: str, folder: Path, into: Path) -> str:
    """Build a wheel or a source distribution from a folder and return its name."""
    code = f"import sys; from hatchling.build import build_{kind}; print(build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(into)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split()[-1]


def test_a_source_distribution_gives_the_same_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    with tarfile.open(tmp_path / build("sdist", ROOT, tmp_path)) as archive:
        archive.extraction_filter = lambda member, path: member  # Python 3.11.2 ignores this; 3.12 warns without it
        archive.extractall(tmp_path)
    names = []
    for source in (ROOT, tmp_path / f"localllm-{__version__}"):
        with zipfile.ZipFile(tmp_path / build("wheel", source, tmp_path)) as wheel:
            names.append({name: wheel.read(name) for name in wheel.namelist() if not name.endswith("RECORD")})
    assert names[0] == names[1]
    assert "localllm/models/llama.py" in names[1]


def test_the_container_serves_as_a_user_without_home_and_reports_its_health(tmp_path: Path) -> None:
    """Run the commands of ``Containerfile`` in this environment."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", "")
    entry, health = (json.loads(re.search(rf"{word}.*?(\[.*\])", text)[1]) for word in ("ENTRYPOINT", "HEALTHCHECK"))  # type: ignore[index]
    copied = {path.name for path in ROOT.iterdir()} & {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()
    }
    assert {"localllm", "pyproject.toml", "README.md", "LICENSE", *ROOMS} <= copied
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    assert entry[0] == "localllm"
    command = [sys.executable, "-m", *entry, "--port", port, "--api-key", "k"]
    check = [sys.executable, *(word.replace("8080", port) for word in health[1:])]
    environment = os.environ | {"HOME": "/nonexistent", "LOCALLLM_CACHE": str(tmp_path)}
    with subprocess.Popen(command, env=environment, cwd=tmp_path) as server:
        try:
            end = time.monotonic() + 60
            while subprocess.run(check, stderr=subprocess.DEVNULL, check=False).returncode:
                assert time.monotonic() < end
                assert server.poll() is None
                time.sleep(0.2)
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0
    assert subprocess.run(check, stderr=subprocess.DEVNULL, check=False).returncode


def test_a_wheel_has_the_sources_and_no_stale_file(tmp_path: Path) -> None:
    """The wheel omits files of earlier builds, such as modules deleted since."""
    pytest.importorskip("hatchling")
    checkout = tmp_path / "checkout"
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests", ".*", "build", "dist")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left_out)
    for stale in ("build/lib/localllm/stale.py", "dist/stale.py", "quant/__pycache__/stale.cpython-311.pyc"):
        path = checkout / stale
        path.parent.mkdir(parents=True)
        path.write_text("stale = True\n")
    name = build("wheel", checkout, tmp_path)
    assert name.startswith(f"localllm-{__version__}-")
    with zipfile.ZipFile(tmp_path / name) as wheel:
        built = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    expected = sources(checkout / "localllm", "localllm")
    for room in ROOMS:
        expected |= sources(checkout / room, f"localllm/{room}")
    assert built == expected
    assert {"localllm/py.typed", "localllm/data/demo.gguf", "localllm/tui/chat.tcss"} <= set(built)
    assert "localllm/kernels/cuda/common.cuh" in built
