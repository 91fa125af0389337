"""The keys that do something now, in a line at the foot of the screen."""

from __future__ import annotations

from textual.binding import Binding
from textual.widgets import Footer


class KeyFooter(Footer):
    """A footer in which no key is cut: where it is too narrow for all, the last ones are left out."""

    _offered: list[tuple[Binding, bool]] | None = None

    async def recompose(self) -> None:
        if not self.is_attached:
            return
        offered = [(active.binding, active.enabled) for active in self.screen.active_bindings.values()]
        if offered != self._offered:  # what Textual reports is mostly another focus, with the same keys
            self._offered = offered
            await super().recompose()
            self._fit()

    def on_resize(self) -> None:
        self._fit()

    def _fit(self) -> None:
        room = self.size.width
        # The palette, from which all else can be reached, stands last, but stays.
        for key in sorted(self.children, key=lambda child: not child.has_class("-command-palette")):
            room -= key.get_content_width(self.size, self.size) + key.gutter.width
            key.display = room >= 0
