"""``general.architecture`` to the function that assembles it, and from a file to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from localllm.errors import UnsupportedArchitectureError, quoted
from localllm.kernels.ops import Ops, Weight
from localllm.models import llama, qwen2, qwen3, qwen3moe
from localllm.models.blocks import Model
from localllm.models.config import ModelConfig, read_architecture
from localllm.models.weights import Progress, Weights

ARCHITECTURES: dict[str, Callable[[ModelConfig, Weights], Model]] = {
    "llama": llama.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "qwen3moe": qwen3moe.build,
}


class ModelFile(Protocol):
    """What a model is read from (`localllm.gguf.GGUFFile` is one)."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Weight]: ...


def load_model(
    file: ModelFile,
    ops: Ops,
    config: ModelConfig,
    context: int,
    *,
    spare_bytes: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """Packs a model's weights for the backend ``ops``.

    Args:
        config: the file's hyper-parameters (`localllm.models.config.read_config`).
        context: tokens that a sequence can have.  Models with LongRoPE rotate differently beyond their original
            context.
        spare_bytes: what weights may take beyond `Loader.packed_bytes`, which those do whose values do not fit into
            the format planned on; None for any amount.
        progress: called with the bytes packed so far and the bytes of all tensors.

    Raises:
        UnsupportedArchitectureError: the file's architecture is not one of `ARCHITECTURES`.
        ModelError: the hyper-parameters and tensors do not make a model, or one that localllm does not support.
        KernelError: the backend cannot compute with a tensor's format.
        NotEnoughMemoryError: a weight must take more than was planned, and than there is.
    """
    build = builder(file.metadata)
    weights = Weights(file.tensors, ops, progress, spare_bytes)
    model = build(config.for_context(context), weights)
    weights.refuse_leftovers()
    return model


def builder(metadata: Mapping[str, Any]) -> Callable[[ModelConfig, Weights], Model]:
    """The function that assembles the architecture that ``general.architecture`` names.

    Raises:
        UnsupportedArchitectureError: there is none; names those there are.
        ModelError: the key is missing.
    """
    architecture = read_architecture(metadata)
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedArchitectureError(
            f"the architecture {quoted(architecture)} is not supported; localllm runs {known}"
        )
    return ARCHITECTURES[architecture]
