"""Conversations, and their form for each type of template."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.chat import ChatTemplate
from localllm.chat.conversation import Message, ToolCall, read_messages
from localllm.errors import TemplateError


def each(body: str) -> str:
    """Return a template that writes this for each message m."""
    return "{% for m in messages %}" + body + "{% endfor %}"


USER = "{% if m.role == 'user' %}<U>{{ m.content }}{% elif m.role == 'assistant' %}<A>{{ m.content }}"
SYSTEM = "{% if SYSTEM.role == 'system' %}<S>{{ SYSTEM.content }}{% endif %}"
#: Templates like those of public families.
KNOWS_THREE = each(SYSTEM.replace("SYSTEM", "m") + USER + "{% endif %}")
FIRST_SYSTEM_ALONE = SYSTEM.replace("SYSTEM", "messages[0]") + each(USER + "{% endif %}")
NO_SYSTEM = each(USER + "{% else %}{{ raise_exception('only two roles') }}{% endif %}")
ALTERNATING = each(
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + USER
    + "{% endif %}"
)
DEVELOPER = each("{% if m.role == 'developer' %}<D>{{ m.content }}{% else %}" + USER + "{% endif %}{% endif %}")
ANY_ROLE = each("<{{ m.role }}>{{ m.content }}") + "{# developer #}"


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


HI = said("user", "hi")


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (KNOWS_THREE, [said("developer", "D"), HI], "<S>D<U>hi"),
        (DEVELOPER, [said("developer", "D"), HI], "<D>D<U>hi"),
        (ANY_ROLE, [said("developer", "D"), HI], "<system>D<user>hi"),
        (KNOWS_THREE, [said("system", "S"), said("developer", "D"), HI], "<S>S<S>D<U>hi"),
        (FIRST_SYSTEM_ALONE, [said("system", "S"), said("developer", "D"), HI], "<S>S\n\nD<U>hi"),
        (FIRST_SYSTEM_ALONE, [HI, said("assistant", "ho"), said("system", "S"), HI], "<S>S<U>hi<A>ho<U>hi"),
        (NO_SYSTEM, [said("system", "S"), HI, said("assistant", "ho")], "<U>S\nhi<A>ho"),
        (
            ALTERNATING,
            [HI, said("user", "you"), said("assistant", "ho"), said("assistant", "!")],
            "<U>hi\n\nyou<A>ho\n\n!",
        ),
        (KNOWS_THREE, [HI, said("user", "you")], "<U>hi<U>you"),
    ],
    ids=str,
)
def test_no_message_is_lost(template: str, messages: Any, text: str) -> None:
    assert ChatTemplate(template).render(messages) == text


ITS_PARTS = "{% for p in m.content %}{% if p.type == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}"
PARTS, FIRST_PART = each(ITS_PARTS), each("<{{ m.content[0].text }}>")
BOTH = each("{% if m.content is string %}{{ m.content }}{% else %}" + ITS_PARTS + "{% endif %}")
TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "of_a_text", "of_parts"),
    [(PARTS, "<ab>", "<a><b>"), (FIRST_PART, "<ab>", "<ab>"), (BOTH, "ab", "<a><b>"), (TEXT, "ab", "ab")],
    ids=["parts", "the first part", "both", "text"],
)
def test_a_template_gets_parts_or_text(template: str, of_a_text: str, of_parts: str) -> None:
    parts = [{"type": "text", "text": "a"}, "b"]
    assert ChatTemplate(template).render([said("user", "ab")]) == of_a_text
    assert ChatTemplate(template).render([said("user", parts)]) == of_parts


CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.name }} "
    "{{ ARGUMENTS }}]{% endfor %}{% elif m.role == 'tool' %}({{ m.tool_call_id }} {{ m.name }} {{ m.content }})"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
AS_MAPPING = CALLS.replace("ARGUMENTS", "c.function.arguments | tojson")
AS_TEXT = CALLS.replace("ARGUMENTS", "'' + c.function.arguments")
NINE = AS_MAPPING.replace("[{{", "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[{{")


def call(id_: str | None, name: str, arguments: Any = "{}") -> dict[str, Any]:
    return {**({} if id_ is None else {"id": id_}), "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("template", [AS_MAPPING, AS_TEXT], ids=["mapping", "text"])
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}], ids=["text", "mapping"])
def test_arguments_are_as_the_template_wants_them(template: str, arguments: Any) -> None:
    text = ChatTemplate(template).render([HI, said("assistant", None, tool_calls=[call("c1", "f", arguments)])])
    assert text == 'hi[c1 f {"a": 1}]'


def test_results_are_matched_to_their_calls_by_id_by_name_and_by_order() -> None:
    calls = [call(None, "f"), call(None, "g"), call("own", "f")]
    results = [said("tool", "1", tool_name="g"), said("tool", "2", tool_call_id="own"), said("tool", "3")]
    text = ChatTemplate(AS_MAPPING).render([HI, said("assistant", "", tool_calls=calls), *results])
    assert text == "hi[call_1 f {}][call_2 g {}][own f {}](call_2 g 1)(own f 2)(call_1 f 3)"


#: Templates that accept a message of the user after a result, and that refuse it.
AFTER_RESULTS = each(
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.id }}{% endfor %}"
)
NOT_AFTER_RESULTS = (
    "{% for m in messages %}{% if m.role == 'user' and not loop.first and loop.previtem.role == 'tool' %}"
    "{{ raise_exception('the assistant must follow a result') }}{% endif %}{% endfor %}" + AFTER_RESULTS
)


@pytest.mark.parametrize(
    ("template", "end"),
    [(AFTER_RESULTS, "<tool>noon<user>So?"), (NOT_AFTER_RESULTS, "<tool>noon\n\nSo?")],
)
def test_texts_of_the_user_after_a_result(template: str, end: str) -> None:
    call = {"id": "abcdefghi", "function": {"name": "now", "arguments": {}}}
    messages = [HI, said("assistant", None, tool_calls=[call]), said("tool", "noon", tool_call_id="abcdefghi")]
    text = ChatTemplate(template).render([*messages, said("user", "So?")], add_generation_prompt=False)
    assert text.endswith(end)


def test_ids_have_nine_characters_where_they_must() -> None:
    calls = [call("toolu_0123456789", "f"), call("abcdefghi", "g")]
    results = [said("tool", "1", tool_call_id="abcdefghi"), said("tool", "2", tool_call_id="toolu_0123456789")]
    text = ChatTemplate(NINE).render([HI, said("assistant", "", tool_calls=calls), *results])
    first, second = text[3:12], "abcdefghi"
    assert first.isalnum()
    assert text == f"hi[{first} f {{}}][{second} g {{}}]({second} g 1)({first} f 2)"


def test_a_tool_that_failed_is_told_from_one_that_did_not() -> None:
    messages = [
        said("assistant", "", tool_calls=[call("c", "f")]),
        said("tool", "x", tool_call_id="c", is_error=True),
    ]
    assert "(c f Error: x)" in ChatTemplate(AS_MAPPING).render([HI, *messages])


def test_other_keys_reach_the_template() -> None:
    assert (
        ChatTemplate("{{ messages[0].mood }}{{ messages[0].content }}").render([said("user", "a", mood="b")]) == "ba"
    )


def test_what_was_thought_is_read_under_each_of_its_names() -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert read_messages([said("assistant", "a", **{key: "hm"})]) == [Message("assistant", ("a",), "hm")]
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
    assert read_messages([said("assistant", parts)]) == [Message("assistant", ("a",), "hm")]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (said("assistant", "", tool_calls="f"), "tool_calls of message 0 is not a list"),
        (said("assistant", "", tool_calls=[{"id": "a"}]), "a tool call of message 0 has no function with a name"),
        (said("tool", "", tool_call_id=5), "tool_call_id of message 0 is 5, but must be a string"),
        (said("user", [5]), "a part of message 0 has no text: write"),
    ],
)
def test_what_is_malformed_is_named(message: Any, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        read_messages([message])


def test_arguments_that_are_not_json_stay_what_the_model_wrote() -> None:
    assert ToolCall("f", "{x").values == {"arguments": "{x"}
    assert ToolCall("f", "").values == {}


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:image/png;base64,aGk+", b"hi>"),
        ("DATA:image/png;charset=utf-8;BASE64,aGk=", b"hi"),
        ("data:image/png; base64,aGk=", b"hi"),
        ("data:image/png;base64 ,aGk=", b"hi"),
        (" \n data:image/png;base64,aGk=\n", b"hi"),
        ("data:image/png;base64,aGk%3D", b"hi"),
        ("data:image/png;base64,aGk%2B", b"hi>"),
        ("data:;base64,a G\nk", b"hi"),
        ("data:image/png;base64,aG-_", b"ho\xbf"),
        ("data:,h%69%20+\n#fragment", b"hi +"),
        ("data:text/plain;base64=no,aGk=", b"aGk="),
    ],
)
def test_data_urls_are_decoded_as_the_url_standard_specifies(url: str, data: bytes) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    (message,) = read_messages([{"role": "user", "content": [part]}])
    assert message.media[0].source == data


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", " FILE:///etc/passwd", "/etc/passwd", "data:image/png;base64", "x:y"]
)
def test_files_of_this_machine_are_not_for_clients(url: str) -> None:
    with pytest.raises(TemplateError, match="is not a data URL"):
        read_messages([{"role": "user", "content": [{"type": "image_url", "image_url": url}]}])
