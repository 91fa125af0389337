"""Command lines and child processes as the user's system has them: words, quotation marks, ends and encodings."""

from __future__ import annotations

import codecs
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    import subprocess


def split_command(text: str) -> list[str]:
    """The words of a command line; on Windows a backslash is part of a path, and ``'`` of a name."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.commenters = True, ""
    if sys.platform == "win32":
        words.escape, words.quotes = "", '"'
    return list(words)


def join_command(words: Iterable[str]) -> str:
    """A command line to copy into the user's shell."""
    if sys.platform == "win32":
        from subprocess import list2cmdline  # here, and not at every start

        return list2cmdline(words)
    return shlex.join(words)


def set_variable(name: str, value: str) -> str:
    """The command of the user's shell that sets an environment variable."""
    return f"set {name}={value}" if sys.platform == "win32" else f"export {name}={value}"


def found_program(command: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """A command whose program is named by its path, as Windows starts ``.cmd`` files (npx, code) only so."""
    import shutil

    return [shutil.which(command[0], path=env.get("PATH")) or command[0], *command[1:]]


def copy_text(text: str) -> None:
    """Gives a text to the clipboard of macOS and Windows, whose terminals do not all take it from programs."""
    program, encoding = {"darwin": ("pbcopy", "utf-8"), "win32": ("clip", "utf-16")}.get(sys.platform, ("", ""))
    if program:
        from subprocess import SubprocessError, run

        data, env = text.encode(encoding, "replace"), {**os.environ, "LC_CTYPE": "UTF-8"}
        with suppress(OSError, SubprocessError):
            run(found_program([program]), input=data, env=env, capture_output=True, timeout=5, check=False)


def own_group() -> dict[str, Any]:
    """Keywords of Popen for a process that Ctrl-C does not reach, and that `kill_tree` ends."""
    if sys.platform == "win32":  # a console of its own, too: else it reads this one's keys
        from subprocess import CREATE_NEW_PROCESS_GROUP, CREATE_NO_WINDOW

        return {"creationflags": CREATE_NEW_PROCESS_GROUP | CREATE_NO_WINDOW}
    return {"start_new_session": True}


def kill_tree(process: subprocess.Popen[bytes] | asyncio.subprocess.Process) -> None:
    """Ends a process that was started with `own_group`, and what it has begun."""
    with suppress(OSError):
        if sys.platform == "win32":
            from subprocess import SubprocessError, run

            with suppress(OSError, SubprocessError):
                run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, timeout=10, check=False)
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def decoded(output: bytes) -> str:
    """The output of a program as text: UTF-8, or else on Windows the console's code page.

    A character that is cut off at the end is left out.
    """
    try:
        return codecs.utf_8_decode(output, "strict", False)[0]
    except UnicodeDecodeError:
        return output.decode("oem" if sys.platform == "win32" else "utf-8", "replace")
