"""GGUF's names of a checkpoint's tensors: from the tables of the ``gguf`` package, and from ``HF_NAMES`` of
architectures for tensors that these tables lack or name differently."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Tables with the names of architectures that have no table, or an incomplete one.
_SIMILAR = {
    "axk2": "glm-dsa",
    "bailingmoe": "bailingmoe2",
    "bailingmoe3": "kimi-linear bailingmoe2",
    "cohere2moe": "dots1 cohere2",
    "deepseek32": "glm-dsa",
    "dflash": "qwen3",
    "dots3note": "glm-dsa",
    "embedding-gemma2": "gemma4",
    "gemma4-assistant": "gemma4",
    "glm5-next": "kimi-linear glm-dsa",
    "granite_swa": "granitehybrid",
    "hy_v3": "hunyuan-moe dots1",
    "hy_v4": "glm-dsa",
    "kolibri1": "qwen2moe glm4moe",
    "laguna": "qwen2moe step35",
    "lara_mini": "qwen35moe",
    "lfm3": "lfm2moe",
    "maple": "qwen3moe",
    "mellum": "qwen3moe",
    "minimax-m3": "kimi-linear minimax-m2",
    "muse-glimmer": "gemma3 afmoe",
    "qwen4exp": "qwen35moe",
}
#: Names that the tables lack, in several architectures.
_COMMON = {
    "classifier": "cls.output",
    "linear": "dense_2",  # in ColBERT
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "pooler.dense": "cls",
}
#: Names of a norm's tensors, by their names in BERT's first checkpoints.
_NORMS = {"gamma": "weight", "beta": "bias"}
#: BERT's names of a classifier's layers, by RoBERTa's names.
_CLASSIFIER = {"dense": "pooler.dense.", "out_proj": "classifier."}
#: Suffixes of the limits of a matrix's input and output (Gemma 4).
_CLAMPS = (".input_min", ".input_max", ".output_min", ".output_max")
#: Start of the names of tensors in layers.
LAYER = r"(?:model\.)?(?:\w+\.)?(?:layers?|h|blocks?|transformer_encoder)\.(\d+)\."


def tensor_names(architecture: str, exceptions: Mapping[str, str]) -> dict[str, str]:
    """Return GGUF's names by Hugging Face's names: from the architecture's table or, if missing there, from Llama's.

    Both omit ``.weight`` and ``.bias``. Hugging Face's names of tensors in layers start with ``*.`` instead of
    ``model.layers.{i}.``, and GGUF's omit ``blk.{i}.``.

    Args:
        exceptions: names that replace the names in the tables. Hugging Face's names omit ``*.``.
    """
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import TensorNameMap

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    tables = ("llama", *_SIMILAR.get(architecture, architecture).split())
    names: dict[str, str] = {}
    for number in (numbers[table] for table in tables if table in numbers):
        # Some architectures change the class's table of layers, which must stay unchanged for others.
        copied = {"block_mappings_cfg": dict(TensorNameMap.block_mappings_cfg)}
        for theirs, (_, ours) in type("Names", (TensorNameMap,), copied)(number, n_blocks=1).mapping.items():
            _, in_layer, name = ours.rpartition("blk.0.")
            names[f"*.{theirs.partition('.0.')[2]}" if in_layer else theirs] = name
    changes = {**_COMMON, **exceptions}
    return names | changes | {f"*.{theirs}": ours for theirs, ours in changes.items()}


def gguf_name(names: Mapping[str, str], name: str) -> str | None:
    """Return the name of a checkpoint's tensor in GGUF files; None if GGUF has no such tensor.

    Args:
        names: names of the architecture, from `tensor_names`.
        name: name in the checkpoint. Numbers of experts are written as ``*``.
    """
    prefix, name = split_layer(without_wrappers(name))
    if name.startswith("nextn."):
        return prefix + name
    name = name.replace(".*", "").replace("dt_bias", "dt_proj.bias").replace("correction_bias", "correction.bias")
    # Models with a head add a prefix, and the tables contain names of one class.
    forms = [name, f"model.{name}", f"transformer.{name}", re.sub(r"^(model|transformer)\.", "", name)]
    for form in [f"*.{name}"] if prefix else forms:
        for suffix in ("", ".weight", ".bias"):
            if ours := names.get(form.removesuffix(suffix)):
                return prefix + ours + (suffix or _suffix(name, ours))
    return None


def _suffix(theirs: str, ours: str) -> str:
    """Return the suffix in GGUF files of a tensor whose complete name in the checkpoint is in the tables."""
    if theirs.endswith((".weight", ".bias")) or ours.endswith((".bias", ".scale", "ssm_a", "ssm_d", "conv_base")):
        return ""
    return ".bias" if ours == "exp_probs_b" else ".weight"


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the prefixes of models with images or with a task."""
    name = re.sub(r"(^|\.)(thinker|language_model|text_model|text_decoder|bert|roberta|llm)\.", r"\1", name)
    name = re.sub(r"^midlayer\.", "layers.0.", name)  # in some EAGLE-3 drafters
    name = re.sub(r"^(model\.layers|rwkv\.blocks)\.0\.(pre_norm|pre_ln)\.", "pre_norm.", name)  # in RWKV
    name = re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda norm: _NORMS[norm[1]], name)
    return re.sub(r"^classifier\.(dense|out_proj)\.", lambda head: _CLASSIFIER[head[1]], name)


def split_layer(name: str) -> tuple[str, str]:
    """Return the prefix of GGUF's name of a layer's tensor, and the remaining name in the checkpoint."""
    match = re.fullmatch(LAYER + "(.*)", name)
    before = {"encoder.block": "enc.", "decoder.block": "dec."}.get(".".join(name.split(".")[:2]), "")
    return (f"{before}blk.{match[1]}.", match[2]) if match else ("", name)


# -- Encoders of images and audio ------------------------------------------------------------------------------------


def layer_names(media: str) -> dict[str, str]:
    """Return GGUF's names of tensors in the layers of encoders, by Hugging Face's names.

    Hugging Face's names start with ``*.`` instead of, for example, ``vision_tower.encoder.layers.{i}.``. In GGUF's
    names, ``*`` is the layer's number.

    Args:
        media: "image" or "audio".
    """
    from gguf.constants import MODEL_ARCH
    from gguf.tensor_mapping import TensorNameMap

    names: dict[str, str] = {}
    start = "a.blk.0." if media == "audio" else "v.blk.0."
    for theirs, (_, ours) in TensorNameMap(MODEL_ARCH.MMPROJ, n_blocks=1).mapping.items():
        if ours.startswith(start):
            names.setdefault(f"*.{theirs.partition('.0.')[2]}", ours.replace(".0.", ".*."))
    return names


def encoder_name(names: Mapping[str, str], name: str) -> str | None:
    """Return the name in GGUF files of a tensor of an encoder; None if GGUF has no such tensor.

    Args:
        names: GGUF's names by the ends of Hugging Face's names, and by the names in `layer_names`.
    """
    number = re.search(r"\.(\d+)\.", name)
    parts = name.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    if number:
        ends.append("*." + name[number.end() :].replace(".linear.", "."))
    for end in ends:
        for suffix in ("", ".weight", ".bias", *_CLAMPS):
            if end.endswith(suffix) and (ours := names.get(end.removesuffix(suffix))):
                return (ours + suffix).replace("*", number[1] if number else "")
    return None
