"""Chooses the requests and tokens of each step. Uses no threads, clocks or logits.

Each step, in this order:

1. Waiting requests are admitted while the cache has pages for all of their tokens, in order of `Request.rank`. Each
   running request of a client delays the client's next one by `CLIENT_DELAY_S`.
2. Each decoding sequence gets its next token, and drafts if there is room.
3. The rest of the step's **token budget** goes to prompts, in chunks. The oldest prompt gets half of the budget. The
   other prompts share the rest, shortest first. Therefore long prompts do not delay short ones, and no prompt
   starves. The budget is the number of tokens that the measured speed allows in ``step_s`` seconds. So prompts do not
   stall streams, and new or cancelled requests do not wait long.

If no page is free, a request takes the pages of a request whose reader is slow, or of the youngest request that was
admitted after it. That request is **preempted**: it waits again, and its lost tokens are evaluated again after its
admission. The oldest request is never preempted, so there is always progress.

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

#: Minimum of prompt tokens per step, however slow the model is, and their number before its speed is known.
MIN_CHUNK, FIRST_CHUNK = 16, 32

#: Minimum of prompt tokens if no request decodes: with fewer tokens, CPU kernels unpack weights unnecessarily often.
MIN_CHUNK_ALONE = 64

#: Weight of one step in the running estimates of speed.
_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part in a step: its next ``n_tokens``, then its first ``n_drafts`` drafts."""

    request: Request
    n_tokens: int
    n_drafts: int = 0

    def chunk(self) -> BatchItem:
        request, sequence = self.request, self.request.sequence
        assert sequence is not None
        if (canvas := request.canvas) is not None:
            outputs = canvas.outputs
            return BatchItem(sequence, canvas.ids, len(outputs), 0, request.adapters, outputs=outputs)
        start = len(sequence)
        ids = request.tokens[start : start + self.n_tokens] + request.drafts[: self.n_drafts]
        n_outputs = request.n_outputs(start, self.n_tokens, self.n_drafts)
        sampler, draws = request.sampler, () if request.sampler is None else request.sampler.draws(2)
        is_foreseen = bool(draws) or (sampler is not None and not sampler.sampling.temperature)
        goes_on = is_foreseen and request.drafter is None and request.max_tokens != request.n_generated + 1
        return BatchItem(
            sequence,
            ids,
            n_outputs,
            start,
            request.adapters,
            goes_on,
            draws if goes_on else (),
            request.media,
            request.embeddings,
            request.probe,
        )


class StepTimes:
    """Running estimates of the duration of steps, from measurements."""

    def __init__(self) -> None:
        self._decode_s = 0.0  # a step without prompt tokens
        self.token_s = 0.0  # added by each prompt token

    def add(self, n_prompt_tokens: int, n_decoding: int, seconds: float) -> None:
        if not n_prompt_tokens:
            self._decode_s = _moved(self._decode_s, seconds)
        elif n_prompt_tokens >= MIN_CHUNK:
            base = self._decode_s if n_decoding else 0.0
            self.token_s = _moved(self.token_s, max(seconds - base, 0.1 * seconds) / n_prompt_tokens)

    def budget(self, seconds: float) -> int:
        """Return the number of prompt tokens for a step of ``seconds`` with decoding requests."""
        if not self.token_s:
            return FIRST_CHUNK
        tokens = (seconds - self._decode_s) / self.token_s
        return max(MIN_CHUNK, int(min(tokens, 2.0**31)))  # int() of an infinite number raises


def _moved(estimate: float, measured: float) -> float:
    return estimate + _WEIGHT * (measured - estimate) if estimate else measured


class Scheduler:
    """Queue and running requests of an engine."""

    def __init__(self, runner: ModelRunner, *, max_running: int, step_s: float) -> None:
        """``step_s``: longest step with prompt tokens, in seconds."""
        self.waiting: list[Request] = []  # without pages, by rank
        self.running: list[Request] = []  # with pages, by rank
        self.step_times = StepTimes()
        self.n_preempted = 0  # number of preemptions
        self._cache = runner.cache
        self._max_tokens, self._max_outputs = runner.max_tokens, runner.max_outputs
        self._max_running = min(max_running, runner.cache.max_sequences)
        self._step_s = step_s
        # If experts stay in the file, a step reads nearly all experts, however few prompt tokens it has.
        self._least_alone = MIN_CHUNK_ALONE if runner.expert_reads is None else self._max_tokens
        self._is_diffusion = runner.diffusion is not None
        # is_causal: a prompt can be split into chunks. has_spans: an image must be in one step.
        self._is_causal, self._has_spans = runner.is_causal, runner.has_spans
        self._has_prompts = runner.graph.prompt is not None  # whether prompts are evaluated by another program
        self._decode_counter = count(1)

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    @property
    def has_one(self) -> bool:
        return len(self.running) == 1 and not self.waiting

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=attrgetter("rank"))

    def remove(self, request: Request) -> None:
        """Remove a request. Its tokens stay cached until their pages are needed."""
        if request.sequence is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._cache.release(request.sequence)
            request.sequence = None
            request.embeddings.clear()

    def next_batch(self) -> list[Scheduled]:
        """Return the next batch, with pages reserved; empty if no request can run."""
        self.admit()
        batch: list[Scheduled] = []
        active = [request for request in self.running if not (request.output.is_full or request.is_choosing)]
        if self._is_diffusion:
            return self._canvases(active)
        decoding = [request for request in active if request.is_decoding]
        prompts = [request for request in active if not request.is_decoding]
        most = min(self._max_outputs, self._max_tokens)
        if prompts:  # reserve tokens, and one row of logits, for prompts
            n_together, largest = max((self._n_together(request), -i) for i, request in enumerate(prompts))
            if n_together == self._max_tokens:  # the image fills a step
                self._add_prompts([prompts[-largest]], batch, n_together, self._max_outputs)
                if batch:
                    return batch
            most = min(self._max_outputs - 1, self._max_tokens - max(MIN_CHUNK, n_together))
        if len(decoding) > most:  # requests take turns
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

    def _canvases(self, active: list[Request]) -> list[Scheduled]:
        """Return a step of requests of a model that writes by diffusion, which take turns.

        Each request adds its whole text. After the first text, texts are added if the step has room for their tokens
        and logits, and takes about as long as a step with prompt tokens.
        """
        batch: list[Scheduled] = []
        tokens_left, rows_left = self._max_tokens, self._max_outputs
        budget = self.step_times.budget(self._step_s)
        for request in sorted(active, key=lambda request: request.last_decoded_step):
            assert request.canvas is not None
            n, n_rows = request.n_missing, len(request.canvas.outputs)
            has_room = n <= tokens_left and n_rows <= rows_left and (not batch or n <= budget)
            if has_room and request.sequence is not None and self._free_pages(request, n, batch):
                batch.append(Scheduled(request, n))
                request.last_decoded_step = next(self._decode_counter)
                tokens_left, rows_left, budget = tokens_left - n, rows_left - n_rows, budget - n
        return batch

    def admit(self) -> None:
        """Admit waiting requests while there are pages."""
        if not self.waiting:
            return
        waiting = [request for request in self.waiting if not (request.output.is_full or request.is_restoring)]
        n_running = Counter(request.client for request in self.running)
        while waiting:
            request = min(
                waiting, key=lambda candidate: candidate.rank + CLIENT_DELAY_S * n_running[candidate.client]
            )
            waiting.remove(request)
            n_running[request.client] += 1
            reusable = request.tokens[: request.n_reusable]
            n_pages = self._cache.n_pages_to_begin(reusable, request.n_text, request.tree)
            while self.running and not self._fits(request, n_pages):
                paused = self._paused()
                if paused is None:
                    return
                self._preempt(paused)
            self.waiting.remove(request)
            request.sequence = self._cache.begin(reusable, request.tree, branch_point=request.branch_point)
            request.count_cached()
            insort(self.running, request, key=attrgetter("rank"))

    def _fits(self, request: Request, n_pages: int) -> bool:
        """Return whether there is room for a request that takes ``n_pages``.

        Running requests keep the pages for the rest of their prompts and one more page each. Without this reserve the
        new request would soon be preempted.
        """
        sequences = ((running.sequence, running.n_missing) for running in self.running)
        missing = (self._cache.n_pages_missing(sequence, n) for sequence, n in sequences if sequence is not None)
        lengths = (candidate.n_text for candidate in (*self.running, request))
        return (
            len(self.running) < self._max_running
            and n_pages <= self._cache.n_available - sum(missing) - len(self.running)
            and self._cache.has_windows_for(lengths, self._max_tokens)
        )

    def _add_prompts(self, prompts: list[Request], batch: list[Scheduled], budget: int, rows: int) -> int:
        """Divide the budget among prompts. Return the number of logits rows that they use."""
        oldest, *younger = prompts
        rows_left = rows
        #: Pages computed in this step: other requests wait for a page instead of computing it again.
        computed: set[tuple[Block, tuple[int, ...]]] = set()

        def add(request: Request, n_most: int) -> int:
            nonlocal rows_left
            if request.sequence is None:  # preempted in this step
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
            if self._has_prompts and request.is_in_media:
                n = min(n, request.media.stop - start)
            if self._has_spans and n:
                n = request.media.whole(start, n, self._max_tokens - sum(e.n_tokens for e in batch))
            if request.sampler is None:  # limited by the free rows
                n = min(n, max(0, request.logits_from - start) + rows_left)
            n_rows = request.n_outputs(start, n, 0)
            if n < 1 or n_rows > rows_left or not self._free_pages(request, n, batch):
                return 0
            batch.append(Scheduled(request, n))
            rows_left -= n_rows
            if key is not None:
                computed.add(key)
            return n

        not_needed = budget - sum(request.n_missing for request in younger)
        budget -= add(oldest, max(-(-budget // 2), not_needed))
        for request in sorted(younger, key=lambda request: request.n_missing):
            if budget > 0:
                budget -= add(request, budget)
        return rows - rows_left

    def _n_together(self, request: Request) -> int:
        """Return the number of next tokens that must not be split: all tokens of an image, 0 if it is not ready."""
        start = 0 if request.sequence is None else len(request.sequence)
        return request.media.whole(start, 1, request.n_ready(start)) if self._has_spans else 0

    def _add_drafts(self, batch: list[Scheduled], n_decoding: int, rows_left: int) -> None:
        tokens_left = self._max_tokens - sum(item.n_tokens for item in batch)
        for i, item in enumerate(batch[:n_decoding]):
            request = item.request
            n, sequence = min(len(request.drafts), tokens_left, rows_left), request.sequence
            # Drafts never preempt a request.
            if n > 0 and sequence is not None and self._cache.reserve(sequence, 1 + n) and self._cache.save(sequence):
                batch[i] = Scheduled(request, 1, n)
                tokens_left -= n
                rows_left -= n

    def _free_pages(self, request: Request, n_tokens: int, batch: Sequence[Scheduled]) -> bool:
        assert request.sequence is not None
        while not self._cache.reserve(request.sequence, n_tokens):
            scheduled = {item.request for item in batch}
            younger = self.running[self.running.index(request) + 1 :]
            victims = [candidate for candidate in younger if candidate not in scheduled and not candidate.is_choosing]
            victim = self._paused() or (victims[-1] if victims else None)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _paused(self) -> Request | None:
        """Return the youngest running request with a slow reader whose tokens are not being sampled in a thread."""
        return next(
            (request for request in reversed(self.running) if request.output.is_full and not request.is_choosing),
            None,
        )

    def _preempt(self, request: Request) -> None:
        self.n_preempted += 1
        self.remove(request)
        self.add(request)
