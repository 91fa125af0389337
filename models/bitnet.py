"""BitNet b1.58 (arXiv:2402.17764): ternary weights, with norms before the last matrices of attention and MLP.

The activation is SiLU in 1bitLLM's models, and squared ReLU in Microsoft's. llama.cpp knows only SiLU, and its
converter rejects Microsoft's tokenizer. Therefore, a file without ``hidden_activation`` means SiLU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import Gated, Linears
from localllm.models.blocks import Layer, attention, decoder, norm
from localllm.models.config import Header
from localllm.models.hf_convert import SILU, Array, floats, implied
from localllm.models.rope import make_rope

HF_NAMES = {
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
}
HF_MEANT = {"hidden_act": (*SILU, "relu2")} | implied("input_bits", 8) | implied("weight_bits", 1)


def hf_keys(config: Any) -> dict[str, Any]:
    activation = config.get("hidden_act", "silu")
    return {
        "hidden_activation": None if activation in SILU else activation,
        "rope.dimension_count": None,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 1.0,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Round the weights of layers to -1, 0 or 1 times their mean magnitude, as the model does when it computes."""
    if not name.endswith("_proj.weight"):
        return array
    values = floats(array)
    inverse = np.float32(1) / max(np.abs(values).mean(dtype=np.float32), np.float32(1e-5))
    rounded: Array = np.clip(np.round(values * inverse), -1, 1) / inverse
    return rounded


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim)
    activation = m.meta.read("hidden_activation", str, "silu")
    if activation not in ("silu", "relu2"):
        raise ModelError(f"bitnet.hidden_activation is {quoted(activation)}; localllm supports silu and relu2")

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, residual=x, sub_norm="attn_sub_norm")
        matrices = (at.weights.matrix(name, at.n_embd, n_ff) for name in ("ffn_gate", "ffn_up"))
        gate, up = at.add(Linears(norm(at, "ffn_norm", x), tuple(matrices)))
        y = norm(at, "ffn_sub_norm", at.add(Gated(gate, up, activation)))
        return at.linear(y, "ffn_down", at.n_embd, residual=x)

    return decoder(m, layer)
