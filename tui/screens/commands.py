"""What the commands do; `localllm.tui.menu` lists them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.terminal import quantity
from localllm.errors import StoreError, UsageError
from localllm.tui import menu, options
from localllm.tui.conversation import Conversation, Message
from localllm.tui.screens.dialogs import Ask, Tell, confirm
from localllm.tui.screens.help import HelpScreen
from localllm.tui.screens.sampling import SamplingScreen
from localllm.tui.screens.sessions import SessionsScreen, ask_export, ask_import, path_of
from localllm.tui.screens.system import SystemScreen
from localllm.tui.session import ChatSession
from localllm.tui.transfer import read_export, write_export

if TYPE_CHECKING:
    from localllm.tui.screens.chat import ChatScreen

_Handler = Callable[[str], Awaitable[None]]


class Commands:
    """Runs commands on a screen."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self._handlers: dict[str, _Handler] = {
            "new": self._new,
            "sessions": self._sessions,
            "model": self._model,
            "system": self._system,
            "set": self._set,
            "regen": self._regen,
            "edit": self._edit,
            "branch": self._branch,
            "continue": self._continue,
            "copy": self._copy,
            "title": self._title,
            "save": self._title,
            "load": self._load,
            "export": self._export,
            "import": self._import,
            "stats": self._stats,
            "clear": self._clear,
            "archive": self._archive,
            "delete": self._delete,
            "theme": self._theme,
            "stop": self._stop,
            "help": self._help,
            "quit": self._quit,
        }

    async def run(self, text: str) -> None:
        """Runs a command as it is typed.

        Raises:
            LocalLLMError: there is none of this name, or it fails.
        """
        command, argument = menu.find(text)
        await self._handlers[command.name](argument)

    # -- Chats -----------------------------------------------------------------------------------------------------

    async def _open(self, conversation: Conversation) -> None:
        screen = self._screen
        store = screen.need_session().store
        await screen.open(ChatSession(screen.models.model, store, conversation))
        screen.composer.focus()

    async def _new(self, argument: str) -> None:
        await self._open(self._screen.new_conversation())

    async def _clear(self, argument: str) -> None:
        old = self._screen.need_session().conversation
        await self._open(Conversation(system=old.system, settings=dict(old.settings), model=old.model))

    async def _open_id(self, id_: str) -> None:
        store = self._screen.need_session().store
        if id_ != self._screen.need_session().conversation.id:
            await self._open(await self._screen.app.offload(store.load, id_))

    async def _sessions(self, argument: str) -> None:
        screen = self._screen
        session = screen.need_session()
        chats = SessionsScreen(session.store, session.conversation.id, argument)
        chosen = await screen.app.push_screen_wait(chats)
        if chosen is not None:
            await self._open_id(chosen)
        elif session.conversation.id in chats.deleted:
            await self._new("")
        else:
            await self._retitle(session)

    async def _retitle(self, session: ChatSession) -> None:
        """Takes over a title that was changed in the list."""
        found = await self._screen.app.offload(session.store.sessions)
        title = next((each.title for each in found if each.id == session.conversation.id), None)
        if title is not None and title != session.conversation.title:
            session.conversation.title = title
            await self._screen.refresh_all()

    async def _load(self, argument: str) -> None:
        if argument.lower().endswith(".json"):
            await self._import(argument)
            return
        try:
            id_ = await self._screen.app.offload(self._screen.need_session().store.find, argument)
        except StoreError:
            await self._sessions(argument)
        else:
            await self._open_id(id_)

    async def _title(self, argument: str) -> None:
        session = self._screen.need_session()
        title = argument or await self._screen.app.push_screen_wait(Ask("Title", value=session.conversation.title))
        if title:
            await self._screen.app.offload(session.set_title, title)
            await self._screen.refresh_all()

    async def _archive(self, argument: str) -> None:
        session = self._screen.need_session()
        await self._screen.app.offload(session.store.archive, session.conversation.id)
        self._screen.app.say("the chat is archived: Ctrl+O and h show it")
        await self._new("")

    async def _delete(self, argument: str) -> None:
        session = self._screen.need_session()
        text = session.conversation.title or "It has no title yet."
        if await self._screen.app.push_screen_wait(confirm("Delete this chat for good?", text, "Delete")) == "yes":
            await self._screen.end_turn()
            await self._screen.app.offload(session.store.delete, session.conversation.id)
            await self._new("")

    async def _export(self, argument: str) -> None:
        screen = self._screen
        conversation = screen.need_session().conversation
        name = argument or await screen.app.push_screen_wait(ask_export(conversation.title))
        if name:
            path = path_of(name)
            if path.suffix.lower() not in (".md", ".json"):
                path = Path(f"{path}.md")
            await screen.app.offload(write_export, conversation, path)
            screen.app.say(f"written to {path}")

    async def _import(self, argument: str) -> None:
        screen = self._screen
        name = argument or await screen.app.push_screen_wait(ask_import())
        if name:
            conversation = await screen.app.offload(read_export, path_of(name))
            store = screen.need_session().store
            await screen.app.offload(store.save, conversation, conversation.messages)
            await self._open(conversation)

    # -- How replies are generated ---------------------------------------------------------------------------------

    async def _model(self, argument: str) -> None:
        if argument:
            await self._screen.models.load("" if argument == "demo" else argument)
        else:
            await self._screen.models.choose()

    async def _system(self, argument: str) -> None:
        session = self._screen.need_session()
        text = argument or await self._screen.app.push_screen_wait(SystemScreen(session.conversation.system))
        if text is not None:
            await self._screen.app.offload(session.set_system, text)
            self._screen.app.say("the system prompt is set" if text else "there is no system prompt now")
            await self._screen.refresh_all()

    async def _set(self, argument: str) -> None:
        session = self._screen.need_session()
        if not argument:
            settings = await self._screen.app.push_screen_wait(SamplingScreen(session.conversation.settings))
        else:
            name, _, value = argument.partition(" ")
            if not value.strip():
                raise UsageError(f"/set {name} needs a value, or default: /set temperature 0.7")
            settings = options.with_setting(session.conversation.settings, name, value.strip())
        if settings is not None:
            await self._screen.app.offload(session.set_options, settings)
            given = ", ".join(f"{name} {value}" for name, value in settings.items()) or "all by default"
            self._screen.app.say(f"settings of this chat: {given}")

    # -- Messages --------------------------------------------------------------------------------------------------

    async def _regen(self, argument: str) -> None:
        self._screen.begin(self._screen.need_session().regenerate)

    async def _continue(self, argument: str) -> None:
        self._screen.begin(self._screen.need_session().continue_reply)

    async def _edit(self, argument: str) -> None:
        message = self._last("user")
        if argument:
            self._screen.begin(partial(self._screen.need_session().edit, message.id, argument), typed=argument)
        else:
            self._screen.edit(message)

    async def _branch(self, argument: str) -> None:
        session = self._screen.need_session()
        path = session.conversation.path()
        forked = next((m for m in reversed(path) if session.conversation.branch_of(m.id)[1] > 1), None)
        if forked is None:
            raise UsageError("there is one branch: edit a message or regenerate a reply to have another")
        number, n = session.conversation.branch_of(forked.id)
        steps = {"": 1 if number < n else 1 - n, "next": 1, "previous": -1}
        if argument in steps:
            by = steps[argument]
        elif argument.isdecimal():
            by = int(argument) - number
        else:
            raise UsageError("/branch takes next, previous or a number")
        await self._screen.step(forked.id, by)

    async def _copy(self, argument: str) -> None:
        message = self._last("assistant")
        what, _, number = argument.partition(" ")
        if what == "code":
            await self._screen.copy_code(message, int(number) if number.strip().isdecimal() else None)
        else:
            self._screen.copy_message(message)

    def _last(self, role: str) -> Message:
        path = self._screen.need_session().conversation.path()
        message = next((each for each in reversed(path) if each.role == role), None)
        if message is None:
            raise UsageError("there is no message yet")
        return message

    # -- The rest --------------------------------------------------------------------------------------------------

    async def _stats(self, argument: str) -> None:
        screen = self._screen
        session = screen.need_session()
        meter = await screen.app.offload(session.meter)
        memory = await screen.app.offload(screen.app.setup.memory)
        await screen.app.push_screen_wait(Tell("Statistics", _statistics(session, meter.used, meter.context, memory)))

    async def _theme(self, argument: str) -> None:
        app = self._screen.app
        if not argument:
            app.search_themes()
        elif argument in app.available_themes:
            app.theme = argument
        else:
            raise UsageError(
                f"there is no theme {argument!r:.40}: there are {', '.join(sorted(app.available_themes))}"
            )

    async def _stop(self, argument: str) -> None:
        self._screen.action_stop()

    async def _help(self, argument: str) -> None:
        await self._screen.app.push_screen_wait(HelpScreen())

    async def _quit(self, argument: str) -> None:
        await self._screen.quit()


def _statistics(session: ChatSession, used: int, context: int, memory: int) -> str:
    conversation = session.conversation
    lines = [
        f"{len(conversation):,} messages in {len(conversation.branches()):,} branches",
        f"{used:,} of {context:,} tokens of context in use",
        f"{quantity(memory, 'B')} of memory in use",
    ]
    if (stats := session.last) is not None:
        lines += [
            "",
            f"The last reply, by {stats.model}:",
            f"{stats.prompt_tokens:,} tokens of prompt, {stats.cached_tokens:,} of them from the cache",
            f"{stats.new_tokens:,} tokens written at {stats.rate:.1f} tok/s, the first after {stats.first_token_s:.2f} s",
        ]
    if session.model is not None:
        lines += ["", str(session.model.info)]
    return "\n".join([*lines, "", f"chat {conversation.id}"])
