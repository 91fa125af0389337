"""Atomic writing of files, and reading of complete text files."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from localllm.errors import OutputError, UsageError, path_text
from localllm.regular_file import refuse_named_pipe

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

#: Maximum bytes of text files.  Longer texts fit into no context, and endless files such as /dev/zero are rejected.
MAX_TEXT_BYTES = 64 << 20
#: Position of the byte that is locked on Windows, whose C library is limited to 31 bits.
_LOCKED_BYTE = (1 << 31) - 2


def read_text(source: str | os.PathLike[str] | BinaryIO, label: str = "", *, n_bytes: int | None = None) -> str:
    """Return the text of a file, without a byte order mark.

    ``source``: a path, or an open file.  ``label``: precedes or replaces the path in errors.  ``n_bytes``: maximum
    number of bytes to read; a character cut off at the end is dropped.
    """
    name = label
    limit = MAX_TEXT_BYTES + 1 if n_bytes is None else min(n_bytes, MAX_TEXT_BYTES)
    try:
        if isinstance(source, str | os.PathLike):
            name = f"{label} {path_text(source)}".lstrip()
            refuse_named_pipe(source)
            with open(source, "rb") as file:
                data = file.read(limit)
        else:
            data = source.read(limit)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{name} cannot be read ({reason}): check the path") from None
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(f"{name} is larger than {MAX_TEXT_BYTES >> 20} MiB, the maximum for text: shorten it")
    data = data.removeprefix(codecs.BOM_UTF8)
    is_cut = n_bytes is not None and len(data) == limit
    try:
        return codecs.utf_8_decode(data, "strict", not is_cut)[0]
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not valid UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it to UTF-8"
        ) from None


def check_is_new(path: Path, sources: Iterable[Path] = ()) -> None:
    """Raise OutputError or UsageError if a file cannot be written, before the work for it starts.

    ``sources``: input files, which the new file must not replace.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return
    except OSError as error:  # the name is too long
        raise OutputError(f"{path_text(path)} cannot be written ({error.strerror}): choose another name") from None
    if stat.S_ISDIR(mode):
        raise OutputError(f"{path_text(path)} is a folder: name a file in it")
    if any(source.samefile(path) for source in sources):
        raise UsageError(f"{path_text(path)} is the model itself: choose another name for the new file")
    raise OutputError(f"{path_text(path)} already exists: choose another name, or remove it first")


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` replaced by the home folder; unchanged if the user does not exist."""
    try:
        return Path(os.fsdecode(path)).expanduser()
    except RuntimeError:
        return Path(os.fsdecode(path))


def private_opener(path: str, flags: int) -> int:
    """Open a file for `open`, readable only by its owner if it is created.  For files that contain users' texts."""
    return os.open(path, flags, 0o600)


def create_private(path: Path) -> None:
    """Create an empty file that only its owner can read, unless the file exists.  Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def private_folder(path: Path) -> str | None:
    """Create a folder for users' texts.  Return a warning if other users can read it.  Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if sys.platform == "win32" or not path.stat().st_mode & 0o077:
        return None
    return f"other users can read {path_text(path)}, which contains your texts: run chmod go= {path_text(path)}"


class NewFile:
    """A file being written, as a context manager: it gets its name when the block ends without an error.

    Args:
        path: the file's name.  An existing file stays until the new file is complete.
        n_bytes: size of the file, which must be free on the disk.
        is_resumable: keep the partial file after Ctrl-C, as after a crash.
        is_private: whether only its owner can read the file.
    """

    def __init__(self, path: Path, n_bytes: int, *, is_resumable: bool = False, is_private: bool = False) -> None:
        self.path = path
        self.n_bytes = n_bytes
        self.is_resumable = is_resumable
        self.is_private = is_private
        self._lock = -1  # file descriptor that holds the lock

    def __enter__(self) -> Self:
        try:
            self._partial = self.path.with_name(self.path.name + ".part")
            # Root could replace a device such as /dev/null by a file.
            if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
                raise OutputError(f"{path_text(self.path)} is a device or a pipe, not a file: choose another name")
            n_resumed = self._n_kept() if self.is_resumable and self._partial.is_file() else 0
            free = shutil.disk_usage(self.path.parent).free
            if free < self.n_bytes - n_resumed:
                raise OutputError(
                    f"{path_text(self.path)} needs {self.n_bytes:,} bytes, but only {free:,} bytes are free: "
                    "free disk space, or write to another disk"
                )
            mode = 0o600 if self.is_private else 0o666
            self._file = open(
                self._partial, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, mode)
            )
            self._claim()
            if self.is_private and sys.platform != "win32":
                os.fchmod(self._file.fileno(), mode)  # also for an existing partial file
            self._file.truncate(n_resumed)
            self._file.seek(n_resumed)
        except (OSError, ValueError) as error:  # ValueError: no name, a NUL, or a lone surrogate
            raise self._error(error) from error
        return self

    def _claim(self) -> None:
        """Keep other programs from writing the file, until it has its name."""
        self._lock = os.dup(self._file.fileno())
        try:
            lock(self._lock)
            is_ours = os.path.samestat(os.fstat(self._lock), self._partial.stat())
        except (BlockingIOError, PermissionError, FileNotFoundError):
            is_ours = False
        except OSError:
            is_ours = True  # a file system without locks
        if not is_ours:
            self._file.close()
            self._release()
            raise OutputError(f"another program is writing {path_text(self.path)}: wait, or choose another name")

    def _n_kept(self) -> int:
        """Return the number of bytes kept from an earlier, unfinished file."""
        return 0

    def put(self, data: Any, at: int | None = None) -> None:
        """Append bytes, or write them at a position."""
        try:
            if at is not None:
                self._file.seek(at)
            self._file.write(data)
        except OSError as error:
            self._discard()
            raise self._error(error) from error

    @property
    def stream(self) -> BinaryIO:
        """The open file, for functions that write to a stream. Callers convert its errors."""
        return self._file

    def keep_access(self) -> None:
        """Copy the owner, group and mode of an existing file that the new file replaces."""
        if sys.platform != "win32":
            with contextlib.suppress(FileNotFoundError, PermissionError):
                status = self.path.stat()
                os.fchown(self._file.fileno(), status.st_uid, status.st_gid)
                os.fchmod(self._file.fileno(), stat.S_IMODE(status.st_mode))

    def sync(self) -> None:
        """Wait until all written bytes are on the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._discard()
            raise self._error(error) from error

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error_type is None:
                self.sync()
                self._file.close()
                self._release_early()
                os.replace(self._partial, self.path)
            elif self.is_resumable and error_type in (KeyboardInterrupt, GeneratorExit):
                self._file.close()
            else:
                self._discard()
        except BaseException as failure:
            self._discard()
            if isinstance(failure, OSError):
                raise self._error(failure) from failure
            raise
        finally:
            self._release()

    def _discard(self) -> None:
        """Remove the partial file."""
        try:
            self._file.close()  # may try to write again
        except OSError:
            self._file.raw.close()
        self._release_early()
        self._partial.unlink(missing_ok=True)
        self._release()

    def _release_early(self) -> None:
        """Close the file on Windows, where an open file can neither be renamed nor removed."""
        if sys.platform == "win32":
            self._release()

    def _release(self) -> None:
        """Allow other programs to write the file."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _error(self, error: OSError | ValueError) -> OutputError:
        shown = path_text(self.path)
        if not isinstance(error, OSError):
            return OutputError(f"{shown:.200} is not the name of a file ({error}): choose another name")
        if error.errno in (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)):
            return OutputError(f"{shown} cannot be written, the disk is full: free space, or write to another disk")
        return OutputError(f"{shown} cannot be written ({error.strerror or error}): choose another folder")


def lock(descriptor: int) -> None:
    """Locks a file for this descriptor.  Raises BlockingIOError or PermissionError if another has the lock."""
    if sys.platform == "win32":
        # Locked bytes cannot be written through other descriptors, so lock a byte far after the end.
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
