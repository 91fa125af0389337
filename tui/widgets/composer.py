"""The message editor and its list of completions."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import events, getters, on
from textual.actions import SkipAction
from textual.app import SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, TextArea
from textual.widgets.option_list import Option

from localllm.errors import UsageError
from localllm.parallel import in_thread
from localllm.shell import found_program, set_variable, split_command
from localllm.tui.base_app import BaseApp
from localllm.tui.chat.attachments import Suggestion, clipboard_images, media_reference
from localllm.tui.storage.prompt_history import PromptHistory
from localllm.tui.text import Pastes, escape_controls


class Suggestions(OptionList, can_focus=False):
    """The list of completions. The editor keeps the focus and moves the highlight."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Suggestion] = []
        self._line = ""
        self.display = False

    def offer(self, choices: Sequence[Suggestion], line: str = "") -> None:
        """Show completions for ``line``. An empty list hides the widget."""
        self._line = line
        if list(choices) == self.choices:
            return
        self.choices = list(choices)
        self.clear_options()
        self.add_options([Option(_line(choice)) for choice in self.choices])
        self.display = bool(self.choices)
        if self.choices:
            self.highlighted = 0

    def is_complete(self, typed: str) -> bool:
        """Whether Enter sends the word ``typed`` instead of completing it.

        That is so if the word is a completion or a folder, and the user has not moved the highlight.
        """
        names = [choice.text.rstrip() for choice in self.choices]
        is_folder = typed.startswith("@") and typed.endswith(("/", os.sep))
        return self.highlighted == 0 and (typed in names or is_folder)

    def chosen(self, line: str) -> Suggestion | None:
        """Return the highlighted completion. None if the list is hidden or was built for another line."""
        fits = self.display and line == self._line
        return self.choices[self.highlighted] if fits and self.highlighted is not None else None


def _line(choice: Suggestion) -> Content:
    text = Content(escape_controls(choice.text))
    return Content.assemble(text, "  ", (choice.help, "dim")) if choice.help else text


PLACEHOLDER = "Message · Enter sends · Ctrl+J line · / command · @ file"


class Composer(TextArea):
    """The editor of a message. Enter sends; Up and Down at the edges recall earlier messages (``typed``)."""

    app = getters.app(BaseApp)

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send"),
        Binding("shift+enter,ctrl+j,alt+enter", "new_line", "New line", key_display="^j", show=False),
        Binding("up", "history(-1)", "Earlier message", show=False),
        Binding("down", "history(1)", "Later message", show=False),
        Binding("tab", "complete", "Complete", show=False),
        Binding("ctrl+e", "screen.command('editor')", "Editor", show=False),
        Binding("pageup", "screen.scroll_page(-1)", "Page up", show=False),
        Binding("pagedown", "screen.scroll_page(1)", "Page down", show=False),
    ]

    @dataclass
    class Sent(Message):
        """The user sends the message."""

        text: str

    @dataclass
    class Typed(Message):
        """The line before the cursor has changed, so other completions may apply."""

        line: str
        is_first: bool

    def __init__(self, history: PromptHistory, suggestions: Suggestions) -> None:
        super().__init__(placeholder=PLACEHOLDER, compact=True, highlight_cursor_line=False)
        self.typed = history
        self.suggestions = suggestions
        self.pastes = Pastes()
        self._called_up = ""
        self._line_state = ("", True)

    @property
    def message(self) -> str:
        """The text that would be sent."""
        return self.pastes.unfold(self.text)

    def put(self, text: str) -> None:
        """Replace the text, and move the cursor to the end."""
        self.text = self.pastes.fold(text)
        self.move_cursor(self.document.end)

    def write_in_editor(self) -> None:
        """Edit the message in $VISUAL or $EDITOR. If that fails, raises UsageError and keeps the message."""
        command = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not command:
            advice = set_variable("EDITOR", "notepad" if sys.platform == "win32" else "nano")
            raise UsageError(f"no editor is set: {advice}, or another one, and start the chat again")
        with tempfile.TemporaryDirectory(prefix="localllm-") as folder:
            path = Path(folder, "message.md")
            path.write_text(self.message, "utf-8")
            try:
                with self.app.suspend():
                    subprocess.run([*found_program(split_command(command)), str(path)], check=True)
                text = path.read_text("utf-8")
            except SuspendNotSupported:
                raise UsageError("an editor cannot be started from this terminal") from None
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise UsageError(f"the editor {command!r} has failed ({error}): the message is unchanged") from None
        self.put(text.removesuffix("\n"))

    def empty(self) -> None:
        self.text = ""
        self.pastes.clear()

    def action_copy(self) -> None:
        """Copy the selection. Without a selection, the app handles Ctrl+C."""
        if self.selected_text:
            super().action_copy()
        else:
            raise SkipAction

    async def on_key(self, event: events.Key) -> None:
        # A binding with priority would overtake letters that are still queued when the user types quickly.
        if event.key == "enter":
            self.action_send()
        elif event.key == "ctrl+d" and not self.text:  # with text, Ctrl+D deletes a character
            await self.run_action("app.quit")
        else:
            return
        event.prevent_default()
        event.stop()

    async def on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        if (reference := media_reference(event.text)) is not None:
            self.insert(reference)
        elif not event.text:  # some terminals send an empty paste if the clipboard has no text
            self.action_paste()
        else:
            self._insert_pasted(event.text)

    def action_paste(self) -> None:
        """Attach the image on the system's clipboard, or insert the text that was copied in the app."""
        self.app.spawn(self._paste())

    async def _paste(self) -> None:
        self._insert_pasted(await asyncio.wrap_future(in_thread(clipboard_images)) or self.app.clipboard)

    def _insert_pasted(self, text: str) -> None:
        self.insert(self.pastes.fold(text.replace("\r\n", "\n").replace("\r", "\n")))

    def action_send(self) -> None:
        completion = self.suggestions.chosen(self.line_to_cursor)
        typed = "" if completion is None else self.line_to_cursor[completion.start :]
        if completion is not None and not self.suggestions.is_complete(typed):
            self.complete(completion)
        elif self.line_to_cursor.endswith("\\"):  # newline for terminals that cannot report Shift+Enter
            self.action_delete_left()
            self.action_new_line()
        else:
            if typed.startswith('@"') and not typed.endswith('"'):  # a folder, whose quotation mark is still open
                self.insert('"')
            self.post_message(self.Sent(self.message))

    def action_new_line(self) -> None:
        self.insert("\n")

    def action_history(self, by: int) -> None:
        """Move through completions, then lines, and from the first or last line through earlier messages."""
        is_at_edge = self.cursor_at_first_line if by < 0 else self.cursor_at_last_line
        if self.suggestions.display:
            move = self.suggestions.action_cursor_up if by < 0 else self.suggestions.action_cursor_down
            move()
        elif is_at_edge and (text := self.typed.older(self.text) if by < 0 else self.typed.newer()) is not None:
            self.put(text)
            self._called_up = self.text  # no completions here: they would capture the arrow keys
        elif by < 0:
            self.action_cursor_up()
        else:
            self.action_cursor_down()

    def action_complete(self) -> None:
        if (completion := self.suggestions.chosen(self.line_to_cursor)) is not None:
            self.complete(completion)
        else:
            self.screen.focus_next()

    def complete(self, choice: Suggestion) -> None:
        row, column = self.cursor_location
        text = choice.text if choice.goes_on or choice.text.endswith(" ") else f"{choice.text} "
        self.replace(text, (row, choice.start), (row, column))
        if not choice.goes_on:
            self.suggestions.offer([])

    @on(TextArea.Changed)
    @on(TextArea.SelectionChanged)
    def _tell(self) -> None:
        if self.text and self.text == self._called_up:
            self.suggestions.offer([])
            return
        self._called_up = ""
        line_state = (self.line_to_cursor, self.cursor_location[0] == 0)
        if line_state != self._line_state:  # one key may cause both events
            self._line_state = line_state
            self.post_message(self.Typed(*line_state))

    @property
    def line_to_cursor(self) -> str:
        row, column = self.cursor_location
        return self.document.get_line(row)[:column]
