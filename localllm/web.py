"""Fetches web pages and files for models: only from the Internet, with limits on time and size."""

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

#: Maximum seconds without data from the server, and maximum seconds of a download.
_SECONDS, MAX_SECONDS = 20.0, 60.0
#: Seconds between two checks whether the download is cancelled.
_POLL_SECONDS = 0.2
#: IPv6 addresses that represent IPv4 addresses in networks without IPv4 (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: Block of the Internet's IPv6 addresses (IANA, IPv6 Address Space).
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
#: Blocks of special-purpose IPv4 and IPv6 addresses in IANA's registries, and IPv4 multicast.  Includes the globally
#: reachable special blocks, because these services belong to the local network (PCP, TURN, DNS-SD, AS112,
#: AMT).  IPv6 blocks outside `_GLOBAL_UNICAST` are omitted.
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
#: Handlers of urllib, except the handlers for proxies and for protocols other than HTTP.
_HANDLERS: tuple[Any, ...] = (urllib.request.HTTPRedirectHandler, urllib.request.HTTPDefaultErrorHandler)
_HANDLERS += (urllib.request.HTTPErrorProcessor, urllib.request.UnknownHandler)


@dataclass(frozen=True)
class Page:
    data: bytes
    content_type: str
    charset: str


def is_web(address: str) -> bool:
    """Return whether an address is a web address: http or https, with a host and only printable ASCII characters."""
    if any(not "!" <= c <= "~" for c in address):
        return False
    try:
        url = urlsplit(address)
        return url.scheme in ("http", "https") and bool(url.hostname)
    except ValueError:
        return False


def is_public(address: str) -> bool:
    """Return whether an IP address is on the Internet.  Services of this machine and its network are not for models.

    IPv6 spellings of IPv4 addresses other than NAT64 (mapped, translated, compatible, 6to4, Teredo) are not public.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip in _NAT64:
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return (ip.version == 4 or ip in _GLOBAL_UNICAST) and not any(ip in block for block in _SPECIAL)


class _Limits:
    """The deadline of a download, which may also be cancelled."""

    def __init__(self, seconds: float, is_stopped: Callable[[], bool]) -> None:
        self._end, self._is_stopped = time.monotonic() + seconds, is_stopped

    def remaining(self) -> float:
        """Return the seconds until the deadline.  Raises TimeoutError after it, or if the download is cancelled."""
        if (remaining := self._end - time.monotonic()) <= 0 or self._is_stopped():
            raise TimeoutError("it takes too long")
        return remaining


class _Reader(io.RawIOBase):
    """Reads bytes from a socket, within the limits of the download."""

    def __init__(self, stream: Any, connection: socket.socket, limits: _Limits) -> None:
        self._stream, self._connection, self._limits = stream, connection, limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        silent_until = time.monotonic() + _SECONDS
        while True:
            self._connection.settimeout(min(_POLL_SECONDS, self._limits.remaining()))
            try:
                return self._connection.recv_into(buffer)
            except TimeoutError:
                if time.monotonic() > silent_until:
                    raise

    def close(self) -> None:
        self._stream.close()  # which closes the connection
        super().close()


def _connect(
    limits: _Limits, may_be_private: bool, address: tuple[str, int], timeout: float, *options: Any
) -> socket.socket:
    """Resolve a name, check its addresses, and connect, because a second lookup could return another address."""
    addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)]
    if not may_be_private and not all(map(is_public, addresses)):
        raise UsageError(f"{address[0]} is not a public host on the Internet")
    for ip in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((ip, address[1]), min(timeout, limits.remaining()), *options)
    return socket.create_connection((addresses[-1], address[1]), min(timeout, limits.remaining()), *options)


def _matches(host: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(host.lower(), pattern.lower()) for pattern in patterns)


class _Web(urllib.request.HTTPSHandler):
    """Opens web pages of allowed hosts, also after redirections."""

    def __init__(self, hosts: Sequence[str], private_hosts: Sequence[str], limits: _Limits) -> None:
        super().__init__()
        self._hosts, self._private_hosts, self._limits = hosts, private_hosts, limits

    def http_open(self, request: Any) -> Any:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), request)

    def https_open(self, request: Any) -> Any:
        return self.do_open(partial(self._connection, http.client.HTTPSConnection), request)

    http_request = urllib.request.HTTPSHandler.https_request

    def _connection(self, connection_class: Any, *arguments: Any, **options: Any) -> Any:
        connection = connection_class(*arguments, **options)
        if not _matches(connection.host, self._hosts):
            raise UsageError(f"{connection.host} is not an allowed host")
        may_be_private = _matches(connection.host, self._private_hosts)
        connection._create_connection = partial(_connect, self._limits, may_be_private)
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
    private_hosts: Sequence[str] = (),
    is_stopped: Callable[[], bool] = lambda: False,
    seconds: float = MAX_SECONDS,
) -> Page:
    """Fetch the first bytes of a page.

    Args:
        address: an address on the web.
        max_bytes: maximum number of bytes to read.
        hosts: allowed hosts, also of redirections; "*.example.org" allows all its subdomains.
        private_hosts: hosts whose addresses may be private, in the same form.
        is_stopped: returns whether to cancel the download.
        seconds: maximum seconds of the download.

    Raises:
        UsageError: the address is not a web address, or its host is not allowed.
        OSError: the host cannot be reached, or the download is cancelled or takes too long.
    """
    if not is_web(address):
        raise UsageError("it is not the address of a web page")
    limits = _Limits(seconds, is_stopped)
    opener = urllib.request.OpenerDirector()
    for handler in (_Web(hosts, private_hosts, limits), *(handler() for handler in _HANDLERS)):
        opener.add_handler(handler)
    request = urllib.request.Request(address, headers={"User-Agent": "localllm"})
    data = b""
    try:
        page = opener.open(request, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()  # the error object holds the connection
        raise
    with page:
        while len(data) < max_bytes and (more := page.read1(1 << 16)):
            data += more
        headers = page.headers
        return Page(data, headers.get_content_type(), headers.get_content_charset("utf-8"))
