"""Text for people: control characters, status lines, quantities."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from localllm import console as terminal
from localllm.console import LoadStatus, StatusLine, quantity, short_count, visible, visible_line


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    """Replace stderr by a terminal, and show progress without delay."""
    stream = FakeTerminal()
    # Not sys.stderr itself, which pytest replaces when the test starts.
    monkeypatch.setattr(terminal, "sys", SimpleNamespace(stderr=stream))
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(terminal, "_UPDATE_SECONDS", 0.0)
    return stream


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, schön, 日本\n\tand so on", "plain, schön, 日本\n\tand so on"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("back\rover\x08", "back\\x0dover\\x08"),
        ("\x9b31m\x7f\x00", "\\x9b31m\\x7f\\x00"),
    ],
)
def test_control_characters_are_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert not any((c < " " and c not in "\t\n") or "\x7f" <= c < "\xa0" for c in visible(text))
    line = visible_line(text)
    assert len(line.splitlines()) <= 1
    assert not any(c < " " or "\x7f" <= c < "\xa0" for c in line)


def test_marks_of_direction_and_ends_of_lines_are_spelled_out_in_a_line() -> None:
    """Bidirectional controls of Unicode (UAX #9, table 4), and line ends of `str.splitlines`."""
    marks = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    ends = "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"
    line = visible_line(f"a{marks}{ends}\tz")
    assert line.isprintable()
    assert line.count("\\") == len(marks + ends) + 1


def test_a_status_line_is_written_over_and_wiped(screen: FakeTerminal) -> None:
    status = StatusLine()
    status.show("the first, a long one")
    status.show("short")
    status.clear()
    status.clear()
    width = len("the first, a long one")
    assert screen.getvalue() == "\rthe first, a long one" + "\r" + "short".ljust(width) + "\r" + " " * 5 + "\r"


def test_a_status_line_never_fills_the_last_column(screen: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    StatusLine().show("x" * 100)
    assert screen.getvalue() == "\r" + "x" * 19


def test_what_is_quick_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", 60.0)
    status = StatusLine()
    status.show("soon done")
    status.clear()
    assert stream.getvalue() == ""


def test_progress_of_loading_on_a_terminal(screen: FakeTerminal) -> None:
    progress = LoadStatus()
    progress.formats = "Q4_K, Q6_K"
    for done in range(3):
        progress("kernels", done, 2)
    progress("weights", 1, 2)
    for done in range(2):
        progress("kernels", done, 1)
    progress.close()
    shown = [part.strip() for part in screen.getvalue().split("\r") if part.strip()]
    kernels = [f"compiling kernels for Q4_K, Q6_K: {n} left" for n in (2, 1, 1)]
    assert shown == [*kernels[:2], "loading weights: 50 %", kernels[2]]
    assert screen.getvalue().endswith(" \r")


def test_one_kernel_is_no_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LoadStatus()
    progress("kernels", 0, 1)
    progress("kernels", 1, 1)
    progress.close()
    assert capsys.readouterr().err.splitlines()[1] == "localllm: compiled 1 kernel in 0 s"


def test_progress_of_loading_elsewhere_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LoadStatus()
    for total in (2, 1, 8):
        for done in range(total + 1):
            progress("weights", done, total)
            progress("kernels", done, total)
    progress.close()
    progress.close()
    first, last = capsys.readouterr().err.splitlines()
    assert first == "localllm: compiling 2 kernels for this processor, which later runs reuse"
    assert last == "localllm: compiled 11 kernels in 0 s"


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A folder for compiled kernels that cannot be created."""
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "cache")
    monkeypatch.setenv("LOCALLLM_CACHE", folder)
    return folder


def test_kernels_that_cannot_be_kept(no_cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    progress = LoadStatus()
    for _ in range(2):
        progress("kernels", 0, 2)
        progress("kernels", 2, 2)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["localllm: compiling 2 kernels for this processor", "localllm: compiled 4 kernels in 0 s"]


def test_kernels_that_cannot_be_kept_on_a_terminal(no_cache: str, screen: FakeTerminal) -> None:
    LoadStatus()("kernels", 1, 2)
    assert screen.getvalue() == "\rcompiling kernels for this processor: 1 left"


def test_no_progress_where_none_is_wanted(screen: FakeTerminal) -> None:
    progress = LoadStatus(enabled=False)
    for stage in ("weights", "kernels"):
        progress(stage, 0, 2)
        progress(stage, 2, 2)
    progress.close()
    assert screen.getvalue() == ""


@pytest.mark.parametrize(
    ("n", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.4, "999 B"),
        (999.6, "1 kB"),
        (1234567, "1.23 MB"),
        (5e15, "5 PB"),
        (5e18, "5e+03 PB"),
    ],
)
def test_quantities(n: float, shown: str) -> None:
    assert quantity(n, "B") == shown


@pytest.mark.parametrize(("n", "shown"), [(7, "7"), (292_800, "293K"), (1_100_000_000, "1.1B")])
def test_counts(n: int, shown: str) -> None:
    assert short_count(n) == shown
