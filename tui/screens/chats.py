"""The list of chats: search, open, rename, archive, delete."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Set
from typing import Any, ClassVar

from textual.actions import SkipAction
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.tui.screens.dialogs import Ask, Find, FoundList, confirm
from localllm.tui.storage.chats import ChatSummary, Store
from localllm.tui.text import escape_controls


class ChatsScreen(Find):
    """The chats that are kept; the result is the id of the one to open."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open", priority=True),
        Binding("f2", "rename", "Rename"),
        Binding("f3", "archive", "Archive"),
        Binding("delete", "delete", "Delete", key_display="del", priority=True),
        Binding("f6", "hidden", "Archived"),
    ]

    def __init__(self, store: Store, open_ids: Set[str], search: str = "", *, archived: bool = False) -> None:
        """``open_ids`` are those of the chats that are open here."""
        super().__init__(_title(archived))
        self._store = store
        self._open_ids = open_ids
        self._search = search
        self._archived = archived
        self._found: list[ChatSummary] = []
        #: What these were found for, and whether among archived chats.
        self._found_for: tuple[str, bool] | None = None
        #: Ids of chats that were deleted here.
        self.deleted: set[str] = set()
        #: New titles of chats that were renamed here, by id.
        self.titles: dict[str, str] = {}
        self.add_class("large")

    def content(self) -> ComposeResult:
        yield Input(self._search, placeholder="Search titles and messages", id="search")
        yield FoundList()
        yield Static(classes="empty")

    def on_mount(self) -> None:
        self._refresh()

    # -- The list --------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self.app.spawn(self._list(), group="sessions")

    @property
    def _wanted(self) -> tuple[str, bool]:
        return self.query_one(Input).value, self._archived

    async def _list(self) -> None:
        wanted = text, archived = self._wanted
        if text.strip():
            found = await self.app.offload(self._store.search, text)
            found = [summary for summary in found if summary.archived or not archived]
        else:
            found = await self.app.offload(self._store.sessions, archived=archived)
        if not self.is_attached or wanted != self._wanted:
            return
        chats = self.query_one(OptionList)
        place = chats.highlighted or 0
        self._found, self._found_for = found, wanted
        chats.clear_options()
        chats.add_options([Option(_entry(summary, summary.id in self._open_ids), id=summary.id) for summary in found])
        chats.highlighted = min(place, len(found) - 1) if found else None
        empty = self.query_one(".empty", Static)
        empty.display = not found
        empty.update(Content(self._nothing(text)))

    def _nothing(self, text: str) -> str:
        if text.strip():
            return "no chat has these words"
        return "no chat is archived" if self._archived else "no chat is kept yet"

    async def listed(self) -> None:
        if self._found_for != self._wanted:
            await self._list()

    async def _on_chosen(self, work: Callable[[ChatSummary], Coroutine[Any, Any, None]]) -> None:
        """Does something with the chat that is highlighted, once what was typed has been searched for."""
        await self.listed()
        place = self.query_one(OptionList).highlighted
        if place is not None and place < len(self._found):
            await work(self._found[place])

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._refresh()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option_id)

    # -- What can be done with one ---------------------------------------------------------------------------------

    def action_open(self) -> None:
        self.app.ask(self._on_chosen(self._open))

    async def _open(self, chosen: ChatSummary) -> None:
        self.dismiss(chosen.id)

    def action_hidden(self) -> None:
        self._archived = not self._archived
        self.query_one(".box").border_title = _title(self._archived)
        self._refresh()

    def action_rename(self) -> None:
        self.app.ask(self._on_chosen(self._rename))

    async def _rename(self, chosen: ChatSummary) -> None:
        title = await self.app.push_screen_wait(Ask("Rename", value=chosen.title))
        if title:
            self.titles[chosen.id] = await self.app.offload(self._store.rename, chosen.id, title)
            await self._list()

    def action_archive(self) -> None:
        self.app.ask(self._on_chosen(self._archive))

    async def _archive(self, chosen: ChatSummary) -> None:
        await self.app.offload(self._store.archive, chosen.id, not chosen.archived)
        self.app.notify(f"{chosen.title or 'the chat'}: {'back in the list' if chosen.archived else 'archived'}")
        await self._list()

    def action_delete(self) -> None:
        field = self.query_one(Input)
        if not field.cursor_at_end or not field.selection.is_empty:
            raise SkipAction  # there is something to delete in the field
        self.app.ask(self._on_chosen(self._delete))

    async def _delete(self, chosen: ChatSummary) -> None:
        text = f"{chosen.title or 'Untitled'}, {_messages(chosen)}"
        if others := await self.app.offload(self._store.others_with_open, chosen.id):
            text += f"\n\nIt is open in another terminal ({', '.join(others)})."
        if await self.app.push_screen_wait(confirm("Delete the chat for good?", text, "Delete")) == "yes":
            await self.app.offload(self._store.delete, chosen.id)
            self.deleted.add(chosen.id)
            await self._list()


def _entry(summary: ChatSummary, is_open: bool) -> Content:
    marks = ["open" if is_open else "", "archived" if summary.archived else ""]
    about = " · ".join(filter(None, [*marks, age(time.time() - summary.updated), _messages(summary)]))
    title = Content.styled(escape_controls(summary.title or "Untitled"), "bold")
    return Content.assemble(title, (f"  {about}\n", "dim"), escape_controls(summary.preview))


def _messages(summary: ChatSummary) -> str:
    return f"{summary.n_messages:,} message{'s' * (summary.n_messages != 1)}"


def age(seconds: float) -> str:
    """How long ago something was, roughly."""
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (n := int(seconds // length)) >= 1:
            return f"{n:,} {name}{'s' * (n != 1)} ago"
    return "just now"


def _title(archived: bool) -> str:
    return "Archived chats" if archived else "Chats"
