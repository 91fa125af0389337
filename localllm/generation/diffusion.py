"""Requests to models that write by diffusion: options, and their defaults from the model's release."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from localllm.engine.canvas import Canvas, DiffusionSettings
from localllm.errors import Argument, ContextLengthError, UsageError
from localllm.models.diffusion import Diffusion
from localllm.options.declared import CheckedOptions, Sampling

#: Options of models that write by diffusion.
OPTIONS = ("diffusion_steps", "diffusion_block_length", "diffusion_algorithm", "diffusion_eps")

#: Sampling options that `Canvas` does not use, and the value that switches each option off.
_OFF = {
    "top_n_sigma": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "dry_multiplier": 0.0, "xtc_probability": 0.0, "mirostat": 0, "adaptive_target": -1.0, "logprobs": None,
    "json_schema": None, "regex": None, "grammar": None, "processors": (),
}  # fmt: skip


def check_no_diffusion(checked: CheckedOptions) -> None:
    """Raise UsageError if options of diffusion are given for a model that writes token by token."""
    for name in OPTIONS:
        if getattr(checked, name) is not None:
            raise UsageError(Argument(name), " is only for models that write by diffusion: leave it out")


def _unused(checked: CheckedOptions, sampling: Sampling) -> Iterator[str]:
    """Yield the names of given options that a model that writes by diffusion cannot use."""
    yield from (name for name, off in _OFF.items() if getattr(sampling, name) != off)
    if checked.speculate not in ("auto", None):
        yield "speculate"
    yield from (name for name in ("draft_always", "watch", "on_values", "steer", "hooks") if getattr(checked, name))
    if checked.reasoning_budget not in (None, -1):
        yield "reasoning_budget"


def make_canvas(
    ids: Sequence[int],
    checked: CheckedOptions,
    sampling: Sampling,
    model: Diffusion,
    *,
    context: int,
    max_masks: int,
) -> Canvas:
    """Return the canvas of a prompt.

    Args:
        sampling: settings, with the biases of tokens that are never generated.
        context: tokens of prompt and reply at most.
        max_masks: masks at most whose logits a step computes.

    Raises:
        UsageError: an option cannot be used, or is too large.
        ContextLengthError: the prompt leaves no room for a token.
    """
    for name in _unused(checked, sampling):
        raise UsageError(Argument(name), " cannot be used with a model that writes by diffusion: leave it out")
    n_tokens = model.n_tokens if checked.max_tokens is None else checked.max_tokens
    if n_tokens and len(ids) >= context:
        raise ContextLengthError(len(ids) + 1, context)
    n_tokens = min(n_tokens, context - len(ids))
    given = checked.diffusion_block_length
    block_length = model.block_length if given is None else given
    if min(n_tokens, block_length or n_tokens) > max_masks:
        name = "diffusion_block_length" if block_length else "max_tokens"
        raise UsageError.of(
            name, block_length or n_tokens, f"at most {max_masks:,}, the masks that a step can replace"
        )
    settings = DiffusionSettings(
        mask_id=model.mask_id,
        shifts=model.shifts,
        steps=checked.diffusion_steps or max(1, n_tokens),
        block_length=block_length,
        algorithm=checked.diffusion_algorithm or model.algorithm,
        eps=1e-3 if checked.diffusion_eps is None else checked.diffusion_eps,
        tempers=model.tempers,
        sampling=sampling,
        seed=secrets.randbits(32) if sampling.seed is None else sampling.seed,
    )
    return Canvas(ids, n_tokens, settings)
