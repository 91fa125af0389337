"""EmbeddingGemma 2: Gemma 4's layers, which attend in both directions. The embedding of each layer is only a
projection of the token's embedding. A matrix follows the last norm.

llama.cpp has no names for this model yet, so Gemma 4's names are used.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels import operations as ops
from localllm.kernels.graph import Graph, Tensor
from localllm.models import gemma4
from localllm.models.blocks import Layer, add, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import GELU_TANH, window_keys, window_pattern
from localllm.models.rope import make_local_rope, make_rope

HF_NAMES = {
    "ple.per_layer_model_projection": "per_layer_model_proj",
    "ple.per_layer_projection_norm": "per_layer_proj_norm",
    "ple_block.per_layer_input_gate": "inp_gate",
    "ple_block.per_layer_projection": "proj",
    "ple_block.post_per_layer_input_norm": "post_norm",
    "embedding_projection": "output_proj",
}
HF_MEANT = {"hidden_activation": GELU_TANH, "per_layer_config": (), "embedding_dim": ()}


def _full_attention(config: Any, name: str, default: int) -> int:
    """Return a setting of the layers without a window."""
    layers, first = getattr(config, "per_layer_config", None) or {}, config.layer_types.index("full_attention")
    return int(layers.get(str(first), {}).get(name, default))


def hf_keys(config: Any) -> dict[str, Any]:
    dim, n_kv = _full_attention(config, "head_dim", 512), _full_attention(config, "num_key_value_heads", 1)
    return {
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": [config.num_key_value_heads if x else n_kv for x in window_pattern(config)],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.dimension_count": dim,
        "rope.dimension_count_swa": config.head_dim,
        **window_keys(config),
        # As in EmbeddingGemma: half before, half after a token.
        "attention.sliding_window": 2 * config.sliding_window,
    }


def record(m: Header) -> Graph:
    heads, n_ff, d, n_layers = gemma4.read_heads(m), m.mlp_width(), m.config.n_embd, m.config.n_layers
    windows = tuple(window and window // 2 + 1 for window in m.windows(period=6, default=None))
    n_per_layer = m.meta.read("embedding_length_per_layer_input", int, low=1, high=1 << 16)
    full, local = (m.head_dims(suffix)[0] for suffix in ("", "_swa"))
    rope, local_rope = make_rope(m, full), make_local_rope(m, local or full)

    def layer(at: Layer, x: Tensor) -> Tensor:
        window = windows[at.number]
        y = norm(at, "attn_norm", x)
        own_rope = local_rope if window else rope
        y = gemma4.attention(at, y, heads[at.number], own_rope, window, None, has_spans=False)
        x = add(at, norm(at, "post_attention_norm", y), x)
        y = gated_mlp(at, norm(at, "ffn_norm", x), n_ff, activation="gelu")
        x = add(at, norm(at, "post_ffw_norm", y), x)
        x = add(at, gemma4.layer_embedding(at, x, at.embedding, m.weights, n_per_layer, n_layers), x)
        return at.add(ops.Scale(x, weight=at.weights.require("layer_output_scale.weight", 1)))

    def output_norm(at: Layer, name: str, x: Tensor) -> Tensor:
        return at.linear(norm(at, name, x), "output_proj", at.weights.n_rows("output_proj.weight"))

    return decoder(m, layer, embedding_scale=d**0.5, output_norm=output_norm)
