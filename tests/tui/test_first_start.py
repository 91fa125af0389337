"""The first start of the chat in a real terminal: a model is downloaded from a hub on localhost."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.data import ROOT
from tests.helpers.hub_server import HubServer, Repo, hub_server, hub_variables
from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")

DEMO = (ROOT / "localllm" / "data" / "demo.gguf").read_bytes()
REPOSITORY = "unsloth/SmolLM2-135M-Instruct-GGUF"
FILE = "SmolLM2-135M-Instruct-Q8_0.gguf"
#: A chat on a machine without other models, for which one model is suggested.
PROGRAM = """
import sys
from localllm.catalog import other_programs, suggestions
from localllm.catalog.known_models import known_model
from localllm.catalog.suggestions import SuggestedModel
from localllm.cli.main import main
other_programs.import_path = lambda: []
other_programs.folders = lambda: []
other_programs.ollama_models = dict
model, _ = known_model("smollm2:135m")
suggestions.suggest_here = lambda use, progress=None: [SuggestedModel(model, "Q8_0", 10**8, 99.0)]
sys.exit(main(["chat", *sys.argv[1:]]))
"""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.end()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        server.repos[REPOSITORY] = Repo({FILE: DEMO})
        yield server


def start(terminal: Terminal, hub: HubServer, home: Path, *arguments: str) -> None:
    terminal.start(program=[sys.executable, "-c", PROGRAM, *arguments], **hub_variables(hub, home))


def test_a_model_is_offered_and_downloaded(terminal: Terminal, hub: HubServer, tmp_path: Path) -> None:
    repo = hub.repos[REPOSITORY]
    repo.waits = True
    start(terminal, hub, tmp_path)
    terminal.sees("Which model?", "smollm2:135m: 140 MB, about 99 tokens/s", "Chat with the demo model")
    terminal.press("Enter")
    terminal.sees("downloading")
    folder = tmp_path / "hub" / f"models--{REPOSITORY.replace('/', '--')}" / "blobs"
    terminal.until(lambda screen: [*folder.glob("*.incomplete")] != [], "a part of the file")
    terminal.press("C-c")  # quits, and leaves a clean terminal
    assert "Traceback" not in terminal.sees("ended with 0")
    (part,) = folder.glob("*.incomplete")
    assert 0 < part.stat().st_size < len(DEMO)
    repo.waits = False
    n_requests = len(hub.ranges)
    start(terminal, hub, tmp_path)
    terminal.sees("Which model?")
    terminal.press("Enter")
    terminal.sees("localllm demo · cpu")  # the name in the downloaded file
    assert (folder / part.stem).read_bytes() == DEMO
    assert hub.ranges[n_requests:] == [f"bytes={part_size(hub, n_requests)}-"]
    terminal.press("Hi", "Enter")
    terminal.sees("tok/s")
    terminal.press("C-q")
    terminal.sees("ended with 0")
    start(terminal, hub, tmp_path)  # not the first start
    terminal.until(lambda screen: "localllm demo" in screen and "Which model?" not in screen, "the chat")


def part_size(hub: HubServer, n: int) -> int:
    """Return the start of the n-th request for a part of a file."""
    asked = hub.ranges[n]
    assert asked is not None
    size = int(asked.removeprefix("bytes=").rstrip("-"))
    assert 0 < size < len(DEMO)
    return size


def test_a_model_is_offered_line_by_line(terminal: Terminal, hub: HubServer, tmp_path: Path) -> None:
    start(terminal, hub, tmp_path, "--plain")
    terminal.sees("1  smollm2:135m: ", ">")
    terminal.press("7", "Enter")
    terminal.sees("write a number from 1 to 1, or nothing")
    terminal.press("1", "Enter")
    terminal.sees(f"smollm2:135m is {REPOSITORY}:Q8_0 on the hub", "tokens of context")
    terminal.press("C-d")
    terminal.sees("ended with 0")


def test_without_a_network_the_demo_model_replies(terminal: Terminal, hub: HubServer, tmp_path: Path) -> None:
    hub.endpoint = "http://127.0.0.1:9"
    start(terminal, hub, tmp_path)
    terminal.sees("Which model?")
    terminal.press("Enter")
    terminal.sees("smollm2:135m cannot be loaded", "cannot be reached", "Back to the demo model")
    terminal.press("Enter")
    terminal.sees("localllm demo · cpu")
    terminal.press("C-q")
    terminal.sees("ended with 0")
    start(terminal, hub, tmp_path, "--plain")
    terminal.sees("1  smollm2:135m")
    terminal.press("1", "Enter")
    terminal.sees("replies instead", "tokens of context")
