"""Conversations as files: Markdown, JSON and import, including JSON files of other programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from localllm.errors import StoreError, UsageError
from localllm.tui.chat.attachments import path_of
from localllm.tui.chat.conversation import Attachment, Conversation, ReplyStats, Window
from localllm.tui.chat.export import from_json, read_export, to_json, to_markdown, write_export
from tests.helpers import chat_schema
from tests.helpers.hostile_chats import HOSTILE, altered


@pytest.fixture
def conversation() -> Conversation:
    conversation = Conversation(title="Kitchen", system="be kind", settings={"temperature": 0.5, "stop": ["x"]})
    question = conversation.add("user", "How long?", attachments=(Attachment("a.md", "```\nx\n```", 5),))
    reply = conversation.add("assistant", "<think>hm</think>Eight.", stats=ReplyStats(5, 3, 2, 0.5, 9.0, "M"))
    more = conversation.add("user", "Sure?")
    conversation.update(more.id, window=Window(question.id, "cooking"))
    conversation.add("assistant", "No\x1b[2J", state="stopped")
    conversation.add_sibling(reply.id, "Nine.")
    conversation.switch(more.id)
    return conversation


def shape(conversation: Conversation) -> list[Any]:
    """Return a conversation's data without ids."""
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
    with pytest.raises(UsageError, match="already exists"):
        write_export(conversation, tmp_path / "chat.md")
    with pytest.raises(UsageError, match="cannot be written"):
        write_export(conversation, tmp_path / "no" / "chat.md")
    with pytest.raises(UsageError, match="cannot be read"):
        read_export(tmp_path)
    with pytest.raises(StoreError, match=r"chat.md cannot be imported: it is not valid JSON"):
        read_export(tmp_path / "chat.md")


@pytest.mark.parametrize(("text", "complaint"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files(text: str | bytes, complaint: str) -> None:
    with pytest.raises(StoreError) as caught:
        from_json(text)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_page_has_the_same_form() -> None:
    """``python -m tests.helpers.chat_schema`` writes the page's copy of the schema."""
    assert chat_schema.PATH.read_text("utf-8") == chat_schema.source()


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
def test_any_value_is_accepted_or_refused(key: str, value: Any) -> None:
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


def test_an_unknown_home_folder_is_reported() -> None:
    with pytest.raises(UsageError, match="is not a valid path"):
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
