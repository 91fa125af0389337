"""BERT, RoBERTa and XLM-R (arXiv:1810.04805, 1907.11692, 1911.02116): encoders.

Tokens see each other in both directions. Norms follow attention and MLP, after the residual is added. Positions are
learnt vectors. All tokens have the first of two types.
"""

from __future__ import annotations

from typing import Any, Literal

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import Embed
from localllm.models.blocks import Layer, add, attention, decoder, gated_mlp, layer_norm, mixture, mlp
from localllm.models.config import Header
from localllm.models.hf_convert import Array, encoder_keys
from localllm.models.rope import make_rope
from localllm.models.weights import PositionTable

HF_MEANT = {"is_decoder": (False,)}

#: Norm of query and key without and with a tensor for it.
_QK_NORM: tuple[None, Literal["layer"]] = (None, "layer")


def hf_keys(config: Any) -> dict[str, Any]:
    for name, usual in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if (value := getattr(config, name, usual)) != usual:
            raise ModelError(f"config.json has {name} = {quoted(value)}, but GGUF files of BERT mean {usual}")
    n_positions = config.max_position_embeddings - _first_position(config)
    return encoder_keys(config) | {"rope.freq_base": None, "context_length": n_positions}


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    return array[_first_position(config) :] if name.endswith("position_embeddings.weight") else array


def _first_position(config: Any) -> int:
    """Return the first position. RoBERTa counts positions from the padding token's id + 1."""
    return int(config.pad_token_id) + 1 if "roberta" in config.model_type else 0


def record(m: Header) -> Graph:
    heads, n_ff, d = m.heads(), m.mlp_width(), m.config.n_embd
    falls, has_positions = m.config.architecture == "jina-bert-v2", m.config.architecture == "bert"
    rope, experts = None if falls or has_positions else make_rope(m, heads.key_dim), m.experts(norm_topk_prob=False)
    m.meta.skip("moe_every_n_layers")  # the tensors show which layers have experts
    options: Any = {
        "max_bias": m.meta.read("attention.max_alibi_bias", float, 8.0, low=0.0, high=1e3) if falls else 0
    }

    def embedding(at: Layer, x: Tensor) -> Tensor:
        n, w = m.config.context_length, at.weights
        positions = w.require("position_embd.weight", n, d) if has_positions else None
        n_types, types = w.n_rows("token_types.weight"), None
        if "token_types.weight" in w:
            types = w.require("token_types.weight", n_types, d) if n_types else w.row("token_types", d).weight
        if positions is not None or types is not None:
            x = add(at, at.add(Embed(PositionTable(n, positions, types), by_position=True)), x)
        return layer_norm(at, "token_embd_norm", x)

    def layer(at: Layer, x: Tensor) -> Tensor:
        layer_input, qk_norm = x, _QK_NORM["attn_q_norm.weight" in at.weights]
        y = attention(at, x, heads, rope, residual=x, qk_norm=qk_norm, **options)
        x = layer_norm(at, "attn_output_norm", y)
        if "attn_norm_2.weight" in at.weights:
            x = layer_norm(at, "attn_norm_2", add(at, x, layer_input))
        if experts and at.weights.n_rows("ffn_gate_inp.weight"):
            y = mixture(at, x, experts, residual=x, activation="gelu_erf")
        elif "ffn_gate.weight" in at.weights or at.weights.n_rows("ffn_up.weight") == 2 * n_ff:
            y = gated_mlp(at, x, n_ff, residual=x, activation="gelu_erf" if falls else "silu")
        else:
            y = mlp(at, x, n_ff, residual=x, activation="gelu_erf")
        return layer_norm(at, "layer_output_norm", y)

    return decoder(m, layer, change_embedding=embedding, output_norm=None, norm_eps=m.layer_norm_eps)
