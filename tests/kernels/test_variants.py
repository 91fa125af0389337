"""Programs that read and change named values, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import DeviceError, KernelError
from localllm.gguf import GGUFFile
from localllm.kernels.backend import HostOutput, Step
from localllm.kernels.cpu.backend import CPUBackend
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.cupy_driver import open_driver
from localllm.kernels.cuda.row_split import RowSplitBackend
from localllm.kernels.variants import graph_variant, head_graph
from localllm.models.registry import read_model
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.helpers.backends import emulated_cuda, no_harness, shared_by_threads
from tests.helpers.recorder import CPUOps, ReferenceOps, SplitOps
from tests.helpers.run_model import Runner, make_batch
from tests.helpers.tiny_models import tiny_gguf

Array = NDArray[Any]

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 12)]


def _emulated() -> Any:
    if reason := no_harness():
        pytest.skip(reason)
    return emulated_cuda()


def _real() -> Any:
    try:
        return CUDABackend(open_driver(), 0)
    except DeviceError as error:
        pytest.skip(str(error))


MAKERS: dict[str, Callable[[], Any]] = {
    "reference": ReferenceOps,
    "cpu": lambda: shared_by_threads(CPUOps(threads=2)),
    "cuda-emulated": _emulated,
    "cuda": _real,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("variants") / "m.gguf", "qwen3_moe", type=GGMLType.Q8_0)


@pytest.fixture(params=MAKERS)
def runner(request: pytest.FixtureRequest, path: Path) -> Runner:
    return Runner(path, MAKERS[request.param](), n_pages=2, max_tokens=16)


def run(step: Step, ids: list[int], past: int = 0, **more: Any) -> Array:
    return step(replace(make_batch([(ids, past, [0])]), **more)).copy()


def test_reading_all_values_leaves_all_bits(runner: Runner, path: Path) -> None:
    graph, values = graph_variant(runner.model.graph, runner.model.graph.names, ())
    step = runner.step.variant(graph)
    expected = Runner(path, ReferenceOps(), n_pages=2)
    theirs = graph_variant(expected.model.graph, expected.model.graph.names, ())
    of_reference = expected.step.variant(theirs[0])
    for ids, past in ((IDS[:7], 0), (IDS[7:11], 7), (IDS[11:], 11)):
        logits = run(runner.step, ids, past)
        np.testing.assert_array_equal(run(step, ids, past), logits)
        run(of_reference, ids, past)
        np.testing.assert_array_equal(step.value(values["logits"]), logits)
        for name, value in values.items():
            actual, right = step.value(value), of_reference.value(theirs[1][name])
            assert actual.shape == right.shape, name
            if name.endswith("experts"):
                router = step.value(values[name.replace("experts", "router")])
                np.testing.assert_array_equal(np.sort(actual), np.sort(np.argsort(-router)[:, :3]))
                if not np.array_equal(np.sort(actual), np.sort(right)):
                    break  # rounding changed the choice of experts
            else:
                assert np.linalg.norm(actual - right) < 0.1 * np.linalg.norm(right), name


def test_edits_change_rows_and_what_follows(runner: Runner) -> None:
    names = ["layers.0.output", "layers.1.attention", "layers.1.mlp", "logits"]
    graph, values = graph_variant(runner.model.graph, [*names, "layers.1.input", "layers.1.output"], names)
    step, seen = runner.step.variant(graph), list[str]()

    def keep(name: str, x: Array, base: Array | None) -> None:
        seen.append(name)

    plain = run(runner.step, IDS)
    np.testing.assert_array_equal(run(step, IDS, edit=keep), plain)
    assert seen == names
    before = {name: step.value(value).copy() for name, value in values.items()}
    outputs: dict[str, Array] = {}

    def record(name: str, x: Array, base: Array | None) -> None:
        outputs[name] = x.copy() if base is None else x - base

    only_edits = runner.step.variant(graph_variant(runner.model.graph, (), names)[0])
    np.testing.assert_array_equal(run(only_edits, IDS, edit=record), plain)
    for name in names:
        np.testing.assert_array_equal(outputs[name], before[name])

    def change(name: str, x: Array, base: Array | None) -> None:
        assert (base is not None) == name.endswith(("attention", "mlp"))
        x[2:5] = base[2:5] if base is not None else 1.0 if name == "logits" else x[2:5, ::-1].copy()

    logits = run(step, IDS, edit=change)
    after = {name: step.value(value) for name, value in values.items()}
    np.testing.assert_array_equal(logits[:2], plain[:2])
    assert (logits[2:5] == 1).all()
    np.testing.assert_array_equal(after["layers.0.output"][2:5], before["layers.0.output"][2:5, ::-1])
    np.testing.assert_array_equal(after["layers.1.input"], after["layers.0.output"])
    for name in ("layers.1.attention", "layers.1.mlp"):  # a block whose output was removed
        assert not after[name][2:5].any()
        np.testing.assert_array_equal(after[name][:2], before[name][:2])
    np.testing.assert_array_equal(after["layers.1.output"][2:5], after["layers.1.input"][2:5])
    assert not np.array_equal(after["layers.1.attention"][5:], before["layers.1.attention"][5:]), (
        "later tokens see it"
    )


def test_the_head_computes_logits_of_streams(runner: Runner) -> None:
    graph, values = graph_variant(runner.model.graph, ["layers.2.output"], ())
    step, head = runner.step.variant(graph), runner.step.variant(head_graph(runner.model.graph))
    logits = run(step, IDS)
    stream = step.value(values["layers.2.output"]).copy()
    for first, n in ((0, len(IDS)), (5, 1)):
        batch, rows = make_batch([([0] * n, 0, [0])]), stream[first : first + n]
        np.testing.assert_array_equal(head.run(batch, HostOutput(rows)).rows(), logits[first : first + n])
    np.testing.assert_array_equal(
        run(runner.step, IDS[-1:], past=len(IDS) - 1), logits[-1:], "the cache is unchanged"
    )


def test_a_model_with_experts_in_its_file_has_variants(path: Path) -> None:
    sizes = {"n_pages": (2,), "max_tokens": 16, "max_outputs": 16}
    with GGUFFile.open(path) as file:  # the variant is compiled after the file was closed
        graph = read_model(file).graph
        step = CPUBackend(threads=1).footprint(graph, **sizes, expert_bytes=1 << 20).load(None)
    assert step.expert_reads is not None
    new, values = graph_variant(graph, ["layers.1.mlp"], ["layers.0.output"])
    variant = step.variant(new)
    np.testing.assert_array_equal(run(variant, IDS), run(step, IDS))
    assert variant.value(values["layers.1.mlp"]).shape == (len(IDS), 64)


def _split_reference(layers: list[int]) -> Any:
    return SplitOps([(ReferenceOps(), n) for n in layers], micro_batch=5)


def _split_cpu(layers: list[int]) -> Any:
    return SplitOps([(shared_by_threads(CPUOps(threads=2)), n) for n in layers], micro_batch=5)


def _split_cuda(layers: list[int]) -> Any:
    if reason := no_harness():
        pytest.skip(reason)
    driver = EmulatedDriver(n_devices=len(layers))
    return SplitOps([(emulated_cuda(driver, i), n) for i, n in enumerate(layers)], micro_batch=5)


@pytest.mark.parametrize(
    ("make", "split", "layers"),
    [
        *(("reference", _split_reference, layers) for layers in ([1, 2], [2, 1], [1, 1, 1])),
        ("cpu", _split_cpu, [1, 2]),
        ("cuda-emulated", _split_cuda, [1, 2]),
    ],
)
def test_a_model_split_over_devices_has_the_values_of_one_device(
    path: Path, make: str, split: Callable[[list[int]], Any], layers: list[int]
) -> None:
    """With edits before and after the cuts, and batches of more tokens than a micro-batch."""
    alone = Runner(path, MAKERS[make](), n_pages=2, max_tokens=16)
    parts = Runner(path, split(layers), n_pages=2, max_tokens=16)
    edited = ["embedding", *(f"layers.{i}.{name}" for i in range(3) for name in ("output", "attention", "mlp"))]
    for reads, changes in ((alone.model.graph.names, ()), (edited, ["logits", *edited]), ((), edited)):
        rows: list[dict[str, Array]] = []
        for runner in (alone, parts):

            def change(name: str, x: Array, base: Array | None) -> None:
                x[1:] += np.float32(0.25) * x[:-1]
                if base is not None:
                    x[0] = base[0]

            graph, values = graph_variant(runner.model.graph, reads, changes)
            step = runner.step.variant(graph)
            read: dict[str, Array] = {}
            for ids, past in ((IDS[:7], 0), (IDS[7:8], 7)):
                read[f"result after {past}"] = run(step, ids, past, edit=change)
                read |= {f"{name} after {past}": step.value(value).copy() for name, value in values.items()}
            rows.append(read)
            assert np.isfinite(run(runner.step, IDS, 0)).all()
        assert rows[0].keys() == rows[1].keys()
        for name, expected in rows[0].items():
            np.testing.assert_array_equal(rows[1][name], expected, err_msg=name)


def test_a_model_split_by_rows_has_no_variants(tmp_path: Path) -> None:
    if reason := no_harness():
        pytest.skip(reason)
    driver = EmulatedDriver(n_devices=2)
    backend = RowSplitBackend([emulated_cuda(driver, i) for i in range(2)])
    runner = Runner(tiny_gguf(tmp_path / "m.gguf", type=GGMLType.Q8_0), backend, n_pages=2, max_tokens=16)
    with pytest.raises(KernelError, match=r"split by rows cannot be read or changed: leave split_mode out to split"):
        runner.step.variant(runner.model.graph)


def test_chosen_experts_are_not_edited(path: Path) -> None:
    with pytest.raises(KernelError, match=r"layers.0.experts are numbers of experts, which cannot be changed"):
        graph_variant(Runner(path, ReferenceOps()).model.graph, (), ["layers.0.experts"])
