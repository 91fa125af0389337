"""Gemma (arXiv:2403.08295): wide heads, GeGLU, and an embedding times √n."""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models.blocks import decoder, llama_layer
from localllm.models.config import Header
from localllm.models.hf_convert import GELU_TANH, add_one_to_norms

#: In the configurations of the first release, "gelu" means the tanh form.
HF_MEANT = {"hidden_act": (*GELU_TANH, "gelu"), "hidden_activation": GELU_TANH}
hf_tensor = add_one_to_norms


def record(m: Header) -> Graph:
    layer = llama_layer(m, activation="gelu")
    return decoder(m, layer, embedding_scale=m.config.n_embd**0.5)
