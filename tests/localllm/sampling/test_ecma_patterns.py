"""Patterns of JSON schemas in JavaScript's syntax: their matches, and generated texts that satisfy them."""

from __future__ import annotations

import re

import pytest

from localllm.errors import GrammarError
from localllm.options.declared import Sampling
from localllm.sampling.ecma_patterns import from_ecma
from localllm.sampling.grammar import check_grammar
from localllm.sampling.json_schema import _is_enforced, enforceable_schema

#: Patterns, with matching and other texts (checked with node).
PATTERNS = [
    (r"^[^]{2}$", ["a\n", "]]"], ["a", "abc"]),
    (r"^a[^]b$", ["a]b", "a\nb"], ["ab", "a]]b"]),
    (r"^[^]a]$", ["xa]", "]a]"], ["x", "b"]),
    (r"^\cJ$", ["\n"], ["J", "cJ", r"\cJ"]),
    (r"^\cj[\cA]$", ["\n\x01"], ["\nA"]),
    (r"^\c$", [r"\c"], ["c"]),
    (r"^[[a]$", ["[", "a"], ["[a"]),
    (r"^[a&&b]$", ["a", "&", "b"], ["&&", ""]),
    (r"^[a~~b]$", ["~"], ["c"]),
    (r"^[\w-.]$", ["a", "-", "."], ["+", ","]),
    (r"^[.-\w]$", ["a", "-", "."], ["/", "+"]),
    (r"^[+--]$", ["+", ",", "-"], [".", "*"]),
    (r"^[a\-z]$", ["a", "-", "z"], ["b"]),
    (r"^[^\]]$", ["a"], ["]"]),
    (r"^\/\_\-\@\<b\>\"$", ['/_-@<b>"'], ["b"]),
    (r"^a{$", ["a{"], ["a"]),
    (r"^{}$", ["{}"], [""]),
    (r"^a{,3}$", ["a{,3}"], ["a", "aaa"]),
    (r"^a{2,3}$", ["aa", "aaa"], ["a", "a{2,3}"]),
    (r"^\ud83d\ude00$", ["😀"], ["\ufffd"]),
    (r"^[\u{1F600}a]$", ["😀", "a"], ["b"]),
    (r"^\u00e9\x41$", ["éA"], ["é"]),
    (r"^\u002b\x2e$", ["+."], ["++"]),
    (r"^\0$", ["\0"], ["0"]),
    (r"^[\b]$", ["\b"], ["b"]),
    (r"^(?<year>\d{4})-(?:a|b)$", ["2026-a"], ["2026-c"]),
    (r"^[\w.+-]+@[\w-]+\.[\w.-]+$", ["a.b+c@d-e.org"], ["a@b"]),
]


@pytest.mark.parametrize(("pattern", "matches", "others"), PATTERNS)
def test_a_pattern_matches_what_it_matches_in_javascript(pattern: str, matches: list[str], others: list[str]) -> None:
    translated, has_references = from_ecma(pattern)
    assert _is_enforced(translated)
    assert not has_references
    assert [text for text in (*matches, *others) if re.search(translated, text)] == matches
    schema, unenforced = enforceable_schema({"type": "string", "pattern": pattern})
    assert (schema["pattern"], unenforced) == (translated, [])


@pytest.mark.parametrize(
    ("pattern", "wider"),
    [
        (r"^(a|b)\1$", r"^(a|b)(?:[\s\S]*)$"),
        (r"^(?<c>a|b)\k<c>$", r"^(a|b)(?:[\s\S]*)$"),
        (r"^\k<c>(?<c>a)$", r"^(?:[\s\S]*)(a)$"),
        (r"^(?<c$>a)\k<c$>(?=b)$", r"^(a)(?:[\s\S]*)$"),
    ],
)
def test_a_reference_may_be_any_text_with_a_warning(pattern: str, wider: str) -> None:
    schema, unenforced = enforceable_schema({"type": "string", "pattern": pattern})
    assert schema["pattern"] == wider
    assert unenforced == [f"pattern {pattern!r} in full"]


@pytest.mark.parametrize("pattern", [r"^\ud800$", "[]"])
def test_a_pattern_that_matches_no_text_is_a_warning(pattern: str) -> None:
    schema, unenforced = enforceable_schema({"type": "string", "pattern": pattern})
    assert "pattern" not in schema
    assert unenforced == [f"pattern {pattern!r}"]


@pytest.mark.parametrize("pattern", ["^(a$", "a)", "[a", "*a", "(?<c>a"])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError):
        check_grammar(Sampling(json_schema={"type": "string", "pattern": pattern}))


def test_a_long_pattern_is_translated_in_proportion() -> None:
    for part in ("\\", "[", "(?<", "\\k<", "\\u{", "{1,", "\\ud83d"):
        from_ecma(part * 20_000)
