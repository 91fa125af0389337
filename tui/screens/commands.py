"""Slash commands of the app."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from textual.app import SuspendNotSupported
from textual.widget import Widget

from localllm.console import quantity
from localllm.errors import UsageError
from localllm.shell import found_program, set_variable, split_command
from localllm.tui import commands
from localllm.tui.base_app import BaseApp
from localllm.tui.chat.conversation import ChatMessage, Conversation
from localllm.tui.chat.events import ToolApprovalRequest, Turn
from localllm.tui.chat.session import ChatSession
from localllm.tui.chat.tools import Permission
from localllm.tui.screens.chats import ChatsScreen
from localllm.tui.screens.dialogs import (
    Choose,
    CompareScreen,
    Dialog,
    SamplingScreen,
    SystemScreen,
    TextDialog,
    confirm,
)
from localllm.tui.screens.help import HelpScreen
from localllm.tui.screens.models import ModelLoader, OpenChat
from localllm.tui.text import code_blocks
from localllm.tui.widgets.composer import Composer
from localllm.tui.widgets.finder import Finder

#: Maximum lines and characters of a notification. A dialog shows longer texts.
_MAX_LINES = 3
_MAX_LENGTH = 400


#: Answers to a tool call, with labels that fit on a line of 32 columns.
PERMISSIONS = {
    "no": "No: refuse this call",
    "once": "Yes, this time",
    "chat": "Yes, from now on in this chat",
    "always": "Yes, always, with any arguments",
}


class CommandScreen(OpenChat, Protocol):
    """The part of a chat's screen that commands use. `ChatScreen` documents the methods."""

    models: ModelLoader[Any]
    composer: Composer
    finder: Finder
    asked: ToolApprovalRequest | None
    n_comparisons: int
    ended: asyncio.Event

    async def open(self, conversation: Conversation) -> None: ...
    async def quit(self) -> None: ...
    async def switch(self, id_: str) -> None: ...
    def begin(self, start: Callable[[Turn], None]) -> None: ...
    def edit(self, message: ChatMessage) -> None: ...
    def ask_for_tool(self, request: ToolApprovalRequest | None) -> None: ...
    def draw_heading(self) -> None: ...
    def set_focus(self, widget: Widget | None) -> None: ...
    def refresh(self, *, layout: bool = False) -> object: ...


class ScreenUI(commands.UI):
    """The app's user interface for commands. `on_screen` calls the method ``on_NAME`` for command NAME."""

    has_screen = True

    def __init__(self, screen: CommandScreen, app: BaseApp) -> None:
        self._screen = screen
        self._app = app
        self._ask, self.call = app.push_screen_wait, app.offload  # type: ignore[method-assign]
        self._command = ""

    @property
    def session(self) -> ChatSession:
        return self._screen.session

    async def run(self, text: str) -> None:
        """Run a command in typed form. Raises LocalLLMError if the command is unknown or fails."""
        call = commands.parse(text)
        if not isinstance(call, str):
            self._command = call.command.name
            await commands.run(self.session, self, call)

    async def until_esc(self, activity: str, function: Callable[..., str], *arguments: object) -> str:
        is_stopped = threading.Event()
        self._screen.status.change(activity=f"{activity}: Esc ends it", progress=None)
        try:
            return await self._app.in_thread(function, *arguments, is_stopped.is_set)
        finally:
            is_stopped.set()
            self._screen.status.change(activity="")

    async def tell(self, text: str) -> None:
        await self._screen.refresh_all()
        if text.count("\n") < _MAX_LINES and len(text) < _MAX_LENGTH:
            self._app.notify(text)
        else:
            await self._ask(Dialog[None](self._command.capitalize(), text))

    async def show(self) -> None:
        await self._screen.refresh_all()
        self._screen.set_focus(self._screen.composer)

    async def play(self, start: Callable[[Turn], None]) -> None:
        self._screen.set_focus(self._screen.composer)
        self._screen.begin(start)

    async def edit(self, message: ChatMessage) -> None:
        self._screen.edit(message)

    async def put(self, draft: str) -> None:
        self._screen.composer.put(draft)

    async def open(self, conversation: Conversation, notice: str = "") -> None:
        chats = self._screen.models.chats
        index = next((i for i, chat in enumerate(chats) if chat.session.conversation.id == conversation.id), None)
        if index is None:
            await self._screen.open(conversation)
            self._screen.set_focus(self._screen.composer)
        else:
            await self._app.show_tab(index)
        if notice:
            self._app.notify(notice)

    async def use_model(self, name: str) -> None:
        await self._screen.models.change(name)

    async def quit(self) -> None:
        await self._screen.quit()

    async def ask(self, title: str, text: str = "", value: str = "", example: str = "") -> str | None:
        return await self._ask(TextDialog(title, text, value=value, placeholder=example))

    async def choose(self, title: str, choices: Sequence[tuple[str, str]], at: int) -> str | None:
        return await self._ask(Choose(title, "", choices, at))

    async def confirm(self, question: str, text: str) -> bool:
        return await self._ask(confirm(question, text, "Delete")) == "yes"

    async def on_screen(self, name: str, argument: str) -> bool:
        await getattr(self, f"on_{name}")(argument)
        return True

    # -- Screens of commands ---------------------------------------------------------------------------------------

    async def on_sessions(self, words: str) -> None:
        screen = self._screen
        archived = words == "archived"
        open_ids = {chat.session.conversation.id for chat in screen.models.chats}
        chats = ChatsScreen(self.session.store, open_ids, "" if archived else words, archived=archived)
        chat_id = await self._ask(chats)
        for chat in screen.models.chats:
            conversation = chat.session.conversation
            conversation.title = chats.titles.get(conversation.id, conversation.title)
            if conversation.id in chats.deleted:
                await chat.open(commands.new_chat(chat.session))
        screen.draw_heading()
        if chat_id is not None:
            await self.open(await self.call(self.session.store.load, chat_id))

    async def on_system(self, argument: str) -> None:
        session = self.session
        text = await self._ask(SystemScreen(session.conversation.system))
        if text is not None:
            await self.call(session.set_system, text)
            await self.tell("the system prompt is set" if text else "there is no system prompt now")

    async def on_set(self, argument: str) -> None:
        session = self.session
        settings = await self._ask(SamplingScreen(session.conversation.settings))
        if settings is not None:
            await self.call(session.set_options, settings)
            summary = ", ".join(f"{name} {value}" for name, value in settings.items()) or "all by default"
            self._app.notify(f"settings of this chat: {summary}")

    async def on_allow(self, answer: str | None) -> None:
        if (request := self._screen.asked) is None:
            raise UsageError("no tool waits for an answer")
        if not answer:
            # The name is in the text too: a narrow screen cuts the title.
            text = f"{request.name} {request.arguments}"
            answer = await self._ask(Choose("May the model use this tool?", text, PERMISSIONS.items()))
            if answer is None or self._screen.asked is not request:
                return
        if answer not in PERMISSIONS:
            raise UsageError(f"answer with {', '.join(PERMISSIONS)}")
        request.answer(cast(Permission, answer))
        self._screen.ask_for_tool(None)

    async def on_model(self, argument: str) -> None:
        await self._screen.models.choose()

    async def on_find(self, text: str) -> None:
        self._screen.finder.open(text)

    async def on_compare(self, name: str) -> None:
        """Show two replies side by side. If a model is named, it first writes the second reply.

        The previous model is loaded again while the user reads the replies.
        """
        screen = self._screen
        screen.n_comparisons += 1
        try:
            await self._compare(screen, screen.session, name)
        finally:
            screen.n_comparisons -= 1
            screen.send_pending()

    async def _compare(self, screen: CommandScreen, session: ChatSession, name: str) -> None:
        if name:
            if session.conversation.leaf is None:
                raise UsageError("there is nothing to reply to yet: send a message first")
            before = screen.models.name
            await screen.models.change(name)
            if screen.models.name != name:
                return  # loading failed, and the user was notified
            self._app.keys.go_on()
            screen.begin(partial(session.regenerate, None))
            await screen.ended.wait()
            if before is not None and before != name:
                self._app.spawn(screen.models.load(before), group="loading")
        pair = [(reply.id, commands.who(reply), reply.content) for reply in commands.compared(session.conversation)]
        reply_id = await self._ask(CompareScreen(pair))
        if reply_id is not None and session is screen.session:
            await screen.switch(reply_id)

    async def on_copy(self, argument: str) -> None:
        words = argument.split()
        message: ChatMessage | None
        if words and words[0] != "code":
            message = commands.numbered(self.session.conversation, words.pop(0))
        else:
            path = self.session.conversation.path()
            message = next((candidate for candidate in reversed(path) if candidate.role == "assistant"), None)
        if message is None:
            raise UsageError("there is no reply yet: send a message first")
        if words:
            await self._copy_code(message, *words[1:2])
        else:
            self._app.copy_to_clipboard(message.content)
            self._app.notify(f"copied {len(message.content):,} characters")

    async def _copy_code(self, message: ChatMessage, number: str | None = None) -> None:
        """Copy a code block to the clipboard: block ``number``, counted from 1, or a block that the user chooses."""
        blocks = {str(i): block for i, block in enumerate(await self.call(code_blocks, message.content), 1)}
        if not blocks:
            raise UsageError("this message has no code block")
        if number is None and len(blocks) > 1:
            labels = []
            for i, (language, text) in blocks.items():
                first, *_ = lines = text.splitlines() or [""]
                labels.append((i, f"{i}  {language or 'text'}, {_lines(lines)}: {first.strip():.50}"))
            number = await self._ask(Choose("Copy which block?", "", labels))
            if number is None:
                return
        number = number or "1"
        if number not in blocks:
            raise UsageError(f"this message has {len(blocks)} code blocks: give a number from 1 to {len(blocks)}")
        _, text = blocks[number]
        self._app.copy_to_clipboard(text)
        self._app.notify(f"copied {_lines(text.splitlines())} of code")

    async def on_editor(self, argument: str) -> None:
        """Edit the message in $VISUAL or $EDITOR. If that fails, raises UsageError and keeps the message."""
        command = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not command:
            advice = set_variable("EDITOR", "notepad" if sys.platform == "win32" else "nano")
            raise UsageError(f"no editor is set: {advice}, or another one, and start the chat again")
        screen = self._screen
        with tempfile.TemporaryDirectory(prefix="localllm-") as folder:
            path = Path(folder, "message.md")
            path.write_text(screen.composer.message, "utf-8")
            try:
                with self._app.suspend():
                    subprocess.run([*found_program(split_command(command)), str(path)], check=True)
                text = path.read_text("utf-8")
            except SuspendNotSupported:
                raise UsageError("an editor cannot be started from this terminal") from None
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise UsageError(f"the editor {command!r} has failed ({error}): the message is unchanged") from None
        screen.refresh(layout=True)
        screen.composer.put(text.removesuffix("\n"))
        screen.set_focus(screen.composer)

    async def on_stats(self, argument: str) -> None:
        screen = self._screen
        text = await self.call(commands.stats_text, screen.session)
        memory = await self.call(self._app.setup.memory)
        lines = [text, f"memory {quantity(memory, 'B')} in use"]
        if screen.models.model is not None:
            lines += ["", str(screen.models.model.info)]
        await self._ask(Dialog[None]("Statistics", "\n".join(lines)))

    async def on_tab(self, target: str) -> None:
        if not target:
            await self._app.open_tab(commands.new_chat(self.session))
            return
        chats = self._screen.models.chats
        steps = {"next": 1, "prev": -1}
        index = (chats.index(self._screen) + steps.get(target, 0)) % len(chats)
        if target not in steps:
            index = int(target) - 1 if target.isdecimal() else -1
        if not 0 <= index < len(chats):
            raise UsageError(f"there is no tab {target}: {len(chats)} are open; /tab opens a new one")
        await self._app.show_tab(index)

    async def on_close(self, argument: str) -> None:
        await self._app.close_tab()

    async def on_theme(self, argument: str) -> None:
        app = self._app
        if not argument:
            app.search_themes()
        elif argument in app.available_themes:
            app.theme = argument
        else:
            themes = ", ".join(sorted(app.available_themes))
            raise UsageError(f"there is no theme {argument!r:.40}: the themes are {themes}")

    async def on_help(self, argument: str) -> None:
        await self._ask(HelpScreen())


def _lines(lines: Sequence[str]) -> str:
    return f"{len(lines):,} line{'s' * (len(lines) != 1)}"
