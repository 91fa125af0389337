"""Reading low-rank adapters, GGUF files and PEFT's folders, and writing models that have them in their weights."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert.checkpoint import gguf_name
from localllm.convert.config import read_json
from localllm.convert.safetensors import read_header
from localllm.errors import ModelError, ModelNotFoundError, path_text, quoted
from localllm.files import check_new
from localllm.gguf import GGUFFile
from localllm.gguf.writer import GGUFWriter, TensorSpec
from localllm.models.adapters import Adapter, check
from localllm.models.config import Metadata
from localllm.models.hf_convert import floats
from localllm.models.registry import find_architecture
from localllm.quant.encode import quantize
from localllm.quant.formats import dequantize

Array = NDArray[np.float32]


def read_adapter(name: str, path: Path, file: GGUFFile) -> Adapter:
    """An adapter for the model in a file.

    Raises:
        ModelNotFoundError: there is none at that path.
        GGUFError, ModelError: it is damaged, of a kind that is not supported, or for another model.
    """
    path = Path(path).expanduser()
    if not os.path.exists(path):  # Path.exists raises where a name is too long
        raise ModelNotFoundError(f"there is no adapter {path_text(path)}: give a GGUF file, or a folder of PEFT's")
    pairs, scale = _read_peft(path, file) if path.is_dir() else _read_gguf(path, file)
    lacking = [part for part, (a, b) in pairs.items() if a is None or b is None]
    if lacking or not pairs:
        what = f"only one of the two matrices of {quoted(lacking[0])}" if lacking else "no low-rank matrices"
        raise ModelError(f"{path_text(path)} has {what}: it is not an adapter, or damaged")
    parts = {part: (a, b * np.float32(scale(part, len(a)))) for part, (a, b) in pairs.items()}
    adapter = Adapter(name, parts)
    check(adapter, {tensor: info.shape for tensor, info in file.tensors.items()})
    return adapter


_Read = tuple[dict[str, tuple[Any, Any]], Callable[[str, int], float]]


def _read_gguf(path: Path, file: GGUFFile) -> _Read:
    """As llama.cpp's convert_lora_to_gguf.py writes it."""
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
        found: dict[str, list[Any]] = {}
        for name, tensor in adapter.tensors.items():
            match = re.fullmatch(r"(.+)\.lora_([ab])", name)
            if match is None:
                raise ModelError(f"{path_text(path)} changes {quoted(name)} as a whole, which is not supported")
            values = dequantize(tensor.data, tensor.type).reshape(tensor.shape)
            found.setdefault(match[1], [None, None])["ab".index(match[2])] = values
    return {name: (a, b) for name, (a, b) in found.items()}, lambda _, rank: float(alpha) / rank if alpha else 1.0


def _read_peft(folder: Path, file: GGUFFile) -> _Read:
    config = read_json(folder / "adapter_config.json")
    if not config:
        raise ModelError(f"{path_text(folder)} has no adapter_config.json: is the adapter complete?")
    kind = str(config.get("peft_type", "LORA")).upper()
    unsupported = [
        key for key in ("use_dora", "fan_in_fan_out", "modules_to_save", "target_parameters") if config.get(key)
    ]
    if kind != "LORA" or unsupported:
        what = f"of the kind {quoted(kind)}" if kind != "LORA" else f"one with {', '.join(unsupported)}"
        raise ModelError(f"the adapter {path_text(folder)} is {what}, which localllm does not support: plain LoRA is")
    conversion = find_architecture(file.metadata).conversion
    found: dict[str, list[Any]] = {}
    for name, stored in read_header(folder / "adapter_model.safetensors").items():
        match = re.fullmatch(
            r"(?:base_model\.model\.)?(.+)\.lora_(A|B|embedding_A|embedding_B)(?:\.default)?(?:\.weight)?", name
        )
        theirs = f"{match[1]}.weight" if match else name
        target = gguf_name(conversion, theirs)
        is_matrix = len(stored.shape) == 2 and stored.dtype in ("F32", "F16", "BF16")
        if match is None or target is None or "embedding" in match[2] or not is_matrix:
            raise ModelError(
                f"the adapter {path_text(folder)} changes {quoted(name)}, which localllm does not support"
            )
        values = floats(stored.read())
        if match[2] == "B" and target.endswith(("attn_q.weight", "attn_k.weight")):
            with suppress(ValueError):  # of another model, which is said where shapes are compared
                values = np.ascontiguousarray(conversion.tensor(theirs, values, _heads(file)))
        found.setdefault(target, [None, None])["AB".index(match[2])] = values
    alphas = config.get("alpha_pattern") or {}
    if alphas or config.get("rank_pattern"):
        raise ModelError(
            f"the adapter {path_text(folder)} has an alpha_pattern or rank_pattern, which is not supported"
        )
    alpha, root = float(config.get("lora_alpha", 8)), bool(config.get("use_rslora"))
    return {name: (a, b) for name, (a, b) in found.items()}, lambda _, rank: alpha / (rank**0.5 if root else rank)


def _heads(file: GGUFFile) -> SimpleNamespace:
    """What changing the rows of query and key takes of a configuration."""
    meta = Metadata(file.metadata, file.architecture)
    n_heads = meta.read("attention.head_count", int, low=1, high=1 << 14)
    n_kv_heads = meta.read("attention.head_count_kv", int, n_heads, low=1, high=n_heads)
    return SimpleNamespace(model_type="", num_attention_heads=n_heads, num_key_value_heads=n_kv_heads)


def merge(
    file: GGUFFile,
    adapters: Sequence[tuple[Adapter, float]],
    target: Path,
    *,
    overwrite: bool = False,
) -> Iterable[str]:
    """Writes a model with adapters added to its weights, each so much of it, in the types that the file has.

    Yields the name of each tensor when it is written.

    Raises:
        UsageError: the output is the input.
        OutputError: the file is there already, or cannot be written.
    """
    check_new(target, file.paths, overwrite=overwrite)
    source = file.metadata
    kept = {key: source.encoded(key) for key in source if not key.startswith("split.")}
    specs = [TensorSpec(tensor.name, tensor.shape, tensor.type) for tensor in file.tensors.values()]
    with GGUFWriter(target, kept, specs, source.alignment) as writer:
        for name, tensor in file.tensors.items():
            parts = [
                (*adapter.parts[name], np.float32(share)) for adapter, share in adapters if name in adapter.parts
            ]
            data = tensor.data
            if parts:
                values = dequantize(data, tensor.type).reshape(tensor.shape)
                for a, b, share in parts:
                    values = values + share * (b @ a)
                data = quantize(values, tensor.type)
            writer.write(data)
            tensor.drop_pages()
            yield name
        file.check_unchanged()
