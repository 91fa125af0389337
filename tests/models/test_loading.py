"""Tensors that are missing, too many or of the wrong shape, and what loading reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.errors import ModelError, UnsupportedArchitectureError
from localllm.gguf import GGUFFile
from localllm.kernels.ops import CacheShape
from localllm.kernels.reference import ReferenceOps
from localllm.models.blocks import Model
from localllm.models.config import read_config
from localllm.models.registry import ARCHITECTURES, builder, load_model
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.run_model import Runner


def write(
    path: Path,
    model_type: str = "llama",
    tensors: dict[str, np.ndarray | None] | None = None,
    **changes: Any,
) -> Path:
    """A tiny model with tensors added, replaced or, where None, left out."""
    settings = tiny_models.config(model_type, **changes)
    arrays = tiny_models.gguf_tensors(settings, tiny_models.random_weights(settings)) | (tensors or {})
    encoded = {name: tiny_models.encode(array, GGMLType.F32) for name, array in arrays.items() if array is not None}
    name = tiny_models.gguf_architecture(settings)
    return tiny_models.write_file(path / "model.gguf", name, tiny_models.gguf_metadata(settings), encoded)


def load(path: Path) -> Model:
    with GGUFFile.open(path) as file:
        return load_model(file, ReferenceOps(), read_config(file.metadata, file.tensors), 128)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_loads(architecture: str, tmp_path: Path) -> None:
    model = load(write(tmp_path, {"qwen3moe": "qwen3_moe"}.get(architecture, architecture)))
    assert model.config.architecture == architecture
    assert model.cache_shape == CacheShape(n_layers=3, n_kv_heads=2, head_dim=16)


def test_an_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"'gpt-x' is not supported.*llama, qwen2, qwen3"):
        builder({"general.architecture": "gpt-x"})


@pytest.mark.parametrize("metadata", [{}, {"general.architecture": 1}])
def test_a_file_that_is_no_model_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"general\.architecture"):
        read_config(metadata, {})
    with pytest.raises(ModelError, match=r"general\.architecture"):
        builder(metadata)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "token_embd.weight"),
        ("llama", "output_norm.weight"),
        ("llama", "blk.1.attn_v.weight"),
        ("llama", "blk.2.ffn_down.weight"),
        ("qwen2", "blk.0.attn_k.bias"),
        ("qwen3", "blk.0.attn_q_norm.weight"),
        ("mixtral", "blk.1.ffn_gate_inp.weight"),
        ("qwen3_moe", "blk.2.ffn_down_exps.weight"),
    ],
)
def test_a_missing_tensor_is_named(model_type: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"no tensor {name}"):
        load(write(tmp_path, model_type, {name: None}))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_q.weight", (64, 32)),
        ("blk.1.attn_norm.weight", (63,)),
        ("blk.2.ffn_gate.weight", (64, 172)),
        ("output.weight", (299, 64)),
        ("blk.0.attn_q.bias", (65,)),
        ("token_embd.weight", (300, 32)),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named_with_both(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load(write(tmp_path, tensors={name: np.zeros(shape, np.float32)}))
    assert f"tensor {name} has the shape {list(shape)}" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.0.foo.weight", "output_norm.bias", "rope_factors_long.weight"]
)
def test_a_tensor_that_no_block_uses_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"a tensor '{name}' that a model"):
        load(write(tmp_path, tensors={name: np.ones(16, np.float32)}))


def test_tensors_of_old_converters_are_let_be(tmp_path: Path) -> None:
    names = ["rope.freqs", "blk.0.attn_rot_embd.weight", "blk.1.attn.rotary_emb.inv_freq"]
    load(write(tmp_path, tensors={name: np.ones(8, np.float32) for name in names}))


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    path = write(tmp_path, tie_word_embeddings=True, tensors={"rope.freqs": np.ones(8, np.float32)})
    reports: list[tuple[int, int]] = []
    with GGUFFile.open(path) as file:
        config = read_config(file.metadata, file.tensors)
        load_model(file, ReferenceOps(), config, 128, progress=lambda done, total: reports.append((done, total)))
        total = sum(tensor.data.nbytes for name, tensor in file.tensors.items() if name != "rope.freqs")
    done = [report[0] for report in reports]
    assert done == sorted(done)
    assert reports[-1] == (total, total)
    assert {report[1] for report in reports} == {total}


@pytest.mark.parametrize("tied", [False, True])
def test_what_the_backend_holds_is_told(tied: bool, tmp_path: Path) -> None:
    model = load(write(tmp_path, "qwen2", tie_word_embeddings=tied))
    held = {weight.name: weight for weight in model.weights}
    assert len(held) == len(model.weights), "a matrix that is embedding and output counts once"
    assert held["token_embd.weight"].n_bytes == 4 * 300 * 64
    assert held["blk.0.attn_q.bias"].n_bytes == 4 * 64
    assert {(w.file_type, w.kernel_type) for w in model.weights} == {("F32", "F32")}
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        assert held.keys() == file.tensors.keys()


def test_a_model_works_after_its_file_is_closed(tmp_path: Path) -> None:
    assert np.isfinite(Runner(write(tmp_path), ReferenceOps()).logits([5, 6, 7])).all()
