"""Find the file that a user's name means: a path, a name in a folder of models, ``ORG/REPO[:…]`` or a short name
(`known_models`) in the hub's cache, a name of Ollama's, or words of the name of a model on this machine."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.catalog import other_programs
from localllm.catalog.demo import demo_path
from localllm.catalog.hub_cache import cached_models, hub_cache, models_in
from localllm.catalog.hub_names import DEFAULT_QUANT, DEMO, HubName, choices, choose, matching
from localllm.catalog.known_models import KnownModel, advice, known_model
from localllm.errors import ModelNotFoundError, warn
from localllm.kernels.cpu.host import available_memory

if TYPE_CHECKING:
    from localllm.catalog.listing import LocalModel


def model_path(name: str | None, folders: Iterable[Path] = ()) -> str | Path | None:
    """Return the argument of `localllm.load` for a name: the result of `find`, or None for the demo model."""
    return None if name is None or (name == DEMO and not os.path.lexists(DEMO)) else find(name, folders)


def trained_context(path: str | Path) -> int | None:
    """Return the tokens of context that a model was trained on; None if the file has no such key."""
    from localllm.gguf import GGUFFile

    with GGUFFile.open(path) as file:
        n_tokens = file.metadata.get(f"{file.architecture}.context_length")
    return n_tokens if isinstance(n_tokens, int) and n_tokens > 0 else None


def find(name: str, folders: Iterable[Path] = ()) -> str | Path:
    """Return the file that a name means. Searches this machine only.

    The order is: an existing path, with or without ".gguf"; a file in ``folders`` or in folders of other programs;
    "demo"; a name of Ollama's; a name on the hub; a short name; a file of a Python package, PACKAGE/FILE; words of a
    name that `find_models` lists. Other names that look like paths are returned unchanged, so opening them raises the
    error.

    ``folders``: folders of models, which are named by their paths in the folder, with or without ".gguf".

    Raises:
        ModelNotFoundError: there is no such model on this machine.
    """
    if os.path.lexists(name):
        return name
    if name != DEMO and os.path.isfile(f"{name}.gguf"):
        return f"{name}.gguf"
    user_folders, folders = list(folders), [*folders, *other_programs.folders()]
    for folder in folders:
        for path in (folder / name, folder / f"{name}.gguf"):
            if os.path.isfile(path):  # Path.is_file raises without permission
                return path
    if name == DEMO:
        return demo_path()
    if (model := other_programs.ollama_model(name)) is not None:
        return model.path
    if (hub_name := HubName.parse(name)) is not None:
        return _downloaded(hub_name, folders)
    known = known_model(name)
    if known is not None and (downloaded := known_here(*known, folders)) is not None:
        return downloaded
    if re.fullmatch(r"[\w.:-]+(?<!\.gguf)", name, re.IGNORECASE):
        if (fitting := _by_words(name, user_folders)) is not None:
            return fitting.path
        raise _not_here(name, known)
    package, _, file = name.partition("/")
    return other_programs.package_models().get(package, {}).get(file, name) if file else name


def _not_here(name: str, known: tuple[KnownModel, str | None] | None) -> ModelNotFoundError:
    if known is not None:
        return ModelNotFoundError(f"{name} is not on this machine: localllm pull {name} downloads it")
    remedy = advice(name)
    if remedy is None:
        remedy = "localllm models lists the names, and localllm pull ORG/REPO[:QUANT] downloads one from the hub"
    return ModelNotFoundError(f"there is no file or model {name!r} here: {remedy}")


def _downloaded(name: HubName, folders: Iterable[Path]) -> Path:
    """Return the file of a model on the hub, in the hub's cache or in LM Studio's layout in a folder.

    Raises ModelNotFoundError.
    """
    try:
        return find_cached(name)
    except ModelNotFoundError:
        for folder in (root / name.repo for root in folders):
            groups = models_in(folder)
            if groups and (name.choice is None or matching(name.choice, groups)):
                return folder / choose(name, groups, str(folder)).names[0]
        raise


def known_here(model: KnownModel, format: str | None, folders: Iterable[Path] = ()) -> Path | None:
    """Return the file of a short name: the first of its formats that was downloaded; None without a download."""
    for choice in model.formats if format is None else (format,):
        with contextlib.suppress(ModelNotFoundError):
            return _downloaded(HubName(model.repository, choice), folders)
    return None


def _by_words(name: str, folders: list[Path]) -> LocalModel | None:
    """Return the model to run among the models whose names contain these words, such as "smollm2" or "qwen2.5:7b".

    This is the largest model that fits into memory, in `DEFAULT_QUANT` if several have that size. None if no name
    matches.
    """
    from localllm.catalog.listing import find_models, read_details  # imported here because most names are paths

    slug = f"-{_slug(name)}"
    models = [m for m in find_models(folders).models if slug in f"-{_slug(f'{m.name} {m.path.name}')}"]
    if len(models) < 2:
        return models[0] if models else None
    ranks, available = ("yes", "with less context", "no", None), available_memory()

    def rank(model: LocalModel) -> tuple[int, int, bool, int]:
        details = model.details
        assert details is not None
        is_default = details.file_type == DEFAULT_QUANT
        return ranks.index(details.fits(available)), -(details.n_parameters or 0), not is_default, -model.n_bytes

    best = min(read_details(models), key=rank)
    warn(f"{name} means {best.name}, the largest of {len(models)} that fits: localllm models lists the others")
    return best


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def find_cached(name: HubName) -> Path:
    """Return the file of a model on the hub in the cache, the first file of a split model.

    Raises:
        ModelNotFoundError: the model, or one of its files, is not in the cache.
    """
    try:
        models = cached_models(name.repo)
    except OSError as error:
        fault = f"the cache {hub_cache()} cannot be read ({error.strerror or error})"
        raise ModelNotFoundError(f"{fault}: check its permissions") from None
    if not models:
        fault = f"there is no file {str(name)!r}, and no such model in {hub_cache()}"
        raise ModelNotFoundError(f"{fault}: pull it first, localllm pull {name}, or check the path")
    groups, cache = [group for _, group in models], f"the cache of {name.repo} here"
    if name.choice is not None and not matching(name.choice, groups):
        fault = f"{cache} has no {name.choice!r}, but {choices(name, groups)}"
        raise ModelNotFoundError(f"{fault}: pull it first, localllm pull {name}")
    group = choose(name, groups, cache)
    if not group.is_complete:
        fault = f"{cache} has {len(group.names)} of the {group.n_parts} files of {group.stem}"
        raise ModelNotFoundError(f"{fault}: pull the rest, localllm pull {name}")
    return next(path for path, cached in models if cached is group)
