"""Control characters are shown, and no terminal control sequence remains."""

from __future__ import annotations

import runpy
import sys
import unicodedata

import pytest
from hypothesis import given, strategies as st

from localllm.tui import text
from localllm.tui.text import escape_controls, spelled_out


@pytest.mark.linux("simulates macOS")
def test_a_key_that_macos_keeps_is_not_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (text.SELECT_KEY, text.SELECT_SIGN) == ("Ctrl+Up", "^↑")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert runpy.run_path(text.__file__)["SELECT_KEY"] == "Shift+Tab"


def test_symbols() -> None:
    assert escape_controls("\x1b]0;title\x07 \x00 \x7f \x9b") == "␛]0;title␇ ␀ ␡ \\x9b"
    assert (
        escape_controls("\u202eevil\u202c \u2066x\u2069 שלום\u200f!")
        == "\\u202eevil\\u202c \\u2066x\\u2069 שלום\u200f!"
    )
    assert escape_controls("a\tb\nc\r\nd\re") == "a\tb\nc\nd␍e"


@given(st.text())
def test_no_control_sequence_remains(line: str) -> None:
    assert {c for c in escape_controls(line) if unicodedata.category(c) == "Cc"} <= {"\t", "\n"}


@given(st.text(alphabet=st.characters(exclude_categories=["Cc"])))
def test_other_text_stays(line: str) -> None:
    reorders = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    assert all(escape_controls(c) == c for c in line if unicodedata.bidirectional(c) not in reorders)


def test_invisible_characters_are_spelled_out() -> None:
    assert spelled_out("a\tb\r\nc\rd\x1b\x9b") == "a\\tb\nc\\rd\\x1b\\x9b"
    assert (
        spelled_out("\u202e\u2067\u200b\u200f\u2028\ufeff\xa0\u3164")
        == r"\u202e\u2067\u200b\u200f\u2028\ufeff\xa0\u3164"
    )
    assert spelled_out("\U000e0041\U000e0100\ud800") == r"\U000e0041\U000e0100\ud800"
    assert spelled_out("é 漢字 שלום ← 🙂 ␛") == "é 漢字 שלום ← 🙂 ␛"


@given(st.text())
def test_what_is_spelled_out_is_printable(text: str) -> None:
    assert spelled_out(text).replace("\n", "").isprintable()
