"""Tools for files in a folder: read_file, search_files, edit_file, write_file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from localllm import pdf
from localllm.agent_tools.file_edits import apply_edit, confined, decoded_text, diff, edited, read_confined, written
from localllm.agent_tools.tool import (
    AgentTool,
    FileEdit,
    IsStopped,
    ToolOutput,
    stoppable,
    text_argument,
    text_parameters,
)
from localllm.errors import UsageError

#: Maximum size of a file that is read, and of a file that is searched, in bytes.
MAX_READ, MAX_SEARCHED = 32 << 20, 1 << 20
#: Maximum number of entries of a folder, of files and folders that are searched, of their levels, and of results.
_MAX_ENTRIES, _MAX_FILES, _MAX_LEVELS, _MAX_RESULTS = 1000, 20_000, 100, 200
#: Maximum characters of the text of a file, and of a line in the results of a search.
_MAX_TEXT, _MAX_LINE = 18_000, 200
#: Folders whose files are not searched.
_SKIPPED = frozenset((".git", ".hg", ".svn", ".venv", "node_modules", "__pycache__"))
#: File name extensions of images.
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


def file_tools(folder: Path, *, is_writable: bool) -> list[AgentTool]:
    """Return the tools for files in ``folder``, a resolved path. Without ``is_writable`` only tools that read."""
    scope = str(folder)
    reader = AgentTool("read_file", _READ, _read_parameters(), partial(read, folder), scope=scope)
    search = AgentTool("search_files", _SEARCH, _search_parameters(), partial(_search, folder), scope=scope)
    tools = [stoppable(reader), stoppable(search)]
    if is_writable:
        tools += [
            _editor("edit_file", _EDIT, _edit_parameters(), partial(_edited, folder), scope),
            _editor("write_file", _WRITE, _write_parameters(), partial(_written, folder), scope),
        ]
    return tools


_PATH = "path relative to the folder"
_READ = "Reads text or an image, or lists a folder."
_SEARCH = "Finds files by name, and lines by text. Gives paths, or lines as path:number: line."
_EDIT = "Replaces text in a file. Read the file first."
_WRITE = "Creates a file, or replaces its whole content. To change a part of a file, use edit_file."


def _read_parameters() -> dict[str, Any]:
    parameters = text_parameters("path", path=f"{_PATH}; . is the folder itself")
    line = {"type": "integer", "description": "number of the first line, from 1; for long files"}
    parameters["properties"]["first_line"] = line
    return parameters


def _search_parameters() -> dict[str, Any]:
    text = "text to find in the files, in any case; empty to find files only by name"
    return text_parameters(text=text, files="pattern of file names, such as *.py or docs/*.md; default: all files")


def _edit_parameters() -> dict[str, Any]:
    old = "text to replace, exactly as in the file. It must occur only once"
    return text_parameters("path", "old_text", "new_text", path=_PATH, old_text=old, new_text="the new text")


def _write_parameters() -> dict[str, Any]:
    return text_parameters("path", "content", path=_PATH, content="the whole text of the file")


# -- Reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path, arguments: Mapping[str, Any], is_stopped: IsStopped) -> ToolOutput | str:
    """Return the text of a file from a line on, an image, or the entries of a folder."""
    name = text_argument(arguments, "path")
    path = confined(folder, name)
    if path.is_dir():
        return _entries(path)
    data = read_confined(folder, name, MAX_READ)
    if name.lower().endswith(_IMAGES):
        return ToolOutput(f"the image {name}", (data,))
    if name.lower().endswith(".pdf"):
        text = pdf.page_texts(name, data)
        if not text.replace("\f", "").strip():
            raise UsageError(f"{name} is a PDF file of images without text: it cannot be read")
    else:
        text = decoded_text(data, name)
    return _page(text.replace("\r\n", "\n"), arguments.get("first_line", 1))


def _entries(folder: Path) -> str:
    with os.scandir(folder) as entries:  # `DirEntry.is_dir` raises OSError for a cycle of links
        names = [
            f"{entry.name}/" if os.path.isdir(entry.path) else entry.name
            for entry in islice(entries, _MAX_ENTRIES + 1)
        ]
    more = f"\n(more than {_MAX_ENTRIES} entries)" if len(names) > _MAX_ENTRIES else ""
    return "\n".join(sorted(names[:_MAX_ENTRIES])) + more


def _page(text: str, first: object) -> str:
    """Return the lines from line ``first`` on, and a remark how to read the remaining lines."""
    if isinstance(first, str) and first.isdecimal():
        first = int(first[:9])
    if not isinstance(first, int) or first < 1:
        raise UsageError("first_line must be a whole number of at least 1")
    lines = text.split("\n")
    if first > len(lines):
        raise UsageError(f"the file has only {len(lines):,} lines: give a smaller first_line")
    n, n_characters = first - 1, 0
    while n < len(lines) and (n < first or n_characters + len(lines[n]) < _MAX_TEXT):
        n_characters += len(lines[n]) + 1
        n += 1
    part = "\n".join(lines[first - 1 : n])
    if n == len(lines):
        return part
    return f"{part}\n(lines {first:,} to {n:,} of {len(lines):,}: first_line {n + 1} continues)"


# -- Searching -------------------------------------------------------------------------------------------------------


def _search(folder: Path, arguments: Mapping[str, Any], is_stopped: IsStopped) -> str:
    text = text_argument(arguments, "text", "").casefold()
    pattern = text_argument(arguments, "files", "") or "*"
    if len(pattern) > _MAX_LINE:
        raise UsageError(f"files is longer than {_MAX_LINE} characters: give a shorter pattern")
    results: list[str] = []
    for name in _names(folder, pattern):
        results += _matching_lines(folder, name, text) if text else [name]
        if len(results) > _MAX_RESULTS or is_stopped():
            break
    more = [f"(more than {_MAX_RESULTS} results: search for a more specific text or pattern)"]
    return "\n".join(results[:_MAX_RESULTS] + more * (len(results) > _MAX_RESULTS)) or "nothing found"


def _names(folder: Path, pattern: str) -> Iterator[str]:
    """Yield the paths of files that match, relative to ``folder``. Links are omitted."""
    n_files = 0
    for at, folders, files in os.walk(folder):
        start = Path(at).relative_to(folder)
        is_deep = len(start.parts) >= _MAX_LEVELS  # `os.walk` is recursive before Python 3.12
        folders[:] = [] if is_deep else sorted(name for name in folders if name not in _SKIPPED)
        n_files += len(folders) + len(files)
        if n_files > _MAX_FILES:
            raise UsageError(f"the folder has more than {_MAX_FILES:,} files: choose a smaller folder")
        for name in sorted(files):
            relative = (start / name).as_posix()
            is_match = fnmatchcase(name, pattern) or fnmatchcase(relative, pattern.removeprefix("./"))
            if is_match and not os.path.islink(os.path.join(at, name)):
                yield relative


def _matching_lines(folder: Path, name: str, text: str) -> list[str]:
    try:
        lines = decoded_text(read_confined(folder, name, MAX_SEARCHED), name).split("\n")
    except UsageError:  # not text, too large or not readable
        return []
    matches = [(number, line) for number, line in enumerate(lines, 1) if text in line.casefold()]
    return [f"{name}:{number}: {line.strip()[:_MAX_LINE]}" for number, line in matches[: _MAX_RESULTS + 1]]


# -- Editing ---------------------------------------------------------------------------------------------------------


def _edited(folder: Path, arguments: Mapping[str, Any]) -> FileEdit:
    old, new = text_argument(arguments, "old_text"), text_argument(arguments, "new_text")
    return edited(folder, text_argument(arguments, "path"), old, new)


def _written(folder: Path, arguments: Mapping[str, Any]) -> FileEdit:
    return written(folder, text_argument(arguments, "path"), text_argument(arguments, "content"))


def _editor(
    name: str,
    description: str,
    parameters: dict[str, Any],
    edit_of: Callable[[Mapping[str, Any]], FileEdit],
    scope: str,
) -> AgentTool:
    """Return a tool that applies the edit of its arguments, on the calling thread, so that it always completes."""

    def run(arguments: Mapping[str, Any], is_stopped: IsStopped) -> ToolOutput:
        edit = edit_of(arguments)
        apply_edit(edit)
        return ToolOutput(f"{edit.name} is {'created' if edit.before is None else 'changed'}", edit=edit)

    return AgentTool(name, description, parameters, run, lambda arguments: diff(edit_of(arguments)), scope)
