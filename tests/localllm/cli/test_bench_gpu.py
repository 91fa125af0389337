"""``localllm bench`` on emulated GPUs, whose kernels do nothing and take a microsecond each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.bench import ceilings as bench_ceilings
from localllm.bench.ceilings import amount, ceiling
from localllm.bench.profile import DeviceCeilings, DeviceProfile
from localllm.bench.workload import ModelCost, Test
from localllm.cli.commands import bench
from localllm.kernels.cpu.backend import CPUBackend
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.calls import Cost
from localllm.kernels.cuda.profile import Profile, Share
from localllm.loading.devices import Device
from localllm.quant.types import GGMLType
from tests.helpers.command_line import Outcome, run_main
from tests.helpers.tiny_models import tiny_gguf
from tests.kernels.cuda.watched import KernellessDriver

Bench = Callable[..., Outcome]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf", type=GGMLType.Q8_0, intermediate_size=192)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], path: Path) -> Bench:
    """Run the command with ``n_gpus`` emulated GPUs."""

    def run_on(*flags: str, n_gpus: int = 1) -> Outcome:
        driver = KernellessDriver(max(1, n_gpus), memory=1 << 26)
        host = Device("cpu", "kernels", 1, 1, CPUBackend(threads=1), lambda: None)
        gpus = [
            Device(f"cuda:{i}", "CUDA kernels", 1, 1, CUDABackend(driver, i), lambda: None, lambda: 1 << 40)
            for i in range(n_gpus)
        ]
        monkeypatch.setattr("localllm.loading.load.open_devices", lambda *_, **__: (host, *gpus))
        monkeypatch.setattr("localllm.kernels.cuda.cupy_driver.open_driver", lambda: driver)
        monkeypatch.setattr(bench, "disturbance", lambda other_cpus, scatter: None)
        return run_main(capfdbinary, "bench", path, *flags)

    return run_on


FLAGS = ("-p", "40", "-n", "3", "-d", "0,8", "-r", "2", "-q")


def test_the_units_of_a_gpu(run: Bench) -> None:
    outcome = run(*FLAGS, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    report = json.loads(outcome.out.splitlines()[-1])
    assert report["device"] == "cuda:0"
    assert [r["unit"] for r in report["results"]] == ["FLOP/s", "B/s"] * 2
    for result in report["results"]:
        assert result["share"] == pytest.approx(result["achieved"] / result["ceiling"], rel=0.5)
        assert "profiles" not in result


def test_a_profile(run: Bench) -> None:
    n_gpus = 2
    outcome = run(*FLAGS, "--json", "--profile", n_gpus=n_gpus)
    assert (outcome.code, outcome.err) == (0, "")
    report = json.loads(outcome.out.splitlines()[-1])
    names = [f"cuda:{i}" for i in range(n_gpus)]
    for result in report["results"]:
        assert [each["device"] for each in result["profiles"]] == names
        for each in result["profiles"]:
            assert set(each["ceilings"]) == {"copy", "read", "int8", "f16", "bf16"}
            assert each["busy"] > 0
            assert sum(op["share"] for op in each["operations"]) == pytest.approx(1)
        layers = [
            op["launches"]
            for each in result["profiles"]
            for op in each["operations"]
            if op["name"] == "gate + quantise"
        ]
        assert sum(layers) == 3
    tables = run(*FLAGS, "--profile", n_gpus=n_gpus).out.split("\n\n")[2:]
    assert len(tables) == 4 * n_gpus
    assert tables[-1].startswith(f"tg3 @ d8 on {names[-1]}: ")
    assert any(line.split()[:2] == ["linear", "output"] for line in tables[-1].splitlines())
    assert tables[0].splitlines()[1].split()[-2:] == ["of", "floor"]


def test_steps_of_a_prompt_are_averaged(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 tokens need two steps of 512; a profile generates few tokens."""
    monkeypatch.setattr(CUDABackend, "step_tokens", 512)
    monkeypatch.setattr("localllm.engine.scheduler.MIN_CHUNK_ALONE", 512)  # on a busy machine too
    outcome = run("-p", "600", "-n", "9", "-r", "1", "-q", "--json", "--profile")
    pp, tg = json.loads(outcome.out.splitlines()[-1])["results"]
    assert pp["profiles"][0]["n_steps"] == 2
    assert tg["profiles"][0]["n_steps"] == 4
    launches = {op["name"]: op["launches"] for op in pp["profiles"][0]["operations"]}
    assert launches["gate + quantise"] == 3
    assert launches["linear output Q8_0"] == 0.5  # for the last token
    table = run("-p", "600", "-n", "0", "-r", "1", "-q", "--profile").out
    gather = next(line.split() for line in table.splitlines() if line.split()[:1] == ["gather"])
    assert gather[1] == "0.5"


def test_there_is_no_profile_of_a_processor(capfdbinary: pytest.CaptureFixture[bytes], path: Path) -> None:
    outcome = run_main(capfdbinary, "bench", path, "--device", "reference", "--profile", "-q")
    assert outcome.code != 0
    expected = "--profile takes the time of kernels on a GPU, but the model runs on reference: leave it out"
    assert expected in outcome.error()


# -- Arithmetic ----------------------------------------------------------------------------------------------------

WORK = ModelCost(
    weight_bytes=1000, kv_bytes=40, layer_products=(400, 80), head_products=(100, 0), attention_products=8
)


def info_of(**layers: int) -> Any:
    """Return the info of a model with these numbers of layers per device, 100 bytes per layer and 50 for the head."""
    devices = tuple(name.replace("_", ":") for name in layers)
    counts = dict(zip(devices, layers.values(), strict=True))

    def on(device: str) -> Any:
        return SimpleNamespace(multiplied=100 * counts[device] + 50 * (device == devices[-1]))

    placement = SimpleNamespace(devices=devices, on=on, layers_on=counts.__getitem__)
    return SimpleNamespace(placement=placement, n_layers=sum(layers.values()))


def test_what_each_device_does() -> None:
    info = info_of(cuda_0=1, cuda_1=3)
    first, last = (WORK.on(f"cuda:{i}", info) for i in (0, 1))
    assert first == ModelCost(100, 10, (100, 20), (0, 0), 2)
    assert last == ModelCost(350, 30, (300, 60), (100, 0), 6)


def test_tokens_wait_for_all_devices_and_prompts_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {0: 2.0, 1: 3.0}
    monkeypatch.setattr(bench_ceilings, "_gpu_seconds", lambda index, test, work: lambda: seconds[index])
    info = info_of(cuda_0=1, cuda_1=3)
    for test, together in ((Test("tg", 4, 0), 5.0), (Test("pp", 4, 0), 3.0)):
        most = ceiling(info, test, WORK, None, None)  # type: ignore[arg-type]
        assert most is not None
        assert most() == amount(info, test, WORK) / together
    assert amount(info, Test("tg", 1, 9), WORK) == 1000 + 40 * 10
    assert amount(info, Test("pp", 1, 9), WORK) == 2 * (480 + 100 + 8 * 10)
    assert amount(info_of(cpu=4), Test("pp", 1, 9), WORK) == 480 + 100 + 8 * 10


def test_the_lines_of_a_profile() -> None:
    """The slowest operation comes first; the larger of both bounds is the floor."""
    shares = {
        "a": Share("a", Cost(2e9, 1e9, "int8"), n=2, n_launches=4, seconds=0.01),
        "b": Share("b", Cost(3e9), n=2, n_launches=1, seconds=0.03),
        "c": Share("c", Cost(1e9, 3e12, "f16"), n=2, n_launches=2, seconds=0.02),
    }
    ceilings = DeviceCeilings(1e12, 2e12, {"int8": 1e15, "f16": 5e14})
    profile = DeviceProfile(Test("tg", 2, 0), "cuda:1", Profile(2, 0.05, shares), 0.9, ceilings)
    head, _, *rows = profile.lines()
    assert head == (
        "tg2 on cuda:1: 25.000 ms a step, 30.000 ms by operation; at work in 90% of the time; copies 1 TB/s, "
        "int8 1 PFLOP/s, f16 500 TFLOP/s"
    )
    assert [row.split() for row in rows] == [
        ["b", "0.5", "15.000", "ms", "50.0%", "100", "GB/s", "-", "10%"],
        ["c", "1", "10.000", "ms", "33.3%", "50", "GB/s", "150", "TFLOP/s", "30%"],
        ["a", "2", "5.000", "ms", "16.7%", "200", "GB/s", "100", "GFLOP/s", "20%"],
    ]
    last = profile.as_json()["operations"][2]
    assert last.pop("share") == pytest.approx(1 / 3)
    assert last == {
        "name": "c",
        "launches": 1,
        "step_s": 0.01,
        "bytes": 5e8,
        "flop": 1.5e12,
        "kind": "f16",
        "floor_s": 3e-3,
    }
