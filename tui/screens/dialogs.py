"""Dialogs: a choice, a question, a line of text, the system prompt, sampling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from localllm.errors import UsageError
from localllm.options.declared import Sampling, declared
from localllm.tui.base_app import BaseApp
from localllm.tui.chat import settings as chat_settings
from localllm.tui.chat.events import ContextFull
from localllm.tui.text import escape_controls, sentence, spelled_out
from localllm.tui.widgets.reply import ReplyView
from localllm.tui.widgets.status import KeyFooter
from localllm.web import is_web

Result = TypeVar("Result")
Entry = TypeVar("Entry")

#: Maximum characters of a dialog's text. The middle of a longer text is omitted: 40,000 short lines take 1 s to draw.
_MAX_TEXT = 40_000
#: Minimum number of visible lines of a dialog's text, on the smallest screen.
_MIN_LINES = 2


class DialogText(VerticalScroll, can_focus=False):
    """The scrollable text of a dialog. The border of the box shows how many lines are below the visible lines."""

    def __init__(self, text: str) -> None:
        super().__init__(Static(Content(text)), classes="text")

    def on_resize(self) -> None:
        self._update_box()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._update_box()

    def _update_box(self) -> None:
        if isinstance(box := self.parent, Vertical):
            n = max(0, self.max_scroll_y - self.scroll_offset.y)
            box.border_subtitle = f"{n:,} more line{'s' * (n != 1)} below: Page ↓" if n else ""
            self.screen.refresh_bindings()


class Dialog(ModalScreen[Result | None]):
    """A box above the conversation. Esc closes it without a result.

    A long text scrolls, so that the widgets below the text are always visible.
    """

    app = getters.app(BaseApp)

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close"),
        # With priority, because a list of choices uses these keys as well.
        Binding("pagedown", "scroll_text('page_down')", "More text", priority=True),
        Binding("pageup", "scroll_text('page_up')", "Page up", show=False, priority=True),
        Binding("down", "scroll_text('down')", "Down", show=False),
        Binding("up", "scroll_text('up')", "Up", show=False),
    ]

    def __init__(self, title: str, text: str = "") -> None:
        super().__init__()
        self._title = title
        text = spelled_out(text)
        if len(text) > _MAX_TEXT:
            half = _MAX_TEXT // 2
            text = f"{text[:half]}\n… {len(text) - 2 * half:,} characters are not shown …\n{text[-half:]}"
        self._text = DialogText(text) if text else None

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = Content(escape_controls(self._title))
            if self._text is not None:
                yield self._text
            yield from self.content()
        yield KeyFooter(show_command_palette=False, compact=True)

    def on_resize(self) -> None:
        self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        """Give the text the height that remains after the other widgets."""
        box = self.query_one(".box")
        if self._text is None or not self._text.is_attached or box.styles.max_height is None:
            return
        screen = self.size.with_height(self.size.height - 1)  # without the line of keys
        limit = int(box.styles.max_height.resolve(screen, screen)) - box.gutter.height
        limit -= self._text.styles.margin.height
        below = 0
        for widget in box.children:
            if isinstance(widget, OptionList):
                widget.styles.max_height = max(1, limit - _MIN_LINES)
                below += min(widget.virtual_size.height, limit - _MIN_LINES)
            elif widget is not self._text:
                below += widget.outer_size.height + widget.styles.margin.height
        self._text.styles.max_height = max(_MIN_LINES, limit - below)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable the scroll keys only if the text is longer than its area."""
        return action != "scroll_text" or (self._text is not None and self._text.max_scroll_y > 0)

    def action_scroll_text(self, direction: str) -> None:
        if self._text is not None:
            getattr(self._text, f"scroll_{direction}")(animate=False)

    def content(self) -> ComposeResult:
        """Yield the widgets of the box, below its text."""
        yield from ()

    def action_close(self) -> None:
        self.dismiss(None)


class Choose(Dialog[str]):
    """A list of choices. The result is the id of the selected choice."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", "Choose", priority=True)]

    def __init__(self, title: str, text: str, choices: Iterable[tuple[str, str]], at: int = 0) -> None:
        """``choices`` are pairs of id and label. The choice with index ``at`` is highlighted first."""
        super().__init__(title, text)
        self._at = at
        self._choices = list(choices)

    def content(self) -> ComposeResult:
        options = OptionList(*(Option(Content(escape_controls(label)), id=id_) for id_, label in self._choices))
        options.highlighted = self._at  # set before the first key is handled
        yield options

    def action_choose(self) -> None:
        self.query_one(OptionList).action_select()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option_id)


class Find(Dialog[str], Generic[Entry]):
    """A searchable list. Letters go to the field above the list, and arrow keys move in the list."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Choose", priority=True),
        Binding("up", "move('cursor_up')", "Up", show=False),
        Binding("down", "move('cursor_down')", "Down", show=False),
        Binding("pageup", "move('page_up')", "Page up", show=False),
        Binding("pagedown", "move('page_down')", "Page down", show=False),
        Binding("ctrl+home", "move('first')", "First", show=False),
        Binding("ctrl+end", "move('last')", "Last", show=False),
    ]

    def __init__(self, title: str, placeholder: str, text: str = "", note: str = "") -> None:
        """``note`` is shown until the list is loaded."""
        super().__init__(title)
        self.found: list[Entry] = []
        self._found_for: object = None
        self._field = Input(text, placeholder=placeholder, id="search")
        self._list = OptionList(classes="found")
        self._list.can_focus = False  # the field keeps the focus
        self._note = Static(note, classes="empty", markup=False)
        self.add_class("large")

    async def find(self, text: str) -> list[Entry]:
        """Return the entries that match the text in the field."""
        raise NotImplementedError

    def options(self) -> list[Option]:
        """Return the options for `found`."""
        raise NotImplementedError

    def first(self, before: int) -> int:
        """Return the index to highlight in a new list. ``before`` is the index in the previous list."""
        return before

    def note(self, entry: Entry | None) -> str:
        """Return the note for the highlighted entry, or for an empty list."""
        raise NotImplementedError

    def result(self, entry: Entry | None) -> str | None:
        """Return the result of choosing an entry, or None to keep the dialog open."""
        raise NotImplementedError

    @property
    def wanted(self) -> object:
        """The key of the list. When it changes, the list must be searched again."""
        return self._field.value

    def content(self) -> ComposeResult:
        yield self._field
        yield self._list
        yield self._note

    def on_mount(self) -> None:
        self.refresh_list()

    def refresh_list(self) -> None:
        self.app.spawn(self.search(), group="find")

    async def search(self) -> None:
        key = self.wanted
        try:
            entries = await self.find(self._field.value)
        except Exception as error:
            self.app.notify_error(error)
            entries = []
        if not self.is_attached or key != self.wanted:
            return
        before = self._list.highlighted or 0
        self.found, self._found_for = entries, key
        self._list.clear_options().add_options(self.options())
        self._list.highlighted = min(self.first(before), len(entries) - 1) if entries else None
        self._explain()

    async def highlighted(self) -> Entry | None:
        """Return the highlighted entry, after the search is complete."""
        if self._found_for != self.wanted:
            await self.search()
        index = self._list.highlighted
        return None if index is None else self.found[index]

    def _explain(self) -> None:
        index = self._list.highlighted
        text = self.note(None if index is None else self.found[index])
        self._note.update(Content(spelled_out(text)))
        self._note.display = bool(text)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.refresh_list()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        self._explain()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(self.result(self.found[event.option_index]))

    def action_move(self, direction: str) -> None:
        self.app.ask(self._move(direction))

    async def _move(self, direction: str) -> None:
        await self.highlighted()
        getattr(self._list, f"action_{direction}")()

    def action_choose(self) -> None:
        self.app.ask(self._choose())

    async def _choose(self) -> None:
        if (result := self.result(await self.highlighted())) is not None:
            self.dismiss(result)


def confirm(title: str, text: str, yes: str) -> Choose:
    """Return a dialog with a question. Its result is "yes" if the user confirms."""
    return Choose(title, text, [("no", "Cancel"), ("yes", yes)])


class TextDialog(Dialog[str]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "done", "OK", priority=True)]

    def __init__(self, title: str, text: str = "", value: str = "", placeholder: str = "") -> None:
        super().__init__(title, text)
        self._value = value
        self._placeholder = placeholder

    def content(self) -> ComposeResult:
        yield Input(self._value, placeholder=self._placeholder)

    def action_done(self) -> None:
        self.dismiss(self.query_one(Input).value)


class CompareScreen(Dialog[str]):
    """Two replies side by side. The result is the id of the reply to continue with."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1,left", "pick(0)", "Continue with the left one", key_display="1"),
        Binding("2,right", "pick(1)", "With the right one", key_display="2"),
    ]

    def __init__(self, replies: Sequence[tuple[str, str, str]]) -> None:
        """``replies`` are tuples of id, model name and text."""
        super().__init__("Compare")
        self._replies = replies
        self._views = [ReplyView() for _ in replies]
        self.add_class("large").add_class("wide")

    def content(self) -> ComposeResult:
        with Horizontal():
            for (_, name, _), view in zip(self._replies, self._views, strict=True):
                with VerticalScroll():
                    yield Static(Content.styled(escape_controls(name), "bold"))
                    yield view

    def on_mount(self) -> None:
        for (_, _, text), view in zip(self._replies, self._views, strict=True):
            self.app.spawn(view.show(text), group="compare")

    def action_pick(self, index: int) -> None:
        self.dismiss(self._replies[index][0])


def rows(cells: Sequence[Sequence[str]]) -> list[Content]:
    """Return lines of cells, aligned in columns."""
    columns = [[Content(escape_controls(cell)) for cell in column] for column in zip(*cells, strict=True)]
    widths = [max(cell.cell_length for cell in column) for column in columns]
    return [
        Content("  ").join(cell.pad_right(width - cell.cell_length) for cell, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]


class SystemScreen(Dialog[str]):
    """The editor of the system prompt. The result is the new text."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+s", "save", "Save", priority=True)]

    def __init__(self, prompt: str) -> None:
        super().__init__("System prompt", "Instructions for the model, before the conversation. May be empty.")
        self._prompt = prompt
        self.add_class("large")

    def content(self) -> ComposeResult:
        yield TextArea(self._prompt, compact=True, highlight_cursor_line=False)

    def on_mount(self) -> None:
        editor = self.query_one(TextArea)
        editor.move_cursor(editor.document.end)

    def action_save(self) -> None:
        self.dismiss(self.query_one(TextArea).text)


#: Choices for a message that does not fit, in addition to the choices of `ContextFull`.
EDIT, TAKE_BACK = "edit", "take back"

_CHOICES = {
    "drop": "Drop the oldest turns: the model no longer gets them; they stay in this chat",
    "summarise": "Summarise: a summary by the model replaces the oldest turns",
    "stop": "Stop: the reply stays incomplete",
}


def ask_when_full(event: ContextFull) -> Choose:
    """Return the dialog. Its result is a `localllm.tui.chat.events.Choice`, `EDIT` or `TAKE_BACK`."""
    subject = "the conversation and the unfinished reply have" if event.in_reply else "the conversation has"
    text = f"{subject[0].upper()}{subject[1:]} {event.needed:,} tokens, and the context holds {event.context:,}."
    if event.choices == ("stop",):
        too_long = "reply is too long: ask for a shorter one"
        if not event.in_reply:
            too_long = "last message alone is too long: shorten it"
        text += f" The {too_long}, or load the model with a larger context."
    choices: list[tuple[str, str]] = [(choice, _CHOICES[choice]) for choice in event.choices]
    if not event.in_reply:
        choices[-1:] = [
            (EDIT, "Edit your message"),
            (TAKE_BACK, "Take your message back"),
            ("stop", "Stop: the message stays without a reply"),
        ]
    return Choose("The context is full", text, choices)


async def open_link(app: BaseApp, address: str) -> None:
    """Show the full address of a link, and open or copy it if the user agrees."""
    text = spelled_out(address).replace("\n", "")
    choices = [("no", "Cancel"), ("copy", "Copy the address")]
    title = "Not a link to a web page"
    if is_web(address):
        choices.append(("open", "Open in the browser"))
        title = "Open this link?"
    answer = await app.push_screen_wait(Choose(title, text, choices))
    if answer == "open":
        app.open_url(address)
    elif answer == "copy":
        app.copy_to_clipboard(text)


def _placeholder(name: str, help_: str) -> str:
    value = getattr(Sampling(), name)
    return help_ if value is None else f"{value:g} by default; {help_}"


#: Labels and placeholders of the settings in the form. The placeholder explains an empty field.
_FIELDS = {
    **{name: (o.label, _placeholder(name, o.brief)) for name, o in declared(Sampling).items() if o.label},
    "max_tokens": ("Longest reply", "tokens; none for no limit"),
    "thinking": ("Thinking", "on or off, for models that can"),
    "reasoning_budget": ("Reasoning tokens", "maximum number of tokens of thinking; none for no limit"),
    "reasoning_effort": ("Reasoning effort", "low, medium or high, for models that support it"),
    "reply_prefix": ("Reply starts with", "first text of every reply"),
    "stop": ("Stop at", r"strings in quotes; \n is a line end"),
}


class SamplingScreen(Dialog[dict[str, Any]]):
    """The form with the settings of a chat. The result contains all settings."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", priority=True),
        Binding("ctrl+r", "reset", "Defaults", priority=True),
        Binding("enter", "save", "Save", show=False, priority=True),
    ]

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__("Sampling")
        self._settings = dict(settings)
        self.add_class("large")

    def content(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            for name, (label, placeholder) in _FIELDS.items():
                value = chat_settings.typed(self._settings.get(name, ""))
                with Horizontal(classes="field"):
                    yield Label(label)
                    yield Input(value, placeholder=placeholder, id=name)
        yield Static(classes="error")

    def action_reset(self) -> None:
        for field in self.query(Input):
            field.value = ""

    def action_save(self) -> None:
        settings = {name: value for name, value in self._settings.items() if name not in _FIELDS}
        for name in _FIELDS:
            field = self.query_one(f"#{name}", Input)
            text = field.value if name == "reply_prefix" else field.value.strip()
            try:
                settings = chat_settings.with_setting(settings, name, text) if text else settings
            except UsageError as error:
                self.query_one(".error", Static).update(Content(sentence(error)))
                self.set_focus(field)
                return
        self.dismiss(settings)
