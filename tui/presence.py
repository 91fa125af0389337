"""Which terminals have a chat open: two that go on with the same one are to know of each other.

A mark names its process.  One that was killed leaves its mark, which counts no longer: there is no such process any
more, or another one with its number, which began at another time.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

Execute = Callable[..., Any]

#: Seconds by which the time that a process began may seem to move, when the clock is set.
_TOLERANCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Terminal:
    """What has at most one chat open at a time; two of them may be in one process.

    Attributes:
        id: unique.
        host, pid, began: its process.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    began: float = field(default_factory=lambda: psutil.Process().create_time())

    def enter(self, execute: Execute, session: str) -> None:
        """Notes that a chat is open here, and no longer the one before."""
        execute(
            "INSERT OR REPLACE INTO terminals (id, host, pid, began, session) VALUES (?, ?, ?, ?, ?)",
            (self.id, self.host, self.pid, self.began, session),
        )

    def leave(self, execute: Execute) -> None:
        """Notes that none is open here any more; forgets terminals that were killed as well."""
        rows = execute("SELECT id, host, pid, began FROM terminals").fetchall()
        for id_, host, pid, began in rows:
            if id_ == self.id or (host == self.host and not _is_alive(pid, began)):
                execute("DELETE FROM terminals WHERE id = ?", (id_,))

    def others(self, execute: Execute, session: str) -> list[str]:
        """The other terminals that have a chat open, as people know them."""
        rows = execute(
            "SELECT host, pid, began FROM terminals WHERE session = ? AND id != ?", (session, self.id)
        ).fetchall()
        return [
            f"process {pid}" if host == self.host else f"process {pid} on {host}"
            for host, pid, began in rows
            # Whether one on another machine lives cannot be known: that it may is the safer guess.
            if host != self.host or _is_alive(pid, began)
        ]


def _is_alive(pid: int, began: float) -> bool:
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - began) <= _TOLERANCE_SECONDS
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, OSError, ValueError, TypeError, OverflowError):
        return False
