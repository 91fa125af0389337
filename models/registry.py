"""``general.architecture`` to the function that assembles it, and from a file to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from localllm.errors import ModelError, UnsupportedArchitectureError
from localllm.kernels.ops import Ops, Weight
from localllm.models import llama, qwen2, qwen3
from localllm.models.blocks import Model
from localllm.models.config import ModelConfig, read_config
from localllm.models.weights import Progress, Weights

ARCHITECTURES: dict[str, Callable[[ModelConfig, Weights], Model]] = {
    "llama": llama.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}


class ModelFile(Protocol):
    """What a model is read from (`localllm.gguf.GGUFFile` is one)."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Weight]: ...


def load_model(file: ModelFile, ops: Ops, *, context: int | None = None, progress: Progress | None = None) -> Model:
    """Reads a model's hyper-parameters and packs its weights for the backend ``ops``.

    Args:
        context: tokens that will be used, by default all that the model was trained to see.  Models with
            LongRoPE rotate differently beyond their original context.
        progress: called with the bytes packed so far and the bytes of all tensors.

    Raises:
        UnsupportedArchitectureError: the file's architecture is not one of `ARCHITECTURES`.
        ModelError: the hyper-parameters and tensors do not make a model, or one that localllm does not support.
        KernelError: the backend cannot compute with a tensor's format.
    """
    build = builder(file.metadata)
    config = read_config(file.metadata, file.tensors, context)
    weights = Weights(file.tensors, ops, progress)
    model = build(config, weights)
    weights.refuse_leftovers()
    return model


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
