"""A model that is being loaded, by a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from localllm.errors import LocalLLMError
from localllm.tui.base_app import freeze_gc_heap, unfreeze_gc_heap
from localllm.tui.chat.model import ChatModel
from localllm.tui.screens.dialogs import Choose
from localllm.tui.screens.models import ModelsScreen
from localllm.tui.setup import Loader
from localllm.tui.text import sentence

if TYPE_CHECKING:
    from localllm.tui.screens.chat import ChatScreen


class Cancelled(Exception):
    """Loading was ended by whoever began it."""


class Progress(NamedTuple):
    """How far it is, in words, and from 0 to 1; None where no total is known."""

    text: str
    share: float | None


class Loading:
    """Loads one model.

    Attributes:
        name: of the model, as `Loader` takes it.
        progress: how far it is; any thread may read it.
    """

    def __init__(self, loader: Loader, name: str) -> None:
        self.name = name
        self.progress = Progress("loading the model", None)
        self._loader = loader
        self._cancelled = threading.Event()
        self._compiled = 0

    def run(self) -> ChatModel:
        """Loads it, on the thread that calls.

        Raises:
            Cancelled: `cancel` was called.
            LocalLLMError: it cannot be loaded.
        """
        if not self._cancelled.is_set():
            model = self._loader(self.name, self._report)
            if not self._cancelled.is_set():
                return model
            model.close()
        raise Cancelled

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ends it soon, at its next sign of life; any thread may call it."""
        self._cancelled.set()

    def _report(self, stage: str, done: int, total: int) -> None:
        if self._cancelled.is_set():
            raise Cancelled
        if stage == "weights":
            self.progress = Progress("loading weights", done / total if total else None)
        elif done < total:
            self.progress = Progress(f"compiling kernel {self._compiled + done + 1}, once on this machine", None)
        else:
            self._compiled += total


#: Seconds between two looks at how far loading is.
_PERIOD = 0.1


class ModelState(Enum):
    """What becomes of a message that is sent now."""

    #: It waits: a model was asked for, as when the app starts, but its loading has not begun.
    TO_LOAD = auto()
    #: It waits: a model is being loaded.
    LOADING = auto()
    #: The model replies to it.
    LOADED = auto()
    #: It is refused: loading failed.
    NONE = auto()


class ModelLoader:
    """One model at a time, for two may not fit.

    Attributes:
        state: whether there is a model, or will be; only this class sets it.
        model: the one that is loaded; None if none is.
        name: its name, empty for the demo model; None if none is loaded.
    """

    def __init__(self, screen: ChatScreen) -> None:
        self.state = ModelState.TO_LOAD
        self.model: ChatModel | None = None
        self.name: str | None = None
        self._screen = screen
        self._loading: Loading | None = None
        self._one_at_a_time = asyncio.Lock()

    def cancel(self) -> None:
        """Ends loading, if a model is being loaded."""
        if self._loading is not None:
            self._loading.cancel()

    async def change(self, name: str) -> None:
        """Loads a model in the place of the one before, which stays where the file of the new one cannot be read."""
        screen = self._screen
        if self.model is not None and self.name == name:
            screen.app.notify(f"{name or 'the demo model'} is loaded already")
            return
        if self.state is not ModelState.NONE:
            try:
                await self._screen.app.in_thread(screen.app.setup.check, name)
            except LocalLLMError as error:
                await self._ask_before_change(name, error)
                return
        screen.app.keys.go_on()
        await self.load(name)

    async def load(self, name: str, *, keeps: bool = True) -> None:
        """Loads a model in the place of the one before; where that fails, asks what to do.

        A later call takes the place of one whose model is still being loaded.

        Args:
            name: as a command takes it; empty for the demo model.
            keeps: note the model with the chat.
        """
        screen = self._screen
        self.cancel()
        loading = self._loading = Loading(screen.app.setup.load, name)
        self.state = ModelState.TO_LOAD
        async with self._one_at_a_time:
            before = self.name
            await screen.end_turn()
            await self._close()
            error = await self._load_now(loading, name if keeps else None)
        if error is not None:
            await self._ask_after_failure(name, before, error)
            screen.send_pending()

    async def _load_now(self, loading: Loading, kept: str | None) -> Exception | None:
        """Loads a model and lets it reply; returns why it cannot be loaded, unless that was cancelled."""
        self.state = ModelState.LOADING
        try:
            model = await self._loaded(loading)
        except Exception as error:
            if loading.is_cancelled:
                return None
            self.state = ModelState.NONE
            self._screen.status.change(activity="", progress=None)
            return error
        self.model, self.name = model, loading.name
        await self._use(model, loading, kept)
        return None

    async def _loaded(self, loading: Loading) -> ChatModel:
        """The model; meanwhile the screen shows how far it is."""
        thread = asyncio.create_task(self._screen.app.in_thread(loading.run))
        while not thread.done():
            text, share = loading.progress
            self._screen.status.change(activity=text, progress=share)
            await asyncio.wait([thread], timeout=_PERIOD)
        return thread.result()

    async def _use(self, model: ChatModel, loading: Loading, kept: str | None) -> None:
        screen = self._screen
        freeze_gc_heap()
        info = model.info
        screen.status.change(
            activity="",
            progress=None,
            model=info.name or info.path.name,
            device=info.device,
            gpu_memory=info.gpu_bytes,
        )
        await screen.app.offload(screen.session.use_model, model, kept)
        try:
            await screen.refresh_all()
        finally:
            if not loading.is_cancelled:  # else the app ends, or another model is to be loaded
                self.state = ModelState.LOADED
                screen.send_pending()

    async def _close(self) -> None:
        model, self.model, self.name = self.model, None, None
        screen = self._screen
        screen.status.change(model="", device="", gpu_memory=0)
        if model is not None:
            unfreeze_gc_heap()
            await screen.app.offload(screen.session.use_model, None, None)
            await screen.app.offload(model.close)

    async def _ask_before_change(self, name: str, error: LocalLLMError) -> None:
        """Says why a model cannot be loaded, while the one before is there still, or is being loaded."""
        back = "Back" if self.model is None else f"Back to {_title(self.name)}"
        choices = [("back", back), ("other", "Choose another model")]
        if await self._chosen(name, error, choices) == "other":
            await self.choose()

    async def _ask_after_failure(self, name: str, before: str | None, error: Exception) -> None:
        choices = [("other", "Choose another model")]
        can_go_back = before is not None and before != name
        if can_go_back:
            choices.insert(0, ("back", f"Back to {_title(before)}"))
        choices += [("again", "Try again"), ("none", "Go on without a model: the chat can be read")]
        chosen = await self._chosen(name, error, choices)
        if chosen == "other":
            await self.choose()
        elif chosen == "again":
            await self.change(name)
        elif before is not None and can_go_back and chosen != "none":  # Esc goes back as well
            await self.load(before)

    async def _chosen(self, name: str, error: Exception, choices: list[tuple[str, str]]) -> str | None:
        title = f"{name or 'The demo model'} cannot be loaded"
        return await self._screen.app.push_screen_wait(Choose(title, sentence(error), choices))

    async def tell_difference(self, saved: str) -> None:
        """Says so where a chat that is opened was with another model than the one that is loaded."""
        if self.name is None or self.name == saved:
            return
        app = self._screen.app
        try:
            await self._screen.app.in_thread(app.setup.check, saved)
        except LocalLLMError:
            app.notify(
                f"the model of this chat, {saved}, is not here: {_title(self.name)} replies now", severity="warning"
            )
        else:
            app.notify(f"this chat was with {_title(saved)}: {_title(self.name)} replies now, /model changes that")

    async def choose(self) -> None:
        """Asks for a model, and loads it."""
        screen = self._screen
        name = await screen.app.push_screen_wait(ModelsScreen(screen.app.setup.list_models, self.name))
        if name is not None:
            await self.change(name)


def _title(name: str | None) -> str:
    return name or "the demo model"
