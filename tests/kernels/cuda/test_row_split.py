"""Models split by rows over emulated devices: each device computes a part of every layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from localllm.errors import KernelError, UsageError
from localllm.kernels.cuda import step
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.row_split import RowSplitBackend
from localllm.llm import LLM
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.emulated_streams import StreamOrder
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.helpers.backends import emulated_cuda
from tests.helpers.run_model import Runner, make_batch
from tests.kernels.cuda.conftest import cpu
from tests.kernels.cuda.test_models import (
    IDS,
    LONG,
    SHORT,
    assert_near,
    assert_same_text,
    conversation,
    small,
)
from tests.kernels.cuda.test_planned_memory import LARGER
from tests.kernels.cuda.watched import KernellessDriver
from tests.models import tiny

T = GGMLType
#: Sizes that four devices can share.
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 160}


def over(n: int, **options: Any) -> RowSplitBackend:
    driver = EmulatedDriver(n, **options)
    return RowSplitBackend([emulated_cuda(driver, i) for i in range(n)])


@pytest.mark.parametrize(
    ("kind", "type", "n", "peers", "order"),
    [
        ("llama", T.Q4_0, 2, True, "random"),
        ("llama", T.Q8_0, 2, False, "lazy"),
        ("qwen3", T.F16, 3, True, "lazy"),
        ("qwen2", T.Q4_0, 4, False, "random"),
        ("llama", T.F32, 2, True, "eager"),
    ],
)
def test_the_text_is_the_cpus(
    load: Callable[..., LLM], tmp_path: Path, kind: str, type: GGMLType, n: int, peers: bool, order: StreamOrder
) -> None:
    skip_without_tools()
    path = small(tmp_path, kind, type, num_hidden_layers=2, **WIDE)
    llm = load(path, over(n, peers=peers, order=order, seed=n))
    assert_same_text(llm, load(path), SHORT)


@pytest.mark.parametrize("name", ["gemma2", "command-r", "gpt2", "phi3"])
def test_architectures(tmp_path: Path, name: str) -> None:
    """Norms after blocks, soft-caps, windows, parallel blocks, biases and fused matrices."""
    skip_without_tools()
    pytest.importorskip("transformers")
    path = tiny.write(tmp_path / "model.gguf", tiny.TINY[name], tiny.make_model(tiny.TINY[name]))
    split, on_cpu = (Runner(path, backend, 8).run((IDS[:20], 0, [3])) for backend in (over(2), cpu()))
    assert_near(split, on_cpu)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """Return a model and its `conversation` on two devices."""
    skip_without_tools()
    path = small(tmp_path_factory.mktemp("rows"), num_hidden_layers=2)
    return path, conversation(Runner(path, over(2), 8))


@pytest.mark.parametrize(("peers", "order", "seed"), [(True, "eager", 0), (False, "random", 1), (True, "random", 2)])
def test_the_bits_are_the_same_in_every_run(
    peers: bool, order: StreamOrder, seed: int, on_two: tuple[Path, list[np.ndarray]]
) -> None:
    """In any order of streams, with sums from peers or through the host."""
    path, expected = on_two
    again = conversation(Runner(path, over(2, peers=peers, order=order, seed=seed), 8))
    for a, b in zip(again, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_decoded_tokens_have_the_bits_of_prefilled_ones(on_two: tuple[Path, list[np.ndarray]]) -> None:
    """The first tokens are launched, the others replay the graph of all devices."""
    path, _ = on_two
    runner = Runner(path, over(2, order="random"), 8)
    at_once = runner.run((IDS[:12], 0, [3]))
    for i in range(12):
        np.testing.assert_array_equal(runner.run((IDS[i : i + 1], i, [5])), at_once[i : i + 1])


@pytest.mark.parametrize("seed", range(4))
def test_steps_start_before_results_are_read(seed: int, on_two: tuple[Path, list[np.ndarray]]) -> None:
    """The host does not wait, so the next batch must not overwrite inputs that a device still reads."""
    path, _ = on_two
    batches = [make_batch([(IDS[i : i + 1], i, [5])]) for i in range(6)]
    read, unread = (Runner(path, over(2, order="random", seed=seed), 8).step for _ in range(2))
    expected = [read(batch) for batch in batches][-1]
    *_, last = [unread.run(batch) for batch in batches]
    np.testing.assert_array_equal(last.rows(), expected)


def test_pages_hold_the_heads_of_all_devices(on_two: tuple[Path, list[np.ndarray]]) -> None:
    path, _ = on_two
    runner = Runner(path, over(2), 8)
    runner.run((IDS[:60], 0, [0]), outputs=[])
    runner.cache.copy(0, 0, 3)
    runner.cache.write(0, 4, runner.cache.read(0, 0))
    expected = runner.run((IDS[60:61], 60, [0]))
    for page in (3, 4):
        np.testing.assert_array_equal(runner.run((IDS[60:61], 60, [page])), expected)


def test_the_largest_batch(on_two: tuple[Path, list[np.ndarray]]) -> None:
    """Launches are rounded up to eight tokens; the size is no multiple of eight."""
    path, _ = on_two
    expected, through_host = (
        Runner(path, over(2, peers=peers), 8, max_tokens=75).run((IDS, 0, [0, 1])) for peers in (True, False)
    )
    np.testing.assert_array_equal(through_host, expected)


@pytest.mark.parametrize("peers", [True, False])
def test_the_first_part_of_a_long_prompt_has_no_outputs(peers: bool, on_two: tuple[Path, list[np.ndarray]]) -> None:
    """Both as single launches and from a graph."""
    path, _ = on_two
    runner = Runner(path, over(2, peers=peers), 8)
    expected = runner.run((IDS, 0, [0, 1]))[70:]
    for pages in ([2, 3], [4, 5], [6, 7]):
        assert not len(runner.run((IDS[:70], 0, pages), outputs=[]))
        np.testing.assert_array_equal(runner.run((IDS[70:], 70, pages)), expected)


def test_the_first_layers_on_the_cpu(load: Callable[..., LLM], tmp_path: Path) -> None:
    skip_without_tools()
    path = small(tmp_path, num_hidden_layers=3)
    llm = load(path, over(2), n_gpu_layers=2)
    assert {d: llm.info.placement.layers_on(d) for d in llm.info.placement.devices} == {"cpu": 1, "cuda:0": 2}
    assert_same_text(llm, load(path), LONG)


def test_the_option_split_mode(load: Callable[..., LLM], tmp_path: Path) -> None:
    skip_without_tools()
    path, driver = small(tmp_path, num_hidden_layers=1), EmulatedDriver(2)
    gpus = [emulated_cuda(driver, i) for i in range(2)]
    assert load(path, *gpus, split_mode="layer").info.device == "cuda:0"
    llm = load(path, *gpus, split_mode="row")
    assert llm.info.device == "cuda:0+cuda:1"
    assert_same_text(llm, load(path), SHORT)
    with pytest.raises(UsageError, match="tensor_split is for a model split by layers"):
        load(path, *gpus, split_mode="row", tensor_split=[1, 1])
    for n, there in ((0, "are 0"), (1, "is 1")):
        with pytest.raises(UsageError, match=f"needs 2 to 8 GPUs, but there {there}"):
            load(path, *gpus[:n], split_mode="row")


@pytest.mark.parametrize("peers", [True, False])
def test_a_model_takes_the_planned_memory(load: Callable[..., LLM], tmp_path: Path, peers: bool) -> None:
    """The plan is the memory of the device that takes most, times the number of devices."""
    path = small(tmp_path, max_position_embeddings=512, **LARGER)
    on_one = load(path, CUDABackend(KernellessDriver(1, memory=1 << 32), 0), context=256)
    driver = KernellessDriver(2, memory=1 << 32, peers=peers)
    with mock.patch.object(step, "NODE_BYTES", 0):  # emulated devices take no memory for graphs
        llm = load(path, RowSplitBackend([CUDABackend(driver, i) for i in range(2)]), context=256)
    llm.generate(IDS[:60], max_tokens=2, temperature=0)
    used = [info.total - info.free for info in map(driver.memory_info, range(2))]
    assert 2 * max(used) == llm.info.placement.on("cuda:0").total
    assert max(used) < 0.75 * on_one.info.placement.on("cuda:0").total


@pytest.mark.parametrize(
    ("kind", "n", "message"),
    [("mixtral", 2, "mixtures of experts cannot be split by rows"), ("llama", 4, "2 .* each of 4 devices")],
)
def test_models_that_cannot_be_split_are_refused(tmp_path: Path, kind: str, n: int, message: str) -> None:
    backend = RowSplitBackend([CUDABackend(KernellessDriver(n), i) for i in range(n)])
    with pytest.raises(KernelError, match=f"{message}.*leave split_mode out"):
        Runner(small(tmp_path, kind), backend, 8)
