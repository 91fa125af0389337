"""A chat in two terminals: the second one is notified, and no message of either is lost or mixed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localllm.errors import StoreError
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.events import ChatWarning, Delta, Event, Turn
from localllm.tui.chat.session import ChatSession
from localllm.tui.storage.chats import Store
from tests.helpers.chat_app import AppModel, chatting, setup
from tests.helpers.fake_chat import FakeModel, leaves, play


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Store, Store]:
    """Open a file as in two terminals."""
    return Store(tmp_path / "chats.sqlite3"), Store(tmp_path / "chats.sqlite3")


def session(store: Store, *replies: str, id_: str | None = None) -> ChatSession:
    conversation = Conversation() if id_ is None else store.load(id_)
    return ChatSession(FakeModel([*replies]), store, conversation)


def test_the_second_terminal_is_notified(stores: tuple[Store, Store]) -> None:
    one = session(stores[0], "a reply")
    assert one.mark_open() is None
    play(one.send, "hello")
    two = session(stores[1], id_=one.conversation.id)
    warning = two.mark_open()
    assert warning is not None
    assert "open in another terminal too (process " in warning
    # It switches to another chat, and the first terminal is alone again.
    assert stores[0].others_with_open(one.conversation.id) != []
    assert session(stores[1]).mark_open() is None
    assert stores[0].others_with_open(one.conversation.id) == []


def test_an_ended_terminal_no_longer_counts(stores: tuple[Store, Store]) -> None:
    one = session(stores[0], "a reply")
    one.mark_open()
    play(one.send, "hello")
    stores[0].close()
    assert session(stores[1], id_=one.conversation.id).mark_open() is None


def test_a_killed_process_no_longer_counts(stores: tuple[Store, Store]) -> None:
    store, _ = stores
    code = (
        "import sys; from pathlib import Path; from localllm.tui.storage.chats import Store\n"
        "store = Store(Path(sys.argv[1])); store.mark_open('chat'); print('entered', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(store.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"entered\n"
        assert store.others_with_open("chat") == [f"process {process.pid}"]
        process.kill()
        process.wait()
        assert store.others_with_open("chat") == []
    # A different process with the same id does not count.
    mark = "INSERT INTO terminals VALUES ('x', (SELECT host FROM terminals LIMIT 1), 1, 5.0, 'chat')"
    store._connection.execute(mark)
    assert store.others_with_open("chat") == []
    store._connection.execute("UPDATE terminals SET host = 'elsewhere' WHERE id = 'x'")
    assert store.others_with_open("chat") == ["process 1 on elsewhere"]


def test_messages_of_both_terminals_are_separate(stores: tuple[Store, Store]) -> None:
    one = session(stores[0], "first reply", "by one")
    one.mark_open()
    play(one.send, "hello")
    two = session(stores[1], "by two", id_=one.conversation.id)
    two.mark_open()
    play(one.send, "said in one")
    play(two.send, "said in two")
    kept = stores[0].load(one.conversation.id)
    paths = [[m.text for m in kept.path(leaf.id)] for leaf in leaves(kept)]
    assert paths == [
        ["hello", "first reply", "said in one", "by one"],
        ["hello", "first reply", "said in two", "by two"],
    ]


def test_a_reply_of_another_terminal_is_not_changed(stores: tuple[Store, Store]) -> None:
    one = session(stores[0], "a b c d")
    one.mark_open()

    def watch(event: Event, turn: Turn) -> None:
        if event == Delta(" b"):
            assert one.busy
            two = session(stores[1], "by two", id_=one.conversation.id)
            assert [m.text for m in two.conversation.path()] == ["hello"]
            play(two.regenerate, None)

    play(one.send, "hello", watch=watch)
    texts = [m.text for m in stores[0].load(one.conversation.id).messages]
    assert sorted(texts) == ["a b c d", "by two", "hello"]


def test_one_reply_is_continued_in_two_terminals(stores: tuple[Store, Store]) -> None:
    one = session(stores[0], "begun and more", " one more")
    one.conversation.settings = {"max_tokens": 2}
    one.mark_open()
    play(one.send, "hello")
    assert one.conversation.path()[-1].is_cut
    two = session(stores[1], " two more", id_=one.conversation.id)
    two.mark_open()
    play(two.continue_reply)
    play(one.continue_reply)
    texts = [m.text for m in stores[0].load(one.conversation.id).messages]
    assert sorted(texts) == ["begun and", "begun and one more", "begun and two more", "hello"]


def test_a_chat_that_another_terminal_deletes_does_not_come_back(stores: tuple[Store, Store]) -> None:
    one = session(stores[0], "a reply", "more", "and more")
    play(one.send, "hello")
    stores[1].delete(one.conversation.id)
    warnings = [e.text for text in ("again", "and again") for e in play(one.send, text) if isinstance(e, ChatWarning)]
    assert warnings == ["this chat was deleted: new messages are not saved; /export writes the chat to a file"]
    assert [m.text for m in one.conversation.path()][-2:] == ["and again", "and more"]
    assert not one.saver.is_saved
    assert one.saver.flush(0.0) is None
    assert stores[0].sessions() == []


async def test_all_tabs_of_the_app_count(tmp_path: Path) -> None:
    first, second = Store(tmp_path / "chats.sqlite3"), Store(tmp_path / "chats.sqlite3")
    async with chatting(setup(AppModel(["a", "b"]), first)) as chat:
        await chat.ask("one")
        await chat.press("f4")
        await chat.ask("two")
        (two, one) = (summary.id for summary in first.sessions())
        await chat.until(lambda: second.others_with_open(one) and second.others_with_open(two))
        await chat.press("ctrl+o")
        await chat.until(lambda: chat.screen.count("  open · ") == 2)
        await chat.press("down", "delete", "down", "enter")  # the chat of the hidden tab
        await chat.until(lambda: len(first.sessions()) == 1)
        await chat.press("escape")
        await chat.until(lambda: not second.others_with_open(one))
        assert "1 New chat" in chat.screen
        await chat.say("/close")
        await chat.until(lambda: not second.others_with_open(two))


async def test_the_app_tells(tmp_path: Path) -> None:
    first, second = Store(tmp_path / "chats.sqlite3"), Store(tmp_path / "chats.sqlite3")

    one = session(first, "a reply")
    one.mark_open()
    play(one.send, "hello")
    built = setup(AppModel(), second, conversation=second.load(one.conversation.id))
    async with chatting(built) as chat:
        await chat.hears("open in another terminal too")
        await chat.sees("Also open in another terminal")
        await chat.press("ctrl+o")
        await chat.sees("hello  open")
        await chat.press("delete")
        await chat.sees("It is open in another terminal (process")
        await chat.press("escape", "escape")


def test_a_read_only_store_does_not_notify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "chats.sqlite3")

    def fail(*ids: object) -> list[str]:
        raise StoreError("the disk is full")

    monkeypatch.setattr(store, "mark_open", fail)
    assert session(store).mark_open() is None
