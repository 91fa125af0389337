"""The chat without a screen, for users in a terminal and for input from a pipe.

A message is one line, or several: a backslash at the end of a line continues it on the next line, and three quotation
marks start and end a block.
"""

from __future__ import annotations

import codecs
import contextlib
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from localllm.agent_tools.toolbox import Permission
from localllm.console import StatusLine, is_terminal, say, warn
from localllm.errors import ContextLengthError, LocalLLMError, UsageError
from localllm.files import create_private
from localllm.tui import commands
from localllm.tui.chat import events
from localllm.tui.chat.context import ChatModel
from localllm.tui.chat.conversation import ChatMessage, Conversation
from localllm.tui.chat.events import Choice, Event, Turn
from localllm.tui.chat.session import ChatSession
from localllm.tui.text import escape_controls, spelled_out

BLOCK = '"""'

#: Maximum size of a line in bytes. No context is long enough for a longer message.
_MAX_BYTES = 64 << 20
_MAX_HISTORY = 1000


class InputReader:
    """Reads messages from standard input. ``interactive`` is True if it is a terminal."""

    def __init__(self, history: Path | None = None) -> None:
        """``history`` is the file of the input history, used if Python has readline; None: no history."""
        self.interactive = is_terminal(sys.stdin)
        self._history = history
        self._readline = _load_readline(history) if self.interactive and is_terminal(sys.stdout) else None

    def read(self) -> str | None:
        """Return the next message, or None at the end of the input.

        Raises UsageError if the input is not valid UTF-8 or a line is too long.
        """
        line = self._line("> ")
        if line is None:
            return None
        if line.lstrip().startswith(BLOCK):
            text = self._joined(line.lstrip().removeprefix(BLOCK), BLOCK).strip("\n")
        else:
            text = self._joined(line, None)
        if self._readline is not None and self._history is not None:
            with contextlib.suppress(OSError):
                create_private(self._history)
                self._readline.write_history_file(self._history)
        return text

    def answer(self, question: str) -> str:
        """Return the user's answer, or an empty string if the input is a pipe."""
        return (self._line(question) or "").strip() if self.interactive else ""

    def edit(self, text: str) -> str | None:
        """Let the user edit ``text``, in place if possible. Returns None at the end of the input."""
        if self._readline is None or "\n" in text or not text.isprintable():
            say(f"{escape_controls(text)}\n(type all of the new text; an empty line keeps the old text)")
            return self.read()
        self._readline.set_startup_hook(partial(self._readline.insert_text, text))
        try:
            return self._line("edit> ")
        finally:
            self._readline.set_startup_hook()

    def _joined(self, line: str, end: str | None) -> str:
        """Join ``line`` with the next lines, up to ``end``; if ``end`` is None, while lines end with a backslash."""
        lines = []
        while (not line.rstrip().endswith(end)) if end else line.endswith("\\"):
            lines.append(line if end else line[:-1])
            more = self._line(". ")
            if more is None:
                return "\n".join(lines)
            line = more
        return "\n".join([*lines, line.rstrip().removesuffix(end) if end else line])

    def _line(self, prompt: str) -> str | None:
        if self._readline is not None:
            try:
                line = input(prompt)
                line.encode()
                return line
            except EOFError:
                print(flush=True)
                return None
            except UnicodeEncodeError:
                raise UsageError("the input is not valid UTF-8: check the terminal's character set") from None
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        if sys.stdin is None or sys.stdin.closed:
            return None
        data = sys.stdin.buffer.readline(_MAX_BYTES)
        if len(data) == _MAX_BYTES:
            raise UsageError(f"a line has more than {_MAX_BYTES >> 20} MiB, which is the maximum: shorten it")
        if not data:
            return None
        try:
            return data.removeprefix(codecs.BOM_UTF8).decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise UsageError("standard input is not valid UTF-8: convert it to UTF-8") from None


def _load_readline(history: Path | None) -> Any:
    """Return the module readline with the history, so that `input` supports line editing; None if it is missing."""
    if sys.platform == "win32":
        return None
    try:
        import readline
    except ImportError:  # Python was built without readline
        return None
    readline.set_history_length(_MAX_HISTORY)
    if history is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(history)
    return readline


#: Lines are not wrapped on terminals with fewer columns.
_NARROWEST = 20

LoadModel = Callable[[str], ChatModel]

_FULL = (
    "the context is full ({needed:,} of {context:,} tokens): /drop omits the oldest turns, /summarise replaces "
    "them with a summary, /edit changes your message, /remove {number} deletes it"
)
_TOO_LONG = (
    "the message is too long for the context ({needed:,} of {context:,} tokens): /edit makes it shorter, "
    "/remove {number} deletes it"
)
_REPLY_TOO_LONG = "the reply has filled the context of {context:,} tokens, and there are no older turns to drop"


class LineChat(commands.UI):
    def __init__(
        self,
        session: ChatSession,
        load: LoadModel,
        lines: InputReader,
        *,
        check: Callable[[str], None] = lambda path: None,
        when_full: Choice | None = None,
        quiet: bool = False,
    ) -> None:
        """``load``, ``check`` and ``when_full`` as in `Setup`. ``quiet`` hides status lines and remarks."""
        self.session = session
        self.unsaved: list[ChatSession] = []
        self._load = load
        self._check = check
        self._lines = lines
        self._when_full = when_full
        self._quiet = quiet
        self._status = StatusLine(enabled=not quiet)
        self._show = escape_controls if is_terminal(sys.stdout) else str
        self._ended = False
        self._turn: Turn | None = None

    def run(self, question: str = "") -> None:
        """Chat until the input ends, starting with ``question``. Errors are raised only if the input is a pipe."""
        impatience = 0
        with self._interrupts():
            while not self._ended:
                try:
                    text, question = question or self._lines.read(), ""
                    impatience = 0
                    if text is None:
                        break
                    self._take(text)
                except KeyboardInterrupt:
                    impatience += 1
                    if not self._lines.interactive or impatience > 1:
                        raise
                    say("\n(Ctrl-D or /quit ends the chat, and so does Ctrl-C again)")
                except LocalLLMError as error:
                    if not self._lines.interactive:
                        raise
                    self._status.clear()
                    self._say(f"localllm: error: {error}")

    def _take(self, text: str) -> None:
        if not text.strip():
            return
        typed = commands.parse(text)
        if isinstance(typed, str):
            self._play(partial(self.session.send, typed))
            return
        with contextlib.suppress(StopIteration):  # no command awaits anything in line mode
            commands.run(self.session, self, typed).send(None)
        if warning := self.session.saver.take_warning():
            warn(warning)

    async def tell(self, text: str) -> None:
        self._say(text)

    async def show(self) -> None:
        self._say(commands.transcript(self.session, ""))

    async def put(self, draft: str) -> None:
        self._play(partial(self.session.send, draft))

    async def quit(self) -> None:
        self._ended = True

    def _say(self, text: str) -> None:
        """Print ``text``; on a terminal, wrap its lines between words."""
        lines = escape_controls(text).split("\n")
        width = shutil.get_terminal_size().columns if is_terminal(sys.stderr) else 0
        if width >= _NARROWEST:
            fold = partial(textwrap.wrap, width=width - 1, subsequent_indent="  ", replace_whitespace=False)
            lines = ["\n".join(fold(line)) for line in lines]
        say("\n".join(lines))

    async def play(self, start: Callable[[Turn], None]) -> None:
        self._play(start)

    def _play(self, start: Callable[[Turn], None]) -> None:
        """Generate a reply and print it during the generation."""
        printer = _Printer(self._show, self._status)
        full: list[events.ContextFull] = []

        def emit(event: Event) -> None:
            if isinstance(event, events.ContextFull):
                full.append(event)
            else:
                self._tell(event, printer)

        self._turn = turn = Turn(emit)
        try:
            start(turn)
        finally:
            self._turn = None
            self._status.clear()
            printer.end()
        if turn.is_stopped and not self._lines.interactive:
            raise KeyboardInterrupt
        if full:
            self._free_context(full[0])

    async def edit(self, message: ChatMessage) -> None:
        if not self._lines.interactive:
            raise UsageError("give the new text: /edit TEXT, or /edit 3 TEXT for the message of that number")
        text = self._lines.edit(message.text)
        if text is None or not text.strip() or text == message.text:
            self._say("(unchanged)")
        else:
            self._play(partial(self.session.edit, message.id, text))
            if message.role == "assistant":
                self._remark("edited: /continue continues the reply")

    async def open(self, conversation: Conversation, notice: str = "") -> None:
        old = self.session
        if old.saver.flush(0.0) is not None:
            self.unsaved.append(old)
        self.session = replace(old, conversation=conversation)
        if (warning := self.session.mark_open()) is not None:
            warn(warning)
        self._say(notice or "a new chat") if notice or not len(conversation) else await self.show()

    async def use_model(self, path: str) -> None:
        """Replace the model. The old model stays loaded if the new file cannot be read."""
        self._check(path)
        self.close()
        self.session.use_model(self._load(path), path)

    def close(self) -> None:
        if (model := self.session.model) is not None:
            self.session.use_model(None, None)
            model.close()

    # -- Events ----------------------------------------------------------------------------------------------------

    def _tell(self, event: Event, printer: _Printer) -> None:
        if isinstance(event, events.Delta):
            printer.print(event)
        elif isinstance(event, events.Prefill):
            self._status.show(f"reading the prompt: {event.done:,} of {event.total:,} tokens")
        elif isinstance(event, events.Summarising):
            self._status.show("the model summarises the earlier messages …")
        elif isinstance(event, events.ChatWarning):
            warn(event.text)
        elif isinstance(event, events.ChatNotice):
            self._remark(event.text)
        elif isinstance(event, events.ToolApprovalRequest):
            printer.end()
            self._status.clear()
            self._say(spelled_out(f"the model wants to use {event.text}"))
            answers: dict[str, Permission] = {"o": "once", "c": "chat", "a": "always"}  # no answer in a pipe
            answer = self._lines.answer("allow it? [n]o, [o]nce, in this [c]hat, [a]lways: ")
            event.answer(answers.get(answer[:1].lower(), "no"))
        elif isinstance(event, events.ToolCallsDone):
            call = next((call for call in reversed(event.message.calls) if call.result is not None), None)
            if call is None:  # only the diff of the first call is known
                return
            self._remark(f"{call.name} {call.subject}: {len(call.result or ''):,} characters")
        elif isinstance(event, events.ContextTrimmed):
            self._status.clear()
            instead = f", but this summary: {event.summary}" if event.summary else ""
            self._remark(f"the model no longer gets the first {event.n_left_out} messages{instead}")
        elif isinstance(event, events.Finished):
            printer.end()
            if event.message is None or event.message.state == "stopped":
                self._remark("stopped" if event.message is None else "stopped: /continue continues the reply")
            elif event.message.state == "length":
                self._remark("cut off by max_tokens: /continue continues the reply")

    def _remark(self, text: str) -> None:
        if not self._quiet and self._lines.interactive:
            self._say(f"({text})")

    def _free_context(self, full: events.ContextFull) -> None:
        choice = self._when_full
        if choice in full.choices and choice != "stop":
            self._play(partial(self.session.free_context, choice))
            return
        if choice is None and not self._lines.interactive:
            raise ContextLengthError(full.needed, full.context, "--when-full drop or summarise")
        text = _FULL if len(full.choices) > 1 else _REPLY_TOO_LONG if full.in_reply else _TOO_LONG
        number = len(self.session.conversation.path())
        self._say(text.format(needed=full.needed, context=full.context, number=number))

    # -- Ctrl-C ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Make Ctrl-C stop a reply, which is kept. At other times, or a second time, it raises KeyboardInterrupt."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before == signal.SIG_IGN:
            yield
            return
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._turn is None or self._turn.is_stopped:
            raise KeyboardInterrupt
        self._turn.stop()


class _Printer:
    """Prints a reply. Thinking is printed only on a terminal, separately from the answer."""

    def __init__(self, show: Callable[[str], str], status: StatusLine) -> None:
        self._show = show
        self._status = status
        self._part: bool | None = None
        self._last = "\n"

    def print(self, delta: events.Delta) -> None:
        if delta.thinking and not is_terminal(sys.stdout):
            return
        self._status.clear()
        if delta.thinking != self._part:
            if self._part is not None:
                self._write("\n\n")
            if delta.thinking:
                self._write("(thinking) ")
            self._part = delta.thinking
        self._write(self._show(delta.text))

    def end(self) -> None:
        if not self._last.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        self._last = text or self._last
        print(text, end="", flush=True)
