"""Patterns of calls, built from the declared formats. They tolerate white space and quotation marks in tags."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache

from localllm.chat.calls.declaration import CallFormat, PythonArguments, TaggedArguments
from localllm.chat.calls.formats import ENDS, FORMATS, TAGGED, TAGS

#: Namespaces before a tool's name, and the index of a call after it.
_NAMESPACE, _INDEX = r"(?:functions?[._:/]?|(?:[\w-]+[.:/])+)?", r"(?:[:._-]?\d+)?"


def tool_name(written: str, names: Collection[str]) -> str:
    """Return the offered tool that a written name means; otherwise the written name.

    Models write a namespace before the name (``default_api.look``). They also write the call's id instead of its
    name, and clients replace characters of ids (``functions.look:0``, ``functions_look_0``).
    """
    for name in (written, written := written.strip().strip("\"'`").strip()):
        if name in names:
            return name
    index = _INDEX if written.startswith("functions") else r"(?::\d+)?"
    for name in sorted(names, key=len, reverse=True):
        if re.fullmatch(f"{_NAMESPACE}{re.escape(name)}{index}", written):
            return name
    return re.sub(r":\d+\Z", "", written.removeprefix("functions."))


def _literal(text: str) -> str:
    """Pattern of a part of a tag."""
    pieces = re.split(r"(\s+|\{id\})", text)
    return "".join(
        r"\s*" if piece.isspace() else r"[^<\[\n]{0,256}+" if piece == "{id}" else re.escape(piece)
        for piece in pieces
    )


def _xml_tag(tag: str, group: str) -> str:
    """Pattern of a tag with a name, up to its attributes: ``<tag=name`` or ``<tag name="name"``."""
    return rf"""{re.escape(tag)}(?:\s+name)?\s*=\s*["']?(?P<{group}>(?:[^<>"'\n/]|/(?!>)){{1,256}}+)["']?"""


#: Tags that may follow the arguments of a call, as a pattern. A code block may also precede them.
_FOLLOWING = {tag for tag in (*ENDS, *TAGS, *TAGS.values()) if not tag.startswith("`")}
FOLLOWING = "|".join(map(re.escape, sorted(_FOLLOWING, key=len, reverse=True)))


def _head(format_: CallFormat, end: str) -> str:
    """Pattern of a call up to its arguments. ``end``: of a call without arguments."""
    before, _, after = format_.head.partition("{name}")
    if re.match(r'"?>', after):
        return _xml_tag(re.split(r"[=\s]", before)[0], "name") + r"\s*/?>"
    before, after = before.removesuffix("functions."), after.removeprefix(":{number}").strip()
    has_parentheses = isinstance(format_.arguments, PythonArguments)
    name = r"[\w.-]" if has_parentheses else r"[^\n<>\"'{}()\[\]]" if before else r"[^\s<>\"'{}()\[\]]"
    # "function<｜tool▁sep｜>" precedes the name in another format, so "function" is not the name.
    longer = {f.head.partition("{name}")[0].removeprefix(before) for f in FORMATS.values() if before}
    suffixes = [
        suffix for suffix in longer if suffix and any(f.head.startswith(before + suffix) for f in FORMATS.values())
    ]
    lookahead = "".join(rf"(?!{re.escape(suffix)}\s*(?:\Z|[^{{\s]))" for suffix in suffixes if suffix != "functions.")
    pattern = rf"{_literal(before)}\s*{lookahead}(?P<name>{name}{{1,256}}+)\s*"
    if isinstance(format_.arguments, TaggedArguments) and not after:
        return pattern + rf"(?={re.escape(format_.arguments.key_tag)})"
    if after:
        return pattern + (rf"(?:{_literal(after)}|(?={end}))" if before else _literal(after))
    return pattern + (r"(?=\()" if has_parentheses else rf"(?=\{{|{end})")


@cache
def head_patterns(*, at_end: bool = False) -> tuple[re.Pattern[str], ...]:
    """Return patterns of calls up to their arguments, other than JSON objects.

    Compiling them takes 10 ms, and most programs read no call.

    Args:
        at_end: whether the reply has ended.
    """
    formats = [format_ for format_ in FORMATS.values() if not format_.is_bare and not format_.head.startswith('{"')]
    end = FOLLOWING + r"|\Z" if at_end else FOLLOWING
    return tuple(re.compile(pattern) for pattern in dict.fromkeys(_head(format_, end) for format_ in formats))


#: A call that is only a name.
NAME_ALONE = re.compile(rf"\s*(?P<name>[A-Za-z_][\w.:/-]{{0,255}}+)(?<=\w)(?=[\s\]]*(?:{FOLLOWING}))")
OFFERED_ALONE = re.compile(r"\s*(?P<name>[^\s<{]{1,256}+)\s*\Z")

#: A call that is a JSON object, up to its arguments, in repaired JSON.
_PAIR = r'"[^"\\]*"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*'
OBJECT_HEAD = re.compile(
    rf'\s*\{{\s*(?:(?!"(?:tool_)?name"){_PAIR})*+"(?:tool_)?name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*(?:{_PAIR})*+'
    r'"(?:arguments|parameters)"\s*:\s*\{'
)
#: The same if the tool's name is the only key.
NAMED_HEAD = re.compile(r'\s*\{\s*(?P<name>"(?:[^"\\]|\\.)*")\s*:\s*\{')

#: Calls without tags, at the start of a reply: JSON, a list of Python calls, or a name on a separate line.
BARE = re.compile(
    r"\[?\s{0,99}\{|\[\s{0,99}(?P<in_list>[\w.-]{1,256}+)\("
    r"(?P<has_keyword>\s{0,99}(?:\w{1,256}+\s{0,99}=(?!=)|\)))?|(?P<on_line>[\w.-]{1,256}+)\n\s{0,99}\{"
)
BARE_HEAD = re.compile(r"(?P<name>[\w.-]+)(?:(?=\()|\n\s*(?=\{))")
#: The start of such a call.
PARTIAL_BARE = re.compile(r"\[?\s{0,99}[\w.-]{0,256}+(?:\n\s{0,99})?")
PARTIAL_BARE_LIST = re.compile(r"\[\s{0,99}[\w.-]{0,256}+(?:\(\s{0,99}(?:\w{1,256}+\s{0,99})?)?")


def _key(arguments: TaggedArguments) -> re.Pattern[str]:
    begin, _, end = arguments.begin.partition("{key}")
    if "=" in begin:
        return re.compile(_xml_tag(arguments.key_tag, "key") + r"(?P<attributes>[^<>]*+)>")
    close, value = re.findall(r"<[^<>]+>", end)
    return re.compile(
        rf"{re.escape(begin)}\s*(?P<key>[^<>]{{1,256}}+)(?:{re.escape(close)})?\s*(?P<attributes>){re.escape(value)}"
    )


@cache
def key_patterns() -> dict[str, re.Pattern[str]]:
    """Return the patterns up to an argument's value, by their first tag."""
    return {tag: _key(arguments) for tag, arguments in TAGGED.items()}
