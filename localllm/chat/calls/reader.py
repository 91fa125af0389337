"""Calls between two tags: one or several, in any of the formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import cache
from typing import Any, Literal

from localllm.chat.calls import patterns
from localllm.chat.calls.declaration import NestedArguments
from localllm.chat.calls.formats import ENDS, FORMATS, NAMED_TAG, TAGS, TAGS_IN_CALLS
from localllm.chat.calls.json_text import JSONReader, is_word, repaired
from localllm.chat.calls.python_call import read_python
from localllm.chat.calls.source import TOO_DEEP, Call, CallDelta, CallSource, MalformedError, Reading
from localllm.chat.calls.tagged import read_nested, read_tagged
from localllm.chat.conversation import ToolCall
from localllm.chat.thinking import n_open

_MARK = next(format_.arguments.mark for format_ in FORMATS.values() if isinstance(format_.arguments, NestedArguments))
#: A mark, or the start of one at the end of the text; its first character may also be the end of a list.
_PARTIAL_MARK = "|".join([re.escape(_MARK), *(rf"{re.escape(_MARK[:n])}\Z" for n in range(2, len(_MARK)))])
_BETWEEN = re.compile(rf"(?:(?!{_PARTIAL_MARK})[\s\[\]}},;]|{'|'.join(map(re.escape, ENDS))})*")
#: Control tokens that end a call, also if its JSON is not closed.
_CONTROL_ENDS = tuple(end for end in ENDS if end.startswith(("<|", "<｜")))
#: Unknown text of this length after an opening tag is no call; nor are so many spaces and brackets between calls.
_LONGEST_HEAD = 1000
_ARGUMENT_KEYS = ("arguments", "parameters")


class CallReader:
    """Reads the calls of one reply.

    Attributes:
        parameters: Schemas of the arguments, by tool name.
        warnings: Errors in calls.
        n_calls: Number of calls.
    """

    def __init__(
        self, source: CallSource, emit: Callable[[CallDelta | ToolCall], None], emit_text: Callable[[str], None]
    ) -> None:
        self.parameters: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.n_calls = 0
        self._undecided: list[str] = []  # text that was read and may be no call
        self._source, self._emit, self._emit_text = source, emit, emit_text
        self._call: Call | None = None

    @property
    def held(self) -> str:
        """Text that was read and may be no call."""
        return "".join(self._undecided)

    def read(self, opening: str) -> Reading:
        """Read calls after an opening tag, and the tag that closes them. Text that is no call is answer text."""
        n_before, closing = self.n_calls, TAGS.get(opening, "")
        opening_text = "" if opening in TAGS_IN_CALLS else opening
        self._undecided = [opening_text]
        try:
            while (head := (yield from self._next_call(closing, n_before))) is not None:
                if isinstance(head, re.Match):
                    yield from self._read_headed(head, closing)
                else:
                    yield from self._read_object(head, opening, closing)
        except MalformedError as error:
            if self._call is not None:
                self._call.problem = str(error)
                self._end()
            elif self.n_calls > n_before:
                self.warnings.append(f"the text after a tool call was left as text: {error}")
            else:
                if opening and not self._source.is_cut:
                    self.warnings.append(f"a tool call was left as text: {error}")
                self._emit_text(opening_text)
            if closing:
                yield from self._read_text_to(closing, emits_closing=self.n_calls == n_before)

    def _read_text_to(self, closing: str, *, emits_closing: bool) -> Reading:
        """Read text up to a closing tag, which is also read unless it opens the next call."""
        source = self._source
        while (at := source.text.find(closing, source.at)) < 0:
            n_held = 0 if source.is_whole else n_open(source.rest, (closing,))
            self._emit_text(source.take(len(source.text) - source.at - n_held))
            if not (yield from source.wait()):
                return
        self._emit_text(source.take(at - source.at))
        tag = "" if closing in TAGS else source.take(len(closing))
        self._emit_text(tag if emits_closing else "")

    def _next_call(self, closing: str, n_before: int) -> Generator[None, None, int | re.Match[str] | None]:
        """Return the start of the next call: the offset of a JSON object, or what precedes the arguments.

        None after the closing tag.
        """
        source, n_searched = self._source, 0
        has_call = self.n_calls > n_before
        while True:
            text = source.text
            between = _BETWEEN.match(text, source.at)
            assert between is not None
            at = between.end()
            closed = text.find(closing, source.at, at + len(closing)) if closing else -1
            if (at if closed < 0 else closed) - source.at > _LONGEST_HEAD:
                raise MalformedError("there is no call")
            if closed >= 0:
                if not has_call:
                    raise MalformedError("it is empty")
                source.at = closed + (0 if closing in TAGS else len(closing))
                return None
            if text.startswith("{", at):
                return at - source.at
            following = text[at : at + _LONGEST_HEAD]
            if not closing and at < len(text):
                head = patterns.BARE_HEAD.match(text, at)
                if head is not None and (not has_call or head["name"] in self.parameters):
                    return head
                is_partial = self.may_be_bare(following) or any(tag.startswith(following) for tag in (_MARK, *ENDS))
                if is_partial and (yield from source.wait()):
                    continue
                source.at = at
                return None
            found = patterns.head_patterns(at_end=source.is_whole and not source.is_cut)
            head = next(filter(None, (head.match(text, at) for head in found)), None) or self._name_alone(at)
            if head is not None:
                return head
            is_closing = has_call and any(tag.startswith(following) for tag in (closing, *ENDS))
            n_held = 0 if source.is_whole else n_open(text[max(source.at, len(text) - 50) :], tuple(TAGS))
            if len(following) == _LONGEST_HEAD or (
                closing and text.find(closing, source.at + n_searched, len(text) - n_held) >= 0
            ):
                raise MalformedError("it is written in no known way")
            n_searched = max(0, len(text) - source.at - max(len(closing), n_held))
            if not (yield from source.wait()):
                if not is_closing:
                    raise MalformedError("it is written in no known way")
                source.at = len(text)
                return None

    def may_be_bare(self, text: str) -> bool:
        """Whether text may be the start of a call of an offered tool without tags."""
        name = text.removeprefix("[").strip()
        return bool(patterns.PARTIAL_BARE.fullmatch(text)) and any(tool.startswith(name) for tool in self.parameters)

    def _name_alone(self, at: int) -> re.Match[str] | None:
        """A call that is only a name, before a tag or the end of the reply."""
        source = self._source
        if (alone := patterns.NAME_ALONE.match(source.text, at)) is not None:
            return alone
        alone = patterns.OFFERED_ALONE.match(source.text, at) if source.is_whole and not source.is_cut else None
        return alone if alone is not None and self.is_offered(alone["name"]) else None

    def is_offered(self, written_name: str) -> bool:
        return patterns.tool_name(written_name, self.parameters) in self.parameters

    def _begin(self, written_name: str) -> Call:
        name = patterns.tool_name(written_name, self.parameters)
        if name not in self.parameters:
            self.warnings.append(f"there is no tool {name!r:.80}, but the model calls it")
        self._call = call = Call(self.n_calls, name, self.parameters.get(name), self._emit)
        self.n_calls += 1
        self._undecided = []
        return call

    def _end(self) -> None:
        assert self._call is not None
        if self._call.is_empty and not self._source.is_cut:
            self._call.add("{}")
        if self._call.problem:
            self.warnings.append(f"a call of {self._call.name} is malformed: {self._call.problem}")
        self._call.end()
        self._call = None

    def _read_headed(self, head: re.Match[str], closing: str) -> Reading:
        """Read a call whose name precedes its arguments."""
        source = self._source
        source.at = head.end()
        call = self._begin(head["name"])
        if not head[0].endswith("/>"):
            source.skip_space()
            while source.is_empty and (yield from source.wait()):
                source.skip_space()
            if source.text.startswith("{", source.at):
                yield from self._read_arguments(call, JSONReader(), 0, closing)
            elif source.text.startswith("(", source.at):
                yield from read_python(source, call)
            elif head[0].startswith(_MARK):
                yield from read_nested(source, call, _MARK)
            else:
                yield from read_tagged(source, call, closing)
        self._end()

    def _read_object(self, offset: int, opening: str, closing: str) -> Reading:
        """Read a call that is a JSON object. Its arguments are emitted while they arrive if they follow its name."""
        source, reader = self._source, JSONReader()
        n_undecided, out = len(self._undecided), list[str]()
        self._undecided.append(source.take(offset))
        pattern = patterns.NAMED_HEAD if opening == NAMED_TAG else patterns.OBJECT_HEAD
        try:
            state, reader = yield from self._read_json(reader, out.append, closing, pause=2, is_undecided=True)
            if state == "paused":
                head = pattern.fullmatch("".join(out))
                if head is not None:
                    call = self._begin(json.loads(head["name"]))
                    call.add("{")
                    reader = yield from self._read_arguments(call, reader, 1, closing)
                    self._end()
                    yield from self._read_json(reader, lambda _: None, closing)
                    return
                state, reader = yield from self._read_json(reader, out.append, closing, is_undecided=True)
            if state == "cut":
                raise MalformedError("it ends early")
            if state == "open":
                out.append(reader.close())
            self._emit_object(_loaded("".join(out)), opening, TOO_DEEP if reader.is_too_deep else "")
        except MalformedError:
            source.put_back("".join(self._undecided[n_undecided:]))
            raise

    def _emit_object(self, value: dict[str, Any], opening: str, problem: str) -> None:
        """Emit a call whose JSON object is whole."""
        if isinstance(function := value.get("function"), dict):
            value = function
        name = value.get("name", value.get("tool_name", function))
        arguments = next((value[key] for key in _ARGUMENT_KEYS if key in value), None)
        if opening == NAMED_TAG and len(value) == 1 and not isinstance(name, str):
            ((name, arguments),) = value.items()
        is_offered = isinstance(name, str) and self.is_offered(name)
        if not isinstance(name, str) or (not opening and not is_offered and not isinstance(arguments, dict)):
            raise MalformedError("it has no name")
        call = self._begin(name)
        call.problem = problem
        if isinstance(arguments, str):
            written = repaired(arguments or "{}")
            arguments = arguments if written is None else _loaded(written.json)
            call.problem = TOO_DEEP if written is not None and written.is_too_deep else ""
        if arguments is None:  # some models write them next to the name
            arguments = {key: value[key] for key in call.types.names if key in value and value[key] != name}
        is_object = isinstance(arguments, dict)
        call.add(json.dumps(arguments if is_object else {"arguments": arguments}, ensure_ascii=False))
        if not is_object:
            call.problem = "its arguments are not a JSON object"
        self._end()

    def _read_arguments(
        self, call: Call, reader: JSONReader, depth: int, closing: str
    ) -> Generator[None, None, JSONReader]:
        """Read the arguments of a call as JSON, until brackets are closed down to a depth. Return the reader."""
        state, reader = yield from self._read_json(reader, call.add, closing, stop=depth)
        if state == "open":
            call.add(reader.close(depth))
            call.problem = "its arguments are not closed"
        if reader.is_too_deep:
            call.problem = TOO_DEEP
        return reader

    def _read_json(
        self,
        reader: JSONReader,
        add: Callable[[str], None],
        closing: str,
        *,
        stop: int = 0,
        pause: int = 0,
        is_undecided: bool = False,
    ) -> Generator[None, None, tuple[Literal["closed", "paused", "open", "cut"], JSONReader]]:
        """Read JSON and pass it on, until it is closed or paused (`JSONReader.read`) or ends before that.

        ``is_undecided``: whether the text may be no call.

        Return how it ends, and the reader, which is another one after a tag in a string.

        JSON after a closing tag in a string is withheld until the JSON is closed. If it has errors, the tag was no
        part of the string, and the JSON ends before the tag.
        """
        source, (tags, pattern) = self._source, _ends(closing)
        before_tag: JSONReader | None = None  # the reader before a tag in a string
        withheld, text_after_tag = list[str](), list[str]()
        while True:
            text = source.text
            tag = pattern.search(text, source.at) if before_tag is None else None
            end = len(text) if tag is None else tag.start()
            is_whole = tag is not None or (source.is_whole and not source.is_cut)
            if before_tag is None and not is_whole:
                end -= n_open(text[max(source.at, end - 50) :], tags)
            out, at = reader.read(text, source.at, end, stop=stop, pause=pause, is_whole=is_whole)
            consumed = source.take(at - source.at)
            if is_undecided:
                self._undecided.append(consumed)
            is_paused = bool(pause) and reader.depth == pause and out.endswith(("{", "["))
            if before_tag is None:
                add(out)
                if reader.has_closed or is_paused:
                    return "closed" if reader.has_closed else "paused", reader
            else:
                withheld.append(out)
                text_after_tag.append(consumed)
                if reader.n_repairs > before_tag.n_repairs:
                    break
                if reader.has_closed:
                    add("".join(withheld))
                    return "closed", reader
            if tag is not None:
                if not reader.quote:
                    break
                before_tag, reader = reader, reader.fork()
                reader.is_strict = True
                continue
            if is_paused or (yield from source.wait()):
                continue
            if source.is_cut:
                add("".join(withheld) + reader.cut(source.take(len(source.rest))))
                return "cut", reader
            break
        if before_tag is not None:
            source.put_back("".join(text_after_tag))
            if is_undecided:
                del self._undecided[len(self._undecided) - len(text_after_tag) :]
        return "open", before_tag or reader


def _loaded(text: str) -> Any:
    """Parse valid JSON; numbers outside Python's range become strings."""
    return json.loads(
        text,
        parse_int=lambda digits: int(digits) if is_word(digits) else digits,
        parse_float=lambda digits: float(digits) if is_word(digits) else digits,
    )


@cache
def _ends(closing: str) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Tags that end JSON, and their pattern."""
    tags = tuple(dict.fromkeys(tag for tag in (closing, *_CONTROL_ENDS) if tag))
    return tags, re.compile("|".join(map(re.escape, tags)))
