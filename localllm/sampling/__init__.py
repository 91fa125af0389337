"""Chooses the next token from logits."""

from localllm.options.declared import Sampling
from localllm.options.types import LogitsProcessor
from localllm.sampling.sampler import Choice, Sampler, UniformNumbers, greedy

__all__ = ["Choice", "LogitsProcessor", "Sampler", "Sampling", "UniformNumbers", "greedy"]
