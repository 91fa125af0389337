"""The tools that a model may call in a chat: built-in tools, which are off by default, and tools of MCP servers.

Settings are the table ``[tools]`` of the settings file::

    [tools]
    read = "~/notes"                  # files in this folder may be read
    run = "python:3.13"               # shell commands in a container of this image
    fetch = true                      # web pages
    private_hosts = ["wiki.lan"]      # hosts of the local network for fetch
    search = "http://localhost:8888"  # web search with this SearXNG
    rounds = 10                       # maximum number of rounds of tool calls in a reply

    [tools.servers.clock]
    command = ["python", "clock.py"]      # or url = "http://localhost:8000/mcp"

A chat with a working folder also has the tools that change files in this folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from localllm.agent_tools.container import command_tool
from localllm.agent_tools.file_tools import file_tools
from localllm.agent_tools.mcp_servers import McpServer
from localllm.agent_tools.tool import AgentTool, IsStopped
from localllm.agent_tools.web_tools import fetch_tool, search_tool
from localllm.errors import SettingsError, StoreError, UsageError
from localllm.files import private_opener
from localllm.regular_file import read_regular
from localllm.shell import join_command, split_command
from localllm.web import is_web

#: The user's answer to a tool call. "chat" and "always" allow later calls of the tool, in this chat or everywhere.
Permission = Literal["no", "once", "chat", "always"]


class ServerSettings(msgspec.Struct, forbid_unknown_fields=True):
    """An MCP server: a command that starts it, or its URL."""

    command: list[str] = []
    url: str = ""
    env: dict[str, str] = {}


class ToolSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The table ``[tools]`` of the settings file."""

    read: str = ""
    run: str = ""
    fetch: bool = False
    private_hosts: list[str] = []
    search: str = ""
    rounds: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 10
    servers: dict[str, ServerSettings] = {}


class Toolbox:
    """The tools of one process, shared by all chats. ``settings`` may be changed at any time."""

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        allowed: Path | None = None,
        skills: Path | None = None,
    ) -> None:
        """Create the tools of the table ``[tools]``. Raises SettingsError if a setting is wrong.

        ``allowed``: the file of permanent permissions. ``skills``: the user's folder of skills.
        """
        if isinstance(settings, Mapping) and settings.get("run") is True:
            raise SettingsError(
                'run = true in [tools] is not supported: commands run in a container; write run = "IMAGE"'
            )
        try:
            self.settings = msgspec.convert(settings or {}, ToolSettings)
        except msgspec.ValidationError as error:
            raise SettingsError(f"the table [tools] of the settings file is wrong: {error}") from None
        for name, server in self.settings.servers.items():
            _check_server(name, server)
        self.skills = skills
        self._path = allowed
        self._allowed: set[str] = set()
        if allowed is not None:
            with suppress(OSError, ValueError):
                self._allowed.update(read_regular(allowed, 1 << 20).decode().splitlines())
        self._servers: dict[str, McpServer] = {}
        self._failed: dict[str, str] = {}

    def tools(self, is_stopped: IsStopped = lambda: False, folder: Path | None = None) -> dict[str, AgentTool]:
        """Return the enabled tools by name, and start MCP servers that are not running.

        ``folder`` is the working folder, a resolved path. Its files may be changed.
        """
        tools = self._built_in(folder)
        for name, server_settings in list(self.settings.servers.items()):
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
                scope = server_settings.url or join_command(server_settings.command)
                for called, description, parameters in server.tools:
                    plain = re.sub(r"[^A-Za-z0-9_-]", "_", called)[:40]
                    run = partial(server.call, called)
                    tools.append(AgentTool(f"{name}__{plain}", description, parameters, run, scope=scope))
        return {tool.name: tool for tool in tools}

    def _built_in(self, folder: Path | None) -> list[AgentTool]:
        settings, tools = self.settings, list[AgentTool]()
        if folder is not None:
            tools += file_tools(folder, is_writable=True)
        elif settings.read:
            tools += file_tools(_resolved(settings.read), is_writable=False)
        if settings.run:
            try:
                tools.append(command_tool(settings.run, folder))
            except UsageError as error:
                self._failed.setdefault("run_command", f"run_command is off: {error}")
        if settings.fetch:
            tools.append(fetch_tool(settings.private_hosts))
        if settings.search:
            tools.append(search_tool(settings.search))
        return tools

    def take_warnings(self) -> list[str]:
        """Return the reasons why servers could not be started. Each reason is returned once."""
        warnings = [text for text in self._failed.values() if text]
        self._failed = dict.fromkeys(self._failed, "")
        return warnings

    def is_allowed(self, tool: AgentTool) -> bool:
        return tool.mark in self._allowed

    def allow(self, tool: AgentTool) -> None:
        """Allow a tool from now on, in later chats as well. Raises StoreError if the permission cannot be stored."""
        self._allowed.add(tool.mark)
        if self._path is not None:
            try:
                with open(self._path, "a", encoding="utf-8", opener=private_opener) as file:
                    file.write(tool.mark + "\n")
            except OSError as error:
                raise StoreError(f"{self._path} cannot be written ({error.strerror}): later chats ask") from None

    def change(self, text: str) -> None:
        """Enable or disable tools until the program ends, for example ``fetch on``. Raises UsageError."""
        action, _, value = text.partition(" ")
        name, _, target = value.strip().partition(" ")
        checks: dict[str, Callable[[str], object]]
        checks = {"read": _check_folder, "run": partial(command_tool, folder=None), "search": search_tool}
        if action in checks and value:
            if value != "off":
                checks[action](value)
            setattr(self.settings, action, "" if value == "off" else value)
            if action == "run":
                self._failed.pop("run_command", None)
        elif action == "fetch" and value in ("on", "off"):
            self.settings.fetch = value == "on"
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
            raise UsageError(
                "give /tools read FOLDER|off, run IMAGE|off, fetch on|off, search ADDRESS|off, add NAME COMMAND|URL "
                "or remove NAME"
            )

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


def _check_folder(folder: str) -> None:
    if not _resolved(folder).is_dir():
        raise UsageError(f"there is no folder {folder}: check the path")


def _resolved(folder: str) -> Path:
    try:
        return Path(folder).expanduser().resolve()
    except (OSError, ValueError, RuntimeError):  # the path contains a NUL, or links form a cycle
        raise UsageError(
            f"the folder that may be read, {folder!r}, is not a valid path: give another folder"
        ) from None
