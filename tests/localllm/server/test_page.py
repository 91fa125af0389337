"""The page at / in a headless Chromium, where there is one, and Playwright to drive it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from localllm.server.http import Limits
from tests.helpers.http_server import Serving, scripted, serving

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


def script(prompt: str) -> str:
    if "endless" in prompt:
        return "word " * 600
    return f"<think>Hm.</think>Hello <b>you</b>, turn {prompt.count('user:')}."


@pytest.fixture(scope="module")
def actor() -> Iterator[Serving]:
    with serving(scripted(script), names=("first", "second"), limits=Limits(api_keys=("k",))) as started:
        yield started


@pytest.fixture
def page(actor: Serving) -> Iterator[Any]:
    """The page with its key; an error in its script fails the test."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, complaints = browser.new_page(), []
        page.goto(actor.url)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.fill("#key", "k")
        page.press("#key", "Tab")
        page.wait_for_selector("#model option", state="attached")
        yield page
        browser.close()
        assert complaints == []


def ask(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def test_a_chat_goes_on_with_the_model_that_was_picked(page: Any, actor: Serving) -> None:
    assert page.locator("#model option").all_inner_texts() == ["first", "second"]
    page.select_option("#model", "second")
    for turn in (1, 2):
        ask(page, "Hi")
        page.get_by_text(f"Hello <b>you</b>, turn {turn}.").wait_for()
        page.locator(".note").nth(turn - 1).filter(has_text="tokens").wait_for()
    assert page.locator("details").count() == 2
    assert [each.name for each in actor.models.served.values() if each.llm] == ["second"]
    page.click("#new")
    assert page.inner_text("#chat") == ""
    ask(page, "Hi")
    page.get_by_text("turn 1.").wait_for()


def test_stop_ends_a_reply(page: Any, actor: Serving) -> None:
    ask(page, "endless")
    page.get_by_text("word word").wait_for()
    page.click("#send")
    page.get_by_text("stopped").wait_for()
    actor.wait_until_idle()
    assert page.inner_text("#send") == "Send"


def test_an_error_is_shown(page: Any) -> None:
    page.fill("#temperature", "-5")
    page.evaluate("() => { messages = [{role: 'user', content: 'word '.repeat(3000)}] }")
    ask(page, "Hi")
    page.locator(".note").filter(has_text="the context holds").wait_for()
