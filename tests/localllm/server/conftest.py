"""Servers that the tests of one file share; without the packages of the extra ``dev`` there is nothing to test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

# Clients would read all certificates for each request, for 20 ms, though none is for https.
os.environ.pop("SSL_CERT_FILE", None)

collect_ignore_glob = [] if all(map(find_spec, ("starlette", "uvicorn", "msgspec", "httpx"))) else ["test_*.py"]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A server over the demo model."""
    from tests.helpers.http_server import demo, serving

    with serving(demo()) as started:
        yield started
