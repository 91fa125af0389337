"""Records of cached blocks in files, for `localllm.engine.block_store` and `localllm.engine.saved_prompts`.

A file starts with `MAGIC`. Each record contains one part of a block: the page of a window group, or the recurrent
states after some of its tokens. A record is a head, the block's token ids, and the data. All numbers are
little-endian. Checksums (CRC-32) cover the head with the ids, and the data.

The digest of a block is a hash of its parent's digest and its ids. It therefore identifies all tokens up to the
block's end, in every process. The ids of a root are the bytes of a label, which states everything else that
determines the data: the model, the cache type, the kernels.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

import numpy as np

from localllm.engine.media import Embeddings

#: The last two digits are the version of the layout.
MAGIC = b"llmblk01"

#: CRC-32 of the rest of the head and of the ids, bytes of ids, part, bytes of data, CRC-32 of the data, parent.
_HEAD = struct.Struct("<IIiQI16s")
_SHAPE = struct.Struct("<3I")

#: Parent of roots.
NO_PARENT = bytes(16)

#: Label of the parent of encoded images and audio clips, whose ids are their keys. Their only part is 0.
MEDIA_LABEL = b'["images and audio"]'


class Record(NamedTuple):
    """One part of a block, and the place of its data in the file."""

    parent: bytes  # digest of the preceding block
    ids: bytes  # int64 [n_tokens], or the label of a root
    part: int  # window group of a page, or -n for the recurrent states after n tokens
    offset: int
    n_bytes: int
    crc: int

    @classmethod
    def of(cls, parent: bytes, ids: bytes, part: int, data: bytes, position: int = 0) -> Record:
        """Return the record of some data at a position of a file."""
        return cls(parent, ids, part, position + _HEAD.size + len(ids), len(data), zlib.crc32(data))

    @property
    def size(self) -> int:
        """Bytes of the whole record."""
        return _HEAD.size + len(self.ids) + self.n_bytes

    @property
    def head(self) -> bytes:
        """The bytes that precede the data."""
        rest = _HEAD.pack(0, len(self.ids), self.part, self.n_bytes, self.crc, self.parent)[4:] + self.ids
        return struct.pack("<I", zlib.crc32(rest)) + rest


def ids_bytes(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<i8").tobytes()


def ids_of(data: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(data, "<i8").tolist()
    return ids


def digest(parent: bytes, ids: bytes) -> bytes:
    return blake2b(parent + ids, digest_size=16).digest()


MEDIA_ROOT = digest(NO_PARENT, MEDIA_LABEL)


def scan(file: BinaryIO) -> Iterator[Record]:
    """Yield the records of a file without reading their data. The caller may read between two records.

    Raises:
        ValueError: the file has another version, or is damaged or truncated at this point.
    """
    size, position = os.fstat(file.fileno()).st_size, len(MAGIC)
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("the file does not start with the format's magic number")
    while position < size:
        file.seek(position)
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise ValueError("a record is truncated")
        crc, n_ids, part, n_bytes, data_crc, parent = _HEAD.unpack(head)
        offset = position + _HEAD.size + n_ids
        position = offset + n_bytes
        if position > size or zlib.crc32(head[4:] + (ids := file.read(n_ids))) != crc:
            raise ValueError("a record is damaged or truncated")
        yield Record(parent, ids, part, offset, n_bytes, data_crc)


def read_data(file: BinaryIO, record: Record) -> bytes:
    """Return the data of a record. Raises ValueError if the data is damaged."""
    file.seek(record.offset)
    data = file.read(record.n_bytes)
    if len(data) != record.n_bytes or zlib.crc32(data) != record.crc:
        raise ValueError("the data of a record is damaged")
    return data


def pack_embeddings(embeddings: Embeddings) -> bytes:
    return _SHAPE.pack(*embeddings.shape) + embeddings.astype("<f4", copy=False).tobytes()


def unpack_embeddings(data: bytes) -> Embeddings:
    """Return the embeddings of `pack_embeddings`. Raises ValueError if the data does not match its shape."""
    if len(data) < _SHAPE.size or min(shape := _SHAPE.unpack_from(data)) < 1:
        raise ValueError("the shape of an image's embeddings is not positive")
    return np.frombuffer(data, "<f4", offset=_SHAPE.size).astype(np.float32, copy=False).reshape(shape)
