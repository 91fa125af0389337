"""Evaluates batches with a model's compiled step and its KV cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from localllm.engine.cache import CachedSequence, Launched, PagedCache, n_window_pages
from localllm.engine.canvas import MAX_MASKS
from localllm.engine.media import NO_MEDIA, Embeddings, PromptMedia
from localllm.engine.probe import Probe
from localllm.errors import NotEnoughMemoryError
from localllm.kernels.backend import Backend, Batch, ExpertReads, HostOutput, Output, Step, TopK
from localllm.kernels.graph import Graph, Rows, Tensor, Value
from localllm.kernels.variants import graph_variant, head_graph
from localllm.models.diffusion import Diffusion

#: Default for the most tokens per step. A backend may choose more (`Backend.step_tokens`).
MAX_TOKENS = Backend.step_tokens

#: Extra window pages and state slots for cached prefixes: for `KEPT_ENDS` positions per running sequence, or for
#: `KEPT_BYTES` if that is more.
KEPT_ENDS, KEPT_BYTES = 2, 256 << 20
#: Length of a short prompt or reply, in tokens.
_SHORT_TURN = 128

#: Most programs to keep that read or change values. A step with more programs keeps them all. Each program has memory
#: for the activations of a step.
KEPT_VARIANTS = 4

#: Most bytes of rows that a run of `Graph.token_graph` computes, unless it computes one row.
_TOKEN_GRAPH_BYTES = 256 << 10

#: Most bytes of logits that a step computes.
MAX_LOGITS_BYTES = 32 << 20


@dataclass(frozen=True, eq=False, slots=True)
class BatchItem:
    """The part of one sequence in a batch."""

    sequence: CachedSequence  # with pages reserved for ``ids``
    ids: list[int]  # tokens to evaluate
    n_outputs: int  # logits are computed for the last n_outputs tokens
    start: int  # position of the first token; later cache contents are overwritten
    adapters: tuple[float, ...] = ()  # scale of each LoRA adapter; empty: base model
    goes_on: bool = False  # True if the token chosen on the device is likely to be evaluated in the next step
    # Random numbers and parameters for that token and the next one (`Batch.draws`); empty: choose the largest logits
    draws: Sequence[tuple[float, ...]] = ()
    # Images of the sequence, and embeddings by image key for the images in the chunk
    media: PromptMedia = NO_MEDIA
    embeddings: Mapping[bytes, Embeddings] = field(default_factory=dict)
    probe: Probe | None = None  # values that the request reads or changes; the same program for a whole batch
    outputs: Sequence[int] | None = None  # tokens of ``ids`` whose logits are computed; None: the last n_outputs

    def embedded(self) -> Iterator[tuple[range, Embeddings]]:
        """Yield token indices in the chunk, and their embeddings, for each image in the chunk."""
        stop = self.start + len(self.ids)
        for span in self.media.of(self.start, stop):
            positions = range(max(span.start, self.start), min(span.stop, stop))
            begin = span.first + positions.start - span.start
            rows = self.embeddings[span.media.key][begin : begin + len(positions)]
            yield range(positions.start - self.start, positions.stop - self.start), rows


@dataclass(frozen=True, slots=True)
class _Launch:
    """A batch that was launched ahead, before its tokens were known to the caller."""

    id: int
    n_items: int
    top_k: int
    output: Output

    def evaluates(self, items: Sequence[BatchItem], top_k: int) -> bool:
        """Return whether this is the batch of ``items``: the tokens chosen on the device, in the same order."""
        return (len(items), top_k) == (self.n_items, self.top_k) and all(
            item.sequence.launched == (self.id, row, item.start, *item.ids) for row, item in enumerate(items)
        )


class ModelRunner:
    """A model on its device, with its KV cache. Not thread-safe."""

    def __init__(
        self,
        step: Step,
        *,
        n_vocab: int,
        context: int,
        max_tokens: int = MAX_TOKENS,
        width: int | None = None,
        is_causal: bool = True,
        has_axes: bool = False,
        has_spans: bool = False,
        hidden: Value | None = None,
        graph: Graph | None = None,
        diffusion: Diffusion | None = None,
    ) -> None:
        """
        Args:
            step: compiled for ``min(max_tokens, context)`` tokens and their `max_outputs`.
            width: values per output row; default: ``n_vocab``.
            graph: graph of ``step``, for requests that read or change its values; default: no request does.
            diffusion: how the model writes, if it writes by diffusion: all requests then have a canvas.
        """
        self.context = context  # context length
        self.n_vocab = n_vocab
        self.max_tokens = min(max_tokens, context)  # most tokens per step
        self.width = n_vocab if width is None else width  # values per output row: logits, or embedding dimensions
        self.is_causal = is_causal  # True if text can be evaluated in several steps
        # has_axes: positions of image tokens have several axes. has_spans: tokens of an image see each other.
        self.has_axes, self.has_spans = has_axes, has_spans
        self.diffusion = diffusion
        self.max_outputs = max_outputs(self.width, self.max_tokens, diffusion)  # most rows of logits per step
        # Most top logits that the device finds; 0 if logits are in host memory anyway
        self.max_top_k = step.max_top_k
        self.cache = PagedCache(step.cache)
        self.hidden = hidden  # hidden states that drafters read after a step
        self.graph = Graph() if graph is None else graph
        self._step = step
        #: Program of `Graph.token_graph`, and its most tokens per run.
        self._token_step: Step | None = None
        self._max_ids = 1
        if (token_graph := self.graph.token_graph) is not None:
            self._max_ids = max(1, min(self.max_tokens, _TOKEN_GRAPH_BYTES // (4 * token_graph.result.width)))
            self._token_step = step.variant(token_graph, self._max_ids)
        #: Programs that read or change values, and the watched values by name, in order of their last use.
        self._variants: OrderedDict[Hashable, tuple[Step, dict[str, Value]]] = OrderedDict()
        self.n_programs = 0  # number of programs in the current step
        self._of_prompts: Step | None = None
        self._n_launched = 0
        self._launch: _Launch | None = None

    def run(
        self, chunks: Sequence[BatchItem], top_k: int = 0, full_rows: Sequence[int] = ()
    ) -> NDArray[np.float32] | TopK:
        """Evaluate a batch and return the logits [rows, n_vocab] of all chunks, in order.

        Writes the cache's pages, but records no tokens (`PagedCache.append`). With ``top_k``, returns only the
        largest ``top_k`` logits of each row, and all logits of the rows in ``full_rows``. The result is memory of the
        backend, valid until the next call.
        """
        for chunk in chunks:
            chunk.sequence.is_ahead = True
        if self.graph.prompt is not None and chunks[0].start < chunks[0].media.stop:
            return self._prompt_step().run(self._batch(chunks)).rows()
        if (probe := chunks[0].probe) is not None:
            step, batch = self.variant(probe)[0], replace(self._batch(chunks), edit=partial(self._edit, chunks))
            return step.run(batch, _streams(chunks)).rows()
        launch, self._launch = self._launch, None
        if not 0 < top_k <= self.max_top_k or full_rows or not self._step.chooses_ahead:
            batch = self._batch(chunks)
            return self._step.top_k(batch, top_k, full_rows) if 0 < top_k <= self.max_top_k else self._step(batch)
        is_launched = launch is not None and launch.evaluates(chunks, top_k)
        output = launch.output if launch is not None and is_launched else self._begin(chunks, top_k)
        # Launch the next batch before waiting for the output of this one.
        following = self._following(chunks)
        coming = self._begin(following, top_k, len(following)) if following else None
        best = output.top_k(top_k)
        if coming is not None:
            self._n_launched += 1
            tokens = (best.ids[:, 0] if best.chosen is None else best.chosen).tolist()
            for row, (chunk, token) in enumerate(zip(following, tokens, strict=True)):
                chunk.sequence.launched = Launched(self._n_launched, row, chunk.start, token)
            self._launch = _Launch(self._n_launched, len(following), top_k, coming)
        return best

    @property
    def expert_reads(self) -> ExpertReads | None:
        return self._step.expert_reads

    def _prompt_step(self) -> Step:
        """Return the program of prompts that an encoder reads. It is compiled when it is needed first."""
        if self._of_prompts is None:
            assert self.graph.prompt is not None
            self._of_prompts = self._compiled(self.graph.prompt)
        return self._of_prompts

    def variant(self, probe: Probe) -> tuple[Step, dict[str, Value]]:
        """Return the program that reads and changes the values of a request, and its watched values by name.

        Programs are compiled when they are needed first, and kept; see `KEPT_VARIANTS`.
        """
        program = probe.program
        if program not in self._variants:
            while len(self._variants) >= max(KEPT_VARIANTS, self.n_programs):
                self._variants.popitem(last=False)
            watched, edited, is_head = program
            graph, values = (head_graph(self.graph), {}) if is_head else graph_variant(self.graph, watched, edited)
            self._variants[program] = self._compiled(graph), values
        self._variants.move_to_end(program)
        return self._variants[program]

    def _compiled(self, graph: Graph) -> Step:
        """Compile a variant of the step. If memory is short, drop other variants, the least recently used first.

        Raises NotEnoughMemoryError if the variant does not fit in memory after all others were dropped.
        """
        while True:
            try:
                return self._step.variant(graph)
            except NotEnoughMemoryError:
                if not self._variants:
                    raise
                self._variants.popitem(last=False)

    def report_values(self, chunk: BatchItem, tokens: slice, outputs: slice) -> None:
        """Report the values that a chunk's request reads, after its step.

        Args:
            tokens, outputs: rows of the chunk among the batch's tokens, and among its outputs.
        """
        assert chunk.probe is not None
        step, values = self.variant(chunk.probe)
        rows = {
            name: step.value(values[name])[outputs if self._is_of_outputs(name) else tokens]
            for name in chunk.probe.watched
        }
        chunk.probe.report(chunk.start + len(chunk.ids), rows)

    def _is_of_outputs(self, name: str) -> bool:
        """Return whether a value has a row per output instead of a row per token."""
        value = self.graph.names[name].value
        return isinstance(value, Tensor) and value.rows is Rows.OUTPUTS

    def _edit(
        self,
        chunks: Sequence[BatchItem],
        name: str,
        rows: NDArray[np.float32],
        base: NDArray[np.float32] | None,
    ) -> None:
        """Let each request of a batch change its rows of a value."""
        first, of_outputs = 0, self._is_of_outputs(name)
        for chunk in chunks:
            n = chunk.n_outputs if of_outputs else len(chunk.ids)
            chunk_rows, stop = slice(first, first + n), chunk.start + len(chunk.ids)
            first += n
            assert chunk.probe is not None
            chunk_base = None if base is None else base[chunk_rows]
            chunk.probe.apply(name, rows[chunk_rows], chunk_base, np.arange(stop - n, stop))

    def _begin(self, chunks: Sequence[BatchItem], top_k: int, n_chosen: int = 0) -> Output:
        return self._step.run(replace(self._batch(chunks), top_k=top_k, n_chosen=n_chosen))

    def _batch(self, chunks: Sequence[BatchItem]) -> Batch:
        batch = make_batch(chunks, self.cache.page_size)
        if not any(chunk.media.placed for chunk in chunks):
            return batch
        if self.graph.prompt is not None and chunks[0].start >= chunks[0].media.stop:
            begins = [np.full(len(chunk.ids), chunk.media.stop, np.int32) for chunk in chunks]
            return replace(batch, begins=np.concatenate(begins))
        spans = [(chunk.media, chunk.start, chunk.start + len(chunk.ids)) for chunk in chunks]
        if self.has_axes:
            batch = replace(batch, axes=np.concatenate([media.axes(*ends) for media, *ends in spans], axis=1))
        if self.has_spans:
            batch = replace(batch, ends=np.concatenate([media.ends(*ends) for media, *ends in spans]))
        first, numbers, embeddings = 0, list[int](), list[Embeddings]()
        for chunk in chunks:
            for indices, rows in chunk.embedded():
                numbers += range(first + indices.start, first + indices.stop)
                embeddings.append(rows)
            first += len(chunk.ids)
        if not numbers:
            return batch
        return replace(batch, embedded=np.array(numbers, np.int32), embeddings=np.concatenate(embeddings))

    def _following(self, chunks: Sequence[BatchItem]) -> list[BatchItem]:
        """Return the next batch if every chunk continues with the token chosen on the device, else an empty list.

        The next batch cannot be launched yet if a sequence has no page for it or has recurrent states, which the
        batch would change irreversibly.
        """
        following = [
            replace(chunk, ids=[~i], start=chunk.start + len(chunk.ids), draws=chunk.draws[1:])
            for i, chunk in enumerate(chunks)
            if chunk.goes_on and chunk.n_outputs == 1
        ]
        may_begin = all(
            chunk.start < min(self.context, len(chunk.sequence.blocks) * self.cache.page_size) for chunk in following
        )
        return following if may_begin and len(following) == len(chunks) and not self.cache.has_states else []

    def continued(self, chunks: Sequence[BatchItem], hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Like `run`, for a graph whose inputs are the hidden states of all tokens, [T, d]."""
        return self._step.run(self._batch(chunks), HostOutput(hidden)).rows()

    def at_once(self, chunk: BatchItem) -> NDArray[np.float32]:
        """Like `run`, for one chunk whose tokens all see each other."""
        ends = np.full(len(chunk.ids), chunk.start + len(chunk.ids), np.int32)
        return self._step.run(replace(self._batch([chunk]), ends=ends)).rows()

    def of_tokens(self, ids: Sequence[int]) -> list[NDArray[np.float32]]:
        """Return the results [T, width] of all operations of the graph's `token_graph`, for token ids. New arrays."""
        step, graph = self._token_step, self.graph.token_graph
        assert step is not None
        assert graph is not None
        results = [x for node in graph.nodes for x in node.operation.results]
        parts = []
        for first in range(0, len(ids), self._max_ids):
            step.run(self._batch_of_ids(ids[first : first + self._max_ids])).rows()
            parts.append([step.value(x).copy() for x in results])
        return parts[0] if len(parts) == 1 else [np.concatenate(rows) for rows in zip(*parts, strict=True)]

    def _batch_of_ids(self, ids: Sequence[int]) -> Batch:
        """Return a batch for a program that neither reads nor writes the cache."""
        n = len(ids)
        ends, n_pages = np.array([0, n], np.int32), -(-n // self.cache.page_size)
        tables = np.zeros((len(self.graph.windows), 1, n_pages), np.int32)
        nothing = np.zeros(0, np.int32)
        return Batch(np.array(ids, np.int32), np.arange(n, dtype=np.int32), ends, ends[1:], tables, nothing, ends[:1])

    def hidden_rows(self) -> NDArray[np.float32]:
        """Return the `hidden` states [T, d] of the last step, valid until the next step."""
        assert self.hidden is not None
        rows: NDArray[np.float32] = self._step.value(self.hidden)
        return rows


def n_cache_pages(
    graph: Graph, context: int, parallel: int, page_size: int, max_tokens: int = MAX_TOKENS
) -> tuple[int, ...]:
    """Return the pages per window group (`Graph.windows`) for ``parallel`` sequences of ``context`` tokens.

    Window groups have pages for the windows of all sequences, for a step's ``max_tokens``, and for cached prefixes
    (`KEPT_ENDS`, `KEPT_BYTES`). No group has more pages than the group of all tokens.
    """
    of_all = parallel * -(-context // page_size)
    n_pages = [of_all]
    for window in graph.windows[1:]:
        page_bytes = page_size * sum(c.bytes_per_token() for c in graph.caches.values() if c.window == window)
        of_windows = parallel * n_window_pages(window or 1, page_size)
        n_cached = max(KEPT_ENDS * of_windows, KEPT_BYTES // page_bytes)
        n_pages.append(min(of_all, of_windows + -(-max_tokens // page_size) + n_cached))
    return tuple(n_pages)


def n_states(graph: Graph, context: int, parallel: int) -> int:
    """Return the slots for recurrent states of ``parallel`` sequences of ``context`` tokens; 0 without such layers.

    Additional slots are for snapshots, given by `KEPT_ENDS` and `KEPT_BYTES`, and limited to one per `_SHORT_TURN`
    tokens of the cache.
    """
    n_bytes = 4 * sum(state.n_values for states in graph.states.values() for state in states)
    if not n_bytes:
        return 0
    most = min(KEPT_BYTES // n_bytes, parallel * context // _SHORT_TURN)
    return parallel + max(KEPT_ENDS * parallel, most)


def max_step_tokens(graph: Graph, context: int, max_tokens: int) -> int:
    """Return the most tokens per step. A model that is not causal evaluates the whole text in one step."""
    return min(max_tokens, context) if graph.is_causal else context


def max_outputs(width: int, max_tokens: int, diffusion: Diffusion | None = None) -> int:
    """Return the most output rows per step, for rows of ``width`` values."""
    least = 1 if diffusion is None else min(MAX_MASKS, max_tokens)
    return max(least, min(max_tokens, MAX_LOGITS_BYTES // (4 * width)))


def _streams(chunks: Sequence[BatchItem]) -> HostOutput | None:
    """Return the residual streams that the chunks' requests start with (`Probe.stream`), or None without them."""
    rows = [
        chunk.probe.stream[chunk.start : chunk.start + len(chunk.ids)]
        for chunk in chunks
        if chunk.probe is not None and chunk.probe.stream is not None
    ]
    return HostOutput(np.concatenate(rows)) if rows else None


def make_batch(chunks: Sequence[BatchItem], page_size: int) -> Batch:
    """Concatenate chunks into a backend's batch."""
    ids: list[int] = []
    positions: list[int] = []
    query_starts = [0]
    kv_lengths: list[int] = []
    outputs: list[int] = []
    n_blocks = max(-(-(chunk.start + len(chunk.ids)) // page_size) for chunk in chunks)
    block_tables = np.zeros((len(chunks[0].sequence.pages), len(chunks), n_blocks), np.int32)
    for s, chunk in enumerate(chunks):
        stop = chunk.start + len(chunk.ids)
        ids += chunk.ids if chunk.start >= chunk.media.stop else [max(id_, 0) for id_ in chunk.ids]
        positions += range(chunk.start, stop)
        if chunk.outputs is None:
            outputs += range(len(ids) - chunk.n_outputs, len(ids))
        else:
            outputs += [len(ids) - len(chunk.ids) + i for i in chunk.outputs]
        query_starts.append(len(ids))
        kv_lengths.append(stop)
        for group, pages in enumerate(chunk.sequence.pages):
            block_tables[group, s, : len(pages)] = pages[:n_blocks]
    adapters = np.zeros((0, 0), np.float32)
    if n_adapters := max(len(chunk.adapters) for chunk in chunks):
        shares = [chunk.adapters or (0.0,) * n_adapters for chunk in chunks]
        adapters = np.repeat(np.array(shares, np.float32), [len(chunk.ids) for chunk in chunks], axis=0)
    draws = [(chunk.draws or [(0.0,) * 5])[0] for chunk in chunks for _ in range(chunk.n_outputs)]
    return Batch(
        ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        query_starts=np.array(query_starts, np.int32),
        kv_lengths=np.array(kv_lengths, np.int32),
        block_tables=block_tables,
        outputs=np.array(outputs, np.int32),
        states=np.array([chunk.sequence.state for chunk in chunks], np.int32),
        adapters=adapters,
        draws=np.array(draws, np.float32).reshape(-1, 5),
    )
