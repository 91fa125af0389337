"""Invalid files that resemble exported chats, and the errors that the terminal's chat reports for them."""

from __future__ import annotations

import json
from typing import Any


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
    "an id twice": (messages({}, {"id": "0"}), "message 1 has the id of an earlier message"),
    "its own parent": (messages({"parent": "0"}), "'parent' of message 0 is not an earlier message"),
    "a parent to come": (messages({"parent": "1"}, {}), "'parent' of message 0"),
    "no text": (altered(messages=[{"id": "a", "role": "user"}]), "missing required field `text`"),
    "half a character": (messages({"text": "\ud800"}), "it is not valid JSON"),
    "a role": (messages({"role": "root"}), "Invalid enum value 'root' - at `$.role`"),
    "a state": (messages({"state": "happy"}), "at `$.state`"),
    "long ago": (messages({"created": -1}), "Expected `float` >= 0.0 - at `$.created`"),
    "far ahead": (messages({"created": 1e300}), "at `$.created`"),
    "infinity": (messages({"stats": {}}).replace("{}", '{"prompt_tokens": 1e999}'), "Number out of range"),
    "stats": (messages({"stats": {"prompt_tokens": True}}), "got `bool` - at `$.stats.prompt_tokens`"),
    "a window": (messages({"window": {"first": "x"}}), "the window of message 0 does not start at"),
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
    "null for a number": (
        altered(settings={"temperature": None}),
        "its settings are wrong: temperature cannot be None",
    ),
    "messages as a setting": (altered(settings={"messages": []}), "there is no setting 'messages'"),
    "a text as stop": (altered(settings={"stop": "x"}), "its settings are wrong: stop cannot be 'x'"),
    "a text as schema": (
        altered(settings={"json_schema": "{}"}),
        "its settings are wrong: json_schema cannot be '{}'",
    ),
    "half a token": (altered(settings={"max_tokens": 1.5}), "its settings are wrong: max_tokens is 1.5"),
    "tools": (altered(tools=[{"function": {}}]), "field `name` - at `$.tools[0].function`"),
    "a system prompt": (altered(system=["x"]), "at `$.system`"),
    "settings": (altered(settings={"temperature": "hot"}), "its settings are wrong: temperature is 'hot'"),
    "strange settings": (altered(settings={"processors": []}), "there is no setting 'processors'"),
    "settings without a name": (altered(settings={"": None}), "there is no setting ''"),
    "settings that are none": (altered(settings=[1]), "at `$.settings`"),
    "a title": (altered(title=5), "at `$.title`"),
}
