"""BPE of plain characters (Gemma 4), Unigram (T5) and WordPiece (BERT), compared with their original libraries;
PLaMo's and RWKV's tokenizers, compared with simple formulas."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings, strategies as st

from localllm.convert.config import Config
from localllm.convert.vocabulary import vocabulary_keys
from localllm.errors import TokenizerError
from localllm.tokenizer import Tokenizer
from tests.helpers.checkpoints import bytes_field
from tests.helpers.vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, FakeFile, tokenizer_keys
from tests.localllm.tokenizer.test_tokenizer import CORPUS, any_text, wordy_text


def tiny(tokens: list[str], types: list[int], **keys: Any) -> Tokenizer:
    return Tokenizer.from_gguf(FakeFile(tokenizer_keys(tokens=tokens, token_type=np.array(types, np.int32), **keys)))


def gemma(**changes: Any) -> Tokenizer:
    """Return a vocabulary of bytes, characters and merge results, and runs of line feeds without merges."""
    merges = ["a b", "▁ ab", "é é"]
    words = ["a", "b", "▁", "é", "\n", *(merge.replace(" ", "") for merge in merges), "\n\n\n"]
    tokens = ["<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    return tiny(tokens, types, **{"model": "gemma4", "merges": merges, "bos_token_id": 0, **changes})


def test_gemmas_tokens_are_plain_characters() -> None:
    tokenizer = gemma(add_bos_token=False)  # older files set it wrongly
    text = "ab abé éé\n\n\n\n漢\n\n\nab"
    ids = tokenizer.encode(text)
    assert [tokenizer.token_text(id_) for id_ in ids] == (
        ["<bos>", "ab", "▁ab", "é", "▁", "éé", "\n", "\n", "\n", "\n", "<0xE6>", "<0xBC>", "<0xA2>", "\n\n\n", "ab"]
    )
    assert tokenizer.decode(ids) == text
    sarvam = gemma(model="gpt2", pre="sarvam-moe")
    assert [sarvam.token_text(id_) for id_ in sarvam.encode("\n\n\nab")] == ["\n", "\n", "\n", "ab"]


@settings(max_examples=60)
@given(any_text | wordy_text | st.text("ab \né", max_size=30))
def test_gemma_spells_every_text(text: str) -> None:
    tokenizer = gemma()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_white_space_alone_cuts_words() -> None:
    tokenizer = tiny(["<s>", "a", "b", "ab"], [UNKNOWN, NORMAL, NORMAL, NORMAL], model="whitespace", merges=["a b"])
    assert tokenizer.encode(" ab  ba\n") == [3, 2, 1]


# -- Unigram


def unigram(**changes: Any) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    """Train a T5-like model, and return it with the tokenizer of the converted file."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=made,
        model_type="unigram",
        vocab_size=250,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    ids = range(processor.vocab_size())
    types = [UNKNOWN if processor.is_unknown(i) else CONTROL if processor.is_control(i) else NORMAL for i in ids]
    keys = {
        "model": "t5",
        "scores": np.array([processor.get_score(i) for i in ids], np.float32),
        "unknown_token_id": 0,
        "eos_token_id": 2,
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "precompiled_charsmap": np.frombuffer(bytes_field(bytes_field(made.getvalue(), 3), 2), np.uint8),
    }
    return processor, tiny([processor.id_to_piece(i) for i in ids], types, **{**keys, **changes})


def test_agrees_with_a_trained_unigram_model() -> None:
    processor, tokenizer = unigram()

    @settings(max_examples=100)
    @given(st.lists(st.sampled_from([*CORPUS.split(" "), "  ", "ﬁ", "①", "１", "e\u0301", "\t", "𝒳"])).map(" ".join))
    def check(text: str) -> None:
        assert tokenizer.encode(text, add_special=False) == processor.encode(text)

    check()
    assert tokenizer.encode("Once") == [*processor.encode("Once"), 2]
    assert tokenizer.decode(tokenizer.encode("  Once   upon\n")) == "Once upon"


def test_what_follows_a_replaced_character_is_kept() -> None:
    """The library's map replaces a character with all its marks, and keeps the rest of the replacement."""
    processor, tokenizer = unigram()
    for text in (
        "e\u0301\u0301",
        "½\u0c46",
        "\xa0\u0651",
        "ﬁ\u0300x",
        "①\u20dd",
        "\x00a",
        "\U0010ffff2",
        "a\u0315e\u0301",
    ):
        assert tokenizer.encode(text, add_special=False) == processor.encode(text), ascii(text)


def test_sums_of_scores_are_of_double_precision() -> None:
    """llama.cpp's choice among segmentations equal up to rounding: its ids, for scores of XLM-RoBERTa."""
    pieces = [("<unk>", 0.0), ("▁", -3.92997050), ("=", -9.74633789), ("==", -13.05228329), ("=" * 16, -14.79131794)]
    tokenizer = tiny(
        [text for text, _ in pieces],
        [UNKNOWN, NORMAL, NORMAL, NORMAL, NORMAL],
        model="t5",
        scores=np.array([score for _, score in pieces], np.float32),
        unknown_token_id=0,
        add_eos_token=False,
        add_space_prefix=True,
        remove_extra_whitespaces=True,
    )
    assert tokenizer.encode("=" * 23) == [1, 2, 3, 3, 3, 4]
    assert tokenizer.encode("=" * 26) == [1, 3, 3, 3, 3, 3, 4]


@pytest.mark.parametrize("charsmap", [b"abc", b"\xff" * 8, b"\4\0\0\0" + b"\xff" * 8, b"\1\0\0\0" * 9])
def test_a_broken_map_of_characters_is_an_error(charsmap: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"tiny\.gguf: tokenizer\.ggml\.precompiled_charsmap is damaged"):
        unigram(precompiled_charsmap=np.frombuffer(charsmap, np.uint8))[1].encode("any text ① 漢")
    with pytest.raises(TokenizerError, match="precompiled_charsmap is not an array of bytes"):
        unigram(precompiled_charsmap="abc")


# -- WordPiece


@pytest.mark.parametrize("lowercase", [True, False])
def test_agrees_with_a_trained_wordpiece_model(lowercase: bool) -> None:
    reference = tokenizers.BertWordPieceTokenizer(lowercase=lowercase)
    reference.train_from_iterator([CORPUS], vocab_size=300, show_progress=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # In the spelling of llama.cpp's converter.
    tokens = [
        token if token in special else token[2:] if token.startswith("##") else f"▁{token}"
        for token, _ in sorted(reference.get_vocab().items(), key=lambda item: item[1])
    ]
    tokenizer = tiny(
        tokens,
        [CONTROL if token in special else NORMAL for token in tokens],
        model="bert",
        unknown_token_id=1,
        cls_token_id=2,
        seperator_token_id=3,
        **({} if lowercase else {"normalizer.lowercase": False}),
    )

    @settings(max_examples=100)
    @given(any_text | wordy_text | st.lists(st.sampled_from(CORPUS.split(" "))).map(" ".join))
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == [2, *reference.encode(text).ids, 3]

    check()
    assert tokenizer.decode(tokenizer.encode("there was a tokenizer")) == "there was a tokenizer"


# -- PLaMo


PLAMO_PIECES = [("a", -1.0), ("b", -1.5), ("ab", -2.5), ("aba", -3.00004), ("ba", -2.0), (" ", -2.0), (" a", -2.9)]
PLAMO_PIECES += [("漢", -1.0), ("漢漢", -2.0)]


def plamo() -> Tokenizer:
    special = [("<|plamo:unk|>", UNKNOWN), *[(f"<|plamo:{name}|>", CONTROL) for name in ("bos", "eos", "pad", "op")]]
    tokens = [*(name for name, _ in special), *(f"<0x{byte:02X}>" for byte in range(256)), *dict(PLAMO_PIECES)]
    types = [*(kind for _, kind in special), *[BYTE] * 256, *[NORMAL] * len(PLAMO_PIECES)]
    scores = np.array([0.0] * (len(tokens) - len(PLAMO_PIECES)) + [score for _, score in PLAMO_PIECES], np.float32)
    return tiny(tokens, types, model="plamo2", scores=scores)


def cheapest(text: str) -> tuple[int, list[str]]:
    """Return the cost of the best split of a text and its pieces, longest first piece among equals."""
    if not text:
        return 0, []
    pieces = [(-round(score * 1e4), piece) for piece, score in PLAMO_PIECES if text.startswith(piece)]
    pieces.sort(key=lambda entry: -len(entry[1]))
    pieces.append((10_000_000, text[0]))
    found = [(cost + rest[0], [piece, *rest[1]]) for cost, piece in pieces for rest in [cheapest(text[len(piece) :])]]
    return min(found, key=lambda entry: entry[0])


@settings(max_examples=60)
@given(st.text("ab 漢é", max_size=10))
def test_plamo_finds_the_split_with_the_best_scores(text: str) -> None:
    tokenizer = plamo()
    expected: list[str] = []
    for piece in cheapest(text)[1]:
        is_token = piece in dict(PLAMO_PIECES)
        expected += [piece] if is_token else [f"<0x{byte:02X}>" for byte in piece.encode()]
    ids = tokenizer.encode(text)
    assert [tokenizer.token_text(id_) for id_ in ids] == expected
    assert tokenizer.decode(ids) == text


def test_plamo_writes_no_control_token_for_text() -> None:
    tokenizer = plamo()
    assert not {0, 1, 2, 3, 4} & set(tokenizer.encode("a<|plamo:op|>b", parse_special=False))


# -- RWKV


RWKV_TOKENS = [b"ab", b"abc", b"bcd", b"\n\n", b"'\\", "漢".encode(), "é".encode() + b"a", b"\t\xe6"]
RWKV_FILE = "".join(
    f"{i + 1} {token if i % 2 or not token.isascii() else token.decode()!r} {len(token)}\n"
    for i, token in enumerate([*(bytes((value,)) for value in range(256)), *RWKV_TOKENS])
)


def rwkv(folder: Path) -> Tokenizer:
    folder.joinpath("rwkv_vocab_v20230424.txt").write_text(RWKV_FILE, encoding="utf-8", newline="\n")
    folder.joinpath("config.json").write_text("{}")
    keys = vocabulary_keys(folder, Config({"bos_token_id": 1, "eos_token_id": 2}), 270)
    return Tokenizer.from_gguf(FakeFile(keys))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("abcd\n'\\漢é\t\0", max_size=12))
def test_rwkv_takes_the_longest_tokens(tmp_path: Path, text: str) -> None:
    tokenizer, data, expected = rwkv(tmp_path), text.encode(), []
    while data:
        token = max((t for t in RWKV_TOKENS if data.startswith(t)), key=len, default=data[:1])
        expected.append(257 + RWKV_TOKENS.index(token) if token in RWKV_TOKENS else 1 + token[0])
        data = data[len(token) :]
    ids = tokenizer.encode(text)
    assert ids == expected
    assert tokenizer.decode(ids) == text


def test_rwkv_ends_a_turn_with_an_empty_line(tmp_path: Path) -> None:
    tokenizer = rwkv(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (0, 0, False)
    assert tokenizer.eog_ids == {0, 260}
    assert tokenizer.encode("<s>") == [1 + byte for byte in b"<s>"]


@pytest.mark.parametrize("line", ["7 'a' 2", "1 'a", "x 'a' 1", "1 3.5 1", "2 'a' 1"])
def test_a_damaged_rwkv_vocabulary_is_an_error(tmp_path: Path, line: str) -> None:
    tmp_path.joinpath("rwkv_vocab_v20230424.txt").write_text(line)
    with pytest.raises(TokenizerError, match=r"line 1 .*download it again"):
        vocabulary_keys(tmp_path, Config({}), 270)
