"""Write the table of class defaults, localllm/convert/defaults.json, from the installed transformers.

    python -m tests.benchmarks.class_defaults

A setting that a class of transformers has, and that localllm does not list as irrelevant, is in the table with the
value of the class; `names` of one setting come from ``attribute_map``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from localllm.convert.config import is_irrelevant, shares_name
from localllm.convert.defaults import PATH
from localllm.models.encoders.registry import PROJECTORS
from localllm.models.registry import ARCHITECTURES, DRAFTERS

_SECTIONS = ("text_config", "vision_config", "audio_config")


def classes() -> dict[str, Any]:
    """Return the configuration classes of all types that localllm converts, by ``model_type``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    types = [each.hf_types for each in (*ARCHITECTURES.values(), *DRAFTERS.values(), *PROJECTORS.values())]
    names = sorted({name.partition("/")[0] for text in types for name in text.split()} | {"qwen2_5_vl_text"})
    found: dict[str, Any] = {}
    for name in names:
        if name in CONFIG_MAPPING:
            kind = CONFIG_MAPPING[name]
            found[name] = kind
            for section in _SECTIONS:
                inner = getattr(kind(), section, None)
                if inner is not None and dataclasses.is_dataclass(inner):
                    found[inner.model_type] = type(inner)
    return found


def class_defaults(kind: Any) -> dict[str, Any]:
    """Return the settings of a class with their defaults."""
    missing = dataclasses.MISSING
    fields = {field.name for field in dataclasses.fields(kind)}
    is_left_out = is_irrelevant if "vocab_size" in fields else _is_left_out
    values = {
        field.name: field.default_factory() if field.default_factory is not missing else field.default
        for field in dataclasses.fields(kind)
        if not is_left_out(field.name) and field.name not in (*_SECTIONS, "rope_scaling", "rope_parameters")
    }
    values = {name: _plain(value) for name, value in values.items() if value is not missing}
    return values | _rope_defaults(kind)


def _is_left_out(name: str) -> bool:
    from transformers import PreTrainedConfig

    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return name in base or re.search("dropout|initializer|_token|tie_word|init_value", name) is not None


def _rope_defaults(kind: Any) -> dict[str, Any]:
    rope = getattr(kind(), "rope_parameters", None)
    if not rope:
        return {}
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    if local and full["rope_type"] == local["rope_type"] == "default":
        thetas = {"rope_theta": full["rope_theta"]}
        if full["rope_theta"] != local["rope_theta"] or set(full) != {"rope_type", "rope_theta"}:
            if set(full) == {"rope_type", "rope_theta"}:
                return thetas | {"rope_local_base_freq": local["rope_theta"]}
            return {"rope_parameters": rope}
        return thetas
    if (
        local
        or full is not rope
        or set(rope) - {"rope_theta", "rope_type", "partial_rotary_factor"}
        or (rope["rope_type"] not in ("default", "axial"))
    ):
        theta = getattr(kind, "default_theta", None)
        return {"rope_theta": theta} | {
            "rope_parameters": {k: v for k, v in rope.items() if k not in ("type", "max_position_embeddings")}
        }
    return {key: value for key, value in rope.items() if key != "rope_type"}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return {key: x for key, x in value.to_dict().items() if not is_irrelevant(key) and x is not None}
    return list(value) if isinstance(value, tuple | range) else value


def table() -> dict[str, dict[str, Any]]:
    """Return the table as `localllm.convert.defaults` has it."""
    return {name: class_defaults(kind) for name, kind in classes().items()}


def names() -> dict[str, tuple[tuple[str, str], ...]]:
    """Return the groups of names of one setting, by type."""
    found = {}
    for name, kind in classes().items():
        pairs = dict(getattr(kind, "attribute_map", None) or {}).items()
        own = tuple(sorted(pair for pair in pairs if not (is_irrelevant(pair[0]) or shares_name(*pair))))
        if own:
            found[name] = own
    return found


def text_types() -> dict[str, str]:
    """Return the type of the text model of types that also see or hear."""
    found = {}
    for name, kind in classes().items():
        inner = getattr(kind(), "text_config", None)
        if inner is not None and dataclasses.is_dataclass(inner):
            found[name] = inner.model_type
    return found


def encoder_types() -> dict[str, str]:
    """Return the types of encoders by the type of the model and the section."""
    found = {}
    for name, kind in classes().items():
        for section in ("vision_config", "audio_config"):
            inner = getattr(kind(), section, None)
            if inner is not None and dataclasses.is_dataclass(inner):
                found[f"{name}/{section}"] = inner.model_type
    return found


def tables() -> dict[str, Any]:
    """Return everything that the file has."""
    return {
        "defaults": table(), "names": names(), "text_types": text_types(), "encoder_types": encoder_types()
    }  # fmt: skip


def main() -> None:
    lines = [
        f'"{name}": {{\n' + ",\n".join(f'"{kind}": {json.dumps(each[kind])}' for kind in sorted(each)) + "\n}"
        for name, each in tables().items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
