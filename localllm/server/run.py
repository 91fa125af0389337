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

from localllm.errors import UsageError
from localllm.server.app import App

#: Connections that may be open at once, and seconds for which an idle one is kept.
MOST_CONNECTIONS, KEEP_ALIVE_S = 1024, 75


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free.

    Raises:
        UsageError: the address is taken, or not of this machine.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise UsageError(f"{host} port {port} cannot be listened on ({error}): choose another --port") from None
    # Connections take it over.  Without it a token waits 40 ms until the one before is acknowledged (asyncio sets it
    # only for sockets that were made for TCP by number).
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class Server(uvicorn.Server):
    """Uvicorn, but that replies under way have ``grace_s`` to end, and are then cut with an error that says so."""

    def __init__(self, app: App, *, grace_s: float) -> None:
        config = uvicorn.Config(
            app.asgi,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=MOST_CONNECTIONS,
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
