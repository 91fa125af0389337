"""Incomplete or corrupt vocabularies: a TokenizerError with the reason, or the right default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from localllm.errors import TokenizerError
from localllm.gguf import GGUFFile
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.pretokenizers import TokenizerWarning
from tests.helpers.gguf_writer import write_gguf
from tests.helpers.vocabularies import (
    BYTE,
    BYTE_TOKENS,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    FakeFile,
    bpe_metadata,
    spm_metadata,
    tiny_spm_pieces,
    tokenizer_keys,
)

SPM = spm_metadata(tiny_spm_pieces([("▁a", -1.0), ("a", -2.0), ("▁", -3.0)]))
BPE = bpe_metadata([("a", "b"), ("ab", "c")])


def without(metadata: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in tokenizer_keys(**dict.fromkeys(names))}


def changed(metadata: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**metadata, **tokenizer_keys(**values)}


def tokens_of(metadata: dict[str, Any]) -> list[str]:
    return list(metadata["tokenizer.ggml.tokens"])


def replaced(metadata: dict[str, Any], index: int, token: str) -> dict[str, Any]:
    tokens = tokens_of(metadata)
    tokens[index] = token
    return changed(metadata, tokens=tokens)


def with_type(metadata: dict[str, Any], index: int, kind: int) -> dict[str, Any]:
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[index] = kind
    return changed(metadata, token_type=types)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": (without(SPM, "model"), "the file has no tokenizer"),
    "unsupported model": (changed(SPM, model="rwkv9"), "'rwkv9' is not supported; 'llama'.*'gpt2'"),
    "model no string": (changed(SPM, model=3), "the tokenizer 3 is not supported"),
    "pre no string": (changed(BPE, pre=3), "pre is not a string"),
    "no tokens": (without(SPM, "tokens"), "lacks its tokenizer.ggml.tokens"),
    "empty vocabulary": (changed(SPM, tokens=[]), "vocabulary is empty"),
    "tokens no array": (changed(SPM, tokens="abc"), "tokens is not an array of strings"),
    "tokens are numbers": (changed(SPM, tokens=np.arange(3)), "tokens is not an array of strings"),
    "tokens mixed": (changed(SPM, tokens=["a", 1]), "tokens is not an array of strings"),
    "invalid unicode": (replaced(SPM, 260, "a\udcff"), "tokens holds a string that is not UTF-8"),
    "too few scores": (changed(SPM, scores=np.zeros(5, np.float32)), "262 tokens but 5 entries in .*scores"),
    "too many types": (changed(BPE, token_type=np.ones(999, np.int32)), "259 tokens but 999 entries"),
    "scores no array": (changed(SPM, scores=1.0), "scores is not an array of numbers"),
    "scores text": (changed(SPM, scores=["a"] * 262), "scores is not an array of numbers"),
    "NaN score": (changed(SPM, scores=np.full(262, np.nan, np.float32)), "score of token 0 is nan"),
    "infinite score": (changed(SPM, scores=np.full(262, -np.inf)), "score of token 0 is -inf"),
    "score beyond float32": (changed(SPM, scores=np.full(262, 1e300)), "score of token 0 is inf"),
    "unknown type": (with_type(SPM, 7, 7), "token 7 is of the unknown type 7"),
    "negative type": (with_type(SPM, 7, -1), "token 7 is of the unknown type -1"),
    "types are floats": (
        changed(SPM, token_type=np.ones(262, np.float32)),
        "token_type is not an array of int",
    ),
    "BOS out of range": (changed(SPM, bos_token_id=262), "bos_token_id is 262 but there are 262"),
    "EOS far out of range": (changed(BPE, eos_token_id=2**64 - 1), "eos_token_id is 18446744073709551615"),
    "BOS no integer": (changed(SPM, bos_token_id=1.0), "bos_token_id is not an integer"),
    "BOS a flag": (changed(SPM, bos_token_id=True), "bos_token_id is not an integer"),
    "end of turn out of range": (changed(BPE, eot_token_id=-5), "eot_token_id is -5"),
    "BOS wanted but missing": (changed(BPE, add_bos_token=True), "BOS token, but .*bos_token_id is missing"),
    "EOS wanted but missing": (changed(without(BPE, "eos_token_id"), add_eos_token=True), "EOS token, but"),
    "flag no flag": (changed(SPM, add_bos_token=1), "add_bos_token is not true or false"),
    "bad byte": (replaced(SPM, 10, "<0x-1>"), "token 10 is called a byte but reads '<0x-1>'"),
    "long byte": (replaced(SPM, 10, "<0x100>"), "token 10 is called a byte"),
    "no merges": (without(BPE, "merges"), "lacks its tokenizer.ggml.merges"),
    "merge of one": (changed(BPE, merges=["a b", "ab"]), "merge 1, 'ab', is not two tokens"),
    "merge of three": (changed(BPE, merges=["a b c"]), "merge 0, 'a b c', is not two tokens"),
    "empty merge": (changed(BPE, merges=[""]), "merge 0, '', is not two tokens"),
    "merge with an empty half": (changed(BPE, merges=[" a"]), "merge 0 .* needs the token ''"),
    "merge of no token": (changed(BPE, merges=["a b", "x zz"]), "merge 1 .* needs the token 'zz'"),
    "merge into no token": (changed(BPE, merges=["x y"]), "merge 0 .* needs the token 'xy'"),
    "NUL in a token": (replaced(SPM, 260, "a\0b"), "sentencepiece does not accept"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_broken_is_named(name: str) -> None:
    metadata, words = BAD[name]
    with pytest.raises(TokenizerError, match=words) as caught:
        Tokenizer.from_gguf(FakeFile(metadata, path="some/model.gguf"))
    assert str(caught.value).startswith("some/model.gguf: ")
    assert "\n" not in str(caught.value)


def test_an_unknown_pre_tokenizer_warns_by_name_and_falls_back() -> None:
    with pytest.warns(TokenizerWarning, match=r"tiny\.gguf uses the unknown pre-tokenizer 'mystery'"):
        unknown = Tokenizer.from_gguf(FakeFile(changed(BPE, pre="mystery")))
    with pytest.warns(TokenizerWarning, match=r"names no pre-tokenizer"):
        missing = Tokenizer.from_gguf(FakeFile(without(BPE, "pre")))
    default = Tokenizer.from_gguf(FakeFile(changed(BPE, pre="default")))
    text = "abc 12345 'll!?"
    assert unknown.encode(text) == missing.encode(text) == default.encode(text)
    assert unknown.pre == "mystery"


def test_ids_written_as_minus_one_mean_none() -> None:
    tokenizer = Tokenizer.from_gguf(FakeFile(changed(BPE, bos_token_id=2**32 - 1, eos_token_id=-1)))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


def test_a_sentencepiece_file_without_types_is_understood() -> None:
    tokenizer = Tokenizer.from_gguf(FakeFile(without(SPM, "token_type", "bos_token_id", "unknown_token_id")))
    typed = Tokenizer.from_gguf(FakeFile(SPM))
    for text in ("a", "é\n", "<s>"):
        assert tokenizer.encode(text) == typed.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.is_special(1)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


def test_a_sentencepiece_file_without_scores_merges_from_left_to_right() -> None:
    pieces = tiny_spm_pieces([(text, 0.0) for text in ("▁", "a", "b", "ab", "ba")])
    tokenizer = Tokenizer.from_gguf(FakeFile(without(spm_metadata(pieces), "scores")))
    assert [tokenizer.token_text(token) for token in tokenizer.encode("aba")] == ["<s>", "▁", "ab", "a"]


def test_empty_and_unused_tokens_are_padding() -> None:
    for metadata in (
        spm_metadata([*tiny_spm_pieces([("▁", 0.0)]), ("", 0, UNUSED), ("", 0, NORMAL), ("<pad>", 0, UNUSED)]),
        bpe_metadata([], [("", UNUSED), ("", NORMAL), ("<pad>", UNUSED)]),
    ):
        tokenizer = Tokenizer.from_gguf(FakeFile(metadata))
        n = tokenizer.n_vocab
        assert tokenizer.decode(range(n - 3, n)) == ""
        assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def test_an_unused_token_is_never_chosen() -> None:
    words = [("▁", -1.0), ("h", -2.0), ("i", -3.0), ("▁h", -4.0)]
    tokenizer = Tokenizer.from_gguf(FakeFile(spm_metadata([*tiny_spm_pieces(words), ("▁hi", -5.0, UNUSED)])))
    assert [tokenizer.token_text(token) for token in tokenizer.encode("hi")] == ["<s>", "▁h", "i"]


def test_bytes_may_be_spelled_small_and_twice() -> None:
    small = [(token.lower(), 0.0, BYTE) for token in BYTE_TOKENS]
    pieces = [
        ("<unk>", 0.0, UNKNOWN),
        ("<s>", 0.0, CONTROL),
        ("</s>", 0.0, CONTROL),
        *small,
        ("▁", 0.0, NORMAL),
        ("<0xE9>", 0.0, BYTE),
    ]
    tokenizer = Tokenizer.from_gguf(FakeFile(spm_metadata(pieces)))
    assert tokenizer.decode(tokenizer.encode("é 漢")) == "é 漢"
    assert tokenizer.token_bytes(len(pieces) - 1) == b"\xe9"


def test_some_bytes_are_not_enough_to_fall_back_on() -> None:
    pieces = tiny_spm_pieces([("▁", 0.0), ("a", 0.0)])
    del pieces[3 + 0x41]
    tokenizer = Tokenizer.from_gguf(FakeFile(spm_metadata(pieces)))
    assert [tokenizer.token_text(token) for token in tokenizer.encode("aé")] == ["<s>", "▁", "a", "<unk>"]


def test_reads_what_the_gguf_package_writes(tmp_path: Any) -> None:
    for metadata in (SPM, BPE):
        path = write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama", **metadata})
        with GGUFFile.open(path) as file:
            tokenizer = Tokenizer.from_gguf(file)
        fake = Tokenizer.from_gguf(FakeFile(metadata))
        assert tokenizer.encode("abc é") == fake.encode("abc é")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.just(2**32 - 1),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.text(max_size=3), max_size=4),
    st.lists(st.integers(-1, 7), max_size=4).map(np.array),
    st.just(np.zeros(262, np.float32)),
    st.just(np.zeros(259, np.int32)),
)


@pytest.mark.filterwarnings("ignore::localllm.tokenizer.pretokenizers.TokenizerWarning")
@settings(max_examples=100)
@given(
    st.sampled_from([SPM, BPE]),
    st.dictionaries(st.sampled_from([key.split(".")[-1] for key in {**SPM, **BPE}]), VALUES, max_size=3),
    st.lists(st.tuples(st.integers(0, 258), st.text(max_size=8)), max_size=3),
)
def test_whatever_the_file_holds_it_works_or_is_refused(
    base: dict[str, Any], changes: dict[str, Any], new_tokens: list[tuple[int, str]]
) -> None:
    metadata = base
    for index, token in new_tokens:
        metadata = replaced(metadata, index, token)
    metadata = {key: value for key, value in changed(metadata, **changes).items() if value is not None}
    try:
        tokenizer = Tokenizer.from_gguf(FakeFile(metadata))
        ids = tokenizer.encode("ab c é<s>", parse_special=True)
    except TokenizerError:
        return
    assert all(0 <= token < tokenizer.n_vocab for token in ids)
    assert isinstance(tokenizer.decode(range(tokenizer.n_vocab), special=True), str)
