"""Requests of commands to a running ``localllm serve``."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any
from urllib.parse import SplitResult, urlsplit

from localllm.cli.parser import flag
from localllm.errors import LocalLLMError, UsageError

#: Environment variable with the keys that a server accepts, separated by commas.  Clients use the first.
KEY_VARIABLE = "LOCALLLM_API_KEY"

#: Seconds that a server may take to answer.
_SECONDS = 60.0

#: The server, and the key that it may require.
SERVER = [
    flag("--url URL", "address of the server", default="http://127.0.0.1:8080"),
    flag("--api-key KEY", f"key that the server requires (default: the environment variable {KEY_VARIABLE})"),
]


class RefusedRequestError(LocalLLMError):
    """A server answered with an error.  ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def address_of(arguments: argparse.Namespace) -> SplitResult:
    """Return the parts of the server's address.  Raises UsageError if it is not an address."""
    try:
        address: SplitResult = urlsplit(arguments.url.rstrip("/"))
        if address.scheme not in ("http", "https") or address.port == 0:  # reading the port checks it
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--url {arguments.url!r:.80} is not the address of a server: write http://HOST:PORT"
        ) from None
    return address


def key_of(arguments: argparse.Namespace) -> str:
    """Return the key for the server, or an empty string."""
    return arguments.api_key or os.environ.get(KEY_VARIABLE, "").partition(",")[0].strip()


def ask(
    arguments: argparse.Namespace, path: str, body: dict[str, Any] | None = None, seconds: float = _SECONDS
) -> Any:
    """Return the JSON value of a server's answer.  Raises LocalLLMError if no server answers or it refuses."""
    import urllib.error  # imported here: this takes as long as the help of a command
    import urllib.request
    from http.client import HTTPException

    url = address_of(arguments).geturl()
    headers = {"Content-Type": "application/json"}
    if key := key_of(arguments):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not reach this machine
    try:
        with opener.open(request, timeout=seconds) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            message = f"the server at {url} refused the request: {_message(error)}"
            raise RefusedRequestError(message, error.code) from None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        advice = "start one with localllm serve, or name its address with --url"
        raise LocalLLMError(f"no server answers at {url} ({reason!s:.100}): {advice}") from None


def _message(error: Any) -> str:
    """Return the message of an error in any API's form."""
    try:
        value = json.load(error)["error"]
        return str(value["message"] if isinstance(value, dict) else value)
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
