"""Parts of the app without a screen: events, history, pasted text and completions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules

import pytest

import localllm.agent_tools
import localllm.tui.chat
from localllm.tui import commands
from localllm.tui.chat.attachments import Suggestion, file_completions
from localllm.tui.chat.conversation import ReplyStats
from localllm.tui.chat.events import Delta, EventQueue, Finished, Prefill, Started, Summarising
from localllm.tui.chat.session import Meter
from localllm.tui.storage.prompt_history import MAX_ENTRIES, PromptHistory
from localllm.tui.text import MAX_LINES, Pastes, code_blocks
from localllm.tui.widgets.status import Status, line
from localllm.web import is_web
from tests.helpers.data import ROOT


def test_modules_without_a_screen_do_not_import_textual() -> None:
    names = [
        f"{package.__name__}.{module.name}"
        for package in (localllm.tui.chat, localllm.agent_tools)
        for module in iter_modules(package.__path__)
    ]
    code = (
        f"import localllm.cli.chat_launcher, {', '.join(names)}, sys; print({{'textual', 'rich'}} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "set()\n"


def test_events_that_wait_are_joined() -> None:
    inbox = EventQueue()
    for event in (
        Started("a"),
        Prefill(1, 9),
        Prefill(5, 9),
        Delta("x", True),
        Delta("y", True),
        Delta("z"),
        Delta("!"),
        Summarising("s"),
        Summarising("t"),
        Finished(None),
    ):
        inbox.put(event)
    assert inbox.take() == [
        Started("a"),
        Prefill(5, 9),
        Delta("xy", True),
        Delta("z!"),
        Summarising("st"),
        Finished(None),
    ]
    assert inbox.take() == []


def test_history_goes_back_and_forth_and_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "history"
    history = PromptHistory(path)
    for text in ("one", "two", "two", " ", "three"):
        if history.add(text):
            history.save(text)
    assert path.read_text() == '"one"\n"two"\n"three"\n'
    assert path.stat().st_mode & 0o777 == 0o600
    assert [history.older("draft"), history.older("three"), history.newer(), history.newer(), history.newer()] == [
        "three",
        "two",
        "three",
        "draft",
        None,
    ]
    with path.open("a") as file:
        file.write("not json\n[1]\n" + '"again"\n' * (3 * MAX_ENTRIES))
    assert len(PromptHistory(path).load()) == MAX_ENTRIES
    assert len(path.read_text().splitlines()) == MAX_ENTRIES
    assert PromptHistory(tmp_path / "none").load() == []
    PromptHistory(tmp_path / "history" / "no folder").save("lost")  # errors are ignored


def test_large_texts_are_folded() -> None:
    pastes = Pastes()
    long, wide = "x\n" * (MAX_LINES + 1), "y" * 5000
    assert pastes.fold("short") == "short"
    message = f"see {pastes.fold(long)} and {pastes.fold(wide)}"
    assert message == "see [pasted text #1: 41 lines] and [pasted text #2: 5,000 characters]"
    assert pastes.unfold(message) == f"see {long} and {wide}"
    assert pastes.unfold("[pasted text #9: 41 lines]") == "[pasted text #9: 41 lines]"


def test_commands_are_completed() -> None:
    assert [choice.text for choice in commands.completions("/se")] == ["/set", "/sessions"]
    assert [choice.text for choice in commands.completions("/stop-")] == ["/stop-strings"]
    assert len(commands.completions("/")) == len(commands.COMMANDS)
    for text in ("", "se", "/set x", "a /se", "//se"):
        assert commands.completions(text) == []


def test_files_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "No te.txt").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "deep.md").touch()
    assert file_completions("see @no") == [Suggestion('@"No te.txt" ', 4), Suggestion("@notes.txt ", 4)]
    assert [choice.text for choice in file_completions("@")] == ["@folder/", '@"No te.txt" ', "@notes.txt "]
    assert file_completions("@folder/") == [Suggestion("@folder/deep.md ", 0)]
    assert file_completions("@.h") == [Suggestion("@.hidden ", 0)]
    assert file_completions(f"@{tmp_path}/fol") == [Suggestion(f"@{tmp_path}/folder/", 0, "folder")]
    assert file_completions("@gone/x") == []
    assert file_completions("me@no") == []
    assert file_completions('see @"No t') == [Suggestion('@"No te.txt" ', 4)]


def test_blocks_of_code() -> None:
    text = "a\n```py x\n1\n```\n- b\n  ```\n  2\n  ```\n\n~~~sh\n3"
    assert code_blocks(text) == [("py", "1\n"), ("", "2\n"), ("sh", "3")]


@pytest.mark.parametrize("address", ["http://a.b", "https://example.org/x?y#z", "HTTPS://example.org"])
def test_addresses_of_pages(address: str) -> None:
    assert is_web(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "javascript:alert(1)",
        "file:///etc/passwd",
        "ftp://a.b",
        "http:",
        "http://",
        "https://a\x1bb",
        "//a.b",
        "http://[x",
    ],
)
def test_addresses_of_something_else(address: str) -> None:
    assert not is_web(address)


def test_the_status_line_omits_the_least_important_parts() -> None:
    stats = ReplyStats(1000, 0, 203, 0.35, 23.44)
    status = Status("", None, Meter(1203, 8192), stats, "Model 1B", "cpu", 812_000_000)
    whole = "1,203 / 8,192 · 15% · 23.4 tok/s · first after 0.35 s · Model 1B · cpu · 812 MB in use"
    assert line(status, 100).plain == whole
    assert line(status, 60).plain == "1,203 / 8,192 · 15% · 23.4 tok/s · Model 1B · cpu"
    assert line(status, 20).plain == "1,203 / 8,192 · 15%"
    on_gpu = line(Status(model="M", device="cuda:0", memory=812_000_000, gpu_memory=5_100_000_000), 60).plain
    assert on_gpu == "M · cuda:0 · 812 MB + 5.1 GB GPU in use"
    loading = line(Status("loading weights", 0.5), 60).plain
    assert loading == "loading weights ━━━━━╌╌╌╌╌ 50%"
    assert "no model" in line(Status(), 60).plain
