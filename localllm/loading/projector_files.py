"""Projector files (mmproj) next to a model: the choice of the files that belong to it, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

#: Types of weights in the order of preference, as file names write them.
_TYPES = [re.compile(rf"(?<![a-z]){type}(?![a-z0-9])") for type in ("f16", "q8_0", "bf16")]
#: Parts of names that do not name the model: types of weights, the number of a split file, and kinds of files.
_NO_NAME = re.compile(
    r"(?<![a-z0-9])(?:(?:ud|i1)-)?(?:i?q\d|tq\d|mxfp4|nvfp4|bf16|fp?16|fp?32|fp?8)(?:_[a-z0-9]+)*(?![a-z0-9])"
    r"|-\d{5}-of-\d{5}(?=\.gguf$)|\.gguf$|(?<![a-z0-9])(?:mmproj|ggml|gguf|imat)(?![a-z0-9])"
    r"|(?<![a-z0-9])(?:text[-_]model|vision[-_]model|model)(?![a-z0-9])"
)
#: Starts of the names of drafters, which repositories store next to their model.
_DRAFTERS = ("mtp-", "eagle3-", "dflash-", "dspark-")


def find_projectors(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the projector files next to a model that belong to it, best first, and the other projector files."""
    names = [file.name for file in path.parent.glob("*.gguf")]
    matching = projector_names(path.name, names)
    remaining = sorted(name for name in names if _is_projector(name) and name not in matching)
    return [path.parent / name for name in matching], [path.parent / name for name in remaining]


def projector_names(model: str, names: Iterable[str]) -> list[str]:
    """Return the projector files that belong to a model: the longest name first, then F16, then Q8_0.

    A projector belongs to the models whose names start with the projector's name.  Otherwise it belongs to the models
    with the longest name that the projector's name starts with.  A projector without a name belongs to all
    models of a folder with one family.  All projectors in a folder with one model belong to that model.

    Args:
        model: the name of the model's file.
        names: all GGUF files of its folder.
    """
    names = list(names)
    words = _words(model)
    projectors = {name: _words(name) for name in names if _is_projector(name)}
    models = {_words(name) for name in names if _is_model(name)}
    is_alone = models <= {words}
    is_one_family = all(_is_start(words, m) or _is_start(m, words) for m in models)
    matching = [
        name
        for name, start in projectors.items()
        if is_alone or (words in _owners(start, models | {words}) if start else is_one_family)
    ]

    def order(name: str) -> tuple[int, int, str]:
        n_words = len(projectors[name]) if _is_start(projectors[name], words) else 0
        type_ = next((i for i, pattern in enumerate(_TYPES) if pattern.search(name.lower())), len(_TYPES))
        return -n_words, type_, name.lower()

    return sorted(matching, key=order)


def _owners(projector: tuple[str, ...], models: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return the names of the models that a projector belongs to."""
    longer = {model for model in models if _is_start(projector, model)}
    if longer:
        return longer
    shorter = {model for model in models if model and _is_start(model, projector)}
    longest = max(map(len, shorter), default=0)
    return {model for model in shorter if len(model) == longest}


def _words(name: str) -> tuple[str, ...]:
    """Return the words of a file's name that name the model."""
    return tuple(re.findall(r"[a-z0-9]+", _NO_NAME.sub("-", name.rpartition("/")[2].lower())))


def _is_start(start: tuple[str, ...], words: tuple[str, ...]) -> bool:
    return words[: len(start)] == start


def is_drafter(name: str) -> bool:
    """Return whether a file is a drafter of another model, by its name."""
    return name.rpartition("/")[2].lower().startswith(_DRAFTERS)


def _is_model(name: str) -> bool:
    return not _is_projector(name) and not is_drafter(name) and "imatrix" not in name.lower()


def _is_projector(name: str) -> bool:
    return "mmproj" in name.rpartition("/")[2].lower()
