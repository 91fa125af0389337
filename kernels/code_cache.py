"""Where compiled kernels are kept between processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

#: Environment variable that names another folder for compiled kernels.
CACHE_VARIABLE = "LOCALLLM_CACHE"
#: What is in the cache is kept so long after its last use.
KEPT_SECONDS = 30 * 24 * 60 * 60
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
