"""Requests to the engine, and how far they have come."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.engine.cache import CachedSequence
from localllm.engine.drafting import Drafter, Drafts
from localllm.engine.pictures import NO_PICTURES, Embeddings, Pictures
from localllm.options.types import DEFAULT_DRAFTS, Priority
from localllm.sampling import Choice, Sampler

#: Why a request ended: the model or a stop string ended its text; it reached ``max_tokens`` or the end of the
#: context; it was cancelled; or its ``timeout`` had passed.
FinishReason = Literal["stop", "length", "cancelled", "timeout"]

#: A background request is served as if it had come so many seconds later: behind those that wait, but never starving.
BACKGROUND_DELAY_S = 30.0

#: A request waits as if it had come so many seconds later for each request of the same client that runs.
CLIENT_DELAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens.

    Attributes:
        prompt_tokens: all tokens of the prompt.
        cached_tokens: how many of them were in the cache already, and cost nothing.
        completion_tokens: tokens generated, without the one that ended it.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds and tokens.

    Attributes:
        prefill_s: from the first step over the prompt to the end of the last one.
        prefill_tokens: tokens of the prompt that were not cached.
        first_token_s: from the call to the first token, waiting for other requests included.
        decode_s: steps, and sampling, for ``decode_tokens``, all but the first.
    """

    prefill_s: float
    prefill_tokens: int
    first_token_s: float
    decode_s: float
    decode_tokens: int

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens of the prompt a second; 0 if none was evaluated."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens generated a second, the first one left out; 0 if there is no other."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


class RequestOutput(Protocol):
    """Takes what the engine makes of one request.

    All but ``is_full`` are called in the engine's thread, and must not wait for anything.  What they raise ends the
    request.
    """

    @property
    def is_full(self) -> bool:
        """Whether the reader is so far behind that the request pauses until it has caught up.

        Any thread may end that, but only what the engine hands over begins it.
        """
        ...

    def progress(self, n_evaluated: int) -> None:
        """So many tokens of the prompt are in the cache: before the first step, and after each.  Raises nothing."""
        ...

    def token(self, choice: Choice) -> bool:
        """A token was chosen.  Returns whether the text is complete with it."""
        ...

    def logits(self, position: int, rows: NDArray[np.float32]) -> None:
        """Logits [n, n_vocab] after the tokens from ``position`` on; the array is used again for the next step."""
        ...

    def flush(self) -> None:
        """A step is done: hand over what it brought."""
        ...

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes; see `Request.finish_reason`."""
        ...


@dataclass(eq=False)
class Request:
    """A prompt to go on with, or, without a ``sampler``, tokens whose logits are wanted."""

    tokens: list[int]  # the prompt; the engine appends what it chooses
    output: RequestOutput  # takes the results
    sampler: Sampler | None = None
    stop_ids: Set[int] = frozenset()  # tokens that end the text, and are not part of it
    max_tokens: int | None = None  # tokens to generate at most; None: until the context is full
    # without a sampler, position of the first token whose logits are wanted and did not come yet
    logits_from: int = 0
    priority: Priority = "normal"
    timeout_s: float | None = None  # seconds after which it ends, wherever it is
    client: str = ""  # who asks; clients share the model, however many requests each has
    # who drafts tokens for the model to verify: the text so far ("lookup"), the draft model, the block behind the
    # model's own layers ("mtp"), or nobody
    speculate: Literal["lookup", "draft", "mtp"] | None = None
    draft_max: int = DEFAULT_DRAFTS  # tokens that are drafted for one step at most
    draft_always: bool = False  # drafts as many for every step, whether that is expected to pay or not
    adapters: tuple[float, ...] = ()  # how much of each loaded adapter it gets; empty for none of them
    pictures: Pictures = NO_PICTURES  # those of the prompt, where its tokens are their ids (`Picture.ids`)

    finish_reason: FinishReason | None = None  # None while it goes on, or if an error ended it
    sequence: CachedSequence | None = None  # its tokens in the cache; None while it waits to be admitted
    drafter: Drafter | None = None  # proposes ``drafts``, tokens to follow ``tokens``
    drafts: list[int] = field(default_factory=list)
    n_prompt: int = 0
    n_cached: int = 0  # tokens of the prompt that were in the cache before this request reached them
    n_reached: int = 0  # tokens that it had in the cache at most: after it was preempted, fewer are there
    n_again: int = 0  # tokens generated that are evaluated again, as drafts behind them were wrong
    is_choosing: bool = False  # its next tokens are being chosen in another thread: it has no part in steps meanwhile
    # of the pictures that it comes to, by their keys
    embeddings: dict[bytes, Embeddings] = field(default_factory=dict)
    is_cancelled: bool = False  # may be set by any thread; takes effect before the next step
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    last_decoded_step: int = 0  # when it last decoded, counted by the scheduler
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
    def rank(self) -> float:
        """The place in the queue: the lowest comes first."""
        return self.submitted_at + (BACKGROUND_DELAY_S if self.priority == "background" else 0.0)

    @property
    def deadline(self) -> float | None:
        """When it ends, in the time of `time.perf_counter`."""
        return None if self.timeout_s is None else self.submitted_at + self.timeout_s

    @property
    def n_reusable(self) -> int:
        """Tokens that need not be evaluated if the cache has them: for all after these logits are wanted."""
        return min(len(self.tokens) - 1, self.logits_from) if self.sampler is None else len(self.tokens) - 1

    @property
    def n_missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - (0 if self.sequence is None else len(self.sequence.ids))

    @property
    def is_decoding(self) -> bool:
        """Whether it needs the last token alone, which is not a picture's, or with it what is evaluated again."""
        n_missing = self.n_missing
        return n_missing <= 1 + self.n_again and len(self.tokens) - n_missing >= self.pictures.stop

    def n_ready(self, start: int) -> int:
        """Tokens from a position on, up to the first picture that has no embeddings yet."""
        pictures = self.pictures.of(start, self.pictures.stop)
        lacking = (each.start for each in pictures if each.picture.key not in self.embeddings)
        return max(0, next(lacking, len(self.tokens)) - start)

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    def n_outputs(self, start: int, n: int, n_drafts: int) -> int:
        """Rows of logits wanted of ``n`` tokens from position ``start`` on, and drafts behind them."""
        if self.sampler is None:
            return max(0, start + n - max(start, self.logits_from))
        return 1 + n_drafts if start + n == len(self.tokens) else 0

    def count_cached(self) -> None:
        """Counts what the cache had of the prompt."""
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
        )

    @property
    def draft_counts(self) -> Drafts | None:
        """Counts of its drafts so far; None without a drafter."""
        return None if self.drafter is None else Drafts(self.n_drafted, self.n_accepted, self.n_decode_steps)
