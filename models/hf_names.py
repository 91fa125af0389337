"""Hugging Face's names of tensors by GGUF's names. The ``HF_NAMES`` of most architectures start with these mappings.

Names of tensors in layers omit ``blk.{i}.`` and ``model.layers.{i}.``. Names of matrices and norms omit ``.weight``
and ``.bias``, unless the suffixes of the two names differ. ``*`` is the number of an expert: GGUF files store the
matrices of all experts in one tensor.
"""


def projections(module: str, suffix: str = "") -> dict[str, str]:
    """Return the names of a gated MLP's matrices. ``suffix`` is appended to GGUF's names."""
    return {f"ffn_{name}{suffix}": f"{module}.{name}_proj" for name in ("gate", "up", "down")}


def w123_experts(module: str) -> dict[str, str]:
    """Return the names of experts and their router, as in Mixtral."""
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    experts = {f"ffn_{ours}_exps": f"{module}.experts.*.{theirs}" for ours, theirs in names.items()}
    return {"ffn_gate_inp": f"{module}.gate"} | experts


def mamba(module: str) -> dict[str, str]:
    """Return the names of a Mamba 2 layer."""
    names = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_dt.bias": "dt_bias",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
    }
    return {ours: f"{module}.{theirs}" for ours, theirs in names.items()}


COMMON = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
} | projections("mlp")

#: Experts: separate tensors for each expert (EXPERTS), or one tensor for all experts (STACKED_EXPERTS).
EXPERTS = projections("mlp.experts.*", "_exps")
STACKED_EXPERTS = {
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}

#: Embedding and norms of GPT-2.
GPT_2 = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
}
#: Embedding and norms of Mamba, whose layers have one norm.
BACKBONE = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "attn_norm": "norm",
}

#: Norms of query and key, by head or by row.
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

#: Norms before and after attention and MLP, as in Gemma.
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

#: The shared expert, used by every token.
SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | projections("mlp.shared_expert", "_shexp")

#: Shared experts and the bias of the selection, as in DeepSeek V3.
SHARED_EXPERTS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"} | projections(
    "mlp.shared_experts", "_shexp"
)
