"""The image and audio encoders of a Hugging Face folder, with the interface of an ``mmproj`` file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert.checkpoint import Array, CheckpointTensor, checkpoint_name, size_label
from localllm.convert.config import Config
from localllm.convert.defaults import DEFAULTS, ENCODER_TYPES, NAMES
from localllm.convert.safetensors import read_folder
from localllm.convert.settings import Settings, read_json
from localllm.convert.sources import Source, find_sources
from localllm.errors import ModelError, OutputError, UnsupportedArchitectureError, UsageError, path_text, quoted
from localllm.gguf.writer import TensorSpec, read_back
from localllm.models.encoders.encoder import Checkpoint
from localllm.models.encoders.registry import PROJECTORS, Projector, read_encoder
from localllm.models.hf_convert import floats
from localllm.quant.types import GGMLType
from localllm.quantize.mixes import is_quantizable

#: GGUF's keys after ``clip.vision.`` or ``clip.audio.``, and their names in config.json. The first name with a value
#: is used.
_NAMES = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "embedding_length": "hidden_size embed_dim vt_hidden_size d_model",
    "feed_forward_length": "intermediate_size vt_intermediate_size encoder_ffn_dim",
    "block_count": "num_hidden_layers depth vt_num_hidden_layers encoder_layers",
    "attention.head_count": "num_attention_heads num_heads vt_num_attention_heads encoder_attention_heads",
    "num_mel_bins": "num_mel_bins",
}

#: Tensors of the text model, and audio tensors in models for images.
_OTHERS = re.compile(
    r"^(model\.)?(language_model|text_model|layers|norm|embed_tokens)\b"
    r"|^(lm_head|mtp|llm|apm|tts|audio_projection_layer)\."
)
_SOUNDS = re.compile(r"^(model\.)?(audio_tower|embed_audio)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class MmprojCheckpoint:
    """A folder with config.json, preprocessor_config.json and safetensors, of a model for images or audio."""

    architecture = "clip"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        values = read_json(folder / "config.json")
        kind, processor = values.get("model_type"), _processor(folder)
        config = Settings(values, defaults=DEFAULTS.get(str(kind)), names=NAMES.get(str(kind), ()))
        found: dict[str, tuple[Projector, Checkpoint]] = {}  # by kind of media
        for media, section in (("image", "vision_config"), ("audio", "audio_config")):
            own = values.get(section)
            if isinstance(own, dict):
                names = f"{kind}/{own.get('model_type')}", kind
                families = [
                    each
                    for name in names
                    for each in PROJECTORS.values()
                    if each.kind == media and name in each.hf_types.split()
                ]
                if families:
                    own_type = own.get("model_type")
                    if own_type in (None, kind):
                        own_type = ENCODER_TYPES.get(f"{kind}/{section}", kind)
                    options = {"defaults": DEFAULTS.get(str(own_type)), "names": NAMES.get(str(own_type), ())}
                    encoder = config.inner(section, **options)
                    found[media] = families[0], Checkpoint(config, encoder, processor, Config(values))
        if not found:
            known = ", ".join(sorted({kind for each in PROJECTORS.values() for kind in each.hf_types.split()}))
            raise UnsupportedArchitectureError(
                f"config.json has model_type = {quoted(kind)}, whose encoder of pictures or sounds localllm does not "
                f"convert; it converts those of {known}"
            )
        files = read_folder(folder)
        self.paths = sorted({tensor.path for tensor in files.values()})  # safetensors files
        try:
            sources = find_sources(files, Config(values))
            self.tensors = _tensors(sources, found) | _rows(folder, sources, found)
            metadata = _keys(folder, found) | {"general.size_label": size_label(self.tensors)}
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
            raise ModelError(
                f"config.json and the tensors of {path_text(folder)} do not make an encoder of "
                f"{next(iter(found.values()))[0].models} "
                f"({type(error).__name__}: {error!s:.150}): is the folder complete?"
            ) from error
        for media, (family, checkpoint) in found.items():
            if media == "image":
                _check_read(checkpoint, family.meant)
        try:
            specs = [TensorSpec(tensor.name, tensor.shape, tensor.type) for tensor in self.tensors.values()]
            # metadata and tensors of the converted GGUF file
            self.metadata = read_back(folder, metadata, specs)
            for media in found:
                read_encoder(self, media)
        except UnsupportedArchitectureError:
            raise
        except (ModelError, UsageError, OutputError) as error:
            raise ModelError(f"the encoder of {path_text(folder)} cannot be converted: {error}") from error

    @property
    def parts(self) -> Sequence[Sequence[str]]:
        return (tuple(self.tensors),)

    def check_unchanged(self) -> None:
        """Do nothing: reading a tensor raises ModelError if a file was truncated."""


def _processor(folder: Path) -> Settings:
    """Return the settings of the image processor in preprocessor_config.json or processor_config.json."""
    values = read_json(folder / "preprocessor_config.json")
    whole = read_json(folder / "processor_config.json")
    merged = values | (values.get("media_proc_cfg") or {}) | whole | (whole.get("image_processor") or {})
    return Settings(merged, file="preprocessor_config.json")


def _check_read(c: Checkpoint, meant: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ModelError for a setting of the encoder or of its processor that would be lost."""
    for place, settings in (("vision_config.", c.vision), ("", c.processor), ("", c.values)):
        for name, values in meant.items():
            is_of_text = settings is c.values and not name.startswith(("projector", "vision"))
            value = None if is_of_text or settings.is_read(name) else settings.get(name)
            if value is not None and values and value not in values:
                raise ModelError(
                    f"the checkpoint has {place}{name} = {quoted(value)}, but an mmproj file of this family means "
                    f"{' or '.join(str(other) for other in values)}"
                )
    for full, value in c.vision.unread():
        names = full.split(".")[1:]
        if not any(name in meant or "dropout" in name or "initializer" in name for name in names):
            raise ModelError(
                f"config.json has {full} = {quoted(value)}, which localllm convert --mmproj does not know for this "
                "family: remove it if it changes nothing, or report the model"
            )


def _keys(folder: Path, found: Mapping[str, tuple[Projector, Checkpoint]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for media, (family, c) in found.items():
        section = "vision" if media == "image" else "audio"
        keys |= {f"has_{section}_encoder": True, f"{section}.projection_dim": c.text.hidden_size}
        for key, names in _NAMES.items():
            values = (c.vision.get(name) for name in names.split())
            keys[f"{section}.{key}"] = next((value for value in values if value is not None), None)
        if media == "image":
            for key, other in (("image_mean", "norm_mean"), ("image_std", "norm_std")):
                keys[f"vision.{key}"] = [float(x) for x in c.processor[key if key in c.processor else other]]
        own = family.keys(c)
        if len(found) > 1 and (projector := own.pop("projector_type", None)):
            own[f"{section}.projector_type"] = projector
        keys |= own
    given = {f"clip.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": "clip", "general.type": "mmproj", "general.name": checkpoint_name(folder)} | given


def _tensors(
    sources: Mapping[str, Source], families: Mapping[str, tuple[Projector, Checkpoint]]
) -> dict[str, CheckpointTensor]:
    """Return all tensors of the file, by name."""
    names = {
        media: {theirs: ours for ours, each in family.names.items() for theirs in each.split()}
        for media, (family, _) in families.items()
    }
    found: dict[str, CheckpointTensor] = {}
    for name, source in sources.items():
        media = "audio" if _SOUNDS.search(name) or "image" not in families else "image"
        if _OTHERS.search(name) or media not in families or name.endswith((".inv_freq", "position_ids")):
            continue
        of = *families[media], names[media]
        for ours, array in _changed(name, _placeholder(source), *of).items():

            def read(ours: str = ours, name: str = name, source: Source = source, of: Any = of) -> Iterator[Array]:
                yield _changed(name, source.values(), *of)[ours]

            keeps = is_quantizable(ours, array.shape) or ".patch_embd." in ours or ".patch_merger." in ours
            is_half = array.dtype.itemsize == 2
            type = source.type if keeps and is_half else GGMLType.F32
            found[ours] = CheckpointTensor(ours, array.shape, type, read)
    return found


def _rows(
    folder: Path, sources: Mapping[str, Source], families: Mapping[str, tuple[Projector, Checkpoint]]
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


def _placeholder(source: Source) -> Array:
    dtype = {GGMLType.BF16: np.uint16, GGMLType.F32: np.float32}.get(source.type, np.float16)
    return np.broadcast_to(np.zeros(1, dtype) if source.shape else np.zeros((), dtype), source.shape)


def _changed(name: str, array: Array, family: Projector, c: Checkpoint, names: Mapping[str, str]) -> dict[str, Array]:
    """Return the file's tensors for a tensor of the checkpoint, by GGUF's names."""
    array = floats(array) if array.ndim < 2 else array
    changed = family.tensor(name, array, c)
    if isinstance(changed, Mapping):
        return dict(changed)
    number = _NUMBER.search(name)
    generic = name if number is None else name[: number.start()] + "*" + name[number.end() :]
    for wanted, layer in ((generic, number and number[0]), (name, None)):
        for theirs, ours in names.items():
            for suffix in ("", ".weight", ".bias"):
                if wanted.endswith(theirs + suffix) and wanted.removesuffix(theirs + suffix)[-1:] in ("", "."):
                    return {(ours + suffix).replace("*", str(layer)): changed}
    raise ModelError(
        f"the checkpoint has the tensor {quoted(name)}, which localllm convert --mmproj does not know for its family"
    )
