"""The routes of the page's tools: who may use them, and what they return."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from localllm.agent_tools.tool import AgentTool, ToolOutput, text_parameters
from localllm.agent_tools.toolbox import Toolbox
from localllm.server.http import HTTPError, Limits
from localllm.server.keys import KeyFile
from localllm.server.page_tools import PageTools, ToolCallRequest
from tests.helpers.http_server import Serving, demo, serving
from tests.localllm.server.test_keys import key_file, section

KEY = "page key"
PNG = b"\x89PNG\r\n\x1a\n and more"
ROUTES = {
    "/page/tools": None,
    "/page/tools/preview": {"name": "read_file", "mark": "", "arguments": "{}"},
    "/page/tools/call": {"name": "read_file", "mark": "", "arguments": "{}"},
    "/page/tools/undo": {"id": "a"},
    "/page/tools/restart": {},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text("pears\n")
    (folder / "b.png").write_bytes(PNG)
    (folder / "AGENTS.md").write_text("Write short sentences.")
    (tmp_path / "secret").write_text("plums")
    return folder.resolve()


@pytest.fixture
def tools(folder: Path) -> PageTools:
    return PageTools(Toolbox({"fetch": True}), {"notes": folder}, KEY)


@pytest.fixture(scope="module")
def started() -> Iterator[Serving]:
    with serving(demo(), page_tools=PageTools(Toolbox({"fetch": True}), {}, KEY)) as started:
        yield started


@pytest.fixture
def server(started: Serving, folder: Path) -> Serving:
    assert started.app.page_tools is not None
    started.app.page_tools.folders = {"notes": folder}
    return started


def ask(server: Serving, path: str, body: Any = None, **headers: str) -> httpx.Response:
    headers = headers or {"X-Page-Key": KEY}
    return httpx.request(
        "GET" if body is None else "POST", f"{server.url}{path}", json=body, headers=headers, timeout=60
    )


def listed(server: Serving, folder: str = "notes") -> dict[str, Any]:
    answer: dict[str, Any] = ask(server, f"/page/tools?folder={folder}").json()
    return answer


def call(server: Serving, name: str, arguments: str, action: str = "call", **more: str) -> httpx.Response:
    marks = {tool["name"]: tool["mark"] for tool in listed(server)["tools"]}
    body = {"name": name, "mark": marks.get(name, ""), "arguments": arguments, "folder": "notes", **more}
    return ask(server, f"/page/tools/{action}", body)


# -- Access ----------------------------------------------------------------------------------------------------------


def test_a_server_without_the_flag_has_no_tools() -> None:
    with serving(demo()) as server:
        assert ask(server, "/page/tools").json() == {"allowed": False}
        for path, body in ROUTES.items():
            assert body is None or ask(server, path, body).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Nothing": "1"},
        {"X-Page-Key": "wrong"},
        {"X-Page-Key": ""},
        {"Authorization": f"Bearer {KEY}"},
        {"X-Page-Key": KEY, "Origin": "https://evil.example"},
        {"X-Page-Key": KEY, "Host": "evil.example"},
    ],
)
def test_tools_need_the_page_s_key(started: Serving, headers: dict[str, str]) -> None:
    for path, body in ROUTES.items():
        answer = ask(started, path, body, **headers)
        assert answer.status_code == 403
        assert (answer.json()["error"]["code"] == "page_key_needed") == (len(headers) == 1)
        assert KEY not in answer.text


def test_a_key_of_a_client_is_not_enough(tools: PageTools) -> None:
    with serving(demo(), page_tools=tools, limits=Limits(api_keys=("client",))) as server:
        key, page_key = {"Authorization": "Bearer client"}, {"X-Page-Key": KEY}
        for path, body in ROUTES.items():
            assert ask(server, path, body, **page_key).status_code == 401
            assert ask(server, path, body, **key).status_code == 403
        assert ask(server, "/page/tools", **key, **page_key).json()["allowed"] is True


def test_with_a_key_file_tools_need_an_administrator(tmp_path: Path, folder: Path) -> None:
    path = key_file(tmp_path, section("client"), section("metrics", role="metrics"), section("boss", role="admin"))
    tools = PageTools(Toolbox(), {"notes": folder}, None)
    with serving(demo(), page_tools=tools, limits=Limits(keys=KeyFile(path))) as server:
        for path_, body in ROUTES.items():
            assert ask(server, path_, body, **{"X-Page-Key": KEY}).status_code == 401
            for key in ("client", "metrics"):
                assert ask(server, path_, body, Authorization=f"Bearer {key}").status_code == 403
        assert ask(server, "/page/tools", Authorization="Bearer boss").json()["folders"] == ["notes"]


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("192.168.1.5", False),
        ("203.0.113.9", False),
        ("a.localhost", False),
        ("", False),
        (None, False),
    ],
)
def test_the_page_s_key_is_used_on_this_machine(tools: PageTools, address: str | None, is_allowed: bool) -> None:
    client = None if address is None else SimpleNamespace(host=address)
    request: Any = SimpleNamespace(client=client, headers={"x-page-key": KEY})
    if is_allowed:
        tools.check(request)
        return
    with pytest.raises(HTTPError, match="only on the machine of the server"):
        tools.check(request)


def test_without_keys_nobody_is_an_administrator(folder: Path) -> None:
    with serving(demo(), page_tools=PageTools(Toolbox(), {"notes": folder}, None)) as server:
        assert ask(server, "/page/tools").status_code == 403


# -- Tools -----------------------------------------------------------------------------------------------------------


def test_tools_of_a_folder_are_listed(server: Serving) -> None:
    answer = listed(server)
    names = {tool["name"]: tool["is_editor"] for tool in answer["tools"]}
    assert names == {
        "read_file": False,
        "search_files": False,
        "edit_file": True,
        "write_file": True,
        "fetch_page": False,
    }
    assert (answer["folders"], answer["rounds"], answer["warnings"]) == (["notes"], 10, [])
    assert "Write short sentences." in answer["system"]
    without = listed(server, "")
    assert ([tool["name"] for tool in without["tools"]], without["system"]) == (["fetch_page"], "")
    assert ask(server, "/page/tools?folder=../secret").status_code == 404


def test_files_are_read_and_stay_in_the_folder(server: Serving) -> None:
    assert call(server, "read_file", '{"path": "a.txt"}').json() == {"text": "pears\n", "images": [], "undo": None}
    assert "plums" not in call(server, "read_file", '{"path": "../secret"}').text
    image = call(server, "read_file", '{"path": "b.png"}').json()
    assert [base64.b64decode(data) for data in image["images"]] == [PNG]


def test_an_edit_is_shown_then_applied_and_undone(server: Serving, folder: Path) -> None:
    arguments = '{"path": "a.txt", "old_text": "pears", "new_text": "figs"}'
    shown = call(server, "edit_file", arguments, "preview").json()
    assert shown["change"].endswith("-pears\n+figs")
    assert call(server, "edit_file", arguments).json()["text"].startswith("error: the file has changed")
    (folder / "a.txt").write_text("more pears\n")
    assert "has changed" in call(server, "edit_file", arguments, digest=shown["digest"]).json()["text"]
    assert (folder / "a.txt").read_text() == "more pears\n"
    shown = call(server, "edit_file", arguments, "preview").json()
    done = call(server, "edit_file", arguments, digest=shown["digest"]).json()
    assert (folder / "a.txt").read_text() == "more figs\n"
    assert ask(server, "/page/tools/undo", {"id": done["undo"]}).json() == {"text": "a.txt is restored"}
    assert (folder / "a.txt").read_text() == "more pears\n"
    assert ask(server, "/page/tools/undo", {"id": done["undo"]}).status_code == 400
    assert call(server, "edit_file", '{"path": "a.txt"}', "preview").status_code == 400


def test_a_call_is_of_the_tool_that_was_shown(server: Serving) -> None:
    assert call(server, "read_file", '{"path": "a.txt"}', mark="read_file 0123").status_code == 409
    assert call(server, "read_file", '{"path": "a.txt"}', folder="").status_code == 409
    assert call(server, "rm", "{}").status_code == 409
    for arguments in ("[]", "{", '{"a":' * 60 + "1" + "}" * 60, ""):
        assert call(server, "read_file", arguments).status_code == 400
    assert "path is missing" in call(server, "read_file", "{}").json()["text"]


class _Slow(Toolbox):
    """A toolbox with one tool, which runs until it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.is_running, self.was_stopped = threading.Event(), threading.Event()

    def tools(self, is_stopped: Any = None, folder: Path | None = None) -> dict[str, AgentTool]:
        return {"slow": AgentTool("slow", "Waits.", text_parameters(), self._run)}

    def _run(self, arguments: Mapping[str, Any], is_stopped: Any) -> ToolOutput:
        self.is_running.set()
        end = time.monotonic() + 60
        while not is_stopped() and time.monotonic() < end:
            time.sleep(0.01)
        if is_stopped():
            self.was_stopped.set()
        return ToolOutput("", (b"x" * (20 << 20), b"y" * (20 << 20)))


def test_a_call_ends_when_the_page_is_closed() -> None:
    toolbox = _Slow()
    mark = toolbox.tools()["slow"].mark
    with serving(demo(), page_tools=PageTools(toolbox, {}, KEY)) as server:
        body = json.dumps({"name": "slow", "mark": mark, "arguments": "{}"})
        head = (
            f"POST /page/tools/call HTTP/1.1\r\nHost: localhost\r\nX-Page-Key: {KEY}\r\nContent-Length: {len(body)}"
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(f"{head}\r\n\r\n{body}".encode())
            assert toolbox.is_running.wait(60)
        assert toolbox.was_stopped.wait(60)


def test_images_of_a_result_are_bounded() -> None:
    toolbox = _Slow()
    tools = PageTools(toolbox, {}, KEY)
    body: Any = SimpleNamespace(name="slow", mark=toolbox.tools()["slow"].mark, arguments="{}", folder="", digest="")
    polls = iter([False])  # stopped after the start
    assert len(tools.call(body, lambda: next(polls, True))["images"]) == 1


def test_a_call_that_was_stopped_before_its_start_changes_nothing(tools: PageTools, folder: Path) -> None:
    arguments = '{"path": "new.txt", "content": "x"}'
    marks = {tool["name"]: tool["mark"] for tool in tools.described("notes", lambda: False)["tools"]}
    request = ToolCallRequest("write_file", marks["write_file"], arguments, "notes")
    request.digest = tools.preview(request, lambda: False)["digest"]
    assert "stopped" in tools.call(request, lambda: True)["text"]
    assert not (folder / "new.txt").exists()
    assert tools.call(request, lambda: False)["text"] == "new.txt is created"


def test_names_that_are_not_unicode_are_typed_errors(server: Serving) -> None:
    arguments = r'{"path": "\udcff", "old_text": "a", "new_text": "b"}'
    answer = call(server, "edit_file", arguments, "preview")
    assert (answer.status_code, "not valid Unicode" in answer.text) == (400, True)
