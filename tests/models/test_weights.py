"""Matrices that are rows of a tensor, unused tensors, and the loading plan."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.convert import Checkpoint
from localllm.errors import ModelError
from localllm.gguf import GGUFFile
from localllm.kernels.graph import Matrix
from localllm.loading.load import plan_file
from localllm.models.registry import read_model
from localllm.models.weights import Weights, split_rows
from localllm.options.declared import LoadOptions
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.recorder import ReferenceOps
from tests.helpers.run_model import Runner
from tests.helpers.weights import Tensor, f32, random
from tests.models.tiny import TINY, make_model, save, write


@dataclass
class File:
    tensors: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)


def values(weight: Any) -> np.ndarray:
    return dequantize(weight.data, weight.type).reshape(weight.shape)


def test_parts_of_a_matrix_are_its_rows_in_order() -> None:
    whole, bias = random(10, 8), random(10)
    weights = Weights(File({"qkv.weight": f32(whole), "qkv.bias": f32(bias)}))
    q, k, v = weights.split("qkv", 8, {"q": 6, "k": 2, "v": 2})
    for part, rows in ((q, slice(0, 6)), (k, slice(6, 8)), (v, slice(8, 10))):
        np.testing.assert_array_equal(values(part.weight), whole[rows])
        np.testing.assert_array_equal(values(part.bias), bias[rows])
    assert (q.weight.name, v.weight.name) == ("qkv.weight[q]", "qkv.weight[v]")
    assert not q.weight.data.flags.owndata


def test_a_vector_in_blocks_is_not_cut() -> None:
    bias = Tensor(GGMLType.Q8_0, (64,), np.zeros(68, np.uint8), "qkv.bias")
    with pytest.raises(ModelError, match=r"qkv\.bias is a vector in Q8_0, whose blocks cannot be cut"):
        split_rows(Matrix(f32(random(64, 8)), bias), {"q": 32, "k": 32})


def test_parts_may_take_turns() -> None:
    """Rows of three heads, each with two rows of the query and one of the gate."""
    whole = random(9, 4)
    query, gate = split_rows(Matrix(f32(whole)), {"query": 6, "gate": 3}, n_groups=3)
    np.testing.assert_array_equal(values(query.weight), whole[[0, 1, 3, 4, 6, 7]])
    np.testing.assert_array_equal(values(gate.weight), whole[[2, 5, 8]])
    assert query.bias is gate.bias is None


def test_parts_of_parts_and_of_experts() -> None:
    whole = random(5, 6, 4)
    gate, up = Weights(File({"exps.weight": f32(whole.reshape(5, 6, 4))})).split_experts(
        "exps", 5, 4, {"gate": 4, "up": 2}
    )
    np.testing.assert_array_equal(values(gate), whole[:, :4])
    np.testing.assert_array_equal(values(up), whole[:, 4:])
    matrix = random(12, 4)
    first, _ = split_rows(Matrix(f32(matrix)), {"first": 8, "second": 4})
    even, odd = split_rows(first, {"even": 4, "odd": 4}, n_groups=4)
    np.testing.assert_array_equal(values(even.weight), matrix[0:8:2])
    np.testing.assert_array_equal(values(odd.weight), matrix[1:8:2])


def test_parts_of_blocks_are_whole_rows_of_blocks() -> None:
    data, type = tiny_models.encode(random(6, 64), GGMLType.Q8_0)
    whole = Tensor(type, (6, 64), data)
    (_, last) = split_rows(Matrix(whole), {"a": 4, "b": 2})
    np.testing.assert_array_equal(last.weight.data, data[4:])
    assert last.weight.shape == (2, 64)


@pytest.mark.parametrize("shape", [(8,), (1, 8)])
def test_a_row_may_be_stored_as_a_vector(shape: tuple[int, ...]) -> None:
    row = Weights(File({"gate.weight": f32(random(*shape))})).row("gate", 8)
    assert row.weight.shape == (1, 8)
    np.testing.assert_array_equal(values(row.weight).reshape(shape), random(*shape))


def fused(path: Path, type: GGMLType = GGMLType.Q8_0) -> tuple[Path, Path]:
    """Write a model twice: with separate query, key and value matrices, and with one joined matrix."""
    settings = tiny_models.config("qwen2", hidden_size=64)
    tensors = tiny_models.gguf_tensors(settings, tiny_models.random_weights(settings))
    keys = tiny_models.gguf_metadata(settings) | tiny_models.spm_vocabulary(settings["vocab_size"])
    files = []
    for name in ("plain", "fused"):
        if name == "fused":
            for i in range(3):
                for kind in ("weight", "bias"):
                    parts = [tensors.pop(f"blk.{i}.attn_{x}.{kind}") for x in "qkv"]
                    tensors[f"blk.{i}.attn_qkv.{kind}"] = np.concatenate(parts)
        encoded = {name: tiny_models.encode(array, type) for name, array in tensors.items()}
        files.append(tiny_models.write_file(path / f"{name}.gguf", "qwen2", keys, encoded))
    return files[0], files[1]


def test_one_matrix_for_query_key_and_value_gives_the_same_bits_and_an_exact_plan(tmp_path: Path) -> None:
    plain, together = fused(tmp_path)
    ids = list(range(5, 25))
    rows = [Runner(path, ReferenceOps()).logits(ids) for path in (plain, together)]
    np.testing.assert_array_equal(*rows)
    sizes = []
    for path in (plain, together):
        with localllm.load(path, context=64, threads=1) as llm:
            written = llm.generate(ids, max_tokens=5, ignore_eos=True, temperature=0).ids
            placed = llm.info.placement
        sizes.append((placed.total, written))
        assert plan_file(LoadOptions(path, context=64, threads=1)).placement.total == placed.total
    assert sizes[0] == sizes[1]


def test_blocks_that_predict_further_tokens_are_let_be(tmp_path: Path) -> None:
    settings = tiny_models.config("qwen3")
    tensors = tiny_models.gguf_tensors(settings, tiny_models.random_weights(settings))
    tensors |= {"blk.3.nextn.eh_proj.weight": random(64, 128), "blk.3.attn_norm.weight": random(64)}
    keys = tiny_models.gguf_metadata(settings) | {"qwen3.block_count": 4, "qwen3.nextn_predict_layers": 1}
    encoded = {name: tiny_models.encode(array, GGMLType.F32) for name, array in tensors.items()}
    path = tiny_models.write_file(tmp_path / "model.gguf", "qwen3", keys, encoded)
    with GGUFFile.open(path) as file:
        assert read_model(file).config.n_layers == 3
        for change, message in (
            ({"qwen3.nextn_predict_layers": 2}, "nextn_predict_layers is 2"),
            ({"qwen3.nextn_predict_layers": 0}, "the file has no tensor blk.3.attn_q.weight"),
        ):
            with pytest.raises(ModelError, match=message):
                read_model(File(dict(file.tensors), {**file.metadata, **change}))


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("olmo3", {"olmo2.attention.sliding_window_pattern": [True, False]}, "has 2 values for 4 layers"),
    ("gpt-oss", {"gpt-oss.attention.sliding_window": 0}, "sliding_window is 0, but must be between 1"),
    ("cohere2", {"cohere2.attention.sliding_window": None}, "no cohere2.attention.sliding_window"),
    ("olmo3", {"olmo2.attention.sliding_window": 0}, "sliding_window_pattern gives layers a window"),
    ("olmo3", {"olmo2.attention.sliding_window_pattern": [1, 1, 1, 0]}, "must be of type bool"),
    ("qwen35", {"qwen35.ssm.group_count": 3}, "ssm.time_step_rank is 4, which is not a multiple"),
    ("qwen35", {"qwen35.ssm.conv_kernel": None}, "no qwen35.ssm.conv_kernel"),
    ("qwen35", {"qwen35.attention.recurrent_layers": [True]}, "recurrent_layers has 1 values for 4 layers"),
    ("qwen35moe", {"qwen35moe.expert_used_count": 7}, "expert_used_count is 7, more than the 6"),
    ("gpt-oss", {"gpt-oss.expert_count": 0}, "no gpt-oss.expert_count"),
    ("gemma4-e2b", {"gemma4.attention.shared_kv_layers": 7}, "shared_kv_layers is 7"),
    ("gemma4-e2b", {"gemma4.attention.head_count_kv": [2]}, "head_count_kv has 1 values"),
    ("granite", {"granite.residual_scale": float("nan")}, "residual_scale is nan"),
    ("deepseek-v3", {"deepseek2.attention.kv_lora_rank": 1024}, "kv_lora_rank is 1024"),
    ("deepseek-v3", {"deepseek2.attention.value_length_mla": None}, "no deepseek2.attention.value_length_mla"),
    ("gpt2", {"gpt2.context_length": 256}, r"position_embd.weight has the shape \[128, 64\]"),
    ("lfm2", {"lfm2.attention.head_count_kv": [0, 2]}, "head_count_kv has 2 values for 4 layers"),
    ("lfm2", {"lfm2.shortconv.l_cache": 9}, "shortconv.l_cache is 9"),
    ("minimax-m2", {"minimax-m2.expert_count": 0}, "no minimax-m2.expert_count"),
    ("nemotron-h", {"nemotron_h.feed_forward_length": [0, 172, 172, 0, 172]}, "both are not 0 for layer 2"),
    ("nemotron-h", {"nemotron_h.ssm.inner_size": 100}, "inner_size is 100, which is not a multiple"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD)
def test_bad_keys_are_refused_by_name(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    path = write(tmp_path / "model.gguf", TINY[name], make_model(TINY[name]))
    with GGUFFile.open(path) as file:
        keys = {key: value for key, value in {**file.metadata, **change}.items() if value is not None}
        with pytest.raises(ModelError, match=message):
            read_model(File(dict(file.tensors), keys))


def test_a_tensor_of_some_layers_is_missing_in_the_others() -> None:
    weights = Weights(File({"blk.0.a.bias": f32(random(4)), "blk.1.b.bias": f32(random(4))}))
    assert weights.layer(0).find("a.bias", 4) is not None
    assert weights.layer(1).find("b.bias", 4) is not None
    weights.check_all_used()
    assert "a.bias" not in weights.layer(1)
    with pytest.raises(ModelError, match=r"no tensor blk\.1\.a\.bias, but has blk\.0\.a\.bias"):
        weights.check_all_used()


#: Replacement values of a key; None removes the key.
DAMAGE = [None, "text", 0, -1, 1 << 31, 0.5, float("nan"), True, [], [1], [0] * 4, ["text"] * 4]


@pytest.mark.parametrize("name", {TINY[name].architecture: name for name in TINY}.values())
def test_a_model_with_a_damaged_key_is_refused_by_name_or_read(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    checkpoint = Checkpoint(save(tmp_path / "model", make_model(TINY[name])), TINY[name].conversion)
    refused = []
    for key in [key for key in checkpoint.metadata if key.startswith(f"{checkpoint.architecture}.")]:
        for damage in DAMAGE:
            changed = {k: damage if k == key else v for k, v in checkpoint.metadata.items()}
            try:
                read_model(File(checkpoint.tensors, {k: v for k, v in changed.items() if v is not None}))
            except ModelError as error:
                refused.append(f"{key} = {damage}: {error}")
    assert len(refused) > 20
    assert not [each for each in refused if not re.search(rf": .*({checkpoint.architecture}\.|tensor)", each)]
