"""What commands do in the app: those without an argument ask, the others are shared with the plain chat."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.terminal import quantity
from localllm.errors import StoreError, UsageError
from localllm.tui import commands
from localllm.tui.chat.conversation import Conversation, Message
from localllm.tui.chat.events import Event
from localllm.tui.chat.export import import_chat, path_of, write_export
from localllm.tui.chat.session import ChatSession
from localllm.tui.numbers import NO_BRANCHES, branch_meant, forks
from localllm.tui.screens.chats import ChatsScreen, ask_export, ask_import
from localllm.tui.screens.dialogs import Ask, Choose, SystemScreen, TextDialog, confirm
from localllm.tui.screens.help import HelpScreen
from localllm.tui.screens.sampling import SamplingScreen
from localllm.tui.slash.chats import check_begun
from localllm.tui.slash.messages import to_remove
from localllm.tui.slash.settings import stats
from localllm.tui.text import shortened

if TYPE_CHECKING:
    from localllm.tui.screens.chat import ChatScreen

#: More lines than these are told in a dialog, and no notification.
_MOST_LINES = 3


class Shared:
    """A `Frontend` (`localllm.tui.slash.frontend`) in the thread of `BaseApp.offload`: it notes what is to be done.

    Attributes:
        session: what is talked in.
        said: what is to be told.
        events: what is to be shown.
        message: what is to be edited.
        conversation: what is to be opened.
        model: what is to be loaded.
        ends: whether the program is to end.
    """

    def __init__(self, session: ChatSession) -> None:
        self.session = session
        self.said: list[str] = []
        self.events: Iterator[Event] | None = None
        self.message: Message | None = None
        self.conversation: Conversation | None = None
        self.model: str | None = None
        self.ends = False

    def say(self, text: str) -> None:
        self.said.append(text)

    def play(self, events: Iterator[Event]) -> None:
        self.events = events

    def edit(self, message: Message) -> None:
        self.message = message

    def open(self, conversation: Conversation) -> None:
        self.conversation = conversation

    def use_model(self, path: str) -> None:
        self.model = path

    def quit(self) -> None:
        self.ends = True


class Commands:
    """Runs commands on a screen."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        #: What is done without an argument.
        self._asking: dict[str, Callable[[], Awaitable[None]]] = {
            "archive": self._archive,
            "branch": self._branches,
            "delete": self._delete,
            "export": self._export,
            "import": self._import,
            "load": partial(self._sessions, ""),
            "model": screen.models.choose,
            "rename": self._rename,
            "sessions": partial(self._sessions, ""),
            "set": self._set,
            "stats": self._stats,
            "system": self._system,
            "theme": partial(self._theme, ""),
        }
        #: What the app does in its own way, whatever the argument.
        self._own: dict[str, Callable[[str], Awaitable[None]]] = {
            "branch": self._branch,
            "copy": self._copy,
            "export": self._export_to,
            "help": self._help,
            "import": self._import_from,
            "load": self._load,
            "remove": self._remove,
            "sessions": self._sessions,
            "theme": self._theme,
        }

    async def run(self, text: str) -> None:
        """Runs a command as it is typed.

        Raises:
            LocalLLMError: there is none of this name, or it fails.
        """
        call = commands.parse(text)
        if isinstance(call, str):
            return
        name, argument = call.command.name, call.argument
        if argument == "this" and name in ("archive", "delete"):  # the open chat, as without an argument
            argument = ""
        if not argument and name in self._asking:
            await self._asking[name]()
        elif name in self._own:
            await self._own[name](argument)
        else:
            await self._run_shared(call)

    async def _run_shared(self, call: commands.Call) -> None:
        screen = self._screen
        front = Shared(screen.session)
        await screen.app.offload(commands.run, front, call)
        if front.events is not None:
            events = front.events
            screen.begin(lambda: events)
        elif front.message is not None:
            screen.edit(front.message)
        elif front.conversation is not None:
            await self._open(front.conversation)
        elif front.model is not None:
            await screen.models.change(front.model)
        elif front.ends:
            await screen.quit()
        else:
            await screen.refresh_all()
            await self._tell(call.command.name, "\n".join(front.said))

    async def _tell(self, title: str, text: str) -> None:
        if text.count("\n") < _MOST_LINES:
            self._screen.app.notify(text)
        else:
            await self._screen.app.push_screen_wait(TextDialog(title.capitalize(), text))

    # -- Chats -----------------------------------------------------------------------------------------------------

    async def _open(self, conversation: Conversation) -> None:
        await self._screen.open(conversation)
        self._screen.composer.focus()

    async def _new(self) -> None:
        await self.run("/clear")

    async def _open_id(self, id_: str) -> None:
        session = self._screen.session
        if id_ != session.conversation.id:
            await self._open(await self._screen.app.offload(session.store.load, id_))

    async def _sessions(self, words: str) -> None:
        screen = self._screen
        session = screen.session
        archived = words == "archived"
        chats = ChatsScreen(session.store, session.conversation.id, "" if archived else words, archived=archived)
        chosen = await screen.app.push_screen_wait(chats)
        if (title := chats.titles.get(session.conversation.id)) is not None:
            session.conversation.title = title
            await screen.refresh_all()
        if chosen is not None:
            await self._open_id(chosen)
        elif session.conversation.id in chats.deleted:
            await self._new()

    async def _load(self, argument: str) -> None:
        screen = self._screen
        store = screen.session.store
        if argument.lower().endswith(".json"):
            await self._import_from(argument)
            return
        try:
            id_ = await screen.app.offload(store.find, argument)
        except StoreError:  # words, then
            await self._sessions(argument)
        else:
            await self._open_id(id_)

    async def _import(self) -> None:
        name = await self._screen.app.push_screen_wait(ask_import())
        if name:
            await self._import_from(name)

    async def _import_from(self, name: str) -> None:
        screen = self._screen
        conversation = await screen.app.offload(import_chat, screen.session.store, path_of(name))
        await self._open(conversation)
        screen.app.notify(f"imported: {conversation.title}")

    async def _rename(self) -> None:
        session = self._screen.session
        title = await self._screen.app.push_screen_wait(Ask("Title", value=session.conversation.title))
        if title:
            await self._screen.app.offload(session.set_title, title)
            await self._screen.refresh_all()

    async def _archive(self) -> None:
        session = self._screen.session
        check_begun(session.conversation)
        await self._screen.app.offload(session.store.archive, session.conversation.id)
        self._screen.app.notify("the chat is archived: Ctrl+O and F6 show it")
        await self._new()

    async def _delete(self) -> None:
        screen = self._screen
        conversation = screen.session.conversation
        text = conversation.title or "It has no title yet."
        if await screen.app.push_screen_wait(confirm("Delete this chat for good?", text, "Delete")) == "yes":
            await screen.end_turn()
            await screen.app.offload(screen.session.store.delete, conversation.id)
            await self._new()

    async def _export(self) -> None:
        name = await self._screen.app.push_screen_wait(ask_export(self._screen.session.conversation.title))
        if name:
            await self._export_to(name)

    async def _export_to(self, name: str) -> None:
        path = path_of(name)
        if path.suffix.lower() not in (".md", ".json"):
            path = Path(f"{path}.md")
        await self._screen.app.offload(write_export, self._screen.session.conversation, path)
        self._screen.app.notify(f"written to {path}")

    # -- How replies are generated ---------------------------------------------------------------------------------

    async def _system(self) -> None:
        session = self._screen.session
        text = await self._screen.app.push_screen_wait(SystemScreen(session.conversation.system))
        if text is not None:
            await self._screen.app.offload(session.set_system, text)
            self._screen.app.notify("the system prompt is set" if text else "there is no system prompt now")
            await self._screen.refresh_all()

    async def _set(self) -> None:
        session = self._screen.session
        settings = await self._screen.app.push_screen_wait(SamplingScreen(session.conversation.settings))
        if settings is not None:
            await self._screen.app.offload(session.set_options, settings)
            given = ", ".join(f"{name} {value}" for name, value in settings.items()) or "all by default"
            self._screen.app.notify(f"settings of this chat: {given}")

    # -- Messages --------------------------------------------------------------------------------------------------

    async def _branches(self) -> None:
        """Asks for a branch, and goes there."""
        found = forks(self._screen.session.conversation)
        if not found:
            raise UsageError(NO_BRANCHES)
        labels = [
            (branch.id, f"{'●' if i == fork.at else '○'} #{fork.number}  {i}/{len(fork.branches)}  {_line(branch)}")
            for fork in found
            for i, branch in enumerate(fork.branches, 1)
        ]
        at = len(labels) - len(found[-1].branches) + found[-1].at - 1
        chosen = await self._screen.app.push_screen_wait(Choose("Branches", "", labels, at))
        if chosen is not None:
            await self._screen.switch(chosen)

    async def _branch(self, argument: str) -> None:
        await self._screen.switch(branch_meant(self._screen.session.conversation, argument).id)

    async def _remove(self, argument: str) -> None:
        session = self._screen.session
        await self._screen.delete_asked(session, to_remove(session.conversation, argument))

    async def _copy(self, argument: str) -> None:
        message = self._last("assistant")
        what, _, number = argument.partition(" ")
        if what == "code":
            await self._screen.copy_code(message, int(number) if number.strip().isdecimal() else None)
        else:
            self._screen.copy_message(message)

    def _last(self, role: str) -> Message:
        path = self._screen.session.conversation.path()
        message = next((each for each in reversed(path) if each.role == role), None)
        if message is None:
            raise UsageError("there is no such message yet: send one first")
        return message

    # -- The rest --------------------------------------------------------------------------------------------------

    async def _stats(self) -> None:
        screen = self._screen
        front = Shared(screen.session)
        await screen.app.offload(stats, front, "")
        memory = await screen.app.offload(screen.app.setup.memory)
        lines = [*front.said, f"memory {quantity(memory, 'B')} in use"]
        if screen.models.model is not None:
            lines += ["", str(screen.models.model.info)]
        await screen.app.push_screen_wait(TextDialog("Statistics", "\n".join(lines)))

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

    async def _help(self, argument: str) -> None:
        await self._screen.app.push_screen_wait(HelpScreen())


def _line(message: Message) -> str:
    return shortened(message.content, 55)
