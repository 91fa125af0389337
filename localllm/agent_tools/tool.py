"""The interface of tools that a model calls."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from localllm.errors import UsageError
from localllm.parallel import in_thread, wait_for

#: Returns whether the user has stopped the call.
IsStopped = Callable[[], bool]

#: Time limit of a call in seconds.
CALL_SECONDS = 120.0
#: Maximum length of a tool's result in characters. The model gets a longer result cut to this length.
MAX_RESULT = 20_000


@dataclass(frozen=True, slots=True)
class FileEdit:
    """A change of a file, which can be applied and undone.

    Attributes:
        path: the file, with links followed.
        name: the path that the model named.
        before: content before the edit; None if the edit has created the file.
        after: content after the edit.
    """

    path: Path
    name: str
    before: bytes | None
    after: bytes

    @property
    def undone(self) -> str:
        """A sentence for the user after undo."""
        return f"{self.name} is {'removed' if self.before is None else 'restored'}"


class ToolOutput(NamedTuple):
    """The result of a call: text, contents of image files, and the edit that the call has applied."""

    text: str
    images: tuple[bytes, ...] = ()
    edit: FileEdit | None = None


@dataclass(frozen=True, slots=True)
class AgentTool:
    """A tool that models can call.

    Attributes:
        name: unique among the enabled tools.
        description: for the model.
        parameters: JSON schema of the arguments.
        run: returns the output of a call, and ends soon when its second argument returns True. May raise any
            exception, whose message is for the model.
        preview: returns the diff of the change that a call would make. Raises UsageError if the call would fail.
            None if the tool changes no files.
        scope: limit of a permanent permission, such as a folder; empty without a limit.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[[Mapping[str, Any], IsStopped], ToolOutput | str]
    preview: Callable[[Mapping[str, Any]], str] | None = None
    scope: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's format for functions."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def mark(self) -> str:
        """The key of a stored permission. Includes a hash, so that a changed description needs new permission."""
        parts = [self.schema, self.scope] if self.scope else self.schema
        return f"{self.name} {hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]}"


def call_tool(tool: AgentTool, arguments: Mapping[str, Any], is_stopped: IsStopped) -> ToolOutput:
    """Run a call, unless it was stopped. The output's text is cut to `MAX_RESULT` characters; errors become text."""
    if is_stopped():  # for example while MCP servers started: the user no longer expects an effect
        return ToolOutput("error: stopped before it was run")
    try:
        output = tool.run(arguments, is_stopped)
    except Exception as error:  # the model gets every error of a tool as text
        output = f"error: {error}"
    if isinstance(output, str):
        output = ToolOutput(output)
    text = storable(output.text)
    if len(text) > MAX_RESULT:
        text = f"{text[:MAX_RESULT]}\n(cut off: it has {len(text):,} characters)"
    return output._replace(text=text)


def preview_of(tool: AgentTool, arguments: Mapping[str, Any]) -> str:
    """Return the diff of a call; empty if the tool changes no files. Raises UsageError if the call would fail."""
    if tool.preview is None:
        return ""
    try:
        return storable(tool.preview(arguments))
    except Exception as error:
        raise UsageError(str(error)) from None


def shown_change(change: str) -> str:
    """Return a diff for the user, cut to `MAX_RESULT` characters."""
    return change if len(change) <= MAX_RESULT else f"{change[:MAX_RESULT]}\n… {len(change):,} characters"


def digest_of(change: str) -> str:
    """Return a hash of a diff; empty if the diff is empty."""
    return hashlib.sha256(change.encode()).hexdigest() if change else ""


def call_as_shown(tool: AgentTool, arguments: Mapping[str, Any], digest: str, is_stopped: IsStopped) -> ToolOutput:
    """Run a call if its diff is still the diff that the user has seen, whose `digest_of` is ``digest``."""
    try:
        if digest_of(preview_of(tool, arguments)) != digest:
            return ToolOutput("error: the file has changed in the meantime: read it again")
    except UsageError as error:
        return ToolOutput(f"error: {error}")
    return call_tool(tool, arguments, is_stopped)


def storable(text: str) -> str:
    """Return ``text`` with lone surrogates escaped. File names may contain them, but UTF-8 cannot encode them."""
    return text.encode("utf-8", "backslashreplace").decode()


def stoppable(tool: AgentTool) -> AgentTool:
    """Return a tool that runs in a thread, because name lookups and reading damaged PDF files cannot be cancelled."""

    def run(arguments: Mapping[str, Any], is_stopped: IsStopped) -> ToolOutput | str:
        is_over = threading.Event()  # the thread also ends after the time limit
        work = partial(tool.run, arguments, lambda: is_over.is_set() or is_stopped())
        try:
            output: ToolOutput | str = wait_for(in_thread(work), CALL_SECONDS, is_stopped)
        finally:
            is_over.set()
        return output

    return replace(tool, run=run)


# -- Arguments -------------------------------------------------------------------------------------------------------


def text_parameters(*required: str, **descriptions: str) -> dict[str, Any]:
    """Return the JSON schema of an object of strings, from the description of each string."""
    properties = {name: {"type": "string", "description": text} for name, text in descriptions.items()}
    return {"type": "object", "properties": properties, "required": list(required)}


def text_argument(arguments: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return an argument that must be a string of valid Unicode.

    Raises UsageError if it is missing and has no default, or has lone surrogates, which cannot be stored or sent.
    """
    value = arguments.get(name, default)
    if not isinstance(value, str):
        raise UsageError(f"{name} is {'missing' if value is None else 'not a string'}: give {name} as a string")
    if storable(value) != value:
        raise UsageError(f"{name} has a character that is not valid Unicode: remove it")
    return value
