"""The engine thread: admits requests, schedules batches, evaluates, samples and delivers results.

Any thread may submit a request, cancel it or close the engine. Each call adds a message to a queue that the engine
thread reads before each step. Results go to the `RequestOutput` of their request. A caller that is interrupted, stops
reading or dies does not block other requests, and an exception in a caller's function ends only its own request.

The output of a request does not depend on other requests in its batch.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import takewhile
from typing import Never, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.engine.block_store import BlockStore
from localllm.engine.cache import PagedCache
from localllm.engine.canvas import Canvas
from localllm.engine.disk_tier import DiskTier
from localllm.engine.drafting.cost import StepCost
from localllm.engine.drafting.lookup import LookupDrafter
from localllm.engine.drafting.model import DraftModel
from localllm.engine.drafting.mtp import MTPDrafter
from localllm.engine.encoding import Encoding, MediaEmbedder
from localllm.engine.request import FinishReason, Request
from localllm.engine.runner import BatchItem, ModelRunner
from localllm.engine.sampling_threads import SamplingThreads
from localllm.engine.scheduler import Scheduled, Scheduler
from localllm.errors import (
    ClosedError,
    ContextLengthError,
    ExpertReadError,
    LocalLLMError,
    QueueFullError,
    UsageError,
)
from localllm.kernels import process
from localllm.kernels.backend import ExpertReads, TopK
from localllm.kernels.process import Process
from localllm.options.checks import in_vocabulary
from localllm.sampling import Choice, Sampler

#: Most requests that run at once, and most that wait.
MAX_RUNNING, MAX_WAITING = 256, 1024

#: Longest step with prompt tokens, in seconds.
STEP_S = 0.1

#: Timeout of one wait of a caller, in seconds. Callers wait in a loop.
_WAIT_S = 0.2

#: Longest sleep of the engine thread, in seconds: an operating system may reject a timeout of many years.
_LONGEST_SLEEP_S = 3600.0

#: Longest wait of a step for tokens from sampling threads, in seconds. Later tokens join a later step.
_CHOICES_S = 0.01

#: A request that is alone samples in the engine thread after a choice that took at most this long, in seconds: to
#: wake a thread and to wait for it takes about 0.1 ms.
_QUICK_CHOICE_S = 1e-3

_T = TypeVar("_T")
#: The engine thread that a thread waits for. Hooks of several models could otherwise wait for each other forever.
_awaited_by: dict[threading.Thread, threading.Thread] = {}

#: A token, whether it equals its draft, and whether the text is complete.
_Chosen: TypeAlias = "tuple[Choice, bool, bool]"

_Message: TypeAlias = "Callable[[EngineLoop], None]"


@dataclass(slots=True)
class Counts:
    """Counters since the start of the engine, and current values. Only the engine thread writes them."""

    running: int = 0  # requests with tokens in the cache
    n_pages: int = 0  # pages of the cache
    n_pages_used: int = 0  # pages of running requests
    steps: int = 0
    step_s: float = 0.0  # evaluation time of all steps, in seconds
    prompt_tokens: int = 0  # evaluated prompt tokens
    cached_tokens: int = 0  # prompt tokens found in the cache; added when a request ends
    disk_tokens: int = 0  # tokens of ``cached_tokens`` that were read from disk for their request
    restored_tokens: int = 0  # tokens of the cache that were read from disk, also if the request was cancelled
    generated_tokens: int = 0
    ended: int = 0  # requests
    preempted: int = 0  # preemptions
    encoded: int = 0  # images
    # Seconds of all requests
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0  # tokens sampled in ``decode_s``: without the first token of each request
    in_steps: int = 0  # sum of the batch sizes of all steps
    longest: int = 0  # longest sequence of an ended request, in tokens
    draft_steps: int = 0  # steps with drafts
    drafted: int = 0
    accepted: int = 0
    experts: ExpertReads | None = None  # reads of experts that stay in the file

    def since(self, before: Counts) -> Counts:
        """Return the increase of the counters; all counters if the engine was started again after ``before``."""
        if self.steps < before.steps:
            return self
        names = [field.name for field in fields(self) if field.name != "experts"]
        return Counts(**{name: getattr(self, name) - getattr(before, name) for name in names})


class Engine:
    """A model and the thread that runs requests on it. Any thread may call its methods.

    It ends with `close`, or when the object is garbage-collected.
    """

    def __init__(self, loop: EngineLoop, *, max_waiting: int = MAX_WAITING) -> None:
        """Start the thread. More than ``max_waiting`` waiting requests are refused."""
        runner, draft_model = loop.runner, loop.draft_model
        self.context = runner.context  # context length
        self.n_vocab = runner.n_vocab
        self.max_tokens = runner.max_tokens  # most tokens per step
        self.width = runner.width  # values per output row: logits, or dimensions of an embedding
        self.graph = runner.graph  # with the names of values that requests can read and change
        self.diffusion = runner.diffusion  # how the model writes, if it writes by diffusion
        self.max_outputs = runner.max_outputs  # most rows of logits per step
        self.drafts_by = None if draft_model is None else draft_model.kind  # "draft", "mtp" or None
        self._max_waiting = max_waiting
        self._process = Process()
        process.engines.check()
        self._sees, self._has_axes, self._has_spans = loop.sees, runner.has_axes, runner.has_spans
        self._inbox, self._waiting, self._ended, self.counts = loop.inbox, loop.waiting, loop.ended, loop.counts
        self._thread = threading.Thread(target=loop.run, name="localllm-engine", daemon=True)
        self._thread.start()
        # The thread has no reference to this object, so garbage collection of the object ends the thread.
        weakref.finalize(self, self._inbox.put, EngineLoop.close).atexit = False

    @property
    def n_waiting(self) -> int:
        """Number of submitted requests that have not started."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Its `RequestOutput` receives the results.

        A full queue still accepts requests of a client that has less than its share of the queue.

        Raises:
            UsageError: invalid tokens or images.
            ContextLengthError: the prompt is longer than the context.
            QueueFullError: too many requests wait.
            ClosedError: the engine was closed.
        """
        self.check()
        if not request.tokens:
            raise UsageError("the prompt is empty: give at least one token")
        if (self.diffusion is None) != (request.canvas is None):
            raise UsageError(
                "the model writes by diffusion, so it has no logits of a next token and no values to read: use it to "
                "generate text, or choose a model that writes token by token"
            )
        if self.graph.prompt is not None and not (request.media.placed and request.probe is None):
            raise UsageError(
                "an encoder reads the model's prompts, so a prompt has no logits, and values inside the model cannot "
                "be read or changed: use the model to generate text"
            )
        self._check_tokens(request)
        if request.n_text > self.context:
            raise ContextLengthError(request.n_text, self.context)
        if self.n_waiting >= self._max_waiting and self._has_share(request.client):
            raise QueueFullError(
                f"{self.n_waiting:,} requests are waiting for the model: try again later, or load the model "
                "with a larger max_waiting"
            )
        self._waiting.add(request)
        self._inbox.put(lambda loop: loop.add(request))
        self.check()  # an engine that was closed in the meantime may not have read the message

    def _check_tokens(self, request: Request) -> None:
        """Raise a `UsageError` if text tokens are outside the vocabulary or images are not valid for the model."""
        tokens, media = request.tokens, request.media
        if media.placed and not self._sees:
            raise UsageError("the model was loaded without an encoder for images: load its projector file too")
        if request.sampler is None and request.logits_from < media.stop:
            raise UsageError("images have no logits: request logits of tokens after the last image")
        media.check(tokens)
        stops = (0, *(span.stop for span in media.placed))
        for stop, start in zip(stops, (*media.starts, len(tokens)), strict=True):
            in_vocabulary(tokens[stop:start], self.n_vocab)
        for span in media.placed:
            if span.media.is_causal:  # evaluated like text
                continue
            n, (rows, columns) = span.stop - span.start, span.media.grid
            n_turning = n - 2 * span.media.is_numbered
            if self._has_axes and rows * columns not in (0, n_turning):  # without a grid: positions like text
                raise UsageError(f"an image of {n:,} tokens cannot have {rows:,} rows of {columns:,}")
            if self._has_spans and n > self.max_tokens:
                raise UsageError(
                    f"an image of {n:,} tokens does not fit into a step of at most {self.max_tokens:,} tokens: "
                    "reduce the tokens per image"
                )

    def _has_share(self, client: str) -> bool:
        """Return whether a client has used its share of an evenly divided queue."""
        waiting = [request.client for request in list(self._waiting)]
        return waiting.count(client) >= self._max_waiting // len({*waiting, client})

    def check(self) -> None:
        """Raise an error if the engine is closed, belongs to another process, or the process is ending."""
        self._process.check()
        if self._ended.is_set():
            raise ClosedError("the model was closed: load it again")
        process.engines.check()

    def check_may_wait(self) -> None:
        """Raise an error if this thread cannot wait for results of the engine."""
        self._process.check()
        process.engines.check(waits=True)
        thread, awaited = threading.current_thread(), self._thread
        for _ in range(len(_awaited_by) + 1):
            if awaited is thread:
                raise UsageError(
                    "a logits processor or a hook runs in the model's own thread and cannot wait for the same model: "
                    "call the model from another thread"
                )
            awaited = _awaited_by.get(awaited, awaited)

    def wait_for(self, items: queue.SimpleQueue[_T]) -> _T:
        """Return the next item from a queue that the engine thread fills."""
        thread = threading.current_thread()
        _awaited_by[thread] = self._thread
        try:
            while True:
                self.check_may_wait()
                # Ctrl-C and the end of the process do not interrupt a wait without a timeout on every system.
                with contextlib.suppress(queue.Empty):
                    return items.get(timeout=_WAIT_S)
        finally:
            _awaited_by.pop(thread, None)

    def cancel(self, request: Request) -> None:
        """End a request before the next step. Never blocks, so a finaliser may call it."""
        request.is_cancelled = True
        self.wake()

    def wake(self) -> None:
        """Let a request whose output was full continue."""
        self._inbox.put(EngineLoop.wake)

    def with_cache(self, work: Callable[[PagedCache], _T]) -> _T:
        """Call a function with the cache in the engine thread, between two steps. Return its result."""
        results: queue.SimpleQueue[Callable[[], _T]] = queue.SimpleQueue()

        def message(loop: EngineLoop) -> None:
            try:
                result = work(loop.runner.cache)
                results.put(lambda: result)
            except BaseException as error:
                results.put(partial(_raise, error))

        self.check_may_wait()
        self._inbox.put(message)
        self.check()  # an engine that was closed in the meantime may not have read the message
        return self.wait_for(results)()

    def forget(self) -> None:
        """Remove cached tokens of earlier requests. Takes effect before any request that is submitted later."""
        self.check()
        self._inbox.put(EngineLoop.forget)

    def close(self) -> None:
        """End all requests with a `ClosedError`, wait for the current step, and free the model and the cache.

        When the process is ending, wait at most `process.END_S` seconds: a caller's function may block the step.
        """
        self._inbox.put(EngineLoop.close)
        if self._process.is_current and threading.current_thread() is not self._thread:
            self._thread.join(process.patience())
        self._ended.set()


def _raise(error: BaseException) -> Never:
    raise error


class EngineLoop:
    """The loop of the engine thread. It owns the models and the encoder, and has no reference to the `Engine`."""

    def __init__(
        self,
        runner: ModelRunner,
        draft_model: DraftModel | None = None,
        encoder: MediaEmbedder | None = None,
        *,
        max_running: int = MAX_RUNNING,
        step_s: float = STEP_S,
        store: BlockStore | None = None,
        label_of: Callable[[Hashable], str | None] = str,
        is_scoped: bool = False,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        """
        Args:
            max_running: most requests with tokens in the cache.
            step_s: longest step with prompt tokens, in seconds.
            store: blocks of the cache on disk. It is closed when the engine ends.
            label_of: as in `DiskTier`.
            is_scoped: whether clients share no cached tokens and images.
            on_end: called in the engine thread when it ends.
        """
        self.inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()  # any thread may add a message
        self.waiting: set[Request] = set()  # submitted requests that have not started
        self.ended = threading.Event()  # set when messages are no longer read
        self.counts = Counts(n_pages=runner.cache.n_pages, experts=runner.expert_reads)
        self.runner, self.draft_model, self.sees = runner, draft_model, encoder is not None
        self._scheduler = Scheduler(runner, max_running=max_running, step_s=step_s)
        self._encoding = Encoding(encoder, runner.cache.embeddings)
        self._step_s, self._is_scoped = step_s, is_scoped
        self._tier: DiskTier | None = None
        if store is not None:
            wake = partial(self.inbox.put, EngineLoop.wake)
            self._tier = DiskTier(store, runner.cache, label_of, self._scheduler.step_times, wake)
        self._cost = StepCost()
        self._on_end = on_end
        self._sampling_threads = SamplingThreads()
        self._is_closed = False

    # -- Messages --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        if request.probe is not None:  # rejected drafts would be read or changed
            request.drafter = None
        elif request.speculate == "lookup":
            request.drafter = LookupDrafter(self._cost, request.draft_max, request.draft_always)
        elif request.media.placed:  # draft models do not see images
            request.drafter = None
        elif self.draft_model is not None and request.speculate == self.draft_model.kind:
            request.drafter = self.draft_model.drafter(self._cost, request.draft_max, request.draft_always)
        if self._is_scoped:
            request.scope = request.client
        if self._tier is not None:
            self._tier.add(request)
        self._scheduler.add(request)

    def wake(self) -> None:
        """Interrupt the wait for messages."""

    def forget(self) -> None:
        self.runner.cache.forget()
        if self.draft_model is not None:
            self.draft_model.runner.cache.forget()

    def close(self) -> None:
        self._is_closed = True

    # -- The thread ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the engine is closed."""
        with process.UnfinishedWork(process.engines, partial(self.inbox.put, EngineLoop.wake)):
            self._run()

    def _run(self) -> None:
        error: BaseException = ClosedError("the model was closed: load it again")
        try:
            has_work = False
            while self._read_messages(wait=not has_work):
                has_work = self.step()
                self._count()
        except BaseException as defect:  # a bug of the engine: callers must not wait forever
            error = defect
        self._sampling_threads.close()
        if process.engines.is_over:  # remaining readers are daemon threads
            self._close_tier()
            return
        self.ended.set()
        while not self.inbox.empty():
            self.inbox.get()(self)
        for request in self._scheduler.requests:
            self._end(request, error=error)
        self._close_tier()
        self.counts.running = self.counts.n_pages_used = 0
        on_end = self._on_end
        # Free model and cache.
        del self.runner, self.draft_model, self._scheduler, self._encoding, self._tier, self._on_end
        if on_end is not None:
            on_end()

    def _close_tier(self) -> None:
        if self._tier is not None:
            with contextlib.suppress(LocalLLMError):  # of a device that was lost
                self._tier.close()

    def _read_messages(self, *, wait: bool) -> bool:
        """Process messages. Return False if the engine is to end."""
        if wait and self.inbox.empty():
            deadlines = [r.deadline for r in self._scheduler.requests if r.deadline is not None]
            timeout = min(max(0.0, min(deadlines) - time.perf_counter()), _LONGEST_SLEEP_S) if deadlines else None
            try:
                self.inbox.get(timeout=timeout)(self)
            except queue.Empty:
                return True
        for _ in range(self.inbox.qsize()):  # later messages wait until after the next step
            self.inbox.get()(self)
        return not (self._is_closed or process.engines.is_over)

    def step(self) -> bool:
        """Evaluate the next batch. Return False if no request can run."""
        begin = time.perf_counter()
        for request in self._scheduler.requests:
            if request.is_cancelled:
                self._end(request, "cancelled")
            elif request.deadline is not None and begin >= request.deadline:
                self._end(request, "timeout")
        is_busy = self._tier is not None and self._tier.advance(is_alone=not self._scheduler.running)
        self._propose_drafts()
        self._scheduler.admit()
        self._encode()
        batch = self._scheduler.next_batch()
        if not batch:
            return self._encoding.is_busy or is_busy
        groups = _by_program(batch, has_prompts=self.runner.graph.prompt is not None)
        self.runner.n_programs = len(groups)
        for group in groups:
            self._evaluate(group, begin)
        self._wait_for_choices(batch)
        return True

    def _evaluate(self, batch: Sequence[Scheduled], begin: float) -> None:
        """Evaluate requests of the same program, and deliver their results. ``begin``: start of the step."""
        chunks = [scheduled.chunk() for scheduled in batch]
        evaluating = time.perf_counter()
        for scheduled in batch:
            if not scheduled.request.started_at:
                scheduled.request.started_at = evaluating
                self.waiting.discard(scheduled.request)
                scheduled.request.output.progress(scheduled.request.n_cached)
        failed: Mapping[int, BaseException] = {}
        try:
            logits = self.runner.run(chunks, *_wanted_logits(batch, chunks, self.runner.max_top_k))
        except ExpertReadError as error:
            logits, failed = error.logits, dict.fromkeys(error.sequences, error)
        except BaseException as error:
            for scheduled in batch:
                self._end(scheduled.request, error=error)
            return
        seconds = time.perf_counter() - evaluating
        n_tokens = sum(len(chunk.ids) for chunk in chunks)
        n_decoding = sum(scheduled.request.is_decoding for scheduled in batch)
        self.counts.steps += 1
        self.counts.in_steps += len(batch)
        self.counts.step_s += seconds
        self.counts.experts = self.runner.expert_reads
        self.counts.prompt_tokens += sum(
            e.n_tokens for e in batch if not e.request.n_generated and e.request.canvas is None
        )
        n_of_prompts = sum(e.n_tokens for e in batch if not e.request.is_decoding)
        self._scheduler.step_times.add(n_of_prompts, n_decoding, seconds)
        if len(batch) == n_decoding == 1:
            self._cost.add(n_tokens, seconds)
        row = token = 0
        for i, (scheduled, chunk) in enumerate(zip(batch, chunks, strict=True)):
            rows, tokens = slice(row, row + chunk.n_outputs), slice(token, token + len(chunk.ids))
            row, token = rows.stop, tokens.stop
            try:
                if i in failed:
                    raise failed[i]
                if chunk.probe is not None:
                    if chunk.probe.error is not None:
                        raise chunk.probe.error
                    self.runner.report_values(chunk, tokens, rows)
                reason = self._take_results(scheduled, logits, rows, begin)
                if reason is None and isinstance(scheduled.request.drafter, MTPDrafter):
                    hidden = self.runner.hidden_rows()[tokens]
                    scheduled.request.drafter.observe(chunk, hidden, scheduled.request.tokens)
                scheduled.request.output.flush()
            except BaseException as error:
                self._end(scheduled.request, error=error)
            else:
                if reason is not None:
                    self._end(scheduled.request, reason)

    def _count(self) -> None:
        self.counts.running = len(self._scheduler.running)
        self.counts.n_pages_used = self.counts.n_pages - self.runner.cache.n_available
        self.counts.preempted = self._scheduler.n_preempted
        self.counts.encoded = self._encoding.n_encoded
        if self._tier is not None:
            self.counts.restored_tokens = self._tier.n_restored

    def _encode(self) -> None:
        """Encode the next images of prompts. While requests decode, encoding takes at most half of a step's time."""
        if not self.sees:
            return
        running = self._scheduler.running
        seconds = self._step_s / 2 if any(request.is_decoding for request in running) else self._step_s
        for request, error in self._encoding.advance(running, seconds).items():
            self._end(request, error=error)

    def _propose_drafts(self) -> None:
        for request in list(self._scheduler.running):
            request.drafts = []
            if request.drafter is None or request.is_choosing or request.n_missing != 1 or not request.n_generated:
                continue
            most = self.runner.context - len(request.tokens)
            if request.max_tokens is not None:
                most = min(most, request.max_tokens - request.n_generated - 1)
            if most < 1 or request.output.is_full:
                continue
            try:
                ids = request.drafter.propose(request.tokens, most)
            except BaseException as error:
                self._end(request, error=error)
            else:
                drafts = list(takewhile(lambda id_: 0 <= id_ < self.runner.n_vocab, ids[:most]))
                request.drafts = drafts if request.sampler is None else drafts[: request.sampler.n_possible(drafts)]

    def _take_results(
        self, scheduled: Scheduled, logits: NDArray[np.float32] | TopK, rows: slice, begin: float
    ) -> FinishReason | None:
        """Record the evaluated tokens of a request and sample. Return the finish reason if the request is done."""
        request, sequence = scheduled.request, scheduled.request.sequence
        assert sequence is not None
        if request.canvas is not None:
            assert isinstance(logits, np.ndarray)
            return self._take_canvas(request, request.canvas, logits[rows], begin)
        position = len(sequence)
        is_whole = request.n_missing == scheduled.n_tokens
        if not scheduled.n_drafts:
            self.runner.cache.append(sequence, request.tokens[position : position + scheduled.n_tokens])
            request.n_again = 0
        request.n_reached = max(request.n_reached, len(sequence))
        if not request.n_generated:
            before, request.prefill_s = request.prefill_s, time.perf_counter() - request.started_at
            self.counts.prefill_s += request.prefill_s - before
            request.output.progress(len(sequence))
        if request.sampler is None:
            if rows.start < rows.stop and isinstance(logits, np.ndarray):
                request.output.logits(request.logits_from, logits[rows])
                request.logits_from = len(sequence)
            return "stop" if is_whole else None
        if not is_whole:
            return None
        if request.max_tokens == 0:
            return "length"
        drafts = request.drafts[: scheduled.n_drafts]
        is_slow = request.sampler.is_slow and not isinstance(request.drafter, MTPDrafter)
        if is_slow and not (request.choosing_s <= _QUICK_CHOICE_S and self._scheduler.has_one):
            copied = [_row(logits, rows.start + i).copy() for i in range(scheduled.n_drafts + 1)]
            choices = _choices(request, drafts, [partial(request.sampler, row) for row in copied])
            request.is_choosing = True
            self._sampling_threads.put(partial(_choose, self.inbox, scheduled, position, begin, choices))
            return None
        steps = [_chooser(request.sampler, logits, rows.start + i) for i in range(scheduled.n_drafts + 1)]
        choosing = time.perf_counter()
        reason = self._take_choices(scheduled, position, begin, _choices(request, drafts, steps))
        if is_slow:
            request.choosing_s = time.perf_counter() - choosing
        return reason

    def _take_canvas(
        self, request: Request, canvas: Canvas, logits: NDArray[np.float32], begin: float
    ) -> FinishReason | None:
        """Finish a step of diffusion. Append the tokens up to the first mask. Return the finish reason if done."""
        n_chosen = request.n_chosen
        canvas.advance(logits)
        if canvas.n_steps == 1:
            request.prefill_s = time.perf_counter() - request.started_at
            request.n_reached = request.n_prompt
            self.counts.prefill_s += request.prefill_s
            self.counts.prompt_tokens += request.n_prompt
            request.output.progress(request.n_prompt)
        settled = canvas.ids[len(request.tokens) : canvas.n_settled]
        reason = self._append(request, ((Choice(id_), False, False) for id_ in settled))
        if not n_chosen and request.n_chosen:
            request.first_token_s = time.perf_counter() - request.submitted_at
        if canvas.n_steps > 1:
            seconds = time.perf_counter() - begin
            request.decode_s += seconds
            self.counts.decode_s += seconds
            self.counts.decode_tokens += request.n_chosen - n_chosen
        return reason or ("length" if canvas.is_complete else None)

    def _take_choices(
        self, scheduled: Scheduled, position: int, begin: float, choices: Iterable[_Chosen]
    ) -> FinishReason | None:
        """Append the tokens that were sampled after a step. Return the finish reason if the request is complete.

        ``position``: first token of the request in the step. ``begin``: start of the step.
        """
        request = scheduled.request
        is_first = not request.n_generated
        n_accepted, n_chosen = request.n_accepted, request.n_chosen
        request.n_drafted += scheduled.n_drafts
        try:
            reason = self._append(request, choices)
        finally:
            if scheduled.n_drafts:
                self._record_drafts(scheduled, position, request.n_accepted - n_accepted)
                self.counts.draft_steps += 1
                self.counts.drafted += scheduled.n_drafts
                self.counts.accepted += request.n_accepted - n_accepted
        if is_first:
            request.first_token_s = time.perf_counter() - request.submitted_at
        else:
            seconds = time.perf_counter() - begin
            request.n_decode_steps += 1
            request.decode_s += seconds
            self.counts.decode_s += seconds
            self.counts.decode_tokens += request.n_chosen - n_chosen
        return reason

    def _append(self, request: Request, choices: Iterable[_Chosen]) -> FinishReason | None:
        for choice, is_draft, is_complete in choices:
            request.n_chosen += 1
            self.counts.generated_tokens += 1
            request.n_accepted += is_draft
            if choice.id in request.stop_ids:
                return "stop"
            request.tokens.append(choice.id)
            if request.output.token(choice) or is_complete:
                return "stop"
            if request.n_generated == request.max_tokens or len(request.tokens) > self.runner.context:
                return "length"
        return None

    def chosen(
        self, scheduled: Scheduled, position: int, begin: float, choices: list[_Chosen], error: BaseException | None
    ) -> None:
        """Append tokens from a sampling thread, then raise its error, if any, as the error of the request."""
        request = scheduled.request
        if not request.is_choosing:  # the request has ended
            return
        request.is_choosing = False
        try:
            reason = self._take_choices(scheduled, position, begin, choices)
            if reason is None and error is not None:
                raise error
            request.output.flush()
        except BaseException as failure:
            self._end(request, error=failure)
        else:
            if reason is not None:
                self._end(request, reason)

    def _wait_for_choices(self, batch: Sequence[Scheduled]) -> None:
        """Wait up to `_CHOICES_S` for tokens from sampling threads."""
        end = time.perf_counter() + _CHOICES_S
        while (
            any(scheduled.request.is_choosing for scheduled in batch) and (remaining := end - time.perf_counter()) > 0
        ):
            with contextlib.suppress(queue.Empty):
                self.inbox.get(timeout=remaining)(self)

    def _record_drafts(self, scheduled: Scheduled, position: int, n_accepted: int) -> None:
        """Record a step with drafts that started at ``position``. Rejected drafts roll recurrent states back."""
        request, cache = scheduled.request, self.runner.cache
        assert request.sequence is not None
        ids = request.tokens[position : position + scheduled.n_tokens + n_accepted]
        if cache.has_states and len(ids) < scheduled.n_tokens + scheduled.n_drafts:
            cache.rollback(request.sequence)
            request.n_again = request.n_missing - 1
        else:
            cache.append(request.sequence, ids)

    def _end(
        self, request: Request, reason: FinishReason | None = None, *, error: BaseException | None = None
    ) -> None:
        self._scheduler.remove(request)
        if self._tier is not None:
            self._tier.remove(request)
            request.notice = self._tier.take_notice()
        self.waiting.discard(request)
        self.counts.ended += 1
        self.counts.cached_tokens += request.n_cached
        self.counts.disk_tokens += min(request.n_cached, request.n_restored)
        self.counts.longest = max(self.counts.longest, len(request.tokens))
        request.finish_reason, request.is_choosing = reason, False
        if request.drafter is not None:
            request.drafter.close()
        if isinstance(error, StopIteration | StopAsyncIteration):  # Python does the same for generators
            error, cause = RuntimeError(f"a function given to the model raised {type(error).__name__}"), error
            error.__cause__ = cause
        self._count()  # before the end is reported, so that a caller with a complete reply sees current counters
        request.output.end(error)


def _by_program(batch: list[Scheduled], *, has_prompts: bool) -> Collection[list[Scheduled]]:
    """Divide a batch by program: the model's program, programs that read or change values, and the program of
    prompts that an encoder reads."""
    groups: dict[object, list[Scheduled]] = {}
    for scheduled in batch:
        probe = scheduled.request.probe
        is_prompt = has_prompts and scheduled.request.is_in_media
        groups.setdefault((is_prompt, None if probe is None else probe.program), []).append(scheduled)
    return groups.values()


def _row(logits: NDArray[np.float32] | TopK, row: int) -> NDArray[np.float32]:
    """Return all logits of a row."""
    return logits.whole[row] if isinstance(logits, TopK) else logits[row]


def _chooser(sampler: Sampler, logits: NDArray[np.float32] | TopK, row: int) -> Callable[[], Choice]:
    """Return a function that samples a token from a row of logits."""
    if isinstance(logits, TopK) and row not in logits.whole:
        return lambda: sampler.among(*logits.row(row))
    return partial(sampler, _row(logits, row))


def _choices(request: Request, drafts: Sequence[int], steps: Sequence[Callable[[], Choice]]) -> Iterator[_Chosen]:
    """Yield the next token, then the tokens after it while they equal the drafts."""
    assert request.sampler is not None
    for draft, step in zip((*drafts, None), steps, strict=True):
        choice = step()
        if choice.id in request.stop_ids:
            yield choice, choice.id == draft, True
            return
        request.sampler.accept(choice.id)
        yield choice, choice.id == draft, request.sampler.is_complete
        if choice.id != draft:
            return


def _choose(
    inbox: queue.SimpleQueue[_Message], scheduled: Scheduled, position: int, begin: float, choices: Iterable[_Chosen]
) -> None:
    """Sample in a sampling thread and send the tokens to the engine thread."""
    if not scheduled.request.is_choosing or scheduled.request.is_cancelled:  # ended, or about to end
        return
    sampled: list[_Chosen] = []
    failure: BaseException | None = None
    begin_choice = time.perf_counter()
    try:
        sampled.extend(choices)
    except BaseException as error:
        failure = error
    scheduled.request.choosing_s = time.perf_counter() - begin_choice
    inbox.put(lambda loop: loop.chosen(scheduled, position, begin, sampled, failure))


def _wanted_logits(batch: Sequence[Scheduled], chunks: Sequence[BatchItem], most: int) -> tuple[int, list[int]]:
    """Return the number of largest logits per row that samplers need, at most ``most``, and rows needed completely.

    The number is 0 if every row is needed completely or a request needs logits without sampling.
    """
    top_k, full_rows, row = 0, list[int](), 0
    for scheduled, chunk in zip(batch, chunks, strict=True):
        rows, sampler = range(row, row + chunk.n_outputs), scheduled.request.sampler
        row = rows.stop
        if rows and sampler is None:
            return 0, []
        if sampler is not None and 1 <= sampler.n_enough <= most:
            top_k = max(top_k, sampler.n_enough) if rows else top_k
        else:
            full_rows += rows
    return top_k, full_rows
