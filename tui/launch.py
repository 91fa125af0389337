"""``localllm chat``: what is talked to and in which conversation, by the app or line by line."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from localllm.cli.defaults import settle
from localllm.cli.generate import describe, generation_options, load_model, plan_shower
from localllm.cli.terminal import LoadStatus, is_terminal, warn
from localllm.errors import StoreError, UsageError
from localllm.llm import LLM
from localllm.options import Request
from localllm.progress import LoadPlan, LoadProgress
from localllm.settings import Settings
from localllm.tui import options
from localllm.tui.conversation import Conversation
from localllm.tui.lines import Lines
from localllm.tui.plain import PlainChat
from localllm.tui.session import ChatSession
from localllm.tui.store import Store, default_path


@dataclass
class Launch:
    """What was asked for on the command line, for the app and for the plain chat.

    Attributes:
        arguments: the command line.
        store: where chats are kept; in memory, if the file cannot be used.
        notices: what there is to tell before anything else.
        conversation: a new one, or the one to go on with; its ``model`` is what to load.
        settings: those of the user's settings file.
        more: keywords of `LLM.stream_chat` beside the conversation's settings.
    """

    arguments: argparse.Namespace
    store: Store
    notices: list[str]
    conversation: Conversation
    settings: Settings
    more: dict[str, Any]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Launch:
        """Raises:
        UsageError: a setting is out of range.
        SettingsError, ModelNotFoundError: see `localllm.cli.defaults.settle`.
        StoreError: there is no such chat to go on with.
        """
        names_model = arguments.model is not None
        defaults = settle(arguments)
        notices: list[str] = []
        store = _store(arguments, notices)
        conversation = _conversation(arguments, store, notices)
        is_new = not len(conversation)
        # A chat goes on as it was, but for what the command line says.
        settings, more = _settings(arguments, defaults if is_new else Settings())
        if names_model or is_new:
            conversation.model = "" if arguments.model is None else str(arguments.model)
        elif conversation.model and not Path(conversation.model).exists():
            notices.append(f"the chat's model {conversation.model} is not there any more: the demo model replies")
            conversation.model = ""
        if arguments.system is not None:
            conversation.system = arguments.system
        elif is_new:
            conversation.system = defaults.system_prompt or ""
        conversation.settings = {**conversation.settings, **settings}
        if not is_new:
            c = conversation
            store.set(c.id, model=c.model, system=c.system, settings=c.settings)
        return cls(arguments, store, notices, conversation, defaults, more)

    def load(self, path: str, progress: LoadProgress | None = None, planned: LoadPlan | None = None) -> LLM:
        """Loads a model, with what the command line says of devices, context and threads.

        Args:
            path: its file; empty is the demo model.
            progress, planned: see `localllm.load`.

        Raises:
            LocalLLMError: see `localllm.load`.
        """
        return load_model(self.arguments, path or None, progress, planned)

    @property
    def history(self) -> Path | None:
        """The file that keeps what was typed."""
        return None if self.store.path is None else self.store.path.with_name("history")


def run(arguments: argparse.Namespace) -> int:
    """Chats as the command line asks."""
    launch = Launch.of(arguments)
    try:
        if arguments.plain or not _has_screen():
            return _run_plain(launch)
        return int(_app().run(launch))
    finally:
        launch.store.close()


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

    def load(path: str) -> LLM:
        progress = LoadStatus(enabled=not arguments.quiet)
        try:
            llm = launch.load(path, progress, plan_shower(progress, arguments.quiet))
        finally:
            progress.close()
        if not arguments.quiet:
            describe(llm.info, verbose=arguments.verbose)
        return llm

    session = ChatSession(load(launch.conversation.model), launch.store, launch.conversation, launch.more)
    when_full = None if arguments.when_full == "ask" else arguments.when_full
    chat = PlainChat(session, load, Lines(launch.history), when_full=when_full, quiet=arguments.quiet)
    return chat.run()


def _settings(arguments: argparse.Namespace, defaults: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the command line sets: settings that are kept with the chat, and those that are not."""
    given = generation_options(arguments, defaults)
    Request.from_options(given)  # complains before a model is loaded for nothing
    given["stop"] = list(given["stop"])
    unset: dict[str, Any] = {"stop": [], "logit_bias": {}, "ignore_eos": False, "max_tokens": None}
    given = {name: value for name, value in given.items() if name not in unset or value != unset[name]}
    kept = {name: value for name, value in given.items() if name in options.READERS}
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
