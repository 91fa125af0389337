"""The main screen: the conversation, and the editor below it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar, cast

from textual import getters
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
from localllm.tui.chat.attachments import file_completions
from localllm.tui.chat.context import ChatModel
from localllm.tui.chat.conversation import Conversation, Message
from localllm.tui.chat.events import ContextFull, ToolApprovalRequest, Turn
from localllm.tui.chat.session import ChatSession
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
from localllm.tui.widgets.status import KeyFooter, StatusLine
from localllm.tui.widgets.transcript import Transcript

#: Commands whose keys stand in the footer.
_SHOWN = ("clear", "sessions")
#: Seconds between two looks at the memory in use.
_MEMORY_SECONDS = 3.0
#: Seconds without a key after which the size of a file that was named is counted.
_TYPING_SECONDS = 0.15
#: Characters of a tool's arguments that are shown above the editor.
_MAX_OF_A_CALL = 120
#: Seconds that selecting waits for what was just sent to be drawn.
_DRAWN_SECONDS = 0.5
#: Seconds that a reply has to end in when the program does.
_PATIENCE_SECONDS = 5.0


class ChatScreen(Screen[None]):
    """The chat."""

    app = getters.app(BaseApp)

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+up", "select(-1)", "Messages", key_display=SELECT_SIGN),
        Binding("ctrl+down", "select(1)", "Next message", show=False),
        Binding("ctrl+pagedown", "command('tab next')", "Next tab", show=False),
        Binding("ctrl+pageup", "command('tab prev')", "Previous tab", show=False),
        Binding("f1", "command('help')", "Help", id="help"),
        # What has no key can be given one by the settings file.
        *(
            Binding(c.key or f"none-{c.name}", f"command({c.name!r})", c.title, show=c.name in _SHOWN, id=c.name)
            for c in sorted(commands.COMMANDS, key=lambda command: command.name != "clear")
            if c.name not in ("help", "quit")
        ),
    ]

    def __init__(self, setup: Setup, models: ModelLoader, conversation: Conversation) -> None:
        super().__init__()
        self.session = setup.session(models.model, conversation)
        self.turn: StreamedTurn | None = None
        self.models = models
        models.chats.append(self)
        self.replacing: str | None = None  # the id of the message that the next one takes the place of
        self.unsaved: list[ChatSession] = []  # sessions of chats that were left while they could not be saved
        self.asked: ToolApprovalRequest | None = None  # the tool call that waits for an answer
        self.suggestions = Suggestions()
        self.composer = Composer(PromptHistory(setup.history), self.suggestions)
        self._heading, self._hint = Static(id="heading"), Static(id="hint")
        self.transcript = Transcript()
        self.finder = Finder()
        self._match: commands.Match | None = None  # the match of the finder's text that is shown
        self.status = StatusLine()
        #: Whether it is the chat that is shown; dialogs may be above it.
        self.seen = asyncio.Event()
        #: Whether nothing is generated, and all of it is drawn.
        self.ended = asyncio.Event()
        self.ended.set()
        #: Comparisons (/compare) under way: messages wait for their end.
        self.n_comparisons = 0
        #: Pending messages: sent once a model is loaded, or the reply that was stopped has ended.
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
        self.commands = ScreenUI(self)
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
        # Before any key is handled: a /model that is typed ahead comes after it, and Ctrl+Q finds it to cancel.
        self.app.spawn(self.models.load(name, keeps=name == saved), group="loading")
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
        """Shows a conversation in the place of the one before."""
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
            self.hint("Open in another terminal too: what both say is kept, as branches.")

    async def mark_open(self) -> str | None:
        """Tells other terminals which chats are open here; returns what there is to tell of this one."""
        ids = [chat.session.conversation.id for chat in self.models.chats]
        return await self.app.offload(self.session.mark_open, ids)

    async def end_turn(self) -> None:
        """Stops what is generated, and waits for its end."""
        if self.turn is not None:
            self.turn.stop()
            await self.ended.wait()

    async def quit(self) -> None:
        """Ends the program; replies that are under way are kept as far as they came."""
        self.models.cancel()
        self.status.change(activity="ending", progress=None)
        try:
            await asyncio.wait_for(asyncio.gather(*(c.end_turn() for c in self.models.chats)), _PATIENCE_SECONDS)
        finally:
            self.app.exit(0)

    # -- What is shown ---------------------------------------------------------------------------------------------

    async def refresh_all(self) -> None:
        session = self.session
        self.draw_heading()
        await self.transcript.show(session.conversation)
        self.refresh_bindings()
        meter = await self.app.offload(session.meter)
        if session is self.session and self.turn is None:
            self.status.change(meter=meter, stats=session.last)
        if (warning := session.saver.take_warning()) is not None:
            self.app.notify(warning, severity="warning")

    @property
    def title_line(self) -> str:
        """Its title, and before it what goes on in it."""
        mark = "? " if self.asked else "… " if self.turn else ""
        return mark + (escape_controls(self.session.conversation.title) or "New chat")

    def draw_heading(self) -> None:
        """Draws the titles of the chats that are open, in all of them."""
        titles = [shortened(chat.title_line, 30) for chat in self.models.chats]
        for at, chat in enumerate(self.models.chats):
            parts: list[str | tuple[str, str]] = [f" {chat.title_line}"]
            if len(titles) > 1:
                parts = [(f" {i + 1} {title} ", "reverse" if i == at else "") for i, title in enumerate(titles)]
            chat._heading.update(Content.assemble((" localllm ", "bold"), *parts))

    def hint(self, text: str) -> None:
        """Says something above the editor; an empty text says nothing."""
        self._hint.update(Content(escape_controls(text)))
        self._hint.display = bool(text)

    async def _sample_memory(self) -> None:
        self.status.change(memory=await self.app.in_thread(self.app.setup.memory))

    # -- Turns -----------------------------------------------------------------------------------------------------

    def begin(self, start: Callable[[Turn], None], draft: Draft | None = None) -> None:
        """Has something generated.  Raises UsageError during a reply, or while a model is being loaded."""
        if self.turn is not None:
            raise UsageError("a reply is under way: Esc stops it")
        if self.models.state == "loading":
            raise UsageError("the model is being loaded: wait until it is there")
        self.turn = StreamedTurn(start, draft)
        self.ended.clear()
        self.refresh_bindings()
        self.draw_heading()
        self.app.spawn(self._run(self.session, self.turn), group="turn")

    async def _run(self, session: ChatSession, turn: StreamedTurn) -> None:
        thread = asyncio.create_task(self.app.in_thread(turn.run))
        try:
            await turn.follow(self, session)
        finally:
            await thread
            self.turn = None
            self.ended.set()
            if self.asked is not None:
                self.ask_for_tool(None)
            self.draw_heading()
        if turn.draft is not None and turn.question is None:
            self._take_back(turn.draft)
        if turn.error is not None:
            self.app.notify_error(turn.error)
        if session is self.session:
            await self.refresh_all()
        # A context that was full says nothing of the model that is being loaded in the place of this one.
        if turn.full is not None and session is self.session and self.models.state == "loaded":
            self._take_back_pending()
            await self.seen.wait()
            await self._free_context(session, turn.full)
        self.send_pending()

    def ask_for_tool(self, asked: ToolApprovalRequest | None) -> None:
        """Asks in a line above the editor: a dialog would take the keys of who is typing."""
        self.asked = asked
        text = ""
        if asked is not None:
            call = spelled_out(f"{asked.name} {asked.arguments}").replace("\n", "\\n")
            n_hidden = len(call) - _MAX_OF_A_CALL
            if n_hidden > 0:
                call = f"{call[:_MAX_OF_A_CALL]}… ({n_hidden:,} more characters)"
            text = f"May the model use {call}? {self.app.key_of('allow')} answers; Esc stops the reply."
        self.hint(text)
        self.draw_heading()

    async def _free_context(self, session: ChatSession, full: ContextFull) -> None:
        """Does what is to be done about a full context; asks, unless that was said before."""
        choice = self.app.setup.when_full
        question = session.conversation.leaf
        if choice is None or choice not in full.choices:
            chosen = await self.app.push_screen_wait(ask_when_full(full))
            choice = "drop" if chosen == "drop" else "summarise" if chosen == "summarise" else "stop"
            if question is not None and chosen == EDIT:
                self.edit(question)
            elif question is not None and chosen == TAKE_BACK:
                await self.app.offload(session.delete, question.id)
                await self.refresh_all()
        if choice != "stop":
            self.begin(partial(session.free_context, choice))

    @property
    def is_ending(self) -> bool:
        """Whether what is generated has ended, or was stopped, and is about to be drawn as it stays."""
        return self.turn is not None and (self.turn.is_stopped or self.turn.has_ended)

    def action_stop(self) -> None:
        """Esc: closes what is open, stops what is generated, or goes back to the editor."""
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
        """Submits a text, or tells why it cannot be sent."""
        try:
            self.submit(text)
        except UsageError as error:
            self.app.notify_error(error)

    def submit(self, text: str) -> None:
        """Sends a message, or runs a command.  Raises UsageError if it cannot be sent now; it stays in the editor."""
        if not text.strip():
            return
        typed = commands.parse(text)  # what is not a command stays where it can be mended
        if not isinstance(typed, str):
            self._remember(text)
            self.run_command(text)
            return
        if self.turn is not None and not self.is_ending:
            raise UsageError("a reply is under way: Esc stops it")
        if self._pending is not None:
            raise UsageError("a message is already waiting to be sent: Esc takes it back")
        if self.models.state == "none":
            raise UsageError("no model is loaded: choose one with /model")
        self._pending, self.replacing = Draft(text, self.replacing), None
        self._remember(text)
        if self.models.state != "loaded":
            self.hint("The model is being loaded: your message is sent as soon as it is there. Esc takes it back.")
        self.send_pending()

    def send_pending(self) -> None:
        """Sends the message that waits, if it can be sent now; where no model could be loaded, takes it back."""
        draft, state = self._pending, self.models.state
        if draft is None or self.turn is not None or state == "loading" or self.n_comparisons:
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
        """Puts a message that was not sent into the editor again, before what was typed since."""
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
        # Not a coroutine: one that is cancelled before it begins would never be awaited.
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
        """Says how many tokens the file has that has just been named, where a model is there to count them."""
        model = self.session.model
        if model is None or self.replacing is not None or self._pending is not None or self.asked is not None:
            return
        if not line.endswith(" ") or "@" not in line:
            self.hint("")
            return
        await asyncio.sleep(_TYPING_SECONDS)  # what is typed next cancels it
        is_wanted = threading.Event()
        is_wanted.set()
        try:
            told = await self.app.in_thread(_sizes, self.session, line, model, is_wanted)
        except UsageError as error:
            told = sentence(error)
        finally:
            is_wanted.clear()
        self.hint(told)

    def on_option_list_option_selected(self, event: Suggestions.OptionSelected) -> None:
        event.stop()
        self.composer.complete(self.suggestions.choices[event.option_index])

    # -- The message that is selected -------------------------------------------------------------------------------

    @property
    def selected(self) -> MessageView | None:
        """The message that is selected; None if the editor has the focus."""
        focused = self.focused
        nodes = () if focused is None else focused.ancestors_with_self
        return next((node for node in nodes if isinstance(node, MessageView)), None)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys for what cannot be done are not shown."""
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
        """Selects the message before or after; from the editor, the last one."""
        self.app.ask(self._select(by), group="select")

    async def _select(self, by: int) -> None:
        # What was just sent may take the place of what is there.
        if self.turn is not None and not self.turn.has_ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.turn.is_drawn.wait(), _DRAWN_SECONDS)
        views = self.transcript.views
        view = self.selected
        if not views:
            return
        at = len(views) if view is None else views.index(view)
        place = at + by
        if place >= len(views):
            self.action_compose_message()
        elif place < 0:
            self.action_show_earlier()
        else:
            self.transcript.release_anchor()
            self.set_focus(views[place])

    def action_select_first(self) -> None:
        """Selects the first message that is drawn, and draws earlier ones where there are any."""
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
        """Shows a match of a text: ``step`` matches after the one that is shown, or the last one."""
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

    # -- Doing -----------------------------------------------------------------------------------------------------

    def action_on_message(self, command: str, more: str = "") -> None:
        if (view := self.selected) is not None:
            self.run_command(f"/{command} {view.place.number} {more}")

    def edit(self, message: Message) -> None:
        """Puts a message into the editor; what is sent next takes its place, as another branch."""
        self.replacing = message.id
        self.composer.put(message.text)
        reply = f"the reply; {self.app.key_of('continue')} continues it then"
        what = "your message" if message.role == "user" else reply
        is_kept = self.session.conversation.was_replied_to(message.id)
        stays = "keeps the old one as a branch" if is_kept else "sends it"
        self.hint(f"Editing {what}: Enter {stays}, Esc leaves it.")
        self.set_focus(self.composer)

    def action_branch(self) -> None:
        """Has the next message go on from this one, beside what follows it now."""
        if (view := self.selected) is None:
            return
        id_ = view.message.id
        after = next((later for later in self.session.conversation.path() if later.parent == id_), None)
        self.replacing = None if after is None else after.id
        self.composer.empty()
        self.hint("A new branch: what you send goes on from the selected reply. Esc leaves it.")
        self.set_focus(self.composer)

    def action_step(self, by: int) -> None:
        if (view := self.selected) is not None:
            self.action_step_message(view.message.id, by)

    def action_step_message(self, id_: str, by: int) -> None:
        """For clicks."""
        self.app.ask(self.step(id_, by), group="step")

    async def switch(self, id_: str) -> None:
        """Goes to the branch that a message is in."""
        await self.app.offload(self.session.switch, id_)
        await self.refresh_all()

    async def step(self, id_: str, by: int) -> None:
        """Goes to another branch, and selects the message there."""
        branches = [message.id for message in self.session.conversation.siblings(id_)]
        place = branches.index(id_) + by
        if not 0 <= place < len(branches):
            return
        await self.switch(branches[place])
        if (view := self.transcript.view(branches[place])) is not None:
            self.transcript.release_anchor()
            self.set_focus(view)

    def action_unfold(self) -> None:
        if (view := self.selected) is not None:
            view.toggle()

    # -- Commands, links -------------------------------------------------------------------------------------------

    def run_command(self, text: str) -> None:
        """Runs a command as it is typed, with its slash."""
        self.app.ask(self._run_command(text), group="command")

    async def _run_command(self, text: str) -> None:
        if self.is_ending:
            await self.ended.wait()
        await self.commands.run(text)

    def action_command(self, name: str) -> None:
        self.run_command(f"/{name}")

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        self.app.spawn(open_link(self.app, event.href), group="link")


#: More files than these are not named one by one.
_MAX_NAMED = 3


def _sizes(session: ChatSession, line: str, model: ChatModel, is_wanted: threading.Event) -> str:
    """The files that a line names, and their tokens; counting ends where nobody waits for it any more."""

    def count(text: str) -> int:
        return len(model.tokenize(text, add_special=False)) if is_wanted.is_set() else 0

    files, _, skipped, n_tokens, is_cut = session.attach(line, count)
    left_out = f"; {len(skipped):,} that are not text are left out" if skipped else ""
    if is_cut:
        sent = sum(file.n_tokens for file in files)
        return f"about {n_tokens:,} tokens: the pieces that match your message best are sent, {sent:,} fit{left_out}"
    if len(files) > _MAX_NAMED:
        return f"{len(files):,} files: {n_tokens:,} tokens{left_out}"
    return ", ".join(f"{file.name}: {file.n_tokens:,} tokens" for file in files) + left_out
