"""A limit on the nesting of input from files, models and clients, checked before the input is parsed.

The parsers of JSON and of Python are recursive and written in C.  Whether they raise an error for deeply nested input
depends on the version of Python.  On 3.12 and 3.13 they overflow a thread's stack of 512 KiB, which ends the process.
"""

from __future__ import annotations

import io
import json
import keyword
import re
import tokenize
from typing import Any

#: Levels of lists and objects in a document, and of brackets and operators in an expression.
MAX_NESTING = 100
#: Levels in the arguments of a tool call.  Chat templates read these arguments in messages, up to 64 levels in total.
MAX_CALL_NESTING = 50

_TOKEN = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]'
_SPACES: dict[type, Any] = {str: re.compile(r"\s*"), bytes: re.compile(rb"\s*")}
_TOKENS: dict[type, Any] = {str: re.compile(_TOKEN, re.DOTALL), bytes: re.compile(_TOKEN.encode(), re.DOTALL)}


class NestingError(ValueError):
    """The input has too many levels."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"it is nested too deeply: at most {limit} levels are supported")


def check_nesting(text: str | bytes, limit: int = MAX_NESTING, start: int = 0) -> None:
    """Raise NestingError if the JSON value at ``start`` has more than ``limit`` levels."""
    opening: Any = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    start = _SPACES[type(text)].match(text, start).end()
    # A document may have thousands of values to check, so only a check of the whole document counts its brackets.
    if text[start : start + 1] not in opening or (
        not start and sum(text.count(bracket) for bracket in opening) <= limit
    ):
        return
    depth = 0
    for token in _TOKENS[type(text)].finditer(text, start):
        if token[0] in opening:
            depth += 1
            if depth > limit:
                raise NestingError(limit)
        elif len(token[0]) == 1:
            depth -= 1
            if depth <= 0:
                return


def parse_json(text: str | bytes, limit: int = MAX_NESTING, **options: Any) -> Any:
    """Return the values of a JSON text.  ``options``: arguments of `json.loads`.

    Raises:
        NestingError: the text has more than ``limit`` levels; also a ValueError.
        ValueError: the text is not valid JSON.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    check_nesting(text, limit)
    return json.loads(text, **options)


def check_expression(text: str, limit: int = MAX_NESTING) -> None:
    """Check a Python expression.  An operator counts as a level, because it nests like a bracket.

    Raises:
        NestingError: it has more than ``limit`` levels.
        SyntaxError: its tokens are not valid.
    """
    n_operators = [0]  # in the current item of each open bracket
    depth = 0  # open brackets, and their operators
    try:
        for token_type, token, *_ in tokenize.generate_tokens(io.StringIO(text).readline):
            if token_type == tokenize.OP and token in ("(", "[", "{"):
                n_operators.append(0)
                depth += 1
            elif token_type == tokenize.OP and token == ",":
                depth -= n_operators[-1]
                n_operators[-1] = 0
            elif token_type == tokenize.OP or keyword.iskeyword(token):
                if token in (")", "]", "}") and len(n_operators) > 1:
                    depth -= n_operators.pop() + 1
                n_operators[-1] += 1  # a call or a subscript may follow
                depth += 1
            if depth > limit:
                raise NestingError(limit)
    except tokenize.TokenError as error:
        raise SyntaxError(error.args[0]) from None
