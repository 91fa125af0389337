"""Importance matrices: for each tensor, how much the activations that meet its columns amount to.

A file has the sums of squared activations and how many were added, of each expert's weights in mixtures.  Two formats
are read: GGUF (tensors ``NAME.in_sum2`` and ``NAME.counts``), and the older one of llama.cpp::

    i32 n_entries, n_entries × { i32 length, name, i32 n_calls, i32 n_values, f32 values (means times n_calls) }
    i32 n_chunks, i32 length, name of the text                                                      (optional)
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localllm.errors import GGUFError, ModelError, path_text, quoted
from localllm.gguf import GGUFFile, StringArray, TensorInfo
from localllm.quant.bits import Floats
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType


@dataclass(frozen=True)
class ImportanceMatrix:
    """The importance of columns.

    Attributes:
        path: of its file.
        columns: by tensor, float32 [n_columns], or of all experts in turn [n_experts * n_columns].
        dataset: the text it was made with, if the file says.
        n_chunks: how many pieces of that; 0 where the file does not say.
    """

    path: Path
    columns: Mapping[str, Floats]
    dataset: str | None = None
    n_chunks: int = 0

    @classmethod
    def read(cls, path: Path) -> ImportanceMatrix:
        """Read a file of either format.

        Raises:
            GGUFError: the file is missing or damaged, or holds no importance matrix.
        """
        try:
            with path.open("rb") as file:
                magic = file.read(4)
                found = _read_gguf(path) if magic == b"GGUF" else _read_old(path, magic + file.read())
        except OSError as error:
            raise GGUFError(f"{path_text(path)} cannot be read ({error.strerror}): check the path") from None
        for name, values in found.columns.items():
            if not np.isfinite(values).all() or (values < 0).any():
                raise _damaged(path, f"the values of {quoted(name)} are not all finite and at least 0")
        return found

    def of(self, name: str, shape: tuple[int, ...]) -> Floats | None:
        """The importance of a tensor's columns: [n_columns], or [shape[0], n_columns]; None where there is none.

        Raises:
            ModelError: it has another number of columns, so the matrix is of another model.
        """
        values = self.columns.get(name)
        if values is None:
            return None
        if values.size == shape[-1]:
            return values
        if len(shape) == 3 and values.size == shape[0] * shape[-1]:
            return values.reshape(shape[0], shape[-1])
        if name == "token_embd.weight":  # as the output it has columns of importance, as an embedding none
            return None
        raise ModelError(
            f"{path_text(self.path)} is of another model: {quoted(name)} has {values.size} columns there and "
            f"{shape[-1]} here; make one with this model"
        )

    def check_is_of(self, names: Collection[str]) -> None:
        """Raise ModelError if it has none of these tensors."""
        if not any(name in self.columns for name in names):
            example = quoted(next(iter(self.columns), ""))
            raise ModelError(
                f"{path_text(self.path)} is of another model: it is for tensors such as {example}, and this model "
                "has none of them; make one with this model"
            )


def _damaged(path: Path, defect: str) -> GGUFError:
    return GGUFError(f"{path_text(path)} is not an importance matrix that can be read: {defect}; make it again")


def _read_gguf(path: Path) -> ImportanceMatrix:
    columns: dict[str, Floats] = {}
    with GGUFFile.open(path) as file:
        tensors = file.tensors
        for name, tensor in tensors.items():
            if not name.endswith(".in_sum2"):
                continue
            name = name.removesuffix(".in_sum2")
            if f"{name}.counts" not in tensors:
                raise _damaged(path, f"{quoted(name)} has sums but no counts")
            sums, counts = _floats(path, tensor).ravel(), _floats(path, tensors[f"{name}.counts"]).ravel()
            if sums.size % counts.size:
                raise _damaged(path, f"the sums and counts of {quoted(name)} do not fit together")
            each = sums.reshape(counts.size, -1)
            used = counts[:, None] > 0
            columns[name] = np.where(used, each / np.where(used, counts[:, None], 1), 1).astype(np.float32).ravel()
        if not columns:
            raise _damaged(path, "it has no tensors named *.in_sum2")
        datasets, n_chunks = file.metadata.get("imatrix.datasets"), file.metadata.get("imatrix.chunk_count")
        dataset = datasets[0] if isinstance(datasets, StringArray) and len(datasets) else None
        return ImportanceMatrix(path, columns, dataset, n_chunks if isinstance(n_chunks, int) else 0)


def _floats(path: Path, tensor: TensorInfo) -> Floats:
    if tensor.type is not GGMLType.F32:
        raise _damaged(path, f"{quoted(tensor.name)} is {tensor.type.name}, not F32")
    return dequantize(tensor.data, tensor.type)


def _read_old(path: Path, data: bytes) -> ImportanceMatrix:
    at = 0

    def take(n: int) -> bytes:
        nonlocal at
        if n < 0 or n > len(data) - at:
            raise _damaged(path, "it ends early, or is another kind of file")
        at += n
        return data[at - n : at]

    def number() -> int:
        value: int = struct.unpack("<i", take(4))[0]
        return value

    columns: dict[str, Floats] = {}
    for _ in range(number()):
        name = take(number()).decode("utf-8", "replace")
        n_calls, n_values = number(), number()
        values = np.frombuffer(take(4 * n_values), "<f4")
        columns[name] = (values / max(n_calls, 1)).astype(np.float32)
    if not columns:
        raise _damaged(path, "it is empty, or is another kind of file")
    if at == len(data):
        return ImportanceMatrix(path, columns)
    n_chunks = number()
    dataset = take(number()).decode("utf-8", "replace") if at < len(data) else None
    return ImportanceMatrix(path, columns, dataset, n_chunks)
