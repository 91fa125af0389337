"""Read low-rank adapters from GGUF files and PEFT folders, and write models with adapters merged into the weights."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert.safetensors import read_header
from localllm.convert.settings import read_json
from localllm.errors import ModelError, ModelNotFoundError, path_text, quoted
from localllm.files import check_is_new, expanded
from localllm.gguf import GGUFFile
from localllm.gguf.writer import GGUFWriter, TensorSpec
from localllm.models.adapters import Adapter, check
from localllm.models.config import ModelMetadata
from localllm.models.hf_convert import floats
from localllm.models.registry import find_architecture
from localllm.models.tensor_names import gguf_name, tensor_names
from localllm.quant.encode import quantize
from localllm.quant.formats import dequantize
from localllm.quantize.mixes import layer_order

Array = NDArray[np.float32]


def read_adapter(name: str, path: Path, file: GGUFFile) -> Adapter:
    """Return an adapter for the model in a file.

    Raises:
        ModelNotFoundError: the adapter does not exist.
        ModelError: the adapter is damaged, unsupported, or for another model.
    """
    path = expanded(path)
    if not os.path.exists(path):  # Path.exists raises if a name is too long
        raise ModelNotFoundError(f"there is no adapter {path_text(path)}: give a GGUF file, or a folder of PEFT's")
    pairs, scale = _read_peft(path, file) if path.is_dir() else _read_gguf(path, file)
    lacking = [key for key, ab in pairs.items() if not all(np.ndim(matrix) == 2 and matrix.size for matrix in ab)]
    if lacking or not pairs:
        fault = f"not two matrices for {quoted(lacking[0])}" if lacking else "no low-rank matrices"
        raise ModelError(f"{path_text(path)} has {fault}: it is not an adapter, or damaged")
    for key, both in pairs.items():
        if not all(np.isfinite(matrix).all() for matrix in both):
            raise ModelError(
                f"{path_text(path)} has values for {quoted(key)} that are NaN or infinite: the adapter is damaged; "
                "get it again"
            )
    matrices = {key: (a, b * np.float32(scale(len(a)))) for key, (a, b) in pairs.items()}
    adapter = Adapter(name, matrices)
    check(adapter, {tensor: info.shape for tensor, info in file.tensors.items()})
    return adapter


#: A and B by the name of the tensor that they change, None for a missing matrix; and the scale for a rank.
_Read = tuple[dict[str, list[Any]], Callable[[int], float]]


def _read_gguf(path: Path, file: GGUFFile) -> _Read:
    """Read an adapter in the format of llama.cpp's convert_lora_to_gguf.py."""
    with GGUFFile.open(path) as adapter:
        metadata = adapter.metadata
        if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
            raise ModelError(
                f"{path_text(path)} is not an adapter (general.type is {quoted(metadata.get('general.type'))})"
            )
        if adapter.architecture != file.architecture:
            raise ModelError(
                f"{path_text(path)} is an adapter for {adapter.architecture} models, but this one is "
                f"{file.architecture}"
            )
        alpha = metadata.get("adapter.lora.alpha")
        if not isinstance(alpha, int | float | np.number) or not np.isfinite(alpha):
            raise ModelError(f"{path_text(path)} has no adapter.lora.alpha: convert the adapter again")
        pairs: dict[str, list[Any]] = {}
        for name, tensor in adapter.tensors.items():
            match = re.fullmatch(r"(.+)\.lora_([ab])", name)
            if match is None:
                raise ModelError(f"{path_text(path)} changes {quoted(name)} as a whole, which is not supported")
            values = dequantize(tensor.data, tensor.type).reshape(tensor.shape)
            pairs.setdefault(match[1], [None, None])["ab".index(match[2])] = values
    return pairs, lambda rank: float(alpha) / rank if alpha else 1.0


def _read_peft(folder: Path, file: GGUFFile) -> _Read:
    config = read_json(folder / "adapter_config.json")
    if not config:
        raise ModelError(f"{path_text(folder)} has no adapter_config.json: is the adapter complete?")
    peft_type = str(config.get("peft_type", "LORA")).upper()
    unsupported = [
        key for key in ("use_dora", "fan_in_fan_out", "modules_to_save", "target_parameters") if config.get(key)
    ]
    if peft_type != "LORA" or unsupported:
        description = (
            f"of the kind {quoted(peft_type)}" if peft_type != "LORA" else f"one with {', '.join(unsupported)}"
        )
        raise ModelError(
            f"the adapter {path_text(folder)} is {description}, which localllm does not support: plain LoRA is"
        )
    conversion = find_architecture(file.metadata).conversion
    names = tensor_names(file.architecture, conversion.names)
    pairs: dict[str, list[Any]] = {}
    for name, stored in read_header(folder / "adapter_model.safetensors").items():
        match = re.fullmatch(
            r"(?:base_model\.model\.)?(.+)\.lora_(A|B|embedding_A|embedding_B)(?:\.default)?(?:\.weight)?", name
        )
        theirs = f"{match[1]}.weight" if match else name
        target = gguf_name(names, theirs)
        is_matrix = len(stored.shape) == 2 and stored.dtype in ("F32", "F16", "BF16")
        if match is None or target is None or "embedding" in match[2] or not is_matrix:
            raise ModelError(f"the adapter {path_text(folder)} changes {quoted(name)}, which is not supported")
        values = floats(stored.read())
        if match[2] == "B":  # its rows are the weight's rows, whose order may differ in GGUF files
            try:
                changed = conversion.tensor(theirs, values, _Heads(file, target))
            except AttributeError:  # the conversion needs more settings than heads
                changed = {}
            except (ValueError, IndexError):  # an adapter of another model: `check` reports different shapes
                changed = values
            if not isinstance(changed, np.ndarray) or changed.shape != values.shape:
                raise ModelError(
                    f"the adapter {path_text(folder)} changes {quoted(name)}, which GGUF files have in "
                    "another form: merge it into its model with PEFT, and convert that"
                )
            values = np.ascontiguousarray(changed)
        pairs.setdefault(target, [None, None])["AB".index(match[2])] = values
    alphas = config.get("alpha_pattern") or {}
    if alphas or config.get("rank_pattern"):
        raise ModelError(f"the adapter {path_text(folder)} has an unsupported alpha_pattern or rank_pattern")
    alpha, root = config.get("lora_alpha", 8), bool(config.get("use_rslora"))
    if not isinstance(alpha, int | float) or not abs(alpha) < 1e30:  # also False for NaN
        raise ModelError(f"the adapter {path_text(folder)} has lora_alpha = {quoted(alpha)}: download it again")
    return pairs, lambda rank: alpha / (rank**0.5 if root else rank)


class _Heads:
    """Numbers of heads of a layer: the only settings that are known when a conversion reorders rows."""

    model_type = ""

    def __init__(self, file: GGUFFile, target: str) -> None:
        self._meta = ModelMetadata(file.metadata, file.architecture)
        self._layer = layer_order(target)[0]

    @property
    def num_attention_heads(self) -> int:
        return self._read("attention.head_count")

    @property
    def num_key_value_heads(self) -> int:
        return self._read("attention.head_count_kv", self.num_attention_heads)

    def _read(self, key: str, *default: int) -> int:
        n_layers = self._meta.read("block_count", int, low=1, high=1 << 14)
        return self._meta.read_each(key, n_layers, int, *default, low=0, high=1 << 14)[self._layer]


def merge(file: GGUFFile, adapters: Sequence[tuple[Adapter, float]], target: Path) -> Iterable[str]:
    """Write a model with adapters, each multiplied by a factor, added to its weights. Tensors keep their types.

    Yields the name of each tensor after writing it.
    """
    check_is_new(target, file.paths)
    source = file.metadata
    metadata = {key: source.encoded(key) for key in source if not key.startswith("split.")}
    specs = [TensorSpec(tensor.name, tensor.shape, tensor.type) for tensor in file.tensors.values()]
    with GGUFWriter(target, metadata, specs) as writer:
        for name, tensor in file.tensors.items():
            updates = [
                (*adapter.parts[name], np.float32(share)) for adapter, share in adapters if name in adapter.parts
            ]
            data = tensor.data
            if updates:
                values = dequantize(data, tensor.type).reshape(tensor.shape)
                for a, b, share in updates:
                    values = values + share * (b @ a)
                data = quantize(values, tensor.type, search=True)
            writer.write(data)
            tensor.drop_pages()
            yield name
        file.check_unchanged()
