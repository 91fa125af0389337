"""Use of the app: messages, replies, keys."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from localllm.errors import DeviceError, StoreError
from localllm.tui.app import take_any_bytes
from localllm.tui.storage.prompt_history import PromptHistory
from localllm.tui.text import sentence
from localllm.tui.widgets import transcript
from tests.helpers.chat_app import AppModel, AppStore, Steps, chatting, setup, talk
from tests.helpers.fake_chat import leaves, words

REPLY = "Hello **there**.\nA second line.\n\n```python\nprint('one')\n```\n\nand\n\n```sh\nls\n```\n"


async def test_a_message_is_replied_to() -> None:
    store = AppStore(None)
    async with chatting(setup(AppModel([REPLY]), store)) as chat:
        await chat.ask("hello")
        assert "Hello there." in chat.screen
        assert "**" not in chat.screen
        assert "▌ A second line." in chat.screen  # a line end is kept
        assert "print('one')" in chat.screen
        assert "localllm  hello" in chat.screen  # the title
        n = len(words("user: hello\nassistant:")) + len(words(REPLY))
        assert f"{n} / 1,000 · {n / 1000:.0%} · 10.0 tok/s · first after 0.25 s · Fake · cpu" in chat.screen
        (kept,) = await chat.app.offload(store.sessions)
    assert [m.text for m in store.load(kept.id).path()] == ["hello", REPLY]


@pytest.mark.parametrize("name", ["notes", "my notes"])
async def test_enter_after_a_folder_name_sends_all_its_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    for file in ("a.txt", "b.txt"):
        (tmp_path / name / file).write_text("text")
    async with chatting(setup(AppModel())) as chat:
        await chat.type(f'@"{name}/' if " " in name else f"@{name}/")
        await chat.sees("a.txt")
        await chat.press("enter")
        await chat.until(lambda: len(chat.app.session.conversation) == 2)
        assert len(chat.app.session.conversation.path()[0].attachments) == 2
        await chat.type(f'@"{name}/' if " " in name else f"@{name}/")
        # The first message contains the names too, so wait for the list itself.
        await chat.until(lambda: len(chat.app._chat.suggestions.choices) == 2)
        await chat.press("down", "enter")
        await chat.until(lambda: chat.app._chat.composer.text.rstrip('" ').endswith("b.txt"))


async def test_enter_sends_and_other_keys_start_lines() -> None:
    model = AppModel()
    async with chatting(setup(model)) as chat:
        await chat.type("a\nb\\")
        await chat.press("enter")  # after a backslash, Enter adds a line
        await chat.type("c")
        await chat.press("alt+enter", "shift+enter")
        await chat.ask("d")
        assert model.asked[0].messages[-1]["content"] == "a\nb\nc\n\nd"
        await chat.press("enter")  # an empty message is not sent
        await chat.rest()
        assert len(model.asked) == 1


async def test_the_history_recalls_earlier_input(tmp_path: Path) -> None:
    path = tmp_path / "data" / "history"
    PromptHistory(path).save("first")
    async with chatting(setup(AppModel(), history=path)) as chat:
        editor = chat.app._chat.composer
        await chat.until(lambda: editor.typed.older("") is not None)
        editor.typed.newer()
        await chat.ask("second")
        await chat.type("draft")
        for key, *texts in (("up", "second", "first", "first"), ("down", "second", "draft", "draft")):
            for text in texts:
                await chat.press(key)
                await chat.until(lambda text=text: editor.text == text)
        editor.empty()
        await chat.say("/stats")
        await chat.press("escape")
        for key, text in (
            ("up", "/stats"),
            ("up", "second"),
            ("down", "/stats"),
        ):  # these keys move through the history
            await chat.press(key)
            await chat.until(lambda text=text: editor.text == text)
    assert PromptHistory(path).load() == ["first", "second", "/stats"]


async def test_a_key_ends_the_thinking() -> None:
    model = AppModel(["<think>hm hm</think>So."], gate=(steps := Steps()))
    async with chatting(setup(model)) as chat:
        await chat.press("f8")
        await chat.hears("no reply is being written")
        await chat.say("why")
        steps.allow(1)
        await chat.sees("thinking (F8 ends it)")
        await chat.press("f8")
        await chat.until(lambda: model.n_ended_reasonings)
        steps.set()
        await chat.rest()
        assert model.n_ended_reasonings == 1


async def test_esc_stops_a_reply_and_keeps_its_text() -> None:
    model = AppModel(["one two three four five", "six seven"], gate=(steps := Steps()))
    async with chatting(setup(model)) as chat:
        await chat.say("count")
        steps.allow(2)
        await chat.sees("one two")
        await chat.sees("writing · ")
        await chat.press("escape")
        await chat.rest()
        assert "stopped · Ctrl+G continues" in chat.screen
        assert "writing" not in chat.screen
        (_, reply) = chat.app._chat.session.conversation.path()
        assert reply.state == "stopped"
        assert reply.text == "one two"
        steps.set()
        await chat.press("ctrl+g")
        await chat.sees("one twosix seven")
        await chat.rest()
        assert "continues" not in chat.screen
        assert model.asked[1].reply_prefix == "one two"
        assert chat.app._chat.session.conversation.path()[1].text == reply.text + "six seven"


async def test_a_failed_reply_keeps_the_chat_and_the_models_name() -> None:
    model = AppModel(
        ["one two three", MemoryError(), DeviceError("gone: plug it in"), "fine"], gate=(steps := Steps())
    )
    async with chatting(setup(model)) as chat:
        await chat.say("count")
        steps.allow(1)
        await chat.sees("▌ Fake #2")  # from the start
        steps.set()
        await chat.rest()
        for text in ("memory ran out", "gone: plug it in"):
            await chat.ask("again")
            await chat.hears(text)
        await chat.sees("cut off by an error")
        assert "so farso far" not in chat.screen
        assert "▌ Fake #6" in chat.screen
        await chat.ask("again")
        assert "fine" in chat.screen
        assert "Reply" not in chat.screen


def test_errors_are_reported_in_a_sentence() -> None:
    assert sentence(OSError(12, "x")) == sentence(MemoryError()) != sentence(OSError(5, "x"))
    assert sentence(OSError(5, "x")) == "the operating system reported an error: [Errno 5] x"
    assert sentence(ZeroDivisionError("x\x1b")).startswith("unexpected error in localllm (ZeroDivisionError: x")
    assert "\x1b" not in sentence(DeviceError("x\x1b"))


async def test_thinking_is_folded_and_its_time_is_kept() -> None:
    store = AppStore(None)
    async with chatting(setup(AppModel(["<think>Hm, well.</think>Yes."], seconds=0.02), store)) as chat:
        await chat.ask("is it so?")
        (title,) = [line for line in chat.screen.splitlines() if "▶ Thought for " in line]
        assert "Yes." in chat.screen
        assert "Hm, well." not in chat.screen
        await chat.press("ctrl+up", "t")
        await chat.sees("Hm, well.")
        await chat.press("t")
        await chat.until(lambda: "Hm, well." not in chat.screen)
        (kept,) = await chat.app.offload(store.sessions)
    conversation = store.load(kept.id)
    stats = conversation.path()[1].stats
    assert stats is not None
    assert stats.thinking_s is not None
    assert f"Thought for {stats.thinking_s:.1f} s" in title
    async with chatting(setup(AppModel(), conversation=conversation)) as chat:
        assert title in chat.screen.splitlines()


async def test_notifications_appear_above_the_editor() -> None:
    async with chatting(setup(AppModel()), notifications=True) as chat:
        app = chat.app
        for text in ("one", "two", "two"):
            app.notify(text)
            await chat.hears(text)
        await chat.until(lambda: chat.notices == ["one", "two"])
        await chat.until(lambda: "two" in "".join(chat.screen.splitlines()[:12]))
        assert "two" not in "".join(chat.screen.splitlines()[12:])
        assert all(notice.timeout <= 4 for notice in app._notifications)
        app.notify_error(DeviceError("it takes some time to read this: " + "word " * 30))
        await chat.until(lambda: any(notice.timeout > 8 for notice in app._notifications))


async def test_a_message_is_refused_during_a_reply() -> None:
    model = AppModel(["one two", "three"], gate=(steps := Steps()))
    async with chatting(setup(model)) as chat:
        await chat.say("first")
        steps.allow(1)
        await chat.sees("one")
        await chat.say("second")
        await chat.hears("a reply is in progress: Esc stops it")
        assert chat.app._chat.composer.text == "second"
        await chat.press("escape", "enter")  # a message sent while a reply ends waits for its end
        steps.set()
        await chat.until(lambda: len(chat.app._chat.session.conversation) == 4)
        await chat.rest()
        assert "three" in chat.screen
        assert len(chat.notices) == 1


async def test_control_sequences_are_shown() -> None:
    evil = "\x1b]52;c;aGk=\x07\x1b[2J red [bold]not markup[/] <b>html</b> [@click=app.quit]x[/]"
    async with chatting(setup(AppModel([evil]))) as chat:
        await chat.ask("[red]me too[/]")
        assert "␛]52;c;aGk=␇␛[2J red [bold]not markup[/] <b>html</b>" in chat.screen.replace("\n ▌ ", " ")
        assert "[red]me too[/]" in chat.screen
        assert "\x1b" not in chat.screen


async def test_links_open_after_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    page, other = "https://example.org/a?b=c", "ssh://example.org"
    reply = f"a [page]({page}) here\n\na [host]({other}) there"
    async with chatting(setup(AppModel(), conversation=talk("go", reply))) as chat:
        monkeypatch.setattr(chat.app, "open_url", opened.append)
        await chat.sees("there")
        for paragraph, address in zip(chat.app.screen.query("MarkdownParagraph"), (page, other), strict=True):
            await chat.pilot.click(paragraph, offset=(3, 0))
            await chat.sees(address)
            assert ("Open in the browser" in chat.screen) == (address == page)
            assert opened == [page] * (address == other)
            await chat.press("end", "enter")
            await chat.until(lambda: chat.app.screen is chat.app._chat)
        assert opened == [page]
        assert chat.app.clipboard == other


async def test_text_that_cannot_be_sent_stays_in_the_editor(tmp_path: Path) -> None:
    async with chatting(setup(AppModel())) as chat:
        for text, complaint in (
            (f'see @"{tmp_path}/gone.txt"', "there is no file"),
            ("/modle x", "did you mean /model?"),
        ):
            chat.app._chat.composer.put(text)
            await chat.press("enter")
            await chat.hears(complaint)
            await chat.rest()
            assert chat.app._chat.composer.text == text
            assert len(chat.app._chat.session.conversation) == 0
        chat.app._chat.composer.empty()
        await chat.ask("//not a command")
        assert chat.app._chat.session.conversation.path()[0].text == "/not a command"


async def test_a_failing_store_is_reported_and_the_chat_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    store = AppStore(None)
    monkeypatch.setattr(store, "save", fail)
    async with chatting(setup(AppModel(["one", "two"]), store)) as chat:
        await chat.ask("hi")
        await chat.hears("the disk is full; the chat continues, but is not saved")
        await chat.ask("and now")
        assert "two" in chat.screen


async def test_startup_notices_are_shown() -> None:
    async with chatting(setup(AppModel(), notices=["the model of this chat is no longer on this machine"])) as chat:
        await chat.hears("no longer on this machine")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
async def test_a_message_is_written_in_an_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "my editor"
    script.write_text('#!/bin/sh\nprintf "%s" " and more" >> "$2"\nexit $1\n')
    script.chmod(0o755)
    async with chatting(setup(AppModel())) as chat:
        monkeypatch.delenv("VISUAL", raising=False)
        monkeypatch.delenv("EDITOR", raising=False)
        await chat.type("draft")
        await chat.press("ctrl+e")
        await chat.hears("no editor is set")
        monkeypatch.setenv("EDITOR", f"'{script}' 0")
        await chat.press("ctrl+e")
        await chat.hears("cannot be started from this terminal")  # the test terminal
        monkeypatch.setattr(chat.app, "suspend", nullcontext)
        await chat.press("ctrl+e")
        await chat.until(lambda: chat.app._chat.composer.text == "draft and more")
        monkeypatch.setenv("VISUAL", f"'{script}' 3")
        await chat.press("ctrl+e")
        await chat.hears("has failed")
        assert chat.app._chat.composer.text == "draft and more"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
async def test_the_output_of_a_command_goes_into_the_editor() -> None:
    model = AppModel()
    async with chatting(setup(model)) as chat:
        await chat.say("!seq 100")
        await chat.sees("[pasted text #1: 104 lines]")
        await chat.type(" what is this?")
        await chat.press("enter")
        await chat.until(lambda: model.asked)
        await chat.rest()
        assert "\n99\n100\n```\n what" not in chat.screen
        assert "99\n100\n``` what is this?" in str(model.asked[0].messages[-1]["content"])


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
async def test_esc_ends_a_command_that_runs(tmp_path: Path) -> None:
    async with chatting(setup(AppModel())) as chat:
        await chat.say(f"!echo $$ > {tmp_path}/pid; sleep 100")
        await chat.sees("the command runs: Esc ends it")
        await chat.until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        await chat.press("escape")
        await chat.until(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())), "an end")
        await chat.until(lambda: "the command runs" not in chat.screen)


async def test_the_question_of_the_command_line_is_sent_first() -> None:
    async with chatting(setup(AppModel(["blue"]), question="what colour is the sky?")) as chat:
        await chat.until(lambda: len(chat.app.session.conversation) == 2)
        await chat.rest()
        assert [m.text for m in chat.app.session.conversation.path()] == ["what colour is the sky?", "blue"]


# Quitting.


async def test_quitting_keeps_a_reply() -> None:
    store = AppStore(None)
    model = AppModel(["one two three"], gate=(steps := Steps()))
    async with chatting(setup(model, store)) as chat:
        await chat.say("count")
        steps.allow(2)
        await chat.sees("one two")
        await chat.press("ctrl+q")
        await chat.until(lambda: not chat.app.is_running)
        store.watched = False
    (kept,) = store.sessions()
    reply = store.load(kept.id).path()[-1]
    assert reply.state == "stopped"
    assert reply.text == "one two"
    assert model.closed


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
async def test_sigterm_keeps_the_reply() -> None:
    """``kill`` ends the app like Ctrl+Q, which restores the terminal."""
    gate = Steps()
    async with chatting(setup(AppModel([REPLY], gate=gate))) as chat:
        gate.allow(1)
        await chat.say("hello")
        await chat.sees("Hello")
        os.kill(os.getpid(), signal.SIGTERM)
        await chat.until(lambda: chat.app.return_code == 0, "an end")
        leaf = chat.app.session.conversation.leaf
        assert leaf is not None
        assert (leaf.text, leaf.state) == ("Hello", "stopped")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def test_ctrl_c_stops_a_reply_and_then_quits() -> None:
    model = AppModel(["one two three"], gate=(steps := Steps()))
    async with chatting(setup(model)) as chat:
        await chat.say("count")
        steps.allow(2)
        await chat.sees("one two")
        await chat.type("draft")  # a stopped reply keeps the draft
        await chat.press("ctrl+c")
        await chat.rest()
        assert chat.app.is_running
        assert chat.app.session.conversation.path()[-1].state == "stopped"
        assert chat.app._chat.composer.text == "draft"
        chat.app._chat.composer.empty()
        await chat.press("ctrl+c")
        await chat.until(lambda: not chat.app.is_running)


async def test_ctrl_c_warns_about_an_unsent_message() -> None:
    async with chatting(setup(AppModel())) as chat:
        await chat.type("draft")
        await chat.press("ctrl+c")
        await chat.hears("Ctrl+C again quits")
        assert chat.app.is_running
        await chat.press("ctrl+c")
        await chat.until(lambda: not chat.app.is_running)


async def test_ctrl_d_quits_if_the_editor_is_empty() -> None:
    async with chatting(setup(AppModel())) as chat:
        await chat.type("ab")
        await chat.press("home", "ctrl+d")
        await chat.until(lambda: chat.app._chat.composer.text == "b")
        await chat.press("ctrl+d")
        await chat.until(lambda: chat.app._chat.composer.text == "")
        assert chat.app.is_running
        await chat.press("ctrl+d")
        await chat.until(lambda: not chat.app.is_running)


# Long chats and messages.


async def test_a_resize_in_mid_stream() -> None:
    model = AppModel([" ".join(f"word{i}" for i in range(99))], gate=(steps := Steps()))
    async with chatting(setup(model)) as chat:
        await chat.say("go")
        steps.allow(5)
        await chat.sees("word4")
        for size in ((60, 15), (20, 6), (80, 24)):
            steps.allow(20)
            await chat.pilot.resize_terminal(*size)
        steps.set()
        await chat.rest()
        assert "word98" in chat.screen


async def test_the_view_follows_the_end_unless_the_user_scrolls() -> None:
    many = [f"paragraph {i}" for i in range(30)]
    conversation = talk("go", "\n\n".join(many))
    model = AppModel(["\n\n".join(many)], gate=threading.Event())
    async with chatting(setup(model, conversation=conversation)) as chat:
        assert model.gate is not None
        await chat.sees("paragraph 29")
        await chat.press("pageup", "pageup")
        await chat.until(lambda: "paragraph 29" not in chat.screen)
        place = chat.app._chat.transcript.scroll_y
        await chat.say("again")
        await chat.sees("again")
        model.gate.set()
        await chat.press("pageup", "pageup", "pageup")
        await chat.rest()
        assert "paragraph 29" not in chat.screen
        assert chat.app._chat.transcript.scroll_y != place
        await chat.press("escape")
        await chat.sees("paragraph 29")


async def test_long_conversations_are_drawn_from_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript, "MAX_DRAWN", 3)
    conversation = talk(*(f"message {i}" for i in range(10)))
    async with chatting(setup(AppModel(), conversation=conversation)) as chat:
        assert len(chat.views) == 3
        await chat.press("ctrl+up", "home")
        await chat.until(lambda: len(chat.views) == 6)
        assert [view.message.text for view in chat.views] == [f"message {i}" for i in range(4, 10)]
        before = chat.views
        await chat.press("escape")
        await chat.ask("more")
        assert chat.views[:-2] == before[2:]  # unchanged messages are not redrawn
        assert [view.message.text for view in chat.views[-3:]] == ["message 9", "more", "ok"]


async def test_a_large_text_is_pasted() -> None:
    model = AppModel(context=100_000)
    text = "\r\n".join(f"line {i}" for i in range(20_000))
    async with chatting(setup(model)) as chat:
        await chat.type(text)
        await chat.sees("[pasted text #1: 20,000 lines]")
        await chat.press("enter")
        await chat.until(lambda: model.asked)
        await chat.rest()
        assert model.asked[0].messages[-1]["content"] == text.replace("\r\n", "\n")
        assert "… 19,985 more lines" in chat.screen


async def test_files_are_completed_and_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("some words to read\n")
    (tmp_path / "novel.txt").touch()
    model = AppModel()
    async with chatting(setup(model)) as chat:
        await chat.type("read @no")
        await chat.sees("@novel.txt")
        await chat.press("down", "up", "tab")
        await chat.until(lambda: chat.app._chat.composer.text == "read @notes.txt ")
        await chat.sees("notes.txt: 5 tokens")
        await chat.press("enter")
        await chat.until(lambda: model.asked)
        await chat.rest()
        assert "+ notes.txt · 5 tokens" in chat.screen
        assert "some words to read" in str(model.asked[0].messages)


async def test_a_message_that_is_longer_than_the_context() -> None:
    """The message can be withdrawn or edited."""
    long = "word " * 60
    async with chatting(setup(AppModel(context=40), conversation=talk("hi", "ok"))) as chat:
        conversation = chat.app._chat.session.conversation
        await chat.say(long)
        await chat.sees("Take your message back")
        await chat.press("down", "enter")
        await chat.until(lambda: chat.app.screen is chat.app._chat)
        await chat.rest()
        assert [message.text for message in conversation.path()] == ["hi", "ok"]
        assert chat.app._chat.composer.text == ""
        await chat.say(long)
        await chat.sees("Take your message back")
        await chat.press("enter")
        await chat.sees("Editing your message: Enter sends it")
        await chat.rest()
        assert chat.app._chat.composer.text.strip() == long.strip()
        chat.app._chat.composer.put("short")
        await chat.press("enter")
        await chat.until(lambda: len(conversation) == 4)
        await chat.rest()
        assert [message.text for message in conversation.path()] == ["hi", "ok", "short", "ok"]
        assert len(leaves(conversation)) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="has another driver")
def test_bytes_that_are_no_text_are_taken() -> None:
    """Input in another character set, typed or pasted, makes Textual raise UnicodeDecodeError."""
    from textual.drivers import linux_driver

    take_any_bytes()
    decoder = vars(linux_driver)["getincrementaldecoder"]("utf-8")()
    assert [decoder.decode(data) for data in (b"a\xffb", b"\xc3", b"\xbc")] == ["a\ufffdb", "", "\xfc"]
