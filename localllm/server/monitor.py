"""Observes all requests of a server: request ids, metrics, log lines and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.server.logs import log_request
from localllm.server.metrics import Metrics
from localllm.server.records import CURRENT, RequestRecord, request_id

if TYPE_CHECKING:
    from localllm.server.tracing import Tracing


@dataclass(frozen=True)
class Monitoring:
    """Options of `Monitor`."""

    metrics_per_key: bool = False  # whether the metrics contain the usage of each API key
    logs_prompts: bool = False  # whether log lines contain prompts
    tracing: Tracing | None = None


class Monitor:
    """An ASGI application that observes the requests to another one.  It must be the outermost."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route], metrics: Metrics, options: Monitoring) -> None:
        self._app, self._metrics, self._options = app, metrics, options
        self._paths = {route.path for route in routes if "{" not in route.path}
        self._templates = [route for route in routes if "{" in route.path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        address = str((scope.get("client") or ("",))[0])
        record = RequestRecord(request_id(scope["headers"]), scope["method"], scope["path"], address)
        tracing = self._options.tracing
        span = None if tracing is None else tracing.start(scope)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", record.id.encode())]}
            await send(message)

        token = CURRENT.set(record)
        try:
            await self._app(scope, receive, sending)
        finally:
            record.key, route = _key_name(scope), self._route(scope)
            self._metrics.observe(record, route)
            trace_id = "" if tracing is None or span is None else tracing.end(span, record, route)
            log_request(record, has_prompts=self._options.logs_prompts, trace_id=trace_id)
            CURRENT.reset(token)
        return None

    def _route(self, scope: Scope) -> str:
        """Return the template of a path; empty for a path that the server does not have."""
        if scope["path"] in self._paths:
            return str(scope["path"])
        matches = (route.path for route in self._templates if route.matches(scope)[0] is not Match.NONE)
        return next(matches, "")


def _key_name(scope: Scope) -> str:
    """Return the name of the client's API key, or the start of its hash; empty without a valid key.

    `localllm.server.http.Guard` sets ``key_name`` and ``client``.
    """
    state = scope.get("state", {})
    client = str(state.get("client", ""))
    return str(state.get("key_name") or (client.removeprefix("key ")[:8] if client.startswith("key ") else ""))
