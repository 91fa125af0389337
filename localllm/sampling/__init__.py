"""How the next token is chosen from the logits."""

from localllm.declared_options import Sampling
from localllm.option_types import LogitsProcessor
from localllm.sampling.sampler import (
    Choice,
    Sampler,
    UniformNumbers,
    greedy,
    make_sampler,
)

__all__ = ["Choice", "LogitsProcessor", "Sampler", "Sampling", "UniformNumbers", "greedy", "make_sampler"]
