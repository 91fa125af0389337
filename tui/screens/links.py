"""Links in what a model writes: opened only on demand, and only those that a browser is for."""

from __future__ import annotations

from urllib.parse import urlsplit

from localllm.tui.base import BaseApp
from localllm.tui.control import shown
from localllm.tui.screens.dialogs import Choose


async def open_link(app: BaseApp, address: str) -> None:
    """Asks whether to open a link, with all of its address, and does so."""
    text = shown(address).replace("\n", "")
    choices = [("no", "Cancel"), ("copy", "Copy the address")]
    title = "No link to a web page"
    if is_web(address):
        choices.append(("open", "Open in the browser"))
        title = "Open this link?"
    chosen = await app.push_screen_wait(Choose(title, text, choices))
    if chosen == "open":
        app.open_url(address)
    elif chosen == "copy":
        app.copy_to_clipboard(text)


def is_web(address: str) -> bool:
    """Whether an address is of a web page: http or https, with a host, and nothing that does not belong there."""
    if any(not "!" <= c <= "~" for c in address):
        return False
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False
