"""``localllm chat`` without a screen: input from a pipe and from a terminal."""

from __future__ import annotations

import io
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from localllm.agent_tools.toolbox import Toolbox
from localllm.errors import ContextLengthError, DeviceLostError, UsageError
from localllm.tui.chat.events import Delta, Event, Turn
from localllm.tui.chat.session import ChatSession
from localllm.tui.line_mode import InputReader, LineChat
from localllm.tui.storage.chats import Store
from tests.helpers.command_line import Outcome, Process, environment, on_terminal, run_main, run_process
from tests.helpers.data import ROOT
from tests.helpers.engines import eventually
from tests.helpers.fake_chat import FakeModel
from tests.helpers.tiny_models import config, random_weights, write_gguf

Give = Callable[[str], None]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    return lambda text: monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    )


def chat(store: Store, model: FakeModel, interactive: bool = False, **options: object) -> LineChat:
    lines = InputReader()
    lines.interactive = interactive
    return LineChat(ChatSession(model, store), lambda path: FakeModel(), lines, **options)  # type: ignore[arg-type]


# Input.


def read_all(give: Give, text: str) -> list[str]:
    give(text)
    lines = InputReader()
    found = []
    while (line := lines.read()) is not None:
        found.append(line)
    return found


def test_messages_of_several_lines(give: Give) -> None:
    assert read_all(give, "a\nb\r\n\nc") == ["a", "b", "", "c"]
    assert read_all(give, "a\\\nb\\\nc\nd") == ["a\nb\nc", "d"]
    assert read_all(give, 'x\n"""\na\n\n b\\\n"""\ny') == ["x", "a\n\n b\\", "y"]
    assert read_all(give, '"""one"""\n"""two\nthree"""') == ["one", "two\nthree"]
    assert read_all(give, '"""open\nend') == ["open\nend"]
    assert read_all(give, "open\\") == ["open"]
    assert read_all(give, "\ufeffa") == ["a"]


def test_input_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(UsageError, match="not valid UTF-8"):
        InputReader().read()


# With a fake model.


def test_only_replies_go_to_standard_output(give: Give, store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    give("hi\n/stats\n\n//slash\n/quit\nnever")
    model = FakeModel(["one\ntwo", "<think>hm</think>three\x1b[2J"])
    chat(store, model).run()
    out, err = capfd.readouterr()
    assert out == "one\ntwo\nthree\x1b[2J\n"
    assert err.startswith("context 5 / 1,000 tokens")
    assert len(model.asked) == 2
    assert model.asked[1].messages[-1]["content"] == "/slash"


def test_a_pipe_ends_with_the_first_error(give: Give, store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    give("/nothing\nhi")
    model = FakeModel()
    with pytest.raises(UsageError, match="no command /nothing"):
        chat(store, model).run()
    assert model.asked == []
    give("hi\nmore")
    with pytest.raises(DeviceLostError):
        chat(store, FakeModel([DeviceLostError("gone")])).run()
    assert capfd.readouterr().out == "so far\n"


def test_a_terminal_continues_after_an_error(give: Give, store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    give("/nothing\nhi\nagain")
    chat(store, FakeModel([DeviceLostError("gone"), "well"]), interactive=True).run()
    out, err = capfd.readouterr()
    assert out == "so far\nwell\n"
    assert [line for line in err.splitlines() if "error" in line] == [
        "> localllm: error: there is no command /nothing: /help lists them; // starts a message with a slash",
        "> localllm: error: gone",
    ]


def test_a_full_context(give: Give, store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    many = "a\nb\nc\nd\ne\nf\n"
    replies = ["y " * 9] * 20

    def model() -> FakeModel:
        return FakeModel([*replies], context=60)

    give(many)
    with pytest.raises(ContextLengthError, match="--when-full drop or summarise"):
        chat(store, model()).run()
    give(many)
    chat(store, model(), when_full="drop").run()
    give(many)
    chat(store, model(), when_full="stop").run()
    give(many + "/drop\n")
    capfd.readouterr()
    chat(store, model(), interactive=True).run()
    err = capfd.readouterr().err
    assert "the context is full" in err
    assert "the model no longer gets the first" in err


def test_another_model_replaces_the_loaded_one(give: Give, store: Store) -> None:
    give("/model new.gguf\nhi\n")
    old, new = FakeModel(), FakeModel(["by the new one"])
    plain = LineChat(ChatSession(old, store), lambda path: new, InputReader())
    plain.run()
    assert (old.closed, new.closed, plain.session.model) == (True, False, new)
    assert plain.session.conversation.path()[1].text == "by the new one"

    def check(path: str) -> None:
        raise UsageError("no such file")

    give("/model typo.gguf\n")
    plain = LineChat(ChatSession(new, store), lambda path: old, InputReader(), check=check)
    with pytest.raises(UsageError, match="no such file"):
        plain.run()
    assert not new.closed


def test_a_message_is_edited(give: Give, store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    give('hi\nyou\n/edit 1\nHi\n/edit\n\n/edit 2\n"""\nWell,\nso\n"""\n/continue\n')
    model = FakeModel(["one", "two", "three", " more"])
    plain = chat(store, model, interactive=True)
    plain.run()
    err = capfd.readouterr().err
    assert "hi\n(type all of the new text; an empty line keeps the old text)" in err
    assert "(unchanged)" in err
    assert "(edited: /continue continues the reply)" in err
    assert [message.text for message in plain.session.conversation.path()] == ["Hi", "Well,\nso more"]
    give("hi\n/edit\n")
    with pytest.raises(UsageError, match="give the new text"):
        chat(store, FakeModel()).run()


def test_a_message_that_is_too_long(give: Give, store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    give("hi\n" + "word " * 60 + "\n/remove 3\nyou\n" + "word " * 60 + "\n/edit me\n")
    plain = chat(store, FakeModel(context=40), interactive=True)
    plain.run()
    err = capfd.readouterr().err
    assert "/edit makes it shorter, /remove 3 deletes it" in err
    assert [m.text for m in plain.session.conversation.path()] == ["hi", "ok", "you", "ok", "me", "ok"]


def test_a_tool_needs_permission(give: Give, store: Store, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("pears")
    call = '<tool_call>{"name": "read_file", "arguments": {"path": "a.txt"}}</tool_call>'
    give("go\no\n")
    plain = chat(store, FakeModel([call, "done"], context=10_000), interactive=True)
    plain.session.toolbox = Toolbox({"read": str(tmp_path)})
    plain.run()
    out, err = capfd.readouterr()
    assert out == "done\n"
    assert 'the model wants to use read_file {"path": "a.txt"}' in err
    assert 'read_file {"path": "a.txt"}: ' in err
    assert "pears" in (plain.session.conversation.path()[1].calls[0].result or "")
    give("go\n")  # without a user to give permission, the tool does not run
    plain = chat(store, FakeModel([call, "done"], context=10_000))
    plain.session.toolbox = Toolbox({"read": str(tmp_path)})
    plain.run()
    assert "does not allow" in (plain.session.conversation.path()[1].calls[0].result or "")


def test_a_change_is_shown_before_the_question(
    give: Give, store: Store, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("pears\n")
    call = '{"name": "edit_file", "arguments": {"path": "a.txt", "old_text": "pears", "new_text": "figs"}}'
    give("go\no\n/undo\n/undo\n")
    plain = chat(store, FakeModel([f"<tool_call>{call}</tool_call>", "done"], context=10_000), interactive=True)
    plain.session.set_options({"folder": str(tmp_path)})
    plain.run()
    err = capfd.readouterr().err
    assert "use edit_file\n--- a.txt\n+++ a.txt\n@@ -1,1 +1,1 @@\n-pears\n+figs\nallow it?" in err
    assert "a.txt is restored\n> localllm: error: no edit can be undone" in err
    assert (tmp_path / "a.txt").read_text() == "pears\n"


def test_a_tool_question_shows_all_of_the_arguments(
    give: Give, store: Store, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = "pears " * 20_000 + "\u202e\u200b\u3164; the end"
    call = f'<tool_call>{{"name": "read_file", "arguments": {{"path": "{path}"}}}}</tool_call>'
    give("go\nn\n")
    plain = chat(store, FakeModel([call, "done"], context=1_000_000), interactive=True)
    plain.session.toolbox = Toolbox({"read": str(tmp_path)})
    plain.run()
    question = capfd.readouterr().err.partition("allow it?")[0]
    assert question.endswith('\\u202e\\u200b\\u3164; the end"}\n')


def test_an_interrupt_ends_a_pipe_and_keeps_the_reply(give: Give, store: Store) -> None:
    give("hi\nnever")
    model = FakeModel(["one two three"], seconds=0.05)
    plain = chat(store, model)
    send = plain.session.send

    def interrupted(text: str, turn: Turn) -> None:
        """Press Ctrl-C after the first chunk of the reply."""
        emit = turn.emit

        def watch(event: Event) -> None:
            emit(event)
            if isinstance(event, Delta) and event.text == "one":
                signal.raise_signal(signal.SIGINT)

        turn.emit = watch
        send(text, turn)

    plain.session.send = interrupted  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            plain.run()
    finally:
        signal.signal(signal.SIGINT, before)
    question, reply = plain.session.conversation.path()
    assert (question.text, reply.state) == ("hi", "stopped")
    assert reply.text.startswith("one")
    assert len(model.asked) == 1


# The program itself.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that replies with z's."""
    settings = config()
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    path = tmp_path_factory.mktemp("plain") / "tiny.gguf"
    return write_gguf(path, settings, random_weights(settings), metadata={"tokenizer.chat_template": template})


Z = ("--temp", "0", "-l", f"{3 + ord('z')}+1000", "--device", "reference", "-q")


@pytest.fixture
def run_chat(
    give: Give, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    """Run ``localllm chat`` in this process, with ``stdin`` as standard input and chats in ``tmp_path``."""
    monkeypatch.setenv("LOCALLLM_DATA", str(tmp_path))

    def run(*arguments: object, stdin: str = "") -> Outcome:
        give(stdin)
        return run_main(capfdbinary, "chat", *arguments)

    return run


def test_the_folder_is_named_on_the_command_line(
    run_chat: Callable[..., Outcome], tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "AGENTS.md").write_text("Use tabs.")
    outcome = run_chat(tiny, *Z, "--plain", "--folder", tmp_path / "project", stdin="/folder\n")
    assert outcome.err.startswith(f"the model may read and change files in {(tmp_path / 'project').resolve()}")
    assert "AGENTS.md (9 characters)" in outcome.err
    outcome = run_chat(tiny, "--folder", tmp_path / "nowhere")
    assert (outcome.code, outcome.out) == (2, "")
    assert "give the path of a folder that exists" in outcome.err


def test_from_a_pipe_and_again(run_chat: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    env = environment(LOCALLLM_DATA=str(tmp_path))
    outcome = run_process(["chat", tiny, *Z, "-n", "3"], stdin=b"hi\nyou\n", env=env)
    assert (outcome.code, outcome.out, outcome.err) == (0, "zzz\nzzz\n", "")
    store = Store(tmp_path / "chats.sqlite3")
    (summary,) = store.sessions()
    kept = store.load(summary.id)
    assert kept.settings == {"temperature": 0.0, "max_tokens": 3}
    assert kept.model == str(tiny)
    store.close()
    outcome = run_chat("--list")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.updated))
    assert (outcome.code, outcome.out) == (0, f"{summary.id}  {when}     4 messages  hi\n")
    for which in (["--continue"], ["--session", summary.id[:7]]):
        outcome = run_chat(*which, *Z, stdin="/show\n")
        assert (
            outcome.err == "#1 user\nhi\n\n#2 assistant, cut off\nzzz\n\n#3 user\nyou\n\n#4 assistant, cut off\nzzz\n"
        )
    tiny.rename(tiny.with_name("gone"))
    try:
        given = [*Z[:-1], "-sys", "be kind", "--session", summary.id]  # without -q
        outcome = run_chat(*given, stdin="/system\n/model\n")
    finally:
        tiny.with_name("gone").rename(tiny)
    lines = outcome.err.splitlines()
    assert lines[0] == (
        f"localllm: warning: the model of this chat, {tiny}, is no longer on this machine: the demo model "
        "replies instead; /model selects another model"
    )
    assert "system prompt: be kind" in lines
    assert lines[-1] == f"Continue this chat with: localllm chat --session {summary.id}"
    given = ["-sys", "be kind", "--prefix", "So"]
    outcome = run_chat("--continue", *Z, *given, stdin="/continue\n/system\n/prefix\n")
    assert (outcome.code, outcome.out) == (0, "zzz\n")
    assert outcome.err == "system prompt: be kind\nreply_prefix         So\n"


def test_a_question_on_the_command_line(run_chat: Callable[..., Outcome], tiny: Path) -> None:
    outcome = run_chat("two words", "-n", "2", *Z, stdin="/show\n")
    assert (outcome.code, outcome.err[:19]) == (0, "#1 user\ntwo words\n\n")
    assert run_chat("no such file.gguf", *Z).code != 0


def test_bad_command_lines(run_chat: Callable[..., Outcome]) -> None:
    outcome = run_chat("--session", "x")
    assert (outcome.code, outcome.error()) == (
        1,
        "there is no chat 'x': localllm chat --list lists them, and in a chat /sessions does",
    )
    outcome = run_chat("--session", "x", "--continue")
    assert outcome.code == 2
    outcome = run_chat("--temp", "-1")
    assert (outcome.code, outcome.error()[:15]) == (2, "argument --temp")
    outcome = run_chat("-q", "--device", "reference", stdin="/nothing\n")
    assert (outcome.code, outcome.error()[:29]) == (2, "there is no command /nothing:")
    assert "--continue" in run_chat("--help").out


def test_a_store_that_cannot_be_used(
    run_chat: Callable[..., Outcome], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALLLM_DATA", str(tmp_path / "file"))
    outcome = run_chat(tiny, *Z, "-n", "1", stdin="hi\n")
    assert (outcome.code, outcome.out) == (0, "z\n")
    assert outcome.err.startswith("localllm: warning: the chats in ")
    assert outcome.err.endswith("this chat is not saved\n")
    assert run_chat("--continue", tiny, *Z).code == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_message_is_edited_in_its_line(tiny: Path, tmp_path: Path) -> None:
    arguments = ["chat", "--plain", tiny, *Z, "-n", "2"]
    with on_terminal(arguments, LOCALLLM_DATA=str(tmp_path), TERM="dumb") as (process, master):
        _until(master, b"> ")
        os.write(master, b"hi\r")
        _until(master, b"zz\r\n")
        os.write(master, b"/edit\r")
        _until(master, b"edit> hi")
        os.write(master, b" there\r")
        _until(master, b"zz\r\n")
        os.write(master, b"/help\r")
        help_lines = _until(master, b"quit\r\n> ").decode().replace("\r", "").splitlines()
        os.write(master, b"\x04")
        assert process.wait(60) == 0
    assert max(map(len, help_lines)) < 80
    store = Store(tmp_path / "chats.sqlite3")
    assert [m.text for m in store.load(store.sessions()[0].id).path()] == ["hi there", "zz"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_at_a_terminal(tiny: Path, tmp_path: Path) -> None:
    """Type a message, interrupt a long reply, and quit with Ctrl-D."""
    arguments = ["chat", "--plain", tiny, *Z, "-c", "20000"]
    with on_terminal(arguments, LOCALLLM_DATA=str(tmp_path), TERM="dumb") as (process, master):
        screen = _until(master, b"> ")
        os.write(master, b"hi\r")
        screen += _until(master, b"zzz")
        process.send_signal(signal.SIGINT)
        screen += _until(master, b"> ")
        # Python misses a signal between writing its prompt and waiting for a line.
        _until_it_waits(process)
        process.send_signal(signal.SIGINT)
        screen += _until(master, b"again)\r\n> ")
        os.write(master, b"\x04")
        assert process.wait(60) == 0
    assert b"Ctrl-D or /quit" in screen
    store = Store(tmp_path / "chats.sqlite3")
    reply = store.load(store.sessions()[0].id).path()[1]
    store.close()
    assert reply.state == "stopped"
    assert set(reply.text) == {"z"}


def _until_it_waits(process: Process) -> None:
    """Return once the main thread of a process sleeps until an event."""
    watched = psutil.Process(process.pid)
    while True:
        before = watched.num_ctx_switches()
        time.sleep(0.1)
        if watched.status() == psutil.STATUS_SLEEPING and watched.num_ctx_switches() == before:
            return


def _until(descriptor: int, end: bytes) -> bytes:
    """Read a terminal until ``end`` appears."""
    data = b""
    while end not in data:
        try:
            if not select.select([descriptor], [], [], 120)[0]:
                raise TimeoutError
            data += os.read(descriptor, 4096)
        except OSError:  # the writing process has ended
            pytest.fail(f"{end!r} is missing after {data[-2000:]!r}")
    return data


# Killed during a reply.

KILLED = """
import sys
from pathlib import Path
from localllm.tui.chat.session import ChatSession
from localllm.tui.storage.chats import Store
from localllm.tui.chat.events import Turn
from tests.helpers.fake_chat import FakeModel
reply = " ".join(f"w{i}" for i in range(100_000))
session = ChatSession(FakeModel([reply], context=1_000_000, seconds=0.005), Store(Path(sys.argv[1])))
session.send("go on", Turn(lambda event: None))
"""


def saved_words(path: Path) -> list[str]:
    """Return the words of the reply that the file of chats contains."""
    with closing(Store(path)) as store:
        return [word for each in store.sessions() for m in store.load(each.id).path()[1:] for word in m.text.split()]


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_chat_keeps_what_was_saved_while_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    process = subprocess.Popen([sys.executable, "-c", KILLED, path], cwd=ROOT)
    n_words = 0
    for _ in range(2):  # saved repeatedly
        assert eventually(lambda: len(saved_words(path)) > n_words + 1)  # noqa: B023
        n_words = len(saved_words(path))
    process.kill()
    process.wait()
    words = saved_words(path)
    assert words == [f"w{i}" for i in range(len(words))]
    assert len(words) >= n_words
    with closing(Store(path)) as store:
        question, reply = store.load(store.sessions()[0].id).path()
    assert (question.text, reply.state) == ("go on", "killed")


@pytest.mark.parametrize("words", [["--session", "x"], ["--list"], ["-q", "--device", "reference"]])
def test_the_database_is_closed(
    run_chat: Callable[..., Outcome], connections: list[sqlite3.Connection], words: list[str]
) -> None:
    run_chat(*words, stdin="/quit\n")
    assert len(connections) == 1
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connections[0].execute("SELECT 1")
