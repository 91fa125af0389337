"""Differences between tiny models' files and files of llama.cpp's converter or published checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.convert import Checkpoint
from localllm.errors import ModelError
from localllm.gguf import GGUFFile
from localllm.gguf.writer import read_back
from localllm.kernels.operations import Attention, RopeAppend
from localllm.models import baichuan, qwen3
from localllm.models.registry import Model, read_model
from localllm.quant.encode import quantize
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType
from tests.helpers.gguf_writer import write_gguf
from tests.helpers.recorder import CPUOps, ReferenceOps
from tests.helpers.run_model import Runner
from tests.models.tiny import TINY, make_model, save, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")


def read(folder: Path, name: str, **changes: Any) -> Model:
    """Read a tiny model with changed keys; None removes a key."""
    checkpoint = Checkpoint(save(folder, make_model(TINY[name])))
    prefix = f"{checkpoint.architecture}."
    values = dict(checkpoint.metadata) | {prefix + key: value for key, value in changes.items()}
    values = {key: value for key, value in values.items() if value is not None}
    checkpoint.metadata = read_back(folder, values, ())
    return read_model(checkpoint)


def windows(model: Model) -> list[int | None]:
    return [node.operation.window for node in model.graph.nodes if isinstance(node.operation, Attention)]


def test_without_a_pattern_the_first_of_four_layers_of_laguna_has_no_window(tmp_path: Path) -> None:
    model = read(tmp_path, "laguna", **{"attention.sliding_window_pattern": None})
    assert windows(model) == [None, 7, 7, 7]


def test_patterns_of_mimo_are_numbers(tmp_path: Path) -> None:
    model = read(tmp_path, "mimo2", **{"attention.sliding_window_pattern": [0, 1, 1, 1, 1, 0, 1]})
    assert windows(model) == [None, 7, 7, 7, 7, None, 7]


def test_old_files_of_minicpm_omit_its_scales(tmp_path: Path) -> None:
    keys = dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"))
    operations = [node.operation for node in read(tmp_path, "minicpm", **keys).graph.nodes]
    assert operations[0].scale == 12
    assert {operation.scale for operation in operations if type(operation).__name__ == "Add"} == {0.7}
    assert operations[-1].factor == 4


@pytest.mark.parametrize("is_turned", [False, True])
def test_experts_of_qwen_3_vl_are_accepted_in_both_orders(is_turned: bool) -> None:
    config = SimpleNamespace(model_type="qwen3_vl_moe_text", hidden_size=64, moe_intermediate_size=48)
    for name, shape in (("gate_up_proj", (6, 96, 64)), ("down_proj", (6, 64, 48))):
        matrices = np.random.default_rng(0).normal(size=shape)
        given = matrices.swapaxes(1, 2) if is_turned else matrices
        taken = qwen3.hf_tensor(f"model.layers.0.mlp.experts.{name}", given, config)
        np.testing.assert_array_equal(taken, matrices)


def test_the_head_of_baichuan_2_is_normed_by_rows() -> None:
    rows = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    for n_vocab, expected in ((64_000, rows), (125_696, [[0.6, 0.8], [0, 0]])):
        config = SimpleNamespace(vocab_size=n_vocab)
        np.testing.assert_allclose(baichuan.hf_tensor("lm_head.weight", rows, config), expected)


def test_baichuan_13b_is_identified_by_its_layer_count(tmp_path: Path) -> None:
    """It has no rotary positions: its scores decrease with the distance."""
    for n_layers in (4, 40):
        entry = replace(TINY["baichuan"], config={"num_hidden_layers": n_layers, "num_key_value_heads": 4})
        graph = read_model(Checkpoint(save(tmp_path / str(n_layers), make_model(entry)))).graph
        attentions = [node.operation for node in graph.nodes if isinstance(node.operation, Attention)]
        assert {each.slopes is not None for each in attentions} == {n_layers == 40}
        ropes = [node.operation.rope for node in graph.nodes if isinstance(node.operation, RopeAppend)]
        assert {rope is None for rope in ropes} == {n_layers == 40}


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_factors_of_matrices_in_nvfp4(name: str, tmp_path: Path) -> None:
    """llama.cpp's converter writes a factor for each matrix or expert, and input factors, which are unused."""
    entry = replace(TINY[name], config=TINY[name].config | {"intermediate_size": 128, "moe_intermediate_size": 64})
    path, rng = write(tmp_path / "model.gguf", entry, make_model(entry)), np.random.default_rng(0)
    scaled, plain = dict[str, Any](), dict[str, Any]()
    with GGUFFile.open(path) as file:
        left_out = "general.f", "tokenizer."
        metadata = {key: value for key, value in file.metadata.items() if not key.startswith(left_out)}
        for key, tensor in file.tensors.items():
            values = np.array(tensor.data).view(np.float32).reshape(tensor.shape)
            if len(tensor.shape) < 2 or not key.startswith("blk.") or "inp" in key:
                scaled[key] = plain[key] = values
                continue
            rows = quantize(values.reshape(-1, tensor.shape[-1]) * 100, GGMLType.NVFP4)
            n = tensor.shape[0] if len(tensor.shape) == 3 else 1
            factors = (rng.uniform(0.8, 1.25, n) / 100).astype(np.float32)
            scaled[key] = GGMLType.NVFP4, tensor.shape, rows.tobytes()
            stem = key.removesuffix(".weight")
            scaled |= {f"{stem}.scale": factors, f"{stem}.input_scale": np.full(n, 7, np.float32)}
            decoded = dequantize(rows, GGMLType.NVFP4).reshape(n, -1) * factors[:, None]
            plain[key] = decoded.reshape(tensor.shape)
    files = [write_gguf(tmp_path / f"{i}.gguf", metadata, tensors) for i, tensors in enumerate((scaled, plain))]
    ids = [int(i) for i in rng.integers(3, 300, 20)]
    for ops, bound in ((ReferenceOps(np.float32), 5e-3), (CPUOps(threads=2), 0.1)):
        found, expected = (Runner(file, ops).logits(ids) for file in files)
        assert np.abs(found - expected).max() / np.abs(expected).max() < bound


def test_files_of_bamba_are_refused(tmp_path: Path) -> None:
    """llama.cpp's converter orders query and key rows as for fully rotated heads, but only half of a head rotates."""
    keys = {"rope.scaling.finetuned": True, "rope.dimension_count": 8}
    with pytest.raises(ModelError, match=r"granitehybrid\.rope\.dimension_count is 8, but heads have 16 values"):
        read(tmp_path, "granitehybrid", **keys)


def test_convolutions_that_see_both_ways_are_refused(tmp_path: Path) -> None:
    """LFM2.5-Embedding needs them."""
    with pytest.raises(ModelError, match=r"lfm2\.attention\.causal is false, but the model has recurrent layers"):
        read(tmp_path, "lfm2", **{"attention.causal": False, "pooling_type": 2})


def test_layers_of_nemotron_puzzle_differ_in_their_experts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expert_used_count differs from layer to layer, which localllm does not"):
        read(tmp_path, "nemotron-h-moe", expert_used_count=[1, 2, 1, 1, 1])


def test_gemma_4_with_one_matrix_for_query_key_and_value(tmp_path: Path) -> None:
    """The file that llama.cpp's converter writes with --fuse-qkv; layers with values equal to keys are unchanged."""
    path = write(tmp_path / "model.gguf", TINY["gemma4-e2b"], make_model(TINY["gemma4-e2b"]))
    with GGUFFile.open(path) as file:
        metadata = {key: v for key, v in file.metadata.items() if not key.startswith(("general.f", "tokenizer."))}
        values = {
            key: np.array(tensor.data).view(np.float32).reshape(tensor.shape) for key, tensor in file.tensors.items()
        }
    tensors = dict(values)
    for i in range(3):
        parts = [tensors.pop(f"blk.{i}.attn_{part}.weight") for part in "qkv"]
        tensors[f"blk.{i}.attn_qkv.weight"] = np.concatenate(parts)
    fused, ids = write_gguf(tmp_path / "fused.gguf", metadata, tensors), list(range(3, 23))
    expected, found = (Runner(each, ReferenceOps(np.float32)).logits(ids) for each in (path, fused))
    np.testing.assert_array_equal(found, expected)
