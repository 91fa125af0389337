"""Takes a reply apart while it streams in: what the model thinks, what it says, and which tools it calls.

A call begins when its tool is known, and its arguments come as the model writes them: JSON as it is, values between
tags one after the other.  What is not a call, or of a tool that nobody offered, is text like any other; where a call
goes wrong after it has begun, it ends there, its arguments incomplete, and the rest is text.  Both are a warning: a
turn never fails for it, and nothing is lost.

Models write calls in many ways, which no two use for different things: so all of them are read, whatever the model.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from localllm.chat.conversation import ToolCall
from localllm.chat.thinking import CALL, END_OF_CALL, Piece, ThinkingSplitter, n_open, opening_tag
from localllm.nesting import MAX_CALL_NESTING, NestingError, check_expression, check_values, parse_json
from localllm.tokenizer import Tokenizer

#: What MiniMax M3 writes in front of its tags.
_MARK = "]<]minimax[>["

#: What stands around calls, opening and closing; where nothing closes them, the next opening or the reply's end does.
_TAGS_AROUND_CALLS = {
    "<tool_call>": "</tool_call>",  # Hermes, Qwen, GLM, Nemotron 3
    "<TOOLCALL>": "</TOOLCALL>",  # Nemotron 2
    "<tool_calls>": "</tool_calls>",  # MiniMax M1, Hunyuan A13B, Jamba, Apriel
    "<function_calls>": "</function_calls>",  # OLMo 3
    "<minimax:tool_call>": "</minimax:tool_call>",  # MiniMax M2
    f"{_MARK}<tool_call>": f"{_MARK}</tool_call>",  # MiniMax M3
    "<|tool_call>": "<tool_call|>",  # Gemma 4
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",  # DeepSeek to V3.1
    "<｜DSML｜function_calls>": "</｜DSML｜function_calls>",  # DeepSeek V3.2
    "<｜DSML｜tool_calls>": "</｜DSML｜tool_calls>",  # DeepSeek V4
    "<tool_calls:opensource>": "</tool_calls:opensource>",  # Hunyuan 3
    "<atem:function_calls>": "</atem:function_calls>",  # Muse Glimmer
    "<seed:tool_call>": "</seed:tool_call>",
    "<|START_ACTION|>": "<|END_ACTION|>",  # Command R7B and A, North
    "<|tools_prefix|>": "<|tools_suffix|>",  # Apertus
    "<|tool_call_start|>": "<|tool_call_end|>",  # LFM2, MiniCPM 3
    "<|tool_call|>": "<|/tool_call|>",  # Phi 4 mini, and without an end Granite 3
    "<|action_start|><|plugin|>": "<|action_end|>",  # InternLM 2.5
    "Action:\n```json\n": "```",  # Command R and R+
    "Action: ```json\n": "```",
    "functools[": "functools[",  # FireFunction
    "<|message_sep|>\n\nfunction call<|role_sep|>\n": "<|message_sep|>",  # GigaChat 3 of 2025
    "<|tool_calls|>": "<|calls|>",  # Solar
    "<|function_call|>": "<|function_call|>",  # GigaChat 3
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",  # Kimi
    "[TOOL_CALLS]": "[TOOL_CALLS]",  # Mistral
    "<|python_tag|>": "<|python_tag|>",  # Llama 3
}

#: The same where these are part of the call.
_TAGS_IN_CALLS = {"<function=": "</function>", "<function name=": "</function>", CALL: END_OF_CALL}

_CLOSING = {**_TAGS_AROUND_CALLS, **_TAGS_IN_CALLS}
_OPENING = re.compile("|".join(map(re.escape, _CLOSING)))
_LONGEST_OPENING, _OPENING_CHARACTERS = max(map(len, _CLOSING)), {opening[0] for opening in _CLOSING}

#: What ends calls of MiniMax M3.
_MARKED_END = f"{_MARK}</invoke>"
#: What ends calls whose arguments are between tags, and what begins the next one.
_TAGGED_ENDS = ("</function>", "</invoke>", "</｜DSML｜invoke>", "</atem:invoke>", "</tool_call:opensource>")
_TAGGED_BEGINNINGS = (
    *("<function=", "<function name=", "<invoke ", "<｜DSML｜invoke ", "<atem:invoke ", "<tool_call:opensource>"),
)
#: What may end a call, and stand between calls.
_ENDS = (
    *_TAGGED_ENDS,
    _MARKED_END,
    "```python",
    "```",
    "<|tool_call:end|>",
    "<｜tool▁call▁end｜>",
    "<|tool_call_end|>",
    END_OF_CALL,
)
#: A mark, or the beginning of one at the end of the text.
_MAY_BE_MARK = "|".join([re.escape(_MARK), *(rf"{re.escape(_MARK[:n])}\Z" for n in range(2, len(_MARK)))])
_BETWEEN = re.compile(rf"(?:(?!{_MAY_BE_MARK})[\s\[\]}},;]|{'|'.join(map(re.escape, _ENDS))})*")
_SPACE = re.compile(r"\s*")

#: What stands before the arguments of calls that are not JSON; names are bounded, for texts are looked at often.
_HEADS = [
    re.compile(pattern)
    for pattern in (
        r"<function=(?P<name>[^>\s]{1,256}+)>",
        r'<(?:｜DSML｜|atem:)?(?:invoke|function) name="(?P<name>[^">]{1,256}+)">',
        rf'{re.escape(_MARK)}<invoke name="(?P<name>[^">]{{1,256}}+)">',
        r"<tool_call:opensource>(?P<name>[^\s<]{1,256}+)<tool_sep:opensource>",
        r"<\|tool_call:begin\|>[^<]*<\|tool_call:name\|>(?P<name>[^<]{1,256}+)<\|tool_call:args\|>(?=\{)",
        rf"{re.escape(CALL)}(?:functions\.)?(?P<name>[^\s<]{{1,256}}+)<\|message\|>",
        r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]{1,256}+)\n```json\n",
        r"<｜tool▁call▁begin｜>(?P<name>[^<]{1,256}+)<｜tool▁sep｜>(?=\{)",
        r"<\|tool_call_begin\|>(?:functions\.)?(?P<name>[^:<]{1,256}+)[^<]*+<\|tool_call_argument_begin\|>",
        r"(?P<name>[^\s\[{]{1,256}+)(?:\[CALL_ID\][^\[]*+)?\[ARGS\](?=\{)",
        r"call:(?P<name>[^\s{]{1,256}+)(?=\{)",
        r"(?P<name>[\w.-]{1,256}+)(?=\()",
        r"(?P<name>[^\s<{]{1,256}+)\s*+(?=<arg_key>)",
    )
]
#: How a reply begins that is a call without anything around it: JSON, Llama 4's lists of calls as Python has them, or
#: a name on a line of its own, as ChatGLM and GLM-4 9B write them.
_BARE = re.compile(r"\[?\s*\{|\[\s*(?P<in_list>[\w.-]+)\(|(?P<on_line>[\w.-]+)\n\s*\{")
#: What may stand before the arguments of such calls.
_BARE_HEADS = re.compile(r"(?P<name>[\w.-]+)(?:(?=\()|\n\s*(?=\{))")
#: And where that may still come.
_BARE_BEGINNING = re.compile(r"\[?\s*[\w.-]*(?:\n\s*)?")
_NAME_ALONE = re.compile(r"(?P<name>[^\s<{]{1,256}+)\s*")

_PAIR = r'"[^"\\]*"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*'
#: The same of a call that is JSON.
_OBJECT_HEAD = re.compile(
    rf'\{{\s*(?:(?!"(?:tool_)?name"){_PAIR})*"(?:tool_)?name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*(?:{_PAIR})*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
#: The same where the tool's name is the key of its arguments, in these.
_NAMED_HEAD, _NAMED = re.compile(r'\{\s*(?P<name>"(?:[^"\\]|\\.)*")\s*:\s*(?=\{)'), "<|tools_suffix|>"
#: How a reply begins that is not a call from its beginning on, as calls of Llama are: a key that no call has.
_OTHER_KEY = re.compile(r'[\s\[]*\{\s*"(?!(?:name|type|id|arguments|parameters)")[^"]*"')

_KEY = re.compile(
    r"""<(?P<tag>(?:｜DSML｜|atem:)?param(?:eter)?)(?:=|\ name=")(?P<key>[^>"]++)[^>]*+>
    |<arg_key(?P<of>(?::\w+)?)>(?P<key_>.*?)</arg_key(?P=of)>\s*<arg_value(?P=of)>""",
    re.DOTALL | re.VERBOSE,
)
_KEYS = (
    *("<parameter=", "<parameter ", "<｜DSML｜parameter ", "<atem:parameter ", "<param ", "<arg_key>"),
    "<arg_key:opensource>",
)

#: A tag around an argument of MiniMax M3's calls, or around a part of one.
_MARKED_TAG = re.compile(rf"{re.escape(_MARK)}<(?P<closes>/?)(?P<name>[^<>]+)>")
#: What may become one.
_MAY_BE_TAG = re.compile(rf"{re.escape(_MARK)}(?:</?[^<>]*)?")

#: What MiniCPM 5 writes around values that have characters of XML.
_CDATA = "<![CDATA[", "]]>"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The beginning of a call of a tool, or more of its arguments; at its end comes the whole `ToolCall`."""

    index: int  #: which call of the reply
    id: str
    name: str
    arguments: str = ""  #: the next piece of its JSON
    begins: bool = False
    text: ClassVar[str] = ""  #: what it adds to the text of the reply, as of a `Piece`


_Event = Piece | CallDelta | ToolCall
#: Reads text, and stops where more of it has to come.
_Reading = Generator[None, None, None]


class _MalformedError(ValueError):
    """The text is not a call, or not the rest of one."""


class ReplyParser:
    """Takes one reply apart."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), opened: str = "") -> None:
        """Begins a reply.  ``tools``: that the model was offered, as OpenAI's API describes functions; without any,
        none are called; ``opened``: the tag that the prompt ended with (`localllm.chat.thinking.opening_tag`)."""
        self.warnings: list[str] = []  # calls that were left as text, wholly or in part, and why
        self.offer(tools)
        self._thinking = ThinkingSplitter(opened)
        self._events: list[_Event] = []
        #: Text that is not read yet, from a place on; places within it are counted from there.
        self._text, self._at = "", 0
        self._is_whole = self._is_cut = self._is_after_call = False
        self._n_calls = 0
        self._call: CallDelta | None = None  # that has begun
        self._arguments = ""  # of that
        self._skipped = ""
        self._reading = self._read()

    @classmethod
    def after(
        cls,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] = (),
        prefix: str = "",
    ) -> ReplyParser:
        """Begins the reply to a prompt, whose end ``prefix`` is already the beginning of the reply.

        What the prefix says is not told again; calls in it are.
        """
        ids = [id_ for id_ in prompt_ids[-16 - 4 * len(prefix) :] if id_ >= 0]  # those below stand for pictures
        end = tokenizer.decode(ids, special=True)
        parser = cls(tools, opening_tag(end.removesuffix(prefix)))
        if prefix:
            parser._events = [each for each in parser.feed(prefix) if not isinstance(each, Piece)]
            parser._skipped = parser._text[parser._at :] + parser._thinking.held
        return parser

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Says which tools may be called."""
        functions = [tool.get("function", tool) for tool in tools]
        self._tools = {str(each.get("name")): each for each in functions if isinstance(each, Mapping)}

    def feed(self, text: str) -> list[_Event]:
        """Takes the next piece of text; returns what is certain now."""
        self._consume(self._thinking.feed(text))
        return self._drain()

    def finish(self, *, is_cut: bool = False) -> list[_Event]:
        """Returns what was held back; call it once, after the last text.  ``is_cut``: whether the model would have
        gone on: a call that has not ended is not malformed."""
        self._consume(self._thinking.finish())
        self._is_whole, self._is_cut = True, is_cut
        for _ in self._reading:
            pass
        return self._drain()

    def _consume(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.thinking or not self._tools:
                self._emit(piece.text, piece.thinking)
            else:
                self._text, self._at = self._text[self._at :] + piece.text, 0
                next(self._reading)

    def _drain(self) -> list[_Event]:
        events, self._events = self._events, []
        return events

    def _emit(self, text: str, thinking: bool = False) -> None:
        if self._skipped:
            both = zip(text, self._skipped, strict=False)
            n = next((i for i, (a, b) in enumerate(both) if a != b), min(len(text), len(self._skipped)))
            self._skipped = self._skipped[n:] if n == len(text) else ""
            text = text[n:]
        if text:
            self._events.append(Piece(text, thinking))

    # -- Text ------------------------------------------------------------------------------------------------------

    def _wait_for_more(self) -> Generator[None, None, bool]:
        """Waits for more text; whether there is any."""
        if self._is_whole:
            return False
        yield
        return True

    def _read(self) -> _Reading:
        """Reads the reply from its beginning to its end."""
        while not (text := self._text[self._at :].lstrip()) or self._may_be_bare(text):
            if not (yield from self._wait_for_more()):
                break
        bare = _BARE.match(text)
        if bare and {bare["in_list"], bare["on_line"]} - {None} <= self._tools.keys():
            yield from self._calls("", "", "")
        while True:
            if self._is_after_call:
                self._skip(_SPACE)
                self._is_after_call = self._at == len(self._text) and not self._is_whole
            opening = _OPENING.search(self._text, self._at)
            if opening is None:
                rest = self._text[self._at :]
                may_open = not _OPENING_CHARACTERS.isdisjoint(rest[-_LONGEST_OPENING:])
                n = max(n_open(rest, tag) for tag in _CLOSING) if may_open else 0
                # White space before a call is no part of the text.
                end = len(self._text[: len(self._text) - n].rstrip())
                if end > self._at:
                    self._emit(self._text[self._at : end])
                    self._at = end
                if not (yield from self._wait_for_more()):
                    self._emit(self._text[self._at :])
                    return
                continue
            before = self._text[self._at : opening.start()]
            self._emit(before.rstrip())
            self._at = opening.start() if opening[0] in _TAGS_IN_CALLS else opening.end()
            yield from self._calls(before[len(before.rstrip()) :], opening[0], _CLOSING[opening[0]])

    def _may_be_bare(self, text: str) -> bool:
        """Whether a text may be the beginning of a call without anything around it, before its arguments."""
        name = text.removeprefix("[").strip()
        return bool(_BARE_BEGINNING.fullmatch(text)) and any(each.startswith(name) for each in self._tools)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _read_to(self, closing: str, *, is_text: bool) -> _Reading:
        """Reads text up to what closes a call, which ``is_text`` too, unless it opens the next one."""
        while (at := self._text.find(closing, self._at)) < 0:
            end = len(self._text) - (0 if self._is_whole else n_open(self._text[self._at :], closing))
            self._emit(self._text[self._at : end])
            self._at = end
            if not (yield from self._wait_for_more()):
                return
        end = at if closing in _CLOSING else at + len(closing)
        self._emit(self._text[self._at : end if is_text else at])
        self._at = end

    # -- Calls -----------------------------------------------------------------------------------------------------

    def _calls(self, space: str, opening: str, closing: str) -> _Reading:
        """Reads calls that stand together, and what closes them; nothing does where ``closing`` is empty."""
        n_before = self._n_calls
        try:
            while found := (yield from self._next_call(closing, self._n_calls > n_before)):
                begin, head = found
                if head is None:
                    yield from self._object(begin, closing)
                else:
                    yield from self._headed(head, closing)
        except ValueError as error:
            if self._call is not None:
                self.warnings.append(f"a call of {self._call.name} is malformed, and the rest of it text: {error}")
                self._end()
            elif self._n_calls > n_before:
                self.warnings.append(f"what stands behind a call of a tool was left as text: {error}")
            else:
                if opening and not self._is_cut:
                    self.warnings.append(f"a call of a tool was left as text: {error}")
                self._emit(space + (opening if opening not in _TAGS_IN_CALLS else ""))
            if closing:
                yield from self._read_to(closing, is_text=self._n_calls == n_before)
            return
        self._is_after_call = self._n_calls > n_before

    def _next_call(
        self, closing: str, has_call: bool
    ) -> Generator[None, None, tuple[int, re.Match[str] | None] | None]:
        """Where the next call begins, and what stands before its arguments; None where what closes them was read."""
        searched = 0
        while True:
            between = _BETWEEN.match(self._text, self._at)
            assert between is not None
            at = between.end()
            closed = self._text.find(closing, self._at, at + len(closing)) if closing else -1
            if closed >= 0:
                if not has_call:
                    raise _MalformedError("it is empty")
                self._at = closed + (0 if closing in _CLOSING else len(closing))
                return None
            if self._text.startswith("{", at):
                return at - self._at, None
            if not closing and at < len(self._text):
                head = _BARE_HEADS.match(self._text, at)
                if head is not None and head["name"] in self._tools:
                    return at - self._at, head
                rest = self._text[at:]
                if (self._may_be_bare(rest) or _MARK.startswith(rest)) and (yield from self._wait_for_more()):
                    continue
                self._at = at
                return None
            heads = (head.match(self._text, at) for head in _HEADS)
            head = next(filter(None, heads), None)
            rest = self._text[at:]
            is_closing = has_call and any(tag.startswith(rest) for tag in (closing, *_ENDS))
            if head is None and not is_closing and (alone := _NAME_ALONE.match(self._text, at)):
                is_last = self._is_whole and not self._is_cut and alone.end() == len(self._text)
                head = alone if is_last or self._text.startswith(closing, alone.end()) else None
            if head is not None:
                return at - self._at, head
            if closing and self._text.find(closing, self._at + searched) >= 0:
                raise _MalformedError("it is written in no known way")
            searched = max(0, len(self._text) - self._at - len(closing))
            if not (yield from self._wait_for_more()):
                if not is_closing:
                    raise _MalformedError("it is written in no known way")
                self._at = len(self._text)
                return None

    def _begin(self, name: str, at: int) -> None:
        """Begins a call whose arguments stand at a place."""
        if name not in self._tools:
            raise _MalformedError(f"there is no tool {name!r:.80}")
        self._at = at
        self._call, self._arguments = CallDelta(self._n_calls, f"call_{uuid.uuid4().hex[:24]}", name), ""
        self._n_calls += 1
        self._skipped = ""
        self._events.append(replace(self._call, begins=True))

    def _add(self, arguments: str) -> None:
        if self._call is not None and arguments:
            self._arguments += arguments
            self._events.append(replace(self._call, arguments=arguments))

    def _end(self) -> None:
        if self._call is not None:
            self._events.append(ToolCall(self._call.name, self._arguments, self._call.id))
            self._call = None

    def _object(self, begin: int, closing: str) -> _Reading:
        """Reads a call that is a JSON object."""
        whole, text, n, n_searched = _JSONReader(), "", begin, begin + 1
        pattern = _NAMED_HEAD if closing == _NAMED else _OBJECT_HEAD
        while True:
            if not closing and _OTHER_KEY.match(self._text, self._at):
                raise _MalformedError("it is written in no known way")
            # What stands before arguments ends with the bracket that these begin with.
            may_have_head = self._text.find("{", self._at + n_searched) >= 0
            n_searched = max(n_searched, len(self._text) - self._at)
            if may_have_head and (head := pattern.match(self._text, self._at + begin)):
                self._begin(_value(head["name"]), head.end())
                reader = _JSONReader()
                reader.read(head[0], 0, len(head[0]))
                yield from self._json(reader, 1, closing)
                self._end()
                yield from self._json(reader, 0, closing)
                return
            out, at = whole.read(self._text, self._at + n, len(self._text))
            text, n = text + out, at - self._at
            if whole.has_closed:
                name, arguments = _call_of(text)
                self._begin(name, at)
                self._add(arguments)
                self._end()
                return
            if whole.error or not (yield from self._wait_for_more()):
                raise _MalformedError(whole.error or "it ends early")

    def _headed(self, head: re.Match[str], closing: str) -> _Reading:
        """Reads a call with its tool's name before its arguments."""
        self._begin(head["name"], head.end())
        while not self._text[self._at :].lstrip() and (yield from self._wait_for_more()):
            pass
        self._skip(_SPACE)
        if self._text.startswith("{", self._at):
            yield from self._json(_JSONReader(), 0, closing)
        elif self._text.startswith("(", self._at):
            yield from self._python()
        elif head[0].startswith(_MARK):
            yield from self._marked()
        else:
            yield from self._tagged(closing)
        self._end()

    def _json(self, reader: _JSONReader, stop: int, closing: str) -> _Reading:
        """Reads JSON until ``stop`` brackets are open; of a call that has not ended it is the arguments.

        Where a text in it has what closes calls, nothing of what comes then is told until all of it is there: should
        it not be JSON, the call ends before.
        """
        withheld: list[str] = []
        n, is_withheld = 0, False
        while True:
            found, end = -1, len(self._text)
            if closing and not is_withheld:
                found = self._text.find(closing, self._at)
                end = found if found >= 0 else end - n_open(self._text[self._at :], closing) * (not self._is_whole)
            out, at = reader.read(self._text, self._at + n, end, stop)
            withheld.append(out)
            if is_withheld:
                n = at - self._at
            else:
                self._at = at
            if not is_withheld or reader.has_closed:
                self._add("".join(withheld))
                withheld = []
            if reader.has_closed:
                self._at += n
                return
            error = reader.error
            if found >= 0 and not is_withheld and not error:
                is_withheld = bool(reader.quote)
                if is_withheld:
                    continue
                if self._call is None:  # only what closes the object is missing
                    return
                error = "its arguments are not closed"
            if not error and not (yield from self._wait_for_more()):
                if self._is_cut or self._call is None:
                    rest = self._text[self._at + n :]
                    self._add("".join(withheld) + reader.rest_of_cut(rest))
                    self._at = len(self._text)
                    return
                error = "its arguments are not closed"
            if error:
                raise _MalformedError(error)

    def _python(self) -> _Reading:
        """Reads the arguments of a call as Python has it, which are told once all are there."""
        reader, n = _PythonReader(), 0
        while not reader.has_closed:
            n = reader.read(self._text, self._at + n) - self._at
            if not reader.has_closed and not (yield from self._wait_for_more()):
                if not self._is_cut:
                    raise _MalformedError("its arguments are not closed")
                self._at = len(self._text)
                return
        try:
            whole = self._text[self._at : self._at + n]
            text = _PYTHON_STRING.sub(lambda string: string[0].replace("\n", "\\n").replace("\r", "\\r"), whole)
            check_expression(f"f{text}", MAX_CALL_NESTING)
            call = _JSONWords().visit(ast.parse(f"f{text}", mode="eval").body)
            assert isinstance(call, ast.Call)
            given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
            if call.args or None in given:
                raise _MalformedError("its arguments have no names")
            self._add(_json_of(given))
        except (SyntaxError, TypeError, NestingError) as error:
            raise _MalformedError(f"its arguments are not Python's: {error}") from None
        self._at += n

    def _tagged(self, closing: str) -> _Reading:
        """Reads values between tags."""
        separator = "{"
        ends = [[key] for key in _KEYS] + [[closing]]
        ends += [[end, then] for end in _TAGGED_ENDS for then in (*_TAGGED_BEGINNINGS, closing)]
        while True:
            self._skip(_SPACE)
            key = _KEY.match(self._text, self._at)
            if key is None:
                rest = self._text[self._at :]
                is_end = rest.startswith((closing, *_ENDS))
                may_go_on = any(each.startswith(rest[: len(each)]) for each in (*_KEYS, closing, *_ENDS))
                if not is_end and not may_go_on:
                    raise _MalformedError("its arguments are written in no known way")
                if not is_end and (yield from self._wait_for_more()):
                    continue
                if rest and not is_end and not self._is_cut:
                    raise _MalformedError("its arguments are not closed")
                self._add("" if self._is_cut and not is_end else "}" if separator != "{" else "{}")
                self._at = self._at if is_end else len(self._text)
                return
            name = key["key"] or key["key_"] or ""
            tag = f"</arg_value{key['of']}>" if key["key"] is None else f"</{key['tag']}>"
            begin = n = key.end() - self._at
            while True:
                at = self._text.find(tag, self._at + n)
                if at >= 0:
                    n = at + len(tag) - self._at
                    found = {_begins(self._text[self._at + n :], words) for words in ends}
                    if True not in found and None not in found:
                        continue
                    if True in found:
                        break
                    n -= len(tag)
                else:
                    n = max(n, len(self._text) - len(tag) + 1 - self._at)
                if not (yield from self._wait_for_more()):
                    break
            value = self._text[self._at + begin : at if at >= 0 else len(self._text)]
            if "arg" not in tag:
                value = value.removeprefix("\n")
            if at < 0:
                if not self._is_cut:
                    raise _MalformedError("a value is not closed")
                value = value[: len(value) - n_open(value, tag)]
                value = value.removesuffix("\n") if "arg" not in tag else value
                value = value.removeprefix(_CDATA[0])
                self._add(f"{separator}{json.dumps(name, ensure_ascii=False)}: {self._partial_value(name, value)}")
                self._at = len(self._text)
                return
            value = value.removesuffix("\n") if "arg" not in tag else value
            if value.startswith(_CDATA[0]) and value.endswith(_CDATA[1]):
                value = value[len(_CDATA[0]) : -len(_CDATA[1])]
            self._add(f"{separator}{json.dumps(name, ensure_ascii=False)}: {self._value(name, value)}")
            separator, self._at = ", ", at + len(tag)

    def _marked(self) -> _Reading:
        """Reads MiniMax M3's arguments: values between tags with a mark, whose parts are between such tags, too."""
        assert self._call is not None
        schema, separator = self._tools[self._call.name].get("parameters") or {}, "{"
        reader = _MarkedReader(schema)
        while True:
            self._skip(_SPACE)
            if self._text.startswith(_MARKED_END, self._at):
                self._add("}" if separator != "{" else "{}")
                return
            if parameter := reader.read(self._text, self._at):
                name, value, end = parameter
                self._add(f"{separator}{_json_of({name: value})[1:-1]}")
                self._at, separator, reader = end, ", ", _MarkedReader(schema)
                continue
            rest = self._text[self._at :]
            if not reader.has_begun and not (_MARK.startswith(rest) or _MAY_BE_TAG.fullmatch(rest)):
                raise _MalformedError("its arguments are written in no known way")
            if not (yield from self._wait_for_more()):
                if not self._is_cut:
                    raise _MalformedError("its arguments are not closed")
                self._at = len(self._text)
                return

    def _is_text(self, name: str) -> bool:
        """Whether an argument of the call may be a text."""
        assert self._call is not None
        schema = self._tools[self._call.name].get("parameters") or {}
        return "string" in _types(_schema_of_part(schema, schema, name), schema)

    def _value(self, name: str, value: str) -> str:
        """The JSON of a value between tags: a text where the tool's schema says so, else JSON if it is that."""
        return _json_of(value if self._is_text(name) else _as_json(value))

    def _partial_value(self, name: str, value: str) -> str:
        """The same of one that was cut off."""
        reader = _JSONReader()
        reader.read(f"[{value}", 0, len(value) + 1)
        return json.dumps(value, ensure_ascii=False)[:-1] if self._is_text(name) or reader.error else value


class _JSONWords(ast.NodeTransformer):
    """JSON's words in calls as Python has them, for which some models write them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words: dict[str, bool | None] = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


#: What some models write for JSON's words.
_PYTHON = {"True": "true", "False": "false", "None": "null"}

_TOKEN = re.compile(r"""(?P<space>\s+)|(?P<quote>"|<\|"\|>)|(?P<mark>[{}\[\]:,])|(?P<word>[^\s{}\[\]:,"<]+)""")
_PYTHON_STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
#: Of calls of Python, what stands between quotation marks and brackets, and in texts.
_PYTHON_TEXT = {"": re.compile(r"[^\"'()]*")}
_PYTHON_TEXT |= {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*", re.DOTALL) for quote in "\"'"}
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
#: Surrogates come in pairs.
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|u(?![dD][89a-fA-F])[\da-fA-F]{4})',
    re.ASCII,
)
_LONGEST_ESCAPE = 12


class _JSONReader:
    """Follows JSON as it comes, and mends what models write otherwise.

    Keys may have no quotation marks, those of texts may be Gemma's tokens, texts may have control characters, and
    words may be Python's.
    """

    def __init__(self) -> None:
        self.error = ""
        self.has_closed = False  #: whether the last read has come to where it was to stop
        self.quote = ""  #: what ends the text that is being read
        self._open: list[str] = []  # what closes the brackets that are open
        #: A value, or V for one or a bracket's end; a key, or K for one or the end; a colon; a comma or the end.
        self._expects = "v"
        self._is_key = False

    def read(self, text: str, at: int, end: int, stop: int = 0) -> tuple[str, int]:
        """The JSON of what is certain between two places of a text, and where that ends.

        Stops where no more than ``stop`` brackets are open.
        """
        out: list[str] = []
        self.has_closed = False
        while at < end and not self.error and not self.has_closed:
            piece, n = self._string(text, at, end) if self.quote else self._token(text, at, end, stop)
            if not n:
                break
            out.append(piece)
            at += n
        return "".join(out), at

    def rest_of_cut(self, rest: str) -> str:
        """The JSON of what follows, which was cut off before it was certain."""
        if '<|"|>'.startswith(rest):
            return ""
        return rest if self.quote or self._expects not in "kK" else json.dumps(rest, ensure_ascii=False)[:-1]

    def _string(self, text: str, at: int, end: int) -> tuple[str, int]:
        """A piece of a text, and how long it is."""
        if self.quote == '"' and text[at] == "\\":
            escape = _ESCAPE.match(text, at, end)
            if escape is None and end - at >= _LONGEST_ESCAPE:
                self.error = "an escape in its arguments is not JSON"
            return (escape[0], len(escape[0])) if escape else ("", 0)
        if text.startswith(self.quote, at, end):
            n, self.quote, self._expects = len(self.quote), "", ":" if self._is_key else ","
            return '"', n
        stops = [text.find(each, at, end) for each in (self.quote, "\\" if self.quote == '"' else self.quote)]
        stop = min((each for each in stops if each >= 0), default=end - n_open(text[at:end], self.quote))
        return json.dumps(text[at:stop], ensure_ascii=False)[1:-1], stop - at

    def _token(self, text: str, at: int, end: int, stop: int) -> tuple[str, int]:
        """A token outside of texts, and how long it is."""
        token = _TOKEN.match(text, at, end)
        if token is None:
            if not '<|"|>'.startswith(text[at:end]):
                self.error = f"{text[at]!r} is not JSON there"
            return "", 0
        found, kind = token[0], token.lastgroup
        expects, out = self._expects, found
        if kind == "space":
            pass
        elif kind == "word" and token.end() == end:  # more of it may come
            return "", 0
        elif kind == "quote" and expects in "vVkK":
            self.quote, self._is_key, out = found, expects in "kK", '"'
        elif kind == "word" and expects in "kK":
            out, self._expects = json.dumps(found, ensure_ascii=False), ":"
        elif kind == "word" and expects in "vV" and _WORD.fullmatch(_PYTHON.get(found, found)):
            out, self._expects = _PYTHON.get(found, found), ","
        elif found in "{[" and len(self._open) == MAX_CALL_NESTING:
            self.error = "its arguments are nested too deeply"
            return "", 0
        elif found in "{[" and expects in "vV":
            self._open.append("}" if found == "{" else "]")
            self._expects = "K" if found == "{" else "V"
        elif found == expects == ":":
            self._expects = "v"
        elif found == expects == ",":
            self._expects = "k" if self._open[-1] == "}" else "v"
        elif self._open and found == self._open[-1] and expects in ("," + ("K" if found == "}" else "V")):
            self._open.pop()
            self._expects, self.has_closed = ",", len(self._open) <= stop
        else:
            self.error = f"{found!r:.40} is not JSON there"
            return "", 0
        return out, len(found)


class _PythonReader:
    """Follows the arguments of a call of Python as they come."""

    def __init__(self) -> None:
        self.has_closed = False  #: whether the last read has come to their end
        self._depth, self._quote = 0, ""

    def read(self, text: str, at: int) -> int:
        """How far what is certain of them goes from a place of a text on."""
        while not self.has_closed and (found := _PYTHON_TEXT[self._quote].match(text, at)):
            at = found.end()
            mark = text[at : at + 1]
            if mark in ("", "\\"):  # more of it has to come
                break
            at += 1
            if mark in "()":
                self._depth += 1 if mark == "(" else -1
                self.has_closed = not self._depth
            else:
                self._quote = "" if self._quote else mark
        return at


class _MarkedReader:
    """Follows an argument of MiniMax M3's calls as it comes: a value, or parts between marked tags.

    ``schema``: of the call's arguments, into which references lead.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        # Of the tags that are open, names, where their values begin, their parts and schemas; and how much was read.
        self._open: list[tuple[str, int, list[tuple[str, Any]], Any]] = []
        self._n = 0

    @property
    def has_begun(self) -> bool:
        """Whether a tag is open."""
        return bool(self._open)

    def read(self, text: str, at: int) -> tuple[str, Any, int] | None:
        """The name and the value of what begins at a place, and where it ends; None if it does not yet."""
        for tag in _MARKED_TAG.finditer(text, at + self._n):
            if not self._open and (tag.start() > at or tag["closes"]):
                return None
            self._n = tag.end() - at
            if not tag["closes"]:
                of = self._open[-1][3] if self._open else self._schema
                self._open.append((tag["name"], self._n, [], _schema_of_part(of, self._schema, tag["name"])))
                continue
            name, begin, parts, own = self._open.pop()
            if tag["name"] != name:
                raise _MalformedError(f"{tag['name']!r:.40} closes {name!r:.40}")
            own_text = "" if parts else text[at + begin : tag.start()]
            value = _unmarked(own_text, parts, _types(own, self._schema))
            if not self._open:
                return name, value, tag.end()
            self._open[-1][2].append((name, value))
        if self._open:
            last = text.rfind(_MARK, at + self._n)
            may_open = last >= 0 and _MAY_BE_TAG.fullmatch(text, last)
            self._n = max(self._n, (last if may_open else len(text) - len(_MARK) + 1) - at)
        return None


def _unmarked(text: str, parts: list[tuple[str, Any]], types: set[str]) -> Any:
    """The value that parts, named values, make up: a list or a mapping; without parts, the value of the text."""
    if parts:
        is_list = "array" in types or ("object" not in types and all(name == "item" for name, _ in parts))
        return [value for _, value in parts] if is_list else dict(parts)
    if "string" in types:
        return text
    if not text and types & {"array", "object"}:
        return [] if "array" in types else {}
    return _as_json(text)


def _as_json(text: str) -> Any:
    """The value whose JSON a text is, or the text."""
    try:
        value = _value(_PYTHON.get(text, text))
        _json_of(value)
        return value
    except ValueError:
        return text


def _schema_of_part(schema: Any, root: Mapping[str, Any], name: str) -> Any:
    """The schema of a mapping's value or of a list's items."""
    schema = _referenced(schema, root)
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) and name in properties else schema.get("items")


def _referenced(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference leads to, which may be another reference; what is no reference is returned."""
    if isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        schema = root
        for name in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def _begins(text: str, words: Sequence[str]) -> bool | None:
    """Whether a text begins with words, with white space before each; None if it may, once more of it comes."""
    for word in words:
        text = text.lstrip()
        if not text.startswith(word):
            return None if word.startswith(text) else False
        text = text[len(word) :]
    return True


def _call_of(text: str) -> tuple[str, str]:
    """The tool's name and the arguments of a call that is JSON."""
    try:
        call = _value(text)
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
        arguments = _value(arguments) if isinstance(arguments, str) else arguments
        name = call["name"] if "name" in call else call["tool_name"]
        if not isinstance(arguments, dict):
            raise _MalformedError("its arguments are not a JSON object")
        written = _json_of(arguments)
    except KeyError as error:
        raise _MalformedError(f"it has no {error}") from None
    except ValueError as error:
        raise _MalformedError(str(error)) from None
    return str(name), written


def _json_of(value: Any) -> str:
    """Return the JSON of ``value``.  Raises ValueError for infinite numbers, lone surrogates and deep nesting."""
    try:
        check_values(value, MAX_CALL_NESTING)
    except NestingError as error:
        raise _MalformedError(str(error)) from None
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    written.encode()
    return written


def _value(text: str) -> Any:
    return parse_json(text, parse_constant=_refuse)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types of JSON that a schema allows, as far as it names them; ``root``: what its references lead into."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(schema.get("$ref"), str):
        return _types(_referenced(schema, root), root, depth + 1)
    named = schema.get("type")
    types = {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not types and isinstance(values, list):
        types = {"string" for value in values if isinstance(value, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        for each in alternatives if isinstance(alternatives, list) else ():
            types |= _types(each, root, depth + 1)
    return types
