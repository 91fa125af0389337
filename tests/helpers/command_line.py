"""Runs the command ``localllm``: inside this process, or as a program of its own."""

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

#: Seconds after which a command that has not ended is killed: long enough to compile all kernels on a slow machine.
LIMIT = 300.0


Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit code, and what it wrote, decoded from UTF-8."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """The one line that says what went wrong; fails if there is anything beside it."""
        assert not self.out
        assert "Traceback" not in self.err
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        start = "localllm: error: "
        assert lines[0].startswith(start), self.err
        return lines[0].removeprefix(start)


def run_main(capfdbinary: pytest.CaptureFixture[bytes], *arguments: object) -> Outcome:
    """Runs a command line in this process."""
    capfdbinary.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capfdbinary.readouterr()
    return Outcome(code, out.decode(), err.decode())


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "localllm", *(str(argument) for argument in arguments)]


def environment(**changes: str) -> dict[str, str]:
    """The environment for a process of its own; ``PYTHONWARNINGS`` and the like are not handed on.

    Nor is a terminal's size: GNU readline writes one into the environment, and a terminal of the test's has its own.
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
    """Runs a command line in a process of its own, with nothing on stdin unless something is given.

    ``prefix`` is a command that runs the one which follows it.
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
    """A command line in a process of its own, which is killed at the block's end, or after `LIMIT` seconds: then
    whoever waits for it, or reads what it writes, goes on.

    Ctrl-C reaches it, even where the tests run in the background of a script and ignore it.
    """
    with _default_interrupts():
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
def _default_interrupts() -> Iterator[None]:
    """A program inherits that SIGINT is ignored, but not a handler: it begins with what the system does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_on_terminal(arguments: Sequence[object]) -> tuple[int, str]:
    """Runs a command line with a terminal as stdin, stdout and stderr; exit code, and what was on the screen."""
    with on_terminal(arguments, COLUMNS="80") as (process, master):
        screen = read_all(master)
        return process.wait(), screen.decode()


@contextmanager
def on_terminal(arguments: Sequence[object], **variables: str) -> Iterator[tuple[Process, int]]:
    """A command with a terminal of its own as stdin, stdout and stderr, and the terminal's other end."""
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
    """What a terminal shows until its last program ends, which Linux reports as an error."""
    data = b""
    while True:
        try:
            part = os.read(descriptor, 4096)
        except OSError:
            return data
        if not part:
            return data
        data += part
