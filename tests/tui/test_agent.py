"""The chat as an agent: edits in a working folder with permission and undo, AGENTS.md, skills, images, effort."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from localllm.agent_tools.toolbox import Toolbox
from localllm.errors import StoreError, UsageError
from localllm.tui import commands
from localllm.tui.chat.conversation import CallRecord, Conversation
from localllm.tui.chat.events import ChatNotice, ChatWarning, Event, ToolApprovalRequest, ToolCallsDone, Turn
from localllm.tui.chat.export import from_json, to_json, to_markdown
from localllm.tui.chat.session import ChatSession
from tests.helpers.chat_app import AppModel, chatting, setup
from tests.helpers.fake_chat import FakeModel, Reply, play
from tests.helpers.images import file_of
from tests.tui.test_tools import answering, asking, call

CAT = file_of(Image.new("RGB", (8, 8)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a.txt").write_bytes(b"pears\nplums\n")
    return (tmp_path / "project").resolve()


def working(folder: Path, *replies: Reply, **settings: Any) -> tuple[ChatSession, FakeModel]:
    session, model = asking(*replies)
    session.set_options({"folder": str(folder), **settings})
    return session, model


def edit(old: str, new: str) -> str:
    return call("edit_file", path="a.txt", old_text=old, new_text=new)


def test_an_edit_shows_its_diff_before_it_is_applied(folder: Path) -> None:
    session, model = working(folder, edit("plums", "figs"), "done")
    seen: list[object] = []

    def watch(event: Event, turn: Turn) -> None:
        if isinstance(event, ToolCallsDone):
            seen.append(event.message.calls[0])
        if isinstance(event, ToolApprovalRequest):
            seen.append((event.change, (folder / "a.txt").read_text()))
            event.answer("once")

    play(session.send, "edit", watch=watch)
    change = "--- a.txt\n+++ a.txt\n@@ -1,2 +1,2 @@\n pears\n-plums\n+figs"
    shown, asked, done = seen
    assert (shown.change, shown.result) == (change, None)  # type: ignore[attr-defined]
    assert asked == (change, "pears\nplums\n")
    assert (done.change, done.result) == (change, "a.txt is changed")  # type: ignore[attr-defined]
    assert (folder / "a.txt").read_bytes() == b"pears\nfigs\n"
    names = [tool["function"]["name"] for tool in model.asked[0].tools or ()]
    assert names == ["read_file", "search_files", "edit_file", "write_file"]
    stored = session.store.load(session.conversation.id)
    assert stored.path()[1].calls == session.conversation.path()[1].calls
    assert stored.settings == {"folder": str(folder)}
    assert "+figs" in to_markdown(stored)


def test_an_edit_that_is_not_allowed_changes_nothing(folder: Path) -> None:
    session, _ = working(folder, edit("plums", "figs"), "pity")
    play(session.send, "edit", watch=answering("no"))
    assert (folder / "a.txt").read_bytes() == b"pears\nplums\n"
    with pytest.raises(UsageError, match="no edit can be undone"):
        session.undo()


def test_an_edit_that_fails_is_not_asked_for(folder: Path) -> None:
    session, model = working(folder, edit("zebra", "figs"), "pity")
    play(session.send, "edit", watch=answering())
    assert "old_text is not in a.txt" in str(model.asked[1].messages[2]["content"])


def test_a_file_that_changes_during_the_question_is_kept(folder: Path) -> None:
    session, _ = working(folder, edit("plums", "figs"), call("write_file", path="a.txt", content="x"), "pity")

    def watch(event: Event, turn: Turn) -> None:
        if isinstance(event, ToolApprovalRequest):
            (folder / "a.txt").write_text((folder / "a.txt").read_text() + "plums\n")
            event.answer("once")

    play(session.send, "edit", watch=watch)
    assert (folder / "a.txt").read_text() == "pears\nplums\nplums\nplums\n"
    errors = [reply.calls[0].result or "" for reply in session.conversation.path() if reply.calls]
    assert "occurs 2 times" in errors[0]
    assert "changed in the meantime" in errors[1]


def test_permission_for_edits_is_for_one_folder(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    session, _ = working(folder, edit("plums", "figs"), "a", edit("figs", "plums"), "b", edit("plums", "figs"), "c")
    session.toolbox = Toolbox({}, tmp_path / "allowed")
    play(session.send, "edit", watch=answering("always"))
    play(session.send, "edit", watch=answering())
    assert (folder / "a.txt").read_bytes() == b"pears\nplums\n"
    session.set_options({"folder": str(other)})
    events = play(session.send, "edit", watch=answering("no"))
    assert any(isinstance(event, ToolApprovalRequest) for event in events)
    assert (other / "a.txt").read_bytes() == b"pears\nplums\n"


def test_edits_are_undone_in_order_and_the_model_is_told(folder: Path) -> None:
    session, model = working(
        folder, edit("plums", "figs"), call("write_file", path="b.txt", content="x"), "done", "ok"
    )
    play(session.send, "edit", watch=answering("chat", "chat"))
    assert (folder / "b.txt").read_text() == "x"
    (folder / "b.txt").write_text("y")
    with pytest.raises(UsageError, match=r"b\.txt has changed since the edit"):
        session.undo()
    (folder / "b.txt").write_text("x")
    assert session.undo() == "b.txt is removed; 1 earlier edit can be undone"
    assert session.undo() == "a.txt is restored"
    assert (folder / "a.txt").read_bytes() == b"pears\nplums\n"
    assert not (folder / "b.txt").exists()
    play(session.send, "go on")
    results = [str(message["content"]) for message in model.asked[-1].messages if message["role"] == "tool"]
    note = "\n(the user has undone this edit)"
    assert results == [f"a.txt is changed{note}", f"b.txt is created{note}"]
    assert session.store.load(session.conversation.id).path()[1].calls[0].result == results[0]


def test_undo_waits_for_the_end_of_a_reply(folder: Path) -> None:
    session, _ = working(folder, edit("plums", "figs"), "done")
    errors = []

    def watch(event: Event, turn: Turn) -> None:
        if isinstance(event, ToolApprovalRequest):
            with pytest.raises(UsageError, match="a reply is in progress") as error:
                session.undo()
            errors.append(error)
            event.answer("once")

    play(session.send, "edit", watch=watch)
    assert errors
    assert session.undo().startswith("a.txt is restored")


def test_an_imported_diff_may_be_any_text() -> None:
    for change, subject in (("x", "{}"), ("", "{}"), ("--- a\n+++ b", "b"), ("\n", "")):
        assert CallRecord("edit_file", "{}", change=change).subject == subject


# -- AGENTS.md and skills ------------------------------------------------------------------------------------------


def test_agents_md_is_in_the_system_message_and_can_be_switched_off(folder: Path) -> None:
    (folder / "AGENTS.md").write_text("Use tabs.")
    (folder / ".agents" / "skills" / "draw").mkdir(parents=True)
    (folder / ".agents" / "skills" / "draw" / "SKILL.md").write_text(
        "---\nname: draw\ndescription: draws\n---\nPencil"
    )
    session, model = working(folder, "a", call("read_skill", name="draw"), "b", "c")
    session.set_system("Be kind.")
    events = play(session.send, "hi")
    (notice,) = [event.text for event in events if isinstance(event, ChatNotice)]
    assert "AGENTS.md (9 characters), 1 skill (draw): /set instructions off" in notice
    system = str(model.asked[0].messages[0]["content"])
    assert system.startswith("Be kind.\n\nInstructions from ")
    assert "Use tabs." in system
    assert system.endswith("\n- draw: draws")
    (folder / "AGENTS.md").write_text("Changed.")  # the cached prompt stays valid
    events = play(session.send, "draw", watch=answering("once"))
    assert not any(isinstance(event, ChatNotice) for event in events)
    assert model.asked[1].messages[0]["content"] == system
    assert "Pencil" in str(model.asked[2].messages[-1]["content"])
    assert session.meter().used > 0
    session.set_options({**session.conversation.settings, "instructions": False})
    play(session.send, "hi")
    assert model.asked[-1].messages[0]["content"] == "Be kind."
    assert "read_skill" not in str(model.asked[-1].tools)


def test_a_folder_that_was_removed_is_reported(folder: Path) -> None:
    session, model = working(folder, "a")
    shutil.rmtree(folder)
    events = play(session.send, "hi")
    assert any(isinstance(event, ChatWarning) and "there is no folder" in event.text for event in events)
    assert not model.asked[0].tools


def test_the_folder_is_chosen_by_a_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = asking()
    assert "no working folder" in commands.folder_text(session, "")
    monkeypatch.chdir(folder)
    assert str(folder) in commands.folder_text(session, ".")
    assert session.conversation.settings == {"folder": str(folder)}
    assert [line.split()[0] for line in commands.tools_text(session, "").splitlines()][2:] == [
        "edit_file",
        "write_file",
    ]
    with pytest.raises(UsageError, match="folder cannot be 'nowhere': give the path of a folder that exists"):
        commands.folder_text(session, "nowhere")
    assert "no working folder" in commands.folder_text(session, "none")


def test_an_exported_chat_has_no_folder(folder: Path) -> None:
    session, _ = working(folder, "a", temperature=0.5)
    play(session.send, "hi")
    text = to_json(session.conversation)
    assert str(folder) not in text
    assert from_json(text).settings == {"temperature": 0.5}
    values = json.loads(text)
    values["settings"]["folder"] = "/"
    assert from_json(json.dumps(values)).settings == {"temperature": 0.5}
    values["settings"]["folder"] = 5
    with pytest.raises(StoreError, match="folder cannot be 5"):
        from_json(json.dumps(values))


# -- Images and reasoning ------------------------------------------------------------------------------------------


def test_an_image_is_read_if_the_model_accepts_images(folder: Path) -> None:
    (folder / "cat.png").write_bytes(CAT)
    session, model = working(folder, call("read_file", path="cat.png"), "a", call("read_file", path="cat.png"), "b")
    play(session.send, "look", watch=answering("chat"))
    assert "does not accept images" in str(model.asked[1].messages[-1]["content"])
    model.accepts_images = True
    play(session.send, "look")
    content = model.asked[3].messages[-1]["content"]
    assert content == [  # type: ignore[comparison-overlap]
        {"type": "image", "image": CAT},
        {"type": "text", "text": "the image cat.png"},
    ]
    stored = session.store.load(session.conversation.id)
    assert stored.path()[-2].calls[0].images == (CAT,)
    assert "![](data:;base64,iVBOR" in to_markdown(stored)
    assert from_json(to_json(stored)).path()[-2].calls == stored.path()[-2].calls


def test_reasoning_is_limited_by_tokens_and_effort() -> None:
    session, model = asking("a", "b")
    for text in ("reasoning_budget 100", "reasoning_effort low", "thinking on"):
        commands._settings(session, text)
    play(session.send, "hi")
    assert model.asked[0].options["reasoning_budget"] == 100
    assert model.asked[0].variables == {"enable_thinking": True, "reasoning_effort": "low"}
    commands._settings(session, "reasoning_budget none")
    play(session.send, "hi")
    assert model.asked[1].options["reasoning_budget"] is None
    for text in ("reasoning_effort 1", "reasoning_effort low}", f"reasoning_effort {'x' * 30}", "reasoning_budget x"):
        with pytest.raises(UsageError, match="cannot be"):
            commands._settings(session, text)


# -- In the app ----------------------------------------------------------------------------------------------------


async def test_in_the_app_the_diff_is_shown_before_the_answer(folder: Path) -> None:
    model = AppModel([edit("plums", "f\x1b[2J\u200bigs"), "finished"], context=10_000)
    built = setup(model, conversation=Conversation(settings={"folder": str(folder)}))
    async with chatting(built, (100, 40)) as chat:
        await chat.say("edit")
        await chat.sees("May the model use edit_file")
        await chat.sees("-plums")
        await chat.sees("+f\\x1b[2J\\u200bigs")
        await chat.press("f3")
        await chat.sees("from now on in this chat")
        assert "@@ -1,2 +1,2 @@" in chat.screen
        assert "\x1b" not in chat.screen
        await chat.press("down", "enter")
        await chat.sees("finished")
        await chat.rest()
        assert "a.txt is changed" in chat.screen
        await chat.say("/undo")
        await chat.hears("a.txt is restored")
        await chat.sees("(the user has undone this edit)")
        await chat.until(lambda: (folder / "a.txt").read_bytes() == b"pears\nplums\n")
        await chat.say("/undo")
        await chat.hears("no edit can be undone")
        await chat.say("/folder")
        await chat.hears(f"the model may read and change files in {folder}")
        assert " · in project" in chat.screen
        await chat.say("/folder none")
        await chat.until(lambda: " · in project" not in chat.screen)
