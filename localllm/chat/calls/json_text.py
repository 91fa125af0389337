"""JSON as models write it, converted to valid JSON while it arrives."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from typing import NamedTuple, Self

from localllm.chat.thinking import n_open
from localllm.nesting import MAX_CALL_NESTING

#: Quotation marks of Gemma 4: control tokens that no text contains.
TOKEN_QUOTE = '<|"|>'

#: Python's names for JSON's words.
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
#: The start of such a word.
PARTIAL_WORD = re.compile(r"t|tr|tru|true|f|fa|fal|fals|false|n|nu|nul|null|-?\d*\.?\d*(?:[eE][+-]?\d*)?", re.ASCII)

_SPACE = re.compile(r"\s*")
#: White space that JSON does not allow between its tokens.
_OTHER_SPACE = re.compile(r"[^\S \n\r\t]")
#: White space after a quotation mark or a value, by which it is certain that they have ended.
_LONGEST_SPACE = 1000
#: Characters of a string up to its end or an escape, by quotation mark.
_CHARACTERS = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
#: An escape; surrogates come in pairs.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|u(?P<code>[\da-fA-F]{4})|(?P<other>.))",
    re.ASCII | re.DOTALL,
)
#: Length of the longest escape.
_LONGEST_ESCAPE = 12
#: A key without quotation marks; a longer one is split.
_LONGEST_BARE_KEY = 256
_BARE_KEY = re.compile(rf"""[^\s{{}}\[\]:,"'<=]{{1,{_LONGEST_BARE_KEY}}}+""")
#: A key and its colon; the start of one. Longer ones are not recognized after a missing comma.
_KEY = re.compile(r"""(?:"[^"\\]{0,80}"|'[^'\\]{0,80}'|<\|"\|>[^<]{0,80}<\|"\|>|[\w$.-]{1,80})\s{0,20}:""")
_PARTIAL_KEY = re.compile(
    r"""(?:"[^"\\]{0,80}(?:"\s{0,20})?|'[^'\\]{0,80}(?:'\s{0,20})?"""
    r"""|<(?:\|(?:"(?:\|(?:>[^<]{0,80}(?:<(?:\|(?:"(?:\|(?:>\s{0,20})?)?)?)?)?)?)?)?)?|[\w$.-]{1,80}\s{0,20})\Z"""
)
#: Characters that may end a value without quotation marks.
_BARE_VALUE_END = {"}": re.compile(r"[,}\n]"), "]": re.compile(r"[,\]\n]"), "": re.compile(r"\Z")}
_BARE_WORD = re.compile(r"[\w.+-]{1,100}+(?=\s{0,20}[,}\]\n])")


def is_word(text: str) -> bool:
    """Return whether a text is a word or number of JSON. A number beyond float64 is none."""
    return bool(_WORD.fullmatch(text)) and (text[0] in "tfn" or math.isfinite(float(text)))


def json_word(text: str) -> str:
    """Return the JSON of a word of JSON or Python, or of a number; empty for other text.

    A number with a fraction or an exponent that is larger than float64 becomes the largest float64. Grammars allow
    such numbers, and the tool's schema may not allow a string.
    """
    word = PYTHON_WORDS.get(text, text)
    if is_word(word):
        return word
    is_large = _WORD.fullmatch(word) is not None and not word.removeprefix("-").isdigit()
    return repr(math.copysign(sys.float_info.max, float(word))) if is_large else ""


class JSONReader:
    """Converts JSON while it arrives, and repairs what models get wrong.

    Strings and keys may lack quotation marks or have Python's or Gemma's. Strings may contain control characters and
    quotation marks. Commas may be missing or superfluous. Words may be Python's. Brackets may be missing.

    Attributes:
        n_repairs: Number of repaired errors. Other quotation marks and words are no errors.
        is_strict: Whether a quotation mark always ends a string.
        is_too_deep: Whether a part was replaced by null because of ``max_depth``.
        has_closed: Whether the last read ended at the depth that it was to stop at.
        quote: The end of the string that is being read; empty outside of strings.
    """

    def __init__(self, max_depth: int = MAX_CALL_NESTING) -> None:
        """``max_depth``: lists and objects inside each other; deeper ones become null."""
        self._max_depth = max_depth
        self.n_repairs = 0
        self.is_strict = self.is_too_deep = self.has_closed = False
        self.quote = ""
        self._open: list[str] = []  # closing brackets of the open lists and objects
        self._expects = "value"  # the next token: "value", "key", ":" or ","
        self._is_key = False  # whether the string is a key
        self._separator = ""  # a comma and white space that belong before the next item
        self._n_scanned = 0  # characters of a value without quotation marks that contain no end

    @property
    def depth(self) -> int:
        """Open lists and objects."""
        return len(self._open)

    def fork(self) -> Self:
        """Return a copy that reads on independently."""
        reader = copy.copy(self)
        reader._open = self._open.copy()
        return reader

    def read(self, text: str, at: int, end: int, *, stop: int = 0, pause: int = 0, is_whole: bool) -> tuple[str, int]:
        """Return the certain part of the JSON of ``text[at:end]``, and the position after it.

        Args:
            stop: Depth to stop at when brackets are closed.
            pause: Depth to stop at when brackets are opened.
            is_whole: Whether nothing follows ``end``.
        """
        out: list[str] = []
        self.has_closed = False
        while at < end and not self.has_closed:
            depth = self.depth
            piece, n = self._string(text, at, end, is_whole) if self.quote else self._token(text, at, end, is_whole)
            if not n:
                break
            if depth <= self._max_depth:
                out.append(piece)
            at += n
            self._n_scanned = 0
            self.has_closed = self.depth <= stop and self.depth < depth
            if self.depth == pause > depth:
                break
        return "".join(out), at

    def close(self, depth: int = 0) -> str:
        """Return the end of JSON that was not closed, down to a depth."""
        if len(self._open) > self._max_depth:
            return "".join(reversed(self._open[depth : self._max_depth]))
        string_end = '"' if self.quote else ""
        if self.quote:
            self.quote, self._expects = "", ":" if self._is_key else ","
        return string_end + self._missing_value() + "".join(reversed(self._open[depth:]))

    def cut(self, text: str) -> str:
        """Return the JSON of the characters after the last certain one, for a reply that was cut off there."""
        if self.depth > self._max_depth or TOKEN_QUOTE.startswith(text):
            return ""
        if self.quote:
            return '"' if text.startswith(self.quote) else text
        if self._expects == "key" and _BARE_KEY.match(text):
            return self._separator + json.dumps(text, ensure_ascii=False)[:-1]
        if self._expects != "value" or not text.strip():
            return ""
        word = PYTHON_WORDS.get(text, text)
        return self._separator + (word if PARTIAL_WORD.fullmatch(word) else json.dumps(text, ensure_ascii=False)[:-1])

    @property
    def _bracket(self) -> str:
        """The closing bracket of the innermost list or object."""
        return self._open[-1] if self._open else ""

    def _missing_value(self) -> str:
        """The missing value of a key."""
        if self._expects == ":":
            return ": null"
        return "null" if self._expects == "value" and self._bracket == "}" else ""

    def _next_item(self) -> str:
        """The text between the last item and the next one; inserts a comma or colon that is missing."""
        separator, self._separator = self._separator, ""
        if self._expects not in ",:":
            return separator
        self.n_repairs += 1
        separator = ", " if self._expects == "," else ": "
        self._expects = "key" if self._expects == "," and self._bracket == "}" else "value"
        return separator

    # -- Strings ---------------------------------------------------------------------------------------------------

    def _string(self, text: str, at: int, end: int, is_whole: bool) -> tuple[str, int]:
        """The next piece of a string, and its length in the text; 0 if more text is needed."""
        if text.startswith(self.quote, at, end):
            n, ends = len(self.quote), self._ends_string(text, at + len(self.quote), end, is_whole)
            if ends is None:
                return "", 0
            if not ends:
                self.n_repairs += 1
                return json.dumps(self.quote)[1:-1], n
            self.quote, self._expects = "", ":" if self._is_key else ","
            return '"', n
        if self.quote == TOKEN_QUOTE:
            stop = text.find(TOKEN_QUOTE, at, end)
            if stop < 0:
                stop = end - (0 if is_whole else n_open(text[max(at, end - len(TOKEN_QUOTE)) : end], TOKEN_QUOTE))
        elif text[at] == "\\":
            is_partial = end - at < _LONGEST_ESCAPE and not is_whole and self._is_partial_escape(text[at:end])
            return ("", 0) if is_partial else self._escape(text, at, end)
        else:
            characters = _CHARACTERS[self.quote].match(text, at, end)
            stop = at if characters is None else characters.end()
        return json.dumps(text[at:stop], ensure_ascii=False)[1:-1], stop - at

    @staticmethod
    def _is_partial_escape(text: str) -> bool:
        """Whether an escape continues after the text."""
        if text[1:2] not in ("", "u"):
            return False
        digits = text[2:6]
        if len(digits) < 4:
            return re.fullmatch(r"[\da-fA-F]*", digits) is not None
        is_high = digits[0] in "dD" and digits[1] in "89abAB"
        return is_high and re.fullmatch(r"(?:\\(?:u(?:[dD](?:[c-fC-F][\da-fA-F]?)?)?)?)?", text[6:]) is not None

    def _escape(self, text: str, at: int, end: int) -> tuple[str, int]:
        escape = _ESCAPE.match(text, at, end)
        if escape is None:  # the last character of the text
            self.n_repairs += 1
            return "\\\\", 1
        character, code = escape["other"], escape["code"]
        if code is not None and 0xD800 <= int(code, 16) <= 0xDFFF:
            self.n_repairs += 1
            return "\\ufffd", len(escape[0])
        if character is None or character in '"\\/bfnrt':
            return escape[0], len(escape[0])
        self.n_repairs += character != "'"
        return json.dumps(character if character == "'" else escape[0], ensure_ascii=False)[1:-1], len(escape[0])

    def _ends_string(self, text: str, at: int, end: int, is_whole: bool) -> bool | None:
        """Whether a quotation mark before ``at`` ends a string; None if more text is needed."""
        if self.is_strict or self.quote == TOKEN_QUOTE:
            return True
        start, at = at, _space_end(text, at, end)
        if at == end or at - start >= _LONGEST_SPACE:
            return True if is_whole or at - start >= _LONGEST_SPACE else None
        if self._is_key:
            return text[at] in ":,}="
        if text[at] == "," and self._bracket == "}":
            start, at = at + 1, _space_end(text, at + 1, end)
            if at == end or at - start >= _LONGEST_SPACE:
                return True if is_whole or at - start >= _LONGEST_SPACE else None
            return text[at] in "\"'<}" or self._is_key_at(text, at, end, is_whole)
        if text[at] in "}],":
            return True
        if "```".startswith(text[at : min(end, at + 3)]):  # the end of a code block
            return None if end - at < 3 and not is_whole else True
        if self._bracket == "}":
            return self._is_key_at(text, at, end, is_whole)
        return text[at] in "\"'"

    @staticmethod
    def _is_key_at(text: str, at: int, end: int, is_whole: bool) -> bool | None:
        """Whether a key and its colon follow; None if more text is needed."""
        if _KEY.match(text, at, end):
            return True
        return None if not is_whole and _PARTIAL_KEY.match(text, at, end) else False

    # -- Tokens ----------------------------------------------------------------------------------------------------

    def _token(self, text: str, at: int, end: int, is_whole: bool) -> tuple[str, int]:
        """The JSON of a token outside of strings, and its length in the text; 0 if more text is needed."""
        character = text[at]
        if character.isspace():
            space = _OTHER_SPACE.sub(" ", text[at : _space_end(text, at, end)])
            if self._separator:
                self._separator += space
            return "" if self._separator else space, len(space)
        if character in "{[":
            return self._opened(character), 1
        if character in "}]":
            return self._closed(character), 1
        if character == ",":
            return self._comma(), 1
        if character == ":" or (character == "=" and self._expects == ":"):
            is_expected = self._expects == ":"
            self.n_repairs += character == "=" or not is_expected
            self._expects = "value" if is_expected else self._expects
            return ":" if is_expected else "", 1
        quote = next((quote for quote in ('"', "'", TOKEN_QUOTE) if text.startswith(quote, at, end)), "")
        if quote:
            out = self._next_item()
            self.quote, self._is_key = quote, self._expects == "key"
            return out + '"', len(quote)
        if TOKEN_QUOTE.startswith(text[at:end]) and not is_whole:
            return "", 0
        if self._expects == "," and self._bracket == "}":
            is_key = self._is_key_at(text, at, end, is_whole)
            if not is_key:
                self.n_repairs += is_key is not None
                return "", 0 if is_key is None else 1
        elif self._expects != "key":
            return self._bare_value(text, at, end, is_whole)
        return self._bare_key(text, at, end, is_whole)

    def _opened(self, bracket: str) -> str:
        if self._expects == "key" or (self._expects == "," and self._bracket == "}"):
            self.n_repairs += 1
            return ""
        out = self._next_item()
        self._open.append("}" if bracket == "{" else "]")
        self._expects = "key" if bracket == "{" else "value"
        if self.depth <= self._max_depth:
            return out + bracket
        self.is_too_deep = True
        return out + "null"

    def _closed(self, bracket: str) -> str:
        if bracket not in self._open:
            self.n_repairs += 1
            return ""
        out = self._missing_value()
        self.n_repairs += bool(out or self._separator) + (bracket != self._bracket)
        self._separator = ""
        while self._open:
            last = self._open.pop()
            out += last
            if last == bracket:
                break
        self._expects = ","
        return out

    def _comma(self) -> str:
        is_first_item = self._expects == "value" and self._bracket == "]"
        if self._separator or not self._open or self._expects == "key" or is_first_item:
            self.n_repairs += 1  # it follows no item
            return ""
        out = self._missing_value()
        self.n_repairs += bool(out)
        self._separator, self._expects = ",", "key" if self._bracket == "}" else "value"
        return out

    def _bare_key(self, text: str, at: int, end: int, is_whole: bool) -> tuple[str, int]:
        key = _BARE_KEY.match(text, at, end)
        if key is None:
            self.n_repairs += 1
            return "", 1
        if key.end() == end and len(key[0]) < _LONGEST_BARE_KEY and not is_whole:
            return "", 0
        out = self._next_item()
        self._expects = ":"
        return out + json.dumps(key[0], ensure_ascii=False), len(key[0])

    def _bare_value(self, text: str, at: int, end: int, is_whole: bool) -> tuple[str, int]:
        """A number or word, or a string without quotation marks, which a comma ends only before the next key."""
        word = _BARE_WORD.match(text, at, end)
        if word is not None and json_word(word[0]):
            value_end: int | None = word.end()
        else:
            value_end = self._bare_value_end(text, at, end, is_whole)
        if value_end is None:
            return "", 0
        value = text[at:value_end].rstrip()
        out = self._next_item()
        self._expects = ","
        if written := json_word(value):
            return out + written, value_end - at
        self.n_repairs += 1
        return out + json.dumps(value, ensure_ascii=False), value_end - at

    def _bare_value_end(self, text: str, at: int, end: int, is_whole: bool) -> int | None:
        for mark in _BARE_VALUE_END[self._bracket].finditer(text, at + self._n_scanned, end):
            if mark[0] in "}]" or (mark[0] == "," and self._bracket == "]"):
                return mark.start()
            position = _space_end(text, mark.end(), end)
            if position - mark.end() >= _LONGEST_SPACE:
                return mark.start()
            is_end = text[position : position + 1] in ("}", "]", '"', "'") if position < end else is_whole or None
            is_end = is_end or (self._is_key_at(text, position, end, is_whole) if position < end else is_end)
            if is_end is None:
                self._n_scanned = mark.start() - at
                return None
            if is_end:
                return mark.start()
        self._n_scanned = end - at
        return end if is_whole else None


def _space_end(text: str, at: int, end: int) -> int:
    space = _SPACE.match(text, at, end)
    assert space is not None
    return space.end()


class Repaired(NamedTuple):
    """JSON of a list or object."""

    json: str
    is_too_deep: bool


def repaired(text: str, *, max_repairs: int | None = None, max_depth: int = MAX_CALL_NESTING) -> Repaired | None:
    """Return the JSON of a list or object, with errors repaired; None if it is none or has more errors."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return None
    reader = JSONReader(max_depth)
    out, end = reader.read(text, 0, len(text), is_whole=True)
    if end < len(text) or (max_repairs is not None and reader.n_repairs + (not reader.has_closed) > max_repairs):
        return None
    return Repaired(out if reader.has_closed else out + reader.close(), reader.is_too_deep)
