"""The real app in a real terminal, on the demo model: asks, interrupts, edits, branches, quits, resumes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.end()


def test_a_chat_in_a_terminal(terminal: Terminal) -> None:
    # Plain numpy writes slowly, and this reply does not end by itself: it can be interrupted on whatever machine.
    slowly = ("--device", "reference", "--ignore-eos")
    terminal.start("chat", "--temp", "0", *slowly)
    terminal.sees("localllm demo · reference", "Type a message")
    # All at once, as a quick typist: what was typed is there before it is sent.
    terminal.press("Tell me a story about a boat, and another one, and another one", "Enter")
    terminal.sees("writing")
    terminal.press("Escape")
    terminal.sees("stopped · Ctrl+G or /continue goes on")
    terminal.press("C-Up")
    terminal.sees("y Copy")
    terminal.press("y")
    terminal.sees("copied")
    terminal.press("Escape")
    terminal.until(lambda screen: "y Copy" not in screen, "the editor")
    # An edited question is a branch.
    terminal.press("F2")
    terminal.sees("Editing your message")
    terminal.press("!", "Enter")
    terminal.sees("‹ 2/2 ›", "another one!", "writing")
    terminal.press("C-q")
    terminal.sees("ended with 0", "Continue this chat with: localllm chat --session ")
    assert "Traceback" not in terminal.screen()
    terminal.start("chat", "--continue", *slowly)
    terminal.sees("‹ 2/2 ›", "another one!", "stopped", "localllm demo · reference")
    terminal.press("/branch 1", "Enter")
    terminal.sees("‹ 1/2 ›")
    terminal.press("C-c")
    terminal.sees("ended with 0")
