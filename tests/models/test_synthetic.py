"""The random models of the benchmarks: their blocks, formats and vocabularies match their description."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from localllm.gguf import GGUFFile
from localllm.quant.types import GGMLType
from tests.helpers import synthetic
from tests.helpers.recorder import ReferenceOps
from tests.helpers.run_model import Runner

SMALL = {
    "llama": replace(
        synthetic.SHAPES["llama-1.1b"], n_layers=8, n_embd=256, n_ff=512, n_heads=8, n_kv_heads=2, n_vocab=1000
    ),
    "qwen2": replace(
        synthetic.SHAPES["qwen2-0.5b"], n_layers=8, n_embd=128, n_ff=256, n_heads=4, n_kv_heads=2, n_vocab=2000
    ),
}


@pytest.mark.parametrize("type", [kind for kind in GGMLType if kind in synthetic._MAKERS])
def test_blocks_have_the_requested_mean_and_deviation(type: GGMLType) -> None:
    blocks = synthetic.random_blocks(np.random.default_rng(0), type, 5_000, 0.02)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(type))
    assert values.std() == pytest.approx(0.02, rel=0.04)
    assert abs(values.mean()) < 1e-3
    assert len(np.unique(blocks, axis=0)) > (4_900 if blocks.shape[1] > 2 else 1_000)


@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "blk.0.attn_q.weight", "token_embd.weight"])
@pytest.mark.parametrize("shape", synthetic.SHAPES.values(), ids=synthetic.SHAPES)
@pytest.mark.parametrize("type", [kind for kind in GGMLType if kind in synthetic._MAKERS])
def test_matrices_of_every_shape_have_their_deviation(type: GGMLType, shape: synthetic.Shape, name: str) -> None:
    """The scales of small values must not round to zero."""
    size = next(size for each, size in synthetic.tensor_shapes(shape) if each == name)
    deviation = synthetic._deviation(name, size, shape)
    blocks = synthetic.random_blocks(np.random.default_rng(0), type, 5_000, deviation)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(type))
    assert values.std() == pytest.approx(deviation, rel=0.06)


@pytest.mark.parametrize("architecture", SMALL)
@pytest.mark.parametrize("file_type", synthetic.FILE_TYPES)
def test_activations_stay_healthy(architecture: str, file_type: str, tmp_path: Path) -> None:
    path = synthetic.random_gguf(tmp_path / "model.gguf", SMALL[architecture], file_type)
    logits = Runner(path, ReferenceOps()).logits([300, 5, 301, 17])
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2
    # The output depends on the input through all layers.
    assert np.triu(np.corrcoef(logits), k=1).max() < 0.7


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    files = [synthetic.random_gguf(tmp_path / f"{i}.gguf", SMALL["llama"], "q4_0", seed=i // 2) for i in range(3)]
    a, b, c = (file.read_bytes() for file in files)
    assert a == b
    assert a != c


@pytest.mark.parametrize(
    ("shape", "file_type", "expected"),
    [
        # Formats in llama.cpp's quantised files of TinyLlama 1.1B and Qwen 2.5 0.5B.
        ("llama-1.1b", "q4_k_m", {"F32": 45, "Q4_K": 135, "Q6_K": 21}),
        ("llama-1.1b", "q5_k_m", {"F32": 45, "Q5_K": 135, "Q6_K": 21}),
        ("llama-1.1b", "q4_0", {"F32": 45, "Q4_0": 155, "Q6_K": 1}),
        ("llama-1.1b", "q8_0", {"F32": 45, "Q8_0": 156}),
        ("qwen2-0.5b", "q4_k_m", {"F32": 121, "Q5_0": 132, "Q8_0": 13, "Q4_K": 12, "Q6_K": 12}),
        ("qwen2-0.5b", "q5_k_m", {"F32": 121, "Q5_1": 132, "Q8_0": 13, "Q5_K": 12, "Q6_K": 12}),
    ],
)
def test_formats_are_mixed_as_llama_cpp_does(shape: str, file_type: str, expected: dict[str, int]) -> None:
    sizes, kind = synthetic.SHAPES[shape], synthetic.FILE_TYPES[file_type]
    types = [synthetic.tensor_type(name, size, sizes, kind) for name, size in synthetic.tensor_shapes(sizes)]
    assert Counter(type.name for type in types) == expected


@pytest.mark.parametrize("architecture", SMALL)
def test_vocabularies_are_whole(architecture: str, tmp_path: Path) -> None:
    path = synthetic.random_gguf(tmp_path / "model.gguf", SMALL[architecture], "q8_0")
    with GGUFFile.open(path) as file:
        tokens = list(file.metadata["tokenizer.ggml.tokens"])
        assert len(tokens) == len(set(tokens)) == SMALL[architecture].n_vocab
        assert len(file.metadata["tokenizer.ggml.token_type"]) == len(tokens)
        if architecture == "qwen2":
            for merge in file.metadata["tokenizer.ggml.merges"]:
                left, right = merge.split(" ")
                assert {left, right, left + right} <= set(tokens[: tokens.index(left + right) + 1])
        else:
            assert len(file.metadata["tokenizer.ggml.scores"]) == len(tokens)
