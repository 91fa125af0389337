"""Files that are sent with a message: ``@notes.txt``, ``@folder``, ``@src/*.py``, in quotes if there are spaces.

A picture, or a sound, goes with a message if it is named itself, or by a pattern, and those of folders do not.
"""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from localllm.errors import UsageError
from localllm.kernels.regular_file import read_regular
from localllm.shell import decoded, kill_tree, own_group
from localllm.tui.chat import pdf, pieces
from localllm.tui.chat.conversation import Attachment, Message
from localllm.tui.text import storable

#: Bytes of a file, of what a command prints, and files of a folder.
MAX_BYTES, MAX_OUTPUT, MAX_FILES = 32 << 20, 1 << 20, 500
#: Seconds that a shell command may take.
COMMAND_SECONDS = 30.0
#: Seconds between two looks at whether it is to end.
_WATCH_SECONDS = 0.05

#: Endings of names of pictures, and of sounds.
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
SOUNDS = (".wav", ".mp3", ".flac", ".ogg")

#: Gives the tokens that a model makes of the file of a picture or a sound.
See = Callable[[bytes], int]

# At the beginning of a word: an address such as me@example.org names no file.
_REFERENCE = re.compile(r"""(?<!\S)@(?:"([^"\n]+)"|'([^'\n]+)'|(\S+))""")
_PUNCTUATION = ".,;:!?)]}"


class Attached(NamedTuple):
    """The files that a text names."""

    files: tuple[Attachment, ...]  # each of them once, or where they do not fit, the pieces that match the text best
    unknown: tuple[str, ...] = ()  # what looks like a name but is that of no file; it may be just a word with an @
    skipped: tuple[str, ...] = ()  # files of folders that are not text
    n_tokens: int = 0  # of all files, about
    is_cut: bool = False  # whether these are pieces


def attach(
    text: str,
    count: Callable[[str], int],
    known: Iterable[Attachment] = (),
    budget: Callable[[], int] = lambda: sys.maxsize,
    rank: pieces.Rank = pieces.ranked,
    see: See | None = None,
) -> Attached:
    """Reads the files that a text names, also by folders and by patterns such as ``@docs/*.md``.

    ``count`` gives the tokens of a text, ``budget`` those that files may have.  Files that are gone are taken from
    ``known``, those of an earlier version of the text; ``rank`` ranks pieces of files that do not fit.  ``see`` is
    None where the model sees no pictures and hears no sounds.
    """
    old = tuple(known)
    kept: list[Attachment] = []
    texts: dict[str, str] = {}
    pictures: dict[str, bytes] = {}
    unknown, skipped = [], []
    for match in _REFERENCE.finditer(text):
        quoted = match[1] or match[2]
        names = [quoted] if quoted else [match[3], match[3].rstrip(_PUNCTUATION)]
        found = next((found for name in names if (found := _files(name))), [])
        for name in found:
            try:
                if _is_media(name) and (name in names or "*" in match[0] or "?" in match[0]):
                    pictures[storable(name)] = read_file(name)
                elif (pages := _scanned_pages(name) if name in names and see is not None else None) is not None:
                    pictures |= {f"{storable(name)}, page {i}": page for i, page in enumerate(pages, 1)}
                else:
                    texts[storable(name)] = read_text_file(name, _folder(names))
            except UsageError:
                if name in names:
                    raise
                skipped.append(name)
        if found:
            continue
        if gone := [file for file in old if any(map(file.is_of, names))]:
            kept += gone
        elif quoted:
            raise UsageError(f"there is no file {quoted!r} to attach: check the path")
        else:
            unknown.append(match[3])
    seen = _seen(pictures, see, budget)
    n_seen = sum(file.n_tokens for file in seen)
    files, n_tokens, is_cut = _fitting(texts, _REFERENCE.sub("", text), count, lambda: budget() - n_seen, rank)
    return Attached((*kept, *seen, *files), tuple(unknown), tuple(skipped), n_seen + n_tokens, is_cut)


def _seen(pictures: Mapping[str, bytes], see: See | None, budget: Callable[[], int]) -> list[Attachment]:
    """Pictures and sounds with their tokens, as far as all of them fit."""
    if pictures and see is None:
        name = next(iter(pictures))
        does = "hears no sounds" if name.lower().endswith(SOUNDS) else "sees no pictures"
        raise UsageError(f"{name} cannot be attached: the model {does}; load one with its mmproj file")
    files: list[Attachment] = []
    left = budget() if pictures else 0
    for name, data in pictures.items():
        assert see is not None
        try:
            files.append(Attachment(name, "", see(data), data))
        except UsageError as error:
            raise UsageError(f"{name} cannot be attached: {error}") from None
        left -= files[-1].n_tokens
        if left < 0:
            n = files[-1].n_tokens
            what = f"{name}, which has {n:,} tokens" if len(files) == 1 else f"{len(pictures)} pictures"
            raise UsageError(f"there is no room for {what}: attach fewer, or load the model with a larger context")
    return files


def _is_media(name: str) -> bool:
    return name.lower().endswith((*PICTURES, *SOUNDS))


def picture_reference(pasted: str) -> str | None:
    """The reference to a picture or a sound whose path was pasted, or written by a terminal for a dropped file."""
    path = pasted.strip()
    if len(path) > 4096 or "\n" in path or not _is_media(path.rstrip("\"'")):
        return None
    if path.startswith("file://"):
        path = url2pathname(urlsplit(path).path)
    elif path[0] in "\"'":
        path = path.strip(path[0])
    elif os.sep == "/":
        path = re.sub(r"\\(.)", r"\1", path)  # as for a shell
    try:
        is_there = path_of(path).is_file()
    except (OSError, ValueError, UsageError):
        is_there = False
    return (f'@"{path}" ' if re.search(r"\s", path) else f"@{path} ") if is_there else None


def clipboard_pictures() -> str:
    """What attaches the pictures on the system's clipboard, or the files of pictures there; "" where none are.

    A picture gets a temporary file: the chat keeps its bytes once it is sent.
    """
    from PIL import ImageGrab

    try:
        found = ImageGrab.grabclipboard()
        if not isinstance(found, list):
            file = io.BytesIO()
            if found is None:
                return ""
            found.save(file, "PNG")
            handle, path = tempfile.mkstemp(".png", "clipboard-")
            with open(handle, "wb") as written:
                written.write(file.getbuffer())
            found = [path]
    except (OSError, NotImplementedError):  # damaged, or no program that reads the clipboard
        return ""
    return "".join(picture_reference(path) or "" for path in found)


def _fitting(
    texts: Mapping[str, str], question: str, count: Callable[[str], int], budget: Callable[[], int], rank: pieces.Rank
) -> tuple[list[Attachment], int, bool]:
    """Files as a whole, or their best pieces; all their tokens, and whether these are pieces."""
    left = budget() if texts else 0
    n_tokens = sum(map(len, texts.values())) // 4
    if n_tokens <= 4 * left:  # else it need not be counted
        files = [Attachment(name, content, count(content)) for name, content in texts.items()]
        n_tokens = sum(file.n_tokens for file in files)
        if n_tokens <= left:
            return files, n_tokens, False
    best = pieces.best(texts, question, count, left, rank)
    if not best:
        raise UsageError(f"there is room for {left:,} tokens of files alone: load the model with a larger context")
    return best, n_tokens, True


def _files(name: str) -> list[str]:
    """The files of a name, folder or pattern; hidden ones by name alone.  Raises UsageError if too many or none."""
    try:
        path = path_of(name)
        if path.is_dir():
            found = _walk(path)
        elif path.exists():
            return [name]
        else:
            has_marks = any(mark in name for mark in "*?[")
            found = (each for each in glob.iglob(str(path), recursive=True) if has_marks and os.path.isfile(each))
        listed = list(itertools.islice(found, MAX_FILES + 1))
    except (OSError, ValueError, UsageError):  # too long, a NUL, or ~somebody
        return []
    if not listed and path.is_dir():
        raise UsageError(f"{name} cannot be attached: it has no files")
    if len(listed) > MAX_FILES:
        raise UsageError(f"{name} has more than {MAX_FILES} files: name a smaller folder, or a pattern")
    return listed


def _folder(names: Iterable[str]) -> Path | None:
    """Return the folder that one of some names is of; None if there is none."""
    for name in names:
        with contextlib.suppress(OSError, ValueError, UsageError):
            if (path := path_of(name)).is_dir():
                return path
    return None


def _walk(folder: Path) -> Iterator[str]:
    """The files in a folder and below it, but for hidden ones."""
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(at, name) for name in sorted(files) if not name.startswith("."))


def with_attachments(message: Message) -> str:
    """A message as the model reads it: its text, and below it its files of text."""
    parts = [f"File `{file.name}`:\n{fenced(file.text)}" for file in message.attachments if not file.picture]
    return "\n\n".join([message.content, *parts])


def fenced(text: str) -> str:
    """A text as a block of Markdown, whatever fences are in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.removesuffix(chr(10))}\n{fence}"


def path_of(name: str) -> Path:
    """The path that somebody typed.  Raises UsageError if it begins with the home of somebody who is not there."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"{name} is not a path here: check its beginning") from None


def read_file(name: str, folder: Path | None = None) -> bytes:
    """Return the bytes of a file.

    Raises UsageError if it cannot be read, is too large, or is a link to a file outside of a ``folder``.
    """
    try:
        return read_regular(path_of(name), MAX_BYTES, folder=folder)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{name} cannot be attached ({reason}): check its path, size and permissions") from None


def read_text_file(name: str, folder: Path | None = None) -> str:
    """Return the text of a file.  Raises UsageError as `read_file`, or if it is no text."""
    data = read_file(name, folder)
    if _is_pdf(name):  # its pages, with form feeds between them
        text = pdf.page_texts(name, data)
        if not text.replace("\f", "").strip():
            raise UsageError(f"{name} cannot be attached: it has no text, only pictures of it")
        return storable(text)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{name} cannot be attached: it is not UTF-8 text")
    return text


def _is_pdf(name: str) -> bool:
    return name.lower().endswith(".pdf")


def _scanned_pages(name: str) -> list[bytes] | None:
    """Return images of a PDF file's pages; None if it has text."""
    if not _is_pdf(name) or pdf.page_texts(name, data := read_file(name)).replace("\f", "").strip():
        return None
    return pdf.page_images(name, data)


def command_output(command: str, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """The output of a shell command within `COMMAND_SECONDS`, as a text to send.  Raises UsageError if it fails."""
    if not command:
        raise UsageError("give a command: !ls, or /run ls; !! begins a message with an exclamation mark")
    try:
        process = subprocess.Popen(command, shell=True, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, **own_group())
    except (OSError, ValueError) as error:
        raise UsageError(f"{command!r} cannot be run ({error})") from None
    assert process.stdout is not None
    output, data = process.stdout, bytearray()

    def read() -> None:
        with output:
            while len(data) < MAX_OUTPUT and (more := os.read(output.fileno(), MAX_OUTPUT - len(data))):
                data.extend(more)

    # In a thread, for a program that has left the shell's group may keep its output open for ever.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    end = time.monotonic() + COMMAND_SECONDS
    try:
        while reader.is_alive() and time.monotonic() < end and not is_stopped():
            reader.join(_WATCH_SECONDS)
    finally:
        kill_tree(process)  # also where all is read: of endless output the beginning is enough
        process.wait()
    reader.join(_WATCH_SECONDS)
    return f"Output of `{command}`:\n\n{fenced(decoded(bytes(data)))}"


# -- Names that are being typed --------------------------------------------------------------------------------------

#: Choices that are offered at once.
MOST = 8
_MAX_SCANNED = 5000

_FILE = re.compile(r"""(?:^|(?<=\s))@("[^"\n]*|[^\s"']*)$""")


@dataclass(frozen=True, slots=True)
class Completion:
    """A way to go on: ``text`` for what stands from ``start`` on."""

    text: str
    start: int
    help: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether it is a folder, after which more can follow."""
        return self.text.endswith(("/", "\\"))


def file_completions(line: str) -> list[Completion]:
    """The files and folders whose names begin as the one at the end of a line; it looks into a folder."""
    match = _FILE.search(line)
    if match is None:
        return []
    folder, beginning = os.path.split(match[1].lstrip('"'))
    found: list[Completion] = []
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:
            for _, entry in zip(range(_MAX_SCANNED), entries, strict=False):
                name = entry.name
                if name.casefold().startswith(beginning.casefold()) and (beginning or not name.startswith(".")):
                    path, is_folder = os.path.join(folder, name), entry.is_dir()
                    quote = '"' if re.search(r"\s", path) else ""
                    text = f"@{quote}{path}" + (os.sep if is_folder else f"{quote} ")
                    found.append(Completion(text, match.start(), "folder" * is_folder))
    except OSError:
        return []
    return sorted(found, key=lambda choice: choice.text.lstrip('@"').casefold())[:MOST]
