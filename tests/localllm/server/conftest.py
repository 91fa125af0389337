"""Servers shared by the tests of one file; without the packages of the extra ``dev``, the tests are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

# Clients would load all certificates for each request, which takes 20 ms, although none uses https.
os.environ.pop("SSL_CERT_FILE", None)

collect_ignore_glob = (
    [] if all(map(find_spec, ("starlette", "uvicorn", "msgspec", "httpx", "prometheus_client"))) else ["test_*.py"]
)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    from tests.helpers.http_server import demo, serving

    with serving(demo()) as started:
        yield started
