"""The model that replies: loaded, changed and closed while the chat goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from localllm.tui import collector
from localllm.tui.failures import sentence
from localllm.tui.loading import Cancelled, Loading
from localllm.tui.screens.dialogs import Choose
from localllm.tui.screens.models import ModelsScreen
from localllm.tui.setup import OpenModel

if TYPE_CHECKING:
    from localllm.tui.screens.chat import ChatScreen

#: Seconds between two looks at how far loading is.
_PERIOD = 0.1


class ModelInUse:
    """One model at a time, for two may not fit.

    Attributes:
        model: the one that is loaded; None if none is.
        name: its name, empty for the demo model; None if none is loaded.
    """

    def __init__(self, screen: ChatScreen) -> None:
        self.model: OpenModel | None = None
        self.name: str | None = None
        self._screen = screen
        self._loading: Loading | None = None

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    def cancel(self) -> None:
        """Ends loading, if a model is being loaded."""
        if self._loading is not None:
            self._loading.cancel()

    async def load(self, name: str) -> None:
        """Loads a model in the place of the one before; where that fails, asks what to do."""
        screen = self._screen
        self.cancel()
        while self._loading is not None:
            await asyncio.sleep(_PERIOD)
        await screen.end_turn()
        before = self.name
        await self._close()
        loading = self._loading = Loading(screen.app.setup.load, name)
        try:
            model = await self._loaded(loading)
        except Cancelled:
            return
        except Exception as error:
            self._loading = None
            screen.status.change(activity="", progress=None)
            await self._ask_after_failure(name, before, error)
            return
        finally:
            self._loading = None
            screen.status.change(activity="", progress=None)
        self.model, self.name = model, name
        await self._use()

    async def _loaded(self, loading: Loading) -> OpenModel:
        """The model; meanwhile the screen shows how far it is."""
        thread = asyncio.create_task(asyncio.to_thread(loading.run))
        while not thread.done():
            text, share = loading.progress
            self._screen.status.change(activity=text, progress=share)
            await asyncio.wait([thread], timeout=_PERIOD)
        return thread.result()

    async def _use(self) -> None:
        screen, model = self._screen, self.model
        if model is None or self.name is None:
            return
        collector.set_aside()
        info = model.info
        screen.status.change(model=info.name or info.path.name, device=info.device, gpu_memory=info.gpu_bytes)
        await screen.app.offload(screen.session.use_model, model, self.name)
        await screen.refresh_all()
        screen.model_is_there()

    async def _close(self) -> None:
        model, self.model, self.name = self.model, None, None
        screen = self._screen
        screen.status.change(model="", device="", gpu_memory=0)
        if model is not None:
            collector.take_back()
            session = screen.session
            await screen.app.offload(session.use_model, None, session.conversation.model)
            await screen.app.offload(model.close)

    async def _ask_after_failure(self, name: str, before: str | None, error: Exception) -> None:
        choices = [("other", "Choose another model")]
        if before is not None and before != name:
            choices.append(("back", f"Back to {before or 'the demo model'}"))
        choices += [("again", "Try again"), ("none", "Go on without a model: the chat can be read")]
        title = f"{name or 'The demo model'} cannot be loaded"
        chosen = await self._screen.app.push_screen_wait(Choose(title, sentence(error), choices))
        if chosen == "other":
            await self.choose()
        elif chosen == "back" and before is not None:
            await self.load(before)
        elif chosen == "again":
            await self.load(name)

    async def choose(self) -> None:
        """Asks for a model, and loads it."""
        screen = self._screen
        name = await screen.app.push_screen_wait(ModelsScreen(screen.app.setup.list_models, self.name))
        if name is not None:
            await self.load(name)
