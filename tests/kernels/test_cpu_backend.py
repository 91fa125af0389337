"""The CPU backend: batches that it refuses, memory that it keeps, and the threads that it uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import DeviceError, UsageError
from localllm.kernels.cpu import host, weights
from localllm.kernels.cpu.backend import FEW_TOKENS, SHORT_STEP
from localllm.kernels.cpu.batch import BatchTables
from localllm.kernels.cpu.program import Job, Workers
from localllm.kernels.cpu.thread_limit import ThreadLimit
from localllm.quant.packing import LAYOUTS
from localllm.quant.repack import ScaleRangeError
from localllm.quant.types import GGMLType
from tests.helpers.recorder import CacheShape, CPUOps
from tests.helpers.run_model import make_batch
from tests.helpers.weights import f32, one_sequence, run

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def ops() -> CPUOps:
    return CPUOps(threads=2)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def doubled(ops: CPUOps, width: int = 32) -> Callable[[], Any]:
    """Return a forward pass with one kernel: it doubles rows."""
    table, twice = ops.load_embedding(f32(np.eye(64, width))), ops.load_linear(f32(2 * np.eye(width)))
    return lambda: ops.outputs(ops.linear(ops.embed(table), twice))


def test_a_step_waits_for_an_interrupted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two interrupts in a row can end `step` while threads still compute it."""
    ops = CPUOps(threads=2)
    table, wide = ops.load_embedding(f32(np.eye(64, 1024))), ops.load_linear(f32(2 * np.eye(1024)))
    cache = ops.new_cache(CacheShape(1, 1, 16), 1)

    def forward() -> Any:
        x = ops.embed(table)
        for _ in range(20):
            x = ops.linear(x, wide)
        return ops.outputs(x)

    step = ops.compile(forward, cache, max_tokens=64, max_outputs=64)
    step(make_batch([(range(64), 0, [0])]))  # starts the threads

    def cut_short(workers: Workers, job: Job) -> None:
        workers._inboxes[0].jobs.put(job)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workers, "_await", cut_short)
        with pytest.raises(KeyboardInterrupt):
            step(make_batch([(range(64), 0, [0])]))
    job = ops.workers._last
    assert job is not None
    seen: list[bool] = []
    fill = BatchTables.fill
    monkeypatch.setattr(BatchTables, "fill", lambda self, *given: (seen.append(job.done), fill(self, *given)))
    out = step(make_batch([(range(8), 0, [0])], outputs=[3]))
    assert seen == [True]
    np.testing.assert_array_equal(out, 2.0**20 * np.eye(64, 1024)[[3]])


def test_a_small_step_runs_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, handed = CPUOps(threads=2), []
    step = ops.compile(doubled(ops), ops.new_cache(CacheShape(1, 1, 16), 1), max_tokens=8, max_outputs=8)
    run = ops.workers.run
    monkeypatch.setattr(ops.workers, "run", lambda job, before: (handed.append(job), run(job, before)))
    out = step(make_batch([(range(8), 0, [0])])).copy()
    assert not handed
    ops.backend.small_step = 0
    np.testing.assert_array_equal(step(make_batch([(range(8), 0, [0])])), out)
    assert len(handed) == 1


def test_a_step_keeps_its_weights_alive(ops: CPUOps) -> None:
    """Only the step refers to the weights after `forward` has returned."""
    x, matrix, weight = random(3, 64), random(64, 64), random(64)

    def forward() -> Any:
        normed = ops.rms_norm(ops.embed(ops.load_embedding(f32(x))), ops.load_vector(f32(weight)), 0.0)
        return ops.outputs(ops.linear(normed, ops.load_linear(f32(matrix), f32(weight))))

    step = ops.compile(forward, ops.new_cache(CacheShape(1, 1, 16), 1), max_tokens=3, max_outputs=3)
    trash = [random(4096) for _ in range(50)]
    normed = x / np.sqrt(np.square(x.astype(float)).mean(axis=1, keepdims=True)) * weight
    np.testing.assert_allclose(step(one_sequence(3)), normed @ matrix.T + weight, rtol=1e-4, atol=1e-4)
    assert len(trash) == 50


def test_a_lookup_after_other_operations_keeps_its_rows(ops: CPUOps) -> None:
    """Rows are looked up before the program runs, so the program must not overwrite them."""
    first, second = random(8, 64), random(8, 64)
    tables, linear = [ops.load_embedding(f32(x)) for x in (first, second)], ops.load_linear(f32(np.eye(64)))

    def forward() -> Any:
        # These buffers are free before the second lookup, and the program writes to them.
        scratch = ops.linear(ops.rms_norm(ops.embed(tables[0]), ops.load_vector(f32(np.ones(64))), 0.0), linear)
        del scratch
        return ops.outputs(ops.embed(tables[1]))

    np.testing.assert_array_equal(run(ops, forward, one_sequence(8)), second)


def test_a_deep_pass_takes_no_more_memory_than_a_shallow_one(ops: CPUOps) -> None:
    table, ones = ops.load_embedding(f32(random(4, 64))), ops.load_vector(f32(np.ones(64)))
    linear = ops.load_linear(f32(random(64, 64)))

    def forward(depth: int) -> None:
        x = ops.embed(table)
        for _ in range(depth):
            a, b = ops.linears(ops.rms_norm(x, ones, 1e-6), [linear, linear])
            x = ops.linear(ops.gated(a, b, "silu"), linear, residual=x)
        ops.outputs(x)

    def n_bytes(depth: int) -> int:
        graph = ops.record(lambda: forward(depth), CacheShape(1, 1, 16))
        return ops.footprint(graph, n_pages=(1,), max_tokens=16, max_outputs=16).buffers

    assert 0 < n_bytes(2) == n_bytes(30)


def test_pages_hold_transposed_keys_and_rows_of_values(ops: CPUOps) -> None:
    x = random(64, 16)
    table, cache = ops.load_embedding(f32(x)), ops.new_cache(CacheShape(1, 1, 16), 2)

    def forward() -> Any:
        return ops.outputs(ops.rope_append(ops.embed(table), ops.embed(table), ops.embed(table), None, 0))

    run(ops, forward, make_batch([(range(64), 0, [1])]), cache)
    keys, values = cache.blocks()[0]
    expected = x.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(values[1, 0].view(np.uint16), expected.ravel())
    np.testing.assert_array_equal(keys[1, 0].view(np.uint16), expected.T.ravel())
    assert not keys[0].any()
    assert not values[0].any()


def test_steps_of_few_tokens_use_the_threads_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    own = CPUOps(threads=3)
    own.backend.small_step = 0
    own.backend.decode_threads = 2
    monkeypatch.setattr(ThreadLimit, "record", lambda *_: None)  # independent of other load on the machine
    taken: list[int | None] = []
    original = Workers.run

    def watched(workers: Workers, job: Job, *rest: Any) -> None:
        taken.append(job.threads)
        original(workers, job, *rest)

    forward = doubled(own)
    few = FEW_TOKENS
    sizes = (1, few, few + 1, SHORT_STEP + 1)
    expected = [run(own, forward, one_sequence(n)) for n in sizes]
    monkeypatch.setattr(Workers, "run", watched)
    for n, threads, logits in zip(sizes, (2, 2, 3, 3), expected, strict=True):
        taken.clear()
        np.testing.assert_array_equal(run(own, forward, one_sequence(n)), logits)
        assert taken[-1] == threads


@pytest.mark.parametrize(("kept_bytes", "drops"), [(1, 4), (2 * 256 * 128, 2), (1 << 20, 1)])
def test_pages_of_large_matrices_are_dropped_while_they_are_packed(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int, drops: int
) -> None:
    """A matrix of 1,000 rows of 128 bytes is packed 256 rows at a time."""
    monkeypatch.setattr(weights, "KEPT_BYTES", kept_bytes)
    dropped: list[None] = []
    matrix = random(1000, 32)
    weight = f32(matrix)
    monkeypatch.setattr(weight, "drop_pages", lambda: dropped.append(None))
    packed, _ = CPUOps(threads=2).loader.pack(weight)
    assert len(dropped) == drops
    unpacked = LAYOUTS[GGMLType.F32].unpack_rows(packed, 32, np.arange(1000))
    np.testing.assert_array_equal(unpacked.view(np.float32), matrix)


def test_a_scale_out_of_range_stops_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is useless after one thread found the scale, so the other threads stop."""
    repacked: list[None] = []

    def repack(rows: NDArray[np.uint8], *_: object) -> NDArray[np.uint8]:
        if not repacked:
            repacked.append(None)
            raise ScaleRangeError
        repacked.append(None)
        time.sleep(0.01)
        return rows

    monkeypatch.setattr(weights, "repack", repack)
    ops = CPUOps(threads=2)
    with pytest.raises(ScaleRangeError):
        ops.loader._pack(f32(random(100 * weights.PACKED_ROWS, 32)), GGMLType.F32)
    assert len(repacked) < 20


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(ops: CPUOps, threads: int) -> None:
    own = CPUOps(threads=threads)
    x, matrix = random(20, 64), random(500, 64)

    def result(ops: CPUOps) -> np.ndarray:
        table, linear = ops.load_embedding(f32(x)), ops.load_linear(f32(matrix))
        return run(ops, lambda: ops.outputs(ops.linear(ops.embed(table), linear)), one_sequence(20))

    np.testing.assert_array_equal(result(own), result(ops))
    own.workers.close()


@pytest.mark.parametrize("threads", [0, host.most_threads() + 1, 200_000])
def test_a_number_of_threads_out_of_range_is_refused(threads: int) -> None:
    with pytest.raises(UsageError, match=rf"threads={threads} .* 1 to {host.most_threads()}, "):
        CPUOps(threads=threads)


def test_an_error_while_starting_threads_is_raised_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    own = CPUOps(threads=4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(DeviceError, match="none of 4 threads could be started"):
            own.loader.pack(f32(random(600, 32)))
    assert own.loader.pack(f32(random(600, 32)))[0].nbytes >= 4 * 600 * 32
    own.workers.close()
