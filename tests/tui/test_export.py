"""Conversations as files: Markdown, JSON and back; and JSON that others wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import StoreError, UsageError
from localllm.tui.chat.attachments import path_of
from localllm.tui.chat.conversation import Attachment, Conversation, Stats, Window
from localllm.tui.chat.export import from_json, read_export, to_json, to_markdown, write_export


@pytest.fixture
def conversation() -> Conversation:
    conversation = Conversation(title="Kitchen", system="be kind", settings={"temperature": 0.5, "stop": ["x"]})
    question = conversation.add("user", "How long?", attachments=(Attachment("a.md", "```\nx\n```", 5),))
    reply = conversation.add("assistant", "<think>hm</think>Eight.", stats=Stats(5, 3, 2, 0.5, 9.0, "M"))
    more = conversation.add("user", "Sure?")
    conversation.update(more.id, window=Window(question.id, "cooking"))
    conversation.add("assistant", "No\x1b[2J", state="stopped")
    conversation.add_sibling(reply.id, "Nine.")
    conversation.switch(more.id)
    return conversation


def shape(conversation: Conversation) -> list[Any]:
    """A conversation without ids."""
    numbers = {message.id: i for i, message in enumerate(conversation.messages)} | {None: None}
    return [
        (
            numbers[m.parent], m.role, m.text, m.created, m.state, m.stats, m.attachments,
            m.window and (numbers[m.window.first], m.window.summary),
        )
        for m in conversation.messages
    ]  # fmt: skip


def test_json_comes_back_with_new_ids(conversation: Conversation) -> None:
    again = from_json(to_json(conversation))
    assert shape(again) == shape(conversation)
    assert [m.text for m in again.path()] == [m.text for m in conversation.path()]
    assert (again.title, again.system, again.settings) == ("Kitchen", "be kind", {"temperature": 0.5, "stop": ["x"]})
    assert again.id != conversation.id
    assert not {m.id for m in again.messages} & {m.id for m in conversation.messages}


def test_markdown_is_the_path(conversation: Conversation) -> None:
    text = to_markdown(conversation)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# Kitchen", "## System", "## User", "## Assistant", "## User", "## Assistant"]
    assert "Eight." in text
    assert "Nine." not in text
    assert "<details><summary>Thinking</summary>\n\nhm\n" in text
    assert "File `a.md`:\n\n````\n```\nx\n```\n````" in text
    assert "No␛[2J\n\n*(cut off)*" in text


def test_files(conversation: Conversation, tmp_path: Path) -> None:
    write_export(conversation, tmp_path / "chat.json")
    write_export(conversation, tmp_path / "chat.md")
    assert shape(read_export(tmp_path / "chat.json")) == shape(conversation)
    assert (tmp_path / "chat.md").read_text(encoding="utf-8") == to_markdown(conversation)
    with pytest.raises(UsageError, match="is there already"):
        write_export(conversation, tmp_path / "chat.md")
    with pytest.raises(UsageError, match="cannot be written"):
        write_export(conversation, tmp_path / "no" / "chat.md")
    with pytest.raises(UsageError, match="cannot be read"):
        read_export(tmp_path)
    with pytest.raises(StoreError, match=r"chat.md cannot be imported: it is not valid JSON"):
        read_export(tmp_path / "chat.md")


def altered(**changes: Any) -> str:
    values = {"format": "localllm-chat", "version": 1, "messages": [{"id": "a", "role": "user", "text": "hi"}]}
    return json.dumps(values | changes)


def messages(*several: dict[str, Any]) -> str:
    return altered(messages=[{"id": str(i), "role": "user", "text": "x"} | each for i, each in enumerate(several)])


HOSTILE = {
    "nothing": ("", "it is not valid JSON"),
    "bytes": (b"\xff\xfe\xff", "it is not valid JSON"),
    "a list": ("[]", "'format' is not 'localllm-chat'"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "a long number": ('{"format": ' + "9" * 10_000 + "}", "it is not valid JSON"),
    "NaN": (altered(created=float("nan")), "it is not valid JSON"),
    "another format": ('{"format": "x"}', "'format' is not 'localllm-chat'"),
    "a newer version": (altered(version=2), "it has version 2"),
    "no messages": (altered(messages=None), "Expected `array`, got `null` - at `$.messages`"),
    "a message that is none": (altered(messages=[5]), "message 0 is damaged: Expected `object`, got `int`"),
    "no id": (altered(messages=[{}]), "message 0 is damaged: Object missing required field `id`"),
    "an empty id": (messages({"id": ""}), "Expected `str` of length >= 1 - at `$.id`"),
    "a long id": (messages({"id": "x" * 101}), "Expected `str` of length <= 100 - at `$.id`"),
    "an id twice": (messages({}, {"id": "0"}), "message 1 has the id of an earlier one"),
    "its own parent": (messages({"parent": "0"}), "'parent' of message 0 is not one of the messages before"),
    "a parent to come": (messages({"parent": "1"}, {}), "'parent' of message 0"),
    "no text": (altered(messages=[{"id": "a", "role": "user"}]), "missing required field `text`"),
    "half a character": (messages({"text": "\ud800"}), "it is not valid JSON"),
    "a role": (messages({"role": "root"}), "Invalid enum value 'root' - at `$.role`"),
    "a state": (messages({"state": "happy"}), "at `$.state`"),
    "long ago": (messages({"created": -1}), "Expected `float` >= 0.0 - at `$.created`"),
    "far ahead": (messages({"created": 1e300}), "at `$.created`"),
    "infinity": (messages({"stats": {}}).replace("{}", '{"prompt_tokens": 1e999}'), "Number out of range"),
    "stats": (messages({"stats": {"prompt_tokens": True}}), "got `bool` - at `$.stats.prompt_tokens`"),
    "a window": (messages({"window": {"first": "x"}}), "the window of message 0 begins at no message"),
    "attachments": (messages({"attachments": {}}), "at `$.attachments`"),
    "an attachment": (
        messages({"attachments": [{"name": "a"}]}),
        "field `text` - at `$.attachments[0]`",
    ),
    **{
        f"arguments {text:.9}": (
            messages({"calls": [{"name": "a", "arguments": text}]}),
            "message 0 is damaged: the arguments of a call are not a JSON object",
        )
        for text in ("x", "5", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000)
    },
    "a leaf": (altered(leaf="x"), "its 'leaf' is not one of its messages"),
    "settings": (altered(settings={"temperature": "hot"}), "its settings are wrong: temperature is 'hot'"),
    "strange settings": (altered(settings={"processors": []}), "there is no setting 'processors'"),
    "settings without a name": (altered(settings={"": None}), "there is no setting ''"),
    "settings that are none": (altered(settings=[1]), "at `$.settings`"),
    "a title": (altered(title=5), "at `$.title`"),
}


@pytest.mark.parametrize(("text", "complaint"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files(text: str | bytes, complaint: str) -> None:
    with pytest.raises(StoreError) as caught:
        from_json(text)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_least_that_is_needed() -> None:
    conversation = from_json(altered())
    assert [message.text for message in conversation.path()] == ["hi"]


OF_A_CHAT = ["title", "system", "settings", "model", "created", "leaf", "messages"]

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(
    st.sampled_from(OF_A_CHAT)
    | st.sampled_from(["id", "parent", "role", "text", "state", "opened", "stats", "window", "attachments"]),
    JSON,
)
def test_any_value_anywhere_is_taken_or_refused(key: str, value: Any) -> None:
    message = {"id": "a", "role": "user", "text": "hi"}
    values: dict[str, Any] = {"format": "localllm-chat", "version": 1, "messages": [message]}
    (values if key in ("title", "system", "settings", "model", "created", "leaf", "messages") else message)[key] = (
        value
    )
    try:
        conversation = from_json(json.dumps(values))
    except StoreError:
        return
    assert shape(from_json(to_json(conversation))) == shape(conversation)


def test_the_home_of_nobody_is_said() -> None:
    with pytest.raises(UsageError, match="is not a path here"):
        path_of("~nobody-of-this-name/chat.json")


def test_names_that_are_no_utf8_are_exported(conversation: Conversation, tmp_path: Path) -> None:
    conversation.model = "m\udcff.gguf"
    write_export(conversation, tmp_path / "a.json")
    assert read_export(tmp_path / "a.json").model == "m?.gguf"


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_a_file_that_could_not_be_written_to_its_end_is_removed(
    conversation: Conversation, tmp_path: Path, windows: None
) -> None:
    import resource

    conversation.add("user", "x" * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UsageError, match="cannot be written"):
            write_export(conversation, tmp_path / "a.md")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
