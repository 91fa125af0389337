"""Small vocabularies for tests, in the format of a GGUF file's metadata."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sentencepiece

from localllm.gguf import GGUFFile
from localllm.tokenizer import Tokenizer
from tests.helpers.data import shared_data

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

# GPT-2's table, written independently: printable Latin-1 unchanged, the other bytes from U+0100.
_PRINTABLE = [b for b in range(256) if chr(b).isprintable() and chr(b) not in " \xa0\xad" and b < 256]
BYTE_CHARACTERS = [chr(b) if b in _PRINTABLE else chr(0x100 + b - sum(p < b for p in _PRINTABLE)) for b in range(256)]


@functools.cache
def real_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a file in ``../shared/data``, loaded once; skips the test if the file is missing."""
    with GGUFFile.open(shared_data(name)) as file:
        return Tokenizer.from_gguf(file)


@dataclass
class FakeFile:
    """An open GGUF file, with only the attributes that tokenizers use."""

    metadata: Mapping[str, Any]
    path: str = field(default="tiny.gguf")


def tokenizer_keys(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def spm_metadata(pieces: Sequence[tuple[str, float, int]], **changes: Any) -> dict[str, Any]:
    """Return a SentencePiece vocabulary of (text, score, type)."""
    texts, scores, types = zip(*pieces, strict=True)
    keys = tokenizer_keys(
        model="llama",
        pre="default",
        tokens=list(texts),
        scores=np.array(scores, np.float32),
        token_type=np.array(types, np.int32),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    return _changed(keys, changes)


def tiny_spm_pieces(words: Iterable[tuple[str, float]] = ()) -> list[tuple[str, float, int]]:
    """Return the tokens for unknown, BOS, EOS, 256 bytes and ``words``."""
    return [
        ("<unk>", 0.0, UNKNOWN),
        ("<s>", 0.0, CONTROL),
        ("</s>", 0.0, CONTROL),
        *((token, 0.0, BYTE) for token in BYTE_TOKENS),
        *((text, score, NORMAL) for text, score in words),
    ]


def bpe_metadata(
    merges: Sequence[tuple[str, str]] = (),
    special: Sequence[tuple[str, int]] = (("<|endoftext|>", CONTROL),),
    **changes: Any,
) -> dict[str, Any]:
    """Return a byte-level vocabulary: 256 bytes, the results of ``merges``, and ``special`` (text, type)."""
    words = list(dict.fromkeys(left + right for left, right in merges))
    tokens = [*BYTE_CHARACTERS, *words, *(text for text, _ in special)]
    types = [NORMAL] * (256 + len(words)) + [kind for _, kind in special]
    keys = tokenizer_keys(
        model="gpt2",
        pre="gpt-2",
        tokens=tokens,
        token_type=np.array(types, np.int32),
        merges=[f"{left} {right}" for left, right in merges],
        eos_token_id=len(tokens) - 1,
    )
    return _changed(keys, changes)


def _changed(keys: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``keys`` with some ``tokenizer.ggml`` keys replaced, or removed if the value is ``None``."""
    keys = {**keys, **tokenizer_keys(**changes)}
    return {key: value for key, value in keys.items() if value is not None}


def train_sentencepiece(text: str, vocab_size: int) -> sentencepiece.SentencePieceProcessor:
    """Train a real SentencePiece model of Llama's type (BPE, byte fallback, identity) on ``text``."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
        num_threads=1,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """Return the metadata that a converter writes for a SentencePiece model."""
    pieces = []
    for index in range(processor.vocab_size()):
        kind = NORMAL
        if processor.is_unknown(index):
            kind = UNKNOWN
        elif processor.is_control(index):
            kind = CONTROL
        elif processor.is_byte(index):
            kind = BYTE
        pieces.append((processor.id_to_piece(index), processor.get_score(index), kind))
    return spm_metadata(pieces)
