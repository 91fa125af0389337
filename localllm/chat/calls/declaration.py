"""Declaration of a format of tool calls.

A declaration has all that a writer of calls needs, so a parser, a grammar and tests can be built from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from localllm.chat.thinking import CALL


@dataclass(frozen=True)
class JSONArguments:
    """Arguments as a JSON object. ``quote`` surrounds strings; keys then have no quotation marks."""

    quote: str = '"'


@dataclass(frozen=True)
class PythonArguments:
    """Keyword arguments of a Python call."""


@dataclass(frozen=True)
class TaggedArguments:
    """One pair of tags per argument, around a raw string or the JSON of another value.

    ``{key}`` in ``begin`` is the argument's name.
    """

    begin: str
    end: str
    between: str = ""
    has_line_breaks: bool = True  # whether line breaks at both ends of a value belong to the tags

    @property
    def key_tag(self) -> str:
        """The tag before the argument's name, without attributes."""
        return re.split(r"[=\s{]", self.begin)[0]


@dataclass(frozen=True)
class NestedArguments:
    """One pair of tags per argument and per nested value, each after ``mark``. The tag of list items is ``item``."""

    mark: str


Arguments = JSONArguments | PythonArguments | TaggedArguments | NestedArguments


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    A reply is text, then ``opening``, ``inside[0]``, calls with ``between`` between them, ``inside[1]`` and
    ``closing``, then text or more calls. A call is ``head``, arguments and ``tail``.

    Attributes:
        head: ``{name}`` is the tool's name, ``{id}`` an identifier, ``{number}`` the index of the call in the reply.
        opening: Tag before calls; empty if ``head`` starts with a tag, or if a call
            without tags starts the reply.
        closing: Tag after calls; empty if they end with the next opening tag or the reply.
        repeats: Whether the tags surround each call, and not all calls together.
        is_control: Whether ``opening`` is a control token, which also ends reasoning.
    """

    models: str
    head: str
    arguments: Arguments
    tail: str = ""
    opening: str = ""
    closing: str = ""
    inside: tuple[str, str] = ("", "")
    between: str = "\n"
    repeats: bool = False
    is_control: bool = False

    @property
    def is_bare(self) -> bool:
        """Whether calls have no tags at all."""
        return not self.opening and not self.tag_of_head

    @property
    def is_harmony(self) -> bool:
        """Whether calls are messages, as in gpt-oss."""
        return self.head.startswith(CALL)

    @property
    def before_name(self) -> str:
        """The start of a call that has tags, without a quotation mark before the name."""
        before = self.head.partition("{name}")[0]
        return "" if before.startswith("{") else re.split(r'"|\{id\}|functions\.', before)[0]

    @property
    def tag_of_head(self) -> str:
        """The opening tag that is a part of the head."""
        return self.before_name if not self.opening else ""

    @property
    def end(self) -> str:
        """The closing tag that the parser looks for; the opening tag for formats without a closing tag."""
        return self.closing or (self.tail if self.tag_of_head else self.opening)
