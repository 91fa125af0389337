"""Chat sessions: requests to the model, saved messages, and the ends of replies."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest

import localllm
from localllm.errors import DeviceLostError, UsageError
from localllm.quant.types import GGMLType
from localllm.tui.chat.context import ChatModel
from localllm.tui.chat.conversation import ChatMessage, Conversation, ReplyStats
from localllm.tui.chat.events import (
    ChatWarning,
    ContextFull,
    ContextTrimmed,
    Delta,
    Event,
    Finished,
    Prefill,
    Started,
    Summarising,
    Turn,
)
from localllm.tui.chat.session import ChatSession
from localllm.tui.storage.chats import Store
from tests.helpers.fake_chat import FakeModel, Reply, leaves, play
from tests.helpers.tiny_models import config, random_weights, write_gguf


def begin(store: Store, *replies: Reply, context: int = 1000) -> tuple[ChatSession, FakeModel]:
    model = FakeModel(list(replies), context=context)
    return ChatSession(model, store), model


def texts(session: ChatSession) -> list[str]:
    return [message.text for message in session.conversation.path()]


def prefilled(stats: ReplyStats) -> int:
    """Return the number of prompt tokens that were not in the cache."""
    return stats.prompt_tokens - stats.cached_tokens


def kept(session: ChatSession) -> list[str]:
    return [message.text for message in session.store.load(session.conversation.id).path()]


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta) and not event.thinking)


# Turns.


def test_a_turn(store: Store) -> None:
    session, model = begin(store, "Hello to you")
    events = play(session.send, "hi there")
    question, reply = session.conversation.path()
    assert events[0] == Started(reply.id)
    assert [event for event in events if isinstance(event, Prefill)] == [Prefill(0, 4), Prefill(4, 4)]
    assert [event for event in events if isinstance(event, Delta)] == [Delta("Hello"), Delta(" to"), Delta(" you")]
    assert events[-1] == Finished(reply)
    assert (question.text, reply.text, reply.state) == ("hi there", "Hello to you", "complete")
    assert model.asked[0].messages == [{"role": "user", "content": "hi there"}]
    stats = reply.stats
    assert stats is not None
    assert (stats.prompt_tokens, stats.cached_tokens, stats.new_tokens) == (4, 0, 3)
    assert (stats.model, session.last, session.live) == ("Fake", stats, None)
    assert session.meter() == (7, 1000)
    assert store.load(session.conversation.id) == session.conversation
    assert session.conversation.title == "hi there"
    assert not session.busy


def test_a_model_without_thinking_starts_with_its_answer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    session, model = begin(store, "Yes.", "hm</think>Yes.")
    model.ending = "assistant:<think>"
    monkeypatch.setattr(FakeModel, "template_variables", {"enable_thinking": False})  # with --reasoning off
    play(session.send, "hi")
    session.set_options({"thinking": True})
    play(session.send, "hi")
    replies = [message for message in session.conversation.path() if message.role == "assistant"]
    assert [(each.thinking, each.content) for each in replies] == [("", "Yes."), ("hm", "Yes.")]


def test_the_next_turn_sends_the_conversation(store: Store) -> None:
    session, model = begin(store, "<think>hm</think>one", "two")
    session.set_system("be kind")
    play(session.send, "a")
    events = play(session.send, "b")
    assert [tuple(m.values()) for m in model.asked[1].messages] == [
        ("system", "be kind"),
        ("user", "a"),
        ("assistant", "one"),
        ("user", "b"),
    ]
    assert said(events) == "two"


def test_thinking_is_separated(store: Store) -> None:
    session, model = begin(store)
    model.ending = "assistant:<think>\n"
    model.replies = ["well </think> yes"]
    events = play(session.send, "a")
    assert [e for e in events if isinstance(e, Delta)] == [Delta("well", True), Delta(" ", True), Delta("yes")]
    assert session.conversation.path()[1].content == "yes"
    assert session.conversation.path()[1].opened == "<think>"


def test_an_edit_is_answered_in_a_new_branch(store: Store) -> None:
    session, model = begin(store, "one", "two", "three")
    play(session.send, "a")
    play(session.send, "b")
    b = session.conversation.path()[2]
    play(session.edit, b.id, "B")
    assert texts(session) == kept(session) == ["a", "one", "B", "three"]
    session.switch(session.conversation.siblings(session.conversation.path()[2].id)[0].id)
    assert texts(session) == kept(session) == ["a", "one", "b", "two"]
    assert model.asked[2].messages[-1] == {"role": "user", "content": "B"}
    stats = leaves(session.conversation)[-1].stats
    assert stats is not None
    assert prefilled(stats) < 5 < stats.prompt_tokens


def test_regenerating(store: Store) -> None:
    session, _ = begin(store, "one", "two", "three")
    play(session.send, "a")
    play(session.regenerate, None)
    assert texts(session) == kept(session) == ["a", "two"]
    assert session.conversation.branch_of(session.conversation.path()[1].id) == (2, 2)
    play(session.regenerate, session.conversation.path()[0].id)
    assert texts(session) == ["a", "three"]


def test_an_edited_reply_is_continued(store: Store) -> None:
    session, model = begin(store, "one two", " more")
    play(session.send, "a")
    assert play(session.edit, session.conversation.path()[1].id, "one and") == []
    assert said(play(session.continue_reply)) == " more"
    assert texts(session) == kept(session) == ["a", "one and more"]
    assert model.asked[1].reply_prefix == "one and"
    assert model.asked[1].messages == [{"role": "user", "content": "a"}]


def test_a_reply_that_was_too_long_is_continued(store: Store) -> None:
    session, model = begin(store, "one two three four", " three four")
    session.set_options({"max_tokens": 2})
    play(session.send, "a")
    reply = session.conversation.path()[1]
    assert (reply.text, reply.state, reply.is_cut) == ("one two", "length", True)
    session.set_options({})
    events = play(session.continue_reply)
    assert events[0] == Started(reply.id)
    assert texts(session) == kept(session) == ["a", "one two three four"]
    assert model.asked[1].reply_prefix == "one two"
    with pytest.raises(UsageError, match="the last reply is complete"):
        play(session.continue_reply)


def test_a_reply_starts_with_the_prefix(store: Store) -> None:
    session, model = begin(store, " indeed")
    session.set_options({"reply_prefix": "Yes,", "thinking": False, "temperature": 0.5, "stop": ["x"]})
    assert said(play(session.send, "a")) == "Yes, indeed"
    assert texts(session)[1] == "Yes, indeed"
    asked = model.asked[0]
    assert (asked.reply_prefix, asked.variables) == ("Yes,", {"enable_thinking": False})
    assert asked.options.items() >= {"temperature": 0.5, "stop": ["x"]}.items()
    assert store.load(session.conversation.id).settings == session.conversation.settings


def test_impossible_actions_are_reported(store: Store) -> None:
    session, _ = begin(store)
    for act, complaint in (
        (lambda: play(session.send, "  \n"), "nothing to send"),
        (lambda: play(session.regenerate, None), "nothing to reply to"),
        (lambda: play(session.continue_reply), "not a reply that can be continued"),
        (lambda: play(session.free_context, "drop"), "not full"),
        (lambda: play(session.edit, "x", "y"), "no message 'x'"),
        (lambda: session.set_options({"temperature": -1}), "temperature is -1"),
        (lambda: session.set_options({"colour": 1}), "no setting 'colour'"),
        (lambda: play(ChatSession(None, store).regenerate, None), "no model is loaded"),
        (lambda: play(ChatSession(None, store).send, "a"), "no model is loaded"),
    ):
        with pytest.raises(UsageError, match=complaint):
            act()  # type: ignore[operator]
    assert store.sessions() == []


# Ends.


def test_stopping_keeps_the_text(store: Store) -> None:
    session, _ = begin(store, "one two three")
    play(session.send, "a", watch=lambda event, turn: turn.stop() if event == Delta(" two") else None)
    reply = session.conversation.path()[1]
    assert (reply.text, reply.state) == ("one two", "stopped")
    assert kept(session) == ["a", "one two"]
    play(session.send, "b")
    assert session.conversation.path()[3].state == "complete"


def test_stopping_before_the_first_word_leaves_no_reply(store: Store) -> None:
    session, model = begin(store, "one", "two")
    model.gate = threading.Event()
    refused = []

    def watch(event: Event, turn: Turn) -> None:
        if not isinstance(event, Started):
            return
        assert session.busy
        for act in (
            lambda: play(session.regenerate, None),
            lambda: play(session.send, "b"),
            lambda: session.switch("x"),
        ):
            with pytest.raises(UsageError, match="a reply is in progress"):
                act()  # type: ignore[no-untyped-call]
            refused.append(act)
        threading.Timer(0.05, turn.stop).start()

    assert play(session.send, "a", watch=watch)[-1] == Finished(None)
    assert len(refused) == 3
    assert texts(session) == kept(session) == ["a"]
    model.gate = None
    play(session.send, "b")
    assert model.asked[1].messages == [{"role": "user", "content": "a\n\nb"}]


def test_an_interrupt_keeps_the_text(store: Store) -> None:
    session, _ = begin(store, "one two three")

    def watch(event: Event, turn: Turn) -> None:
        if event == Delta(" two"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(session.send, "a", watch=watch)
    assert not session.busy
    assert session.conversation.path()[1].state == "stopped"
    assert kept(session) == ["a", "one two"]


def test_a_turn_stopped_before_its_start_changes_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while attached files are read and counted, which takes time."""
    (tmp_path / "notes.txt").write_text("some words")
    monkeypatch.chdir(tmp_path)
    session, model = begin(store, "one", "two")
    events: list[Event] = []
    turn = Turn(events.append)
    count = model.tokenize

    def tokenize(text: str, add_special: bool = True) -> list[int]:
        turn.stop()
        return count(text, add_special)

    monkeypatch.setattr(model, "tokenize", tokenize)
    session.send("read @notes.txt", turn)
    assert events == [Finished(None)]
    assert (turn.question, len(session.conversation), model.asked) == (None, 0, [])
    play(session.send, "a")
    turn = Turn(events.append)
    turn.stop()
    session.regenerate(None, turn)
    assert texts(session) == ["a", "one"]
    assert len(model.asked) == 1


def test_a_failure_keeps_the_text(store: Store) -> None:
    session, _ = begin(store, DeviceLostError("the GPU is gone"), " and on")
    with pytest.raises(DeviceLostError):
        play(session.send, "a")
    reply = session.conversation.path()[1]
    assert (reply.text, reply.state) == ("so far", "failed")
    assert kept(session) == ["a", "so far"]
    play(session.continue_reply)
    assert kept(session) == ["a", "so far and on"]


def test_a_reply_is_saved_while_it_is_written(store: Store) -> None:
    """A separate thread saves, even if no token arrives."""
    session, _ = begin(store, "one two")

    def watch(event: Event, turn: Turn) -> None:
        if event == Delta("one"):
            for _ in range(500):
                if kept(session) == ["a", "one"]:
                    break
                time.sleep(0.02)
            assert kept(session) == ["a", "one"]
            assert store.load(session.conversation.id).path()[1].state == "killed"

    play(session.send, "a", watch=watch)


def test_a_chat_that_is_deleted_in_mid_reply_does_not_come_back(store: Store) -> None:
    session, _ = begin(store, "one two three")

    def watch(event: Event, turn: Turn) -> None:
        if event == Delta("one"):
            store.delete(session.conversation.id)
            turn.stop()

    (warning,) = (e for e in play(session.send, "a", watch=watch) if isinstance(e, ChatWarning))
    assert "this chat was deleted" in warning.text
    assert store.sessions() == []
    assert store.search("one") == []


def test_the_chat_continues_without_a_store(store: Store) -> None:
    session, _ = begin(store, "one", "two", "three")
    store._connection.execute("PRAGMA query_only=1")
    warnings = [event for event in play(session.send, "a") if isinstance(event, ChatWarning)]
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0].text
    assert "is not saved" in warnings[0].text
    assert not [event for event in play(session.send, "b") if isinstance(event, ChatWarning)]
    store._connection.execute("PRAGMA query_only=0")
    play(session.send, "c")
    assert texts(session) == kept(session) == ["a", "one", "b", "two", "c", "three"]


def test_deleting_a_message(store: Store) -> None:
    session, _ = begin(store, "one", "two")
    play(session.send, "a")
    play(session.send, "b")
    session.delete(session.conversation.path()[2].id)
    assert texts(session) == kept(session) == ["a", "one"]


# Attachments.


def test_files_go_with_a_message(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("buy milk\n")
    (tmp_path / "my notes.md").write_text("```\ncode\n```")
    session, model = begin(store)
    events = play(session.send, 'see @notes.txt, @"my notes.md" and @nobody or me@notes.txt')
    assert [e.text for e in events if isinstance(e, ChatWarning)] == [
        "there is no file 'nobody': @nobody is sent as text"
    ]
    message = session.conversation.path()[0]
    assert [(file.name, file.n_tokens) for file in message.attachments] == [("notes.txt", 3), ("my notes.md", 3)]
    sent = str(model.asked[0].messages[0]["content"])
    assert sent.startswith(message.text + "\n\nFile `notes.txt`:\n```\nbuy milk\n```")
    assert "File `my notes.md`:\n````\n```\ncode\n```\n````" in sent
    assert store.load(session.conversation.id).path()[0] == message
    (tmp_path / "notes.txt").unlink()
    play(session.edit, message.id, "and @notes.txt?")
    assert session.conversation.path()[0].attachments == (message.attachments[0],)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("@binary", "it is not UTF-8 text"),
        ("@latin", "it is not UTF-8 text"),
        ("@large", "it has more than 32 MiB"),
        ("@folder", "it has no files"),
        ("@/dev/zero", "it is not a regular file"),
        ("@pipe.pdf", "it is not a regular file"),
        ('@"not there"', "there is no file 'not there'"),
    ],
)
def test_files_that_cannot_go(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "latin").write_bytes("ü".encode("latin-1"))
    (tmp_path / "large").write_bytes(b"")
    os.truncate(tmp_path / "large", (32 << 20) + 1)
    (tmp_path / "folder").mkdir()
    (tmp_path / "pipe.pdf").symlink_to("/dev/zero")  # like a pipe, it has no end
    session, _ = begin(store)
    with pytest.raises(UsageError, match=complaint):
        play(session.send, f"look at {name}")
    assert len(session.conversation) == 0


# A full context.


def chatted(store: Store, n: int, context: int) -> tuple[ChatSession, FakeModel]:
    """Return a chat of ``n`` turns of 11 tokens each."""
    session, model = begin(store, *(f"r{i} {'y ' * 4}y" for i in range(n)), context=context)
    for i in range(n):
        assert isinstance(play(session.send, f"q{i} x x")[-1], Finished)
    return session, model


def roles(model: FakeModel, first_words: bool = True) -> list[str]:
    return [str(m["content"]).split()[0] for m in model.asked[-1].messages]


def test_a_full_context_opens_a_dialog(store: Store) -> None:
    session, model = chatted(store, 5, context=60)
    before = len(model.asked)
    events = play(session.send, "q5 x x")
    assert events == [ContextFull(60, 60, False, ("drop", "stop"))]
    assert len(model.asked) == before
    assert play(session.free_context, "stop") == []
    assert texts(session)[-1] == kept(session)[-1] == "q5 x x"
    with pytest.raises(UsageError, match="not full"):
        play(session.free_context, "drop")


def test_dropping_the_oldest_turns(store: Store) -> None:
    session, model = chatted(store, 5, context=60)
    play(session.send, "q5 x x")
    events = play(session.free_context, "drop")
    assert events[0] == ContextTrimmed(4, "")
    assert isinstance(events[-1], Finished)
    assert roles(model) == ["q2", "r2", "q3", "r3", "q4", "r4", "q5"]
    assert len(texts(session)) == len(kept(session)) == 12
    play(session.send, "q6")
    assert roles(model)[0] == "q2"
    # An edit keeps the window, and an earlier edit removes it.
    play(session.edit, session.conversation.path()[10].id, "Q5")
    assert roles(model)[0] == "q2"
    play(session.edit, session.conversation.path()[6].id, "Q3")
    assert roles(model)[0] == "q0"
    assert store.load(session.conversation.id) == session.conversation


def test_summarising(store: Store) -> None:
    session, model = chatted(store, 11, context=128)
    play(session.send, "q11 x x x x x x")
    model.replies = ["<think>hm</think> all of it", "fine"]
    events = play(session.free_context, "summarise")
    assert "".join(e.text for e in events if isinstance(e, Summarising)) == "<think>hm</think> all of it"
    (made,) = [event for event in events if isinstance(event, ContextTrimmed)]
    assert made.summary == "all of it"
    assert said(events) == "fine"
    *_, summed, replied = model.asked
    assert "Summarise our conversation" in str(summed.messages[-1]["content"])
    assert summed.options["max_tokens"] == 16
    assert replied.messages[0] == {"role": "system", "content": "Summary of the conversation so far:\nall of it"}
    assert str(replied.messages[1]["content"]).startswith("q")
    assert len(session.conversation) == 24
    assert store.load(session.conversation.id) == session.conversation


def test_a_stopped_summary_can_be_requested_again(store: Store) -> None:
    session, model = chatted(store, 11, context=128)
    play(session.send, "q11 x x x x x x")
    model.replies = ["one two three four"]
    play(
        session.free_context,
        "summarise",
        watch=lambda event, turn: turn.stop() if isinstance(event, Summarising) else None,
    )
    assert session.conversation.path()[-1].window is None
    assert isinstance(play(session.free_context, "drop")[-1], Finished)


def test_the_context_fills_in_a_reply(store: Store) -> None:
    session, model = chatted(store, 4, context=60)
    model.replies = ["z " * 30, "and on"]
    events = play(session.send, "q4")
    finished, full = events[-2:]
    assert isinstance(finished, Finished)
    assert finished.message is not None
    assert finished.message.state == "context"
    assert full == ContextFull(61, 60, True, ("drop", "stop"))
    reply = finished.message.text
    events = play(session.free_context, "drop")
    assert isinstance(events[0], ContextTrimmed)
    assert model.asked[-1].reply_prefix == reply
    assert texts(session)[-1] == kept(session)[-1] == reply + "and on"
    assert len(session.conversation) == 10


def test_a_message_too_long_by_itself(store: Store) -> None:
    session, _ = chatted(store, 2, context=60)
    (full,) = play(session.send, "x " * 80)
    assert isinstance(full, ContextFull)
    assert full.choices == ("stop",)
    with pytest.raises(UsageError, match="drop does not help here"):
        play(session.free_context, "drop")


# A real model.


def test_the_library_is_a_model() -> None:
    """Type checkers accept this too."""

    def takes(model: ChatModel) -> None:
        assert model

    with localllm.load(device="reference") as llm:
        takes(llm)


def test_only_new_tokens_are_prefilled(store: Store, tmp_path: Path) -> None:
    """Edit the last message of a chat of 1,000 tokens with a real engine."""
    settings = config(max_position_embeddings=4096, intermediate_size=192)
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    keys = {"tokenizer.chat_template": template}
    path = write_gguf(tmp_path / "a.gguf", settings, random_weights(settings), type=GGMLType.Q8_0, metadata=keys)
    past = Conversation(settings={"temperature": 0, "max_tokens": 4})
    for i in range(7):
        past.add("user", f"Tell me a story about a dog and {i} cats.")
        past.add("assistant", "Once there was a dog that liked to walk in the park with all of the cats. " * 2)
    with localllm.load(path, device="reference") as llm:  # which needs no compiled kernels
        session = ChatSession(llm, store, past)
        first = after(session, play(session.send, "What is localllm?"))
        question = session.conversation.path()[-2]
        edited = after(session, play(session.edit, question.id, "What is a token?"))
        again = after(session, play(session.regenerate, None))
        new = len(llm.tokenize("a token?;a:", add_special=False))
    assert first.prompt_tokens == prefilled(first) > 1000
    assert edited.prompt_tokens > 1000
    # The common start of both questions and everything before it are cached.
    assert prefilled(edited) <= new + 1
    assert prefilled(again) == 1


def after(session: ChatSession, events: list[Event]) -> ReplyStats:
    """Return the final counters, which must agree with the reported prompt counters."""
    progress = [event for event in events if isinstance(event, Prefill)]
    stats = session.last
    assert stats is not None
    assert progress[-1] == Prefill(stats.prompt_tokens, stats.prompt_tokens)
    assert all(event.done >= stats.cached_tokens for event in progress)
    return stats


def test_messages_can_be_read_while_they_are_written(store: Store) -> None:
    session, model = begin(store, "word " * 200)
    lengths: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            path: list[ChatMessage] = session.conversation.path()
            lengths.append(len(path[-1].content) if path else 0)

    thread = threading.Thread(target=read)
    thread.start()
    play(session.send, "a")
    done.set()
    thread.join()
    assert max(lengths) <= 1000
    assert model.asked


def test_changes_that_could_not_be_saved_are_saved_later(store: Store) -> None:
    """While another program locks the file: a title, a system prompt, deletions and the end of the path."""
    session, _ = begin(store, "one", "two")
    play(session.send, "first")
    play(session.send, "second")
    conversation = session.conversation
    store._connection.execute("PRAGMA busy_timeout=10")
    assert store.path is not None
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    session.set_title("new")
    session.set_system("be kind")
    session.delete(conversation.path()[2].id)
    assert "is not saved" in (session.saver.take_warning() or "")
    other.execute("ROLLBACK")
    assert len(kept(session)) == 4
    play(session.send, "third")
    loaded = store.load(conversation.id)
    assert (loaded.title, loaded.system) == ("new", "be kind")
    assert [message.text for message in loaded.messages] == ["first", "one", "third", "ok"]
    other.close()
