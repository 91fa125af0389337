"""``general.architecture`` to the module that knows it, and from a file's header to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from localllm.errors import KernelError, ModelError, UnsupportedArchitectureError, quoted
from localllm.kernels.graph import CacheType, Graph
from localllm.models.config import Header, Metadata, ModelConfig, read_architecture, read_general
from localllm.models.weights import ModelFile, Weights


@dataclass(frozen=True)
class Architecture:
    """A module of this folder, and the models that it is for.

    The module has ``record(m: Header) -> Graph``, and ``HF_NAMES``: see `localllm.models.hf_names`.  With
    ``has_block``, it can record the block behind the last layer as well (`localllm.models.mtp`).
    """

    module: str
    models: str
    has_block: bool = False

    @property
    def record(self) -> Callable[[Header], Graph]:
        """Records the forward pass."""
        record: Callable[[Header], Graph] = import_module(f"localllm.models.{self.module}").record
        return record

    @property
    def hf_names(self) -> Mapping[str, str]:
        """Hugging Face's names of tensors, by GGUF's."""
        names: Mapping[str, str] = import_module(f"localllm.models.{self.module}").HF_NAMES
        return names


ARCHITECTURES: dict[str, Architecture] = {
    "cohere2": Architecture("cohere", "Command R7B, Command A"),
    "command-r": Architecture("cohere", "Command R, Aya"),
    "deepseek2": Architecture("deepseek2", "DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash"),
    "ernie4_5": Architecture("ernie4_5", "ERNIE 4.5, dense"),
    "ernie4_5-moe": Architecture("ernie4_5", "ERNIE 4.5 with experts"),
    "exaone4": Architecture("exaone4", "EXAONE 4"),
    "falcon-h1": Architecture("falcon_h1", "Falcon-H1"),
    "gemma": Architecture("gemma", "Gemma"),
    "gemma2": Architecture("gemma2", "Gemma 2"),
    "gemma3": Architecture("gemma3", "Gemma 3"),
    "gemma4": Architecture("gemma4", "Gemma 4"),
    "glm4": Architecture("glm4", "GLM-4 (0414), GLM-Z1"),
    "glm4moe": Architecture("glm4moe", "GLM-4.5, 4.6 and 4.7"),
    "gpt-oss": Architecture("gpt_oss", "gpt-oss"),
    "gpt2": Architecture("gpt2", "GPT-2"),
    "gptneox": Architecture("gptneox", "GPT-NeoX, Pythia"),
    "granite": Architecture("granite", "Granite 3 and 4, dense"),
    "granitehybrid": Architecture("granite", "Granite 4 with Mamba layers"),
    "granitemoe": Architecture("granite", "Granite 3 with experts"),
    "hunyuan-dense": Architecture("hunyuan", "Hunyuan, dense"),
    "hunyuan-moe": Architecture("hunyuan", "Hunyuan A13B"),
    "kimi-linear": Architecture("kimi_linear", "Kimi Linear"),
    "lfm2": Architecture("lfm2", "LFM2"),
    "lfm2moe": Architecture("lfm2", "LFM2 with experts"),
    "llama": Architecture("llama", "Llama 1 to 3.x, Mistral, Mixtral, TinyLlama, SmolLM"),
    "llama4": Architecture("llama4", "Llama 4, text"),
    "mamba2": Architecture("mamba2", "Mamba 2"),
    "minimax-m2": Architecture("minimax_m2", "MiniMax-M2"),
    "mistral3": Architecture("mistral3", "Ministral 3, Devstral 2"),
    "nemotron_h": Architecture("nemotron_h", "Nemotron-H, Nemotron Nano 2"),
    "nemotron_h_moe": Architecture("nemotron_h", "Nemotron 3, with experts"),
    "olmo2": Architecture("olmo2", "OLMo 2 and 3"),
    "phi2": Architecture("phi2", "Phi 1, 1.5 and 2"),
    "phi3": Architecture("phi3", "Phi-3, 3.5 and 4"),
    "qwen2": Architecture("qwen2", "Qwen 2 and 2.5"),
    "qwen2moe": Architecture("qwen2", "Qwen 1.5 and 2 with experts"),
    "qwen3": Architecture("qwen3", "Qwen 3"),
    "qwen35": Architecture("qwen35", "Qwen 3.5 and 3.6", has_block=True),
    "qwen35moe": Architecture("qwen35", "Qwen 3.5 and 3.6 with experts", has_block=True),
    "qwen3moe": Architecture("qwen3", "Qwen 3 with experts"),
    "qwen3next": Architecture("qwen3next", "Qwen 3 Next", has_block=True),
    "seed_oss": Architecture("seed_oss", "Seed-OSS"),
    "smollm3": Architecture("smollm3", "SmolLM3"),
    "stablelm": Architecture("stablelm", "StableLM 1 and 2"),
    "starcoder2": Architecture("starcoder2", "StarCoder 2"),
}


@dataclass(frozen=True)
class Model:
    """What is known of a model, and its forward pass, which refers to the tensors of its file.

    Attributes:
        is_long: whether its graph is for sequences beyond the original context; LongRoPE then rotates otherwise.
    """

    config: ModelConfig
    graph: Graph
    is_long: bool = False


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


def has_block(file: ModelFile) -> bool:
    """Whether a file has a block behind the last layer that predicts one token more, which localllm can use."""
    architecture = find_architecture(file.metadata)
    n_layers = read_general(Metadata(file.metadata, read_architecture(file.metadata)), file.tensors).n_layers
    return architecture.has_block and f"blk.{n_layers}.nextn.eh_proj.weight" in file.tensors


def read_model(
    file: ModelFile, context: int | None = None, cache_type: CacheType = "f16", *, is_block: bool = False
) -> Model:
    """The model in a file, from its header: no weight is read.

    Args:
        context: tokens that a sequence can have, by default as many as the model was trained on.  Models with
            LongRoPE rotate differently beyond their original context.
        cache_type: what keys and values are kept in.
        is_block: whether to read the block behind the last layer, as a model of one layer: `has_block`.

    Raises:
        UnsupportedArchitectureError: the file's architecture is not one of `ARCHITECTURES`.
        ModelError: a hyper-parameter is missing, of the wrong type, out of range, at odds with the others, or one
            that nothing here reads; or the tensors are not those of such a model.
    """
    record = find_architecture(file.metadata).record
    meta, weights = Metadata(file.metadata, read_architecture(file.metadata)), Weights(file)
    config = read_general(meta, file.tensors)
    weights.skip_layers(config.n_layers)
    context = config.context_length if context is None else context
    try:
        graph = record(Header(meta, config, weights, context, cache_type, is_block))
    except KernelError as error:
        raise ModelError(f"{error}: the hyper-parameters are at odds with each other") from error
    if is_block:
        return Model(replace(config, n_layers=1), graph, context > config.original_context)
    meta.check_all_read()
    weights.check_all_used()
    return Model(config, graph, context > config.original_context)
