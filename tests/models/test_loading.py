"""Missing, superfluous and wrongly shaped tensors, and the progress that loading reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.errors import ModelError, UnsupportedArchitectureError
from localllm.gguf import GGUFFile
from localllm.kernels.graph import KVCache
from localllm.kernels.reference import ReferenceBackend
from localllm.models.registry import Model, find_architecture, read_model
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.recorder import ReferenceOps
from tests.helpers.run_model import Runner


def write(
    path: Path,
    model_type: str = "llama",
    tensors: dict[str, np.ndarray | None] | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny model with tensors added, replaced, or removed if None."""
    settings = tiny_models.config(model_type, **changes)
    arrays = tiny_models.gguf_tensors(settings, tiny_models.random_weights(settings)) | (tensors or {})
    encoded = {name: tiny_models.encode(array, GGMLType.F32) for name, array in arrays.items() if array is not None}
    name = tiny_models.gguf_architecture(settings)
    return tiny_models.write_file(path / "model.gguf", name, tiny_models.gguf_metadata(settings), encoded)


@dataclass
class Changed:
    """Write a file with changed keys."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]


def load(path: Path) -> Model:
    with GGUFFile.open(path) as file:
        return read_model(file)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_every_layer_keeps_keys_and_values(model_type: str, tmp_path: Path) -> None:
    model = load(write(tmp_path, model_type))
    assert model.config.architecture == model_type.replace("_", "")
    assert model.graph.caches == {i: KVCache(i, n_heads=2, key_dim=16, value_dim=16) for i in range(3)}


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    with GGUFFile.open(path) as file:
        for key, value in (("attention.new_kind", 1), ("logit_scale", 0.5), ("attention.output_scale", 2.0)):
            with pytest.raises(ModelError, match=f"llama.{key} = {value}, which localllm does not supp"):
                read_model(Changed({**file.metadata, f"llama.{key}": value}, file.tensors))
        read_model(Changed({**file.metadata, "llama.logit_scale": 1.0, "qwen2.new_kind": 1}, file.tensors))


def test_an_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"'gpt-x' is not supported; docs/models.md"):
        find_architecture({"general.architecture": "gpt-x"})


@pytest.mark.parametrize("metadata", [{}, {"general.architecture": 1}])
def test_a_file_that_is_no_model_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"general\.architecture"):
        find_architecture(metadata)


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
    "name",
    [
        "blk.0.attn_q_norm.weight",
        "blk.0.foo.weight",
        "output_norm.bias",
        "rope.freqs.bias",
    ],
)
def test_a_tensor_that_no_block_uses_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"a tensor '{name}' that a model"):
        load(write(tmp_path, tensors={name: np.ones(16, np.float32)}))


def test_tensors_of_old_converters_are_let_be(tmp_path: Path) -> None:
    names = ["rope.freqs", "blk.0.attn_rot_embd.weight", "blk.1.attn.rotary_emb.inv_freq"]
    load(write(tmp_path, tensors={name: np.ones(8, np.float32) for name in names}))


@pytest.mark.parametrize("tied", [False, True])
def test_the_backends_formats_are_reported(tied: bool, tmp_path: Path) -> None:
    """A matrix used as embedding and output counts once."""
    packed: list[str] = []
    with GGUFFile.open(write(tmp_path, "qwen2", tie_word_embeddings=tied)) as file:
        sizes: dict[str, Any] = {"n_pages": (1,), "max_tokens": 1, "max_outputs": 1}
        graph, backend = read_model(file).graph, ReferenceBackend()
        step = backend.compile(graph, **sizes, progress=lambda weight: packed.append(weight.name))
        assert sorted(packed) == sorted(weight.name for weight in step.weights) == sorted(file.tensors)
        assert step.weights == backend.footprint(graph, **sizes).weights
    held = {weight.name: weight for weight in step.weights}
    assert held["token_embd.weight"].n_bytes == 4 * 300 * 64
    assert held["token_embd.weight"].layer == ("output" if tied else "embedding")
    assert (held["blk.0.attn_q.bias"].n_bytes, held["blk.0.attn_q.bias"].layer) == (4 * 64, 0)
    assert {(w.file_type, w.kernel_type) for w in step.weights} == {("F32", "F32")}


def test_a_model_works_after_its_file_is_closed(tmp_path: Path) -> None:
    assert np.isfinite(Runner(write(tmp_path), ReferenceOps()).logits([5, 6, 7])).all()
