"""MCP servers: programs or URLs whose tools a model may call. Uses the official MCP client.

Source: https://modelcontextprotocol.io/specification. A server may be hostile: its messages are limited in time and
length, its process gets no secrets from the environment, and its output never reaches the terminal.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from localllm.agent_tools.tool import CALL_SECONDS, ToolOutput
from localllm.errors import UsageError
from localllm.parallel import reason_of, wait_for
from localllm.shell import found_program, kill_tree, own_group

#: Time limit in seconds for starting a server.
START_SECONDS = 30.0
#: Maximum bytes of a message, number of tools per server, and characters of a description.
MAX_BYTES, MAX_TOOLS, MAX_CHARACTERS = 8 << 20, 100, 2000
#: Seconds to wait for a server to end.
_END_SECONDS = 5.0


class McpServer:
    """One MCP server, run by a separate thread. ``tools`` are names, descriptions and parameter schemas."""

    def __init__(self, command: Sequence[str] = (), url: str = "", env: Mapping[str, str] | None = None) -> None:
        """Start a server: a program that uses stdio, or a URL of streamable HTTP."""
        self.tools: list[tuple[str, str, dict[str, Any]]] = []
        self._command, self._url, self._env = list(command), url, dict(env or {})
        self._loop = asyncio.new_event_loop()
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self._thread.start()

    def wait(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until the list of tools has arrived. Raises UsageError if the server cannot be started."""
        wait_for(self._started, START_SECONDS, is_stopped)

    def call(self, name: str, arguments: Mapping[str, Any], is_stopped: Callable[[], bool]) -> ToolOutput:
        """Return a tool's result. Raises UsageError if the call fails, takes too long or was stopped."""
        if self._client is None:
            raise UsageError("the server has ended")
        future = asyncio.run_coroutine_threadsafe(self._client.call_tool(name, dict(arguments)), self._loop)
        result = wait_for(future, CALL_SECONDS, is_stopped)
        texts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
        images = tuple(base64.b64decode(block.data) for block in result.content if block.type == "image")
        return ToolOutput(("error: " if result.is_error else "") + "\n".join(texts), images)

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            self._task = self._loop.create_task(self._serve())
            self._loop.run_until_complete(self._task)
        except BaseException as error:  # also exception groups and cancellation: `wait` must end
            if not self._started.done():
                remedy = "check its url" if self._url else "run its command in a terminal to see its errors"
                fault = f"it cannot be used ({reason_of(error)}): {remedy}"
                self._started.set_exception(error if isinstance(error, UsageError) else UsageError(fault))
        finally:
            self._client = None
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())  # also runs callbacks that close pipes
            self._loop.close()

    async def _serve(self) -> None:
        try:
            from mcp import Client
        except ImportError:
            raise UsageError('MCP servers need the package mcp: pip install "localllm[mcp]"') from None
        logging.getLogger("mcp").propagate = False  # the log would be written over the screen
        logging.getLogger("mcp").addHandler(logging.NullHandler())
        target = _over_http(self._url) if self._url else _over_stdio(self._command, self._env)
        async with Client(target, read_timeout_seconds=CALL_SECONDS) as client:
            async with asyncio.timeout(START_SECONDS):
                cursor = None
                while len(self.tools) < MAX_TOOLS:
                    page = await client.list_tools(cursor=cursor)
                    for tool in page.tools:
                        self.tools.append((tool.name, (tool.description or "")[:MAX_CHARACTERS], tool.input_schema))
                    cursor = page.next_cursor
                    if not cursor or not page.tools:
                        break
            del self.tools[MAX_TOOLS:]
            self._client = client
            self._started.set_result(None)
            await asyncio.Event().wait()


@asynccontextmanager
async def _over_http(url: str) -> AsyncIterator[Any]:
    """Yield the streams of an HTTP server. Messages are limited to `MAX_BYTES`."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            n_bytes = 0
            async for chunk in self._stream:
                n_bytes += len(chunk)
                if n_bytes > MAX_BYTES:
                    raise httpx2.StreamError(f"the response has more than {MAX_BYTES:,} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: Any) -> None:
        response.headers.pop("content-encoding", None)  # a short compressed body could expand to any length
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            response.stream = Bounded(response.stream)  # the client itself limits the events of a stream

    timeout = httpx2.Timeout(START_SECONDS, read=CALL_SECONDS)
    hooks, headers = {"response": [bound]}, {"Accept-Encoding": "identity"}
    async with (
        httpx2.AsyncClient(timeout=timeout, event_hooks=hooks, headers=headers) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=MAX_BYTES) as streams,
    ):
        yield streams


@asynccontextmanager
async def _over_stdio(command: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a program's streams, like the client's `stdio_client`, with limited line length and hidden stderr."""
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    environment = {**get_default_environment(), **env}
    process = await asyncio.create_subprocess_exec(
        *found_program(command, environment),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        limit=MAX_BYTES,
        **own_group(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    received, to_read = anyio.create_memory_object_stream[Any](0)
    to_write, outgoing = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        async with received:
            with suppress(ValueError, anyio.BrokenResourceError):  # the line is too long, or the reader has ended
                while line := await stdout.readline():
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:  # not a message, but output of the program
                        continue
                    await received.send(SessionMessage(message))

    async def write() -> None:
        with suppress(OSError):
            async for message in outgoing:
                stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(write)
            yield to_read, to_write
            group.cancel_scope.cancel()
    finally:
        for stream in (received, to_read, to_write, outgoing):
            stream.close()
        kill_tree(process)
        # Otherwise the transport closes only at the end of all output, and a child in another group may keep it open.
        process._transport.close()  # type: ignore[attr-defined]
        with anyio.CancelScope(shield=True):
            await process.wait()
