"""The tools of the web page, which run on this machine: ``localllm serve --page-tools``.

The page shows the calls of a model, requests the user's permission, and sends allowed calls here. Tools read files
and start programs, so a client's key is never enough. With a key file the requests need an administrator's key.
Otherwise they need the page's key, which the server prints at its start, and must come from this machine. Other pages
in the browser, other users of the machine, and clients of a reverse proxy do not know this key.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request

from localllm.agent_tools.file_edits import undo_edit
from localllm.agent_tools.instructions import ProjectInstructions, read_instructions
from localllm.agent_tools.tool import (
    AgentTool,
    FileEdit,
    IsStopped,
    call_as_shown,
    digest_of,
    preview_of,
    shown_change,
)
from localllm.agent_tools.toolbox import Toolbox
from localllm.errors import UsageError
from localllm.nesting import MAX_CALL_NESTING, parse_json
from localllm.server.http import HTTPError
from localllm.server.keys import CURRENT, is_admin

#: Header of the page's key.
KEY_HEADER = "x-page-key"

#: Maximum number of images of a result, of their bytes together, and of edits that can be undone.
_MAX_IMAGES, _MAX_IMAGE_BYTES, _MAX_EDITS = 8, 32 << 20, 50


class PageTools:
    """The tools that the operator has switched on. Methods may be called by several threads.

    Attributes:
        toolbox: the tools of the table ``[tools]``.
        folders: working folders, resolved, by the names that the page shows.
        key: the page's key; None if the server has a key file.
    """

    def __init__(self, toolbox: Toolbox, folders: Mapping[str, Path], key: str | None) -> None:
        self.toolbox, self.folders, self.key = toolbox, dict(folders), key
        self._lock = threading.Lock()
        self._warnings: dict[str, None] = {}
        self._edits: dict[str, FileEdit] = {}  # by id, oldest first

    def check(self, request: Request) -> None:
        """Raise HTTPError unless the request comes from an administrator, or from the page on this machine."""
        if self.key is None:
            if CURRENT.get() is None or not is_admin():
                raise HTTPError(403, "tools of the page need an administrator's key: use a key file (--keys)")
            return
        if request.client is None or not _is_loopback(request.client.host):
            raise HTTPError(403, "the page has tools only on the machine of the server: open the page there")
        sent = request.headers.get(KEY_HEADER, "")
        if not hmac.compare_digest(sent.encode("latin-1"), self.key.encode()):
            raise HTTPError(403, "open the address that the server has printed, to use tools", "page_key_needed")

    def described(self, folder: str, is_stopped: IsStopped) -> dict[str, Any]:
        """Return the tools of a chat and the text of its instructions. ``folder`` is empty without a folder."""
        project = self._project(folder)
        tools = self._tools(folder, project, is_stopped).values()
        with self._lock:
            self._warnings |= dict.fromkeys(self.toolbox.take_warnings())
            warnings = [*self._warnings, *project.warnings]
        rows = [
            {**tool.schema["function"], "mark": tool.mark, "is_editor": tool.preview is not None} for tool in tools
        ]
        return {
            "allowed": True,
            "folders": list(self.folders),
            "has_servers": bool(self.toolbox.settings.servers),
            "rounds": self.toolbox.settings.rounds,
            "tools": rows,
            "system": project.system_text,
            "summary": project.summary,
            "warnings": warnings,
        }

    def preview(self, call: ToolCallRequest, is_stopped: IsStopped) -> dict[str, str]:
        """Return the diff of a call and its digest; both are empty if the tool changes no files.

        Raises UsageError if the call would fail.
        """
        change = preview_of(self._tool(call, is_stopped), _arguments(call))
        return {"change": shown_change(change), "digest": digest_of(change)}

    def call(self, call: ToolCallRequest, is_stopped: IsStopped) -> dict[str, Any]:
        """Return the text and images of a call, and the id under which `undo` takes its edit back, or None."""
        output = call_as_shown(self._tool(call, is_stopped), _arguments(call), call.digest, is_stopped)
        images = [base64.b64encode(image).decode() for image in _bounded(output.images)]
        return {"text": output.text, "images": images, "undo": output.edit and self._keep(output.edit)}

    def undo(self, id_: str) -> str:
        """Take an edit back, and return a sentence about it. Raises UsageError if the file has changed since."""
        with self._lock:
            edit = self._edits.get(id_)
            if edit is None:
                raise UsageError(f"this edit cannot be undone: only the last {_MAX_EDITS} edits of this server can")
            undo_edit(edit)
            del self._edits[id_]
        return edit.undone

    def restart(self) -> None:
        """Start the MCP servers again: servers that have ended, and servers that could not be started."""
        with self._lock:
            ended = self.toolbox
            self.toolbox = Toolbox(msgspec.to_builtins(ended.settings), skills=ended.skills)
            self._warnings.clear()
        ended.close()

    def close(self) -> None:
        self.toolbox.close()

    def _keep(self, edit: FileEdit) -> str:
        id_ = uuid.uuid4().hex
        with self._lock:
            self._edits[id_] = edit
            if len(self._edits) > _MAX_EDITS:
                del self._edits[next(iter(self._edits))]
        return id_

    def _tool(self, call: ToolCallRequest, is_stopped: IsStopped) -> AgentTool:
        """Return the tool of a call. Raises HTTPError if it is not the tool that the user has seen."""
        tool = self._tools(call.folder, self._project(call.folder), is_stopped).get(call.name)
        if tool is None or tool.mark != call.mark:
            raise HTTPError(409, f"the tool {call.name!r:.80} has changed: reload the page", "tool_changed")
        return tool

    def _tools(self, folder: str, project: ProjectInstructions, is_stopped: IsStopped) -> dict[str, AgentTool]:
        with self._lock:  # otherwise two threads would start the same MCP server
            tools = self.toolbox.tools(is_stopped, self.folders.get(folder))
        return tools | {tool.name: tool for tool in project.tools}

    def _project(self, folder: str) -> ProjectInstructions:
        if folder and folder not in self.folders:
            raise HTTPError(404, f"the page has no folder {folder!r:.80}: choose another in the settings of the chat")
        return read_instructions(self.folders.get(folder), self.toolbox.skills)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a client of a Unix socket, or a name that a proxy has sent
        return False


def _bounded(images: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the first images, at most `_MAX_IMAGES` with `_MAX_IMAGE_BYTES` together."""
    n_bytes = 0
    for image in images[:_MAX_IMAGES]:
        n_bytes += len(image)
        if n_bytes > _MAX_IMAGE_BYTES:
            return
        yield image


# -- Requests --------------------------------------------------------------------------------------------------------


class ToolCallRequest(msgspec.Struct):
    """A call of a model.

    Attributes:
        name: name of the tool.
        mark: `AgentTool.mark` of the tool that the user has seen.
        arguments: JSON text that the model has written.
        folder: name of the chat's working folder; empty without a folder.
        digest: `digest_of` the diff that the user has seen; empty if the tool changes no files.
    """

    name: str
    mark: str
    arguments: str
    folder: str = ""
    digest: str = ""


def _arguments(call: ToolCallRequest) -> dict[str, Any]:
    try:
        arguments = parse_json(call.arguments, MAX_CALL_NESTING)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise HTTPError(400, "arguments must be the text of a JSON object")
    return arguments
