"""Safetensors files: the header is checked against the file, and tensors are read on access.

Layout (https://github.com/huggingface/safetensors): u64 length of the header, that many bytes of JSON
``{name: {"dtype", "shape", "data_offsets": [first, last]}}``, and the data, where the offsets start at 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert.settings import read_json
from localllm.errors import ModelError, path_text, quoted
from localllm.nesting import parse_json
from localllm.regular_file import open_regular

#: numpy's types. Types without a numpy type are read as their bits.
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "u1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's library
_AGAIN = "download it again"


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file. ``dtype`` is a key of `DTYPES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    def read(self) -> NDArray[Any]:
        """Return the values, or their bits if numpy has no such type."""
        try:
            with open_regular(self.path) as file:
                values = np.fromfile(file, DTYPES[self.dtype], prod(self.shape), offset=self.offset)
        except OSError as error:
            raise ModelError(f"{path_text(self.path)} cannot be read ({error.strerror or error})") from error
        if values.size != prod(self.shape):
            raise ModelError(f"{path_text(self.path)} was shortened while it was read: {_AGAIN}")
        return values.reshape(self.shape)


def read_folder(folder: Path) -> dict[str, FileTensor]:
    """Return the tensors of all safetensors files of a checkpoint, by name."""
    index = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        names = sorted({name for name in index.values() if isinstance(name, str) and Path(name).name == name})
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise ModelError(
                f"{path_text(folder)} lacks {len(missing)} of the checkpoint's {len(names)} files, such as "
                f"{quoted(missing[0] if missing else 'all')}: download them"
            )
        paths = [folder / name for name in names]
    elif (folder / "model.safetensors").is_file():
        paths = [folder / "model.safetensors"]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(
            f"{path_text(folder)} has no .safetensors file: localllm converts checkpoints in that format"
        )
    tensors: dict[str, FileTensor] = {}
    for path in paths:
        tensors |= read_header(path)
    if isinstance(index, dict) and (lacking := index.keys() - tensors.keys()):
        raise ModelError(f"no file of {path_text(folder)} has the tensor {quoted(min(lacking))}: {_AGAIN}")
    return tensors


def read_header(path: Path) -> dict[str, FileTensor]:
    try:
        with open_regular(path) as file:
            n_file = os.fstat(file.fileno()).st_size
            n_header = int.from_bytes(file.read(8), "little")
            if not 2 <= n_header <= min(n_file - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {n_header} bytes in a file of {n_file}")
            header = parse_json(file.read(n_header))
        header.pop("__metadata__", None)
        return {name: _entry(path, name, entry, 8 + n_header, n_file) for name, entry in header.items()}
    except OSError as error:
        raise ModelError(f"{path_text(path)} cannot be read ({error.strerror or error})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path_text(path)} is not a whole safetensors file ({error!s:.100}): {_AGAIN}") from error


def _entry(path: Path, name: str, entry: dict[str, Any], data: int, n_file: int) -> FileTensor:
    """Return a tensor by its entry in the header. ``data``: start of the data in the file; ``n_file``: bytes of the
    file.
    """
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"tensor {quoted(name)} has the type {quoted(dtype)}")
    if not all(type(n) is int and n >= 0 for n in [first, last, *shape]):
        raise ValueError(f"tensor {quoted(name)} has the shape {quoted(shape)}")
    n_bytes = np.dtype(DTYPES[dtype]).itemsize * prod(shape)
    if last - first != n_bytes or data + last > n_file:
        raise ValueError(f"tensor {quoted(name)} takes {n_bytes} bytes, but the file has other ones for it")
    return FileTensor(name, dtype, tuple(shape), path, data + first)
