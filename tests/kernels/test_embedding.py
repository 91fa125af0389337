"""Embedding tables: they keep the rows of the file after the file is gone."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.kernels import embedding
from localllm.kernels.backend import Backend
from localllm.kernels.cpu import weights
from localllm.kernels.cpu.backend import CPUBackend
from localllm.kernels.graph import Graph, Matrix
from localllm.kernels.operations import Embed, Linear, Outputs
from localllm.kernels.reference import ReferenceBackend
from localllm.quant.formats import FORMATS
from localllm.quant.types import GGMLType
from tests.helpers.blocks import has_own_kernel, random_rows, values_of
from tests.helpers.run_model import make_batch
from tests.helpers.weights import Tensor, blocks

IDS = np.array([36, 0, 17, 17], np.int32)

#: Whether the table is tied to the output matrix, and its format.  Only CI compiles kernels that are nearly the same
#: as another.
CASES = [
    pytest.param(tied, t, id=f"{tied}-{t.name}", marks=[pytest.mark.ci] if tied and not has_own_kernel(t) else [])
    for tied in (False, True)
    for t in FORMATS
]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return ReferenceBackend() if request.param == "reference" else CPUBackend(threads=2)


@pytest.mark.parametrize(("tied", "type"), CASES)
@pytest.mark.parametrize("small", [False, True])
def test_rows_survive_changes_of_the_file(
    type: GGMLType, backend: Backend, tied: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is overwritten after a table of 37 rows was loaded.

    If kernels read another format, float16 rounds the scales of a tied table.
    """
    monkeypatch.setattr(weights, "SMALL_TABLE", 1 << 20 if small else 0)
    rows = random_rows(type, 37, 256)
    values, weight = values_of(rows, type).astype(np.float32), blocks(rows, type, 256)
    graph = Graph()
    x = graph.add(Embed(weight))
    if tied:
        graph.add(Linear(x, Matrix(weight)))
    graph.add(Outputs(x))
    step = backend.compile(graph, n_pages=(1,), max_tokens=4, max_outputs=4)
    rows[:] = 0x55
    np.testing.assert_allclose(step(make_batch([(IDS, 0, [0])])), values[IDS], rtol=2**-11 * tied, atol=1e-7 * tied)


def test_large_tables_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []

    class Counted(Tensor):
        def drop_pages(self) -> None:
            dropped.append(1)

    monkeypatch.setattr(embedding, "_COPIED_BYTES", 3000)
    rows = random_rows(GGMLType.F32, 10, 256)
    table = embedding.CopiedTable.of(Counted(GGMLType.F32, (10, 256), rows))
    np.testing.assert_array_equal(table.data, rows)
    assert len(dropped) == 5, "two rows of 1,024 bytes at a time"
