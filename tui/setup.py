"""What the app is built of: given by the command line, and by tests with a model of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from localllm.errors import StoreError
from localllm.progress import LoadProgress
from localllm.tui.replies import ChatModel, Info
from localllm.tui.store import Store


class OpenInfo(Info, Protocol):
    """What the app shows of a model."""

    @property
    def device(self) -> str: ...


class OpenModel(ChatModel, Protocol):
    """A model that the app has loaded, and closes."""

    @property
    def info(self) -> OpenInfo: ...
    def close(self) -> None: ...


class Loader(Protocol):
    """Loads a model, and tells how far it is; what ``progress`` raises ends it."""

    def __call__(self, name: str, progress: LoadProgress) -> OpenModel:
        """``name`` is as a command takes it; empty for the demo model."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model to choose.

    Attributes:
        name: what `Loader` takes.
        size: bytes of its files.
        quantisation: such as "Q4_K_M"; empty if it is not known, as what follows.
        parameters: such as "1.24B".
        context: tokens that it was trained on.
        fits: "yes", "with less context" or "no".
        error: why it cannot be run.
    """

    name: str
    size: int
    quantisation: str = ""
    parameters: str = ""
    context: int | None = None
    fits: str = ""
    error: str = ""


class Opened(NamedTuple):
    """A store, and what there is to tell of how it was opened."""

    store: Store
    warning: str | None


@dataclass(frozen=True)
class Setup:
    """What a `localllm.tui.app.ChatApp` is built of.  The functions may take their time: they run in threads.

    Attributes:
        open_store: opens the file with the chats.
        load: loads models.
        list_models: the models to choose from.
        memory: bytes that are in use.
        history: the file with what was typed before; None for no file.
        model: the one to load; None for the one that the chat was with.
        session: the beginning of a chat's id, to go on with; "" for the latest one, None for a new one.
        system, settings: of new chats.
        theme: the name of a theme.
    """

    open_store: Callable[[], Opened]
    load: Loader
    list_models: Callable[[], Iterable[ModelEntry]] = tuple
    memory: Callable[[], int] = lambda: 0
    history: Path | None = None
    model: str | None = None
    session: str | None = None
    system: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    theme: str = "dark"


def open_store(path: Path) -> Opened:
    """The store in a file, or one in memory where that cannot be opened."""
    try:
        store = Store(path)
    except StoreError as error:
        return Opened(Store.in_memory(), f"{error}; chats are kept in memory alone, and are gone with the program")
    return Opened(store, store.notice)
