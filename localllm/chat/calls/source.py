"""Text of a reply while it arrives, and the call that is being read from it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from localllm.chat.calls.argument_types import ArgumentTypes
from localllm.chat.calls.json_text import PYTHON_WORDS, json_word, repaired
from localllm.chat.conversation import ToolCall
from localllm.nesting import MAX_CALL_NESTING

#: The problem of a call whose arguments were cut at `MAX_CALL_NESTING`.
TOO_DEEP = f"its arguments have more than {MAX_CALL_NESTING} parts inside each other"

#: A function that reads text and yields whenever it needs more.
Reading = Generator[None, None, None]


class MalformedError(ValueError):
    """The text is no call, or not the rest of one."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The start of a tool call, or more of its arguments. The whole `ToolCall` follows at its end."""

    index: int  #: of the call in the reply
    id: str
    name: str
    arguments: str = ""  #: the next characters of the JSON
    begins: bool = False
    text: ClassVar[str] = ""  #: answer text of this event, as in `Piece`


class CallSource:
    """Text that was not read yet.

    Attributes:
        text: Unread text from position ``at`` on.
        is_whole: Whether nothing follows.
        is_cut: Whether the model would have continued, so that an open call is no error.
    """

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.is_whole = self.is_cut = False

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    @property
    def is_empty(self) -> bool:
        return self.at == len(self.text)

    def add(self, text: str) -> None:
        """Add text that has arrived. Keep the last character that was read, which tells whether a line begins."""
        n_kept = min(self.at, 1)
        self.text, self.at = self.text[self.at - n_kept :] + text, n_kept

    def take(self, n: int) -> str:
        """Return the next ``n`` characters as read."""
        self.at += n
        return self.text[self.at - n : self.at]

    def put_back(self, text: str) -> None:
        """Undo `take`."""
        self.text, self.at = text + self.text[self.at :], 0

    def skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def wait(self) -> Generator[None, None, bool]:
        """Wait for more text. Return whether there may be some."""
        if self.is_whole:
            return False
        yield
        return True


class Call:
    """A call whose arguments are being read. Emits events; the arguments are valid JSON when it ends.

    Attributes:
        name: Name of the tool.
        types: Types of its arguments.
        problem: Error in its arguments; empty for errors whose repair is certain.
    """

    def __init__(self, index: int, name: str, parameters: Any, emit: Callable[[CallDelta | ToolCall], None]) -> None:
        self.name, self.types, self.problem = name, ArgumentTypes(parameters), ""
        self._delta = CallDelta(index, f"call_{uuid.uuid4().hex[:24]}", name)
        self._emit, self._arguments = emit, list[str]()
        emit(replace(self._delta, begins=True))

    @property
    def is_empty(self) -> bool:
        """Whether the call has no arguments yet."""
        return not self._arguments

    def add(self, arguments: str) -> None:
        if arguments:
            self._arguments.append(arguments)
            self._emit(replace(self._delta, arguments=arguments))

    def add_value(self, name: str, json_value: str) -> None:
        """Add an argument, for formats whose arguments are not one JSON object."""
        self.add(f"{'{' if self.is_empty else ', '}{json.dumps(name, ensure_ascii=False)}: {json_value}")

    def value_json(self, text: str, *path: str, is_string: bool | None = None) -> str:
        """Return the JSON of a value that was written as text.

        Args:
            path: Names of the argument and of its part.
            is_string: Whether the markup declares a string. None: the tool's schema decides.
        """
        types = self.types.of(*path)
        if is_string is None:
            is_string = "string" in types and not (text == "null" and "null" in types)
        if is_string:
            return json.dumps(text, ensure_ascii=False)
        word = json_word(text.strip())
        if word and ("number" in types or word == PYTHON_WORDS.get(text.strip(), text.strip())):
            return word
        # JSON with errors may be a string, unless the schema requires a list or an object.
        max_repairs = None if types & {"array", "object"} else 0
        value = repaired(text, max_repairs=max_repairs, max_depth=MAX_CALL_NESTING - len(path))
        if value is None:
            return json.dumps(text, ensure_ascii=False)
        self.problem = TOO_DEEP if value.is_too_deep else self.problem
        return value.json

    def close_object(self) -> None:
        """End the arguments after `add_value`."""
        self.add("{}" if self.is_empty else "}")

    def end(self) -> None:
        self._emit(ToolCall(self.name, "".join(self._arguments), self._delta.id))


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Schemas of the arguments by tool name, from tools as OpenAI's API describes them."""
    functions = [tool.get("function", tool) for tool in tools]
    return {str(f.get("name")): f.get("parameters") for f in functions if isinstance(f, Mapping)}
