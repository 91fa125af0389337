"""Models with short names, such as ``qwen3.5:4b``: the table models.toml, and the files on the hub that names mean.

A name is FAMILY[:TAG] as in Ollama. The tag is a size, ``latest``, or a size and a format (``4b-q8_0``). Case,
hyphens in the family's name, and the words "instruct" and "it" in a tag make no difference.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.catalog.hub_names import HubName

#: Contents of models.toml: uses, and abilities in addition to text.
USES = ("chat", "code", "images", "audio", "embeddings")
ABILITIES = ("images", "audio", "tools", "reasoning", "embeddings")

_NAME = re.compile(r"(?P<family>[a-z][\w.-]*?)(?::(?P<tag>[\w.-]+))?", re.ASCII | re.IGNORECASE)
#: Words of tags that do not select a file: kinds of models, and active parameters (A3B).
_IGNORED = re.compile(r"instruct|it|chat|a\d+b")
#: Formats in tags, such as q8_0 or ud-q4_k_m.
_FORMAT = re.compile(r"(?:^|-)((?:ud-)?(?:i?q\d|mxfp4|bf16|f16|f32)(?:_[a-z0-9]+)*)$")
#: Estimated memory of a model in addition to its files, for the cache, activations and the program.
_SHARE_ADDED, _BYTES_ADDED = 0.1, 250_000_000


@dataclass(frozen=True)
class KnownModel:
    """A size of a model in models.toml."""

    family: str  # "qwen3.5"
    tag: str  # "4b"
    is_default: bool  # whether the family's name without a tag means this size
    title: str
    architecture: str
    licence: str
    abilities: tuple[str, ...]  # of `ABILITIES`
    uses: tuple[str, ...]  # of `USES`; empty for older models
    repository: str  # "ORG/REPO" on the hub
    parameters: float  # billions
    active: float  # billions of parameters that a token uses
    formats: Mapping[str, int]  # bytes of the model's files by format, the default format first
    projector: str | None = None  # file that encodes images or audio
    projector_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{self.family}:{self.tag}"

    @property
    def default_format(self) -> str:
        return next(iter(self.formats))

    def n_bytes(self, format: str) -> int:
        """Return the bytes of a download."""
        return self.formats[format] + self.projector_bytes

    def memory(self, format: str) -> int:
        """Return the estimated bytes of memory with a short context."""
        return int(self.n_bytes(format) * (1 + _SHARE_ADDED)) + _BYTES_ADDED

    def format_for(self, available: int) -> str:
        """Return the default format, or the largest smaller one if only that fits into ``available`` bytes."""
        default = self.default_format
        smaller = [name for name, size in self.formats.items() if size <= self.formats[default]]
        fitting = [name for name in smaller if self.memory(name) <= available]
        return max(fitting, key=lambda name: self.formats[name], default=default)

    def tokens_per_s(self, format: str, bandwidth: float) -> float:
        """Return the estimated tokens per second if ``bandwidth`` bytes of weights are read per second."""
        return bandwidth / (self.formats[format] * self.active / self.parameters)


@functools.cache
def known_models() -> tuple[KnownModel, ...]:
    """Return the models of models.toml in order."""
    import tomllib  # imported here because most names are paths

    table = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
    return tuple(_read(family, size) for family in table["models"] for size in family["sizes"])


def _read(family: Mapping[str, Any], size: Mapping[str, Any]) -> KnownModel:
    facts = {**family, **size}
    abilities = tuple(facts["abilities"])
    projector = next(iter(facts.get("projector", {}).items()), (None, 0))
    return KnownModel(
        family=facts["name"],
        tag=facts["tag"],
        is_default=facts["tag"] == facts["default"],
        title=facts["title"],
        architecture=facts["architecture"],
        licence=facts["licence"],
        abilities=abilities,
        uses=tuple(use for use in facts.get("uses", ()) if use not in ABILITIES or use in abilities),
        repository=facts["repository"],
        parameters=facts["parameters"],
        active=facts.get("active", facts["parameters"]),
        formats={name: round(gigabytes * 1e9) for name, gigabytes in facts["formats"].items()},
        projector=projector[0],
        projector_bytes=round(projector[1] * 1e9),
    )


@functools.lru_cache(256)
def known_model(name: str) -> tuple[KnownModel, str | None] | None:
    """Return the model that a short name means, and the format in the name or None; None for other names."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    sizes = [model for model in known_models() if _key(model.family) == _key(match["family"])]
    tag = (match["tag"] or "latest").lower()
    format_match = _FORMAT.search(tag)
    if format_match is not None:
        tag = tag[: format_match.start()] or "latest"
    size, *words = tag.split("-")
    if not all(map(_IGNORED.fullmatch, words)):
        return None
    for model in sizes:
        if size == model.tag or (size == "latest" and model.is_default):
            return model, None if format_match is None else format_match[1].upper()
    return None


def _key(family: str) -> str:
    return family.lower().replace("-", "")


def available_bytes() -> int:
    """Return the bytes of memory that are available for models, of the processor and of GPUs."""
    # Imported here because most names are not short names.
    from localllm.kernels.cpu.host import available_memory
    from localllm.loading.devices import gpu_memory

    return available_memory() + gpu_memory("auto")


def hub_name(name: str) -> HubName | None:
    """Return the repository and the file that a name means: ORG/REPO[:…], an address, or a short name.

    The available memory chooses the format of a short name. None for other names.
    """
    if (parsed := HubName.parse(name)) is not None:
        return parsed
    if (known := known_model(name)) is None:
        return None
    model, format = known
    return HubName(model.repository, format or model.format_for(available_bytes()))


def matching_models(text: str) -> list[KnownModel]:
    """Return the models whose names, titles, abilities or uses contain all words of ``text``."""
    words = text.lower().split()
    return [model for model in known_models() if all(word in _searched(model) for word in words)]


def _searched(model: KnownModel) -> str:
    return " ".join((model.name, model.title, *model.abilities, *model.uses, model.repository)).lower()


def short_names(repository: str, format: str | None) -> tuple[str, ...]:
    """Return the short names of a file in a repository."""
    names = []
    for model in known_models():
        if model.repository == repository and format is not None:
            is_default_format = format == model.default_format
            ending = "" if is_default_format else f"-{format.lower()}"
            names.append(f"{model.name}{ending}")
            if model.is_default and is_default_format:
                names.append(model.family)
    return tuple(names)


def advice(name: str) -> str | None:
    """Return the known names that are similar to an unknown name, as a part of an error; None without such names."""
    match = _NAME.fullmatch(name)
    if match is None or name.lower().endswith(".gguf"):
        return None
    if sizes := [model for model in known_models() if _key(model.family) == _key(match["family"])]:
        return f"the tags of {sizes[0].family} are {', '.join(model.tag for model in sizes)}"
    near = difflib.get_close_matches(
        match["family"].lower(), {model.family: None for model in known_models()}, cutoff=0.6
    )
    tagged = (f"{family}:{match['tag']}".lower() for family in near)
    names = [long if known_model(long) else family for family, long in zip(near, tagged, strict=True)]
    return f"did you mean {' or '.join(names)}?" if names else None
