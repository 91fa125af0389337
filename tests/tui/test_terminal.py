"""The real app in a real terminal with the demo model: send, interrupt, edit, branch, quit, resume."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.end()


def test_a_chat_in_a_terminal(terminal: Terminal) -> None:
    # The reference backend is slow and this reply is endless, so it can be interrupted on any machine.
    slowly = ("--device", "reference", "--ignore-eos")
    terminal.start("chat", "-m", "demo", "--temp", "0", *slowly)
    terminal.sees("localllm demo · reference", "Type a message")
    # All keys at once, like a fast typist: the text must arrive before it is sent.
    terminal.press("Tell me a story about a boat, and another one, and another one", "Enter")
    terminal.sees("writing")
    terminal.press("Escape")
    terminal.sees("stopped · Ctrl+G continues")
    terminal.press("C-Up")
    terminal.sees("y Copy")
    terminal.press("y")
    terminal.sees("copied")
    terminal.press("Escape")
    terminal.until(lambda screen: "y Copy" not in screen, "the editor")
    # An edited message starts a branch.
    terminal.press("F2")
    terminal.sees("Editing your message")
    terminal.press("!", "Enter")
    terminal.sees("‹ 2/2 ›", "another one!", "writing")
    terminal.press("C-q")
    terminal.sees("ended with 0", "Continue this chat with: localllm chat --session ")
    assert "Traceback" not in terminal.screen()
    terminal.start("chat", "--continue", *slowly)
    terminal.sees("‹ 2/2 ›", "another one!", "stopped", "localllm demo · reference")
    terminal.press("/branch 1", "Enter")
    terminal.sees("‹ 1/2 ›")
    terminal.press("C-c")
    terminal.sees("ended with 0")


#: A real chat with a fake model, which calls a tool to add numbers and reports the result.
PROGRAM = """
import sys
from localllm.cli.main import main
from localllm.cli import chat_launcher as launch
from tests.helpers.chat_app import AppModel
call = '<tool_call>{"name": "numbers__add", "arguments": {"a": 2, "b": 40}}</tool_call>'
replies = [call, lambda messages: f"It is **{messages[-1]['content']}**."]
launch.load_model = lambda *arguments: AppModel(replies, context=10_000)
sys.exit(main(["chat", "-m", "demo"]))
"""


def test_a_tool_of_an_mcp_server_is_used_in_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    command = json.dumps([sys.executable, str(Path(__file__).parents[1] / "helpers" / "mcp_server.py")])
    (tmp_path / "config.toml").write_text(f"[tools.servers.numbers]\ncommand = {command}\n")
    terminal.start(program=[sys.executable, "-c", PROGRAM])
    terminal.sees("Fake", "Type a message")
    terminal.press("/tools", "Enter")
    terminal.sees("numbers__add", "Adds two numbers.")
    terminal.press("What is 2 and 40?", "Enter")
    terminal.sees('May the model use numbers__add {"a": 2, "b": 40}? F3 answers')
    terminal.press("F3")
    terminal.sees("Yes, this time", "No: refuse this call")
    terminal.press("Down", "Enter")
    terminal.sees('numbers__add {"a": 2, "b": 40} · 2 characters', "It is 42.")
    terminal.press(f"/export {tmp_path}/chat.md", "Enter")
    terminal.sees("written to")
    assert "Tool `numbers__add`:" in (tmp_path / "chat.md").read_text()
    terminal.press("C-q")
    terminal.sees("ended with 0")
