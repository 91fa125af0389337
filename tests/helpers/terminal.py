"""A terminal for tests: runs a program, presses keys and reads the screen."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.helpers.command_line import command, environment
from tests.helpers.data import ROOT

#: Seconds to wait for an event: kernels may have to be compiled first.
LIMIT = 120.0


class Terminal:
    """A tmux terminal with a separate tmux server."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux")
        self._folder = folder
        self._runs = False

    def tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, "-f", "/dev/null", *arguments], capture_output=True, check=True, timeout=60
        )
        return done.stdout.decode()

    def start(self, *arguments: str, program: Sequence[str] = (), **more: str) -> None:
        """Run a localllm command line or another program; prints its exit code when it ends.

        ``more``: environment variables.
        """
        variables = environment(
            LOCALLLM_DATA=str(self._folder / "data"),
            LOCALLLM_CONFIG=str(self._folder / "config.toml"),
            TERM="screen-256color",
            **more,
        )
        given = [f"{name}={value}" for name, value in variables.items() if not name.startswith("TMUX")]
        line = shlex.join(["env", "-i", *given, *(program or command(*arguments))])
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
        """Wait until all texts are on the screen."""
        return self.until(lambda screen: all(text in screen for text in texts), f"{texts}")

    def until(self, condition: Callable[[str], bool], what: str) -> str:
        end = time.monotonic() + LIMIT
        while not condition(screen := self.screen()):
            assert time.monotonic() < end, f"timeout: waiting for {what}:\n{screen}"
            assert "ended with" not in screen or "ended with" in what, screen
            time.sleep(0.1)
        return screen

    def end(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False, timeout=60)
