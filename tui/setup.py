"""What the app is built of: given by the command line, and by tests with a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from localllm.progress import LoadProgress
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.events import Choice
from localllm.tui.chat.model import ChatModel, Info
from localllm.tui.chat.tools import Toolbox
from localllm.tui.storage.chats import Store


class OpenInfo(Info, Protocol):
    """What the app shows of a model."""

    @property
    def device(self) -> str: ...
    @property
    def gpu_bytes(self) -> int: ...


class OpenModel(ChatModel, Protocol):
    """A model that the app has loaded."""

    @property
    def info(self) -> OpenInfo: ...


class Loader(Protocol):
    """Loads a model, and tells how far it is; what ``progress`` raises ends it."""

    def __call__(self, name: str, progress: LoadProgress) -> OpenModel:
        """``name`` is as a command takes it; empty for the demo model."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model to choose.

    Attributes:
        name: for people.
        path: what `Loader` takes.
        size: bytes of its files.
        quantisation: such as "Q4_K_M"; empty if it is not known, as what follows.
        parameters: such as "1.24B".
        context: tokens that it was trained on.
        fits: "yes", "with less context" or "no".
        error: why it cannot be run.
    """

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
    """What a `localllm.tui.app.ChatApp` is built of.  The functions may take their time: they run in threads.

    Attributes:
        store: where chats are kept.
        conversation: what is talked about first.
        first_model: what replies at first, as `Loader` takes it; None is the conversation's.
        load: loads models.
        check: reads as much of a model's file as tells whether it can be loaded, and raises where it cannot.
        list_models: the models to choose from.
        memory: bytes that are in use, GPUs' aside.
        more: keywords of `LLM.stream_chat` beside the conversations' settings.
        when_full: what is done when the context is full; None asks.
        history: the file with what was typed before; None for no file.
        notices: what there is to tell at first.
        theme: the name of a theme.
        question: the first message; empty for none.
        toolbox: what models may call.
    """

    store: Store
    load: Loader
    conversation: Conversation = field(default_factory=Conversation)
    first_model: str | None = None
    check: Callable[[str], None] = lambda name: None
    list_models: Callable[[], Iterable[ModelEntry]] = tuple
    memory: Callable[[], int] = lambda: 0
    more: Mapping[str, Any] = field(default_factory=dict)
    when_full: Choice | None = None
    history: Path | None = None
    notices: Sequence[str] = ()
    theme: str = "dark"
    question: str = ""
    toolbox: Toolbox = field(default_factory=Toolbox)
