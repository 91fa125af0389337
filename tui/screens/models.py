"""The picker of models: what is on this machine, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import Worker, WorkerFailed

from localllm.cli.terminal import quantity
from localllm.tui.screens.dialogs import Find, FoundList, rows
from localllm.tui.setup import ModelEntry
from localllm.tui.text import sentence

_HEAD = ("model", "size", "format", "parameters", "context", "fits")


class ModelsScreen(Find):
    """The models to choose from; the result is the path of one, or what was typed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", "Choose", priority=True)]

    def __init__(self, list_models: Callable[[], Iterable[ModelEntry]], current: str | None) -> None:
        """``current`` is the path of the model that is loaded."""
        super().__init__("Models")
        self._list_models = list_models
        self._current = current
        self._entries: list[ModelEntry] = []
        self._shown: list[ModelEntry] = []
        self._listing: Worker[object] | None = None
        self.add_class("large")

    def content(self) -> ComposeResult:
        yield Input(placeholder="Search, or a path to a GGUF file, or ORG/REPO[:QUANT]", id="search")
        yield Static(classes="head")
        yield FoundList()
        yield Static("looking for models …", classes="empty", markup=False)

    def on_mount(self) -> None:
        self._listing = self.app.spawn(self._list())

    async def _list(self) -> None:
        try:
            self._entries = await self.app.in_thread(lambda: list(self._list_models()))
        except Exception as error:
            self.query_one(".empty", Static).update(Content(sentence(error)))
            raise
        if self.is_attached:
            self._draw()

    def _draw(self) -> None:
        words = self.query_one(Input).value.casefold().split()
        self._shown = [e for e in self._entries if all(word in e.name.casefold() for word in words)]
        lines = rows([_HEAD, *map(self._row, self._shown)])
        self.query_one(".head", Static).update(lines[0])
        models = self.query_one(OptionList)
        models.clear_options()
        models.add_options([Option(line) for line in lines[1:]])
        if self._shown:
            models.highlighted = next((i for i, e in enumerate(self._shown) if e.path == self._current), 0)
        self._explain()

    def _row(self, entry: ModelEntry) -> tuple[str, ...]:
        return (
            entry.name,
            quantity(entry.size, "B"),
            entry.quantisation or "-",
            entry.parameters or "-",
            "-" if entry.context is None else f"{entry.context:,}",
            ("cannot be run" if entry.error else entry.fits or "-") + (" (loaded)" * (entry.path == self._current)),
        )

    def _explain(self) -> None:
        """Says what there is to say of the model that is highlighted."""
        place = self.query_one(OptionList).highlighted
        text = "no model here: type a path, or get one with localllm pull ORG/REPO" if not self._shown else ""
        if self._shown and place is not None and place < len(self._shown):
            text = self._shown[place].error
        note = self.query_one(".empty", Static)
        note.update(Content(text))
        note.display = bool(text)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._draw()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        self._explain()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(self._shown[event.option_index].path)

    def action_choose(self) -> None:
        """The model that is highlighted, or what was typed where that is none of them."""
        self.app.ask(self._choose())

    async def listed(self) -> None:
        if self._listing is not None:
            with suppress(WorkerFailed):  # which was told
                await self._listing.wait()

    async def _choose(self) -> None:
        await self.listed()
        place = self.query_one(OptionList).highlighted
        typed = self.query_one(Input).value.strip()
        if place is not None and place < len(self._shown):
            self.dismiss(self._shown[place].path)
        elif typed:
            self.dismiss(typed)
