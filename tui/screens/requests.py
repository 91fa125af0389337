"""Messages that request something of a chat's screen. `ScreenUI` posts them, and the screen handles them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from textual.message import Message

from localllm.tui.chat.conversation import ChatMessage, Conversation
from localllm.tui.chat.events import Turn


@dataclass
class ScreenRequest(Message):
    """A request to the screen, which sets ``is_done`` at the end, and ``error`` if the request fails."""

    is_done: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    error: Exception | None = field(default=None, init=False)


@dataclass
class Redraw(ScreenRequest):
    """Draw the conversation and the status line, and optionally move the focus to the editor."""

    focus_editor: bool = False


@dataclass
class PlayTurn(ScreenRequest):
    """Start a turn. If ``until_end``, the request is done when the turn has ended."""

    start: Callable[[Turn], None]
    until_end: bool = False


@dataclass
class EditMessage(ScreenRequest):
    """Load a message into the editor."""

    message: ChatMessage


@dataclass
class PutDraft(ScreenRequest):
    """Replace the text in the editor."""

    draft: str


@dataclass
class OpenConversation(ScreenRequest):
    """Show another conversation instead of the current one."""

    conversation: Conversation


@dataclass
class FindText(ScreenRequest):
    """Search the conversation for ``text``."""

    text: str


@dataclass
class ShowActivity(ScreenRequest):
    """Show the command's activity in the status line; an empty string removes it."""

    activity: str


class WriteInEditor(ScreenRequest):
    """Let the user write the message in $VISUAL or $EDITOR."""
