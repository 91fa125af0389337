"""Converts regular expressions of JSON schemas, in ECMAScript's syntax, to llguidance's syntax.

Source: https://tc39.es/ecma262/#sec-patterns, with the additional syntax of its annex B.
"""

from __future__ import annotations

import re

_ESCAPE = (
    r"\\(?:c[A-Za-z]|k<[^<>]*>|u\{[0-9A-Fa-f]{1,6}\}|u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}"
    r"|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[pP]\{[^{}]*\}|[1-9][0-9]*|[\s\S])"
)
#: One token outside a class, and one inside.
_OUTSIDE = re.compile(rf"{_ESCAPE}|\(\?<(?![=!])[^<>]*>|\[\^?\]?|\{{[0-9]+(?:,[0-9]*)?\}}|[\s\S]")
_INSIDE = re.compile(rf"{_ESCAPE}|[\s\S]")

_NAMED_GROUP = re.compile(r"\(\?<(?![=!])([^<>]*)>")

#: Escapes with the same meaning in both syntaxes: classes, and single characters.
_CLASSES, _SAME = "dDwWsSpP", "tnrvfxbB"

#: Pattern that matches every string, in place of back references.
_ANY_TEXT = r"(?:[\s\S]*)"


def from_ecma(pattern: str) -> tuple[str, bool]:
    r"""Translate a pattern.

    Returns:
        The pattern, with any string in place of references (``\1``, ``\k<name>``), and whether it has references.
    """
    names = set(_NAMED_GROUP.findall(pattern))
    pieces: list[str] = []
    position, in_class, has_references, previous = 0, False, False, ""
    while position < len(pattern):
        match = (_INSIDE if in_class else _OUTSIDE).match(pattern, position)
        assert match is not None  # both patterns match any character
        token, position = match[0], match.end()
        if token[0] == "\\" and len(token) > 1:
            is_reference = not in_class and (token[1] in "123456789" or token[2:].strip("<>") in names)
            is_reference &= token[1] in "k123456789"
            has_references |= is_reference
            pieces.append(_ANY_TEXT if is_reference else _escape(token, in_class))
        elif in_class:
            is_range = token == "-" and not _is_class(previous) and previous != "-"
            is_range &= not _is_class(pattern[position : position + 2])
            pieces.append(f"\\{token}" if token in "[&~-" and not is_range else token)
            in_class = token != "]"
        elif token in ("[]", "[^]"):
            pieces.append(r"[^\s\S]" if token == "[]" else r"[\s\S]")
        elif token.startswith("(?<"):
            pieces.append("(")
        else:
            pieces.append(r"\{" if token == "{" else token)
            in_class = token[0] == "["
        previous = token
    return "".join(pieces), has_references


def _is_class(token: str) -> bool:
    return len(token) > 1 and token[0] == "\\" and token[1] in _CLASSES


def _escape(token: str, in_class: bool) -> str:
    letter, argument = token[1], token[2:]
    if letter in "bB" and in_class:
        return r"\x08"
    if letter in _CLASSES + _SAME:
        return token if letter != "x" or argument else "x"
    if letter == "c":
        return f"\\x{ord(argument) & 31:02x}" if argument else r"\\c"
    if letter == "u" and argument:
        units = [int(unit, 16) for unit in re.findall(r"[0-9A-Fa-f]+", argument.replace("\\u", " "))]
        code = units[0] if len(units) == 1 else 0x10000 + ((units[0] - 0xD800) << 10) + units[1] - 0xDC00
        return token if 0xD800 <= code < 0xE000 or code > 0x10FFFF else re.escape(chr(code))
    if letter.isdecimal():  # octal number in a class
        digits = token[1:]
        return f"\\x{int(digits, 8):02x}" if re.fullmatch("[0-3]?[0-7]{1,2}", digits) else re.escape(digits)
    return re.escape(token[1:])
