"""The keywords of `LLM.generate`, `stream` and `chat`, for type checkers and `help`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from localllm.options.declared import CheckedOptions, Sampling, describes
from localllm.options.types import (
    DiffusionAlgorithm,
    Hook,
    LogitsProcessor,
    OnValues,
    Overflow,
    Priority,
    Progress,
    Speculate,
)


class SamplingOptions(TypedDict, total=False):
    """The settings of `localllm.Sampling`, which describes them."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    typical_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: tuple[str, ...]
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float
    adaptive_decay: float
    logit_bias: Mapping[int, float]
    seed: int | None
    logprobs: int | None
    post_sampling_probs: bool
    json_schema: str | Mapping[str, Any] | type | None
    regex: str | None
    grammar: str | None
    processors: tuple[LogitsProcessor, ...]


@describes(CheckedOptions)
class Options(SamplingOptions, total=False):
    """Keywords of a generation.  The settings of `localllm.Sampling`, which describes them, are among them.

    ``logits_processor`` is another name of ``processors``.

    Attributes:
        {options}
    """

    logits_processor: Callable[[Any, Any], Any] | Sequence[Callable[[Any, Any], Any]] | None
    max_tokens: int | None
    stop: str | Sequence[str]
    reasoning_budget: int | None
    reasoning_budget_message: str | None
    ignore_eos: bool
    overflow: Overflow
    sampling: Sampling | None
    progress: Progress | None
    speculate: Speculate | None
    draft_max: int
    draft_always: bool
    diffusion_steps: int | None
    diffusion_block_length: int | None
    diffusion_algorithm: DiffusionAlgorithm | None
    diffusion_eps: float | None
    priority: Priority
    tool_grammar: bool
    timeout: float | None
    client: str
    adapters: Mapping[str, float] | None
    watch: str | Sequence[str]
    on_values: OnValues | None
    steer: Mapping[str, Any] | Sequence[Any] | object
    hooks: Mapping[str, Hook] | None
