"""A generation or logits request, its state in the engine, and its statistics."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.engine.cache import CachedSequence
from localllm.engine.canvas import Canvas
from localllm.engine.drafting import Drafter, Drafts
from localllm.engine.media import NO_MEDIA, Embeddings, PreparedMedia, PromptMedia
from localllm.engine.probe import Probe
from localllm.options.types import DEFAULT_DRAFTS, Priority
from localllm.sampling import Choice, Sampler

#: "stop": end-of-text token or stop string. "length": ``max_tokens`` or the context limit.
FinishReason = Literal["stop", "length", "cancelled", "timeout"]

#: Seconds added to the queue time of a background request. Bounded, so that background requests never starve.
BACKGROUND_DELAY_S = 30.0

#: Seconds added to a request's queue time for each running request of the same client.
CLIENT_DELAY_S = 30.0

#: Most tokens after the last message of a chat that open the reply.
MAX_OPENING = 64


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens reused from the KV cache.
        completion_tokens: Generated tokens, without the end-of-text token.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of a request, in seconds.

    Attributes:
        prefill_s: Start of the first prompt step to the end of the last one.
        prefill_tokens: Prompt tokens that were evaluated, not reused.
        first_token_s: Submission to the first token, queue time included.
        decode_s: Evaluation and sampling of ``decode_tokens``.
        decode_tokens: Generated tokens except the first.
        queue_s: Submission to the start of the first step; 0 before that.
    """

    prefill_s: float
    prefill_tokens: int
    first_token_s: float
    decode_s: float
    decode_tokens: int
    queue_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 if the whole prompt was cached."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """0 if fewer than two tokens were generated."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


class RequestOutput(Protocol):
    """Receives the results of one request.

    The engine thread calls every method except ``is_full``. Methods must not block. An exception ends the request.
    """

    @property
    def is_full(self) -> bool:
        """True if the reader is too slow; the request then pauses until this is False again.

        Only calls from the engine may turn it True. Any thread may turn it False.
        """

    def progress(self, n_evaluated: int) -> None:
        """Report the number of prompt tokens in the cache. Must not raise.

        Called before the first step and after each step.
        """

    def token(self, choice: Choice) -> bool:
        """Receive the next token. Return True if the text is complete (the finish reason "stop")."""

    def logits(self, position: int, rows: NDArray[np.float32]) -> None:
        """Receive logits [n, n_vocab] for the tokens at ``position`` and after. The array is reused: copy it."""

    def flush(self) -> None:
        """Deliver the results of the finished step."""

    def end(self, error: BaseException | None) -> None:
        """Called once, after the last result. See `Request.finish_reason`."""


@dataclass(eq=False)
class Request:
    """A prompt to continue or, without a ``sampler``, tokens to compute logits for."""

    tokens: list[int]  # prompt; the engine appends generated tokens
    output: RequestOutput
    sampler: Sampler | None = None
    stop_ids: Set[int] = frozenset()  # end-of-text tokens; not part of the output
    max_tokens: int | None = None  # None: up to the context limit
    logits_from: int = 0  # without a sampler: position of the next logits to deliver
    priority: Priority = "normal"
    timeout_s: float | None = None  # measured from submission
    client: str = ""  # the scheduler shares the model fairly between clients
    speculate: Literal["lookup", "draft", "mtp"] | None = None  # source of draft tokens
    draft_max: int = DEFAULT_DRAFTS  # draft tokens per step
    draft_always: bool = False  # draft even if the cost model expects no gain
    adapters: tuple[float, ...] = ()  # scale of each loaded LoRA adapter; empty: base model
    media: PromptMedia = NO_MEDIA  # images and audio in the prompt; ``tokens`` holds their `PreparedMedia.ids`
    probe: Probe | None = None  # values inside the model that the request reads or changes
    canvas: Canvas | None = None  # text of a model that writes by diffusion; without a sampler
    scope: str = ""  # requests of different scopes share no cached tokens and images

    # State, changed by the engine thread
    finish_reason: FinishReason | None = None  # None while running and after an error
    sequence: CachedSequence | None = None  # None while queued
    drafter: Drafter | None = None
    drafts: list[int] = field(default_factory=list)  # proposed continuation of ``tokens``
    n_prompt: int = 0
    n_cached: int = 0  # prompt tokens found in the cache
    n_restored: int = 0  # prompt tokens that the cache read from disk for this request
    n_reached: int = 0  # most tokens ever in the cache; preemption lowers the current number
    n_again: int = 0  # generated tokens to evaluate again after rejected drafts
    choosing_s: float = math.inf  # seconds that its last choice took, for a grammar
    is_choosing: bool = False  # a sampling thread is choosing its next tokens; excluded from steps
    embeddings: dict[bytes, Embeddings] = field(default_factory=dict)  # of upcoming images and audio, by content key
    is_cancelled: bool = False  # set by any thread; takes effect before the next step
    is_restoring: bool = False  # waits until blocks are read from disk; not admitted

    notice: str = ""  # a problem with the prompt cache, for the user; set at the end

    # Statistics
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    last_decoded_step: int = 0  # scheduler's step number
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    n_chosen: int = 0
    n_decode_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)

    @property
    def tree(self) -> Hashable:
        """Identifies the requests that may share cached tokens: equal scope, adapters and edits of values."""
        edits = None if self.probe is None else self.probe.key
        return self.adapters if not self.scope and edits is None else (self.scope, self.adapters, edits)

    def media_key(self, media: PreparedMedia) -> bytes:
        """Return the key of an image in the cache of embeddings."""
        return self.scope.encode() + media.key

    @property
    def rank(self) -> float:
        """Requests are admitted in ascending order of this value."""
        return self.submitted_at + (BACKGROUND_DELAY_S if self.priority == "background" else 0.0)

    @property
    def deadline(self) -> float | None:
        """On the clock of `time.perf_counter`."""
        return None if self.timeout_s is None else self.submitted_at + self.timeout_s

    @property
    def n_reusable(self) -> int:
        """Number of leading tokens that may come from the cache. Later tokens must be evaluated for their values."""
        n = min(len(self.tokens) - 1, self.logits_from) if self.sampler is None else len(self.tokens) - 1
        return min(n, self.probe.values_from) if self.probe is not None and self.probe.watched else n

    @property
    def branch_point(self) -> int:
        """Number of leading tokens that the next prompt of the same chat most likely has.

        Templates omit the reasoning of earlier replies.  The next prompt then differs after the end of the last
        message, in the opening of the reply.
        """
        n = self.n_reusable
        ends = (i for i in range(n, max(0, n - MAX_OPENING), -1) if self.tokens[i - 1] in self.stop_ids)
        return next(ends, n)

    @property
    def n_text(self) -> int:
        """Tokens of the text, with masks."""
        return len(self.tokens) if self.canvas is None else len(self.canvas.ids)

    @property
    def n_missing(self) -> int:
        """Tokens that are not in the cache."""
        return self.n_text - (0 if self.sequence is None else len(self.sequence.ids))

    @property
    def is_in_media(self) -> bool:
        """True if the last image, or the prompt that an encoder reads, is not completely in the cache."""
        return self.sequence is not None and len(self.sequence) < self.media.stop

    @property
    def is_decoding(self) -> bool:
        """True if only text remains: the last token, and tokens to evaluate again after rejected drafts."""
        n_missing = self.n_missing
        return (
            self.canvas is None and n_missing <= 1 + self.n_again and len(self.tokens) - n_missing >= self.media.stop
        )

    def n_ready(self, start: int) -> int:
        """Return the number of tokens from ``start`` to the first image without embeddings."""
        spans = self.media.of(start, self.media.stop)
        lacking = (span.start for span in spans if span.media.key not in self.embeddings)
        return max(0, next(lacking, len(self.tokens)) - start)

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    def n_outputs(self, start: int, n: int, n_drafts: int) -> int:
        """Return the number of logits rows for a step over ``n`` tokens from ``start`` and ``n_drafts`` drafts."""
        if self.sampler is None:
            return max(0, start + n - max(start, self.logits_from))
        return 1 + n_drafts if start + n == len(self.tokens) else 0

    def count_cached(self) -> None:
        """Update ``n_cached`` and ``n_reached`` after a cache lookup."""
        n = 0 if self.sequence is None else min(len(self.sequence), self.n_prompt)
        if n > self.n_reached:
            self.n_cached += n - self.n_reached
            self.n_reached = n

    @property
    def usage(self) -> Usage:
        return Usage(self.n_prompt, self.n_cached, self.n_generated)

    @property
    def timings(self) -> Timings:
        return Timings(
            prefill_s=self.prefill_s,
            prefill_tokens=max(0, min(self.n_reached, self.n_prompt) - self.n_cached),
            first_token_s=self.first_token_s,
            decode_s=self.decode_s,
            decode_tokens=max(0, self.n_chosen - 1),
            queue_s=self.started_at - self.submitted_at if self.started_at else 0.0,
        )

    @property
    def draft_counts(self) -> Drafts | None:
        """Draft counts, or None without a drafter."""
        return None if self.drafter is None else Drafts(self.n_drafted, self.n_accepted, self.n_decode_steps)
