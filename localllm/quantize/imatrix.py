"""Importance matrices: for each tensor, the magnitude of the activations that its columns multiply.

A file contains sums of squared activations and numbers of activations, for each expert in mixtures of experts. There
are two formats: GGUF (tensors ``NAME.in_sum2`` and ``NAME.counts``), and the older one of llama.cpp::

    i32 n_entries, n_entries × { i32 length, name, i32 n_calls, i32 n_values, f32 values (means times n_calls) }
    i32 n_chunks, i32 length, name of the text                                                      (optional)

GGUF files written by localllm may also contain **Hessians** (``NAME.hessian``): XᵀX [n, n] of a matrix's input rows
X, for `localllm.quant.encode.Feedback`. Weights with the same input share a Hessian: ``imatrix.hessians`` lists
``NAME=NAME of the stored one``. Other programs ignore Hessians.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import GGUFError, ModelError, path_text, quoted
from localllm.files import NewFile
from localllm.gguf import GGUFFile, StringArray, TensorInfo
from localllm.gguf.writer import GGUFWriter, TensorSpec, encode_value
from localllm.quant.bits import Floats
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType
from localllm.regular_file import open_regular

#: Default tokens per piece, for files without the number.
_CHUNK = 512


@dataclass(frozen=True)
class ImatrixEntry:
    """Sums over the input rows of one tensor's matrices."""

    sums: NDArray[np.floating]  # sums of squares of each column, [n_matrices, n_columns]
    counts: NDArray[np.number]  # number of rows, [n_matrices]
    # float32 [n_columns, n_columns]: XᵀX of the rows of a single matrix; None if it was not collected
    hessian: Floats | None = None

    def __add__(self, other: ImatrixEntry) -> ImatrixEntry:
        hessian = None
        if self.hessian is not None and other.hessian is not None:
            hessian = self.hessian + other.hessian
        return ImatrixEntry(self.sums + other.sums, self.counts + other.counts, hessian)

    @property
    def means(self) -> Floats:
        """float32 [n_matrices * n_columns]; 1 for matrices without rows."""
        counts = self.counts[:, None].astype(np.float64)
        return np.where(counts > 0, self.sums / np.maximum(counts, 1), 1).astype(np.float32).ravel()


@dataclass(frozen=True)
class ImportanceMatrix:
    path: Path | None  # the file; None if it was not written
    entries: Mapping[str, ImatrixEntry]  # by tensor
    datasets: tuple[str, ...] = ()  # names of the texts, if the file contains them
    n_chunks: int = 0  # number of pieces; 0 if unknown
    chunk_size: int = _CHUNK  # tokens per piece

    @classmethod
    def read(cls, path: Path) -> ImportanceMatrix:
        """Read a file of either format."""
        try:
            with open_regular(path) as file:
                magic = file.read(4)
                matrix = _read_gguf(path) if magic == b"GGUF" else _read_old(path, magic + file.read())
        except OSError as error:
            raise GGUFError(f"{path_text(path)} cannot be read ({error.strerror}): check the path") from None
        for name, entry in matrix.entries.items():
            if not np.isfinite(entry.means).all() or (entry.means < 0).any():
                raise _damaged(path, f"the values of {quoted(name)} are not all finite and at least 0")
        return matrix

    def write(self, path: Path) -> None:
        """Write a file: GGUF, or the older format if its name ends in ``.dat``."""
        if path.suffix == ".dat":
            data = self._in_old_format()
            with NewFile(path, len(data)) as file:
                file.put(data)
            return
        tensors: dict[str, NDArray[Any]] = {}
        holders: dict[int, str] = {}
        shared = []
        for name, entry in sorted(self.entries.items()):
            tensors[f"{name}.in_sum2"] = entry.sums
            tensors[f"{name}.counts"] = entry.counts[:, None]
            if entry.hessian is not None:
                holder = holders.setdefault(id(entry.hessian), name)
                tensors.setdefault(f"{holder}.hessian", entry.hessian)
                shared.append(f"{name}={holder}")
        metadata = {
            "general.type": encode_value("imatrix"),
            "imatrix.datasets": encode_value(self.datasets),
            "imatrix.chunk_count": encode_value(self.n_chunks),
            "imatrix.chunk_size": encode_value(self.chunk_size),
        }
        if shared:
            metadata["imatrix.hessians"] = encode_value(shared)
        specs = [TensorSpec(name, values.shape, GGMLType.F32) for name, values in tensors.items()]
        with GGUFWriter(path, metadata, specs) as writer:
            for values in tensors.values():
                writer.write(np.ascontiguousarray(values, np.float32).view(np.uint8))

    def _in_old_format(self) -> bytes:
        data = [struct.pack("<i", len(self.entries))]
        for name, entry in sorted(self.entries.items()):
            n_calls = -(-int(entry.counts.max()) // self.chunk_size)
            means = np.where(entry.counts.repeat(entry.sums.shape[1]) > 0, entry.means, 0)
            head = struct.pack("<i", len(name.encode())) + name.encode() + struct.pack("<ii", n_calls, means.size)
            data += [head, (means * n_calls).astype("<f4").tobytes()]
        dataset = self.datasets[-1].encode() if self.datasets else b""
        return b"".join([*data, struct.pack("<ii", self.n_chunks, len(dataset)), dataset])

    def __add__(self, other: ImportanceMatrix) -> ImportanceMatrix:
        """Return the sum of both matrices, as if they had been collected together."""
        entries = dict(self.entries)
        hessians: dict[int, Floats | None] = {}  # sums by id of the first Hessian, so that weights still share them
        for name, entry in other.entries.items():
            mine = entries.get(name)
            if mine is not None and mine.sums.shape != entry.sums.shape:
                raise ModelError(f"the importance matrices are of different models: {quoted(name)} differs in size")
            if mine is not None:
                entry = mine + replace(entry, hessian=None) if id(mine.hessian) in hessians else mine + entry
                entry = replace(entry, hessian=hessians.setdefault(id(mine.hessian), entry.hessian))
            entries[name] = entry
        datasets = tuple(dict.fromkeys(self.datasets + other.datasets))
        return ImportanceMatrix(None, entries, datasets, self.n_chunks + other.n_chunks, other.chunk_size)

    def of(self, name: str, shape: tuple[int, ...]) -> Floats | None:
        """Return the importance of columns, [n_columns] or [shape[0], n_columns]; None if it was not collected."""
        if name not in self.entries:
            return None
        values = self.entries[name].means
        if values.size == shape[-1]:
            return values
        if len(shape) == 3 and values.size == shape[0] * shape[-1]:
            return values.reshape(shape[0], shape[-1])
        if name == "token_embd.weight":  # has importance as the output matrix, but not as the embedding
            return None
        raise ModelError(
            f"{self._name} is of another model: {quoted(name)} has {values.size} columns there and "
            f"{shape[-1]} here; make one with this model"
        )

    @property
    def _name(self) -> str:
        return "the importance matrix" if self.path is None else path_text(self.path)

    def check_is_of(self, names: Collection[str]) -> None:
        """Raise ModelError if the matrix contains none of these tensors."""
        if not any(name in self.entries for name in names):
            example = quoted(next(iter(self.entries), ""))
            raise ModelError(
                f"{self._name} is of another model: it is for tensors such as {example}, and this model "
                "has none of them; make one with this model"
            )


def _damaged(path: Path, defect: str) -> GGUFError:
    return GGUFError(f"{path_text(path)} is not an importance matrix that can be read: {defect}; make it again")


def _read_gguf(path: Path) -> ImportanceMatrix:
    entries: dict[str, ImatrixEntry] = {}
    hessians: dict[str, Floats] = {}
    with GGUFFile.open(path) as file:
        tensors, shared = file.tensors, file.metadata.get("imatrix.hessians")
        holders = (
            dict(pair.split("=", 1) for pair in shared if "=" in pair) if isinstance(shared, StringArray) else {}
        )
        for name, tensor in tensors.items():
            if not name.endswith(".in_sum2"):
                continue
            name = name.removesuffix(".in_sum2")
            if f"{name}.counts" not in tensors:
                raise _damaged(path, f"{quoted(name)} has sums but no counts")
            sums, counts = _floats(path, tensor).ravel(), _floats(path, tensors[f"{name}.counts"]).ravel()
            if sums.size % counts.size:
                raise _damaged(path, f"the sums and counts of {quoted(name)} do not fit together")
            hessian = None
            if holder := holders.get(name):
                hessian = hessians.setdefault(holder, _hessian(path, tensors, holder, sums.size))
            entries[name] = ImatrixEntry(sums.reshape(counts.size, -1).astype(np.float64), counts, hessian)
        if not entries:
            raise _damaged(path, "it has no tensors named *.in_sum2")
        datasets = file.metadata.get("imatrix.datasets")
        n_chunks, size = (_number(file.metadata.get(f"imatrix.chunk_{key}")) for key in ("count", "size"))
        names = tuple(datasets) if isinstance(datasets, StringArray) else ()
        return ImportanceMatrix(path, entries, names, n_chunks, size or _CHUNK)


def _hessian(path: Path, tensors: Mapping[str, TensorInfo], name: str, n: int) -> Floats:
    """Return the Hessian of a tensor, a view of the file."""
    tensor = tensors.get(f"{name}.hessian")
    if tensor is None or tensor.shape != (n, n) or tensor.type is not GGMLType.F32:
        raise _damaged(path, f"{quoted(name)} should have a Hessian of {n} columns")
    return tensor.data.view("<f4")


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


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

    entries: dict[str, ImatrixEntry] = {}
    for _ in range(number()):
        name = take(number()).decode("utf-8", "replace")
        n_calls, n_values = number(), number()
        values = np.frombuffer(take(4 * n_values), "<f4")
        # The number of rows is not stored; n_calls chunks with these means give the same result.
        entries[name] = ImatrixEntry(values.astype(np.float64)[None] * _CHUNK, np.array([max(n_calls, 1) * _CHUNK]))
    if not entries:
        raise _damaged(path, "it is empty, or is another kind of file")
    if at == len(data):
        return ImportanceMatrix(path, entries)
    n_chunks = number()
    dataset = take(number()).decode("utf-8", "replace") if at < len(data) else ""
    return ImportanceMatrix(path, entries, (dataset,) if dataset else (), n_chunks)
