from __future__ import annotations

import pytest
from gguf.constants import MODEL_ARCH_NAMES

from localllm.models.encoders.registry import PROJECTORS
from localllm.models.registry import ARCHITECTURES, DRAFTERS
from localllm.models.tensor_names import _SIMILAR, encoder_name, gguf_name, layer_names, tensor_names

ALL = ARCHITECTURES | DRAFTERS


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("llama", "model.layers.12.self_attn.q_proj.weight", "blk.12.attn_q.weight"),
        ("qwen2", "model.layers.3.self_attn.q_proj.bias", "blk.3.attn_q.bias"),
        # the base class, without a head
        ("qwen3", "norm.weight", "output_norm.weight"),
        ("qwen3", "layers.3.input_layernorm.weight", "blk.3.attn_norm.weight"),
        ("mamba", "backbone.layers.3.norm.weight", "blk.3.attn_norm.weight"),
        ("bloom", "word_embeddings.weight", "token_embd.weight"),
        # in models with images
        ("gemma3", "model.language_model.norm.weight", "output_norm.weight"),
        ("qwen3vl", "model.visual.blocks.0.attn.proj.weight", None),
        # depends on the architecture
        ("llama", "model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ("olmo2", "model.layers.0.post_attention_layernorm.weight", "blk.0.post_attention_norm.weight"),
        # experts
        ("qwen3moe", "model.layers.0.mlp.experts.*.down_proj.weight", "blk.0.ffn_down_exps.weight"),
        ("qwen3moe", "model.layers.0.mlp.experts.0.down_proj.weight", None),
        ("qwen3moe", "model.layers.0.mlp.experts.down_proj", "blk.0.ffn_down_exps.weight"),
        # suffixes of parameters
        ("mamba2", "backbone.layers.0.mixer.dt_bias", "blk.0.ssm_dt.bias"),
        ("mamba2", "backbone.layers.0.mixer.A_log", "blk.0.ssm_a"),
        ("deepseek2", "model.layers.9.mlp.gate.e_score_correction_bias", "blk.9.exp_probs_b.bias"),
        ("gemma4", "model.layers.0.router.per_expert_scale", "blk.0.ffn_down_exps.scale"),
        (
            "falcon-h1",
            "model.layers.0.pre_ff_layernorm.weight",
            "blk.0.ffn_norm",
        ),  # as llama.cpp's converter writes it
        ("t5encoder", "encoder.block.1.layer.0.SelfAttention.q.weight", "enc.blk.1.attn_q.weight"),
        ("eagle3", "midlayer.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
        ("llama", "model.layers.0.self_attn.new_proj.weight", None),
    ],
)
def test_names(architecture: str, name: str, expected: str | None) -> None:
    names = tensor_names(architecture, ALL[architecture].conversion.names)
    assert gguf_name(names, name) == expected


@pytest.mark.parametrize(
    ("projector", "name", "expected"),
    [
        ("gemma3", "vision_tower.vision_model.encoder.layers.12.self_attn.q_proj.bias", "v.blk.12.attn_q.bias"),
        ("kimik25", "vision_tower.encoder.blocks.0.norm1.weight", "v.blk.0.ln2.weight"),
        ("internvl", "model.vision_tower.encoder.layer.3.lambda_1", "v.blk.3.ls1.weight"),
        ("gemma4a", "model.audio_tower.layers.3.self_attn.q_proj.linear.weight", "a.blk.3.attn_q.weight"),
        ("gemma4a", "model.audio_tower.layers.3.self_attn.q_proj.input_min", "a.blk.3.attn_q.input_min"),
        ("minicpmv4_6", "model.vision_tower.vit_merger.self_attn.q_proj.weight", "v.vit_merger.attn_q.weight"),
        ("minicpmv4_6", "model.merger.mlp.0.linear_1.weight", "mm.up.weight"),
        ("gemma3", "multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
        ("gemma3", "vision_tower.vision_model.encoder.layers.0.new.weight", None),
        ("gemma3", "new.weight", None),
    ],
)
def test_names_in_encoders(projector: str, name: str, expected: str | None) -> None:
    family = PROJECTORS[projector]
    assert encoder_name({**layer_names(family.kind), **family.conversion.names}, name) == expected


def test_tables_of_similar_architectures_exist() -> None:
    tables = {table for names in _SIMILAR.values() for table in names.split()}
    assert tables <= {*MODEL_ARCH_NAMES.values()}
    assert {*_SIMILAR} <= {*ALL}


def test_every_exception_is_needed() -> None:
    for module in {architecture.module for architecture in ALL.values()}:
        used = {name: each.conversion.names for name, each in ALL.items() if each.module == module}
        tables = {name: tensor_names(name, {}) for name in used}
        needed = {
            theirs
            for name, exceptions in used.items()
            for theirs, ours in exceptions.items()
            if ours not in (tables[name].get(theirs), tables[name].get(f"*.{theirs}"))
        }
        assert needed == {theirs for exceptions in used.values() for theirs in exceptions}, module
