"""From a piece of plain text to token ids: SentencePiece and byte-level BPE.

Libraries that the field trusts cut words and know SentencePiece.  They are imported when the first encoder of its
kind is built, so a program pays only for the one that its model needs.
"""

from __future__ import annotations

import struct
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

import numpy as np

from localllm.errors import TokenizerError, quoted
from localllm.tokenizer.pretokenizers import PreTokenizer
from localllm.tokenizer.vocabulary import BPE, TokenType, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_PLACEHOLDER = "\U0010ffff{}"
"""Names a token that no text may become: this is not one of the byte-level characters."""


class Encoder(Protocol):
    """Turns text without special tokens into ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; ``n_vocab`` stands for a character that the vocabulary cannot spell."""
        ...


def make_encoder(vocabulary: Vocabulary) -> Encoder:
    """The encoder for ``vocabulary.model``.

    Raises:
        TokenizerError: tokens, scores or merges do not fit together.
    """
    return BPEEncoder(vocabulary) if vocabulary.model == BPE else SentencePieceEncoder(vocabulary)


class SentencePieceEncoder:
    """SentencePiece's BPE: starting from characters, the neighbours whose union scores highest join.

    A character that is no token becomes its UTF-8 bytes if the vocabulary has all 256, else unknown.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import sentencepiece

        model = sentencepiece_model(vocabulary)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError, ValueError) as error:
            raise TokenizerError(
                f"{vocabulary.where}: sentencepiece does not accept the vocabulary: {quoted(str(error))}"
            ) from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids


# sentencepiece_model.proto: SentencePiece.Type and TrainerSpec.ModelType
_PIECE_TYPES = {
    TokenType.UNDEFINED: 1,
    TokenType.NORMAL: 1,
    TokenType.UNKNOWN: 3,  # there can be one unknown piece only; that one is written separately
    TokenType.CONTROL: 3,
    TokenType.USER_DEFINED: 1,  # already cut out of the text where it is spelled out
    TokenType.UNUSED: 5,
    TokenType.BYTE: 3,  # unless all 256 are there
}
_UNKNOWN_PIECE, _CONTROL_PIECE, _BYTE_PIECE = 2, 3, 6
_MODEL_BPE = 2


def sentencepiece_model(vocabulary: Vocabulary) -> bytes:
    """A serialised ``ModelProto`` (sentencepiece_model.proto) for a vocabulary.

    The pieces are the tokens in order.  If no token can be the unknown piece, which sentencepiece insists on,
    one more is added behind them.
    """
    kinds = [_PIECE_TYPES[TokenType(kind)] for kind in range(len(TokenType))]
    kinds_of = bytearray(vocabulary.types.translate(bytes(kinds).ljust(256, b"\0")))
    names = [token.encode() for token in vocabulary.tokens]
    byte_fallback = len(set(vocabulary.byte_values.values())) == 256
    if byte_fallback:
        _name_bytes(vocabulary.byte_values, names, kinds_of)
    for index, name in enumerate(names):
        if not name:
            names[index] = _PLACEHOLDER.format(index).encode()
            kinds_of[index] = _CONTROL_PIECE
    scores = vocabulary.scores.astype("<f4").tobytes()
    unknown = vocabulary.unk_id
    if unknown is None:
        unknown = len(names)
        names.append(_PLACEHOLDER.format(unknown).encode())
        kinds_of.append(_CONTROL_PIECE)
        scores += struct.pack("<f", 0)
    kinds_of[unknown] = _UNKNOWN_PIECE
    pieces = _pieces(names, scores, kinds_of)
    trainer = _field(3, _MODEL_BPE) + _field(35, int(byte_fallback))
    # No prefix, no removal of spaces: the tokenizer does what the file asks for.  A space becomes U+2581.
    normalizer = _bytes_field(1, b"identity") + _field(3, 0) + _field(4, 0) + _field(5, 1)
    return pieces + _bytes_field(2, trainer) + _bytes_field(3, normalizer)


def _name_bytes(byte_values: dict[int, int], names: list[bytes], kinds: bytearray) -> None:
    """Give each byte's first token the spelling that sentencepiece looks for, and hide the others."""
    seen: set[int] = set()
    for index, value in byte_values.items():
        if value in seen:
            names[index] = _PLACEHOLDER.format(index).encode()
            continue
        seen.add(value)
        names[index] = b"<0x%02X>" % value
        kinds[index] = _BYTE_PIECE


def _pieces(names: list[bytes], scores: bytes, kinds: bytearray) -> bytes:
    """``repeated SentencePiece pieces = 1``, each of piece = 1, score = 2 and type = 3.

    Written out by hand: a vocabulary has up to 262,144 of them and this runs at every start.
    """
    tails = np.zeros((len(names), _TAIL), np.uint8)
    tails[:, 0], tails[:, 5] = 0x15, 0x18
    tails[:, 1:5] = np.frombuffer(scores, np.uint8).reshape(-1, 4)
    tails[:, 6] = kinds
    tail, places = tails.tobytes(), range(0, tails.size, _TAIL)
    heads = {n: _head(n) for n in set(map(len, names))}
    return b"".join([heads[len(name)] + name + tail[at : at + _TAIL] for name, at in zip(names, places, strict=True)])


#: Bytes of a piece's score and type.
_TAIL = 7


def _head(n: int) -> bytes:
    """What stands before a piece's name of ``n`` bytes."""
    name = _bytes_head(1, n)
    return _bytes_head(1, len(name) + n + _TAIL) + name


def _varint(value: int) -> bytes:
    if value < 128:
        return _SMALL_VARINTS[value]
    return bytes((value & 127 | 128,)) + _varint(value >> 7)


_SMALL_VARINTS = [bytes((value,)) for value in range(128)]


def _field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _bytes_head(number, len(value)) + value


def _bytes_head(number: int, length: int) -> bytes:
    """What stands before the bytes of a field."""
    return _varint(number << 3 | 2) + _varint(length)


class BPEEncoder:
    """Byte-level BPE (GPT-2): regular expressions cut words, merges join the bytes of each.

    The library's own model of 150,000 tokens takes a fifth of a second to build, at every start.  The dictionaries
    that the vocabulary has anyway serve as well, and merging words is as fast as cutting them.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import pre_tokenizers

        self._splitter = pre_tokenizers.Sequence(
            [
                word_splitter(vocabulary.pre_tokenizer),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        self._ids, self._ranks, self._unknown = vocabulary.ids, vocabulary.merges, len(vocabulary)
        self._takes_whole_words = vocabulary.pre_tokenizer.ignore_merges
        self._seen: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word, _ in self._splitter.pre_tokenize_str(text):
            ids += self._seen.get(word) or self._encode_word(word)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        whole = self._ids.get(word) if self._takes_whole_words or len(word) == 1 else None
        ids = [self._ids.get(part, self._unknown) for part in self._merged(word)] if whole is None else [whole]
        if len(word) <= _LONGEST_SEEN:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[word] = ids
        return ids

    def _merged(self, word: str) -> list[str]:
        """A word's parts when no merge is left: the best merge first, of equals the leftmost."""
        parts, n, ranks = list(word), len(word), self._ranks
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))

        def rank(i: int) -> int | None:
            """Of the merge of part i and the next one.  A part that was joined to another is empty, and has none."""
            return ranks.get(f"{parts[i]} {parts[after[i]]}") if after[i] < n else None

        merges = [(r, i) for i in range(n - 1) if (r := rank(i)) is not None]
        heapify(merges)
        while merges:
            best, i = heappop(merges)
            if rank(i) != best:  # one of the two parts is another by now
                continue
            j = after[i]
            parts[i], parts[j], after[i] = parts[i] + parts[j], "", after[j]
            if after[j] < n:
                before[after[j]] = i
            for k in (before[i], i):
                if k >= 0 and (r := rank(k)) is not None:
                    heappush(merges, (r, k))
        return [part for part in parts if part]


#: Words whose ids are remembered, and characters of the longest of them.
_MOST_SEEN, _LONGEST_SEEN = 1 << 16, 64


def word_splitter(kind: PreTokenizer) -> tokenizers.pre_tokenizers.PreTokenizer:
    """What cuts a text into words as ``kind`` says."""
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns])


def _byte_characters() -> dict[str, int]:
    """GPT-2's visible character for each byte: printable Latin-1 for itself, U+0100 on for the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + n): byte for n, byte in enumerate(others)},
    }


BYTE_CHARACTERS = _byte_characters()
