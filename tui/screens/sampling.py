"""How replies are generated: a form with the settings that people change."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widgets import Input, Label, Static

from localllm.declared_options import Sampling, declared
from localllm.errors import UsageError
from localllm.tui.chat import settings as chat_settings
from localllm.tui.screens.dialogs import Dialog
from localllm.tui.text import sentence


class _Field(NamedTuple):
    name: str
    label: str
    help: str


_FIELDS = (
    *(_Field(name, each.label, each.brief) for name, each in declared(Sampling).items() if each.label),
    _Field("max_tokens", "Longest reply", "tokens; none for no limit"),
    _Field("thinking", "Thinking", "on or off, for models that can"),
    _Field("reply_prefix", "Reply begins with", "every reply goes on from it"),
    _Field("stop", "Stop at", r"texts in quotes; \n is a line end"),
)
#: The settings that the form has.
_NAMES = {field.name for field in _FIELDS}


class SamplingScreen(Dialog[dict[str, Any]]):
    """The settings of a chat; the result has all of them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", priority=True),
        Binding("ctrl+r", "reset", "Defaults", priority=True),
        Binding("enter", "save", "Save", show=False),
    ]

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__("Sampling")
        self._settings = dict(settings)
        self.add_class("large")

    def content(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            for field in _FIELDS:
                with Horizontal(classes="field"):
                    yield Label(field.label)
                    yield Input(_typed(self._settings.get(field.name)), placeholder=_default(field), id=field.name)
        yield Static(classes="error")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_save()

    def action_reset(self) -> None:
        for field in _FIELDS:
            self.query_one(f"#{field.name}", Input).value = ""

    def action_save(self) -> None:
        settings = {name: value for name, value in self._settings.items() if name not in _NAMES}
        for field in _FIELDS:
            widget = self.query_one(f"#{field.name}", Input)
            text = widget.value if field.name == "reply_prefix" else widget.value.strip()
            try:
                settings = chat_settings.with_setting(settings, field.name, text) if text else settings
            except UsageError as error:
                self._complain(error, widget)
                return
        self.dismiss(settings)

    def _complain(self, error: UsageError, widget: Input) -> None:
        self.query_one(".error", Static).update(Content(sentence(error)))
        widget.focus()


def _default(field: _Field) -> str:
    """What a field without a value means."""
    value = getattr(Sampling(), field.name, None)
    return field.help if value is None else f"{value:g} by default; {field.help}"


def _typed(value: Any) -> str:
    """A value as it is typed."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return shlex.join(text.replace("\n", "\\n") for text in value)
    return str(value)
