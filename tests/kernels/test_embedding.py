"""Embedding tables: the rows that the file has, after the file is gone."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.kernels import embedding
from localllm.kernels.cpu.ops import CPUOps
from localllm.kernels.embedding import EmbeddingTable
from localllm.kernels.ops import Ops
from localllm.kernels.reference import ReferenceOps
from localllm.quant.formats import FORMATS
from localllm.quant.types import GGMLType
from tests.helpers.blocks import random_rows, values_of
from tests.helpers.weights import Tensor, blocks

IDS = np.array([36, 0, 17, 17], np.int32)

all_formats = pytest.mark.parametrize("type", FORMATS, ids=lambda type: type.name)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ReferenceOps() if request.param == "reference" else CPUOps(threads=2)  # type: ignore[return-value]


def table_and_values(type: GGMLType, ops: Ops, *, tied: bool) -> tuple[EmbeddingTable, np.ndarray]:
    """A table of 37 rows whose file was overwritten after it was loaded, and the values it had."""
    rows = random_rows(type, 37, 256)
    values = values_of(rows, type).astype(np.float32)
    weight = blocks(rows, type, 256)
    table: EmbeddingTable = ops.load_embedding(weight, ops.load_linear(weight) if tied else None)
    rows[:] = 0x55
    return table, values


@all_formats
def test_a_table_is_a_copy(type: GGMLType, ops: Ops) -> None:
    table, values = table_and_values(type, ops, tied=False)
    assert table.shape == (37, 256)
    np.testing.assert_array_equal(table.rows(IDS), values[IDS])


@all_formats
def test_rows_come_from_an_output_matrix_that_the_table_is_tied_to(type: GGMLType, ops: Ops) -> None:
    """Where kernels read another format, its scales are rounded to float16."""
    table, values = table_and_values(type, ops, tied=True)
    assert table.shape == (37, 256)
    np.testing.assert_allclose(table.rows(IDS), values[IDS], rtol=2**-11, atol=1e-7)


def test_large_tables_are_copied_in_parts_whose_pages_go(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []

    class Counted(Tensor):
        def drop_pages(self) -> None:
            dropped.append(1)

    monkeypatch.setattr(embedding, "_COPIED_BYTES", 3000)
    rows = random_rows(GGMLType.F32, 10, 256)
    table = embedding.CopiedTable.of(Counted(GGMLType.F32, (10, 256), rows))
    np.testing.assert_array_equal(table.data, rows)
    assert len(dropped) == 5, "two rows of 1,024 bytes at a time"
