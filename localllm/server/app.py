"""The server as an ASGI application, with its table of endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from localllm.errors import LocalLLMError
from localllm.server import (
    anthropic,
    downloads,
    embeddings,
    llamacpp,
    lm_studio,
    model_control,
    ollama,
    openai,
    page_endpoints,
    responses,
    roles,
    transcriptions,
)
from localllm.server.answers import LoraScale
from localllm.server.bodies import decode
from localllm.server.dispatcher import Dispatcher
from localllm.server.http import Guard, HTTPError, Limits, json_response
from localllm.server.keys import CURRENT
from localllm.server.metrics import Metrics
from localllm.server.models import Models
from localllm.server.monitor import Monitor, Monitoring
from localllm.server.page import page
from localllm.server.page_tools import PageTools, ToolCallRequest
from localllm.server.response_store import ResponseStore
from localllm.version import __version__

#: Called with the request, the dispatcher, and the body if the endpoint reads one.
_Endpoint = Callable[..., Awaitable[Response]]


async def _root(request: Request, dispatcher: Dispatcher) -> Response:
    """Return the page for browsers, or for other programs the text that identifies Ollama."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(f"Ollama is running: localllm {__version__} has its API, too\n")
    text, policy = page()
    headers = {"Content-Security-Policy": policy, "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(text, headers=headers)


async def _openapi(request: Request, dispatcher: Dispatcher) -> Response:
    return json_response(description())


async def _refuse_change(request: Request, dispatcher: Dispatcher) -> Response:
    raise HTTPError(
        403, "requests change no models: they are plain files, which localllm models lists where the server runs"
    )


_COUNTED_CHATS = ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens")
_TRANSCRIPTIONS = ("/v1/audio/transcriptions", "/audio/transcriptions")


async def _left_out(request: Request, dispatcher: Dispatcher) -> Response:
    raise HTTPError(501, "this server was started with --no-slots", "not_available")


#: Method, paths, handler, and type of the request body.
_ENDPOINTS: tuple[tuple[str, tuple[str, ...], _Endpoint, Any], ...] = (
    ("GET", ("/",), _root, None),
    ("GET", ("/openapi.json",), _openapi, None),
    ("GET", ("/page/tools",), page_endpoints.page_tools, None),
    ("POST", ("/page/tools/preview",), page_endpoints.page_tool_preview, ToolCallRequest),
    ("POST", ("/page/tools/call",), page_endpoints.page_tool_call, ToolCallRequest),
    ("POST", ("/page/tools/restart",), page_endpoints.page_tool_restart, None),
    ("POST", ("/page/tools/undo",), page_endpoints.page_tool_undo, page_endpoints.UndoRequest),
    ("GET", ("/v1/models", "/models"), openai.models, None),
    ("GET", ("/models/sse",), model_control.events, None),
    ("GET", ("/models/catalog",), downloads.catalog, None),
    ("POST", ("/models/load",), model_control.load, model_control.ModelName),
    ("POST", ("/models/unload",), model_control.unload, model_control.ModelName),
    ("GET", ("/running",), model_control.running, None),
    ("GET", ("/unload",), model_control.unload_all, None),
    ("POST", ("/unload",), model_control.unload_all, None),
    ("GET", ("/v1/models/{name:path}",), openai.model, None),
    (
        "POST",
        ("/v1/chat/completions", "/chat/completions", "/api/v0/chat/completions"),
        openai.chat_completions,
        openai.ChatRequest,
    ),
    ("POST", ("/v1/chat/completions/control",), openai.control, openai.ControlRequest),
    ("POST", ("/v1/completions", "/api/v0/completions"), openai.completions, openai.CompletionRequest),
    ("POST", _COUNTED_CHATS, openai.chat_input_tokens, openai.ChatRequest),
    ("POST", ("/v1/responses", "/responses"), responses.responses, responses.ResponsesRequest),
    ("POST", ("/v1/responses/input_tokens",), responses.input_tokens, responses.ResponsesRequest),
    ("GET", ("/v1/responses/{id}/input_items",), responses.input_items, None),
    ("GET", ("/v1/responses/{id}",), responses.get_response, None),
    ("DELETE", ("/v1/responses/{id}",), responses.delete_response, None),
    ("POST", _TRANSCRIPTIONS, transcriptions.transcriptions, transcriptions.TranscriptionRequest),
    ("POST", ("/v1/embeddings", "/api/v0/embeddings"), embeddings.openai, embeddings.EmbeddingsRequest),
    ("POST", ("/embedding", "/embeddings"), embeddings.llamacpp, embeddings.EmbeddingsRequest),
    ("POST", ("/pooling",), embeddings.vllm, embeddings.PoolingRequest),
    ("POST", ("/api/embed", "/api/embeddings"), embeddings.ollama, embeddings.OllamaEmbedRequest),
    ("POST", ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking"), embeddings.rerank, embeddings.RerankRequest),
    ("POST", ("/v1/messages",), anthropic.messages, anthropic.MessagesRequest),
    ("POST", ("/v1/messages/count_tokens",), anthropic.count_tokens, anthropic.MessagesRequest),
    ("POST", ("/api/chat",), ollama.chat, ollama.OllamaRequest),
    ("POST", ("/api/generate",), ollama.generate, ollama.OllamaRequest),
    ("GET", ("/api/tags",), ollama.tags, None),
    ("GET", ("/api/ps",), ollama.running, None),
    ("GET", ("/api/version",), ollama.version, None),
    ("POST", ("/api/show",), ollama.show, ollama.OllamaRequest),
    ("POST", ("/api/pull",), ollama.pull, ollama.OllamaRequest),
    ("DELETE", ("/api/delete",), ollama.delete, ollama.OllamaRequest),
    ("POST", ("/api/copy", "/api/create", "/api/push", "/api/blobs/{digest}"), _refuse_change, None),
    ("GET", ("/api/v0/models",), lm_studio.models_v0, None),
    ("GET", ("/api/v0/models/{name:path}",), lm_studio.model_v0, None),
    ("GET", ("/api/v1/models",), lm_studio.models_v1, None),
    ("POST", ("/api/v1/models/load",), lm_studio.load, model_control.ModelName),
    ("POST", ("/api/v1/models/unload",), lm_studio.unload, lm_studio.UnloadRequest),
    ("POST", ("/api/v1/chat",), lm_studio.chat, lm_studio.StudioChatRequest),
    ("GET", ("/health", "/v1/health"), llamacpp.health, None),
    ("GET", ("/props",), llamacpp.props, None),
    ("GET", ("/slots",), llamacpp.slots, None),
    ("POST", ("/slots/{id}",), llamacpp.slot, llamacpp.SlotRequest),
    ("GET", ("/metrics",), llamacpp.metrics, None),
    ("GET", ("/lora-adapters",), llamacpp.lora_adapters, None),
    ("POST", ("/lora-adapters",), llamacpp.set_lora_adapters, list[LoraScale]),
    ("POST", ("/tokenize",), llamacpp.tokenize, llamacpp.TokenizeRequest),
    ("POST", ("/detokenize",), llamacpp.detokenize, llamacpp.DetokenizeRequest),
    ("POST", ("/apply-template",), llamacpp.apply_template, llamacpp.TemplateRequest),
    ("POST", ("/completion", "/completions"), llamacpp.completion, llamacpp.LlamaCompletionRequest),
    ("POST", ("/infill",), llamacpp.infill, llamacpp.InfillRequest),
)


_RESPONSES = {"200": {"description": "done"}, "default": {"description": "an error, and why"}}


def description() -> dict[str, Any]:
    """Return the server's endpoints in OpenAPI 3.1 format."""
    bodies = dict.fromkeys(body for *_, body in _ENDPOINTS if body is not None)
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, names, endpoint, body in _ENDPOINTS:
        for name in () if endpoint is _refuse_change else names:
            path = name.replace(":path", "")
            operation: dict[str, Any] = {"responses": _RESPONSES}
            if body is not None:
                operation["requestBody"] = {"content": {"application/json": {"schema": schema_of[body]}}}
            if parameters := re.findall(r"{(\w+)}", path):
                location = {"in": "path", "required": True, "schema": {"type": "string"}}
                operation["parameters"] = [{"name": parameter, **location} for parameter in parameters]
            paths.setdefault(path, {})[method.lower()] = operation
    info = {"title": "localllm serve", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


@dataclass
class _Path:
    pattern: str  # such as "/v1/responses/{id}"
    dispatcher: Dispatcher
    endpoints: dict[str, tuple[_Endpoint, Any]] = field(default_factory=dict)  # with the type of the body, by method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"]):
            raise HTTPError(426, "there are no WebSockets here: send the request over HTTP")  # Codex then uses HTTP
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if method not in self.endpoints:
            allow = ", ".join(self.endpoints)
            raise HTTPError(405, f"{scope['path']:.80} takes {allow}, not {scope['method']:.20}", allow=allow)
        key, role = CURRENT.get(), roles.role_of(method, self.pattern)
        if key is not None and not key.has_role(role):
            raise HTTPError(403, f"this needs a key with the role {role}: use one, or another endpoint")
        endpoint, body_type = self.endpoints[method]
        request = Request(scope, receive, send)
        bodies = [] if body_type is None else [await decode(request, body_type, self.dispatcher.read_body)]
        response = await endpoint(request, self.dispatcher, *bodies)
        await response(scope, receive, send)


@dataclass
class App:
    models: Models  # served models
    limits: Limits = field(default_factory=Limits)  # access control
    responses_folder: Path | None = None  # stores responses; None stores them only in memory
    loads_first: bool = False  # whether to load the first model at the start
    has_slots: bool = True  # whether ``/slots`` answers
    monitoring: Monitoring = field(default_factory=Monitoring)  # metrics, logs and traces
    may_pull: bool = False  # whether requests may download and delete models
    page_tools: PageTools | None = None  # tools that the page may call
    dispatcher: Dispatcher = field(init=False)  # submits requests to the models
    routes: Sequence[Route] = field(init=False)  # all endpoints
    asgi: ASGIApp = field(init=False)  # the application for a server such as uvicorn
    load_error: Exception | None = field(init=False, default=None)  # why the only model cannot be loaded
    stop: Callable[[], object] = field(init=False, default=lambda: None)  # stops the server, which sets it

    def __post_init__(self) -> None:
        self.models.describe = llamacpp.described
        metrics = Metrics(self.models, per_key=self.monitoring.metrics_per_key)
        self.dispatcher = Dispatcher(self.models, ResponseStore(self.responses_folder), metrics)
        self.dispatcher.may_pull, self.dispatcher.page_tools = self.may_pull, self.page_tools
        paths: dict[str, _Path] = {}
        for method, names, endpoint, body_type in _ENDPOINTS:
            for name in names:
                row = (endpoint, body_type) if self.has_slots or name != "/slots" else (_left_out, None)
                paths.setdefault(name, _Path(name, self.dispatcher)).endpoints[method] = row
        self.routes = [Route(name, path) for name, path in paths.items()]
        router = Router(self.routes, redirect_slashes=False, default=_not_found, lifespan=self._lifespan)
        guard = Guard(router, self.limits, self.models.log)
        self.asgi = Monitor(guard, self.routes, metrics, self.monitoring)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: ASGIApp) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._unload_expired())]
        if self.loads_first:
            self.dispatcher.is_starting = True
            tasks.append(asyncio.create_task(self._load_first()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.dispatcher.stop(at_once=True)
            await self.models.close()
            if self.page_tools is not None:
                await asyncio.to_thread(self.page_tools.close)
            self.dispatcher.close()

    async def _load_first(self) -> None:
        try:
            served, _ = await self.models.acquire(None)
            self.models.release(served)
        except LocalLLMError as error:  # logged, and reported to requests for the model
            if len(self.models.served) == 1 and not self.models.is_closed:
                self.load_error = error
                self.stop()
        finally:
            self.dispatcher.is_starting = False

    async def _unload_expired(self) -> None:
        while True:
            await asyncio.sleep(await self.models.unload_expired())


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        raise HTTPError(404, f"there is nothing at {scope['path']!r:.80}: /openapi.json lists what there is")
