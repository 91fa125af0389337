"""Detects a chat template's format of calls, from a rendered call."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from localllm.chat.calls.declaration import CallFormat
from localllm.chat.calls.formats import FORMATS
from localllm.chat.calls.writer import written

#: Name and argument of the rendered call.
NAME, ARGUMENTS = "zqname", {"zqkey": "zqsecond"}


def detected_format(prompt: str, rendered: str) -> CallFormat | None:
    """Return the format of a call of `NAME` with `ARGUMENTS`; None if it is unknown.

    Args:
        prompt: the rendered conversation before the call, with the start of the assistant's turn.
        rendered: the rendered conversation with the call.
    """
    prompt, text = (re.sub(r"\s+", "", text) for text in (prompt, rendered))
    formats = []
    for format_, pattern in _patterns():
        is_answer = text.startswith(prompt) and pattern.match(text, len(prompt)) is not None
        if is_answer if format_.is_bare else pattern.search(text):
            formats.append(format_)
    # Some formats differ only in white space.
    exact = (format_ for format_ in formats if written(format_, [(NAME, ARGUMENTS)]) in rendered)
    return next(exact, formats[0] if formats else None)


@cache
def _patterns() -> list[tuple[CallFormat, re.Pattern[str]]]:
    """Patterns of the call in each format without white space, longest first; formats without tags come last."""
    patterns = [(format_, _pattern(format_)) for format_ in FORMATS.values()]
    patterns.sort(key=lambda item: (item[0].is_bare, -len(item[1])))
    return [(format_, re.compile(pattern)) for format_, pattern in patterns]


def _pattern(format_: CallFormat) -> str:
    if format_.is_harmony:  # the template writes more words in the header
        return r"to=functions\.zqname.{0,60}<\|message\|>\{\"zqkey\""
    head = format_.head.replace("{id}", "\0").replace("{number}", "\0")
    text = re.sub(r"\s+", "", written(replace(format_, head=head), [(NAME, ARGUMENTS)]))
    # A JSON object may have further keys, such as an id, after the arguments.
    return re.escape(text).replace("\0", r"[\w.:-]*").replace(r"\}\}", r"\}[^{}]*\}")
