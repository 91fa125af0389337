"""Where compiled kernels are kept between processes."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

from localllm.errors import warn

#: Environment variable that names another folder for compiled kernels.
CACHE_VARIABLE = "LOCALLLM_CACHE"
#: How long cached code stays after its last use.
KEPT_SECONDS = 30 * 24 * 60 * 60
#: Bytes of one model's kernels, generously.
_MODEL_BYTES = 512 << 10
#: Bytes of the digest that a file of code begins with.
_DIGEST = 32


def cache_root() -> Path | None:
    """The folder for compiled kernels: ``LOCALLLM_CACHE``, or the platform's place for caches; None if there is none.

    (A folder for temporary files will not do: what lies there may be others' code.)
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no variable names a home, and the system does not know the user
        return None
    return base / "localllm" / "kernels"


def cache_fault() -> str | None:
    """Why kernels that are compiled now will not be there for the next process; None if they will."""
    root = cache_root()
    if root is None:
        return "this user has no home"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(bytes(_MODEL_BYTES))  # on a full disk there is a file, but nothing in it
    except FileExistsError:
        return os.strerror(errno.ENOTDIR)
    except OSError as error:
        return error.strerror or str(error)
    return None


@functools.cache
def warn_if_unwritable(root: Path | None) -> None:
    """Warns, once in a process, that what is about to be compiled will not be there for the next one."""
    if fault := cache_fault():
        warn(
            f"compiled kernels cannot be saved in {root or 'a folder in the home'} ({fault}), so every start "
            "compiles them: free space there if it is full, or name a folder that can be written in the environment "
            f"variable {CACHE_VARIABLE}"
        )


def read_code(path: Path) -> bytes | None:
    """Code that `write_code` wrote to this file; None where there is none, or a damaged or another one's."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[_DIGEST:]
    return code if content[:_DIGEST] == _digest(path, code) else None


def write_code(path: Path, code: bytes) -> None:
    """Writes a file of the cache, which begins with a digest of its name and of the code, if it can."""
    write_aside(path, _digest(path, code) + code)


def _digest(path: Path, code: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\n" + code).digest()


def is_stale(path: Path) -> bool:
    """Whether nobody has used it for `KEPT_SECONDS`."""
    return time.time() - path.stat().st_mtime > KEPT_SECONDS


def write_aside(path: Path, content: bytes) -> None:
    """Writes a file of the cache if it can: aside, and then into place, so that nobody ever reads half of it."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(content)
            os.replace(scratch, path)
        except OSError:
            os.unlink(scratch)
