"""Types of a model's tensors: llama.cpp's choices for the usual names of quantised files.

A mix such as Q4_K_M is a type for most tensors and larger types for tensors that matter more: the output, the values
of attention, the down projections of the first and last layers. If rows do not fill the blocks of a type, the tensor
gets a type of about the same size with shorter blocks.

Source: llama.cpp, ``src/llama-quant.cpp`` (``llama_tensor_get_type_impl``, ``tensor_type_fallback``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod

from localllm.errors import UsageError
from localllm.models.config import ModelMetadata
from localllm.quant.types import BLOCK_SIZES, GGMLType

T = GGMLType

#: Number in ``general.file_type`` and type of most tensors, by name of the mix.
MIXES: dict[str, tuple[int, GGMLType]] = {
    "F32": (0, T.F32), "F16": (1, T.F16), "BF16": (32, T.BF16), "Q8_0": (7, T.Q8_0),
    "Q4_0": (2, T.Q4_0), "Q4_1": (3, T.Q4_1), "Q5_0": (8, T.Q5_0), "Q5_1": (9, T.Q5_1),
    "Q2_K": (10, T.Q2_K), "Q2_K_S": (21, T.Q2_K), "Q3_K_S": (11, T.Q3_K), "Q3_K_M": (12, T.Q3_K),
    "Q3_K_L": (13, T.Q3_K), "Q4_K_S": (14, T.Q4_K), "Q4_K_M": (15, T.Q4_K), "Q5_K_S": (16, T.Q5_K),
    "Q5_K_M": (17, T.Q5_K), "Q6_K": (18, T.Q6_K), "IQ4_NL": (25, T.IQ4_NL), "IQ4_XS": (30, T.IQ4_XS),
    "IQ3_M": (27, T.IQ3_S), "IQ3_S": (26, T.IQ3_S), "IQ3_XS": (22, T.IQ3_S), "IQ3_XXS": (23, T.IQ3_XXS),
    "IQ2_M": (29, T.IQ2_S), "IQ2_S": (28, T.IQ2_XS), "IQ2_XS": (20, T.IQ2_XS), "IQ2_XXS": (19, T.IQ2_XXS),
    "IQ1_M": (31, T.IQ1_M), "IQ1_S": (24, T.IQ1_S), "TQ1_0": (36, T.TQ1_0), "TQ2_0": (37, T.TQ2_0),
    "MXFP4_MOE": (38, T.MXFP4), "Q1_0": (40, T.Q1_0), "Q2_0": (41, T.Q2_0),
}  # fmt: skip
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}

#: Replacement for a type whose blocks do not fit the rows.
_SHORTER = {
    T.IQ1_S: T.IQ4_NL, T.IQ1_M: T.IQ4_NL, T.IQ2_XXS: T.IQ4_NL, T.IQ2_XS: T.IQ4_NL, T.IQ2_S: T.IQ4_NL,
    T.IQ3_XXS: T.IQ4_NL, T.IQ3_S: T.IQ4_NL, T.IQ4_XS: T.IQ4_NL,
    T.Q2_K: T.Q4_0, T.Q3_K: T.Q4_0, T.TQ1_0: T.Q4_0, T.TQ2_0: T.Q4_0, T.Q2_0: T.Q4_0,
    T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0,
}  # fmt: skip

#: Types that need an importance matrix, except for embeddings and the output.
_BLIND = {T.IQ3_XXS, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ1_M, T.IQ1_S}

#: Parts of the names of tensors that are small, or that lose more than they save.
_NEVER = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "attn_rel_b.weight",
    ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger",
    "a.rvq.codebook", "mm.a.code_embd",
    "time_mix_first.weight", "time_mix_lerp_fused.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight",
    *(f"time_mix_{x}{i}.weight" for x in "wva" for i in range(3)), "time_mix_g1.weight", "time_mix_g2.weight",
)  # fmt: skip
_NEVER_WHOLE = ("position_embd.weight", "token_types.weight")

_LOWEST = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M"}


def mix_named(name: str) -> str:
    """Return the mix that a user means. Raises UsageError if there is no such mix."""
    numbers = {str(number): key for key, (number, _) in MIXES.items()}  # llama-quantize accepts them
    mix = _ALIASES.get(name.upper(), numbers.get(name, name.upper()))
    if mix not in MIXES:
        near = difflib.get_close_matches(mix, MIXES, n=1)
        advice = f"did you mean {near[0]}? There are" if near else "choose one of"
        raise UsageError(f"there is no type {name!r}: {advice} {', '.join(MIXES)}")
    return mix


#: Roles of tensors that mixes distinguish.
Role = Enum("Role", "TOKENS OUTPUT QKV KV_B V K Q ATTENTION_OUTPUT UP GATE DOWN OTHER")

_ROLES = {
    "attn_qkv.weight": Role.QKV, "attn_kv_b.weight": Role.KV_B, "attn_v.weight": Role.V, "attn_k.weight": Role.K,
    "attn_q.weight": Role.Q, "attn_output.weight": Role.ATTENTION_OUTPUT, "ffn_up": Role.UP, "ffn_gate": Role.GATE,
    "ffn_down": Role.DOWN,
}  # fmt: skip
_VALUES = (Role.V, Role.QKV, Role.KV_B)


def role_of(name: str) -> Role:
    if name == "output.weight":
        return Role.OUTPUT
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return Role.TOKENS
    return next((role for substring, role in _ROLES.items() if substring in name), Role.OTHER)


def is_quantizable(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is ever quantised: a weight of at least two dimensions that is not in the exceptions.
    ``shape``: in numpy's order.
    """
    is_matrix = prod(shape[:-1]) > 1
    is_exception = name in _NEVER_WHOLE or any(substring in name for substring in _NEVER)
    return is_matrix and name.endswith("weight") and not is_exception


def needs_importance(name: str, type: GGMLType, mix: str) -> bool:
    """Return whether a tensor of this type needs an importance matrix."""
    if role_of(name) in (Role.TOKENS, Role.OUTPUT):
        return False
    return type in _BLIND or (type is T.Q2_K and mix == "Q2_K_S")


def layer_order(name: str) -> tuple[int, str]:
    """Return the sort key for counting and writing tensors: by layer, then by name; tensors without a layer first."""
    match = re.match(r"blk\.(\d+)\.", name)
    return (int(match[1]) if match else -1, name)


@dataclass
class Chooser:
    """Chooses types of tensors in `layer_order`. Choices depend on the number of earlier tensors of a role."""

    mix: str  # a name in `MIXES`
    # architecture, n_layers, n_experts: of the model; n_groups: query heads per key-value head
    architecture: str
    n_layers: int
    n_experts: int
    n_groups: int
    n_values: int  # number of value tensors of attention in the model
    is_tied: bool  # the token embedding is also the output matrix
    has_importance: bool  # there is an importance matrix
    overrides: Sequence[tuple[re.Pattern[str], GGMLType]] = ()  # patterns of names, and their types
    _counts: dict[str, int] = field(default_factory=dict)

    def wanted_type(self, name: str, shape: Sequence[int], old: GGMLType) -> GGMLType:
        """Return the type for a tensor of numpy's ``shape`` with type ``old``. Ignores the block length."""
        _, default = MIXES[self.mix]
        if not is_quantizable(name, shape):
            return old
        if BLOCK_SIZES[default].length == 1:
            return default
        new = next((type for pattern, type in self.overrides if pattern.search(name)), None)
        return self._chosen(name, role_of(name), shape, default) if new is None else new

    def _chosen(self, name: str, role: Role, shape: Sequence[int], default: GGMLType) -> GGMLType:
        mix = self.mix
        if role is Role.OUTPUT or (self.is_tied and role is Role.TOKENS):
            if mix == "MXFP4_MOE" or self.architecture == "falcon" or shape[-1] % BLOCK_SIZES[default].length:
                return T.Q8_0
            if mix in _LOWEST or mix == "IQ3_XXS":
                return T.Q5_K
            return default if default is T.Q8_0 else T.Q6_K
        if mix == "MXFP4_MOE":
            return T.MXFP4 if len(shape) == 3 and shape[0] > 1 else T.Q8_0
        if role is Role.TOKENS:
            return _TOKENS.get(mix, default)
        if mix in _LOWEST:
            return self._of_lowest(role, default)
        if role in _VALUES:
            return self._of_values(default)
        if role in (Role.K, Role.Q):
            if role is Role.K and self.n_experts == 8:
                return T.Q8_0
            return {"IQ3_XS": T.IQ3_XXS, "IQ3_XXS": T.IQ2_S}.get(mix, default)
        if role is Role.DOWN:
            return self._of_down(name, default)
        if role is Role.ATTENTION_OUTPUT:
            return self._of_attention_output(default)
        if role in (Role.UP, Role.GATE) and mix == "IQ3_XS":
            layer = self._layer(role.name, name)
            return T.IQ3_XXS if self.n_layers // 8 <= layer < 7 * self.n_layers // 8 else default
        return default

    def _count(self, key: str) -> int:
        """Return the number of earlier calls for ``key``."""
        n = self._counts.get(key, 0)
        self._counts[key] = n + 1
        return n

    def _layer(self, key: str, name: str) -> int:
        """Return a tensor's layer; in models without experts, the number of earlier tensors of its role."""
        n = self._count(key)
        return layer_order(name)[0] if self.n_experts > 1 else n

    def _of_lowest(self, role: Role, default: GGMLType) -> GGMLType:
        better = T.IQ3_S if self.mix in ("IQ2_S", "IQ2_M") else T.Q2_K
        if role in _VALUES:
            return T.Q4_K if self.n_groups >= 4 or self.n_experts >= 4 else better
        if role is Role.K and self.n_experts == 8:
            return T.Q4_K
        if role is Role.DOWN:
            return better if self._count("DOWN") < self.n_layers // 8 else default
        if role is Role.ATTENTION_OUTPUT:
            if self.n_experts == 8:
                return T.Q5_K
            return {"IQ1_S": T.IQ2_XXS, "IQ1_M": T.IQ2_XXS, "IQ2_S": T.IQ3_S, "IQ2_M": T.IQ3_S}.get(self.mix, default)
        return default

    def _of_values(self, default: GGMLType) -> GGMLType:
        mix, at, is_grouped = self.mix, self._count("VALUES"), self.n_groups >= 4
        new = default
        if mix == "Q2_K":
            new = T.Q4_K if is_grouped else T.Q3_K
        elif mix == "IQ3_XXS":
            new = T.Q4_K if is_grouped else T.IQ3_XXS if self.has_importance else T.IQ3_S
        elif mix == "IQ3_M" or (mix in ("Q2_K_S", "IQ3_XS", "IQ3_S") and is_grouped):
            new = T.Q4_K
        elif mix == "Q3_K_M":
            new = T.Q5_K if at < 2 else T.Q4_K
        elif mix == "Q3_K_L" or (mix in ("IQ4_NL", "IQ4_XS") and is_grouped) or (mix == "Q4_K_S" and at < 4):
            new = T.Q5_K
        elif mix in ("Q4_K_M", "Q5_K_M") and _matters_more(at, self.n_values):
            new = T.Q6_K
        if self._is_70b() and new in (T.Q3_K, T.Q4_K):
            new = T.Q5_K
        return T.Q8_0 if self.n_experts == 8 else new

    def _is_70b(self) -> bool:
        """Whether llama.cpp classifies the model as "70B": eight heads share their values, which are therefore
        small."""
        if self.architecture == "llama":
            return self.n_layers == 80 and self.n_groups != 1
        return self.n_layers == {"qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}.get(self.architecture)

    def _of_down(self, name: str, default: GGMLType) -> GGMLType:
        mix, n, is_falcon = self.mix, self.n_layers, self.architecture == "falcon"
        layer = self._layer("DOWN", name)
        is_first, matters = layer < n // 8, _matters_more(layer, n)
        match mix:
            case "Q2_K":
                return T.Q3_K
            case "Q2_K_S" if is_first:
                return T.Q4_K
            case "IQ3_XXS" if not self.has_importance:
                return T.Q4_K if is_first else T.Q3_K
            case "Q3_K_M":
                return T.Q5_K if layer < n // 16 else T.Q4_K if not is_falcon or matters else T.Q3_K
            case "IQ3_M" if is_first or (self.n_experts == 8 and matters):
                return T.Q4_K
            case "Q3_K_L":
                return T.Q4_K if is_falcon else T.Q5_K
            case "Q4_K_M" if is_falcon:
                return T.Q6_K if layer < n // 16 else T.Q5_K if matters else T.Q4_K
            case "Q4_K_M" | "Q5_K_M" if matters:
                return T.Q6_K
            case "IQ4_NL" | "IQ4_XS" if is_first and not self.has_importance:
                return T.Q5_K
            case "Q4_K_S" if is_first and not is_falcon:
                return T.Q5_K
            case "Q4_0" | "Q5_0" if is_first and self.has_importance:
                return T.Q4_1 if mix == "Q4_0" else T.Q5_1
        return default

    def _of_attention_output(self, default: GGMLType) -> GGMLType:
        if self.architecture == "falcon":
            return T.Q4_K if self.mix == "Q3_K_L" else default
        if self.n_experts == 8:
            return T.Q5_K if self.mix in _WITH_BETTER_ATTENTION else default
        return _ATTENTION_OUTPUT.get(self.mix, default)


_TOKENS = {
    "IQ1_S": T.Q2_K, "IQ1_M": T.Q2_K, "IQ2_XXS": T.Q2_K, "IQ2_XS": T.Q2_K,
    "IQ2_S": T.IQ3_S, "IQ2_M": T.IQ3_S, "IQ3_XXS": T.IQ3_S, "TQ1_0": T.Q4_K, "TQ2_0": T.Q4_K,
    "Q2_0": T.Q4_K,
}  # fmt: skip
_ATTENTION_OUTPUT = {"Q2_K": T.Q3_K, "IQ3_XXS": T.IQ3_S, "Q3_K_M": T.Q4_K, "Q3_K_L": T.Q5_K, "IQ3_M": T.Q4_K}
_WITH_BETTER_ATTENTION = frozenset(
    ["Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S", "IQ3_M", "IQ4_XS"]
)


def _matters_more(layer: int, n: int) -> bool:
    """Return whether a layer is in the first or the last eighth of the layers, or every third layer between them."""
    return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2


def fitting(type: GGMLType, n: int) -> GGMLType:
    """Return ``type``, or its replacement if rows of ``n`` values do not fill its blocks."""
    if n % BLOCK_SIZES[type].length == 0:
        return type
    shorter = _SHORTER.get(type, type)
    return shorter if n % BLOCK_SIZES[shorter].length == 0 else T.F16


def chooser_for(
    mix: str,
    architecture: str,
    metadata: Mapping[str, object],
    names: Sequence[str],
    has_importance: bool,
    overrides: Sequence[tuple[re.Pattern[str], GGMLType]] = (),
) -> Chooser:
    """Return a `Chooser` for the model with these keys and tensors."""

    def number(key: str, default: int) -> int:
        value = ModelMetadata(metadata, architecture).find(key)
        value = value[0] if isinstance(value, list | tuple) and value else value  # the first layer's, as in llama.cpp
        return ModelMetadata({f"{architecture}.{key}": value}, architecture).read(key, int, default)

    heads = number("attention.head_count", 0)
    kv_heads = number("attention.head_count_kv", heads)
    return Chooser(
        mix=mix,
        architecture=architecture,
        n_layers=number("block_count", 0),
        n_experts=number("expert_count", 0),
        n_groups=heads // kv_heads if kv_heads else 0,
        n_values=sum(role_of(name) in _VALUES for name in names),
        is_tied="output.weight" not in names,
        has_importance=has_importance,
        overrides=overrides,
    )
