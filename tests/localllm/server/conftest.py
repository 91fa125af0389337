"""Servers shared by the tests of one file; without the packages of the extra ``dev``, the tests are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.helpers.browser_page import CHROMIUM, MICROPHONE, Open

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *MICROPHONE])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Open the page in a separate browser; an error in its script or a request to another host fails the test."""
    complaints: list[str] = []
    contexts = []

    def opened(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((url.partition("#")[0], "data:", "blob:")) or complaints.append(request.url)
            ),
        )
        page.goto(url)
        page.locator("#model-name", has_text="first").wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
