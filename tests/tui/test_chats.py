"""Chats on disk: chats are restored exactly, and damaged files are reported or repaired."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from localllm.errors import StoreError
from localllm.tui.chat.conversation import Attachment, ChatMessage, Conversation, ReplyStats, Window
from localllm.tui.storage import schema
from localllm.tui.storage.chats import ChatDeletedError, Store, default_path
from localllm.tui.text import automatic_title, clean_title
from tests.helpers.data import ROOT
from tests.helpers.fake_chat import leaves


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "chats.sqlite3"


@pytest.fixture
def store(path: Path) -> Store:
    return Store(path)


def talk(*words: str, title: str = "") -> Conversation:
    conversation = Conversation(title=title)
    for i, word in enumerate(words):
        conversation.add("assistant" if i % 2 else "user", word)
    return conversation


def saved(store: Store, *words: str, title: str = "") -> Conversation:
    conversation = talk(*words, title=title)
    store.save(conversation, conversation.messages)
    return conversation


# Saving and loading.


def test_a_round_trip_through_the_file(path: Path) -> None:
    conversation = Conversation(title="t", system="be kind", settings={"temperature": 0.5}, model="/m.gguf")
    question = conversation.add("user", "hello\0 \x1b ü 🙂", attachments=(Attachment("a b.txt", "text", 3),))
    conversation.update(question.id, window=Window(question.id, "before"))
    reply = conversation.add(
        "assistant", "<think>x</think>y", state="length", opened="<think>", stats=ReplyStats(5, 3, 2, 0.5, 9.0, "M")
    )
    conversation.add_sibling(reply.id, "other")
    conversation.switch(reply.id)
    store = Store(path)
    store.save(conversation, conversation.messages)
    store.close()
    store = Store(path)
    again = store.load(conversation.id)
    store.close()
    assert again == conversation


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 5)), max_size=8))
def test_any_tree_is_restored(store: Store, said: list[tuple[str, int]]) -> None:
    conversation = Conversation()
    for text, at in said:
        messages = conversation.messages
        conversation.add("user", text, parent=messages[at % len(messages)].id if messages else None)
    store.save(conversation, conversation.messages)
    assert store.load(conversation.id) == conversation


def test_a_reply_is_saved_again_and_again(store: Store) -> None:
    conversation = saved(store, "hello", "one")
    reply = conversation.path()[1]
    for text in ("one two", "one two three"):
        store.save(conversation, [conversation.update(reply.id, text=text)])
    assert store.load(conversation.id).path()[1].text == "one two three"
    assert store.sessions()[0].n_messages == 2


def test_a_reply_that_was_being_written_is_cut_off(store: Store) -> None:
    conversation = talk("hello")
    reply = conversation.add("assistant", "so far", state="streaming")
    store.save(conversation, conversation.messages)
    again = store.load(conversation.id)
    assert again.leaf == replace(reply, state="killed")
    assert again.leaf.is_cut
    conversation.update(reply.id, text="")
    store.save(conversation, [conversation[reply.id]])
    assert [message.text for message in store.load(conversation.id).path()] == ["hello"]


def test_lists(store: Store) -> None:
    first, second = saved(store, "a", "<think>hm</think>b\nc", title="First"), saved(store, "x" * 500)
    listed = store.sessions()
    assert [summary.id for summary in listed] == [second.id, first.id]
    assert (listed[1].title, listed[1].preview, listed[1].n_messages) == ("First", "b c", 2)
    assert len(listed[0].preview) <= 81
    store.save(first, [])
    assert store.sessions()[0].id == first.id
    store.set(first.id, archived=True)
    assert store.sessions()[0].id == second.id
    assert [summary.id for summary in store.sessions(archived=True)] == [first.id]
    store.set(first.id, archived=False)
    assert len(store.sessions(limit=1)) == 1
    assert store.rename(first.id, "  new\nname\x1b ") == "new name\\x1b"
    assert store.load(first.id).title == "new name\\x1b"


def test_an_empty_store(store: Store) -> None:
    assert store.sessions() == store.search("a") == []
    for act in (store.load, store.find):
        with pytest.raises(StoreError, match="there is no chat 'x'"):
            act("x")


def test_deleting(store: Store) -> None:
    kept, gone = saved(store, "apple pie"), saved(store, "apple cake", "secret")
    assert len(store.search("apple")) == 2
    store.delete(gone.id)
    assert [summary.id for summary in store.search("apple")] == [kept.id]
    assert store.search("secret") == []
    assert [summary.id for summary in store.sessions()] == [kept.id]
    store.delete_messages([kept.path()[0].id])
    assert store.search("apple") == []
    assert len(store.load(kept.id)) == 0


def test_ids_can_be_shortened(store: Store) -> None:
    conversation = Conversation(id="abcdef")
    other = Conversation(id="abx")
    for each in (conversation, other, Conversation(id="ab%")):
        store.save(each, [])
    assert store.find("abcdef") == store.find("abc") == "abcdef"
    assert store.find("ab%") == "ab%"
    with pytest.raises(StoreError, match="several chats"):
        store.find("ab")
    with pytest.raises(StoreError, match="no chat ''"):
        store.find("")


# Searching.


def test_searching(store: Store) -> None:
    cooking = saved(store, "How long do noodles boil?", "<think>salt</think>Eight minutes.", title="Kitchen")
    street = saved(store, "Große Straße in 100%", "[a*b]?", title="Ä town")

    def found(text: str) -> list[str]:
        return [summary.id for summary in store.search(text)]

    assert found("NOODLE") == found("nood boil") == found("minutes") == found("kitch") == [cooking.id]
    assert found("strasse") == found("GROSSE") == found("100%") == found("ä") == found("[a*b]?") == [street.id]
    assert found("a*b") == found("[a*") == [street.id]
    assert set(found("o")) == {cooking.id, street.id}
    for text in ("noodles minutes", "salt", "n?odles", "x*", "1000", "'", '"'):
        assert found(text) == [], text
    (hit,) = store.search("boil")
    assert "boil" in hit.preview


def test_an_excerpt_starts_shortly_before_the_match(store: Store) -> None:
    before = "Maß " * 500
    saved(store, f"{before}needle {'hay ' * 500}", title="far")
    saved(store, f"a Needle {'hay ' * 500}", title="near")
    saved(store, f"{before}a needle", title="last")
    excerpts = {hit.title: hit.preview for hit in store.search("needle")}
    assert excerpts == {
        "far": f"…{'Maß ' * 5}needle {'hay ' * 12}hay…",
        "near": f"a Needle {'hay ' * 16}hay…",
        "last": f"…ß {'Maß ' * 4}a needle",
    }


def test_changed_messages_are_found_with_their_new_text(store: Store) -> None:
    conversation = saved(store, "hello", "apple")
    assert store.search("apple")
    store.save(conversation, [conversation.update(conversation.path()[1].id, text="pear")])
    assert not store.search("apple")
    assert store.search("pear")


# Damaged files and several processes.


def test_a_private_file_in_wal_mode(store: Store, path: Path) -> None:
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with sqlite3.connect(path) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


@pytest.mark.parametrize("damage", ["garbage", "torn"])
def test_a_damaged_file_is_refused_and_stays(path: Path, damage: str) -> None:
    store = Store(path)
    for i in range(30):
        saved(store, "word " * 300, title=str(i))
    store.close()
    data = path.read_bytes()
    damaged = b"not a database" * 100 if damage == "garbage" else data[:8192] + b"\xff" * 20_000 + data[28_192:]
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match="damaged: move the file and"):
        Store(path)
    assert path.read_bytes() == damaged


def test_damage_at_run_time_is_reported(path: Path) -> None:
    store = Store(path)
    for i in range(30):
        saved(store, "word " * 300, title=str(i))
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._connection.execute("PRAGMA cache_size=0")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with pytest.raises(StoreError, match="are damaged"):
        store.search("word")


def test_a_newer_file_is_refused(path: Path) -> None:
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(
        StoreError, match=r"written by a newer localllm \(schema 99, this version supports 3\): update"
    ):
        Store(path)
    assert path.read_bytes() == before


def test_migrations_run_once_and_in_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(path)
    conversation = saved(store, "hello")
    store.close()
    more = ("ALTER TABLE sessions ADD COLUMN colour TEXT",)
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, more))
    for _ in range(2):
        store = Store(path)
        assert store.load(conversation.id).path()[0].text == "hello"
        assert store._connection.execute("PRAGMA user_version").fetchone()[0] == len(schema.MIGRATIONS)
        store.close()


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(path).close()
    broken = ("ALTER TABLE sessions ADD COLUMN colour TEXT", "NONSENSE")
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, broken))
    with pytest.raises(StoreError):
        Store(path)
    monkeypatch.undo()
    store = Store(path)
    assert "colour" not in store._connection.execute("SELECT * FROM sessions").description
    store.close()  # `undo` has also removed the patch of the fixture that closes databases


def test_a_lock_is_reported_after_waiting(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "BUSY_SECONDS", 0.05)
    store = Store(path)
    conversation = saved(store, "hello")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="are locked by another program"):
        store.save(conversation, conversation.messages)
    assert len(store.sessions()) == 1
    assert len(store.search("hell")) == 1  # this store cannot write the index
    other.execute("ROLLBACK")
    other.close()
    store.save(conversation, conversation.messages)


def test_a_full_disk_is_reported_and_loses_nothing(store: Store) -> None:
    conversation = saved(store, "hello")
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count={pages}")
    long = conversation.add("assistant", "x" * 100_000)
    with pytest.raises(StoreError, match="the disk is full: make room"):
        store.save(conversation, [long])
    assert len(store.load(conversation.id)) == 1
    store._connection.execute("PRAGMA max_page_count=100000")
    store.save(conversation, [long])
    assert len(store.load(conversation.id)) == 2


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root can write any file")
def test_a_file_without_permission_is_reported(path: Path) -> None:
    Store(path).close()
    path.chmod(0)
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(path)


def test_a_read_only_database_can_be_read(store: Store) -> None:
    conversation = saved(store, "hello")
    store._connection.execute("PRAGMA query_only=1")
    assert store.load(conversation.id) == conversation
    assert len(store.search("hello")) == 1
    with pytest.raises(StoreError, match="cannot be written: check the permissions"):
        store.save(conversation, conversation.messages)


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="LOCALLLM_DATA"):
        Store(tmp_path / "file" / "chats.sqlite3")
    (tmp_path / "chats.sqlite3").mkdir()
    with pytest.raises(StoreError, match="cannot be"):
        Store(tmp_path / "chats.sqlite3")


def test_memory() -> None:
    store = Store(None)
    conversation = saved(store, "hello")
    assert store.load(conversation.id) == conversation
    assert store.search("hell")
    store.close()
    with pytest.raises(StoreError, match="in memory cannot be used"):
        store.sessions()


WRITES = """
import sys
from pathlib import Path
from localllm.tui.chat.conversation import Conversation
from localllm.tui.storage.chats import Store
store, conversation = Store(Path(sys.argv[1])), Conversation()
for i in range(30):
    store.save(conversation, [conversation.add("user", str(i))])
store.close()
"""


def test_processes_write_at_once(path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", WRITES, path], cwd=ROOT) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    store = Store(path)
    assert [summary.n_messages for summary in store.sessions()] == [30, 30, 30]


def test_a_new_database_waits_for_a_process_that_writes(path: Path) -> None:
    path.parent.mkdir()
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.1, other.execute, ["COMMIT"])
    release.start()
    saved(Store(path), "hello")
    release.join()
    other.close()


def test_two_processes_in_one_chat_make_branches(path: Path) -> None:
    one, two = Store(path), Store(path)
    first = saved(one, "hello", "hi")
    second = two.load(first.id)
    for store, conversation, text in ((one, first, "left"), (two, second, "right")):
        store.save(conversation, [conversation.add("user", text)])
    again = one.load(first.id)
    assert [message.text for message in leaves(again)] == ["left", "right"]
    assert again.leaf == second.leaf
    two.delete(first.id)
    for conversation in (first, second):  # half of the chat must not reappear
        with pytest.raises(ChatDeletedError):
            one.save(conversation, [conversation.add("assistant", "still here")])
    assert two.sessions() == []
    one.close()
    two.close()


def test_invalid_values_are_reported_or_ignored(store: Store) -> None:
    conversation = saved(store, "hello")
    execute = store._connection.execute
    execute("""UPDATE sessions SET settings = '{"temperature": 0.5, "top_k": "x", "of_the_future": 1}'""")
    assert store.load(conversation.id).settings == {"temperature": 0.5}
    execute("UPDATE messages SET extras = '{\"stats\": 5}'")
    with pytest.raises(
        StoreError,
        match=r"message 1 of the saved chats is damaged: Expected .*, got `int` - at `\$.stats`",
    ):
        store.load(conversation.id)


def test_text_that_is_not_utf8_hides_no_chat(store: Store) -> None:
    """File names may contain arbitrary bytes, and a disk may change a byte."""
    conversation = talk("hello", "there")
    conversation.model = "m\udcff.gguf"
    store.save(conversation, conversation.messages)
    store.set(conversation.id, system="s\ud800")
    loaded = store.load(conversation.id)
    assert (loaded.model, loaded.system) == ("m\\udcff.gguf", "s\\ud800")
    store._connection.execute("UPDATE sessions SET title = CAST(x'61FF' AS TEXT)")
    store._connection.execute("UPDATE messages SET text = CAST(x'62FF' AS TEXT) WHERE seq = 2")
    (summary,) = store.sessions()
    assert (summary.title, summary.preview) == ("a\ufffd", "b\ufffd")
    assert [message.text for message in store.load(conversation.id).path()] == ["hello", "b\ufffd"]


def test_a_damaged_message_is_named(store: Store) -> None:
    conversation = saved(store, "hello")
    store._connection.execute("UPDATE messages SET extras = ''")
    with pytest.raises(StoreError, match="message 1 of the saved chats is damaged: it is not valid JSON"):
        store.load(conversation.id)


@pytest.mark.parametrize("change", ["CREATE TABLE theirs (x)", "PRAGMA user_version=-1"])
def test_the_database_of_another_program_is_not_changed(path: Path, change: str) -> None:
    path.parent.mkdir()
    other = sqlite3.connect(path)
    other.execute(change)
    other.close()
    with pytest.raises(StoreError, match="is a database of another program: move the file"):
        Store(path)
    other = sqlite3.connect(path)
    assert {name for (name,) in other.execute("SELECT name FROM sqlite_master")} <= {"theirs"}
    other.close()


def test_unknown_values_cannot_be_set(store: Store) -> None:
    with pytest.raises(TypeError, match="'colour'"):
        store.set("x", colour="red")


# Details.


def test_the_path_of_the_chats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALLLM_DATA", str(tmp_path))
    assert default_path() == tmp_path / "chats.sqlite3"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALLLM_DATA", "~/chats")
    if sys.platform != "win32":
        assert default_path() == tmp_path / "chats" / "chats.sqlite3"
    monkeypatch.delenv("LOCALLLM_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    if sys.platform == "linux":
        assert default_path() == tmp_path / "data" / "localllm" / "chats.sqlite3"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Hello!", "Hello!"),
        ("\n\n# A heading\nand more", "A heading"),
        ("```\ncode\n```", "code"),
        ("x" * 100, "x" * 49 + "…"),
        (
            "one two three four five six seven eight nine ten eleven",
            "one two three four five six seven eight nine ten…",
        ),
        (" \n ", ""),
        ("a\x1b[31mb\u202ec", "a\\x1b[31mb\\u202ec"),
    ],
)
def test_automatic_titles(text: str, title: str) -> None:
    assert automatic_title(text) == title
    assert len(clean_title(text * 10)) <= 201


def test_a_message_is_a_value() -> None:
    assert ChatMessage("a", None, "user", "x", 1.0) == ChatMessage("a", None, "user", "x", 1.0)
