"""``general.architecture`` to the function that assembles it, and from a file to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from localllm.errors import ModelError, UnsupportedArchitectureError
from localllm.kernels.ops import Ops, Weight
from localllm.models import llama
from localllm.models.blocks import Model
from localllm.models.config import ModelConfig, read_config
from localllm.models.weights import Progress, Weights

ARCHITECTURES: dict[str, Callable[[ModelConfig, Weights], Model]] = {
    "llama": llama.build,
}


class ModelFile(Protocol):
    """What a model is read from (`localllm.gguf.GGUFFile` is one)."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Weight]: ...


def load_model(file: ModelFile, ops: Ops, *, progress: Progress | None = None) -> Model:
    """Reads a model's hyper-parameters and packs its weights for the backend ``ops``.

    ``progress`` is called with the bytes packed so far and the bytes of all tensors.

    Raises:
        UnsupportedArchitectureError: the file's architecture is not one of `ARCHITECTURES`.
        ModelError: the hyper-parameters and tensors do not make a model.
    """
    build = builder(file.metadata)
    config = read_config(file.metadata, file.tensors)
    return build(config, Weights(file.tensors, ops, progress))


def builder(metadata: Mapping[str, Any]) -> Callable[[ModelConfig, Weights], Model]:
    """The function that assembles the architecture that ``general.architecture`` names.

    Raises:
        UnsupportedArchitectureError: there is none; names those there are.
        ModelError: the key is missing.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError("the file has no general.architecture: it does not hold a model")
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedArchitectureError(
            f"the architecture {architecture!r} is not supported; localllm runs {known}"
        )
    return ARCHITECTURES[architecture]
