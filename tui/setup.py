"""Configuration of a chat, built by the command line, or by tests with a fake model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.agent_tools.toolbox import Toolbox
from localllm.options.types import LoadProgress
from localllm.tui.chat.context import ChatModel
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.events import Choice
from localllm.tui.chat.pieces import Rank, ranked
from localllm.tui.chat.session import ChatSession
from localllm.tui.storage.chats import Store

#: Loads the model with the given name, or the demo model if the name is empty. Progress is passed to a
#: `LoadProgress`; an exception raised there cancels loading.
Loader = Callable[..., ChatModel]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model in the list of models. ``path`` is the argument of `Loader`; unknown fields are empty."""

    name: str
    path: str
    size: int
    quantisation: str = ""
    parameters: str = ""
    context: int | None = None
    fits: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that the first chat offers to download. ``name`` is the argument of `Setup.pull` and of `Loader`."""

    name: str
    label: str


@dataclass(frozen=True)
class Setup:
    """Configuration of a `localllm.tui.app.ChatApp` or of line mode. Its functions may be slow."""

    store: Store
    load: Loader
    conversation: Conversation = field(default_factory=Conversation)
    first_model: str | None = None  # name of the first model; None: the model of the conversation
    # reads as much of a model file as is necessary to decide whether it can be loaded; raises if it cannot
    check: Callable[[str], None] = lambda name: None
    list_models: Callable[[], Iterable[ModelEntry]] = tuple
    # models to choose from before the first chat; None: the first model is loaded at once
    offers: Callable[[], Sequence[Offer]] | None = None
    # returns a label such as "Download it (2 GB)" if a name is the name of a model that can be downloaded
    download_label: Callable[[str], str | None] = lambda name: None
    # downloads a model that the user chose, and reports progress; an exception raised there cancels the download
    pull: Callable[[str, LoadProgress], object] = lambda name, progress: None
    memory: Callable[[], int] = lambda: 0  # bytes in use, without GPU memory
    # keyword arguments of `LLM.stream_chat` in addition to the conversation's settings
    more: Mapping[str, Any] = field(default_factory=dict)
    when_full: Choice | None = None  # action when the context is full; None: ask the user
    # file with the input history, or None; line mode uses a second file next to it
    history: Path | None = None
    notices: Sequence[str] = ()  # messages shown at the start
    theme: str = "dark"
    question: str = ""  # the first message; empty: no message
    toolbox: Toolbox = field(default_factory=Toolbox)
    rank: Rank = ranked
    # changed key bindings: command name to key
    keys: Mapping[str, str] = field(default_factory=dict)

    def session(self, model: ChatModel | None, conversation: Conversation) -> ChatSession:
        """Return a session for ``conversation``."""
        return ChatSession(model, self.store, conversation, self.more, self.toolbox, self.rank)
