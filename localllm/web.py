"""Fetches web pages and files for models: from the Internet alone, within bounds."""

from __future__ import annotations

import http.client
import ipaddress
import socket
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

#: Seconds that a server may take to go on.
_SECONDS = 20.0
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


def _connect(address: tuple[str, int], *options: Any) -> socket.socket:
    """Connects with what was checked: a name may mean another address when it is asked for again."""
    found = [str(each[4][0]) for each in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)]
    if not all(map(is_public, found)):
        raise UsageError(f"{address[0]} is not in the Internet")
    for ip in found[:-1]:
        with suppress(OSError):
            return socket.create_connection((ip, address[1]), *options)
    return socket.create_connection((found[-1], address[1]), *options)


class _Web(urllib.request.HTTPSHandler):
    """Opens pages, also those that others redirect to."""

    def __init__(self, hosts: Sequence[str]) -> None:
        super().__init__()
        self._hosts = hosts

    def http_open(self, request: Any) -> Any:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), request)

    def https_open(self, request: Any) -> Any:
        return self.do_open(partial(self._connection, http.client.HTTPSConnection), request)

    http_request = urllib.request.HTTPSHandler.https_request

    def _connection(self, kind: Any, *arguments: Any, **options: Any) -> Any:
        made = kind(*arguments, **options)
        if not any(fnmatchcase(made.host.lower(), host.lower()) for host in self._hosts):
            raise UsageError(f"{made.host} is not one of the hosts that are allowed")
        made._create_connection = _connect
        return made


def fetch(
    address: str, max_bytes: int, *, hosts: Sequence[str] = ("*",), is_stopped: Callable[[], bool] = lambda: False
) -> Page:
    """Fetches an address, up to so many bytes.  ``hosts``: names that may be asked, also by redirections;
    "*.example.org" are all below it; ``is_stopped``: says that nobody waits for it any more."""
    if not is_web(address):
        raise UsageError("it is not the address of a web page")
    opener = urllib.request.OpenerDirector()
    for handler in (_Web(hosts), *(each() for each in _HANDLERS)):
        opener.add_handler(handler)
    request = urllib.request.Request(address, headers={"User-Agent": "localllm"})
    data = b""
    try:
        page = opener.open(request, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise
    with page:
        while len(data) < max_bytes and not is_stopped() and (more := page.read1(1 << 16)):
            data += more
        headers = page.headers
        return Page(data, headers.get_content_type(), headers.get_content_charset("utf-8"))
