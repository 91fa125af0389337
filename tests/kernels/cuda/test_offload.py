"""Experts on the CPU and the rest of each layer on an emulated device: the text, the bits, and the copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.engine.drafting.lookup import LookupDrafter
from localllm.errors import UsageError
from localllm.kernels.cuda import step as steps
from localllm.kernels.cuda.calls import padded
from localllm.kernels.offload import OffloadedStep
from localllm.kernels.variants import graph_variant
from localllm.llm import LLM
from localllm.loading.bandwidths import Bandwidths, measure
from localllm.loading.devices import Device
from localllm.loading.overrides import Overrides
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.emulated_streams import EmulatedEvent, StreamOrder
from tests.helpers.backends import emulated_cuda, no_harness
from tests.helpers.offloading import EXPERTS, OffloadingBackend
from tests.helpers.run_model import Runner, make_batch
from tests.kernels.cuda.conftest import cpu
from tests.kernels.cuda.test_models import IDS, SHORT, assert_near, assert_same, conversation, greedy, small
from tests.kernels.cuda.watched import WatchedDriver

pytestmark = pytest.mark.skipif(no_harness() is not None, reason="the CUDA harness does not run here")

T = GGMLType
#: Layers of the tiny models, and tokens of a prompt.
N_LAYERS, N_PROMPT = 3, 30


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("offload"), "qwen3_moe", T.Q8_0)


def on_host(driver: EmulatedDriver | None = None, overrides: Overrides = EXPERTS) -> OffloadingBackend:
    return OffloadingBackend(emulated_cuda(driver or EmulatedDriver()), overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        EXPERTS,
        Overrides(n_layers=1),
        Overrides(("token_embd=CPU", "output=CPU", r"blk\.1\.ffn=CPU", "attn_(q|output)=CPU")),
    ],
    ids=["all experts", "experts of a layer", "other matrices"],
)
def test_logits_are_the_cpus(path: Path, overrides: Overrides) -> None:
    """Prefill in chunks, batches of sequences, and decode."""
    ours, expected = conversation(Runner(path, on_host(overrides=overrides), 8)), conversation(Runner(path, cpu(), 8))
    for a, b in zip(ours, expected, strict=True):
        if len(b):
            assert_near(a, b)


@pytest.mark.parametrize(("order", "seed"), [("lazy", 0), ("random", 1), ("random", 2), ("random", 3)])
def test_the_order_of_work_does_not_change_the_bits(path: Path, order: StreamOrder, seed: int) -> None:
    expected = conversation(Runner(path, on_host(EmulatedDriver(order="eager")), 8))
    assert_same(conversation(Runner(path, on_host(EmulatedDriver(order=order, seed=seed)), 8)), expected)


def test_emulated_devices_detect_a_host_that_does_not_wait(path: Path) -> None:
    class Impatient(EmulatedDriver):
        def synchronize(self, work: Any) -> None:
            if not isinstance(work, EmulatedEvent):
                super().synchronize(work)

    expected = Runner(path, on_host(), 8).run((IDS[:SHORT], 0, [1]))
    assert not np.array_equal(Runner(path, on_host(Impatient()), 8).run((IDS[:SHORT], 0, [1])), expected)


def test_a_token_has_the_same_bits_alone_and_in_a_batch(path: Path) -> None:
    """Also when launches are captured and replayed."""
    runner = Runner(path, on_host(), 8)
    whole = runner.run((IDS[:N_PROMPT], 0, [0]))
    for _ in range(3):
        chunks = [runner.run((IDS[first : first + 10], first, [1])) for first in range(0, N_PROMPT, 10)]
        np.testing.assert_array_equal(np.concatenate(chunks), whole)
        single = [runner.run(([token], i, [2]), (IDS[:3], 0, [3]))[:1] for i, token in enumerate(IDS[:4])]
        np.testing.assert_array_equal(np.concatenate(single), whole[:4])


def test_bytes_between_device_and_host(path: Path) -> None:
    """Per layer and token: the experts' input and the router's logits to the host, and the experts' output back."""
    counts: list[tuple[int, int]] = []
    for make in (on_host, emulated_cuda):
        driver = WatchedDriver()
        runner = Runner(path, make(driver), 8)
        for n_tokens in (1, 7):
            driver.forget()
            runner.run((IDS[:n_tokens], 0, [0]), outputs=[0])
            counts.append((driver.downloaded_bytes, driver.uploaded_bytes))
    one, seven, plain_one, plain_seven = counts
    width, n_experts = 64, 9
    for n_tokens, (down, up), (plain_down, plain_up) in ((1, one, plain_one), (7, seven, plain_seven)):
        assert down - plain_down == N_LAYERS * n_tokens * 4 * (padded(width) + padded(n_experts))
        assert up - plain_up == N_LAYERS * n_tokens * 4 * padded(width)
    step = Runner(path, on_host(), 8).step
    assert isinstance(step, OffloadedStep)
    assert step.graphs.copied_bytes(7) == N_LAYERS * 7 * 4 * (2 * width + n_experts)


def test_decoding_replays_captured_kernels(path: Path) -> None:
    driver = WatchedDriver()
    runner = Runner(path, on_host(driver), 8)
    for position in range(4):
        driver.forget()
        runner.run((IDS[position : position + 1], position, [0]))
    assert driver.calls["launch"] == 0
    assert driver.calls["replay"] == 1 + N_LAYERS  # from one layer's experts to the next layer's router


def test_values_are_read_and_changed(path: Path) -> None:
    """Also values of operations on the host, and of operations that are divided."""
    names = [f"layers.{i}.{name}" for i in range(N_LAYERS) for name in ("experts", "mlp", "attention", "output")]

    def halve(name: str, x: np.ndarray, base: np.ndarray | None) -> None:
        x *= np.float32(0.5)

    found = list[dict[str, np.ndarray]]()
    batch = replace(make_batch([(IDS[:6], 0, [0])]), edit=halve)
    for backend in (on_host(), emulated_cuda()):
        runner = Runner(path, backend, 8)
        graph, values = graph_variant(runner.model.graph, names, ["layers.1.mlp"])
        step = runner.step.variant(graph)
        result = step(batch).copy()
        found.append({"result": result} | {name: step.value(value).copy() for name, value in values.items()})
    for name, expected in found[1].items():
        if name.endswith("experts"):
            np.testing.assert_array_equal(found[0][name], expected, err_msg=name)
        else:
            assert_near(found[0][name], expected)


# -- Whole programs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"n_cpu_moe": 2}, {"cpu_moe": True}, {"override_tensor": r"blk\.0\.=CUDA0,exps=CPU,output=CPU"}],
    ids=["n_cpu_moe", "cpu_moe", "override_tensor"],
)
def test_the_text_is_the_cpus(load: Callable[..., LLM], path: Path, options: dict[str, Any]) -> None:
    llm, on_cpu = load(path, emulated_cuda(), **options), load(path)
    placement = llm.info.placement
    assert llm.info.device == "cpu + cuda:0"
    assert placement.layers_on("cuda:0") == N_LAYERS
    [group] = (group for group in placement.groups if group.is_offloaded)
    layers = {"n_cpu_moe": "experts of layers 0-1", "cpu_moe": "experts of layers 0-2"}
    assert group.name == layers.get(next(iter(options)), "matrices of layers 1-2")
    assert {weight.layer for weight in group.packed if "_exps" in weight.name} == (
        {0, 1} if "n_cpu_moe" in options else {0, 1, 2} if "cpu_moe" in options else {1, 2}
    )
    weights = {(weight.name, weight.layer) for g in placement.groups for weight in g.packed}
    assert weights == {(weight.name, weight.layer) for g in on_cpu.info.placement.groups for weight in g.packed}
    assert greedy(llm, IDS[:N_PROMPT]) == greedy(on_cpu, IDS[:N_PROMPT])


def test_requests_share_steps_and_are_cancelled(load: Callable[..., LLM], path: Path) -> None:
    llm = load(path, emulated_cuda(), n_cpu_moe=N_LAYERS, parallel=3)
    prompts = [IDS[:9], IDS[5:17], IDS[20:24]]
    expected = [greedy(llm, prompt) for prompt in prompts]
    llm.forget()
    streams = [llm.stream(prompt, temperature=0, max_tokens=60, ignore_eos=True) for prompt in prompts]
    next(iter(streams[1]))
    streams[1].cancel()
    assert [streams[i].read().ids[:8] for i in (0, 2)] == [expected[0], expected[2]]
    assert greedy(llm, prompts[1]) == expected[1]


def test_drafts_do_not_change_the_text(load: Callable[..., LLM], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(path, emulated_cuda(), cpu_moe=True)
    expected = greedy(llm, IDS[:N_PROMPT])

    def propose(_: object, tokens: list[int], most: int) -> list[int]:
        return [*expected[len(tokens) - N_PROMPT :][:2], 0][:most]

    monkeypatch.setattr(LookupDrafter, "propose", propose)
    llm.forget()
    options: dict[str, Any] = {"temperature": 0, "max_tokens": len(expected), "ignore_eos": True}
    drafted = llm.generate(IDS[:N_PROMPT], speculate="lookup", **options)
    assert drafted.ids == expected
    assert drafted.drafts is not None
    assert drafted.drafts.accepted > 0


def test_experts_that_exceed_memory_stay_in_the_file(load: Callable[..., LLM], path: Path) -> None:
    alone = load(path, emulated_cuda(), cpu_moe=True)
    placement = alone.info.placement
    experts = sum(group.weights for group in placement.groups if group.is_offloaded)
    least = placement.on("cpu").total - experts // 2
    llm = load(path, emulated_cuda(), cpu_moe=True, max_memory=least / 1e9, context=alone.info.context)
    assert 0 < llm.info.placement.pool < experts
    assert greedy(llm, IDS[:N_PROMPT]) == greedy(alone, IDS[:N_PROMPT])


def test_layers_split_by_rows_have_their_experts(load: Callable[..., LLM], path: Path) -> None:
    driver = EmulatedDriver(2)
    with pytest.raises(UsageError, match="experts cannot be on the CPU if each layer is on several GPUs: omit"):
        load(path, emulated_cuda(driver, 0), emulated_cuda(driver, 1), split_mode="row", n_cpu_moe=1)


@pytest.mark.parametrize(("rule", "is_valid"), [("exps=CUDA1", True), ("exps=CUDA2", False), ("a=CUDA999", False)])
def test_rules_name_devices_of_the_model(load: Callable[..., LLM], path: Path, rule: str, is_valid: bool) -> None:
    driver, rules = EmulatedDriver(2, peers=False), ["exps=CPU", rule]
    with (
        nullcontext() if is_valid else pytest.raises(UsageError, match="but the model uses cuda:0, cuda:1: name one")
    ):
        load(path, emulated_cuda(driver, 0), emulated_cuda(driver, 1), override_tensor=rules)
    load(path, override_tensor=rules)


def test_two_devices_and_the_cpu(load: Callable[..., LLM], path: Path) -> None:
    driver = EmulatedDriver(2, peers=False)
    llm = load(
        path, emulated_cuda(driver, 0), emulated_cuda(driver, 1), n_gpu_layers=2, tensor_split=[1, 1], cpu_moe=True
    )
    placement = llm.info.placement
    assert {d: placement.layers_on(d) for d in placement.devices} == {"cpu": 1, "cuda:0": 1, "cuda:1": 1}
    assert [group.name for group in placement.groups if group.is_offloaded] == [
        "experts of layers 1-1",
        "experts of layers 2-2",
    ]
    assert greedy(llm, IDS[:N_PROMPT]) == greedy(load(path), IDS[:N_PROMPT])


# -- Placed automatically --------------------------------------------------------------------------------------------

#: Bandwidths at which reading weights takes much longer than copies, and bandwidths at which it takes no time.
SLOW, FAST = Bandwidths(1e5, 1e8, 1e7), Bandwidths(1e15, 1e15, 1e15)


def experts_bytes(llm: LLM) -> int:
    """Return the bytes of a layer's experts in the memory of the GPU."""
    weights = [w for group in llm.info.placement.groups if group.device == "cuda:0" for w in group.packed]
    return sum(weight.n_bytes for weight in weights if weight.is_expert and weight.layer == 0)


@pytest.mark.parametrize("missing", [0.5, 1.5, 2.5])
def test_as_few_experts_as_possible_are_on_the_host(
    load: Callable[..., LLM], path: Path, monkeypatch: pytest.MonkeyPatch, missing: float
) -> None:
    monkeypatch.setattr("localllm.loading.load.measure", lambda devices: SLOW)
    monkeypatch.setattr(steps, "NODE_BYTES", 0)  # in a tiny model, graphs take more memory than experts
    whole = load(path, emulated_cuda(), context=64)
    room = whole.info.placement.on("cuda:0").total - round(missing * experts_bytes(whole))
    monkeypatch.setattr("tests.kernels.cuda.conftest.PLENTY", room)
    n = int(missing) + 1
    with pytest.warns(UserWarning, match=f"no room for the experts of {n} of 3 layers of the model: the cpu"):
        llm = load(path, emulated_cuda(), context=64)
    placement = llm.info.placement
    assert (placement.n_cpu_moe, placement.layers_on("cuda:0")) == (n, N_LAYERS)
    assert placement.on("cuda:0").total <= room
    explicit = load(path, emulated_cuda(), context=64, n_cpu_moe=n).info.placement
    assert explicit.groups == placement.groups
    assert greedy(llm, IDS[:N_PROMPT]) == greedy(whole, IDS[:N_PROMPT])


def test_whole_layers_are_on_the_host_if_that_is_faster(
    load: Callable[..., LLM], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block on the host also costs time."""
    monkeypatch.setattr(steps, "NODE_BYTES", 0)
    whole = load(path, emulated_cuda(), context=64)
    room = whole.info.placement.on("cuda:0").total - experts_bytes(whole) // 2
    monkeypatch.setattr("tests.kernels.cuda.conftest.PLENTY", room)
    for bandwidths, n_layers in ((FAST, 2), (None, 2), (SLOW, 3)):
        monkeypatch.setattr("localllm.loading.load.measure", lambda devices, found=bandwidths: found)
        with pytest.warns(UserWarning, match="the GPU has"):
            llm = load(path, emulated_cuda(), context=64)
        assert llm.info.placement.layers_on("cuda:0") == n_layers


def test_bandwidths_are_measured() -> None:
    """The clock of emulated devices counts pieces of work."""
    device = Device("cuda:0", "kernels", 1, 1, emulated_cuda(), lambda: None)
    host = Device("cpu", "kernels", 1, 1, cpu().backend, lambda: None)
    bandwidths = measure([host, device])
    assert bandwidths is not None
    assert bandwidths.host > 1e8
    assert bandwidths.gpus == pytest.approx(2 * bandwidths.link)
    other = replace(device, backend=cpu().backend)
    assert measure([host, other]) is None
    assert measure([other, device]) is not None
