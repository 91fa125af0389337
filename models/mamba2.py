"""Mamba 2 (arXiv:2405.21060): no attention, and nothing else between its layers."""

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, Mamba, decoder, mamba, norm
from localllm.models.config import Header
from localllm.models.hf_convert import mamba_tensor

HF_NAMES = hf_names.mamba("mixer") | {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "attn_norm": "norm",
}
hf_tensor = mamba_tensor


def hf_keys(config: Any) -> dict[str, Any]:
    absent = ("head_count_kv", "key_length", "value_length", "layer_norm_epsilon")
    return {f"attention.{name}": None for name in absent} | {
        "rope.freq_base": None,
        "context_length": 1 << 20,  # it has no limit; as llama.cpp's converter says
        "attention.head_count": 0,
        "feed_forward_length": 0,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.num_heads,
        "ssm.inner_size": config.num_heads * config.head_dim,
    }


def record(m: Header) -> Graph:
    net = Mamba.read(m.meta)
    m.meta.skip("attention.head_count")  # 0

    def layer(at: Layer, x: Tensor) -> Tensor:
        return mamba(at, norm(at, "attn_norm", x), net, residual=x)

    return decoder(m, layer)
