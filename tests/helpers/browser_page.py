"""The web page in Chromium, driven by Playwright: what tests do on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

#: A simulated microphone that beeps and needs no permission.
MICROPHONE = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream")

#: Opens an address in a new browser context, with its options, and returns the page.
Open = Callable[..., Any]


def ask(page: Any, text: str, n: int | None = None) -> None:
    """Send a message; with ``n``, wait until ``n`` replies are complete."""
    page.fill("#text", text)
    page.press("#text", "Enter")
    if n is not None:
        finished(page, n)


def finished(page: Any, n: int) -> None:
    page.locator(".message.assistant").nth(n - 1).locator(".stats", has_text="tokens").wait_for()


def kept(page: Any, said: str) -> None:
    """Wait until a reply is in the browser's storage, which happens when it ends."""
    page.locator("#said", has_text=said).wait_for(state="attached")


def reload(page: Any) -> None:
    """Load the page again. Waits for the storage first, because a page that ends loses unfinished transactions."""
    page.evaluate("async () => { await storage.load(chat.id); }")
    page.reload()


def requests_of(page: Any) -> list[dict[str, Any]]:
    """Record the bodies of future chat completions."""
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda request: bodies.append(request.post_data_json) if "/chat/completions" in request.url else None,
    )
    return bodies


def exported(page: Any, action: str) -> str:
    with page.expect_download() as download:
        if action == "all":
            page.click("#export-all")
        else:
            page.click("#chat-menu")
            page.click(f"[data-do={action}]")
    return Path(download.value.path()).read_text(encoding="utf-8")


def imported(page: Any, text: str) -> None:
    page.set_input_files(
        "#import-file", {"name": "chat.json", "mimeType": "application/json", "buffer": text.encode()}
    )


def check_with_axe(page: Any, where: str) -> None:
    """Check the accessibility of the page, if axe is installed, and that the page does not scroll sideways.

    All rules are checked with light colours, and the contrast also with dark colours.
    """
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), where
    if find_spec("axe_playwright_python") is None:
        return
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate((resources.files("axe_playwright_python") / "axe.min.js").read_text("utf-8"))
    for scheme, options in (("dark", {"runOnly": ["color-contrast"]}), ("light", {})):
        page.emulate_media(color_scheme=scheme)
        violations = page.evaluate("async options => (await axe.run(options)).violations", options)
        assert [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in violations] == [], where
