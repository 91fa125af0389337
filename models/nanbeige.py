"""Nanbeige 4.2: Llama's layers, which run several times in a row with the same weights.

Each run has a separate cache. The final norm follows each run, unless the file skips it.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import decoder, llama_layer
from localllm.models.config import Header
from localllm.models.hf_convert import head_dim, implied, interleave_query_and_key

#: Settings of variants that GGUF files cannot describe.
HF_MEANT = (
    implied("enable_double_loop_split enable_hyper_connection enable_mhc enable_depth_attention qk_layernorm", False)
    | implied("enable_h_res_identity loop_share_kv ngram_compressed_tokenizer ngram_insert_all_layers", False)
    | implied("emb_neighbor_num", None)
    | implied("depth_attention_recent_window depth_attention_static_anchor_once depth_attention_stride")
    | implied("emb_split_num emb_tp_num insert_ngram_layer_idx loop_middle_layers loop_middle_repeats")
    | implied("mhc_diff_for_loop mhc_double_stream_position_for_loop mhc_identity_nohresparam")
    | implied("mhc_init_gating_factor mhc_sinkhorn_iterations ngram_embedding_hidden_size ngram_fused_mode")
    | implied("ngram_layer_downproject_size ngram_mod_force_prime ngram_vocab_size_ratio num_residual_streams")
    | implied("skip_ngram_for_input")
)
hf_tensor = interleave_query_and_key


def _n_loops(config: Any) -> int:
    n, weights = getattr(config, "num_loops", 1) or 1, getattr(config, "loop_loss_weights", None)
    return len(weights) + 1 if weights else int(n)


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "num_loops": _n_loops(config),
        "skip_loop_final_norm": bool(getattr(config, "skip_loop_final_norm", False)),
        "rope.dimension_count": head_dim(config),
    }


def record(m: Header) -> Graph:
    n_loops = m.meta.read("num_loops", int, 1, low=1, high=64)
    norms_loops = not m.meta.read("skip_loop_final_norm", bool, False)
    return decoder(m, llama_layer(m, interleaved=True), n_loops=n_loops, norms_loops=norms_loops)
