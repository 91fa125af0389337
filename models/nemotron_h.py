"""Nemotron-H (arXiv:2504.03624) and Nemotron 3: each layer is either Mamba 2, attention without rotation, an MLP
or experts without gates."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, Mamba, attention, decoder, mamba, mixture, mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, interleave_query_and_key, mamba_tensor, rotated_part, routing_keys

HF_NAMES = {f"mixer.experts.{name}_proj": f"ffn_{name}_exps" for name in ("up", "down")}
HF_MEANT = {"norm_eps": (), "mlp_hidden_act": ("relu2",), "moe_shared_expert_overlap": ()}
#: Settings of experts, which are also present in models without experts.
_OF_EXPERTS: tuple[str, ...] = (
    "moe_shared_expert_intermediate_size",
    "n_shared_experts",
    "norm_topk_prob",
    "routed_scaling_factor",
)
_OF_EXPERTS += ("n_group", "topk_group", "moe_latent_size")
#: Kinds of layers by their letters in released configurations.
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    return interleave_query_and_key(name, mamba_tensor(name, array, config), config)


def hf_keys(config: Any) -> dict[str, Any]:
    kinds = getattr(config, "layers_block_type", None) or [_KINDS[each] for each in config.hybrid_override_pattern]

    def of(kind: str, value: int) -> list[int]:
        return [value if each.endswith(kind) and each != "linear_attention" else 0 for each in kinds]

    keys = rotated_part(config) | {
        "vocab_size": config.vocab_size,
        "context_length": 1 << 20,  # no limit, because nothing is rotated
        "rope.freq_base": None,
        "rope.scaling.finetuned": False,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,  # rms_norm_eps has no effect
        "attention.head_count_kv": of("attention", config.num_key_value_heads),
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }
    if "moe" not in kinds:
        absent = ("expert_count", "expert_used_count", "expert_feed_forward_length")
        config.skip(*_OF_EXPERTS)
        return keys | {"feed_forward_length": of("mlp", config.intermediate_size)} | dict.fromkeys(absent)
    keys = routing_keys(config) | keys
    return keys | {
        "leading_dense_block_count": None,
        "feed_forward_length": of("moe", config.moe_intermediate_size),
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": getattr(config, "moe_latent_size", None),
    }


def record(m: Header) -> Graph:
    meta, heads, net, experts = m.meta, m.heads_by_layer(), Mamba.read(m.meta), m.experts(gating="sigmoid")
    widths = meta.read_each("feed_forward_length", m.config.n_layers, int, low=0, high=1 << 24)
    meta.skip("moe_latent_size")  # the tensors have this width
    eps = meta.read("attention.layer_norm_epsilon", float, 0.0, low=0.0, high=1.0)
    eps = meta.read("attention.layer_norm_rms_epsilon", float, eps, low=0.0, high=1.0)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, n_ff, own_heads = norm(at, "attn_norm", x), widths[at.number], heads[at.number]
        if n_ff and own_heads:
            raise ModelError(
                f"{meta.architecture}.feed_forward_length and {meta.architecture}.attention.head_count_kv both are "
                f"not 0 for layer {at.number}, but only one may be: the file is broken"
            )
        if n_ff and experts and at.weights.n_rows("ffn_gate_inp.weight"):
            return mixture(at, y, experts, activation="relu2", residual=x)
        if n_ff:
            return mlp(at, y, n_ff, activation="relu2", residual=x)
        return attention(at, y, own_heads, None, residual=x) if own_heads else mamba(at, y, net, residual=x)

    return decoder(m, layer, norm_eps=eps)
