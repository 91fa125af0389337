"""Grammars for text inside a JSON string: a Lark grammar whose characters are escaped as JSON escapes them.

Each character is a separate terminal, because llguidance's lexer cannot go back: a backslash may continue one
terminal or start the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from re import _constants as sre, _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

#: Comments, strings, regular expressions and names in a Lark grammar.
_TOKEN = re.compile(
    r'(?P<comment>//[^\n]*+)|(?P<string>"(?:[^"\\\n]++|\\.)*+)(?P<end>"?)(?P<case>i?)'
    r"|/(?![/*])(?P<pattern>(?:[^/\\\n]++|\\.)++)(?P<slash>/?)(?P<flags>[imslux]*)|(?<![%\w])(?P<name>[A-Za-z_]\w*+)"
)
#: Parts of a grammar that would change the grammar around it, or that `rule_of` cannot express.
_REFUSED = re.compile(r"%(?!import\b)\w+|\"\s*\.\.\s*\"")
#: Operators of classes, and names of classes, which exist in Rust's patterns but not in Python's.
_RUST_CLASSES = re.compile(r"&&|--|~~|\[:")
#: Imports of Lark's standard library.
_IMPORT = re.compile(r"^[ \t]*%import[ \t]+common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?[ \t]*$", re.MULTILINE)
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "NUMBER": r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
}
#: Characters that JSON escapes.
_ESCAPED = [*map(chr, range(32)), '"', "\\"]

_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}


def escaped_grammar(lark: str, prefix: str = "") -> str:
    """Return a Lark grammar of the texts that ``lark`` matches, escaped as in JSON strings.

    Args:
        lark: the grammar, whose first rule is ``start``.
        prefix: added to the names of all rules.

    Raises:
        ValueError: a part of the grammar cannot be escaped.
    """

    def rewrite(match: re.Match[str]) -> str:
        if match["name"]:
            terminal = "t_" if match["name"].isupper() else ""  # becomes a rule
            return f"{prefix}{terminal}{match['name'].lower()}"
        if match["comment"]:
            return ""
        if not (match["end"] or match["slash"]):
            raise ValueError("a string or a pattern has no end")
        if match["string"]:
            return rule_of(re.escape(json.loads(match["string"] + '"')), match["case"])
        return rule_of(match["pattern"], match["flags"])

    def imported(match: re.Match[str]) -> str:
        if match[1] not in _COMMON:
            raise ValueError(f"%import common.{match[1]} is not supported: write the terminal's pattern")
        return f"{match[2] or match[1]}: /{_COMMON[match[1]]}/"

    lark = _IMPORT.sub(imported, lark)
    if refused := _REFUSED.search(lark):
        raise ValueError(f"{refused[0]} is not supported in a grammar of text inside JSON")
    return _TOKEN.sub(rewrite, lark)


def rule_of(pattern: str, flags: str = "") -> str:
    """Return a regular expression as a rule in Lark's notation; see `escaped_grammar`.

    ``flags``: of ``/pattern/flags``.
    """
    if _RUST_CLASSES.search(pattern):
        raise ValueError(f"the pattern {pattern!r:.80} combines classes: write one class")
    used = sum({getattr(re, flag.upper()) for flag in flags if flag in "imsx"})
    try:
        parsed = sre_parser.parse(pattern, used)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r:.80} is not valid: {error}") from None
    return _sequence(parsed, re.RegexFlag(parsed.state.flags))


def _sequence(items: Iterable[tuple[Any, Any]], flags: re.RegexFlag) -> str:
    return "( " + (" ".join(_written(items, flags)) or '""') + " )"


def _written(items: Iterable[tuple[Any, Any]], flags: re.RegexFlag) -> Iterator[str]:
    for operator, value in items:
        if operator is sre.LITERAL:
            yield _class(f"[{_in_class(value)}]", flags)
        elif operator is sre.ANY:
            yield _class(r"[\s\S]" if flags & re.DOTALL else r"[^\n]", flags)
        elif operator is sre.NOT_LITERAL:
            yield _class(f"[^{_in_class(value)}]", flags)
        elif operator is sre.IN:
            yield _class("".join(("[", *map(_member, value), "]")), flags)
        elif operator is sre.BRANCH:
            yield "( " + " | ".join(_sequence(branch, flags) for branch in value[1]) + " )"
        elif operator is sre.SUBPATTERN:
            _, added, removed, inner = value
            yield _sequence(inner, (flags | added) & ~removed)
        elif operator in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, repeated = value
            bounds = f"{{{least},{'' if most is sre.MAXREPEAT else most}}}"
            yield _sequence(repeated, flags) + {"{0,}": "*", "{1,}": "+", "{0,1}": "?"}.get(bounds, bounds)
        elif operator is not sre.AT:  # a terminal is matched from start to end
            raise ValueError("patterns cannot look around or back here: write them without")


def _in_class(code: int) -> str:
    return rf"\x{code:02x}" if code < 32 else re.escape(chr(code))


def _member(item: tuple[Any, Any]) -> str:
    operator, value = item
    if operator is sre.NEGATE:
        return "^"
    if operator is sre.RANGE:
        return f"{_in_class(value[0])}-{_in_class(value[1])}"
    return _in_class(value) if operator is sre.LITERAL else _CATEGORIES[value]


@lru_cache(4096)
def _class(source: str, flags: re.RegexFlag) -> str:
    """Return a terminal for one character of a class: itself, or its escape."""
    matches = re.compile(source, flags & re.IGNORECASE).fullmatch
    escapes = [re.escape(json.dumps(char)[1:-1]) for char in _ESCAPED if matches(char)]
    case = "(?i)" if flags & re.IGNORECASE else ""
    return "/" + case + "|".join([rf'[{source}&&[^\x00-\x1f"\\]]', *escapes]).replace("/", r"\/") + "/"
