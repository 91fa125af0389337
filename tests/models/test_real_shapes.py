"""The benchmarks' models with shapes of current models: complete, with healthy activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm.gguf import GGUFFile

pytest.importorskip("transformers", reason="needs the extra 'reference'")

from tests.helpers.real_shapes import REAL_SHAPES, real_shape_gguf

SMALLER = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


@pytest.mark.parametrize("name", REAL_SHAPES)
def test_layers_are_repeated(name: str, tmp_path: Path) -> None:
    shape = REAL_SHAPES[name]
    n_layers = 2 * shape.n_own
    small = replace(shape, n_layers=n_layers, config=dict(shape.config) | SMALLER)
    path = real_shape_gguf(tmp_path / "model.gguf", small, "q8_0")
    with GGUFFile.open(path) as file:
        assert file.metadata[f"{file.architecture}.block_count"] == n_layers
        for tensor_name, tensor in file.tensors.items():
            if tensor_name.startswith("blk.0."):
                same = file.tensors[tensor_name.replace("blk.0.", f"blk.{shape.n_own}.")]
                np.testing.assert_array_equal(tensor.data, same.data)
    with localllm.load(path, device="cpu", context=64, threads=1) as llm:
        logits = llm.logits([1, 300, 5, 301, 17])
    assert np.isfinite(logits).all()
    assert 0.2 < logits.std() < 5
