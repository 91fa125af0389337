"""One token after the other: evaluates a prompt, samples, and feeds the choice back, until something ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from localllm.engine import Engine, Run
from localllm.errors import UsageError
from localllm.sampling import Choice, Sampler

#: Why a generation ended: the model or a stop string ended it; it reached ``max_tokens`` or the end of the
#: context; or it was cancelled.
FinishReason = Literal["stop", "length", "cancelled"]

#: Called between the chunks of a long prompt with the tokens evaluated so far and those of the whole prompt.
Progress = Callable[[int, int], object]


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
    """Where the time went, in seconds and tokens.  What the caller does between two tokens does not count.

    Attributes:
        prefill_s: evaluating what was not cached of the prompt, ``prefill_tokens``.
        first_token_s: from the call to the first token, waiting for other threads included.
        decode_s: evaluating and sampling ``decode_tokens``, all but the first.
    """

    prefill_s: float
    prefill_tokens: int
    first_token_s: float
    decode_s: float
    decode_tokens: int

    @property
    def prefill_rate(self) -> float:
        """Tokens of the prompt a second; 0 if none was evaluated."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens generated a second, the first one left out; 0 if there is no other."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


class Generation:
    """An iterator of the tokens that follow a prompt.

    It ends at an id of ``stop_ids``, which it does not yield, after ``max_tokens``, or where the context ends.
    Any thread may ask for the next token, one at a time, and any may `close` it.  An exception ends it.

    Attributes:
        finish_reason: None while it goes on or if an exception ended it.
    """

    def __init__(
        self,
        engine: Engine,
        run: Run,
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        stop_ids: Set[int] = frozenset(),
        progress: Progress | None = None,
    ) -> None:
        """Takes over a run that `Engine.start` made of the prompt, and finishes it in the end."""
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._run = run
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._progress = progress
        self._n_prompt = len(run.tokens)
        self._ended = False
        self._in_step = threading.Lock()
        self._started_at = time.perf_counter()
        self._prefill_s = self._first_token_s = self._decode_s = 0.0
        self._n_chosen = 0

    @property
    def usage(self) -> Usage:
        return Usage(self._n_prompt, self._run.n_cached, len(self._run.tokens) - self._n_prompt)

    @property
    def timings(self) -> Timings:
        return Timings(
            prefill_s=self._prefill_s,
            prefill_tokens=self._n_prompt - self._run.n_cached if self._prefill_s else 0,
            first_token_s=self._first_token_s,
            decode_s=self._decode_s,
            decode_tokens=max(0, self._n_chosen - 1),
        )

    def __iter__(self) -> Iterator[Choice]:
        return self

    def __next__(self) -> Choice:
        """The next token.

        Raises:
            StopIteration: it has ended; see `finish_reason`.
            UsageError: another call is at it.
            ClosedError: the engine was closed.
        """
        if not self._in_step.acquire(blocking=False):
            raise UsageError("this generation is already at its next token: ask for one at a time")
        try:
            choice = None if self._ended else self._next()
        except BaseException:
            self._ended = True
            raise
        finally:
            self._in_step.release()
            self._release_if_ended()
        if choice is None:
            raise StopIteration
        return choice

    def stop(self) -> None:
        """Ends it because its text is complete, even if it was about to end for another reason."""
        self._end("stop")
        self.finish_reason = "stop"
        self._release_if_ended()

    def close(self) -> None:
        """Ends it.  A step under way in another thread is finished, or a chunk of the prompt, but no more."""
        self._end("cancelled")
        self._release_if_ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _next(self) -> Choice | None:
        begin = time.perf_counter()
        logits = self._evaluate()
        if logits is None:
            return None
        evaluated = time.perf_counter()
        if self._max_tokens == 0:
            self._prefill_s = evaluated - begin
            self._end("length")
            return None
        choice = self._sampler(logits)
        now = time.perf_counter()
        if self._n_chosen:
            self._decode_s += now - begin
        else:
            self._prefill_s = evaluated - begin
            self._first_token_s = now - self._started_at
        self._n_chosen += 1
        if choice.id in self._stop_ids:
            self._end("stop")
            return None
        self._sampler.accept(choice.id)
        self._run.tokens.append(choice.id)
        if self._n_chosen == self._max_tokens or len(self._run.tokens) > self._engine.context:
            self._end("length")
        return choice

    def _evaluate(self) -> NDArray[np.float32] | None:
        """Logits [n_vocab] after the last token; None if it was closed meanwhile."""
        while not self._ended:
            self._engine.advance(self._run)
            if self._progress is not None and not self._n_chosen:
                self._progress(self._run.position, self._n_prompt)
            if self._run.logits is not None:
                logits: NDArray[np.float32] = self._run.logits[-1]
                return logits
        return None

    def _end(self, reason: FinishReason) -> None:
        if not self._ended:
            self.finish_reason = reason
            self._ended = True

    def _release_if_ended(self) -> None:
        """Gives the sequence back once no step is under way.

        `close` sets the flag before it tries the lock, and a step looks at the flag after it has released the
        lock: so whichever comes last does it.
        """
        if self._ended and self._in_step.acquire(blocking=False):
            try:
                self._engine.finish(self._run)
            finally:
                self._in_step.release()
