"""The widget of one message."""

from __future__ import annotations

import asyncio
from typing import ClassVar, NamedTuple

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Collapsible, Static

from localllm.tui.base_app import BaseApp
from localllm.tui.chat.conversation import CallRecord, ChatMessage
from localllm.tui.chat.events import ThinkingClock
from localllm.tui.text import escape_controls, shortened, spelled_out
from localllm.tui.widgets.image import half_blocks
from localllm.tui.widgets.reply import ReplyView, block_end


class ThinkingView(Collapsible):
    """The model's thinking. It is drawn only while expanded, in blocks; only the last block changes."""

    def __init__(self, text: str, seconds: float | None) -> None:
        self.text = escape_controls(text)
        self._n_drawn = 0  # characters of finished blocks
        self._last = Static(classes="thought")
        self._body = Vertical(self._last, classes="thoughts")
        super().__init__(self._body, title=_title(self.text, seconds, False), collapsed=True)

    def write(self, text: str, seconds: float) -> None:
        """Append text. ``seconds`` is the thinking time up to now."""
        self.text += escape_controls(text)
        self.title = _title(self.text, seconds, True)
        self._draw()

    def show(self, text: str, seconds: float | None) -> None:
        """Show the complete thinking. ``seconds`` is the thinking time, or None if it is unknown."""
        escaped = escape_controls(text)
        if not escaped.startswith(self.text[: self._n_drawn]):
            self._n_drawn = 0
            self._body.query(Static).remove()
            self._add_block()
        self.text = escaped
        self.title = _title(self.text, seconds, False)
        self._draw()

    def _draw(self) -> None:
        if self.collapsed or not self._body.is_mounted or not self._body.is_attached:
            return
        while True:
            remaining = self.text[self._n_drawn :]
            end = block_end(remaining)
            if not end:
                self._last.update(Content(remaining.rstrip()))
                return
            self._last.update(Content(remaining[:end].removesuffix("\n")))
            self._n_drawn += end
            self._add_block()

    def _add_block(self) -> None:
        self._last = Static(classes="thought")
        if self._body.is_attached:
            self._body.mount(self._last)

    def on_collapsible_expanded(self) -> None:
        self._draw()


def _title(text: str, seconds: float | None, is_thinking: bool) -> str:
    if is_thinking:
        return f"Thinking … {0.0 if seconds is None else seconds:.0f} s"
    if seconds is not None:
        return f"Thought for {seconds:.1f} s"
    n_words = len(text.split())
    return f"Thought in {n_words:,} word{'s' * (n_words != 1)}"


#: Characters of a call's arguments in its title.
_MAX_OF_A_CALL = 200
#: Maximum characters of a call's arguments, and of its result, in the expanded section.
_MAX_UNFOLDED = 20_000
#: Maximum lines and characters of a user's message before it is folded.
_MAX_LINES = 30
_MAX_CHARACTERS = 5000

_ENDS = {
    "stopped": "stopped",
    "length": "cut off at the maximum number of tokens",
    "context": "cut off: the context is full",
    "failed": "cut off by an error",
    "killed": "cut off: the program ended",
    "edited": "edited",
}


class Place(NamedTuple):
    """The place of a message on the path: its number and branch (number and total), and the ``divider`` above it.

    Numbers count from 1.
    """

    message: ChatMessage
    number: int
    branch: tuple[int, int]
    divider: str
    is_last: bool


class MessageView(Vertical, can_focus=True):
    """A message that can be selected, and then edited, copied and so on."""

    app = getters.app(BaseApp)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "screen.on_message('edit')", "Edit"),
        Binding("r", "screen.on_message('regen')", "Regenerate"),
        Binding("b", "screen.branch", "New branch"),
        Binding("left", "screen.step(-1)", "Previous branch", key_display="←"),
        Binding("right", "screen.step(1)", "Next branch", key_display="→"),
        Binding("c", "screen.on_message('continue')", "Continue"),
        Binding("y", "screen.on_message('copy')", "Copy"),
        Binding("k", "screen.on_message('copy', 'code')", "Copy code"),
        Binding("t", "screen.unfold", "Unfold"),
        Binding("d,delete", "screen.on_message('remove')", "Delete", key_display="d"),
        Binding("up,ctrl+up", "screen.select(-1)", "Up", show=False),
        Binding("down,ctrl+down", "screen.select(1)", "Down", show=False),
        Binding("home", "screen.select_first", "First", show=False),
        Binding("end", "screen.compose_message", "To the input", show=False),
        Binding("enter,space,i", "screen.compose_message", "To the input", show=False),
        Binding("pageup", "screen.scroll_page(-1)", "Page up", show=False),
        Binding("pagedown", "screen.scroll_page(1)", "Page down", show=False),
    ]

    def __init__(self, position: Place, *, is_streaming: bool = False) -> None:
        super().__init__(classes=position.message.role)
        self.place = position
        self.message = position.message
        self._is_streaming = is_streaming
        self._is_unfolded = False
        self._writer = ""
        self._clock = ThinkingClock()
        # A streaming reply starts empty: all its text arrives as pieces.
        self._thinking = ThinkingView("" if is_streaming else self.message.thinking, _seconds(self.message))
        self._thinking.display = bool(self._thinking.text.strip())
        self._reply = ReplyView()
        self._shown_calls: tuple[CallRecord, ...] = ()
        # Attributes instead of queries by class: children might not be mounted yet, or be gone when the app ends.
        self._divider, self._head = Static(classes="divider"), Static(classes="head")
        self._said, self._foot = Static(classes="said"), Static(classes="foot")
        self._calls, self._images = Vertical(classes="calls"), Static(classes="said")
        self._shown_images: list[bytes] = []

    def compose(self) -> ComposeResult:
        yield self._divider
        yield self._head
        if self.message.role == "user":
            yield self._said
            yield self._images
        else:
            yield self._thinking
            yield self._reply
            yield self._calls
        yield self._foot

    @property
    def can_unfold(self) -> bool:
        """Whether the message has foldable parts: thinking, tool calls, or a long text of the user."""
        text = self.message.text
        is_long = self.message.role == "user" and (text.count("\n") >= _MAX_LINES or len(text) > _MAX_CHARACTERS)
        return bool(self._thinking.display) or is_long or bool(self.message.calls)

    def show(self, position: Place) -> None:
        """Update everything except the text."""
        if position != self.place or position.message != self.message:
            self.place, self.message = position, position.message
            self._draw()
            self._draw_calls()

    def on_mount(self) -> None:
        self._draw()
        self._draw_calls()

    def toggle(self) -> None:
        self._is_unfolded = not self._is_unfolded
        for section in self.query(Collapsible):
            section.collapsed = not section.collapsed
        self._draw()

    def locate(self, text: str, number: int) -> tuple[Widget, int]:
        """Return the widget that shows match ``number`` of ``text``, and the line of the match in the widget."""
        if self.message.role == "user" and not self._is_unfolded and self.can_unfold:
            self._is_unfolded = True
            self._draw()
        text = text.casefold()
        blocks = [self._said] if self.message.role == "user" else self._reply.walk_children(Static)
        for block in blocks:
            shown = str(block.content).casefold()
            n = shown.count(text)
            if number < n:
                before = text.join(shown.split(text)[: number + 1])
                width = max(1, block.size.width)
                return block, sum(1 + len(line) // width for line in before.split("\n")[:-1])
            number -= n
        return self, 0

    async def fill(self) -> None:
        """Draw the text of a reply, unless it is still streaming."""
        if self.message.role == "assistant" and not self._is_streaming:
            await self._reply.show(self.message.content)

    def begin(self, writer: str) -> None:
        """Start or continue streaming by the model named ``writer``."""
        self._is_streaming = True
        self._writer = writer
        self._clock = ThinkingClock(_seconds(self.message))
        self._draw()

    async def write(self, text: str, *, thinking: bool) -> None:
        self._clock.see(thinking=thinking)
        if thinking:
            self._thinking.display = True
            self._thinking.write(text, self._clock.seconds)
        else:
            await self._reply.write(text)

    async def finish(self, message: ChatMessage) -> None:
        self._is_streaming = False
        self.message = message
        self._thinking.display = bool(message.thinking.strip())
        self._thinking.show(message.thinking, _seconds(message))
        await self._reply.show(message.content)
        self._draw()
        self._draw_calls()

    def _draw(self) -> None:
        self._head.update(self._head_text())
        self._said.update(self._said_text())
        self._draw_images()
        for line, text in ((self._divider, Content(self.place.divider)), (self._foot, self._foot_text())):
            line.update(text)
            line.display = bool(text)

    def _draw_images(self) -> None:
        images = [file.picture for file in self.message.attachments if file.picture and not file.is_sound]
        self._images.display = bool(images)
        if images != self._shown_images:
            self._shown_images = images
            self.app.spawn(self._show_images(images), group="images")

    async def _show_images(self, images: list[bytes]) -> None:
        drawn = await asyncio.to_thread(lambda: [half_blocks(image) for image in images])
        if images is self._shown_images:
            self._images.update(Content("\n\n").join(drawn))

    def _draw_calls(self) -> None:
        if self._shown_calls != self.message.calls and self._calls.is_attached:
            self._shown_calls = self.message.calls
            self._calls.remove_children()
            self._calls.mount_all(_call(call) for call in self.message.calls)

    def _head_text(self) -> Content:
        if self.message.role == "user":
            name = "You"
        else:
            written = "" if self.message.stats is None or self._is_streaming else self.message.stats.model
            name = escape_controls(written or self._writer) or "Reply"
        number, n = self.place.branch
        spans: list[str | Content | tuple[str, str | Style]] = [(name, "bold"), (f" #{self.place.number}", "dim")]
        if n > 1:
            spans += ["  ", self._step("‹", -1, number > 1), f" {number}/{n} ", self._step("›", 1, number < n)]
        return Content.assemble(*spans)

    def _said_text(self) -> Content:
        text = escape_controls(self.message.text)
        lines = text.split("\n")
        if self._is_unfolded or (len(lines) <= _MAX_LINES and len(text) <= _MAX_CHARACTERS):
            return Content(text)
        beginning = "\n".join(lines[: _MAX_LINES // 2])
        n_more, unit = len(lines) - _MAX_LINES // 2, "lines"
        if len(beginning) > _MAX_CHARACTERS or n_more <= 0:
            beginning = text[: _MAX_CHARACTERS // 2]
            n_more, unit = len(text) - len(beginning), "characters"
        return Content.assemble(beginning, (f"\n… {n_more:,} more {unit} (t unfolds)", "dim"))

    def _foot_text(self) -> Content:
        message = self.message
        if self._is_streaming:
            return Content("")
        notes = [f"+ {escape_controls(file.name)} · {file.n_tokens:,} tokens" for file in message.attachments]
        if message.role == "assistant" and message.state in _ENDS:
            hint = f" · {self.app.key_of('continue')} continues" if self.place.is_last else ""
            notes.append(_ENDS[message.state] + hint)
        return Content("\n".join(notes))

    def _step(self, symbol: str, by: int, is_possible: bool) -> tuple[str, str | Style]:
        """Return a symbol that switches to another branch when clicked."""
        if not is_possible:
            return (symbol, "dim")
        return (symbol, Style.from_meta({"@click": f"screen.step_message({self.message.id!r}, {by})"}))


def _call(call: CallRecord) -> Collapsible:
    """Return the section of a call. The diff of an edit is unfolded.

    Invisible characters of the diff and of the arguments are spelled out, because the user decides by this text.
    """
    size = "…" if call.result is None else f"{len(call.result):,} characters"
    if call.change:
        text = Content("\n").join(
            [*map(_diff_line, _beginning(call.change).split("\n")), Content(_shown(call.result))]
        )
    else:
        text = Content(f"{_spelled(_beginning(call.arguments))}\n\n{_shown(call.result)}")
    title = escape_controls(f"{call.name} {shortened(call.subject, _MAX_OF_A_CALL)} · {size}")
    is_folded = not call.change
    return Collapsible(Static(text, classes="thought"), title=title.replace("[", "\\["), collapsed=is_folded)


def _diff_line(line: str) -> Content:
    colours = {"+": "$text-success", "-": "$text-error", "@": "$text-accent"}
    return Content.styled(_spelled(line), colours.get(line[:1], ""))


def _spelled(text: str) -> str:
    return "\t".join(map(spelled_out, text.split("\t")))


def _shown(text: str | None) -> str:
    return escape_controls(_beginning(text or ""))


def _beginning(text: str) -> str:
    n_more = len(text) - _MAX_UNFOLDED
    return text if n_more <= 0 else f"{text[:_MAX_UNFOLDED]}\n… {n_more:,} more characters"


def _seconds(message: ChatMessage) -> float | None:
    return None if message.stats is None else message.stats.thinking_s
