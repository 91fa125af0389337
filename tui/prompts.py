"""From a path of a conversation to the messages that the model gets."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.tui.attachments import with_attachments
from localllm.tui.conversation import Message, Window

#: A message as `LLM.chat` takes it.
Sent = dict[str, str]


def window_of(path: Sequence[Message]) -> Window | None:
    """The window that holds at the end of a path: the last one that begins on it."""
    ids = {message.id for message in path}
    return next((m.window for m in reversed(path) if m.window is not None and m.window.first in ids), None)


def visible_part(path: Sequence[Message], window: Window | None) -> Sequence[Message]:
    """The messages from the window's first one on."""
    if window is None:
        return path
    return path[next((i for i, message in enumerate(path) if message.id == window.first), 0) :]


def prompt(messages: Sequence[Message], system: str, summary: str = "") -> list[Sent]:
    """What the model gets of messages, told of those before by a summary.

    Replies without an answer are left out, and messages of a user that follow one another joined, for many templates
    insist on turns.
    """
    sent: list[Sent] = []
    if summary:
        system = f"{system}\n\nSummary of the conversation so far:\n{summary}".lstrip()
    if system:
        sent.append({"role": "system", "content": system})
    for message in messages:
        content = with_attachments(message) if message.role == "user" else message.content
        if not content:
            continue
        if sent and sent[-1]["role"] == message.role:
            sent[-1]["content"] += f"\n\n{content}"
        else:
            sent.append({"role": message.role, "content": content})
    return sent


def whole_prompt(path: Sequence[Message], system: str) -> list[Sent]:
    """What the model gets of a path, through the window that holds at its end."""
    window = window_of(path)
    return prompt(visible_part(path, window), system, "" if window is None else window.summary)
