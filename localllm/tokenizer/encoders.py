"""Encodes plain text to token ids: SentencePiece, Unigram, BPE and WordPiece.

The libraries ``tokenizers`` and ``sentencepiece`` split words and implement SentencePiece. They are imported with the
first encoder that needs them, so a program loads only what its model needs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

import numpy as np

from localllm.cancellation import check_cancelled
from localllm.errors import TokenizerError, quoted
from localllm.tokenizer.pretokenizers import PreTokenizer
from localllm.tokenizer.vocabulary import BPE, PLAMO, RWKV, SPM, UNIGRAM, WORD_PIECE, TokenType, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_PLACEHOLDER = " {}"
"""Name of a token that no text can become, because spaces are U+2581 before text is split."""


class TextEncoder(Protocol):
    """Encodes text without special tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; ``n_vocab`` marks a byte or character that the vocabulary cannot represent."""


def make_encoder(vocabulary: Vocabulary) -> TextEncoder:
    encoders: dict[str, Callable[[Vocabulary], TextEncoder]]
    encoders = {SPM: SentencePieceEncoder, BPE: BPEEncoder, UNIGRAM: UnigramEncoder, WORD_PIECE: WordPieceEncoder}
    encoders |= {PLAMO: PLaMoEncoder, RWKV: RWKVEncoder}
    return encoders[vocabulary.model](vocabulary)


class SentencePieceEncoder:
    """SentencePiece's BPE: starts with characters and repeatedly joins the pair with the highest-scoring union.

    A character that is not a token becomes its UTF-8 bytes if the vocabulary has all 256 bytes, else the unknown
    token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import sentencepiece

        model = sentencepiece_model(vocabulary)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError, ValueError) as error:
            raise TokenizerError(
                f"{vocabulary.file_name}: sentencepiece does not accept the vocabulary: {quoted(str(error))}"
            ) from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids


# sentencepiece_model.proto: SentencePiece.Type and TrainerSpec.ModelType
_PIECE_TYPES = {
    TokenType.UNDEFINED: 1,
    TokenType.NORMAL: 1,
    TokenType.UNKNOWN: 3,  # only one unknown piece is allowed; it is written separately
    TokenType.CONTROL: 3,
    TokenType.USER_DEFINED: 1,  # matched in the text before encoding
    TokenType.UNUSED: 5,
    TokenType.BYTE: 3,  # unless all 256 exist
}
_UNKNOWN_PIECE, _CONTROL_PIECE, _BYTE_PIECE = 2, 3, 6
_MODEL_BPE = 2


def sentencepiece_model(vocabulary: Vocabulary) -> bytes:
    """Return a serialized ``ModelProto`` (sentencepiece_model.proto) for a vocabulary.

    The pieces are the tokens, in order. sentencepiece requires an unknown piece. If no token can be the unknown
    piece, one is added at the end.
    """
    kinds = [_PIECE_TYPES[TokenType(i)] for i in range(len(TokenType))]
    kinds_of = bytearray(vocabulary.types.translate(bytes(kinds).ljust(256, b"\0")))
    names = [token.encode() for token in vocabulary.tokens]
    byte_fallback = len(set(vocabulary.byte_values.values())) == 256
    hidden = _hidden(vocabulary)
    if byte_fallback:
        hidden = _name_bytes(vocabulary, names, kinds_of, hidden)
    for index in hidden:
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
    # No prefix and no removal of spaces, because the tokenizer handles both. A space becomes U+2581.
    normalizer = _bytes_field(1, b"identity") + _field(3, 0) + _field(4, 0) + _field(5, 1)
    return pieces + _bytes_field(2, trainer) + _bytes_field(3, normalizer)


def _hidden(vocabulary: Vocabulary) -> set[int]:
    """Return tokens that no text can become: empty tokens, and tokens whose text belongs to another token."""
    if len(vocabulary.ids) == len(vocabulary):
        return set()
    return {index for index, token in enumerate(vocabulary.tokens) if vocabulary.ids.get(token) != index}


def _name_bytes(vocabulary: Vocabulary, names: list[bytes], kinds: bytearray, hidden: set[int]) -> set[int]:
    """Give the first token of each byte the name that sentencepiece expects. Return the tokens to hide."""
    first: dict[int, int] = {}
    for index, value in vocabulary.byte_values.items():
        if first.setdefault(value, index) == index:
            names[index] = b"<0x%02X>" % value
            kinds[index] = _BYTE_PIECE
    words = {vocabulary.ids[name] for value in first if (name := f"<0x{value:02X}>") in vocabulary.ids}
    return hidden.union(vocabulary.byte_values, words) - set(first.values())


def _pieces(names: list[bytes], scores: bytes, kinds: bytearray) -> bytes:
    """Serialize ``repeated SentencePiece pieces = 1``, with fields piece = 1, score = 2 and type = 3.

    Without a protobuf library, because a vocabulary has up to 262,144 pieces and this runs at every start.
    """
    tails = np.zeros((len(names), _TAIL), np.uint8)
    tails[:, 0], tails[:, 5] = 0x15, 0x18
    tails[:, 1:5] = np.frombuffer(scores, np.uint8).reshape(-1, 4)
    tails[:, 6] = kinds
    tail, places = tails.tobytes(), range(0, tails.size, _TAIL)
    heads = {n: _head(n) for n in set(map(len, names))}
    return b"".join([heads[len(name)] + name + tail[at : at + _TAIL] for name, at in zip(names, places, strict=True)])


#: Bytes of a piece's score and type fields.
_TAIL = 7


def _head(n: int) -> bytes:
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
    return _varint(number << 3 | 2) + _varint(length)


class UnigramEncoder:
    """Unigram: splits text into the tokens with the highest sum of scores.

    Sums have double precision, as in llama.cpp and in the libraries commonly used with embedding models.
    SentencePiece's single precision splits long runs of one character differently.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import models

        hidden = _hidden(vocabulary).union(vocabulary.of_type(*_NO_TEXT))
        pieces = [
            (_PLACEHOLDER.format(index), 0.0) if index in hidden else (token, score)
            for index, (token, score) in enumerate(zip(vocabulary.tokens, vocabulary.scores.tolist(), strict=True))
        ]
        unknown = vocabulary.unk_id
        if unknown is None:
            unknown = len(pieces)
            pieces.append((_PLACEHOLDER.format(unknown), 0.0))
        self._model = models.Unigram(pieces, unknown, byte_fallback=False)
        self._prefix, self._merge = vocabulary.add_space_prefix, vocabulary.merge_spaces
        self._replace = CharacterMap(vocabulary.charsmap, vocabulary.file_name) if vocabulary.charsmap else str

    def encode(self, text: str) -> list[int]:
        text = self._replace(text)
        if self._merge:
            text = " ".join(filter(None, text.split(" ")))
        if self._prefix and text:
            text = " " + text
        return [token.id for token in self._model.tokenize(text.replace(" ", "\u2581"))]


_NO_TEXT = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED, TokenType.BYTE)


class PLaMoEncoder:
    """PLaMo's Unigram: splits text into the tokens with the highest sum of scores, which are rounded to 1e-4.

    Of equal sums, the longest first token counts. A character without a token becomes its UTF-8 bytes, at a cost
    above the cost of tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        hidden = _hidden(vocabulary).union(vocabulary.of_type(*_NO_TEXT))
        scores = vocabulary.scores.astype(np.float64) * 1e4
        costs = -np.copysign(np.floor(np.abs(scores) + 0.5), scores).astype(np.int64)
        #: Cost and id of each token by its text.
        self._tokens = {
            token: (cost, index)
            for index, (token, cost) in enumerate(zip(vocabulary.tokens, costs.tolist(), strict=True))
            if token and index not in hidden
        }
        lengths: dict[str, set[int]] = {}
        for token in self._tokens:
            lengths.setdefault(token[:2], set()).add(len(token))
        #: Lengths of the tokens that start with two characters, or that are one character, longest first.
        self._lengths = {start: sorted(some, reverse=True) for start, some in lengths.items()}
        self._bytes = {value: id_ for id_, value in vocabulary.byte_values.items()}
        self._unknown = len(vocabulary)

    def encode(self, text: str) -> list[int]:
        text = text.removeprefix("\ufeff")
        n = len(text)
        costs, ends, ids = [0] * (n + 1), [0] * n, [-1] * n
        for start in range(n - 1, -1, -1):
            if not start % _CHECKED:
                check_cancelled()
            best, end, id_ = _NO_COST, start + 1, -1
            pair = text[start : start + 2]
            for length in (*self._lengths.get(pair, ()), *([1] if len(pair) > 1 else [])):
                token = self._tokens.get(text[start : start + length])
                stop = start + length
                if token is not None and stop <= n and costs[stop] + token[0] < best:
                    best, end, id_ = costs[stop] + token[0], stop, token[1]
            if costs[start + 1] + _UNKNOWN_COST < best:
                best, end, id_ = costs[start + 1] + _UNKNOWN_COST, start + 1, -1
            costs[start], ends[start], ids[start] = best, end, id_
        return self._path(text, ends, ids)

    def _path(self, text: str, ends: list[int], ids: list[int]) -> list[int]:
        """Return the ids of the best split, from the end and the id of the first token at each character."""
        path, at = [], 0
        while at < len(text):
            if ids[at] >= 0:
                path.append(ids[at])
            else:
                path += [self._bytes.get(byte, self._unknown) for byte in text[at].encode()]
            at = ends[at]
        return path


#: Cost of a character without a token, and a cost above every sum. Source: llama.cpp's ``llm_tokenizer_plamo2``.
_UNKNOWN_COST, _NO_COST = 10_000_000, 1 << 60


class RWKVEncoder:
    """RWKV's tokenizer: repeatedly takes the longest token that the remaining bytes of the text start with."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        hidden = set(vocabulary.of_type(*_NO_TEXT))
        tokens = {unescaped(t): i for i, t in enumerate(vocabulary.tokens) if t and i not in hidden}
        self._tokens, self._unknown = tokens, len(vocabulary)
        lengths: dict[bytes, set[int]] = {}
        for token in tokens:
            lengths.setdefault(token[:2], set()).add(len(token))
        #: Lengths of the tokens that start with two bytes, longest first.
        self._lengths = {start: sorted(some, reverse=True) for start, some in lengths.items()}

    def encode(self, text: str) -> list[int]:
        data, start = text.encode(), 0
        ids: list[int] = []
        while start < len(data):
            if not len(ids) % _CHECKED:
                check_cancelled()
            for length in (*self._lengths.get(data[start : start + 2], ()), 1):
                id_ = self._tokens.get(data[start : start + length])
                if id_ is not None:
                    break
            ids.append(self._unknown if id_ is None else id_)
            start += length
        return ids


_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)
_ESCAPED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def unescaped(token: str) -> bytes:
    """Return the bytes of a token of RWKV's tokenizer, which files contain as a literal of Python."""

    def value(match: re.Match[bytes]) -> bytes:
        return bytes((int(match[1], 16),)) if match[1] else _ESCAPED.get(match[2], match[2])

    return _ESCAPE.sub(value, token.encode())


class CharacterMap:
    """Replaces characters, longest match first, with rules compiled by SentencePiece.

    ``charsmap`` is the size of a double array in bytes, the array, and the replacements, each terminated by a zero
    byte. Bits of an array unit: 0-7 the byte that leads to it; 8 set if a match ends there; 10-30 the XOR offset of
    its children, shifted left by eight bits if bit 9 is set. After a match, the child of byte 0 is the offset of the
    replacement (darts-clone). All offsets are checked, because SentencePiece would read out of bounds.
    """

    def __init__(self, charsmap: bytes, file_name: str) -> None:
        size = int.from_bytes(charsmap[:4], "little")
        self._units = np.frombuffer(charsmap[4 : 4 + size // 4 * 4], "<u4").tolist()
        self._texts = charsmap[4 + size :]
        self._file_name = file_name
        self("a")

    def __call__(self, text: str) -> str:
        data, position, replaced = text.encode(), 0, bytearray()
        try:
            while position < len(data):
                end, new = self._match(data, position)
                replaced += data[position:end] if new is None else new
                position = end
            return replaced.decode()
        except (IndexError, ValueError):
            raise TokenizerError(f"{self._file_name}: tokenizer.ggml.precompiled_charsmap is damaged") from None

    def _match(self, data: bytes, start: int) -> tuple[int, bytes | None]:
        """Return the longest match's end and its replacement; without a match the character's end and None."""
        units, node, replacement, end = self._units, _children(self._units[0]), None, start
        for at in range(start, len(data)):
            byte = data[at]
            node ^= byte
            unit = units[node]
            if unit & 0x8000_00FF != byte or not byte:
                break
            node ^= _children(unit)
            if unit >> 8 & 1:
                replacement, end = units[node] & 0x7FFF_FFFF, at + 1
        if replacement is not None:
            return end, self._texts[replacement : self._texts.index(0, replacement)]
        end = start + 1
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end += 1
        return end, None


def _children(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


class WordPieceEncoder:
    """WordPiece: splits off the longest token at the start of a word, repeatedly. A word without a match is unknown.

    GGUF marks tokens that start words with U+2581, and omits the "##" of other tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        if vocabulary.unk_id is None:
            raise TokenizerError(f"{vocabulary.file_name}: tokenizer.ggml.unknown_token_id is missing")
        ids = {text[1:] if text.startswith("\u2581") else f"##{text}": id_ for text, id_ in vocabulary.ids.items()}
        unknown = vocabulary.tokens[vocabulary.unk_id]
        ids[unknown] = vocabulary.unk_id
        self._tokenizer = Tokenizer(models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=_LONGEST_WORD))
        self._tokenizer.normalizer = normalizers.BertNormalizer(
            lowercase=vocabulary.lowercase, strip_accents=vocabulary.strip_accents
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


#: Longest word that WordPiece splits, in characters; a longer word is unknown.
_LONGEST_WORD = 100


class BPEEncoder:
    """BPE: regular expressions split words, then merges join bytes (GPT-2) or characters.

    The model of the ``tokenizers`` library takes 0.2 s to build for 150,000 tokens, at every start. The vocabulary's
    dictionaries need no building, and merging is as fast as splitting words.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import pre_tokenizers

        self._pre_tokenizer = pre_tokenizer = vocabulary.pre_tokenizer
        self._splitter = word_splitter(pre_tokenizer)
        self._cuts_words = cuts_words(self._splitter)
        if not pre_tokenizer.is_raw:
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            self._splitter = pre_tokenizers.Sequence([self._splitter, byte_level])
        self._ids, self._ranks, self._unknown = vocabulary.ids, vocabulary.merges, len(vocabulary)
        self._bytes = {value: id_ for id_, value in vocabulary.byte_values.items()} if pre_tokenizer.is_raw else {}
        self._seen: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, word in enumerate(self._words(text)):
            if not number % _CHECKED:
                check_cancelled()
            ids += self._seen.get(word) or self._encode_word(word)
        return ids

    def _words(self, text: str) -> list[str]:
        if self._pre_tokenizer.is_raw:
            if not self._pre_tokenizer.space:
                return text.split()
            text = text.replace(" ", self._pre_tokenizer.space)
        segments = text_segments(text) if self._cuts_words else [text]
        return [word for segment in segments for word, _ in self._splitter.pre_tokenize_str(segment)]

    def _encode_word(self, word: str) -> list[int]:
        is_unsplit = (
            self._pre_tokenizer.ignore_merges
            or len(word) == 1
            or (self._pre_tokenizer.unsplit and not word.strip(self._pre_tokenizer.unsplit))
        )
        word_id = self._ids.get(word) if is_unsplit else None
        ids = [id_ for piece in self._merged(word) for id_ in self._spelled(piece)] if word_id is None else [word_id]
        if len(word) <= _LONGEST_SEEN:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen[word] = ids
        return ids

    def _spelled(self, piece: str) -> list[int]:
        id_ = self._ids.get(piece)
        if id_ is not None or not self._bytes:
            return [self._unknown if id_ is None else id_]
        return [self._bytes.get(byte, self._unknown) for byte in piece.encode()]

    def _merged(self, word: str) -> list[str]:
        """Return a word's pieces after all merges: best merge first, leftmost among equal ones."""
        pieces, n, ranks = list(word), len(word), self._ranks
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))

        def rank(i: int) -> int | None:
            """Return the rank of merging piece i with the next piece; None for a piece that was joined already."""
            return ranks.get(f"{pieces[i]} {pieces[after[i]]}") if after[i] < n else None

        # Numbers instead of pairs, pushed one by one: for a word of a million characters, other methods would block
        # other threads for a long time.
        merges: list[int] = []
        for i in range(n - 1):
            if (r := rank(i)) is not None:
                heappush(merges, r * n + i)
        while merges:
            best, i = divmod(heappop(merges), n)
            if not i % _CHECKED:
                check_cancelled()
            if rank(i) != best:  # one of the pieces has changed
                continue
            j = after[i]
            pieces[i], pieces[j], after[i] = pieces[i] + pieces[j], "", after[j]
            if after[j] < n:
                before[after[j]] = i
            for k in (before[i], i):
                if k >= 0 and (r := rank(k)) is not None:
                    heappush(merges, r * n + k)
        return [piece for piece in pieces if piece]


#: Words, or merges, between two checks for cancellation.
_CHECKED = 1024

#: Most words in the cache, and longest word in it, in characters.
_MAX_SEEN, _LONGEST_SEEN = 1 << 16, 64


#: Characters split into words at once, without releasing other threads: a few milliseconds.
_PART = 1 << 12

#: Longest part without a word boundary, in characters. Longer parts are split anywhere.
_LONGEST_WORD = 1 << 17

#: A word boundary in every text: between a letter and white space that is followed by a letter.
_CUT = re.compile(r"(?<=[^\W\d_])(?=[ \n][^\W\d_])")


def cuts_words(splitter: tokenizers.pre_tokenizers.PreTokenizer) -> bool:
    """Return whether a splitter splits between words. For some vocabularies several words are one piece."""
    starts = {start for _, (start, _) in splitter.pre_tokenize_str("a b\nc")}
    return {1, 3} <= starts


def text_segments(text: str) -> Iterator[str]:
    start, stop = 0, _PART
    while stop < len(text):
        check_cancelled()
        cut = _CUT.search(text, stop, stop + _PART)
        if cut is not None or stop + _PART - start > _LONGEST_WORD:
            end = stop if cut is None else cut.start()
            yield text[start:end]
            start = end
        stop += _PART
    yield text[start:]


def word_splitter(pre_tokenizer: PreTokenizer) -> tokenizers.pre_tokenizers.PreTokenizer:
    """Return a splitter into words for a pre-tokenizer."""
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]
    )


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's visible character for each byte: itself for printable Latin-1, else U+0100 and following."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + n): byte for n, byte in enumerate(unprintable)}}


BYTE_CHARACTERS = _byte_characters()
