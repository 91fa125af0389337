"""Runs the server in this process until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import UsageError
from localllm.server.app import App

#: Connections whose requests are answered, and of all that may be open: fewer than most systems allow files.
ANSWERED_CONNECTIONS, MAX_CONNECTIONS = 512, 640

#: Seconds for which an idle connection is kept.
KEEP_ALIVE_S = 75


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free.

    Raises:
        UsageError: the address is taken, or not of this machine.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise UsageError(f"{host} port {port} cannot be listened on ({error}): choose another --port") from None
    # Connections take it over.  Without it a token waits 40 ms until the one before is acknowledged (asyncio sets it
    # only for sockets that were made for TCP by number).
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class _Connection(H11Protocol):
    """Uvicorn's, but that connections are bounded in number, and closed if no request's head comes within twice
    ``KEEP_ALIVE_S``: uvicorn waits for ever for the first one, and for the rest of one that has begun."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
        self._close_if_idle(object())

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self, before: object) -> None:
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if self.cycle is before and not is_busy:
            self.transport.close()
        self._timer = self.loop.call_later(KEEP_ALIVE_S, self._close_if_idle, object() if is_busy else self.cycle)


class Server(uvicorn.Server):
    """Uvicorn, but that replies under way have ``grace_s`` to end, and are then cut with an error that says so."""

    def __init__(self, app: App, *, grace_s: float) -> None:
        config = uvicorn.Config(
            app.asgi,
            http=_Connection,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=ANSWERED_CONNECTIONS,
            timeout_graceful_shutdown=int(grace_s) + 10,
        )
        super().__init__(config)
        self._app, self._grace_s = app, grace_s
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
            self._loop.call_soon_threadsafe(self._stop, 0.0 if at_once else self._grace_s)

    def _stop(self, grace_s: float) -> None:
        self._app.desk.stop(at_once=not grace_s)
        if grace_s and self._loop is not None:
            self._loop.call_later(grace_s, self._stop, 0.0)
