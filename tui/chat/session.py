"""A chat with a model. Replies are added to the conversation and saved in the store during their generation.

Generation runs on the calling thread. It reports progress through the `emit` of a `localllm.tui.chat.events.Turn`,
which any other thread may stop.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from localllm.agent_tools.file_edits import undo_edit
from localllm.agent_tools.instructions import ProjectInstructions, read_instructions
from localllm.agent_tools.tool import (
    AgentTool,
    FileEdit,
    ToolOutput,
    call_as_shown,
    digest_of,
    preview_of,
    shown_change,
)
from localllm.agent_tools.toolbox import Permission, Toolbox
from localllm.chat.calls.formats import CONTROL_TAGS
from localllm.chat.conversation import ToolCall
from localllm.chat.reply import ReplyParser
from localllm.chat.thinking import Piece, opening_tag, split
from localllm.errors import StoreError, UsageError
from localllm.tui.chat import events, settings as chat_settings
from localllm.tui.chat.attachments import Attached, attach
from localllm.tui.chat.context import ChatModel, ContextTrimmer, name_of, texts_alone, tokens_of_media, whole_prompt
from localllm.tui.chat.conversation import (
    Attachment,
    CallRecord,
    ChatMessage,
    Conversation,
    ReplyStats,
    State,
    Window,
)
from localllm.tui.chat.events import Choice, Event, ThinkingClock, Turn
from localllm.tui.chat.pieces import Rank, ranked
from localllm.tui.storage.autosave import AutoSaver
from localllm.tui.storage.chats import Store
from localllm.tui.text import automatic_title, clean_title, shortened

if TYPE_CHECKING:
    from localllm.generation.completion import Stream

#: Interval in seconds between checks whether a turn was stopped, while it waits for the user's permission.
_ANSWER_SECONDS = 0.05
#: Maximum number of edits that can be undone.
_MAX_EDITS = 50


class Meter(NamedTuple):
    """Tokens in use, and the context length in tokens."""

    used: int
    context: int


@dataclass(frozen=True, slots=True)
class _Full:
    """A turn that waits for space in the context: the reply to ``question``, or the rest of ``reply``."""

    question: str
    reply: str | None
    choices: tuple[Choice, ...]


class _AppliedEdit(NamedTuple):
    """An edit, and the call that has applied it: the message's id, and the index of the call in the message."""

    edit: FileEdit
    message: str
    call: int


@dataclass(eq=False)
class ChatSession:
    """One conversation, with its model or None while no model is loaded. ``turn`` is the running generation."""

    model: ChatModel | None
    store: Store
    conversation: Conversation = field(default_factory=Conversation)
    more: Mapping[str, Any] = field(default_factory=dict)
    toolbox: Toolbox = field(default_factory=Toolbox)
    rank: Rank = ranked

    def __post_init__(self) -> None:
        self.turn: Turn | None = None
        self._tools: dict[str, AgentTool] = {}
        self._edits: list[_AppliedEdit] = []
        self._project: tuple[object, ProjectInstructions] | None = None
        self._announced: ProjectInstructions | None = None
        self._allowed: set[str] = set()
        self.saver = AutoSaver(self.store, self.conversation)
        self._busy = threading.Lock()
        self._full: _Full | None = None

    def mark_open(self, beside: Iterable[str] = ()) -> str | None:
        """Mark this chat and the chats ``beside`` as open. Returns a warning if another terminal has opened it."""
        try:
            self.store.mark_open(self.conversation.id, *beside)
            terminals = self.store.others_with_open(self.conversation.id)
        except StoreError:  # reported when something cannot be saved
            return None
        if not terminals:
            return None
        return (
            f"this chat is open in another terminal too ({', '.join(terminals)}): its messages are not shown here, "
            "and messages from both terminals are saved as branches of the chat"
        )

    # -- Actions of the user -----------------------------------------------------------------------------------------

    def send(self, text: str, turn: Turn) -> None:
        """Send a message with the files that it names, and generate a reply. Raises UsageError if that fails."""
        self._ask(text, None, turn)

    def edit(self, id_: str, text: str, turn: Turn) -> None:
        """Replace the text of a message. The old message stays as a branch if it had a reply.

        After a user's message the model replies. After a reply, generation waits for `continue_reply`.
        """
        old = self.conversation[id_]
        if old.role == "user":
            self._ask(text, old, turn)
            return
        with self._taking(turn):
            edited = self.conversation.add_sibling(id_, text, state="edited", opened=old.opened)
            self.saver.save(edited.id)

    def regenerate(self, id_: str | None, turn: Turn) -> None:
        """Reply again to a message, or to the question of a reply (default: the last). The old reply is a branch."""
        with self._taking(turn):
            self._loaded()
            message = self.conversation.leaf if id_ is None else self.conversation[id_]
            while message is not None and message.role == "assistant":
                message = None if message.parent is None else self.conversation[message.parent]
            if message is None:
                raise UsageError("there is nothing to reply to yet: send a message first")
            self._reply(message.id, None, turn)

    def continue_reply(self, turn: Turn) -> None:
        """Continue the last reply. Raises UsageError if it was not cut off."""
        with self._taking(turn):
            self._loaded()
            reply = self.conversation.leaf
            parent = None if reply is None else reply.parent
            if reply is None or reply.role == "user" or parent is None:
                raise UsageError("the last message is not a reply that can be continued: /regen generates a reply")
            if not reply.can_go_on:
                raise UsageError("the last reply is complete: /regen generates another one")
            is_shared = False
            with suppress(StoreError):
                is_shared = bool(self.store.others_with_open(self.conversation.id))
            if is_shared:  # otherwise two terminals could continue the same reply
                reply = self.conversation.add_sibling(reply.id, reply.text, state=reply.state, opened=reply.opened)
            self._reply(parent, reply.id, turn)

    def free_context(self, choice: Choice, turn: Turn) -> None:
        """Continue after `ContextFull`. Raises UsageError if the context is not full or ``choice`` is not offered."""
        full = self._full
        with self._taking(turn):
            self._full = full  # until the context has space
            if full is None:
                raise UsageError("the context is not full: there is nothing to choose")
            if choice not in full.choices:
                raise UsageError(f"{choice} does not help here: choose {' or '.join(full.choices)}")
            if choice == "stop":
                self._full = None
            else:
                self._trim(full, turn, summarise=choice == "summarise")

    # -- State -------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return self._busy.locked()

    @property
    def live(self) -> ReplyStats | None:
        """Counters of the reply in progress, or None."""
        stream = None if self.turn is None else self.turn.stream
        return None if stream is None or self.model is None else _stats(stream, self.model)

    @property
    def last(self) -> ReplyStats | None:
        """Counters of the last reply on the path, or None if the loaded model did not write it."""
        stats = next((m.stats for m in reversed(self.conversation.path()) if m.stats is not None), None)
        is_ours = stats is not None and self.model is not None and stats.model == name_of(self.model)
        return stats if is_ours else None

    def meter(self) -> Meter:
        """Return how full the context is. Tokenizes the path if this model has not yet counted it for a reply."""
        if self.model is None:
            return Meter(0, 0)
        context = self.model.info.context
        leaf = self.conversation.leaf
        counted = self.live or (None if leaf is None or leaf.stats is None else self.last)
        if counted is not None:  # the last token of a full context is never cached, so cap the count
            return Meter(min(counted.total_tokens, context), context)
        messages = whole_prompt(self.conversation.path(), self.system)
        return Meter(len(self.model.tokenize_chat(messages)) if messages else 0, context)

    # -- The working folder ----------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path | None:
        """The working folder, resolved; None without the setting, or if the folder was removed."""
        name = self.conversation.settings.get("folder")
        folder = Path(name).resolve() if name else None
        return folder if folder is not None and folder.is_dir() else None

    @property
    def project(self) -> ProjectInstructions:
        """AGENTS.md and skills. They are read once, because a changed system message would empty the cache."""
        is_on = self.conversation.settings.get("instructions", True)
        key = (self.conversation.settings.get("folder"), is_on)
        if self._project is None or self._project[0] != key:
            none = ProjectInstructions({}, {})
            self._project = key, read_instructions(self.folder, self.toolbox.skills) if is_on else none
        return self._project[1]

    @property
    def system(self) -> str:
        """The system message: the system prompt of the chat, AGENTS.md, and the descriptions of skills."""
        return "\n\n".join(filter(None, (self.conversation.system, self.project.system_text)))

    def undo(self) -> str:
        """Take back the last edit of a file by the model, and note this for the model. Returns a sentence about it.

        Raises UsageError if there is no edit, or the file has changed since.
        """
        if not self._busy.acquire(blocking=False):
            raise UsageError("a reply is in progress: stop it first")
        try:
            if not self._edits:
                raise UsageError("no edit can be undone: the model has changed no file since the chat was opened")
            edit, id_, index = self._edits[-1]
            undo_edit(edit)
            self._edits.pop()
            if (message := self.conversation.get(id_)) is not None:
                calls = list(message.calls)
                calls[index] = replace(calls[index], result=f"{calls[index].result}\n(the user has undone this edit)")
                self.conversation.update(id_, calls=tuple(calls))
                self.saver.save(id_)
        finally:
            self._busy.release()
        n = len(self._edits)
        more = f"; {n} earlier edit{'s' * (n > 1)} can be undone" if n else ""
        return f"{edit.undone}{more}"

    # -- Properties of the conversation ------------------------------------------------------------------------------

    def set_system(self, text: str) -> None:
        """Set the system prompt; an empty text removes it."""
        self.conversation.system = text
        self.saver.set(system=text)

    def set_title(self, text: str) -> str:
        """Set the title. Returns the saved title, which is one line."""
        self.conversation.title = clean_title(text)
        self.saver.set(title=self.conversation.title)
        return self.conversation.title

    def set_options(self, settings: dict[str, Any]) -> None:
        """Set the generation settings. Raises UsageError if a setting is unknown or out of range."""
        chat_settings.check(settings)
        self.conversation.settings = settings
        self.saver.set(settings=settings)

    def use_model(self, model: ChatModel | None, path: str | None) -> None:
        """Set or remove the model, and save its ``path`` (empty: demo model). Raises UsageError during a reply."""
        self._check_free()
        self.model = model
        if path is not None:
            self.conversation.model = path
            self.saver.set(model=path)

    def switch(self, id_: str) -> None:
        self._check_free()
        self.conversation.switch(id_)
        self._moved()

    def delete(self, id_: str) -> None:
        """Delete a message and all its descendants for good."""
        self._check_free()
        self.saver.delete(self.conversation.delete(id_))
        self._moved()

    def detach(self, name: str) -> int:
        """Remove an attachment from all messages of the path. Returns the number of removed attachments.

        All pieces of a file, or all files of a folder, are removed together.
        """
        self._check_free()
        n = 0
        for message in self.conversation.path():
            attachments = tuple(file for file in message.attachments if not file.is_of(name))
            if attachments != message.attachments:
                n += len(message.attachments) - len(attachments)
                self.conversation.update(message.id, attachments=attachments)
                self.saver.save(message.id)
        return n

    def _moved(self) -> None:
        self._full = None
        leaf = self.conversation.leaf
        self.saver.set(leaf=None if leaf is None else leaf.id)

    # -- Turns -----------------------------------------------------------------------------------------------------

    def _check_free(self) -> None:
        if self.busy:
            raise UsageError("a reply is in progress: stop it first")

    def _loaded(self) -> ChatModel:
        if self.model is None:
            raise UsageError("no model is loaded: wait until one is, or choose one with /model")
        return self.model

    @contextmanager
    def _taking(self, turn: Turn) -> Iterator[None]:
        """Hold the session for one turn: other turns and changes of the conversation raise UsageError."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("a reply is in progress: stop it first")
        try:
            self.turn, self._full = turn, None
            yield
            self._emit(turn)
        finally:
            self.turn = None
            self._busy.release()

    def _emit(self, turn: Turn, *new_events: Event) -> None:
        """Emit events, after a warning if something could not be saved."""
        if (warning := self.saver.take_warning()) is not None:
            turn.emit(events.ChatWarning(warning))
        for event in new_events:
            turn.emit(event)

    def _ask(self, text: str, old: ChatMessage | None, turn: Turn) -> None:
        """Send a message, at the end or as a replacement of ``old``, and generate the reply."""
        with self._taking(turn):
            model = self._loaded()
            if not text.strip():
                raise UsageError("there is nothing to send: type a message")

            def count(content: str) -> int:
                return len(model.tokenize(content, add_special=False))

            attached = self.attach(text, count, old, self.rank)
            if turn.is_stopped:
                turn.emit(events.Finished(None))
                return
            question = self._say(text, old, attached.files)
            turn.question = question.id
            for name in attached.unknown:
                turn.emit(events.ChatWarning(f"there is no file {name!r}: @{name} is sent as text"))
            if attached.is_cut:
                n_sent = sum(file.n_tokens for file in attached.files)
                amount = f"{n_sent:,} of about {attached.n_tokens:,} tokens of files fit"
                turn.emit(events.ChatWarning(f"{amount}: the pieces that match the message best are sent"))
            if attached.skipped:
                names = shortened(", ".join(attached.skipped), 200)
                turn.emit(events.ChatWarning(f"not sent, because they are not text files: {names}"))
            self._reply(question.id, None, turn)

    def attach(
        self, text: str, count: Callable[[str], int], old: ChatMessage | None = None, rank: Rank = ranked
    ) -> Attached:
        """Return the files (or fitting pieces) that ``text`` names. It replaces ``old``; see `attachments.attach`."""

        def budget() -> int:
            context = self._loaded().info.context
            parent = None if old is None else old.parent
            path = [] if old is not None and parent is None else self.conversation.path(parent)
            messages = whole_prompt(path, self.system)
            n_left = context - count(text) - (len(self._loaded().tokenize_chat(messages)) if messages else 0)
            return max(n_left, context // 2) - context // 4  # old turns can be dropped to make room

        model = self._loaded()
        see = partial(tokens_of_media, model) if model.accepts_images or model.accepts_audio else None
        return attach(text, count, () if old is None else old.attachments, budget, rank, see)

    def _say(self, text: str, old: ChatMessage | None, files: tuple[Attachment, ...]) -> ChatMessage:
        if not self.conversation.title:
            self.set_title(automatic_title(text))
        if old is None:
            question = self.conversation.add("user", text, attachments=files)
        else:
            question = self.conversation.add_sibling(old.id, text, attachments=files)
            if old.window is not None:
                first = question.id if old.window.first == old.id else old.window.first
                question = self.conversation.update(question.id, window=Window(first, old.window.summary))
            if not self.conversation.was_replied_to(old.id):
                self.saver.delete(self.conversation.delete(old.id))
        self.saver.save(question.id)
        return question

    def _reply(self, question: str, id_: str | None, turn: Turn) -> None:
        """Generate the reply to a message, or the rest of the reply ``id_``, and run the tools that it calls."""
        self._start_tools(turn)
        for _ in range(self.toolbox.settings.rounds):
            reply = self._reply_once(question, id_, turn)
            if reply is None or not reply.calls:
                return
            self._run_tools(reply, turn)
            if turn.is_stopped:
                return
            question, id_ = reply.id, None
        n = self.toolbox.settings.rounds
        self._emit(turn, events.ChatWarning(f"stopped after {n} rounds of tools: send a message to continue"))

    @property
    def _tool_options(self) -> dict[str, Any]:
        """Keyword arguments that pass the tools to the model."""
        return {"tools": [tool.schema for tool in self._tools.values()]} if self._tools else {}

    def _start_tools(self, turn: Turn) -> None:
        """Start the enabled tools, and notify the user once of the instructions that the model gets."""
        project = self.project
        self._tools = self.toolbox.tools(lambda: turn.is_stopped, self.folder)
        self._tools |= {tool.name: tool for tool in project.tools}
        warnings = self.toolbox.take_warnings()
        if project is not self._announced:
            self._announced = project
            if self.conversation.settings.get("folder") and self.folder is None:
                warnings.append(f"there is no folder {self.conversation.settings['folder']}: /folder chooses another")
            warnings += project.warnings
            if project.summary:
                self._emit(turn, events.ChatNotice(f"{project.summary}: /set instructions off omits this"))
        self._emit(turn, *map(events.ChatWarning, warnings))

    def _run_tools(self, reply: ChatMessage, turn: Turn) -> None:
        """Run the tool calls of a reply in order, if they are allowed."""
        for i, call in enumerate(reply.calls):
            tool = self._tools.get(call.name)
            if tool is None:
                names = ", ".join(self._tools)
                output = ToolOutput(f"There is no tool {call.name!r:.80}. The tools are: {names}.")
            else:
                output = self._run_tool(tool, call, turn, partial(self._record, reply.id, i, turn))
            if output.edit is not None:
                self._edits.append(_AppliedEdit(output.edit, reply.id, i))
                del self._edits[:-_MAX_EDITS]
            self._record(reply.id, i, turn, result=output.text, images=output.images)

    def _record(self, id_: str, index: int, turn: Turn, **changes: Any) -> None:
        """Change a call of a message, and save and show the message."""
        calls = list(self.conversation[id_].calls)
        calls[index] = replace(calls[index], **changes)
        message = self.conversation.update(id_, calls=tuple(calls))
        self.saver.save(id_)
        self._emit(turn, events.ToolCallsDone(message))

    def _run_tool(self, tool: AgentTool, call: CallRecord, turn: Turn, record: Callable[..., None]) -> ToolOutput:
        """Run a call if it is allowed. ``record`` stores and shows the diff of an edit before the question."""
        arguments = json.loads(call.arguments)
        try:
            change = "" if turn.is_stopped else preview_of(tool, arguments)
        except UsageError as error:
            return ToolOutput(f"error: {error}")
        if change:
            record(change=shown_change(change))
        is_allowed = not turn.is_stopped and self._may_run(tool, call, change, turn)
        if turn.is_stopped:
            return ToolOutput("(stopped before it was run)")
        if not is_allowed:
            return ToolOutput("(the user does not allow this call)")
        return self._acceptable(call_as_shown(tool, arguments, digest_of(change), lambda: turn.is_stopped))

    def _acceptable(self, output: ToolOutput) -> ToolOutput:
        """Return an output without images that the model cannot process."""
        model = self._loaded()
        if not output.images:
            return output
        if not model.accepts_images:
            return ToolOutput(f"{output.text}\n(the model does not accept images)")
        try:
            for image in output.images:
                tokens_of_media(model, image)
        except UsageError as error:
            return ToolOutput(f"error: {error}")
        return output

    def _may_run(self, tool: AgentTool, call: CallRecord, change: str, turn: Turn) -> bool:
        """Return whether a call is allowed. Requests the user's permission unless an earlier one covers the call."""
        if tool.mark in self._allowed or self.toolbox.is_allowed(tool):
            return True
        answers: queue.SimpleQueue[Permission] = queue.SimpleQueue()
        turn.asked = events.ToolApprovalRequest(call.name, call.arguments, answers.put, change)
        self._emit(turn, turn.asked)
        answer: Permission | None = None
        while answer is None and not turn.is_stopped:
            with suppress(queue.Empty):
                answer = answers.get(timeout=_ANSWER_SECONDS)
        turn.asked = None
        self._emit(turn, events.ToolApprovalEnded())
        if answer == "always":
            try:
                self.toolbox.allow(tool)
            except StoreError as error:
                self._emit(turn, events.ChatWarning(str(error)))
        elif answer == "chat":
            self._allowed.add(tool.mark)
        return answer is not None and answer != "no"

    def _reply_once(self, question: str, id_: str | None, turn: Turn) -> ChatMessage | None:
        """Generate one reply, or the rest of reply ``id_``. Returns the reply if it is complete, otherwise None."""
        model, conversation = self._loaded(), self.conversation
        params = chat_settings.generation(conversation.settings)
        messages = whole_prompt(conversation.path(question), self.system)
        prefix = params.reply_prefix if id_ is None else conversation[id_].text
        variables = params.template_variables
        n_tokens = len(
            model.tokenize_chat(messages, template_variables=variables, reply_prefix=prefix, **self._tool_options)
        )
        if turn.is_stopped:
            self._emit(turn, events.Finished(None if id_ is None else conversation[id_]))
            return None
        if n_tokens >= model.info.context:
            self._emit(turn, self._context_full(question, id_, n_tokens))
            return None
        is_new = id_ is None
        if id_ is None:
            render_variables = {**model.template_variables, **variables, **self._tool_options}
            end = model.chat_template.render(texts_alone(messages), **render_variables)
            opened = opening_tag(end)
            id_ = conversation.add("assistant", prefix, parent=question, state="streaming", opened=opened).id
        else:
            conversation.update(id_, state="streaming")
        self.saver.save(question, id_)
        self._emit(turn, events.Started(id_))
        more = {
            "template_variables": variables,
            "reply_prefix": prefix,
            **self.more,
            **params.options,
            **self._tool_options,
        }
        more["progress"] = lambda done, total: turn.emit(events.Prefill(done, total))
        start = partial(model.stream_chat, messages, parse=False, **more)  # the conversation stores the raw text
        self._write(id_, start, turn, show_begun=is_new)
        message = conversation.get(id_)
        self._emit(turn, events.Finished(message))
        if message is not None and message.state == "context" and message.stats is not None:
            self._emit(turn, self._context_full(question, id_, message.stats.total_tokens))
        return message if message is not None and message.state == "complete" else None

    def _write(self, id_: str, start: Callable[[], Stream], turn: Turn, *, show_begun: bool) -> None:
        """Stream a reply, or its rest, into the conversation. After an error, the generated text is kept."""
        model, reply = self._loaded(), self.conversation[id_]
        parser = ReplyParser(self._tool_options.get("tools", ()), reply.opened)
        calls: list[ToolCall] = []
        answer = ""

        def tell(pieces: Sequence[object], *, show: bool = True) -> None:
            nonlocal answer
            for piece in pieces:
                if isinstance(piece, ToolCall):
                    calls.append(piece)
                if not isinstance(piece, Piece):
                    continue
                answer += "" if piece.thinking else piece.text
                if show:
                    clock.see(thinking=piece.thinking)
                    self._emit(turn, events.Delta(*piece))

        clock = ThinkingClock(None if reply.stats is None else reply.stats.thinking_s)
        state: State = "failed"
        stream: Stream | None = None
        try:
            tell(parser.feed(reply.text), show=show_begun)
            turn.stream = stream = start()
            with self.saver.saving(id_):
                for chunk in stream:
                    if chunk.text:
                        self.conversation.update(id_, text=self.conversation[id_].text + chunk.text)
                        tell(parser.feed(chunk.text))
            tell(parser.finish(is_cut=stream.finish_reason != "stop" or stream.stop_text is not None))
            state = "stopped" if stream.finish_reason == "cancelled" else "complete"
            if stream.finish_reason == "length":
                state = "context" if stream.usage.total_tokens >= model.info.context else "length"
            # Store complete calls in the message's field ``calls``, not in its text.
            if calls and state == "complete" and all(call.is_whole for call in calls):
                text = self.conversation[id_].text
                text = text.removesuffix(split(text, reply.opened, CONTROL_TAGS)[1]) + answer.rstrip()
                self.conversation.update(id_, text=text, calls=tuple(CallRecord(c.name, c.arguments) for c in calls))
            self._emit(turn, *map(events.ChatWarning, parser.warnings))
        except KeyboardInterrupt:
            state = "stopped"
            raise
        finally:
            turn.stream = None
            stats = None
            if stream is not None:
                stream.close()
                stats = replace(_stats(stream, model), thinking_s=clock.stop())
            self._end(id_, state, stats)

    def _end(self, id_: str, state: State, stats: ReplyStats | None) -> None:
        """Save the final state of a reply. An empty reply is deleted, unless the model itself ended it."""
        if self.conversation[id_].text or state == "complete":
            self.conversation.update(id_, state=state, stats=stats)
            self.saver.save(id_)
        else:
            self.saver.delete(self.conversation.delete(id_))
            self._moved()

    # -- A full context --------------------------------------------------------------------------------------------

    def _trimmer(self, question: str, reply: str | None) -> ContextTrimmer:
        conversation = self.conversation
        prefix = conversation.settings.get("reply_prefix", "") if reply is None else conversation[reply].text
        return ContextTrimmer(self._loaded(), conversation, self.system, question, prefix, self._tool_options)

    def _context_full(self, question: str, reply: str | None, n_tokens: int) -> events.ContextFull:
        choices = self._trimmer(question, reply).choices()
        self._full = _Full(question, reply, choices)
        context = self._loaded().info.context
        return events.ContextFull(n_tokens, context, reply is not None, choices)

    def _trim(self, full: _Full, turn: Turn, *, summarise: bool) -> None:
        trimmer = self._trimmer(full.question, full.reply)
        first = trimmer.first(trimmer.summary_tokens if summarise else 0)
        if first is None:
            raise UsageError("the context cannot be freed: the last message alone is too long; shorten it with /edit")
        summary = self._summarise(trimmer, first, turn) if summarise else trimmer.summary
        if turn.is_stopped:
            return
        self._full = None
        self.conversation.update(full.question, window=Window(trimmer.path[first].id, summary))
        self.saver.save(full.question)
        self._emit(turn, events.ContextTrimmed(first, summary))
        self._reply(full.question, full.reply, turn)

    def _summarise(self, trimmer: ContextTrimmer, first: int, turn: Turn) -> str:
        model = self._loaded()
        params = chat_settings.generation(self.conversation.settings)
        options = {**self.more, **params.options, "max_tokens": trimmer.summary_tokens, "stop": ()}
        options["template_variables"] = {"enable_thinking": False}
        turn.stream = stream = model.stream_chat(trimmer.request(first), **options)
        written = ""
        try:
            for chunk in stream:
                written += chunk.text
                turn.emit(events.Summarising(chunk.text))
        finally:
            turn.stream = None
            stream.close()
        return split(written)[1].strip()


def _stats(stream: Stream, model: ChatModel) -> ReplyStats:
    usage, timings = stream.usage, stream.timings
    return ReplyStats(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        new_tokens=usage.completion_tokens,
        first_token_s=timings.first_token_s,
        rate=timings.decode_tokens_per_s,
        model=name_of(model),
    )
