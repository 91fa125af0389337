"""Names of models on the hub, ``ORG/REPO[:FILE or QUANT]``, and the files of a repository that they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Self

from localllm.errors import UsageError

#: Default quantisation if a repository has several files.
DEFAULT_QUANT = "Q4_K_M"

#: Name of the model in localllm's package, unless a file has this name.
DEMO = "demo"

#: A repository on the hub, ORG/REPO.
REPOSITORY = re.compile(r"[a-z0-9][\w.-]*/[a-z0-9_][\w.-]*", re.ASCII | re.IGNORECASE)
_NAME = re.compile(rf"(?P<repo>{REPOSITORY.pattern})(:(?P<choice>.+))?", re.ASCII | re.IGNORECASE)
#: The address of a repository on the hub, or of a file in it.
_ADDRESS = re.compile(
    r"(?:hf://|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)(?P<repo>[^/?#:]+/[^/?#:]+)"
    r"(?:/(?:blob|resolve|raw|tree)/[^/?#]+)?(?::|/)?(?P<choice>[^?#]*)",
    re.IGNORECASE,
)
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_QUANT = re.compile(
    r"(?<![a-z0-9])((?:UD-)?(?:I?Q\d|TQ\d|MXFP4|NVFP4|BF16|FP?16|FP?32)(?:_[a-z0-9]+)*)(?![a-z0-9])", re.IGNORECASE
)
#: Maximum number of models that a message lists.
_MAX_LISTED = 12

#: GGUF files that are not models: image projectors, and importance matrices for quantisation.
_NO_MODEL = re.compile(r"(mmproj|imatrix)|.*\b(mmproj|imatrix)\b", re.IGNORECASE)


@dataclass(frozen=True)
class HubName:
    repo: str  # "ORG/REPO"
    choice: str | None = None  # name of a file, or a quantisation; None for the default

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a name or an address on the hub; None if the string can only be a path."""
        if address := _ADDRESS.match(text):
            text = f"{address['repo']}:{address['choice']}".rstrip(":")
        match = _NAME.fullmatch(text)
        if match is None or (match["choice"] is None and text.lower().endswith(".gguf")):
            return None
        return cls(match["repo"], match["choice"])

    def __str__(self) -> str:
        return self.repo if self.choice is None else f"{self.repo}:{self.choice}"


@dataclass(frozen=True)
class FileGroup:
    """A model's file, or all files of a split model."""

    names: tuple[str, ...]  # paths in the repository, in order
    n_bytes: int  # bytes of all files
    n_parts: int = 1  # number of files of the complete model

    @property
    def is_complete(self) -> bool:
        return len(self.names) == self.n_parts

    @property
    def stem(self) -> str:
        """The file's name without ".gguf" and the number of the part."""
        first = self.names[0]
        match = _PART.fullmatch(first)
        return match["stem"] if match else first[: -len(".gguf")]

    @property
    def quant(self) -> str | None:
        """The quantisation in the file's name: "Q4_K_M", "UD-Q4_K_XL"; None if there is none."""
        quants = _QUANT.findall(PurePosixPath(self.stem).name) or _QUANT.findall(self.stem)
        return quants[-1].upper() if quants else None


def group_files(sizes: Mapping[str, int]) -> list[FileGroup]:
    """Return the models among a repository's files, in order of their names. ``sizes``: bytes of each file, by path
    in the repository."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in sorted(sizes):
        if not name.lower().endswith(".gguf") or _NO_MODEL.match(PurePosixPath(name).name):
            continue
        match = _PART.fullmatch(name)
        groups.setdefault((match["stem"], int(match["count"])) if match else (name, 1), []).append(name)
    return [FileGroup(tuple(names), sum(map(sizes.__getitem__, names)), n) for (_, n), names in groups.items()]


def label(group: FileGroup, groups: Iterable[FileGroup]) -> str:
    """Return the quantisation of a group if it is unique, otherwise the name of its file."""
    quant = group.quant
    is_unique = quant is not None and sum(g.quant == quant for g in groups) == 1
    return quant if quant is not None and is_unique else group.names[0]


def choose(name: HubName, groups: Sequence[FileGroup], source: str) -> FileGroup:
    """Return the group of files that a name means. Raises UsageError without a unique match. ``source``: name of the
    repository or cache in messages."""
    if not groups:
        raise UsageError(
            f"{source} has no GGUF file: choose a repository of GGUF files, often named ORG/REPO-GGUF, or convert "
            f"its checkpoint: localllm convert {name.repo}"
        )
    if name.choice is None:
        models = _without_drafters(groups)
        if len(models) == 1:
            return models[0]
        matches = matching(DEFAULT_QUANT, groups)
        if len(matches) == 1:
            return matches[0]
        raise UsageError(f"{source} has {len(groups)} models: choose one, {choices(name, groups)}")
    matches = matching(name.choice, groups)
    if len(matches) == 1:
        return matches[0]
    if matches:
        some = choices(name, groups, matches)
        raise UsageError(f"{name.choice!r} fits {len(matches)} models of {source}: choose one, {some}")
    raise UsageError(f"{source} has no {name.choice!r}: there are {choices(name, groups)}")


def matching(choice: str, groups: Iterable[FileGroup]) -> Sequence[FileGroup]:
    """Return the groups that ``choice`` means: by file, else by quantisation, else by a word of the name.

    Drafters are omitted unless the choice is the name of a file, or means only drafters.
    """
    file_name = choice.lower()
    word = re.compile(rf"(?<![a-z0-9_]){re.escape(choice)}(?![a-z0-9_])", re.IGNORECASE)

    def is_file(group: FileGroup) -> bool:
        names = {name.lower() for name in (*group.names, group.stem, f"{group.stem}.gguf")}
        return file_name in names | {PurePosixPath(name).name for name in names}

    for fits in (is_file, lambda group: group.quant == choice.upper(), lambda group: word.search(group.stem)):
        if matches := [group for group in groups if fits(group)]:
            return matches if fits is is_file else _without_drafters(matches)
    return []


def _without_drafters(groups: Sequence[FileGroup]) -> Sequence[FileGroup]:
    # Imported here because many commands only parse a name.
    from localllm.loading.projector_files import is_drafter

    return [group for group in groups if not is_drafter(group.names[0])] or groups


def choices(name: HubName, groups: Sequence[FileGroup], some: Sequence[FileGroup] | None = None) -> str:
    """List ``some`` of the groups, or all groups, with their sizes."""
    listed = groups if some is None else some
    more = [f"and {len(listed) - _MAX_LISTED:,} more"] if len(listed) > _MAX_LISTED else []
    shown = (f"{name.repo}:{label(group, groups)} ({_size(group.n_bytes)})" for group in listed[:_MAX_LISTED])
    return ", ".join([*shown, *more])


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.2f} MB"
