"""Named values of every architecture, compared with the modules of transformers; and the bits of their programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.inspection.names import ValueNames
from localllm.inspection.transformers_values import layers_of, values_of
from localllm.kernels.backend import Batch, HostOutput, Step
from localllm.kernels.variants import graph_variant, head_graph
from tests.helpers.backends import shared_by_threads
from tests.helpers.recorder import CPUOps, ReferenceOps
from tests.helpers.run_model import Runner, make_batch
from tests.models.test_transformers import IDS, model_of
from tests.models.tiny import TINY, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[Any]


def run(step: Step, ids: Sequence[int], past: int, n_pages: int = 8, **more: Any) -> Array:
    """Return the logits of all tokens of one sequence."""
    return step(replace(batch_of(step, ids, past, n_pages), **more)).copy()


def batch_of(step: Step, ids: Sequence[int], past: int, n_pages: int = 8) -> Batch:
    batch = make_batch([(ids, past, range(n_pages))])
    return replace(batch, block_tables=np.repeat(batch.block_tables, len(step.cache.windows), axis=0))


def traced(runner: Runner, names: Sequence[str], chunks: Sequence[slice] = (slice(None),)) -> dict[str, Array]:
    """Return values at `IDS`, evaluated in chunks. The logits must have the bits of the program without names."""
    graph, values = graph_variant(runner.model.graph, names, ())
    step = runner.step.variant(graph)
    rows: dict[str, list[Array]] = {name: [] for name in names}
    for chunk in chunks:
        ids, past = IDS[chunk], chunk.start or 0
        states = [runner.cache.read(None, 0)] if runner.cache.n_states else []
        logits = run(runner.step, ids, past)
        for state in states:
            runner.cache.write(None, 0, state)
        np.testing.assert_array_equal(run(step, ids, past), logits)
        for name in names:
            rows[name].append(step.value(values[name]).copy())
    return {name: np.concatenate(parts) for name, parts in rows.items()}


def check(name: str, runner: Runner, limit: float) -> None:
    names, n_layers = ValueNames(runner.model.graph), runner.model.config.n_layers
    for i in range(n_layers):
        of_layer = {value.split(".")[2] for value in names if value.startswith(f"layers.{i}.")}
        assert {"input", "output"} <= of_layer
        assert of_layer & {"attention", "recurrent", "mlp"} or name == "deci", "a layer without a named block"
    theirs: dict[str, Array] = {}
    if not TINY[name].written:  # transformers has the model
        theirs = values_of(model_of(name), IDS, names)
        streams = {f"layers.{i}.{end}" for i in range(n_layers) for end in ("input", "output")}
        # The file of deci has more layers, and layers of hrm-text have other names in transformers.
        assert theirs.keys() >= {"embedding", "logits", *streams} or name in ("deci", "hrm-text")
        assert theirs.keys() >= {value for value in names if value.endswith(".router")} or name.startswith("llama4")
    ours = traced(runner, [*names])
    for value, expected in theirs.items():
        error = np.abs(ours[value] - expected).max() / np.abs(expected).max()
        assert error < limit, f"{value}: {error:.1e}"
    chunked = traced(runner, [*names], (slice(0, 7), slice(7, 20), slice(20, None)))
    for value, rows in ours.items():
        np.testing.assert_array_equal(chunked[value], rows, err_msg=value)
    graph = runner.model.graph
    stream = ours[f"layers.{graph.n_layers - 1}.output"]
    head = runner.step.variant(head_graph(graph))
    np.testing.assert_array_equal(head.run(batch_of(head, IDS, 0), HostOutput(stream)).rows(), ours["logits"])


@pytest.mark.parametrize("name", TINY)
def test_the_reference_has_the_values_of_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    check(name, Runner(path, ReferenceOps(np.float32)), 1e-3)


#: Models whose blocks differ most. Only CI runs the others on the CPU, because their kernels are slow to compile.
ON_THE_CPU = ("llama", "gemma2", "qwen3moe", "deepseek-v3", "mamba2", "qwen35", "qwen4exp", "lfm2", "gemma3n")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ON_THE_CPU else pytest.mark.ci) for name in TINY]
)
def test_the_cpu_has_the_values_of_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    check(name, Runner(path, shared_by_threads(CPUOps(threads=2))), 5e-3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3moe", "mamba2", "gptneox"])
def test_an_edit_changes_logits_as_in_transformers(name: str, tmp_path: Path) -> None:
    import torch

    runner = Runner(write(tmp_path / "model.gguf", TINY[name], model_of(name)), ReferenceOps(np.float32))
    vector = np.random.default_rng(3).normal(0, 1, runner.model.config.n_embd).astype(np.float32)

    def steer(value: str, x: Array, base: Array | None) -> None:
        x += vector

    def hook(module: Any, arguments: Any, result: Any) -> Any:
        added = torch.from_numpy(vector)
        return (result[0] + added, *result[1:]) if isinstance(result, tuple) else result + added

    edited = runner.step.variant(graph_variant(runner.model.graph, (), ["layers.1.output"])[0])
    ours, model = run(edited, IDS, 0, edit=steer), model_of(name)
    handle = layers_of(model, ValueNames(runner.model.graph))[1].register_forward_hook(hook)
    try:
        with torch.no_grad():
            theirs = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    finally:
        handle.remove()
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()
    assert np.abs(ours - run(runner.step, IDS, 0)).max() > 0.01 * np.abs(theirs).max()
