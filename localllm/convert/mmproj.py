"""The encoder of pictures of a Hugging Face folder as if it was an ``mmproj`` file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert.checkpoint import Array, CheckpointTensor, checkpoint_name, size_label
from localllm.convert.config import Config, read_json
from localllm.convert.safetensors import read_folder
from localllm.convert.sources import Source, find_sources
from localllm.errors import ModelError, OutputError, UnsupportedArchitectureError, UsageError, path_text, quoted
from localllm.gguf.writer import TensorSpec, read_back
from localllm.models.hf_convert import floats
from localllm.models.vision.encoder import Checkpoint
from localllm.models.vision.registry import PROJECTORS, Projector, read_encoder
from localllm.quant.types import GGMLType
from localllm.quantize.mixes import is_quantizable

#: GGUF's keys behind ``clip.vision.``, and the names that config.json has for them, of which the first counts.
_NAMES = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "embedding_length": "hidden_size embed_dim vt_hidden_size",
    "feed_forward_length": "intermediate_size vt_intermediate_size",
    "block_count": "num_hidden_layers depth vt_num_hidden_layers",
    "attention.head_count": "num_attention_heads num_heads vt_num_attention_heads",
}

#: What belongs to the text model, or to sound.
_OTHERS = re.compile(
    r"^(model\.)?(language_model|text_model|layers|norm|embed_tokens|audio_tower|embed_audio)\b|^(lm_head|mtp)\."
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class MmprojCheckpoint:
    """A folder with config.json, preprocessor_config.json and safetensors, of a model that sees."""

    architecture = "clip"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        values = read_json(folder / "config.json")
        kind = values.get("model_type")
        vision = values.get("vision_config")
        own = f"{kind}/{vision.get('model_type')}" if isinstance(vision, dict) else kind
        found = [each for name in (own, kind) for each in PROJECTORS.values() if name in each.hf_types.split()]
        if not found or not isinstance(vision, dict):
            known = ", ".join(sorted({kind for each in PROJECTORS.values() for kind in each.hf_types.split()}))
            raise UnsupportedArchitectureError(
                f"config.json has model_type = {quoted(kind)}, whose encoder of pictures localllm does not convert; "
                f"it converts those of {known}"
            )
        family, text = found[0], values.get("text_config")
        text = values | text if isinstance(text, dict) else values
        checkpoint = Checkpoint(values, vision, _processor(folder), text)
        files = read_folder(folder)
        self.paths = sorted({tensor.path for tensor in files.values()})  # of the safetensors files
        try:
            self.tensors = _tensors(find_sources(files, Config(values)), family, checkpoint)
            metadata = _keys(folder, family, checkpoint) | {"general.size_label": size_label(self.tensors)}
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
            raise ModelError(
                f"config.json and the tensors of {path_text(folder)} do not make an encoder of {family.models} "
                f"({type(error).__name__}: {error!s:.150}): is the folder complete?"
            ) from error
        try:
            specs = [TensorSpec(tensor.name, tensor.shape, tensor.type) for tensor in self.tensors.values()]
            # metadata, tensors: of the GGUF file that it makes
            self.metadata = read_back(folder, metadata, specs)
            read_encoder(self)
        except UnsupportedArchitectureError:
            raise
        except (ModelError, UsageError, OutputError) as error:
            raise ModelError(f"the encoder of {path_text(folder)} cannot be converted: {error}") from error

    @property
    def parts(self) -> Sequence[Sequence[str]]:
        return (tuple(self.tensors),)

    def check_unchanged(self) -> None:
        """Reading says so itself where a file was shortened."""


def _processor(folder: Path) -> Mapping[str, Any]:
    """The picture processor's values in preprocessor_config.json or processor_config.json."""
    values = read_json(folder / "preprocessor_config.json")
    whole = read_json(folder / "processor_config.json")
    return values | (values.get("media_proc_cfg") or {}) | whole | (whole.get("image_processor") or {})


def _keys(folder: Path, family: Projector, c: Checkpoint) -> dict[str, Any]:
    keys: dict[str, Any] = {"has_vision_encoder": True, "vision.projection_dim": c.text["hidden_size"]}
    for key, names in _NAMES.items():
        keys[f"vision.{key}"] = next((c.vision[name] for name in names.split() if name in c.vision), None)
    for key in ("image_mean", "image_std"):
        keys[f"vision.{key}"] = [float(x) for x in c.processor[key]]
    keys |= family.keys(c)
    own = {f"clip.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": "clip", "general.type": "mmproj", "general.name": checkpoint_name(folder)} | own


def _tensors(sources: Mapping[str, Source], family: Projector, c: Checkpoint) -> dict[str, CheckpointTensor]:
    """All tensors of the file, by name."""
    names = {theirs: ours for ours, each in family.names.items() for theirs in each.split()}
    found: dict[str, CheckpointTensor] = {}
    for name, source in sources.items():
        if _OTHERS.search(name) or name.endswith((".inv_freq", "position_ids")):
            continue
        for ours, array in _changed(name, _placeholder(source), family, names, c).items():

            def read(ours: str = ours, name: str = name, source: Source = source) -> Iterator[Array]:
                yield _changed(name, source.values(), family, names, c)[ours]

            keeps = is_quantizable(ours, array.shape) or ".patch_embd." in ours or ".patch_merger." in ours
            is_half = array.dtype.itemsize == 2
            type = source.type if keeps and is_half else GGMLType.F32
            found[ours] = CheckpointTensor(ours, array.shape, type, read)
    return found


def _placeholder(source: Source) -> Array:
    dtype = {GGMLType.BF16: np.uint16, GGMLType.F32: np.float32}.get(source.type, np.float16)
    return np.broadcast_to(np.zeros(1, dtype) if source.shape else np.zeros((), dtype), source.shape)


def _changed(name: str, array: Array, family: Projector, names: Mapping[str, str], c: Checkpoint) -> dict[str, Array]:
    """The file's tensors made from one of the checkpoint, by GGUF's names."""
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
