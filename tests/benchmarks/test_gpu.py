"""The GPU benchmark on emulated devices: every section yields rows, and errors are reported."""

from __future__ import annotations

import ctypes
import errno
import re
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest

import localllm
from localllm.errors import DeviceError, KernelError, NotEnoughMemoryError
from localllm.kernels.cuda import prediction
from localllm.kernels.cuda.step import CUDAStep
from tests.benchmarks import theirs
from tests.benchmarks.gpu import correctness, counted, early, installed, kernels, layers, machine, models, predict
from tests.benchmarks.gpu.installed import missing
from tests.benchmarks.gpu.report import markdown, read
from tests.benchmarks.gpu.run import _PACKED, SHARES, main
from tests.benchmarks.gpu.sections import Found, Row, Section, escape_controls, run, run_all
from tests.benchmarks.results import QUANTISED_TOLERANCE
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.helpers.synthetic import SHAPES, gguf_bytes, random_gguf
from tests.kernels.cuda.watched import KernellessDriver


@pytest.fixture(autouse=True)
def harness() -> None:
    skip_without_tools()


def test_a_run_on_emulated_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [name for name in SHARES if name not in ("tests", "sanitizer", "processes", *_PACKED)]
    assert main(["--emulated", "--out", str(tmp_path / "new"), "--sections", ",".join(chosen)]) == 0
    _, err = capsys.readouterr()
    assert err == ""
    head, *lines = read(tmp_path / "new")
    assert head["card"] == "emulated GPU, emulated GPU"
    assert head["command"].startswith("python -m tests.benchmarks.gpu --emulated")
    sections = rows_of(lines)
    assert list(sections) == chosen
    assert all(sections.values())
    assert {line["note"] for line in lines if "note" in line} == {""}
    (product,) = sections["products"]
    assert (product["kernel"], product["format"], product["rows"]) == ("linear qkv", "Q4_0", 1)
    assert product["floor, us"] < product["hoped for, us"]
    assert [row["format"] for row in sections["attention"]] == ["f16", "f16", "q8_0", "q8_0"]
    assert {"causal conv", "recurrence"} <= {row["call"] for row in sections["layers"]}
    found = {row["test"].partition(":")[0] for row in sections["models"]}
    assert {"pp20", "3 replays, the same bits", "tg2 @ d5", "2 sequences", "tg2 @ d5, a step", "worst 5"} <= found
    (compared,) = sections["cpu"]
    assert 0 < compared["error"] < QUANTISED_TOLERANCE
    whats = [row["what"] for row in sections["several"]]
    assert whats[:3] == ["copy from cuda:0 to cuda:1", "copy from cuda:1 to cuda:0", "q4_0 on cuda:0"]
    text = (tmp_path / "new" / "gpu.md").read_text()
    assert all(f"## {name} (" in text for name in chosen)
    assert text.endswith("No faults.\n")


def rows_of(lines: Sequence[dict[str, Any]]) -> dict[str, list[Row]]:
    """Return the rows of each section of gpu.jsonl."""
    titles = dict.fromkeys(line["section"] for line in lines)
    return {title: [line["row"] for line in lines if line["section"] == title and "row" in line] for title in titles}


def test_wrong_outputs_are_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    download = CUDAStep.download
    monkeypatch.setattr(CUDAStep, "download", lambda self, n: download(self, n) * np.float32(1.1))
    assert main(["--emulated", "--out", str(tmp_path), "--sections", "products,attention"]) == 1
    faults = capsys.readouterr().err.splitlines()
    assert len(faults) == 5
    assert re.fullmatch(r"fault: linear qkv, Q4_0, 1: the error is 1\.0e-01, more than 0\.001", faults[0])
    assert (tmp_path / "gpu.md").read_text().count("\n- linear qkv") == 1


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DeviceError("no driver is installed"), 2, "there is no GPU to measure: no driver is installed\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C before anything was measured\n"),
    ],
)
def test_errors_before_the_first_measurement(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "open_driver", mock.Mock(side_effect=error))
    assert main([]) == code
    assert capsys.readouterr().err == text


def test_a_gpu_that_other_programs_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine.emulated(tmp_path) as devices:
        rows = [{row["what"]: row["value"] for row in machine.environment(devices)}]
        monkeypatch.setattr(machine, "_OWN_BYTES", -1)
        rows += [{row["what"]: row["value"] for row in machine.environment(devices)}]
    assert [row["cuda:1"].partition(" GB free")[2] for row in rows] == ["", machine._OTHERS]


def test_models_that_do_not_fit_leave_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = localllm.load

    def refuse(path: Path, **options: Any) -> Any:
        if path.name == "q4_0.gguf":
            raise NotEnoughMemoryError("too large")
        return load(path, **options)

    monkeypatch.setattr("localllm.load", refuse)
    with machine.emulated(tmp_path) as devices:
        rows = list(models.models(devices))
    assert [row["test"] for row in rows] == ["written", "skipped: too large"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sections", "ceilings,banana"], "unknown section 'banana'; choose from environment, compile, "),
        (["--sections", ""], "unknown section ''"),
        (["--sanitizer", "valgrind"], "unknown tool of compute-sanitizer 'valgrind'; choose from memcheck, "),
        (["--types", "q4_0,q4"], "unknown file type 'q4'; choose from f16, bf16, q4_0, "),
        (["--sections", "families"], "sections that need --packages: families; see "),
        (["--minutes", "0"], "--minutes is 0, but must be a number above 0"),
        (["--minutes", "nan"], "--minutes is nan, but must be a number above 0"),
        (["--minutes", "inf"], "--minutes is inf, but must be a number above 0"),
    ],
)
def test_invalid_arguments_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(said)


def test_results_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The check comes before any measurement."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/localllm")):
        assert main(["--emulated", "--out", str(folder)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("the results cannot be written: ")
        assert err.endswith("free space, or choose another folder with --out\n")


def test_a_disk_that_fills_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(Path, "write_text", full)
        assert main(["--emulated", "--out", str(tmp_path), "--sections", "environment"]) == 2
    assert capsys.readouterr().err.startswith("the results cannot be written: [Errno 28] No space left on device; ")


def test_a_disk_without_space_for_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check comes before any file is written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert main(["--emulated", "--sections", "environment,several"]) == 2
    assert capsys.readouterr().err == (
        f"the models take up to 0.0 GB on the disk, but {tmp_path} has 0.0 GB free: set TMPDIR to another folder, or "
        "omit the sections models, variants and several\n"
    )
    assert not list(tmp_path.iterdir())
    assert main(["--emulated", "--sections", "environment", "--out", str(tmp_path)]) == 0


def test_the_size_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = random_gguf(tmp_path / "model.gguf", machine.TINY.model, "q4_0")
    tensors = models.largest_file(machine.TINY)
    assert tensors <= path.stat().st_size < tensors + 50_000
    assert 2e9 < models.largest_file(machine.FULL) < 4e9
    monkeypatch.setattr(theirs, "has_gpu", lambda: True)
    assert 15e9 < models.largest_file(machine.FULL) == models.largest_file(machine.FULL, whole=True) < 17e9


def test_ctrl_c(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are written, and model files are removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupted(*_: object, **__: object) -> None:
        assert any(tmp_path.rglob("*.gguf"))
        raise KeyboardInterrupt

    monkeypatch.setattr("localllm.load", interrupted)
    out = tmp_path / "out"
    assert main(["--emulated", "--sections", "environment,models,several", "--out", str(out)]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    _, *lines = read(out)
    assert list(rows_of(lines)) == ["environment", "models"]
    assert rows_of(lines)["environment"]
    assert lines[-1]["note"] == "stopped by Ctrl-C: the rest was skipped"
    assert capsys.readouterr().err == ""


def test_every_format_and_size_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on emulated devices, with small matrices and kernels that do nothing."""
    small = replace(
        machine.FULL,
        products=tuple((name, (64,) * len(n_outs), 256) for name, n_outs, _ in machine.FULL.products),
        copied=1 << 16,
        heads=(4, 2, 16),
        decode=((1, 512), (8, 64)),
        prefill=(512,),
        chunks=((64, 512),),
        layers={
            **machine.FULL.layers,
            "Qwen 3's experts": (64, partial(layers.mixture, n_experts=128, k=8, n_ff=64)),
        },
        batches=((1, 1, 64), (8, 1, 64), (1, 64, 512)),
        model=replace(machine.TINY.model, n_embd=256, n_ff=512, context_length=4096),
        prompts=(512, 600),
        generated=4,
        replays=3,
        depth=64,
        sequences=4,
        transferred=1 << 16,
    )
    driver = KernellessDriver(2, memory=1 << 30)
    monkeypatch.setattr("localllm.kernels.cuda.cupy_driver.open_driver", lambda: driver)
    with machine.emulated(tmp_path, driver) as devices:
        devices = replace(devices, sizes=small)
        for find in (machine.ceilings, kernels.products, kernels.attention, layers.layers, models.several):
            assert list(find(devices))
        rows = list(models.models(devices))
    assert {row["model"] for row in rows} == set(machine.FULL.file_types)
    assert not list(tmp_path.iterdir())


def test_predictions() -> None:
    """A token reads all weights except the embedding table once; a second GPU adds only the hand-over."""
    shape, card = SHAPES["llama-8b"], predict.CARDS[0]
    table = 144 / 256 * shape.n_vocab * shape.n_embd
    token = predict.total(predict.Model(card, 1, 64).predict(1, 1, 1))
    assert token.n_bytes == pytest.approx(gguf_bytes(shape, "q4_k_m") - table, rel=0.01)
    assert token.seconds > token.n_bytes / card.rates.copy + token.n_launches * prediction.GAP
    one, two = (predict.decode(card, 1, 512, n_gpus) for n_gpus in (1, 2))
    assert 1 / two["tok/s"] - 1 / one["tok/s"] == pytest.approx(prediction.HANDOVER)
    assert predict.decode(card, 32, 32768, 1)["tok/s"] == "does not fit"
    assert predict.decode(card, 32, 32768, 2, rows=True)["tok/s"] > predict.decode(card, 32, 32768, 2)["tok/s"]
    for each in predict.CARDS:
        assert predict.prefill(each, 512, 2)["tok/s"] > predict.prefill(each, 512, 1)["tok/s"]
    assert predict.prefill(card, 4096, 1)["launches"] == 2 * predict.prefill(card, 2048, 1)["launches"]


# -- Sections ------------------------------------------------------------------------------------------------------


def test_other_sections_run_after_a_failure() -> None:
    def fails(seconds: float) -> Iterator[Row]:
        yield {"x": 1}
        raise ValueError("no luck")

    said: list[str] = []
    sections = [Section("a", fails, 1), Section("b", lambda seconds: iter([{"y": 2, "fault": "wrong"}]), 1)]
    saved: list[list[int]] = []
    first, second = run_all(sections, 10, said.append, lambda found: saved.append([len(each.rows) for each in found]))
    assert saved == [[1], [1], [1, 1], [1, 1]], "saved after each row and each section"
    assert (first.rows, first.faults) == ([{"x": 1}], ["a: failed: ValueError: no luck"])
    assert (second.rows, second.faults) == ([{"y": 2, "fault": "wrong"}], ["wrong"])
    assert "failed: ValueError: no luck" in said


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section finishes its current row; later sections are skipped."""
    clock = iter(range(100))
    monkeypatch.setattr("tests.benchmarks.gpu.sections.time.monotonic", lambda: next(clock))
    given: list[float] = []

    def endless(seconds: float) -> Iterator[Row]:
        given.append(seconds)
        while True:
            yield {"x": 1}

    found = run(Section("a", endless, 1), 2.5, lambda found: None)
    assert given == [2.5]
    assert len(found.rows) == 3
    assert found.note == "stopped after 2 s: the rest was skipped"
    assert not found.faults
    assert run(Section("a", endless, 1), -1, lambda found: None).note.startswith("skipped")


def test_sections_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.gpu.sections.time.monotonic", lambda: 0.0)
    given: list[float] = []

    def note(seconds: float) -> Iterator[Row]:
        given.append(seconds)
        yield {}

    run_all([Section("a", note, 1), Section("b", note, 3)], 8, lambda line: None, lambda found: None)
    assert given == [2, 8], "the second section gets the remaining time"


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() == []
    monkeypatch.setattr(installed, "TESTS", ("no-such-package>=2", "pytest<1"))
    assert missing() == ["no-such-package>=2", "pytest<1"]


def test_the_tables() -> None:
    found = Found("numbers", [{"a": "x|y", "b": 1234.5}, {"b": 0.00012, "c": True}], 3.2, ["bad"])
    text = markdown({"date": "today"}, [found, Found("none", note="left out")])
    assert "- date: today" in text
    assert "## numbers (3 s)\n\n| a | b | c |\n| --- | --- | --- |\n| x/y | 1,234 |  |\n|  | 0.00012 | True |" in text
    assert text.endswith("## none (0 s)\n\nleft out\n\n## Faults\n\n- bad\n")
    assert escape_controls(7) == "7"


# -- Tests, and compute-sanitizer ----------------------------------------------------------------------------------

SOURCE = "def test_good(): pass\ndef test_bad(): assert 1 == 2\n"


def suites(folder: Path, chosen: str) -> list[tuple[str, tuple[str, ...]]]:
    (folder / "test_some.py").write_text(SOURCE)
    return [("some", (str(folder / "test_some.py"), "--rootdir", str(folder), "-k", chosen))]


@pytest.mark.parametrize(
    ("chosen", "fault"), [("bad", "some: FAILED .*::test_bad - assert 1 == 2$"), ("none", "some: no test ran$")]
)
def test_suites_that_fail(tmp_path: Path, chosen: str, fault: str) -> None:
    (row,) = correctness.run_tests(100, suites(tmp_path, chosen), tmp_path)
    assert re.match(fault, row["fault"])


def test_a_suite_that_takes_too_long(tmp_path: Path) -> None:
    """Its output is kept, and its child processes are killed."""
    sleep = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    (tmp_path / "test_slow.py").write_text(
        f"import subprocess, sys\n\ndef test_it():\n    subprocess.run([sys.executable, '-c', {sleep!r}])\n"
    )
    suite = "some, slow", (str(tmp_path / "test_slow.py"), "--rootdir", str(tmp_path), "-s")
    (row,) = correctness.run_tests(12, [suite], tmp_path)
    assert row == {"tests": "some, slow", "result": "stopped after 12 s: see some-slow.txt"}
    process = int((tmp_path / "some-slow.txt").read_text().split()[0])
    assert not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def test_two_processes(tmp_path: Path) -> None:
    rows = list(correctness.two_processes(100, suites(tmp_path, "good")[0], tmp_path))
    assert [row["tests"] for row in rows] == ["some, process 1", "some, process 2"]
    assert all(row["result"].startswith("1 passed") for row in rows)


def test_the_counters_of_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake ncu that writes a table."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(correctness, "FOLDERS", [])
    with machine.emulated(tmp_path) as devices:
        count = partial(correctness.count, devices, 100, tmp_path)
        (row,) = count()
        assert row["result"] == "not counted: ncu is not on the PATH"
        columns = ["ID", "Kernel Name", "Grid Size", *correctness.METRICS]
        values = [("matvec", "1,000.5", "81"), ("matmul", "4,000", "20"), ("matvec", "2,000.5", "79")]
        table = [columns, ["", "", "", "us", *["%"] * 4]]
        table += [
            [str(i), kernel, "(8, 1, 1)", us, part, "30", "44", "60"] for i, (kernel, us, part) in enumerate(values)
        ]
        tool = tmp_path / correctness.NCU
        text = "==PROF== Connected\n" + "".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in table)
        tool.write_text(
            f"#!{sys.executable}\nimport sys\nopen(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({text!r})\n"
        )
        tool.chmod(0o755)
        first, second = count()
        assert first == {
            "kernel": "matmul",
            "grid": "(8, 1, 1)",
            "launches": 1,
            "time": 4000.0,
            "% of memory": 20.0,
            "% of processors": 30.0,
            "% of warps": 44.0,
            "registers": 60.0,
            "unit of time": "us",
        }
        assert (second["launches"], second["time"], second["% of memory"]) == (2, 1500.5, 80.0)
        (tmp_path / "ncu.csv").unlink()
        tool.write_text(f"#!{sys.executable}\nprint('==ERROR== ERR_NVGPUCTRPERM - no permission')\n")
        (row,) = count()
        assert row == {"kernel": "all", "result": "not counted: the driver permits it only to root; run as root"}
        tool.write_text(f"#!{sys.executable}\n")
        (row,) = count()
        assert row["fault"].startswith("ncu counted nothing")


def test_the_counted_steps(tmp_path: Path) -> None:
    """A prompt and a token run between the start and the stop of the profiler, each by single launches."""
    driver = KernellessDriver(1, memory=1 << 28)
    with machine.emulated(tmp_path, driver) as devices:
        path = random_gguf(tmp_path / "model.gguf", devices.sizes.model, "q4_0")
        profiler = mock.Mock(profilerStart=driver.forget, profilerStop=lambda: counts.update(driver.kernels))
        counts: dict[str, int] = {}
        counted.main(str(path), 20, profiler)
    assert (counts["embed"], counts["attention_split"]) == (2, 2 * devices.sizes.model.n_layers)
    assert not driver.calls["replay"]


def test_tools_outside_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images with the CUDA toolkit have such folders."""
    (tmp_path / "cuda").mkdir()
    tool = tmp_path / "cuda" / correctness.SANITIZER
    tool.write_text(f"#!{sys.executable}\nprint('1 passed')\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(correctness, "FOLDERS", [str(tmp_path / "cuda")])
    (row,) = correctness.sanitize(["memcheck"], 100, suites(tmp_path, "good"), tmp_path)
    assert row == {"tests": "some, memcheck", "result": "1 passed"}


def test_the_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake tool that checks its options and runs the command."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(correctness, "FOLDERS", [])
    (row,) = correctness.sanitize(["memcheck"], 100, suites(tmp_path, "good"), tmp_path)
    assert "compute-sanitizer is not on the PATH" in row["result"]
    tool = tmp_path / correctness.SANITIZER
    tool.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "assert sys.argv[1:6:2] == ['--tool', '--error-exitcode', sys.executable]\n"
        "os.execv(sys.argv[5], sys.argv[5:])\n"
    )
    tool.chmod(0o755)
    (row,) = correctness.sanitize(["racecheck"], 100, suites(tmp_path, "good"), tmp_path)
    assert row["tests"] == "some, racecheck"
    assert row["result"].startswith("1 passed, 1 deselected")
    assert "fault" not in row


def test_a_launch_that_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuLaunchKernelEx gets CUlaunchConfig, CUlaunchAttribute and arguments with the layout of cuda.h."""
    seen: list[Any] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    def launch(config: int, function: int, arguments: Any, extra: object) -> int:
        *sizes, stream, attributes, n = struct.unpack("<7I4xQQI", ctypes.string_at(config, 52))
        number = ctypes.string_at(arguments[0], 8), ctypes.string_at(arguments[1], 4)
        seen.append((sizes, stream, struct.unpack("<i4xi60x", ctypes.string_at(attributes, 72)), n, function, number))
        return len(seen) - 1

    monkeypatch.setattr(early, "library", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    function = early.Early(SimpleNamespace(ptr=77))
    given = (3, 2, 1), (64, 1, 1), (np.uint64(1 << 40), np.float32(1.5)), 96
    function(*given, SimpleNamespace(ptr=1 << 41))
    numbers = struct.pack("<Q", 1 << 40), struct.pack("<f", 1.5)
    assert seen == [([3, 2, 1, 64, 1, 1, 96], 1 << 41, (6, 1), 1, 77, numbers)]
    with pytest.raises(KernelError, match="CUDA's error 1"):
        function(*given, SimpleNamespace(ptr=0))
