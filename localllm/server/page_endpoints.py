"""Endpoints of the page's tools; see `localllm.server.page_tools`."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm.server.dispatcher import Dispatcher
from localllm.server.http import HTTPError, json_response
from localllm.server.page_tools import PageTools, ToolCallRequest


class UndoRequest(msgspec.Struct):
    id: str


def _enabled(request: Request, dispatcher: Dispatcher) -> PageTools:
    tools = dispatcher.page_tools
    if tools is None:
        raise HTTPError(403, "the page has no tools: start serve with --page-tools", "not_available")
    tools.check(request)
    return tools


async def page_tools(request: Request, dispatcher: Dispatcher) -> Response:
    """List the page's tools. ``?folder=NAME`` is the working folder of a chat."""
    if dispatcher.page_tools is None:
        return json_response({"allowed": False})
    work = partial(_enabled(request, dispatcher).described, request.query_params.get("folder", ""))
    return json_response(await dispatcher.run_tool(request, work))


async def page_tool_preview(request: Request, dispatcher: Dispatcher, body: ToolCallRequest) -> Response:
    """Return the diff of a call that would change a file."""
    work = partial(_enabled(request, dispatcher).preview, body)
    return json_response(await dispatcher.run_tool(request, work))


async def page_tool_call(request: Request, dispatcher: Dispatcher, body: ToolCallRequest) -> Response:
    """Run a call that the user has allowed. It is cancelled when the page disconnects."""
    tools = _enabled(request, dispatcher)
    dispatcher.models.log(f"the page calls {body.name!r:.80}")
    return json_response(await dispatcher.run_tool(request, partial(tools.call, body)))


async def page_tool_restart(request: Request, dispatcher: Dispatcher) -> Response:
    """Start the MCP servers of the page again."""
    tools = _enabled(request, dispatcher)
    await dispatcher.run_tool(request, lambda is_stopped: tools.restart())
    return json_response({})


async def page_tool_undo(request: Request, dispatcher: Dispatcher, body: UndoRequest) -> Response:
    """Take the edit of a call back."""
    tools = _enabled(request, dispatcher)
    text = await dispatcher.run_tool(request, lambda is_stopped: tools.undo(body.id))
    return json_response({"text": text})
