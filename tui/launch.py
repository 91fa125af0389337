"""``localllm chat``: what is talked to and in which conversation, by the app or line by line."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import psutil

from localllm.cli.defaults import settle
from localllm.cli.generate import describe, generation_options, load_model, plan_shower
from localllm.cli.terminal import LoadStatus, is_terminal, say, short_count, visible_line, warn
from localllm.declared_options import CheckedOptions
from localllm.devices import gpu_memory
from localllm.errors import LocalLLMError, StoreError, UsageError
from localllm.kernels.cpu.host import available_memory
from localllm.library.find import model_path
from localllm.library.listing import demo_model, find_models, read_details
from localllm.llm import LLM
from localllm.loading import check_file
from localllm.progress import LoadPlan, LoadProgress
from localllm.settings import Settings
from localllm.tui.chat import settings as chat_settings
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.events import Choice
from localllm.tui.chat.session import ChatSession
from localllm.tui.chat.tools import Toolbox
from localllm.tui.line_mode import InputReader, LineChat
from localllm.tui.setup import ModelEntry, Setup
from localllm.tui.storage.chats import Store, default_path

#: Seconds that what is not saved yet is tried to be saved when the program ends.
_FLUSH_SECONDS = 5.0


@dataclass
class Launch:
    """What was asked for on the command line, for the app and for the plain chat.

    Attributes:
        arguments: the command line.
        store: where chats are kept; in memory, if the file cannot be used.
        notices: what there is to tell before anything else.
        conversation: a new one, or the one to go on with.
        model: what to load, as a command takes it; empty is the demo model.  It is the conversation's, unless that is
            gone.
        settings: those of the user's settings file.
        more: keywords of `LLM.stream_chat` beside the conversation's settings.
        toolbox: what models may call.
        question: the first message; None for none.
        sessions: the chats that were open in the end, of which the last one is gone on with.
    """

    arguments: argparse.Namespace
    store: Store
    notices: list[str]
    conversation: Conversation
    model: str
    settings: Settings
    more: dict[str, Any]
    toolbox: Toolbox = field(default_factory=Toolbox)
    question: str | None = None
    sessions: list[ChatSession] = field(default_factory=list)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Launch:
        """Raises:
        UsageError: a setting is out of range.
        SettingsError, ModelNotFoundError: see `localllm.cli.defaults.settle`.
        StoreError: there is no such chat to go on with.
        """
        question = _question(arguments)
        names_model = arguments.model is not None
        defaults = settle(arguments)
        notices: list[str] = []
        store = _store(arguments, notices)
        conversation = _conversation(arguments, store, notices)
        is_new = not len(conversation)
        # A chat goes on as it was, but for what the command line says.
        settings, more = _settings(arguments, defaults if is_new else Settings())
        model = "" if arguments.model is None else str(arguments.model)
        if names_model or is_new:
            conversation.model = model
        elif is_here(conversation.model, defaults.model_folders):
            model = conversation.model
        else:
            notices.append(
                f"the model of this chat, {conversation.model}, is not here any more: {model or 'the demo model'} "
                "replies now; /model chooses another one"
            )
        if arguments.system is not None:
            conversation.system = arguments.system
        elif is_new:
            conversation.system = defaults.system_prompt or ""
        conversation.settings = {**conversation.settings, **settings}
        if not is_new:
            c = conversation
            store.set(c.id, model=c.model, system=c.system, settings=c.settings)
        allowed = None if store.path is None else store.path.with_name("allowed-tools")
        toolbox = Toolbox(defaults.tools, allowed)
        return cls(arguments, store, notices, conversation, model, defaults, more, toolbox, question)

    def load(self, name: str, progress: LoadProgress | None = None, planned: LoadPlan | None = None) -> LLM:
        """Loads a model, with what the command line says of devices, context and threads.

        Args:
            name: as a command takes it; empty is the demo model.
            progress, planned: see `localllm.load`.

        Raises:
            LocalLLMError: see `localllm.load`.
        """
        return load_model(self.arguments, self._path(name), progress, planned)

    def check(self, name: str) -> None:
        """Reads a model's header to see whether it can be loaded.

        Raises:
            LocalLLMError: it cannot; see `localllm.loading.check_file`.
        """
        if (path := self._path(name)) is not None:
            check_file(path)

    def _path(self, name: str) -> str | None:
        path = model_path(name or None, self.settings.model_folders)
        return None if path is None else str(path)

    @property
    def when_full(self) -> Choice | None:
        """What is done when the context is full; None asks."""
        choice: Choice | Literal["ask"] = self.arguments.when_full
        return None if choice == "ask" else choice

    @property
    def history(self) -> Path | None:
        """The file that keeps what was typed."""
        return None if self.store.path is None else self.store.path.with_name("history")


def run(arguments: argparse.Namespace) -> int:
    """Chats as the command line asks."""
    if arguments.list_chats:
        return _list_chats()
    launch = Launch.of(arguments)
    try:
        is_plain = arguments.plain or not _has_screen()
        try:
            code = _run_plain(launch) if is_plain else int(_app().run(launch))
        finally:
            _save_the_rest(launch)
        if not arguments.quiet:
            _say_how_to_go_on(launch)
        return code
    finally:
        launch.toolbox.close()
        launch.store.close()


def is_here(model: str, folders: Iterable[Path]) -> bool:
    """Whether the model of a chat, as a command takes it, is on this machine; an empty name is the demo model."""
    try:
        path = model_path(model or None, folders)
    except LocalLLMError:
        return False
    return path is None or Path(path).exists()


def _save_the_rest(launch: Launch) -> None:
    """Saves what could not be saved while the chat ran, as where another program had locked the file."""
    for session in launch.sessions:
        if (reason := session.flush(_FLUSH_SECONDS)) is not None:
            warn(f"the end of the chat {session.conversation.title!r} could not be saved: {reason}")


def _say_how_to_go_on(launch: Launch) -> None:
    session = launch.sessions[-1]
    if launch.store.path is not None and session.is_saved and len(session.conversation):
        say(f"Continue this chat with: localllm chat --session {session.conversation.id}")


def _list_chats() -> int:
    """Prints the chats that are kept, the ones that were talked in last first."""
    store = Store(default_path())
    try:
        if store.notice is not None:
            warn(store.notice)
        found = store.sessions()
    finally:
        store.close()
    if not found:
        say("no chats yet: localllm chat begins one")
    for chat in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.updated))
        plural = "s" if chat.n_messages != 1 else " "
        print(f"{visible_line(chat.id)}  {when}  {chat.n_messages:>4} message{plural}  {visible_line(chat.title)}")
    return 0


def _has_screen() -> bool:
    return is_terminal(sys.stdin) and is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"


def _app() -> Any:
    """The module of the app, which is not imported for the plain chat."""
    try:
        return import_module("localllm.tui.app")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the chat app needs {error.name}, which is not installed: pip install textual, or chat with --plain"
        ) from None


def _run_plain(launch: Launch) -> int:
    arguments = launch.arguments
    for notice in launch.notices:
        warn(notice)

    def load(name: str) -> LLM:
        progress = LoadStatus(enabled=not arguments.quiet)
        try:
            llm = launch.load(name, progress, plan_shower(progress, arguments.quiet))
        finally:
            progress.close()
        if not arguments.quiet:
            describe(llm.info, verbose=arguments.verbose)
        return llm

    session = ChatSession(load(launch.model), launch.store, launch.conversation, launch.more, launch.toolbox)
    if (warning := session.mark_open()) is not None:
        warn(warning)
    lines = InputReader(launch.history)
    when_full = launch.when_full
    chat = LineChat(session, load, lines, check=launch.check, when_full=when_full, quiet=arguments.quiet)
    try:
        return chat.run(launch.question)
    finally:
        launch.sessions = [*chat.unsaved, chat.session]
        chat.close()


def _question(arguments: argparse.Namespace) -> str | None:
    """The first message, where one was given in the place of a file: several words that are the name of none."""
    given = arguments.model
    if given is None or len(str(given).split()) < 2 or os.path.lexists(given) or str(given).endswith(".gguf"):
        return None
    arguments.model = None
    return str(given)


def _settings(arguments: argparse.Namespace, defaults: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the command line sets: settings that are kept with the chat, and those that are not."""
    given = generation_options(arguments, defaults)
    CheckedOptions.of(given)  # complains before a model is loaded for nothing
    given["stop"] = list(given["stop"])
    unset: dict[str, Any] = {"stop": [], "logit_bias": {}, "ignore_eos": False, "max_tokens": None}
    given = {name: value for name, value in given.items() if name not in unset or value != unset[name]}
    kept = {name: value for name, value in given.items() if name in chat_settings.READERS}
    if arguments.prefix:
        kept["reply_prefix"] = arguments.prefix
    return kept, {name: value for name, value in given.items() if name not in kept}


def _store(arguments: argparse.Namespace, notices: list[str]) -> Store:
    try:
        store = Store(default_path())
    except StoreError as error:
        if arguments.session is not None or arguments.resume:
            raise
        notices.append(f"{error}; this chat is not saved")
        return Store.in_memory()
    if store.notice is not None:
        notices.append(store.notice)
    return store


def _conversation(arguments: argparse.Namespace, store: Store, notices: list[str]) -> Conversation:
    id_ = store.find(arguments.session) if arguments.session is not None else None
    if arguments.resume:
        id_ = store.latest()
        if id_ is None:
            notices.append("there is no chat to go on with yet: this is a new one")
    return Conversation() if id_ is None else store.load(id_)


def setup_of(launch: Launch) -> Setup:
    """What the app needs for a command line."""
    arguments, settings = launch.arguments, launch.settings

    return Setup(
        store=launch.store,
        conversation=launch.conversation,
        first_model=launch.model,
        load=launch.load,
        check=launch.check,
        list_models=lambda: list_models(settings.model_folders, arguments.device),
        memory=memory_in_use,
        more=launch.more,
        when_full=launch.when_full,
        history=None if launch.history is None else launch.history.with_suffix(".jsonl"),
        notices=tuple(launch.notices),
        theme=settings.theme,
        question=launch.question or "",
        toolbox=launch.toolbox,
    )


def list_models(folders: Sequence[Path], device: str) -> Iterator[ModelEntry]:
    """The models on this machine, with what is known of them; reads the headers of those that are new."""
    demo = demo_model()
    models = [*find_models(folders).models, *([] if demo is None else [demo])]
    available = available_memory() + gpu_memory(device)
    for model in read_details(models):
        details = model.details
        is_demo = demo is not None and model.path == demo.path
        yield ModelEntry(
            name=visible_line(model.name),
            path="" if is_demo else str(model.path),
            size=model.n_bytes,
            quantisation=(details and details.file_type) or "",
            parameters=short_count(details.n_parameters) if details and details.n_parameters else "",
            context=details.trained_context if details else None,
            fits=(details and details.fits(available)) or "",
            error=(details and details.error) or "",
        )


def memory_in_use() -> int:
    """Bytes of memory that this process has."""
    return int(psutil.Process().memory_info().rss)
