"""The image and audio encoders of a Hugging Face folder, with the interface of an ``mmproj`` file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from localllm.convert.checkpoint import (
    Array,
    CheckpointTensor,
    ConvertedFolder,
    checkpoint_name,
    empty_row,
    placeholder,
    size_label,
    texts,
)
from localllm.convert.config import COMMON_NAMES, TEXT_SECTIONS, Config, of_thinker
from localllm.convert.defaults import DEFAULTS, ENCODER_TYPES, NAMES, PROCESSOR_DEFAULTS, PROCESSOR_TYPES
from localllm.convert.irrelevant import is_irrelevant_to_encoder, is_irrelevant_to_processor, is_media
from localllm.convert.safetensors import read_folder
from localllm.convert.settings import CheckpointSettings, read_json
from localllm.convert.sources import Source, find_sources
from localllm.errors import ModelError, UnsupportedArchitectureError, path_text, quoted
from localllm.models.encoders.encoder import EncoderCheckpoint
from localllm.models.encoders.registry import PROJECTORS, Projector, read_encoder
from localllm.models.hf_convert import floats
from localllm.models.tensor_names import encoder_name, layer_names
from localllm.quant.types import GGMLType
from localllm.quantize.mixes import is_quantizable

#: GGUF's keys after ``clip.vision.`` or ``clip.audio.``, and their names in config.json. The first name with a value
#: is used.
_NAMES = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "embedding_length": "hidden_size embed_dim d_model",
    "feed_forward_length": "intermediate_size encoder_ffn_dim",
    "block_count": "num_hidden_layers depth encoder_layers",
    "attention.head_count": "num_attention_heads num_heads encoder_attention_heads",
    "num_mel_bins": "num_mel_bins",
}

#: Tensors of the text model, and audio tensors in models for images.
_OTHERS = re.compile(
    r"^(thinker\.)?(model\.)?(language_model|text_model|layers|norm|embed_tokens|hc_head)\b"
    r"|^(thinker\.)?(lm_head|mtp|llm|text_decoder|apm|tts|audio_projection_layer|talker|token2wav|code2wav)\."
)
#: Ends of the names of tensors that are computed, or counted in training.
_COMPUTED = (".inv_freq", "position_ids", ".num_batches_tracked")
#: Kinds of encoders, and their sections of config.json.
SECTIONS = {"vision_config": "image"} | dict.fromkeys(
    ("audio_config", "encoder_config", "speech_config", "sound_config"), "audio"
)
#: Sections of preprocessor_config.json of Kimi and of Dots 3 Note.
_PROCESSOR_SECTIONS = ("media_proc_cfg", "vision_config")
#: Sections of processor_config.json for audio.
_AUDIO_SECTIONS = ("feature_extractor", "audio_processor")
#: Tensors of numbered experts, which are stacked to one tensor in GGUF files.
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
_SOUNDS = re.compile(r"^(thinker\.)?(model\.)?(audio_tower|embed_audio|audio_encoder|sound_\w+)\.")


class MmprojCheckpoint(ConvertedFolder):
    """A folder with config.json, preprocessor_config.json and safetensors, of a model for images or audio."""

    architecture = "clip"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        values = of_thinker(read_json(folder / "config.json"))
        found = _families(folder, values)
        files = read_folder(folder)
        self.paths = sorted({tensor.path for tensor in files.values()})
        try:
            sources = find_sources(files, Config(values))
            read = partial(_values, sources)
            found = {media: (family, replace(c, read=read)) for media, (family, c) in found.items()}
            self.tensors = _tensors(sources, found) | _rows(folder, sources, found)
            metadata = _keys(folder, found) | {"general.size_label": size_label(self.tensors)}
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
            raise ModelError(
                f"config.json and the tensors of {path_text(folder)} do not make an encoder of "
                f"{next(iter(found.values()))[0].models} "
                f"({type(error).__name__}: {error!s:.150}): is the folder complete?"
            ) from error
        _check_lost(found)
        name = f"the encoder of {path_text(folder)}"
        self.read_back(metadata, name, lambda: [read_encoder(self, media) for media in found])


def _families(folder: Path, values: Mapping[str, Any]) -> dict[str, tuple[Projector, EncoderCheckpoint]]:
    """Return the families of the encoders in config.json, and their configuration, by kind of media.

    Raises UnsupportedArchitectureError if localllm converts none of them.
    """
    kind = str(values.get("model_type"))
    config = CheckpointSettings(values, defaults=DEFAULTS.get(kind), names=NAMES.get(kind, ()))
    config.skip(*SECTIONS, *TEXT_SECTIONS)
    found: dict[str, tuple[Projector, EncoderCheckpoint]] = {}
    for section, media in SECTIONS.items():
        if not isinstance(inner := values.get(section), dict):
            continue
        inner_type = inner.get("model_type")
        names = *sorted(texts(values.get("architectures"))), f"{kind}/{inner_type}", kind
        families = [
            family
            for name in names
            for family in PROJECTORS.values()
            if family.kind == media and name in family.hf_types.split()
        ]
        if families:
            if inner_type == kind or inner_type not in DEFAULTS:  # also of classes that come with the checkpoint
                inner_type = ENCODER_TYPES.get(f"{kind}/{section}", kind)
            encoder, processor = _encoder(inner, section, inner_type), _processor(folder, kind, media)
            found[media] = families[0], EncoderCheckpoint(config, encoder, processor, Config(values))
    if not found:
        known = ", ".join(sorted({kind for family in PROJECTORS.values() for kind in family.hf_types.split()}))
        raise UnsupportedArchitectureError(
            f"config.json has model_type = {quoted(values.get('model_type'))}, whose encoder of images or audio "
            f"localllm does not convert; it converts those of {known}"
        )
    return found


def _encoder(values: Mapping[str, Any], section: str, kind: str) -> CheckpointSettings:
    """Return the settings in an encoder's section, with the settings of the rotation next to the others."""
    names = ("rope_scaling", "rope_parameters")
    rope = [rope for name in names if isinstance(rope := values.get(name), dict)]
    flat = {name: value for name, value in values.items() if name not in names}
    for each in rope:
        flat |= {"rope_type" if name == "type" else name: value for name, value in each.items()}
    groups = (*COMMON_NAMES, *NAMES.get(kind, ()))
    return CheckpointSettings(flat, place=f"{section}.", defaults=DEFAULTS.get(kind), names=groups)


def _processor(folder: Path, kind: str, media: str) -> CheckpointSettings:
    """Return the settings of the processor of images or audio.

    As in transformers, a section of processor_config.json replaces preprocessor_config.json.
    """
    file = "processor_config.json"
    sections = ("image_processor",) if media == "image" else _AUDIO_SECTIONS
    processors = read_json(folder / file)
    section = next((name for name in sections if isinstance(processors.get(name), dict)), sections[0])
    values = processors.get(section)
    if not isinstance(values, dict):
        file = "preprocessor_config.json"
        values = read_json(folder / file)
        section = next((name for name in _PROCESSOR_SECTIONS if isinstance(values.get(name), dict)), "")
        values = values[section] if section else values
        if media == "audio" and "feature_extractor_type" not in values:  # a processor of images
            values = {}
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if name in values and values[name] is None:  # which some processors read as true, and others as false
            raise ModelError(f"{file} has {name} = null: set it to true or false")
    if section in _PROCESSOR_SECTIONS or media == "audio":
        defaults = None
    else:
        name = str(values.get("image_processor_type", PROCESSOR_TYPES.get(kind)))
        defaults = PROCESSOR_DEFAULTS.get(re.sub("(Fast|Pil)$", "", name))
    return CheckpointSettings(values, file=file, place=f"{section}." if section else "", defaults=defaults)


def _check_lost(families: Mapping[str, tuple[Projector, EncoderCheckpoint]]) -> None:
    """Raise ModelError for a setting of encoders, processors or the fused model that the file would lose."""
    meant: dict[str, tuple[Any, ...]] = {}
    for family, c in families.values():
        c.vision.check_all_read(family.conversion.meant, is_irrelevant_to_encoder)
        c.processor.check_all_read(family.conversion.meant, is_irrelevant_to_processor)
        meant |= family.conversion.meant
    text = c.text

    def is_fusion(name: str) -> bool:
        """Return whether a setting of config.json outside of sections concerns the converted encoders."""
        if text.knows(name) or ("audio" not in families and name.startswith("audio_")):
            return False
        return text.has_section or name in c.values.defaults or bool(is_media(name))

    meant = {name: values for name, values in meant.items() if is_fusion(name)}
    c.values.check_all_read(meant, lambda name: not is_fusion(name) or is_irrelevant_to_encoder(name))


def _keys(folder: Path, found: Mapping[str, tuple[Projector, EncoderCheckpoint]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for media, (family, c) in found.items():
        section = "vision" if media == "image" else "audio"
        keys |= {f"has_{section}_encoder": True, f"{section}.projection_dim": c.text.hidden_size}
        for key, names in _NAMES.items():
            values = (c.vision.get(name) for name in names.split())
            keys[f"{section}.{key}"] = next((value for value in values if value is not None), None)
        if media == "image":
            for key, other in (("image_mean", "norm_mean"), ("image_std", "norm_std")):
                keys[f"vision.{key}"] = [float(x) for x in c.processor[other if other in c.processor else key]]
        own = dict(family.conversion.keys(c))
        if len(found) > 1 and (projector := own.pop("projector_type", None)):
            own[f"{section}.projector_type"] = projector
        keys |= own
    given = {f"clip.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": "clip", "general.type": "mmproj", "general.name": checkpoint_name(folder)} | given


def _tensors(
    sources: Mapping[str, Source], families: Mapping[str, tuple[Projector, EncoderCheckpoint]]
) -> dict[str, CheckpointTensor]:
    names = {media: {**layer_names(media), **family.conversion.names} for media, (family, _) in families.items()}
    found: dict[str, CheckpointTensor] = {}
    experts: dict[str, dict[int, Source]] = {}
    for name, source in sources.items():
        media = "audio" if _SOUNDS.search(name) or "image" not in families else "image"
        if _OTHERS.search(name) or media not in families or name.endswith(_COMPUTED):
            continue
        if number := _EXPERT.search(name):
            experts.setdefault(_EXPERT.sub("", name), {})[int(number[1])] = source
            continue
        of = *families[media], names[media]
        for ours, array in _changed(name, placeholder(source.shape, empty_row(source.type)), *of).items():

            def read(ours: str = ours, name: str = name, source: Source = source, of: Any = of) -> Iterator[Array]:
                yield _changed(name, source.values(), *of)[ours]

            keeps = is_quantizable(ours, array.shape) or ".patch_embd." in ours or ".patch_merger." in ours
            is_half = array.dtype.itemsize == 2
            type = source.type if keeps and is_half else GGMLType.F32
            found[ours] = CheckpointTensor(ours, array.shape, type, read)
    for name, numbered in experts.items():
        parts = [numbered[i] for i in range(len(numbered))]
        if len({(part.shape, part.type) for part in parts}) > 1:
            raise ModelError(f"the experts of {quoted(name)} have different shapes: is the folder complete?")
        (ours,) = _changed(
            name, placeholder(parts[0].shape, empty_row(parts[0].type)), *families["image"], names["image"]
        )

        def read_all(parts: Sequence[Source] = parts) -> Iterator[Array]:
            return (part.values()[None] for part in parts)

        found[ours] = CheckpointTensor(ours, (len(parts), *parts[0].shape), parts[0].type, read_all)
    return found


def _values(sources: Mapping[str, Source], name: str) -> Array:
    return floats(sources[name].values())


def _rows(
    folder: Path, sources: Mapping[str, Source], families: Mapping[str, tuple[Projector, EncoderCheckpoint]]
) -> dict[str, CheckpointTensor]:
    """Return the token embeddings that llama.cpp expects in the file, if the folder contains token embeddings."""
    wanted = [family.row for family, _ in families.values() if family.row is not None]
    added = (read_json(folder / "tokenizer.json").get("added_tokens") or ()) if wanted else ()
    ids = {token["content"]: int(token["id"]) for token in added}
    table = next((each for name, each in sources.items() if name.endswith("embed_tokens.weight")), None)
    found: dict[str, CheckpointTensor] = {}
    for token, name in wanted:
        if table is not None and token in ids:

            def read(table: Source = table, row: int = ids[token]) -> Iterator[Array]:
                yield floats(table.values()[row])

            found[name] = CheckpointTensor(name, table.shape[1:], GGMLType.F32, read)
    return found


def _changed(
    name: str, array: Array, family: Projector, c: EncoderCheckpoint, names: Mapping[str, str]
) -> dict[str, Array]:
    """Return the file's tensors for a tensor of the checkpoint, by GGUF's names."""
    array = floats(array) if array.ndim < 2 else array
    changed = family.conversion.tensor(name, array, c)
    if isinstance(changed, Mapping):
        return dict(changed)
    if (ours := encoder_name(names, name)) is not None:
        return {ours: changed}
    raise ModelError(
        f"the checkpoint has the tensor {quoted(name)}, which localllm convert --mmproj does not know for its family"
    )
