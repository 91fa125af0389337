"""Slash commands of the app."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from textual.message import Message

from localllm.agent_tools.toolbox import Permission
from localllm.console import quantity
from localllm.errors import UsageError
from localllm.tui import commands
from localllm.tui.base_app import BaseApp
from localllm.tui.chat.conversation import ChatMessage, Conversation
from localllm.tui.chat.events import Turn
from localllm.tui.chat.session import ChatSession
from localllm.tui.screens import requests
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
from localllm.tui.screens.models import ModelLoader
from localllm.tui.screens.requests import ScreenRequest
from localllm.tui.text import code_blocks

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


class ScreenUI(commands.UI):
    """The user interface of one command in the app. It shows dialogs, and posts requests to the screen of the chat.

    `on_screen` calls the method ``on_NAME`` for command NAME.
    """

    has_screen = True

    def __init__(
        self, app: BaseApp, models: ModelLoader[Any], session: ChatSession, post: Callable[[Message], bool]
    ) -> None:
        """``post`` posts a message to the screen of the chat."""
        self._app = app
        self._models = models
        self._session = session
        self._post = post
        self._ask, self.call = app.push_screen_wait, app.offload  # type: ignore[method-assign]
        self._command = ""

    async def run(self, text: str) -> None:
        """Run a command in typed form. Raises LocalLLMError if the command is unknown or fails."""
        call = commands.parse(text)
        if not isinstance(call, str):
            self._command = call.command.name
            await commands.run(self._session, self, call)

    async def _request(self, request: ScreenRequest) -> None:
        """Post a request, and wait until the screen has handled it. Raises the screen's error."""
        if self._post(request):  # False if the screen is closed
            await request.is_done.wait()
        if request.error is not None:
            raise request.error

    async def until_esc(self, activity: str, function: Callable[..., str], *arguments: object) -> str:
        is_stopped = threading.Event()
        self._post(requests.ShowActivity(f"{activity}: Esc ends it"))
        try:
            return await self._app.in_thread(function, *arguments, is_stopped.is_set)
        finally:
            is_stopped.set()
            self._post(requests.ShowActivity(""))

    async def tell(self, text: str) -> None:
        await self._request(requests.Redraw())
        if text.count("\n") < _MAX_LINES and len(text) < _MAX_LENGTH:
            self._app.notify(text)
        else:
            await self._ask(Dialog[None](self._command.capitalize(), text))

    async def show(self) -> None:
        await self._request(requests.Redraw(focus_editor=True))

    async def play(self, start: Callable[[Turn], None]) -> None:
        await self._request(requests.PlayTurn(start))

    async def edit(self, message: ChatMessage) -> None:
        await self._request(requests.EditMessage(message))

    async def put(self, draft: str) -> None:
        await self._request(requests.PutDraft(draft))

    async def open(self, conversation: Conversation, notice: str = "") -> None:
        ids = [chat.session.conversation.id for chat in self._models.chats]
        if conversation.id in ids:
            await self._app.show_tab(ids.index(conversation.id))
        else:
            await self._request(requests.OpenConversation(conversation))
        if notice:
            self._app.notify(notice)

    async def use_model(self, name: str) -> None:
        await self._models.change(name)

    async def quit(self) -> None:
        await self._app.action_quit()

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
        archived = words == "archived"
        open_ids = {chat.session.conversation.id for chat in self._models.chats}
        chats = ChatsScreen(self._session.store, open_ids, "" if archived else words, archived=archived)
        chat_id = await self._ask(chats)
        for chat in self._models.chats:
            conversation = chat.session.conversation
            conversation.title = chats.titles.get(conversation.id, conversation.title)
            if conversation.id in chats.deleted:
                await chat.open(commands.new_chat(chat.session))
        await self._request(requests.Redraw())
        if chat_id is not None:
            await self.open(await self.call(self._session.store.load, chat_id))

    async def on_system(self, argument: str) -> None:
        text = await self._ask(SystemScreen(self._session.conversation.system))
        if text is not None:
            await self.call(self._session.set_system, text)
            await self.tell("the system prompt is set" if text else "there is no system prompt now")

    async def on_set(self, argument: str) -> None:
        settings = await self._ask(SamplingScreen(self._session.conversation.settings))
        if settings is not None:
            await self.call(self._session.set_options, settings)
            summary = ", ".join(f"{name} {value}" for name, value in settings.items()) or "all by default"
            self._app.notify(f"settings of this chat: {summary}")

    async def on_allow(self, answer: str | None) -> None:
        turn = self._session.turn
        if turn is None or (request := turn.asked) is None:
            raise UsageError("no tool waits for an answer")
        if not answer:
            # The name is in the text too: a narrow screen cuts the title.
            answer = await self._ask(Choose("May the model use this tool?", request.text, PERMISSIONS.items()))
            if answer is None or turn.asked is not request:
                return
        if answer not in PERMISSIONS:
            raise UsageError(f"answer with {', '.join(PERMISSIONS)}")
        request.answer(cast(Permission, answer))

    async def on_answer(self, argument: str) -> None:
        turn = self._session.turn
        if turn is None or (stream := turn.stream) is None:
            raise UsageError("no reply is being written")
        stream.end_reasoning()

    async def on_model(self, argument: str) -> None:
        await self._models.choose()

    async def on_find(self, text: str) -> None:
        await self._request(requests.FindText(text))

    async def on_compare(self, name: str) -> None:
        """Show two replies side by side. If a model is named, it first writes the second reply.

        The previous model is loaded again while the user reads the replies.
        """
        self._models.n_comparisons += 1
        try:
            await self._compare(name)
        finally:
            self._models.n_comparisons -= 1
            self._models.send_pending()

    async def _compare(self, name: str) -> None:
        models, conversation = self._models, self._session.conversation
        if name:
            if conversation.leaf is None:
                raise UsageError("there is nothing to reply to yet: send a message first")
            before = models.name
            await models.change(name)
            if models.name != name:
                return  # loading failed, and the user was notified
            self._app.keys.go_on()
            await self._request(requests.PlayTurn(partial(self._session.regenerate, None), until_end=True))
            if before is not None and before != name:
                self._app.spawn(models.load(before), group="loading")
        pair = [(reply.id, commands.who(reply), reply.content) for reply in commands.compared(conversation)]
        reply_id = await self._ask(CompareScreen(pair))
        if reply_id is not None:
            await self.call(self._session.switch, reply_id)
            await self._request(requests.Redraw())

    async def on_copy(self, argument: str) -> None:
        words = argument.split()
        message: ChatMessage | None
        if words and words[0] != "code":
            message = commands.numbered(self._session.conversation, words.pop(0))
        else:
            path = self._session.conversation.path()
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
        await self._request(requests.WriteInEditor())

    async def on_stats(self, argument: str) -> None:
        text = await self.call(commands.stats_text, self._session)
        memory = await self.call(self._app.setup.memory)
        lines = [text, f"memory {quantity(memory, 'B')} in use"]
        if self._models.model is not None:
            lines += ["", str(self._models.model.info)]
        await self._ask(Dialog[None]("Statistics", "\n".join(lines)))

    async def on_tab(self, target: str) -> None:
        if not target:
            await self._app.open_tab(commands.new_chat(self._session))
            return
        sessions = [chat.session for chat in self._models.chats]
        steps = {"next": 1, "prev": -1}
        index = (sessions.index(self._session) + steps.get(target, 0)) % len(sessions)
        if target not in steps:
            index = int(target) - 1 if target.isdecimal() else -1
        if not 0 <= index < len(sessions):
            raise UsageError(f"there is no tab {target}: {len(sessions)} are open; /tab opens a new one")
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
