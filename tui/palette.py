"""The command palette: all commands of the chat."""

from __future__ import annotations

from functools import partial
from typing import Protocol, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from localllm.tui.menu import MENU, Entry


class _Runner(Protocol):
    def run_command(self, text: str) -> None: ...


class CommandsProvider(Provider):
    """Finds commands by their title and by what they do."""

    async def discover(self) -> Hits:
        for command in MENU:
            yield DiscoveryHit(command.title, self._runner(command), help=_help(command))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in MENU:
            text = f"{command.title} /{command.name}"
            score = max(matcher.match(text), 0.8 * matcher.match(command.help))
            if score > 0:
                yield Hit(score, matcher.highlight(text), self._runner(command), text=text, help=_help(command))

    def _runner(self, command: Entry) -> partial[None]:
        return partial(cast(_Runner, self.screen).run_command, f"/{command.name}")


def _help(command: Entry) -> str:
    return command.help + (f" ({command.shown_key})" if command.key else "")
