"""A model writes: replies go into the conversation, and into the store, piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace

from localllm.tui.conversation import Conversation, State, Stats
from localllm.tui.events import Delta, Prefill
from localllm.tui.keeping import Keeper
from localllm.tui.replies import ChatModel, ReplyStream, Reports, with_prefill
from localllm.tui.thinking import ThinkingClock, ThinkingSplitter

#: What begins a stream, which `Writer.stop` may have to end at once.
Start = Callable[[], ReplyStream]


class Writer:
    """Takes down what models write in one conversation, one text at a time.

    Attributes:
        stopped: set once somebody wants no more.
    """

    def __init__(self, conversation: Conversation, keeper: Keeper) -> None:
        self.stopped = threading.Event()
        self._conversation = conversation
        self._keeper = keeper
        self._stream: ReplyStream | None = None

    def stop(self) -> None:
        """Ends what is being written.  Any thread may call it, at any time."""
        self.stopped.set()
        if (stream := self._stream) is not None:
            stream.cancel()

    def live(self, model: ChatModel) -> Stats | None:
        """The counters of the text that is under way; None if there is none."""
        stream = self._stream
        return None if stream is None else _stats(stream, model)

    def write(
        self, model: ChatModel, id_: str, start: Start, reports: Reports, *, show_begun: bool
    ) -> Generator[Prefill | Delta, None, None]:
        """Writes a reply as it comes; whatever ends it, what was said stays.

        Args:
            model: who writes.
            id_: the reply, which is there as far as it is written already.
            start: begins the stream.
            reports: where the stream's ``progress`` goes.
            show_begun: whether what is written already is told too.
        """
        reply = self._conversation[id_]
        splitter = ThinkingSplitter(reply.opened)
        begun = splitter.feed(reply.text)
        clock = ThinkingClock(None if reply.stats is None else reply.stats.thinking_s)
        state: State = "failed"
        stream: ReplyStream | None = None
        try:
            if show_begun:
                yield from (Delta(*piece) for piece in begun)
            stream = self._begin(start)
            with self._keeper.saving(id_), closing(with_prefill(stream, reports)) as items:
                for item in items:
                    if isinstance(item, Prefill):
                        yield item
                    elif item.text:
                        self._conversation.update(id_, text=self._conversation[id_].text + item.text)
                        pieces = splitter.feed(item.text)
                        clock.see(pieces)
                        yield from (Delta(*piece) for piece in pieces)
            yield from (Delta(*piece) for piece in splitter.finish())
            state = _state(stream, model)
        except (GeneratorExit, KeyboardInterrupt):
            state = "stopped"
            raise
        finally:
            self._stream = None
            stats = None
            if stream is not None:
                stream.close()
                stats = replace(_stats(stream, model), thinking_s=clock.stop())
            self._end(id_, state, stats)

    def dictate(self, start: Start) -> Generator[str, None, None]:
        """What a model writes that is no reply, piece by piece."""
        stream = self._begin(start)
        try:
            for chunk in stream:
                yield chunk.text
        finally:
            self._stream = None
            stream.close()

    def _begin(self, start: Start) -> ReplyStream:
        """Starts a stream that `stop` ends, even if it came before."""
        self._stream = stream = start()
        if self.stopped.is_set():
            stream.cancel()
        return stream

    def _end(self, id_: str, state: State, stats: Stats | None) -> None:
        """Keeps a reply as it will stay; one without a word is taken away, unless the model wanted it so."""
        if self._conversation[id_].text or state == "complete":
            self._conversation.update(id_, state=state, stats=stats)
            self._keeper.save(id_)
        else:
            self._keeper.delete(self._conversation.delete(id_))
            leaf = self._conversation.leaf
            self._keeper.set(leaf=None if leaf is None else leaf.id)


def _state(stream: ReplyStream, model: ChatModel) -> State:
    if stream.finish_reason == "length":
        return "context" if stream.usage.total_tokens >= model.info.context else "length"
    return "stopped" if stream.finish_reason == "cancelled" else "complete"


def _stats(stream: ReplyStream, model: ChatModel) -> Stats:
    usage, timings, info = stream.usage, stream.timings, model.info
    return Stats(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        new_tokens=usage.completion_tokens,
        first_token_s=timings.first_token_s,
        rate=timings.decode_tokens_per_s,
        model=info.name or info.path.name,
    )
