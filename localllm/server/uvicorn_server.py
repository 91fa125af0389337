"""Runs the server in this process until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import UsageError, path_text
from localllm.regular_file import refuse_named_pipe
from localllm.server.app import App

#: Connections above which silent ones are closed, and other open files of the process.
MAX_CONNECTIONS, OTHER_FILES = 512, 128

#: Additional requests before uvicorn answers 503, because it still counts requests of closed connections.
_ENDING = 16

#: Seconds before an idle connection is closed, and seconds to receive the head of a request.
KEEP_ALIVE_S, HEAD_S = 75, 10.0

#: Address of clients of a Unix socket, for `Server`'s ``trusted_proxies``.
UNIX_CLIENT = "unix"

#: Bytes of a connection that are parsed before other connections get a turn.  Tiny chunks are slow to parse.
_PARSED_AT_ONCE = 4096

#: Seconds after the grace period for the error message to replies that were cut off.
_LAST_WORDS_S = 2


def connection_limit() -> int:
    """Return `MAX_CONNECTIONS`, or less if the limit of open files is lower (256 by default on macOS)."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    needed = MAX_CONNECTIONS + _ENDING + OTHER_FILES
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
            return MAX_CONNECTIONS
        return max(8, min(MAX_CONNECTIONS, limit - _ENDING - OTHER_FILES))
    return MAX_CONNECTIONS


def end_if_busy(code: int) -> None:
    """Ends the process if a thread is still busy after the server has ended.

    Python would wait for the thread, and work inside a library cannot be interrupted.
    """
    end = time.monotonic() + _LAST_WORDS_S
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


class _Connection(H11Protocol):
    """Uvicorn's connection with timeouts, so that silent clients cannot block other clients.

    Uvicorn waits forever for the first request and for the rest of an incomplete request.  Here the connection is
    closed if the head of a request does not arrive in time.  At the connection limit, a new connection replaces the
    connection that was silent for the longest time.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is None:
            self.client = (UNIX_CLIENT, 0)
        self._unparsed = b""
        self._heard_at = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, transport.close)
        connections = [each for each in self.connections if each is not self and not each.transport.is_closing()]
        silent = [each for each in connections if isinstance(each, _Connection) and each._waits_for_client]
        limit = (self.config.limit_concurrency or MAX_CONNECTIONS + _ENDING) - _ENDING
        if len(connections) + 1 >= limit and silent:  # if no connection is silent, uvicorn answers 503
            longest = min(silent, key=lambda each: each._heard_at)
            longest.transport.abort()
            self.connections.discard(longest)  # uvicorn counts connections before it sees the close

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        is_waiting, self._unparsed = bool(self._unparsed), self._unparsed + data
        if not is_waiting:
            self._parse()

    def _parse(self) -> None:
        """Parse some bytes, and schedule the next ones after the other connections."""
        data, self._unparsed = self._unparsed[:_PARSED_AT_ONCE], self._unparsed[_PARSED_AT_ONCE:]
        if not data or self.transport.is_closing():
            return
        self._parse_some(data)
        if self._unparsed:
            self.transport.pause_reading()
            self.loop.call_soon(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _parse_some(self, data: bytes) -> None:
        if self._head_timer is None and self._is_idle:
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_head_timer()

    def shutdown(self) -> None:
        """End the connection when the server stops, immediately if a request is incomplete."""
        super().shutdown()
        if not self._is_idle and self.cycle.more_body:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed = b""
        self._stop_head_timer()
        super().connection_lost(exc)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = None

    @property
    def _is_idle(self) -> bool:
        """Return whether no request is running."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits_for_client(self) -> bool:
        """Return whether the connection is idle or its request is incomplete."""
        return self._is_idle or self.cycle.more_body


class Server(uvicorn.Server):
    """Uvicorn, but at shutdown running replies have ``grace_s`` seconds to finish before they end with an error."""

    def __init__(
        self,
        app: App,
        *,
        grace_s: float,
        tls: tuple[Path | None, Path | None] = (None, None),
        trusted_proxies: Sequence[str] = (),
    ) -> None:
        """Create the server.

        Args:
            app: the application.
            grace_s: seconds that running replies have to finish after the first signal.
            tls: files of the private key and certificate; plain HTTP without them.
            trusted_proxies: addresses and networks whose header ``X-Forwarded-For`` names the client.
        """
        config = uvicorn.Config(
            app.asgi,
            ssl_keyfile=tls[0],
            ssl_certfile=tls[1],
            http=_Connection,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(trusted_proxies),
            forwarded_allow_ips=list(trusted_proxies),
            timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=connection_limit() + _ENDING,
            timeout_graceful_shutdown=math.ceil(grace_s) + _LAST_WORDS_S,
        )
        try:
            for path in tls:
                if path is not None:
                    refuse_named_pipe(path)
            config.load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            files = " and ".join(path_text(path) for path in tls if path is not None)
            raise UsageError(
                f"HTTPS cannot be served with {files} ({error}): give a key and a certificate as PEM"
            ) from None
        super().__init__(config)
        self._app, self._grace_s = app, grace_s
        app.stop = self._stop_when_started
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM by stopping the server.  Uvicorn would also end the process with the signal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        handlers = {number: signal.signal(number, self.handle_exit) for number in signals}
        if self._app.limits.keys is not None and hasattr(signal, "SIGHUP"):  # otherwise SIGHUP ends the process
            handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._reload_keys)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server; may be called from any thread.  The second call ends running replies immediately."""
        at_once, self.should_exit = self.should_exit, True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop, 0.0 if at_once else self._grace_s)

    def _reload_keys(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None and (file := self._app.limits.keys) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(file.reload)

    def _stop_when_started(self) -> None:
        """Stop the server, in its event loop, after the start is complete.  Otherwise uvicorn does not clean up."""
        if self.started:
            self.handle_exit(signal.SIGTERM, None)
        elif self._loop is not None:
            self._loop.call_later(0.01, self._stop_when_started)

    def _stop(self, grace_s: float) -> None:
        self._app.dispatcher.stop(at_once=not grace_s)
        if grace_s and self._loop is not None:
            self._loop.call_later(grace_s, self._stop, 0.0)
