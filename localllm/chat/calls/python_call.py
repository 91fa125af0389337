"""Arguments of calls that are written in Python."""

from __future__ import annotations

import ast
import json
import re

from localllm.chat.calls.source import Call, CallSource, Reading
from localllm.nesting import MAX_CALL_NESTING, check_expression

_STRING = re.compile(r""""(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'""", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)|\n|\r", re.DOTALL)
_ESCAPED = "\\'\"abfnrtvxuUN01234567\n"
#: Characters between quotation marks and brackets, and within strings.
_CODE, _CHARACTERS = re.compile(r"[^\"'()\[\]{},]*"), {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_KEYWORD = re.compile(r"\s*(\w+)\s*=(?!=)\s*")


class _JSONWords(ast.NodeTransformer):
    """JSON's words, which some models write in Python calls."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words: dict[str, bool | None] = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def read_python(source: CallSource, call: Call) -> Reading:
    """Read the arguments of a Python call. Each argument is emitted once it is complete."""
    source.take(1)
    names, pieces = call.types.names, list[str]()
    quote, brackets = "", 0
    while True:
        pattern = _CHARACTERS[quote[0]] if quote else _CODE
        code = pattern.match(source.text, source.at)
        assert code is not None
        pieces.append(source.take(len(code[0])))
        following = source.text[source.at : source.at + 3]
        mark = following[:1]
        # A string has one or three quotation marks at each end; an escape has two characters.
        needed = quote or (mark * 3 if mark and mark in "\"'" else "")
        is_partial = following in ("", "\\") or (len(following) < len(needed) and needed.startswith(following))
        if is_partial and (yield from source.wait()):
            continue
        if not following:
            break
        if mark == ")" and not quote and not brackets:
            source.take(1)
            break
        n = 2 if quote and mark == "\\" else len(quote) if quote and following.startswith(quote) else 1
        if quote:
            quote = "" if mark != "\\" and following.startswith(quote) else quote
        elif mark in "\"'":
            quote = needed if following == needed else mark
            n = len(quote)
        elif mark == "," and not brackets:
            source.take(1)
            _add_argument(call, names, "".join(pieces))
            pieces = []
            continue
        elif mark != ",":
            brackets = max(0, brackets + (1 if mark in "([{" else -1))
        pieces.append(source.take(n))
    if not following and source.is_cut:
        return
    _add_argument(call, names, "".join(pieces))
    call.close_object()
    if not following:
        call.problem = "its arguments are not closed"


def _add_argument(call: Call, names: list[str], text: str) -> None:
    """Add an argument, and remove its name from ``names``. An argument without a keyword has the first name."""
    if not text.strip():
        return
    keyword = _KEYWORD.match(text)
    if keyword is None and (not names or text.lstrip().startswith("*")):
        call.problem = "its arguments have no names"
        return
    name = names[0] if keyword is None else keyword[1]
    if name in names:
        names.remove(name)
    value = text[0 if keyword is None else keyword.end() :].strip()
    literal = _literal(value)
    call.add_value(name, call.value_json(value, name) if literal is None else literal)


def _literal(code: str) -> str | None:
    """Return the JSON of a Python literal; None if it is none or too deep."""
    code = _STRING.sub(lambda string: _ESCAPE.sub(_escape, string[0]), code)
    try:
        check_expression(code, MAX_CALL_NESTING - 1)
        value = ast.literal_eval(_JSONWords().visit(ast.parse(code, mode="eval").body))
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # a lone surrogate cannot be
    except (SyntaxError, ValueError, TypeError):
        return None
    return written


def _escape(escape: re.Match[str]) -> str:
    """An escape or a line break in the form that Python's strings allow."""
    if escape[1] is None:
        return "\\n" if escape[0] == "\n" else "\\r"
    return escape[0] if escape[1] in _ESCAPED else f"\\{escape[0]}"
