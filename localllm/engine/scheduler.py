"""Decides what the next step evaluates.  Plain data: no threads, no clocks, no logits.

Each step, in this order:

1. Requests that wait are admitted while the cache has pages for all of their tokens: by rank (`Request.rank`), but
   those of a client that runs many already (`CLIENT_DELAY_S`) after those of one that runs few.
2. Every sequence that decodes gets its next token, and its drafts where there is room.
3. What is left of the step's **token budget** goes to prompts, in chunks: half of it to the one that came first, the
   rest to those that need least.  So long prompts hold up no short ones, and none starves.  The budget is
   what the measured speed allows in ``step_s`` seconds: no stream stalls behind a prompt, and a request that comes or
   is cancelled need not wait for long.

When pages run out, a request takes those of the youngest that came after it, or of one whose reader is behind.  That
one is **preempted**: it waits again, and evaluates what it lost when it is admitted.  The oldest request is preempted
by nobody, so there is always progress.

Sources: Yu et al., Orca (OSDI 2022); Agrawal et al., Sarathi-Serve (arXiv:2403.02310).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from localllm.engine.request import CLIENT_DELAY_S, Request
from localllm.engine.runner import BatchItem, ModelRunner
from localllm.engine.snapshots import Block

#: Tokens of prompts that a step evaluates at least, however slow the model, and before its speed is known.
MIN_CHUNK, FIRST_CHUNK = 16, 32

#: The same where nothing decodes: with fewer, CPU kernels unpack weights more often than they need to.
MIN_CHUNK_ALONE = 64

#: Weight of one step in the running estimates of speed.
_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The part of a request in a step: its next ``n_tokens``, and its first ``n_drafts`` drafts behind them."""

    request: Request
    n_tokens: int
    n_drafts: int = 0

    def chunk(self) -> BatchItem:
        request, sequence = self.request, self.request.sequence
        assert sequence is not None
        start = len(sequence)
        ids = request.tokens[start : start + self.n_tokens] + request.drafts[: self.n_drafts]
        n_outputs = request.n_outputs(start, self.n_tokens, self.n_drafts)
        sampler, draws = request.sampler, () if request.sampler is None else request.sampler.draws(2)
        is_foreseen = bool(draws) or (sampler is not None and not sampler.sampling.temperature)
        goes_on = is_foreseen and request.drafter is None and request.max_tokens != request.n_generated + 1
        own = request.adapters, goes_on, draws if goes_on else (), request.pictures, request.embeddings
        return BatchItem(sequence, ids, n_outputs, start, *own)


class StepTimes:
    """Running estimates of how long steps take, from those that were made."""

    def __init__(self) -> None:
        self._decode_s = 0.0  # a step without prompts
        self._token_s = 0.0  # what each token of a prompt adds

    def add(self, n_prompt_tokens: int, n_decoding: int, seconds: float) -> None:
        if not n_prompt_tokens:
            self._decode_s = _moved(self._decode_s, seconds)
        elif n_prompt_tokens >= MIN_CHUNK:
            base = self._decode_s if n_decoding else 0.0
            self._token_s = _moved(self._token_s, max(seconds - base, 0.1 * seconds) / n_prompt_tokens)

    def budget(self, seconds: float) -> int:
        """Tokens of prompts that a step beside those that decode can have, to take so long."""
        if not self._token_s:
            return FIRST_CHUNK
        tokens = (seconds - self._decode_s) / self._token_s
        return max(MIN_CHUNK, int(min(tokens, 2.0**31)))  # an infinite number is no int


def _moved(estimate: float, measured: float) -> float:
    return estimate + _WEIGHT * (measured - estimate) if estimate else measured


class Scheduler:
    """The requests of an engine."""

    def __init__(self, runner: ModelRunner, *, max_running: int, step_s: float) -> None:
        """``step_s``: seconds that a step with tokens of prompts shall last at most."""
        self.waiting: list[Request] = []  # those without pages, by rank
        self.running: list[Request] = []  # those with pages, by rank
        self.step_times = StepTimes()  # how long steps take
        self.n_preempted = 0  # how often a request had to make room for another
        self._cache = runner.cache
        self._max_tokens, self._max_outputs = runner.max_tokens, runner.max_outputs
        self._max_running = min(max_running, runner.cache.max_sequences)
        self._step_s = step_s
        # Where experts stay in the file, a step reads nearly all, however few tokens of a prompt it has.
        self._least_alone = MIN_CHUNK_ALONE if runner.expert_reads is None else self._max_tokens
        # whether a prompt can be cut, else it comes in one step; and whether a picture comes in one
        self._is_causal, self._has_spans = runner.is_causal, runner.has_spans
        self._decode_counter = count(1)

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=attrgetter("rank"))

    def remove(self, request: Request) -> None:
        """Ends a request; what it has in the cache stays until the pages are needed."""
        if request.sequence is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._cache.release(request.sequence)
            request.sequence = None
            request.embeddings.clear()

    def next_batch(self) -> list[Scheduled]:
        """The batch of the next step, with pages reserved; empty if there is nothing to do."""
        self.admit()
        batch: list[Scheduled] = []
        active = [request for request in self.running if not (request.output.is_full or request.is_choosing)]
        decoding = [request for request in active if request.is_decoding]
        prompts = [request for request in active if not request.is_decoding]
        most = min(self._max_outputs, self._max_tokens)
        if prompts:  # they need some of the tokens, and a row of logits in the end
            n_together, largest = max((self._n_together(each), -i) for i, each in enumerate(prompts))
            if n_together == self._max_tokens:  # a picture has a step alone
                self._add_prompts([prompts[-largest]], batch, n_together, self._max_outputs)
                if batch:
                    return batch
            most = min(self._max_outputs - 1, self._max_tokens - max(MIN_CHUNK, n_together))
        if len(decoding) > most:  # they take turns
            decoding.sort(key=lambda request: request.last_decoded_step)
        n_tokens = 0
        for request in decoding:
            n = request.n_missing
            if n_tokens + n <= max(most, n) and request.sequence is not None and self._free_pages(request, n, batch):
                batch.append(Scheduled(request, n))
                request.last_decoded_step = next(self._decode_counter)
                n_tokens += n
        n_decoding = len(batch)
        rows_left = self._max_outputs - n_decoding
        if prompts:
            budget = self.step_times.budget(self._step_s)
            budget = min(budget if n_decoding else max(budget, self._least_alone), self._max_tokens - n_tokens)
            rows_left -= self._add_prompts(prompts, batch, budget, rows_left)
        self._add_drafts(batch, n_decoding, rows_left)
        return batch

    def admit(self) -> None:
        """Gives requests that wait pages, as long as there are some."""
        if not self.waiting:
            return
        waiting = [each for each in self.waiting if not each.output.is_full]
        n_running = Counter(each.client for each in self.running)
        while waiting:
            request = min(waiting, key=lambda each: each.rank + CLIENT_DELAY_S * n_running[each.client])
            waiting.remove(request)
            n_running[request.client] += 1
            reusable = request.tokens[: request.n_reusable]
            n_pages = self._cache.n_pages_to_begin(reusable, len(request.tokens), request.adapters)
            while self.running and not self._fits(request, n_pages):
                paused = self._paused()
                if paused is None:
                    return
                self._preempt(paused)
            self.waiting.remove(request)
            request.sequence = self._cache.begin(reusable, request.adapters)
            request.count_cached()
            insort(self.running, request, key=attrgetter("rank"))

    def _fits(self, request: Request, n_pages: int) -> bool:
        """Whether there is room for a request that takes so many pages, beside what running requests need for their
        prompts, and a page more for each: with less, what is admitted would soon be preempted again."""
        sequences = ((each.sequence, each.n_missing) for each in self.running)
        missing = (self._cache.n_pages_missing(sequence, n) for sequence, n in sequences if sequence is not None)
        lengths = (len(each.tokens) for each in (*self.running, request))
        return (
            len(self.running) < self._max_running
            and n_pages <= self._cache.n_available - sum(missing) - len(self.running)
            and self._cache.has_windows_for(lengths, self._max_tokens)
        )

    def _add_prompts(self, prompts: list[Request], batch: list[Scheduled], budget: int, rows: int) -> int:
        """Shares the budget among prompts; returns the rows of logits that they take."""
        oldest, *others = prompts
        rows_left = rows
        #: Pages that this step computes: who needs the same one waits for it.
        computed: set[tuple[Block, tuple[int, ...]]] = set()

        def add(request: Request, n_most: int) -> int:
            nonlocal rows_left
            if request.sequence is None:  # preempted just now
                return 0
            self._cache.extend(request.sequence, request.tokens[: request.n_reusable])
            request.count_cached()
            key = self._cache.next_page_key(request.sequence, request.tokens)
            if key in computed:
                return 0
            start, n = len(request.sequence), min(n_most, request.n_missing)
            if not self._is_causal:
                n = request.n_missing if request.n_missing <= self._max_tokens - sum(e.n_tokens for e in batch) else 0
            n = min(self._cache.n_to_snapshot(request.sequence, n), request.n_ready(start))
            if self._has_spans and n:
                n = request.pictures.whole(start, n, self._max_tokens - sum(e.n_tokens for e in batch))
            if request.sampler is None:  # as many as there are rows for
                n = min(n, max(0, request.logits_from - start) + rows_left)
            n_rows = request.n_outputs(start, n, 0)
            if n < 1 or n_rows > rows_left or not self._free_pages(request, n, batch):
                return 0
            batch.append(Scheduled(request, n))
            rows_left -= n_rows
            if key is not None:
                computed.add(key)
            return n

        not_needed = budget - sum(request.n_missing for request in others)
        budget -= add(oldest, max(-(-budget // 2), not_needed))
        for request in sorted(others, key=lambda request: request.n_missing):
            if budget > 0:
                budget -= add(request, budget)
        return rows - rows_left

    def _n_together(self, request: Request) -> int:
        """Tokens that a request needs next in one step: those of a picture that is ready."""
        start = 0 if request.sequence is None else len(request.sequence)
        return request.pictures.whole(start, 1, request.n_ready(start)) if self._has_spans else 0

    def _add_drafts(self, batch: list[Scheduled], n_decoding: int, rows_left: int) -> None:
        tokens_left = self._max_tokens - sum(each.n_tokens for each in batch)
        for i, each in enumerate(batch[:n_decoding]):
            request = each.request
            n, sequence = min(len(request.drafts), tokens_left, rows_left), request.sequence
            # No request is preempted for drafts.
            if n > 0 and sequence is not None and self._cache.reserve(sequence, 1 + n) and self._cache.save(sequence):
                batch[i] = Scheduled(request, 1, n)
                tokens_left -= n
                rows_left -= n

    def _free_pages(self, request: Request, n_tokens: int, batch: Sequence[Scheduled]) -> bool:
        assert request.sequence is not None
        while not self._cache.reserve(request.sequence, n_tokens):
            scheduled = {each.request for each in batch}
            younger = self.running[self.running.index(request) + 1 :]
            victims = [other for other in younger if other not in scheduled and not other.is_choosing]
            victim = self._paused() or (victims[-1] if victims else None)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _paused(self) -> Request | None:
        """The youngest running request whose reader is behind, and of which no thread is choosing tokens."""
        return next((each for each in reversed(self.running) if each.output.is_full and not each.is_choosing), None)

    def _preempt(self, request: Request) -> None:
        self.n_preempted += 1
        self.remove(request)
        self.add(request)
