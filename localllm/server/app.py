"""The server as an ASGI application: which path is answered by what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from localllm.server import anthropic, llamacpp, ollama, openai
from localllm.server.answers import Desk
from localllm.server.http import Guard, HTTPError, Limits, not_available
from localllm.server.models import Models
from localllm.server.responses import Store, delete_response, get_response, responses

#: Seconds between two looks for models that nobody has used for long.
_LOOK_S = 1.0

_Endpoint = Callable[[Request, Desk], Awaitable[Response]]

#: Method, paths and what answers.
_ENDPOINTS: tuple[tuple[str, tuple[str, ...], _Endpoint], ...] = (
    ("GET", ("/v1/models", "/models"), openai.models),
    ("GET", ("/v1/models/{name:path}",), openai.model),
    ("POST", ("/v1/chat/completions", "/chat/completions"), openai.chat_completions),
    ("POST", ("/v1/completions",), openai.completions),
    ("POST", ("/v1/messages",), anthropic.messages),
    ("POST", ("/v1/messages/count_tokens",), anthropic.count_tokens),
    ("POST", ("/api/chat",), ollama.chat),
    ("POST", ("/api/generate",), ollama.generate),
    ("GET", ("/api/tags",), ollama.tags),
    ("GET", ("/api/ps",), ollama.running),
    ("GET", ("/api/version",), ollama.version),
    ("POST", ("/api/show",), ollama.show),
    ("POST", ("/api/pull",), ollama.pull),
    ("GET", ("/health", "/v1/health"), llamacpp.health),
    ("GET", ("/props",), llamacpp.props),
    ("GET", ("/slots",), llamacpp.slots),
    ("GET", ("/metrics",), llamacpp.metrics),
    ("GET", ("/lora-adapters",), llamacpp.lora_adapters),
    ("POST", ("/tokenize",), llamacpp.tokenize),
    ("POST", ("/detokenize",), llamacpp.detokenize),
    ("POST", ("/apply-template",), llamacpp.apply_template),
    ("POST", ("/completion", "/completions"), llamacpp.completion),
    ("POST", ("/infill",), llamacpp.infill),
)

#: What a later version will have, and its paths.
_NOT_YET = (
    ("embeddings", ("/v1/embeddings", "/embedding", "/embeddings", "/api/embed", "/api/embeddings")),
    ("reranking", ("/v1/rerank", "/rerank", "/reranking")),
    ("saving and restoring a slot", ("/slots/{id}",)),
)


@dataclass
class App:
    """The application.

    Attributes:
        desk: takes requests to the models.
        asgi: what a server such as uvicorn runs.
    """

    models: Models
    limits: Limits = field(default_factory=Limits)
    responses_folder: Path | None = None
    desk: Desk = field(init=False)
    asgi: ASGIApp = field(init=False)

    def __post_init__(self) -> None:
        self.desk, store = Desk(self.models), Store(self.responses_folder)

        def bound(endpoint: Callable[..., Awaitable[Response]], *more: Any) -> Callable[..., Any]:
            async def answer(request: Request) -> Response:
                return await endpoint(request, self.desk, *more)

            return answer

        routes = [
            Route(path, bound(endpoint), methods=[method]) for method, paths, endpoint in _ENDPOINTS for path in paths
        ]
        for method, path, keeper in (
            ("POST", "/v1/responses", responses),
            ("GET", "/v1/responses/{id}", get_response),
            ("DELETE", "/v1/responses/{id}", delete_response),
        ):
            routes.append(Route(path, bound(keeper, store), methods=[method]))
        for what, paths in _NOT_YET:
            routes += [Route(path, partial(_refuse, what), methods=["POST"]) for path in paths]
        routes.append(Route("/", _page, methods=["GET"]))
        self.asgi = Guard(
            Router(routes, redirect_slashes=False, default=_not_found, lifespan=self._lifespan), self.limits
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: ASGIApp) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._unload_expired())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            self.desk.stop(at_once=True)
            await self.models.close()
            self.desk.close()

    async def _unload_expired(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.models.unload_expired()


async def _refuse(what: str, request: Request) -> Response:
    raise not_available(what)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        raise HTTPError(404, f"there is nothing at {scope['path']!r:.80}")


async def _page(request: Request) -> Response:
    text = (resources.files("localllm.server") / "page.html").read_text("utf-8")
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Frame-Options": "DENY"})
