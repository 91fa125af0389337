"""Requests of commands to a running ``localllm serve``."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any
from urllib.parse import urlsplit

from localllm.cli.parser import flag
from localllm.errors import LocalLLMError, UsageError

#: Seconds that a server may take to answer.
_SECONDS = 60.0

#: The server, and the key that it may require.
SERVER = [
    flag("--url URL", "address of the server", default="http://127.0.0.1:8080"),
    flag("--api-key KEY", "key that the server requires (default: the environment variable LOCALLLM_API_KEY)"),
]


def ask(arguments: argparse.Namespace, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON value of a server's answer.  Raises LocalLLMError if no server answers or it refuses."""
    import urllib.error  # imported here: this takes as long as the help of a command
    import urllib.request
    from http.client import HTTPException

    url = arguments.url.rstrip("/")
    try:
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or address.port == 0:  # reading the port checks it
            raise ValueError
        headers = {"Content-Type": "application/json"}
        if key := arguments.api_key or os.environ.get("LOCALLLM_API_KEY", "").partition(",")[0]:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, headers)
    except ValueError:
        raise UsageError(
            f"--url {arguments.url!r:.80} is not the address of a server: write http://HOST:PORT"
        ) from None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not reach this machine
    try:
        with opener.open(request, timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise LocalLLMError(f"the server at {url} refused the request: {_message(error)}") from None
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
