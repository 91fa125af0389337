"""Run the command ``localllm`` inside this process or as a separate program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from localllm.cli.main import main
from tests.helpers.data import ROOT

#: Seconds before a command is killed: long enough to compile all kernels on a slow machine.
LIMIT = 300.0


Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Outcome:
    """Result of a command: exit code and output, decoded from UTF-8."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """Return the single line of the error message; fails if the command wrote anything else."""
        assert not self.out
        assert "Traceback" not in self.err
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        start = "localllm: error: "
        assert lines[0].startswith(start), self.err
        return lines[0].removeprefix(start)


def run_main(capfdbinary: pytest.CaptureFixture[bytes], *arguments: object) -> Outcome:
    capfdbinary.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capfdbinary.readouterr()
    return Outcome(code, out.decode(), err.decode())


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "localllm", *(str(argument) for argument in arguments)]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child process, without ``PYTHONWARNINGS`` and similar variables.

    It also omits the terminal size: GNU readline exports it, and a test's terminal sets its own.
    """
    left_out = ("PYTHON", "LOCALLLM_", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    handed_on = {name: os.environ.get(name, "") for name in ("LOCALLLM_CACHE", "LOCALLLM_CONFIG")}
    return {**kept, **handed_on, **changes}


def run_process(
    arguments: Sequence[object],
    *,
    stdin: bytes | None = None,
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    **options: Any,
) -> Outcome:
    """Run a command line in a child process, without stdin unless ``stdin`` is passed.

    ``prefix`` is a command that runs the command line, such as ``nice``.
    """
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(
        [*prefix, *command(*arguments)],
        cwd=ROOT,
        env=env or environment(),
        check=False,
        timeout=LIMIT,
        **given,
        **(streams | options),
    )
    return Outcome(done.returncode, (done.stdout or b"").decode(), (done.stderr or b"").decode())


@contextmanager
def running(arguments: Sequence[object], *, env: dict[str, str] | None = None, **streams: Any) -> Iterator[Process]:
    """Run a command line in a child process, killed at the end of the block or after `LIMIT` seconds, so that no
    reader waits forever.

    Ctrl-C reaches it even if the tests run in the background of a script and ignore it.
    """
    with default_interrupts():
        process = subprocess.Popen(command(*arguments), cwd=ROOT, env=env or environment(), **streams)
    timer = threading.Timer(LIMIT, process.kill)
    timer.start()
    with process:
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


@contextmanager
def default_interrupts() -> Iterator[None]:
    """Restore the default SIGINT handler. Children inherit an ignored signal, but no handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_on_terminal(arguments: Sequence[object]) -> tuple[int, str]:
    """Run a command line with a terminal as stdin, stdout and stderr; return the exit code and the screen."""
    with on_terminal(arguments, COLUMNS="80") as (process, master):
        screen = read_all(master)
        return process.wait(), screen.decode()


@contextmanager
def on_terminal(arguments: Sequence[object], **variables: str) -> Iterator[tuple[Process, int]]:
    """Run a command with a new terminal as stdin, stdout and stderr; yield the process and the master end."""
    master, slave = os.openpty()
    try:
        with running(
            arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment(**variables),
        ) as process:
            os.close(slave)
            yield process, master
    finally:
        os.close(master)


def read_all(descriptor: int) -> bytes:
    """Return a terminal's output until its last program ends, which Linux reports as an error."""
    data = b""
    while True:
        try:
            part = os.read(descriptor, 4096)
        except OSError:
            return data
        if not part:
            return data
        data += part
