"""Storage of compiled kernels between processes."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import tempfile
import time
from pathlib import Path

from localllm.errors import warn

#: Environment variable that selects another folder for compiled kernels.
CACHE_VARIABLE = "LOCALLLM_CACHE"
#: Seconds that unused code is kept.
KEPT_SECONDS = 30 * 24 * 60 * 60
#: Upper estimate of the size of one model's kernels in bytes.
_MODEL_BYTES = 512 << 10
#: Length of the digest at the start of a code file, in bytes.
_DIGEST = 32


def cache_root() -> Path | None:
    """Return the folder for compiled kernels: ``LOCALLLM_CACHE``, or the platform's cache folder.

    None if the user has no home folder. A folder for temporary files is not used, because other users could write
    code there.
    """
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    from platformdirs import user_cache_path

    try:
        return user_cache_path("localllm", appauthor=False, opinion=False) / "kernels"
    except RuntimeError:  # no variable names a home folder, and the system does not know the user
        return None


def cache_fault() -> str | None:
    """Return why compiled kernels cannot be saved for the next process; None if they can."""
    root = cache_root()
    if root is None:
        return "this user has no home"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(bytes(_MODEL_BYTES))  # creating a file also works on a full disk, but writing does not
    except FileExistsError:
        return os.strerror(errno.ENOTDIR)
    except OSError as error:
        return error.strerror or str(error)
    return None


@functools.cache
def warn_if_unwritable(root: Path | None) -> None:
    """Warn, once per process, if compiled kernels cannot be saved."""
    if fault := cache_fault():
        warn(
            f"compiled kernels cannot be saved in {root or 'a folder in the home'} ({fault}), so every start "
            "compiles them: free space there if it is full, or set the environment variable "
            f"{CACHE_VARIABLE} to a writable folder"
        )


def read_code(path: Path) -> bytes | None:
    """Return the code that `write_code` wrote to this file; None if it is missing, damaged, or not a cache file."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[_DIGEST:]
    return code if content[:_DIGEST] == _digest(path, code) else None


def write_code(path: Path, code: bytes) -> None:
    """Write a cache file that starts with a digest of its name and of the code. Does nothing if writing fails."""
    write_aside(path, _digest(path, code) + code)


def _digest(path: Path, code: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\n" + code).digest()


def is_stale(path: Path) -> bool:
    """Return whether the file has been unused for `KEPT_SECONDS`."""
    return time.time() - path.stat().st_mtime > KEPT_SECONDS


def write_aside(path: Path, content: bytes) -> None:
    """Write a cache file. Does nothing if writing fails.

    The content is first written to another file, so that readers never see a partial file.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(content)
            os.replace(scratch, path)
        except OSError:
            os.unlink(scratch)
