"""Suggestions of models with short names for this machine, by its memory, its speed and a use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from localllm.catalog.file_details import DetailsReader
from localllm.catalog.find import known_here
from localllm.catalog.known_models import KnownModel, available_bytes, known_models
from localllm.kernels.cpu.host import available_memory

#: Minimum estimated speed of a suggestion in tokens per second, unless no model reaches it.
MIN_TOKENS_PER_S = 8.0
#: Maximum size of a suggestion relative to the previous one, so that suggestions differ.
NEXT_SIZE = 0.6


@dataclass(frozen=True)
class SuggestedModel:
    """A model and a format for this machine.

    If the file was downloaded, ``memory`` and ``tokens_per_s`` are predicted from its header. Otherwise they are
    estimated from its size and the measured memory bandwidth.
    """

    model: KnownModel
    format: str
    memory: int  # bytes
    tokens_per_s: float | None  # None if it is not known
    path: Path | None = None  # the downloaded file
    is_estimate: bool = True


def suggest(use: str, available: int, bandwidth: float | None, n: int = 3) -> list[SuggestedModel]:
    """Return up to ``n`` models for a use that fit into memory in their default format, the most capable first.

    Each is smaller than the previous one.

    Args:
        use: one of `localllm.catalog.known_models.USES`.
        available: bytes of memory.
        bandwidth: bytes of weights read per second; None if it is not known.
    """
    fitting = []
    for model in known_models():
        format = model.default_format
        if use in model.uses and model.memory(format) <= available:
            speed = None if bandwidth is None else model.tokens_per_s(format, bandwidth)
            fitting.append(SuggestedModel(model, format, model.memory(format), speed))
    quick = [s for s in fitting if s.tokens_per_s is None or s.tokens_per_s >= MIN_TOKENS_PER_S]
    picks: list[SuggestedModel] = []
    for suggestion in sorted(quick or fitting, key=_capability, reverse=True):
        if not picks or _size(suggestion) <= NEXT_SIZE * _size(picks[-1]):
            picks.append(suggestion)
    return [_with_details(pick) for pick in picks[:n]]


def _capability(suggestion: SuggestedModel) -> float:
    """Return the parameters of a dense model that answers about as well, in billions."""
    return sqrt(suggestion.model.parameters * suggestion.model.active)


def _size(suggestion: SuggestedModel) -> int:
    return suggestion.model.formats[suggestion.format]


def _with_details(suggestion: SuggestedModel) -> SuggestedModel:
    """Replace estimates by predictions if the model was downloaded."""
    path = known_here(suggestion.model, suggestion.format)
    details = None if path is None else DetailsReader().read(path)
    if path is None or details is None or details.memory is None:
        return suggestion
    speed, is_estimate = details.tokens_per_s, details.tokens_per_s is None
    return SuggestedModel(
        suggestion.model, suggestion.format, details.memory, speed or suggestion.tokens_per_s, path, is_estimate
    )


def suggest_here(use: str, progress: Callable[[int, int], None] | None = None) -> list[SuggestedModel]:
    """Return suggestions for this machine. Measures the memory bandwidth once per machine, in a second or two.

    ``progress``: called with the numbers of compiled kernels and of kernels to compile.
    """
    from localllm.kernels.cpu.target import choose
    from localllm.kernels.cpu.thread_choice import choose_threads

    available = available_bytes()
    if available > available_memory():  # a GPU, whose bandwidth is not measured here
        return suggest(use, available, None)
    choice = choose_threads(choose(None), progress)
    return suggest(use, available, dict(choice.curve).get(choice.decode))
