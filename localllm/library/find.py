"""From what a user types to a file: a path, a name in a folder of models, or ``ORG/REPO[:…]`` in the hub's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from localllm.errors import ModelNotFoundError
from localllm.gguf import GGUFFile
from localllm.library.hub_cache import cached_models, hub_cache, where_cached
from localllm.library.names import DEMO, HubName, choices, choose, matching


def model_path(name: str | None, folders: Iterable[Path] = ()) -> str | Path | None:
    """What `localllm.load` takes for a name: a file as `find` has it, or None for the demo model."""
    return None if name is None or (name == DEMO and not os.path.lexists(DEMO)) else find(name, folders)


def demo_path() -> Path:
    """The file of the demo model, which comes with localllm."""
    path = Path(str(resources.files("localllm") / "data" / "demo.gguf"))
    if not path.is_file():
        raise ModelNotFoundError("this installation of localllm has no demo model: name a GGUF file")
    return path


def trained_context(path: str | Path) -> int | None:
    """Tokens of context that a model was trained on; None if its file does not say."""
    with GGUFFile.open(path) as file:
        found = file.metadata.get(f"{file.architecture}.context_length")
    return found if isinstance(found, int) and found > 0 else None


def find(name: str, folders: Iterable[Path] = ()) -> str | Path:
    """The file that a name means, looked for on this machine alone.

    A path that exists comes first, then a file in one of the folders, "demo", and a name on the hub.  What looks like
    a path is given back as it is, for whoever opens it to complain about.

    Args:
        folders: that have models, which are named by their path in there, with or without ".gguf".
    """
    if os.path.lexists(name):
        return name
    for folder in folders:
        for path in (folder / name, folder / f"{name}.gguf"):
            if os.path.isfile(path):  # Path.is_file raises where it may not look
                return path
    if name == DEMO:
        return demo_path()
    hub_name = HubName.parse(name)
    if hub_name is None and re.fullmatch(r"[\w.:-]+(?<!\.gguf)", name, re.IGNORECASE):
        raise ModelNotFoundError(
            f"there is no file or model {name!r} here: localllm models lists those that are, and localllm pull "
            "ORG/REPO[:QUANT] downloads one from the hub"
        )
    return name if hub_name is None else find_cached(hub_name)


def find_cached(name: HubName) -> Path:
    """The file of a model on the hub, the first one if it is split, if it is in the cache."""
    try:
        models = cached_models(name.repo)
    except OSError as error:
        raise ModelNotFoundError(
            f"the cache {hub_cache()} cannot be read ({error.strerror or error}): check its permissions"
        ) from None
    if not models:
        raise ModelNotFoundError(
            f"there is no file {str(name)!r}, nor is it a model in {hub_cache()}: pull it first, localllm pull "
            f"{name}, or check the path"
        )
    groups = [group for _, group in models]
    if name.choice is not None and not matching(name.choice, groups):
        raise ModelNotFoundError(
            f"{where_cached(name)} has no {name.choice!r}, but {choices(name, groups)}: pull it first, localllm pull "
            f"{name}"
        )
    group = choose(name, groups, where_cached(name))
    if not group.is_complete:
        raise ModelNotFoundError(
            f"{where_cached(name)} has {len(group.names)} of the {group.n_parts} files of {group.stem}: pull the "
            f"rest, localllm pull {name}"
        )
    return next(path for path, each in models if each is group)
