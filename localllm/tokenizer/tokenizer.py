"""Converts text to token ids and back, using only the metadata of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from localllm.cancellation import check_cancelled
from localllm.errors import TokenizerError, quoted, warn
from localllm.kernels import process
from localllm.options import checks
from localllm.tokenizer.encoders import BYTE_CHARACTERS, make_encoder, unescaped
from localllm.tokenizer.pretokenizers import TokenizerWarning, warn_if_unknown
from localllm.tokenizer.vocabulary import BPE, RWKV, SPM, MetadataFile, TokenType, Vocabulary, as_token_id

_SPACE_MARK = "\u2581"  # a space in SentencePiece
_WHITE_SPACE = " \t\n\v\f\r"
_INVISIBLE = frozenset({TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED})


class Tokenizer:
    """The tokenizer of one model. Immutable and thread-safe.

    ``decode(encode(text)) == text`` for every text that the vocabulary can represent, with one exception: in
    SentencePiece U+2581 (``▁``) represents a space and is decoded as a space. WordPiece and Unigram normalize texts,
    and decode to the normalized text.

    Token ids equal llama.cpp's, except as listed in docs/models.md (Tokens).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Build the tokenizer of a checked vocabulary (``Vocabulary.from_gguf``).

        Raises:
            TokenizerError: tokens, scores or merges do not fit together.
        """
        self._vocabulary = vocabulary
        self._n_vocab = len(vocabulary)
        with process.UnfinishedWork(process.workers):
            self._encoder = make_encoder(vocabulary)
        self._visible_tokens = self._matcher(TokenType.USER_DEFINED)
        self._all_special_tokens = self._matcher(TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN)

    @classmethod
    def from_gguf(cls, file: MetadataFile) -> Tokenizer:
        """Return the tokenizer of an open GGUF file.

        Raises:
            TokenizerError: the file's tokenizer is missing, unsupported or damaged.

        Warns:
            TokenizerWarning: the file's pre-tokenizer is unknown and the default one is used.
        """
        tokenizer = cls(Vocabulary.from_gguf(file))
        tokenizer.warn_if_guessed()
        return tokenizer

    def warn_if_guessed(self) -> None:
        """Warn if the file's pre-tokenizer is unknown and the default one is used."""
        if self.model == BPE:
            warn_if_unknown(self.pre, self._vocabulary.file_name)

    @property
    def model(self) -> str:
        """Kind: "llama" (SentencePiece), "gpt2" (BPE), "t5" (Unigram), "bert" (WordPiece), "plamo2" or "rwkv"."""
        return self._vocabulary.model

    @property
    def pre(self) -> str | None:
        """Name of BPE's pre-tokenizer (``tokenizer.ggml.pre``)."""
        return self._vocabulary.pre

    @property
    def n_vocab(self) -> int:
        return self._n_vocab

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._vocabulary.eos_id

    @property
    def eog_ids(self) -> frozenset[int]:
        """Tokens that end a generation: EOS, end of turn, end of message and similar tokens."""
        return self._vocabulary.eog_ids

    @property
    def suppressed_ids(self) -> frozenset[int]:
        """Tokens that no reply contains, such as placeholders of images (``tokenizer.ggml.suppress_tokens``)."""
        return self._vocabulary.suppressed_ids

    @property
    def add_bos(self) -> bool:
        """True if texts start with BOS."""
        return self._vocabulary.add_bos

    @property
    def add_eos(self) -> bool:
        """True if texts end with EOS."""
        return self._vocabulary.add_eos

    @property
    def add_space_prefix(self) -> bool:
        """True if encoding adds a leading space, which decoding removes."""
        return self._vocabulary.add_space_prefix

    def difference(self, other_vocabulary: Vocabulary) -> str | None:
        """Describe the first difference from another vocabulary; None if every id has the same meaning in both.

        Unused tokens at the end of only one vocabulary are padding and do not count.
        """
        vocabulary = self._vocabulary
        if vocabulary.model != other_vocabulary.model:
            return f"its kind is {other_vocabulary.model!r} instead of {vocabulary.model!r}"
        for id_, (token, its) in enumerate(zip(vocabulary.tokens, other_vocabulary.tokens, strict=False)):
            if token != its:
                return f"token {id_:,} is {quoted(its)} instead of {quoted(token)}"
        n = min(len(vocabulary), len(other_vocabulary))
        longer = vocabulary if len(vocabulary) > n else other_vocabulary
        if any(token_type != TokenType.UNUSED for token_type in longer.types[n:]):
            return f"it has {len(other_vocabulary):,} tokens instead of {len(vocabulary):,}"
        return None

    def is_special(self, token: int) -> bool:
        """Return whether ``token`` is a control or unknown token, which adds no text."""
        return self._vocabulary.types[as_token_id(token, self._n_vocab)] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def token_text(self, token: int) -> str:
        """Return the token as written in the vocabulary, for display."""
        return self._vocabulary.tokens[as_token_id(token, self._n_vocab)]

    def token_label(self, token: int) -> str:
        r"""Return a label for lists of tokens: a control token's name, bytes of partial characters as ``\xe2``."""
        return self.token_bytes(token, special=True).decode(errors="backslashreplace")

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of ``token`` in decoded text, often incomplete characters.

        Control, unknown and unused tokens add no bytes, or their names if ``special``.

        Raises:
            TokenizerError: ``token`` is not an id of this vocabulary.
        """
        token = as_token_id(token, self._n_vocab)
        token_type = self._vocabulary.types[token]
        text = self._vocabulary.tokens[token]
        if token_type in _INVISIBLE:
            return text.encode() if special else b""
        if token_type == TokenType.BYTE:
            return bytes((self._vocabulary.byte_values[token],))
        if token_type == TokenType.USER_DEFINED:
            return text.encode()
        if self.model == RWKV:
            return unescaped(text)
        if self.model == BPE and not self._vocabulary.pre_tokenizer.is_raw:
            try:
                return bytes([BYTE_CHARACTERS[character] for character in text])
            except KeyError:
                return text.encode()  # not written in GPT-2's characters
        return text.replace(_SPACE_MARK, " ").encode()

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, continuation: bool = False
    ) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: any text.
            add_special: add BOS before the text and EOS after it if the model requires them (``add_bos``,
                ``add_eos``). BOS is not added to a text that already starts with it (``parse_special``).
            parse_special: convert names of control tokens, such as ``<|im_end|>``, to these tokens. Do not use it for
                text from others. User-defined tokens are always converted.
            continuation: the text continues earlier text: add no space before it (``add_space_prefix``).

        Raises:
            UsageError: ``text`` is not a string.
            TokenizerError: ``text`` is not valid Unicode (a lone surrogate).

        Warns:
            TokenizerWarning: the vocabulary has no token for a byte of a character, which is therefore omitted.
        """
        _check_unicode(checks.text("text", text))
        vocabulary = self._vocabulary
        special_tokens = self._all_special_tokens if parse_special else self._visible_tokens
        with process.UnfinishedWork(process.workers):
            ids = self._encode_pieces(text, special_tokens, after_special=not continuation)
        if add_special:
            ids = self.with_bos(ids)
            if vocabulary.add_eos and vocabulary.eos_id is not None:
                ids.append(vocabulary.eos_id)
        return ids

    def with_bos(self, ids: list[int], *, replaced: int = 0) -> list[int]:
        """Return ``ids`` with BOS before them if texts start with BOS (``add_bos``) and ``ids`` do not yet.

        Args:
            ids: tokens of a whole text or of a part.
            replaced: number of leading tokens that BOS replaces: 1 for chunks of a fixed length.
        """
        bos = self.bos_id
        return [bos, *ids[replaced:]] if self.add_bos and bos is not None and ids[:1] != [bos] else ids

    def _encode_pieces(self, text: str, special_tokens: _TokenMatcher, *, after_special: bool) -> list[int]:
        ids: list[int] = []
        strip = False
        for piece, following in pairwise([*special_tokens.split(text), None]):
            check_cancelled()
            assert piece is not None
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
                strip = piece in self._vocabulary.strip_after
                continue
            if strip:
                piece = piece.lstrip(_WHITE_SPACE)
            if following in self._vocabulary.strip_before:
                piece = piece.rstrip(_WHITE_SPACE)
            if piece:
                if after_special and self.add_space_prefix and self.model == SPM:
                    piece = " " + piece
                ids += self._encoder.encode(piece)
                after_special = strip = False
        if self._n_vocab in ids:
            self._warn_of_lost(text)
            ids = [id_ for id_ in ids if id_ != self._n_vocab]
        return ids

    def _warn_of_lost(self, text: str) -> None:
        lost = [c for c in dict.fromkeys(text) if self._n_vocab in self._encoder.encode(c)]
        more = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
        warn(
            f"{self._vocabulary.file_name}: the vocabulary cannot spell {lost[0]!a} (U+{ord(lost[0]):04X}){more}: "
            "the model reads the text without it",
            TokenizerWarning,
        )

    def decode(self, ids: Iterable[int], *, special: bool = False, continuation: bool = False) -> str:
        """Return the text of ``ids``. Invalid UTF-8 becomes U+FFFD.

        Args:
            ids: token ids.
            special: include names of control tokens. By default they are omitted, so that
                ``decode(encode(text)) == text``.
            continuation: the ids continue earlier text: keep a leading space. By default it is removed, because
                encoding adds it (``add_space_prefix``).

        Raises:
            TokenizerError: an id is not in this vocabulary.
        """
        text = b"".join(self.token_bytes(token, special=special) for token in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.add_space_prefix and not continuation else text

    def _matcher(self, *kinds: TokenType) -> _TokenMatcher:
        tokens = self._vocabulary.tokens
        return _TokenMatcher({tokens[i]: i for i in reversed(self._vocabulary.of_type(*kinds)) if tokens[i]})


class _TokenMatcher:
    """Finds special tokens in text; the longest among tokens that start at the same position."""

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids
        lengths: dict[str, set[int]] = {}
        for token in ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(token_lengths, reverse=True) for start, token_lengths in lengths.items()}
        firsts = "".join(sorted({token[0] for token in ids}))
        self._candidate = re.compile(f"[{re.escape(firsts)}]") if firsts else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the ids of special tokens in ``text``, and the texts between them, which are never empty."""
        end = 0
        if self._candidate is not None:
            for match in self._candidate.finditer(text):
                start = match.start()
                token = self._longest_at(text, start) if start >= end else None
                if token is not None:
                    if start > end:
                        yield text[end:start]
                    yield self._ids[token]
                    end = start + len(token)
        if end < len(text):
            yield text[end:]

    def _longest_at(self, text: str, start: int) -> str | None:
        for prefix in (text[start : start + 2], text[start]):
            for length in self._lengths.get(prefix, ()):
                token = text[start : start + length]
                if token in self._ids:
                    return token
        return None


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text is not valid Unicode: character {error.start} is the lone surrogate "
            f"U+{ord(text[error.start]):04X}; decode the input with errors='replace'"
        ) from None
