"""A server for other devices of the local network: its address and key, which can be shown as a QR code."""

from __future__ import annotations

import io
import ipaddress
import os
import secrets
import socket
import sys
from urllib.parse import quote

from localllm.console import is_terminal
from localllm.errors import UsageError, path_text
from localllm.options.settings import settings_path

#: Address in a documentation network (RFC 5737).  No packet is sent; it only selects the outgoing interface.
_ELSEWHERE = ("192.0.2.1", 9)


def lan_address() -> str | None:
    """Return this machine's IPv4 address in the local network; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError:  # no route, for example in an isolated network
            pass
    import psutil

    states = psutil.net_if_stats()
    rows = [row for name, rows in psutil.net_if_addrs().items() if states[name].isup for row in rows]
    addresses = [ipaddress.ip_address(row.address) for row in rows if row.family == socket.AF_INET]
    return next(
        (str(address) for address in addresses if not address.is_loopback and not address.is_link_local), None
    )


def stored_key(name: str, advice: str) -> str:
    """Return the key of this user's servers in the file ``name``.  Devices thus stay connected after a restart.

    Raises UsageError with ``advice`` if the key cannot be stored.
    """
    settings = settings_path()
    if settings is None:
        return secrets.token_urlsafe(12)
    path = settings.parent / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secrets.token_urlsafe(12))
        except FileExistsError:
            pass
        if key := path.read_text("ascii").strip():
            return key
        raise ValueError("it is empty")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the key in {path_text(path)} cannot be kept ({error}): remove the file, or {advice}"
        ) from None


def invitation(url: str, key: str) -> str:
    """Return the instructions for another device: address and key as text, and as a QR code on a terminal."""
    address = f"{url}/#key={quote(key, safe='')}"
    lines = [f"on another device: {address}", f"programs there: {url}/v1 with the API key {key}"]
    try:
        import segno
    except ModuleNotFoundError:
        return "\n".join([*lines, 'for a QR code: pip install "localllm[serve]"'])
    if is_terminal(sys.stderr):
        drawn = io.StringIO()
        segno.make(address, error="l", micro=False).terminal(drawn, compact=True, border=2)
        lines.append(drawn.getvalue().rstrip("\n"))
    return "\n".join(lines)
