"""The tokenizer compared with llama.cpp's test vectors and the libraries' models, and decoded again."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from localllm.errors import TokenizerError
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.pretokenizers import TokenizerWarning
from localllm.tokenizer.vocabulary import Vocabulary
from tests.helpers.data import ROOT, shared_data
from tests.helpers.vocabularies import (
    BYTE,
    BYTE_CHARACTERS,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    FakeFile,
    bpe_metadata,
    real_tokenizer,
    sentencepiece_metadata,
    spm_metadata,
    tiny_spm_pieces,
    train_sentencepiece,
)

VOCABULARIES = ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "starcoder"]

CORPUS = (
    "Once upon a time there was a little tokenizer. It's 12 years old, isn't it? THE END!\n"
    "def main(argc: int) -> None:\n    return argc ** 2  # 3,14159\n"
    "Ein schöner Tag – naïve café, Ελληνικά, русский, 漢字かな, 한국어, عربى, हिन्दी.\n"
    "\tTabs\tand   spaces,\r\nnewlines\n\n\n, emoji 🙂👩‍👩‍👧 and \u200bmarks e\u0301.\n"
) * 4


def tiny(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(FakeFile(metadata))


def vocabulary(name: str) -> Tokenizer:
    return real_tokenizer(f"vocab/ggml-vocab-{name}.gguf")


# --- real vocabularies


@pytest.mark.parametrize("name", VOCABULARIES)
def test_agrees_with_the_vectors_of_llama_cpp(name: str) -> None:
    path = shared_data(f"vocab/ggml-vocab-{name}.gguf")
    tokenizer = vocabulary(name)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (
        Path(f"{path}.out").read_text(encoding="utf-8").split("\n")
    )  # the last text, and so the last line, is empty
    expected = [[int(token) for token in line.split()] for line in lines]
    assert len(texts) == len(expected) == 47
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)
        assert tokenizer.decode(ids) == text


# SentencePiece spells a space as U+2581; NUL and surrogates are dropped as usual.
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))
wordy_text = st.lists(
    st.sampled_from(["the", " the", "  ", "\n", "\r\n", "\t", "isn't", "1234567", "é", "e\u0301", "漢字", "🙂", "\0"])
).map("".join)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_decoding_undoes_encoding(name: str) -> None:
    tokenizer = vocabulary(name)

    bytes_known = {tokenizer.token_bytes(token) for token in range(tokenizer.n_vocab)}
    missing = {byte for byte in range(256) if bytes([byte]) not in bytes_known}
    # No text has these bytes.  StarCoder lacks a few more, of unused planes of Unicode.
    assert missing - {0xC0, 0xC1, *range(0xF5, 0x100)} <= ({0xF1, 0xF2, 0xF4} if name == "starcoder" else set())

    @settings(max_examples=50)
    @given(any_text | wordy_text)
    def check(text: str) -> None:
        if not missing.isdisjoint(text.encode()):
            with pytest.warns(TokenizerWarning, match=r"cannot spell"):
                ids = tokenizer.encode(text, add_special=False)
            known = bytes(byte for byte in text.encode() if byte not in missing)
            assert b"".join(map(tokenizer.token_bytes, ids)) == known
            return
        ids = tokenizer.encode(text)
        assert all(0 <= token < tokenizer.n_vocab for token in ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text

    check()


def test_special_tokens_of_real_vocabularies() -> None:
    llama3, qwen2, llama2 = vocabulary("llama-bpe"), vocabulary("qwen2"), vocabulary("llama-spm")
    assert (llama3.model, llama3.pre, llama3.n_vocab) == ("gpt2", "llama-bpe", 128_256)
    assert (llama3.bos_id, llama3.eos_id, llama3.add_bos) == (128_000, 128_001, True)
    assert {llama3.token_text(token) for token in llama3.eog_ids} == {"<|end_of_text|>", "<|eot_id|>"}
    assert llama3.encode("<|eot_id|>", add_special=False, parse_special=True) == [128_009]
    assert llama3.decode([128_009]) == ""
    assert llama3.decode([128_009], special=True) == "<|eot_id|>"
    assert (qwen2.add_bos, qwen2.is_special(151_645), qwen2.is_special(0)) == (False, True, False)
    assert {qwen2.token_text(token) for token in qwen2.eog_ids} == {"<|endoftext|>", "<|im_end|>"}
    assert llama2.encode("") == [1]
    assert llama2.encode("<s>Hello</s> there", parse_special=True) == [1, 15_043, 2, 29_871, 727]


def test_a_word_that_looks_like_an_end_token_stays_a_word() -> None:
    # Qwen2 treats "</s>" as HTML: an ordinary token.  llama.cpp ends generation there.
    tokenizer = vocabulary("qwen2")
    assert tokenizer.token_text(128_247) == "</s>"
    assert tokenizer.decode([128_247]) == "</s>"
    assert not tokenizer.is_special(128_247)
    assert 128_247 not in tokenizer.eog_ids


def test_phi_3_swallows_white_space_after_special_tokens() -> None:
    tokenizer = vocabulary("phi-3")
    user, end = 32_010, 32_007
    assert tokenizer.token_text(user) == "<|user|>"
    plain = tokenizer.encode("Hi", add_special=False)
    marked = tokenizer.encode("<|user|>\n Hi<|end|>\n", add_special=False, parse_special=True)
    assert marked == [user, *plain, end]


@pytest.mark.parametrize(("name", "swallows"), [("Phi-3 mini", True), ("phi3", True), ("Phi 2", False)])
def test_white_space_after_special_tokens(name: str, swallows: bool) -> None:
    tokenizer = tiny({**bpe_metadata([], [("<|user|>", CONTROL), ("<s>", CONTROL)]), "general.name": name})
    texts = ["<|user|>", "a", "<s>", "Ġ", "a"] if swallows else ["<|user|>", "Ċ", "Ġ", "a", "<s>", "Ġ", "a"]
    assert tokenizer.encode("<|user|>\n a<s> a", parse_special=True) == ids_of(tokenizer, *texts)


def test_stories_agree_with_the_facts() -> None:
    ids = real_tokenizer("models/stories260K/stories260K.gguf").encode("Once upon a time")
    assert ids == [1, 403, 407, 261, 378]


def test_equal_scores_merge_from_left_to_right() -> None:
    """All scores of this file are −1000, and it has no byte tokens: unknown characters are unknown."""
    tokenizer = real_tokenizer("models/story656K/TinyStories-656K-Q8_0.gguf")
    source = json.loads(shared_data("models/story656K/tokenizer.json").read_text())
    assert source["model"]["vocab"] == {tokenizer.token_text(i): i for i in range(tokenizer.n_vocab)}
    for text in ("Once upon a time", "Lily likes her dog.", "a  b\nc"):
        assert tokenizer.encode(text) == [1, *merge_left_to_right(f"▁{text.replace(' ', '▁')}", source)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # U+6F22 is not a token; the unknown token replaces it and decodes to an empty string.
    assert tokenizer.encode("漢", add_special=False)[-1] == 0
    assert tokenizer.decode(tokenizer.encode("a漢b")) == "ab"


def merge_left_to_right(text: str, source: Any) -> list[int]:
    """Merge greedily, assuming equal scores, in the simplest way."""
    vocabulary = source["model"]["vocab"]
    parts = list(text)
    while True:
        for i in range(len(parts) - 1):
            if parts[i] + parts[i + 1] in vocabulary:
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
                break
        else:
            return [vocabulary[part] for part in parts]


# --- against the libraries' own models


def test_agrees_with_a_trained_sentencepiece_model() -> None:
    processor = train_sentencepiece(CORPUS, 420)
    tokenizer = tiny(sentencepiece_metadata(processor))

    @settings(max_examples=60)
    @given(any_text | st.lists(st.sampled_from(CORPUS.split(" "))).map(" ".join))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == processor.encode(text)
        assert tokenizer.decode(ids) == processor.decode(ids) == text

    check()


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_agrees_with_a_trained_bpe_model(ignore_merges: bool) -> None:
    reference = tokenizers.Tokenizer(tokenizers.models.BPE())
    reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, initial_alphabet=sorted(alphabet), show_progress=False)
    reference.train_from_iterator([CORPUS], trainer)
    model = json.loads(reference.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = tiny(
        bpe_metadata(
            merges,
            [("Ġtokenizer", NORMAL), ("<|endoftext|>", CONTROL)],  # no merge leads to the first
            pre="llama3" if ignore_merges else "gpt-2",
            add_bos_token=False,
        )
    )

    @settings(max_examples=60)
    @given(any_text | st.lists(st.sampled_from(CORPUS.split(" "))).map(" ".join))
    def check(text: str) -> None:
        texts = [tokenizer.token_text(token) for token in tokenizer.encode(text, add_special=False)]
        if not ignore_merges:
            assert texts == reference.encode(text).tokens
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()
    whole = tokenizer.encode(" tokenizer", add_special=False)
    assert [tokenizer.token_text(token) for token in whole] == (
        ["Ġtokenizer"] if ignore_merges else reference.encode(" tokenizer").tokens
    )


@settings(max_examples=60)
@given(st.data(), st.text("abc", min_size=1, max_size=40))
def test_merges_in_any_order_join_as_the_librarys(data: st.DataObject, text: str) -> None:
    """Also if a merge creates a pair that an earlier one joins."""
    tokens, merges = ["a", "b", "c"], list[tuple[str, str]]()
    for _ in range(data.draw(st.integers(1, 12))):
        left, right = data.draw(st.tuples(st.sampled_from(tokens), st.sampled_from(tokens)))
        if left + right not in tokens:
            tokens.append(left + right)
            merges.append((left, right))
    merges = data.draw(st.permutations(merges))
    tokenizer = tiny(bpe_metadata(merges))
    ids = {tokenizer.token_text(token): token for token in range(tokenizer.n_vocab)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
    assert tokenizer.encode(text, add_special=False) == library.encode(text).ids


# --- BOS, EOS, spaces and special tokens

WORDS = [("▁", -1.0), ("h", -2.0), ("i", -3.0), ("▁h", -4.0), ("▁hi", -5.0), ("hi", -6.0)]


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    every = [tokenizer.token_text(token) for token in range(tokenizer.n_vocab)]
    return [every.index(text) for text in texts]


@pytest.mark.parametrize(
    ("changes", "front", "back"),
    [
        ({}, ["<s>"], []),  # SentencePiece models add BOS unless the file disables it
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, ["<s>"], ["</s>"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(changes: dict[str, Any], front: list[str], back: list[str]) -> None:
    tokenizer = tiny(spm_metadata(tiny_spm_pieces(WORDS), **changes))
    assert tokenizer.encode("hi") == ids_of(tokenizer, *front, "▁hi", *back)
    assert tokenizer.encode("hi", add_special=False) == ids_of(tokenizer, "▁hi")


def test_bos_of_byte_level_models_depends_on_the_pre_tokenizer() -> None:
    assert not tiny(bpe_metadata(pre="gpt-2", bos_token_id=256)).add_bos
    assert tiny(bpe_metadata(pre="llama3", bos_token_id=256)).add_bos
    assert not tiny(bpe_metadata(pre="llama3", bos_token_id=256, add_bos_token=False)).add_bos


def test_a_text_that_starts_with_bos_gets_no_second_one() -> None:
    tokenizer = tiny(spm_metadata(tiny_spm_pieces(WORDS)))
    assert tokenizer.encode("<s>hi", parse_special=True) == ids_of(tokenizer, "<s>", "▁hi")
    assert tokenizer.encode("<s>hi").count(1) == 1  # the text's BOS is plain text


def test_the_space_in_front_is_optional() -> None:
    with_space = tiny(spm_metadata(tiny_spm_pieces(WORDS)))
    without = tiny(spm_metadata(tiny_spm_pieces(WORDS), add_space_prefix=False))
    assert without.encode("hi", add_special=False) == ids_of(without, "hi")
    assert without.decode(ids_of(without, "▁hi")) == " hi"
    assert with_space.decode(ids_of(with_space, "<s>", "▁hi")) == "hi"
    assert with_space.decode(ids_of(with_space, "▁hi"), continuation=True) == " hi"
    assert with_space.decode(with_space.encode("  hi")) == "  hi"


def test_control_tokens_are_parsed_on_request_and_user_defined_ones_always() -> None:
    special = [("<|im_end|>", CONTROL), ("<tool>", USER_DEFINED), ("<tool>x", USER_DEFINED)]
    tokenizer = tiny(bpe_metadata([], special))
    end, tool, tool_x = ids_of(tokenizer, "<|im_end|>", "<tool>", "<tool>x")
    assert end not in tokenizer.encode("a<|im_end|>")
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>")) == "a<|im_end|>"
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [end]
    assert tokenizer.encode("<tool><tool>x") == [tool, tool_x]  # the longest token at this position
    assert tokenizer.decode([tool, end, tool_x]) == "<tool><tool>x"
    assert tokenizer.is_special(end)
    assert not tokenizer.is_special(tool)
    assert tokenizer.eog_ids == {end, tool_x}  # tool_x is the file's EOS


def test_token_bytes() -> None:
    special = [("<unk>", UNKNOWN), ("<pad>", UNUSED), ("naïve", USER_DEFINED), ("<|eot_id|>", CONTROL)]
    tokenizer = tiny(bpe_metadata([("Ġ", "a")], special))
    space_a, unknown, unused, user, control = range(256, 261)
    assert tokenizer.token_bytes(space_a) == b" a"
    assert tokenizer.token_bytes(user) == "naïve".encode()
    assert [tokenizer.token_bytes(token) for token in (unknown, unused, control)] == [b"", b"", b""]
    assert tokenizer.token_bytes(control, special=True) == b"<|eot_id|>"
    assert [tokenizer.token_label(token) for token in (space_a, user, control)] == [" a", "naïve", "<|eot_id|>"]
    (half,) = (token for token in range(256) if tokenizer.token_bytes(token) == b"\xe2")
    assert tokenizer.token_label(half) == r"\xe2"
    spm = tiny(spm_metadata(tiny_spm_pieces(WORDS)))
    assert [spm.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert spm.token_bytes(ids_of(spm, "▁hi")[0]) == b" hi"


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    tokenizer = tiny(spm_metadata(tiny_spm_pieces()))
    assert tokenizer.decode([3 + 0xE2, 3 + 0x82, 3 + ord("x"), 3 + 0xFF]) == "\ufffdx\ufffd"


def test_how_vocabularies_differ() -> None:
    """Unused tokens at the end are padding and make no difference."""
    words = tiny_spm_pieces(WORDS)
    others = {
        "same": words,
        "padded": [*words, ("<pad>", 0.0, UNUSED)],
        "longer": [*words, ("more", 0.0, NORMAL)],
        "renamed": [*words[:-1], ("ho", -6.0, NORMAL)],
    }
    tokenizer = tiny(spm_metadata(words))

    def difference(metadata: dict[str, Any]) -> str | None:
        return tokenizer.difference(Vocabulary.from_gguf(FakeFile(metadata)))

    n = len(words)
    assert {name: difference(spm_metadata(pieces)) for name, pieces in others.items()} == {
        "same": None,
        "padded": None,
        "longer": f"it has {n + 1} tokens instead of {n}",
        "renamed": f"token {n - 1} is 'ho' instead of 'hi'",
    }
    assert difference(bpe_metadata()) == "its kind is 'gpt2' instead of 'llama'"


# --- end of generation


@pytest.mark.parametrize(
    "text",
    [
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<｜end▁of▁sentence｜>",
    ],
)
def test_end_tokens_are_identified_by_their_text(text: str) -> None:
    for kind in (NORMAL, USER_DEFINED, CONTROL):
        tokenizer = tiny(bpe_metadata([], [(text, kind), ("<x>", CONTROL)], eos_token_id=257))
        assert tokenizer.eog_ids == {256, 257}
        assert tokenizer.is_special(256)


def test_a_word_that_merges_lead_to_is_no_end_token() -> None:
    merges = [("[", "E"), ("[E", "O"), ("[EO", "S"), ("[EOS", "]")]
    tokenizer = tiny(bpe_metadata(merges, [("<x>", CONTROL)]))
    assert tokenizer.eog_ids == set(ids_of(tokenizer, "<x>"))
    assert not tokenizer.is_special(*ids_of(tokenizer, "[EOS]"))


def test_end_tokens_are_known_by_metadata() -> None:
    special = [(f"<{letter}>", CONTROL) for letter in "abcd"]
    tokenizer = tiny(
        bpe_metadata([], special, eos_token_id=256, eot_token_id=257, eom_token_id=258, fim_pad_token_id=259)
    )
    assert tokenizer.eog_ids == {256, 257, 258, 259}


@pytest.mark.parametrize("name", ["]<]minimax[>[", "<mm:think>", "</mm:think>", "</think>", "[TOOL_CALLS]"])
def test_tags_of_reasoning_and_calls_are_text(name: str) -> None:
    """Files may mark them as control tokens."""
    tokenizer = tiny(bpe_metadata([], [(name, CONTROL), ("<x>", CONTROL)]))
    (id_,) = tokenizer.encode(name, add_special=False)
    assert tokenizer.decode([id_]) == name
    assert len(tokenizer.encode("<x>", add_special=False)) == 3


def test_the_messages_of_gpt_oss_end_without_ending_the_answer() -> None:
    special = [(f"<|{name}|>", CONTROL) for name in ("end", "return", "call", "channel", "message")]
    tokenizer = tiny(bpe_metadata([], special, eos_token_id=257))
    assert tokenizer.eog_ids == {257, 258}
    assert tokenizer.decode(range(256, 261)) == "<|end|><|channel|><|message|>"


# --- texts and ids that cannot be translated


def test_a_lone_surrogate_is_refused() -> None:
    for tokenizer in (tiny(spm_metadata(tiny_spm_pieces())), tiny(bpe_metadata())):
        with pytest.raises(TokenizerError, match=r"character 1 is the lone surrogate U\+DC80"):
            tokenizer.encode("a\udc80b")


@pytest.mark.parametrize("token", [-1, 257, 2**70, 1.0, "a", None])
def test_ids_that_are_none_are_refused(token: Any) -> None:
    tokenizer = tiny(bpe_metadata())
    for call in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_special):
        with pytest.raises(TokenizerError, match=r"token id"):
            call(token)
    with pytest.raises(TokenizerError, match=r"token id"):
        tokenizer.decode([0, token])


def test_bytes_that_no_token_spells_are_left_out_with_a_warning() -> None:
    metadata = bpe_metadata([("a", "b")], special=[])
    tokens = metadata["tokenizer.ggml.tokens"]
    for character in ("z", BYTE_CHARACTERS[4], BYTE_CHARACTERS[0xF1]):
        tokens.remove(character)
    short = tiny({**metadata, "tokenizer.ggml.eos_token_id": 1, **types_for(tokens)})
    assert short.decode(short.encode("abc")) == "abc"
    with pytest.warns(TokenizerWarning, match=r"tiny\.gguf: the vocabulary cannot spell 'z' \(U\+007A\): the model"):
        assert short.decode(short.encode("azbz")) == "ab"
    with pytest.warns(TokenizerWarning, match=r"'\\x04' \(U\+0004\) and 1 more"):
        assert short.decode(short.encode("a\x04zb\x04")) == "ab"
    with pytest.warns(TokenizerWarning, match=r"'\\U00040000' \(U\+40000\)"):
        ids = short.encode("a\U00040000b")  # the first of its four bytes: llama.cpp also drops it
    assert b"".join(map(short.token_bytes, ids)) == b"a\x80\x80\x80b"
    with pytest.warns(TokenizerWarning):
        assert short.encode("zz\x04") == []
    no_unknown = spm_metadata([("<s>", 0, CONTROL), ("</s>", 0, CONTROL), ("a", 0, NORMAL), ("▁", 0, NORMAL)])
    for key, value in (("bos", 0), ("eos", 1), ("unknown", None)):
        no_unknown[f"tokenizer.ggml.{key}_token_id"] = value
    with pytest.warns(TokenizerWarning, match=r"cannot spell 'b'"):
        assert tiny({key: value for key, value in no_unknown.items() if value is not None}).encode("ab") == [0, 3, 2]


def test_one_text_warns_of_a_character_once() -> None:
    metadata = bpe_metadata(special=[])
    metadata["tokenizer.ggml.tokens"].remove("z")
    short = tiny({**metadata, "tokenizer.ggml.eos_token_id": 1, **types_for(metadata["tokenizer.ggml.tokens"])})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            short.encode("az z")
    assert len(told) == 1


def test_fill_in_markers_are_control_tokens_of_any_type() -> None:
    names = ("<｜fim▁begin｜>", "<fim_suffix>", "▁<MID>")
    tokenizer = tiny(bpe_metadata([], [*((name, USER_DEFINED) for name in names), ("<x>", CONTROL)]))
    for name in names:
        (token,) = tokenizer.encode(name, parse_special=True)
        assert token not in tokenizer.encode(name)
        assert tokenizer.decode(tokenizer.encode(name)) == name
        assert tokenizer.is_special(token)
        assert token not in tokenizer.eog_ids


def test_a_mask_swallows_the_white_space_before_it_in_jina_v2_and_modern_bert() -> None:
    special = [("<mask>", CONTROL), ("[MASK]", CONTROL)]
    for mask, more in ("<mask>", {"pre": "jina-v2-de"}), ("[MASK]", {"general.name": "Modern-BERT base"}):
        keys = {key: value for key, value in more.items() if key != "general.name"}
        tokenizer = tiny({**bpe_metadata([], special, **keys), **more})
        for text in (f"a \n{mask} a", f" {mask}{mask}"):
            ids = tokenizer.encode(text, parse_special=True)
            assert tokenizer.decode(ids, special=True) == text.replace(f" \n{mask}", mask).removeprefix(" ")
    assert tokenizer.decode(tokenizer.encode("a <mask>", parse_special=True), special=True) == "a <mask>"


# --- tokens of one spelling


def test_the_first_ordinary_token_of_a_spelling_is_used() -> None:
    cases: list[tuple[list[tuple[str, int]], int]] = [
        ([("ab", NORMAL), ("ab", NORMAL)], 256),
        ([("ab", CONTROL), ("ab", NORMAL)], 257),
        ([("ab", UNUSED), ("ab", USER_DEFINED), ("ab", NORMAL)], 257),
    ]
    for special, expected in cases:
        metadata = {**bpe_metadata([], special), "tokenizer.ggml.merges": ["a b"]}
        tokenizer = tiny(metadata)
        assert tokenizer.n_vocab == 256 + len(special)
        assert tokenizer.encode("ab") == [expected]
        assert [tokenizer.token_text(256 + i) for i in range(len(special))] == ["ab"] * len(special)
    twice = tiny(bpe_metadata([], [("<|im_end|>", CONTROL), ("<|im_end|>", CONTROL), ("<x>", CONTROL)]))
    assert twice.encode("<|im_end|>", parse_special=True) == [256]
    assert twice.eog_ids == {256, 257, 258}


def test_sentencepiece_takes_tokens_of_one_spelling() -> None:
    words = [
        ("▁", -1.0, NORMAL),
        ("a", -2.0, NORMAL),
        ("▁a", -3.0, NORMAL),
        ("▁a", -3.5, NORMAL),
        ("a", -4.0, CONTROL),
    ]
    also = [("<0x41>", -5.0, NORMAL), ("</s>", -6.0, NORMAL), ("", 0.0, NORMAL)]  # names of a byte and of EOS
    tokenizer = tiny(spm_metadata([*tiny_spm_pieces(), *words, *also]))
    text = "a A <0x41></s>"
    ids = tokenizer.encode(text, add_special=False)
    assert ids[0] == 261
    assert tokenizer.decode(ids) == text
    assert not {1, 2, 262, 263} & set(ids)


def test_the_name_of_a_byte_is_plain_text_even_if_bytes_lack_tokens() -> None:
    begins = ["<", "<0", "<0x", "<0x4", "<0x41"]
    words = [*((text, -float(i), NORMAL) for i, text in enumerate([*"0x41>A", *begins])), ("▁", -20.0, NORMAL)]
    tokenizer = tiny(spm_metadata([*tiny_spm_pieces()[:3], ("<0x41>", 0.0, BYTE), *words], add_space_prefix=False))
    assert tokenizer.decode([3]) == "A"
    assert tokenizer.encode("<0x41>", add_special=False) == ids_of(tokenizer, "<0x41", ">")


def types_for(tokens: list[str]) -> dict[str, Any]:
    return {"tokenizer.ggml.token_type": np.full(len(tokens), NORMAL, np.int32)}


@pytest.mark.parametrize("text", ["a", " ", "1", "!", "漢", "\n", "ab ", "🙂"])
def test_a_long_run_of_one_kind_is_still_one_text(text: str) -> None:
    # Quadratic time would not end here.
    long = text * (20_000 // len(text)) + "x"
    for tokenizer in (
        tiny(spm_metadata(tiny_spm_pieces(WORDS))),
        tiny(bpe_metadata([("a", "a"), ("Ġ", "Ġ")])),
    ):
        assert tokenizer.decode(tokenizer.encode(long)) == long


def test_only_the_library_that_is_needed_is_imported() -> None:
    script = (
        "import sys\n"
        "from localllm.tokenizer import Tokenizer\n"
        "assert not {'sentencepiece', 'tokenizers'} & set(sys.modules)\n"
        "from tests.helpers.vocabularies import *\n"
        "del sys.modules['sentencepiece']\n"
        "Tokenizer.from_gguf(FakeFile(bpe_metadata()))\n"
        "assert 'tokenizers' in sys.modules and 'sentencepiece' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
