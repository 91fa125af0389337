"""Models split over several devices: the same text, and the reported placement."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.errors import DeviceError, NotEnoughMemoryError, UsageError
from localllm.kernels.cuda import installation
from localllm.llm import LLM
from localllm.loading.devices import Device, cuda_indices, open_devices
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.command_line import run_main
from tests.helpers.recorder import CPUOps, ReferenceOps

#: A prompt with more tokens than a micro-batch.
PROMPT = [int(i) for i in np.random.default_rng(2).integers(3, 300, 200)]

Make = Callable[[], Any]


def cpu_ops() -> CPUOps:
    return CPUOps(threads=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    return tiny_models.tiny_gguf(folder / "model.gguf", type=GGMLType.Q8_0, max_position_embeddings=512)


class Machine:
    """Devices that `open_devices` returns: a host, and devices with separate memory.

    Attributes:
        closed: devices whose threads have ended.
    """

    def __init__(self, make: Make, *free: int) -> None:
        self._make, self._free = make, free
        self.closed: list[str] = []

    def __call__(self, name: str, **_: Any) -> tuple[Device, ...]:
        names = ["host", *(f"device {i}" for i in range(len(self._free)))]
        free = [None, *((lambda n=n: n) for n in self._free)]
        return tuple(self._device(name, room) for name, room in zip(names, free, strict=True))

    def _device(self, name: str, free: Callable[[], int] | None) -> Device:
        return Device(name, f"kernels of {name}", 1, 1, self._make().backend, lambda: self.closed.append(name), free)


@pytest.fixture(autouse=True)
def gpus_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have a `Machine`'s devices, because flags for devices are ignored without any."""
    monkeypatch.setattr("localllm.loading.devices.gpu_memory", lambda name: 0 if name == "cpu" else 1 << 30)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def load_on(machine: Machine, path: Path, **options: Any) -> LLM:
        monkeypatch.setattr("localllm.loading.load.open_devices", machine)
        opened.append(localllm.load(path, **options))
        return opened[-1]

    yield load_on
    for llm in opened:
        llm.close()


def greedy(llm: LLM, prompt: Any = PROMPT, n: int = 24) -> tuple[int, ...]:
    return llm.generate(prompt, temperature=0, max_tokens=n, ignore_eos=True).ids


@pytest.mark.parametrize("make", [ReferenceOps, cpu_ops], ids=["reference", "cpu"])
def test_a_split_model_writes_the_same_text(make: Make, path: Path, load: Callable[..., LLM]) -> None:
    alone = load(Machine(make), path)
    expected, logits = greedy(alone), alone.logits(PROMPT)
    plenty = 1 << 40
    for machine, options, layers in (
        (Machine(make, plenty), {"n_gpu_layers": 1}, {"host": 2, "device 0": 1}),
        (Machine(make, plenty, plenty), {"n_gpu_layers": 2}, {"host": 1, "device 0": 1, "device 1": 1}),
        (Machine(make, plenty, plenty), {"tensor_split": [2, 1]}, {"device 0": 2, "device 1": 1}),
        (Machine(make, plenty), {}, {"device 0": 3}),
    ):
        llm = load(machine, path, **options)
        placement = llm.info.placement
        assert {device: placement.layers_on(device) for device in placement.devices} == layers
        assert greedy(llm) == expected
        np.testing.assert_array_equal(llm.logits(PROMPT), logits)


@pytest.mark.parametrize("make", [ReferenceOps, cpu_ops], ids=["reference", "cpu"])
def test_values_of_a_split_model_are_read_and_changed(make: Make, path: Path, load: Callable[..., LLM]) -> None:
    alone, plenty = load(Machine(make), path, parallel=4), 1 << 40
    split = load(Machine(make, plenty, plenty), path, n_gpu_layers=2, parallel=4)
    vector = np.random.default_rng(3).normal(0, 1, 64).astype(np.float32)
    changes: list[dict[str, Any]] = [
        {},
        {"steer": {"layers.*.output": vector}},
        {"hooks": {"layers.1.attention": lambda rows, positions: rows * np.float32(0.5)}},
    ]
    prompts = [PROMPT * 2, PROMPT[:30]]  # the first is longer than a micro-batch
    for options in changes:
        for a, b in zip(*(llm.trace(prompts, ["*", "layers.*.*"], **options) for llm in (split, alone)), strict=True):
            assert a.keys() == b.keys()
            for name, rows in a.items():
                np.testing.assert_array_equal(rows, b[name], err_msg=name)
        replies = [llm.generate(PROMPT, max_tokens=6, temperature=0, logprobs=1, **options) for llm in (split, alone)]
        assert replies[0].logprobs == replies[1].logprobs
    np.testing.assert_array_equal(*(llm.embed(prompts, layer=1) for llm in (split, alone)))
    assert greedy(split) == greedy(alone)


def test_a_host_without_layers_leaves_the_cache_its_size(path: Path, load: Callable[..., LLM]) -> None:
    """Also if the host has longer pages than the devices."""
    cpu_host = Machine(ReferenceOps, 1 << 40, 1 << 40)
    cpu_host._device = lambda name, free: Machine(cpu_ops if free is None else ReferenceOps)._device(name, free)
    llm, ids = load(cpu_host, path, tensor_split=[1, 2]), [1 + i % 200 for i in range(480)]
    assert llm.info.placement.devices == ("device 0", "device 1")
    assert greedy(llm, ids) == greedy(load(Machine(ReferenceOps), path), ids)


def test_info_of_a_split_model(path: Path, load: Callable[..., LLM], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "localllm")
    machine = Machine(ReferenceOps, 1 << 40)
    with load(machine, path, n_gpu_layers=2, context=64) as llm:
        info = llm.info
    assert (info.device, info.kernels) == ("host + device 0", "kernels of host + kernels of device 0")
    assert [(group.name, group.device, group.kernels) for group in info.placement.groups] == [
        ("embedding", "host", "kernels of host"),
        ("layers 0-0", "host", "kernels of host"),
        ("layers 1-2", "device 0", "kernels of device 0"),
        ("output", "device 0", "kernels of device 0"),
    ]
    assert all(group.formats and group.weights for group in info.placement.groups)
    assert info.placement.kv_cache == 3 * 64 * 2 * 2 * 16 * 2
    assert "layers 1-2 on device 0 (kernels of device 0): Q8_0 read as F32" in caplog.text
    assert machine.closed == ["host", "device 0"]


def test_a_tied_matrix_is_loaded_for_both_its_devices(load: Callable[..., LLM], tmp_path: Path) -> None:
    path = tiny_models.tiny_gguf(tmp_path / "tied.gguf", "qwen2", tie_word_embeddings=True)
    alone, split = (load(Machine(ReferenceOps, 1 << 40), path, n_gpu_layers=n) for n in (0, 1))
    table = 4 * 300 * 64
    assert split.info.placement.weights == alone.info.placement.weights + table
    assert [(g.name, g.weights) for g in split.info.placement.groups if not g.layers] == [
        ("embedding", table),
        ("output", table + 4 * 64),
    ]
    assert greedy(split, PROMPT[:50]) == greedy(alone, PROMPT[:50])


def test_layers_that_do_not_fit_go_to_the_host_with_a_warning(path: Path, load: Callable[..., LLM]) -> None:
    needed = load(Machine(ReferenceOps, 1 << 40), path, n_gpu_layers=2).info.placement.on("device 0").total
    with pytest.warns(UserWarning, match="room for not more than 2 layers of the model: 1 of 3 run on the host"):
        llm = load(Machine(ReferenceOps, needed), path)
    assert llm.info.placement.layers_on("device 0") == 2
    with pytest.warns(UserWarning, match="room for no layer of the model: 3 of 3 run on the host"):
        llm = load(Machine(ReferenceOps, 1000), path)
    assert (llm.info.device, llm.info.placement.devices) == ("host", ("host",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(Machine(ReferenceOps, needed), path, n_gpu_layers=2)
        load(Machine(ReferenceOps, 1 << 40), path)


def test_a_draft_model_with_a_split_model(path: Path, load: Callable[..., LLM]) -> None:
    expected = greedy(load(Machine(ReferenceOps), path))
    llm = load(Machine(ReferenceOps, 1 << 40), path, n_gpu_layers=2, draft_model=path)
    assert llm.info.draft is not None
    assert (llm.info.device, llm.info.draft.device) == ("host + device 0", "device 0")
    assert greedy(llm) == expected
    host_only = load(Machine(ReferenceOps, 1 << 40), path, n_gpu_layers=0, draft_model=path)
    assert host_only.info.draft is not None
    assert (host_only.info.device, host_only.info.draft.device) == ("host", "host")


def test_a_request_that_does_not_fit_ends_the_devices(path: Path, load: Callable[..., LLM]) -> None:
    machine = Machine(ReferenceOps, 10_000)
    with pytest.raises(NotEnoughMemoryError, match=r"2 layers on GPUs need .* on device 0"):
        load(machine, path, n_gpu_layers=2)
    assert machine.closed == ["host", "device 0"]


def test_arguments_are_checked(path: Path) -> None:
    for options, words in (
        ({"n_gpu_layers": -1}, "n_gpu_layers is -1, but must be a whole number of at least 0"),
        ({"n_gpu_layers": 1.5}, "n_gpu_layers is 1.5"),
        ({"n_gpu_layers": 2}, "n_gpu_layers is 2, but no GPU was chosen"),
        ({"tensor_split": "3,1"}, "tensor_split is '3,1', but must be a list of numbers"),
        ({"tensor_split": [0, 0]}, "not all 0"),
        ({"tensor_split": []}, "not all 0"),
        ({"tensor_split": [1, -1]}, "numbers of at least 0"),
        ({"tensor_split": [1, float("nan")]}, "numbers of at least 0"),
        ({"tensor_split": [1, True]}, "numbers of at least 0"),
        ({"tensor_split": [1, 10**400]}, "numbers of at least 0"),
        ({"tensor_split": 3}, "tensor_split is 3"),
        ({"tensor_split": [1, 1]}, "tensor_split is '1,1', but no GPU was chosen: leave it out"),
    ):
        with pytest.raises(UsageError, match=words):
            localllm.load(path, device="reference", **options)


def test_names_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "driver_cuda", lambda: None)
    for name in ("cuda", "cuda:0", "cuda:1,0", "cuda0", "gpu"):
        with pytest.raises(DeviceError, match=r"no CUDA device can be used: .* use device='cpu'"):
            open_devices(name)
    with pytest.raises(DeviceError, match="'cuda:1,0,1' names a GPU twice"):
        open_devices("cuda:1,0,1")
    for name in ("cuda:", "cuda:x", "cuda:0,", "cuda:-1", "vulkan"):
        with pytest.raises(DeviceError, match=f"there is no device '{name}': choose one of 'auto', 'cpu', 'cuda'"):
            open_devices(name)
    assert (cuda_indices(None), cuda_indices("2"), cuda_indices("1,0")) == (None, (2,), (1, 0))


# -- The command line ----------------------------------------------------------------------------------------------


def test_the_plan_without_loading(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    machine = Machine(ReferenceOps, 1 << 40)
    monkeypatch.setattr("localllm.loading.load.open_devices", machine)
    monkeypatch.setattr("localllm.loading.placement.Planner.load", None)
    outcome = run_main(capfdbinary, "inspect", path, "--plan", "-ngl", 2, "-c", 64)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[2:5] == ["64 tokens of context", "", "embedding            host (kernels of host): 20.4 kB weights"]
    assert [line.split(":")[0] for line in lines[5:8]] == [
        "layers 0-0           host (kernels of host)",
        "layers 1-2           device 0 (kernels of device 0)",
        "output               device 0 (kernels of device 0)",
    ]
    assert lines[8] == "cache                pages of 16 tokens: 4 of all tokens"
    assert [line[:20].strip() for line in lines[8:]] == ["cache", "scratch", "on host", "on device 0", "total"]
    assert re.search(r"^on host +[\d.]+ MB of [\d.]+ GB free: [\d.]+ kB weights, ", lines[10])
    assert re.search(
        r"on device 0 +[\d.]+ kB of 1.1 TB free: [\d.]+ kB weights, [\d.]+ kB KV cache, [\d.]+ kB scratch$",
        lines[11],
    )
    assert machine.closed == ["host", "device 0"]
    plan = json.loads(run_main(capfdbinary, "inspect", path, "--plan", "-ngl", 2, "--json").out)["plan"]
    assert (plan["context"], [group["device"] for group in plan["groups"]]) == (512, ["host"] * 2 + ["device 0"] * 2)
    assert sum(plan["devices"].values()) == plan["total"]
    assert plan["free"]["device 0"] == 1 << 40


def test_a_plan_that_leaves_something_to_be_desired(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr("localllm.loading.load.open_devices", Machine(ReferenceOps, 1000))
    outcome = run_main(capfdbinary, "inspect", path, "--plan")
    assert outcome.code == 0
    assert "warning: the GPU has room for no layer" in outcome.err
    assert "and -ngl 0 silences this warning" in outcome.err
    outcome = run_main(capfdbinary, "inspect", path, "--plan", "-ngl", 1)
    assert (outcome.code, outcome.out) == (1, "")
    assert "1 layers on GPUs need" in outcome.error()


def test_the_plan_is_printed_before_anything_is_loaded(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The notice also appears if nothing fits on a GPU, but not without a GPU or with --quiet."""

    def load_model(*_: Any, **__: Any) -> None:
        raise NotEnoughMemoryError("nothing is loaded here")

    monkeypatch.setattr("localllm.loading.placement.Planner.load", load_model)
    generate = ("generate", "-m", path, "-p", "the", "-c", 64)
    for machine, flags, said in (
        (Machine(ReferenceOps, 1 << 40), (), "on device 0"),
        (Machine(ReferenceOps, 1000), (), "on device 0          0 B of 1 kB free\n"),
        (Machine(ReferenceOps, 1 << 40), ("--draft-model", path), "draft model:"),
        (Machine(ReferenceOps, 1 << 40), ("--quiet",), None),
        (Machine(ReferenceOps), (), None),
    ):
        monkeypatch.setattr("localllm.loading.load.open_devices", machine)
        outcome = run_main(capfdbinary, *generate, *flags)
        assert outcome.code == 1
        assert ("plan with 64 tokens of context:" in outcome.err) == (said is not None)
        assert said is None or said in outcome.err


def test_flags(path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    monkeypatch.setattr("localllm.loading.load.open_devices", Machine(ReferenceOps, 1 << 40, 1 << 40))
    generate = ("generate", "-m", path, "-p", "the", "-n", 3, "--temp", 0, "-c", 64)
    expected = run_main(capfdbinary, *generate, "-ngl", 0)
    assert "host (kernels of host)" in expected.err
    outcome = run_main(capfdbinary, *generate, "--gpu-layers", 2, "--tensor-split", "3,1")
    assert (outcome.code, outcome.out) == (0, expected.out)
    plan, text = outcome.err.index("plan with 64 tokens of context:"), outcome.err.index("host + device 0")
    assert plan < text, "the plan must precede loading"
    on = ["on host", "on device 0", "on device 1"]
    named = [line[2:22].strip() for line in outcome.err.splitlines() if line.startswith("  ")]
    assert named == ["embedding", "layers 0-0", "layers 1-2", "output", "cache", "scratch", *on, "total"]
    for flags, words in (
        (["-ngl", "x"], "'x' is not one whole number of at least 0, 'auto' or 'all'"),
        (["-ts", "3;1"], "'3;1' is not a list of numbers of at least 0"),
        (["-ts", "1"], "-ts is '1', but needs one number for each GPU, and there are 2"),
        (["-ts", "0,0"], "'0,0' is not a list of numbers of at least 0, not all 0"),
        (["-mg", "1"], "there is no flag -mg: --device names GPUs in order, such as --device cuda:1,0"),
    ):
        outcome = run_main(capfdbinary, *generate, *flags)
        assert outcome.code == 2
        assert words in outcome.error()


@pytest.mark.parametrize(
    "flags", [["-c", 64], ["--device", "cpu"], ["-ngl", 0], ["-ts", "1"], ["--cache-type", "q8_0"]]
)
def test_flags_of_the_plan_alone(flags: list[Any], path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "inspect", path, *flags)
    assert outcome.code == 2
    assert "needs --plan: add it" in outcome.error()
