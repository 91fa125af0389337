"""``config.json``: a checkpoint's hyper-parameters, and the GGUF keys that most architectures have of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from localllm.convert.defaults import DEFAULTS, LIKE, NAMES
from localllm.convert.irrelevant import is_irrelevant
from localllm.convert.settings import CheckpointSettings, MissingSetting
from localllm.errors import ModelError, quoted
from localllm.models.config import ModelConfig
from localllm.models.hf_convert import head_dim, window_pattern
from localllm.models.rope import yarn_mscale

#: Sections of config.json that describe the text model.
TEXT_SECTIONS = ("text_config", "transformer_layer_config", "llm_config", "language_config", "thinker_config")

#: Names of one setting, in every architecture: one setting per line.
_COMMON_NAMES = """\
num_hidden_layers n_layer n_layers num_layers num_transformer_layers
hidden_size n_embd n_embed d_model model_dim
num_attention_heads n_head n_heads num_heads
max_position_embeddings n_positions max_seq_len
n_routed_experts num_experts num_local_experts moe_num_experts
num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts experts_per_token
n_shared_experts num_shared_experts moe_num_shared_experts
norm_topk_prob moe_renormalize
n_group num_expert_group
intermediate_size d_ff block_ff_dim
head_dim d_kv attention_head_dim
num_kv_heads n_head_kv
partial_rotary_factor rotary_pct rope_pct rope_percent
rope_theta rotary_emb_base global_rope_theta rope_freq_constant theta
rope_local_base_freq local_rope_theta rope_local_theta swa_rope_theta
layer_types layers_block_type
tie_word_embeddings tie_embedding share_input_output_layers
torch_dtype dtype
"""
COMMON_NAMES = [line.split() for line in _COMMON_NAMES.splitlines()]


def of_thinker(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of the thinker, the text model of a model that also speaks (Qwen Omni)."""
    kind = str(values.get("model_type")).removesuffix("_thinker")
    thinker = values.get("thinker_config")
    if not isinstance(thinker, dict) or not isinstance(thinker.get("text_config"), dict):
        return {**values, "model_type": kind} if "model_type" in values else dict(values)
    others = re.compile("(thinker|talker|token2wav|code2wav)_")
    rest = {name: value for name, value in values.items() if not others.match(name)}
    return {**rest, **thinker, "model_type": kind}


class Config(CheckpointSettings):
    """``config.json`` of a checkpoint: the settings of its text model, with the defaults of transformers' class.

    Attributes:
        has_section: whether the settings are in a section, next to those of encoders.
        rope_parameters: the rotation, from ``rope_parameters``, ``rope_scaling`` or separate settings.
        tensors: the checkpoint's tensors by name, `localllm.convert.sources.Source`.
        n_nextn: blocks after the last layer, each of which predicts one further token.
        target: of a drafter, the model that it drafts for.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        section = next((name for name in TEXT_SECTIONS if isinstance(values.get(name), dict)), None)
        text = values[section] if section else values
        kind = str(text.get("model_type") or values.get("model_type"))
        self.text_type = kind = LIKE.get(kind, kind)
        defaults = DEFAULTS.get(kind, {})
        outer = {name: value for name, value in values.items() if name not in defaults} if section else {}
        place = f"{section}." if section else ""
        super().__init__(
            {**outer, **text}, place=place, defaults=defaults, names=(*COMMON_NAMES, *NAMES.get(kind, ()))
        )
        self._text, self.has_section = text, section is not None
        self.tensors: Mapping[str, Any] = {}
        self.n_nextn = 0
        self.target: ModelConfig | None = None
        self.rope_parameters = self._rope()

    def __getitem__(self, name: str) -> Any:
        try:
            value = super().__getitem__(name)
        except MissingSetting:
            value = self._derived(name)
            if value is None:
                raise
        return self._derived(name) if value is None else value

    def _derived(self, name: str) -> Any:
        """Return the value of an omitted setting that follows from others; None if it does not."""
        if name == "num_key_value_heads":
            return self.get("num_attention_heads")
        if name == "num_hidden_layers" and isinstance(kinds := self.get("layers_block_type"), list):
            return len(kinds)
        if name == "layer_types" and (kind_of := _LAYER_TYPES.get(self.text_type)):
            return [kind_of(self, i) for i in range(self.num_hidden_layers)]
        if name == "mlp_layer_types":
            n_dense = self.get("first_k_dense_replace", _N_DENSE.get(self.text_type))
            if n_dense is not None:
                return ["dense" if i < n_dense else "sparse" for i in range(self.num_hidden_layers)]
        return None

    def _rope(self) -> CheckpointSettings:
        """Return the rotation of all layers, or of full and of windowed layers, as transformers 5 writes it."""
        given = None
        for name in ("rope_parameters", "rope_scaling"):  # the second counts first
            other = super().get(name)
            given = other if other is not None and other != {} else given
            if isinstance(other, CheckpointSettings):
                other.skip_all()
        given = self.defaults.get("rope_parameters") if given is None else given
        if not isinstance(given, CheckpointSettings | dict | None):
            raise ModelError(f"config.json has rope_scaling = {quoted(given)}, which must be an object")
        rope: dict[str, Any] = dict(given.raw() if isinstance(given, CheckpointSettings) else given or {})
        local = self.get("rope_local_base_freq")
        if not any(isinstance(part, dict) for part in rope.values()):
            rope = self._with_defaults(rope)
            if local is not None or self.text_type in _ROPE_OF_LAYERS:
                theta = rope["rope_theta"] if local is None else local
                part = rope.get("partial_rotary_factor")
                plain = {"rope_type": "default", "rope_theta": theta}
                plain |= {} if part is None else {"partial_rotary_factor": part}
                rope = {"full_attention": rope, "sliding_attention": plain}
        else:
            rope = {
                kind: self._with_defaults(part, local if kind == "sliding_attention" else None)
                for kind, part in rope.items()
                if isinstance(part, dict)
            }
        return CheckpointSettings(rope, place=f"{self._place}rope_parameters.")

    def _with_defaults(self, rope: Mapping[str, Any], theta: Any = None) -> dict[str, Any]:
        theta = self.get("rope_theta") if theta is None else theta
        kind = rope.get("rope_type") or rope.get("type") or "default"
        rope = {key: value for key, value in rope.items() if value is not None and key != "type"}
        found = {"rope_theta": 10_000.0 if theta is None else theta}
        if (part := self.get("partial_rotary_factor")) is not None:
            found["partial_rotary_factor"] = part
        original = self.get("original_max_position_embeddings")
        if kind in ("llama3", "yarn", "longrope", "su"):
            found["original_max_position_embeddings"] = original or self.get("max_position_embeddings")
            if original is not None:  # outside of the rotation, it counts first
                rope.pop("original_max_position_embeddings", None)
        return (
            {"rope_type": _KINDS_OF_ROPE.get(kind, kind)}
            | found
            | {k: v for k, v in rope.items() if k != "rope_type"}
        )

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the unread settings of the text model.

        Settings of a fused model outside the text model's section belong to its encoders (`localllm.convert.mmproj`).
        """
        return (
            (full, value)
            for full, value in super().unread()
            if full.removeprefix(self._place).partition(".")[0] in self._text
        )

    def knows(self, name: str) -> bool:
        """Return whether the text model's class has a setting of this name."""
        return name in self.defaults or name in self._names or name in ("rope_parameters", "rope_scaling")

    def check_lost(self, meant: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise ModelError for a setting that the file would lose.

        ``meant``: as in `CheckpointSettings.check_all_read`.
        """
        self.check_all_read(meant, is_irrelevant)
        self.rope_parameters.check_all_read({}, lambda name: name in meant or is_irrelevant(name))


#: Old names of kinds of rotation; for text, the axes of an image are all the position.
_KINDS_OF_ROPE = {"su": "longrope", "mrope": "default", "none": "default"}
#: Classes that scale the rotation of layers without a window only.
_ROPE_OF_LAYERS = {"olmo3"}


def _window(has_window: Any) -> str:
    return "sliding_attention" if has_window else "full_attention"


def _every(config: Config, name: str, default: int | None = None) -> int:
    """Return a setting, the length of a repeated pattern of layers. Raises ModelError if it is not positive."""
    n = config[name] if default is None else config.get(name, default)
    if not isinstance(n, int) or n < 1:
        raise ModelError(f"config.json has {name} = {quoted(n)}, a number of layers: set it to 1 or more")
    return n


def _exaone(config: Config, i: int) -> str:
    period = config.get("sliding_window_pattern", 4)
    if isinstance(period, str):  # "LLLG"
        period = len(period)
    elif not config.get("sliding_window"):
        period = 0
    return _window(period and (i + 1) % int(period))


def _after_dense(config: Config, i: int) -> str:
    return _window(config.use_sliding_window and config.sliding_window and i >= config.max_window_layers)


#: Settings that ``layer_types`` replaces.
_OF_LAYER_TYPES = (
    "full_attention_interval", "global_attn_every_n_layers", "layer_group_size", "max_window_layers",
    "prefix_dense_sliding_window_pattern", "sliding_window_pattern", "use_sliding_window",
)  # fmt: skip

#: Layers without experts where a class has no setting for them.
_N_DENSE = {"glm5_next_text": 3, "hy_v3": 1, "hy_v4": 1, "laguna": 1, "mellum": 0, "mimo_v2_flash": 1}


def _cohere2_moe(config: Config, i: int) -> str:
    n_dense, of_dense = config.get("first_k_dense_replace", 0), _every(config, "prefix_dense_sliding_window_pattern")
    period = _every(config, "sliding_window_pattern")
    return _window((i + 1) % of_dense if i < n_dense else (i - n_dense + 1) % period)


def _lfm2(config: Config, i: int) -> str:
    full = config.get("full_attn_idxs")
    return "full_attention" if full is None or i in full else "conv"


def _linear(other: str) -> Callable[[Config, int], str]:
    return lambda config, i: "linear_attention" if (i + 1) % _every(config, "full_attention_interval", 4) else other


#: Kinds of layers that a class gives a layer, counted from 0, if ``layer_types`` is omitted.
_LAYER_TYPES: dict[str, Callable[[Config, int], str]] = {
    "afmoe": lambda config, i: _window((i + 1) % _every(config, "global_attn_every_n_layers")),
    "cohere2": lambda config, i: _window((i + 1) % _every(config, "sliding_window_pattern", 4)),
    "cohere2_moe": _cohere2_moe,
    "dots1": lambda config, i: _window(config.sliding_window and i >= config.max_window_layers),
    "embedding_gemma2_text": lambda config, i: _window((i + 1) % 6 and i + 1 < config.num_hidden_layers),
    "exaone4": _exaone,
    "exaone_moe": _exaone,
    "gemma2": lambda config, i: _window((i + 1) % 2),
    "gemma3_text": lambda config, i: _window((i + 1) % _every(config, "sliding_window_pattern", 6)),
    "gemma3n_text": lambda config, i: _window((i + 1) % 5),
    "gemma4_text": lambda config, i: _window((i + 1) % 6 and i + 1 < config.num_hidden_layers),
    "gemma4_unified_text": lambda config, i: _window((i + 1) % 6 and i + 1 < config.num_hidden_layers),
    "glm5_next_text": lambda config, i: "linear_attention" if i % 4 != 3 else "indexed_attention",
    "gpt_oss": lambda config, i: _window((i + 1) % 2),
    "granite_swa": lambda config, i: _window(i % 4),
    "granitemoe_swa": lambda config, i: _window(i % 4),
    "granitemoehybrid": lambda config, i: "linear_attention",
    "laguna": lambda config, i: "full_attention",
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "lfm3": lambda config, i: "full_attention" if i % 4 == 2 else "conv" if i % 4 or not i else "sliding_attention",
    "mellum": lambda config, i: "full_attention",
    "mimo_v2_flash": lambda config, i: _window(i and (i + 1) % 6),
    "mistral": lambda config, i: _window(config.sliding_window),
    "mixtral": lambda config, i: _window(config.sliding_window),
    "modernbert": lambda config, i: _window(i % _every(config, "global_attn_every_n_layers", 3)),
    "muse_glimmer_text": lambda config, i: _window((config.num_hidden_layers - 1 - i) % 4),
    "olmo3": lambda config, i: _window((i + 1) % 4),
    "phi3": lambda config, i: _window(config.sliding_window),
    "qwen2": _after_dense,
    "qwen2_vl_text": _after_dense,
    "qwen2_5_vl_text": _after_dense,
    "qwen3": _after_dense,
    "qwen2_moe": lambda config, i: _window(
        config.use_sliding_window and (i + 1) % 2 and i < config.max_window_layers
    ),
    "qwen3_moe": lambda config, i: _window(config.use_sliding_window and config.sliding_window),
    "qwen3_5_moe_text": _linear("full_attention"),
    "qwen3_5_text": _linear("full_attention"),
    "qwen3_next": _linear("full_attention"),
    "qwen4_exp_text": _linear("indexed_attention"),
    "smollm3": lambda config, i: _window(
        config.use_sliding_window
        and config.sliding_window
        and (i + 1) % _every(config, "no_rope_layer_interval") == 0
    ),
    "spark2_5": lambda config, i: _window((i + 1) % 4),
    "starcoder2": lambda config, i: _window(config.sliding_window),
    "step3p5": lambda config, i: "full_attention",
}


#: Names in config.json by GGUF's; the first name with a value counts.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "model_max_length max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_ROPE_KEYS = {
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_SCALINGS = ("linear", "yarn", "longrope")
#: Settings that an unscaled rotation ignores.
_UNSCALED = (
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "low_freq_factor", "high_freq_factor", "truncate",
)  # fmt: skip
#: Keys whose values are floats, also where config.json has 10000 for 10000.0: llama.cpp takes no others.
_FLOATS = re.compile(
    r"rope\.(freq_base\w*|scale_linear|scaling\.(factor|alpha|attn_factor|yarn_\w+))|xielu\.\w+"
    r"|.*(scale|epsilon|softcapping|magnitude|lower_bound)|(.*\.)?(swiglu_clamp|clamp)_\w+|attention\.max_alibi_bias"
    r"|attention\.compress_rope_freq_base"
)


def general_keys(config: Config) -> dict[str, Any]:
    """Return the GGUF keys that llama.cpp's converter writes for every model; None if a setting is missing."""
    keys: dict[str, Any] = {}
    for key, names in _KEYS.items():
        values = [value for name in names.split() if (value := config.get(name)) is not None]
        keys[key] = values[0] if values else None
    if not keys["expert_count"]:
        keys |= dict.fromkeys(key for key in keys if key.startswith("expert_") and key != "expert_count")
    keys |= _window_keys(config)
    if config.get("is_causal") is False:
        keys["attention.causal"] = False
    return keys | _rope_keys(config)


def _rope_keys(config: Config) -> dict[str, Any]:
    """Return the keys of the rotation; of layers with a window, GGUF files have the base alone."""
    rope = config.rope_parameters
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    if local is not None and local.peek("rope_type") == "default":
        local.skip("rope_type", *_UNSCALED)
    kind, part = rope.peek("rope_type"), rope.get("partial_rotary_factor")
    # Files of Laguna and Spark-X2.5 have a key for windowed layers. Step 3.5's architecture implies the fraction of
    # other layers.
    if local is not None and config.text_type not in ("laguna", "spark2_5", "step3p5", "step3p7"):
        other, rotated = local.get("partial_rotary_factor", 1.0), 1.0 if kind == "proportional" else part or 1.0
        if other != rotated:
            raise ModelError(
                f"config.json rotates {other} of a head in layers with a window and {rotated} in others, "
                "which localllm does not convert"
            )
    keys = {"rope.freq_base": rope.get("rope_theta"), "rope.freq_base_swa": local and local.get("rope_theta")}
    if part not in (None, 1.0) and kind != "proportional":
        keys["rope.dimension_count"] = int(head_dim(config) * part)
    # For text, all axes are the position.
    rope.skip("mrope_section", "mrope_interleaved", "interleaved", "xdrope_section", "finetuned")
    if kind == "default" or (kind == "dynamic" and not rope.peek("alpha")):  # which extends the context alone
        rope.skip("rope_type", *_UNSCALED)
    if kind not in _SCALINGS:
        return keys
    rope.skip("rope_type", *([] if rope.peek("truncate") is False else ["truncate"]))
    keys |= {"rope.scaling.type": kind} | {ours: rope.get(theirs) for ours, theirs in _ROPE_KEYS.items()}
    if kind == "longrope":
        keys["rope.scaling.yarn_attn_factor"] = None
        keys["rope.scaling.attn_factor"] = _longrope_magnitude(config, rope)
    if kind != "linear" and keys["rope.scaling.factor"] is None:
        keys["rope.scaling.factor"] = config.max_position_embeddings / rope.original_max_position_embeddings
    first, last = rope.get("mscale"), rope.get("mscale_all_dim")
    if kind == "yarn" and first and last and keys["rope.scaling.yarn_attn_factor"] is None:
        factor = keys["rope.scaling.factor"]
        keys["rope.scaling.yarn_attn_factor"] = yarn_mscale(factor, first) / yarn_mscale(factor, last)
    return keys


def _longrope_magnitude(config: Config, rope: CheckpointSettings) -> float:
    if (magnitude := rope.get("attention_factor")) is not None:
        return float(magnitude)
    original = rope.original_max_position_embeddings
    factor = rope.get("factor") or config.max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _window_keys(config: Config) -> dict[str, Any]:
    """Return the keys of windows, if there are layers with windows that are shorter than the context."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        return {}
    config.skip(*_OF_LAYER_TYPES)
    window, pattern = config.get("sliding_window"), window_pattern(config)
    if window == 0 and config.get("use_sliding_window", True):
        raise ModelError("config.json has sliding_window = 0, a window without tokens: set it to null")
    if not window or not any(pattern) or window >= config.max_position_embeddings:
        return {}
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": None if all(pattern) else pattern}


def with_floats(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same keys, with whole numbers as floats where GGUF files have floats."""

    def as_float(value: Any) -> Any:
        if isinstance(value, list):
            return [as_float(each) for each in value]
        return float(value) if type(value) is int else value

    return {key: as_float(value) if _FLOATS.fullmatch(key) else value for key, value in keys.items()}
