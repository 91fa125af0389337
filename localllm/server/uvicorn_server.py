"""Runs the server in this process until it is told to stop."""

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
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import UsageError, path_text
from localllm.server.app import App

#: Connections beyond which those that say nothing are closed, and files that a process has open beside them.
MAX_CONNECTIONS, OTHER_FILES = 512, 128

#: So many more are answered before uvicorn refuses with 503: it still counts requests whose connections were closed.
_ENDING = 16

#: Seconds for which an idle connection is kept, and those in which the head of a request has to come.
KEEP_ALIVE_S, HEAD_S = 75, 10.0

#: Bytes of a connection that are parsed at once, while others wait: a chunk of one byte takes as long as a long one.
_PARSED_AT_ONCE = 4096

#: Seconds after their time has passed in which replies are told so.
_LAST_WORDS_S = 2


def connection_limit() -> int:
    """`MAX_CONNECTIONS`, or fewer where a process may not have so many files: macOS gives it 256 unless it asks."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    wanted = MAX_CONNECTIONS + _ENDING + OTHER_FILES
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
            return MAX_CONNECTIONS
        return max(8, min(MAX_CONNECTIONS, limit - _ENDING - OTHER_FILES))
    return MAX_CONNECTIONS


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise UsageError(f"{host} port {port} cannot be listened on ({error}): choose another --port") from None
    # Connections take it over.  Without it a token waits 40 ms until the one before is acknowledged (asyncio sets it
    # only for sockets that were made for TCP by number).
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def end_if_busy(code: int) -> None:
    """Ends the process where a thread is still at work, whose end Python would wait for: the server has ended, and
    what a library does for a request cannot be stopped."""
    end = time.monotonic() + _LAST_WORDS_S
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


class _Connection(H11Protocol):
    """Uvicorn's, but that clients which say nothing shut nobody out: uvicorn waits for ever for a first request, and
    for the rest of one that has begun.

    A head that does not come in time ends the connection.  Where all places are taken, the one that was silent for
    longest makes room for a new one.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unparsed = b""
        self._heard_at = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, transport.close)
        others = [each for each in self.connections if each is not self and not each.transport.is_closing()]
        silent = [each for each in others if isinstance(each, _Connection) and each._waits_for_client]
        limit = (self.config.limit_concurrency or MAX_CONNECTIONS + _ENDING) - _ENDING
        if len(others) + 1 >= limit and silent:  # with none that is silent uvicorn answers 503
            longest = min(silent, key=lambda each: each._heard_at)
            longest.transport.abort()
            self.connections.discard(longest)  # uvicorn counts them before it learns of that

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        is_waiting, self._unparsed = bool(self._unparsed), self._unparsed + data
        if not is_waiting:
            self._parse()

    def _parse(self) -> None:
        """Parse some bytes, and the next ones after other connections had their turn."""
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
        """End the connection when the server stops: at once if the rest of a request has yet to arrive."""
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
        """Whether no request is at work."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits_for_client(self) -> bool:
        """Whether it is idle, or the rest of a request has to come."""
        return self._is_idle or self.cycle.more_body


class Server(uvicorn.Server):
    """Uvicorn, but that replies under way have ``grace_s`` to end, and are then cut with an error that says so."""

    def __init__(self, app: App, *, grace_s: float, tls: tuple[Path | None, Path | None] = (None, None)) -> None:
        """``tls``: files of the private key and of the certificate; without them it is plain HTTP."""
        config = uvicorn.Config(
            app.asgi,
            ssl_keyfile=tls[0],
            ssl_certfile=tls[1],
            http=_Connection,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=connection_limit() + _ENDING,
            timeout_graceful_shutdown=math.ceil(grace_s) + _LAST_WORDS_S,
        )
        try:
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
        """Ctrl-C and SIGTERM stop the server, and are done with: uvicorn's own would end the process by them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        handlers = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server; may be called from any thread.  The second time replies are cut at once."""
        at_once, self.should_exit = self.should_exit, True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop, 0.0 if at_once else self._grace_s)

    def _stop_when_started(self) -> None:
        """Stop the server; called in its event loop.  Uvicorn cleans up only after a start that was completed."""
        if self.started:
            self.handle_exit(signal.SIGTERM, None)
        elif self._loop is not None:
            self._loop.call_later(0.01, self._stop_when_started)

    def _stop(self, grace_s: float) -> None:
        self._app.dispatcher.stop(at_once=not grace_s)
        if grace_s and self._loop is not None:
            self._loop.call_later(grace_s, self._stop, 0.0)
