"""Division of text into words for each pre-tokenizer.

Pre-tokenizers with available vocabularies (gpt-2, llama-bpe, qwen2, starcoder) are tested with them in
test_tokenizer.  Here each rule has an example, and rewritten patterns are compared with their originals.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from localllm.tokenizer import encoders
from localllm.tokenizer.encoders import cuts_words, text_segments, word_splitter
from localllm.tokenizer.pretokenizers import PRE_TOKENIZERS

KINDS = {id(kind): name for name, kind in PRE_TOKENIZERS.items()}  # one name for each


def words(name: str, text: str) -> list[str]:
    return [word for word, _ in word_splitter(PRE_TOKENIZERS[name]).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(KINDS.values()))
def test_every_kind_compiles_and_loses_nothing(name: str) -> None:
    splitter = word_splitter(PRE_TOKENIZERS[name])

    @settings(max_examples=15)
    @given(st.text(st.characters(exclude_categories=["Cs"])) | st.text(" \n\r\t'a9!漢e\u0301_", max_size=30))
    def check(text: str) -> None:
        assert "".join(word for word, _ in splitter.pre_tokenize_str(text)) == text

    check()


@pytest.mark.parametrize("name", sorted(KINDS.values()))
def test_the_words_of_a_long_text_are_those_of_its_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    splitter = word_splitter(PRE_TOKENIZERS[name])
    monkeypatch.setattr(encoders, "_PART", 3)
    n_parts = 0
    letters = "aZ  \n\n\r\t'9½²!,漢字\u0e01e\u0301ßı_/"

    @settings(max_examples=100)
    @given(st.lists(st.sampled_from(letters), max_size=30).map("".join) | st.text(max_size=30))
    def check(text: str) -> None:
        nonlocal n_parts
        text = text.encode(errors="replace").decode() + "b c\nd"
        parts = list(text_segments(text))
        assert "".join(parts) == text
        n_parts = max(n_parts, len(parts))
        if cuts_words(splitter):
            assert [word for part in parts for word in words(name, part)] == words(name, text)

    check()
    assert n_parts > 2
    assert cuts_words(splitter) or len(words(name, "a b c")) == 1 or PRE_TOKENIZERS[name].space != " "


def test_a_run_without_the_end_of_a_word_is_cut_at_last() -> None:
    text = "x" * 1_000_000 + " b"
    parts = list(text_segments(text))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= encoders._LONGEST_WORD


# The names of public models' GGUF files.
PUBLISHED = """
    default llama3 llama-v3 llama-bpe falcon3 deepseek-llm deepseek-coder deepseek-v3 falcon mpt
    starcoder gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe
    refact command-r qwen2 qwen35 deepseek-r1-qwen stablelm2 olmo dbrx smaug-bpe poro-chat glm4
    chatglm-bpe viking jais tekken pixtral smollm codeshell bloom gpt3-finnish exaone exaone4
    exaone-moe chameleon minerva-7b megrez gpt-4o llama4 superbpe trillion granite-docling
    bailingmoe bailingmoe2 llada-moe seed-coder a.x-4.0 mellum hunyuan hunyuan-dense kimi-k2 grok-2
    afmoe minimax-m2 lfm2 midm-2.0 solar-open youtu
"""


def test_published_names_are_known() -> None:
    assert set(PUBLISHED.split()) <= PRE_TOKENIZERS.keys()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # contractions: capitals too in Llama 3, small letters only in GPT-2
        ("llama3", "I'LL don't", ["I", "'LL", " don", "'t"]),
        ("gpt-2", "I'LL don't", ["I", "'", "LL", " don", "'t"]),
        # digits: threes from the left, single digits, all, threes after all
        ("llama3", "x12345", ["x", "123", "45"]),
        ("qwen2", "x12345", ["x", "1", "2", "3", "4", "5"]),
        ("gpt-2", "x12345", ["x", "12345"]),
        ("starcoder", "x 12345", ["x", " ", "1", "2", "3", "4", "5"]),
        ("falcon", "x 12345!", ["x", " ", "123", "45", "!"]),
        ("default", "12345", ["123", "45"]),
        ("deepseek-llm", "x 12345", ["x", " ", "12345"]),
        ("deepseek-v3", "x 12345", ["x", " ", "123", "45"]),
        # and threes from the right
        ("superbpe", "1234567 12", ["1", "234", "567", " ", "12"]),
        ("afmoe", "1234567 12", ["1", "234", "567", " ", "12"]),
        ("tiny_aya", "1234567 12", ["1", "234", "567", " ", "12"]),
        ("tiny_aya", "1234567x", ["123", "456", "7", "x"]),
        # white space
        ("llama3", "a   b \n\n c", ["a", "  ", " b", " \n\n", " c"]),
        ("gpt-2", "a   b \n\n c", ["a", "  ", " b", " \n\n", " c"]),
        ("bailingmoe", "a \n\n\nb", ["a", " \n\n\n", "b"]),
        ("jais-2", " " * 6 + "a", ["    ", " ", " a"]),
        ("chameleon", "a     b", ["a", "    ", " b"]),
        ("laguna", "a\n\nb", ["a", "\n\n", "b"]),
        # symbols and letters
        ("llama3", "f(x)!!\nx", ["f", "(x", ")!!\n", "x"]),
        ("seed-coder", "x)!!\nx", ["x", ")!!", "\n", "x"]),
        ("deepseek-v3", "a.bc d", ["a", ".bc", " d"]),
        ("deepseek-coder", "ab, cd漢字", ["ab", ",", " cd", "漢字"]),
        ("deepseek-llm", "ab, cd漢字", ["ab", ",", " cd", "漢字"]),
        ("bloom", "Hi, du (x)", ["Hi", ",", " du", " (", "x", ")"]),
        # capitals start a word
        ("gpt-4o", "camelCase HTMLText it's", ["camel", "Case", " HTMLText", " it's"]),
        ("tekken", "camelCase it's", ["camel", "Case", " it", "'s"]),
        ("gpt-4o", "a//\n/b", ["a", "//\n/", "b"]),
        # combining marks join their letters, or not
        ("qwen35", "e\u0301a", ["e\u0301a"]),
        ("qwen2", "e\u0301a", ["e", "\u0301a"]),
        # Kimi: each Han character is a separate word
        ("kimi-k2", "ab漢字cd", ["ab", "漢字", "cd"]),
        ("youtu", "ab漢字，。cd", ["ab", "漢字", "，。", "cd"]),
        # words may span spaces
        ("superbpe", "by the way", ["by the way"]),
        ("exaone-moe", "by the way!", ["by the way", "!"]),
    ],
)
def test_words_are_cut_as_each_kind_says(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


def cut(text: str, *patterns: str) -> list[str]:
    """Apply a rule with Python's regular expressions: matches, including empty ones, and gaps."""
    pieces = [text] if text else []
    for pattern in patterns:
        cuts: list[str] = []
        for piece in pieces:
            marks = {0, len(piece), *(end for match in re.finditer(pattern, piece) for end in match.span())}
            places = sorted(marks)
            cuts += [piece[a:b] for a, b in pairwise(places)]
        pieces = cuts
    return pieces


@settings(max_examples=120)
@given(st.text("0123 a.,", max_size=24))
def test_linear_digit_groups_cut_where_the_original_does(text: str) -> None:
    assert words("superbpe", text) == cut(text, r"\d+", r"(?=(\d{3})+(?!\d))")
    aya = [word for word in words("tiny_aya", text) if word[0].isdigit()]
    # The next pattern splits the remaining numbers, which were not grouped by three from the left.
    grouped = cut(text, r"\d{1,3}(?=(?:\d{3})*\b)", r"\d{1,3}")
    assert aya == [word for word in grouped if word[0].isdigit()]


@settings(max_examples=100)
@given(st.text(" \ta,", max_size=12))
def test_trailing_spaces_of_deepseek_llm_are_one_word(text: str) -> None:
    # The gaps between words are spaces; the pattern for trailing spaces must not split them.
    assert words("deepseek-llm", text) == cut(text, r"\s?[a]+", r"\s?[,]+", r"\s+$")
