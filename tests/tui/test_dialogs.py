"""The dialogs: chats, a full context, system prompt, sampling, help and the palette."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
from rich.console import Console

from localllm.tui.chat.export import read_export
from localllm.tui.commands import COMMANDS
from localllm.tui.screens.commands import PERMISSIONS
from localllm.tui.screens.dialogs import Choose, Dialog, DialogText, TextDialog, confirm
from localllm.tui.screens.help import help_text
from localllm.tui.setup import ModelEntry
from tests.helpers.chat_app import AppModel, Chat, chatting, keeping, setup, talk
from tests.helpers.scenes import MODELS


def title(chat: Chat) -> str:
    return chat.app.session.conversation.title


async def test_chats_are_opened_and_searched() -> None:
    built = keeping(("first", "apples"), ("second", "pears"), ("third", "plums"))
    async with chatting(built) as chat:
        await chat.press("ctrl+o")
        await chat.sees("third  open · just now · 2 messages")
        await chat.press("down", "enter")
        await chat.until(lambda: title(chat) == "second")
        await chat.sees("pears")
        await chat.press("ctrl+o")
        await chat.sees("first")
        await chat.type("apple")
        await chat.until(lambda: "third" not in chat.screen)
        await chat.press("enter")
        await chat.until(lambda: title(chat) == "first")
        await chat.say("/load plums")
        await chat.sees("third")
        await chat.press("escape")
        await chat.until(lambda: "Search titles" not in chat.screen)


async def test_chats_are_renamed_archived_and_deleted() -> None:
    built = keeping(("first", "one"), ("second", "two"))
    async with chatting(built) as chat:
        await chat.press("ctrl+o")
        await chat.sees("second  open")
        await chat.press("f2")
        await chat.sees("─ Rename")
        await chat.type("second best")  # the old title is selected
        await chat.press("enter")
        await chat.sees("second best  open")
        await chat.press("down", "f3")
        await chat.until(lambda: "first" not in chat.screen)
        await chat.press("f6")
        await chat.sees("Archived chats")
        await chat.sees("first  archived")
        await chat.press("delete")
        await chat.sees("Delete the chat for good?")
        await chat.press("down", "enter")
        await chat.sees("no chat is archived")
        await chat.press("f6", "escape")
        await chat.until(lambda: title(chat) == "second best")
        await chat.sees("localllm  second best")
        assert [s.title for s in await chat.app.offload(built.store.sessions)] == ["second best"]
        await chat.say("/delete this")
        await chat.sees("Delete this chat for good?")
        await chat.press("down", "enter")
        await chat.sees("New chat")
        await chat.say("/archive")
        await chat.hears("there is nothing to save yet")
        assert await chat.app.offload(built.store.sessions) == []


async def test_archived_chats_are_listed_and_searched() -> None:
    async with chatting(keeping(("first", "one"), ("third", "three"), ("second", "two"))) as chat:
        await chat.say("/archive")
        await chat.hears("brings it back")
        await chat.say("/sessions archived")
        await chat.sees("Archived chats")
        await chat.sees("second  archived")
        await chat.type("r")  # the other titles contain r
        await chat.sees("no chat contains these words")
        await chat.press("f6")
        await chat.sees("third  just now")


async def test_chats_are_exported_and_imported(tmp_path: Path) -> None:
    async with chatting(keeping(("hello", "one"))) as chat:
        await chat.say(f"/export {tmp_path}/chat.json")
        await chat.hears("written to")
        await chat.say("/export")
        await chat.sees("A new file")
        chat.app.screen.query_one("Input").value = f"{tmp_path}/chat.md"  # type: ignore[attr-defined]
        await chat.press("enter")
        await chat.until((tmp_path / "chat.md").exists)
        await chat.say("/import")
        await chat.sees("An exported .json file")
        chat.app.screen.query_one("Input").value = f"{tmp_path}/chat.json"  # type: ignore[attr-defined]
        await chat.press("enter")
        await chat.hears("imported: hello (copy)")
        await chat.until(lambda: title(chat) == "hello (copy)")
        await chat.say(f"/import {tmp_path}/chat.json")
        await chat.hears("imported: hello (copy 2)")
        await chat.until(lambda: title(chat) == "hello (copy 2)")
        await chat.say(f"/load {tmp_path}/chat.json")
        await chat.until(lambda: title(chat) == "hello (copy 3)")
        await chat.say("/import")
        await chat.sees("for example ~/")
        await chat.press("escape")
        await chat.say(f"/export {tmp_path}/chat.json")
        await chat.hears("already exists: choose another name")
    assert [m.text for m in read_export(tmp_path / "chat.json").path()] == ["hello", "one"]
    assert "## User\n\nhello" in (tmp_path / "chat.md").read_text()


async def test_a_full_context_opens_a_dialog() -> None:
    conversation = talk("one " * 3, "word " * 20, "two " * 3, "word " * 20)
    model = AppModel(["the answer"], context=110)
    async with chatting(setup(model, conversation=conversation)) as chat:
        await chat.say("three " * 60)
        await chat.sees("The context is full")
        assert "Drop the oldest turns" in chat.screen
        assert "Summarise" in chat.screen
        await chat.press("enter")
        await chat.rest()
        await chat.sees("the answer")
        await chat.press("ctrl+up", "up", "up", "up")
        await chat.sees("messages that the model no longer gets")


async def test_a_summary_makes_room_or_nothing_does() -> None:
    conversation = talk("one " * 3, "word " * 20, "two " * 3, "word " * 20)
    model = AppModel(["in short", "at last"], context=110)
    async with chatting(setup(model, conversation=conversation)) as chat:
        await chat.say("three " * 60)
        await chat.sees("The context is full")
        await chat.press("escape")  # stop
        await chat.rest()
        assert model.asked == []
        await chat.press("ctrl+r")
        await chat.sees("The context is full")
        await chat.press("down", "enter")
        await chat.sees("4 messages that the model no longer gets, replaced by a summary")
        await chat.sees("at last")
        assert "in short" in str(model.asked[-1].messages)


async def test_system_prompt_and_settings() -> None:
    model = AppModel()
    async with chatting(setup(model), size=(100, 30)) as chat:
        await chat.press("ctrl+s")
        await chat.sees("System prompt")
        await chat.type("be brief")
        await chat.press("ctrl+s")
        await chat.hears("the system prompt is set")
        await chat.press("ctrl+t")
        await chat.sees("Temperature")
        await chat.type("hot")
        await chat.press("ctrl+s")
        await chat.sees("temperature cannot be 'hot': give a number")
        await chat.press("home", "shift+end")
        await chat.type("0.5")
        chat.app.screen.query_one("#stop").value = "a\\\\nb User:"  # type: ignore[attr-defined]
        await chat.press("ctrl+s")
        await chat.hears("temperature 0.5")
        await chat.say("/set top_k 3")
        await chat.hears("top_k")
        await chat.ask("hello")
        assert model.asked[0].messages[0] == {"role": "system", "content": "be brief"}
        asked = model.asked[0].options
        assert (asked["temperature"], asked["top_k"], asked["stop"]) == (0.5, 3, ["a\nb", "User:"])
        await chat.press("ctrl+t")
        await chat.sees("Temperature")
        assert "a\\nb" in chat.screen
        await chat.press("ctrl+r", "ctrl+s")
        await chat.hears("all by default")


@pytest.mark.parametrize("size", [(80, 24), (40, 12)])
@pytest.mark.parametrize("argument", ["harmless words " * 100, "x" * 1400, "\n" * 300, "", "words " * 30_000])
async def test_a_long_command_scrolls_above_the_choices(argument: str, size: tuple[int, int]) -> None:
    text = f"run_command {argument}; rm -r everything"
    async with chatting(setup(AppModel()), size) as chat:
        answer = chat.app.spawn(chat.app.push_screen_wait(Choose("May it?", text, PERMISSIONS.items())))
        await chat.sees("run_command")

        def is_fitted() -> bool:
            return all(label in chat.screen for label in PERMISSIONS.values())

        await chat.until(is_fitted, "every choice")
        if argument:
            assert "everything" not in chat.screen
            await chat.until(lambda: "below: Page ↓" in chat.screen)
            dialog_text = chat.app.screen.query_one(DialogText)
            await chat.press("pagedown", "pagedown")
            await chat.until(lambda: dialog_text.scroll_offset.y > 1, "the scrolled text")
            assert is_fitted()
            dialog_text.scroll_end(animate=False)
        await chat.sees("everything")
        assert "below" not in chat.screen
        await chat.press("down", "enter")
        await chat.until(lambda: answer.is_finished)
        assert answer.result == "once"


async def test_a_dialog_that_was_made_smaller_shows_its_choices() -> None:
    async with chatting(setup(AppModel()), (100, 40)) as chat:
        chat.app.spawn(chat.app.push_screen_wait(Choose("May it?", "words " * 300, PERMISSIONS.items())))
        await chat.sees("Yes, always")
        await chat.pilot.resize_terminal(40, 12)
        await chat.until(lambda: all(label in chat.screen for label in PERMISSIONS.values()))
        await chat.press("escape")


async def test_invisible_characters_in_a_command_are_spelled_out() -> None:
    text = "\u202e\u2066\u200b\u00ad\u3164\U000e0041\x1b[2J\x07\r \u00a0\ufe0f é 漢 שלום"
    async with chatting(setup(AppModel()), (100, 24)) as chat:
        chat.app.spawn(chat.app.push_screen_wait(Choose("May it?", text, PERMISSIONS.items())))
        await chat.sees(r"\u202e\u2066\u200b\xad\u3164\U000e0041\x1b[2J\x07\r \xa0\ufe0f é 漢 שלום")
        await chat.press("escape")


@pytest.mark.parametrize("size", [(80, 24), (40, 12)])
async def test_the_text_of_every_dialog_scrolls(size: tuple[int, int]) -> None:
    text = "words " * 300 + "(end)"
    dialogs = (
        Dialog[str]("Title", text),
        TextDialog("Title", text, value="a value"),
        confirm("Title", text, "Delete"),
    )
    async with chatting(setup(AppModel()), size) as chat:
        for dialog in dialogs:
            chat.app.spawn(chat.app.push_screen_wait(dialog))
            await chat.until(lambda: "below: Page ↓" in chat.screen)
            chat.app.screen.query_one(DialogText).scroll_end(animate=False)
            await chat.sees("(end)")
            assert {TextDialog: "a value", Choose: "Cancel"}.get(type(dialog), "Title") in chat.screen
            await chat.press("escape")
            await chat.until(lambda: "Title" not in chat.screen)


async def test_dialogs_fit_in_60_columns() -> None:
    async with chatting(setup(AppModel(), list_models=lambda: MODELS, conversation=talk("a", "b")), (60, 20)) as chat:
        await chat.press("ctrl+l")
        await chat.sees("llama-3.3-70b")
        lines = chat.screen.splitlines()
        place = next(i for i, line in enumerate(lines) if "llama-3.2-3b.gguf" in line)
        assert "with less" in lines[place]
        assert "llama-3.3-70b.gguf" in lines[place + 1]
        await chat.press("escape", "ctrl+o")
        keys = "del Delete ⏎ Open esc Close f2 Rename f3 Archive f6 Archived"
        await chat.until(lambda: chat.screen.splitlines()[-1].strip() == keys, "all keys")
        await chat.press("escape", *"/delete", "enter")
        await chat.sees("⏎ Choose esc Close")


@pytest.mark.parametrize("width", [56, 76, 140])
def test_help_has_every_command_and_key(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as printed:
        console.print(help_text(width, {}))
    words = printed.get().split()
    for command in COMMANDS:
        assert f"/{command.name}" in words
        assert not command.key or f"({command.shown_key({})})" in words
    assert (width > 100) == ("Commands" in printed.get().splitlines()[0])


async def test_the_palette_finds_commands() -> None:
    async with chatting(setup(AppModel())) as chat:
        await chat.press("ctrl+p")
        await chat.sees("Sampling")
        await chat.type("statis")
        await chat.until(lambda: "Sampling" not in chat.screen and "Statistics" in chat.screen)
        while "Statistics" in chat.screen and "in use" not in chat.screen:  # Enter works only after the search
            await chat.press("enter")
        await chat.sees("in use")
        await chat.press("escape", "f1")
        await chat.sees("Typing")


def command_has_ended(chat: Chat) -> bool:
    return all(worker.is_finished for worker in chat.app.workers if worker.group == "command")


async def test_every_command_does_something() -> None:
    """No command fails in an empty chat, nor (except commands that open a dialog) in a chat with messages."""
    ask: set[str] = set()
    entry = ModelEntry("small", "/models/small.gguf", 600_000_000)
    for conversation in (talk(), talk("hello", "ok")):
        built = setup(AppModel(), list_models=lambda: (entry,), conversation=conversation)
        async with chatting(built) as chat:
            for name in (command.name for command in COMMANDS if command.name not in ask | {"quit"}):
                chat.app._chat.run_command(f"/{name}")
                await chat.until(lambda: command_has_ended(chat) or len(chat.app.screen_stack) > 2)
                while not command_has_ended(chat) or len(chat.app.screen_stack) > 2:
                    ask.add(name)
                    await chat.press("escape")
                assert not [n for n in chat.notices if "inside localllm" in n], (name, chat.notices)


async def test_themes() -> None:
    async with chatting(setup(AppModel(), theme="light")) as chat:
        assert chat.app.theme == "light"
        await chat.say("/theme dark")
        await chat.until(lambda: chat.app.theme == "dark")
        await chat.say("/theme mauve")
        await chat.hears("there is no theme 'mauve'")


async def test_another_model_replies_and_both_are_compared() -> None:
    first, second = AppModel(["left"]), AppModel(["right"])
    second.name = "Second"
    models = {"": first, "b.gguf": second}
    async with chatting(setup(first, load=lambda name, progress: models[name]), (100, 30)) as chat:
        await chat.say("/compare b.gguf")
        await chat.hears("there is nothing to reply to yet")
        await chat.ask("hi")
        await chat.say("/compare b.gguf")
        await chat.sees("Continue with the left one")
        assert all(text in chat.screen for text in ("Fake", "left", "Second", "right"))
        await chat.press("1")
        await chat.until(lambda: chat.app.session.conversation.path()[-1].text == "left")
        await chat.say("/compare")
        await chat.sees("Continue with the left one")
        await chat.press("1")
        await chat.until(lambda: chat.app.session.conversation.path()[-1].text == "right")


async def test_a_message_that_is_sent_while_the_other_model_loads_waits_for_the_comparison() -> None:
    models = {"": AppModel(["left", "after"]), "b.gguf": AppModel(["right", "after"])}
    may_load = threading.Event()

    def load(name: str, progress: object) -> AppModel:
        assert not name or may_load.wait(10)
        return models[name]

    async with chatting(setup(models[""], load=load), (100, 30)) as chat:
        await chat.ask("hi")
        await chat.say("/compare b.gguf")
        await chat.until(lambda: chat.app._chat.models.state == "loading")
        await chat.say("and then?")
        may_load.set()
        await chat.sees("Continue with the left one")
        assert "right" in chat.screen
        await chat.press("1")
        await chat.until(lambda: len(chat.app.session.conversation.path()) == 4 and chat.app._chat.turn is None)
        texts = [message.text for message in chat.app.session.conversation.path()]
        assert texts == ["hi", "left", "and then?", "after"]


async def test_keys_are_as_the_settings_say() -> None:
    keys = {"clear": "f9", "stats": "f10", "nothing": "f8", "continue": "f7"}
    cut = talk("hi", "a reply")
    cut.update(cut.path()[-1].id, state="stopped")
    async with chatting(setup(AppModel(), keys=keys, conversation=cut), (100, 30)) as chat:
        await chat.hears("has 'nothing', which is not a command")
        await chat.sees("stopped · F7 continues")
        await chat.press("ctrl+up", "e")
        await chat.sees("Editing the reply; F7 continues it afterwards")
        await chat.press("escape", "f9")
        await chat.until(lambda: len(chat.app.session.conversation) == 0)
        await chat.press("f10")
        await chat.sees("Statistics")
        await chat.press("escape")
        await chat.ask("hi")
        await chat.press("ctrl+n")
        assert len(chat.app.session.conversation) == 2
        await chat.press("f9")
        await chat.until(lambda: len(chat.app.session.conversation) == 0)
        await chat.sees("f9 New chat")


async def test_a_text_is_found_in_the_chat() -> None:
    texts = [part for i in range(20) for part in (f"question {i}", f"An **answer** {i}: pears\n\n```\nx = {i}\n```")]
    texts[1] = "Of Apples\n\n" + "- item\n" * 40 + "\nand apples again"
    async with chatting(setup(AppModel(context=10**6), conversation=talk(*texts)), (80, 20)) as chat:
        assert "Apples" not in chat.screen
        await chat.press("f5")
        await chat.sees("Find in this chat")
        await chat.type("APPLES")
        await chat.sees("2 of 2")
        await chat.sees("and apples again")
        await chat.press("enter")  # the first again
        await chat.sees("1 of 2")
        await chat.sees("Of Apples")
        await chat.press("up")
        await chat.sees("2 of 2")
        await chat.sees("and apples again")
        await chat.press("escape")
        await chat.until(lambda: "Find in this chat" not in chat.screen and "2 of 2" not in chat.screen)
        assert not chat.app._chat.transcript.query(".match")
        assert chat.app.screen.focused is chat.app._chat.composer
        await chat.say("/find x = 12")
        await chat.sees("1 of 1")
        await chat.sees("x = 12")
        await chat.say("/find nothing of this kind")
        await chat.sees("no match")


async def test_after_a_comparison_the_previous_model_replies() -> None:
    first, second = AppModel(["left", "after"]), AppModel(["right"])
    second.name = "Second"
    models = {"": first, "b.gguf": second}
    async with chatting(setup(first, load=lambda name, progress: models[name]), (100, 30)) as chat:
        await chat.ask("hi")
        await chat.say("/compare b.gguf")
        await chat.sees("Continue with the left one")
        await chat.press("2")
        await chat.until(lambda: chat.app._chat.models.name == "" and chat.model_is_settled)
        await chat.until(lambda: chat.app.session.conversation.path()[-1].text == "right")
        assert chat.app.session.conversation.model == ""
        await chat.ask("and now?")
        assert chat.app.session.conversation.path()[-1].text == "after"
        assert len(first.asked) == 2


@pytest.mark.parametrize("width", [60, 40])
async def test_the_models_show_size_and_fit_in_few_columns(width: int) -> None:
    name = "a-model-with-a-name-that-is-longer-than-the-screen-is-wide-instruct-{}.gguf"
    entries = [ModelEntry(name.format(q), f"/models/{q}", 4_400_000_000, fits="fits") for q in ("Q4_K_M", "Q8_0")]
    async with chatting(setup(AppModel(), list_models=lambda: entries), (width, 20)) as chat:
        await chat.press("ctrl+l")
        await chat.sees("Q8_0.gguf")
        lines = [line for line in chat.screen.splitlines() if ".gguf" in line]
        assert len(lines) == 2
        assert all("4.4 GB" in line and "fits" in line for line in lines)
