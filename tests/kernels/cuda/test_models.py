"""Whole models on emulated CUDA devices, and on a real device if available.

A model writes the CPU's text, and its bits depend neither on how it is split over devices nor on the rest of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.errors import DeviceError
from localllm.kernels.backend import Backend
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.cupy_driver import open_driver
from localllm.llm import LLM
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.emulated_streams import StreamOrder
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.helpers import tiny_models
from tests.helpers.backends import emulated_cuda
from tests.helpers.recorder import SplitOps
from tests.helpers.run_model import Runner
from tests.kernels.cuda.conftest import cpu

T = GGMLType
#: Tokens of prompts.  The short prompt is padded to a bucket; the long prompt uses tiles of tensor cores.
SHORT, LONG = 5, 75
#: Generated tokens, and the least lead of each token's logit.  Rounding moves logits by a third of the lead.
N_WRITTEN, AHEAD = 8, 0.05
IDS = [int(i) for i in np.random.default_rng(2).integers(3, 300, LONG)]


@pytest.fixture(params=["emulated", "real"])
def make(request: pytest.FixtureRequest) -> Callable[[], CUDABackend]:
    if request.param == "emulated":
        skip_without_tools()
        return emulated_cuda
    try:
        driver = open_driver()
    except DeviceError as error:
        pytest.skip(str(error))
    return lambda: CUDABackend(driver, 0)


def small(path: Path, kind: str = "llama", type: GGMLType = T.Q4_0, **changes: Any) -> Path:
    """Write a tiny model.  All heads have 16 values, so that kernels are compiled for one size only."""
    return tiny_models.tiny_gguf(path / "model.gguf", kind, type=type, **{"head_dim": 16} | changes)


def greedy(llm: LLM, prompt: Any, n: int = N_WRITTEN) -> tuple[int, ...]:
    return llm.generate(prompt, temperature=0, max_tokens=n, ignore_eos=True).ids


def clear_prompt(llm: LLM, n: int) -> list[int]:
    """Return a prompt of ``n`` tokens whose generated tokens all lead clearly."""
    for seed in range(1000):
        prompt = [int(i) for i in np.random.default_rng(seed).integers(3, 300, n)]
        written = greedy(llm, prompt)
        largest = np.sort(llm.logits([*prompt, *written])[n - 1 : -1], axis=1)
        if (largest[:, -1] - largest[:, -2]).min() > AHEAD:
            return prompt
    raise AssertionError("no prompt leads to tokens that lead clearly")


def assert_same_text(llm: LLM, on_cpu: LLM, n: int) -> None:
    prompt = clear_prompt(on_cpu, n)
    assert_near(llm.logits(prompt), on_cpu.logits(prompt))
    assert greedy(llm, prompt) == greedy(on_cpu, prompt)


def assert_near(a: np.ndarray, b: np.ndarray) -> None:
    """Compare logits of one model on different hardware."""
    assert np.square(a - b).mean() < 1e-3 * np.square(b).mean()


# -- The CPU's text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "type", "n", "cache_type"),
    [
        *((kind, type, SHORT, "f16") for kind, type in (("llama", T.Q4_0), ("qwen2", T.Q4_K), ("llama", T.F16))),
        *((kind, T.Q8_0, SHORT, "f16") for kind in ("qwen3", "qwen3_moe")),
        *(("llama", T.Q4_0, LONG, cache_type) for cache_type in ("f16", "q8_0")),
        ("mixtral", T.Q4_0, LONG, "f16"),
    ],
    ids=str,
)
def test_the_text_is_the_cpus(
    make: Callable[[], CUDABackend],
    load: Callable[..., LLM],
    tmp_path: Path,
    kind: str,
    type: GGMLType,
    n: int,
    cache_type: str,
) -> None:
    path = small(tmp_path, kind, type, num_hidden_layers=2, tie_word_embeddings=kind == "qwen3")
    on_cpu, on_cuda = load(path, cache_type=cache_type), load(path, make(), cache_type=cache_type)
    assert on_cuda.info.device == "cuda:0"
    assert_same_text(on_cuda, on_cpu, n)


@pytest.mark.parametrize(("order", "seed"), [("lazy", 0), ("eager", 0), ("random", 1)])
def test_streams_in_any_order(order: StreamOrder, seed: int, load: Callable[..., LLM], tmp_path: Path) -> None:
    skip_without_tools()
    path = small(tmp_path)
    assert_same_text(load(path, emulated_cuda(EmulatedDriver(order=order, seed=seed))), load(path), SHORT)


def test_requests_that_read_and_change_values_share_a_gpu(
    make: Callable[[], CUDABackend], load: Callable[..., LLM], tmp_path: Path
) -> None:
    """Other requests keep their bits, also if their next step was launched ahead."""
    llm, name = load(small(tmp_path, num_hidden_layers=2), make(), context=64, parallel=4), "layers.0.output"
    prompt, options = IDS[:SHORT], {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    vector = np.random.default_rng(3).normal(0, 2, 64)
    plain, steered = llm.generate(prompt, **options).ids, llm.generate(prompt, steer={name: vector}, **options).ids
    assert plain != steered
    rows = list[np.ndarray]()
    keep = {"watch": name, "on_values": lambda positions, values: rows.append(values[name])}
    streams = [llm.stream(prompt, **options, **more) for more in ({}, {"steer": {name: vector}}, {}, keep)]
    assert [stream.read().ids for stream in streams] == [plain, steered, plain, plain]
    whole = llm.trace([*prompt, *plain[:-1]], name, positions=slice(SHORT - 1, None))[name]
    np.testing.assert_array_equal(np.concatenate(rows), whole)


# -- Several devices -----------------------------------------------------------------------------------------------


def conversation(runner: Runner) -> list[np.ndarray]:
    """Return logits of a prefill of two sequences, which is split into micro-batches, and of single tokens."""
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
    """Return a model and its `conversation`."""
    skip_without_tools()
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


@pytest.mark.parametrize("outputs", [[59], []], ids=["with logits", "without"])
def test_a_page_is_copied_after_the_step_that_fills_it(
    outputs: list[int], on_one_device: tuple[Path, list[np.ndarray]]
) -> None:
    """A step without logits is still running when the page is copied."""
    path, _ = on_one_device

    def next_logits(driver: EmulatedDriver, outputs: list[int], page: int) -> np.ndarray:
        runner = Runner(path, SplitOps([(emulated_cuda(driver, i), n) for i, n in ((0, 1), (1, 2))], micro_batch=32))
        runner.run((IDS[:60], 0, [0]), outputs=outputs)
        if page:
            runner.cache.copy(0, 0, page)
        return runner.run((IDS[60:61], 60, [page]))

    expected = next_logits(EmulatedDriver(2, order="eager"), [59], 0)
    np.testing.assert_array_equal(next_logits(EmulatedDriver(2, order="lazy"), outputs, 3), expected)


def test_layers_on_the_cpu_and_on_two_devices(load: Callable[..., LLM], tmp_path: Path) -> None:
    skip_without_tools()
    path = small(tmp_path, "qwen2", T.Q4_K, num_hidden_layers=4)
    driver = EmulatedDriver(2, peers=False)
    llm = load(path, emulated_cuda(driver, 0), emulated_cuda(driver, 1), n_gpu_layers=2, tensor_split=[1, 1])
    layers = {d: llm.info.placement.layers_on(d) for d in llm.info.placement.devices}
    assert layers == {"cpu": 2, "cuda:0": 1, "cuda:1": 1}
    assert_same_text(llm, load(path), SHORT)


def test_layers_on_a_device_before_layers_on_the_cpu(tmp_path: Path) -> None:
    """Plans never choose this order, but hidden states can move in both directions."""
    skip_without_tools()
    path = small(tmp_path)
    there = conversation(Runner(path, SplitOps([(cpu(), 1), (emulated_cuda(), 2)], micro_batch=32), 8))
    back = conversation(Runner(path, SplitOps([(emulated_cuda(), 1), (cpu(), 2)], micro_batch=32), 8))
    expected = conversation(Runner(path, cpu(), 8))
    for a, b, c in zip(there, back, expected, strict=True):
        if len(c):
            assert_near(a, c)
            assert_near(b, c)


# -- Batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "type"), [("llama", T.Q4_0), ("llama", T.F16), ("mixtral", T.Q4_0)], ids=str)
def test_decoded_tokens_have_the_bits_of_prefilled_ones(
    make: Callable[[], CUDABackend], tmp_path: Path, kind: str, type: GGMLType
) -> None:
    """Decode in batches of every bucket size, compared with one prefill."""
    path = small(tmp_path, kind, type, num_hidden_layers=1)
    runner = Runner(path, make(), 8)
    at_once = runner.run((IDS[:44], 0, [3, 0]))
    first = 0
    for n in (1, 2, 3, 5, 1, 8, 12, 1, 11):
        out = runner.run((IDS[first : first + n], first, [5, 2]))
        np.testing.assert_array_equal(out, at_once[first : first + n])
        first += n
    assert first == 44
