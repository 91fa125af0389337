"""``general.architecture`` to the module that assembles it."""

from __future__ import annotations

from collections.abc import Callable

from localllm.errors import UnsupportedArchitectureError
from localllm.models import llama
from localllm.models.blocks import Model
from localllm.models.config import ModelConfig
from localllm.models.weights import Weights

ARCHITECTURES: dict[str, Callable[[ModelConfig, Weights], Model]] = {
    "llama": llama.build,
}


def builder(architecture: str) -> Callable[[ModelConfig, Weights], Model]:
    """The function that assembles ``architecture``.

    Raises:
        UnsupportedArchitectureError: there is none; names those there are.
    """
    try:
        return ARCHITECTURES[architecture]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedArchitectureError(
            f"the architecture {architecture!r} is not supported; localllm runs {known}"
        ) from None
