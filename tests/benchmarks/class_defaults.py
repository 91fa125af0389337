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

from localllm.convert.config import COMMON_NAMES
from localllm.convert.defaults import PATH
from localllm.convert.irrelevant import is_irrelevant
from localllm.convert.mmproj import SECTIONS
from localllm.models.encoders.registry import PROJECTORS
from localllm.models.registry import ARCHITECTURES, DRAFTERS

_SECTIONS = ("text_config", *SECTIONS)


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
            found |= {inner.model_type: inner for inner in sections(kind).values()}
    return found


def sections(kind: Any) -> dict[str, Any]:
    """Return the classes of the sections of a fused model's class, also of optional sections.

    The sections of a model that also speaks are in its thinker's section.
    """
    kind = kind.sub_configs.get("thinker_config", kind)
    is_part = "vision" in kind.model_type  # whose encoder_config is not an encoder of audio
    names = [name for name in _SECTIONS if not (is_part and name == "encoder_config")]
    config = kind()
    inner = {name: type(getattr(config, name, None)) for name in names}
    inner |= {name: spec for name, spec in kind.sub_configs.items() if not dataclasses.is_dataclass(inner.get(name))}
    return {name: inner[name] for name in names if dataclasses.is_dataclass(inner.get(name))}


def class_defaults(kind: Any) -> dict[str, Any]:
    missing = dataclasses.MISSING
    is_left_out = is_irrelevant if is_text(kind) else _is_left_out
    values = {
        field.name: field.default_factory() if field.default_factory is not missing else field.default
        for field in dataclasses.fields(kind)
        if not is_left_out(field.name) and field.name not in (*_SECTIONS, "rope_scaling", "rope_parameters")
    }
    values = {name: _plain(value) for name, value in values.items() if value is not missing}
    return values | _rope_defaults(kind)


def is_text(kind: Any) -> bool:
    """Return whether a class is that of a text model, not of an encoder or a fused model."""
    has_vocabulary = "vocab_size" in {field.name for field in dataclasses.fields(kind)}
    return has_vocabulary and not sections(kind) and re.search("vision|audio|encoder", kind.model_type) is None


def _is_left_out(name: str) -> bool:
    from transformers import PreTrainedConfig

    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return name in base or re.search("dropout|initializer|_token_(id|index)|tie_word|init_value", name) is not None


def _rope_defaults(kind: Any) -> dict[str, Any]:
    rope = getattr(kind(), "rope_parameters", None)
    if not rope:
        return {}
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    if local and (indexed := rope.get("indexed_attention")):  # the rotated part follows from sizes
        return {"rope_theta": indexed["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
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
        own = tuple(
            sorted(
                (one, other)
                for one, other in pairs
                if not is_irrelevant(one) and not any(one in names and other in names for names in COMMON_NAMES)
            )
        )
        if own:
            found[name] = own
    return found


def text_types() -> dict[str, str]:
    """Return the type of the text model of types that also see or hear."""
    found = {name: sections(kind).get("text_config") for name, kind in classes().items()}
    return {name: inner.model_type for name, inner in found.items() if inner is not None}


def encoder_types() -> dict[str, str]:
    """Return the types of encoders by the type of the model and the section."""
    return {
        f"{name}/{section}": inner.model_type
        for name, kind in classes().items()
        for section, inner in sections(kind).items()
        if section != "text_config"
    }


def processor_types() -> dict[str, str]:
    """Return the classes of image processors by the type of the model, without "Pil"."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    types = sorted({name.partition("/")[0] for each in PROJECTORS.values() for name in each.hf_types.split()})
    found = {name: IMAGE_PROCESSOR_MAPPING_NAMES.get(name) for name in types}
    return {name: kinds["torchvision"] for name, kinds in found.items() if kinds}


def processors() -> dict[str, dict[str, Any]]:
    """Return the settings of image processors with their defaults, by class."""
    from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

    from tests.models.encoders.families import by_pillow

    found = {}
    for model, name in [*processor_types().items(), ("", "CLIPImageProcessor"), ("", "SiglipImageProcessor")]:
        kind = get_image_processor_class_from_name(f"{name}Pil")
        kind = by_pillow(f"{model}.image_processing_{model}", name) if kind is None else kind
        values = {key: getattr(kind, key, None) for key in sorted(kind.valid_kwargs.__annotations__)}
        found[name] = {key: _plain(value) for key, value in values.items() if value is not None}
    return found


def tables() -> dict[str, Any]:
    """Return everything that the file has."""
    return {
        "defaults": table(), "names": names(), "text_types": text_types(), "encoder_types": encoder_types(),
        "processors": processors(), "processor_types": processor_types(),
    }  # fmt: skip


def main() -> None:
    lines = [
        f'"{name}": {{\n' + ",\n".join(f'"{kind}": {json.dumps(each[kind])}' for kind in sorted(each)) + "\n}"
        for name, each in tables().items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
