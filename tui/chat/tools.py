"""Tools that a model may call: tools of MCP servers, and three built-in tools that are off by default.

Settings are the table ``[tools]`` of the settings file::

    [tools]
    read = "~/notes"      # files under this folder may be read
    run = true            # shell commands
    fetch = true          # web pages
    rounds = 10           # maximum number of rounds of tool calls in a reply

    [tools.servers.clock]
    command = ["python", "clock.py"]      # or url = "http://localhost:8000/mcp"
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from localllm.errors import SettingsError, StoreError, UsageError
from localllm.files import private_opener
from localllm.parallel import in_thread
from localllm.regular_file import read_regular
from localllm.shell import split_command
from localllm.tui.chat.attachments import MAX_OUTPUT, command_output, path_of, read_text_file
from localllm.tui.chat.mcp_servers import CALL_SECONDS, McpServer, wait_for
from localllm.tui.text import storable
from localllm.web import fetch, is_web

#: The user's answer to a tool call. "chat" and "always" allow later calls of the tool, in this chat or everywhere.
Permission = Literal["no", "once", "chat", "always"]
IsStopped = Callable[[], bool]

#: Maximum length of a tool's result in characters. The model gets a longer result cut to this length.
MAX_RESULT = 20_000


@dataclass(frozen=True, slots=True)
class ChatTool:
    """A tool that models can call; ``parameters`` is a JSON schema.

    Names of MCP tools start with the name of their server, so that no server can replace another tool. ``run``
    returns the result of a call, and ends soon when its second argument returns True.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[[Mapping[str, Any], IsStopped], str]

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's format for functions."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def mark(self) -> str:
        """The key of a stored permission. Includes a hash, so that a changed description needs new permission."""
        return f"{self.name} {hashlib.sha256(json.dumps(self.schema, sort_keys=True).encode()).hexdigest()[:16]}"


class ServerSettings(msgspec.Struct, forbid_unknown_fields=True):
    """An MCP server: a command that starts it, or its URL."""

    command: list[str] = []
    url: str = ""
    env: dict[str, str] = {}


class ToolSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The table ``[tools]`` of the settings file."""

    read: str = ""
    run: bool = False
    fetch: bool = False
    rounds: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 10
    servers: dict[str, ServerSettings] = {}


class Toolbox:
    """The tools of one process, shared by all chats. ``settings`` may be changed at any time."""

    def __init__(self, settings: Mapping[str, Any] | None = None, allowed: Path | None = None) -> None:
        """``settings`` is the table ``[tools]``; ``allowed`` is the file of permanent permissions.

        Raises SettingsError if a setting is wrong.
        """
        try:
            self.settings = msgspec.convert(settings or {}, ToolSettings)
        except msgspec.ValidationError as error:
            raise SettingsError(f"the table [tools] of the settings file is wrong: {error}") from None
        for name, server in self.settings.servers.items():
            _check_server(name, server)
        self._path = allowed
        self._allowed: set[str] = set()
        if allowed is not None:
            with suppress(OSError, ValueError):
                self._allowed.update(read_regular(allowed, 1 << 20).decode().splitlines())
        self._servers: dict[str, McpServer] = {}
        self._failed: dict[str, str] = {}

    def tools(self, is_stopped: IsStopped = lambda: False) -> dict[str, ChatTool]:
        """Return the enabled tools by name, and start MCP servers that are not running."""
        settings = self.settings
        tools = [_reader(settings.read)] if settings.read else []
        tools += [_RUN] if settings.run else []
        tools += [_FETCH] if settings.fetch else []
        for name, server_settings in list(settings.servers.items()):
            if name in self._failed:
                continue
            if name not in self._servers:
                self._servers[name] = McpServer(server_settings.command, server_settings.url, server_settings.env)
            server = self._servers[name]
            try:
                server.wait(is_stopped)
            except BaseException as error:  # also KeyboardInterrupt, in line mode
                self._end(name)
                if not isinstance(error, UsageError):
                    raise
                if not is_stopped():
                    self._failed[name] = f"the MCP server {name!r}: {error}"
            else:
                for called, description, parameters in server.tools:
                    plain = re.sub(r"[^A-Za-z0-9_-]", "_", called)[:40]
                    tools.append(ChatTool(f"{name}__{plain}", description, parameters, partial(server.call, called)))
        return {tool.name: tool for tool in tools}

    def take_warnings(self) -> list[str]:
        """Return the reasons why servers could not be started. Each reason is returned once."""
        warnings = [text for text in self._failed.values() if text]
        self._failed = dict.fromkeys(self._failed, "")
        return warnings

    def is_allowed(self, tool: ChatTool) -> bool:
        return tool.mark in self._allowed

    def allow(self, tool: ChatTool) -> None:
        """Allow a tool from now on, in later chats as well. Raises StoreError if the permission cannot be stored."""
        self._allowed.add(tool.mark)
        if self._path is not None:
            try:
                with open(self._path, "a", encoding="utf-8", opener=private_opener) as file:
                    file.write(tool.mark + "\n")
            except OSError as error:
                raise StoreError(f"{self._path} cannot be written ({error.strerror}): later chats ask") from None

    def change(self, text: str) -> None:
        """Enable or disable tools until the program ends, for example ``run on``. Raises UsageError."""
        action, _, value = text.partition(" ")
        name, _, target = value.strip().partition(" ")
        if action == "read" and value:
            if value != "off" and not path_of(value).is_dir():
                raise UsageError(f"there is no folder {value}: check the path")
            self.settings.read = "" if value == "off" else value
        elif action in ("run", "fetch") and value in ("on", "off"):
            setattr(self.settings, action, value == "on")
        elif action == "add" and target:
            try:
                server = (
                    ServerSettings(url=target) if is_web(target) else ServerSettings(command=split_command(target))
                )
            except ValueError:
                raise UsageError("the command has an unclosed quotation mark: close it") from None
            _check_server(name, server)
            self._end(name)
            self.settings.servers[name] = server
        elif action == "remove" and name in self.settings.servers:
            self._end(name)
            del self.settings.servers[name]
        else:
            raise UsageError("give /tools read FOLDER|off, run|fetch on|off, add NAME COMMAND|URL or remove NAME")

    def _end(self, name: str) -> None:
        self._failed.pop(name, None)
        if (server := self._servers.pop(name, None)) is not None:
            server.close()

    def close(self) -> None:
        for name in list(self._servers):
            self._end(name)


def _check_server(name: str, server: ServerSettings) -> None:
    if not re.fullmatch(r"[A-Za-z0-9-]{1,20}", name):
        raise UsageError(f"an MCP server cannot be named {name!r:.60}: use up to 20 letters, digits and hyphens")
    if bool(server.command) == bool(server.url):
        raise UsageError(f"the MCP server {name!r} needs either a command or a url")


def result_of(tool: ChatTool, arguments: Mapping[str, Any], is_stopped: IsStopped) -> str:
    """Return a tool's result or error message, cut to `MAX_RESULT` characters."""
    try:
        text = tool.run(arguments, is_stopped)
    except Exception as error:  # the model gets every error of a tool as text
        text = f"error: {error}"
    text = storable(text)
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}\n(cut off: it has {len(text):,} characters)"


# -- Built in --------------------------------------------------------------------------------------------------------


def _stoppable(run: Callable[[Mapping[str, Any], IsStopped], str]) -> Callable[[Mapping[str, Any], IsStopped], str]:
    """Run a tool in a thread, because name lookups and reading damaged PDFs cannot be cancelled."""

    def run_in_thread(arguments: Mapping[str, Any], is_stopped: IsStopped) -> str:
        text: str = wait_for(in_thread(partial(run, arguments, is_stopped)), CALL_SECONDS, is_stopped)
        return text

    return run_in_thread


def _object(name: str, description: str) -> dict[str, Any]:
    text = {"type": "string", "description": description}
    return {"type": "object", "properties": {name: text}, "required": [name]}


def _reader(root: str) -> ChatTool:
    try:
        folder = path_of(root).resolve()
    except (OSError, ValueError, RuntimeError):  # the path contains a NUL, or links form a cycle
        raise UsageError(f"the folder that may be read, {root!r}, is not a valid path: give another folder") from None

    def read(arguments: Mapping[str, Any], is_stopped: IsStopped) -> str:
        path = (folder / str(arguments["path"])).resolve()
        if not path.is_relative_to(folder):  # also if a link points outside
            raise UsageError("the path is outside the folder that may be read")
        if path.is_dir():
            return "\n".join(sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in path.iterdir()))
        return read_text_file(str(path))

    parameters = _object("path", "relative to the folder that may be read; . is that")
    return ChatTool("read_file", "Reads a text file, or lists a folder.", parameters, _stoppable(read))


_RUN = ChatTool(
    "run_command",
    "Runs a shell command, and gives what it prints.",
    _object("command", "the command line"),
    lambda arguments, is_stopped: command_output(str(arguments["command"]), is_stopped),
)


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._skipped = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._skipped += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in ("script", "style") and self._skipped > 0
        self.parts += "\n" if tag in ("p", "div", "li", "tr", "h1", "h2", "h3", "title") else ""

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.parts.append(data)


def _fetch(arguments: Mapping[str, Any], is_stopped: IsStopped) -> str:
    page = fetch(str(arguments["url"]), MAX_OUTPUT, is_stopped=is_stopped)
    text = page.data.decode(page.charset, "replace")
    if page.content_type != "text/html":
        return text
    parser = _Text()
    parser.feed(text)
    return re.sub(r"\s*\n\s*", "\n", "".join(parser.parts)).strip()


_FETCH = ChatTool("fetch_page", "Gives the text of a web page.", _object("url", "its address"), _stoppable(_fetch))
