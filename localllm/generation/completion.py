"""Generated text: complete (`Completion`), or streamed (`Stream` of `Chunk`)."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Never, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localllm.chat.conversation import ToolCall
from localllm.engine.drafting import Drafts
from localllm.engine.engine import Engine
from localllm.engine.media import text_ids
from localllm.engine.request import FinishReason, Request, Timings, Usage
from localllm.errors import UsageError
from localllm.options.foreign_names import THEIR_RESULTS, no_attribute
from localllm.options.types import Progress
from localllm.sampling import Choice
from localllm.tokenizer.stream import StreamDecoder

# Imported only when used: these imports delay the first token considerably.
if TYPE_CHECKING:
    import asyncio

    from localllm.chat.reply import CallDelta, ReplyParser

#: Most chunks that a request may be ahead of its reader. Then it pauses.
MAX_UNREAD = 64

#: Minimum time between two deliveries, in seconds. Waking the reader takes the time of a step of a very small model.
DELIVERY_S = 0.002


@dataclass(frozen=True, slots=True)
class Completion:
    """A generated text.

    Attributes:
        text: Text without its stop string and end-of-text token.
        ids: Generated tokens without the end-of-text token. Includes the tokens of a stop string.
        finish_reason: "stop" (end-of-text token or stop string), "length" (``max_tokens`` or the context limit),
            "cancelled" or "timeout".
        usage: Token counts.
        timings: Durations in seconds, and rates.
        logprobs: Log-probability of each token and of the most likely tokens. None unless ``logprobs`` is set.
        drafts: Counts of drafted and accepted tokens. None unless ``speculate`` is set.
        reasoning: Reasoning before the answer. Not part of ``text`` (`LLM.chat`).
        tool_calls: Tool calls. Not part of ``text``.
        warnings: The timeout, if it ended the text, and errors in tool calls that therefore stayed text.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[Choice, ...] | None = None
    drafts: Drafts | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Never:
            raise no_attribute("'Completion' object", name, THEIR_RESULTS)

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes as JSON values under the same names."""

        def likely(id_: int, logprob: float | None) -> dict[str, Any]:
            return {"id": id_, "logprob": logprob if logprob is not None and math.isfinite(logprob) else None}

        logprobs = None
        if self.logprobs is not None:
            logprobs = [
                {**likely(choice.id, choice.logprob), "top": [likely(*top) for top in choice.top]}
                for choice in self.logprobs
            ]
        return {
            "text": self.text,
            "ids": list(self.ids),
            "finish_reason": self.finish_reason,
            "usage": _values(self.usage, "prompt_tokens cached_tokens completion_tokens total_tokens"),
            "timings": _values(
                self.timings,
                "prefill_s prefill_tokens prefill_tokens_per_s first_token_s decode_s decode_tokens "
                "decode_tokens_per_s queue_s",
            ),
            "drafts": _values(self.drafts, "drafted accepted share steps"),
            "logprobs": logprobs,
            "reasoning": self.reasoning,
            "tool_calls": [{"name": call.name, "arguments": call.values} for call in self.tool_calls],
            "warnings": list(self.warnings),
        }


def _values(counts: Usage | Timings | Drafts | None, names: str) -> dict[str, Any] | None:
    return None if counts is None else {name: getattr(counts, name) for name in names.split()}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One token of a stream, or the end of the stream.

    In a chat, a chunk is an event of the reply: text, reasoning, or part of a tool call. A token with several events
    has several chunks; the first chunk has the token.

    Attributes:
        text: Text that is certain. May be empty, because incomplete characters and possible starts of stop strings
            are held back.
        ids: The token. Empty in the last chunk.
        logprobs: `Completion.logprobs` of this token.
        finish_reason, usage, timings, drafts: Only in the last chunk; see `Completion`. Progress chunks also have
            ``usage`` and ``timings``.
        reasoning: In a chat, reasoning, which is not part of ``text``.
        call: In a chat, the start or more arguments of a tool call (`CallDelta`), or the complete call (`ToolCall`).
        warnings: Only in the last chunk; see `Completion`.
        n_evaluated: Only in progress chunks (`Stream.tells_progress`), which precede the first token: number of
            prompt tokens in the cache. The first progress chunk reports tokens found in the cache.
    """

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[Choice, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    drafts: Drafts | None = None
    reasoning: str = ""
    call: CallDelta | ToolCall | None = None
    warnings: tuple[str, ...] = ()
    n_evaluated: int | None = None

    def __str__(self) -> str:
        return self.text


def _events(parser: ReplyParser, chunk: Chunk, *, is_stopped: bool) -> Iterator[Chunk]:
    """Yield the events of a reply in the text of a chunk; the first has the chunk's token.

    Args:
        is_stopped: True if a stop string ended the reply, which truncates an open tool call.
    """
    events = parser.feed(chunk.text)
    ids, logprobs = chunk.ids, chunk.logprobs
    if chunk.finish_reason is not None:
        events += parser.finish(is_cut=is_stopped or chunk.finish_reason != "stop")
    for event in events:
        if isinstance(event, tuple):
            text, reasoning = ("", event.text) if event.thinking else (event.text, "")
            yield Chunk(text, ids, logprobs, reasoning=reasoning)
        else:
            yield Chunk("", ids, logprobs, call=event)
        ids, logprobs = (), None
    if ids:
        yield Chunk("", ids, logprobs)
    if chunk.finish_reason is not None:
        yield replace(chunk, text="", warnings=(*chunk.warnings, *parser.warnings))


#: An item from the engine thread. The last one is an exception, or a chunk with a finish reason.
_Item: TypeAlias = Chunk | BaseException


class TextOutput:
    """Converts tokens from the engine to chunks of text and delivers them to a reader."""

    def __init__(self, decoder: StreamDecoder, deliver: Callable[[list[_Item]], object], *, logprobs: bool) -> None:
        self.deliver = deliver  # receives the items of a step, in the engine thread
        self.logprobs = logprobs  # True if chunks include log-probabilities
        # delivers_at_end: deliver everything at once. reports_progress: deliver progress chunks.
        self.delivers_at_end = self.reports_progress = False
        self.n_read = 0  # chunks taken by the reader, which updates this number
        self.on_end: Callable[[], object] | None = None  # called in the engine thread after the last delivery
        self.request: Request | None = None
        self._decoder = decoder
        self._pending: list[_Item] = []
        self._n_delivered = 0
        self._delivered_at = 0.0

    @property
    def n_unread(self) -> int:
        return self._n_delivered - self.n_read

    @property
    def stopped(self) -> str | None:
        return self._decoder.stopped

    @property
    def is_full(self) -> bool:
        return self.n_unread >= MAX_UNREAD

    def progress(self, n_evaluated: int) -> None:
        if self.reports_progress and self.request is not None:
            usage, timings = self.request.usage, self.request.timings
            self.deliver([Chunk("", usage=usage, timings=timings, n_evaluated=n_evaluated)])

    def token(self, choice: Choice) -> bool:
        text = self._decoder.feed(choice.id)
        self._pending.append(Chunk(text, (choice.id,), (choice,) if self.logprobs else None))
        return self._decoder.stopped is not None

    def logits(self, position: int, rows: NDArray[np.float32]) -> None:
        """Do nothing: text does not need logits."""

    def flush(self) -> None:
        now = time.perf_counter()
        if self._pending and not self.delivers_at_end and now - self._delivered_at >= DELIVERY_S:
            self._n_delivered += len(self._pending)
            self.deliver(self._pending)
            self._pending, self._delivered_at = [], now

    def end(self, error: BaseException | None) -> None:
        self.deliver([*self._pending, self._last_chunk() if error is None else error])
        self._pending = []
        self.request = None  # avoids a reference cycle, so that the drafter's resources are freed with the request
        if self.on_end is not None:
            self.on_end()

    def _last_chunk(self) -> Chunk:
        r = self.request
        assert r is not None
        text = self._decoder.finish()
        if self._decoder.stopped is not None:
            r.finish_reason = "stop"
        warnings: tuple[str, ...] = ()
        if r.finish_reason == "timeout":
            warnings = (f"the text is cut off: its timeout of {r.timeout_s:g} seconds has passed",)
        if r.notice:
            warnings += (r.notice,)
        return Chunk(
            text,
            finish_reason=r.finish_reason,
            usage=r.usage,
            timings=r.timings,
            drafts=r.draft_counts,
            warnings=warnings,
        )


class _ItemQueue:
    """Items sent from the engine thread to a thread or task that reads them.

    The engine has a reference to this queue, not to the stream. So a stream can be garbage-collected, which ends its
    request.
    """

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[list[_Item]] = queue.SimpleQueue()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, step: list[_Item]) -> None:
        self.items.put(step)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                waiting.get_loop().call_soon_threadsafe(_wake, waiting)

    async def get(self) -> list[_Item]:
        import asyncio

        while True:
            with contextlib.suppress(queue.Empty):
                return self.items.get_nowait()
            self._waiting = waiting = asyncio.get_running_loop().create_future()
            if self.items.empty():  # checked after `put` can see the future
                await waiting


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Stream:
    """An iterator of `Chunk`, for ``for`` in any thread and ``async for`` in any event loop. Also a context manager.

    The model generates up to `MAX_UNREAD` chunks ahead of the reader. ``cancel`` may be called from any thread: the
    request ends before its next step, and a last chunk follows. ``close``, or garbage collection of the stream, ends
    it without a last chunk.

    Attributes:
        tells_progress: True if progress is reported in chunks instead of calls of ``progress``.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: StreamDecoder,
        make_request: Callable[[TextOutput], Request],
        *,
        logprobs: bool,
        progress: Progress | None,
        on_end: Callable[[], object] | None = None,
        parser: ReplyParser | None = None,
    ) -> None:
        """Submit the request.

        ``on_end`` is called in the engine thread after the last chunk. All chunks are then delivered at the end.
        ``parser`` splits a chat reply into events. Without a parser, chunks have the unparsed text.
        """
        self._engine, self._progress, self._parser, self._inbox = engine, progress, parser, _ItemQueue()
        self._items: Iterator[_Item] = iter(())  # unread items of the current step
        self._events: deque[Chunk] = deque()  # unread events of the current chunk
        self._finish_reason: FinishReason | None = None
        self._ended = False
        self.tells_progress = False
        self._output = output = TextOutput(decoder, self._inbox.put, logprobs=logprobs)
        output.on_end, output.delivers_at_end = on_end, on_end is not None
        self._request = output.request = make_request(output)
        output.reports_progress = progress is not None
        self._read_lock = threading.Lock()
        engine.submit(self._request)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason of the end, or None while running and after an error."""
        return self._finish_reason

    @property
    def stop_text(self) -> str | None:
        """Stop string that ended the text, or None."""
        return self._output.stopped

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt tokens and generated tokens. Negative ids are placeholders of images."""
        return tuple(self._request.tokens)

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the prompt's text, without placeholders of images."""
        request = self._request
        read_by_encoder = [id_ for span in request.media.placed for id_ in span.media.text]
        return read_by_encoder or text_ids(request.tokens[: request.n_prompt])

    @property
    def usage(self) -> Usage:
        """Current token counts."""
        return self._request.usage

    @property
    def submitted_at(self) -> float:
        """Time of the submission, by `time.perf_counter`."""
        return self._request.submitted_at

    @property
    def timings(self) -> Timings:
        """Current durations, in seconds, and rates."""
        return self._request.timings

    @property
    def drafts(self) -> Drafts | None:
        """Current draft counts; None without a drafter."""
        return self._request.draft_counts

    def end_reasoning(self) -> None:
        """End the reasoning before its next token, so that the answer follows.  May be called in any thread.

        Does nothing if the reply does not reason, or no longer.
        """
        if self._request.sampler is not None and self._request.sampler.reasoning is not None:
            self._request.sampler.reasoning.end()

    def cancel(self) -> None:
        """End the text before the next step. A last chunk follows."""
        self._engine.cancel(self._request)

    def deliver_at_end(self) -> None:
        """Deliver all chunks at the end, so that the model need not wait for the reader."""
        self._output.delivers_at_end = True

    def close(self) -> None:
        """End the stream, without a last chunk."""
        self._events.clear()
        if not self._ended:
            self._ended, self._finish_reason = True, "cancelled"
            self._engine.cancel(self._request)

    def __del__(self) -> None:
        if hasattr(self, "_read_lock"):
            self.close()

    def _next_chunk(self) -> Chunk | None:
        with contextlib.suppress(IndexError):
            return self._events.popleft()
        while (chunk := self._next_written()) is not None and self._parser is not None and chunk.n_evaluated is None:
            self._events.extend(_events(self._parser, chunk, is_stopped=self.stop_text is not None))
            if self._events:
                return self._events.popleft()
        return chunk

    def _next_written(self) -> Chunk | None:
        """Return the next chunk before parsing; None if no items are left in this step.

        Raises:
            BaseException: the error that ended the request, or an error in the caller's ``progress``.
        """
        for item in self._items:
            if isinstance(item, BaseException):
                self._ended, self._items = True, iter(())
                try:
                    raise item
                finally:
                    del item  # its traceback refers to this frame and would keep its variables in memory
            if item.finish_reason is not None:
                self._ended, self._finish_reason = True, item.finish_reason
                return item
            if item.n_evaluated is None:
                self._output.n_read += 1
                # Checked after counting, because the engine may find the output full, and pause, between the two.
                if self._output.n_unread == MAX_UNREAD - 1:
                    self._engine.wake()
                return item
            if self.tells_progress:
                return item
            if self._progress is not None:
                try:
                    self._progress(item.n_evaluated, self._request.n_prompt)
                except (StopIteration, StopAsyncIteration) as error:  # would look like the end of the stream
                    raise RuntimeError(f"progress raised {type(error).__name__}") from error
        return None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Prevent concurrent reads. An exception in the block ends the stream."""
        if not self._read_lock.acquire(blocking=False):
            raise UsageError("this stream is already being read: read one chunk at a time")
        try:
            yield
        except BaseException:
            self.close()
            self._finish_reason = None
            raise
        finally:
            self._read_lock.release()

    def _completion(self, chunks: list[Chunk]) -> Completion:
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            ids=tuple(id_ for chunk in chunks for id_ in chunk.ids),
            finish_reason=self.finish_reason or "cancelled",
            usage=self.usage,
            timings=self.timings,
            logprobs=tuple(c for chunk in chunks for c in chunk.logprobs or ()) if self._output.logprobs else None,
            drafts=self.drafts,
            reasoning="".join(chunk.reasoning for chunk in chunks),
            tool_calls=tuple(chunk.call for chunk in chunks if isinstance(chunk.call, ToolCall)),
            warnings=tuple(warning for chunk in chunks for warning in chunk.warnings),
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """Return the next chunk.

        Raises:
            StopIteration: the stream has ended.
            ClosedError: the model was closed.
            UsageError: called by a logits processor, which runs in the engine thread and must not wait for it.
        """
        if self._ended and not self._events:
            raise StopIteration
        self._engine.check_may_wait()
        with self._reading():
            while (chunk := self._next_chunk()) is None:
                items = self._engine.wait_for(self._inbox.items)
                self._items = iter(items)
            return chunk

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Like `__next__`, without blocking the event loop. Cancelling the task ends the stream."""
        if self._ended and not self._events:
            raise StopAsyncIteration
        self._engine.check_may_wait()
        with self._reading():
            while (chunk := self._next_chunk()) is None:
                self._items = iter(await self._inbox.get())
            return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def aclose(self) -> None:
        """Like `close`, for `contextlib.aclosing`."""
        self.close()

    def read(self) -> Completion:
        """Wait for the remaining chunks and return them as one completion."""
        self.deliver_at_end()
        return self._completion(list(self))

    async def aread(self) -> Completion:
        """Like `read`, without blocking the event loop."""
        self.deliver_at_end()
        return self._completion([chunk async for chunk in self])
