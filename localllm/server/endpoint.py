"""The steps that the text endpoints of all APIs share.

An endpoint converts the fields of a body to a `GenerationJob`, submits the job, and writes its replies as a stream or
as one response, with usage, warnings and errors.  The job ends when the client disconnects, and an idle stream sends
pings.  Long work runs outside the event loop.  An API adds only a function that reads the body, and a `ReplyWriter`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from localllm.chat.conversation import Message
from localllm.generation.completion import Chunk
from localllm.server.answers import GenerationJob, PendingReplies, Reply
from localllm.server.dispatcher import Dispatcher
from localllm.server.http import EventStream, HTTPError, cancel_on_disconnect, event
from localllm.server.response_store import StoredResponse

_Body = TypeVar("_Body")


class ReplyWriter(Generic[_Body]):
    """Writes the replies of a request in the format of an API.

    A stream consists of `begin`, `lines` for every event, and `end`.  Any other response is `answer`.
    """

    media_type = "text/event-stream"
    ping = b": still at work\n\n"  # sent when a stream is idle

    def __init__(self, pending: PendingReplies, body: _Body) -> None:
        self.pending, self.body = pending, body

    @property
    def uses_thread(self) -> bool:
        """Whether a thread writes the start, the last event of each reply, and the answer, as they take long."""
        return "logprobs" in self.pending.job.options or getattr(self.body, "verbose", False)

    async def prepare(self, request: Request, dispatcher: Dispatcher) -> None:
        """Do further work before the replies are read.  By default stores what `keep` needs."""
        self._client, self._store = request.state.client, dispatcher.responses

    def keep(self, id_: str, reply: Reply, response: dict[str, Any], *, n_omitted: int = 0) -> None:
        """Store a response and its chat, without the first ``n_omitted`` messages, so that it can be continued."""
        job = self.pending.job
        start = job.reply_start or Message("assistant")
        text, reasoning = start.text + reply.text, start.reasoning + reply.thinking
        answer = Message("assistant", (text,) if text else (), reasoning, tuple(reply.calls))
        conversation = [*(job.messages or [])[n_omitted:], answer]
        self._store.put(id_, StoredResponse(self._client, conversation, response))

    def begin(self) -> Iterable[bytes]:
        return ()

    def lines(self, reply: Reply, chunk: Chunk) -> Iterable[bytes]:
        raise NotImplementedError

    def end(self, replies: list[Reply]) -> Iterable[bytes]:
        return ()

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body)

    def answer(self, replies: list[Reply]) -> Response:
        """Return a complete response.  `Reply.chunks` are the events of a reply."""
        raise NotImplementedError


async def respond(
    request: Request,
    dispatcher: Dispatcher,
    body: _Body,
    read: Callable[[_Body], GenerationJob],
    writer_type: Callable[[PendingReplies, _Body], ReplyWriter[_Body]],
) -> Response:
    """Submit the job that ``read`` returns for a body, and return its replies as a stream or as one response."""
    job = await dispatcher.read(request, read, body)
    pending = await dispatcher.begin(job, request)
    with contextlib.ExitStack() as stack:
        stack.callback(pending.close)
        writer = writer_type(pending, body)
        await writer.prepare(request, dispatcher)
        if job.stream:
            stack.pop_all()  # the stream closes the replies
            lines = _lines(dispatcher, writer, request.url.path)
            return EventStream(lines, pending.close, writer.media_type, writer.ping)
        replies = await cancel_on_disconnect(request, pending.read())
    return await dispatcher.convert(request, writer.answer, replies) if writer.uses_thread else writer.answer(replies)


async def _lines(dispatcher: Dispatcher, writer: ReplyWriter[Any], path: str) -> AsyncIterator[bytes]:
    async def write(work: Callable[..., Iterable[bytes]], *args: Any) -> Iterable[bytes]:
        return await dispatcher.convert(None, lambda: [*work(*args)]) if writer.uses_thread else work(*args)

    replies = []
    try:
        for line in await write(writer.begin):
            yield line
        async for reply, chunk in writer.pending.events():
            is_end = chunk.finish_reason is not None
            for line in await write(writer.lines, reply, chunk) if is_end else writer.lines(reply, chunk):
                yield line
            if is_end:
                replies.append(reply)
        for line in writer.end(replies):
            yield line
    except Exception as error:
        yield writer.error(HTTPError.of(error).body(path))


async def n_input_tokens(
    request: Request, dispatcher: Dispatcher, body: _Body, read: Callable[[_Body], GenerationJob]
) -> int:
    """Return the number of prompt tokens of a chat.  Raises UsageError for options that a reply would refuse."""
    job = await dispatcher.read(request, read, body)
    job.check_options()
    return len(await dispatcher.with_chat(request, job, GenerationJob.prompt_ids))
