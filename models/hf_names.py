"""Hugging Face's names of tensors, by GGUF's: what most architectures share, for their ``HF_NAMES`` to begin with.

Names of layers' tensors stand without ``blk.{i}.`` and ``model.layers.{i}.``, and those of matrices and norms without
``.weight`` and ``.bias``, but where one has other suffixes than the other.  ``*`` is the number of an expert, whose
matrices lie in one tensor.
"""


def projections(module: str, suffix: str = "") -> dict[str, str]:
    """The matrices of a gated MLP; the suffix is GGUF's."""
    return {f"ffn_{name}{suffix}": f"{module}.{name}_proj" for name in ("gate", "up", "down")}


def w123_experts(module: str) -> dict[str, str]:
    """Experts with Mixtral's names, and what chooses them."""
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    experts = {f"ffn_{ours}_exps": f"{module}.experts.*.{theirs}" for ours, theirs in names.items()}
    return {"ffn_gate_inp": f"{module}.gate"} | experts


def mamba(module: str) -> dict[str, str]:
    """A layer of Mamba 2."""
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

#: Experts, each with tensors of its own, or all in one.
EXPERTS = projections("mlp.experts.*", "_exps")
STACKED_EXPERTS = {
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}

#: GPT-2's embedding and norms.
GPT_2 = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
}
#: Mamba's, whose layers have one norm.
BACKBONE = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "attn_norm": "norm",
}

#: Norms of the heads of query and key, or of their rows.
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

#: Norms before and behind attention and MLP, as Gemma has them.
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

#: The expert that every token goes to.
SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | projections("mlp.shared_expert", "_shexp")

#: The same, and the bias of the selection, as DeepSeek V3 has them.
SHARED_EXPERTS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"} | projections(
    "mlp.shared_experts", "_shexp"
)
