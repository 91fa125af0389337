"""Opening of files in untrusted folders: refuses pipes, which block, and links to files in other folders."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from localllm.errors import UsageError

#: Starts of paths of files that this process has open already.
_DESCRIPTORS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")


def open_regular(path: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None) -> BinaryIO:
    """Open a regular file for reading.

    A pipe would block until another program writes to it, and a device may have no end.

    Args:
        path: the file.
        folder: if given, the file must be in this folder after links are followed, or among the blobs that a
            snapshot of Hugging Face's cache links to.

    Raises:
        OSError: the file does not exist, is not readable, is not a regular file, or is a link to another folder.
        ValueError: the path contains a NUL character.
    """
    if folder is not None:
        path = _linked_within(Path(path), Path(folder))
    if os.name == "nt" and not stat.S_ISREG(os.stat(path).st_mode):  # Windows has no O_NONBLOCK
        raise _irregular(path)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags | getattr(os, "O_NOCTTY", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(path))
        if not stat.S_ISREG(mode):
            raise _irregular(path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(
    path: str | os.PathLike[str], max_bytes: int, *, folder: str | os.PathLike[str] | None = None
) -> bytes:
    """Return the content of a regular file. Raises OSError like `open_regular`, and if it exceeds ``max_bytes``."""
    with open_regular(path, folder=folder) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes >> 20} MiB", os.fspath(path))
    return data


def refuse_named_pipe(path: str | os.PathLike[str]) -> None:
    """Raise OSError for a named pipe, because opening it waits for a writer.

    Pipes that the process has open already are accepted, such as ``/dev/fd/63`` for the shell's ``<(command)``.
    """
    if not os.fspath(path).startswith(_DESCRIPTORS) and stat.S_ISFIFO(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is a named pipe", os.fspath(path))


def reading_error(name: str, error: OSError) -> UsageError:
    """Return the error for a file that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        return UsageError(f"{name} is not there: check the path")
    return UsageError(f"{name} cannot be read ({error.strerror or error}): check the path and its permissions")


def _irregular(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def _linked_within(path: Path, folder: Path) -> Path:
    """Return ``path`` with links followed. Raises OSError if it is outside the folder and its snapshot's blobs."""
    target, root = path.resolve(), folder.resolve()
    blobs = [(parent.parent / "blobs").resolve() for parent in root.parents if parent.name == "snapshots"]
    if not any(target.is_relative_to(allowed) for allowed in (root, *blobs)):
        words = "it is a link to a file in another folder: copy that file"
        raise OSError(errno.EPERM, words, os.fspath(path))
    return target
