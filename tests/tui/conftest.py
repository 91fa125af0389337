"""The chat app in tests: it waits for nobody, and leaves Python's garbage collector alone."""

from __future__ import annotations

import pytest

from localllm.tui import collector
from localllm.tui.screens import following


@pytest.fixture(autouse=True)
def quick_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows what a model writes at once, and collects no garbage, which takes longer than most tests."""
    monkeypatch.setattr(following, "PERIOD", 0.005)
    monkeypatch.setattr(collector, "set_aside", lambda: None)
