"""What a message that is being typed can go on with: names of commands, and of files after an ``@``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

#: Choices that are offered at once.
MOST = 8
_MOST_SCANNED = 5000

_COMMAND = re.compile(r"/([\w-]*)")
_FILE = re.compile(r"""(?:^|(?<=\s))@("[^"\n]*|[^\s"']*)$""")


@dataclass(frozen=True, slots=True)
class Completion:
    """A way to go on.

    Attributes:
        text: what takes the place of the word at the cursor.
        start: where in the line that word begins.
        help: what it is, in a few words.
        goes_on: whether more can follow at once: it is a folder.
    """

    text: str
    start: int
    help: str = ""
    goes_on: bool = False


def command_completions(line: str, commands: Iterable[tuple[str, str]]) -> list[Completion]:
    """The commands, each with its help, that begin with what stands in the line; none unless it is one word."""
    match = _COMMAND.fullmatch(line)
    if match is None:
        return []
    return [Completion(f"/{name}", 0, text) for name, text in commands if name.startswith(match[1].lower())]


def file_word(line: str) -> str | None:
    """The beginning of a file's name at the end of a line; None if there is none."""
    match = _FILE.search(line)
    return None if match is None else match[1].lstrip('"')


def file_completions(line: str) -> list[Completion]:
    """The files and folders whose names begin as the one at the end of a line; it looks into a folder."""
    match = _FILE.search(line)
    if match is None:
        return []
    folder, beginning = os.path.split(match[1].lstrip('"'))
    found: list[Completion] = []
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:
            for _, entry in zip(range(_MOST_SCANNED), entries, strict=False):
                name = entry.name
                if name.casefold().startswith(beginning.casefold()) and (beginning or not name.startswith(".")):
                    found.append(_completion(os.path.join(folder, name), entry.is_dir(), match.start()))
    except OSError:
        return []
    return sorted(found, key=lambda choice: choice.text.lstrip('@"').casefold())[:MOST]


def _completion(path: str, is_folder: bool, start: int) -> Completion:
    quote = '"' if re.search(r"\s", path) else ""
    if is_folder:
        return Completion(f"@{quote}{path}{os.sep}", start, "folder", goes_on=True)
    return Completion(f"@{quote}{path}{quote} ", start)
