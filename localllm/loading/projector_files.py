"""Encoders of pictures beside a model, found by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

#: Types of the encoders' weights in the order in which they are taken, as names of files have them.
_TYPES = [re.compile(rf"(?<![a-z]){type}(?![a-z0-9])") for type in ("f16", "q8_0", "bf16")]


def find_beside(path: Path) -> list[Path]:
    """Encoders beside a model, in the order of `encoder_names`."""
    return [path.parent / name for name in encoder_names(each.name for each in path.parent.glob("*.gguf"))]


def encoder_names(names: Iterable[str]) -> list[str]:
    """The names of files that are encoders' as llama.cpp and the hub name them; those in F16 first, then Q8_0."""

    def order(name: str) -> tuple[int, str]:
        name = name.lower()
        return next((i for i, type in enumerate(_TYPES) if type.search(name)), len(_TYPES)), name

    return sorted((name for name in names if "mmproj" in name.rpartition("/")[2].lower()), key=order)
