"""The real app in a real terminal, on the demo model: asks, interrupts, edits, branches, quits, resumes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.command_line import command, environment
from tests.helpers.data import ROOT

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")

#: Seconds that something may take: kernels may have to be compiled first.
LIMIT = 120.0


class Terminal:
    """A terminal of tmux, with a server of its own."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux")
        self._folder = folder
        self._runs = False

    def tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, "-f", "/dev/null", *arguments], capture_output=True, check=True, timeout=60
        )
        return done.stdout.decode()

    def start(self, *arguments: str) -> None:
        """Runs a command line, of which the exit code is shown when it ends."""
        variables = environment(
            LOCALLLM_DATA=str(self._folder / "data"),
            LOCALLLM_CONFIG=str(self._folder / "none"),
            TERM="screen-256color",
        )
        given = [f"{name}={value}" for name, value in variables.items() if not name.startswith("TMUX")]
        line = shlex.join(["env", "-i", *given, *command(*arguments)])
        line = f"{line}; echo ended with $?; cat"
        if self._runs:
            self.tmux("respawn-pane", "-k", "-c", str(ROOT), line)
        else:
            self.tmux("new-session", "-d", "-x", "90", "-y", "30", "-c", str(ROOT), line)
        self._runs = True

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def sees(self, *texts: str) -> str:
        """Waits until all texts are on the screen."""
        return self.until(lambda screen: all(text in screen for text in texts), f"{texts}")

    def until(self, condition: Callable[[str], bool], what: str) -> str:
        end = time.monotonic() + LIMIT
        while not condition(screen := self.screen()):
            assert time.monotonic() < end, f"there is not {what}:\n{screen}"
            assert "ended with" not in screen or "ended with" in what, screen
            time.sleep(0.1)
        return screen

    def end(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False, timeout=60)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.end()


def test_a_chat_in_a_terminal(terminal: Terminal) -> None:
    # Plain numpy writes slowly enough to be interrupted, on whatever machine.
    terminal.start("chat", "--temp", "0", "--device", "reference")
    terminal.sees("localllm demo · reference", "Type a message")
    # All at once, as a quick typist: what was typed is there before it is sent.
    terminal.press("Tell me a story about a cat and a dog", "Enter")
    terminal.until(lambda screen: "tok/s" in screen and "writing" not in screen, "a reply")
    terminal.press("C-Up")
    terminal.sees("y Copy")
    terminal.press("y")
    terminal.sees("copied")
    terminal.press("Escape")
    terminal.until(lambda screen: "y Copy" not in screen, "the editor")
    # A long one, to be interrupted.
    terminal.press("Tell me a story about a boat, and another one, and another one", "Enter")
    terminal.sees("writing")
    terminal.press("Escape")
    # An edited question is a branch.
    terminal.sees("stopped · Ctrl+G or /continue goes on")
    terminal.press("F2")
    terminal.sees("Editing your message")
    terminal.press("!", "Enter")
    terminal.sees("‹ 2/2 ›", "another one!")
    terminal.until(lambda screen: not any(word in screen for word in ("waiting for", "writing")), "the whole reply")
    terminal.press("/branch 1", "Enter")
    terminal.sees("‹ 1/2 ›")
    terminal.press("/branch next", "Enter")
    terminal.sees("‹ 2/2 ›")
    terminal.press("C-q")
    terminal.sees("ended with 0")
    assert "Traceback" not in terminal.screen()
    terminal.start("chat", "--continue")
    terminal.sees("‹ 2/2 ›", "another one!", "localllm demo · cpu")
    terminal.press("C-c")
    terminal.sees("ended with 0")
