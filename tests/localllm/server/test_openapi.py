"""The server's OpenAPI description, and requests generated from it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from localllm.server.app import description
from tests.helpers.http_server import Serving


def test_the_description_has_every_path_that_is_answered(server: Serving) -> None:
    described = httpx.get(server.url + "/openapi.json").json()
    assert described == json.loads(json.dumps(description()))
    assert described["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    for path, operations in described["paths"].items():
        for method in operations:
            allow = httpx.request("PATCH", server.url + path).headers["allow"]
            assert method.upper() in allow


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_no_request_made_from_the_description_is_a_500(server: Serving, tmp_path: Path) -> None:
    flags = ["--checks", "not_a_server_error", "--phases", "fuzzing", "--max-examples", "10", "--seed", "1"]
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
