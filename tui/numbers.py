"""Messages and branches as commands name them: by their numbers."""

from __future__ import annotations

from typing import NamedTuple

from localllm.errors import UsageError
from localllm.tui.chat.conversation import Conversation, Message

NO_BRANCHES = "there are no branches: /edit and /regen make them"


def numbered(conversation: Conversation, number: str) -> Message:
    """The message of the path that ``3`` or ``#3`` stands for.

    Raises:
        UsageError: there is none.
    """
    path = conversation.path()
    digits = number.removeprefix("#")
    if not digits.isdecimal() or not 0 < int(digits) <= len(path):
        numbers = f"they have numbers from 1 to {len(path)}" if path else "nothing was said yet"
        raise UsageError(f"there is no message {number}: {numbers}")
    return path[int(digits) - 1]


def first_numbered(conversation: Conversation, argument: str) -> tuple[Message | None, str]:
    """A message whose number stands first, None if no number does, and what follows it.

    Raises:
        UsageError: there is no message of that number.
    """
    first, *rest = argument.split(maxsplit=1) or [""]
    if not first.removeprefix("#").isdecimal():
        return None, argument
    return numbered(conversation, first), rest[0] if rest else ""


class Fork(NamedTuple):
    """A message of the path that has others in its place.

    Attributes:
        number: its place in the path, from 1.
        branches: what stands there, oldest first.
        at: which of them is in the path, from 1.
    """

    number: int
    branches: list[Message]
    at: int


def forks(conversation: Conversation) -> list[Fork]:
    """Where a conversation branches, first to last."""
    return [
        Fork(number, conversation.siblings(message.id), conversation.branch_of(message.id)[0])
        for number, message in enumerate(conversation.path(), 1)
        if conversation.branch_of(message.id)[1] > 1
    ]


def branch_meant(conversation: Conversation, argument: str) -> Message:
    """The branch that ``next``, ``prev`` or a number means: at the last fork, or of the message named before it.

    Raises:
        UsageError: there is none.
    """
    found = forks(conversation)
    if not found:
        raise UsageError(NO_BRANCHES)
    first, *rest = argument.split()
    fork = found[-1]
    if rest or first.startswith("#"):
        message = numbered(conversation, first)
        fork = next((each for each in found if message in each.branches), Fork(0, [message], 1))
    where = rest[0] if rest else "next" if first.startswith("#") else first
    steps = {"next": fork.at + 1, "prev": fork.at - 1, "previous": fork.at - 1}
    number = int(where) if where.isdecimal() else steps.get(where, 0)
    n = len(fork.branches)
    if len(rest) > 1 or not 0 < number <= n:
        raise UsageError(f"there is no branch {where}, and this is {fork.at} of {n}: /branch lists them")
    return fork.branches[number - 1]
