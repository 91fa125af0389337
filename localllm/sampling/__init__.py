"""How the next token is chosen from the logits."""

from localllm.declared_options import Sampling
from localllm.sampling.sampler import (
    Choice,
    LogitsProcessor,
    Sampler,
    greedy,
    make_sampler,
    uniform_numbers,
)

__all__ = ["Choice", "LogitsProcessor", "Sampler", "Sampling", "greedy", "make_sampler", "uniform_numbers"]
