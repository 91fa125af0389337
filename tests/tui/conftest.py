"""Fixtures for the chat app: coroutine tests, immediate drawing, no garbage collection."""

from __future__ import annotations

import gc
import inspect
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.tui.screens import streaming
from localllm.tui.storage import schema
from localllm.tui.storage.chats import Store
from tests.helpers.chat_app import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(autouse=True)
def quick_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw tokens immediately, and do not collect garbage, which would take longer than most tests."""
    monkeypatch.setattr(streaming, "PERIOD", 0.005)
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[sqlite3.Connection]]:
    """Close the databases that a test opened.  Python 3.13 warns if open ones are collected."""
    connect, connections = schema.connect, list[sqlite3.Connection]()

    def connect_and_note(path: Path | None) -> sqlite3.Connection:
        connections.append(connect(path))
        return connections[-1]

    monkeypatch.setattr(schema, "connect", connect_and_note)
    yield connections
    for connection in connections:
        connection.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "chats.sqlite3")
