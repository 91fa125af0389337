"""The vocabulary of a GGUF file, read from its metadata, checked and immutable.

Keys and defaults follow the GGUF specification (``docs/gguf.md``, section "Tokenizer"). For cases that it does not
define, they follow llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from os import PathLike
from typing import Protocol

import numpy as np
import numpy.typing as npt

from localllm.errors import TokenizerError, path_text, quoted
from localllm.options.checks import as_int
from localllm.tokenizer import pretokenizers
from localllm.tokenizer.pretokenizers import PreTokenizer

SPM = "llama"
BPE = "gpt2"
UNIGRAM = "t5"
WORD_PIECE = "bert"
PLAMO = "plamo2"
RWKV = "rwkv"
_MODELS = {
    SPM: "SentencePiece",
    BPE: "BPE",
    UNIGRAM: "Unigram",
    WORD_PIECE: "WordPiece",
    PLAMO: "PLaMo",
    RWKV: "RWKV",
}
_BPE_NAMES = ("gemma4", "whitespace")  # pre-tokenizers that are also names of the model

#: Default ids of BOS, EOS and the unknown token.
_DEFAULT_IDS = {SPM: (1, 2, None), BPE: (None, None, None), UNIGRAM: (None, 1, 2), WORD_PIECE: (101, 102, 100)}
_DEFAULT_IDS |= {PLAMO: (1, 2, 0), RWKV: (None, None, None)}

_NO_ID = 0xFFFFFFFF  # written by converters for "no token"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenType(IntEnum):
    """A token's ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ORDINARY = (TokenType.UNDEFINED, TokenType.NORMAL, TokenType.USER_DEFINED)

# Tokens that end a generation, recognized by their text, because files seldom mark them (llama.cpp's list).
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>"),
    *("<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
# Markers of code-completion models. Padding or another file follows them.
_FILL_IN_END_TEXTS = (
    ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)
# Markers of the text before a gap, after it, and in it. They are control tokens, although some files call them
# normal.
_FILL_IN_TEXTS = (
    *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<PRE>", "<SUF>", "<MID>", "▁<PRE>", "▁<SUF>", "▁<MID>"),
    *("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|prefix|>", "<|suffix|>", "<|middle|>"),
    *("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
_FILL_IN_END_KEYS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
# Tags of reasoning and tool calls. They are part of the text, although some files mark them as control tokens.
_VISIBLE_TEXTS = (
    *("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"),  # gpt-oss
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),  # Gemma 4
    *("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),  # Mistral
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<|python_tag|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),  # GLM
    *("<minimax:tool_call>", "</minimax:tool_call>", "<tool_calls>", "</tool_calls>"),
    *("]<]minimax[>[", "<mm:think>", "</mm:think>"),  # MiniMax M3
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),  # DeepSeek
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "｜DSML｜"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),  # Kimi
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_start|>"),  # and LFM2
    *("<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_call:opensource>", "</tool_call:opensource>"),
    *("<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>", "</arg_value:opensource>"),
    *("<tool_sep:opensource>", "<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),  # Command R7B and A
    *("<|tools_prefix|>", "<|tools_suffix|>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
    *("<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>"),  # Solar
    *("<|tool_call|>", "<|/tool_call|>"),  # Phi 4 mini and Granite
    *("<|action_start|>", "<|plugin|>", "<|action_end|>"),  # InternLM
    *("<|message_sep|>", "<|role_sep|>"),  # GigaChat
    *("<|tool_call:end|>", "<|function_call|>", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
)


class MetadataFile(Protocol):
    """A ``GGUFFile``, or another object with a path and metadata."""

    @property
    def path(self) -> str | PathLike[str]: ...

    @property
    def metadata(self) -> Mapping[str, object]: ...


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and all tokenizer metadata. Lengths and ranges are checked."""

    file_name: str  # file name, for messages
    model: str  # ``tokenizer.ggml.model``, one of `_MODELS`; Gemma 4's tokenizer is "gpt2"
    pre: str | None  # ``tokenizer.ggml.pre``, None if missing
    tokens: list[str]  # text of each token as written in the file
    ids: dict[str, int]  # token text -> id, without empty tokens
    types: bytes  # a ``TokenType`` per token
    byte_values: dict[int, int]  # token id -> byte, for ``<0xXX>`` tokens
    scores: npt.NDArray[np.float32]  # float32 ``[n_vocab]``; higher scores merge first (SentencePiece)
    merges: dict[str, int]  # rank of each merge "left right"; lower ranks merge first (BPE)
    pre_tokenizer: PreTokenizer  # BPE
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eog_ids: frozenset[int]  # tokens that end a generation
    suppressed_ids: frozenset[int]  # tokens that no reply contains
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool  # encoding adds a leading space (not BPE)
    merge_spaces: bool  # runs of spaces become one space, and are removed at the start and the end (Unigram)
    charsmap: bytes  # replacements of characters, compiled by SentencePiece (Unigram)
    # Normalization (WordPiece)
    lowercase: bool
    strip_accents: bool
    # Tokens that remove white space before or after them
    strip_before: frozenset[int]
    strip_after: frozenset[int]

    @classmethod
    def from_gguf(cls, file: MetadataFile) -> Vocabulary:
        meta = _TokenizerMetadata(file)
        model = meta.model()
        pre = meta.text("pre")
        if model in _BPE_NAMES:
            model, pre = BPE, model
        tokens = meta.tokens()
        types = bytearray(meta.types(len(tokens)))
        if not meta.has("token_type") and model == SPM:
            _guess_types(types, tokens)
        ids, alike = _index(tokens, types)
        scores = meta.scores(len(tokens))
        pre_tokenizer = pretokenizers.DEFAULT
        merges: dict[str, int] = {}
        if model == BPE:
            pre_tokenizer = pretokenizers.PRE_TOKENIZERS.get(pre or "", pretokenizers.DEFAULT)
            merges = meta.merges(ids)
        bos, eos, unknown = _DEFAULT_IDS[model]
        # BERT files call BOS "cls" and EOS "seperator", in this spelling.
        bos = meta.token_id("cls_token_id", len(tokens), bos) if model == WORD_PIECE else bos
        eos = meta.token_id("seperator_token_id", len(tokens), eos) if model == WORD_PIECE else eos
        bos_id = meta.token_id("bos_token_id", len(tokens), bos)
        eos_id = meta.token_id("eos_token_id", len(tokens), eos)
        unk_id = meta.token_id("unknown_token_id", len(tokens), unknown)
        if unk_id is None:
            unk_id = next(iter(_of_type(types, TokenType.UNKNOWN)), None)
        add_bos = meta.flag("add_bos_token", model in (SPM, WORD_PIECE) or pre_tokenizer.add_bos)
        add_bos |= pre_tokenizer is pretokenizers.GEMMA4  # wrongly false in older files
        add_eos = meta.flag("add_eos_token", model in (UNIGRAM, WORD_PIECE))
        lowercase = meta.flag("normalizer.lowercase", True)
        for name, is_added, token in (("bos", add_bos, bos_id), ("eos", add_eos, eos_id)):
            if is_added and token is None:
                why = f"texts need a {name.upper()} token, but tokenizer.ggml.{name}_token_id is missing"
                raise TokenizerError(f"{meta.file_name}: {why}; convert the model again")
        eog_ids = _mark_special(meta, ids, alike, types, merges, eos_id)
        return cls(
            file_name=meta.file_name,
            model=model,
            pre=pre,
            tokens=tokens,
            ids=ids,
            types=bytes(types),
            byte_values=_byte_values(tokens, types, meta.file_name),
            scores=scores,
            merges=merges,
            pre_tokenizer=pre_tokenizer,
            bos_id=bos_id,
            eos_id=eos_id,
            unk_id=unk_id,
            eog_ids=eog_ids,
            suppressed_ids=frozenset(meta.token_ids("suppress_tokens", len(tokens), skips_others=True)),
            add_bos=add_bos,
            add_eos=add_eos,
            add_space_prefix=meta.flag("add_space_prefix", model != UNIGRAM) and model not in (BPE, PLAMO, RWKV),
            merge_spaces=meta.flag("remove_extra_whitespaces", False),
            charsmap=meta.bytes("precompiled_charsmap"),
            lowercase=lowercase,
            strip_accents=meta.flag("normalizer.strip_accents", lowercase),
            strip_before=_strip_before(meta, pre, ids),
            strip_after=_strip_after(meta, tokens, types),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def of_type(self, *kinds: TokenType) -> list[int]:
        return _of_type(self.types, *kinds)


class _TokenizerMetadata:
    """Reads ``tokenizer.ggml.*`` keys with their types. Errors name the file and the key."""

    def __init__(self, file: MetadataFile) -> None:
        self.file_name = path_text(file.path)
        self._values = file.metadata

    def has(self, name: str) -> bool:
        return f"tokenizer.ggml.{name}" in self._values

    def _get(self, name: str) -> object:
        return self._values.get(f"tokenizer.ggml.{name}")

    def _wrong(self, name: str, expected: str) -> TokenizerError:
        return TokenizerError(f"{self.file_name}: tokenizer.ggml.{name} is not {expected}; the file is damaged")

    def general_name(self) -> str:
        name = self._values.get("general.name")
        return name if isinstance(name, str) else ""

    def model(self) -> str:
        value = self._get("model")
        if value is None:
            raise TokenizerError(f"{self.file_name}: the file has no tokenizer (tokenizer.ggml.model is missing)")
        if not isinstance(value, str) or value not in (*_MODELS, *_BPE_NAMES):
            supported = ", ".join(f"{name!r} ({description})" for name, description in _MODELS.items())
            raise TokenizerError(f"{self.file_name}: the tokenizer {quoted(value)} is not supported; {supported} are")
        return value

    def text(self, name: str) -> str | None:
        value = self._get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def bytes(self, name: str) -> bytes:
        value = self._get(name)
        if value is None:
            return b""
        if not isinstance(value, np.ndarray) or value.dtype not in (np.uint8, np.int8):
            raise self._wrong(name, "an array of bytes")
        return value.tobytes()

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def token_id(self, name: str, n_vocab: int, default: int | None) -> int | None:
        """Return an id below ``n_vocab``. Without the key: the default, or None if that is not below ``n_vocab``."""
        value = self._get(name)
        if value is None:
            return default if default is not None and default < n_vocab else None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "an integer")
        if value in (_NO_ID, -1):
            return None
        if not 0 <= value < n_vocab:
            raise TokenizerError(f"{self.file_name}: tokenizer.ggml.{name} is {value} but there are {n_vocab} tokens")
        return value

    def token_ids(self, name: str, n_vocab: int, *, skips_others: bool = False) -> list[int]:
        """Return a list of ids below ``n_vocab``; empty if the key is missing.

        ``skips_others``: whether other ids are omitted instead of refused.
        """
        value = self._get(name)
        values = value.tolist() if isinstance(value, np.ndarray) else value
        if values is None:
            return []
        if skips_others and isinstance(values, list):
            values = [id_ for id_ in values if type(id_) is not int or 0 <= id_ < n_vocab]
        if not isinstance(values, list) or any(type(i) is not int or not 0 <= i < n_vocab for i in values):
            raise self._wrong(name, f"an array of ids of {n_vocab} tokens")
        return values

    def _strings(self, name: str) -> list[str]:
        value = self._get(name)
        if value is None:
            raise TokenizerError(f"{self.file_name}: the vocabulary lacks its tokenizer.ggml.{name}")
        if isinstance(value, str | bytes | np.ndarray) or not isinstance(value, Sequence):
            raise self._wrong(name, "an array of strings")
        try:
            strings = list(value)
            "".join(strings).encode()
        except UnicodeError:
            raise TokenizerError(
                f"{self.file_name}: tokenizer.ggml.{name} holds a string that is not UTF-8"
            ) from None
        except TypeError:
            raise self._wrong(name, "an array of strings") from None
        return strings

    def _numbers(self, name: str, n_vocab: int) -> npt.NDArray[np.generic] | None:
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
            raise self._wrong(name, "an array of numbers")
        if value.shape != (n_vocab,):
            raise TokenizerError(
                f"{self.file_name}: {n_vocab} tokens but {value.size} entries in tokenizer.ggml.{name}"
            )
        return value

    def tokens(self) -> list[str]:
        tokens = self._strings("tokens")
        if not tokens:
            raise TokenizerError(f"{self.file_name}: the vocabulary is empty (tokenizer.ggml.tokens)")
        return tokens

    def types(self, n_vocab: int) -> Iterable[int]:
        types = self._numbers("token_type", n_vocab)
        if types is None:
            return [TokenType.NORMAL] * n_vocab
        if types.dtype.kind == "f":
            raise self._wrong("token_type", "an array of integers")
        integers = types.astype(np.int64)
        bad = np.flatnonzero((integers < 0) | (integers > max(TokenType)))
        if bad.size:
            first = int(bad[0])
            raise TokenizerError(f"{self.file_name}: token {first} is of the unknown type {integers[first]}")
        return integers.astype(np.uint8).tobytes()

    def scores(self, n_vocab: int) -> npt.NDArray[np.float32]:
        """Return one score per token; 0 if the file has no scores, so that merges go from left to right."""
        scores = self._numbers("scores", n_vocab)
        if scores is None:
            return np.zeros(n_vocab, np.float32)
        with np.errstate(over="ignore"):
            floats = scores.astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(floats))
        if bad.size:
            raise TokenizerError(f"{self.file_name}: the score of token {bad[0]} is {floats[bad[0]]}")
        return floats

    def merges(self, ids: Mapping[str, int]) -> dict[str, int]:
        """Return the rank of each merge "left right"."""
        merges = self._strings("merges")
        text = "\0".join(merges)
        marks = np.frombuffer(text.encode(), np.uint8)
        marks = marks[(marks == 0) | (marks == ord(" "))]
        is_pairs = len(marks) == 2 * len(merges) - 1 and not marks[1::2].any() and bool(marks[::2].all())
        has_empty_half = text.strip(" ") != text or " \0" in text or "\0 " in text
        if has_empty_half or not is_pairs or not all(map(ids.__contains__, text.replace(" ", "").split("\0"))):
            self._check_merges(merges, ids)
        return dict(zip(merges, range(len(merges)), strict=True))

    def _check_merges(self, merges: Sequence[str], ids: Mapping[str, int]) -> None:
        for index, merge in enumerate(merges):
            pair = merge.split(" ")
            if len(pair) != 2:
                raise TokenizerError(
                    f"{self.file_name}: merge {index}, {quoted(merge)}, is not two tokens and a space"
                )
            for token in (*pair, "".join(pair)):
                if token not in ids:
                    fault = f"merge {index} ({quoted(pair[0])} {quoted(pair[1])}) needs the token {quoted(token)}"
                    raise TokenizerError(f"{self.file_name}: {fault}, which the vocabulary does not have")


def _index(tokens: Sequence[str], types: bytes | bytearray) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return the id of each non-empty token text, and all ids of texts that several tokens share.

    A shared text gets the first ordinary token, or the first token if there is no ordinary one.
    """
    ids = dict(zip(reversed(tokens), reversed(range(len(tokens))), strict=True))
    n_empty = tokens.count("")
    ids.pop("", None)
    alike: dict[str, list[int]] = {}
    if len(ids) + n_empty < len(tokens):
        for index, token in enumerate(tokens):
            if token and ids[token] != index:
                alike.setdefault(token, [ids[token]]).append(index)
        for token, indices in alike.items():
            ids[token] = min(indices, key=lambda index: (types[index] not in _ORDINARY, index))
    return ids, alike


def _guess_types(types: bytearray, tokens: Sequence[str]) -> None:
    """Set the types of special tokens in a SentencePiece file without ``token_type``."""
    for index, token in enumerate(tokens):
        if _BYTE_TOKEN.fullmatch(token):
            types[index] = TokenType.BYTE
    for text, token_type in (("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)):
        if text in tokens:
            types[tokens.index(text)] = token_type


def _of_type(types: bytes | bytearray, *kinds: TokenType) -> list[int]:
    ids: list[int] = np.flatnonzero(np.isin(np.frombuffer(types, np.uint8), kinds)).tolist()
    return ids


def _byte_values(tokens: Sequence[str], types: bytes | bytearray, file_name: str) -> dict[int, int]:
    values = {}
    for index in _of_type(types, TokenType.BYTE):
        match = _BYTE_TOKEN.fullmatch(tokens[index])
        if match is None:
            fault = f"token {index} is called a byte but reads {quoted(tokens[index])}"
            raise TokenizerError(f"{file_name}: {fault}, not <0x00> to <0xFF>")
        values[index] = int(match[1], 16)
    return values


def _mark_special(
    meta: _TokenizerMetadata,
    ids: Mapping[str, int],
    alike: Mapping[str, list[int]],
    types: bytearray,
    merges: Iterable[str],
    eos_id: int | None,
) -> frozenset[int]:
    """Find the end-of-generation tokens and correct the types of tokens that files are known to get wrong."""

    def spelled(*texts: str) -> list[int]:
        return [id_ for text in texts for id_ in alike.get(text) or ([ids[text]] if text in ids else [])]

    end_ids = spelled(*END_TEXTS)
    for key, texts in zip(_FILL_IN_END_KEYS, _FILL_IN_END_TEXTS, strict=True):
        by_text = next(iter(spelled(*texts)), None)
        if (token := meta.token_id(key, len(types), by_text)) is not None:
            end_ids.append(token)
    around = spelled(*_FILL_IN_TEXTS)
    ordinary = _ordinary_words((*end_ids, *around), ids, types, merges)
    ends = set(end_ids) - ordinary
    for token in ends.union(around) - ordinary:
        types[token] = TokenType.CONTROL
    for token in spelled(*_VISIBLE_TEXTS):
        if types[token] == TokenType.CONTROL:
            types[token] = TokenType.USER_DEFINED
    if _ends_message_only(ids):
        for token in spelled("<|end|>"):
            ends.discard(token)
            types[token] = TokenType.USER_DEFINED
    metadata_ids = [meta.token_id(key, len(types), None) for key in ("eot_token_id", "eom_token_id")]
    ends.update(token for token in (*metadata_ids, eos_id) if token is not None)
    ends.update(meta.token_ids("eos_token_ids", len(types)))
    # Llama's old EOS also ends generations of fine-tuned models with another EOS. As a normal token it is HTML.
    ends.update(token for token in spelled("</s>") if types[token] == TokenType.CONTROL)
    return frozenset(ends)


def _ordinary_words(
    candidates: Iterable[int], ids: Mapping[str, int], types: bytearray, merges: Iterable[str]
) -> set[int]:
    """Return the ids in ``candidates`` that merges can produce: ordinary words that look like control tokens."""
    normal = {token for token in candidates if types[token] == TokenType.NORMAL}
    joined = (merge.replace(" ", "") for merge in (merges if normal else ()))
    return {ids[token] for token in joined if ids.get(token) in normal}


def _ends_message_only(ids: Mapping[str, int]) -> bool:
    """Return whether ``<|end|>`` ends one of several messages of an answer (gpt-oss, Solar), not the answer."""
    gpt_oss = "<|return|>" in ids and "<|call|>" in ids
    solar = "<|flush|>" in ids and ("<|calls|>" in ids or "<|call|>" in ids)
    return "<|end|>" in ids and (gpt_oss or solar)


def _strip_before(meta: _TokenizerMetadata, pre: str | None, ids: Mapping[str, int]) -> frozenset[int]:
    """Return tokens that remove white space before them: the masks of Jina v2 and ModernBERT, as in training."""
    jina = pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code")
    mask = "<mask>" if jina else "[MASK]" if "modern-bert" in meta.general_name().lower() else ""
    return frozenset([ids[mask]] if mask in ids else [])


def _strip_after(meta: _TokenizerMetadata, tokens: Sequence[str], types: bytearray) -> frozenset[int]:
    """Return Phi-3's special tokens, which remove white space after them, as in training. GGUF lacks such a key."""
    name = meta.general_name().lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    keep = ("<unk>", "<s>", "<|endoftext|>")
    special = _of_type(types, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    return frozenset(token for token in special if tokens[token] not in keep)


def as_token_id(value: object, n_vocab: int) -> int:
    """Return ``value`` as an int. Raises a `TokenizerError` if it is not a token id."""
    token = as_int(value)
    if token is None:
        raise TokenizerError(f"a token id must be an integer, not {quoted(value)}")
    if not 0 <= token < n_vocab:
        raise TokenizerError(f"{token} is not a token id: the vocabulary has {n_vocab} tokens")
    return token
