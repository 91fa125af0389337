"""HRM-Text (arXiv:2506.21734): a slow and a fast stack of layers, which run several times in turn.

The fast stack reads the sum of both states and replaces the fast state. After every ``l_cycles`` runs, the slow stack
replaces the slow state in the same way. Each run of a layer has a separate cache. Norms have no weights.

The file has the layers of the fast stack, then of the slow stack, once. ``block_count`` is the number of runs of
layers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Matrix, Tensor
from localllm.kernels.operations import Add, Columns, Linear, RMSNorm
from localllm.models.blocks import Layer, attention, decoder, gated_mlp
from localllm.models.config import MAX_LAYERS, Header
from localllm.models.hf_convert import Array, head_dim
from localllm.models.rope import make_rope
from localllm.models.weights import ArrayWeight

HF_NAMES = {"self_attn.gate_proj": "attn_gate", "attn.o_proj": "attn_output"}
#: Tensors that a checkpoint may store as one.
_JOINED = {
    "attn.gqkv_proj.weight": ("attn_gate", "attn_q", "attn_k", "attn_v"),
    "mlp.gate_up_proj.weight": ("ffn_gate", "ffn_up"),
}
HF_MEANT = {"L_bp_cycles": ()}  # for training


def _layers_per_stack(config: Any) -> int:
    return int(getattr(config, "num_layers_per_stack", None) or config.num_hidden_layers)


def hf_name(name: str, config: Any) -> str:
    """Number the layers of the fast stack, then the layers of the slow stack."""
    match = re.fullmatch(r"model\.([LH])_module\.layers\.(\d+)\.(.*)", name)
    if match is None:
        return name
    return f"model.layers.{int(match[2]) + (match[1] == 'H') * _layers_per_stack(config)}.{match[3]}"


def hf_keys(config: Any) -> dict[str, Any]:
    n, h, low = _layers_per_stack(config), config.H_cycles, config.L_cycles
    scale = getattr(config, "embedding_scale", None)
    return {
        "block_count": n * h * (low + 1),
        "attention.head_count_kv": None,
        "embedding_scale": 1 / getattr(config, "initializer_range", 0.02) if scale is None else scale,
        "rope.dimension_count": head_dim(config),
        "hrm.layers_per_stack": n,
        "hrm.h_cycles": h,
        "hrm.l_cycles": low,
        "hrm.prefix_lm": bool(config.prefix_lm),
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    for end, names in _JOINED.items():
        if name.endswith(end):
            parts = np.split(array, len(names))
            return {f"{ours}.weight": part for ours, part in zip(names, parts, strict=True)}
    return {"hrm.z_l_init": array} if name.endswith("z_L_init") else array


def record(m: Header) -> Graph:
    heads, n_ff, eps, d = m.heads(), m.mlp_width(), m.norm_eps, m.config.n_embd
    n = m.config.n_layers // 2
    h_cycles, l_cycles = (m.meta.read(f"hrm.{name}_cycles", int, low=1, high=1 << 8) for name in "hl")
    m.meta.read("hrm.prefix_lm", bool, False)  # for training: llama.cpp computes causal attention, too
    n_runs = n * h_cycles * (l_cycles + 1)
    if n_runs > MAX_LAYERS or n_runs != m.meta.read("block_count", int):
        raise ModelError(f"hrm_text.block_count must be {n_runs} by the cycles in the file, and at most {MAX_LAYERS}")
    rope = make_rope(m, heads.key_dim)
    states: dict[bool, Tensor] = {}  # slow (True) and fast (False)

    def layer(at: Layer, x: Tensor) -> Tensor:
        run, i = divmod(at.number, n)
        is_slow = run % (l_cycles + 1) == l_cycles
        if not at.number:
            # The fast state is a vector of the file at first. The product with zeros adds it as a bias.
            start = m.weights.require("hrm.z_l_init", d)
            zeros = ArrayWeight("zeros", np.zeros((d, 16), np.float32))
            states[True], x = x, at.add(Linear(at.add(Columns(x, range(16))), Matrix(zeros, start), residual=x))
        elif not i:
            x = at.add(Add(states[False], states[True]))
        at = replace(at, weights=m.weights.layer(i + n * is_slow))
        y = at.add(RMSNorm(x, None, eps))
        x = attention(at, y, heads, rope, residual=x, has_gate=True)
        x = gated_mlp(at, at.add(RMSNorm(x, None, eps)), n_ff, residual=x)
        if i == n - 1:
            x = states[is_slow] = at.add(RMSNorm(x, None, eps))
        return x

    runs = replace(m, config=replace(m.config, n_layers=n_runs))
    scale = m.meta.read("embedding_scale", float, 1.0, low=0.0, high=1e6)
    return decoder(runs, layer, embedding_scale=scale, output_norm=None)
