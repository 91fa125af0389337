"""Grammars of texts inside JSON strings."""

from __future__ import annotations

import json
import re

import pytest

from localllm.chat.calls.json_strings import escaped_grammar, rule_of

llguidance = pytest.importorskip("llguidance")

#: The shape of a grammar of patches, as agents send it.
PATCHES = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?   // the last line
hunk: "*** Update File: " filename LF change+
filename: /(.+)/
change: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
PATCH = '*** Begin Patch\n*** Update File: a "b".py\n-x = "\\n"\n+y = \'ä\'\t\n*** End Patch\n'


def accepts(lark: str, text: str) -> bool:
    """Return whether a grammar accepts a text, byte by byte."""
    vocabulary = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(vocabulary, lark)
    assert not matcher.is_error(), matcher.get_error()
    ids = vocabulary.tokenize_str(text)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("text", [PATCH, PATCH.replace("\t", "\x01"), PATCH.replace("*** End", "-*** End")])
def test_the_escaped_grammar_accepts_the_escaped_texts(text: str) -> None:
    assert accepts(PATCHES, text) == accepts(escaped_grammar(PATCHES), json.dumps(text, ensure_ascii=False)[1:-1])


def test_the_patch_is_accepted_and_others_are_not() -> None:
    lark = escaped_grammar(PATCHES)
    assert accepts(lark, json.dumps(PATCH, ensure_ascii=False)[1:-1])
    for wrong in (PATCH, "*** Begin Patch\\n", json.dumps(PATCH.replace("Begin", "Start"))[1:-1]):
        assert not accepts(lark, wrong)


@pytest.mark.parametrize(
    "pattern",
    [r"a.b", r"[^a]{2}", r'["\\\n]+', r"\s\S", r"(?:a|\n)*", r"[a-z\-]?\.", r"\d{2,}", "é+", r"a\/b", r"[\]^]"],
)
def test_patterns(pattern: str) -> None:
    lark = f"start: {rule_of(pattern)}"
    texts = ["a.b", "a\nb", "aab", "bb", '"\\\n', " a", "\ta", "a\n\na", "-.", "x.", "123", "éé", "a/b", "]^", '"']
    for text in texts:
        assert accepts(lark, json.dumps(text, ensure_ascii=False)[1:-1]) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1"])
def test_patterns_that_cannot_be_escaped(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        rule_of(pattern)


def test_unknown_imports_are_refused() -> None:
    with pytest.raises(ValueError, match="ESCAPED_STRING"):
        escaped_grammar("start: A\n%import common.ESCAPED_STRING")
