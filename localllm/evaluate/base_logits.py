"""The file of ``llama-perplexity --kl-divergence-base`` of llama.cpp, with a model's log-probabilities for a text::

    "_logits_", i32 context, i32 n_vocab, i32 n_chunks, i32 tokens [n_chunks * context]
    n_chunks × (context - 1 - context / 2) × { f32 scale, f32 lowest, u16 steps [n_vocab, rounded up to even] }

Each row has the log-probabilities ``lowest + scale * steps`` of the token after a token of a chunk's second half.
Log-probabilities more than 16 below the maximum are clipped.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm.errors import UsageError, path_text
from localllm.files import NewFile
from localllm.quant.bits import Floats
from localllm.regular_file import open_regular

_MAGIC = b"_logits_"
_HEADER = struct.Struct("<8siii")

#: Log-probabilities are clipped at this distance below the maximum.
RANGE = np.float32(16)
_STEPS = np.float32(65535)


def rows_of_chunk(context: int) -> int:
    """Return the number of predicted tokens of a chunk: the tokens of its second half, without the first."""
    return context - 1 - context // 2


def _row_size(n_vocab: int) -> int:
    """Return the number of 16-bit values per row."""
    return 2 * ((n_vocab + 1) // 2) + 4


@dataclass(frozen=True)
class BaseLogits:
    """An open file of logits."""

    path: Path
    tokens: NDArray[np.int32]  # int32 [n_chunks, context], tokens of the text, without BOS in place of the first
    n_vocab: int  # logits per token
    _rows: NDArray[np.uint16]  # [n_chunks, rows_of_chunk, _row_size], a view of the file

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> BaseLogits:
        """Open a file. Raises UsageError if it is damaged or of another format."""
        path = Path(path)
        try:
            with open_regular(path) as file:
                head = file.read(_HEADER.size)
                n_bytes = file.seek(0, os.SEEK_END)
        except OSError as error:
            raise UsageError(f"{path_text(path)} cannot be read ({error.strerror}): check the path") from None
        if not head.startswith(_MAGIC) or len(head) < _HEADER.size:
            raise UsageError(f"{path_text(path)} is not a file of base logits: --save-logits writes one")
        _, context, n_vocab, n_chunks = _HEADER.unpack(head)
        shape = (n_chunks, rows_of_chunk(context), _row_size(n_vocab))
        if min(context - 4, n_vocab - 1, n_chunks - 1) < 0 or n_bytes != _n_bytes(n_chunks, context, n_vocab):
            raise UsageError(f"{path_text(path)} is damaged or was not written to its end: write it again")
        tokens = np.fromfile(path, "<i4", n_chunks * context, offset=_HEADER.size).reshape(n_chunks, context)
        if tokens.min() < 0 or tokens.max() >= n_vocab:
            raise UsageError(f"{path_text(path)} is damaged: it has tokens outside the vocabulary")
        rows = np.memmap(path, "<u2", "r", _HEADER.size + tokens.nbytes, shape)
        return cls(path, tokens, n_vocab, rows)

    @property
    def context(self) -> int:
        """Tokens per chunk."""
        return int(self.tokens.shape[1])

    def log_probabilities(self, chunk: int) -> Floats:
        """Return the log-probabilities of a chunk, float32 [rows_of_chunk, n_vocab]."""
        rows = self._rows[chunk]
        scale, lowest = np.ascontiguousarray(rows[:, :4]).view("<f4").T[:, :, None]
        with np.errstate(over="ignore", invalid="ignore"):
            highest = lowest + scale * _STEPS
        if not (np.isfinite(lowest).all() and np.isfinite(highest).all() and (scale >= 0).all()):
            raise UsageError(f"{path_text(self.path)} is damaged: it has logits that are not finite; write it again")
        steps: Floats = rows[:, 4 : 4 + self.n_vocab].astype(np.float32)
        steps *= scale
        steps += lowest
        return steps


class BaseLogitsWriter(NewFile):
    """A file of logits being written, chunk by chunk with `add`."""

    def __init__(self, path: Path, tokens: NDArray[np.int32], n_vocab: int) -> None:
        """``tokens``: int32 [n_chunks, context]."""
        n_chunks, context = tokens.shape
        super().__init__(path, _n_bytes(n_chunks, context, n_vocab))
        self._head = _HEADER.pack(_MAGIC, tokens.shape[1], n_vocab, len(tokens)) + tokens.astype("<i4").tobytes()

    def add(self, rows: NDArray[np.uint16]) -> None:
        """Write the next chunk of `packed` rows."""
        head, self._head = self._head, b""
        self.put(head + rows.tobytes())


def packed(logits: Floats) -> NDArray[np.uint16]:
    """Return the rows of the file for logits [n, n_vocab]."""
    n_vocab = logits.shape[1]
    peak = logits.max(axis=1, keepdims=True)
    low = np.maximum(logits.min(axis=1, keepdims=True), peak - RANGE)
    log_total = np.log(np.exp(logits - peak).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    scale = (peak - low) / _STEPS
    rows = np.zeros((len(logits), _row_size(n_vocab)), "<u2")
    rows[:, :4] = np.concatenate([scale, low - peak - log_total], axis=1).astype("<f4").view("<u2")
    with np.errstate(divide="ignore", invalid="ignore"):  # scale and steps of equal logits are 0
        steps = np.where(logits > low, np.rint((logits - low) * (np.float32(1) / scale)), 0)
    rows[:, 4 : 4 + n_vocab] = np.where(scale > 0, steps, 0)
    return rows


def _n_bytes(n_chunks: int, context: int, n_vocab: int) -> int:
    return _HEADER.size + 4 * n_chunks * context + 2 * n_chunks * rows_of_chunk(context) * _row_size(n_vocab)
