"""Files that are sent with a message: ``@notes.txt``, ``@folder``, ``@src/*.py``, in quotes if the name has spaces.

Images and audio are attached only if the message names the file or a matching pattern, not if it names a folder.
"""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from localllm import pdf
from localllm.agent_tools.tool import storable
from localllm.errors import UsageError
from localllm.regular_file import read_regular
from localllm.shell import bounded_output, decoded
from localllm.tui.chat import pieces
from localllm.tui.chat.conversation import Attachment, ChatMessage

#: Maximum size of a file in bytes, of a command's output in bytes, and maximum number of files per folder or pattern.
MAX_BYTES, MAX_OUTPUT, MAX_FILES = 32 << 20, 1 << 20, 500
#: Time limit of a shell command in seconds.
COMMAND_SECONDS = 30.0

#: File name extensions of images and of audio.
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
SOUNDS = (".wav", ".mp3", ".flac", ".ogg")

#: Returns the number of tokens of an image or audio file.
See = Callable[[bytes], int]

# Only at the start of a word: an address such as me@example.org is not a file.
_REFERENCE = re.compile(r"""(?<!\S)@(?:"([^"\n]+)"|'([^'\n]+)'|(\S+))""")
_PUNCTUATION = ".,;:!?)]}"


class Attached(NamedTuple):
    """The files that a message names."""

    files: tuple[Attachment, ...]  # every file once, or the best pieces if the files do not fit
    unknown: tuple[str, ...] = ()  # words with an @ that name no file; they may be plain text
    skipped: tuple[str, ...] = ()  # files in folders that are not text
    n_tokens: int = 0  # approximate number of tokens of all files
    is_cut: bool = False  # whether ``files`` contains pieces


def attach(
    text: str,
    count: Callable[[str], int],
    earlier: Iterable[Attachment] = (),
    budget: Callable[[], int] = lambda: sys.maxsize,
    rank: pieces.Rank = pieces.ranked,
    see: See | None = None,
) -> Attached:
    """Read the files, folders and patterns (such as ``@docs/*.md``) that ``text`` names.

    ``count`` returns the number of tokens of a string. ``budget`` returns the number of tokens available for files.
    ``earlier`` are attachments of an earlier version of the text. They replace files that no longer exist. ``rank``
    ranks the pieces of files that do not fit. ``see`` is None if the model accepts neither images nor audio.
    """
    old = tuple(earlier)
    reused: list[Attachment] = []
    texts: dict[str, str] = {}
    media: dict[str, bytes] = {}
    unknown, skipped = [], []
    for match in _REFERENCE.finditer(text):
        quoted = match[1] or match[2]
        names = [quoted] if quoted else [match[3], match[3].rstrip(_PUNCTUATION)]
        paths = next((paths for name in names if (paths := _files(name))), [])
        folder = next((path for name in names if (path := _folder(name)) is not None), None)
        for name in paths:
            try:
                if _is_media(name) and (name in names or "*" in match[0] or "?" in match[0]):
                    media[storable(name)] = read_file(name)
                elif (pages := _scanned_pages(name) if name in names and see is not None else None) is not None:
                    media |= {f"{storable(name)}, page {i}": page for i, page in enumerate(pages, 1)}
                else:
                    texts[storable(name)] = read_text_file(name, folder)
            except UsageError:
                if name in names:
                    raise
                skipped.append(name)
        if paths:
            continue
        if gone := [file for file in old if any(map(file.is_of, names))]:
            reused += gone
        elif quoted:
            raise UsageError(f"there is no file {quoted!r} to attach: check the path")
        else:
            unknown.append(match[3])
    media_files = _seen(media, see, budget)
    n_seen = sum(file.n_tokens for file in media_files)
    files, n_tokens, is_cut = _fitting(texts, _REFERENCE.sub("", text), count, lambda: budget() - n_seen, rank)
    return Attached((*reused, *media_files, *files), tuple(unknown), tuple(skipped), n_seen + n_tokens, is_cut)


def _seen(media: Mapping[str, bytes], see: See | None, budget: Callable[[], int]) -> list[Attachment]:
    """Return images and audio with their token counts. Raises UsageError if they do not all fit."""
    if media and see is None:
        name = next(iter(media))
        does = "cannot process audio" if name.lower().endswith(SOUNDS) else "cannot process images"
        raise UsageError(f"{name} cannot be attached: the model {does}; load one with its mmproj file")
    files: list[Attachment] = []
    n_left = budget() if media else 0
    for name, data in media.items():
        assert see is not None
        try:
            files.append(Attachment(name, "", see(data), data))
        except UsageError as error:
            raise UsageError(f"{name} cannot be attached: {error}") from None
        n_left -= files[-1].n_tokens
        if n_left < 0:
            n = files[-1].n_tokens
            subject = f"{name}, which has {n:,} tokens" if len(files) == 1 else f"{len(media)} images"
            raise UsageError(f"there is no room for {subject}: attach fewer, or load the model with a larger context")
    return files


def _is_media(name: str) -> bool:
    return name.lower().endswith((*PICTURES, *SOUNDS))


def media_reference(pasted: str) -> str | None:
    """Return a reference to an image or audio file whose path was pasted. Terminals paste paths of dropped files."""
    path = pasted.strip()
    if len(path) > 4096 or "\n" in path or not _is_media(path.rstrip("\"'")):
        return None
    if path.startswith("file://"):
        path = url2pathname(urlsplit(path).path)
    elif path[0] in "\"'":
        path = path.strip(path[0])
    elif os.sep == "/":
        path = re.sub(r"\\(.)", r"\1", path)  # the terminal escapes the path for a shell
    try:
        is_there = path_of(path).is_file()
    except (OSError, ValueError, UsageError):
        is_there = False
    return (f'@"{path}" ' if re.search(r"\s", path) else f"@{path} ") if is_there else None


def clipboard_images() -> str:
    """Return references to the images or image files on the system's clipboard; empty if there are no images.

    An image is written to a temporary file. Once the message is sent, the chat stores the content.
    """
    from PIL import ImageGrab

    try:
        clipboard = ImageGrab.grabclipboard()
        if not isinstance(clipboard, list):
            file = io.BytesIO()
            if clipboard is None:
                return ""
            clipboard.save(file, "PNG")
            handle, path = tempfile.mkstemp(".png", "clipboard-")
            with open(handle, "wb") as written:
                written.write(file.getbuffer())
            clipboard = [path]
    except (OSError, NotImplementedError):  # a damaged image, or no program that can read the clipboard
        return ""
    return "".join(media_reference(path) or "" for path in clipboard)


def _fitting(
    texts: Mapping[str, str], question: str, count: Callable[[str], int], budget: Callable[[], int], rank: pieces.Rank
) -> tuple[list[Attachment], int, bool]:
    """Return whole files or their best pieces, the tokens of all files, and whether the result contains pieces."""
    n_left = budget() if texts else 0
    n_tokens = sum(map(len, texts.values())) // 4
    if n_tokens <= 4 * n_left:  # otherwise the files are too long for certain
        files = [Attachment(name, content, count(content)) for name, content in texts.items()]
        n_tokens = sum(file.n_tokens for file in files)
        if n_tokens <= n_left:
            return files, n_tokens, False
    best = pieces.best(texts, question, count, n_left, rank)
    if not best:
        raise UsageError(f"only {n_left:,} tokens are available for files: load the model with a larger context")
    return best, n_tokens, True


def _files(name: str) -> list[str]:
    """Return the files for a name, folder or pattern; empty if no file matches.

    Hidden files are included only by name. Raises UsageError if a folder has no files or there are too many.
    """
    try:
        path = path_of(name)
        if path.is_dir():
            paths = _walk(path)
        elif path.exists():
            return [name]
        else:
            has_marks = any(mark in name for mark in "*?[")
            paths = (match for match in glob.iglob(str(path), recursive=True) if has_marks and os.path.isfile(match))
        listed = list(itertools.islice(paths, MAX_FILES + 1))
    except (OSError, ValueError, UsageError):  # the path is too long, contains a NUL or an unknown ~user
        return []
    if not listed and path.is_dir():
        raise UsageError(f"{name} cannot be attached: it has no files")
    if len(listed) > MAX_FILES:
        raise UsageError(f"{name} has more than {MAX_FILES} files: name a smaller folder, or a pattern")
    return listed


def _folder(name: str) -> Path | None:
    """Return the folder with a name; None if it is not a folder."""
    with contextlib.suppress(OSError, ValueError, UsageError):
        if (path := path_of(name)).is_dir():
            return path
    return None


def _walk(folder: Path) -> Iterator[str]:
    """Yield all files below a folder, without hidden files and folders."""
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(at, name) for name in sorted(files) if not name.startswith("."))


def with_attachments(message: ChatMessage) -> str:
    """Return a message as the model receives it: the text, followed by the text files."""
    files = [f"File `{file.name}`:\n{fenced(file.text)}" for file in message.attachments if not file.picture]
    return "\n\n".join([message.content, *files])


def fenced(text: str) -> str:
    """Return ``text`` as a Markdown code block. The fence is longer than any fence in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.removesuffix(chr(10))}\n{fence}"


def path_of(name: str) -> Path:
    """Return the path that a user typed. Raises UsageError if it starts with the home folder of an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"{name} is not a valid path: check the part before the first slash") from None


def read_file(name: str, folder: Path | None = None) -> bytes:
    """Return the bytes of a file.

    Raises UsageError if it cannot be read, is too large, or is a link to a file outside ``folder``.
    """
    try:
        return read_regular(path_of(name), MAX_BYTES, folder=folder)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{name} cannot be attached ({reason}): check its path, size and permissions") from None


def read_text_file(name: str, folder: Path | None = None) -> str:
    """Return the text of a file. Raises UsageError like `read_file`, or if the file is not text."""
    data = read_file(name, folder)
    if _is_pdf(name):  # pages separated by form feeds
        text = pdf.page_texts(name, data)
        if not text.replace("\f", "").strip():
            raise UsageError(f"{name} cannot be attached: its pages are images without text")
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
    """Return images of the pages of a PDF file, or None if the file is not a PDF or has text."""
    if not _is_pdf(name) or pdf.page_texts(name, data := read_file(name)).replace("\f", "").strip():
        return None
    return pdf.page_images(name, data)


def command_output(command: str, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Return the output of a shell command, formatted for a message. The command is stopped after `COMMAND_SECONDS`.

    Raises UsageError if the command cannot be started.
    """
    if not command:
        raise UsageError("give a command: !ls, or /run ls; !! starts a message with an exclamation mark")
    try:
        output = bounded_output(command, MAX_OUTPUT, COMMAND_SECONDS, is_stopped)
    except (OSError, ValueError) as error:
        raise UsageError(f"{command!r} cannot be run ({error})") from None
    return f"Output of `{command}`:\n\n{fenced(decoded(output))}"


# -- Completion of file names ----------------------------------------------------------------------------------------

#: Maximum number of completions.
MOST = 8
_MAX_SCANNED = 5000

_FILE = re.compile(r"""(?:^|(?<=\s))@("[^"\n]*|[^\s"']*)$""")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A completion: ``text`` replaces the line from index ``start`` on."""

    text: str
    start: int
    help: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether this is a folder, so that the user will continue typing."""
        return self.text.endswith(("/", "\\"))


def file_completions(line: str) -> list[Suggestion]:
    """Return the files and folders that complete the name at the end of a line. Only one folder is read."""
    match = _FILE.search(line)
    if match is None:
        return []
    folder, beginning = os.path.split(match[1].lstrip('"'))
    completions: list[Suggestion] = []
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:
            for _, entry in zip(range(_MAX_SCANNED), entries, strict=False):
                name = entry.name
                if name.casefold().startswith(beginning.casefold()) and (beginning or not name.startswith(".")):
                    path, is_folder = os.path.join(folder, name), entry.is_dir()
                    quote = '"' if re.search(r"\s", path) else ""
                    text = f"@{quote}{path}" + (os.sep if is_folder else f"{quote} ")
                    completions.append(Suggestion(text, match.start(), "folder" * is_folder))
    except OSError:
        return []
    return sorted(completions, key=lambda choice: choice.text.lstrip('@"').casefold())[:MOST]
