"""PLaMo 2 (arXiv:2509.04897): Mamba 2's scan or attention, then an MLP, with norms before and after each.

The inputs and outputs of the scan's states, and its steps, are normed products of the convolution's result.
llama.cpp's files have no key for the window of attention, which `localllm convert` writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph, Matrix, Tensor
from localllm.kernels.operations import CausalConv, Gated, Linear, Linears, RMSNorm, Scan
from localllm.models.blocks import Layer, Mamba, add, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats, implied
from localllm.models.plamo3 import hf_tensor as norm_tensor
from localllm.models.rope import make_rope

HF_MEANT = (
    implied("mamba_enabled use_cache", True)
    | implied("num_experts", 0)
    | implied("tokenizer_class linear_type fp8_accum_dtype eval_attention_n_bit eval_mlp_n_bit")
    | implied("image_feature_size image_proj_type sparse_intermediate_size sparse_step")
)
#: GGUF's names of tensors that are not called weights, by the end of their names in checkpoints.
_TENSORS = {
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.dt_norm_weight": "ssm_dt_norm",
    "mixer.B_norm_weight": "ssm_b_norm",
    "mixer.C_norm_weight": "ssm_c_norm",
    "mixer.q_weight": "attn_q_norm.weight",
    "mixer.k_weight": "attn_k_norm.weight",
    "mixer.D": "ssm_d",
}


def hf_keys(config: Any) -> dict[str, Any]:
    n, step, dim = config.num_hidden_layers, getattr(config, "mamba_step", 2), config.hidden_size_per_head
    usual = [i % step == step // 2 for i in range(n)]
    attends = usual if n > step // 2 else [i == n - 1 for i in range(n)]
    window, full = getattr(config, "attention_window_size", None), getattr(config, "full_attention_idx", None) or ()
    has_window = bool(window) and window < config.max_position_embeddings
    return {
        "vocab_size": config.vocab_size,
        "attention.head_count": [config.num_attention_heads * each for each in attends],
        "attention.head_count_kv": [config.num_key_value_heads * each for each in attends],
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.sliding_window": window if has_window else None,
        "attention.sliding_window_pattern": [i not in full for i in range(n)] if has_window else None,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": 0,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * dim,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    for theirs, ours in _TENSORS.items():
        if name.endswith(theirs):
            return {ours: array}
    if name.endswith("A_log"):
        return {"ssm_a": -np.exp(floats(array))}
    return array.squeeze(1) if name.endswith("conv1d.weight") else norm_tensor(name, array, config)


def _scan(at: Layer, x: Tensor, net: Mamba) -> Tensor:
    """A convolution and a scan of the heads, times a gate."""
    w, d, n, n_state, inner = at.weights, at.n_embd, net.n, net.n_state, net.n * net.dim
    gate, x = at.add(Linears(x, w.split("ssm_in", d, {"gate": inner, "x": inner}, n_groups=n)))
    conv, state = w.require("ssm_conv1d.weight", inner, net.kernel), at.graph.state("conv", net.kernel - 1, inner)
    x = at.add(CausalConv(x, conv, state, silu=True))
    n_step = max(1, w.n_rows("ssm_x.weight") - 2 * n_state)
    parts = at.add(Linears(x, w.split("ssm_x", inner, {"b": n_state, "c": n_state, "dt": n_step})))
    b, c, dt = (
        at.add(RMSNorm(part, w.require(f"ssm_{name}_norm", part.width), at.norm_eps))
        for name, part in zip(("b", "c", "dt"), parts, strict=True)
    )
    dt = at.add(Linear(dt, Matrix(w.require("ssm_dt.weight", n, n_step))))
    weights = w.require("ssm_a", n), w.require("ssm_dt.bias", n), w.require("ssm_d", n)
    y = at.add(Scan((x, b, c), dt, *weights, at.graph.state("S", n, n_state, net.dim), 1))
    return at.linear(at.add(Gated(gate, y, "silu")), "ssm_out", d)


def record(m: Header) -> Graph:
    heads, n_ff, windows, meta = m.heads_by_layer(), m.mlp_width(), m.windows(period=0), m.meta
    rope = make_rope(m, next((each.key_dim for each in heads if each), 2))
    n, n_state, inner, kernel = (
        meta.read(f"ssm.{key}", int, low=1, high=1 << 20)
        for key in ("time_step_rank", "state_size", "inner_size", "conv_kernel")
    )
    meta.read("ssm.group_count", int, 0, low=0, high=0)
    meta.check_multiple("ssm.inner_size", inner, "ssm.time_step_rank", n)
    net = Mamba(n, inner // n, 1, n_state, kernel)

    def layer(at: Layer, x: Tensor) -> Tensor:
        own, y = heads[at.number], norm(at, "attn_norm", x)
        if own is None:
            y = _scan(at, y, net)
        else:
            y = attention(at, y, own, rope, qk_norm="by head", window=windows[at.number])
        x = add(at, norm(at, "post_attention_norm", y), x)
        y = gated_mlp(at, norm(at, "ffn_norm", x), n_ff)
        return add(at, norm(at, "post_ffw_norm", y), x)

    return decoder(m, layer)
