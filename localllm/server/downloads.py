"""Downloads, removal and search of models by requests, if ``serve --allow-pull`` allows them.

``/api/pull`` and ``/api/delete`` have Ollama's formats (https://github.com/ollama/ollama/blob/main/docs/api.md).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.catalog.hub_cache import hub_cache, parts_of, remove_file
from localllm.errors import HubError, LocalLLMError
from localllm.parallel import in_thread
from localllm.server.dispatcher import Dispatcher
from localllm.server.http import EventStream, HTTPError, json_bytes, json_response

#: Seconds between reports of a download's progress.
_PERIOD_S = 0.3
#: Maximum number of repositories that a search on the hub returns.
_LIMIT = 20


class _Cancelled(Exception):
    """The client has disconnected."""


class _PullState:
    """Progress of a download, which its thread reports."""

    def __init__(self, name: str) -> None:
        self.state: dict[str, Any] = {"status": "pulling manifest"}
        self._name = name
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        self._is_cancelled.set()

    def __call__(self, stage: str, n_done: int, total: int) -> None:
        if self._is_cancelled.is_set():
            raise _Cancelled
        status = "verifying sha256 digest" if stage == "check" else f"pulling {self._name}"
        self.state = {"status": status, "digest": self._name, "total": total, "completed": n_done}


def _check(dispatcher: Dispatcher) -> None:
    if not dispatcher.may_pull:
        raise HTTPError(
            403, "requests download and delete no models: run localllm pull, or start serve with --allow-pull"
        )


async def pull(dispatcher: Dispatcher, name: str, *, is_streamed: bool) -> Response:
    """Download a model that is not served, and serve it.  The download ends when the client disconnects."""
    from localllm.catalog.known_models import advice, hub_name  # imported here because few servers download

    _check(dispatcher)
    remote = await _in_thread(hub_name, name)
    if remote is None:
        raise HTTPError(
            404, f"{name!r:.80} is not the name of a model on the hub: {advice(name) or 'write ORG/REPO'}"
        )
    progress = _PullState(str(remote))
    states = _states(dispatcher, name, progress)
    if is_streamed:
        lines = (json_bytes(state) + b"\n" async for state in states)
        return EventStream(lines, progress.cancel, "application/x-ndjson", json_bytes(progress.state) + b"\n")
    async for state in states:
        if "error" in state:
            raise HTTPError(502, state["error"])
    return json_response(state)


async def _states(dispatcher: Dispatcher, name: str, progress: _PullState) -> AsyncIterator[dict[str, Any]]:
    """Download a model, and yield the states in Ollama's format."""
    from localllm.catalog.pull import pull as pull_model

    task = asyncio.ensure_future(_in_thread(pull_model, name, progress))
    while not task.done():
        yield progress.state
        await asyncio.wait([task], timeout=_PERIOD_S)
    try:
        path: Path = task.result()
    except (LocalLLMError, _Cancelled) as error:
        dispatcher.models.log(f"{name} was not downloaded: {error}")
        yield {"error": str(error)}
        return
    dispatcher.models.add(name, str(path))
    dispatcher.models.log(f"downloaded {name}")
    yield {"status": "success"}


async def delete(dispatcher: Dispatcher, name: str) -> None:
    """Unload a model that was downloaded from the hub, and remove its files."""
    _check(dispatcher)
    models = dispatcher.models
    served = models.named(name)
    cache = hub_cache().resolve()
    if cache not in served.path.absolute().parents and cache not in served.path.resolve().parents:
        raise HTTPError(403, f"{served.name} was not downloaded from the hub: remove its file where the server runs")
    if len(models.served) == 1:
        raise HTTPError(409, f"{served.name} is the only model of this server: stop the server before you remove it")
    await models.remove(served)
    try:
        await _in_thread(_remove, served.path)
    except OSError as error:
        raise HTTPError(500, f"{served.name} cannot be removed ({error.strerror or error})") from None
    models.log(f"removed {served.name}")


def _remove(path: Path) -> None:
    for part in parts_of(path):
        remove_file(part)


async def catalog(request: Request, dispatcher: Dispatcher) -> Response:
    """Search models to download.  ``?search=WORDS`` filters by words, and ``&hub=1`` also searches the hub."""
    if not dispatcher.may_pull:
        return json_response({"allowed": False, "models": [], "repositories": []})
    text = request.query_params.get("search", "")[:200]
    found = await _in_thread(_known, text)
    for entry in found:
        entry["is_here"] = dispatcher.models.has(entry["name"])
    answer: dict[str, Any] = {"allowed": True, "models": found, "repositories": []}
    if request.query_params.get("hub") and text.strip():
        try:
            answer["repositories"] = await _in_thread(_on_hub, text)
        except HubError as error:
            answer["problem"] = str(error)
    return json_response(answer)


def _known(text: str) -> list[dict[str, Any]]:
    from localllm.catalog.known_models import available_bytes, matching_models

    available, found = available_bytes(), []
    for model in matching_models(text):
        format = model.format_for(available)
        memory = model.memory(format)
        found.append(
            {
                "name": model.name,
                "title": model.title,
                "format": format,
                "n_bytes": model.n_bytes(format),
                "memory": memory,
                "fits": memory <= available,
                "abilities": model.abilities,
                "uses": model.uses,
                "licence": model.licence,
            }
        )
    return found


def _on_hub(text: str) -> list[dict[str, Any]]:
    from localllm.catalog.hub import Hub

    return [
        {"name": found.name, "downloads": found.n_downloads, "gated": found.is_gated}
        for found in Hub(text).search(_LIMIT)
    ]


async def _in_thread(function: Any, *arguments: Any) -> Any:
    """Run a function in a daemon thread, which the end of the server does not wait for."""
    return await asyncio.wrap_future(in_thread(partial(function, *arguments), "localllm-download"))
