"""Generated text: all at once (`Completion`), or as it comes (`Stream` of `Chunk`)."""

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
from localllm.engine.request import FinishReason, Request, Timings, Usage
from localllm.errors import UsageError
from localllm.options.foreign_names import THEIR_RESULTS, no_attribute
from localllm.options.types import Progress
from localllm.sampling import Choice
from localllm.tokenizer.stream import StreamDecoder

# It takes a good part of the time to the first token of those that do not use it.
if TYPE_CHECKING:
    import asyncio

    from localllm.chat.reply import CallDelta, ReplyParser

#: Chunks that a request runs ahead of its reader at most, before it pauses.
MAX_UNREAD = 64

#: Seconds between two deliveries at least: to wake the reader costs as much as a step of a very small model.
DELIVERY_S = 0.002


@dataclass(frozen=True, slots=True)
class Completion:
    """A generated text.

    Attributes:
        text: without the stop string or end-of-generation token that ended it.
        ids: the tokens generated, without the end-of-generation token.  Where a stop string ended the text, its
            tokens are among them.
        finish_reason: "stop" (the model ended its text, or a stop string came), "length" (``max_tokens`` or the
            end of the context), "cancelled" or "timeout".
        usage: counts of tokens.
        timings: seconds and rates.
        logprobs: of each token, with the likeliest ones, where ``logprobs`` asked for them.
        drafts: how many tokens were drafted and how many accepted, where ``speculate`` asked for drafts.
        reasoning: what the model thought before its answer, which is no part of ``text`` (`LLM.chat`).
        tool_calls: the tools that it calls, which are no part of ``text`` either.
        warnings: the reason if the time limit ended the text, and the faults of calls that stayed text.
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

    if not TYPE_CHECKING:  # checkers would believe that every attribute is there

        def __getattr__(self, name: str) -> Never:
            raise no_attribute("'Completion' object", name, THEIR_RESULTS)

    def to_dict(self) -> dict[str, Any]:
        """All of it as values that JSON has, under the same names."""

        def likely(id_: int, logprob: float | None) -> dict[str, Any]:
            return {"id": id_, "logprob": logprob if logprob is not None and math.isfinite(logprob) else None}

        logprobs = None
        if self.logprobs is not None:
            logprobs = [
                {**likely(each.id, each.logprob), "top": [likely(*top) for top in each.top]} for each in self.logprobs
            ]
        return {
            "text": self.text,
            "ids": list(self.ids),
            "finish_reason": self.finish_reason,
            "usage": _values(self.usage, "prompt_tokens cached_tokens completion_tokens total_tokens"),
            "timings": _values(
                self.timings,
                "prefill_s prefill_tokens prefill_tokens_per_s first_token_s decode_s decode_tokens "
                "decode_tokens_per_s",
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
    """A piece of a stream: one for each token, and a last one.

    Of a chat it is an event of the reply: some text, some reasoning, or what comes of a call; a token that brings
    several has a chunk for each, the first of which has the token.

    Attributes:
        text: what is certain now; it may be empty, for half a character or what may become a stop string is
            held back.
        ids: the token; none in the last chunk.
        logprobs: as `Completion.logprobs`, of this token.
        finish_reason, usage, timings, drafts: in the last chunk alone; as in `Completion`.  ``usage`` and ``timings``
            are in those of ``n_evaluated`` too.
        reasoning: of a chat, what the model thinks, which is no part of ``text``.
        call: of a chat, the beginning of a call of a tool, more of its arguments (`CallDelta`), or all of it at its
            end (`ToolCall`).
        warnings: in the last chunk; as in `Completion`.
        n_evaluated: tokens of the prompt that are in the cache, in chunks of their own before the first token, where
            `Stream.tells_progress`; the first has those that were there before.
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
    """Return the events of a reply in the text of a chunk; the first has the chunk's token.

    Args:
        is_stopped: whether a stop string ended the reply, which cuts an open call off.
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


#: What comes out of the engine's thread.  The last item is an exception, or a chunk with a finish reason.
_Item: TypeAlias = Chunk | BaseException


class TextOutput:
    """Makes chunks of text of the tokens that the engine chooses, and hands them to a reader."""

    def __init__(self, decoder: StreamDecoder, deliver: Callable[[list[_Item]], object], *, logprobs: bool) -> None:
        self.deliver = deliver  # takes the items of a step; called in the engine's thread
        self.logprobs = logprobs  # whether chunks have them
        # whether all is delivered at once, at the end
        self.delivers_at_end = self.reports_progress = False  # whether the reader wants to know how far the prompt is
        self.n_read = 0  # chunks that the reader has taken; the reader counts
        self.on_end: Callable[[], object] | None = None  # called in the engine's thread when all was delivered
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
        """Text needs none."""

    def flush(self) -> None:
        now = time.perf_counter()
        if self._pending and not self.delivers_at_end and now - self._delivered_at >= DELIVERY_S:
            self._n_delivered += len(self._pending)
            self.deliver(self._pending)
            self._pending, self._delivered_at = [], now

    def end(self, error: BaseException | None) -> None:
        self.deliver([*self._pending, self._last_chunk() if error is None else error])
        self._pending = []
        self.request = None  # no cycle, so that what its drafter holds goes with the request
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
        return Chunk(
            text,
            finish_reason=r.finish_reason,
            usage=r.usage,
            timings=r.timings,
            drafts=r.draft_counts,
            warnings=warnings,
        )


class _ItemQueue:
    """Items on their way from the engine's thread to a thread or a task that reads them.

    The engine refers to it and not to the stream, which ends its request when nobody refers to it any more.
    """

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[list[_Item]] = queue.SimpleQueue()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, step: list[_Item]) -> None:
        self.items.put(step)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            with contextlib.suppress(RuntimeError):  # a loop that was closed has nobody who would read it
                waiting.get_loop().call_soon_threadsafe(_wake, waiting)

    async def get(self) -> list[_Item]:
        import asyncio

        while True:
            with contextlib.suppress(queue.Empty):
                return self.items.get_nowait()
            self._waiting = waiting = asyncio.get_running_loop().create_future()
            if self.items.empty():  # asked after `put` can see who waits
                await waiting


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Stream:
    """An iterator of `Chunk`, for ``for`` in any thread and ``async for`` in any event loop, and a context manager.

    The model writes on while chunks are read, up to `MAX_UNREAD` ahead.  ``cancel`` may be called from any thread:
    the work stops before the next step, and a last chunk says so.  ``close``, or dropping the stream, ends it without
    one.

    Attributes:
        parser: takes the reply to a chat apart; with None, chunks have the text as the model writes it.
        tells_progress: whether there are chunks that say how far the prompt is, in place of calls of ``progress``.
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
    ) -> None:
        """``on_end``: called in the engine's thread when all is there; nothing is read before."""
        self._engine, self._progress, self._inbox = engine, progress, _ItemQueue()
        self._items: Iterator[_Item] = iter(())  # of the step that is being read
        self._events: deque[Chunk] = deque()  # of the chunk that was read last
        self._finish_reason: FinishReason | None = None
        self._ended = False
        self.parser: ReplyParser | None = None
        self.tells_progress = False
        self._output = output = TextOutput(decoder, self._inbox.put, logprobs=logprobs)
        output.on_end, output.delivers_at_end = on_end, on_end is not None
        self._request = output.request = make_request(output)
        output.reports_progress = progress is not None
        self._read_lock = threading.Lock()
        engine.submit(self._request)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it goes on, or if an error ended it."""
        return self._finish_reason

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the text; None where there was none."""
        return self._output.stopped

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the prompt, and those generated so far; below 0 are those of pictures."""
        return tuple(self._request.tokens)

    @property
    def usage(self) -> Usage:
        """Counts of tokens so far."""
        return self._request.usage

    @property
    def timings(self) -> Timings:
        """Seconds and rates so far."""
        return self._request.timings

    @property
    def drafts(self) -> Drafts | None:
        """Counts of drafts so far; None where none were asked for."""
        return self._request.draft_counts

    def cancel(self) -> None:
        """Ends the text before the next step; a last chunk says so."""
        self._engine.cancel(self._request)

    def deliver_at_end(self) -> None:
        """Delivers nothing before all of it is there, so that the model need not wait for the reader."""
        self._output.delivers_at_end = True

    def close(self) -> None:
        """Ends the stream."""
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
        while (chunk := self._next_written()) is not None and self.parser is not None and chunk.n_evaluated is None:
            self._events.extend(_events(self.parser, chunk, is_stopped=self.stop_text is not None))
            if self._events:
                return self._events.popleft()
        return chunk

    def _next_written(self) -> Chunk | None:
        """The next of those that came; None if the items of another step have to come first.

        Raises:
            What ended the request, or the caller's own ``progress``.
        """
        for item in self._items:
            if isinstance(item, BaseException):
                self._ended, self._items = True, iter(())
                try:
                    raise item
                finally:
                    del item  # its traceback refers to this frame: what it holds would stay
            if item.finish_reason is not None:
                self._ended, self._finish_reason = True, item.finish_reason
                return item
            if item.n_evaluated is None:
                self._output.n_read += 1
                # Asked after counting: between the two the engine may find the output full, and pause.
                if self._output.n_unread == MAX_UNREAD - 1:
                    self._engine.wake()
                return item
            if self.tells_progress:
                return item
            if self._progress is not None:
                try:
                    self._progress(item.n_evaluated, self._request.n_prompt)
                except (StopIteration, StopAsyncIteration) as error:  # it would look like the end of the stream
                    raise RuntimeError(f"progress raised {type(error).__name__}") from error
        return None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """One read at a time; whatever it raises ends the stream."""
        if not self._read_lock.acquire(blocking=False):
            raise UsageError("this stream is already being read: ask for one chunk at a time")
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
        """The next chunk.

        Raises:
            StopIteration: it has ended.
            ClosedError: the model was closed.
            UsageError: a logits processor asks for it, in whose thread nothing can be waited for.
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
        """As `__next__`, while other tasks go on; cancelling the task ends the stream."""
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
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    def read(self) -> Completion:
        """Waits for what is still to come, and returns it as one."""
        self.deliver_at_end()
        return self._completion(list(self))

    async def aread(self) -> Completion:
        """As `read`, while other tasks go on."""
        self.deliver_at_end()
        return self._completion([chunk async for chunk in self])
