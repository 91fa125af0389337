"""Command lines and child processes of the system, with a simulated Windows."""

from __future__ import annotations

import codecs
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.shell import (
    copy_text,
    decoded,
    found_program,
    join_command,
    kill_tree,
    own_group,
    set_variable,
    split_command,
)
from tests.helpers.windows import elsewhere


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch, "win32")


WORDS = ["localllm", "generate", "-p", "two words", "it's", "-m", r"C:\my models\a.gguf", "#1", ""]


def test_words_are_split_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch, "linux")
    assert split_command("a 'b c' \"d e\" f\\ g # h") == ["a", "b c", "d e", "f g", "#", "h"]
    assert join_command(WORDS) == shlex.join(WORDS)
    assert split_command(join_command(WORDS)) == WORDS
    assert set_variable("EDITOR", "nano") == "export EDITOR=nano"


def test_a_path_keeps_its_backslashes_on_windows(on_windows: None) -> None:
    line = r'C:\tools\npx.cmd -y "C:\my servers\clock" it' + "'s"
    assert split_command(line) == [r"C:\tools\npx.cmd", "-y", r"C:\my servers\clock", "it's"]
    assert join_command(WORDS) == 'localllm generate -p "two words" it\'s -m "C:\\my models\\a.gguf" #1 ""'
    assert split_command(join_command(WORDS)) == WORDS
    assert set_variable("EDITOR", "notepad") == "set EDITOR=notepad"
    with pytest.raises(ValueError, match="No closing quotation"):
        split_command('"C:\\a')


def test_a_program_is_named_by_its_path(tmp_path: Path) -> None:
    program = tmp_path / "npx"
    program.write_text("")
    program.chmod(0o755)
    assert found_program(["npx", "-y"], {"PATH": str(tmp_path)}) == [str(program), "-y"]
    assert found_program(["no-such-program"], {"PATH": str(tmp_path)}) == ["no-such-program"]
    assert found_program([sys.executable]) == [sys.executable]


@pytest.mark.parametrize(
    ("system", "program", "data"),
    [
        ("darwin", "pbcopy", "é\n".encode()),
        ("win32", "clip", "é\n".encode("utf-16")),
        ("linux", "", b""),
    ],
)
def test_the_clipboard_is_the_systems(
    system: str, program: str, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch, system)
    for name in ("pbcopy", "clip"):
        (tmp_path / name).write_text(f"#!/bin/sh\nexec /bin/cat > {tmp_path}/{name}.out\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    copy_text("é\n")
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.out")} == (
        {f"{program}.out": data} if program else {}
    )


def test_a_process_ends_with_its_children() -> None:
    inner = "print(1, flush=True); import time; time.sleep(99)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **own_group())
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    kill_tree(process)
    assert process.stdout.read() == b""  # the pipe closes with its last process
    process.wait()
    process.stdout.close()
    kill_tree(process)  # it has ended
    assert time.monotonic() - began < 50


def test_windows_ends_processes_by_their_tree(on_windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        ran.append(command)
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    monkeypatch.setattr(subprocess, "CREATE_NO_WINDOW", 0x8000000, raising=False)
    monkeypatch.delattr(os, "killpg", raising=False)
    assert own_group() == {"creationflags": 0x8000200}
    killed: list[bool] = []
    kill_tree(SimpleNamespace(pid=42, kill=lambda: killed.append(True)))  # type: ignore[arg-type]
    assert (ran, killed) == ([["taskkill", "/F", "/T", "/PID", "42"]], [True])


def test_output_is_utf_8_or_of_the_code_page(on_windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    codecs.register(oem := {"oem": codecs.lookup("cp850")}.get)
    assert decoded("Grüße".encode()) == "Grüße"
    assert decoded("Grüß".encode()[:-1]) == "Grü"
    assert decoded("Grüße".encode("cp850")) == "Grüße"
    codecs.unregister(oem)
    elsewhere(monkeypatch, "linux")
    assert decoded(b"a\xffb") == "a\ufffdb"
