"""The main screen: the conversation, and the editor below it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from localllm.errors import UsageError
from localllm.tui import commands
from localllm.tui.base_app import BaseApp
from localllm.tui.chat.attachments import attach
from localllm.tui.chat.completion import command_completions, file_completions, file_word
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.events import ContextFull, Event, Turn
from localllm.tui.chat.model import ChatModel
from localllm.tui.chat.session import ChatSession
from localllm.tui.menu import MENU, NAMES
from localllm.tui.screens.commands import Commands
from localllm.tui.screens.dialogs import EDIT, TAKE_BACK, ask_room, open_link
from localllm.tui.screens.message_actions import MessageActions
from localllm.tui.screens.model_loader import ModelLoader, ModelState
from localllm.tui.screens.streaming import Follower
from localllm.tui.setup import Setup
from localllm.tui.storage.prompt_history import PromptHistory
from localllm.tui.text import escape_controls, sentence
from localllm.tui.widgets.composer import Composer, Suggestions
from localllm.tui.widgets.footer import KeyFooter
from localllm.tui.widgets.message import Reply
from localllm.tui.widgets.status import StatusLine
from localllm.tui.widgets.transcript import Transcript

#: Seconds between two looks at the memory in use.
_MEMORY_SECONDS = 3.0
#: Seconds that a reply has to end in when the program does.
_PATIENCE_SECONDS = 5.0


class ChatScreen(MessageActions, Screen[None]):
    """The chat.

    Attributes:
        session: what is talked in.
        models: the model that is loaded, or will be.
        turn: what is being generated; None if nothing is.
    """

    app = getters.app(BaseApp)

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+up", "select(-1)", "Messages", key_display="^↑"),
        Binding("ctrl+down", "select(1)", "Next message", show=False),
        Binding("f1", "command('help')", "Help"),
        *(
            Binding(entry.key, f"command({entry.name!r})", entry.title, show=entry.name in ("clear", "sessions"))
            for entry in MENU
            if entry.key and entry.name not in ("help", "quit")
        ),
    ]

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.session = ChatSession(None, setup.store, setup.conversation, setup.more)
        self.turn: Turn | None = None
        self.models = ModelLoader(self)
        self.replacing: str | None = None
        self.commands = Commands(self)
        self.suggestions = Suggestions()
        self.composer = Composer(PromptHistory(setup.history), self.suggestions)
        self.transcript = Transcript()
        self.status = StatusLine()
        self._is_stopped = False
        self._ended = asyncio.Event()
        self._ended.set()
        self._sends_when_loaded = False

    def compose(self) -> ComposeResult:
        yield Static(id="heading")
        yield self.transcript
        yield self.suggestions
        yield Static(id="hint")
        with Vertical(id="editor"):
            yield self.composer
        yield self.status
        yield KeyFooter()

    # -- Start and end ---------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.composer.focus()
        self.hint("")
        first, saved = self.app.setup.first_model, self.session.conversation.model
        name = saved if first is None else first
        # Before any key is handled: a /model that is typed ahead comes after it, and Ctrl+Q finds it to cancel.
        self.app.spawn(self.models.load(name, keeps=name == saved), group="loading")
        self.app.spawn(self._start())
        self.set_interval(_MEMORY_SECONDS, self._look_at_memory)

    async def _start(self) -> None:
        for notice in self.app.setup.notices:
            self.app.notify(notice, severity="warning")
        await self._show_chat()
        self.composer.typed.restore(await self.app.offload(self.composer.typed.load))
        await self._sample_memory()

    async def open(self, conversation: Conversation) -> None:
        """Shows a conversation in the place of the one before."""
        await self.end_turn()
        setup = self.app.setup
        self.session = ChatSession(self.models.model, setup.store, conversation, setup.more)
        self.replacing = None
        self._sends_when_loaded = False
        self.hint("")
        await self._show_chat()
        if len(conversation):
            await self.models.tell_difference(conversation.model)

    async def _show_chat(self) -> None:
        await self.refresh_all()
        self.transcript.follow()
        if (warning := await self.app.offload(self.session.enter)) is not None:
            self.app.notify(warning, severity="warning")
            self.hint("Open in another terminal too: what both say is kept, as branches.")

    async def end_turn(self) -> None:
        """Stops what is generated, and waits for its end."""
        if self.turn is not None:
            self.session.stop()
            await self._ended.wait()

    async def quit(self) -> None:
        """Ends the program; the reply that is under way is kept as far as it came."""
        self.models.cancel()
        self.status.change(activity="ending", progress=None)
        try:
            await asyncio.wait_for(self.end_turn(), _PATIENCE_SECONDS)
        finally:
            self.app.exit(0)

    # -- What is shown ---------------------------------------------------------------------------------------------

    async def refresh_all(self) -> None:
        """Draws everything as it is now."""
        session = self.session
        title = escape_controls(session.conversation.title) or "New chat"
        self.query_one("#heading", Static).update(Content.assemble((" localllm ", "bold"), f" {title}"))
        await self.transcript.show(session.conversation)
        self.refresh_bindings()
        meter = await self.app.offload(session.meter)
        if session is self.session and self.turn is None:
            self.status.change(meter=meter, stats=session.last)
        if (warning := session.take_warning()) is not None:
            self.app.notify(warning, severity="warning")

    def hint(self, text: str) -> None:
        """Says something above the editor; an empty text says nothing."""
        hint = self.query_one("#hint", Static)
        hint.update(Content(escape_controls(text)))
        hint.display = bool(text)

    def _look_at_memory(self) -> None:
        self.app.spawn(self._sample_memory(), group="memory")

    async def _sample_memory(self) -> None:
        self.status.change(memory=await asyncio.to_thread(self.app.setup.memory))

    # -- Turns -----------------------------------------------------------------------------------------------------

    def begin(self, start: Callable[[], Iterator[Event]], typed: str | None = None) -> None:
        """Has something generated; see `Turn`.

        Raises:
            UsageError: a reply is under way.
        """
        if self.turn is not None:
            raise UsageError("a reply is under way: Esc stops it")
        self.turn = Turn(start, typed)
        self._is_stopped = False
        self._ended.clear()
        self.refresh_bindings()
        self.app.spawn(self._run(self.session, self.turn), group="turn")

    async def _run(self, session: ChatSession, turn: Turn) -> None:
        thread = asyncio.create_task(asyncio.to_thread(turn.run))
        try:
            follower = Follower(self.app, session, self.transcript, self.status)
            outcome = await follower.follow(turn)
        finally:
            await thread
            self.turn = None
            self._ended.set()
        if outcome.error is not None:
            self._give_back(turn, session)
            self.app.notify_error(outcome.error)
        if session is self.session:
            await self.refresh_all()
        if outcome.full is not None:
            await self._make_room(session, outcome.full)

    async def _make_room(self, session: ChatSession, full: ContextFull) -> None:
        """Does what is to be done about a full context; asks, unless that was said before."""
        choice = self.app.setup.when_full
        question = session.conversation.leaf
        if choice is None or choice not in full.choices:
            chosen = await self.app.push_screen_wait(ask_room(full))
            choice = "drop" if chosen == "drop" else "summarise" if chosen == "summarise" else "stop"
            if question is not None and chosen == EDIT:
                self.edit(question)
            elif question is not None and chosen == TAKE_BACK:
                await self.app.offload(session.delete, question.id)
                await self.refresh_all()
        if choice != "stop":
            self.begin(partial(session.make_room, choice))

    def _give_back(self, turn: Turn, session: ChatSession) -> None:
        """What was typed stays in the editor if it never became a message."""
        path = session.conversation.path()
        was_said = any(message.role == "user" and message.text == turn.typed for message in path[-2:])
        if turn.typed and not was_said and not self.composer.text:
            self.composer.put(turn.typed)

    def action_stop(self) -> None:
        """Esc: closes what is open, stops what is generated, or goes back to the editor."""
        if self.suggestions.display:
            self.suggestions.offer([])
        elif self.turn is not None:
            self._is_stopped = True
            self.session.stop()
        elif self._sends_when_loaded:
            self._sends_when_loaded = False
            self.hint("")
        elif self.replacing is not None:
            self.replacing = None
            self.hint("")
            self.composer.empty()
        else:
            self.transcript.follow()
        self.composer.focus()

    # -- The editor ------------------------------------------------------------------------------------------------

    def on_composer_sent(self, event: Composer.Sent) -> None:
        event.stop()
        self._send(event.text)

    def _send(self, text: str) -> None:
        """Submits a text, or tells why it cannot be sent."""
        try:
            self.submit(text)
        except UsageError as error:
            self.app.notify_error(error)

    def submit(self, text: str) -> None:
        """Sends a message, or runs a command.

        Raises:
            UsageError: it cannot be sent now; it stays in the editor.
        """
        if not text.strip():
            return
        typed = commands.parse(text)  # what is no command stays where it can be mended
        if not isinstance(typed, str):
            self._remember(text)
            self.run_command(text)
            return
        if self.is_ending:
            self.app.ask(self._submit_after_end(), group="submit")
            return
        if self.turn is not None:
            raise UsageError("a reply is under way: Esc stops it")
        if self.models.state is ModelState.NONE:
            raise UsageError("no model is loaded: choose one with /model")
        if self.models.state is not ModelState.LOADED:
            self._sends_when_loaded = True
            self.hint("The model is being loaded: the message is sent as soon as it is there. Esc: not.")
            return
        session, replaced, self.replacing = self.session, self.replacing, None
        self._remember(text)
        start = partial(session.send, typed) if replaced is None else partial(session.edit, replaced, typed)
        self.begin(start, typed=typed)

    @property
    def is_ending(self) -> bool:
        """Whether a reply has ended, or was stopped, and is about to be drawn as it stays."""
        return self.turn is not None and (self._is_stopped or not self.session.busy)

    async def _submit_after_end(self) -> None:
        await self._ended.wait()
        self.composer.action_send()

    def _remember(self, text: str) -> None:
        self.composer.empty()
        self.suggestions.offer([])
        self.hint("")
        if self.composer.typed.add(text):
            self.app.spawn(self.app.offload(self.composer.typed.save, text), group="history")

    def send_waiting(self) -> None:
        """Sends the message that waits for the model; where none could be loaded, it stays in the editor."""
        if self._sends_when_loaded:
            self._sends_when_loaded = False
            self.hint("")
            self._send(self.composer.message)

    def on_composer_typed(self, event: Composer.Typed) -> None:
        event.stop()
        self.app.spawn(self._suggest(event.line, event.is_first), group="suggestions")

    async def _suggest(self, line: str, is_first: bool) -> None:
        choices = command_completions(line, NAMES) if is_first else []
        if not choices and file_word(line) is not None:
            choices = await self.app.offload(file_completions, line)
        if line == self.composer.line_to_cursor:
            self.suggestions.offer(choices, line)
        await self._tell_size(line)

    async def _tell_size(self, line: str) -> None:
        """Says how many tokens the file has that has just been named, where a model is there to count them."""
        model = self.session.model
        if model is None or self.replacing is not None or self._sends_when_loaded:
            return
        if not line.endswith(" ") or "@" not in line:
            self.hint("")
            return
        try:
            files = await self.app.offload(_sizes, line, model)
        except UsageError as error:
            files = [sentence(error)]
        if line == self.composer.line_to_cursor:
            self.hint(", ".join(files))

    def on_option_list_option_selected(self, event: Suggestions.OptionSelected) -> None:
        event.stop()
        self.composer.complete(self.suggestions.choices[event.option_index])

    # -- Commands, links -------------------------------------------------------------------------------------------

    def run_command(self, text: str) -> None:
        """Runs a command as it is typed, with its slash."""
        self.app.ask(self._run_command(text), group="command")

    async def _run_command(self, text: str) -> None:
        if self.is_ending:
            await self._ended.wait()
        await self.commands.run(text)

    def action_command(self, name: str) -> None:
        self.run_command(f"/{name}")

    def on_reply_link(self, event: Reply.Link) -> None:
        event.stop()
        self.app.spawn(open_link(self.app, event.address), group="link")


def _sizes(line: str, model: ChatModel) -> list[str]:
    """The files that a line names, and their tokens."""
    attached = attach(line, lambda text: len(model.tokenize(text, add_special=False)))
    return [f"{file.name}: {file.n_tokens:,} tokens" for file in attached.files]
