"""Endpoints that load, unload and watch models, in the formats of llama.cpp's router and of llama-swap.

Sources: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md,
https://github.com/mostlygeek/llama-swap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localllm.server.dispatcher import Dispatcher
from localllm.server.endpoint import ReplyWriter
from localllm.server.http import EventStream, HTTPError, event, json_response
from localllm.server.models import ServedModel

#: Seconds between polls of the models' states.
_POLL_S = 0.2


class ModelName(msgspec.Struct):
    model: str


async def load(request: Request, dispatcher: Dispatcher, body: ModelName) -> Response:
    """Start loading a model.  ``/models/sse`` reports the progress, and ``/v1/models`` the state."""
    dispatcher.models.begin_load(dispatcher.models.named(body.model))
    return json_response({"success": True})


async def unload(request: Request, dispatcher: Dispatcher, body: ModelName) -> Response:
    """Unload a model, which ends its requests."""
    await dispatcher.models.unload(dispatcher.models.named(body.model))
    return json_response({"success": True})


async def unload_all(request: Request, dispatcher: Dispatcher) -> Response:
    if request.method != "POST" and "mozilla" in request.headers.get("user-agent", "").lower():
        raise HTTPError(403, "browsers cannot unload models by an address, which any page can contain: send a POST")
    for served in dispatcher.models.visible():
        await dispatcher.models.unload(served)
    return PlainTextResponse("OK")


async def running(request: Request, dispatcher: Dispatcher) -> Response:
    """List the loaded models in llama-swap's format."""
    states = {"loaded": "ready", "loading": "starting"}
    rows = [
        {"model": served.name, "state": states[served.state], "ttl": served.ttl_s or 0}
        for served in dispatcher.models.visible()
        if served.state in states
    ]
    return json_response({"running": rows})


async def events(request: Request, dispatcher: Dispatcher) -> Response:
    """Stream the states of all models: first each model's state, then the changes."""
    return EventStream(_changes(dispatcher), lambda: None, ReplyWriter.media_type, ReplyWriter.ping)


async def _changes(dispatcher: Dispatcher) -> AsyncIterator[bytes]:
    reported: dict[str, dict[str, Any]] = {}
    while not dispatcher.is_stopping:
        for served in dispatcher.models.visible():
            status = _status(served)
            if status != reported.get(served.name):
                reported[served.name] = status
                yield event({"model": served.name, "event": "model_status", "data": status})
        await asyncio.sleep(_POLL_S)


def _status(served: ServedModel) -> dict[str, Any]:
    if served.load_progress is None:
        return {"status": served.state}
    stage = "text_model"
    progress = {"stages": [stage], "current": stage, "value": round(served.load_progress, 2)}
    return {"status": "loading", "progress": progress}
