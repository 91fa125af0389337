"""Settings of a conversation, which control how replies are generated: their names, their checks, and their syntax.

Settings are plain values by name. They are the options of `localllm.options.keywords.Options` that are useful in a
chat, and

    thinking          whether a model that can think first does so; without it, the chat template decides
    reasoning_effort  a word for the chat template of a model that supports it, such as low or high
    reply_prefix      first text of every reply
    json_schema       schema of every reply
    folder            the working folder, whose files the model may change
    instructions      whether AGENTS.md and skills are used (default: yes)
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from localllm.errors import UsageError
from localllm.options.declared import CheckedOptions, Sampling, declared

#: Settings for this machine, which exported chats omit.
LOCAL = ("folder", "instructions")
#: Settings that are no options of `LLM.stream_chat`.
_NOT_OPTIONS = ("thinking", "reasoning_effort", "reply_prefix", *LOCAL)
#: Maximum characters of a reasoning effort.
_MAX_WORD = 20

_ON = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}


def _flag(text: str) -> bool:
    return _ON[text.lower()]


def _count(text: str) -> int | None:
    return None if text in ("-1", "none") else int(text)


def _texts(text: str) -> list[str]:
    """Split a list of strings: quoted strings or single words. ``\\n`` is a line feed."""
    return [string.replace("\\n", "\n") for string in shlex.split(text)]


def _word(text: str) -> str:
    if not text.isalpha() or len(text) > _MAX_WORD:
        raise ValueError(text)
    return text


def _folder(text: str) -> str:
    """Return the absolute path of a folder, so that the chat continues in the folder from anywhere."""
    path = Path(text).expanduser().resolve()
    if not path.is_dir():
        raise ValueError(text)
    return str(path)


def _readers() -> dict[str, Callable[[str], object]]:
    readers: dict[str, Callable[[str], object]] = {
        "max_tokens": _count,
        "reasoning_budget": _count,
        "stop": _texts,
        "ignore_eos": _flag,
        "thinking": _flag,
        "reasoning_effort": _word,
        "reply_prefix": str,
        "json_schema": json.loads,
        "folder": _folder,
        "instructions": _flag,
    }
    for name, option in declared(Sampling).items():
        if option.is_setting and option.kind.parse in (float, int):
            readers[name] = _count if option.none else option.kind.parse
    return readers


#: Parsers of settings by name. They raise ValueError or KeyError for invalid text.
READERS = _readers()

#: Settings that may be None.
NULLABLE = frozenset(name for name, reader in READERS.items() if reader is _count)


def typed(value: object) -> str:
    """Format a value in the syntax that users type."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return shlex.join(text.replace("\n", "\\n") for text in value)
    return "none" if value is None else json.dumps(value) if isinstance(value, dict) else str(value)


class Generation(NamedTuple):
    """Settings as keywords of `LLM.stream_chat`."""

    options: dict[str, Any]
    template_variables: dict[str, Any]
    reply_prefix: str


def generation(settings: Mapping[str, Any]) -> Generation:
    options = {name: value for name, value in settings.items() if name not in _NOT_OPTIONS}
    names = {"enable_thinking": "thinking", "reasoning_effort": "reasoning_effort"}
    variables = {variable: settings[name] for variable, name in names.items() if name in settings}
    return Generation(options, variables, settings.get("reply_prefix", ""))


def full_name(name: str) -> str:
    """Return the full name of a setting: ``temp`` and ``n`` are abbreviations, and hyphens become underscores."""
    name = name.replace("-", "_")
    return {"temp": "temperature", "n": "max_tokens"}.get(name, name)


def with_setting(settings: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return ``settings`` with one value parsed from ``text``; ``default`` removes it.

    Raises UsageError if the setting is unknown or the value is invalid.
    """
    name = full_name(name)
    if name not in READERS:
        near = difflib.get_close_matches(name, READERS, n=1)
        raise UsageError(
            f"there is no setting {name!r}: "
            + (f"did you mean {near[0]}?" if near else f"the settings are {', '.join(READERS)}")
        )
    changed = {key: value for key, value in settings.items() if key != name}
    if text == "default":
        return changed
    try:
        changed[name] = READERS[name](text)
    except (ValueError, KeyError, OSError, RuntimeError):  # the last two: a folder
        raise UsageError(f"{name} cannot be {text!r}: give {_kind(name)}, or default") from None
    check(changed)
    return changed


def _kind(name: str) -> str:
    kinds = {float: "a number", int: "a whole number", _count: "a whole number or none", _flag: "on or off"}
    kinds |= {_texts: "strings, with closed quotation marks", _folder: "the path of a folder that exists"}
    kinds[_word] = "a word such as low, medium or high"
    return "a JSON schema" if name == "json_schema" else kinds.get(READERS[name], "text")


def check(settings: Mapping[str, Any]) -> None:
    """Check settings. Raises UsageError if a setting is unknown, has the wrong type or is out of range."""
    for name in settings:
        if name not in READERS:
            raise UsageError(f"there is no setting {name!r:.80}")
    kinds: dict[str, type] = {"json_schema": dict, "stop": list}
    kinds |= {"thinking": bool, "instructions": bool}
    kinds |= {"reasoning_effort": str, "reply_prefix": str, "folder": str}
    for name, value in settings.items():
        if not isinstance(value, kinds.get(name, object)) or (value is None and name not in NULLABLE):
            raise UsageError(f"{name} cannot be {value!r:.80}")
    CheckedOptions.of(generation(settings).options)


def sound(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the valid settings. Other programs and other versions may have stored settings that are invalid here."""
    good: dict[str, Any] = {}
    for name, value in settings.items():
        try:
            check({name: value})
        except UsageError:
            continue
        good[name] = value
    return good
