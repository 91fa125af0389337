"""Text for the screen: control characters become visible symbols, and long texts are shortened or folded.

A model's text may contain escape sequences. A terminal would execute them: move the cursor, set the window title,
write to the clipboard.
"""

from __future__ import annotations

import errno
import re
import sys

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore

from localllm.console import visible, visible_line
from localllm.errors import Argument, LocalLLMError
from localllm.options.declared import in_flags
from localllm.tui.chat.settings import READERS

#: The key that selects a message, in words and as a symbol. On macOS the system uses Ctrl+Up itself.
SELECT_KEY, SELECT_SIGN = ("Shift+Tab", "⇧⇥") if sys.platform == "darwin" else ("Ctrl+Up", "^↑")

# Unicode's block "Control Pictures" has symbols for the first 32 characters and for DEL.
_PICTURES = {i: chr(0x2400 + i) for i in range(0x20) if chr(i) not in "\t\n"} | {0x7F: "\u2421"}
# Explicit marks of direction, which reorder surrounding characters. Right-to-left text does not need them.
_PICTURES |= {i: f"\\u{i:04x}" for i in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_NOTHING = dict.fromkeys(
    [*(i for i in range(0x20) if chr(i) != "\n"), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)


def without_controls(text: str) -> str:
    """Return ``text`` without control characters and without marks that reorder text."""
    return text.translate(_NOTHING)


def escape_controls(text: str) -> str:
    """Return ``text`` with symbols for control characters.

    ESC becomes ``␛``; characters without a symbol become ``\\x9b`` or ``\\u202e``. Tabs and line feeds are unchanged;
    CR LF becomes a line feed.
    """
    return visible(text.replace("\r\n", "\n").translate(_PICTURES))


#: Characters outside printable ASCII, except line feeds. Most are shown unchanged.
_UNUSUAL = re.compile(r"[^\n -~]")
#: Letters, marks and symbols without a visible shape. `str.isprintable` is true for them.
_SHAPELESS = frozenset(
    map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, *range(0xFE00, 0xFE10)))
) | frozenset(map(chr, (*range(0x180B, 0x1810), *range(0xE0100, 0xE01F0))))


def spelled_out(text: str) -> str:
    """Return ``text`` with an escape in place of each character that is invisible or changes how others are drawn.

    Control characters, marks of direction, zero-width characters and unusual spaces become ``\\x1b``, ``\\u202e``, …
    Line feeds stay, and CR LF becomes a line feed.  Dialogs show text from outside this way, because people decide by
    this text.
    """
    return _UNUSUAL.sub(_spelled, text.replace("\r\n", "\n"))


def _spelled(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable() and character not in _SHAPELESS:
        return character
    return character.encode("ascii", "backslashreplace").decode() if ord(character) > 0x7F else repr(character)[1:-1]


def _word(argument: Argument) -> str:
    """Return an argument's name for the user: settings as in /set, loading options as on the command line."""
    return argument.name if argument.name in READERS else in_flags(argument)


def sentence(error: BaseException) -> str:
    """Return the message of an error as one line that is safe in a terminal."""
    text = f"unexpected error in localllm ({type(error).__name__}: {error}): please report it"
    if isinstance(error, LocalLLMError):
        text = error.worded(_word)
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        text = "memory ran out: close other programs, or choose a smaller model or context"
    elif isinstance(error, OSError):
        text = f"the operating system reported an error: {error}"
    return visible_line(text)


_MAX_OF_A_TITLE = 200
_AUTOMATIC_TITLE = 50


def shortened(text: str, length: int) -> str:
    """Return ``text`` as one line, cut between words if it is longer than ``length``."""
    line = visible_line(" ".join(text.split()))
    if len(line) <= length:
        return line
    cut = line[:length].rsplit(" ", 1)[0] if " " in line[length // 2 : length] else line[: length - 1]
    return cut.rstrip(" ,.;:") + "…"


def clean_title(title: str) -> str:
    """Return a title as one line without control characters, with at most 200 characters."""
    return shortened(title, _MAX_OF_A_TITLE)


def automatic_title(text: str) -> str:
    """Return the first line of ``text`` as a title, without Markdown marks, with at most 50 characters."""
    line = next((line.strip("#>*-`~ \t") for line in text.splitlines() if line.strip("#>*-`~ \t")), "")
    return shortened(line, _AUTOMATIC_TITLE)


def parser() -> MarkdownIt:
    """Return a Markdown parser for replies. HTML is shown as text, and each line break in the source is kept."""
    markdown = MarkdownIt("gfm-like", {"html": False})
    markdown.core.ruler.push("breaks", _keep_breaks)
    return markdown


def _keep_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the text of each code block. A code block without an end is included."""
    return [
        (token.info.split()[0] if token.info.split() else "", token.content)
        for token in parser().parse(text)
        if token.type in ("fence", "code_block")
    ]


#: Pasted texts with more lines or characters are folded.
MAX_LINES = 40
MAX_CHARACTERS = 4000

_MARK = re.compile(r"\[pasted text #(\d+): [\d,]+ (?:lines|characters)\]")


class Pastes:
    """Pasted texts of one message. Large texts are folded into placeholders."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def fold(self, text: str) -> str:
        """Return the text for the editor: ``text``, or a placeholder if it is large."""
        n_lines = text.removesuffix("\n").count("\n") + 1
        if n_lines <= MAX_LINES and len(text) <= MAX_CHARACTERS:
            return text
        number = len(self._texts) + 1
        self._texts[number] = text
        size = f"{n_lines:,} lines" if n_lines > MAX_LINES else f"{len(text):,} characters"
        return f"[pasted text #{number}: {size}]"

    def unfold(self, text: str) -> str:
        """Return ``text`` with each placeholder replaced by its pasted text."""
        return _MARK.sub(lambda match: self._texts.get(int(match[1]), match[0]), text)

    def clear(self) -> None:
        self._texts.clear()
