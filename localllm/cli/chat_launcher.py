"""Starts the chat: selects model and conversation, and runs the app or the plain line mode."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

import localllm
from localllm.agent_tools.toolbox import Toolbox
from localllm.catalog.find import model_path
from localllm.catalog.listing import demo_model, find_models, read_details
from localllm.catalog.pull import pull
from localllm.cli.commands.generate import describe, generation_options, load_model, plan_reporter
from localllm.cli.defaults import apply_settings
from localllm.cli.interrupt import INTERRUPTED
from localllm.console import LoadStatus, is_terminal, quantity, say, short_count, visible_line, warn
from localllm.errors import HubError, LocalLLMError, StoreError, UsageError
from localllm.kernels.cpu.host import available_memory
from localllm.llm import LLM
from localllm.loading.devices import gpu_memory
from localllm.loading.load import check_file
from localllm.loading.progress import LoadPlan
from localllm.options.declared import CheckedOptions
from localllm.options.settings import Settings, skills_folder
from localllm.options.types import LoadProgress
from localllm.tui.chat import settings as chat_settings
from localllm.tui.chat.context import ChatModel
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.pieces import ranked, ranked_by_vectors
from localllm.tui.chat.session import ChatSession
from localllm.tui.line_mode import InputReader, LineChat
from localllm.tui.setup import ModelEntry, Offer, Setup
from localllm.tui.storage.chats import Store, default_path

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Folder of evaluated prompts, next to the chats.
PROMPT_CACHE = "prompt-cache"

#: Abilities that an offer mentions.
MEDIA = ("images", "audio")

#: Maximum seconds to retry saving when the program ends.
_FLUSH_SECONDS = 5.0


def setup_of(arguments: argparse.Namespace, store: Store, notices: list[str]) -> Setup:
    """Return the parts of the chat that the command line describes.  ``notices``: collects messages for the start."""
    question = _question(arguments)
    names_model = arguments.model is not None
    defaults = apply_settings(arguments)
    conversation, folders = _conversation(arguments, store, notices), defaults.model_folders
    model = "" if arguments.model is None else str(arguments.model)
    if names_model or not len(conversation):
        conversation.model = model
    elif is_here(conversation.model, folders):
        model = conversation.model
    else:
        notices.append(
            f"the model of this chat, {conversation.model}, is no longer on this machine: "
            f"{model or 'the demo model'} replies instead; /model selects another model"
        )
    more = _configure(conversation, arguments, defaults, store)

    def next_to_chats(name: str) -> Path | None:
        return None if store.path is None else store.path.with_name(name)

    if arguments.prompt_cache is None and not arguments.no_prompt_cache:
        arguments.prompt_cache = next_to_chats(PROMPT_CACHE)

    def path(name: str) -> str | None:
        file = model_path(name or None, folders)
        return None if file is None else str(file)

    def load(name: str, progress: LoadProgress | None = None, planned: LoadPlan | None = None) -> LLM:
        return load_model(arguments, path(name), progress, planned)

    def check(name: str) -> None:
        if (file := path(name)) is not None:
            check_file(file)

    def embed(texts: list[str]) -> NDArray[np.float32]:
        with localllm.load(path(defaults.embedding_model or ""), device=arguments.device) as llm:
            return llm.embed(texts, truncate=True)

    return Setup(
        store=store,
        conversation=conversation,
        first_model=model,
        load=load,
        check=check,
        list_models=lambda: list_models(folders, arguments.device),
        offers=None if names_model or model or question or not is_first_start(store, folders) else offers,
        download_label=download_label,
        pull=pull,
        memory=lambda: int(psutil.Process().memory_info().rss),
        more=more,
        when_full=None if arguments.when_full == "ask" else arguments.when_full,
        history=next_to_chats("history.jsonl"),
        notices=tuple(notices),
        theme=defaults.theme,
        question=question,
        keys=defaults.keys,
        rank=ranked if defaults.embedding_model is None else ranked_by_vectors(embed),
        toolbox=Toolbox(defaults.tools, next_to_chats("allowed-tools"), skills_folder()),
    )


def run(arguments: argparse.Namespace) -> int | None:
    """Runs the chat of a command line, and returns the exit code."""
    if arguments.list_chats:
        return _list_chats()
    notices: list[str] = []
    sessions: list[ChatSession] = []
    with closing(_store(arguments, notices)) as store, ExitStack() as toolbox:
        setup = setup_of(arguments, store, notices)
        toolbox.callback(setup.toolbox.close)
        has_screen = is_terminal(sys.stdin) and is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"
        is_plain = arguments.plain or not has_screen
        try:
            code = _run_plain(arguments, setup, sessions) if is_plain else int(_app().run(setup, sessions))
        finally:
            _save_unsaved(sessions)
        if not arguments.quiet:
            _print_how_to_continue(sessions[-1])
        return code


def is_first_start(store: Store, folders: Sequence[Path]) -> bool:
    """Return whether there is no saved chat, and no model on this machine except the demo model."""
    return not store.sessions(limit=1) and not find_models(folders).models


def offers() -> list[Offer]:
    """Return models to download that fit this machine. Measures its memory bandwidth, in a second or two."""
    from localllm.catalog.suggestions import suggest_here  # imported here because only the first start needs it

    models = []
    for suggestion in suggest_here("chat"):
        model, speed = suggestion.model, suggestion.tokens_per_s
        facts = [quantity(model.n_bytes(suggestion.format), "B")]
        facts += [] if speed is None else [f"about {speed:.0f} tokens/s"]
        facts += [f"takes {' and '.join(kinds)}"] if (kinds := [a for a in model.abilities if a in MEDIA]) else []
        models.append(Offer(model.name, f"{model.name}: {', '.join(facts)}"))
    return models


def download_label(name: str) -> str | None:
    """Return a label for downloading a model that is not on this machine; None if its name cannot be on the hub."""
    from localllm.catalog.hub_names import HubName  # imported here because most chats download nothing
    from localllm.catalog.known_models import available_bytes, known_model

    if HubName.parse(name) is not None:
        return None if os.path.lexists(name) else "Download it from the hub"
    if (known := known_model(name)) is None:
        return None
    model, format = known
    if format is None or format not in model.formats:
        format = model.format_for(available_bytes())
    return f"Download it ({quantity(model.n_bytes(format), 'B')})"


def is_here(model: str, folders: Iterable[Path]) -> bool:
    """Return whether a chat's model is on this machine.  An empty name is the demo model."""
    try:
        path = model_path(model or None, folders)
    except LocalLLMError:
        return False
    return path is None or Path(path).exists()


def _save_unsaved(sessions: list[ChatSession]) -> None:
    """Saves messages that could not be saved earlier, for example because another program had locked the file."""
    for session in sessions:
        if (reason := session.saver.flush(_FLUSH_SECONDS)) is not None:
            warn(f"the end of the chat {session.conversation.title!r} could not be saved: {reason}")


def _print_how_to_continue(session: ChatSession) -> None:
    if session.store.path is not None and session.saver.is_saved and len(session.conversation):
        say(f"Continue this chat with: localllm chat --session {session.conversation.id}")


def _list_chats() -> int:
    """Prints the saved chats, most recently used first."""
    with closing(Store(default_path())) as store:
        chats = store.sessions()
    if not chats:
        say("no chats yet: localllm chat starts one")
    for chat in chats:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.updated))
        plural = "s" if chat.n_messages != 1 else " "
        print(f"{visible_line(chat.id)}  {when}  {chat.n_messages:>4} message{plural}  {visible_line(chat.title)}")
    return 0


def _app() -> Any:
    """Import the app's module, which the plain chat does not need."""
    try:
        from localllm.tui import app
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the chat app needs {error.name}, which is not installed: pip install textual, or chat with --plain"
        ) from None
    return app


def _run_plain(arguments: argparse.Namespace, setup: Setup, sessions: list[ChatSession]) -> int:
    for notice in setup.notices:
        warn(notice)

    def load(name: str) -> ChatModel:
        with closing(LoadStatus(enabled=not arguments.quiet)) as progress:
            llm = cast(LLM, setup.load(name, progress, plan_reporter(progress, arguments.quiet)))
        if not arguments.quiet:
            describe(llm.info, verbose=arguments.verbose)
        return llm

    name = setup.first_model or ""
    try:
        if setup.offers is not None and is_terminal(sys.stdin) and is_terminal(sys.stderr):
            name = setup.conversation.model = _offered(setup.offers(), quiet=arguments.quiet)
    except KeyboardInterrupt:
        return INTERRUPTED
    session = setup.session(load(name), setup.conversation)
    if (warning := session.mark_open()) is not None:
        warn(warning)
    lines = InputReader(setup.history and setup.history.with_suffix(""))
    chat = LineChat(session, load, lines, check=setup.check, when_full=setup.when_full, quiet=arguments.quiet)
    try:
        chat.run(setup.question)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        sessions += [*chat.unsaved, chat.session]
        chat.close()
    return 0


def _offered(offers: Sequence[Offer], *, quiet: bool) -> str:
    """Let the user choose and download a model before the first chat. Returns its name, or "" for the demo model."""
    from localllm.cli.commands.pull import download  # imported here because most chats download nothing

    if not offers:
        return ""
    say("Only the small demo model is on this machine. A number downloads a model, Enter keeps the demo model:")
    for i, offer in enumerate(offers, 1):
        say(f"  {i}  {offer.label}")
    while True:
        try:
            answer = input("> ").strip()
        except EOFError:
            return ""
        if not answer:
            return ""
        if answer.isdecimal() and 1 <= int(answer) <= len(offers):
            name = offers[int(answer) - 1].name
            break
        say(f"write a number from 1 to {len(offers)}, or nothing")
    try:
        download(name, quiet=quiet)
    except HubError as error:
        warn(f"{error}; the demo model replies instead")
        return ""
    return name


def _configure(
    conversation: Conversation, arguments: argparse.Namespace, defaults: Settings, store: Store
) -> dict[str, Any]:
    """Change the settings of a chat, and return the settings that are not stored with it.

    A chat with messages keeps its settings, unless the command line changes them.
    """
    c, is_new = conversation, not len(conversation)
    settings, more = _settings(arguments, defaults if is_new else Settings())
    if arguments.system is not None:
        c.system = arguments.system
    elif is_new:
        c.system = defaults.system_prompt or ""
    c.settings = {**c.settings, **settings}
    if arguments.folder is not None:
        c.settings = chat_settings.with_setting(c.settings, "folder", arguments.folder)
    if not is_new:
        store.set(c.id, model=c.model, system=c.system, settings=c.settings)
    return more


def _question(arguments: argparse.Namespace) -> str:
    """Return the first message: the second word, or the first word if it contains spaces and is not a file."""
    model, question = arguments.model, arguments.question
    if question is None and model and len(model.split()) > 1 and not os.path.lexists(model) and model[-5:] != ".gguf":
        arguments.model, question = None, model
    if (question or "").endswith(".gguf"):
        raise UsageError("a model is named twice: remove one of the names")
    return question or ""


def _settings(arguments: argparse.Namespace, defaults: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the command line's settings that are stored with the chat, and the other settings."""
    values = generation_options(arguments, defaults)
    CheckedOptions.of(values)  # raises errors before the model is loaded
    values["stop"] = list(values["stop"])
    unset: dict[str, Any] = {"stop": [], "logit_bias": {}, "ignore_eos": False}
    unset |= {"max_tokens": None, "reasoning_budget": None}
    values = {name: value for name, value in values.items() if name not in unset or value != unset[name]}
    stored = {name: value for name, value in values.items() if name in chat_settings.READERS}
    if arguments.prefix:
        stored["reply_prefix"] = arguments.prefix
    return stored, {name: value for name, value in values.items() if name not in stored}


def _store(arguments: argparse.Namespace, notices: list[str]) -> Store:
    try:
        return Store(default_path())
    except StoreError as error:
        if arguments.session is not None or arguments.resume:
            raise
        notices.append(f"{error}; this chat is not saved")
        return Store(None)


def _conversation(arguments: argparse.Namespace, store: Store, notices: list[str]) -> Conversation:
    id_ = store.find(arguments.session) if arguments.session is not None else None
    if arguments.resume:
        id_ = next((chat.id for chat in store.sessions(limit=1)), None)
        if id_ is None:
            notices.append("there is no chat to continue yet: this is a new chat")
    return Conversation() if id_ is None else store.load(id_)


def list_models(folders: Sequence[Path], device: str) -> Iterator[ModelEntry]:
    """Yield the models on this machine with their properties.  Reads the headers of new files."""
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
            fits=details.verdict(available) if details else "",
            error=(details and details.error) or "",
        )
