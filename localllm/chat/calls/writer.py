"""Writes calls in a declared format, as a model that follows the format does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.chat.calls.declaration import Arguments, CallFormat, JSONArguments, NestedArguments, PythonArguments


def written(format_: CallFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the text of calls. Each call is a tool's name and the arguments."""
    texts = []
    for number, (name, arguments) in enumerate(calls):
        head = format_.head.replace("{name}", name).replace("{id}", "abc123456").replace("{number}", str(number))
        texts.append(head + _arguments(format_.arguments, arguments) + format_.tail)
    before, after = format_.opening + format_.inside[0], format_.inside[1] + format_.closing
    if format_.repeats:
        return format_.between.join(before + text + after for text in texts)
    return before + format_.between.join(texts) + after


def _arguments(form: Arguments, arguments: Mapping[str, Any]) -> str:
    if isinstance(form, JSONArguments):
        return _json(arguments) if form.quote == '"' else _unquoted(arguments, form.quote)
    if isinstance(form, PythonArguments):
        return f"({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    if isinstance(form, NestedArguments):
        return "".join(_nested(name, value, form.mark) for name, value in arguments.items())
    texts = []
    for name, value in arguments.items():
        begin = form.begin.replace("{key}", name).replace("{is_string}", _json(isinstance(value, str)))
        texts.append(begin + (value if isinstance(value, str) else _json(value)) + form.end + form.between)
    return "".join(texts)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _unquoted(value: Any, quote: str) -> str:
    """JSON with another quotation mark, and keys without quotation marks."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_unquoted(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_unquoted(item, quote) for item in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else _json(value)


def _nested(name: str, value: Any, mark: str) -> str:
    if isinstance(value, Mapping):
        value = "".join(_nested(key, item, mark) for key, item in value.items())
    elif isinstance(value, list):
        value = "".join(_nested("item", item, mark) for item in value)
    elif not isinstance(value, str):
        value = _json(value)
    return f"{mark}<{name}>{value}{mark}</{name}>"
