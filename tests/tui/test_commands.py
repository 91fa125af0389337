"""Slash commands in a front end that records its calls."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from localllm.errors import LocalLLMError, StoreError, UsageError
from localllm.tui import commands
from localllm.tui.chat import attachments, settings as chat_settings
from localllm.tui.chat.conversation import ChatMessage, Conversation
from localllm.tui.chat.events import ContextFull, ContextTrimmed, Event, Turn
from localllm.tui.chat.session import ChatSession
from localllm.tui.storage.chats import Store
from tests.helpers.fake_chat import FakeModel, play


class Notebook(commands.UI):
    def __init__(self, store: Store, model: FakeModel) -> None:
        self.session = ChatSession(model, store)
        self.events: list[Event] = []
        self.opened = ""
        self.said: list[str] = []
        self.ended = False

    def type(self, *lines: str) -> str:
        """Type lines; return the output for the last one."""
        for line in lines:
            self.said = []
            typed = commands.parse(line)
            if isinstance(typed, str):
                self.events = play(partial(self.session.send, typed))
            else:
                with contextlib.suppress(StopIteration):
                    commands.run(self.session, self, typed).send(None)
        return "\n".join(self.said)

    async def tell(self, text: str) -> None:
        self.said.append(text)

    async def show(self) -> None:
        await self.tell(commands.transcript(self.session, ""))

    async def play(self, start: Callable[[Turn], None]) -> None:
        self.events = play(start)

    async def edit(self, message: ChatMessage) -> None:
        self.opened = message.text

    async def put(self, draft: str) -> None:
        await self.tell(draft)

    async def open(self, conversation: Conversation, told: str = "") -> None:
        self.session = ChatSession(self.session.model, self.session.store, conversation)
        await (self.tell(told or "a new chat") if told or not len(conversation) else self.show())

    async def use_model(self, name: str) -> None:
        self.session.use_model(FakeModel(), name)

    async def quit(self) -> None:
        self.ended = True

    @property
    def path(self) -> list[str]:
        return [message.text for message in self.session.conversation.path()]


@pytest.fixture
def model() -> FakeModel:
    return FakeModel([f"r{i}" for i in range(9)])


@pytest.fixture
def front(model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    monkeypatch.chdir(tmp_path)
    return Notebook(Store(tmp_path / "chats.sqlite3"), model)


def test_messages_and_commands() -> None:
    assert commands.parse("hello /quit") == "hello /quit"
    assert commands.parse("//quit") == "/quit"
    call = commands.parse("/edit #1  two words ")
    assert isinstance(call, commands.CommandCall)
    assert (call.command.name, call.argument) == ("edit", "#1  two words")
    for text, hint in {
        "/exprot": "no command /exprot: did you mean /export?",
        "/": "no command /: /help lists",
        "/xyzzy": "/help lists",
    }.items():
        with pytest.raises(UsageError) as caught:
            commands.parse(text)
        assert hint in str(caught.value)


def test_the_table_of_commands_is_consistent(front: Notebook) -> None:
    names = [name for command in commands.COMMANDS for name in (command.name, *command.aliases)]
    assert len(names) == len(set(names))
    asked_for = "system set save load export regen edit branch model stats clear quit help continue prefix sessions"
    assert {*asked_for.split(), "stop-strings", "rename", "delete", "archive", "theme"} <= set(names)
    for command in commands.COMMANDS:
        listed = f"/{command.name}" in front.type("/help").replace("\n", " ").split(" ")
        assert listed == (command.run is not None)  # the app runs the other commands
        assert command.help in front.type(f"/help {command.name}")
    with pytest.raises(UsageError, match="did you mean /edit"):
        front.type("/help edti")


def test_editing_and_branches(front: Notebook) -> None:
    front.type("a", "b", "/edit B")
    assert front.path == ["a", "r0", "B", "r2"]
    assert front.type("/branch") == "○ #3  1/2  b\n● #3  2/2  B"
    front.type("/branch prev")
    assert front.path == ["a", "r0", "b", "r1"]
    front.type("/branch #3 2")
    assert front.path == ["a", "r0", "B", "r2"]
    front.type("/edit 1 A")
    assert front.path == ["A", "r3"]
    front.type("/regen")
    assert front.path == ["A", "r4"]
    assert front.type("/show") == "#1 user, branch 2 of 2\nA\n\n#2 assistant, branch 2 of 2\nr4"
    assert front.type("/branch") == "○ #1  1/2  a\n● #1  2/2  A\n○ #2  1/2  r3\n● #2  2/2  r4"
    front.type("/branch 1 prev")
    assert front.path == ["a", "r0", "B", "r2"]
    front.type("/branch #1")  # the next one
    assert front.path == ["A", "r4"]
    front.type("/remove 2")
    assert front.path == ["A", "r3"]
    front.type("/edit #2 Well,")
    assert "#2 assistant, branch 2 of 2, edited\nWell," in front.type("/show")
    front.type("/continue")
    assert front.path == ["A", "Well,r5"]
    assert "edited" not in front.type("/show")


def test_a_message_is_opened_to_be_edited(front: Notebook) -> None:
    front.type("a", "b", "/edit")
    assert front.opened == "b"
    for line in ("/edit 1", "/edit #1"):
        front.type(line)
        assert front.opened == "a"
    front.type("/edit 2")
    assert front.opened == "r0"
    front.type("/edit two words")
    assert front.path == ["a", "r0", "two words", "r2"]
    front.type("/edit 3 4 words")  # a leading number is always a message number
    assert front.path == ["a", "r0", "4 words", "r3"]
    front.type("/regen 2")
    assert front.path == ["a", "r4"]


def test_a_message_without_a_reply_is_replaced(front: Notebook) -> None:
    front.session = ChatSession(FakeModel(context=20), front.session.store)
    front.type("word " * 40)
    assert isinstance(front.events[-1], ContextFull)
    front.type("/edit short")
    assert front.path == ["short", "ok"]
    assert len(front.session.conversation) == 2
    assert len(front.session.store.load(front.session.conversation.id).messages) == 2


@pytest.mark.parametrize("where", ["4", "prev next", "0", "#1 4", "2 2", "1 9", "1 2 3", "xyz"])
def test_missing_branches(front: Notebook, where: str) -> None:
    front.type("a", "/edit b", "/branch prev", "/edit 1 c", "/branch 1 2")
    with pytest.raises(UsageError, match=r"there is no (branch|message)"):
        front.type(f"/branch {where}")


def test_settings(front: Notebook) -> None:
    assert front.type("/set temperature") == "temperature          0.8  (default)"
    assert front.type("/set temp 0.3") == "temperature          0.3"
    assert front.type("/set max-tokens 9", "/set seed 5", "/set thinking off") == "thinking             off"
    assert front.session.conversation.settings == {
        "temperature": 0.3,
        "max_tokens": 9,
        "seed": 5,
        "thinking": False,
    }
    assert len(front.type("/set").splitlines()) == len(chat_settings.READERS)
    front.type("/set temp default", "/set seed -1")
    assert front.session.conversation.settings == {"max_tokens": 9, "thinking": False, "seed": None}
    front.type("/prefix Sure, ", '/stop-strings "User: " ###', "a")
    assert front.session.model is not None
    settings = front.session.store.load(front.session.conversation.id).settings
    assert settings == front.session.conversation.settings
    assert (settings["reply_prefix"], settings["stop"]) == ("Sure,", ["User: ", "###"])
    front.type("/prefix none", "/stop-strings none")
    assert front.session.conversation.settings == {"max_tokens": 9, "thinking": False, "seed": None}
    assert front.type("/system be kind") == "system prompt: be kind"
    assert front.session.conversation.system == "be kind"
    assert front.type("/system none") == front.type("/system") == "system prompt: none"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set temprature 1", "did you mean temperature"),
        ("/set temperature hot", "temperature cannot be 'hot': give a number, or default"),
        ("/set top_p 3", "top_p is 3.0, but must be a number from 0 to 1"),
        ("/set xyzzy", "there is no setting 'xyzzy'"),
        ("/stop-strings 'a", "with closed quotation marks"),
        ('/stop-strings ""', "must be a non-empty string"),
        ("/edit x", "there is nothing to edit yet"),
        ("/edit #9 x", "there is no message #9: this chat has no messages yet"),
        ("/edit", "nothing to edit"),
        ("/remove", "name the message"),
        ("/branch next", "this chat has no branches"),
        ("/regen x", "there is no message x"),
        ("/load", "name a chat"),
        ("/load xyz", "there is no chat 'xyz'"),
        ("/load no.json", "no.json cannot be read"),
        ("/import ~nobody-of-this-name/a.json", "is not a valid path: check the part before the first slash"),
        ("/export ~nobody-of-this-name/a.md", "is not a valid path: check the part before the first slash"),
        ("/delete", "name the chat"),
        ("/rename", "give a title"),
        ("/save", "nothing to save"),
        ("/theme dark", "/theme is for the app"),
        ("/editor", "/editor is for the app"),
        ("/fork", "nothing to save yet"),
        ("/prompt none", "there is no prompt 'none': save it in"),
        ("!", "give a command: !ls"),
        ("/drop", "the context is not full"),
        ("/continue", "not a reply that can be continued"),
    ],
)
def test_complaints(front: Notebook, line: str, complaint: str) -> None:
    with pytest.raises(LocalLLMError) as caught:
        front.type(line)
    assert complaint in str(caught.value)


def test_chats(front: Notebook, tmp_path: Path) -> None:
    front.type("first words")
    first = front.session.conversation.id
    assert front.type("/clear") == "a new chat"
    front.type("second words", "/rename Two")
    second = front.session.conversation.id
    lines = front.type("/sessions").splitlines()
    assert lines == [f"{second}  Two · 2 · r1", f"{first}  first words · 2 · r0"]
    assert front.type("/sessions first") == f"{first}  first words · 2 · first words"
    assert front.type(f"/load {first[:6]}").startswith("#1 user\nfirst words")
    assert front.type("/save Another title") == f"{first}  Another title, saved in {tmp_path / 'chats.sqlite3'}"
    front.type(f"/archive {second}")
    assert front.type("/sessions archived").startswith(second)
    assert second not in front.type("/sessions")
    front.type(f"/unarchive {second}", f"/delete {second}")
    assert front.type("/sessions archived") == "no chats"
    front.type("/delete this")
    assert front.session.conversation.id != first
    assert front.type("/sessions") == "no chats"
    with pytest.raises(UsageError, match="nothing to save yet"):
        front.type("/archive")


def test_files(front: Notebook, tmp_path: Path) -> None:
    front.type("hello", "/export chat.json", "/export")
    assert json.loads((tmp_path / "chat.json").read_text())["title"] == "hello"
    assert "hello" in (tmp_path / f"chat-{front.session.conversation.id}.md").read_text()
    old = front.session.conversation.id
    front.type("/load chat.json")
    assert front.session.conversation.id != old
    assert front.path == ["hello", "r0"]
    assert len(front.session.store.sessions()) == 2


def test_models_stats_and_the_end(front: Notebook) -> None:
    assert front.type("/model") == "Fake: fake.gguf, 1,000 tokens of context"
    front.type("hello")
    assert front.type("/stats").splitlines() == [
        "context 4 / 1,000 tokens (0%)",
        "last prompt 3 tokens: 0 cached, 3 evaluated",
        "last reply 1 tokens: the first after 0.25 s, then 10.0 tok/s, by Fake",
    ]
    front.type("/model other.gguf")
    assert front.session.store.load(front.session.conversation.id).model == "other.gguf"
    front.type("/quit")
    assert front.ended


@pytest.mark.parametrize("line", ["/drop", "/summarise"])
def test_making_room(front: Notebook, line: str) -> None:
    front.session = ChatSession(FakeModel(["y " * 7] * 20, context=128), front.session.store)
    front.type("a")
    while not isinstance(front.events[-1], ContextFull):
        front.type("d d d d d")
    front.type(line)
    assert any(isinstance(event, ContextTrimmed) for event in front.events)


def test_a_chat_is_forked(front: Notebook) -> None:
    front.type("a", "b", "/edit B", "/rename Two")
    old = front.session.conversation
    front.type("/fork 3")
    assert front.path == ["a", "r0", "B"]
    assert front.session.conversation.title == "Two (fork)"
    front.type("/edit other")
    assert front.path == ["a", "r0", "other", "r3"]
    assert [m.text for m in front.session.store.load(old.id).path()] == ["a", "r0", "B", "r2"]
    assert not {m.id for m in old.messages} & {m.id for m in front.session.conversation.messages}
    assert len(front.session.store.sessions()) == 2


def test_all_chats_are_exported(front: Notebook, tmp_path: Path) -> None:
    front.type("first", "/clear", "second", "/archive")
    assert front.type("/export all backup") == "2 chats written into backup"
    assert front.type("/import backup") == "2 chats imported from backup"
    (tmp_path / "backup" / "z.json").write_text("{}")
    with pytest.raises(StoreError, match=r"z\.json cannot be imported: it is not a chat"):
        front.type("/import backup")
    assert len(front.type("/sessions").splitlines()) == 3  # one chat is archived
    (tmp_path / "backup" / "z.json").unlink()
    kept = [json.loads(path.read_text())["title"] for path in (tmp_path / "backup").iterdir()]
    assert sorted(kept) == ["first", "second"]
    with pytest.raises(UsageError, match="already exists"):
        front.type("/export all backup")


def test_prompts_of_a_folder(front: Notebook, tmp_path: Path) -> None:
    assert f"save texts in {tmp_path / 'prompts'}" in front.type("/prompt")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "short.md").write_text("Say it in $1 words, $2: $ARGUMENTS\n")
    (tmp_path / "prompts" / "plain.txt").write_text("Summarise this.")
    (tmp_path / "secret.md").write_text("secret")
    assert front.type("/prompt") == "plain\nshort"
    assert front.type("/prompt short ten please") == "Say it in ten words, please: ten please"
    assert front.type("/prompt short") == "Say it in  words, : "
    assert front.type("/prompt plain a $1 text") == "Summarise this.\n\na $1 text"
    for name in ("shrot", "../secret"):
        with pytest.raises(UsageError, match="there is no prompt"):
            front.type(f"/prompt {name}")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_the_output_of_a_command(front: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands.parse("!!important") == "!important"
    assert front.type("!echo one; echo two >&2") == "Output of `echo one; echo two >&2`:\n\n```\none\ntwo\n```"
    assert front.type("/run printf '```'").endswith("````\n```\n````")
    monkeypatch.setattr(attachments, "MAX_OUTPUT", 100)
    assert len(front.type("!yes")) < 200  # a command without end
    monkeypatch.setattr(attachments, "COMMAND_SECONDS", 0.1)
    assert front.type("!echo begun; sleep 1000 & wait").endswith("```\nbegun\n```")


def test_replies_follow_a_schema(front: Notebook, model: FakeModel, tmp_path: Path) -> None:
    assert front.type("/format") == "replies are free text"
    (tmp_path / "s.json").write_text('{"type": "object"}')
    assert front.type("/format s.json") == 'replies are JSON by the schema {"type": "object"}'
    front.type("hi")
    assert model.asked[-1].options["json_schema"] == {"type": "object"}
    kept = front.session.store.load(front.session.conversation.id)
    assert kept.settings == {"json_schema": {"type": "object"}}
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(UsageError, match=r"^the schema nothere.json cannot be read \(.*\): check the path$"):
        front.type("/format nothere.json")
    with pytest.raises(UsageError, match="give a JSON schema, or default"):
        front.type("/format s.json")
    assert front.type("/format none") == "replies are free text"


def test_replies_are_compared(front: Notebook, model: FakeModel) -> None:
    with pytest.raises(UsageError, match="there is only one reply"):
        front.type("/compare")
    front.type("hi")
    model.name = "Other"
    front.type("/regen")
    assert front.type("/compare") == "Fake\nr0\n\nOther\nr1"
    front.type("/regen")
    assert front.type("/compare") == "Fake\nr0\n\nOther\nr2"
    with pytest.raises(UsageError, match="/model FILE, /regen"):
        front.type("/compare other.gguf")
