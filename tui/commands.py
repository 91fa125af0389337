"""Slash commands: one table of commands, shared by the app and line mode.

The palette, completion, help and the app's key bindings read this table. A command's function receives the session
and the `UI` of the user who typed the command.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from localllm.errors import StoreError, UsageError
from localllm.files import read_text
from localllm.sampling import Sampling
from localllm.tui.chat import settings as chat_settings
from localllm.tui.chat.attachments import Suggestion, command_output, path_of
from localllm.tui.chat.conversation import ChatMessage, Conversation
from localllm.tui.chat.events import Choice, Turn
from localllm.tui.chat.export import copied_path, export_all, import_all, import_chat, write_export
from localllm.tui.chat.session import ChatSession
from localllm.tui.storage.chats import ChatSummary, default_path
from localllm.tui.text import shortened

P = ParamSpec("P")
T = TypeVar("T")

NO_BRANCHES = "this chat has no branches: /edit and /regen create them"


class UI(Protocol):
    """The operations of a user interface that commands use.

    `ask` and `choose` return None if the user cancels. In line mode they return "", and `confirm` returns True.
    """

    #: Whether the interface can question the user.
    has_screen: bool = False

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that may be slow."""
        return function(*args, **kwargs)

    async def until_esc(self, activity: str, function: Callable[..., str], *arguments: object) -> str:
        """Call a function that may be slow. If Esc can cancel it, it gets ``is_stopped`` as its last argument."""
        return function(*arguments)

    async def tell(self, text: str) -> None:
        """Show a message, and redraw the changed parts of the screen."""

    async def show(self) -> None:
        """Redraw the conversation."""

    async def play(self, start: Callable[[Turn], None]) -> None:
        """Generate a reply: call ``start`` with a new turn."""

    async def edit(self, message: ChatMessage) -> None:
        """Let the user edit a message."""

    async def put(self, draft: str) -> None:
        """Insert a draft into the editor, or send it if the interface has no editor."""

    async def open(self, conversation: Conversation, notice: str = "") -> None:
        """Switch to another conversation, and show the message ``notice``."""

    async def use_model(self, name: str) -> None:
        """Load another model."""

    async def quit(self) -> None:
        """End the program."""

    async def ask(self, title: str, text: str = "", value: str = "", example: str = "") -> str | None:
        """Prompt for a line of text."""
        return ""

    async def choose(self, title: str, choices: Sequence[tuple[str, str]], at: int) -> str | None:
        """Prompt for one of ``choices``, pairs of value and label. The choice with index ``at`` is selected first."""
        return ""

    async def confirm(self, question: str, text: str) -> bool:
        """Return whether the user confirms a deletion."""
        return True

    async def on_screen(self, name: str, argument: str) -> bool:
        """Open the app's screen for a command. Returns False if the command has no screen."""
        return False


Run = Callable[[ChatSession, UI, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A slash command.

    Attributes:
        arguments: syntax of the arguments, for help texts.
        run: executes the command; its last parameter is the text after the name. None if only the app supports it.
        title: name in the palette; empty if the palette omits the command.
        key: default key in the app, in Textual's notation; empty if it has no key.
    """

    name: str
    arguments: str
    help: str
    run: Run | None
    aliases: tuple[str, ...] = ()
    title: str = ""
    key: str = ""

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.arguments}".rstrip()

    def help_and_key(self, keys: Mapping[str, str]) -> str:
        """Return the help text, followed by the key in brackets if the command has a key."""
        key = self.shown_key(keys)
        return f"{self.help} ({key})" if key else self.help

    def shown_key(self, keys: Mapping[str, str]) -> str:
        """Return the key as shown to users, or an empty string. ``keys`` contains the keys that the user changed."""
        return "+".join(name.capitalize() for name in keys.get(self.name, self.key).split(",")[0].split("+"))


class CommandCall(NamedTuple):
    """A command and its argument, which is the text after the name."""

    command: SlashCommand
    argument: str


def parse(text: str) -> CommandCall | str:
    """Parse a command or a message. ``//`` and ``!!`` start a message with / or !. Raises UsageError; see `find`."""
    if text.startswith("!") and not text.startswith("!!"):
        return CommandCall(find("run"), text[1:].strip())
    if not text.startswith("/") or text.startswith("//"):
        return text[1:] if text.startswith(("//", "!!")) else text
    name, *arguments = text[1:].split(maxsplit=1) or [""]
    return CommandCall(find(name), arguments[0].rstrip() if arguments else "")


def find(name: str) -> SlashCommand:
    """Return the command with this name or alias. Raises UsageError, with the closest name, if it is unknown."""
    if (command := _BY_NAME.get(name)) is not None:
        return command
    near = difflib.get_close_matches(name, _BY_NAME, n=1)
    hint = f"did you mean /{near[0]}?" if near else "/help lists them; // starts a message with a slash"
    raise UsageError(f"there is no command /{name}: {hint}")


async def run(session: ChatSession, ui: UI, call: CommandCall) -> None:
    """Execute a command. Raises LocalLLMError if it fails, and UsageError if it needs the app."""
    command, argument = call
    if command.run is not None:
        await command.run(session, ui, argument)
    elif not await ui.on_screen(command.name, argument):
        raise UsageError(f"/{command.name} is for the app: start localllm chat without --plain")


def _telling(function: Callable[[ChatSession, str], str], screen: str = "") -> Run:
    """Return a `Run` that shows the text returned by ``function``. The app may open ``screen`` instead."""

    async def run(session: ChatSession, ui: UI, argument: str) -> None:
        if not screen or not await ui.on_screen(screen, argument):
            await ui.tell(await ui.call(function, session, argument))

    return run


def completions(line: str) -> list[Suggestion]:
    """Return the commands that complete ``line``. Empty unless the line is a single word after a slash."""
    if not line.startswith("/") or not (line[1:].replace("-", "").isalnum() or line == "/"):
        return []
    return [Suggestion(f"/{c.name}", 0, c.help) for c in COMMANDS if c.name.startswith(line[1:].lower())]


# -- Messages and branches -------------------------------------------------------------------------------------------


def numbered(conversation: Conversation, number: str) -> ChatMessage:
    """Return the message with number ``3`` or ``#3`` on the current path. Raises UsageError if it does not exist."""
    path = conversation.path()
    digits = number.removeprefix("#")
    if not digits.isdecimal() or not 0 < int(digits) <= len(path):
        numbers = f"messages have numbers from 1 to {len(path)}" if path else "this chat has no messages yet"
        raise UsageError(f"there is no message {number}: {numbers}")
    return path[int(digits) - 1]


class Fork(NamedTuple):
    """A message that has siblings. ``branches`` are oldest first; ``number`` and ``at`` count from 1.

    ChatMessage ``number`` of the current path is branch ``at``.
    """

    number: int
    branches: list[ChatMessage]
    at: int


def forks(conversation: Conversation) -> list[Fork]:
    return [
        Fork(number, conversation.siblings(message.id), conversation.branch_of(message.id)[0])
        for number, message in enumerate(conversation.path(), 1)
        if conversation.branch_of(message.id)[1] > 1
    ]


def branch_meant(conversation: Conversation, argument: str) -> ChatMessage:
    """Return the branch for ``next``, ``prev`` or a number, at the last fork or at a message. Raises UsageError."""
    path_forks = forks(conversation)
    if not path_forks:
        raise UsageError(NO_BRANCHES)
    first, *words = argument.split()
    fork = path_forks[-1]
    if words or first.startswith("#"):
        message = numbered(conversation, first)
        fork = next((candidate for candidate in path_forks if message in candidate.branches), Fork(0, [message], 1))
    branch = words[0] if words else "next" if first.startswith("#") else first
    steps = {"next": fork.at + 1, "prev": fork.at - 1, "previous": fork.at - 1}
    number = int(branch) if branch.isdecimal() else steps.get(branch, 0)
    n = len(fork.branches)
    if len(words) > 1 or not 0 < number <= n:
        raise UsageError(f"there is no branch {branch}, and this is {fork.at} of {n}: /branch lists them")
    return fork.branches[number - 1]


async def _edit(session: ChatSession, ui: UI, argument: str) -> None:
    conversation = session.conversation
    first, *words = argument.split(maxsplit=1) or [""]
    message: ChatMessage | None
    if first.removeprefix("#").isdecimal():  # a number always names a message
        message, text = numbered(conversation, first), words[0] if words else ""
    else:
        message = next((m for m in reversed(conversation.path()) if m.role == "user"), None)
        text = argument
    if message is None:
        raise UsageError("there is nothing to edit yet: send a message first")
    await (ui.play(partial(session.edit, message.id, text)) if text else ui.edit(message))


async def _regenerate(session: ChatSession, ui: UI, argument: str) -> None:
    message = numbered(session.conversation, argument) if argument else None
    await ui.play(partial(session.regenerate, None if message is None else message.id))


async def _branch(session: ChatSession, ui: UI, argument: str) -> None:
    path_forks = forks(session.conversation)
    if not path_forks:
        raise UsageError(NO_BRANCHES)
    choices = [
        (f"#{fork.number} {i}", f"{'●' if i == fork.at else '○'} #{fork.number}  {i}/{len(fork.branches)}  {text}")
        for fork in path_forks
        for i, text in enumerate((shortened(branch.content, 55) for branch in fork.branches), 1)
    ]
    at = len(choices) - len(path_forks[-1].branches) + path_forks[-1].at - 1
    answer = argument or await ui.choose("Branches", choices, at)
    if answer:
        await ui.call(session.switch, branch_meant(session.conversation, answer).id)
        await ui.show()
    elif answer is not None:
        await ui.tell("\n".join(label for _, label in choices))


async def _remove(session: ChatSession, ui: UI, argument: str) -> None:
    if not argument:
        raise UsageError("name the message: /remove 3 deletes it and all that follows it")
    message = numbered(session.conversation, argument)
    if await ui.confirm("Delete this message?", "The message and everything after it are deleted for good."):
        await ui.call(session.delete, message.id)
        await ui.show()


def transcript(session: ChatSession, argument: str) -> str:
    entries, conversation = [], session.conversation
    for number, message in enumerate(conversation.path(), 1):
        at, n = conversation.branch_of(message.id)
        branch = f", branch {at} of {n}" if n > 1 else ""
        cut = ", cut off" if message.is_cut else ", edited" if message.state == "edited" else ""
        entries.append(f"#{number} {message.role}{branch}{cut}\n{message.content}")
    return "\n\n".join(entries) or "this chat has no messages yet"


class Match(NamedTuple):
    """A search result: the message's id, and the index of the match within the message, from 0."""

    id: str
    number: int


def matches(conversation: Conversation, text: str) -> list[Match]:
    """Return all matches of ``text`` on the current path, ignoring case. Empty for an empty text."""
    text = text.casefold()
    if not text:
        return []
    return [
        Match(message.id, number)
        for message in conversation.path()
        for number in range(message.content.casefold().count(text))
    ]


def _found(session: ChatSession, argument: str) -> str:
    if not argument:
        raise UsageError("name what to find: /find TEXT")
    lines = []
    for number, message in enumerate(session.conversation.path(), 1):
        for line in message.content.splitlines():
            if (at := line.casefold().find(argument.casefold())) >= 0:
                lines.append(f"#{number} {message.role}: {shortened(line[max(0, at - 30) :], 100)}")
    return "\n".join(lines) or f"{argument!r} is not in this chat: /sessions {argument} searches all chats"


# -- How replies are generated ---------------------------------------------------------------------------------------


async def _free_context(choice: Choice, session: ChatSession, ui: UI, argument: str) -> None:
    await ui.play(partial(session.free_context, choice))


async def _system(session: ChatSession, ui: UI, argument: str) -> None:
    if argument:
        await ui.call(session.set_system, "" if argument == "none" else argument)
    elif await ui.on_screen("system", argument):
        return
    await ui.tell(f"system prompt: {session.conversation.system or 'none'}")


async def _set(session: ChatSession, ui: UI, argument: str) -> None:
    if argument or not await ui.on_screen("set", argument):
        await ui.tell(await ui.call(_settings, session, argument))


def _settings(session: ChatSession, argument: str) -> str:
    settings = session.conversation.settings
    name, *values = argument.split(maxsplit=1) or [""]
    if values:
        settings = chat_settings.with_setting(settings, name, values[0])
        session.set_options(settings)
    elif name:
        chat_settings.with_setting(settings, name, "default")  # raises UsageError for an unknown name
    defaults = vars(Sampling())
    lines = []
    for setting in [chat_settings.full_name(name)] if name else chat_settings.READERS:
        text = chat_settings.typed(settings.get(setting, defaults.get(setting, "default")))
        lines.append(f"{setting:<20} {text}{'' if setting in settings else '  (default)'}")
    return "\n".join(lines)


def _set_one(name: str, session: ChatSession, argument: str) -> str:
    return _settings(session, f"{name} {'default' if argument == 'none' else argument}")


def _format(session: ChatSession, argument: str) -> str:
    settings = session.conversation.settings
    if argument:
        schema = "default" if argument == "none" else read_text(path_of(argument), "the schema")
        session.set_options(chat_settings.with_setting(settings, "json_schema", schema))
    held_to = session.conversation.settings.get("json_schema")
    return "replies are free text" if held_to is None else f"replies are JSON by the schema {json.dumps(held_to)}"


def _detach(session: ChatSession, argument: str) -> str:
    if argument:
        n = session.detach(argument)
        if not n:
            raise UsageError(f"there is no attached file {argument!r}: /detach lists the attached files")
        return f"the model no longer gets {argument}"
    files = [file for message in session.conversation.path() for file in message.attachments]
    return "\n".join(f"{file.name}: {file.n_tokens:,} tokens" for file in files) or "no files are attached"


async def _compare(session: ChatSession, ui: UI, argument: str) -> None:
    if not await ui.on_screen("compare", argument):
        if argument:
            raise UsageError("only the app runs the other model for you: use /model FILE, /regen, and then /compare")
        await ui.tell("\n\n".join(f"{who(reply)}\n{reply.content}" for reply in compared(session.conversation)))


def who(reply: ChatMessage) -> str:
    return (reply.stats and reply.stats.model) or "Reply"


def compared(conversation: Conversation) -> list[ChatMessage]:
    """Return the last reply and the reply to compare it with, which comes first.

    The second reply is the newest sibling, preferably by another model. Raises UsageError if there is no sibling.
    """
    reply = next((m for m in reversed(conversation.path()) if m.role == "assistant"), None)
    siblings = [] if reply is None else [m for m in conversation.siblings(reply.id) if m.id != reply.id]
    if reply is None or not siblings:
        raise UsageError("there is only one reply: /compare FILE lets another model reply too, /regen the same model")
    return [max(siblings, key=lambda sibling: (who(sibling) != who(reply), sibling.created)), reply]


async def _model(session: ChatSession, ui: UI, argument: str) -> None:
    if argument:
        await ui.use_model(argument)
    elif not await ui.on_screen("model", argument):
        info = None if session.model is None else session.model.info
        text = "no model is loaded: /model FILE loads one"
        if info is not None:
            text = f"{info.name or info.path.name}: {info.path}, {info.context:,} tokens of context"
        await ui.tell(text)


def stats_text(session: ChatSession, argument: str = "") -> str:
    used, context = session.meter()
    lines = [f"context {used:,} / {context:,} tokens ({used / max(1, context):.0%})"]
    if (stats := session.last) is not None:
        tokens = f"{stats.cached_tokens:,} cached, {stats.prompt_tokens - stats.cached_tokens:,} evaluated"
        speed = f"the first after {stats.first_token_s:.2f} s, then {stats.rate:.1f} tok/s, by {stats.model}"
        lines.append(f"last prompt {stats.prompt_tokens:,} tokens: {tokens}")
        lines.append(f"last reply {stats.new_tokens:,} tokens: {speed}")
    return "\n".join(lines)


# -- Chats -----------------------------------------------------------------------------------------------------------


def _save(session: ChatSession, argument: str) -> str:
    check_begun(session.conversation)
    if argument:
        session.set_title(argument)
    location = "only in memory" if session.store.path is None else f"in {session.store.path}"
    return f"{session.conversation.id}  {session.conversation.title}, saved {location}"


def check_begun(conversation: Conversation) -> None:
    """Raise UsageError if the chat has no messages: empty chats are not saved."""
    if not len(conversation):
        raise UsageError("there is nothing to save yet: chats are saved automatically")


async def _load(session: ChatSession, ui: UI, argument: str) -> None:
    if argument.lower().endswith(".json"):
        await _import(session, ui, argument)
        return
    try:
        if not argument:
            raise UsageError("name a chat, or a file: /load ID, or /load FILE.json; /sessions lists chats")
        id_ = await ui.call(session.store.find, argument)
    except (StoreError, UsageError):
        if not await ui.on_screen("sessions", argument):  # this screen searches chats for words
            raise
    else:
        await ui.open(await ui.call(session.store.load, id_))


async def _import(session: ChatSession, ui: UI, argument: str) -> None:
    example = "for example ~/Downloads/chat.json"
    name = argument or await ui.ask("Import", "An exported .json file", example=example)
    if name is None:
        return
    if not name:
        raise UsageError("name an exported file, or a folder of exported files: /import FILE.json")
    path = path_of(name)
    if path.is_dir():
        await ui.tell(f"{await ui.call(import_all, session.store, path):,} chats imported from {path}")
    else:
        conversation = await ui.call(import_chat, session.store, path)
        await ui.open(conversation, f"imported: {conversation.title}")


async def _export(session: ChatSession, ui: UI, argument: str) -> None:
    if not argument:
        name = re.sub(r"\W+", "-", session.conversation.title.lower())[:40].strip("-") or "chat"
        filename = await ui.ask("Export", "A new file: .md to read, or .json with all branches", f"{name}.md")
        if filename is None:
            return
        argument = filename
    await ui.tell(await ui.call(_exported, session, argument))


def _exported(session: ChatSession, argument: str) -> str:
    if argument == "all" or argument.startswith("all "):
        folder = path_of(argument[len("all ") :].strip() or "chats")
        return f"{export_all(session.store, folder):,} chats written into {folder}"
    path = path_of(argument or f"chat-{session.conversation.id}")
    if path.suffix.lower() not in (".md", ".json"):
        path = path.with_name(f"{path.name}.md")
    write_export(session.conversation, path)
    return f"written to {path}"


def _sessions(session: ChatSession, argument: str) -> str:
    store, words = session.store, argument != "archived" and argument
    summaries = store.search(words) if words else store.sessions(limit=20, archived=argument == "archived")
    return "\n".join(map(_line, summaries)) or "no chats"


def _line(summary: ChatSummary) -> str:
    archived = " (archived)" if summary.archived else ""
    return f"{summary.id}  {summary.title or 'untitled'}{archived} · {summary.n_messages} · {summary.preview}"


async def _rename(session: ChatSession, ui: UI, argument: str) -> None:
    title = argument or await ui.ask("Title", value=session.conversation.title)
    if title == "" and not ui.has_screen:
        raise UsageError("give a title: /rename TITLE")
    if title:
        await ui.tell(f"title: {await ui.call(session.set_title, title)}")


async def _delete(session: ChatSession, ui: UI, argument: str) -> None:
    if not argument and not ui.has_screen:
        raise UsageError("name the chat: /delete ID, or /delete this; /remove 3 deletes messages")
    id_ = await ui.call(_chosen, session, argument)
    if id_ != session.conversation.id:
        await ui.call(session.store.delete, id_)
        await ui.tell(f"deleted {id_}")
    elif await ui.confirm("Delete this chat for good?", session.conversation.title or "It has no title yet."):
        await ui.open(new_chat(session))  # ends a running reply, which would save the chat again
        await ui.call(session.store.delete, id_)


async def _archive(archived: bool, session: ChatSession, ui: UI, argument: str) -> None:
    id_ = await ui.call(_chosen, session, argument)
    is_open = id_ == session.conversation.id
    if is_open:
        check_begun(session.conversation)
    await ui.call(partial(session.store.set, id_, archived=archived))
    notice = f"{id_} is in the list of chats again"
    if archived:
        notice = f"archived {id_}: /unarchive {id_} brings it back"
    await (ui.open(new_chat(session), notice) if archived and is_open else ui.tell(notice))


def _chosen(session: ChatSession, argument: str) -> str:
    return session.conversation.id if argument in ("", "this") else session.store.find(argument)


def new_chat(session: ChatSession) -> Conversation:
    """Return a new chat with the system prompt, settings and model of the current chat."""
    old = session.conversation
    return Conversation(system=old.system, settings=dict(old.settings), model=old.model)


async def _fork(session: ChatSession, ui: UI, argument: str) -> None:
    check_begun(session.conversation)
    to = numbered(session.conversation, argument).id if argument else None
    conversation = copied_path(session.conversation, to)
    await ui.call(session.store.save, conversation, conversation.messages)
    await ui.open(conversation, f"a new chat: {conversation.title}")


# -- Texts from elsewhere --------------------------------------------------------------------------------------------


async def _prompt(session: ChatSession, ui: UI, argument: str) -> None:
    folder = (session.store.path or default_path()).with_name("prompts")
    files = {path.stem: path for path in sorted(folder.glob("*.*")) if path.suffix in (".md", ".txt")}
    name, *words = argument.split(maxsplit=1) or [""]
    if not name:
        await ui.tell("\n".join(files) or f"there are no prompts yet: save texts in {folder} as NAME.md")
        return
    if name not in files:
        near = difflib.get_close_matches(name, files, n=1)
        hint = f"did you mean {near[0]}?" if near else f"save it in {folder} as {name}.md"
        raise UsageError(f"there is no prompt {name!r}: {hint}")
    await ui.put(filled(read_text(files[name]).strip(), words[0] if words else ""))


async def _run(session: ChatSession, ui: UI, argument: str) -> None:
    await ui.put(await ui.until_esc("the command runs", command_output, argument))


def filled(prompt: str, argument: str) -> str:
    """Fill in a prompt. ``$1`` to ``$9`` become words of ``argument``; ``$ARGUMENTS`` becomes ``argument``.

    If the prompt has no placeholder, ``argument`` is appended.
    """
    words = argument.split()
    text = re.sub(
        r"\$([1-9]|ARGUMENTS\b)",
        lambda m: argument if m[1] == "ARGUMENTS" else words[int(m[1]) - 1] if int(m[1]) <= len(words) else "",
        prompt,
    )
    return f"{prompt}\n\n{argument}" if argument and text == prompt else text


# -- Tools -----------------------------------------------------------------------------------------------------------


async def _folder(session: ChatSession, ui: UI, argument: str) -> None:
    await ui.tell(await ui.call(folder_text, session, argument))


def folder_text(session: ChatSession, argument: str) -> str:
    """Choose the working folder, or describe it."""
    if argument:
        value = "default" if argument == "none" else argument
        session.set_options(chat_settings.with_setting(session.conversation.settings, "folder", value))
    folder, project = session.folder, session.project
    text = "no working folder: /folder PATH lets the model read and change the files in a folder"
    if folder is not None:
        text = f"the model may read and change files in {folder}, with your permission"
    return "\n".join(filter(None, (text, project.summary, *project.warnings)))


async def _tools(session: ChatSession, ui: UI, argument: str) -> None:
    await ui.tell(await ui.until_esc("tools start", tools_text, session, argument))


def tools_text(session: ChatSession, argument: str, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Change which tools are enabled, start their servers, and list the enabled tools."""
    toolbox = session.toolbox
    if argument:
        toolbox.change(argument)
    tools = [*toolbox.tools(is_stopped, session.folder).values(), *session.project.tools]
    lines = [
        f"{tool.name:<24} {'always allowed' if toolbox.is_allowed(tool) else 'asks first'}: "
        f"{shortened(tool.description, 60)}"
        for tool in tools
    ]
    return "\n".join([*lines, *toolbox.take_warnings()]) or (
        "no tools: /folder PATH, /tools read FOLDER, /tools run IMAGE, /tools fetch on, /tools search ADDRESS and "
        "/tools add NAME COMMAND switch some on"
    )


# -- The table -------------------------------------------------------------------------------------------------------


async def _help(session: ChatSession, ui: UI, argument: str) -> None:
    name = argument.removeprefix("/")
    listed = [find(name)] if name else [command for command in COMMANDS if command.run is not None]
    if not await ui.on_screen("help", argument):
        width = max(len(command.usage) for command in listed)
        await ui.tell("\n".join(f"{command.usage:<{width}}  {command.help}" for command in listed))


# fmt: off
COMMANDS = [
    SlashCommand("help", "[COMMAND]", "list the commands", _help, ("?",), "Help: keys and commands", "f1"),
    SlashCommand("regen", "[N]", "regenerate the reply; the earlier one stays as a branch", _regenerate, ("retry",),
                 "Regenerate", "ctrl+r"),
    SlashCommand("edit", "[N] [TEXT]", "edit your last message, or number N, in a new branch", _edit,
                 title="Edit your last message", key="f2"),
    SlashCommand("continue", "", "continue a reply that was cut off",
                 lambda session, ui, _: ui.play(session.continue_reply), (), "Continue the reply", "ctrl+g"),
    SlashCommand("branch", "[[N] next|prev|K]", "list branches, or switch to the next, the previous or number K",
                 _branch, title="Branches"),
    SlashCommand("show", "", "show the conversation, with numbers", _telling(transcript), ("history",)),
    SlashCommand("remove", "N", "delete message N and everything after it", _remove),
    SlashCommand("drop", "", "when the context is full: omit the oldest turns", partial(_free_context, "drop")),
    SlashCommand("summarise", "", "when the context is full: replace the oldest turns with a summary",
                 partial(_free_context, "summarise"), ("summarize",)),
    SlashCommand("system", "[TEXT|none]", "show or set the system prompt", _system, title="System prompt",
                 key="ctrl+s"),
    SlashCommand("set", "[NAME [VALUE|default]]", "show or change how replies are generated", _set, (), "Sampling",
                 "ctrl+t"),
    SlashCommand("prefix", "[TEXT|none]", "start replies with this text",
                 _telling(partial(_set_one, "reply_prefix"))),
    SlashCommand("stop-strings", "[TEXT … |none]", "strings that end a reply; quote strings with spaces",
                 _telling(partial(_set_one, "stop"))),
    SlashCommand("model", "[FILE]", "show the model, or load another one", _model, title="Model", key="ctrl+l"),
    SlashCommand("compare", "[FILE]", "let another model reply too, side by side", _compare, title="Compare"),
    SlashCommand("format", "[FILE.json|none]", "make replies JSON that follows the schema in a file",
                 _telling(_format)),
    SlashCommand("detach", "[NAME]", "list attached files, or remove one", _telling(_detach)),
    SlashCommand("stats", "", "tokens, cache and speed", _telling(stats_text, "stats"), title="Statistics"),
    SlashCommand("sessions", "[WORDS|archived]", "list chats, or search them", _telling(_sessions, "sessions"),
                 ("list",), "Chats", "ctrl+o"),
    SlashCommand("find", "[TEXT]", "search this chat for text", _telling(_found, "find"), ("search",),
                 "Find in this chat", "f5"),
    SlashCommand("fork", "[N]", "continue in a new chat, with everything up to message N", _fork,
                 title="Fork the chat"),
    SlashCommand("prompt", "[NAME [WORDS]]", "list the prompts of your folder, or use one", _prompt),
    SlashCommand("run", "COMMAND", "insert the output of a shell command into the message; short form: !COMMAND",
                 _run),
    SlashCommand("folder", "[PATH|none]", "let the model read and change the files in a folder", _folder,
                 title="Working folder"),
    SlashCommand("undo", "", "take back the last edit of a file by the model",
                 _telling(lambda session, _: session.undo()), title="Undo the last edit of a file"),
    SlashCommand("tools", "[read FOLDER|run IMAGE|fetch on|add NAME COMMAND|…]",
                 "list the tools that the model may call, or switch them on", _tools, title="Tools"),
    SlashCommand("allow", "[no|once|chat|always]", "answer a request to use a tool", None, (), "Allow a tool", "f3"),
    SlashCommand("answer", "", "end the thinking of the reply, and let it answer", None, (), "Answer now", "f8"),
    SlashCommand("editor", "", "write the message in $EDITOR", None, (), "Write in your editor", "ctrl+e"),
    SlashCommand("save", "[TITLE]", "show where this chat is saved, and name it", _telling(_save)),
    SlashCommand("load", "ID|FILE.json", "open a saved chat, or import one", _load, ("open",), "Open a chat"),
    SlashCommand("import", "FILE.json|FOLDER", "import an exported chat, or all chats in a folder", _import,
                 title="Import a chat"),
    SlashCommand("export", "[FILE.md|FILE.json|all FOLDER]", "write this chat to a file, or all chats to a folder",
                 _export, title="Export the chat"),
    SlashCommand("rename", "TITLE", "give this chat a title", _rename, title="Rename the chat"),
    SlashCommand("archive", "[ID]", "hide this chat, or another one, from the list", partial(_archive, True),
                 title="Archive the chat"),
    SlashCommand("unarchive", "[ID]", "show an archived chat in the list again", partial(_archive, False)),
    SlashCommand("delete", "ID|this", "delete a chat for good", _delete, title="Delete the chat"),
    SlashCommand("clear", "", "start a new chat; this one stays saved",
                 lambda session, ui, _: ui.open(new_chat(session)), ("new",), "New chat", "ctrl+n"),
    SlashCommand("tab", "[N|next|prev]", "open a new chat in a tab, or switch tabs", None, (), "New tab", "f4"),
    SlashCommand("close", "", "close this chat; it stays saved", None, title="Close the tab"),
    SlashCommand("copy", "[N] [code [K]]", "copy the last reply or message N, or its code", None, (),
                 "Copy the last reply"),
    SlashCommand("theme", "[NAME]", "choose colours", None, title="Theme"),
    SlashCommand("quit", "", "quit", lambda session, ui, _: ui.quit(), ("exit", "bye", "q"), "Quit", "ctrl+q"),
]
# fmt: on

#: The first commands of the palette. Other commands follow in the order of the table.
_FIRST = ("clear", "sessions", "model", "system", "set", "regen", "continue", "edit", "branch", "copy")
_RANKS = {name: rank for rank, name in enumerate(_FIRST)}
PALETTE = sorted(
    (command for command in COMMANDS if command.title), key=lambda command: _RANKS.get(command.name, len(_RANKS))
)

_BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
