"""One token after the other: evaluates a prompt, samples, and feeds the choice back, until something ends it.

**Drafts.**  With a `localllm.drafting.Drafter`, a step evaluates the last token and guesses of what follows it at
once.  Then the sampler chooses from the first row of logits, as it would have without, and as long as it chooses what
was guessed, the next row is valid too and saves a step.  Rows are sampled only as tokens are asked for, one after the
other: so the sampler, its penalties, random numbers and processors see the same in the same order, and the text is
exactly that of decoding token by token, whatever the drafts.  (Leviathan et al., arXiv:2211.17192, and Chen et al.,
arXiv:2302.01318, accept more drafts where the temperature is high, but keep only the distribution of texts, not the
text of a seed.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from localllm.drafting.drafter import Drafter, Drafts
from localllm.engine import Engine, Run
from localllm.errors import UsageError
from localllm.kernels.backend import TopK
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
        drafter: Drafter | None = None,
    ) -> None:
        """Takes over a run that `Engine.start` made of the prompt, and finishes it in the end; so ``drafter``."""
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._run = run
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._progress = progress
        run.n_best = sampler.n_enough
        self._n_prompt = len(run.tokens)
        self._ended = False
        self._in_step = threading.Lock()
        self._started_at = time.perf_counter()
        self._prefill_s = self._first_token_s = self._decode_s = 0.0
        self._n_chosen = 0
        self._drafter = drafter
        #: Of the run's logits the row that follows the last token; -1 if there is none and a step must be made.
        self._row = -1
        self._n_steps = self._n_drafted = self._n_accepted = 0

    @property
    def drafts(self) -> Drafts | None:
        """What became of the drafts so far; None without a drafter."""
        if self._drafter is None:
            return None
        return Drafts(self._n_drafted, self._n_accepted, self._n_steps)

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
        # Nobody is in a step, even if an interrupt left it looking so.
        self._engine.finish(self._run)
        if self._drafter is not None:
            self._drafter.close()

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
        row = self._row
        choice = self._sampler.among(*logits.row(row)) if isinstance(logits, TopK) else self._sampler(logits[row])
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
        self._append(choice.id)
        if self._n_chosen == self._max_tokens or len(self._run.tokens) > self._engine.context:
            self._end("length")
        return choice

    def _evaluate(self) -> NDArray[np.float32] | TopK | None:
        """Logits, or the largest, whose row `_row` follows the last token; None if it was closed meanwhile."""
        if self._row < 0 and self._drafter is not None and self._n_chosen:
            self._run.drafts = self._propose(self._drafter)
        while self._row < 0 and not self._ended:
            self._step()
        return None if self._row < 0 else self._run.logits

    def _step(self) -> None:
        """Evaluates the next chunk of what is missing; with its end the first row of logits is there."""
        run = self._run
        is_decode = run.n_missing == 1 and self._n_chosen > 0
        self._engine.advance(run)
        if self._progress is not None and not self._n_chosen:
            self._progress(run.position, self._n_prompt)
        if run.logits is None:
            return
        self._row = 0
        self._n_steps += self._n_chosen > 0
        self._n_drafted += len(run.drafts)
        if is_decode and not run.n_company and self._drafter is not None:
            self._drafter.measured(1 + len(run.drafts), run.step_s)

    def _propose(self, drafter: Drafter) -> list[int]:
        """Drafts, as many as are of use: up to the end of the context, and one less than tokens are still wanted."""
        most = self._engine.context - len(self._run.tokens)
        if self._max_tokens is not None:
            most = min(most, self._max_tokens - self._n_chosen - 1)
        if most < 1:
            return []
        ids = drafter.propose(self._run.tokens, most)
        if not ids:
            return []
        n_vocab = self._engine.n_vocab
        return list(takewhile(lambda id_: 0 <= id_ < n_vocab, ids[:most]))

    def _append(self, id_: int) -> None:
        """Goes on with a token: to the next row of logits if it was guessed, else what was guessed is dropped."""
        run = self._run
        if self._row < len(run.drafts) and run.drafts[self._row] == id_:
            self._row += 1
            self._n_accepted += 1
        else:
            self._row = -1
            run.cut(len(run.tokens))
        run.tokens.append(id_)

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
                if self._drafter is not None:
                    self._drafter.close()
            finally:
                self._in_step.release()
