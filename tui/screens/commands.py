"""What commands do in the app: those without an argument ask, the others are shared with the plain chat."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from textual.app import SuspendNotSupported

from localllm.console import quantity
from localllm.errors import StoreError, UsageError
from localllm.shell import found_program, set_variable, split_command
from localllm.tui import commands
from localllm.tui.chat.attachments import command_output
from localllm.tui.chat.conversation import Conversation, Message
from localllm.tui.chat.tools import Permission
from localllm.tui.commands import NO_BRANCHES, branch_meant, check_begun, forks, to_remove
from localllm.tui.screens.chats import ChatsScreen
from localllm.tui.screens.dialogs import Ask, Choose, CompareScreen, Dialog, SamplingScreen, SystemScreen, confirm
from localllm.tui.screens.help import HelpScreen
from localllm.tui.text import code_blocks, shortened

if TYPE_CHECKING:
    from localllm.tui.app import ChatApp
    from localllm.tui.screens.chat import ChatScreen

#: More lines than these are told in a dialog, and no notification.
_MAX_LINES = 3


_PERMISSIONS = {
    "no": "No: the model is told so",
    "once": "Yes, this time",
    "chat": "Yes, and whenever it asks in this chat",
    "always": "Yes, always: also in other chats, whatever the arguments",
}


class Commands:
    """Runs commands on a screen.

    A method ``ask_NAME`` is what a command does without an argument, and ``do_NAME`` what the app does in its own way
    with one; all else is as in line mode.
    """

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self._app = cast("ChatApp", screen.app)
        self._ask, self._offload = screen.app.push_screen_wait, screen.app.offload

    async def run(self, text: str) -> None:
        """Runs a command as it is typed.  Raises LocalLLMError if there is none of this name, or it fails."""
        call = commands.parse(text)
        if isinstance(call, str):
            return
        name, argument = call.command.name, call.argument
        if argument == "this" and name in ("archive", "delete"):  # the open chat, as without an argument
            argument = ""
        ask, do = getattr(self, f"ask_{name}", None), getattr(self, f"do_{name}", None)
        if not argument and ask is not None:
            await ask()
        elif do is not None:
            await do(argument)
        else:
            await self._do(name, await self._offload(commands.run, self._screen.session, call))

    async def _do(self, name: str, result: commands.Result) -> None:
        screen = self._screen
        if result.play:
            screen.set_focus(screen.composer)
            screen.begin(result.play)
        elif result.edit:
            screen.edit(result.edit)
        elif result.chat is not None:
            await self._open(result.chat)
            if name in ("fork", "import"):
                self._app.notify(result.text.splitlines()[0])
        elif result.model is not None:
            await screen.models.change(result.model)
        elif result.draft:
            screen.composer.put(result.draft)
        elif result.ends:
            await screen.quit()
        else:
            await screen.refresh_all()
            if result.text.count("\n") < _MAX_LINES:
                self._app.notify(result.text)
            else:
                await self._ask(Dialog[None](name.capitalize(), result.text))

    # -- Chats -----------------------------------------------------------------------------------------------------

    async def _open(self, conversation: Conversation) -> None:
        await self._screen.open(conversation)
        self._screen.set_focus(self._screen.composer)

    async def _open_id(self, id_: str) -> None:
        chats = self._screen.models.chats
        place = next((i for i, chat in enumerate(chats) if chat.session.conversation.id == id_), None)
        if place is None:
            await self._open(await self._offload(self._screen.session.store.load, id_))
        else:
            await self._app.show_tab(place)

    async def do_sessions(self, words: str) -> None:
        screen = self._screen
        session = screen.session
        archived = words == "archived"
        open_ids = {chat.session.conversation.id for chat in screen.models.chats}
        chats = ChatsScreen(session.store, open_ids, "" if archived else words, archived=archived)
        chosen = await self._ask(chats)
        for chat in screen.models.chats:
            conversation = chat.session.conversation
            conversation.title = chats.titles.get(conversation.id, conversation.title)
            if conversation.id in chats.deleted:
                await chat.open(commands.new_chat(chat.session))
        screen.draw_heading()
        if chosen is not None:
            await self._open_id(chosen)

    async def do_load(self, argument: str) -> None:
        if argument.lower().endswith(".json"):
            await self.run(f"/import {argument}")
            return
        try:
            id_ = await self._offload(self._screen.session.store.find, argument)
        except StoreError:  # words, then, or nothing
            await self.do_sessions(argument)
        else:
            await self._open_id(id_)

    async def ask_import(self) -> None:
        asked = Ask("Import", "A .json file that was exported", placeholder="for example ~/Downloads/chat.json")
        if name := await self._ask(asked):
            await self.run(f"/import {name}")

    async def ask_rename(self) -> None:
        session = self._screen.session
        title = await self._ask(Ask("Title", value=session.conversation.title))
        if title:
            await self._offload(session.set_title, title)
            await self._screen.refresh_all()

    async def ask_archive(self) -> None:
        session = self._screen.session
        check_begun(session.conversation)
        await self._offload(session.store.set, session.conversation.id, archived=True)
        self._app.notify(f"the chat is archived: {self._app.key_of('sessions')} and F6 show it")
        await self.run("/clear")

    async def ask_delete(self) -> None:
        screen = self._screen
        conversation = screen.session.conversation
        text = conversation.title or "It has no title yet."
        if await self._ask(confirm("Delete this chat for good?", text, "Delete")) == "yes":
            await screen.end_turn()
            await self._offload(screen.session.store.delete, conversation.id)
            await self.run("/clear")

    async def ask_export(self) -> None:
        title = self._screen.session.conversation.title
        name = re.sub(r"\W+", "-", title.lower())[:40].strip("-") or "chat"
        text = "A new file: .md to read, or .json with all branches"
        chosen = await self._ask(Ask("Export", text, value=f"{name}.md"))
        if chosen:
            await self.run(f"/export {chosen}")

    # -- How replies are generated ---------------------------------------------------------------------------------

    async def ask_system(self) -> None:
        session = self._screen.session
        text = await self._ask(SystemScreen(session.conversation.system))
        if text is not None:
            await self._offload(session.set_system, text)
            self._app.notify("the system prompt is set" if text else "there is no system prompt now")
            await self._screen.refresh_all()

    async def ask_set(self) -> None:
        session = self._screen.session
        settings = await self._ask(SamplingScreen(session.conversation.settings))
        if settings is not None:
            await self._offload(session.set_options, settings)
            given = ", ".join(f"{name} {value}" for name, value in settings.items()) or "all by default"
            self._app.notify(f"settings of this chat: {given}")

    async def ask_allow(self) -> None:
        asked = self._screen.asked
        if asked is None:
            raise UsageError("no tool waits for an answer")
        title = f"May the model use {asked.name}?"
        answer = await self._ask(Choose(title, asked.arguments, _PERMISSIONS.items()))
        if answer is not None and self._screen.asked is asked:
            await self.do_allow(answer)

    async def do_allow(self, argument: str) -> None:
        if argument not in _PERMISSIONS:
            raise UsageError(f"answer with {', '.join(_PERMISSIONS)}")
        if (asked := self._screen.asked) is None:
            raise UsageError("no tool waits for an answer")
        asked.answer(cast(Permission, argument))
        self._screen.ask_for_tool(None)

    async def ask_model(self) -> None:
        await self._screen.models.choose()

    # -- Messages --------------------------------------------------------------------------------------------------

    async def ask_branch(self) -> None:
        found = forks(self._screen.session.conversation)
        if not found:
            raise UsageError(NO_BRANCHES)
        labels = [
            (
                branch.id,
                f"{'●' if i == fork.at else '○'} #{fork.number}  {i}/{len(fork.branches)}  "
                + shortened(branch.content, 55),
            )
            for fork in found
            for i, branch in enumerate(fork.branches, 1)
        ]
        at = len(labels) - len(found[-1].branches) + found[-1].at - 1
        chosen = await self._ask(Choose("Branches", "", labels, at))
        if chosen is not None:
            await self._screen.switch(chosen)

    async def do_compare(self, name: str) -> None:
        """Shows two replies side by side, of which another model writes the second one if it is named."""
        screen = self._screen
        session = screen.session
        if name:
            if session.conversation.leaf is None:
                raise UsageError("there is nothing to reply to yet: send a message first")
            await screen.models.change(name)
            if screen.models.name != name:
                return  # which was told
            self._app.keys.go_on()
            screen.begin(partial(session.regenerate, None))
            await screen.ended.wait()
        pair = [(reply.id, commands.who(reply), reply.content) for reply in commands.compared(session.conversation)]
        chosen = await self._ask(CompareScreen(pair))
        if chosen is not None and session is screen.session:
            await screen.switch(chosen)

    async def do_branch(self, argument: str) -> None:
        await self._screen.switch(branch_meant(self._screen.session.conversation, argument).id)

    async def do_remove(self, argument: str) -> None:
        screen = self._screen
        message = to_remove(screen.session.conversation, argument)
        text = "It goes for good, and so does all that follows it."
        if await self._ask(confirm("Delete this message?", text, "Delete")) == "yes":
            await self._offload(screen.session.delete, message.id)
            await screen.refresh_all()
            screen.set_focus(screen.composer)

    async def do_copy(self, argument: str) -> None:
        words = argument.split()
        message: Message | None
        if words and words[0] != "code":
            message = commands.numbered(self._screen.session.conversation, words.pop(0))
        else:
            path = self._screen.session.conversation.path()
            message = next((each for each in reversed(path) if each.role == "assistant"), None)
        if message is None:
            raise UsageError("there is no reply yet: send a message first")
        if words:
            await self._copy_code(message, *words[1:2])
        else:
            self._app.copy_to_clipboard(message.content)
            self._app.notify(f"copied {len(message.content):,} characters")

    async def _copy_code(self, message: Message, number: str | None = None) -> None:
        """Puts a block of code on the clipboard: the one of a number, from 1, or one that is chosen."""
        blocks = {str(i): block for i, block in enumerate(await self._offload(code_blocks, message.content), 1)}
        if not blocks:
            raise UsageError("there is no block of code in this message")
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
            raise UsageError(f"there are {len(blocks)} blocks of code: give a number from 1 to {len(blocks)}")
        _, text = blocks[number]
        self._app.copy_to_clipboard(text)
        self._app.notify(f"copied {_lines(text.splitlines())} of code")

    async def do_editor(self, argument: str) -> None:
        """Opens the message in $VISUAL or $EDITOR.  Raises UsageError if that fails; the message stays as it was."""
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
                raise UsageError(
                    f"the editor {command!r} has failed ({error}): the message stays as it was"
                ) from None
        screen.refresh(layout=True)
        screen.composer.put(text.removesuffix("\n"))
        screen.set_focus(screen.composer)

    async def do_run(self, argument: str) -> None:
        self._screen.composer.put(await self._until_esc("the command runs", command_output, argument))

    async def do_tools(self, argument: str) -> None:
        text = await self._until_esc("tools start", commands.tools_text, self._screen.session, argument)
        await self._do("tools", commands.Result(text))

    async def _until_esc(self, activity: str, function: Callable[..., str], *arguments: object) -> str:
        """Calls what may take long in a thread of its own; its last argument tells whether Esc was pressed."""
        is_stopped = threading.Event()
        self._screen.status.change(activity=f"{activity}: Esc ends it", progress=None)
        try:
            return await self._app.in_thread(function, *arguments, is_stopped.is_set)
        finally:
            is_stopped.set()
            self._screen.status.change(activity="")

    # -- The rest --------------------------------------------------------------------------------------------------

    async def ask_stats(self) -> None:
        screen = self._screen
        text = await self._offload(commands.stats_text, screen.session)
        memory = await self._offload(self._app.setup.memory)
        lines = [text, f"memory {quantity(memory, 'B')} in use"]
        if screen.models.model is not None:
            lines += ["", str(screen.models.model.info)]
        await self._ask(Dialog[None]("Statistics", "\n".join(lines)))

    async def ask_tab(self) -> None:
        await self._app.open_tab(commands.new_chat(self._screen.session))

    async def do_tab(self, where: str) -> None:
        chats = self._screen.models.chats
        steps = {"next": 1, "prev": -1}
        place = (chats.index(self._screen) + steps.get(where, 0)) % len(chats)
        if where not in steps:
            place = int(where) - 1 if where.isdecimal() else -1
        if not 0 <= place < len(chats):
            raise UsageError(f"there is no tab {where}: {len(chats)} are open; /tab opens a new one")
        await self._app.show_tab(place)

    async def do_close(self, argument: str) -> None:
        await self._app.close_tab()

    async def do_theme(self, argument: str) -> None:
        app = self._app
        if not argument:
            app.search_themes()
        elif argument in app.available_themes:
            app.theme = argument
        else:
            raise UsageError(
                f"there is no theme {argument!r:.40}: there are {', '.join(sorted(app.available_themes))}"
            )

    async def do_help(self, argument: str) -> None:
        await self._ask(HelpScreen())


def _lines(lines: Sequence[str]) -> str:
    return f"{len(lines):,} line{'s' * (len(lines) != 1)}"
