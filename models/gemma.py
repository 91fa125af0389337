"""Gemma (arXiv:2403.08295): wide heads, GeGLU, and an embedding times √n."""

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import add_one_to_norms
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON
hf_tensor = add_one_to_norms


def record(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    rope = make_rope(m, heads.key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, residual=x)
        return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, activation="gelu", residual=x)

    return decoder(m, layer, embedding_scale=m.config.n_embd**0.5)
