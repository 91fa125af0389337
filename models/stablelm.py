"""StableLM 1 and 2 (arXiv:2402.17834): LayerNorm, a partial rotation of each head, in some models attention and MLP
in parallel, and in StableLM 2 12B a LayerNorm of each head; and Orion (arXiv:2401.12246), which has only LayerNorm.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, layer_norm
from localllm.models.config import Header
from localllm.models.hf_convert import parallel_keys
from localllm.models.rope import make_rope

HF_NAMES = {f"self_attn.{x}_layernorm.norms": f"attn_{x}_norm" for x in "qk"}
HF_MEANT = {"norm_eps": ()}


def hf_keys(config: Any) -> dict[str, Any]:
    if config.model_type != "orion":
        return parallel_keys(config)
    if getattr(config, "use_parallel_residual", False):
        raise ModelError("config.json has use_parallel_residual, which GGUF files of Orion have no key for")
    names = ["attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length"]
    names += ["rope.freq_base"] if config.rope_parameters["rope_theta"] == 10_000.0 else []
    return dict.fromkeys(names) | {"attention.layer_norm_epsilon": config.rms_norm_eps}


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim)
    qk_norm: Any = "layer by head" if "blk.0.attn_q_norm.weight" in m.weights else None
    is_parallel = m.meta.read("use_parallel_residual", bool, m.config.architecture == "stablelm")

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = layer_norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, qk_norm=qk_norm, residual=x)
        return gated_mlp(at, y if is_parallel else layer_norm(at, "ffn_norm", x), n_ff, residual=x)

    return decoder(m, layer, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
