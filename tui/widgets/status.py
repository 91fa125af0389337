"""The status line (context, speed, model, memory) and the footer with keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from textual.binding import Binding
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Footer

from localllm.console import quantity
from localllm.tui.chat.conversation import ReplyStats
from localllm.tui.chat.session import Meter
from localllm.tui.text import escape_controls

#: Share of the context at which the meter turns to the warning colour.
_NEARLY_FULL = 0.85
_BAR_WIDTH = 10


@dataclass(frozen=True)
class Status:
    """Content of the status line: activity, its progress (0 to 1), counters, memory in bytes, the working folder."""

    activity: str = ""
    progress: float | None = None
    meter: Meter | None = None
    stats: ReplyStats | None = None
    model: str = ""
    device: str = ""
    memory: int = 0
    gpu_memory: int = 0
    folder: str = ""


class StatusBar(Widget):
    """One line. If it is too narrow, the least important items are omitted."""

    status = reactive(Status())

    def change(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)

    def render(self) -> Content:
        return line(self.status, self.size.width)


def line(status: Status, width: int) -> Content:
    """Return the status line for ``width`` columns."""
    items = _parts(status)
    while len(items) > 1 and sum(item.cell_length + 3 for _, item in items) - 3 > width:
        items.remove(min(items, key=lambda item: item[0]))
    return Content(" · ").join(item for _, item in items)


def _parts(status: Status) -> list[tuple[int, Content]]:
    """Return the items with their priorities."""
    items: list[tuple[int, Content]] = []
    if status.activity:
        bar = ""
        if (share := status.progress) is not None:
            n_full = round(_BAR_WIDTH * share)
            bar = f" {'━' * n_full}{'╌' * (_BAR_WIDTH - n_full)} {share:.0%}"
        items.append((9, Content.styled(f"{status.activity}{bar}", "$text-accent")))
    if status.meter is not None and status.meter.context:
        share = status.meter.used / status.meter.context
        text = f"{status.meter.used:,} / {status.meter.context:,} · {share:.0%}"
        items.append((8, Content.styled(text, "$text-warning" if share >= _NEARLY_FULL else "")))
    if (stats := status.stats) is not None and stats.new_tokens:
        items.append((7, Content(f"{stats.rate:.1f} tok/s")))
        items.append((3, Content(f"first after {stats.first_token_s:.2f} s")))
    if status.model:
        items.append((6, Content(escape_controls(status.model))))
        items.append((4, Content(status.device)))
    elif not status.activity:
        items.append((6, Content.styled("no model: /model chooses one", "$text-warning")))
    if status.folder:
        items.append((5, Content(escape_controls(f"in {status.folder}"))))
    if status.memory:
        gpu = f" + {quantity(status.gpu_memory, 'B')} GPU" if status.gpu_memory else ""
        items.append((2, Content(f"{quantity(status.memory, 'B')}{gpu} in use")))
    return items


class KeyFooter(Footer):
    """A footer that never cuts a key. If it is too narrow, the last keys are omitted."""

    _offered: list[tuple[Binding, bool]] | None = None

    async def recompose(self) -> None:
        if not self.is_attached:
            return
        offered = [(active.binding, active.enabled) for active in self.screen.active_bindings.values()]
        if offered != self._offered:  # most focus changes do not change the keys
            self._offered = offered
            await super().recompose()
            self._fit()

    def on_resize(self) -> None:
        self._fit()

    def _fit(self) -> None:
        width = self.size.width
        # The key of the palette is last but always shown, because the palette lists all commands.
        for key in sorted(self.children, key=lambda child: not child.has_class("-command-palette")):
            margin = key.styles.margin.width
            width -= key.get_content_width(self.size, self.size) + key.gutter.width + margin
            key.display = width + margin >= 0
