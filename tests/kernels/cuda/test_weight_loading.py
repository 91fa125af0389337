"""The upload of weights to an emulated device, and its errors."""

from __future__ import annotations

import gc
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from localllm.errors import DeviceLostError, DeviceMemoryError
from localllm.kernels.cuda.backend import CUDABackend
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.helpers.backends import emulated_cuda, no_harness
from tests.helpers.blocks import random_rows
from tests.helpers.recorder import CacheShape, Ops
from tests.helpers.run_model import make_batch
from tests.helpers.weights import Tensor, blocks, f32, run
from tests.kernels.cuda.watched import KernellessDriver, WatchedDriver

T = GGMLType
needs_harness = pytest.mark.skipif(no_harness() is not None, reason="the CUDA harness does not run here")


@dataclass(eq=False)
class Mapped(Tensor):
    """A tensor that counts the calls of `drop_pages`."""

    drops: list[int] = field(default_factory=list)

    def drop_pages(self) -> None:
        self.drops.append(1)


def rows_of(backend: CUDABackend, table: Tensor, ids: list[int]) -> np.ndarray:
    ops = Ops(backend)
    return run(ops, lambda: ops.outputs(ops.embed(table)), make_batch([(ids, 0, [0])]))


@needs_harness
@pytest.mark.parametrize(("order", "seed"), [("lazy", 0), ("eager", 0), *(("random", seed) for seed in range(6))])
def test_rows_are_uploaded_through_two_buffers(order: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks have 96 rows, the last one fewer, in any order of the device's work."""
    monkeypatch.setattr("localllm.kernels.cuda.weights.KEPT_BYTES", 1 << 15)
    n_rows, n_in = 1000, 256
    rows = random_rows(T.Q4_0, n_rows, n_in)
    driver = WatchedDriver(order=order, seed=seed)
    backend = CUDABackend(driver, 0, compiles_ahead=False, tile_rows=(32,), chunk_bytes=96 * rows.shape[1])
    tensor = Mapped(T.Q4_0, (n_rows, n_in), rows)
    matrix = backend.loader.matrix(tensor)
    assert driver.pinned_bytes == 2 * 96 * rows.shape[1]
    assert driver.kernels == {"pack": -(-n_rows // 96)}
    assert len(tensor.drops) == n_rows // (2 * 96)
    assert (matrix.format, matrix.n_bytes) == ("Q4_0", backend.loader.planned(tensor).n_bytes)
    ids = [0, 95, 96, 97, 500, 959, 960, 999]
    np.testing.assert_array_equal(rows_of(backend, tensor, ids), dequantize(rows, T.Q4_0)[ids])


class OrderedDriver(KernellessDriver):
    """Records the calls that have ended before each upload and each launch.

    Attributes:
        needs: names of these calls, for "upload 0", "pack 0", …
    """

    def __init__(self) -> None:
        super().__init__()
        self.needs: dict[str, set[str]] = {}
        self._before: defaultdict[object, set[str]] = defaultdict(set)

    def record(self, event: Any, stream: Any) -> None:
        self._before[event] = set(self._before[stream])
        super().record(event, stream)

    def wait(self, stream: Any, event: Any) -> None:
        self._before[stream] |= self._before[event]
        super().wait(stream, event)

    def synchronize(self, work: Any) -> None:
        self._before["host"] |= self._before[work]
        super().synchronize(work)

    def upload(self, destination: Any, source: Any, stream: Any) -> None:
        self._note("upload", stream)
        super().upload(destination, source, stream)

    def launch(
        self, module: Any, kernel: str, grid: Any, block: Any, arguments: Any, stream: Any, *more: Any
    ) -> None:
        self._note(kernel, stream)
        super().launch(module, kernel, grid, block, arguments, stream, *more)

    def _note(self, what: str, stream: object) -> None:
        name = f"{what} {sum(what in known for known in self.needs)}"
        self.needs[name] = self._before[stream] | self._before["host"]
        self._before[stream] |= {name}


def test_uploads_wait_for_a_free_buffer_only() -> None:
    """Packing waits for its rows, and an upload for the buffers of two chunks ago, but not for the last packing."""
    driver, n_chunks = OrderedDriver(), 7
    ops = CUDABackend(driver, 0, compiles_ahead=False, chunk_bytes=32 * 4 * 64)
    ops.loader.matrix(f32(np.ones((32 * n_chunks, 64))))
    assert driver.pinned_bytes == 2 * 32 * 4 * 64
    for i in range(n_chunks):
        needs = driver.needs[f"upload {i}"]
        assert f"upload {i}" in driver.needs[f"pack {i}"]
        assert f"pack {i - 1}" not in needs
        assert i < 2 or {f"upload {i - 2}", f"pack {i - 2}"} <= needs


@needs_harness
def test_formats_without_a_kernel_are_repacked_during_the_upload() -> None:
    rows = random_rows(T.MXFP4, 40, 256)
    backend, tensor = emulated_cuda(), blocks(rows, T.MXFP4, 256)
    assert backend.loader.matrix(tensor).format == "LUT_E2M1_32"
    np.testing.assert_array_equal(rows_of(backend, tensor, [0, 39]), dequantize(rows, T.MXFP4)[[0, 39]])


@needs_harness
def test_matrices_with_scales_above_float16_become_float32() -> None:
    rows = random_rows(T.MXFP4, 40, 64)
    rows[7, 0], rows[7, 1] = 200, 0x77
    backend, tensor = emulated_cuda(), blocks(rows, T.MXFP4, 64)
    matrix = backend.loader.matrix(tensor)
    assert (matrix.format, matrix.n_bytes) == ("F32", 64 * 128 * 4)
    np.testing.assert_array_equal(rows_of(backend, tensor, [6, 7]), dequantize(rows, T.MXFP4)[[6, 7]])


@pytest.mark.parametrize("type", [T.F32, T.F16, T.BF16, T.Q4_0, T.Q6_K, T.IQ2_XXS], ids=lambda t: t.name)
def test_the_memory_of_weights_is_planned(type: GGMLType) -> None:
    loader = CUDABackend(KernellessDriver(), 0).loader
    for shape in ((1, 256), (33, 512), (64, 1024)):
        tensor = blocks(random_rows(type, *shape), type, shape[1])
        assert loader.matrix(tensor).n_bytes == loader.planned(tensor).n_bytes


def test_bfloat16_becomes_float32_before_sm_80() -> None:
    loader = CUDABackend(KernellessDriver(capability=(7, 5), shared_bytes=64 << 10), 0).loader
    tensor = blocks(random_rows(T.BF16, 32, 128), T.BF16, 128)
    matrix = loader.matrix(tensor)
    assert (matrix.format, matrix.n_bytes) == ("F32", 32 * 128 * 4)
    assert loader.planned(tensor).n_bytes == matrix.n_bytes


# -- Errors --------------------------------------------------------------------------------------------------------


def load_and_run(driver: EmulatedDriver) -> None:
    """Allocate memory in every way that a backend does."""
    ops = Ops(CUDABackend(driver, 0, compiles_ahead=False))
    linear = ops.load_linear(f32(np.ones((32, 32))), f32(np.ones(32)))
    cache = ops.new_cache(CacheShape(1, 1, 16), 2)

    def forward() -> object:
        x = ops.linear(ops.embed(linear.weight), linear)
        return ops.linear(ops.outputs(x), linear)

    step = ops.compile(forward, cache, max_tokens=4, max_outputs=4)
    for _ in range(2):
        step(make_batch([([1, 2], 0, [0])]))


def test_a_failed_allocation_is_reported_and_all_memory_is_freed() -> None:
    whole = KernellessDriver()
    whole.memories.fail_allocation = 1000
    load_and_run(whole)
    n_allocations = 1000 - whole.memories.fail_allocation
    assert n_allocations >= 6
    for number in range(1, n_allocations + 1):
        driver = KernellessDriver()
        driver.memories.fail_allocation = number
        with pytest.raises(DeviceMemoryError, match="CUDA device 0 cannot allocate"):
            load_and_run(driver)
        gc.collect()
        assert driver.memory_info(0).free == driver.memory_info(0).total


def test_weights_larger_than_the_device() -> None:
    ops = CUDABackend(KernellessDriver(memory=1 << 20), 0)
    with pytest.raises(DeviceMemoryError, match=r"cannot allocate 4,194,304 bytes: 1,048,576 of its 1,048,576"):
        ops.loader.matrix(f32(np.ones((1024, 1024))))


@pytest.mark.parametrize("after", [0, 3, 8, 12])
def test_a_lost_device_is_reported(after: int) -> None:
    driver = KernellessDriver()
    driver.lose(0, after)
    with pytest.raises(DeviceLostError, match="emulated CUDA device 0 is lost"):
        load_and_run(driver)
