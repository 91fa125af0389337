"""The models on this machine: GGUF files in folders, in the hub's cache, in folders of other programs, and in Python
packages.

Finding models reads no file, so it is quick. `read_details` adds the contents of the headers, which are cached.
Damaged files and unreadable folders do not raise: the result reports them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.catalog import other_programs
from localllm.catalog.demo import demo_path
from localllm.catalog.file_details import Details, DetailsReader
from localllm.catalog.hub_cache import cached_models, cached_repos, hub_cache
from localllm.catalog.hub_names import DEMO, FileGroup, group_files, label
from localllm.catalog.known_models import short_names
from localllm.errors import ModelNotFoundError

#: Limits of a search, because a user might name a whole disk: depth of folders, and number of entries.
MAX_DEPTH = 8
MAX_ENTRIES = 100_000


@dataclass(frozen=True)
class LocalModel:
    name: str  # argument of ``-m``
    path: Path  # the file, or the first file of a split model
    n_bytes: int  # bytes of all files
    n_files: int = 1
    details: Details | None = None  # contents of the header; None before it is read
    error: str | None = None  # missing files of a split model
    aliases: tuple[str, ...] = ()  # other names of the same file: short names, and Ollama's


@dataclass(frozen=True)
class Found:
    """Models on this machine, and folders that could not be searched."""

    models: tuple[LocalModel, ...]  # from the hub's cache, folders, other programs, and Python packages
    problems: tuple[str, ...] = ()  # folders that could not be searched, with the reasons


def find_models(folders: Sequence[Path] = (), *, only_folders: bool = False) -> Found:
    """Return the models in the hub's cache, in ``folders`` at any depth, and of other programs and Python packages
    (`other_programs`). A file that is found twice is listed once.

    ``only_folders``: search ``folders`` only, and name models by their paths.
    """
    search = _Search()
    if not only_folders:
        search.hub()
    for folder in dict.fromkeys(folders):
        search.folder(folder, by_path=only_folders)
    if not only_folders:
        for folder in other_programs.folders():
            search.folder(folder)
        search.ollama()
        search.packages()
    return Found(tuple(search.models), tuple(search.problems))


def demo_model() -> LocalModel | None:
    """Return the model in localllm's package; None if the package has no model."""
    try:
        path = demo_path()
    except ModelNotFoundError:
        return None
    return LocalModel(DEMO, path, path.stat().st_size)


def read_details(models: Sequence[LocalModel]) -> Iterator[LocalModel]:
    """Yield the models in order, each with its details. Details of a damaged file contain the error."""
    reader = DetailsReader()
    try:
        for model in models:
            details = Details(error=model.error) if model.error is not None else reader.read(model.path)
            yield replace(model, details=details)
    finally:
        reader.save()


class _Search:
    """A search through folders. It skips folders and files seen before, because links can form circles."""

    def __init__(self) -> None:
        self.models: list[LocalModel] = []
        self.problems: list[str] = []
        self._names: set[str] = set()
        self._visited: set[tuple[int, int]] = set()
        self._n_entries = 0

    def hub(self) -> None:
        try:
            repos = list(cached_repos())
        except OSError as error:
            self._complain(hub_cache(), error)
            return
        for repo in repos:
            try:
                models = cached_models(repo)
            except OSError as error:
                self._complain(hub_cache(), error)
                continue
            groups = [group for _, group in models]
            for path, group in sorted(models, key=lambda model: model[1].names):
                self._add(f"{repo}:{label(group, groups)}", path, group, short_names(repo, group.quant))

    def ollama(self) -> None:
        """Add Ollama's models, each file once with all its names."""
        names: dict[Path, list[str]] = {}
        for name, model in sorted(other_programs.ollama_models().items()):
            names.setdefault(model.path, []).append(name)
        for path, (name, *aliases) in names.items():
            try:
                self._add(name, path, FileGroup((path.name,), path.stat().st_size), tuple(aliases))
            except OSError as error:
                self._complain(path, error)

    def packages(self) -> None:
        """Add the models of installed Python packages, named PACKAGE/FILE."""
        for package, paths in sorted(other_programs.package_models().items()):
            try:
                groups = group_files({name: path.stat().st_size for name, path in paths.items()})
            except OSError:  # a file that has just been removed
                continue
            for group in groups:
                self._add(f"{package}/{group.names[0]}", paths[group.names[0]], group)

    def folder(self, folder: Path, *, by_path: bool = False) -> None:
        """Add the models in a folder, at any depth."""
        if not os.path.isdir(folder):  # Path.is_dir raises without permission
            advice = "" if by_path else ": see the setting model_folders"
            self.problems.append(f"{folder} is not a folder, or may not be read{advice}")
            return
        sizes: dict[str, int] = {}
        for path in self._files(folder, 0):
            with contextlib.suppress(OSError):  # a broken link, or a file deleted just now
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
        for group in group_files(sizes):
            name, path = group.names[0], folder / group.names[0]
            # Names are resolved in the current folder first, and then in the folders in order.
            is_taken = by_path or name in self._names or os.path.lexists(name)
            self._add(str(path) if is_taken else name, path, group)

    def _files(self, folder: Path, depth: int) -> Iterator[Path]:
        """Yield the GGUF files in a folder, at any depth and in any order."""
        try:
            status = folder.stat()
            if self._is_seen(status) or depth > MAX_DEPTH:
                return
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._n_entries += 1
                    if self._n_entries == MAX_ENTRIES:
                        self.problems.append(f"{folder} and more have over {MAX_ENTRIES:,} entries: name less")
                    if self._n_entries >= MAX_ENTRIES:
                        return
                    if _is_folder(entry):
                        yield from self._files(Path(entry.path), depth + 1)
                    elif entry.name.lower().endswith(".gguf"):
                        yield Path(entry.path)
        except OSError as error:
            self._complain(folder, error)

    def _add(self, name: str, path: Path, group: FileGroup, aliases: tuple[str, ...] = ()) -> None:
        try:
            if self._is_seen(path.stat()):
                return
        except OSError:
            return
        error = None
        if not group.is_complete:
            error = f"{group.n_parts - len(group.names)} of its {group.n_parts} files are missing"
        self._names.add(name)
        self.models.append(LocalModel(name, path, group.n_bytes, len(group.names), error=error, aliases=aliases))

    def _is_seen(self, status: os.stat_result) -> bool:
        file = (status.st_dev, status.st_ino)
        if file in self._visited:
            return True
        self._visited.add(file)
        return False

    def _complain(self, folder: Path, error: OSError) -> None:
        self.problems.append(f"{folder} cannot be searched ({error.strerror or error})")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder to search: a folder whose name does not start with a dot."""
    try:
        return entry.is_dir() and not entry.name.startswith(".")
    except OSError:  # a link to itself
        return False
