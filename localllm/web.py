"""Fetches web pages and files for models: from the Internet alone, within bounds."""

from __future__ import annotations

import http.client
import io
import ipaddress
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from localllm.errors import UsageError

#: Seconds that a server may send nothing, and seconds of a whole download.
_SECONDS, MAX_SECONDS = 20.0, 60.0
#: Seconds between two checks whether a download is stopped.
_POLL_SECONDS = 0.2
#: IPv6 addresses that stand for those of IPv4, in networks that have only IPv6 (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: Where the Internet's hosts have their IPv6 addresses (IANA, IPv6 Address Space).
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
#: IANA's registries of special-purpose IPv4 and IPv6 addresses, the latter within the above, and IPv4's multicast.
#: Also the few that count as reachable: what answers there belongs to the network (PCP, TURN, DNS-SD, AS112, AMT).
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24"),
            *("192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
            *("224.0.0.0/4", "240.0.0.0/4"),
            *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
        ),
    )
)
#: Of the library's, without those for other protocols and for proxies.
_HANDLERS: tuple[Any, ...] = (urllib.request.HTTPRedirectHandler, urllib.request.HTTPDefaultErrorHandler)
_HANDLERS += (urllib.request.HTTPErrorProcessor, urllib.request.UnknownHandler)


@dataclass(frozen=True)
class Page:
    data: bytes
    content_type: str
    charset: str


def is_web(address: str) -> bool:
    """Whether an address is of a web page: http or https, with a host, and nothing that does not belong there."""
    if any(not "!" <= c <= "~" for c in address):
        return False
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


def is_public(address: str) -> bool:
    """Whether an IP address is of the Internet: this machine's and its network's services are not for models.

    Other spellings of IPv4 addresses in IPv6 than NAT64's (mapped, translated, compatible, 6to4, Teredo) are not.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip in _NAT64:
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return (ip.version == 4 or ip in _GLOBAL_UNICAST) and not any(ip in block for block in _SPECIAL)


class _Limits:
    """The deadline of a download, which may also be stopped."""

    def __init__(self, seconds: float, is_stopped: Callable[[], bool]) -> None:
        self._end, self._is_stopped = time.monotonic() + seconds, is_stopped

    def left(self) -> float:
        """Return the seconds until the deadline.  Raises TimeoutError after it, or if the download is stopped."""
        if (left := self._end - time.monotonic()) <= 0 or self._is_stopped():
            raise TimeoutError("it takes too long")
        return left


class _Reader(io.RawIOBase):
    """Reads bytes from a socket, within the limits of the download."""

    def __init__(self, stream: Any, connection: socket.socket, limits: _Limits) -> None:
        self._stream, self._connection, self._limits = stream, connection, limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        silent_until = time.monotonic() + _SECONDS
        while True:
            self._connection.settimeout(min(_POLL_SECONDS, self._limits.left()))
            try:
                return self._connection.recv_into(buffer)
            except TimeoutError:
                if time.monotonic() > silent_until:
                    raise

    def close(self) -> None:
        self._stream.close()  # which closes the connection
        super().close()


def _connect(limits: _Limits, address: tuple[str, int], timeout: float, *options: Any) -> socket.socket:
    """Resolve a name, check its addresses, and connect: a second look-up could return another address."""
    addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)]
    if not all(map(is_public, addresses)):
        raise UsageError(f"{address[0]} is not in the Internet")
    for ip in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((ip, address[1]), min(timeout, limits.left()), *options)
    return socket.create_connection((addresses[-1], address[1]), min(timeout, limits.left()), *options)


class _Web(urllib.request.HTTPSHandler):
    """Opens web pages of allowed hosts, also after redirections."""

    def __init__(self, hosts: Sequence[str], limits: _Limits) -> None:
        super().__init__()
        self._hosts, self._limits = hosts, limits

    def http_open(self, request: Any) -> Any:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), request)

    def https_open(self, request: Any) -> Any:
        return self.do_open(partial(self._connection, http.client.HTTPSConnection), request)

    http_request = urllib.request.HTTPSHandler.https_request

    def _connection(self, kind: Any, *arguments: Any, **options: Any) -> Any:
        connection = kind(*arguments, **options)
        if not any(fnmatchcase(connection.host.lower(), host.lower()) for host in self._hosts):
            raise UsageError(f"{connection.host} is not one of the hosts that are allowed")
        connection._create_connection = partial(_connect, self._limits)
        connection.response_class = self._response
        return connection

    def _response(self, connection: Any, *arguments: Any, **options: Any) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(connection, *arguments, **options)
        response.fp = io.BufferedReader(_Reader(response.fp, connection, self._limits))
        return response


def fetch(
    address: str,
    max_bytes: int,
    *,
    hosts: Sequence[str] = ("*",),
    is_stopped: Callable[[], bool] = lambda: False,
    seconds: float = MAX_SECONDS,
) -> Page:
    """Fetch the first bytes of an address.

    Args:
        address: an address on the web.
        max_bytes: the number of bytes; the rest is not read.
        hosts: allowed hosts, also of redirections; "*.example.org" allows all hosts below it.
        is_stopped: whether the page is no longer needed.
        seconds: the limit for the whole download.

    Raises:
        UsageError: the address is not a web address, or its host is not allowed.
        OSError: the host cannot be reached, or the download is stopped or takes too long.
    """
    if not is_web(address):
        raise UsageError("it is not the address of a web page")
    limits = _Limits(seconds, is_stopped)
    opener = urllib.request.OpenerDirector()
    for handler in (_Web(hosts, limits), *(handler() for handler in _HANDLERS)):
        opener.add_handler(handler)
    request = urllib.request.Request(address, headers={"User-Agent": "localllm"})
    data = b""
    try:
        page = opener.open(request, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise
    with page:
        while len(data) < max_bytes and (more := page.read1(1 << 16)):
            data += more
        headers = page.headers
        return Page(data, headers.get_content_type(), headers.get_content_charset("utf-8"))
