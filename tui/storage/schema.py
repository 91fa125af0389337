"""The SQLite file of the chats: opens and migrates the file, and converts its errors to clear messages.

The file is in write-ahead mode: a killed process loses no committed data, and several processes can read while one
process writes. With ``synchronous=NORMAL``, a power failure may lose the last transactions but nothing else.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from localllm.errors import StoreError
from localllm.files import create_private

#: ``user_version`` of a file is the number of migrations that it has run.
MIGRATIONS = (
    (
        """CREATE TABLE sessions (
            id TEXT PRIMARY KEY,
            title TEXT NOT NULL,
            system TEXT NOT NULL,
            settings TEXT NOT NULL,  -- JSON
            model TEXT NOT NULL,
            created REAL NOT NULL,  -- seconds since 1970
            updated REAL NOT NULL,
            archived INTEGER NOT NULL,
            leaf TEXT
        )""",
        """CREATE TABLE messages (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            session TEXT NOT NULL,
            parent TEXT,
            role TEXT NOT NULL,
            text TEXT NOT NULL,
            created REAL NOT NULL,
            state TEXT NOT NULL,
            opened TEXT NOT NULL,
            extras TEXT NOT NULL,  -- JSON: stats, window, attachments, calls
            indexed INTEGER NOT NULL DEFAULT 0  -- of version 0.1, which had an index of texts
        )""",
        "CREATE INDEX messages_of_session ON messages (session)",
        "CREATE INDEX messages_not_indexed ON messages (seq) WHERE NOT indexed",
    ),
    (
        """CREATE TABLE terminals (
            id TEXT PRIMARY KEY,
            host TEXT NOT NULL,
            pid INTEGER NOT NULL,
            began REAL NOT NULL,  -- seconds since 1970: what tells a process from a later one of its number
            session TEXT NOT NULL
        )""",
    ),
    ("DROP TABLE IF EXISTS message_index", "DROP INDEX IF EXISTS messages_not_indexed"),
)

#: Seconds that a statement waits for another process to finish writing.
BUSY_SECONDS = 2.0


def connect(path: Path | None) -> sqlite3.Connection:
    """Open and migrate the file (or memory). Raises StoreError if it is damaged, newer or cannot be written."""
    with in_words(path):
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Other users cannot read the file. SQLite creates the files next to it with the same permissions.
            create_private(path)
        connection = sqlite3.connect(
            ":memory:" if path is None else path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path | None) -> None:
    version = _version(connection)
    if version > len(MIGRATIONS):
        raise StoreError(
            f"the chats in {path} were written by a newer localllm (schema {version}, this version supports "
            f"{len(MIGRATIONS)}): update localllm, or set LOCALLLM_DATA to another folder"
        )
    if (report := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise StoreError(f"the chats in {path} {_DAMAGED} ({' '.join(report.split())})")
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous=NORMAL")
    if version < len(MIGRATIONS):
        with transaction(connection):
            version = _version(connection)  # another process may have migrated the file
            if version < 0 or (version == 0 and connection.execute("SELECT 1 FROM sqlite_master").fetchone()):
                raise StoreError(f"{path} is a database of another program: move the file, or set LOCALLLM_DATA")
            for number in range(version, len(MIGRATIONS)):
                for statement in MIGRATIONS[number]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version={number + 1}")


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Enable write-ahead mode. Retry while another process writes: SQLite's busy timeout does not apply here."""
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
        time.sleep(0.02)


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block as a transaction: all changes are saved, or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # SQLite has already rolled back, for example if the disk is full
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def in_words(path: Path | None) -> Iterator[None]:
    """Convert errors of SQLite and the system to `StoreError`."""
    location = "in memory" if path is None else f"in {path}"
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        raise StoreError(f"the chats {location} {_COMPLAINTS.get(code, 'cannot be used')} ({error})") from error
    except OSError as error:
        raise StoreError(
            f"the chats {location} cannot be used ({error.strerror}): check the folder, or set LOCALLLM_DATA to "
            "another"
        ) from error


_DAMAGED = "are damaged: move the file and its -wal file away, and localllm creates a new one"
_COMPLAINTS = {
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_BUSY: "are locked by another program: close it, or wait",
    sqlite3.SQLITE_LOCKED: "are locked by another program: close it, or wait",
    sqlite3.SQLITE_READONLY: "cannot be written: check the permissions of the file and its folder",
    sqlite3.SQLITE_FULL: "cannot be written, because the disk is full: make room",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: check the permissions of the file and its folder",
    sqlite3.SQLITE_IOERR: "cannot be read or written: check the disk",
}
