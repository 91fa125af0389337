"""The list of chats: search, open, rename, archive, delete."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import ClassVar

from textual.actions import SkipAction
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets.option_list import Option

from localllm.tui.screens.dialogs import Find, TextDialog, confirm
from localllm.tui.storage.chats import ChatSummary, Store
from localllm.tui.text import escape_controls


class ChatsScreen(Find[ChatSummary]):
    """The saved chats. The result is the id of the chat to open.

    ``deleted`` contains the ids of deleted chats, and ``titles`` the new titles by id.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Open", priority=True),
        Binding("f2", "on_highlighted('rename')", "Rename"),
        Binding("f3", "on_highlighted('archive')", "Archive"),
        Binding("delete", "delete", "Delete", key_display="del", priority=True),
        Binding("f6", "hidden", "Archived"),
    ]

    def __init__(self, store: Store, open_ids: Set[str], search: str = "", *, archived: bool = False) -> None:
        """``open_ids`` are the ids of the chats that are open in this app."""
        super().__init__(_title(archived), "Search titles and messages", search)
        self._store = store
        self._open_ids = open_ids
        self._archived = archived
        self.deleted: set[str] = set()
        self.titles: dict[str, str] = {}

    @property
    def wanted(self) -> object:
        return self._field.value, self._archived

    async def find(self, text: str) -> list[ChatSummary]:
        archived = self._archived
        if not text.strip():
            return await self.app.offload(self._store.sessions, archived=archived)
        summaries = await self.app.offload(self._store.search, text)
        return [summary for summary in summaries if summary.archived or not archived]

    def options(self) -> list[Option]:
        return [Option(_entry(summary, summary.id in self._open_ids)) for summary in self.found]

    def note(self, entry: ChatSummary | None) -> str:
        if entry is not None:
            return ""
        if self._field.value.strip():
            return "no chat contains these words"
        return "no chat is archived" if self._archived else "no chat is saved yet"

    def result(self, entry: ChatSummary | None) -> str | None:
        return None if entry is None else entry.id

    def action_on_highlighted(self, name: str) -> None:
        self.app.ask(self._on_highlighted(name))

    async def _on_highlighted(self, name: str) -> None:
        if (summary := await self.highlighted()) is not None:
            await getattr(self, f"_{name}")(summary)

    def action_hidden(self) -> None:
        self._archived = not self._archived
        self.query_one(".box").border_title = _title(self._archived)
        self.refresh_list()

    async def _rename(self, summary: ChatSummary) -> None:
        title = await self.app.push_screen_wait(TextDialog("Rename", value=summary.title))
        if title:
            self.titles[summary.id] = await self.app.offload(self._store.rename, summary.id, title)
            await self.search()

    async def _archive(self, summary: ChatSummary) -> None:
        await self.app.offload(self._store.set, summary.id, archived=not summary.archived)
        self.app.notify(f"{summary.title or 'the chat'}: {'back in the list' if summary.archived else 'archived'}")
        await self.search()

    def action_delete(self) -> None:
        if not self._field.cursor_at_end or not self._field.selection.is_empty:
            raise SkipAction  # let the field delete text
        self.action_on_highlighted("delete")

    async def _delete(self, summary: ChatSummary) -> None:
        text = f"{summary.title or 'Untitled'}, {_messages(summary)}"
        if terminals := await self.app.offload(self._store.others_with_open, summary.id):
            text += f"\n\nIt is open in another terminal ({', '.join(terminals)})."
        if await self.app.push_screen_wait(confirm("Delete the chat for good?", text, "Delete")) == "yes":
            await self.app.offload(self._store.delete, summary.id)
            self.deleted.add(summary.id)
            await self.search()


def _entry(summary: ChatSummary, is_open: bool) -> Content:
    marks = ["open" if is_open else "", "archived" if summary.archived else ""]
    about = " · ".join(filter(None, [*marks, age(time.time() - summary.updated), _messages(summary)]))
    title = Content.styled(escape_controls(summary.title or "Untitled"), "bold")
    return Content.assemble(title, (f"  {about}\n", "dim"), escape_controls(summary.preview))


def _messages(summary: ChatSummary) -> str:
    return f"{summary.n_messages:,} message{'s' * (summary.n_messages != 1)}"


def age(seconds: float) -> str:
    """Return an approximate age, such as "3 hours ago"."""
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (n := int(seconds // length)) >= 1:
            return f"{n:,} {name}{'s' * (n != 1)} ago"
    return "just now"


def _title(archived: bool) -> str:
    return "Archived chats" if archived else "Chats"
