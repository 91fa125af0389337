"""Serve one model on several machines with Ray Serve (https://docs.ray.io): replicas of `localllm serve`.

    serve run localllm.integrations.ray_serve:app model=/models/qwen.gguf max_replicas=3

Ray starts and monitors replicas, and adjusts their number to the load. Ray's consistent hashing of the start of a
conversation sends its requests to one replica, whose cache contains the earlier messages. If a replica dies, its
requests are sent to another replica, unless a part of the response has been sent.
"""

# Without postponed annotations, because ``serve run`` reads the argument type of `app`.

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from localllm.catalog.find import model_path
from localllm.llm import load
from localllm.nesting import parse_json
from localllm.server.app import App
from localllm.server.http import Limits
from localllm.server.models import Models

#: Maximum number of replicas that a request is sent to, in order.
_TRIES = 4
#: Number of characters of a prompt that determine its replica.
_PREFIX = 512

#: Status and headers of a response, before the pieces of its body.
_Head = tuple[int, list[tuple[bytes, bytes]]]


class RayConfig(pydantic.BaseModel):
    """The arguments of `app`.

    Attributes:
        model: argument of `localllm.load` on each machine; None for the demo model.
        name: name of the model in requests; None for the file's name.
        min_replicas, max_replicas: limits of the number of replicas. Starting from 0 takes time.
        target_requests: mean number of running requests per replica; above it, Ray adds a replica.
        max_requests: maximum number of running requests per replica; others wait, or go to another replica.
        threads: processors per replica.
        load: other keyword arguments of `localllm.load`, such as ``{"context": 8192, "parallel": 8}``.
        api_keys: accepted keys; empty to accept every client.
        hosts: host names that the header ``Host`` of requests may contain.
    """

    model: str | None = None
    name: str | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: float = 4
    max_requests: int = 64
    threads: int = 2
    load: dict[str, Any] = {}
    api_keys: list[str] = []
    hosts: list[str] = []


class Replica:
    """A process with the model, which handles requests like `localllm serve`."""

    def __init__(self, config: RayConfig) -> None:
        self._llm = load(model_path(config.model), threads=config.threads, **{"parallel": None, **config.load})
        name = config.name or ("demo" if config.model is None else Path(config.model).name.removesuffix(".gguf"))
        models = Models({name: config.model}, lambda *_: self._llm, takes_any_name=True)
        self._app = App(models, Limits(api_keys=config.api_keys, hosts=config.hosts))

    async def respond(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[_Head | bytes]:
        """Yield the head of a response, and then the pieces of its body.

        Args:
            scope: ASGI scope, without entries that cannot be serialised.
            body: body of the request.
        """
        messages: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        received = [{"type": "http.request", "body": body, "more_body": False}]
        is_ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await is_ended.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app.asgi(scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    yield message["body"]
            await task
        finally:
            is_ended.set()
            task.cancel()

    def check_health(self) -> None:
        """Raise ClosedError if the model is closed, so that Ray starts another replica."""
        self._llm.tokenizer.encode("")

    def __del__(self) -> None:
        self._llm.close()


class Front:
    """Sends each request to the replica of its conversation."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        scope = {
            "type": "http",
            "method": request.method,
            "path": request.url.path,
            "raw_path": request.url.path.encode(),
            "query_string": request.url.query.encode(),
            "root_path": "",
            "headers": request.headers.raw,
            "http_version": "1.1",
            "scheme": request.url.scheme,
            "client": request.client and tuple(request.client),
            "server": None,
        }
        handle = self._replicas.options(stream=True, session_id=conversation_key(body))
        fault: Exception | None = None
        for _ in range(_TRIES):
            answer = handle.respond.remote(scope, body)
            try:
                status, headers = await anext(answer)
                first = await anext(answer, b"")
            except RayError as error:  # the replica died
                fault = error
                continue
            response = StreamingResponse(_pieces(first, answer), status)
            response.raw_headers = headers
            return response
        return PlainTextResponse(f"no replica can answer: {fault}", 503)


async def _pieces(first: bytes, answer: Any) -> AsyncIterator[bytes]:
    """Yield the remaining body. On an error the connection is closed, because sent bytes cannot be taken back."""
    try:
        yield first
        async for piece in answer:
            yield piece
    finally:
        answer.cancel()


def conversation_key(body: bytes) -> str:
    """Return a hash of the messages up to the first user message, or of a prompt's start.

    Requests of one conversation have the same hash. Empty without messages or a prompt, for any replica.
    """
    try:
        request = parse_json(body)
    except ValueError:
        return ""
    if not isinstance(request, dict):
        return ""
    prompt = request.get("messages") or request.get("input") or request.get("prompt") or ""
    if isinstance(prompt, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in prompt]
        if "user" not in roles:
            return ""
        prompt = [request.get("system"), request.get("instructions"), prompt[: roles.index("user") + 1]]
    text = prompt[:_PREFIX] if isinstance(prompt, str) else json.dumps(prompt)
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def app(config: RayConfig) -> serve.Application:
    """Return the application, for ``serve.run(app(RayConfig(...)))`` and the command ``serve run``."""
    replicas = serve.deployment(
        Replica,
        max_ongoing_requests=config.max_requests,
        ray_actor_options={"num_cpus": config.threads},
        autoscaling_config=AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            target_ongoing_requests=config.target_requests,
        ),
        request_router_config=RequestRouterConfig(
            request_router_class="ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
        ),
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=2,
        graceful_shutdown_timeout_s=60,
    )
    at_head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}  # a cluster always has a head node
    front = serve.deployment(Front, max_ongoing_requests=1000, ray_actor_options=at_head)
    return front.bind(replicas.bind(config))
