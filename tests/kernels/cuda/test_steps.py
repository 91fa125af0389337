"""Compiled steps on a device: which kernels are launched, captured and replayed, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.errors import KernelError
from localllm.kernels.backend import HostOutput, Step
from localllm.kernels.cuda import calls, cupy_driver, step as steps
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.calls import Inputs
from localllm.kernels.graph import Matrix
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu import fake_cupy
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.helpers import tiny_models
from tests.helpers.backends import emulated_cuda, no_harness
from tests.helpers.blocks import random_rows
from tests.helpers.recorder import CacheShape, Ops, SplitOps
from tests.helpers.run_model import Runner, make_batch
from tests.helpers.weights import NO_CACHE, blocks, f32, random
from tests.kernels.cuda.watched import KernellessDriver, WatchedDriver

T = GGMLType
needs_harness = pytest.mark.skipif(no_harness() is not None, reason="the CUDA harness does not run here")
IDS = [int(i) for i in np.random.default_rng(3).integers(3, 300, 600)]
#: Kernels per layer for one token.
LAYER = {
    "rms_norm": 2,
    "matvec": 3,
    "matvec_gated": 1,
    "rope_append": 1,
    "attention_split": 1,
    "attention_merge": 1,
}


def small(path: Path, **changes: Any) -> Path:
    """Write a model with the same format for all matrices."""
    options = {"head_dim": 32, "intermediate_size": 256, "max_position_embeddings": 1024} | changes
    return tiny_models.tiny_gguf(path / "model.gguf", type=T.Q4_0, **options)


def watched(**options: Any) -> tuple[WatchedDriver, CUDABackend]:
    driver = WatchedDriver(**options)
    return driver, emulated_cuda(driver)


# -- Launches and graphs -------------------------------------------------------------------------------------------


def test_a_layer_takes_nine_launches_for_a_token(tmp_path: Path) -> None:
    driver = KernellessDriver()
    runner = Runner(small(tmp_path), CUDABackend(driver, 0, compiles_ahead=False))
    driver.forget()
    runner.run((IDS[:1], 0, [0]))
    once = dict(driver.kernels)
    assert sum(LAYER.values()) == 9
    assert once.pop("embed") == 1
    assert once.pop("gather_rows") == 1
    last = {"rms_norm": 1, "matvec": 1}
    assert once == {name: 3 * n + last.get(name, 0) for name, n in LAYER.items()}
    n = driver.calls["launch"]
    assert steps.graph_bytes(runner.step) == 16 * n * steps.NODE_BYTES  # a graph per extent, 16 in all


@needs_harness
def test_a_mixture_takes_eleven_launches_for_a_token(tmp_path: Path) -> None:
    """The router reads the row that the norm writes in addition to its codes."""
    driver, ops = watched()
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 1}
    path = tiny_models.tiny_gguf(tmp_path / "model.gguf", "qwen3_moe", type=T.Q4_0, **sizes)
    runner = Runner(path, ops, 2)
    prefilled = runner.run((IDS[:20], 0, [0]))
    driver.forget()
    np.testing.assert_array_equal(runner.run((IDS[19:20], 19, [0])), prefilled[19:])
    assert driver.calls["launch"] == 11 + 4
    assert (driver.kernels["quantise"], driver.kernels["route"], driver.kernels["matvec_experts_summed"]) == (0, 1, 1)


@needs_harness
def test_only_changed_block_tables_are_uploaded(tmp_path: Path) -> None:
    """Also if only the middle sequence changes, and after a smaller batch."""
    driver, ops = watched()
    path = small(tmp_path, num_hidden_layers=1)
    runner, other = Runner(path, ops, 8), Runner(path, ops, 8)
    alone = [other.run((IDS[10 * i : 10 * i + 4], 0, [i])) for i in range(4)]
    for pages, n_uploads in (
        ([0, 1, 2], 1),
        ([0, 1, 2], 1),
        ([0, 3, 2], 2),
        ([4], 1),
        ([4, 3, 2], 2),
        ([4, 5, 6, 3], 2),
    ):
        driver.forget()
        found = runner.run(*((IDS[10 * i : 10 * i + 4], 0, [page]) for i, page in enumerate(pages)))
        np.testing.assert_array_equal(found, np.concatenate(alone[: len(pages)]))
        assert driver.calls["upload"] == n_uploads


@needs_harness
def test_the_merge_of_splits_writes_codes(tmp_path: Path) -> None:
    """In a prefill, a separate launch quantises the rows.  The bits are the same."""
    driver, ops = watched()
    runner = Runner(small(tmp_path, num_hidden_layers=2, num_key_value_heads=1), ops, 2)
    prefilled = runner.run((IDS[:70], 0, [0, 1]))
    assert driver.kernels["quantise"] == 2
    np.testing.assert_array_equal(runner.run((IDS[67:70], 67, [0, 1])), prefilled[67:])
    np.testing.assert_array_equal(runner.run((IDS[69:70], 69, [0, 1])), prefilled[69:])
    assert driver.kernels["attention_merge"] == 4
    assert driver.kernels["quantise"] == 2


@needs_harness
@pytest.mark.parametrize(("type", "activation"), [(T.Q4_0, "silu"), (T.Q4_K, "gelu"), (T.Q5_1, "clamped_swiglu")])
def test_a_product_computes_its_gate(type: T, activation: str) -> None:
    """One token gets the bits of a batch, whose gate is a separate launch."""
    driver, backend = watched()
    ops = Ops(backend)
    weights = [blocks(random_rows(type, 256, 512, seed=seed), type, 512) for seed in (0, 1)]
    matrices = [Matrix(weights[0], f32(random(256))), Matrix(weights[1])]
    down, table = Matrix(blocks(random_rows(type, 40, 256), type, 256)), ops.load_embedding(f32(random(5, 512)))

    def forward() -> Any:
        gate, up = ops.linears(ops.embed(table), matrices)
        return ops.outputs(ops.linear(ops.gated(gate, up, activation), down))

    step = ops.compile(forward, ops.new_cache(NO_CACHE, 4), max_tokens=5, max_outputs=5)
    together = step(make_batch([(range(5), 0, [0])], outputs=range(5))).copy()
    assert driver.kernels["gated"] == 1
    for i in range(5):
        np.testing.assert_array_equal(step(make_batch([([i], 0, [0])]))[0], together[i])
    assert driver.kernels["matvec_gated"] > 0
    assert driver.kernels["gated"] == 1


@needs_harness
@pytest.mark.parametrize("types", [(T.Q4_K, T.Q4_K, T.Q6_K), (T.Q5_K, T.Q6_K), (T.Q4_K, T.Q3_K)])
def test_matrices_of_two_formats_share_a_launch(types: Sequence[T]) -> None:
    """With few tokens, if a kernel for both formats exists.  The bits are the same as in a batch."""
    driver, backend = watched()
    ops, sizes = Ops(backend), (96, 32, 40)
    matrices = [Matrix(blocks(random_rows(t, n, 512, seed=n), t, 512)) for t, n in zip(types, sizes, strict=False)]
    table, head = ops.load_embedding(f32(random(5, 512))), [Matrix(f32(random(7, n))) for n in sizes]

    def forward() -> Any:
        total = None
        for y, matrix in zip(ops.linears(ops.embed(table), matrices), head, strict=False):
            total = ops.linear(y, matrix, residual=total)
        return ops.outputs(total)

    step = ops.compile(forward, ops.new_cache(NO_CACHE, 4), max_tokens=5, max_outputs=5)
    together = step(make_batch([(range(5), 0, [0])], outputs=range(5))).copy()
    for n in (1, 2, 4):
        driver.forget()
        found = step(make_batch([(range(n), 0, [0])], outputs=range(n)))
        np.testing.assert_array_equal(found, together[:n])
        is_shared = types != (T.Q4_K, T.Q3_K)
        assert driver.kernels["matvec"] == len(types) + (1 if is_shared else 2)


@needs_harness
def test_batches_of_a_bucket_are_one_replay(tmp_path: Path) -> None:
    driver, ops = watched()
    path = small(tmp_path)
    runner, plain = Runner(path, ops, 8), Runner(path, emulated_cuda(), 8)
    expected = plain.run((IDS[:40], 0, [0])), plain.run((IDS[50:90], 0, [1]))
    runner.run((IDS[:10], 0, [4]))
    runner.run((IDS[50:60], 0, [6]))
    for past in range(10, 16):
        driver.forget()
        out = runner.run((IDS[past : past + 1], past, [4]), (IDS[50 + past : 51 + past], past, [6]))
        for row, whole in zip(out, expected, strict=True):
            np.testing.assert_array_equal(row, whole[past])
        if past > 11:  # the first step launches, the second is captured
            assert driver.calls == {"upload": 1, "replay": 1, "download": 1}


def test_pinned_memory_grows_with_the_sequences_of_a_batch(tmp_path: Path) -> None:
    """Memory is not reserved for as many sequences as a batch has tokens."""
    driver, n_pages = KernellessDriver(memory=1 << 28), 4000
    path = small(tmp_path, head_dim=16)
    runner = Runner(path, CUDABackend(driver, 0, compiles_ahead=False, chunk_bytes=1 << 12), n_pages)
    of_one_each = 4 * 4 * n_pages
    assert driver.pinned_bytes < 10 * of_one_each
    for n_sequences, tables in ((1, None), (1, 0), (3, 6), (6, 0), (7, 14)):
        driver.pinned_bytes = 0
        for _ in range(4):
            runner.run(*((IDS[i : i + 1], 0, [i]) for i in range(n_sequences)), outputs=[])
        if tables is not None:  # the first steps also allocate memory for results
            assert tables * of_one_each <= driver.pinned_bytes <= (tables + 2 * bool(tables)) * of_one_each


@needs_harness
def test_a_graph_serves_caches_up_to_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SHORTEST", 64)
    driver, ops = watched()
    path = small(tmp_path, num_hidden_layers=1)
    runner, pages = Runner(path, ops, 8), [3, 1, 7, 0, 6]
    at_once = Runner(path, emulated_cuda(), 8).run((IDS[:300], 0, range(5)))
    runner.run((IDS[:300], 0, pages), outputs=[])
    launched = []
    for past in (40, 62, 64, 40, 120, 128, 290, 3, 299, 127, 289):
        driver.forget()
        out = runner.run((IDS[past : past + 1], past, pages))
        np.testing.assert_array_equal(out[0], at_once[past])
        launched.append(driver.calls["launch"] > 0)
    # Launch, capture, then replay, for up to 64, 128 and 256 tokens, and for the whole cache.
    assert launched == [True, True, True, False, True, True, True, False, True, False, False]


@needs_harness
def test_attention_is_not_split_if_partial_sums_take_too_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small(tmp_path, num_hidden_layers=1)
    pages = [3, 1, 7, 0, 6]
    at_once = Runner(path, emulated_cuda(), 8).run((IDS[:290], 0, pages))
    monkeypatch.setattr(calls, "MAX_PARTIAL_BYTES", 1 << 8)
    driver, ops = watched()
    runner = Runner(path, ops, 8)
    runner.run((IDS[:285], 0, pages), outputs=[])
    for past in (285, 286):
        np.testing.assert_array_equal(runner.run((IDS[past : past + 1], past, pages))[0], at_once[past])
    np.testing.assert_array_equal(runner.run((IDS[287:290], 287, pages)), at_once[287:])
    assert driver.kernels["attention_split"] == 0


def test_kernels_of_every_batch_are_compiled_ahead(tmp_path: Path) -> None:
    for kind, capability in (("llama", (9, 0)), ("llama", (7, 5)), ("qwen2", (8, 6))):
        driver = KernellessDriver(capability=capability, shared_bytes=(64 if capability < (8, 0) else 99) << 10)
        path = tiny_models.tiny_gguf(tmp_path / "m.gguf", kind, type=T.Q8_0, max_position_embeddings=2048)
        runner = Runner(path, CUDABackend(driver, 0))
        ahead = {key for key in driver.compiled if key[0] != "pack"}
        assert ahead
        driver.loaded.clear()
        for n in (1, 2, 3, 5, 8, 9, 17, 24, 25, 32, 33, 40, 63, 64, 100, 127, 128, 200, 511, 512):
            runner.run((IDS[:n], 0, range(8)))
            runner.run((IDS[:n], 1400, range(30)), outputs=[n - 1])
        assert driver.loaded <= ahead


@pytest.mark.parametrize("most", [8, 32, 64])
def test_ragged_batches_share_a_graph(tmp_path: Path, most: int) -> None:
    """Sequences come, go and grow: the step is launched once, captured once, and then replayed."""
    driver = KernellessDriver()
    runner = Runner(small(tmp_path), CUDABackend(driver, 0, compiles_ahead=False), most)
    launched = []
    for n in (most, most - 3, most // 2 + 1, most - 1):
        driver.forget()
        runner.run(*((IDS[:1], (7 * n * i) % 60, [i]) for i in range(n)))
        launched.append(driver.calls["launch"] > 0)
    assert launched == [True, True, False, False]


def test_a_step_without_outputs_omits_the_output_layer(tmp_path: Path) -> None:
    driver = KernellessDriver()
    runner = Runner(small(tmp_path), CUDABackend(driver, 0, compiles_ahead=False))
    driver.forget()
    out = runner.run((IDS[:100], 0, [0, 1]), outputs=[])
    assert out.shape == (0, 300)
    assert driver.kernels["gather_rows"] == 0
    assert driver.kernels["matmul"] == 3 * 4  # one launch for q, k and v, one for gate and up


class _AnyKernel(dict[str, Any]):
    """Modules, or kernels of a module, of any name."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        return lambda defines: _AnyKernel()


class _NoFunction(fake_cupy.FakeFunction):
    """A kernel that does nothing, in the order of its stream."""

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int, stream: Any
    ) -> None:
        assert shared_mem <= self.shared_limit
        stream.put(lambda: None)


def test_cupy_serves_all_requests_of_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load, run and capture steps of several sizes, and move hidden states between devices."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fake_cupy, "FakeFunction", _NoFunction)
    monkeypatch.setattr(cupy_driver, "import_cupy", lambda: fake_cupy.FakeCupy([1 << 28] * 2, _AnyKernel()))
    driver = cupy_driver.CupyDriver()
    split = SplitOps([(CUDABackend(driver, i), n) for i, n in ((0, 1), (1, 2))], micro_batch=32)
    path = small(tmp_path)
    for runner in (Runner(path, split, 8), Runner(path, CUDABackend(driver, 1), 8)):
        for n in (1, 1, 1, 5, 5, 100, 100):
            assert runner.run((IDS[:n], 0, [0, 1])).shape == (n, 300)
        runner.cache.copy(0, 0, 1)


# -- Memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 7, 32, 512])
def test_codes_of_a_norm_or_gate_do_not_overlap_its_inputs(tmp_path: Path, max_tokens: int) -> None:
    ops = CUDABackend(KernellessDriver(), 0, compiles_ahead=False)
    step = Runner(small(tmp_path), ops, 4, max_tokens).step
    fused = [call for call in step.calls if call.name in ("norm + quantise", "gate + quantise")]
    assert len(fused) == 3 * 3 + 1
    for call in fused:
        written = [x.buffer for x in call.operands if isinstance(x, Inputs)]
        read = [buffer for buffer in call.buffers if buffer not in written]
        assert len(written) == 1
        assert read
        for buffer in read:
            apart = buffer.offset + buffer.n_bytes, written[0].offset + written[0].n_bytes
            assert apart[0] <= written[0].offset or apart[1] <= buffer.offset


@needs_harness
def test_every_memory_access_is_valid(tmp_path: Path) -> None:
    """Checks bounds, uninitialised memory and races in a forward pass."""
    ops = emulated_cuda(EmulatedDriver(mode="check"))
    runner = Runner(small(tmp_path, num_hidden_layers=1), ops, 2)
    first = runner.run((IDS[:5], 0, [1]))
    assert np.isfinite(first).all()
    assert np.isfinite(runner.run((IDS[5:6], 5, [1]))).all()


# -- Choice of tokens ----------------------------------------------------------------------------------------------


def logits_step(backend: CUDABackend, logits: np.ndarray) -> Step:
    """Return a step whose logits are rows of a table."""
    ops = Ops(backend)
    table = ops.load_embedding(f32(logits))
    n = len(logits)
    return ops.compile(lambda: ops.outputs(ops.embed(table)), ops.new_cache(NO_CACHE, 4), max_tokens=n, max_outputs=n)


@needs_harness
def test_the_best_ids_are_chosen_on_the_device() -> None:
    logits = np.random.default_rng(4).standard_normal((6, 5000)).astype(np.float32)
    logits[1, [4000, 17]] = 9
    logits[2] = -np.inf
    logits[3, 40] = np.nan
    driver, ops = watched()
    step = logits_step(ops, logits)
    for rows in ([0, 1, 2, 3, 4, 5], [3], [5, 1]):
        for k, n_bytes in ((1, 8), (2, 8 * 64 + 4), (64, 8 * 64 + 4), (65, 8 * 256 + 4)):
            driver.forget()
            ids, values, *_ = step.top_k(make_batch([(range(6), 0, [0])], outputs=rows), k)
            expected = logits[rows].argmax(axis=1)  # a NaN comes first
            np.testing.assert_array_equal(ids[:, 0], expected)
            assert (driver.calls["download"], driver.downloaded_bytes) == (1, n_bytes * len(rows))
    ids, values, *_ = step.top_k(make_batch([(range(6), 0, [0])], outputs=[]), 5)
    assert ids.shape == values.shape == (0, 5)
    driver.forget()
    best = step.top_k(make_batch([(range(6), 0, [0])], outputs=[4, 5, 0, 1]), 1, [3, 0])
    assert driver.downloaded_bytes == 4 * 8 + 2 * 4 * step.result.stride, "of the other rows, only the best"
    assert {i: row.tolist() for i, row in best.whole.items()} == {3: logits[1].tolist(), 0: logits[4].tolist()}


def test_choices_and_pages_out_of_range_are_refused() -> None:
    step = logits_step(CUDABackend(KernellessDriver(), 0), np.zeros((2, 40), np.float32))
    batch = make_batch([([0], 0, [0])])
    for k in (0, 41):
        with pytest.raises(KernelError, match=f"{k} of 40 logits cannot be chosen: 1 to 40 can"):
            step.top_k(batch, k)
    with pytest.raises(KernelError, match="no page 4 in a cache of 4"):
        step.cache.copy(0, 0, 4)


@needs_harness
@pytest.mark.parametrize("order", ["lazy", "eager"])
def test_a_batch_continues_with_ids_chosen_on_the_device(order: Any) -> None:
    """Several steps, also in graphs, start before one is read.  Ids may come from any row."""
    follows = np.random.default_rng(3).permutation(40)
    driver = EmulatedDriver(order=order)
    step = logits_step(emulated_cuda(driver), np.eye(40, dtype=np.float32)[follows])
    assert step.chooses_ahead
    given = make_batch([([7], 0, [0]), ([30], 0, [1])], outputs=[0, 1])
    ids = np.array([7, 30])
    found = step.run(replace(given, top_k=1))
    for k in (1, 1, 5, 5, 1, 1):
        ids = follows[ids]
        swapped = replace(given, ids=np.array([~1, ~0], np.int32), top_k=k, n_chosen=2)
        coming = step.run(swapped)
        np.testing.assert_array_equal(found.top_k(1).ids[:, 0], ids)
        found, ids = coming, ids[::-1]
    step.run(given)
    with pytest.raises(KernelError, match="continues with 2 ids, but 0 were chosen"):
        step.run(swapped)
    with pytest.raises(KernelError, match="token ids outside the vocabulary"):
        step.run(replace(swapped, n_chosen=1))


# -- Parts ---------------------------------------------------------------------------------------------------------


def doubling(backend: CUDABackend) -> Step:
    """Return a part that adds hidden states [T, 40] to their product with a unit matrix, which doubles them."""
    ops, unit = Ops(backend), Matrix(f32(np.eye(40)))

    def forward() -> Any:
        x = ops.hidden(40)
        return ops.linear(x, unit, residual=x)

    return ops.compile(forward, ops.new_cache(CacheShape(1, 1, 16), 1), max_tokens=9, max_outputs=1)


Orders = Sequence[tuple[str, int]]


@needs_harness
@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("order", ["lazy", "eager", "random"])
def test_hidden_states_move_between_devices(order: Any, peers: bool) -> None:
    """Many batches run at once, and a part gets the next batch before the host waits for the last."""
    x = np.random.default_rng(0).standard_normal((12, 9, 40)).astype(np.float32)
    for seed in range(4 if order == "random" else 1):
        driver = EmulatedDriver(2, peers=peers, order=order, seed=seed)
        parts = [doubling(emulated_cuda(driver, i)) for i in (0, 1, 1, 0)]
        found = []
        for i, rows in enumerate(x):
            n = 1 + i % 9
            batch = make_batch([(range(n), 0, [0])], outputs=[])
            given = rows[:n].copy()
            hidden: Any = HostOutput(given)
            for part in parts:
                hidden = part.run(batch, hidden)
            given[:] = np.nan  # the parts have read it
            if i % 3 == 0:
                found.append((i, n, hidden.rows().copy()))
        for i, n, out in found:
            np.testing.assert_array_equal(out, 16 * x[i, :n])


def test_hidden_states_of_another_batch_are_refused() -> None:
    part = doubling(CUDABackend(KernellessDriver(), 0, compiles_ahead=False))
    before = part.run(make_batch([(range(2), 0, [0])], outputs=[]), HostOutput(np.zeros((2, 40), np.float32)))
    batch = make_batch([(range(3), 0, [0])], outputs=[])
    with pytest.raises(KernelError, match=r"got hidden states \[2, 40\]"):
        part.run(batch, before)
