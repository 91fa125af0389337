"""Listening sockets: TCP, Unix sockets, and sockets that systemd has opened."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localllm.errors import UsageError, path_text

#: Start of a host that is the path of a Unix socket.
UNIX = "unix:"

#: Permissions of a Unix socket: its owner and its group can connect.
_MODE = 0o660

#: Connections that wait to be accepted.
_BACKLOG = 512

#: First file descriptor that systemd passes (sd_listen_fds(3)).
_FIRST_DESCRIPTOR = 3

#: Seconds that a server on the path of a Unix socket has to accept a connection.
_PROBE_S = 2.0


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket.  Port 0 selects any free port."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise UsageError(f"{host} port {port} cannot be listened on ({error}): choose another --port") from None
    _set_no_delay(listening)
    return listening


@contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """Return a listening Unix socket as a context manager, which removes its file at the end.

    A socket that remains from a killed server is replaced.  Raises UsageError if a server listens on the path, or if
    the path is another file.
    """
    if sys.platform == "win32":
        raise UsageError(
            f"{UNIX}{path_text(path)}: Windows has no Unix sockets for Python, use an address and a port"
        )
    shown = path_text(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(path.parent):
            _remove_stale(path, listening.family)
            listening.bind(str(path))
            os.chmod(path, _MODE)  # connections are refused until listen()
            listening.listen(_BACKLOG)
        created = os.stat(path)
    except UsageError:
        listening.close()
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        listening.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{shown} cannot be listened on ({reason}): check the folder, or choose another") from None
    except BaseException:
        listening.close()
        raise
    with listening:
        try:
            yield listening
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(path), created):
                    path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other servers that start at the same time."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path, family: int) -> None:
    """Remove a Unix socket without a server.  Raises UsageError if the path is in use."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path_text(path)} exists and is not a socket: choose another path")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:  # a full backlog, or missing permissions: a server may listen
            pass
    raise UsageError(f"another server listens on {path_text(path)}: stop it, or choose another path")


def inherited() -> list[socket.socket]:
    """Return the sockets that systemd has opened for this process (socket activation); empty without any.

    Removes the variables from the environment, so that child processes do not use the sockets.
    """
    names = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    process, count = (os.environ.get(name, "") for name in names[:2])
    if process != str(os.getpid()) or not count.isdecimal():
        return []
    for name in names:
        os.environ.pop(name, None)
    sockets = []
    for descriptor in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count[:4])):
        try:
            opened = socket.socket(fileno=descriptor)
            listens = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:
            raise UsageError(f"systemd's file descriptor {descriptor} is no socket: check the socket unit") from None
        if opened.type != socket.SOCK_STREAM or not listens:
            opened.close()
            raise UsageError(
                f"systemd's file descriptor {descriptor} is no listening stream socket: set ListenStream="
            )
        opened.set_inheritable(False)
        _set_no_delay(opened)
        sockets.append(opened)
    return sockets


def _set_no_delay(listening: socket.socket) -> None:
    """Let connections send without delay, which they inherit from the socket.

    Without the option a token waits 40 ms for the acknowledgement of the previous token.  asyncio sets the option
    only for sockets created with an explicit protocol number.
    """
    if listening.family in (socket.AF_INET, socket.AF_INET6):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def host_of(listening: socket.socket) -> str:
    """Return the address of a socket without its port, or the path of a Unix socket as ``unix:PATH``."""
    name = listening.getsockname()
    return f"{UNIX}{os.fsdecode(name)}" if isinstance(name, str | bytes) else str(name[0])
