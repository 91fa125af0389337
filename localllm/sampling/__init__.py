"""How the next token is chosen from the logits."""

from localllm.sampling.sampler import (
    Choice,
    LogitsProcessor,
    Sampler,
    Sampling,
    greedy,
    make_sampler,
    uniform_numbers,
)

__all__ = ["Choice", "LogitsProcessor", "Sampler", "Sampling", "greedy", "make_sampler", "uniform_numbers"]
