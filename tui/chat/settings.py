"""Settings of a conversation: how replies are generated, as people type them and as they are kept.

They are plain values by name, those of `localllm.options.keywords.Options` that make sense here, and

    thinking      whether a model that can think first shall do so; left out, its template decides
    reply_prefix  what every reply begins with
    json_schema   what every reply is held to
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from localllm.errors import UsageError
from localllm.options.declared import CheckedOptions, Sampling, declared

_ON = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}


def _flag(text: str) -> bool:
    return _ON[text.lower()]


def _count(text: str) -> int | None:
    return None if text in ("-1", "none") else int(text)


def _texts(text: str) -> list[str]:
    """Texts in quotes, or one word each; ``\\n`` is a line's end."""
    return [each.replace("\\n", "\n") for each in shlex.split(text)]


def _readers() -> dict[str, Callable[[str], object]]:
    readers: dict[str, Callable[[str], object]] = {
        "max_tokens": _count,
        "stop": _texts,
        "ignore_eos": _flag,
        "thinking": _flag,
        "reply_prefix": str,
        "json_schema": json.loads,
    }
    for name, option in declared(Sampling).items():
        if option.is_setting and option.kind.parse in (float, int):
            readers[name] = _count if option.none else option.kind.parse
    return readers


#: Settings by name, and what makes a value of what was typed (ValueError or KeyError where it cannot).
READERS = _readers()

#: Settings that may be None.
NULLABLE = frozenset(name for name, reader in READERS.items() if reader is _count)


def typed(value: object) -> str:
    """A value as it is typed."""
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
    options = {name: value for name, value in settings.items() if name not in ("thinking", "reply_prefix")}
    thinking = settings.get("thinking")
    variables = {} if thinking is None else {"enable_thinking": thinking}
    return Generation(options, variables, settings.get("reply_prefix", ""))


def full_name(name: str) -> str:
    """The name of a setting, as people may type it."""
    name = name.replace("-", "_")
    return {"temp": "temperature", "n": "max_tokens"}.get(name, name)


def with_setting(settings: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """Settings with one as it was typed; ``default`` removes it.  Raises UsageError if it is unknown or wrong."""
    name = full_name(name)
    if name not in READERS:
        near = difflib.get_close_matches(name, READERS, n=1)
        raise UsageError(
            f"there is no setting {name!r}: "
            + (f"did you mean {near[0]}?" if near else f"there are {', '.join(READERS)}")
        )
    changed = {other: value for other, value in settings.items() if other != name}
    if text == "default":
        return changed
    try:
        changed[name] = READERS[name](text)
    except (ValueError, KeyError):
        raise UsageError(f"{name} cannot be {text!r}: give {_kind(name)}, or default") from None
    check(changed)
    return changed


def _kind(name: str) -> str:
    kinds = {float: "a number", int: "a whole number", _count: "a whole number or none", _flag: "on or off"}
    kinds[_texts] = "texts, in quotes that are closed"
    return "a JSON schema" if name == "json_schema" else kinds.get(READERS[name], "a text")


def check(settings: Mapping[str, Any]) -> None:
    """Checks settings.  Raises UsageError if one is unknown, of the wrong type or out of range."""
    for name in settings:
        if name not in READERS:
            raise UsageError(f"there is no setting {name!r:.80}")
    kinds = {"thinking": bool, "reply_prefix": str, "json_schema": dict, "stop": list}
    for name, value in settings.items():
        if not isinstance(value, kinds.get(name, object)) or (value is None and name not in NULLABLE):
            raise UsageError(f"{name} is {value!r:.80}, which it cannot be")
    CheckedOptions.of(generation(settings).options)


def sound(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings that are good here, of a program that may have had others."""
    good: dict[str, Any] = {}
    for name, value in settings.items():
        try:
            check({name: value})
        except UsageError:
            continue
        good[name] = value
    return good
