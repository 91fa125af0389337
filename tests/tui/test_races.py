"""Slow operations and badly timed events must not lose any key, word or chat."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from pathlib import Path

import pytest
from textual.widgets import Static

from localllm.cli import chat_launcher as launch
from localllm.errors import StoreError
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.session import ChatSession
from localllm.tui.screens import chat as chat_screen
from localllm.tui.setup import ModelEntry
from localllm.tui.storage import schema
from localllm.tui.storage.chats import Store
from localllm.tui.storage.prompt_history import MAX_ENTRIES, PromptHistory
from tests.helpers.chat_app import LIMIT, AppModel, AppStore, Steps, chatting, screen_text, setup, talk
from tests.helpers.fake_chat import FakeModel, play


class SlowCounter(AppModel):
    """A model whose tokenizer waits while a file is counted.

    Attributes:
        counted: number of counted files.
    """

    def __init__(self, *replies: str) -> None:
        super().__init__([*replies])
        self.came, self.goes = threading.Event(), threading.Event()
        self.counted = 0

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        if "a file" in text:
            self.counted += 1
            self.came.set()
            assert self.goes.wait(LIMIT)
        return super().tokenize(text, add_special)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a file of some words")
    return "read @notes.txt"


async def test_esc_withdraws_a_message_while_its_file_is_counted(notes: str) -> None:
    model = SlowCounter("one", "two")
    async with chatting(setup(model)) as chat:
        await chat.say(notes)
        await chat.until(model.came.is_set)
        await chat.press("escape")
        await chat.type("typed since")
        model.goes.set()
        await chat.rest()
        assert model.asked == []
        assert len(chat.app.session.conversation) == 0
        assert chat.app._chat.composer.text == f"{notes}\ntyped since"
        await chat.press("enter")
        await chat.until(lambda: len(chat.app.session.conversation) == 2)
        await chat.rest()
        assert model.asked[0].messages[-1]["content"].startswith(f"{notes}\ntyped since")  # type: ignore[attr-defined]


async def test_a_message_sent_while_a_reply_stops_is_sent_unchanged(notes: str) -> None:
    """The message is the editor's text at the time of Enter, and Esc takes it back."""
    model = SlowCounter("one", "two")
    async with chatting(setup(model)) as chat:
        await chat.say(notes)
        await chat.until(model.came.is_set)
        await chat.say("too early")  # no reply to stop yet
        await chat.hears("a reply is in progress: Esc stops it")
        assert chat.app._chat.composer.text == "too early"
        chat.app._chat.composer.empty()
        await chat.press("escape")
        await chat.say("whole")
        await chat.type("ha")
        model.goes.set()
        await chat.until(lambda: len(chat.app.session.conversation) == 2)
        await chat.rest()
        assert [m.text for m in chat.app.session.conversation.path()] == ["whole", "one"]
        assert chat.app._chat.composer.text == f"{notes}\nha"


async def test_keys_are_taken_while_models_are_listed_slowly() -> None:
    """Esc closes the dialog, Ctrl+N starts a chat and Ctrl+Q quits, even while the disk is slow."""
    goes = threading.Event()

    def list_models() -> list[ModelEntry]:
        goes.wait(LIMIT)
        return []

    try:
        async with chatting(setup(AppModel(), list_models=list_models, conversation=talk("a", "b"))) as chat:
            began = time.monotonic()
            chat.hit("ctrl+l", "escape", "ctrl+n", "draft")
            await chat.until(lambda: chat.app._chat.composer.text == "draft")
            assert len(chat.app.session.conversation) == 0
            chat.hit("ctrl+l", "x", "enter", "escape", "escape")  # Enter waits for the list, and Esc cancels that
            await chat.until(lambda: chat.app.screen is chat.app._chat and chat.app.keys.is_done)
            assert chat.app._chat.composer.text == "draft"
            chat.hit("ctrl+l", "x", "enter", "y", "ctrl+q")
            await chat.until(lambda: not chat.app.is_running)
            assert time.monotonic() - began < LIMIT
    finally:
        goes.set()


EVIL = "\x1b[31mred\x1b[0m \x9b2J \u202eevil\u202c"


async def test_no_widget_gives_the_terminal_control_characters() -> None:
    """Editors, which show text unchanged, and Markdown, which decodes entities, must not change it."""
    reply = EVIL + " &#x202e;entity&#x1b;[1m"
    conversation = talk("ask", reply)
    conversation.system = f"system {EVIL}"
    conversation.settings = {"reply_prefix": f"so {EVIL}"}
    async with chatting(setup(AppModel(), conversation=conversation), (100, 40)) as chat:
        seen = [screen_text(chat.app)]
        await chat.press("ctrl+up", "e")
        await chat.sees("Editing the reply")
        assert chat.app._chat.composer.text == reply  # unchanged
        seen.append(screen_text(chat.app))
        await chat.press("escape")
        for key, awaited in (("ctrl+s", "system "), ("ctrl+t", "so ")):
            await chat.press(key)
            await chat.sees(awaited)
            seen.append(screen_text(chat.app))
            await chat.press("escape")
            await chat.until(lambda: chat.app.screen is chat.app._chat)
        await chat.type(EVIL)
        seen.append(screen_text(chat.app))
        for text in seen:
            assert not {c for c in text if c in "\x1b\x07\x9b\u202e\u202c"}, repr(text)
        assert "entity" in seen[0]


async def test_a_file_is_counted_once_when_its_name_is_typed(notes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_screen, "_TYPING_SECONDS", 0.01)
    model = SlowCounter()
    model.goes.set()
    async with chatting(setup(model)) as chat:
        await chat.type(f"{notes} ")
        await chat.sees("notes.txt: 5 tokens")
        await chat.rest()
        assert model.counted == 1
        await chat.press("x")
        await chat.until(lambda: "5 tokens" not in chat.screen)
        assert model.counted == 1


async def test_counting_files_ends_when_the_user_types(notes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_screen, "_TYPING_SECONDS", 0.01)
    Path("more.txt").write_text("a file of more", encoding="utf-8")
    model = SlowCounter()
    async with chatting(setup(model)) as chat:
        await chat.type(f"{notes} @more.txt ")
        await chat.until(model.came.is_set)
        await chat.press("x")
        model.goes.set()
        await chat.until(lambda: not any("(run)" in thread.name for thread in threading.enumerate()))
        assert model.counted == 1


def test_changes_blocked_by_a_lock_are_saved_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "BUSY_SECONDS", 0.01)
    store = Store(tmp_path / "chats.sqlite3")
    session = ChatSession(FakeModel(["one", "two"]), store)
    play(session.send, "a")
    assert session.saver.is_saved
    assert store.path is not None
    other = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    play(session.send, "b")
    assert not session.saver.is_saved
    assert "locked by another program" in (session.saver.flush(0.0) or "")
    release = threading.Timer(0.2, other.execute, ["ROLLBACK"])
    release.start()
    assert session.saver.flush(LIMIT) is None
    assert session.saver.is_saved
    assert [m.text for m in store.load(session.conversation.id).path()] == ["a", "one", "b", "two"]
    release.join()
    other.close()


async def test_an_unsaved_chat_is_saved_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store = AppStore(None)
    is_full = True
    save = store.save

    def fail(*arguments: object) -> None:
        if is_full:
            raise StoreError("the disk is full")
        save(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "save", fail)
    async with chatting(setup(AppModel(["one"]), store)) as chat:
        await chat.ask("hi")
        await chat.press("ctrl+n")
        await chat.until(lambda: len(chat.app.session.conversation) == 0)
        left, _ = chat.app.sessions
    is_full = False
    assert left.saver.flush(0.0) is None
    assert [m.text for m in store.load(left.conversation.id).path()] == ["hi", "one"]


def test_only_a_chat_that_is_saved_can_be_continued(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.sqlite3")
    session = ChatSession(FakeModel(), store)
    store._connection.execute("PRAGMA query_only=1")
    play(session.send, "a")
    launch._print_how_to_continue(session)
    assert capsys.readouterr().err == ""
    store._connection.execute("PRAGMA query_only=0")
    launch._save_unsaved([session])
    launch._print_how_to_continue(session)
    assert f"--session {session.conversation.id}" in capsys.readouterr().err


def test_an_invalid_time_hides_no_chats(tmp_path: Path) -> None:
    store = Store(tmp_path / "chats.sqlite3")
    ids = []
    for value in (-1e300, 1e300, "'x'", "NULL"):
        session = ChatSession(FakeModel(), store)
        play(session.send, "hello")
        ids.append(session.conversation.id)
        if value != "NULL":  # the table refuses NULL
            store._connection.execute(
                f"UPDATE sessions SET updated = {value}, created = {value} WHERE id = '{ids[-1]}'"
            )
    assert {summary.id for summary in store.sessions()} == set(ids)
    assert all(time.localtime(summary.updated).tm_year >= 1969 for summary in store.sessions())
    assert all(store.load(id_).created >= 0 for id_ in ids)


def test_of_a_large_history_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text("".join(f'"{"x" * 5000} {i}"\n' for i in range(1500)))
    loaded = PromptHistory(path).load()
    assert loaded[-1].endswith(" 1499")
    assert 0 < len(loaded) <= MAX_ENTRIES
    history = PromptHistory(path)
    assert history.load() == loaded  # the history was shortened, and the newest lines are kept
    assert path.stat().st_size < 4 << 20
    history.save("newest")
    assert PromptHistory(path).load()[-1] == "newest"


def test_the_counters_of_another_model_are_not_shown(tmp_path: Path) -> None:
    session = ChatSession(FakeModel(["one two"]), Store(None))
    play(session.send, "a")
    assert session.last is not None
    counted = session.meter().used
    other = FakeModel(context=3)
    session.use_model(other, None)
    assert session.last is not None  # the same message, by its id
    assert counted > 3
    assert session.meter() == (3, 3)  # never more than the number of tokens
    other.name = "Other"
    assert session.last is None
    assert session.meter() == (
        len(other.tokenize_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "one two"}])),
        3,
    )


async def test_thinking_that_is_open_is_drawn_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Existing text is not laid out again for each new token."""
    lines = [f"thought {i} " + "word " * 20 for i in range(200)]
    model = AppModel([f"<think>{chr(10).join(lines)}</think>Done."], context=10_000, gate=(steps := Steps()))
    async with chatting(setup(model), (100, 30)) as chat:
        await chat.say("think")
        steps.allow(50)
        await chat.sees("Thinking …")
        await chat.press("ctrl+up", "t")
        (view,) = [view for view in chat.views if view.message.role == "assistant"]
        assert view._thinking.display
        (block,) = view._thinking._body.query(Static)
        await chat.until(lambda: "thought 1 " in str(block.content))
        steps.set()
        await chat.rest()
        assert view._thinking.text.strip() == "\n".join(lines).strip()
        drawn = [str(block.content) for block in view._thinking._body.query(Static)]
        assert "\n".join(drawn).split() == "\n".join(lines).split()
        assert len(drawn) > 5
        assert max(map(len, drawn)) < 5000
        assert view._thinking._body.query(Static)[0] is block


@pytest.mark.skipif(sys.platform == "win32", reason="lacks ~")
def test_chats_of_version_0_1_open_as_before(tmp_path: Path) -> None:
    """A database written with old statements: the first schema had no table of terminals."""
    path = tmp_path / "chats.sqlite3"
    old = sqlite3.connect(path)
    for statement in schema.MIGRATIONS[0]:
        old.execute(statement)
    old.execute("PRAGMA user_version=1")
    old.execute(
        "INSERT INTO sessions VALUES ('c1', 'Old', 'be kind', '{\"temperature\": 0.5}', '', 5.0, 6.0, 0, 'm2')"
    )
    extras = (
        '{"stats": {"prompt_tokens": 5, "cached_tokens": 3, "new_tokens": 2, "first_token_s": 0.5, "rate": 9.0, '
        '"model": "M", "thinking_s": null}, "window": {"first": "m1", "summary": "s"}, '
        '"attachments": [{"name": "a.txt", "text": "t", "n_tokens": 1}]}'
    )
    insert = "INSERT INTO messages (id, session, parent, role, text, created, state, opened, extras) VALUES "
    old.execute(insert + "('m1', 'c1', NULL, 'user', 'hello', 5.0, 'complete', '', '{}')")
    old.execute(insert + "('m2', 'c1', 'm1', 'assistant', 'hi', 6, 'length', '<think>', ?)", (extras,))
    old.commit()
    old.close()
    store = Store(path)
    chat = store.load("c1")
    assert isinstance(chat, Conversation)
    assert (chat.title, chat.system, chat.settings, chat.updated) == ("Old", "be kind", {"temperature": 0.5}, 6.0)
    question, reply = chat.path()
    assert (question.text, reply.text, reply.state, reply.opened) == ("hello", "hi", "length", "<think>")
    assert reply.stats is not None
    assert (reply.stats.total_tokens, reply.stats.thinking_s, reply.stats.model) == (7, None, "M")
    assert reply.window is not None
    assert (reply.window.first, reply.window.summary, reply.attachments[0].n_tokens) == ("m1", "s", 1)
    assert store.search("hello")[0].id == "c1"
    assert store._connection.execute("PRAGMA user_version").fetchone()[0] == len(schema.MIGRATIONS)


async def test_a_message_that_was_just_sent_is_selected_once_it_is_drawn() -> None:
    async with chatting(setup(AppModel(["one"], gate=(steps := Steps())))) as chat:
        chat.hit("hello", "enter", "ctrl+up", "up")
        await chat.until(lambda: (view := chat.app._chat.selected) is not None and view.message.role == "user")
        assert chat.app._chat.composer.text == ""
        steps.set()
        await chat.rest()
