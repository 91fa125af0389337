"""A chat with a model: what is said goes into a conversation, and into the store, while it is generated.

Everything that generates gives an iterator of events (`localllm.tui.chat.events`), and works while that is iterated,
on the thread that does it; `ChatSession.stop` may come from any other thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from localllm.errors import StoreError, UsageError
from localllm.tui.chat import settings as chat_settings
from localllm.tui.chat.attachments import attach
from localllm.tui.chat.context import ContextTrimmer, whole_prompt
from localllm.tui.chat.conversation import Conversation, Message, State, Stats, Window
from localllm.tui.chat.events import (
    Choice,
    ContextFull,
    Delta,
    Event,
    Finished,
    Prefill,
    RoomMade,
    Started,
    Summarising,
    Warned,
)
from localllm.tui.chat.model import ChatModel, ReplyStream, Reports, with_prefill
from localllm.tui.chat.thinking import ThinkingClock, ThinkingSplitter, opening_tag, split
from localllm.tui.storage.autosave import AutoSaver
from localllm.tui.storage.chats import Store
from localllm.tui.text import automatic_title, clean_title

Events = Generator[Event, None, None]


class Meter(NamedTuple):
    """Tokens of context that are in use, and that there are."""

    used: int
    context: int


@dataclass(frozen=True, slots=True)
class _Full:
    """What waits for room: the reply to ``question``, or the rest of ``reply``."""

    question: str
    reply: str | None
    choices: tuple[Choice, ...]


class ChatSession:
    """One conversation with a model.

    Attributes:
        model: who replies; None while none is loaded.
        store: where the conversation is kept.
        conversation: what was said.
        more: keywords of `LLM.stream_chat` beside the conversation's settings, which are not kept.
    """

    def __init__(
        self,
        model: ChatModel | None,
        store: Store,
        conversation: Conversation | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """A session; a new conversation where none is given.

        Args:
            model, store, conversation: see above.
            more: keywords of `LLM.stream_chat` beside the conversation's settings, which are not kept.
        """
        self.model = model
        self.more = dict(more or {})
        self.store = store
        self.conversation = Conversation() if conversation is None else conversation
        self._saver = AutoSaver(store, self.conversation)
        self._writer = Writer(self.conversation, self._saver)
        self._busy = threading.Lock()
        self._full: _Full | None = None

    def enter(self) -> str | None:
        """Notes that the conversation is open here; returns what there is to tell if it is so elsewhere too."""
        try:
            others = self.store.enter(self.conversation.id)
        except StoreError:  # told when something cannot be saved
            return None
        if not others:
            return None
        return (
            f"this chat is open in another terminal too ({', '.join(others)}): what is said there is not shown here, "
            "and what both say is kept, as branches of the chat"
        )

    def _is_shared(self) -> bool:
        try:
            return bool(self.store.others(self.conversation.id))
        except StoreError:
            return False

    # -- What people do --------------------------------------------------------------------------------------------

    def send(self, text: str) -> Iterator[Event]:
        """Says something; the model replies.  Files named in it with an @ go with it.

        Raises:
            UsageError: there is nothing to say, no model, a reply is under way, or a file cannot be attached.
            LocalLLMError: while the events are iterated, whatever fails; what was said till then stays.
        """
        return self._ask(text, None)

    def edit(self, id_: str, text: str) -> Iterator[Event]:
        """Says something else in the place of an earlier message; the model replies to it.

        The earlier one stays as a branch, unless it had no reply.  A reply can be edited too: then nothing is
        generated, but `continue_reply` goes on from there.

        Raises:
            UsageError: as `send`, or there is no such message.
        """
        old = self.conversation[id_]
        if old.role == "user":
            return self._ask(text, old)
        self._check_free()
        self._full = None
        edited = self.conversation.add_sibling(id_, text, state="edited", opened=old.opened)
        self._saver.save(edited.id)
        return iter(self._warnings())

    def regenerate(self, id_: str | None = None) -> Iterator[Event]:
        """Has a message replied to again, by default the last one; the earlier reply stays as a branch.

        Args:
            id_: a reply, or a user's message.

        Raises:
            UsageError: nothing was said yet, there is no model, or a reply is under way.
        """
        self._check_free()
        self._loaded()
        message = self.conversation.leaf if id_ is None else self.conversation[id_]
        while message is not None and message.role == "assistant":
            message = None if message.parent is None else self.conversation[message.parent]
        if message is None:
            raise UsageError("there is nothing to reply to yet: send a message first")
        return self._turn(self._reply(message.id, None))

    def continue_reply(self) -> Iterator[Event]:
        """Goes on with the last reply, which was cut off.

        Raises:
            UsageError: there is none, it is complete, there is no model, or a reply is under way.
        """
        self._check_free()
        self._loaded()
        reply = self.conversation.leaf
        parent = None if reply is None else reply.parent
        if reply is None or reply.role == "user" or parent is None:
            raise UsageError("the last message is no reply that could be continued: /regen has it replied to")
        if not reply.can_go_on:
            raise UsageError("the last reply is complete: /regen asks for another one")
        if self._is_shared():  # or two terminals might go on with one reply, each in its way
            reply = self.conversation.add_sibling(reply.id, reply.text, state=reply.state, opened=reply.opened)
        return self._turn(self._reply(parent, reply.id))

    def make_room(self, choice: Choice) -> Iterator[Event]:
        """Goes on after `ContextFull`, in the way that was chosen.

        Raises:
            UsageError: nothing waits for room, or that is no choice here.
        """
        self._check_free()
        full = self._full
        if full is None:
            raise UsageError("the context is not full: there is nothing to choose")
        if choice not in full.choices:
            raise UsageError(f"{choice} would not help here: choose {' or '.join(full.choices)}")
        if choice == "stop":
            self._full = None
            return iter(())
        return self._turn(self._made_room(full, summarise=choice == "summarise"))

    def stop(self) -> None:
        """Ends what is being generated; what was said is kept.  Any thread may call it, at any time."""
        self._writer.stop()

    # -- What is known ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something is being generated."""
        return self._busy.locked()

    @property
    def live(self) -> Stats | None:
        """The counters of the reply that is under way; None if there is none."""
        return None if self.model is None else self._writer.live(self.model)

    @property
    def last(self) -> Stats | None:
        """The counters of the last reply on the path; None if there is none."""
        return next((m.stats for m in reversed(self.conversation.path()) if m.stats is not None), None)

    def meter(self) -> Meter:
        """How full the context is; where no reply has counted it, the path is tokenized."""
        if self.model is None:
            return Meter(0, 0)
        context = self.model.info.context
        if (live := self.live) is not None:
            return Meter(live.total_tokens, context)
        leaf = self.conversation.leaf
        if leaf is not None and leaf.stats is not None:
            return Meter(leaf.stats.total_tokens, context)
        messages = whole_prompt(self.conversation.path(), self.conversation.system)
        return Meter(len(self.model.tokenize_chat(messages)) if messages else 0, context)

    def take_warning(self) -> str | None:
        """What there is to tell of the store since the last event, once."""
        return self._saver.take_warning()

    # -- What belongs to the conversation as a whole ---------------------------------------------------------------

    def set_system(self, text: str) -> None:
        """Sets the system prompt; an empty one takes it away."""
        self.conversation.system = text
        self._saver.set(system=text)

    def set_title(self, text: str) -> str:
        """Gives the conversation a title; returns it as it is kept, in one line."""
        self.conversation.title = clean_title(text)
        self._saver.set(title=self.conversation.title)
        return self.conversation.title

    def set_options(self, settings: dict[str, Any]) -> None:
        """Sets how replies are generated; see `localllm.tui.chat.settings`.

        Raises:
            UsageError: one is unknown or out of range.
        """
        chat_settings.check(settings)
        self.conversation.settings = settings
        self._saver.set(settings=settings)

    def use_model(self, model: ChatModel | None, path: str | None) -> None:
        """Lets another model reply from now on.

        Args:
            model: None for no model.
            path: its file, empty for the demo model, which is kept with the chat; None keeps what is there.

        Raises:
            UsageError: a reply is under way.
        """
        self._check_free()
        self.model = model
        if path is not None:
            self.conversation.model = path
            self._saver.set(model=path)

    def switch(self, id_: str) -> None:
        """Goes to the branch that a message is in."""
        self._check_free()
        self.conversation.switch(id_)
        self._moved()

    def step(self, id_: str, by: int) -> None:
        """Goes to the branch ``by`` places after, below 0 before, that of a message.

        Raises:
            UsageError: there is none, or a reply is under way.
        """
        self._check_free()
        self.conversation.step(id_, by)
        self._moved()

    def delete(self, id_: str) -> None:
        """Deletes a message and all that follows it, for good."""
        self._check_free()
        self._saver.delete(self.conversation.delete(id_))
        self._moved()

    def _moved(self) -> None:
        self._full = None
        leaf = self.conversation.leaf
        self._saver.set(leaf=None if leaf is None else leaf.id)

    # -- Turns -----------------------------------------------------------------------------------------------------

    def _check_free(self) -> None:
        if self.busy:
            raise UsageError("a reply is under way: stop it first")

    def _loaded(self) -> ChatModel:
        if self.model is None:
            raise UsageError("no model is loaded: wait until one is, or choose one with /model")
        return self.model

    def _ask(self, text: str, old: Message | None) -> Iterator[Event]:
        """Says something, at the end or in the place of ``old``, and has it replied to."""
        self._check_free()
        model = self._loaded()
        if not text.strip():
            raise UsageError("there is nothing to send: type a message")
        known = () if old is None else old.attachments
        attached = attach(text, lambda content: len(model.tokenize(content, add_special=False)), known)
        if not self.conversation.title:
            self.set_title(automatic_title(text))
        if old is None:
            question = self.conversation.add("user", text, attachments=attached.files)
        else:
            question = self.conversation.add_sibling(old.id, text, attachments=attached.files)
            question = self._with_window_of(old, question)
            if not self.conversation.was_replied_to(old.id):
                self._saver.delete(self.conversation.delete(old.id))
        self._saver.save(question.id)
        unknown = [Warned(f"there is no file {name!r}: @{name} is sent as it stands") for name in attached.unknown]
        return self._turn(self._reply(question.id, None), unknown)

    def _with_window_of(self, old: Message, new: Message) -> Message:
        if old.window is None:
            return new
        first = new.id if old.window.first == old.id else old.window.first
        return self.conversation.update(new.id, window=Window(first, old.window.summary))

    def _turn(self, events: Events, before: list[Warned] | None = None) -> Events:
        """Events, with warnings among them; meanwhile there is no other turn."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("a reply is under way: stop it first")
        try:
            with closing(events):
                self._writer.stopped.clear()
                self._full = None
                yield from before or ()
                for event in events:
                    yield from self._warnings()
                    yield event
                yield from self._warnings()
        finally:
            self._busy.release()

    def _warnings(self) -> list[Warned]:
        warning = self.take_warning()
        return [] if warning is None else [Warned(warning)]

    def _reply(self, question: str, id_: str | None) -> Events:
        """Generates the reply to a message, or the rest of the reply ``id_``."""
        model, conversation = self._loaded(), self.conversation
        asked = chat_settings.generation(conversation.settings)
        messages = whole_prompt(conversation.path(question), conversation.system)
        begun = asked.reply_prefix if id_ is None else conversation[id_].text
        variables = asked.template_variables
        n_tokens = len(model.tokenize_chat(messages, template_variables=variables, reply_prefix=begun))
        if n_tokens >= model.info.context:
            yield self._waits(question, id_, n_tokens)
            return
        is_new = id_ is None
        if id_ is None:
            opened = opening_tag(model.chat_template.render(messages, **variables))
            id_ = conversation.add("assistant", begun, parent=question, state="streaming", opened=opened).id
        else:
            conversation.update(id_, state="streaming")
        self._saver.save(question, id_)
        yield Started(id_)
        reports: Reports = SimpleQueue()
        start = partial(
            model.stream_chat,
            messages,
            template_variables=variables,
            reply_prefix=begun,
            progress=lambda done, total: reports.put((done, total)),
            **{**self.more, **asked.options},
        )
        yield from self._writer.write(model, id_, start, reports, show_begun=is_new)
        message = conversation.get(id_)
        yield Finished(message)
        if message is not None and message.state == "context" and message.stats is not None:
            yield self._waits(question, id_, message.stats.total_tokens)

    # -- A full context --------------------------------------------------------------------------------------------

    def _room(self, question: str, reply: str | None) -> ContextTrimmer:
        conversation = self.conversation
        begun = conversation.settings.get("reply_prefix", "") if reply is None else conversation[reply].text
        return ContextTrimmer(self._loaded(), conversation, question, begun)

    def _waits(self, question: str, reply: str | None, n_tokens: int) -> ContextFull:
        choices = self._room(question, reply).choices()
        self._full = _Full(question, reply, choices)
        return ContextFull(n_tokens, self._loaded().info.context, reply is not None, choices)

    def _made_room(self, full: _Full, *, summarise: bool) -> Events:
        room = self._room(full.question, full.reply)
        self._full = full  # till there is room
        first = room.first(room.summary_tokens if summarise else 0)
        if first is None:
            raise UsageError("there is no room to be made: the last message alone is too long")
        summary = room.summary
        if summarise:
            summary = yield from self._summary(room, first)
            if self._writer.stopped.is_set():
                return
        self._full = None
        self.conversation.update(full.question, window=Window(room.path[first].id, summary))
        self._saver.save(full.question)
        yield RoomMade(first, summary)
        yield from self._reply(full.question, full.reply)

    def _summary(self, room: ContextTrimmer, first: int) -> Generator[Summarising, None, str]:
        """What the model says of the messages before ``first``."""
        model = self._loaded()
        asked = chat_settings.generation(self.conversation.settings)
        given = {**self.more, **asked.options, "max_tokens": room.summary_tokens, "stop": ()}
        summary = room.summary
        for part in room.parts(first):
            messages = room.request(part, summary)
            written = ""
            start = partial(model.stream_chat, messages, template_variables={"enable_thinking": False}, **given)
            with closing(self._writer.dictate(start)) as pieces:
                for piece in pieces:
                    written += piece
                    yield Summarising(piece)
            summary = split(written)[1].strip()
        return summary


#: What begins a stream, which `Writer.stop` may have to end at once.
Start = Callable[[], ReplyStream]


class Writer:
    """Takes down what models write in one conversation, one text at a time.

    Attributes:
        stopped: set once somebody wants no more.
    """

    def __init__(self, conversation: Conversation, keeper: AutoSaver) -> None:
        self.stopped = threading.Event()
        self._conversation = conversation
        self._saver = keeper
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
            with self._saver.saving(id_), closing(with_prefill(stream, reports)) as items:
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
            self._saver.save(id_)
        else:
            self._saver.delete(self._conversation.delete(id_))
            leaf = self._conversation.leaf
            self._saver.set(leaf=None if leaf is None else leaf.id)


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
