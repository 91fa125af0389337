"""A hub on localhost: answers huggingface_hub's requests to list a repository and to fetch its files.

Written from that package's documentation of its cache and from the requests that it sends:
``/api/models/ORG/REPO`` lists files with their hashes.  ``/ORG/REPO/resolve/REVISION/FILE`` returns the bytes, for
HEAD and for GET with a range.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pytest

from localllm.catalog import pull as pulling

COMMIT = "c0ffee" + "0" * 34
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass
class Repo:
    """A repository.

    Attributes:
        files: contents by file name.
        small: names of files without LFS.
        refusal: status and error code of the hub for all requests, or only for files.
        refuses_files: whether the refusal applies to files only, as for a gated repository.
        cuts: lengths of the next truncated answers, in bytes.
        sent: bytes to send instead of a file's contents.
        has_ranges: whether the hub supports range requests.
        tells_length: whether answers state their length.
        busy: files whose first request is answered with status 429; "" is the list of files.
        wait: Retry-After of those answers.
        commit: the newest commit.
        waits: whether the second half of an answer is held back while the server runs.
        about: further values of the listing.
    """

    files: dict[str, bytes]
    small: set[str] = field(default_factory=set)
    refusal: tuple[int, str] | None = None
    refuses_files: bool = False
    cuts: list[int] = field(default_factory=list)
    sent: dict[str, bytes] = field(default_factory=dict)
    has_ranges: bool = True
    tells_length: bool = True
    busy: set[str] = field(default_factory=set)
    wait: str = ""
    commit: str = COMMIT
    waits: bool = False
    about: dict[str, object] = field(default_factory=dict)

    def hash(self, name: str) -> str:
        data = self.files[name]
        return git_hash(data) if name in self.small else hashlib.sha256(data).hexdigest()

    def listing(self, name: str) -> dict[str, object]:
        data = self.files[name]
        entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": git_hash(data)}
        if name not in self.small:
            entry["lfs"] = {"sha256": self.hash(name), "size": len(data), "pointerSize": 134}
        return entry


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class HubServer:
    """A running hub.

    Attributes:
        requests: requests for files, as method, file and range.
        listings: raw answers for repositories.
        endless: repositories whose answer never ends, with its status.
        n_endless: number of bytes sent in endless answers.
        searches: queries of searches.
        found: raw answer to searches; None: the repositories whose names contain the words.
    """

    endpoint: str
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    listings: dict[str, bytes] = field(default_factory=dict)
    endless: dict[str, int] = field(default_factory=dict)
    n_endless: int = 0
    searches: list[str] = field(default_factory=list)
    found: bytes | None = None
    is_ending: threading.Event = field(default_factory=threading.Event)

    @property
    def ranges(self) -> list[str | None]:
        """Requested ranges, one for each GET of a file."""
        return [ask for method, _, ask in self.requests if method == "GET"]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Run a hub during the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {}))
    hub = HubServer(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02))
    thread.start()
    try:
        yield hub
    finally:
        hub.is_ending.set()
        server.shutdown()
        server.server_close()
        thread.join()


def hub_variables(hub: HubServer, home: Path) -> dict[str, str]:
    """Return the environment in which huggingface_hub uses this hub without a token."""
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@contextmanager
def hub_of_this_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Run a hub during the block, which this process uses. ``home``: folder of the cache."""
    with hub_server() as server:
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        for name in PROXIES:
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)
        for name, value in hub_variables(server, home).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(pulling, "RETRY_SECONDS", (0.0, 0.0))
        huggingface_hub.close_session()  # it caches proxies
        yield server
        huggingface_hub.close_session()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if listed := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            self._list(listed[1])
        elif path == "/api/models":
            self._search(urlsplit(self.path).query)
        elif file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(file[1], file[2], file[3])
        else:
            self._refuse(404, "")

    def _is_busy(self, repo: Repo, name: str) -> bool:
        if name not in repo.busy:
            return False
        repo.busy.remove(name)
        self._refuse(429, "", repo.wait)
        return True

    def _endless(self, status: int) -> None:
        """Send a body until the client disconnects."""
        self.send_response(status)
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.hub.is_ending.is_set():
                self.wfile.write(b"[" * 65536)
                self.hub.n_endless += 65536

    def _list(self, name: str) -> None:
        repo = self.hub.repos.get(name)
        if name in self.hub.endless:
            self._endless(self.hub.endless[name])
        elif name in self.hub.listings:
            self._send(200, self.hub.listings[name])
        elif repo is None:
            self._refuse(401, "RepoNotFound")
        elif repo.refusal is not None and not repo.refuses_files:
            self._refuse(*repo.refusal)
        elif not self._is_busy(repo, ""):
            siblings = [repo.listing(file) for file in repo.files]
            self._send(200, json.dumps({"id": name, "sha": repo.commit, "siblings": siblings, **repo.about}).encode())

    def _search(self, query: str) -> None:
        self.hub.searches.append(query)
        words = parse_qs(query)["search"][0].lower()
        found = [{"id": name, **repo.about} for name, repo in self.hub.repos.items() if words in name.lower()]
        self._send(200, json.dumps(found).encode() if self.hub.found is None else self.hub.found)

    def _file(self, name: str, revision: str, file: str) -> None:
        repo, asked = self.hub.repos[name], self.headers.get("Range")
        self.hub.requests.append((self.command, file, asked))
        if repo.refusal is not None:
            self._refuse(*repo.refusal)
            return
        if self._is_busy(repo, file):
            return
        if revision != repo.commit or file not in repo.files:
            self._refuse(404, "EntryNotFound")
            return
        data = repo.sent.get(file, repo.files[file])
        start, _, end = asked.removeprefix("bytes=").partition("-") if asked and repo.has_ranges else ("0", "", "")
        self._send_part(repo, file, data, int(start), data[int(start) : int(end) + 1 if end else None])

    def _send_part(self, repo: Repo, file: str, data: bytes, start: int, part: bytes) -> None:
        is_part = len(part) < len(data)
        self.send_response(206 if is_part else 200)
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("ETag", f'"{repo.hash(file)}"')
        if file not in repo.small:
            self.send_header("X-Linked-Etag", f'"{repo.hash(file)}"')
            self.send_header("X-Linked-Size", str(len(repo.files[file])))
        if repo.tells_length:
            self.send_header("Content-Length", str(len(part)))
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self._send_body(repo, part)

    def _send_body(self, repo: Repo, body: bytes) -> None:
        """Send the whole body, or the first bytes before the connection is cut."""
        if repo.waits:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.hub.is_ending.wait()
            self.close_connection = True
        elif repo.cuts:
            self.wfile.write(body[: repo.cuts.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, wait: str = "") -> None:
        self.send_response(status)
        if wait:
            self.send_header("Retry-After", wait)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
