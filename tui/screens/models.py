"""The list of models on this machine, and the loading of one model by a separate thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, Protocol, TypeVar

from textual.app import ComposeResult
from textual.widgets import Static
from textual.widgets.option_list import Option

from localllm.console import quantity
from localllm.errors import LocalLLMError
from localllm.tui.base_app import BaseApp
from localllm.tui.chat.context import ChatModel, name_of
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.session import ChatSession
from localllm.tui.screens.dialogs import Choose, Find, rows
from localllm.tui.setup import ModelEntry
from localllm.tui.text import sentence
from localllm.tui.widgets.status import StatusBar

#: Columns of the list, most important first: a narrow screen cuts the last columns.
_HEAD = ("model", "fits", "size", "format", "params", "context")

#: Minimum number of characters of a model's name on the narrowest screen.
_SHORTEST_NAME = 12


def _cut_middle(name: str, length: int) -> str:
    """Return a name of at most ``length`` characters, cut in the middle: names of models often differ at the end."""
    if len(name) <= length:
        return name
    end = length // 2
    return f"{name[: length - end - 1]}…{name[-end:]}"


class ModelsScreen(Find[ModelEntry]):
    """The list of models. The result is the path of the selected model, or the typed text."""

    def __init__(self, list_models: Callable[[], Iterable[ModelEntry]], current: str | None) -> None:
        """``current`` is the path of the loaded model."""
        field = "Search, or a path to a GGUF file, or ORG/REPO[:QUANT]"
        super().__init__("Models", field, note="looking for models …")
        self._list_models = list_models
        self._current = current
        self._head = Static(classes="head")
        self._listing: asyncio.Task[list[ModelEntry]] | None = None

    def content(self) -> ComposeResult:
        yield self._field
        yield self._head
        yield self._list
        yield self._note

    async def find(self, text: str) -> list[ModelEntry]:
        if self._listing is None:
            self._listing = asyncio.create_task(self.app.in_thread(lambda: list(self._list_models())))
        entries = await asyncio.shield(self._listing)
        return [e for e in entries if all(word in e.name.casefold() for word in text.casefold().split())]

    def options(self) -> list[Option]:
        cells = [_HEAD, *map(self._row, self.found)]
        fits, size = (max(len(row[column]) for row in cells) for column in (1, 2))
        # Name, fit and size are visible at any width. An option has one column of padding on both sides.
        room = self._list.scrollable_content_region.width - fits - size - 6
        lines = rows([(_cut_middle(name, max(_SHORTEST_NAME, room)), *row) for name, *row in cells])
        self._head.update(lines[0])
        return [Option(line) for line in lines[1:]]

    def on_resize(self) -> None:
        super().on_resize()
        self.refresh_list()

    def first(self, before: int) -> int:
        return next((i for i, entry in enumerate(self.found) if entry.path == self._current), 0)

    def _row(self, entry: ModelEntry) -> tuple[str, ...]:
        return (
            entry.name,
            ("cannot be run" if entry.error else entry.fits or "-") + (" (loaded)" * (entry.path == self._current)),
            quantity(entry.size, "B"),
            entry.quantisation or "-",
            entry.parameters or "-",
            "-" if entry.context is None else f"{entry.context:,}",
        )

    def note(self, entry: ModelEntry | None) -> str:
        return entry.error if entry else "no model here: type a path, or download one with localllm pull ORG/REPO"

    def result(self, entry: ModelEntry | None) -> str | None:
        return entry.path if entry else self._field.value.strip() or None


class Cancelled(Exception):
    """Loading was cancelled."""


class Loading:
    def __init__(self, name: str) -> None:
        self.name = name
        # activity, and its share of completion or None; read by any thread
        self.progress: tuple[str, float | None] = ("loading the model", None)
        self.cancelled = threading.Event()  # set by any thread; loading stops at its next progress report
        self.formats = ""  # see `localllm.loading.progress.ShowsFormats`

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Record progress, as the callback of loading. Raises Cancelled."""
        if self.cancelled.is_set():
            raise Cancelled
        if stage == "weights":
            self.progress = ("loading weights", done / total if total else None)
        elif stage in _DOWNLOADS:
            shown = f"{_DOWNLOADS[stage]} {quantity(done, 'B')} of {quantity(total, 'B')}"
            self.progress = (shown, done / total if total else None)
        elif done < total:
            formats = f" for {self.formats}" if self.formats else ""
            self.progress = (f"compiling kernels{formats}: {total - done} left", None)


#: Words for the stages of a download.
_DOWNLOADS = {"download": "downloading", "check": "checking"}
#: Interval in seconds between updates of the loading progress.
_PERIOD = 0.1

#: New messages wait for the model ("loading"), are sent ("loaded"), or are refused because loading failed ("none").
ModelState = Literal["loading", "loaded", "none"]


class OpenChat(Protocol):
    """The part of a chat's screen that the loader and commands for all chats use."""

    session: ChatSession
    status: StatusBar

    async def end_turn(self) -> None:
        """Stop the current turn, and wait until it has ended."""

    async def open(self, conversation: Conversation) -> None:
        """Show ``conversation`` instead of the current one."""

    async def refresh_all(self) -> None:
        """Redraw the conversation and the status line."""

    def send_pending(self) -> None:
        """Send the message that waits for the model, if any."""


Chat = TypeVar("Chat", bound=OpenChat)


class ModelLoader(Generic[Chat]):
    """Loads the model that all chats share. Only one model is loaded at a time, because two may not fit in memory."""

    def __init__(self, app: BaseApp) -> None:
        self.state: ModelState = "loading"
        # the loaded model and its name, or None; the name of the demo model is empty
        self.model: ChatModel | None = None
        self.name: str | None = None
        self.chats: list[Chat] = []  # the open chats
        self.n_comparisons = 0  # running comparisons (/compare), until whose end new messages wait
        self._app = app
        self._loading: Loading | None = None
        self._downloads: set[str] = set()  # names that the user chose to download
        self._one_at_a_time = asyncio.Lock()

    def cancel(self) -> None:
        if self._loading is not None:
            self._loading.cancelled.set()

    async def change(self, name: str) -> None:
        """Replace the model. The old model stays loaded if the new file cannot be read."""
        if self.model is not None and self.name == name:
            self._app.notify(f"{_title(name)} is already loaded")
            return
        if self.state != "none":
            try:
                await self._app.in_thread(self._app.setup.check, name)
            except LocalLLMError as error:
                back = "Back" if self.model is None else f"Back to {_title(self.name)}"
                label = await self._app.in_thread(self._app.setup.download_label, name)
                download = [] if label is None else [("download", label)]
                answer = await self._ask(name, error, *download, ("back", back), _OTHER)
                if answer == "other":
                    await self.choose()
                if answer != "download":
                    return
                self._downloads.add(name)
        self._app.keys.go_on()
        await self.load(name)

    async def load(self, name: str, *, keeps: bool = True) -> None:
        """Replace the loaded or loading model. If that fails, let the user choose what to do.

        ``name`` is the argument of a command, empty for the demo model. It is saved with the chats if ``keeps``.
        """
        self.cancel()
        loading = self._loading = Loading(name)
        self.state = "loading"
        async with self._one_at_a_time:
            before = self.name
            for chat in self.chats:
                await chat.end_turn()
            await self._close()
            error = await self._load_now(loading, name if keeps else None)
        if error is not None:
            await self._ask_after_failure(name, before, error)
            self.send_pending()

    async def _load_now(self, loading: Loading, saved_name: str | None) -> Exception | None:
        """Load a model and pass it to all chats. Returns the error if loading fails, otherwise None."""
        if loading.cancelled.is_set():
            return None
        thread = asyncio.create_task(self._app.in_thread(self._pull_and_load, loading))
        while not thread.done():
            text, share = loading.progress
            self._show(activity=text, progress=share)
            await asyncio.wait([thread], timeout=_PERIOD)
        try:
            model = thread.result()
        except Exception as error:
            if loading.cancelled.is_set():
                return None
            self.state = "none"
            self._show(activity="", progress=None)
            return error
        if loading.cancelled.is_set():
            await self._app.offload(model.close)
            return None
        self.model, self.name = model, loading.name
        # The model has a million permanent objects. Without freezing, a full collection would block keys for 0.1 s.
        gc.freeze()
        for chat in self.chats:
            await self._app.offload(chat.session.use_model, model, saved_name)
        try:
            for chat in self.chats:
                await chat.refresh_all()
        finally:
            if not loading.cancelled.is_set():  # otherwise the app is quitting, or another model is loading
                self.state, info = "loaded", model.info
                shown = {"model": name_of(model), "device": info.device, "gpu_memory": info.gpu_bytes}
                self._show(activity="", progress=None, **shown)  # only now: earlier, /continue would be refused
                self.send_pending()
        return None

    def _pull_and_load(self, loading: Loading) -> ChatModel:
        if loading.name in self._downloads:
            self._app.setup.pull(loading.name, loading)
        return self._app.setup.load(loading.name, loading)

    def _show(self, **changes: Any) -> None:
        for chat in self.chats:
            chat.status.change(**changes)

    def send_pending(self) -> None:
        """Send the messages that wait for the model, in all chats."""
        for chat in self.chats:
            chat.send_pending()

    async def _close(self) -> None:
        model, self.model, self.name = self.model, None, None
        self._show(model="", device="", gpu_memory=0)
        if model is not None:
            gc.unfreeze()
            for chat in self.chats:
                await self._app.offload(chat.session.use_model, None, None)
            await self._app.offload(model.close)

    async def _ask_after_failure(self, name: str, before: str | None, error: Exception) -> None:
        if before is None and name in self._downloads:
            before = ""  # without a network the demo model still works
        can_go_back = before is not None and before != name
        back = [("back", f"Back to {_title(before)}")] if can_go_back else []
        none = ("none", "Continue without a model: the chat can be read")
        answer = await self._ask(name, error, *back, _OTHER, ("again", "Try again"), none)
        if answer == "other":
            await self.choose()
        elif answer == "again":
            await self.change(name)
        elif before is not None and can_go_back and answer != "none":  # Esc also restores the old model
            await self.load(before)

    async def _ask(self, name: str, error: Exception, *choices: tuple[str, str]) -> str | None:
        title = f"{name or 'The demo model'} cannot be loaded"
        return await self._app.push_screen_wait(Choose(title, sentence(error), choices))

    async def tell_difference(self, saved: str) -> None:
        """Notify the user if an opened chat was saved with another model."""
        if self.name is None or self.name == saved:
            return
        try:
            await self._app.in_thread(self._app.setup.check, saved)
        except LocalLLMError:
            here = f"the model of this chat, {saved}, is not available: {_title(self.name)} replies now"
            self._app.notify(here, severity="warning")
        else:
            text = f"this chat used {_title(saved)}: {_title(self.name)} replies now"
            self._app.notify(f"{text}, /model changes that")

    async def choose_first(self, first: str) -> None:
        """Let the user choose a model to download before the first chat. Otherwise load ``first``."""
        assert self._app.setup.offers is not None
        offers = await self._app.in_thread(self._app.setup.offers)
        name = None
        if offers:
            choices = [
                *((offer.name, offer.label) for offer in offers),
                (_KEEP, f"Chat with {_title(first)}"),
                _OTHER,
            ]
            answer = await self._app.push_screen_wait(Choose("Which model?", _OFFER, choices))
            if answer == "other":
                name = await self._app.push_screen_wait(ModelsScreen(self._app.setup.list_models, self.name))
            elif answer != _KEEP:
                name = answer
                self._downloads.update([answer] if answer else [])
        await self.load(first if name is None else name)

    async def choose(self) -> None:
        name = await self._app.push_screen_wait(ModelsScreen(self._app.setup.list_models, self.name))
        if name is not None:
            await self.change(name)


_OTHER = ("other", "Choose another model")
#: The choice to download nothing.
_KEEP = "keep"
_OFFER = "Only the small demo model is on this machine. Choose a model to download it. Esc keeps the demo model."


def _title(name: str | None) -> str:
    return name or "the demo model"
