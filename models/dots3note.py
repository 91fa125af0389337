"""Dots 3 Note: latent attention to positions that an indexer selects, and layers with a window, whose latents are
wider. Each head has a gate, and the rotated part of keys has a norm.

The latents of layers with a window are too wide for the cache, so each head has separate keys and values there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels import operations as ops
from localllm.kernels.graph import Graph, Matrix, Rope, Tensor
from localllm.models import deepseek2, deepseek32
from localllm.models.blocks import Layer, decoder, feed_forward, norm
from localllm.models.config import MAX_HEAD_DIM, Header
from localllm.models.hf_convert import Array, floats, implied, routing_keys
from localllm.models.rope import make_local_rope
from localllm.models.weights import FloatView, Reshaped, floats as weight_floats

HF_NAMES = {"self_attn.k_rope_only_layernorm": "attn_k_norm", "self_attn.g_proj": "attn_gate"}
HF_MEANT = (
    implied("use_dsa k_rope_only_layernorm apply_mla_qkv_lora_rescale use_sliding_window", True)
    | implied("normalization final_norm", "RMSNorm")
    | implied("attention_gate_type swa_attention_gate_type", "headwise")
    | implied("use_dynamic_rsf moe_gating_fp32", False)
    | implied("first_k_dense_replace moe_layer_freq swa_num_key_value_heads swa_head_dim head_dim")
    | implied("moe_shared_expert_intermediate_size shared_experts_intermediate_size")
)


def hf_keys(config: Any) -> dict[str, Any]:
    n_latent, rank, local = _n_latent(config, is_local=True), config.kv_lora_rank, _are_local(config)
    n_rot = config.qk_rope_head_dim
    if config.swa_qk_rope_head_dim != n_rot or config.swa_q_lora_rank != config.q_lora_rank:
        raise ModelError(
            "config.json has other values of swa_qk_rope_head_dim or swa_q_lora_rank than of qk_rope_head_dim or "
            "q_lora_rank, but a GGUF file contains one value for all layers"
        )
    return routing_keys(config) | {
        "vocab_size": config.vocab_size,
        "attention.head_count": [_n_heads(config, is_local=is_local) for is_local in local],
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.kv_lora_rank_swa": n_latent,
        "attention.key_length": rank + n_rot,
        "attention.key_length_swa": n_latent + n_rot,
        "attention.value_length": rank,
        "attention.value_length_swa": n_latent,
        "attention.key_length_mla": config.qk_nope_head_dim + n_rot,
        "attention.key_length_mla_swa": config.swa_qk_nope_head_dim + n_rot,
        "attention.value_length_mla": config.v_head_dim,
        "attention.value_length_mla_swa": config.swa_v_head_dim,
        "attention.sliding_window": config.get("sliding_window_size") or config.sliding_window,
        "attention.sliding_window_pattern": local,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": [not is_local for is_local in local],
        "rope.dimension_count": n_rot,
    }


def _are_local(config: Any) -> list[bool]:
    """Return for each layer whether it has a window."""
    return [kind == "sliding_attention" for kind in config.layer_types]


def _n_heads(config: Any, *, is_local: bool) -> int:
    return int(config.swa_num_attention_heads if is_local else config.num_attention_heads)


def _n_latent(config: Any, *, is_local: bool) -> int:
    return int(config.swa_kv_lora_rank if is_local else config.kv_lora_rank)


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Multiply norms of latents with the model's factors, and split each head's matrix as in DeepSeek V2."""
    if not name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight", "kv_b_proj.weight")):
        return array
    is_local = _are_local(config)[int(name.split("layers.")[1].split(".")[0])]
    n_latent = _n_latent(config, is_local=is_local)
    if name.endswith("layernorm.weight"):
        n = config.q_lora_rank if "q_a_" in name else n_latent
        return floats(array) * np.float32((config.hidden_size / n) ** 0.5)
    heads = array.reshape(_n_heads(config, is_local=is_local), -1, n_latent)
    n_nope = config.swa_qk_nope_head_dim if is_local else config.qk_nope_head_dim
    k, v = np.split(heads, [n_nope], axis=1)
    return {"attn_k_b.weight": k.swapaxes(1, 2), "attn_v_b.weight": v}


@dataclass(frozen=True, eq=False)
class KeysOfHeads(FloatView):
    """The matrix [n_heads * key_dim, n_latent + n_rot] from a latent and a rotated part to the keys of all heads.

    It is computed from matrices from keys to latents, [n_heads, n_latent, key_dim - n_rot]. The rotated part is the
    same in the keys of all heads.
    """

    n_rot: int

    @property
    def name(self) -> str:
        return f"{self.whole.name} as keys"

    @property
    def shape(self) -> tuple[int, ...]:
        n_heads, n_latent, n_nope = self.whole.shape
        return n_heads * (n_nope + self.n_rot), n_latent + self.n_rot

    def values(self) -> NDArray[np.float32]:
        n_heads, n_latent, n_nope = self.whole.shape
        matrix = np.zeros((n_heads, n_nope + self.n_rot, n_latent + self.n_rot), np.float32)
        matrix[:, :n_nope, :n_latent] = weight_floats(self.whole).swapaxes(1, 2)
        matrix[:, n_nope:, n_latent:] = np.eye(self.n_rot)
        return matrix


def record(m: Header) -> Graph:
    meta, n_layers = m.meta, m.config.n_layers
    rope, scale = deepseek2.make_latent_rope(m)
    heads = meta.read_each("attention.head_count", n_layers, int, low=1, high=1 << 14)
    latents, local = deepseek2.Latents.read(m, scale, n_heads=1), _read_local(m)
    local_rope = replace(make_local_rope(m, local.n_rot), interleaved=True, first=local.key_dim - local.n_rot)
    windows, ffn = m.windows(period=1), m.feed_forward(m.experts(gating="sigmoid"))
    is_full = tuple(window is None for window in windows)
    select = deepseek32.make_indexers(m, replace(rope, first=0), 1e-6, is_full)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, n, window = norm(at, "attn_norm", x), heads[at.number], windows[at.number]
        if window is None:
            sizes = replace(latents, n_heads=n)
            x = deepseek2.latent_attention(at, y, sizes, rope, residual=x, has_gate=True, select=select)
        else:
            x = window_attention(at, y, replace(local, n_heads=n), local_rope, window, residual=x)
        return feed_forward(at, norm(at, "ffn_norm", x), ffn, residual=x)

    return decoder(m, layer)


def _read_local(m: Header) -> deepseek2.Latents:
    """Read the sizes of layers with a window."""
    meta = m.meta
    meta.skip("attention.key_length_swa", "attention.value_length_swa")  # of the latents
    n_latent = meta.read("attention.kv_lora_rank_swa", int, low=1, high=1 << 12)
    n_rot = meta.read("rope.dimension_count", int, low=2, high=128)
    key_dim, value_dim = (
        meta.read(f"attention.{x}_length_mla_swa", int, low=2, high=MAX_HEAD_DIM) for x in ("key", "value")
    )
    n_query = meta.read("attention.q_lora_rank", int, low=1, high=1 << 16)
    return deepseek2.Latents(1, n_latent, n_rot, key_dim, value_dim, n_query, key_dim**-0.5)


def window_attention(
    at: Layer, x: Tensor, latents: deepseek2.Latents, rope: Rope, window: int, *, residual: Tensor
) -> Tensor:
    """Latent attention in a window, with separate keys and values of each head in the cache."""
    w, n, n_latent, n_rot = at.weights, latents.n_heads, latents.n_latent, latents.n_rot
    matrices = {"attn_q_a": latents.n_query, "attn_kv_a_mqa": n_latent + n_rot}
    q, k = at.add(ops.Linears(x, tuple(w.matrix(name, x.width, width) for name, width in matrices.items())))
    q = at.linear(norm(at, "attn_q_a_norm", q), "attn_q_b", n * latents.key_dim)
    latent, rotated = deepseek2.normed_parts(at, k, n_latent)
    to_latents = w.require("attn_k_b.weight", n, n_latent, latents.key_dim - n_rot)
    values = w.require("attn_v_b.weight", n, latents.value_dim, n_latent)
    k = at.add(ops.Linear(at.add(ops.SideBySide((latent, rotated))), Matrix(KeysOfHeads(to_latents, n_rot))))
    v = at.add(ops.Linear(latent, Matrix(Reshaped(values, (n * latents.value_dim, n_latent)))))
    cache = at.graph.kv_cache(n, latents.key_dim, latents.value_dim, window=window)
    q = at.add(ops.RopeAppend(q, k, v, cache, rope))
    y = at.add(ops.Attention(q, cache, latents.scale, window))
    y = at.add(ops.HeadGate(y, at.linear(x, "attn_gate", n), "sigmoid"))
    return at.linear(y, "attn_output", at.n_embd, residual=residual)
