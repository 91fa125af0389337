"""DeepSeek V4 compared with transformers on texts longer than its groups of 128 tokens, in sequences and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.operations import IndexSelect
from tests.helpers.backends import shared_by_threads
from tests.helpers.recorder import CPUOps, ReferenceOps
from tests.helpers.run_model import Runner
from tests.models.tiny import TINY, make_model, write

torch = pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]

LONG = replace(
    TINY["deepseek-v4"],
    config=TINY["deepseek-v4"].config
    | {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "sliding_window": 20,
        "index_topk": 16,
        "max_position_embeddings": 512,
    },
)
IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 290)]
OTHER_IDS = [int(i) for i in np.random.default_rng(2).integers(3, 300, 70)]
#: Position at which the first text is cut.
CUT = 200


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(LONG)


def of_transformers(model: Any, ids: Sequence[int]) -> Array:
    with torch.no_grad():
        logits: Array = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def check(ours: Array, expected: Array) -> None:
    """Compare the logits of the last tokens."""
    errors = np.abs(ours - expected[-len(ours) :]).max(axis=1) / np.abs(expected).max()
    assert errors.max() < 1e-3


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_entries_of_several_pages(backend: str, model: Any, tmp_path: Path) -> None:
    """The CPU is compared with the reference, because rounding in a float16 cache changes close choices between
    entries or experts relative to transformers."""
    path = write(tmp_path / "model.gguf", LONG, model)
    pages, others = range(20), range(20, 40)

    def of_reference(ids: Sequence[int]) -> Array:
        return Runner(path, ReferenceOps(), n_pages=20).run((ids, 0, pages))

    expected = partial(of_transformers, model) if backend == "reference" else of_reference
    ops = ReferenceOps(np.float32) if backend == "reference" else shared_by_threads(CPUOps(threads=2))
    runner = Runner(path, ops, n_pages=48)
    whole = runner.run((IDS, 0, pages))
    check(whole, expected(IDS))
    # In chunks, together with another sequence.
    first = runner.run((IDS[:130], 0, pages), (OTHER_IDS[:61], 0, others))
    second = runner.run((OTHER_IDS[61:], 61, others), (IDS[130:257], 130, pages))
    third = runner.run((IDS[257:], 257, pages))
    np.testing.assert_array_equal(np.concatenate([first[:130], second[9:], third]), whole)
    check(np.concatenate([first[130:], second[:9]]), expected(OTHER_IDS))
    check(runner.run((OTHER_IDS, CUT, pages)), expected(IDS[:CUT] + OTHER_IDS))


def test_without_an_indexer_where_all_entries_would_be_chosen(tmp_path: Path) -> None:
    entry = replace(LONG, config=LONG.config | {"index_topk": 128})
    model = make_model(entry)
    runner = Runner(write(tmp_path / "model.gguf", entry, model), ReferenceOps(np.float32))
    assert not any(isinstance(node.operation, IndexSelect) for node in runner.model.graph.nodes)
    check(runner.logits(IDS[:150]), of_transformers(model, IDS[:150]))


def test_invalid_values_in_a_file_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="compress_ratios must contain 5 values, each 0 or a power of two"):
        Runner(
            write(tmp_path / "model.gguf", LONG, model, **{"attention.compress_ratios": [0, 4, 3, 4, 3]}),
            ReferenceOps(),
        )
    table = model.model.layers[1].mlp.gate.tid2eid
    table[7, 1] = 8
    with pytest.raises(ModelError, match="numbers that are not from 0 to 7"):
        Runner(write(tmp_path / "model.gguf", LONG, model), ReferenceOps())
