"""Command lines and child processes on the user's system: quoting, process groups and encodings."""

from __future__ import annotations

import codecs
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    import subprocess

#: Interval in seconds between checks whether a command must stop.
_WATCH_SECONDS = 0.05


def split_command(text: str) -> list[str]:
    """Split a command line into words.  On Windows backslashes and ``'`` are ordinary characters."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.commenters = True, ""
    if sys.platform == "win32":
        words.escape, words.quotes = "", '"'
    return list(words)


def join_command(words: Iterable[str]) -> str:
    """Return a command line to copy into the user's shell."""
    if sys.platform == "win32":
        from subprocess import list2cmdline  # imported here to keep the start fast

        return list2cmdline(words)
    return shlex.join(words)


def set_variable(name: str, value: str) -> str:
    """Return the user's shell command that sets an environment variable."""
    return f"set {name}={value}" if sys.platform == "win32" else f"export {name}={value}"


def found_program(command: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """Return a command with the path of its program.  Windows starts ``.cmd`` files (npx, code) only by path."""
    import shutil

    return [shutil.which(command[0], path=env.get("PATH")) or command[0], *command[1:]]


def copy_text(text: str) -> None:
    """Copies text to the clipboard of macOS and Windows, where not all terminals support copying by programs."""
    program, encoding = {"darwin": ("pbcopy", "utf-8"), "win32": ("clip", "utf-16")}.get(sys.platform, ("", ""))
    if program:
        from subprocess import SubprocessError, run

        data, env = text.encode(encoding, "replace"), {**os.environ, "LC_CTYPE": "UTF-8"}
        with suppress(OSError, SubprocessError):
            run(found_program([program]), input=data, env=env, capture_output=True, timeout=5, check=False)


def own_group() -> dict[str, Any]:
    """Keywords of Popen for a process that Ctrl-C does not reach, and that `kill_tree` ends."""
    if sys.platform == "win32":  # also a separate console; otherwise it would read this console's keys
        from subprocess import CREATE_NEW_PROCESS_GROUP, CREATE_NO_WINDOW

        return {"creationflags": CREATE_NEW_PROCESS_GROUP | CREATE_NO_WINDOW}
    return {"start_new_session": True}


def kill_tree(process: subprocess.Popen[bytes] | asyncio.subprocess.Process) -> None:
    """Ends a process that was started with `own_group`, and its child processes."""
    with suppress(OSError):
        if sys.platform == "win32":
            from subprocess import SubprocessError, run

            with suppress(OSError, SubprocessError):
                run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, timeout=10, check=False)
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def bounded_output(
    command: str | Sequence[str], max_bytes: int, seconds: float, is_stopped: Callable[[], bool]
) -> bytes:
    """Run a shell command, or a program with arguments, and return the first bytes of its output and its errors.

    The process and its children are ended after ``max_bytes`` or ``seconds``, or when ``is_stopped`` returns True.
    Raises OSError or ValueError if the command cannot be started.
    """
    from subprocess import DEVNULL, PIPE, STDOUT, Popen

    is_shell = isinstance(command, str)
    process = Popen(command, shell=is_shell, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, **own_group())
    assert process.stdout is not None
    output, data = process.stdout, bytearray()

    def read() -> None:
        with output:
            while len(data) < max_bytes and (more := os.read(output.fileno(), max_bytes - len(data))):
                data.extend(more)

    # Read in a thread: a program that has left the shell's process group may keep the output open forever.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    end = time.monotonic() + seconds
    try:
        while reader.is_alive() and time.monotonic() < end and not is_stopped():
            reader.join(_WATCH_SECONDS)
    finally:
        kill_tree(process)  # also after ``max_bytes``: the output may be endless
        process.wait()
    reader.join(_WATCH_SECONDS)
    return bytes(data)


def decoded(output: bytes) -> str:
    """Decode the output of a program from UTF-8, or on Windows from the console's code page.

    A character that is cut off at the end is dropped.
    """
    try:
        return codecs.utf_8_decode(output, "strict", False)[0]
    except UnicodeDecodeError:
        return output.decode("oem" if sys.platform == "win32" else "utf-8", "replace")
