"""What slash commands need of the program that people sit at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from localllm.tui.chat.conversation import Conversation, Message
from localllm.tui.chat.events import Event
from localllm.tui.chat.session import ChatSession


class Frontend(Protocol):
    """What commands need of the program that people sit at."""

    @property
    def session(self) -> ChatSession: ...
    def say(self, text: str) -> None:
        """Tells something, of one line or several."""

    def play(self, events: Iterator[Event]) -> None:
        """Shows events as they come."""

    def edit(self, message: Message) -> None:
        """Has a message changed, and goes on from there."""

    def open(self, conversation: Conversation) -> None:
        """Goes on with another conversation."""

    def use_model(self, path: str) -> None:
        """Loads another model for this conversation."""

    def quit(self) -> None:
        """Ends the program once the command is done."""
