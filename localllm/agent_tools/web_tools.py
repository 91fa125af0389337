"""Tools for the web: fetch_page and web_search."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from functools import partial
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode, urlsplit

from localllm.agent_tools.tool import AgentTool, IsStopped, stoppable, text_argument, text_parameters
from localllm.errors import UsageError
from localllm.nesting import parse_json
from localllm.web import Page, fetch, is_web

#: Maximum size of a page in bytes.
_MAX_BYTES = 1 << 20
#: Maximum number of search results, and maximum characters of a result's title and of its text.
_MAX_RESULTS, _MAX_TITLE, _MAX_SNIPPET = 10, 200, 500
#: Python's codecs that are not charsets of pages. Decoding Punycode takes quadratic time.
_NO_CHARSETS = frozenset(("idna", "punycode", "raw-unicode-escape", "unicode-escape"))


def fetch_tool(private_hosts: Sequence[str] = ()) -> AgentTool:
    """Return a tool that reads web pages. ``private_hosts`` are hosts whose addresses may be private."""
    run = partial(_fetch, tuple(private_hosts))
    scope = " ".join(private_hosts)
    parameters = text_parameters("url", url="its address")
    return stoppable(AgentTool("fetch_page", "Gives the text of a web page.", parameters, run, scope=scope))


def search_tool(address: str) -> AgentTool:
    """Return a tool that searches the web with the SearXNG at ``address``, whose results must include JSON.

    Raises UsageError if the address is not a web address.
    """
    if not is_web(address):
        raise UsageError(
            f"{address!r:.80} is not the address of a SearXNG: give an address such as http://localhost:8888"
        )
    parameters = text_parameters("query", query="words to search for")
    description = "Searches the web. Gives titles, addresses and short texts."
    return stoppable(AgentTool("web_search", description, parameters, partial(_search, address), scope=address))


class _PageText(HTMLParser):
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


def _fetch(private_hosts: Sequence[str], arguments: Mapping[str, Any], is_stopped: IsStopped) -> str:
    page = fetch(text_argument(arguments, "url"), _MAX_BYTES, private_hosts=private_hosts, is_stopped=is_stopped)
    text = _decoded(page)
    if page.content_type != "text/html":
        return text
    parser = _PageText()
    parser.feed(text)
    # A regular expression for white space around line breaks would take quadratic time.
    return "\n".join(filter(None, map(str.strip, "".join(parser.parts).split("\n"))))


def _decoded(page: Page) -> str:
    """Return the text of a page. The charset is UTF-8 if the header names none, or a codec that pages do not use."""
    try:
        name = codecs.lookup(page.charset).name
        return page.data.decode("utf-8" if name in _NO_CHARSETS else name, "replace")
    except (LookupError, ValueError):  # unknown, not for text, or a codec without the error handler
        return page.data.decode("utf-8", "replace")


def _search(address: str, arguments: Mapping[str, Any], is_stopped: IsStopped) -> str:
    """Return the first results. Source: https://docs.searxng.org/dev/search_api.html."""
    host = urlsplit(address).hostname or ""
    query = urlencode({"q": text_argument(arguments, "query"), "format": "json"})
    # The user chose this host, so its address may be private. Redirections to other hosts are refused.
    page = fetch(
        f"{address.rstrip('/')}/search?{query}",
        _MAX_BYTES,
        hosts=(host,),
        private_hosts=(host,),
        is_stopped=is_stopped,
    )
    try:
        results = parse_json(page.data.decode())["results"]
        entries = [tuple(str(result.get(key) or "") for key in ("title", "url", "content")) for result in results]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UsageError("the search gave no JSON: allow the format json in the settings of the SearXNG") from None
    texts = [
        f"{title[:_MAX_TITLE]}\n{url[:_MAX_SNIPPET]}\n{content[:_MAX_SNIPPET]}"
        for title, url, content in entries[:_MAX_RESULTS]
    ]
    return "\n\n".join(texts) or "nothing found"
