"""Where the Hugging Face hub's library keeps files on this machine; nothing here asks the network.

Layout (as its documentation has it under "Manage the cache")::

    models--ORG--REPO/
        blobs/<hash>                      the files
        refs/main                         the commit that this name had when it was last asked for
        snapshots/<commit>/<path>         links to blobs, under the names that they have in the repository
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from localllm.kernels.regular_file import read_regular
from localllm.library.hub_names import FileGroup, HubName, group_files

_PREFIX = "models--"


def hub_cache() -> Path:
    """The folder of all repositories, as the hub's library finds it."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(folder)))


def repo_folder(repo: str) -> Path:
    """The folder of a repository, "ORG/REPO"."""
    return hub_cache() / (_PREFIX + repo.replace("/", "--"))


def cached_repos() -> Iterator[str]:
    """The repositories of models in the cache, in order of their names."""
    try:
        names = sorted(os.listdir(hub_cache()))
    except FileNotFoundError:
        return
    for name in names:
        org, found, repo = name.removeprefix(_PREFIX).partition("--")
        if name.startswith(_PREFIX) and found:
            yield f"{org}/{repo}"


def snapshots(repo: str) -> list[Path]:
    """The snapshots of a repository, a folder a commit: that of ``main`` first, then the newest."""
    folder = repo_folder(repo)
    try:
        found = [Path(entry.path) for entry in os.scandir(folder / "snapshots") if entry.is_dir()]
        main = ""
        with contextlib.suppress(OSError, ValueError):
            main = read_regular(folder / "refs" / "main", 1000).decode("ascii").strip()
        return sorted(found, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)
    except FileNotFoundError:
        return []


def models_in(snapshot: Path) -> list[FileGroup]:
    """The models in a snapshot's folder; links whose file is gone are left out."""
    sizes: dict[str, int] = {}
    for folder, _, names in os.walk(snapshot):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                if name.lower().endswith(".gguf"):
                    sizes[path.relative_to(snapshot).as_posix()] = path.stat().st_size
    return group_files(sizes)


def cached_models(repo: str) -> list[tuple[Path, FileGroup]]:
    """The models of a repository that are here, with their first files; of several commits the first with it."""
    found: dict[str, tuple[Path, FileGroup]] = {}
    for snapshot in snapshots(repo):
        for group in models_in(snapshot):
            # An older commit's complete set of files is worth more than a newer one's incomplete set.
            if group.stem not in found or (group.is_complete and not found[group.stem][1].is_complete):
                found[group.stem] = (snapshot / group.names[0], group)
    return list(found.values())


def where_cached(name: HubName) -> str:
    """In messages: the part of the cache that a name is looked for in."""
    return f"the cache of {name.repo} here"
