"""Hugging Face folders: a tokenizer, and safetensors files written byte by byte."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.tokenizer.encoders import sentencepiece_model
from localllm.tokenizer.vocabulary import Vocabulary
from tests.helpers import tiny_models


def parsed(text: str) -> dict[str, Any]:
    """Parse settings such as ``width=64 type=yarn``: Python literals, and strings without quotes."""
    values: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
    return values


_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "int8": "I8", "uint8": "U8"}


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any] | tuple[str, NDArray[Any]]]) -> Path:
    """Write a safetensors file of arrays, or of (type, bits) pairs; uint16 means bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, given in tensors.items():
        dtype, array = given if isinstance(given, tuple) else (_DTYPES[given.dtype.name], given)
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_tokenizer(folder: Path, n_vocab: int) -> None:
    """Write `tiny_models.spm_vocabulary` as a SentencePiece tokenizer."""
    keys = tiny_models.spm_vocabulary(n_vocab)
    for name in ("scores", "token_type"):
        keys[f"tokenizer.ggml.{name}"] = np.array(keys[f"tokenizer.ggml.{name}"])
    vocabulary = Vocabulary.from_gguf(SimpleNamespace(path="tiny", metadata=keys))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(vocabulary))


def write_checkpoint(
    folder: Path,
    model_type: str = "llama",
    *,
    tensors: Mapping[str, Any] | None = None,
    without: str | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny random model of `tiny_models`.

    Args:
        tensors: extra tensors, or replacements for existing ones.
        without: name of a tensor to omit.
        changes: changes to config.json.
    """
    settings = tiny_models.config(model_type, **{"bos_token_id": 1, "eos_token_id": 2} | changes)
    weights = dict(tiny_models.random_weights(settings)) | dict(tensors or {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    write_safetensors(folder / "model.safetensors", {k: v for k, v in weights.items() if k != without})
    write_tokenizer(folder, settings["vocab_size"])
    return folder


def bytes_field(message: bytes, wanted: int) -> bytes:
    """Return the first field with number ``wanted`` and a value of bytes, from a protocol buffer's message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while True:
        number, kind = divmod(varint(), 8)
        n = varint() if kind in (0, 2) else 4  # float32, the only other wire type in a model
        n = n if kind else 0
        if (number, kind) == (wanted, 2):
            return message[at : at + n]
        at += n
