"""Runs the command ``localllm``: inside this process, or as a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from localllm.cli.main import main
from tests.helpers.data import ROOT


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
    """The environment for a process of its own; ``PYTHONWARNINGS`` and the like are not handed on."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LOCALLLM_"))}
    return {**kept, "LOCALLLM_CACHE": os.environ.get("LOCALLLM_CACHE", ""), **changes}


def run_process(
    arguments: Sequence[object], *, stdin: bytes | None = None, env: dict[str, str] | None = None, **options: Any
) -> Outcome:
    """Runs a command line in a process of its own, with nothing on stdin unless something is given."""
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    done = subprocess.run(
        command(*arguments), capture_output=True, cwd=ROOT, env=env or environment(), check=False, **given, **options
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())
