"""Whole models on CUDA devices, emulated ones and a real one where there is one: the CPU's text, and the same bits
however a model lies on devices and whatever shares a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from localllm.errors import DeviceError
from localllm.kernels.backend import Backend
from localllm.kernels.cuda import step
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.cupy_driver import open_driver
from localllm.kernels.split import MICRO_BATCH
from localllm.llm import LLM
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.emulated_streams import StreamOrder
from tests.helpers import tiny_models
from tests.helpers.backends import emulated_cuda, no_harness
from tests.helpers.data import shared_data
from tests.helpers.recorder import SplitOps
from tests.helpers.run_model import Runner
from tests.kernels.cuda.conftest import cpu
from tests.kernels.cuda.watched import KernellessDriver

T = GGMLType
#: Tokens of prompts: a short one is a bucket's; a long one takes tensor cores' tiles.
SHORT, LONG = 5, 75
#: Tokens that are written, each of which must be ahead of all others by so much: rounding moves logits by a third.
N_WRITTEN, AHEAD = 8, 0.05
IDS = [int(i) for i in np.random.default_rng(2).integers(3, 300, LONG)]


@pytest.fixture(params=["emulated", "real"])
def make(request: pytest.FixtureRequest) -> Callable[[], CUDABackend]:
    """Makes the backend."""
    if request.param == "emulated":
        if reason := no_harness():
            pytest.skip(reason)
        return emulated_cuda
    try:
        driver = open_driver()
    except DeviceError as error:
        pytest.skip(str(error))
    return lambda: CUDABackend(driver, 0)


def harness() -> None:
    if reason := no_harness():
        pytest.skip(reason)


def small(path: Path, kind: str = "llama", type: GGMLType = T.Q4_0, **changes: Any) -> Path:
    """A tiny model whose heads have 16 values: kernels for one size are compiled once."""
    return tiny_models.tiny_gguf(path / "model.gguf", kind, type=type, **{"head_dim": 16} | changes)


def greedy(llm: LLM, prompt: Any, n: int = N_WRITTEN) -> tuple[int, ...]:
    return llm.generate(prompt, temperature=0, max_tokens=n, ignore_eos=True).ids


def clear_prompt(llm: LLM, n: int) -> list[int]:
    """A prompt of ``n`` tokens after which none that is written is a close call."""
    for seed in range(1000):
        prompt = [int(i) for i in np.random.default_rng(seed).integers(3, 300, n)]
        written = greedy(llm, prompt)
        largest = np.sort(llm.logits([*prompt, *written])[n - 1 : -1], axis=1)
        if (largest[:, -1] - largest[:, -2]).min() > AHEAD:
            return prompt
    raise AssertionError("random models are never sure of themselves")


def assert_same_text(llm: LLM, on_cpu: LLM, n: int) -> None:
    prompt = clear_prompt(on_cpu, n)
    assert_near(llm.logits(prompt), on_cpu.logits(prompt))
    assert greedy(llm, prompt) == greedy(on_cpu, prompt)


def assert_near(a: np.ndarray, b: np.ndarray) -> None:
    """Logits of one model on different hardware."""
    assert np.square(a - b).mean() < 1e-3 * np.square(b).mean()


# -- The CPU's text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "type"), [("llama", T.Q4_0), ("qwen2", T.Q4_K), ("qwen3", T.Q8_0), ("llama", T.F16)], ids=str
)
def test_the_text_is_the_cpus(
    make: Callable[[], CUDABackend], load: Callable[..., LLM], tmp_path: Path, kind: str, type: GGMLType
) -> None:
    path = small(tmp_path, kind, type, num_hidden_layers=2, tie_word_embeddings=kind == "qwen3")
    on_cpu, on_cuda = load(path), load(path, make())
    assert on_cuda.info.device == "cuda:0"
    assert_same_text(on_cuda, on_cpu, SHORT)


@pytest.mark.parametrize(("kind", "type", "n"), [("mixtral", T.Q4_0, LONG), ("qwen3_moe", T.Q8_0, SHORT)], ids=str)
def test_a_mixture_of_experts(
    make: Callable[[], CUDABackend], load: Callable[..., LLM], tmp_path: Path, kind: str, type: GGMLType, n: int
) -> None:
    path = small(tmp_path, kind, type, num_hidden_layers=2)
    assert_same_text(load(path, make()), load(path), n)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_a_long_prompt(
    make: Callable[[], CUDABackend], load: Callable[..., LLM], tmp_path: Path, cache_type: str
) -> None:
    path = small(tmp_path)
    on_cpu, on_cuda = load(path, cache_type=cache_type), load(path, make(), cache_type=cache_type)
    assert_same_text(on_cuda, on_cpu, LONG)


def test_stories260k_writes_the_expected_text(make: Callable[[], CUDABackend], load: Callable[..., LLM]) -> None:
    path = shared_data("models/stories260K/stories260K.gguf")
    prompt = "Once upon a time"
    assert greedy(load(path, make()), prompt, 24) == greedy(load(path), prompt, 24)


def test_stories260k_split_writes_the_expected_text(load: Callable[..., LLM]) -> None:
    """Over two devices, and half of it on the CPU."""
    harness()
    path = shared_data("models/stories260K/stories260K.gguf")
    prompt = "Once upon a time"
    expected = greedy(load(path), prompt, 16)
    driver = EmulatedDriver(2, peers=False)
    over_two = load(path, emulated_cuda(driver, 0), emulated_cuda(driver, 1))
    assert list(over_two.info.placement.devices) == ["cuda:0", "cuda:1"]
    assert greedy(over_two, prompt, 16) == expected
    half = load(path, emulated_cuda(EmulatedDriver()), n_gpu_layers=2)
    assert {d: half.info.placement.layers_on(d) for d in half.info.placement.devices} == {"cpu": 3, "cuda:0": 2}
    assert greedy(half, prompt, 16) == expected


@pytest.mark.parametrize(("order", "seed"), [("lazy", 0), ("eager", 0), ("random", 1)])
def test_streams_in_any_order(order: StreamOrder, seed: int, load: Callable[..., LLM], tmp_path: Path) -> None:
    harness()
    path = small(tmp_path)
    assert_same_text(load(path, emulated_cuda(EmulatedDriver(order=order, seed=seed))), load(path), SHORT)


# -- Several devices -----------------------------------------------------------------------------------------------


def conversation(runner: Runner) -> list[np.ndarray]:
    """Logits of a prefill of two sequences, in several micro-batches where there are any, and of single tokens."""
    a, b = [5, 0, 2], [3, 1, 4]
    return [
        runner.run((IDS[:60], 0, a), (IDS[20:30], 0, b), outputs=[59, 0, 69]),
        runner.run((IDS[60:61], 60, a), (IDS[30:31], 10, b)),
        runner.run((IDS[31:32], 11, b), outputs=[]),
        runner.run((IDS[61:62], 61, a), (IDS[32:33], 12, b)),
        runner.run((IDS[62:75], 62, a), outputs=[12, 0, 12]),
    ]


def assert_same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """A model, and its `conversation`."""
    harness()
    path = small(tmp_path_factory.mktemp("split"))
    return path, conversation(Runner(path, emulated_cuda(), 8))


@pytest.mark.parametrize(
    ("n_devices", "peers", "order"),
    [(1, True, "lazy"), (2, True, "eager"), (2, False, "random"), (3, True, "random"), (3, False, "lazy")],
)
def test_layers_split_over_devices_give_the_same_bits(
    n_devices: int, peers: bool, order: StreamOrder, on_one_device: tuple[Path, list[np.ndarray]]
) -> None:
    path, expected = on_one_device
    driver = EmulatedDriver(n_devices, peers=peers, order=order, seed=n_devices)
    counts = {1: (3,), 2: (1, 2), 3: (1, 1, 1)}[n_devices]
    parts: list[tuple[Backend, int]] = [(emulated_cuda(driver, i), n) for i, n in enumerate(counts)]
    assert_same(conversation(Runner(path, SplitOps(parts, micro_batch=32), 8)), expected)


def test_a_mixture_split_over_devices_gives_the_same_bits(tmp_path: Path) -> None:
    harness()
    path = small(tmp_path, "mixtral")
    expected = conversation(Runner(path, emulated_cuda(), 8))
    driver = EmulatedDriver(2, peers=False, order="random")
    parts: list[tuple[Backend, int]] = [(emulated_cuda(driver, i), n) for i, n in enumerate((1, 2))]
    assert_same(conversation(Runner(path, SplitOps(parts, micro_batch=32), 8)), expected)


@pytest.mark.parametrize("outputs", [[59], []], ids=["with logits", "without"])
def test_a_page_is_copied_behind_the_step_that_fills_it(
    outputs: list[int], on_one_device: tuple[Path, list[np.ndarray]]
) -> None:
    """Nobody waits for micro-batches without logits: they are under way still."""
    path, _ = on_one_device

    def next_logits(driver: EmulatedDriver, outputs: list[int], page: int) -> np.ndarray:
        runner = Runner(path, SplitOps([(emulated_cuda(driver, i), n) for i, n in ((0, 1), (1, 2))], micro_batch=32))
        runner.run((IDS[:60], 0, [0]), outputs=outputs)
        if page:
            runner.cache.copy(0, 0, page)
        return runner.run((IDS[60:61], 60, [page]))

    expected = next_logits(EmulatedDriver(2, order="eager"), [59], 0)
    np.testing.assert_array_equal(next_logits(EmulatedDriver(2, order="lazy"), outputs, 3), expected)


def test_half_of_the_layers_on_the_cpu(
    make: Callable[[], CUDABackend], load: Callable[..., LLM], tmp_path: Path
) -> None:
    path = small(tmp_path, num_hidden_layers=4)
    llm = load(path, make(), n_gpu_layers=2)
    assert {d: llm.info.placement.layers_on(d) for d in llm.info.placement.devices} == {"cpu": 2, "cuda:0": 2}
    assert_same_text(llm, load(path), LONG)


def test_layers_on_the_cpu_and_on_two_devices(load: Callable[..., LLM], tmp_path: Path) -> None:
    harness()
    path = small(tmp_path, "qwen2", T.Q4_K, num_hidden_layers=4)
    driver = EmulatedDriver(2, peers=False)
    llm = load(path, emulated_cuda(driver, 0), emulated_cuda(driver, 1), n_gpu_layers=2, tensor_split=[1, 1])
    layers = {d: llm.info.placement.layers_on(d) for d in llm.info.placement.devices}
    assert layers == {"cpu": 2, "cuda:0": 1, "cuda:1": 1}
    assert_same_text(llm, load(path), SHORT)


def test_a_cpu_behind_a_device(tmp_path: Path) -> None:
    """Not as a plan has it, but hidden states can go that way too."""
    harness()
    path = small(tmp_path)
    there = conversation(Runner(path, SplitOps([(cpu(), 1), (emulated_cuda(), 2)], micro_batch=32), 8))
    back = conversation(Runner(path, SplitOps([(emulated_cuda(), 1), (cpu(), 2)], micro_batch=32), 8))
    expected = conversation(Runner(path, cpu(), 8))
    for a, b, c in zip(there, back, expected, strict=True):
        if len(c):
            assert_near(a, c)
            assert_near(b, c)


LARGER = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "type", "context", "changes"),
    [
        ("llama", T.Q4_0, 64, {}),
        ("llama", T.Q4_0, 2048, {"vocab_size": 8000, "num_hidden_layers": 4, "head_dim": 64} | LARGER),
        ("qwen2", T.Q4_K, 4096, {"num_hidden_layers": 4, "tie_word_embeddings": True} | LARGER),
        ("qwen3", T.F16, 1024, {"num_hidden_layers": 6, "head_dim": 128} | LARGER),
        ("llama", T.F32, 256, {"num_hidden_layers": 6} | LARGER),
        ("mixtral", T.Q4_0, 1024, {"num_hidden_layers": 4} | LARGER),
        ("mixtral", T.F32, 256, LARGER),
        (
            "qwen3_moe",
            T.Q4_K,
            2048,
            LARGER | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "hidden_size": 256},
        ),
        ("qwen3_moe", T.F16, 64, {}),
    ],
)
def test_a_model_takes_the_memory_that_was_planned(
    load: Callable[..., LLM], tmp_path: Path, kind: str, type: GGMLType, context: int, changes: dict[str, Any]
) -> None:
    """No more, and little less, after texts that took all there is."""
    path = small(tmp_path, kind, type, max_position_embeddings=4096, **changes)
    assert_takes_what_was_planned(load, path, context, 1)


def test_a_mixture_on_two_devices_takes_the_memory_that_was_planned(load: Callable[..., LLM], tmp_path: Path) -> None:
    path = small(tmp_path, "mixtral", max_position_embeddings=MICRO_BATCH, **LARGER)
    assert_takes_what_was_planned(load, path, MICRO_BATCH, 2)


def assert_takes_what_was_planned(load: Callable[..., LLM], path: Path, context: int, n_devices: int) -> None:
    driver = KernellessDriver(n_devices, memory=1 << 32)
    with mock.patch.object(step, "NODE_BYTES", 0):  # emulated devices take no memory for graphs
        llm = load(path, *(CUDABackend(driver, i) for i in range(n_devices)), context=context)
    llm.logits(IDS[:60])
    for options in ({"temperature": 0}, {}):
        llm.generate(IDS[:60], max_tokens=2, **options)
    for i in range(n_devices):
        info = driver.memory_info(i)
        planned, used = llm.info.placement.on(f"cuda:{i}").total, info.total - info.free
        assert used == planned


# -- Company -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "type"), [("llama", T.Q4_0), ("llama", T.F16), ("mixtral", T.Q4_0)], ids=str)
def test_decoded_tokens_have_the_bits_of_prefilled_ones(
    make: Callable[[], CUDABackend], tmp_path: Path, kind: str, type: GGMLType
) -> None:
    """One by one, in buckets of every size, and all at once."""
    path = small(tmp_path, kind, type, num_hidden_layers=1)
    runner = Runner(path, make(), 8)
    at_once = runner.run((IDS[:44], 0, [3, 0]))
    first = 0
    for n in (1, 2, 3, 5, 1, 8, 12, 1, 11):
        out = runner.run((IDS[first : first + n], first, [5, 2]))
        np.testing.assert_array_equal(out, at_once[first : first + n])
        first += n
    assert first == 44
