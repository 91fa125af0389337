"""The key file of ``localllm serve --keys``: clients, their roles, their models and their limits.

::

    [alice]
    hash = "sha256:0f5c…"                     # of the key, which only the client stores
    role = "client"                           # default; or "metrics", or "admin"
    models = ["qwen*", "demo"]                # patterns of model names (default: all models)
    requests_per_minute = 60                  # default: no limit
    tokens_per_minute = 100_000               # default: no limit

``localllm keys`` adds and removes sections.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import secrets
import time
import tomllib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from localllm.console import visible_line, warn
from localllm.errors import LocalLLMError, UsageError, path_text
from localllm.regular_file import open_regular
from localllm.server.roles import ADMIN, MAY_USE

#: Start of a generated key.  Programs that search for leaked secrets can recognise it.
PREFIX = "localllm-"

#: Maximum size of a key file, in bytes.
MAX_BYTES = 4 << 20

#: Minimum seconds between two looks at the file.
CHECK_S = 1.0

_NAME = re.compile(r"[A-Za-z0-9][\w.@-]{0,63}", re.ASCII)
_HASH = re.compile(r"sha256:([0-9a-f]{64})")

#: Requests or tokens per minute.
Amount = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A section of the file."""

    hash: str
    role: Literal["client", "metrics", "admin"] = "client"
    models: list[str] | None = None
    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None


class RateMeter:
    """An amount that is used.  It decays at the rate of a limit, so that a pause restores the full limit."""

    def __init__(self) -> None:
        self._used, self._at = 0.0, time.monotonic()

    def wait_s(self, limit: int) -> float:
        """Return the seconds until one more fits into ``limit`` per minute; 0.0 if it fits now."""
        self.add(0, limit)
        return max(0.0, (self._used + 1 - limit) * 60 / limit)

    def add(self, amount: int, limit: int) -> None:
        """Add an amount to the rest of earlier amounts."""
        now = time.monotonic()
        self._used = max(0.0, self._used - limit / 60 * (now - self._at)) + amount
        self._at = now


class LimitError(LocalLLMError):
    """A key has reached a limit.  ``wait_s`` is the number of seconds until its next request is accepted."""

    def __init__(self, message: str, wait_s: int) -> None:
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True)
class ClientKey:
    name: str  # section of the file
    digest: bytes  # SHA-256 of the key
    entry: KeyEntry
    requests: RateMeter = field(default_factory=RateMeter)
    tokens: RateMeter = field(default_factory=RateMeter)

    def has_role(self, needed: str) -> bool:
        """Return whether the key may use routes of the role ``needed``."""
        return self.entry.role in MAY_USE[needed]

    def allows(self, *names: str) -> bool:
        """Return whether the key may use a model with these names.  Patterns ignore case."""
        patterns = self.entry.models
        return patterns is None or any(fnmatchcase(n.casefold(), p.casefold()) for n in names for p in patterns)

    def count_request(self) -> None:
        """Count a request.  Raises LimitError, and does not count it, if a limit is reached."""
        n_requests, n_tokens = self.entry.requests_per_minute, self.entry.tokens_per_minute
        for meter, limit, unit in ((self.requests, n_requests, "requests"), (self.tokens, n_tokens, "tokens")):
            if limit is not None and (wait_s := math.ceil(meter.wait_s(limit))):
                message = f"the key {self.name} has used its {limit:,} {unit} per minute: try again in {wait_s:,} s"
                raise LimitError(message, wait_s)
        if n_requests is not None:
            self.requests.add(1, n_requests)


#: Used by requests without a valid key, for routes that need none.
NOBODY = ClientKey("", b"", KeyEntry(hash="", role="none", models=[]))  # type: ignore[arg-type]

#: The key of the current request; None if the server has no key file, which allows everything.
CURRENT: ContextVar[ClientKey | None] = ContextVar("key", default=None)


def is_admin() -> bool:
    """Return whether the current request may change the server."""
    key = CURRENT.get()
    return key is None or key.has_role(ADMIN)


def charge(n_tokens: int) -> None:
    """Count tokens of the current request.  They can exceed the limit; later requests then wait."""
    if (key := CURRENT.get()) is not None and key.entry.tokens_per_minute is not None:
        key.tokens.add(n_tokens, key.entry.tokens_per_minute)


class KeyFile:
    """The keys of a file, which is read again after a change.  Used only in the server's event loop."""

    def __init__(self, path: Path, log: Callable[[str], object] = lambda line: None) -> None:
        """Read the file.  Raises UsageError if it cannot be read or is invalid."""
        self._path, self._log = path, log
        self._stamp: tuple[int, ...] | None = None
        self._checked_at = time.monotonic()
        self.keys: list[ClientKey] = []
        self.keys = self._read()
        if not self.keys:
            warn(
                f"{path_text(path)} contains no key, so no client can use the server: localllm keys add NAME adds one"
            )

    def find(self, key: str) -> ClientKey | None:
        """Return the entry of a key that a client sent; None if the key is unknown."""
        if not key:
            return None
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        # Compare all keys, so that the time does not depend on which key matches.
        matches = [each for each in self.keys if hmac.compare_digest(each.digest, digest)]
        return matches[0] if matches else None

    def refresh(self) -> None:
        """Read the file again if it has changed.  Looks at it at most once in `CHECK_S`."""
        now = time.monotonic()
        if now - self._checked_at >= CHECK_S:
            self._checked_at = now
            if _stamp(self._path) != self._stamp:
                self.reload()

    def reload(self) -> None:
        """Read the file again.  A file that cannot be read or is invalid changes nothing, and is logged."""
        try:
            self.keys = self._read()
        except UsageError as error:
            warn(f"the keys have not changed, because {error}")
            return
        self._log(f"read {path_text(self._path)}: {len(self.keys)} key{'s' * (len(self.keys) != 1)}")

    def _read(self) -> list[ClientKey]:
        self._stamp = _stamp(self._path)  # before reading: a later change is then seen
        before = {key.digest: key for key in self.keys}
        return [
            replace(key, requests=before[key.digest].requests, tokens=before[key.digest].tokens)
            if key.digest in before
            else key
            for key in read_keys(self._path)
        ]


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written or replaced; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_keys(path: Path) -> list[ClientKey]:
    """Return the keys of a file.  Raises UsageError if it cannot be read or is invalid."""
    shown = path_text(path)
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{shown} cannot be read ({reason}): localllm keys add creates a key file") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{shown} has more than {MAX_BYTES >> 20} MiB: remove keys")
    return parse_keys(data, shown)


def parse_keys(data: bytes, shown: str) -> list[ClientKey]:
    """Return the keys of a file with the content ``data`` and the name ``shown``.  Raises UsageError."""
    try:
        sections = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{shown} is not valid TOML ({visible_line(str(error)):.200}): correct it") from None
    keys: dict[bytes, ClientKey] = {}
    for name, section in sections.items():
        check_name(name, shown)
        try:
            entry = msgspec.convert(section, KeyEntry)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"[{name}] of {shown} is invalid ({visible_line(str(error)):.200}): correct it"
            ) from None
        match = _HASH.fullmatch(entry.hash.lower())
        if match is None:
            raise UsageError(
                f'[{name}] of {shown}: hash must be "sha256:" and 64 digits: localllm keys add makes one'
            )
        key = ClientKey(name, bytes.fromhex(match[1]), entry)
        if key.digest in keys:
            raise UsageError(f"[{name}] of {shown} has the hash of [{keys[key.digest].name}]: remove either")
        keys[key.digest] = key
    return [*keys.values()]


def check_name(name: str, shown: str) -> None:
    """Raise UsageError unless a string can be a key's name, which appears in logs."""
    if not _NAME.fullmatch(name):
        rule = "up to 64 letters, digits, '_', '-', '.' and '@', starting with a letter or digit"
        raise UsageError(f"{name!r:.80} in {shown} cannot be the name of a key: write {rule}")


def new_key() -> tuple[str, str]:
    """Return a random key and its hash for the file.

    The key has 256 random bits, so that trying keys cannot find it.  A slow hash with a salt, as for
    passwords, would only delay each request.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    return key, f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
