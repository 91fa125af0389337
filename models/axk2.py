"""A.X-K2: DeepSeek V3.2's layers, with a gate on the output of attention and gates of low rank on norms.

One matrix computes queries and gates from the normed and the raw input of low rank. GGUF has no names for this
architecture, so `localllm convert` uses DeepSeek V3.2's names.
"""

from __future__ import annotations

from dataclasses import replace

from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import Activation, Gated
from localllm.models import deepseek2, deepseek32
from localllm.models.blocks import Layer, norm
from localllm.models.config import Header
from localllm.models.hf_convert import implied

HF_NAMES = {
    "self_attn.q_b_proj": "attn_q_gate",
    "self_attn.q_gate_proj": "attn_q_gate",
    **{
        f"{theirs}.{part}": f"{ours}{end}"
        for theirs, ours in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"))
        for part, end in (
            ("norm", ""),
            ("W_down", "_down"),
            ("W_up", "_up"),
            ("mlp.fc1", "_down"),
            ("mlp.fc2", "_up"),
        )
    },
}
HF_MEANT = deepseek2.HF_MEANT | implied("gated_norm_rank layer_types")
hf_keys, hf_tensor = deepseek32.hf_keys, deepseek2.hf_tensor


def gated_norm(at: Layer, name: str, x: Tensor) -> Tensor:
    """RMSNorm, times σ(up(silu(down(y)))) of its result y if the file contains these matrices."""
    y, width = norm(at, name, x), at.weights.n_rows(f"{name}_down.weight")
    if not width:
        return y
    gate = at.linear(at.add(Activation(at.linear(y, f"{name}_down", width), "silu")), f"{name}_up", at.n_embd)
    return at.add(Gated(gate, y, "sigmoid"))


def record(m: Header) -> Graph:
    rope = replace(deepseek2.make_latent_rope(m)[0], first=0, interleaved=False)
    select = deepseek32.make_indexers(m, rope, 1e-6, (True,) * m.config.n_layers)
    return deepseek2.record(m, select, gated_norm)
