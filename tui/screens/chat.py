"""The main screen: the conversation, and the editor below it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

from textual import getters, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Markdown, Static
from textual.worker import Worker

from localllm.errors import UsageError
from localllm.tui import commands
from localllm.tui.base_app import BaseApp
from localllm.tui.chat import events
from localllm.tui.chat.attachments import file_completions
from localllm.tui.chat.context import ChatModel, name_of
from localllm.tui.chat.conversation import ChatMessage, Conversation
from localllm.tui.chat.events import Event, Turn
from localllm.tui.chat.session import ChatSession
from localllm.tui.screens import requests
from localllm.tui.screens.commands import ScreenUI
from localllm.tui.screens.dialogs import EDIT, TAKE_BACK, ask_when_full, open_link
from localllm.tui.screens.models import ModelLoader
from localllm.tui.screens.streaming import Draft, StreamedTurn
from localllm.tui.setup import Setup
from localllm.tui.storage.prompt_history import PromptHistory
from localllm.tui.text import SELECT_SIGN, escape_controls, sentence, shortened, spelled_out
from localllm.tui.widgets.composer import Composer, Suggestions
from localllm.tui.widgets.finder import Finder
from localllm.tui.widgets.message import MessageView
from localllm.tui.widgets.status import KeyFooter, StatusBar
from localllm.tui.widgets.transcript import Transcript

#: Commands whose keys are in the footer.
_SHOWN = ("clear", "sessions")
#: No progress is shown for prompts with fewer tokens.
_SHORT_PROMPT = 64
#: Interval in seconds between samples of the memory in use.
_MEMORY_SECONDS = 3.0
#: Seconds without a key before the tokens of a named file are counted.
_TYPING_SECONDS = 0.15
#: Maximum characters of a tool call above the editor.
_MAX_OF_A_CALL = 120
#: Maximum seconds that selecting waits until a sent message is drawn.
_DRAWN_SECONDS = 0.5
#: Seconds for replies to end when the program quits.
_PATIENCE_SECONDS = 5.0


class ChatScreen(Screen[None]):
    """One chat: heading, messages, editor, status line and footer."""

    app = getters.app(BaseApp)

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+up", "select(-1)", "Messages", key_display=SELECT_SIGN),
        Binding("ctrl+down", "select(1)", "Next message", show=False),
        Binding("ctrl+pagedown", "command('tab next')", "Next tab", show=False),
        Binding("ctrl+pageup", "command('tab prev')", "Previous tab", show=False),
        Binding("f1", "command('help')", "Help", id="help"),
        # Commands without a key still need an id, so that the settings file can bind a key.
        *(
            Binding(c.key or f"none-{c.name}", f"command({c.name!r})", c.title, show=c.name in _SHOWN, id=c.name)
            for c in sorted(commands.COMMANDS, key=lambda command: command.name != "clear")
            if c.name not in ("help", "quit")
        ),
    ]

    def __init__(self, setup: Setup, models: ModelLoader[ChatScreen], conversation: Conversation) -> None:
        super().__init__()
        self.session = setup.session(models.model, conversation)
        self.turn: StreamedTurn | None = None
        self._reply: MessageView | None = None  # the reply being written
        self.models = models
        models.chats.append(self)
        self.replacing: str | None = None  # id of the message that the next message replaces
        self.unsaved: list[ChatSession] = []  # sessions of closed chats that could not be saved
        self.suggestions = Suggestions()
        self.composer = Composer(PromptHistory(setup.history), self.suggestions)
        self._heading, self._hint = Static(id="heading"), Static(id="hint")
        self.transcript = Transcript()
        self.finder = Finder()
        self._match: commands.Match | None = None  # the match of the finder's text on the screen
        self.status = StatusBar()
        #: Set while this is the visible chat; dialogs may cover it.
        self.seen = asyncio.Event()
        #: Set while no reply is generated or drawn.
        self.ended = asyncio.Event()
        self.ended.set()
        #: The pending message. It is sent once a model is loaded, or the stopped reply has ended.
        self._pending: Draft | None = None

    def compose(self) -> ComposeResult:
        yield self._heading
        yield self.transcript
        yield self.finder
        yield self.suggestions
        yield self._hint
        with Vertical(id="editor"):
            yield self.composer
        yield self.status
        yield KeyFooter()

    # -- Start and end ---------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.set_focus(self.composer)
        self.hint("")
        self.app.spawn(self._start())
        self.set_interval(_MEMORY_SECONDS, self._sample_memory)
        if len(self.models.chats) > 1:
            shared = self.models.chats[0].status.status
            self.status.status = replace(shared, activity="", progress=None, meter=None, stats=None)
            return
        first, saved = self.app.setup.first_model, self.session.conversation.model
        name = saved if first is None else first
        # Start loading before any key is handled: a /model typed ahead must come later, and Ctrl+Q must cancel it.
        offers = self.app.setup.offers is not None
        loading = self.models.choose_first(name) if offers else self.models.load(name, keeps=name == saved)
        self.app.spawn(loading, group="loading")
        if self.app.setup.question:
            self._send(self.app.setup.question)
        notices = list(self.app.setup.notices)
        for name in set(self.app.setup.keys).difference(command.name for command in commands.COMMANDS):
            notices.append(f"[keys] of the settings file has {name!r}, which is not a command: /help lists them")
        for notice in notices:
            self.app.notify(notice, severity="warning")

    async def _start(self) -> None:
        await self._show_chat()
        self.composer.typed.restore(await self.app.offload(self.composer.typed.load))
        await self._sample_memory()

    async def open(self, conversation: Conversation) -> None:
        """Show ``conversation`` instead of the current one."""
        await self.end_turn()
        self._take_back_pending()
        if await self.app.offload(self.session.saver.flush, 0.0) is not None:
            self.unsaved.append(self.session)
        self.session = self.app.setup.session(self.models.model, conversation)
        self.replacing = None
        self.hint("")
        await self._show_chat()
        if len(conversation):
            await self.models.tell_difference(conversation.model)

    async def _show_chat(self) -> None:
        await self.refresh_all()
        self.transcript.anchor()
        if (warning := await self.mark_open()) is not None:
            self.app.notify(warning, severity="warning")
            self.hint("Also open in another terminal: messages from both are saved as branches.")

    async def mark_open(self) -> str | None:
        """Record which chats are open, for other terminals. Returns a warning if this chat is open elsewhere."""
        ids = [chat.session.conversation.id for chat in self.models.chats]
        return await self.app.offload(self.session.mark_open, ids)

    async def end_turn(self) -> None:
        """Stop the current turn, and wait until it has ended."""
        if self.turn is not None:
            self.turn.stop()
            await self.ended.wait()

    async def quit(self) -> None:
        """Quit the program. Replies in progress are stopped, and their text is kept."""
        self.models.cancel()
        self.status.change(activity="ending", progress=None)
        try:
            await asyncio.wait_for(asyncio.gather(*(c.end_turn() for c in self.models.chats)), _PATIENCE_SECONDS)
        finally:
            self.app.exit(0)

    # -- Display -----------------------------------------------------------------------------------------------------

    async def refresh_all(self) -> None:
        session = self.session
        self.draw_heading()
        await self.transcript.show(session.conversation)
        self.refresh_bindings()
        meter = await self.app.offload(session.meter)
        if session is self.session and self.turn is None:
            folder = Path(session.conversation.settings.get("folder", "")).name
            self.status.change(meter=meter, stats=session.last, folder=folder)
        if (warning := session.saver.take_warning()) is not None:
            self.app.notify(warning, severity="warning")

    @property
    def title_line(self) -> str:
        """The title, after a mark if a reply is in progress or waits for permission."""
        mark = "? " if self._is_asking else "… " if self.turn else ""
        return mark + (escape_controls(self.session.conversation.title) or "New chat")

    def draw_heading(self) -> None:
        """Draw the titles of the open chats, on the screens of all open chats."""
        titles = [shortened(chat.title_line, 30) for chat in self.models.chats]
        for at, chat in enumerate(self.models.chats):
            spans: list[str | tuple[str, str]] = [f" {chat.title_line}"]
            if len(titles) > 1:
                spans = [(f" {i + 1} {title} ", "reverse" if i == at else "") for i, title in enumerate(titles)]
            chat._heading.update(Content.assemble((" localllm ", "bold"), *spans))

    def hint(self, text: str) -> None:
        """Show ``text`` above the editor, or nothing if it is empty."""
        self._hint.update(Content(escape_controls(text)))
        self._hint.display = bool(text)

    async def _sample_memory(self) -> None:
        self.status.change(memory=await self.app.in_thread(self.app.setup.memory))

    # -- Turns -----------------------------------------------------------------------------------------------------

    def begin(self, start: Callable[[Turn], None], draft: Draft | None = None) -> None:
        """Start a turn. Raises UsageError during a reply, or while a model is being loaded."""
        if self.turn is not None:
            raise UsageError("a reply is in progress: Esc stops it")
        if self.models.state == "loading":
            raise UsageError("the model is being loaded: wait until it is loaded")
        self.turn = StreamedTurn(start, draft)
        self.ended.clear()
        self.refresh_bindings()
        self.draw_heading()
        self.app.spawn(self._run(self.session, self.turn), group="turn")

    async def _run(self, session: ChatSession, turn: StreamedTurn) -> None:
        thread = asyncio.create_task(self.app.in_thread(turn.run))
        self.status.change(activity="waiting for the model", progress=None)
        try:
            await turn.post_events(self.post_message)
            await self._finish_reply()
            self.status.change(activity="", progress=None)
        finally:
            await thread
            self.turn = None
            self.ended.set()
            self.draw_heading()
        if turn.draft is not None and turn.question is None:
            self._take_back(turn.draft)
        if turn.error is not None:
            self.app.notify_error(turn.error)
        if session is self.session:
            await self.refresh_all()
        # While another model is loading, the full context of the old model does not matter.
        if turn.full is not None and session is self.session and self.models.state == "loaded":
            self._take_back_pending()
            await self.seen.wait()
            await self._free_context(session, turn.full)
        self.send_pending()

    def on_streamed_turn_progressed(self, message: StreamedTurn.Progressed) -> None:
        message.stop()
        # A worker, because drawing must not delay keys. A partial, as in `on_composer_typed`.
        self.app.spawn(partial(self._show_progress, message), group="turn")

    async def _show_progress(self, message: StreamedTurn.Progressed) -> None:
        try:
            for event in message.events:
                await self._show_event(event, message.turn)
            if (stats := self.session.live) is not None:
                self.status.change(stats=stats, meter=self.session.meter())
        finally:
            message.is_drawn.set()

    async def _show_event(self, event: Event, turn: StreamedTurn) -> None:
        if isinstance(event, events.Delta):
            thinking = f"thinking ({self.app.key_of('answer')} ends it)"
            self.status.change(activity=thinking if event.thinking else "writing", progress=None)
            if self._reply is not None:
                await self._reply.write(event.text, thinking=event.thinking)
        elif isinstance(event, events.Prefill):
            if event.total >= _SHORT_PROMPT and event.done < event.total:
                self.status.change(activity="reading the prompt", progress=event.done / event.total)
        elif isinstance(event, events.Started):
            writer = "" if self.session.model is None else name_of(self.session.model)
            await self.transcript.show(self.session.conversation, streaming=event.id, writer=writer)
            self._reply = self.transcript.view(event.id)
            self.transcript.anchor()
            turn.is_drawn.set()
        elif isinstance(event, events.Finished):
            await self._finish_reply()
        elif isinstance(event, events.Summarising):
            turn.n_summary_words += len(event.text.split())
            self.status.change(activity=f"summarising: {turn.n_summary_words:,} words")
        elif isinstance(event, events.ContextTrimmed):
            self.status.change(activity="")
        elif isinstance(event, events.ToolApprovalRequest):
            self.status.change(activity="a tool waits for your answer")
            self._show_tool_request(event)
        elif isinstance(event, events.ToolApprovalEnded):
            self._show_tool_request(None)
        elif isinstance(event, events.ToolCallsDone):
            self.status.change(activity="using tools")
            if (view := self.transcript.view(event.message.id)) is not None:
                await view.finish(event.message)
        elif isinstance(event, events.ChatWarning):
            self.app.notify(event.text, severity="warning")
        elif isinstance(event, events.ChatNotice):
            self.app.notify(event.text)
        elif isinstance(event, events.ContextFull):
            turn.full = event

    async def _finish_reply(self) -> None:
        """Draw the final reply. This also covers failed turns, which emit no `Finished` event."""
        view, self._reply = self._reply, None
        if view is not None and (message := self.session.conversation.get(view.message.id)) is not None:
            await view.finish(message)

    @property
    def _is_asking(self) -> bool:
        return self.turn is not None and self.turn.asked is not None

    def _show_tool_request(self, request: events.ToolApprovalRequest | None) -> None:
        """Show a tool call above the editor. A dialog would capture the keys of a user who is typing."""
        text = ""
        if request is not None:
            call = spelled_out(f"{request.name} {request.arguments}").replace("\n", "\\n")
            n_hidden = len(call) - _MAX_OF_A_CALL
            if n_hidden > 0:
                call = f"{call[:_MAX_OF_A_CALL]}… ({n_hidden:,} more characters)"
            call = f"{request.name} to make this change" if request.change else call
            text = f"May the model use {call}? {self.app.key_of('allow')} answers; Esc stops the reply."
        self.hint(text)
        self.draw_heading()

    async def _free_context(self, session: ChatSession, full: events.ContextFull) -> None:
        """Free the context by the setting, or let the user choose."""
        choice = self.app.setup.when_full
        question = session.conversation.leaf
        if choice is None or choice not in full.choices:
            answer = await self.app.push_screen_wait(ask_when_full(full))
            choice = "drop" if answer == "drop" else "summarise" if answer == "summarise" else "stop"
            if question is not None and answer == EDIT:
                self._edit(question)
            elif question is not None and answer == TAKE_BACK:
                await self.app.offload(session.delete, question.id)
                await self.refresh_all()
        if choice != "stop":
            self.begin(partial(session.free_context, choice))

    @property
    def is_ending(self) -> bool:
        """Whether the turn has ended or was stopped, but is not completely drawn."""
        return self.turn is not None and (self.turn.is_stopped or self.turn.has_ended)

    def action_stop(self) -> None:
        """Handle Esc: close the completions, stop the reply, or return to the editor."""
        if self.suggestions.display:
            self.suggestions.offer([])
        elif self.turn is not None and not self.turn.is_stopped:
            self.turn.stop()
        elif self._pending is not None:
            self._take_back_pending()
        elif self.replacing is not None:
            self.replacing = None
            self.hint("")
            self.composer.empty()
        else:
            self.transcript.anchor()
        self.set_focus(self.composer)

    # -- The editor ------------------------------------------------------------------------------------------------

    def on_composer_sent(self, event: Composer.Sent) -> None:
        event.stop()
        self._send(event.text)

    def _send(self, text: str) -> None:
        """Submit ``text``, and show a notification if it cannot be sent."""
        try:
            self.submit(text)
        except UsageError as error:
            self.app.notify_error(error)

    def submit(self, text: str) -> None:
        """Send a message or run a command. Raises UsageError, and keeps the text in the editor, if that fails."""
        if not text.strip():
            return
        typed = commands.parse(text)  # an unknown command raises, and stays in the editor
        if not isinstance(typed, str):
            self._remember(text)
            self.run_command(text)
            return
        if self.turn is not None and not self.is_ending:
            raise UsageError("a reply is in progress: Esc stops it")
        if self._pending is not None:
            raise UsageError("a message is already waiting to be sent: Esc returns it to the editor")
        if self.models.state == "none":
            raise UsageError("no model is loaded: choose one with /model")
        self._pending, self.replacing = Draft(text, self.replacing), None
        self._remember(text)
        if self.models.state != "loaded":
            self.hint("The model is being loaded: your message will be sent afterwards. Esc cancels.")
        self.send_pending()

    def send_pending(self) -> None:
        """Send the pending message if possible. If no model could be loaded, return it to the editor."""
        draft, state = self._pending, self.models.state
        if draft is None or self.turn is not None or state == "loading" or self.models.n_comparisons:
            return
        if state == "none":
            self._take_back_pending()
            self.app.notify_error(UsageError("no model is loaded: choose one with /model"))
            return
        self._pending = None
        self.hint("")
        text = str(commands.parse(draft.text))
        start = partial(self.session.send, text)
        if draft.replaced is not None:
            start = partial(self.session.edit, draft.replaced, text)
        self.begin(start, draft)

    def _take_back_pending(self) -> None:
        draft, self._pending = self._pending, None
        if draft is not None:
            self.hint("")
            self._take_back(draft)

    def _take_back(self, draft: Draft) -> None:
        """Return an unsent message to the editor, before the text that was typed since."""
        since = self.composer.message
        self.composer.put(f"{draft.text}\n{since}" if since else draft.text)
        if self.replacing is None and draft.replaced in self.session.conversation:
            self.replacing = draft.replaced

    def _remember(self, text: str) -> None:
        self.composer.empty()
        self.suggestions.offer([])
        self.hint("")
        if self.composer.typed.add(text):
            self.app.spawn(self.app.offload(self.composer.typed.save, text), group="history")

    def on_composer_typed(self, event: Composer.Typed) -> None:
        event.stop()
        # A partial instead of a coroutine: a worker cancelled before its start would never await the coroutine.
        work = partial(self._suggest, event.line, event.is_first)
        _: Worker[None] = self.run_worker(work, group="suggestions", exclusive=True, exit_on_error=False)

    async def _suggest(self, line: str, is_first: bool) -> None:
        choices = commands.completions(line) if is_first else []
        if not choices and "@" in line:
            choices = await self.app.offload(file_completions, line)
        if line == self.composer.line_to_cursor:
            self.suggestions.offer(choices, line)
        await self._tell_size(line)

    async def _tell_size(self, line: str) -> None:
        """Show the tokens of the files named in ``line``, if a model is loaded that can count them."""
        model = self.session.model
        if model is None or self.replacing is not None or self._pending is not None or self._is_asking:
            return
        if not line.endswith(" ") or "@" not in line:
            self.hint("")
            return
        await asyncio.sleep(_TYPING_SECONDS)  # the next key cancels this worker
        is_wanted = threading.Event()
        is_wanted.set()
        try:
            text = await self.app.in_thread(_sizes, self.session, line, model, is_wanted)
        except UsageError as error:
            text = sentence(error)
        finally:
            is_wanted.clear()
        self.hint(text)

    def on_option_list_option_selected(self, event: Suggestions.OptionSelected) -> None:
        event.stop()
        self.composer.complete(self.suggestions.choices[event.option_index])

    # -- The selected message ----------------------------------------------------------------------------------------

    @property
    def selected(self) -> MessageView | None:
        """The selected message, or None if the editor has the focus."""
        focused = self.focused
        nodes = () if focused is None else focused.ancestors_with_self
        return next((node for node in nodes if isinstance(node, MessageView)), None)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the keys of actions that are not possible."""
        if action not in ("on_message", "branch", "step", "unfold"):
            return True
        view = self.selected
        if view is None:
            return False
        message, (number, n) = view.message, view.place.branch
        is_reply, is_busy = message.role == "assistant", self.turn is not None
        if action == "step":
            return not is_busy and 1 <= number + cast(int, parameters[0]) <= n
        if parameters == ("continue",):
            return not is_busy and message.can_go_on and view.place.is_last
        if action == "branch":
            return not is_busy and is_reply and not view.place.is_last
        if action == "unfold":
            return view.can_unfold
        if parameters == ("copy", "code"):
            return is_reply and "```" in message.text
        return parameters == ("copy",) or not is_busy

    # -- Selecting -------------------------------------------------------------------------------------------------

    def action_select(self, by: int) -> None:
        """Select the previous or next message; from the editor, the last one."""
        self.app.ask(self._select(by), group="select")

    async def _select(self, by: int) -> None:
        # A message that was just sent may replace drawn messages.
        if self.turn is not None and not self.turn.has_ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.turn.is_drawn.wait(), _DRAWN_SECONDS)
        views = self.transcript.views
        view = self.selected
        if not views:
            return
        at = len(views) if view is None else views.index(view)
        index = at + by
        if index >= len(views):
            self.action_compose_message()
        elif index < 0:
            self.action_show_earlier()
        else:
            self.transcript.release_anchor()
            self.set_focus(views[index])

    def action_select_first(self) -> None:
        """Select the first drawn message, and draw earlier messages if there are any."""
        views = self.transcript.views
        if views:
            self.set_focus(views[0])
            self.action_show_earlier()

    def action_show_earlier(self) -> None:
        self.app.spawn(self.transcript.show_earlier(self.session.conversation), group="earlier")

    def action_compose_message(self) -> None:
        self.transcript.anchor()
        self.set_focus(self.composer)

    def action_scroll_page(self, by: int) -> None:
        if by < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    # -- Finding ---------------------------------------------------------------------------------------------------

    def on_finder_changed(self, event: Finder.Changed) -> None:
        event.stop()
        self.app.spawn(self._find(event.text, 0), group="find")
        if not self.finder.display:
            self.set_focus(self.composer)

    def on_finder_moved(self, event: Finder.Moved) -> None:
        event.stop()
        self.app.spawn(self._find(self.finder.text, event.step), group="find")

    async def _find(self, text: str, step: int) -> None:
        """Show the match ``step`` matches after the current one. If there is no current match, show the last one."""
        conversation = self.session.conversation
        matches = await self.app.offload(commands.matches, conversation, text)
        if text != self.finder.text:
            return
        at = len(matches) - 1
        if step and self._match in matches:
            at = (matches.index(self._match) + step) % len(matches)
        self._match = matches[at] if matches else None
        self.finder.count(at + 1, len(matches))
        await self.transcript.show_match(conversation, text, self._match)

    # -- Actions -----------------------------------------------------------------------------------------------------

    def action_on_message(self, command: str, more: str = "") -> None:
        if (view := self.selected) is not None:
            self.run_command(f"/{command} {view.place.number} {more}")

    def _edit(self, message: ChatMessage) -> None:
        """Load a message into the editor. The next message replaces it, in another branch."""
        self.replacing = message.id
        self.composer.put(message.text)
        reply = f"the reply; {self.app.key_of('continue')} continues it afterwards"
        subject = "your message" if message.role == "user" else reply
        is_kept = self.session.conversation.was_replied_to(message.id)
        stays = "keeps the old one as a branch" if is_kept else "sends it"
        self.hint(f"Editing {subject}: Enter {stays}, Esc cancels.")
        self.set_focus(self.composer)

    def action_branch(self) -> None:
        """Make the next message a reply to the selected message, as a new branch."""
        if (view := self.selected) is None:
            return
        id_ = view.message.id
        after = next((later for later in self.session.conversation.path() if later.parent == id_), None)
        self.replacing = None if after is None else after.id
        self.composer.empty()
        self.hint("New branch: your message continues from the selected reply. Esc cancels.")
        self.set_focus(self.composer)

    def action_step(self, by: int) -> None:
        if (view := self.selected) is not None:
            self.action_step_message(view.message.id, by)

    def action_step_message(self, id_: str, by: int) -> None:
        self.app.ask(self.step(id_, by), group="step")

    async def step(self, id_: str, by: int) -> None:
        """Switch to a sibling branch, and select its message."""
        branches = [message.id for message in self.session.conversation.siblings(id_)]
        index = branches.index(id_) + by
        if not 0 <= index < len(branches):
            return
        await self.app.offload(self.session.switch, branches[index])
        await self.refresh_all()
        if (view := self.transcript.view(branches[index])) is not None:
            self.transcript.release_anchor()
            self.set_focus(view)

    def action_unfold(self) -> None:
        if (view := self.selected) is not None:
            view.toggle()

    # -- Commands, links -------------------------------------------------------------------------------------------

    def run_command(self, text: str) -> None:
        """Run a command in typed form, with its slash."""
        self.app.ask(self._run_command(text), group="command")

    async def _run_command(self, text: str) -> None:
        if self.is_ending:
            await self.ended.wait()
        await ScreenUI(self.app, self.models, self.session, self.post_message).run(text)

    @on(requests.ScreenRequest)
    def _take_request(self, request: requests.ScreenRequest) -> None:
        request.stop()
        # A worker, because a request may wait for other messages. A partial, as in `on_composer_typed`.
        self.app.spawn(partial(self._carry_out, request), group="command")

    async def _carry_out(self, request: requests.ScreenRequest) -> None:
        """Handle a request of a command. The command raises the error."""
        try:
            if isinstance(request, requests.Redraw):
                await self.refresh_all()
                if request.focus_editor:
                    self.set_focus(self.composer)
            elif isinstance(request, requests.PlayTurn):
                self.set_focus(self.composer)
                self.begin(request.start)
                if request.until_end:
                    await self.ended.wait()
            elif isinstance(request, requests.EditMessage):
                self._edit(request.message)
            elif isinstance(request, requests.PutDraft):
                self.composer.put(request.draft)
            elif isinstance(request, requests.OpenConversation):
                await self.open(request.conversation)
                self.set_focus(self.composer)
            elif isinstance(request, requests.FindText):
                self.finder.open(request.text)
            elif isinstance(request, requests.ShowActivity):
                self.status.change(activity=request.activity, progress=None)
            elif isinstance(request, requests.WriteInEditor):
                self.composer.write_in_editor()
                self.set_focus(self.composer)
        except Exception as error:
            request.error = error
        finally:
            request.is_done.set()

    def action_command(self, name: str) -> None:
        self.run_command(f"/{name}")

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        self.app.spawn(open_link(self.app, event.href), group="link")


#: Maximum number of files that are named separately.
_MAX_NAMED = 3


def _sizes(session: ChatSession, line: str, model: ChatModel, is_wanted: threading.Event) -> str:
    """Return the files that a line names with their tokens. Counting stops when ``is_wanted`` is cleared."""

    def count(text: str) -> int:
        return len(model.tokenize(text, add_special=False)) if is_wanted.is_set() else 0

    files, _, skipped, n_tokens, is_cut = session.attach(line, count)
    left_out = f"; {len(skipped):,} that are not text are skipped" if skipped else ""
    if is_cut:
        n_sent = sum(file.n_tokens for file in files)
        return (
            f"about {n_tokens:,} tokens: the pieces that match your message best are sent, {n_sent:,} fit{left_out}"
        )
    if len(files) > _MAX_NAMED:
        return f"{len(files):,} files: {n_tokens:,} tokens{left_out}"
    return ", ".join(f"{file.name}: {file.n_tokens:,} tokens" for file in files) + left_out
