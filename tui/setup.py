"""The parts of a chat: given by the command line, and by tests with a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.tui.chat.context import ChatModel
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.events import Choice
from localllm.tui.chat.pieces import Rank, ranked
from localllm.tui.chat.session import ChatSession
from localllm.tui.chat.tools import Toolbox
from localllm.tui.storage.chats import Store

#: Loads a model by the name that commands take, empty for the demo model, and tells a `LoadProgress` how far it is;
#: what that raises ends it.
Loader = Callable[..., ChatModel]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model to choose; ``path`` is what `Loader` takes; a field that is not known is empty."""

    name: str
    path: str
    size: int
    quantisation: str = ""
    parameters: str = ""
    context: int | None = None
    fits: str = ""
    error: str = ""


@dataclass(frozen=True)
class Setup:
    """The parts of a `localllm.tui.app.ChatApp`, and of line mode.  The functions may take their time."""

    store: Store
    load: Loader
    conversation: Conversation = field(default_factory=Conversation)
    first_model: str | None = None  # what replies at first, as `Loader` takes it; None is the conversation's
    # reads as much of a model's file as tells whether it can be loaded, and raises where it cannot
    check: Callable[[str], None] = lambda name: None
    list_models: Callable[[], Iterable[ModelEntry]] = tuple
    memory: Callable[[], int] = lambda: 0  # bytes that are in use, GPUs' aside
    # keywords of `LLM.stream_chat` beside the conversations' settings
    more: Mapping[str, Any] = field(default_factory=dict)
    when_full: Choice | None = None  # what is done when the context is full; None asks
    # the file with what was typed before, of which line mode has another one beside it; None for no file
    history: Path | None = None
    notices: Sequence[str] = ()  # what there is to tell at first
    theme: str = "dark"
    question: str = ""  # the first message; empty for none
    toolbox: Toolbox = field(default_factory=Toolbox)
    rank: Rank = ranked
    # of commands, by their names, where they are not the table's
    keys: Mapping[str, str] = field(default_factory=dict)

    def session(self, model: ChatModel | None, conversation: Conversation) -> ChatSession:
        """The session that continues a conversation."""
        return ChatSession(model, self.store, conversation, self.more, self.toolbox, self.rank)
