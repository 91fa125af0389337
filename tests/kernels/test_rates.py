"""Counts of a graph's work, and rates of kernels: measured once, stored, and measured again if they may be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.gguf import GGUFFile
from localllm.kernels import operations as ops
from localllm.kernels.cpu import rates as rates_module
from localllm.kernels.cpu.costs import OperationCost, costs
from localllm.kernels.cpu.rates import PROGRAM, CPURates, Rate, Zeros
from localllm.kernels.cpu.target import choose
from localllm.kernels.cpu.thread_choice import DISTURBED_SECONDS, KEPT_SECONDS
from localllm.kernels.graph import Graph, Rows, Tensor
from localllm.kernels.operations.attention import n_visible
from localllm.models.registry import read_model
from localllm.quant.types import GGMLType
from tests.helpers.tiny_models import tiny_gguf

TOKENS = Tensor(Rows.TOKENS, 64)
PRODUCT = OperationCost("matrix Q8_0", 0, GGMLType.Q8_0, 1, 1000, 500)


def graph_of(path: Path) -> Graph:
    with GGUFFile.open(path) as file:
        return read_model(file, 64).graph


# -- Counts --------------------------------------------------------------------------------------------------------


def test_a_token_reads_each_matrix_once(tmp_path: Path) -> None:
    """The widths need no padding, so that kernels read as many bytes as the file contains."""
    sizes = {"intermediate_size": 128, "vocab_size": 320}
    path = tiny_gguf(tmp_path / "model.gguf", type=GGMLType.Q8_0, **sizes)
    products = [cost for cost in costs(graph_of(path), 1, 0) if cost.is_product]
    with GGUFFile.open(path) as file:
        matrices = [t for t in file.tensors.values() if len(t.shape) == 2 and t.name != "token_embd.weight"]
    assert sum(cost.once for cost in products) == sum(tensor.n_bytes for tensor in matrices)
    assert sum(cost.per_row for cost in products) == sum(tensor.n_values for tensor in matrices)
    assert len([cost for cost in products if cost.layer == "output"]) == 1


def test_steps_without_outputs_need_no_head(tmp_path: Path) -> None:
    graph = graph_of(tiny_gguf(tmp_path / "model.gguf"))
    with_head, without = (sum(cost.per_row for cost in costs(graph, 8, 0, n)) for n in (1, 0))
    assert with_head - without >= 300 * 64
    assert {cost.layer for cost in costs(graph, 8, 0, 0)} == {0, 1, 2}


def test_experts_are_read_as_tokens_choose_them() -> None:
    """One token reads k experts, many tokens read all, and an expert computes whole tiles of eight tokens."""
    weight, graph = Zeros("experts", GGMLType.Q8_0, (16, 64, 64)), Graph()
    x, logits = graph.add(ops.Input(TOKENS, 0, 80)), graph.add(ops.Input(Tensor(Rows.TOKENS, 16), 64, 80))
    graph.add(ops.ExpertLinears(x, (weight,), graph.add(ops.Route(logits, 4, True))))
    one, few, many = (next(c for c in costs(graph, n, 0) if c.is_product) for n in (1, 8, 4000))
    expert_bytes = 64 * 64 * 34 / 32
    assert (one.n_rows, one.once, one.per_row) == (1, 4 * expert_bytes, 4 * 64 * 64)
    assert 4 * expert_bytes < few.once < 16 * expert_bytes
    assert few.n_rows == pytest.approx(32 * expert_bytes / few.once + 3.5)
    assert many.once == pytest.approx(16 * expert_bytes)
    assert many.n_rows == pytest.approx(1003.5)


@pytest.mark.parametrize("reach", [None, 1, 7, 100])
@pytest.mark.parametrize(("depth", "n"), [(0, 1), (0, 20), (5, 4), (90, 20), (300, 3)])
def test_visible_positions(reach: int | None, depth: int, n: int) -> None:
    positions = np.arange(depth, depth + n) + 1
    assert n_visible(reach, depth, n) == pytest.approx(np.minimum(positions, reach or positions[-1]).mean())


def test_families_differ_by_what_kernels_are_compiled_for(tmp_path: Path) -> None:
    graphs = [graph_of(tiny_gguf(tmp_path / f"{n}.gguf", **more)) for n, more in enumerate(({}, {"head_dim": 32}))]
    first, second = ({cost.family for cost in costs(graph, 1, 0)} for graph in graphs)
    assert {name.split()[0] for name in first} == {name.split()[0] for name in second}
    assert {name.split()[0] for name in first ^ second} == {"attention", "rope_append"}


def test_products_of_one_input_quantise_it_once(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", type=GGMLType.Q8_0, intermediate_size=128)
    products = [cost for cost in costs(graph_of(path), 8, 0) if cost.is_product and cost.layer == 0]
    # queries, keys and values; attention's output; gate and up; down
    assert [(bool(cost.n_inputs), cost.n_waits) for cost in products] == [
        *((True, 2), (False, 0), (False, 0), (True, 2)),
        *((True, 2), (False, 0), (True, 2)),
    ]
    assert [cost.per_row / cost.n_outputs for cost in products] == [64, 64, 64, 64, 64, 64, products[-1].n_inputs]


# -- Rates ---------------------------------------------------------------------------------------------------------


class Machine:
    """A machine whose measurements are constants, with a clock."""

    def __init__(self) -> None:
        self.now, self.other_cpus = 1e9, 0.0
        self.measured: list[Any] = []

    def rate(self, _: object, sample: Any) -> Rate:
        self.measured.append(sample)
        return Rate(1e-9, 0.0, 1e-11)

    def rates(self, threads: int = 2, decode_threads: int = 1, n_bytes: int = 1 << 40) -> CPURates:
        return CPURates(choose(), threads, decode_threads, n_bytes)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measures: None) -> Machine:
    machine = Machine()
    monkeypatch.setattr(rates_module, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(rates_module._Test, "program", lambda _: Rate(1e-4, per_row=1e-6))
    monkeypatch.setattr(rates_module._Test, "rate", lambda *arguments: machine.rate(*arguments))
    monkeypatch.setattr(rates_module.time, "time", lambda: machine.now)
    monkeypatch.setattr(rates_module.OtherLoad, "cpus", lambda _: machine.other_cpus)
    return machine


def test_a_step_takes_the_sum_of_its_operations(machine: Machine) -> None:
    rates = machine.rates()
    assert rates.seconds([PRODUCT]) is None
    rates.measure([PRODUCT, PRODUCT])
    assert machine.measured == [GGMLType.Q8_0]
    # One row takes as long as reading the weights, a thousand rows as long as multiplying.
    assert rates.seconds([PRODUCT]) == pytest.approx(1e-4 + 1e-6)
    many = PRODUCT._replace(n_rows=1000, n_waits=2)
    assert rates.seconds([PRODUCT, many]) == pytest.approx(1e-4 + 1e-6 + 5e-6 + 2e-6)


def test_products_take_time_apart_from_multiplying() -> None:
    rate = Rate(1e-9, 0.0, 1e-11, start=1e-6, per_input=1e-8, per_output=1e-7)
    first, second = PRODUCT._replace(n_waits=2, n_inputs=50, n_outputs=10), PRODUCT._replace(n_outputs=10)
    assert rate.of(first) == pytest.approx(2e-6)
    assert rate.of(second) == pytest.approx(1e-6)  # the matrices of an operation are read one after another
    of_a_row = 500 * 1e-11 + 10 * 1e-7
    assert rate.of(first._replace(n_rows=100)) == pytest.approx(100 * (of_a_row + 50 * 1e-8))
    assert rate.of(second._replace(n_rows=100)) == pytest.approx(100 * of_a_row)


def test_small_operations_may_be_unknown_in_rough_predictions(machine: Machine) -> None:
    rates = machine.rates()
    norm = OperationCost("rms_norm 64", 0, ops.RMSNorm(TOKENS, None, 1e-5), 1, 1, 1)
    rates.measure([PRODUCT])
    assert rates.seconds([PRODUCT, norm]) is None
    assert rates.seconds([PRODUCT, norm], is_rough=True) == pytest.approx(1e-4 + 1e-6 + 1e-6)
    assert rates.seconds([PRODUCT._replace(family="matrix Q4_0")], is_rough=True) is None


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (lambda machine, patch: None, False),
        (lambda machine, patch: setattr(machine, "now", machine.now + KEPT_SECONDS - 1), False),
        (lambda machine, patch: setattr(machine, "now", machine.now + KEPT_SECONDS + 1), True),
        (lambda machine, patch: setattr(machine, "now", machine.now - 1), True),
        (lambda machine, patch: patch.setattr(rates_module, "fingerprint", lambda: "other kernels"), True),
        (lambda machine, patch: patch.setattr(rates_module, "machine_key", lambda *_: "another processor"), True),
    ],
)
def test_rates_are_measured_again_if_something_changed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None], again: bool
) -> None:
    machine.rates().measure([PRODUCT])
    change(machine, monkeypatch)
    rates = machine.rates()
    assert (rates.seconds([PRODUCT]) is None) == again
    rates.measure([PRODUCT])
    assert len(machine.measured) == 1 + again


def test_rates_belong_to_threads_and_to_the_memory_that_is_read(machine: Machine) -> None:
    machine.rates().measure([PRODUCT])
    for other in (machine.rates(threads=1), machine.rates(decode_threads=2), machine.rates(n_bytes=0)):
        assert other.seconds([PRODUCT]) is None
        other.measure([PRODUCT])
    assert machine.rates().seconds([PRODUCT]) is not None
    assert len(machine.measured) == 4


def test_a_disturbed_measurement_is_soon_repeated(machine: Machine) -> None:
    machine.other_cpus = 1.0
    machine.rates().measure([PRODUCT])
    machine.now += DISTURBED_SECONDS + 1
    assert machine.rates().seconds([PRODUCT]) is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"kernels": 1}', "[" * 100_000, '{"kernels": "K", "rates": {"a": [1]}}']
)
def test_damaged_files_are_ignored(machine: Machine, tmp_path: Path, content: str) -> None:
    machine.rates().measure([PRODUCT])
    (file,) = (tmp_path / "cache").glob("rates-*.json")
    file.write_text(content.replace("K", rates_module.fingerprint()))
    rates = machine.rates()
    assert rates.seconds([PRODUCT]) is None
    rates.measure([PRODUCT])
    assert machine.rates().seconds([PRODUCT]) is not None


def test_no_cache_folder(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "cache_root", lambda: None)
    rates = machine.rates()
    rates.measure([PRODUCT])
    assert rates.seconds([PRODUCT]) is not None
    assert machine.rates().seconds([PRODUCT]) is None


def test_processes_add_to_the_rates_of_others(machine: Machine, tmp_path: Path) -> None:
    first, second = machine.rates(), machine.rates()
    first.measure([PRODUCT])
    second.measure([PRODUCT._replace(family="matrix Q4_0")])
    (file,) = (tmp_path / "cache").glob("rates-*.json")
    names = {name.rpartition(": ")[2] for name in json.loads(file.read_bytes())["rates"]}
    assert names == {PROGRAM, "matrix Q8_0", "matrix Q4_0"}


# -- Measuring -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measures: None) -> None:
    """Measure small operations, in a separate cache."""
    sizes = {"STEPS": (1, 4, 24), "DEPTH": 96, "DEPTH_OF_SEVERAL": 48, "COLUMNS": 256, "MATRIX_BYTES": 1 << 20}
    for name, size in {**sizes, "MATRIX_ROWS": 64, "REPEATS": 2, "TRIES": 1, "TRY_SECONDS": 0}.items():
        monkeypatch.setattr(rates_module, name, size)
    monkeypatch.setattr(rates_module, "cache_root", lambda: tmp_path / "cache")


def test_everything_is_measured_on_zeros(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight of the model is read, although the operations of its graph are measured."""
    graph = graph_of(tiny_gguf(tmp_path / "model.gguf", "qwen3_moe", type=GGMLType.Q8_0))
    packed: list[Any] = []
    load = rates_module.CPUPackedWeights.load
    monkeypatch.setattr(
        rates_module.CPUPackedWeights, "load", lambda s, use, *more: packed.append(use.weight) or load(s, use, *more)
    )
    work = [*costs(graph, 8, 0)]
    rates = CPURates(choose(), 2, 1, 1 << 40)
    rates.measure(work)
    assert packed
    assert all(isinstance(weight, Zeros) for weight in packed)
    known = [rates._rate(cost.family) for cost in work]
    assert all(rate is not None and min(rate) >= 0 for rate in known)
    assert rates.seconds(work) is not None
