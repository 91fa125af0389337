"""Arguments between tags."""

from __future__ import annotations

import json
import re
from functools import cache

from localllm.chat.calls.formats import BEGINNINGS, ENDS, TAGGED, TAGS
from localllm.chat.calls.json_text import PARTIAL_WORD, repaired
from localllm.chat.calls.patterns import head_patterns, key_patterns
from localllm.chat.calls.source import TOO_DEEP, Call, CallSource, MalformedError, Reading
from localllm.chat.thinking import n_open
from localllm.nesting import MAX_CALL_NESTING

_CDATA = "<![CDATA[", "]]>"
_ENDS_OF_CALLS = tuple(end for end in ENDS if end.startswith("</"))
#: Length of the longest tag with a name.
_LONGEST_TAG = 400


# -- One pair of tags per argument ---------------------------------------------------------------------------------


def read_tagged(source: CallSource, call: Call, closing: str) -> Reading:
    """Read arguments between tags, up to the tag that ends the call."""
    names: set[str] = set()
    ends = (closing, "]", *ENDS, *BEGINNINGS, *TAGS)
    while True:
        source.skip_space()
        text, at = source.text, source.at
        tag = next((tag for tag, key in key_patterns().items() if key.match(text, at)), "")
        if tag:
            yield from _Value(source, call, tag, closing, names).read()
            continue
        if text.startswith(ends, at):
            break
        may_continue = any(
            tag_start.startswith(text[at : at + len(tag_start)]) for tag_start in (*key_patterns(), *ends)
        )
        if may_continue and len(text) - at < _LONGEST_TAG and (yield from source.wait()):
            continue
        if source.is_cut and may_continue:
            source.take(len(text) - at)
            return
        if source.is_empty:
            break
        call.close_object()
        raise MalformedError("its arguments are written in no known way")
    call.close_object()


@cache
def _marks(tag: str, closing: str) -> re.Pattern[str]:
    """Pattern of the tags that may end a value."""
    return re.compile(
        rf"(?P<end>{re.escape(TAGGED[tag].end.strip()[:-1])} ?>)|(?P<key>{re.escape(tag)})"
        rf"|(?P<closing>{re.escape(closing or '(?!)')})|(?P<call_end>{'|'.join(map(re.escape, _ENDS_OF_CALLS))})"
        rf"|(?P<opening>{'|'.join(map(re.escape, TAGS))})"
    )


class _Value:
    """A value between tags. A string is emitted while it arrives.

    A value may contain the tags that end values and calls, and its own end may be missing. So a tag ends the value if
    what follows confirms it; the other tags end it only if no such tag comes (`_tentative`).
    """

    def __init__(self, source: CallSource, call: Call, tag: str, closing: str, names: set[str]) -> None:
        key = key_patterns()[tag].match(source.text, source.at)
        assert key is not None
        source.take(len(key[0]))
        self._source, self._call, self._tag = source, call, tag
        self._closing = "" if closing in TAGS else closing
        self._name, self._arguments = key["key"].strip(), TAGGED[tag]
        names.add(self._name)
        self._names = names
        is_string = re.search(r"""\bstring\s*=\s*["']?(true|false)""", key["attributes"])
        self._types = call.types.of(self._name)
        self._is_string = None if is_string is None else is_string[1] == "true"
        if self._types and self._types <= {"string", "null"}:
            self._is_string = self._is_string or None  # the schema decides
        self._parts: list[str] = []  # certain characters that were not emitted
        self._is_emitted = self._is_on_lines = False
        self._tentative: tuple[int, int] | None = None  # offset and length of an end that nothing has confirmed
        self._marks = _marks(tag, self._closing)
        self._tags = (
            tag,
            f"{self._arguments.end.strip()[:-1]} >",
            self._arguments.end.strip(),
            self._closing,
            *_ENDS_OF_CALLS,
            *TAGS,
        )

    def read(self) -> Reading:
        source, n = self._source, 0  # characters from the position on that contain no end
        yield from self._start()
        while True:
            mark = self._marks.search(source.text, source.at + n)
            start = mark.start() if mark is not None else len(source.text) - self._n_open()
            n = start - source.at
            if self._tentative is None:
                has_break = start > source.at and source.text[start - 1] == "\n"
                n -= self._add(n - has_break)
            verdict = False if mark is None else self._verdict(mark)
            if mark is None or verdict is None:
                if (yield from source.wait()):
                    continue
                if mark is None:
                    break
                verdict = mark.lastgroup == "end"
            end = n, len(mark[0]) if mark.lastgroup == "end" else 0
            if verdict:
                self._end(*(self._tentative if mark.lastgroup == "opening" and self._tentative else end))
                return
            if self._tentative is None and mark.lastgroup in ("end", "closing", "call_end"):
                self._tentative = end
            n += len(mark[0])
        if self._tentative is not None:
            self._end(*self._tentative)
        elif source.is_cut:
            self._cut()
        else:
            self._end(len(source.rest), 0)
            self._call.problem = "a value is not closed"

    def _start(self) -> Reading:
        """Read the line break before a value. Start to emit the value if it is a string.

        A line break after the value belongs to the tags only if a line break also precedes the value: otherwise files
        whose text ends with a line break would lose it.
        """
        source = self._source
        start = "\n" + _CDATA[0]
        while start.startswith(source.rest) or _CDATA[0].startswith(source.rest):
            if not (yield from source.wait()):
                break
        self._is_on_lines = self._arguments.has_line_breaks and source.rest.startswith("\n")
        source.take(self._is_on_lines)
        may_be_null = "null" in self._types and self._is_string is None
        is_string = self._is_string or (self._is_string is None and "string" in self._types)
        self._is_emitted = is_string and not may_be_null and not source.rest.startswith(_CDATA[0])
        if self._is_emitted:
            self._call.add_value(self._name, '"')

    def _n_open(self) -> int:
        """Number of characters at the end of the text that may be the start of a tag."""
        text = self._source.text
        if self._source.is_whole and not self._source.is_cut:
            return 0
        return n_open(text[max(self._source.at, len(text) - _LONGEST_TAG) :], self._tags)

    def _add(self, n: int) -> int:
        text = self._source.take(n)
        if self._is_emitted:
            self._call.add(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._parts.append(text)
        return n

    def _end(self, n: int, n_tag: int) -> None:
        """End the value after ``n`` more characters, before a tag of ``n_tag`` characters."""
        has_break = self._is_on_lines and self._source.rest[:n].endswith("\n")
        self._add(n - has_break)
        self._source.take(has_break + n_tag)
        if self._is_emitted:
            self._call.add('"')
            return
        value = "".join(self._parts)
        if value.startswith(_CDATA[0]) and value.endswith(_CDATA[1]):
            value = value[len(_CDATA[0]) : -len(_CDATA[1])]
        self._call.add_value(self._name, self._call.value_json(value, self._name, is_string=self._is_string))

    def _cut(self) -> None:
        """Emit the start of a value that was cut off."""
        text = self._source.take(len(self._source.rest))
        text = text[: len(text) - n_open(text, self._tags)].removesuffix("\n")
        if self._is_emitted:
            self._call.add(json.dumps(text, ensure_ascii=False)[1:-1])
            return
        value = ("".join(self._parts) + text).removeprefix(_CDATA[0])
        is_string = self._is_string or (self._is_string is None and "string" in self._types)
        if is_string or not (PARTIAL_WORD.fullmatch(value) or repaired(value, max_repairs=1)):
            value = json.dumps(value, ensure_ascii=False)[:-1]
        self._call.add_value(self._name, value)

    def _verdict(self, mark: re.Match[str]) -> bool | None:
        """Whether the value ends at a tag, or before an opening tag at the tentative end; None to wait for text."""
        text, following = self._source.text, self._source.text[mark.end() : mark.end() + 2 * _LONGEST_TAG]
        if mark.lastgroup == "end":
            return _any_begins(following, _confirming(self._tag, self._closing))
        if mark.lastgroup == "call_end":
            return _any_begins(following, tuple((beginning,) for beginning in BEGINNINGS))
        if mark.lastgroup == "key":
            key = key_patterns()[self._tag].match(text, mark.start(), mark.end() + _LONGEST_TAG)
            if key is None:
                last_tag = ">" if "=" in self._arguments.begin else self._arguments.begin.strip().rpartition("<")[2]
                return None if len(following) < _LONGEST_TAG and last_tag not in following else False
            name, names = key["key"].strip(), self._call.types.names
            is_possible = name in names if names else text[mark.start() - 1 : mark.start()] == "\n"
            return is_possible and name not in self._names
        if mark.lastgroup == "opening" and self._tentative is not None:
            if any(head.match(following.lstrip()) for head in head_patterns()):
                return True
            return None if len(following) < _LONGEST_TAG and not self._source.is_whole else False
        return False


@cache
def _confirming(tag: str, closing: str) -> tuple[tuple[str, ...], ...]:
    """Sequences of tags that confirm the end of a value before them."""
    after_call = (*BEGINNINGS, *((closing,) if closing else ()))
    ends = [(end, then) for end in _ENDS_OF_CALLS for then in after_call]
    return ((tag,), *((after,) for after in (*after_call, *TAGS)), *ends)


def _any_begins(text: str, sequences: tuple[tuple[str, ...], ...]) -> bool | None:
    """Whether text starts with one of the sequences of tags; None if more text is needed."""
    results = {_begins(text, tags) for tags in sequences}
    return True if True in results else None if None in results else False


def _begins(text: str, tags: tuple[str, ...]) -> bool | None:
    for tag in tags:
        text = text.lstrip()
        if not text.startswith(tag):
            return None if tag.startswith(text) else False
        text = text[len(tag) :]
    return True


# -- Tags for each part of an argument -----------------------------------------------------------------------------


class _Part:
    """An argument or a part of one, between its tags."""

    def __init__(self, name: str, path: tuple[str, ...]) -> None:
        self.name, self.path = name, path
        self.text: list[str] = []
        self.parts: list[tuple[str, str]] = []  # names and JSON


def read_nested(source: CallSource, call: Call, mark: str) -> Reading:
    """Read arguments between tags with a mark, whose parts are between such tags, too."""
    tag_pattern = re.compile(rf"{re.escape(mark)}<(?P<closes>/?)(?P<name>[^<>]{{1,256}}+)>")
    open_parts: list[_Part] = []
    n_ignored = 0
    while True:
        start = source.text.find(mark + "<", source.at)
        end = start if start >= 0 else len(source.text) - n_open(source.text[source.at :], mark + "<")
        text = source.take(end - source.at)
        if open_parts:
            open_parts[-1].text.append(text)
        elif text.strip():
            source.put_back(text)
            break
        tag = tag_pattern.match(source.text, source.at) if start >= 0 else None
        if tag is None:
            is_no_tag = start >= 0 and len(source.rest) > _LONGEST_TAG
            if is_no_tag and open_parts:
                open_parts[-1].text.append(source.take(len(mark)))
                continue
            if not is_no_tag and (yield from source.wait()):
                continue
            if not is_no_tag and source.is_cut:
                source.take(len(source.rest))
                return
            call.problem = call.problem or "its arguments are not closed"
            break
        name, closes = tag["name"], bool(tag["closes"])
        is_open = name in (part.name for part in open_parts)
        if name.startswith("invoke name=") or (closes and name in ("invoke", "tool_call") and not is_open):
            break
        source.take(len(tag[0]))
        if not closes and len(open_parts) == MAX_CALL_NESTING:
            n_ignored += 1
            call.problem = TOO_DEEP
        elif not closes:
            open_parts.append(_Part(name, (*(open_parts[-1].path if open_parts else ()), name)))
        elif n_ignored:
            n_ignored -= 1
        elif is_open:
            while _close_part(call, open_parts) != name:
                pass
        elif open_parts and not open_parts[-1].parts:  # the name of the opening tag was not repeated correctly
            _close_part(call, open_parts)
    while open_parts:
        _close_part(call, open_parts)
    call.close_object()


def _close_part(call: Call, open_parts: list[_Part]) -> str:
    """Close the innermost part. Return its name."""
    part = open_parts.pop()
    value = _part_json(part, call)
    if open_parts:
        open_parts[-1].parts.append((part.name, value))
    else:
        call.add_value(part.name, value)
    return part.name


def _part_json(part: _Part, call: Call) -> str:
    types = call.types.of(*part.path)
    if part.parts:
        if "array" in types or ("object" not in types and all(name == "item" for name, _ in part.parts)):
            return f"[{', '.join(value for _, value in part.parts)}]"
        values = dict(part.parts)  # of a name that was written twice, the last value
        items = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values.items())
        return f"{{{', '.join(items)}}}"
    text = "".join(part.text)
    if not text and "string" not in types and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    return call.value_json(text, *part.path)
