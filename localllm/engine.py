"""Evaluates tokens over the paged cache.  Knows ids and logits, nothing of text or of sampling.

A `Run` is a sequence that a caller works on: the tokens it shall hold, some of which may be in the cache already.
`Engine.advance` evaluates the next chunk of what is missing.  Prefill, decode, and evaluating again what the cache
had to give up are all this one thing.

**Drafts** are tokens guessed to follow.  They are evaluated behind the last token in the same step, and their logits
serve as far as the guess was right.  Where it was not, `Run.cut` says so, and the next step cuts the cache back.

**Threads.**  One lock guards an engine.  Whoever holds it evaluates, in the same batch, the next chunks of all
runs that other threads wait for: reading the weights once serves them all.  It also waits a little for those that
were in the last batch and whose callers are quick to go on; else one of them would begin alone, just before the
others are back.  What comes out for a token does not depend on its company in the batch.  A forked child has no use
for its parent's engine: a thread that is not there may have held the lock, in the middle of a step.

**Room.**  When pages are short, finished sequences give up theirs first.  Then a run may take the last pages of
runs that began later and of idle ones, which evaluate those tokens again when they go on; otherwise it waits.
The oldest run never waits, so there is always progress.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.cache import CachedSequence, PagedCache
from localllm.checks import in_vocabulary
from localllm.errors import ClosedError, ContextLengthError, UsageError
from localllm.kernels.backend import Batch, Step, TopK
from localllm.kernels.process import Process

#: Tokens that one step evaluates at most.
MAX_TOKENS = 512

#: Bytes of logits that one step computes at most.
MAX_LOGITS_BYTES = 32 << 20

#: Seconds without a step after which a run counts as idle: nobody is about to go on with it.
IDLE_SECONDS = 1.0

#: How long a step waits for the others of the last batch: a part of the seconds which that took, and seconds at most.
_PART_OF_STEP, _MOST_SECONDS = 0.25, 0.02

#: Seconds between two looks at whether a run has become idle.
_POLL_SECONDS = 0.1


@dataclass(eq=False)
class Run:
    """A sequence that a caller works on; `Engine.start` makes it.  To go on, append to ``tokens``.

    Attributes:
        tokens: what the sequence shall hold.
        n_cached: how many of them were in the cache when the run began.
        drafts: tokens guessed to follow ``tokens``, to be evaluated with the last of these.  The step that does it
            leaves those for which there was room.
        n_best: how many of the largest logits are enough for the caller, where a device finds them; 0 for all.
        logits: after `Engine.advance`: float32 [n, n_vocab], or the ``n_best`` largest; the caller's own.  For the
            last token and each draft, or None while it was not reached; with ``all_logits`` for every token of the
            chunk.
        position: after `Engine.advance`: where the chunk ended, drafts not counted.
        n_agreed: tokens of ``sequence`` that are not known to be wrong drafts.
        step_s: seconds that the last step for it took, without any waiting.
        n_company: how many other runs that step was for as well.
        is_quick: whether its caller went on soon after the last step: then it is worth waiting for.
    """

    tokens: list[int]
    sequence: CachedSequence
    all_logits: bool = False
    n_cached: int = 0
    drafts: list[int] = field(default_factory=list)
    n_best: int = 0
    logits: NDArray[np.float32] | TopK | None = None
    position: int = 0
    n_agreed: int = 0
    waiting: bool = False
    thread: int = field(default_factory=threading.get_ident)
    last_used: float = field(default_factory=time.monotonic)
    is_quick: bool = True
    step_s: float = 0.0
    n_company: int = 0

    @property
    def n_missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - min(len(self.sequence), self.n_agreed)

    def cut(self, n_tokens: int) -> None:
        """Drops all but the first ``n_tokens``, and all drafts behind them; the cache follows with the next step.

        To be called before another token than the draft in its place is appended.
        """
        del self.tokens[n_tokens:]
        self.n_agreed = min(self.n_agreed, n_tokens)
        self.drafts = []


class _Part(NamedTuple):
    """What one run has in a batch: its next ``n`` tokens, and the first ``n_drafts`` of its drafts behind them."""

    run: Run
    n: int
    n_drafts: int = 0

    @property
    def stop(self) -> int:
        """The position behind the tokens."""
        return len(self.run.sequence) + self.n

    @property
    def reaches_end(self) -> bool:
        return self.stop == len(self.run.tokens)

    @property
    def n_outputs(self) -> int:
        """Rows of logits wanted."""
        if self.run.all_logits:
            return self.n
        return 1 + self.n_drafts if self.reaches_end else 0

    @property
    def ids(self) -> list[int]:
        return self.run.tokens[len(self.run.sequence) : self.stop] + self.run.drafts[: self.n_drafts]


class Engine:
    """A model, its cache, and the runs in it.  Every method may be called from any thread.

    Attributes:
        context: tokens that a sequence can hold.
        n_vocab: logits a token.
        max_tokens: tokens that one step evaluates at most.
    """

    def __init__(self, step: Step, *, n_vocab: int, context: int, max_tokens: int = MAX_TOKENS) -> None:
        """``step`` was compiled for ``max_tokens`` tokens, or as many as the context has, and their `max_outputs`."""
        self.context = context
        self.n_vocab = n_vocab
        self.max_tokens = min(max_tokens, context)
        self._max_outputs = max_outputs(self.n_vocab, self.max_tokens)
        self._max_top_k = step.max_top_k
        self._open: tuple[PagedCache, Step] | None = (PagedCache(step.cache), step)
        self._process = Process()
        self._lock = threading.Lock()
        #: Of each thread that waits for a change, what wakes it: held until then.
        self._bells: dict[int, threading.Lock] = {}
        #: Whether the last change of runs and cache came to its end: an interrupt may have cut it short.
        self._is_whole = True
        self._runs: list[Run] = []  # oldest first
        self._finished: deque[tuple[Run, bool]] = deque()
        #: The runs of the last batch, and until when a step waits for them.
        self._company: list[Run] = []
        self._wait_until = 0.0

    def start(self, tokens: Sequence[int], *, all_logits: bool = False) -> Run:
        """Begins a run with what the cache has of ``tokens``.

        The last token is always evaluated, for its logits are wanted; with ``all_logits`` all tokens are.

        Raises:
            UsageError: there are no tokens, or one is outside the vocabulary.
            ContextLengthError: they do not fit into the context.
            ClosedError: the engine was closed.
            DeviceError: it was made before this process was forked.
        """
        self._process.check()
        self._check_tokens(tokens)
        with self._lock:
            cache, _ = self._begin_change()
            self._settle_finished()
            sequence = cache.begin([] if all_logits else tokens[:-1])
            n = len(sequence)
            run = Run(list(tokens), sequence, all_logits, n_cached=n, position=n, n_agreed=n)
            self._runs.append(run)
            self._is_whole = True
            return run

    def advance(self, *runs: Run, wait: bool = True) -> bool:
        """Evaluates the next chunk of each run, and sets its ``logits``, ``drafts`` and ``position``.

        Args:
            wait: until there is room for all of them, if other runs have taken it.

        Returns:
            Whether all were evaluated, as they always are after waiting.

        Raises:
            UsageError: a run has nothing to evaluate.
            ContextLengthError: a run's tokens do not fit into the context.
            ClosedError: the engine was closed.
            DeviceError: it was made before this process was forked.
        """
        self._process.check()
        for run in runs:
            if not run.n_missing:
                raise UsageError("every token of this run was evaluated: append one to its tokens first")
            self._check_length(len(run.tokens))
        try:
            for run in runs:
                run.waiting, run.thread = True, threading.get_ident()
            is_back = True
            while True:
                # To wait for the lock again, as a condition variable does, is no good: interrupted there, it would
                # be let go of by one that has not got it.
                with self._lock:
                    if is_back:
                        self._note_return(runs)
                        is_back = False
                    seconds = self._go_on(runs, wait)
                    if not seconds:
                        return not any(run.waiting for run in runs)
                    bell = self._new_bell()
                bell.acquire(timeout=seconds)
        finally:
            for run in runs:
                run.waiting = False

    def finish(self, run: Run, *, keep: bool = True) -> None:
        """Ends a run; its sequence is kept for later prompts, or with ``keep=False`` forgotten.

        It never waits: while a step is under way, the next one to take the lock settles it.  So it may be called
        from a finaliser, which can interrupt any line here.
        """
        self._finished.append((run, keep))
        if self._lock.acquire(blocking=False):
            try:
                if self._open is None:
                    self._finished.clear()
                else:
                    self._begin_change()
                    self._settle_finished()
                    self._is_whole = True
            finally:
                self._lock.release()

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logits after each token, [len(tokens), n_vocab], evaluated in chunks.

        Raises:
            UsageError, ContextLengthError, ClosedError, DeviceError: as `start`.
        """
        run = self.start(tokens, all_logits=True)
        try:
            logits = np.empty((len(tokens), self.n_vocab), np.float32)
            while run.position < len(tokens):
                self.advance(run)
                if isinstance(run.logits, np.ndarray):
                    logits[run.position - len(run.logits) : run.position] = run.logits
            return logits
        finally:
            self.finish(run, keep=False)

    def forget(self) -> None:
        """Drops the finished sequences, so that the next prompts are evaluated from their beginning."""
        self._process.check()
        with self._lock:
            cache, _ = self._begin_change()
            self._settle_finished()
            cache.forget()
            self._is_whole = True

    def close(self) -> None:
        """Waits for the step under way and lets model and cache go.  Runs fail from now on."""
        if not self._process.is_current:  # a step of the parent would never end here
            self._open = None
            return
        with self._lock:
            self._open = None
            self._runs.clear()
            self._company.clear()
            self._finished.clear()
            self._wake_all()

    def _opened(self) -> tuple[PagedCache, Step]:
        if self._open is None:
            raise ClosedError("the model was closed: load it again to go on")
        return self._open

    def _begin_change(self) -> tuple[PagedCache, Step]:
        """What is open, whole again should the last change have been cut short.  The lock is held.

        ``_is_whole`` says that this one is through.
        """
        cache, step = self._opened()
        if not self._is_whole:
            cache.mend([run.sequence for run in self._runs])
        self._is_whole = False
        return cache, step

    def _new_bell(self) -> threading.Lock:
        """What this thread can wait for, without the lock: it can be acquired once something changed."""
        bell = threading.Lock()
        bell.acquire()
        self._bells[threading.get_ident()] = bell
        return bell

    def _wake_all(self) -> None:
        while self._bells:
            self._bells.popitem()[1].release()

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise UsageError("there are no tokens to evaluate: the prompt is empty")
        in_vocabulary(tokens, self.n_vocab)
        self._check_length(len(tokens))

    def _check_length(self, n_tokens: int) -> None:
        if n_tokens > self.context:
            raise ContextLengthError(n_tokens, self.context, "shorten it or load the model with a larger context")

    def _check_running(self, runs: Sequence[Run]) -> None:
        if any(run not in self._runs for run in runs):
            raise UsageError("this run was finished: start another one")

    def _settle_finished(self) -> None:
        """Hands the sequences of finished runs back to the cache.  The lock is held."""
        while self._finished:
            run, keep = self._finished[0]
            if run in self._runs:
                cache, _ = self._opened()
                self._runs.remove(run)
                cache.truncate(run.sequence, min(run.n_agreed, len(run.tokens)))
                (cache.keep if keep else cache.free)(run.sequence)
                self._wake_all()
            self._finished.popleft()  # now that it is done, should this be interrupted

    def _note_return(self, runs: Sequence[Run]) -> None:
        """Notes how soon after the last step the callers of these runs are back.  The lock is held."""
        now = time.monotonic()
        for run in runs:
            if run in self._company:
                run.is_quick = now < self._wait_until

    def _go_on(self, runs: Sequence[Run], wait: bool) -> float:
        """Takes a step for these runs, if they need one and can have it.  The lock is held.

        Returns:
            For how many seconds to wait for a change before trying again; 0 if there is nothing to wait for.
        """
        while any(run.waiting and run.n_missing for run in runs):
            cache, step = self._begin_change()
            self._check_running(runs)
            self._settle_finished()
            seconds = self._company_seconds() if wait else 0.0
            if not seconds:
                parts = self._assemble(cache, runs)
                if parts:
                    self._take_step(cache, step, parts)
                elif wait:
                    seconds = _POLL_SECONDS
            self._is_whole = True
            if seconds or not wait:
                return seconds
        return 0.0

    def _company_seconds(self) -> float:
        """For how long to wait for runs of the last batch that may be back soon."""
        thread = threading.get_ident()
        missing = [
            run
            for run in self._company
            if run.is_quick and not run.waiting and run.thread != thread and run in self._runs
        ]
        seconds = self._wait_until - time.monotonic()
        if missing and seconds > 0:
            return seconds
        for run in missing:
            run.is_quick = False  # until it was back in time again
        return 0.0

    def _take_step(self, cache: PagedCache, step: Step, parts: Sequence[_Part]) -> None:
        begin = time.perf_counter()
        _evaluate(cache, step, parts, _n_best(parts, self._max_top_k))
        seconds = time.perf_counter() - begin
        self._company = [part.run for part in parts]
        for run in self._company:
            run.step_s, run.n_company = seconds, len(parts) - 1
        self._wait_until = time.monotonic() + min(_PART_OF_STEP * seconds, _MOST_SECONDS)
        self._wake_all()

    def _assemble(self, cache: PagedCache, own: Sequence[Run]) -> list[_Part]:
        """The next batch: the tokens of one's own runs, those that others wait for, and drafts in what is left."""
        parts: list[_Part] = []
        n_tokens, n_outputs = self.max_tokens, self._max_outputs
        for run in (*own, *(run for run in self._runs if run not in own)):
            if run.waiting and len(run.sequence) > run.n_agreed:
                cache.truncate(run.sequence, run.n_agreed)
            n = min(run.n_missing, n_tokens, n_outputs if run.all_logits else n_tokens)
            if run.waiting and n and n_outputs and self._make_room(cache, run, n, [part.run for part in parts]):
                parts.append(_Part(run, n))
                n_tokens -= n
                n_outputs -= n if run.all_logits else 1
        for i, (run, n, _) in enumerate(parts):
            n_drafts = min(len(run.drafts), self.context - len(run.tokens), n_tokens, n_outputs)
            # No other run gives up pages for what is but guessed.
            if parts[i].reaches_end and n_drafts > 0 and cache.reserve(run.sequence, n + n_drafts):
                parts[i] = _Part(run, n, n_drafts)
                n_tokens -= n_drafts
                n_outputs -= n_drafts
        return parts

    def _make_room(self, cache: PagedCache, run: Run, n_tokens: int, busy: Sequence[Run]) -> bool:
        while not cache.reserve(run.sequence, n_tokens):
            victim = self._victim(run, busy)
            if victim is None:
                return False
            cache.drop_last_page(victim.sequence)
        return True

    def _victim(self, run: Run, busy: Sequence[Run]) -> Run | None:
        """The youngest run that gives up pages for this one: it began later, or is idle."""
        now, thread = time.monotonic(), threading.get_ident()
        younger = True
        for other in reversed(self._runs):
            if other is run:
                younger = False
                continue
            idle = not other.waiting and (other.thread == thread or now - other.last_used > IDLE_SECONDS)
            if (younger or idle) and other.sequence.pages and other not in busy:
                return other
        return None


def n_cache_pages(context: int, parallel: int, page_size: int) -> int:
    """Pages of a cache for ``parallel`` sequences of ``context`` tokens."""
    return parallel * -(-context // page_size)


def max_outputs(n_vocab: int, max_tokens: int) -> int:
    """Rows of logits that one step computes at most."""
    return max(1, min(max_tokens, MAX_LOGITS_BYTES // (4 * n_vocab)))


def _n_best(parts: Sequence[_Part], most: int) -> int:
    """How many of the largest logits serve all parts of a batch; 0 if one needs all, or more than ``most``."""
    wanted = [part.run.n_best for part in parts if part.n_outputs]
    n = max(wanted, default=0) if all(wanted) else 0
    return n if n <= most else 0


def _evaluate(cache: PagedCache, step: Step, parts: Sequence[_Part], n_best: int) -> None:
    """One step over a batch whose room is reserved.  If it fails, the sequences are as before."""
    batch = _batch(parts, cache.page_size)
    logits = step.top_k(batch, n_best) if n_best else step(batch)
    row = 0
    for part in parts:
        run, ids, stop, n_rows = part.run, part.ids, part.stop, part.n_outputs
        rows = slice(row, row + n_rows)
        # The logits before the tokens: should an interrupt come in between, they are just evaluated again.
        if not n_rows:
            run.logits = None
        else:
            run.logits = logits.copy(rows, run.n_best) if isinstance(logits, TopK) else logits[rows].copy()
        if part.reaches_end:
            del run.drafts[part.n_drafts :]
        run.position = stop
        run.last_used = time.monotonic()
        run.n_agreed = len(run.sequence) + len(ids)
        cache.append(run.sequence, ids)
        run.waiting = False
        row += n_rows


def _batch(parts: Sequence[_Part], page_size: int) -> Batch:
    ids: list[int] = []
    positions: list[int] = []
    query_starts = [0]
    kv_lengths: list[int] = []
    outputs: list[int] = []
    n_blocks = max(-(-(part.stop + part.n_drafts) // page_size) for part in parts)
    block_tables = np.zeros((len(parts), n_blocks), np.int32)
    for s, part in enumerate(parts):
        start, stop = len(part.run.sequence), part.stop + part.n_drafts
        ids += part.ids
        positions += range(start, stop)
        outputs += range(len(ids) - part.n_outputs, len(ids))
        query_starts.append(len(ids))
        kv_lengths.append(stop)
        pages = part.run.sequence.pages[:n_blocks]
        block_tables[s, : len(pages)] = pages
    return Batch(
        ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        query_starts=np.array(query_starts, np.int32),
        kv_lengths=np.array(kv_lengths, np.int32),
        block_tables=block_tables,
        outputs=np.array(outputs, np.int32),
    )
