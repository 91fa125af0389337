"""Predicted speeds: sums of a graph's work at known rates, shown before anything is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from localllm.bench.model_speed import predicted_rate
from localllm.bench.workload import Test
from localllm.catalog.file_details import DetailsReader
from localllm.cli.commands.inspect import speed_lines
from localllm.console import rounded
from localllm.kernels.cpu import rates
from localllm.kernels.cpu.costs import costs
from localllm.kernels.cpu.rates import Rate
from localllm.kernels.cuda import cupy_driver, installation, roofline
from localllm.kernels.cuda.prediction import GAP, HANDOVER, LATENCY, DeviceRates
from localllm.kernels.cuda.roofline import KINDS
from localllm.loading import prediction
from localllm.loading.load import plan_file
from localllm.loading.prediction import PYTHON_S, Predictor
from localllm.options.declared import LoadOptions
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.helpers.command_line import run_main
from tests.helpers.gguf_writer import write_gguf as write_file
from tests.helpers.tiny_models import tiny_gguf


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measures: None) -> None:
    """A machine with the same rate for all kernels, in a separate cache."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rates._Test, "program", lambda _: Rate(1e-4, per_row=1e-6))
    monkeypatch.setattr(rates._Test, "rate", lambda *_: Rate(1e-9, 1e-10, 1e-10))
    monkeypatch.setattr(prediction, "disk_rate", lambda path: 1e6)
    monkeypatch.setattr(rates.OtherLoad, "cpus", lambda _: 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_gguf(tmp_path / "model.gguf", max_position_embeddings=8192)


def predictor(path: Path, **options: Any) -> Predictor:
    plan = plan_file(LoadOptions(path=path, device="cpu", **options))
    found = Predictor.of(path, plan.placement, threads=2)
    assert found is not None
    return found


def seconds(value: float | None) -> float:
    assert value is not None
    return value


def test_more_context_takes_longer(path: Path) -> None:
    model = predictor(path)
    for times in (
        [seconds(model.decode_s(depth)) for depth in (0, 1, 100, 8000)],
        [seconds(model.prompt_s(n)) for n in (1, 64, 512, 513, 8000)],
        [seconds(model.prompt_s(64, depth)) for depth in (0, 1000, 8000)],
    ):
        assert all(before < after for before, after in pairwise(times))


def test_a_window_bounds_the_time_of_a_token(tmp_path: Path) -> None:
    model = predictor(tiny_gguf(tmp_path / "m.gguf", "mistral", sliding_window=32, max_position_embeddings=8192))
    assert model.decode_s(100) == model.decode_s(8000)
    assert seconds(model.decode_s(0)) < seconds(model.decode_s(100))


@pytest.mark.parametrize(("step_s", "size"), [(1e-9, 64), (1e9, 512)])
def test_a_prompt_is_evaluated_in_steps_with_one_output(
    path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, size: int
) -> None:
    """An engine limits the seconds of a step, which has at least 64 tokens."""
    monkeypatch.setattr(prediction, "STEP_S", step_s)
    model = predictor(path, context=1024)
    n = 2 * size + 8
    steps = [model.step_s(size, 0, 0), model.step_s(size, size, 0), model.step_s(8, 2 * size, 1)]
    assert seconds(model.prompt_s(n)) == pytest.approx(sum(map(seconds, steps)) + PYTHON_S)


def test_the_tests_of_a_benchmark(path: Path) -> None:
    model = predictor(path)
    prompt, token = seconds(model.prompt_s(64, 8)), seconds(model.decode_s(8 + 16))
    assert predicted_rate(model, Test("pp", 64, 8)) == pytest.approx(64 / prompt)
    assert predicted_rate(model, Test("tg", 32, 8)) == pytest.approx(1 / token)
    both = prompt + 32 * seconds(model.decode_s(8 + 64 + 16))
    assert predicted_rate(model, Test("pg", 64, 8, 32)) == pytest.approx(96 / both)


def test_experts_in_the_file_cost_the_time_of_reading_them(tmp_path: Path) -> None:
    """One token finds the experts in memory that fit; a prompt reads all experts while it computes."""
    path = tiny_gguf(tmp_path / "model.gguf", "qwen3_moe", num_hidden_layers=2)
    whole = predictor(path, context=64)
    placement = plan_file(LoadOptions(path=path, device="cpu", context=64)).placement
    n_bytes = sum(w.n_bytes for group in placement.groups for w in group.packed if w.is_expert)
    limit = placement.total - n_bytes // 2
    model = predictor(path, context=64, max_memory=limit / 1e9)
    pool = model.placement.pool
    assert 0 < pool < n_bytes == model.placement.experts_in_file
    missing = n_bytes * 3 / 9 * (1 - pool / n_bytes)
    assert seconds(model.step_s(1, 0)) - seconds(whole.step_s(1, 0)) == pytest.approx(missing / 1e6)
    assert seconds(model.step_s(60, 0)) == pytest.approx(n_bytes / 1e6, rel=1e-3)
    assert replace(model, disk=1e15).step_s(60, 0) == whole.step_s(60, 0)


def test_the_reference_is_not_predicted(path: Path) -> None:
    placement = plan_file(LoadOptions(path=path, device="reference")).placement
    assert Predictor.of(path, placement) is None


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, with rates that make each launch of a tiny model take only its waits."""
    driver = EmulatedDriver(2)
    monkeypatch.setattr(installation, "driver_cuda", lambda: (13, 0))
    monkeypatch.setattr(cupy_driver, "open_driver", lambda: driver)
    rates = DeviceRates(1e18, dict.fromkeys(KINDS, 1e30))
    monkeypatch.setattr(roofline, "CUDARoofline", lambda driver, device: None)  # needs no compiler
    monkeypatch.setattr(DeviceRates, "measured", lambda roofline: rates)


@pytest.mark.usefixtures("gpus")
def test_a_step_on_gpus_is_the_sum_of_its_launches(path: Path) -> None:
    options: dict[str, Any] = {"context": 1024, "threads": 2}
    times = []
    split: dict[str, Any] = {"device": "cuda", "tensor_split": (1, 1)}
    for more in ({"device": "cuda:0"}, split, {"device": "cuda:0", "n_gpu_layers": 1}):
        placement = plan_file(LoadOptions(path=path, **options, **more)).placement
        model = Predictor.of(path, placement, threads=2)
        assert model is not None
        times.append(seconds(model.step_s(1, 0)))
        for part in model.parts:
            assert isinstance(part, prediction._GPUPart) == (part is not model.parts[0] or len(times) < 3)
    one, two, with_cpu = times
    n_launches = round((one - HANDOVER) / (GAP + LATENCY))
    assert one == pytest.approx(HANDOVER + n_launches * (GAP + LATENCY))
    assert n_launches > 10
    assert two == pytest.approx(one + HANDOVER, rel=0.1)
    assert with_cpu != two


@pytest.mark.usefixtures("gpus")
def test_the_plan_says_that_no_kernel_of_a_gpu_was_timed(
    path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    shown = run_main(capfdbinary, "inspect", path, "--plan", "--device", "cuda:0").out.splitlines()
    assert "no kernel was timed" in shown[-1]
    assert re.search(r"generation +about [\d,.]+ after 0, [\d,.]+ after 4,096 tokens$", shown[-2])
    speed = json.loads(run_main(capfdbinary, "inspect", path, "--plan", "--device", "cuda:0", "--json").out)
    assert speed["plan"]["speed"]["kernels_measured"] is False


def test_the_plan_shows_the_speed(path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    flags = ("inspect", path, "--plan", "--device", "cpu", "--threads", 2)
    speed = json.loads(run_main(capfdbinary, *flags, "--json").out)["plan"]["speed"]
    model = predictor(path)
    assert speed["prompt_tokens"] == 512
    assert speed["first_token_s"] == model.prompt_s(512)
    assert speed["decode"] == [
        {"depth": depth, "tokens_per_s": 1 / seconds(model.decode_s(depth))} for depth in (0, 4096)
    ]
    shown = run_main(capfdbinary, *flags).out.splitlines()
    assert re.search(r"prompts +about [\d,.]+ tokens/s: the first token after 512 takes [\d.]+ s$", shown[-2])
    assert re.search(r"generation +about [\d,.]+ after 0, [\d,.]+ after 4,096 tokens$", shown[-1])


def test_models_without_generation_have_only_prompts(tmp_path: Path) -> None:
    model = predictor(tiny_gguf(tmp_path / "model.gguf"))
    model.graph.nodes[:] = [
        replace(node, operation=replace(node.operation, causal=False)) if hasattr(node.operation, "window") else node
        for node in model.graph.nodes
    ]
    (part,) = model.parts
    assert isinstance(part, prediction._CPUPart)
    part.rates.measure(costs(model.graph, 8, 0))
    speed = model.speed()
    assert speed is not None
    assert not speed["decode"]
    assert len([*speed_lines(speed)]) == 1


def test_files_that_are_no_models(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tmp_path / "odd.gguf"
    write_file(path, {"general.architecture": "odd"}, {})
    shown = run_main(capfdbinary, "inspect", path, "--plan")
    assert (shown.code, shown.out) == (1, "")
    assert "odd" in shown.error()


def test_lists_show_speeds_of_known_formats(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A list measures nothing; a measurement for one model serves others of the same format."""
    (tmp_path / "folder").mkdir()
    other = tiny_gguf(tmp_path / "folder" / "other.gguf", head_dim=32)
    flags = ("models", other.parent, "--json")
    assert json.loads(run_main(capfdbinary, *flags).out)["models"][0]["tokens_per_s"] is None
    run_main(capfdbinary, "inspect", path, "--plan", "--device", "cpu")
    rate = json.loads(run_main(capfdbinary, *flags).out)["models"][0]["tokens_per_s"]
    assert rate > 0
    details = DetailsReader().read(other)
    assert details.tokens_per_s == rate
    assert details.verdict(1 << 60) == f"yes, {rounded(rate)} tokens/s"
    assert details.verdict(0) == "no"
    assert details.verdict(1 << 60) in run_main(capfdbinary, "models", other.parent).out
