"""GGUF files: header, typed metadata and tensor table over a read-only memory map.

The reader trusts no value in the file. Every count and length is compared with the remaining bytes before anything is
allocated or looped over, every offset is compared with the size of the file, and all arithmetic uses Python's
unbounded integers. Invalid values raise `GGUFError`, which names the file, the byte, the key or tensor, and the
defect.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little-endian::

    "GGUF"  u32 version  u64 n_tensors  u64 n_keys
    n_keys    × { string key, u32 value type, value }
    n_tensors × { string name, u32 n_dims, n_dims × u64, u32 tensor type, u64 offset in the data section }
    padding to general.alignment (32 where absent)
    data section: the tensors, each padded to the alignment

    string: u64 length, that many bytes     array: u32 element type, u64 length, elements

Stricter than the specification: the tensors fill the data section without holes (llama.cpp requires this too), and
only padding follows the last tensor. Therefore a changed bit in a dimension or a count is detected.
"""

from __future__ import annotations

import difflib
import hashlib
import mmap
import os
import re
import stat
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from localllm.errors import ClosedError, GGUFError, ModelNotFoundError, path_text, quoted
from localllm.gguf import limits
from localllm.gguf.cursor import DAMAGED, Cursor, align
from localllm.gguf.metadata import Metadata, MetadataValue, read_metadata
from localllm.gguf.strings import StringArray
from localllm.gguf.tensors import Entry, TensorInfo, read_table, tensor_views
from localllm.kernels.mapped_file import MappedFile

__all__ = ["GGUFFile", "Metadata", "MetadataValue", "StringArray", "TensorInfo"]

# Minimum bytes of a key with its value, and of an entry of the tensor table.
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8


class GGUFFile:
    """An open GGUF model: metadata and tensors of one file, or of all files of a split model.

    The file stays mapped until it is closed and all arrays taken from it are deleted, so these arrays stay valid.
    If another program truncates the open file, the operating system ends a process that reads past the new end.
    To limit this risk, read the data, call `check_unchanged`, and close the file.

    Use `GGUFFile.open`, as a context manager or with `close`.
    """

    def __init__(self, files: Sequence[_SplitFile]) -> None:
        first = files[0]
        self.path: Path = first.path
        self.paths: tuple[Path, ...] = tuple(file.path for file in files)
        self.version: int = first.version
        #: The names of the tensors in each file.
        self.parts: tuple[tuple[str, ...], ...] = tuple(tuple(t.name for t in file.tensors) for file in files)
        self.size: int = sum(len(file.buffer) for file in files)
        self._stamps = [(file.path, file.stamp) for file in files]
        self._metadata: Metadata | None = first.metadata
        self._tensors: Mapping[str, TensorInfo] | None = MappingProxyType(_merge_tensors(files))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map a file and check its header, metadata and tensor table. Reads no weights.

        Any file of a split model (``NAME-00001-of-00003.gguf``) opens the whole model. All its files must be in one
        folder; the metadata comes from the first file.

        Raises:
            ModelNotFoundError: the file does not exist.
            GGUFError: the file is unreadable, not a GGUF file, or damaged. The message names the byte and the defect.
        """
        try:
            file = _read_file(Path(path))
            # Merged models keep this key with the value 0.
            is_split = "split.count" in file.metadata and _split_key(file, "split.count") not in (0, 1)
            return cls(_read_split(file) if is_split else [file])
        except GGUFError as error:
            # Variables of the frames keep the file mapped, and Windows cannot delete mapped files.
            traceback.clear_frames(error.__traceback__)
            raise

    @property
    def metadata(self) -> Metadata:
        """Keys and values; for a split model, from its first file."""
        if self._metadata is None:
            raise ClosedError(f"{path_text(self.path)} was closed: open it again to read its metadata")
        return self._metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by name, in the order of the file."""
        if self._tensors is None:
            raise ClosedError(f"{path_text(self.path)} was closed: open it again to read its tensors")
        return self._tensors

    @property
    def architecture(self) -> str:
        """``general.architecture``, the model family.

        Raises:
            GGUFError: the key is missing or is not a string.
        """
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise GGUFError(
                f"{path_text(self.path)}: key 'general.architecture' is missing or is not a string, so the "
                "model family is unknown; convert the model again"
            )
        return architecture

    def check_unchanged(self) -> None:
        """Check that the files did not change since they were opened. Call this after reading.

        A file that was deleted or replaced is not an error, because the open file keeps its contents.

        Raises:
            GGUFError: another program wrote to a file, so the data read from it may be wrong.
        """
        for path, stamp in self._stamps:
            try:
                now = _Stamp.of(path.stat())
            except OSError:
                continue
            if now != stamp and now.file == stamp.file:
                raise GGUFError(
                    f"{path_text(path)} was changed by another program while it was read: wait until that has "
                    "finished, and load it again"
                )

    def fingerprint(self) -> str:
        """Return a hash that identifies the model: of the first bytes of each metadata value and tensor, and of the
        names, shapes and types of the tensors."""
        digest = hashlib.blake2b(digest_size=16)
        for key in sorted(self.metadata):
            digest.update(key.encode() + self.metadata.encoded(key)[:4096])
        for name, tensor in self.tensors.items():
            digest.update(f"{name} {tensor.shape} {tensor.type.name}".encode())
            digest.update(tensor.data.reshape(-1)[:4096].tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Close the file. Arrays and strings already taken from it stay valid. May be called twice."""
        self._metadata = None
        self._tensors = None

    def __enter__(self) -> Self:
        _ = self.metadata  # raises ClosedError for a closed file
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Stamp:
    """Device and number of a file, and the attributes that change when a program writes to it."""

    file: tuple[int, int]
    n_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        return cls((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class _SplitFile:
    """One file of a model, and the contents of its header."""

    path: Path
    stamp: _Stamp
    version: int
    buffer: mmap.mmap
    metadata: Metadata
    tensors: list[TensorInfo]


def _read_file(path: Path) -> _SplitFile:
    buffer, stamp = _map(path)
    cursor = Cursor(path, buffer)
    version, metadata, entries = read_header(cursor, len(buffer))
    tensors = tensor_views(buffer, entries, align(cursor.at, metadata.alignment))
    return _SplitFile(path, stamp, version, buffer, metadata, tensors)


def read_header(cursor: Cursor, file_bytes: int) -> tuple[int, Metadata, list[Entry]]:
    """Return version, metadata and tensor table of a file of ``file_bytes`` bytes, whose header the cursor reads."""
    version = _read_version(cursor)
    n_tensors = cursor.count("tensors", least_bytes=_MIN_TENSOR_BYTES, most=limits.MAX_TENSORS)
    n_keys = cursor.count("metadata keys", least_bytes=_MIN_KEY_BYTES, most=limits.MAX_KEYS)
    metadata = read_metadata(cursor, n_keys)
    return version, metadata, read_table(cursor, n_tensors, metadata.alignment, file_bytes)


def read_head(path: Path, head: bytes) -> Metadata:
    """Return the metadata of a file from its first bytes.  Raises GGUFError if the metadata is damaged or longer."""
    cursor = Cursor(path, head)
    _read_version(cursor)
    cursor.count("tensors", least_bytes=_MIN_TENSOR_BYTES, most=limits.MAX_TENSORS)
    return read_metadata(cursor, cursor.count("metadata keys", least_bytes=_MIN_KEY_BYTES, most=limits.MAX_KEYS))


def _meant(path: Path) -> str:
    """Return advice for a missing path: the file next to it with the most similar name, if any."""
    try:
        names = [name for name in os.listdir(path.parent) if name.lower().endswith(".gguf")]
    except (OSError, ValueError):
        names = []
    near = difflib.get_close_matches(path.name, names, 1, 0.7)
    return f"did you mean {path_text(path.with_name(near[0]))}?" if near else "check the path"


def _convert(folder: Path) -> str:
    return f"localllm convert {path_text(folder)} converts the checkpoint to a GGUF file"


def _map(path: Path) -> tuple[mmap.mmap, _Stamp]:
    shown = path_text(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            if (path / "config.json").is_file():
                raise GGUFError(f"{shown} is a Hugging Face checkpoint: {_convert(path)}")
            raise GGUFError(f"{shown} is a directory: name a .gguf file in it")
        if path.suffix == ".safetensors":
            raise GGUFError(f"{shown} is part of a Hugging Face checkpoint: {_convert(path.parent)}")
        # Checked before opening, because opening a FIFO waits for its writer.
        if not stat.S_ISREG(status.st_mode):
            raise GGUFError(f"{shown} is not a regular file: name a .gguf file on disk")
        if status.st_size == 0:
            raise GGUFError(f"{shown} is empty: download or convert it again")
        with path.open("rb") as file:
            stamp = _Stamp.of(os.fstat(file.fileno()))
            mapped = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.path = path
            return mapped, stamp
    except FileNotFoundError:
        raise ModelNotFoundError(f"{shown} does not exist: {_meant(path)}") from None
    except PermissionError:
        raise GGUFError(f"{shown} may not be read by this user: check its permissions") from None
    except (OSError, ValueError, OverflowError) as error:
        # ValueError: a null character in the path, or an empty file; OverflowError: larger than the address space.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if "\0" in str(path):  # each version of Python words this differently
            reason = "its name has a null character"
        raise GGUFError(f"{shown} cannot be opened ({reason}): check the path and the disk") from error


def _read_version(cursor: Cursor) -> int:
    if cursor.buffer[:4] != b"GGUF":
        description = _kind_of_file(cursor.buffer[:32])
        why = f"but {description}" if description else "as it does not start with 'GGUF'"
        raise cursor.error(f"not a GGUF file, {why}", advice="name a .gguf file")
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        defect = "the file is big-endian, and localllm reads little-endian files only"
        raise cursor.error(defect, at=4, advice="convert the model for little-endian machines")
    advice = "convert the model again" if version == 1 else "update localllm or convert the model again"
    raise cursor.error(f"GGUF version {version} is not one that localllm reads (2 and 3)", at=4, advice=advice)


def _kind_of_file(head: bytes) -> str | None:
    """Return the kind of another file format by its first bytes; None if unknown."""
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "a model in a format older than GGUF"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive or PyTorch checkpoint"
    if head[8:10] == b'{"':
        return "a safetensors file"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, whose file was not fetched"
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "a web page"
    return None


_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def _split_key(file: _SplitFile, key: str) -> int:
    value = file.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _split_error(file, f"key {key!r} is missing or not an integer", DAMAGED)
    return value


def _split_error(file: _SplitFile, defect: str, advice: str) -> GGUFError:
    return GGUFError(f"{path_text(file.path)}, a part of a split model: {defect}; {advice}")


def _read_split(file: _SplitFile) -> list[_SplitFile]:
    """Return all files of a split model in order; ``file`` is one of these files."""
    count = _split_key(file, "split.count")
    match = _SPLIT_NAME.fullmatch(file.path.name)
    if match is None or int(match["count"]) != count or not 1 <= int(match["number"]) <= count:
        defect = f"key 'split.count' is {count}, but the file's name does not end in -NNNNN-of-{count:05d}.gguf"
        raise _split_error(file, defect, "give all parts their original names")
    paths = [file.path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [path_text(path.name) for path in paths if not path.exists()]
    if missing:
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        defect = f"{len(missing)} of the model's {len(paths)} files are not beside it ({some})"
        raise _split_error(file, defect, "put all of them into one folder")
    files = [file if path == file.path else _read_file(path) for path in paths]
    for number, split_file in enumerate(files):
        pair = (_split_key(split_file, "split.no"), _split_key(split_file, "split.count"))
        if pair != (number, len(files)):
            defect = f"keys 'split.no' and 'split.count' are {pair[0]} and {pair[1]}, not {number} and {len(files)}"
            raise _split_error(split_file, defect, "give all parts their original names")
    n_tensors = sum(len(split_file.tensors) for split_file in files)
    expected = _split_key(files[0], "split.tensors.count")
    if n_tensors != expected:
        defect = f"its files have {n_tensors} tensors together, but key 'split.tensors.count' is {expected}"
        raise _split_error(files[0], defect, "take all files from one model")
    return files


def _merge_tensors(files: Sequence[_SplitFile]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in tensors:
                defect = f"tensor {quoted(tensor.name)} is also in another part"
                raise _split_error(file, defect, "take all files from one model")
            tensors[tensor.name] = tensor
    return tensors
