"""Web search with a SearXNG, and pages of private hosts that the user allows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from localllm.agent_tools import web_tools
from localllm.agent_tools.tool import call_tool
from localllm.agent_tools.web_tools import fetch_tool, search_tool
from localllm.errors import UsageError
from localllm.web import Page

RESULTS = [{"title": f"T{i}", "url": f"http://example.org/{i}", "content": "c" * 2000} for i in range(30)]


class _Searx(BaseHTTPRequestHandler):
    answer = json.dumps({"results": RESULTS})

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/page")
            self.end_headers()
            return
        is_query = url.path == "/search" and parse_qs(url.query) == {"q": ["pears & plums"], "format": ["json"]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write((self.answer if is_query else f"the page {self.path}").encode())

    def log_message(self, *arguments: object) -> None:
        return


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Searx) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_search_results_are_short_texts(address: str) -> None:
    tool = search_tool(f"{address}/")
    results = call_tool(tool, {"query": "pears & plums"}, lambda: False).text.split("\n\n")
    assert len(results) == 10
    assert results[9] == f"T9\nhttp://example.org/9\n{'c' * 500}"


@pytest.mark.parametrize(
    "answer", ["<html>", "[]", '{"results": 5}', '{"results": ["x"]}', "[" * 100_000, '{"results": null}', "\udcff"]
)
def test_a_wrong_search_result_is_an_error(address: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Searx, "answer", answer.encode("utf-8", "replace").decode())
    text = call_tool(search_tool(address), {"query": "pears & plums"}, lambda: False).text
    assert text.startswith("error: the search gave no JSON")


def test_a_search_without_results(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Searx, "answer", '{"results": []}')
    assert call_tool(search_tool(address), {"query": "pears & plums"}, lambda: False).text == "nothing found"


def test_an_address_must_be_a_web_address() -> None:
    for wrong in ("searx", "file:///etc/passwd", "http://a b"):
        with pytest.raises(UsageError, match="is not the address of a SearXNG"):
            search_tool(wrong)


def test_private_hosts_are_fetched_only_if_allowed(address: str) -> None:
    def fetched(tool_hosts: tuple[str, ...], path: str) -> str:
        return call_tool(fetch_tool(tool_hosts), {"url": address + path}, lambda: False).text

    assert fetched((), "/a").endswith("is not a public host on the Internet")
    assert fetched(("*.lan",), "/a").endswith("is not a public host on the Internet")
    assert fetched(("127.0.0.1",), "/a") == "the page /a"
    assert fetched(("127.0.0.1",), "/away") == "error: localhost is not a public host on the Internet"
    assert fetched(("127.0.0.1", "LOCALHOST"), "/away") == "the page /page"


@pytest.mark.parametrize(
    ("data", "charset", "text"),
    [
        (b"<p> a \n\r\n  b </p>\n\n", "utf-8", "a\nb"),
        (b"a" + b" " * 1_000_000 + b"b", "utf-8", "a" + " " * 1_000_000 + "b"),  # in linear time
        (b"caf\xe9", "latin-1", "café"),
        (b"-" + b"a" * 1_000_000, "punycode", "-" + "a" * 1_000_000),
        (b"\\x41", "unicode-escape", "\\x41"),
        (b"pears", "zlib", "pears"),
        (b"pears", "no such charset", "pears"),
    ],
)
def test_the_text_of_any_page_is_found_quickly(
    data: bytes, charset: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_tools, "fetch", lambda *_, **__: Page(data, "text/html", charset))
    assert web_tools._fetch((), {"url": "http://example.org"}, lambda: False) == text


def test_a_search_is_not_redirected_to_another_host(address: str) -> None:
    assert (
        "localhost is not an allowed host"
        in call_tool(search_tool(f"{address}/away?"), {"query": "x"}, lambda: False).text
    )
