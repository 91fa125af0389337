"""Several open chats: each continues while another one is shown."""

from __future__ import annotations

from localllm.tui.storage.chats import Store
from tests.helpers.chat_app import AppModel, AppStore, Steps, chatting, keeping, setup, talk


async def test_a_reply_continues_while_another_chat_is_shown() -> None:
    steps = Steps()
    model = AppModel(["one two three four", "other"], gate=steps)
    async with chatting(setup(model), (100, 30)) as chat:
        await chat.say("first question")
        steps.allow(2)
        await chat.sees("one two")
        await chat.type("a draft")
        await chat.press("f4")
        await chat.sees("2 New chat")
        assert "1 … first question" in chat.screen
        assert chat.app._chat.composer.text == ""
        steps.set()
        await chat.until(lambda: chat.app.models.chats[0].turn is None)
        await chat.ask("second question")
        await chat.sees("other")
        await chat.press("ctrl+pageup")
        await chat.sees("one two three four")
        assert chat.app._chat.composer.text == "a draft"
        await chat.press("ctrl+pagedown")
        await chat.sees("second question")
        await chat.press("escape")
        await chat.say("/tab 3")
        await chat.hears("there is no tab 3: 2 are open")
        await chat.say("/close")
        await chat.sees("one two three four")
        assert "2 " not in chat.screen.splitlines()[0]
        chat.app._chat.composer.empty()
        await chat.say("/close")
        await chat.hears("this is the only open chat")
        store: Store = chat.app.setup.store
        assert isinstance(store, AppStore)
        store.watched = False
        texts = {tuple(m.text for m in store.load(summary.id).path()) for summary in store.sessions()}
        assert texts == {("first question", "one two three four"), ("second question", "other")}


async def test_an_open_chat_is_shown_instead_of_opened_twice() -> None:
    async with chatting(keeping(("apples", "red"), ("pears", "green")), (100, 30)) as chat:
        await chat.press("f4")
        await chat.sees("2 New chat")
        await chat.press("ctrl+o")
        await chat.type("pears")
        await chat.sees("1 pears")
        await chat.press("enter")
        await chat.sees("green")
        assert len(chat.app.models.chats) == 2
        await chat.press("ctrl+pagedown")
        await chat.sees("Type a message")


async def test_another_model_replies_in_all_tabs() -> None:
    models = {"": AppModel(["a"]), "b": AppModel(["b", "b"])}
    async with chatting(setup(models[""], load=lambda name, progress: models[name]), (100, 30)) as chat:
        await chat.ask("hi")
        await chat.press("f4")
        await chat.say("/model b")
        await chat.until(lambda: chat.app.models.name == "b")
        await chat.rest()
        await chat.ask("there")
        await chat.press("ctrl+pageup")
        await chat.ask("and here?")
        assert [m.text for m in chat.app.session.conversation.path()] == ["hi", "a", "and here?", "b"]
        assert models[""].closed


async def test_a_full_context_opens_a_dialog_once_its_chat_is_shown() -> None:
    steps = Steps()
    model = AppModel(["word " * 90], context=60, gate=steps)
    async with chatting(setup(model), (100, 30)) as chat:
        await chat.say("go on")
        await chat.press("f4")
        await chat.sees("2 New chat")
        steps.set()
        await chat.until(lambda: chat.app.models.chats[0].turn is None)
        await chat.press(*"hm")
        await chat.until(lambda: chat.app._chat.composer.text == "hm")
        await chat.press("ctrl+pageup")
        await chat.sees("The context is full")
        await chat.press("escape")


async def test_a_chat_that_was_closed_is_drawn_without_an_error() -> None:
    """A worker may draw messages into a transcript that was removed, where they are never mounted."""
    async with chatting(setup(AppModel()), (100, 30)) as chat:
        await chat.press("f4")
        await chat.sees("2 New chat")
        closed = chat.app._chat
        await chat.app.close_tab()
        await closed.transcript.show(talk("question", "a paragraph\n\nanother one"))


async def test_quitting_keeps_the_replies_of_all_tabs() -> None:
    model = AppModel(["one two three", "four five six"], gate=(steps := Steps()))
    async with chatting(setup(model), (100, 30)) as chat:
        for text in ("a", "b"):
            await chat.say(text)
            steps.allow(1)
            await chat.until(
                lambda: chat.app._chat.turn is not None and chat.app.session.conversation.leaf is not None
            )
            await chat.press("f4")
        await chat.press("ctrl+q")
        await chat.until(lambda: not chat.app.is_running)
        assert [len(session.conversation) > 0 for session in chat.app.sessions] == [True, True, False]
        assert all(session.saver.is_saved for session in chat.app.sessions[:2])
