"""HTTP access, errors and streams, which all APIs share."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import itertools
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm import errors
from localllm.options.declared import LoadOptions, declared, in_flags
from localllm.server.keys import CURRENT, NOBODY, KeyFile, LimitError
from localllm.server.logs import LOG
from localllm.server.models import LoadError, TooLargeError, UnknownModelError
from localllm.server.records import current_id, note

_T = TypeVar("_T")

#: Folders of model files and of other absolute paths, which clients must not see.
_FOLDERS = re.compile(r"(?:[A-Za-z]:)?[/\\].*[/\\](?=[^/\\]*\.gguf)")
_ABSOLUTE = re.compile(r"(?<![\w.~])(?:~|[A-Za-z]:)?[/\\](?:[^/\\\s]+[/\\])+")

#: Minimum size of a long request, in bytes.
LONG_REQUEST = 256 << 10

#: Values of a long list that are encoded at once.
_ENCODED_AT_ONCE = 1000

#: Seconds between pings in an idle stream, for example while a long prompt is evaluated.
PING_S = 10.0


# -- Errors --------------------------------------------------------------------------------------------------------

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class HTTPError(errors.LocalLLMError):
    """An error response.

    ``code`` is a machine-readable word, ``allow`` lists the methods of the path, ``more`` contains further fields,
    ``retry_s`` is the number of seconds until a client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        allow: str = "",
        param: str | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
        retry_s: int = 2,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.allow, self.param, self.more = status, code, allow, param, more
        self.retry_s = retry_s

    @classmethod
    def of(cls, error: BaseException, fields: Mapping[str, str] = MappingProxyType({})) -> HTTPError:
        """Return the HTTP error for an exception.

        The message of a localllm error is used without the paths of this machine.  ``fields``: request field per
        library argument.
        """

        def word(argument: errors.Argument) -> str:
            if argument.name in declared(LoadOptions) and argument.name not in fields:
                return f"{in_flags(argument)} of localllm serve"
            return str(argument._replace(name=fields.get(argument.name, argument.name)))

        if isinstance(error, HTTPError):
            return error
        if isinstance(error, errors.ContextLengthError):
            # Drop the advice to truncate: requests cannot set ``overflow``.
            error = errors.ContextLengthError(error.n_tokens, error.context)
            more = {"n_prompt_tokens": error.n_tokens, "n_ctx": error.context}
            return cls(400, error.worded(word), "context_length_exceeded", more=more)
        if isinstance(error, msgspec.DecodeError):
            return cls(400, f"the body is not what this endpoint takes: {error}")
        if isinstance(error, errors.UsageError | errors.TemplateError | errors.TokenizerError):
            param = fields.get(getattr(error, "argument", None) or "")
            return cls(400, _FOLDERS.sub("", error.worded(word)), param=param)
        if isinstance(error, UnknownModelError):
            return cls(404, str(error), "model_not_found")
        if isinstance(error, errors.QueueFullError):
            return cls(429, "too many requests wait for the model already: try again later", "queue_full")
        if isinstance(error, LimitError):
            return cls(429, str(error), "rate_limit_exceeded", retry_s=error.wait_s)
        if isinstance(error, errors.NotEnoughMemoryError):
            return cls(503, "there is not enough memory for this model and the models in use: try again later")
        if isinstance(error, errors.ClosedError):
            return cls(503, "the model is being unloaded: try again")
        if isinstance(error, ClientDisconnect):  # no client reads it
            return cls(499, "the client has gone")
        if isinstance(error, LoadError):
            text = _ABSOLUTE.sub("", _FOLDERS.sub("", error.worded(word)))
            return cls(400 if isinstance(error, TooLargeError) else 500, text)
        LOG.error("unexpected error in request %s", current_id(), exc_info=error)
        return cls(500, "unexpected error in localllm: see the server's log")

    def body(self, path: str) -> dict[str, Any]:
        """Return the error in the format of the path's API, with the request's id."""
        note(error=str(self), error_code=self.code or "invalid_request", error_status=self.status)
        id_ = current_id()
        return self._body(path) | ({"request_id": id_} if id_ else {})

    def _body(self, path: str) -> dict[str, Any]:
        error_type = _TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        if path.startswith("/v1/messages"):
            message = str(self)
            if self.code == "context_length_exceeded" and self.more:  # Claude Code reads these words
                message = f"prompt is too long: {self.more['n_prompt_tokens']} tokens > {self.more['n_ctx']} maximum"
            return {"type": "error", "error": {"type": error_type, "message": message}}
        if path.startswith("/api/"):
            return {"error": str(self)}
        if self.code == "context_length_exceeded":  # OpenAI's code, and llama.cpp's type
            error_type = "exceed_context_size_error"
        return {
            "error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code, **self.more}
        }

    def response(self, path: str) -> Response:
        headers = {"Retry-After": str(self.retry_s)} if self.status in (429, 503) else {}
        if self.allow:
            headers["Allow"] = self.allow
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(path), self.status, headers)


#: Characters that some clients treat as line ends, and their JSON escapes.
_LINE_ENDS = [(char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029"]


def json_bytes(value: Any) -> bytes:
    """Return a value as one line of JSON, with escapes for `_LINE_ENDS`."""
    data = msgspec.json.encode(value)
    for char, escape in _LINE_ENDS:
        if char in data:
            data = data.replace(char, escape)
    return data


def json_list(values: Iterable[Any]) -> msgspec.Raw:
    """Return a list as JSON.  It is encoded in chunks, because encoding holds the interpreter's lock."""
    values = iter(values)
    chunks = iter(lambda: list(itertools.islice(values, _ENCODED_AT_ONCE)), [])
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(chunk)[1:-1] for chunk in chunks) + b"]")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, "application/json")


# -- Requests ------------------------------------------------------------------------------------------------------


#: Flags of ``localllm serve`` that replace unsupported fields of Ollama's requests.
_ADVICE = {"num_ctx": "-c", "num_thread": "-t", "num_gpu": "-ngl"}


def too_large(limit: int) -> HTTPError:
    return HTTPError(413, f"the request has more than {limit:,} bytes: make it shorter")


async def cancel_on_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """Awaits ``work``, and cancels it if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streamed response.

    The stream ends early if the client disconnects or reads nothing for ``send_timeout_s``.  ``close`` is always
    called at the end.
    """

    send_timeout_s = 60.0

    def __init__(
        self, pieces: AsyncIterator[bytes], close: Callable[[], object], media_type: str, ping: bytes
    ) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type)
        del self.headers["content-length"]
        self._pieces, self._close, self._ping = pieces, close, ping
        self._putting, self._since = False, time.monotonic()  # whether a piece is being sent, and since when

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(work) for work in (self._send(send), self._watch(send), _disconnect(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            for task in tasks:
                task.cancel()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        # An OSError means that the client has disconnected or does not read, so no error can be sent.
        for error in errors:
            if isinstance(error, Exception) and not isinstance(error, OSError):
                raise error

    async def _send(self, send: Send) -> None:
        async def put(message: Message) -> None:
            self._putting, self._since = True, time.monotonic()
            await send(message)
            self._putting, self._since = False, time.monotonic()

        await put({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces:
            await put({"type": "http.response.body", "body": piece, "more_body": True})
        await put({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, send: Send) -> None:
        """Pings a client during long pauses, and raises TimeoutError if the client does not read.

        One task serves all pieces, because a timer per piece would double the cost of a piece.
        """
        while True:
            limit = self.send_timeout_s if self._putting else PING_S
            remaining = self._since + limit - time.monotonic()
            if remaining > 0:
                await asyncio.sleep(min(remaining, self.send_timeout_s, PING_S))
            elif self._putting:
                raise TimeoutError
            else:
                if self._ping:
                    async with asyncio.timeout(self.send_timeout_s):
                        await send({"type": "http.response.body", "body": self._ping, "more_body": True})
                self._since = time.monotonic()


def event(value: Any, name: str = "") -> bytes:
    """Return a server-sent event.  Clients of Anthropic's API require the name."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json_bytes(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


# -- Access control ------------------------------------------------------------------------------------------------


#: Paths that need no key.
OPEN_PATHS = ("/", "/health", "/v1/health")

#: Schemes of the windows of desktop programs, such as Electron's, Tauri's and Visual Studio Code's.
_DESKTOP = ("app", "file", "tauri", "vscode-file", "vscode-webview")


@dataclass(frozen=True)
class Limits:
    api_keys: Sequence[str] = ()  # accepted keys; empty: no key is required
    # names accepted in ``Host``, in addition to IP addresses, localhost and this machine's name; "*.local" accepts
    # any name of the local network
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()  # allowed origins of browser pages, such as "https://example.org"; "*" is any
    max_body: int = 32 << 20  # bytes per request
    read_timeout_s: float = 60.0  # maximum seconds to receive a request
    image_hosts: Sequence[str] = ()  # allowed hosts of image URLs; "*" is any on the Internet
    keys: KeyFile | None = None  # keys with roles and limits, in place of ``api_keys``
    prefix: str = ""  # start of all paths, such as "/llm"; empty without a prefix

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.api_keys):
            raise errors.UsageError(errors.Argument("api_keys"), " has an empty key: leave it out, or give a key")


class Guard:
    """Rejects unauthorized requests before they are parsed, and limits the size of requests.

    ``Host`` and ``Origin`` are checked because a page in a browser can send requests to this machine, and with DNS
    rebinding also read the answers.
    """

    def __init__(self, app: ASGIApp, limits: Limits, log: Callable[[str], object]) -> None:
        self._app, self._limits, self._log = app, limits, log
        self._ignored: set[str] = set()
        self._keys = [hashlib.sha256(key.encode()).digest() for key in limits.api_keys]
        name = socket.gethostname().lower()
        self._hosts = {"localhost", name, f"{name}.local", *(host.lower() for host in limits.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        cors = self._cors(headers.get("origin"))
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], *cors, *self._ignored_fields(scope["state"])]}
            await send(message)

        scope.setdefault("state", {})
        # Always set: uvicorn starts a pipelined request in the context of the connection's previous request.
        CURRENT.set(None if self._limits.keys is None else NOBODY)
        try:
            self._check_host_and_origin(headers)
            if scope["method"] == "OPTIONS" and cors:
                return await Response(status_code=204)(scope, receive, sending)
            self._remove_prefix(scope)
            if len(scope["path"]) > 1 and scope["path"].endswith("/"):
                scope["path"] = scope["path"].rstrip("/") or "/"
            limits = {"max_body": self._limits.max_body, "image_hosts": self._limits.image_hosts}
            state = {"client": self._client(scope, headers), "is_slow": False, **limits}
            scope["state"] = {**scope["state"], **state}
            await self._app(scope, self._bounded(headers, receive), sending)
        except Exception as error:
            if started:
                raise
            refusal = HTTPError.of(error, scope["state"].get("fields", {}))
            await refusal.response(scope["path"])(scope, receive, sending)
        return None

    def _ignored_fields(self, state: dict[str, Any]) -> list[tuple[bytes, bytes]]:
        """Return a header that lists the request's unknown fields.  Each field is logged once."""
        names = [name for name in state.get("ignored", ()) if name.isidentifier() and name.isascii()][:20]
        for name in names:
            if name not in self._ignored and len(self._ignored) < 100:
                self._ignored.add(name)
                advice = f": give {_ADVICE[name]} to localllm serve" if name in _ADVICE else ""
                self._log(f"a request has {name:.40}, which is ignored{advice}")
        return [(b"x-ignored-fields", ", ".join(names).encode())] if names else []

    def _check_host_and_origin(self, headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname or "" if _is_host(host) else ""
        is_local = name.endswith(".local") and "*.local" in self._hosts
        if name not in self._hosts and not is_local and not is_localhost(name) and not _is_address(name):
            raise HTTPError(403, f"the Host {host!r:.80} is not this server's: name it with --allow-host")
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin) and origin.lower().partition("//")[2] != host.lower():
            raise HTTPError(403, f"pages of {origin!r:.80} cannot use this server: allow them with --cors-origin")

    def _allows(self, origin: str) -> bool:
        if origin in self._limits.origins or "*" in self._limits.origins:
            return True
        if not _is_host(origin.partition("//")[2]):
            return False
        url = urlsplit(origin)
        # Pages from this machine and windows of desktop programs are always allowed.
        is_own = url.scheme in ("http", "https") and is_localhost(url.hostname or "")
        return is_own or url.scheme in _DESKTOP

    def _cors(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        if origin is None or not self._allows(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-allow-methods", b"GET, POST, DELETE, HEAD"),
            (b"access-control-allow-headers", b"*, Authorization"),
            (b"vary", b"Origin"),
        ]

    def _client(self, scope: Scope, headers: dict[str, str]) -> str:
        """Return the client's id for the queue and stored responses: the hash of its key, or its address."""
        if not self._keys and self._limits.keys is None:
            return str((scope.get("client") or ("",))[0])
        scheme, _, token = headers.get("authorization", "").partition(" ")
        api_key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if self._limits.keys is not None:
            return self._client_of_file(scope, api_key, self._limits.keys)
        digest = hashlib.sha256(api_key.encode("latin-1")).digest()
        # Compare all keys, so that the time does not depend on which key matches.
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches):
            return _without_key(scope)
        return f"key {digest.hex()[:16]}"

    def _client_of_file(self, scope: Scope, api_key: str, file: KeyFile) -> str:
        """Return the id of a client whose key is in the key file.  Counts the request, unless it only reads."""
        file.refresh()
        key = file.find(api_key)
        if key is None:
            return _without_key(scope)
        CURRENT.set(key)
        scope["state"]["key_name"] = key.name
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            key.count_request()
        return f"key {key.digest.hex()[:16]}"

    def _remove_prefix(self, scope: Scope) -> None:
        """Remove the prefix from the path of a request."""
        prefix, path = self._limits.prefix, scope["path"]
        if prefix:
            if path != prefix and not path.startswith(f"{prefix}/"):
                raise HTTPError(404, f"{path!r:.80} does not exist: all paths start with {prefix}")
            scope["path"] = path[len(prefix) :] or "/"

    def _bounded(self, headers: dict[str, str], receive: Receive) -> Receive:
        limit = self._limits.max_body
        refusal = too_large(limit)
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > limit:
            raise refusal
        n_bytes, is_whole = 0, False
        deadline = asyncio.get_running_loop().time() + self._limits.read_timeout_s

        async def bounded() -> Message:
            nonlocal n_bytes, is_whole
            if is_whole:  # the only remaining message is the disconnect
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPError(408, "the request did not come in time: send it again") from None
            if message["type"] == "http.request":
                n_bytes += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
                if n_bytes > limit:
                    raise refusal
            return message

        return bounded


def _without_key(scope: Scope) -> str:
    """Return the client's id of a request without a valid key.  Raises HTTPError unless its path needs none."""
    if scope["path"] in OPEN_PATHS:
        return ""
    raise HTTPError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")


def _is_host(host: str) -> bool:
    try:
        urlsplit(f"//{host}").port  # noqa: B018
    except ValueError:
        return False
    return not set(host) & set("/?#@\\")


def is_localhost(name: str) -> bool:
    """Return whether a host is this machine: browsers resolve every name below localhost to it (RFC 6761)."""
    return f".{name}".endswith(".localhost") or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
