"""The run of a GPU's checks in minutes: packing, and each section in a process of its own, on emulated devices."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from localllm.kernels.cuda.backend import CUDABackend
from localllm.quant.types import GGMLType
from tests.benchmarks.gpu import families, layers, pack, quick
from tests.benchmarks.gpu.report import read
from tests.benchmarks.gpu.sections import Row, run
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.helpers.data import ROOT
from tests.helpers.recorder import CPUOps
from tests.helpers.run_model import Runner
from tests.helpers.tiny_models import tiny_gguf


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its logits, a kernel, and a wheel."""
    skip_without_tools()
    folder = tmp_path_factory.mktemp("packed")
    path = tiny_gguf(folder / "llama.gguf", type=GGMLType.Q4_0, head_dim=16, num_hidden_layers=1)
    runner = Runner(path, CPUOps(threads=1))
    whole, other = (runner.logits(ids) for ids in families.texts())
    np.savez(path.with_suffix(".npz"), whole=whole, other=other)
    with zipfile.ZipFile(folder / families.MODELS, "w") as archive:
        for each in (path, path.with_suffix(".npz")):
            archive.write(each, each.name)
            each.unlink()
    (folder / families.MODULES).write_text(json.dumps([["ceilings", {}]]))
    write_wheel(folder / "wheels", "packed_here", "1.0", {"packed_here.py": "VALUE = 7\n"})
    return folder


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str], needs: Sequence[str] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
    return path


def test_a_whole_run(packed: Path, tmp_path: Path) -> None:
    """The script starts as a file in another folder, and each section is a process."""
    script = ROOT / "tests" / "benchmarks" / "gpu" / "quick.py"
    words = ["run", str(packed), "--out", "out", "--emulated", "--steps", "environment,compile,families,attention"]
    done = subprocess.run([sys.executable, script, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *lines = read(tmp_path / "out")
    assert head["command"].endswith("--steps environment,compile,families,attention")
    rows = {line["section"]: line["row"] for line in lines if "row" in line}
    assert list(rows) == ["environment", "compile", "families", "attention"]
    assert (rows["compile"]["modules"], rows["families"]["model"]) == (1, "llama")
    assert 0 < rows["families"]["error"] < families.LIMIT
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gpu.md", "gpu.jsonl", "log.txt"}
    assert "===== attention: output.txt" in (tmp_path / "out" / "log.txt").read_text()


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> quick.Steps:
    """Steps whose processes run a program `tests.benchmarks.gpu` in another folder."""
    (tmp_path / "tests" / "benchmarks").mkdir(parents=True)
    monkeypatch.setattr(quick, "ROOT", tmp_path)
    return quick.Steps(tmp_path, tmp_path / "log.txt", (), {})


def program(folder: Path, source: str) -> None:
    text = f"""
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--out") + 1])
def write(*lines):
    (folder / "gpu.new").write_text("".join(json.dumps(line) + "\\n" for line in ({{"date": ""}}, *lines)))
    (folder / "gpu.new").rename(folder / "gpu.jsonl")
{source}
"""
    (folder / "tests" / "benchmarks" / "gpu.py").write_text(text)


@pytest.mark.parametrize(
    ("source", "rows", "note", "fault"),
    [
        ("write({'section': 'a', 'row': {'x': 1}})", [{"x": 1}], "", ""),
        ("write({'section': 'a', 'row': {'fault': 'f'}}); sys.exit(1)", [{"fault": "f"}], "", "f"),
        ("write({'note': 'stopped after 3 s'})", [{"note": "stopped after 3 s"}], "", ""),
        (
            "write({'section': 'a', 'row': {'x': 1}}); print('lost'); sys.exit(9)",
            [{"x": 1}],
            "exit code 9: lost",
            "9",
        ),
        ("write({'note': 'failed: x'}); sys.exit(1)", [], "failed: x", "failed: x"),
        ("raise MemoryError('none')", [], "MemoryError: none", "MemoryError"),
    ],
)
def test_steps_that_end(
    steps: quick.Steps, tmp_path: Path, source: str, rows: list[Row], note: str, fault: str
) -> None:
    program(tmp_path, source)
    found = run(steps.section(quick.Step("a", 1)), 60, lambda found: None)
    assert found.rows == rows
    assert note in found.note
    assert fault in "".join(found.faults)
    assert bool(fault) == bool(found.faults)


def test_a_step_that_hangs(steps: quick.Steps, tmp_path: Path) -> None:
    """Its rows are kept, and its children are killed."""
    child = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])"
    program(
        tmp_path, f"write({{'section': 'a', 'row': {{'x': 1}}}}); {child}; print('busy', flush=True); time.sleep(100)"
    )
    begin = time.monotonic()
    found = run(steps.section(quick.Step("a", 1)), 4, lambda found: None)
    assert time.monotonic() - begin < 60
    assert found.rows == [{"x": 1}]
    assert found.note == "failed: RuntimeError: killed after 4 s: busy"


def test_without_a_gpu(steps: quick.Steps, tmp_path: Path) -> None:
    """The first step reports it, and the others are skipped."""
    program(tmp_path, "print('there is no GPU'); sys.exit(2)")
    first, second = (run(steps.section(quick.Step(name, 1)), 60, lambda found: None) for name in "ab")
    assert first.faults == ["a: failed: RuntimeError: there is no GPU"]
    assert (second.rows, second.faults) == ([{"note": "skipped: no GPU can be used"}], [])
    assert steps.reason == "there is no GPU"


def test_the_site_folder(packed: Path, tmp_path: Path) -> None:
    """It has the wheels' modules, and a package `tests` that wins against an installed one."""
    quick.unpack(packed, tmp_path / "site")
    (tmp_path / "other" / "tests").mkdir(parents=True)
    (tmp_path / "other" / "tests" / "__init__.py").write_text("")
    code = "import packed_here, tests.benchmarks.gpu.sections as s; print(packed_here.VALUE, s.__file__)"
    path = f"{tmp_path / 'site'}:{tmp_path / 'other'}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"7 {ROOT / 'tests' / 'benchmarks' / 'gpu' / 'sections.py'}\n"


@pytest.mark.parametrize(
    "words", [["run", "--steps", "banana"], ["run", "--minutes", "nan"], ["run", "missing"], ["pack"]]
)
def test_invalid_arguments(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quick.main(words)


# -- Packing -------------------------------------------------------------------------------------------------------


def wheel(name: str, *requirements: str) -> pack.Wheel:
    return pack.Wheel(name, Version("1.5"), tuple(map(Requirement, requirements)))


@pytest.mark.parametrize(
    ("needs", "wheels", "said"),
    [
        (["a"], [wheel("a", "b", "numpy>=2"), wheel("b")], []),
        (["a"], [wheel("a", "b")], ["a needs b, but the wheels have none"]),
        (["a>=2"], [wheel("a")], ["localllm needs a>=2, but the wheels have 1.5"]),
        (
            ["a[x]"],
            [wheel("a", "b; extra == 'x'", "c; extra == 'y'")],
            ['a needs b; extra == "x", but the wheels have none'],
        ),
        (["a"], [wheel("a", "b; python_version < '3.12'", "c; sys_platform == 'win32'")], []),
        (["a"], [wheel("a", "b"), wheel("b", "a")], []),
        (
            ["a"],
            [wheel("a"), wheel("a")],
            ["a package has two versions among the wheels: remove the folder, and pack again"],
        ),
    ],
)
def test_packages_that_the_wheels_lack(needs: list[str], wheels: list[pack.Wheel], said: list[str]) -> None:
    assert list(pack.missing(wheels, needs)) == said


def test_requirements_of_a_wheel(tmp_path: Path) -> None:
    path = write_wheel(tmp_path / "wheels", "Some_Name", "2.0", {}, ["other>=1"])
    assert pack._wheel(path) == pack.Wheel("some-name", Version("2.0"), (Requirement("other>=1"),))


def test_the_list_of_kernels(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the modules of tiny models and of sections, as a card of the expected kind loads them."""
    with zipfile.ZipFile(packed / families.MODELS) as archive:
        archive.extractall(tmp_path)
    for name in ("machine.ceilings", "models.models", "kernels.products", "kernels.attention"):
        monkeypatch.setattr(f"tests.benchmarks.gpu.{name}", lambda devices: iter(()))
    seen: list[Any] = []

    def layer(devices: Any) -> Iterator[Row]:
        seen.append((devices.make_backend, devices.driver.properties(0).capability))
        devices.driver.load_module(0, "recurrent", {"ROWS": 1})
        yield {}

    monkeypatch.setattr(layers, "layers", layer)
    monkeypatch.setattr(pack, "random_gguf", lambda path, *_: path.touch() or path)
    monkeypatch.setattr(pack, "counted", SimpleNamespace(main=lambda *_: None))
    found = pack.modules([tmp_path / "llama.gguf"])
    assert seen == [(CUDABackend, (9, 0))]
    assert ("recurrent", {"ROWS": 1}) in found
    assert {"matmul_few", "attention", "append", "embed"} <= {name for name, _ in found}
    assert json.loads(json.dumps(found)) == [list(each) for each in found]
