"""Messages during the compilation of kernels."""

from __future__ import annotations

import io
import sys

import pytest

from localllm.loading import progress
from localllm.loading.progress import CompileNotice, default_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock whose time a test sets."""
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return clock


def test_a_long_compilation_is_reported_once(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    notice = CompileNotice()
    for done, seconds in ((0, 0), (1, 1.9), (2, 2.1), (3, 9), (4, 20)):
        now[0] = 100.0 + seconds
        notice("kernels", done, 4)
        said = capsys.readouterr()
        assert said.out == ""
        assert bool(said.err) == (done == 2)
        assert said.err.count("\n") == (done == 2)
        assert ("compiling" in said.err) == (done == 2)


def test_short_compilations_are_not_reported(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    notice = CompileNotice()
    for stage, done, seconds in (("weights", 0, 0), ("weights", 5, 60), ("kernels", 0, 61), ("kernels", 9, 70)):
        now[0] = 100.0 + seconds
        notice(stage, done, 9)
    assert capsys.readouterr().err == ""


def test_progress_appears_only_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Terminal()
    closed.close()
    for stream in (io.StringIO(), closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert default_progress() is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(default_progress(), CompileNotice)
