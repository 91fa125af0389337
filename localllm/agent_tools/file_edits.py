"""Files in a working folder: confined paths, replaced text, atomic writing, diffs and undo.

A model names the paths, and a repository may contain hostile links. Every path is therefore resolved first, and must
then be in the folder.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import heapq
import os
import re
import stat
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from localllm.agent_tools.tool import FileEdit
from localllm.errors import UsageError
from localllm.regular_file import read_regular, reading_error

#: Maximum size of an edited file in bytes.
MAX_EDITED = 1 << 20
#: Unchanged lines around a change in a diff.
_CONTEXT = 3
#: Maximum number of differing lines that are matched. Matching takes quadratic time.
_MAX_MATCHED = 1000
#: Maximum number of places that an error lists, of lines that are compared for an error, and of their characters.
_MAX_PLACES, _MAX_SEARCHED, _MAX_LINE = 8, 2000, 200
#: Maximum characters of a file's text in an error.
_MAX_SHOWN = 4000
#: Maximum number of lines that are compared in cubic time.
_MAX_COMPARED = 20
#: Names that are devices on Windows, in every folder and with every extension.
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])[ .]*(\..*)?", re.IGNORECASE | re.DOTALL)
_IS_WINDOWS = sys.platform == "win32"
#: Held from the check of a file until it is replaced. Edits of several threads thus do not replace each other.
_WRITING = threading.Lock()


def confined(folder: Path, name: str) -> Path:
    """Return a path with links followed. ``folder`` is resolved. Raises UsageError if the path is outside."""
    path = Path(os.path.normpath(folder / name))
    if _IS_WINDOWS and path.is_relative_to(folder) and any(map(_is_alias, path.relative_to(folder).parts)):
        raise UsageError(f"{name!r:.200} is the name of a device or of another file on Windows: give another path")
    try:
        # Resolve only paths that look right: Windows would connect to the server of a path such as \\server\share.
        path = path.resolve() if path.is_relative_to(folder) else path
    except (OSError, ValueError, RuntimeError):  # a NUL, a name that is too long, a cycle of links
        raise UsageError(f"{name!r:.200} is not a valid path: give a path relative to the folder") from None
    if not path.is_relative_to(folder):
        raise UsageError(f"{name!r:.200} is outside the folder: give a path in the folder, without ..")
    return path


def _is_alias(part: str) -> bool:
    """Return whether a name is a device on Windows, a stream of a file, or has an end that Windows removes."""
    return ":" in part or part != part.rstrip(". ") or _DEVICE.fullmatch(part) is not None


def read_confined(folder: Path, name: str, max_bytes: int) -> bytes:
    """Return the content of a regular file in ``folder``.

    Raises UsageError if the path is outside of the folder, or the file is too large or cannot be read.
    """
    path = confined(folder, name)
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        raise reading_error(name, error) from None


def decoded_text(data: bytes, name: str) -> str:
    """Return the text of a file, without a byte order mark. Raises UsageError if it is not UTF-8 text."""
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{name} is not UTF-8 text: only text files can be used")
    return text


def edited(folder: Path, name: str, old: str, new: str) -> FileEdit:
    """Return the edit that replaces the only occurrence of ``old`` in a file, without writing the file.

    Line breaks match in any form, and the inserted lines end like the replaced lines. Raises UsageError if ``old``
    does not occur, or occurs more than once.
    """
    before = read_confined(folder, name, MAX_EDITED)
    text = decoded_text(before, name)
    old, new = (part.replace("\r\n", "\n") for part in (old, new))
    if not old:
        raise UsageError("old_text is empty: give the text to replace, or write the whole file with write_file")
    plain = text.replace("\r\n", "\n")
    starts = _occurrences(plain, old)
    if len(starts) != 1:
        raise UsageError(_ambiguous(name, plain, starts) if starts else _missing(name, plain, old, new))
    ends = re.findall(r"\r?\n", text)
    start, end = (i + ends[: plain.count("\n", 0, i)].count("\r\n") for i in (starts[0], starts[0] + len(old)))
    replaced = text[start:end]
    new = new.replace("\n", line_end(replaced if "\n" in replaced else text))
    after = f"{text[:start]}{new}{text[end:]}"
    return _edit(confined(folder, name), name, before, after)


def written(folder: Path, name: str, content: str) -> FileEdit:
    """Return the edit that creates a file or replaces its whole content, without writing the file.

    A file keeps its line ends and its byte order mark. Raises UsageError if the existing file is not UTF-8 text.
    """
    path = confined(folder, name)
    content = content.removeprefix("\ufeff")  # the diff does not show a byte order mark
    if not os.path.lexists(path):
        return _edit(path, name, None, content)
    before = read_confined(folder, name, MAX_EDITED)
    end = line_end(decoded_text(before, name))
    return _edit(path, name, before, content.replace("\r\n", "\n").replace("\n", end))


def _edit(path: Path, name: str, before: bytes | None, after: str) -> FileEdit:
    if any(part.lower() == ".git" for part in path.parts):  # hooks and settings are programs that git runs
        raise UsageError(f"{name} belongs to git: files in a folder .git cannot be changed")
    if re.search(r"[\0-\x1f\x7f]", name):  # a line break would continue the first lines of the diff
        raise UsageError(f"{name!r:.200} has a control character: give another name")
    bom = codecs.BOM_UTF8 if before is not None and before.startswith(codecs.BOM_UTF8) else b""
    if "\0" in after:
        raise UsageError("the new text has a NUL character, which text files do not have: remove it")
    data = bom + after.encode()
    if data == before:
        raise UsageError(f"{name} has this content already: the new text is the same as the old text")
    if len(data) > MAX_EDITED:
        raise UsageError(f"{name} would be larger than {MAX_EDITED >> 20} MiB, the maximum: write less text")
    if before is not None and not os.access(path, os.W_OK):
        raise UsageError(f"{name} is read-only: change its permissions first")
    return FileEdit(path, name, before, data)


def _occurrences(text: str, old: str) -> list[int]:
    """Return the first positions of ``old``, which may overlap: at most one more than an error lists."""
    starts: list[int] = []
    while len(starts) <= _MAX_PLACES and (at := text.find(old, starts[-1] + 1 if starts else 0)) >= 0:
        starts.append(at)
    return starts


def line_end(text: str) -> str:
    """Return the line end of most lines."""
    return "\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n"


# -- Errors that help the model --------------------------------------------------------------------------------------


def _missing(name: str, text: str, old: str, new: str) -> str:
    lines = text.split("\n")[:_MAX_SEARCHED]
    stripped = [line.strip() for line in old.strip("\n").split("\n")[:_MAX_SEARCHED]]
    for i, line in enumerate(lines):
        similar = lines[i : i + len(stripped)] if line.strip() == stripped[0] else []
        if [line.strip() for line in similar] == stripped:
            actual = "\n".join(similar)[:_MAX_SHOWN]
            return (
                f"old_text is not in {name}: white space differs. Copy the text exactly from line {i + 1}:\n{actual}"
            )
    if new and new in text:
        return f"old_text is not in {name}, but new_text is: the file may have this change already"
    candidates = [line.strip()[:_MAX_LINE] for line in lines]
    if near := _most_similar(max(stripped, key=len)[:_MAX_LINE], candidates):
        return f"old_text is not in {name}. The most similar line is line {candidates.index(near[0]) + 1}: {near[0]}"
    return f"old_text is not in {name}: read the file again, and copy the text exactly"


def _most_similar(text: str, lines: Sequence[str]) -> list[str]:
    """Return the most similar line; empty if no line is similar.

    Comparing takes cubic time, so only the lines with similar characters, starts and ends are compared.
    """
    matcher = difflib.SequenceMatcher(None, "", text)

    def likeness(line: str) -> float:
        matcher.set_seq1(line)
        n_equal = _n_equal(line, text) + _n_equal(line[::-1], text[::-1])
        return matcher.quick_ratio() + n_equal / (len(line) + len(text) + 1)

    return difflib.get_close_matches(text, heapq.nlargest(_MAX_COMPARED, lines, key=likeness), n=1)


def _ambiguous(name: str, text: str, starts: Sequence[int]) -> str:
    lines = ", ".join(dict.fromkeys(str(text.count("\n", 0, start) + 1) for start in starts))
    n = f"more than {_MAX_PLACES}" if len(starts) > _MAX_PLACES else len(starts)
    return f"old_text occurs {n} times in {name} (lines {lines}): add lines around it, so that it occurs only once"


# -- Diffs -----------------------------------------------------------------------------------------------------------


def diff(edit: FileEdit) -> str:
    """Return an edit as a unified diff. A change of many lines is shown as a removal and an insertion."""
    a, b = (_lines(data) for data in (edit.before, edit.after))
    start = _n_equal(a, b)
    n_tail = min(_n_equal(a[::-1], b[::-1]), len(a) - start, len(b) - start)
    start, n_tail = max(0, start - _CONTEXT), max(0, n_tail - _CONTEXT)
    a, b = a[start : len(a) - n_tail], b[start : len(b) - n_tail]
    if len(a) + len(b) <= _MAX_MATCHED:
        groups = list(difflib.SequenceMatcher(None, a, b, autojunk=False).get_grouped_opcodes(_CONTEXT))
    else:
        groups = [[("replace", 0, len(a), 0, len(b))]]
    lines = [f"--- {'(new file)' if edit.before is None else edit.name}", f"+++ {edit.name}"]
    for group in groups:
        (_, a1, _, b1, _), (_, _, a2, _, b2) = group[0], group[-1]
        first_a, first_b = (start + i + (end > i) for i, end in ((a1, a2), (b1, b2)))
        lines.append(f"@@ -{first_a},{a2 - a1} +{first_b},{b2 - b1} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += _marked(" ", a[i1:i2])
            else:
                lines += _marked("-", a[i1:i2]) + _marked("+", b[j1:j2])
    return "\n".join(lines)


def _lines(data: bytes | None) -> list[str]:
    text = (data or b"").decode("utf-8-sig")
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])


def _n_equal(a: Sequence[str], b: Sequence[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _marked(mark: str, lines: Sequence[str]) -> list[str]:
    marked = []
    for line in lines:
        marked.append(mark + line.rstrip("\r\n"))
        if not line.endswith("\n"):
            marked.append("\\ No newline at end of file")
    return marked


# -- Writing ---------------------------------------------------------------------------------------------------------


def apply_edit(edit: FileEdit) -> None:
    """Write the file of an edit. Raises UsageError if the file has changed since, or cannot be written."""
    with _WRITING:
        if _content(edit) != edit.before:
            raise UsageError(f"{edit.name} has changed in the meantime: read it again")
        _replace(edit, edit.after)


def undo_edit(edit: FileEdit) -> None:
    """Restore the content before an edit. Raises UsageError if the file has changed since the edit."""
    with _WRITING:
        if _content(edit) != edit.after:
            raise UsageError(
                f"{edit.name} has changed since the edit, and undo would lose that change: restore it by hand"
            )
        if edit.before is not None:
            _replace(edit, edit.before)
            return
        try:
            edit.path.unlink()
        except OSError as error:
            raise UsageError(f"{edit.name} cannot be removed ({error.strerror}): remove it yourself") from None


def _content(edit: FileEdit) -> bytes | None:
    try:
        if edit.path.resolve() != edit.path:  # a part of the path has become a link
            raise UsageError(f"{edit.name} is a link now: read it again")
        return read_regular(edit.path, MAX_EDITED)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise reading_error(edit.name, error) from None


def _replace(edit: FileEdit, data: bytes) -> None:
    """Write a file under a temporary name, and rename it. The file keeps its mode, owner and group."""
    path = edit.path
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")  # O_EXCL: a predictable name could be a hostile link
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
        try:
            with open(os.open(temporary, flags, 0o666), "wb") as file:
                file.write(data)
                file.flush()
                if sys.platform != "win32" and path.exists():
                    status = path.stat()
                    with contextlib.suppress(PermissionError):
                        os.fchown(file.fileno(), status.st_uid, status.st_gid)
                    os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(
            f"{edit.name} cannot be written ({error.strerror}): check its folder and permissions"
        ) from None
