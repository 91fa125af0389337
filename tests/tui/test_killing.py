"""``kill -9`` during a reply: every chat opens again, and at most the last second of text is lost.

``LOCALLLM_KILLS`` sets the number of kills, by default 3.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.tui.storage.chats import Store
from tests.helpers.terminal import LIMIT, Terminal
from tests.helpers.tiny_models import config, random_weights, write_gguf

pytestmark = [
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
    pytest.mark.ci,  # needs seconds of real time; test_line_mode.py kills a chat once without a screen
]

KILLS = int(os.environ.get("LOCALLLM_KILLS", "3"))
#: Seconds of text that may be lost.  The program promises one second on an idle machine.
MAX_LOST = 1.0 if "LOCALLLM_KILLS" in os.environ else 10.0


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.end()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Write a model that replies with an endless series of z's."""
    settings = config()
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    return write_gguf(
        tmp_path / "tiny.gguf", settings, random_weights(settings), metadata={"tokenizer.chat_template": template}
    )


def written(database: Path) -> tuple[int, float]:
    """Return the number of stored characters in replies, and the time of the last save."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10)
    try:
        n = connection.execute("SELECT sum(length(text)) FROM messages WHERE role = 'assistant'").fetchone()[0]
        updated = connection.execute("SELECT max(updated) FROM sessions").fetchone()[0]
    finally:
        connection.close()
    return n or 0, updated or 0.0


def test_killed_in_mid_reply(terminal: Terminal, tiny: Path, tmp_path: Path) -> None:
    database = tmp_path / "data" / "chats.sqlite3"
    bias = f"{3 + ord('z')}+1000"
    flags = ("--device", "reference", "--temp", "0", "-l", bias, "-c", "30000")
    lost: list[float] = []
    for number in range(KILLS):
        terminal.start("chat", "-m", str(tiny), *flags, *(["--continue"] if number else []))
        screen = terminal.sees("tiny", "reference", *(["zzz"] if number else []))
        assert "another terminal" not in screen  # the killed terminal
        before = written(database)[0] if number else 0
        if number % 2:
            terminal.press("/continue", "Enter")
        else:
            terminal.press(f"message {number}", "Enter")
        for _ in range(2):  # wait for two saves
            end = time.monotonic() + LIMIT
            while (n := written(database)[0]) <= before:
                assert time.monotonic() < end, terminal.screen()
                time.sleep(0.02)
            before = n
        time.sleep(0.13 * (number % 5))  # at a different time within the saving period
        killed = terminal.kill()
        n, updated = written(database)
        assert n >= before
        lost.append(killed - updated)
        terminal.sees("ended with 137")
    store = Store(database)
    (summary,) = store.sessions()
    path = store.load(summary.id).path()
    store.close()
    assert len(path) == 2 * ((KILLS + 1) // 2)
    assert path[-1].state == "killed"
    assert all(set(message.text) == {"z"} for message in path if message.role == "assistant")
    print(f"{KILLS} kills: at most {max(lost):.2f} s of text lost, {sum(lost) / KILLS:.2f} s on average")
    assert max(lost) <= MAX_LOST, lost
