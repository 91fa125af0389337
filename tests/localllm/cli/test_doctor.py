"""``localllm doctor``: it reports the machine, faults and remedies, and never fails itself."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.commands import doctor
from localllm.cli.commands.doctor import CUDA_PACKAGES, PACKAGES, Finding, findings, nvidia_gpus
from localllm.cli.main import main
from localllm.errors import DeviceError
from localllm.kernels.cpu import thread_choice
from localllm.kernels.cpu.target import available
from localllm.kernels.cpu.thread_choice import ThreadChoice
from localllm.kernels.cuda import cupy_driver, installation
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.helpers.command_line import Outcome, run_main
from tests.helpers.data import ROOT

Doctor = Callable[..., Outcome]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Doctor:
    return lambda *flags: run_main(capfdbinary, "doctor", *flags)


@pytest.fixture(autouse=True)
def own_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALLLM_ISA", raising=False)


def found(name: str, group: str | None = None) -> Finding:
    [finding] = [f for f in findings() if f.name == name and group in (None, f.group)]
    return finding


def test_it_finds_what_is_here(run: Doctor) -> None:
    outcome = run("--json")
    report = json.loads(outcome.out)
    assert (outcome.code, outcome.err, report["ok"]) == (0, "", True)
    values = {(f["group"], f["name"]): f["value"] for f in report["findings"]}
    for distribution in PACKAGES:
        assert values["packages", distribution] == importlib.metadata.version(distribution)
    names = [target.name for target in available()]
    assert values["processor", "instruction sets"] == ", ".join(names)
    assert values["processor", "kernels for"] == names[0]
    assert values["processor", "processor"]
    assert values["kernels", "kernel test"].startswith("passed")
    assert str(ROOT) in values["software", "localllm"]
    assert not any(f["broken"] for f in report["findings"])


def test_the_report_for_people(run: Doctor) -> None:
    outcome = run("-v")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[-1] == "localllm can run here"
    assert [line for line in lines if line and line[0] not in "x! "][:-1] == [
        *("software", "packages", "processor", "kernels", "memory", "GPUs"),
    ]
    brief = run().out.splitlines()
    assert brief[-1] == lines[-1]
    assert len(brief) <= 16
    assert {line.split()[0] for line in brief if line} >= {"localllm", "Python", "processor", "cores", "memory"}


def test_devices_alone(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(cupy_driver, "open_driver", EmulatedDriver)
    for line in (["--list-devices"], ["generate", "--list-devices"]):
        assert main(line) == 0
    outcome = run("--list-devices")
    cpu, gpu = outcome.out.splitlines()[-2:]
    assert cpu.startswith("cpu     ")
    assert re.match(r"cuda:0  .*, .*B of memory free$", gpu)


def test_every_dependency_is_looked_at() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[>=\[]", requirement)[0] for requirement in project["dependencies"]}
    assert required | {"llvmlite"} == set(PACKAGES)  # llvmlite comes with numba
    extras = project["optional-dependencies"]
    for (cupy, toolkit), extra in zip(CUDA_PACKAGES, ("cuda13", "cuda12"), strict=True):
        assert extras[extra] == [f"{cupy}>=14", toolkit]


def test_a_missing_package(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import, real_version = importlib.import_module, importlib.metadata.version

    def broken_import(name: str, *more: Any) -> Any:
        if name == "tokenizers":
            raise ImportError("libfoo.so: cannot open shared object file")
        if name == "sentencepiece":
            raise ModuleNotFoundError("No module named 'sentencepiece'")
        return real_import(name, *more)

    def version(name: str) -> str:
        if name == "sentencepiece":
            raise importlib.metadata.PackageNotFoundError
        return real_version(name)

    monkeypatch.setattr(importlib, "import_module", broken_import)
    monkeypatch.setattr(importlib.metadata, "version", version)
    outcome = run()
    assert outcome.code == 1
    text = " ".join(outcome.out.split())
    assert f"x sentencepiece missing -> {sys.executable} -m pip install sentencepiece" in text
    assert "which cannot be imported (ImportError: libfoo.so: cannot open shared object file)" in text
    assert "-m pip install --force-reinstall tokenizers" in text
    assert outcome.out.splitlines()[-1] == "localllm cannot run here: 2 of these are broken (x)"


def test_a_forced_instruction_set(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    best = available()[0].name
    monkeypatch.setenv("LOCALLLM_ISA", best)
    chosen = found("kernels for")
    assert (chosen.value, chosen.advice is None) == (f"{best}, forced by LOCALLLM_ISA", best != "generic")
    if best != "generic":
        monkeypatch.setenv("LOCALLLM_ISA", "generic")
        chosen = found("kernels for")
        assert chosen.value == "generic, forced by LOCALLLM_ISA"
        assert chosen.advice is not None
        assert "unset the environment variable LOCALLLM_ISA" in chosen.advice


def test_an_instruction_set_that_is_not_there(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_ISA", "mmx")
    outcome = run("-v")
    assert outcome.code == 1
    assert "there is no instruction set called 'mmx'" in outcome.out
    assert "-> unset the environment variable LOCALLLM_ISA" in outcome.out
    assert "kernel test       not run: there is no instruction set to compile for" in outcome.out
    assert "default threads" not in outcome.out
    assert "1 of these is broken" in outcome.out.splitlines()[-1]


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("LOCALLLM_CACHE", str(file / "cache"))
    cache = found("cache")
    assert "cannot be written" in cache.value
    assert cache.advice is not None
    assert "LOCALLLM_CACHE" in cache.advice
    assert not cache.broken


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.kernels.code_cache.cache_root", lambda: None)
    cache = found("cache")
    assert cache.value.endswith("(this user has no home): every process compiles the kernels again")


def test_kernels_that_compute_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.kernels.cpu.roofline.ReadTest.total", lambda test: 0)
    test = found("kernel test")
    assert (test.value, test.broken) == ("a kernel computed a wrong result", True)


def test_kernels_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("LLVM ERROR: no such thing")

    monkeypatch.setattr("localllm.kernels.cpu.roofline.ReadTest.__init__", fail)
    monkeypatch.setattr(thread_choice, "choose_threads", fail)
    [broken] = [finding for finding in findings() if finding.broken]
    assert (broken.name, broken.value) == ("kernel test", "failed: RuntimeError: LLVM ERROR: no such thing")


def test_features_are_those_that_kernels_use_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    present = frozenset({"neon", "dotprod", "i8mm", "bf16", "fullfp16", "crc"})
    monkeypatch.setattr("localllm.kernels.cpu.host.features", lambda: present)
    assert found("features").value == "neon, dotprod, i8mm; not used: fullfp16, bf16"
    monkeypatch.setattr("localllm.kernels.cpu.host.features", lambda: frozenset({"avx2"}))
    assert found("features").value == "avx2"


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.kernels.cpu.host.available_memory", lambda: 10_000_000)
    memory = found("memory", "memory")
    assert ", 10 MB available" in memory.value
    assert memory.advice is not None


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("/proc is missing")

    monkeypatch.setattr(doctor.host, "cpu_model", fail)
    check = found("check", "processor")
    assert (check.value, check.broken) == ("failed: OSError: /proc is missing", True)
    assert found("memory", "memory")


def test_a_quota_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cpu_quota", lambda: 1.5)
    assert found("default threads").value.endswith("limits this process to 1.5 processors)")
    monkeypatch.setattr(doctor, "cpu_quota", lambda: None)
    assert found("default threads").value.endswith(" for prompts")


def test_the_curve_of_the_threads_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = ThreadChoice(2, 4, ((1, 1e10), (2, 1.9e10), (4, 2e10)), 1e9)
    monkeypatch.setattr(thread_choice, "choose_threads", lambda *_: choice)
    assert found("default threads").value.startswith("2 to decode, 4 for prompts")
    curve = found("decoded by threads")
    assert curve.value.startswith("1: 10 GB/s, 2: 19 GB/s, 4: 20 GB/s (measured 2001-09-0")
    assert curve.advice is None
    monkeypatch.setattr(thread_choice, "choose_threads", lambda *_: replace(choice, other_cpus=1.5))
    advice = found("decoded by threads").advice
    assert advice is not None
    assert "other programs kept 1.5 processors busy" in advice
    monkeypatch.setattr(thread_choice, "choose_threads", lambda *_: ThreadChoice(1, 1))
    assert "decoded by threads" not in [finding.name for finding in doctor.findings()]


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "NVIDIA H100 80GB HBM3, 555.42, 81559 MiB\nNVIDIA H100 80GB HBM3, 555.42, 81559 MiB\nFailed: x"
    monkeypatch.setattr(doctor.host, "program_output", lambda *command: listing if command[0] == "nvidia-smi" else "")
    assert nvidia_gpus() == listing.splitlines()[:2]
    monkeypatch.setattr(doctor, "_version", {}.get)
    gpus = list(doctor._gpus())
    assert [f.value for f in gpus] == listing.splitlines()[:2]
    assert all(f.advice is not None and "cupy-cuda13x" in f.advice and not f.broken for f in gpus)
    advice = doctor._gpu_advice()
    assert advice is not None
    assert 'install cupy-cuda13x "cuda-toolkit[nvrtc,cudart]==13.*" (with' in advice
    monkeypatch.setattr(doctor, "_version", {"cupy-cuda12x": "14", "cuda-toolkit": "12"}.get)
    monkeypatch.setattr(doctor, "check_gpus", lambda: None)
    assert [f.advice for f in doctor._gpus()] == [None, None]


def test_gpus_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.host, "program_output", lambda *_: "NVIDIA H100 80GB HBM3, 555.42, 81559 MiB")
    monkeypatch.setattr(doctor, "_version", {"cupy-cuda13x": "14", "cuda-toolkit": "13"}.get)
    monkeypatch.setattr(installation, "driver_cuda", lambda: (11, 8))
    [gpu] = doctor._gpus()
    assert gpu.advice is not None
    assert gpu.advice.startswith("no CUDA device can be used: NVIDIA's driver here runs CUDA up to 11.8")
    assert gpu.advice.endswith("or use --device cpu")


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_driver, "open_driver", lambda: EmulatedDriver(capability=(7, 0)))
    with pytest.raises(DeviceError, match=r"has compute capability 7\.0"):
        doctor.check_gpus()


def test_a_driver_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "nvidia_gpus", list)
    monkeypatch.setattr(doctor, "has_nvidia_driver", lambda: True)
    assert found("NVIDIA driver").value == "installed, but nvidia-smi lists no GPU"
    monkeypatch.setattr(doctor, "has_nvidia_driver", lambda: False)
    assert found("NVIDIA GPU").value.startswith("none found")
