"""``general.architecture`` to the module that knows it, and from a file's header to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from localllm.errors import UnsupportedArchitectureError, quoted
from localllm.kernels.graph import CacheType, Graph, Weight
from localllm.models import llama, qwen2, qwen3, qwen3moe
from localllm.models.config import Metadata, ModelConfig, read_architecture
from localllm.models.weights import ModelFile, Weights


class Architecture(Protocol):
    """A module of `localllm.models` that knows an architecture."""

    def read(self, meta: Metadata, tensors: Mapping[str, Weight]) -> ModelConfig:
        """Reads the hyper-parameters, which must agree with the shapes of the tensors."""
        ...

    def record(self, config: ModelConfig, weights: Weights, cache_type: CacheType) -> Graph:
        """Records the forward pass."""
        ...


ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
}


@dataclass(frozen=True)
class Model:
    """A model's hyper-parameters and its forward pass, which refers to the tensors of its file."""

    config: ModelConfig
    graph: Graph


def find_architecture(metadata: Mapping[str, Any]) -> Architecture:
    """What knows the architecture that ``general.architecture`` names.

    Raises:
        UnsupportedArchitectureError: nothing does; names those there are.
        ModelError: the key is missing.
    """
    architecture = read_architecture(metadata)
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedArchitectureError(
            f"the architecture {quoted(architecture)} is not supported; localllm runs {known}"
        )
    return ARCHITECTURES[architecture]


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, Weight]) -> ModelConfig:
    """The hyper-parameters of the model in a file, which must agree with its vocabulary and tensors.

    Raises:
        UnsupportedArchitectureError: the file's architecture is not one of `ARCHITECTURES`.
        ModelError: a hyper-parameter is missing, of the wrong type, out of range, at odds with the others, or one
            that nothing here reads.
    """
    meta = Metadata(metadata, read_architecture(metadata))
    config = find_architecture(metadata).read(meta, tensors)
    meta.check_all_read()
    return config


def read_model(file: ModelFile, context: int | None = None, cache_type: CacheType = "f16") -> Model:
    """The model in a file, from its header: no weight is read.

    Args:
        context: tokens that a sequence can have, by default as many as the model was trained on.  Models with
            LongRoPE rotate differently beyond their original context.
        cache_type: what keys and values are kept in.

    Raises:
        UnsupportedArchitectureError, ModelError: as `read_config`; or the tensors are not those of such a model.
    """
    config = read_config(file.metadata, file.tensors)
    weights = Weights(file)
    config = config.for_context(config.context_length if context is None else context)
    graph = find_architecture(file.metadata).record(config, weights, cache_type)
    weights.check_all_used()
    return Model(config, graph)
