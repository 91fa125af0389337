"""Locate files in the cache of the Hugging Face hub on this machine, without network access.

Layout (see "Manage the cache" in the documentation of huggingface_hub)::

    models--ORG--REPO/
        blobs/<hash>                      the files
        refs/main                         the commit of this name at the last download
        snapshots/<commit>/<path>         links to blobs, under the names of the files in the repository
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from localllm.catalog.hub_names import FileGroup, group_files
from localllm.regular_file import read_regular

_PREFIX = "models--"


def hub_cache() -> Path:
    """Return the folder of all repositories, by the same environment variables as huggingface_hub."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(folder)))


def repo_folder(repo: str) -> Path:
    return hub_cache() / (_PREFIX + repo.replace("/", "--"))


def cached_repos() -> Iterator[str]:
    """Yield the repositories of models in the cache, in order of their names."""
    try:
        names = sorted(os.listdir(hub_cache()))
    except FileNotFoundError:
        return
    for name in names:
        org, separator, repo = name.removeprefix(_PREFIX).partition("--")
        if name.startswith(_PREFIX) and separator:
            yield f"{org}/{repo}"


def snapshots(repo: str) -> list[Path]:
    """Return the snapshots of a repository, one folder per commit: the commit of ``main`` first, then the newest."""
    folder = repo_folder(repo)
    try:
        folders = [Path(entry.path) for entry in os.scandir(folder / "snapshots") if entry.is_dir()]
        main = ""
        with contextlib.suppress(OSError, ValueError):
            main = read_regular(folder / "refs" / "main", 1000).decode("ascii").strip()
        return sorted(folders, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)
    except FileNotFoundError:
        return []


def models_in(snapshot: Path) -> list[FileGroup]:
    """Return the models in a snapshot's folder; broken links are omitted."""
    sizes: dict[str, int] = {}
    for folder, _, names in os.walk(snapshot):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                if name.lower().endswith(".gguf"):
                    sizes[path.relative_to(snapshot).as_posix()] = path.stat().st_size
    return group_files(sizes)


def parts_of(path: Path) -> list[Path]:
    """Return all files of a model in a folder, which are several for a split model."""
    sizes = {file.name: 0 for file in path.parent.iterdir() if file.suffix.lower() == ".gguf"}
    names = next((group.names for group in group_files(sizes) if path.name in group.names), (path.name,))
    return [path.with_name(name) for name in names]


def remove_file(path: Path) -> None:
    """Remove a file.  If it is a link in the cache, also remove its blob after the last link."""
    target = path.resolve()
    path.unlink()
    snapshots = next((parent for parent in path.parents if parent.name == "snapshots"), None)
    if snapshots is None or target.parent.resolve() != (snapshots.parent / "blobs").resolve():
        return
    if not any(link.is_symlink() and link.resolve() == target for link in snapshots.rglob("*")):
        target.unlink(missing_ok=True)


def cached_models(repo: str) -> list[tuple[Path, FileGroup]]:
    """Return the cached models of a repository with their first files. Earlier snapshots take precedence."""
    models: dict[str, tuple[Path, FileGroup]] = {}
    for snapshot in snapshots(repo):
        for group in models_in(snapshot):
            # An older commit with all files of a model is better than a newer commit with some.
            if group.stem not in models or (group.is_complete and not models[group.stem][1].is_complete):
                models[group.stem] = (snapshot / group.names[0], group)
    return list(models.values())
