"""CPU backend: packs weights, creates caches, and runs the program of a lowered graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from localllm.errors import Argument, ExpertReadError, UsageError
from localllm.kernels import operations as ops
from localllm.kernels.backend import (
    Backend,
    Batch,
    ExpertReads,
    Footprint,
    HostOutput,
    Output,
    PackedWeight,
    Progress,
    Step,
    check_cache,
    input_rows,
    weights_of,
)
from localllm.kernels.cpu.batch import N_CHOSEN, N_TOKENS
from localllm.kernels.cpu.cache import CPUCache
from localllm.kernels.cpu.cache_types import PAGE
from localllm.kernels.cpu.expert_pool import ExpertPool
from localllm.kernels.cpu.host import check_memory, default_threads, most_threads
from localllm.kernels.cpu.lowering import CPULowered, CPULowering, HostRows
from localllm.kernels.cpu.memory import aligned_zeros
from localllm.kernels.cpu.program import Program, Workers
from localllm.kernels.cpu.target import choose
from localllm.kernels.cpu.thread_choice import choose_threads
from localllm.kernels.cpu.thread_limit import ThreadLimit
from localllm.kernels.cpu.weights import CPUPackedWeights, CPUWeightLoader, planned_weight
from localllm.kernels.embedding import NgramRows
from localllm.kernels.graph import Graph, Value

#: Steps of at most this many tokens are limited by reading the weights, longer steps by multiplying them.
FEW_TOKENS = 4
#: Steps of at most this many tokens take milliseconds: a single step does not show how fast a number of threads is.
SHORT_STEP = 32


class CPUBackend(Backend):
    """The CPU.

    Steps with many tokens are limited by multiplication and use all ``threads``; defaults to one thread per physical
    core that this process may use.  Steps with few tokens are limited by memory bandwidth and use ``decode_threads``,
    as chosen by `localllm.kernels.cpu.thread_choice`.  While other programs use the processors, steps use fewer
    threads if that is faster.  ``isa`` is the name of the instruction set; defaults to the best supported instruction
    set.  ``progress`` is called with (kernels compiled, kernels to compile) if some kernels are not in the cache yet.
    """

    name = "cpu"
    page_size = PAGE
    shares_weights = pools_experts = True
    #: A step with fewer products of activations and weights runs on the calling thread alone, because waking other
    #: threads would take longer.
    small_step = 8 << 20

    def __init__(
        self, threads: int | None = None, isa: str | None = None, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.target = choose(isa)
        if threads is None:
            choice = choose_threads(self.target, progress)
            self.decode_threads, threads = choice.decode, choice.cores
        else:
            self.decode_threads = threads = _checked_threads(threads)
        self.workers, self.caller = Workers(threads), Workers(1)
        self.kernel_progress = progress
        self.loader = CPUWeightLoader(self.workers, self.target, progress)
        #: Caches of loaded graphs, for graphs that share them.
        self._caches = WeakKeyDictionary[Graph, ref[CPUCache]]()

    def footprint(
        self,
        graph: Graph,
        *,
        n_pages: tuple[int, ...],
        max_tokens: int,
        max_outputs: int,
        n_states: int = 0,
        expert_bytes: int | None = None,
    ) -> Footprint:
        """See `Backend.footprint`.  ``expert_bytes`` is the memory for experts that stay in the file."""
        check_cache(graph, n_pages, n_states)
        pool = None if expert_bytes is None else ExpertPool(expert_bytes, graph, self.loader.packer)
        weights, uses = CPUPackedWeights(pool), weights_of(graph)
        cache = CPUCache(graph, n_pages, n_states if graph.states else 0, self.workers)
        planned = tuple(planned_weight(use, pooled=pool is not None) for use in uses)

        def lower(graph: Graph, n_tokens: int | None = None) -> CPULowered:
            sizes = {"max_tokens": n_tokens or max_tokens, "max_outputs": max_outputs}
            return CPULowering(graph, weights, cache, self.target, self.workers.n, **sizes).lower()

        program = lower(graph)

        packed_weights: list[PackedWeight] = []

        def pack(progress: Progress | None = None) -> Iterator[None]:
            for use in uses[len(packed_weights) :]:
                packed_weights.append(weights.load(use, self.loader, progress))
                yield

        def load(progress: Progress | None) -> CPUStep:
            for _ in pack(progress):
                pass
            packed = tuple(packed_weights)
            if graph.caches_of is None:
                cache.allocate()
                self._caches[graph] = ref(cache)
            else:
                cache.share(self._caches[graph.caches_of]())
            # A weight that does not fit its planned format gets another format, and needs another kernel.
            as_planned = [w.kernel_type for w in packed] == [w.kernel_type for w in planned]
            if pool is not None:
                pool.open()
            return CPUStep(self, program if as_planned else lower(graph), weights, packed, cache, lower)

        own_bytes = cache.layer_bytes if graph.caches_of is None else {}
        return Footprint(planned, own_bytes, program.arena_bytes, load, pack, expert_bytes or 0)


class CPUStep(Step):
    """A program in memory, with its weights and cache."""

    cache: CPUCache

    def __init__(
        self,
        backend: CPUBackend,
        lowered: CPULowered,
        weights: CPUPackedWeights,
        packed: tuple[PackedWeight, ...],
        cache: CPUCache,
        lower: Callable[[Graph, int | None], CPULowered],
        ngrams: Mapping[ops.NgramEmbed, NgramRows] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            lower: returns the program of another graph with the same weights and cache, and the maximum number of
                tokens, by default the same.
            ngrams: opened tables of n-grams; other tables are opened.
        """
        self.weights, self.cache, self._backend = packed, cache, backend
        self._packed_weights, self._lower = weights, lower
        self._tables, self._n_products = lowered.tables, lowered.n_products
        arena = aligned_zeros(lowered.arena_bytes, np.uint8)
        self._tables.bind(arena)
        self._embeddings = [(op, weights.tables[op.table], y.rows(arena)) for op, y in lowered.filled_by(ops.Embed)]
        self._ngrams = [
            (ngrams.get(op) or NgramRows(op), cache.state(op.state), y.rows(arena))
            for op, y in lowered.filled_by(ops.NgramEmbed)
        ]
        self._adapters = [(op, y.rows(arena)) for op, y in lowered.filled_by(ops.AdapterWeights)]
        self._added = [(op, y.rows(arena)) for op, y in lowered.filled_by(ops.AddRows)]
        self._inputs = [(op, y.rows(arena)) for op, y in lowered.filled_by(ops.Input)]
        self._n_joined = lowered.n_joined
        threads = backend.workers.n
        self.limit, self._batch_limit = ThreadLimit(backend.decode_threads), ThreadLimit(threads)
        self._prompt_limit = ThreadLimit.of_long_steps(threads)
        self._arena, self._watched, self._edits = arena, lowered.watched, lowered.edits
        self._blocks, self._lost, self._seconds = lowered.blocks, 0.0, 0.0
        self._n_instructions = len(lowered.instructions)
        self._result, self._of_tokens = lowered.result.rows(arena), lowered.result.slot == N_TOKENS
        self._width = lowered.result.width
        self.pool = weights.pool
        header = self._tables.header_numbers()
        keep = (arena, weights, cache)
        self._program = Program(
            lowered.instructions, header, backend.target, keep, backend.kernel_progress, arena.ctypes.data
        )

    def rerun(self, threads: int) -> float:
        """Run the program again on the last batch, with a number of threads, and return the seconds."""
        begin = time.perf_counter()
        self._program.run(self._backend.workers, threads=threads)
        return time.perf_counter() - begin

    @property
    def expert_reads(self) -> ExpertReads | None:
        return None if self.pool is None else self.pool.reads

    def _threads(self, n_tokens: int, n_products: int) -> tuple[Workers, ThreadLimit | None]:
        """Return the threads for ``n_products`` products per token, and the limit of their number, if any."""
        backend = self._backend
        if n_tokens * n_products < backend.small_step:
            backend.workers.wait_until_idle()
            return backend.caller, None
        if n_tokens <= FEW_TOKENS:
            return backend.workers, self.limit
        return backend.workers, self._batch_limit if n_tokens <= SHORT_STEP else self._prompt_limit

    def run(self, batch: Batch, hidden: Output | None = None) -> Output:
        n_tokens = len(batch.ids)
        workers, limit = self._threads(n_tokens, self._n_products)
        threads = None if limit is None else limit.now
        if self._edits:
            self._run_with_edits(workers, batch, hidden, threads)
            return self._output(batch)
        begin = time.perf_counter()
        lost = self._program.run(workers, before=lambda: self._fill(batch, hidden), threads=threads)
        if limit is not None and (self.pool is None or not self.pool.has_waited):
            limit.record(lost, (time.perf_counter() - begin) / n_tokens)
        return self._output(batch)

    def _run_with_edits(self, workers: Workers, batch: Batch, hidden: Output | None, threads: int | None) -> None:
        """Run the program, and let the host change rows at the points of its edits."""
        stops = [edit.instruction for edit in self._edits]
        parts = map(range, (0, *stops), (*stops, self._n_instructions))
        self._program.run(workers, lambda: self._fill(batch, hidden), threads=threads, instructions=next(parts))
        for edit, instructions in zip(self._edits, parts, strict=True):
            if batch.edit is not None:
                base = None if edit.base is None else self._rows(edit.base)
                batch.edit(edit.name, self._rows(edit.rows), base)
            if instructions:
                self._program.run(workers, threads=threads, instructions=instructions)

    # -- Blocks of a graph whose other part runs on a device; see `localllm.kernels.offload.HostBlocks` ------------

    def begin(self, batch: Batch) -> None:
        self._backend.workers.wait_until_idle()
        self._fill(batch, None)
        self._lost = self._seconds = 0.0

    def compute(self, number: int, inputs: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        block, n_tokens = self._blocks[number], int(self._tables.header_numbers()[N_TOKENS])
        for stored, rows in zip(block.received, inputs, strict=True):
            into = stored.rows(self._arena)[: len(rows)]
            into[:, : stored.width], into[:, stored.width :] = rows, 0
        if block.begin < block.end:
            workers, limit = self._threads(n_tokens, block.n_products)
            threads, instructions = None if limit is None else limit.now, range(block.begin, block.end)
            begin = time.perf_counter()
            lost = self._program.run(workers, threads=threads, instructions=instructions)
            self._lost, self._seconds = max(self._lost, lost), self._seconds + time.perf_counter() - begin
        return [self._rows(stored) for stored in block.sent]

    def end(self, batch: Batch) -> ExpertReadError | None:
        n_tokens = len(batch.ids)
        _, limit = self._threads(n_tokens, max(block.n_products for block in self._blocks))
        if limit is not None and (self.pool is None or not self.pool.has_waited):
            limit.record(self._lost, self._seconds / n_tokens)
        return self._read_error(batch, None)

    # -- Results ---------------------------------------------------------------------------------------------------

    def run_in_pieces(
        self, batch: Batch, piece_s: float, hidden: Output | None = None
    ) -> Generator[None, None, Output]:
        yield from self._program.run_in_pieces(self._backend.workers, lambda: self._fill(batch, hidden), piece_s)
        return self._output(batch)

    def _output(self, batch: Batch) -> HostOutput:
        n_rows = len(batch.ids) if self._of_tokens else len(batch.outputs)
        output = HostOutput(self._result[:n_rows, : self._width])
        if (error := self._read_error(batch, output)) is not None:
            raise error
        return output

    def _read_error(self, batch: Batch, output: HostOutput | None) -> ExpertReadError | None:
        """Return an error if experts could not be read, with the rows of ``output``; None if all were read."""
        if self.pool is None or (error := self.pool.error) is None:
            return None
        tokens = np.array(self.pool.failed_tokens, np.int32)
        lacking = np.searchsorted(batch.query_starts, tokens, side="right") - 1
        read_error = ExpertReadError(str(error), frozenset(lacking.tolist()), output and output.rows())
        read_error.__cause__ = error
        return read_error

    def variant(self, graph: Graph, max_tokens: int | None = None) -> CPUStep:
        lowered = self._lower(graph, max_tokens)
        check_memory(lowered.arena_bytes, "a program that reads or changes values inside the model")
        ngrams = {rows.op: rows for rows, _, _ in self._ngrams}
        return CPUStep(self._backend, lowered, self._packed_weights, self.weights, self.cache, self._lower, ngrams)

    def _rows(self, stored: HostRows) -> NDArray[np.float32]:
        """Return the batch's rows of a tensor."""
        n_rows = self._tables.header_numbers()[stored.slot]
        return stored.rows(self._arena)[:n_rows, : stored.width]

    def value(self, x: Value) -> NDArray[Any]:
        stored, numbers = self._watched[x], self._tables.header_numbers()
        if isinstance(stored, HostRows):
            return self._rows(stored)
        begin = stored.ids.buffer.offset + stored.ids.n_bytes
        ids = self._arena[begin : begin + 8 * numbers[N_CHOSEN]].view(np.int64)
        return ids.reshape(numbers[N_TOKENS], -1).astype(np.int32)

    def _fill(self, batch: Batch, hidden: Output | None) -> None:
        batch.check_size(self._tables.max_tokens, self._tables.max_outputs)
        batch.check(self.cache, self._n_joined)
        if self.pool is not None:
            self.pool.begin(len(batch.ids))
        row_numbers = [batch.rows_of(table.shape[0], by_position=op.by_position) for op, table, _ in self._embeddings]
        self._tables.fill(batch)
        n_tokens = len(batch.ids)
        table_rows: dict[int, NDArray[np.float32]] = {}
        for (op, table, rows), numbers in zip(self._embeddings, row_numbers, strict=True):
            if id(table) not in table_rows:
                table_rows[id(table)] = table.rows(numbers)
            values, width = table_rows[id(table)], op.result.width
            if op.columns is not None:
                values = values[:, op.columns.start : op.columns.stop]
            rows[:n_tokens, :width] = values if op.scale == 1.0 else values * np.float32(op.scale)
            rows[:n_tokens, width:] = 0
            if op.takes_rows and len(batch.embedded):
                rows[batch.embedded, :width] = batch.embeddings_of(0, width)
        for ngrams, states, into in self._ngrams:
            into[:n_tokens, : ngrams.op.result.width] = ngrams.rows(batch, states)
        for added, into in self._added:
            if n := len(batch.embedded):
                width = added.x.width
                into[:n, :width] = batch.embeddings_of(added.index, width)
        for adapter, into in self._adapters:
            into[:n_tokens, : adapter.result.width] = adapter.rows(batch.adapters, n_tokens)
        for graph_input, into in self._inputs:
            into[:n_tokens, : graph_input.x.width] = input_rows(hidden, n_tokens, graph_input)
            into[:n_tokens, graph_input.x.width :] = 0


def _checked_threads(threads: int) -> int:
    most = most_threads()
    if not 1 <= threads <= most:
        why = f" is out of range: use 1 to {most}, or omit it for {default_threads()}"
        raise UsageError(Argument("threads", threads), why)
    return threads
