"""Control characters in a model's text: shown, never obeyed.

What a model writes may hold escape sequences, which a terminal would execute: move the cursor, set the title, put
text on the clipboard.  Here each control character becomes a symbol for it.
"""

from __future__ import annotations

from localllm.cli.terminal import visible

# Unicode's Control Pictures have symbols for the first 32 characters and for DEL.
_PICTURES = {i: chr(0x2400 + i) for i in range(0x20) if chr(i) not in "\t\n"} | {0x7F: "\u2421"}
# These make what stands beside them read in another order than it is written; right-to-left text does without.
_PICTURES |= {i: f"\\u{i:04x}" for i in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def shown(text: str) -> str:
    """``text`` with symbols for control characters: ESC as ``␛``, those without a symbol as ``\\x9b`` or ``\\u202e``.

    Tabs and line feeds stay, and so do CR LF, as a line feed.
    """
    return visible(text.replace("\r\n", "\n").translate(_PICTURES))
