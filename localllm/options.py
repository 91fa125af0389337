"""The keywords of `LLM.generate`, `stream`, `chat` and their kin: declared once, in `Options`, and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, TypeVar, cast

from localllm.checks import check_keywords, flag, seconds, text, whole_number
from localllm.completion import Progress
from localllm.engine.drafting import DEFAULT_DRAFTS, MAX_DRAFTS
from localllm.engine.request import PRIORITIES, Priority
from localllm.errors import UsageError
from localllm.habits import THEIR_OPTIONS
from localllm.sampling import LogitsProcessor, Sampling

#: What happens to a prompt that is too long: it is refused, or its oldest part is left out.
Overflow = Literal["error", "truncate"]

#: What drafts tokens for the model to verify: the text itself, the draft model, or ("auto") the draft model if there
#: is one.
Speculate = Literal["auto", "lookup", "draft"]

_SPECULATES: tuple[Speculate, ...] = ("auto", "lookup", "draft")

_OVERFLOWS: tuple[Overflow, ...] = ("error", "truncate")


class SamplingOptions(TypedDict, total=False):
    """The settings of `localllm.Sampling`, which describes them."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
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
    logit_bias: Mapping[int, float]
    seed: int | None
    logprobs: int | None
    processors: tuple[LogitsProcessor, ...]


class Options(SamplingOptions, total=False):
    """Keywords of a generation.  The settings of `localllm.Sampling`, which describes them, are among them.

    Attributes:
        max_tokens: tokens to generate at most.  By default until the model ends its text or the context is full;
            0 evaluates the prompt and generates nothing.
        stop: a text, or several, that end the generation and are left out of it.
        ignore_eos: the model's end-of-generation tokens are never chosen.
        overflow: "error" refuses a prompt too long for the context with `ContextLengthError`.  "truncate" leaves
            out the oldest part of a prompt (but for BOS; of a chat its oldest turns, but for system messages)
            where there would not be room for ``max_tokens``, or a quarter of the context by default, and never
            for more than half of it.
        sampling: settings to begin with; single settings given beside it replace its own.
        progress: called while a long prompt is evaluated, with the tokens done and the tokens of the prompt.
        speculate: drafts several tokens, which the model then verifies in one step: the same text, sooner where
            drafts are good, and `Completion.drafts` says how good they were.  "lookup" expects that the text
            repeats what it or the prompt had before; "draft" asks the ``draft_model`` of `localllm.load`; "auto",
            the default, does that if there is one; None drafts nothing.
        draft_max: tokens to draft at most for one step.
        priority: "normal", or "background" for requests that let others begin first for up to 30 seconds; those that
            have begun to decode share every step.
        timeout: seconds after which the text ends where it is, with the ``finish_reason`` "timeout"; waiting counts.
        client: a name of whoever asks: clients share the model evenly, however many requests each has.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    overflow: Overflow
    sampling: Sampling | None
    progress: Progress | None
    speculate: Speculate | None
    draft_max: int
    priority: Priority
    timeout: float | None
    client: str


_NAMES = (*Options.__annotations__,)
_SAMPLING_NAMES = frozenset(field.name for field in fields(Sampling))


@dataclass(frozen=True)
class CheckedOptions:
    """`Options` in their plain Python types, with defaults."""

    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    overflow: Overflow
    progress: Progress | None
    speculate: Speculate | None = None
    draft_max: int = DEFAULT_DRAFTS
    priority: Priority = "normal"
    timeout_s: float | None = None
    client: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> CheckedOptions:
        """Checks the keywords of a call.

        Raises:
            TypeError: a keyword is unknown; names the one that is nearest.
            UsageError: a value is of the wrong type or out of range.
        """
        check_keywords(options, _NAMES, THEIR_OPTIONS)
        speculate = options.get("speculate", "auto")
        draft_max = whole_number("draft_max", options.get("draft_max", DEFAULT_DRAFTS), 1)
        if draft_max > MAX_DRAFTS:
            raise UsageError(f"draft_max is {draft_max}, but must be at most {MAX_DRAFTS}")
        max_tokens, progress = options.get("max_tokens"), options.get("progress")
        if progress is not None and not callable(progress):
            raise UsageError(f"progress is {progress!r:.80}, but must be a function of two numbers")
        return cls(
            sampling=_sampling(options),
            max_tokens=None if max_tokens is None else whole_number("max_tokens", max_tokens, 0),
            stop=_stop_strings(options.get("stop", ())),
            ignore_eos=flag("ignore_eos", options.get("ignore_eos", False)),
            overflow=_one_of("overflow", options.get("overflow", "error"), _OVERFLOWS),
            progress=cast("Callable[[int, int], object] | None", progress),
            speculate=None if speculate is None else _one_of("speculate", speculate, _SPECULATES),
            draft_max=draft_max,
            priority=_one_of("priority", options.get("priority", "normal"), PRIORITIES),
            timeout_s=None if options.get("timeout") is None else seconds("timeout", options["timeout"]),
            client=text("client", options.get("client", "")),
        )

    def room(self, context: int) -> int:
        """Tokens that a truncated prompt leaves free for the answer."""
        wanted = context // 4 if self.max_tokens is None else self.max_tokens
        return min(wanted, context // 2)


_T = TypeVar("_T", bound=str)


def _one_of(name: str, value: object, choices: Sequence[_T]) -> _T:
    for choice in choices:
        if isinstance(value, str) and value == choice:
            return choice
    raise UsageError(f"{name} is {value!r:.80}, but must be one of {', '.join(map(repr, choices))}")


def _sampling(options: Mapping[str, Any]) -> Sampling:
    sampling = options.get("sampling")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise UsageError(f"sampling is {sampling!r:.80}, but must be a localllm.Sampling")
    settings = {name: value for name, value in options.items() if name in _SAMPLING_NAMES}
    return Sampling(**settings) if sampling is None else sampling.replace(**settings)


def _stop_strings(stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if (
        not isinstance(stops, Sequence)
        or isinstance(stops, bytes | bytearray)
        or not all(isinstance(text, str) and text for text in stops)
    ):
        raise UsageError(f"stop is {stop!r:.80}, but must be a text that is not empty, or a list of such")
    return tuple(stops)
