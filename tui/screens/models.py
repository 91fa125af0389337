"""Models: which are on this machine and whether they fit, and the one that is being loaded, by its own thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from textual.app import ComposeResult
from textual.widgets import Static
from textual.widgets.option_list import Option

from localllm.console import quantity
from localllm.errors import LocalLLMError
from localllm.tui.base_app import BaseApp
from localllm.tui.chat.context import ChatModel, name_of
from localllm.tui.screens.dialogs import Choose, Find, rows
from localllm.tui.setup import ModelEntry
from localllm.tui.text import sentence

if TYPE_CHECKING:
    from localllm.tui.screens.chat import ChatScreen

#: Columns that are cut where the screen is narrow stand last.
_HEAD = ("model", "fits", "size", "format", "params", "context")


#: Characters of a model's name that are shown on the narrowest screen.
_SHORTEST_NAME = 12


def _cut_middle(name: str, length: int) -> str:
    """Return a name of at most ``length`` characters; names of models often differ at the end."""
    if len(name) <= length:
        return name
    end = length // 2
    return f"{name[: length - end - 1]}…{name[-end:]}"


class ModelsScreen(Find[ModelEntry]):
    """The models to choose from; the result is the path of one, or what was typed."""

    def __init__(self, list_models: Callable[[], Iterable[ModelEntry]], current: str | None) -> None:
        """``current`` is the path of the model that is loaded."""
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
        # Name, fit and size are visible in any width; an option has a column of padding on both sides.
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
        return entry.error if entry else "no model here: type a path, or get one with localllm pull ORG/REPO"

    def result(self, entry: ModelEntry | None) -> str | None:
        return entry.path if entry else self._field.value.strip() or None


class Cancelled(Exception):
    """Loading was ended by whoever began it."""


class Loading:
    """How far loading one model is."""

    def __init__(self, name: str) -> None:
        self.name = name
        # what is being done, and the share that is done if it is known; any thread may read it
        self.progress: tuple[str, float | None] = ("loading the model", None)
        self.cancelled = threading.Event()  # any thread may set it: loading ends at its next report
        self.formats = ""  # see `localllm.loading.progress.ShowsFormats`

    def __call__(self, stage: str, done: int, total: int) -> None:
        """The progress callback of loading.  Raises Cancelled."""
        if self.cancelled.is_set():
            raise Cancelled
        if stage == "weights":
            self.progress = ("loading weights", done / total if total else None)
        elif done < total:
            what = f" for {self.formats}" if self.formats else ""
            self.progress = (f"compiling kernels{what}: {total - done} left", None)


#: Seconds between two looks at how far loading is.
_PERIOD = 0.1


#: A message that is sent now waits for the model, is replied to, or is refused as loading failed.
ModelState = Literal["loading", "loaded", "none"]


class ModelLoader:
    """One model at a time for all chats, for two may not fit."""

    def __init__(self, app: BaseApp) -> None:
        self.state: ModelState = "loading"
        # model, name: the one that is loaded, and its name, empty for the demo model; None if none is
        self.model: ChatModel | None = None
        self.name: str | None = None
        self.chats: list[ChatScreen] = []  # those that are open
        self._app = app
        self._loading: Loading | None = None
        self._one_at_a_time = asyncio.Lock()

    def cancel(self) -> None:
        if self._loading is not None:
            self._loading.cancelled.set()

    async def change(self, name: str) -> None:
        """Loads a model in the place of the one before, which stays where the file of the new one cannot be read."""
        if self.model is not None and self.name == name:
            self._app.notify(f"{_title(name)} is loaded already")
            return
        if self.state != "none":
            try:
                await self._app.in_thread(self._app.setup.check, name)
            except LocalLLMError as error:
                back = "Back" if self.model is None else f"Back to {_title(self.name)}"
                if await self._ask(name, error, ("back", back), _OTHER) == "other":
                    await self.choose()
                return
        self._app.keys.go_on()
        await self.load(name)

    async def load(self, name: str, *, keeps: bool = True) -> None:
        """Loads a model in the place of the one before, or of one that is being loaded; where that fails, asks.

        ``name`` is as a command takes it, empty for the demo model; it is saved with the chats if ``keeps``.
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
            self._go_on()

    async def _load_now(self, loading: Loading, kept: str | None) -> Exception | None:
        """Loads a model and lets it reply; returns why it cannot be loaded, unless that was cancelled."""
        if loading.cancelled.is_set():
            return None
        thread = asyncio.create_task(self._app.in_thread(self._app.setup.load, loading.name, loading))
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
        # It has a million objects that stay: to look through all of them takes a tenth of a second without a key.
        gc.freeze()
        for chat in self.chats:
            await self._app.offload(chat.session.use_model, model, kept)
        try:
            for chat in self.chats:
                await chat.refresh_all()
        finally:
            if not loading.cancelled.is_set():  # else the app ends, or another model is to be loaded
                self.state, info = "loaded", model.info
                shown = {"model": name_of(model), "device": info.device, "gpu_memory": info.gpu_bytes}
                self._show(activity="", progress=None, **shown)  # only now, as /continue is refused before
                self._go_on()
        return None

    def _show(self, **changes: Any) -> None:
        for chat in self.chats:
            chat.status.change(**changes)

    def _go_on(self) -> None:
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
        can_go_back = before is not None and before != name
        back = [("back", f"Back to {_title(before)}")] if can_go_back else []
        none = ("none", "Go on without a model: the chat can be read")
        chosen = await self._ask(name, error, *back, _OTHER, ("again", "Try again"), none)
        if chosen == "other":
            await self.choose()
        elif chosen == "again":
            await self.change(name)
        elif before is not None and can_go_back and chosen != "none":  # Esc goes back as well
            await self.load(before)

    async def _ask(self, name: str, error: Exception, *choices: tuple[str, str]) -> str | None:
        title = f"{name or 'The demo model'} cannot be loaded"
        return await self._app.push_screen_wait(Choose(title, sentence(error), choices))

    async def tell_difference(self, saved: str) -> None:
        """Says so where a chat that is opened was with another model than the one that is loaded."""
        if self.name is None or self.name == saved:
            return
        try:
            await self._app.in_thread(self._app.setup.check, saved)
        except LocalLLMError:
            here = f"the model of this chat, {saved}, is not here: {_title(self.name)} replies now"
            self._app.notify(here, severity="warning")
        else:
            what = f"this chat was with {_title(saved)}: {_title(self.name)} replies now"
            self._app.notify(f"{what}, /model changes that")

    async def choose(self) -> None:
        name = await self._app.push_screen_wait(ModelsScreen(self._app.setup.list_models, self.name))
        if name is not None:
            await self.change(name)


_OTHER = ("other", "Choose another model")


def _title(name: str | None) -> str:
    return name or "the demo model"
