"""The backend of the CPU: packs weights, makes caches, and runs the program that a graph is lowered to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from localllm.errors import UsageError
from localllm.kernels.backend import (
    Backend,
    Batch,
    Footprint,
    HostOutput,
    Output,
    PackedWeight,
    Progress,
    Step,
    input_rows,
    weights_of,
)
from localllm.kernels.cpu.batch import N_TOKENS
from localllm.kernels.cpu.cache import CPUCache, part_bytes
from localllm.kernels.cpu.cache_types import PAGE
from localllm.kernels.cpu.host import default_threads, most_threads
from localllm.kernels.cpu.lowering import Lowered, lower
from localllm.kernels.cpu.memory import aligned_zeros
from localllm.kernels.cpu.program import Program, Workers
from localllm.kernels.cpu.target import Target, choose
from localllm.kernels.cpu.thread_choice import choose_threads
from localllm.kernels.cpu.weights import PackedWeights, WeightLoader, planned_weight
from localllm.kernels.graph import Graph

#: Tokens in a step up to which reading the weights takes longer than multiplying them.
FEW_TOKENS = 4


class CPUBackend(Backend):
    """The CPU.

    Attributes:
        workers: the threads, all of which compute steps of many tokens.
        decode_threads: how many of them compute steps of few tokens, which read more than they multiply.

    Args:
        threads: how many to compute with; by default one a physical core that this process may use for steps of many
            tokens, and as many as `localllm.kernels.cpu.thread_choice` finds best for those of few.
        isa: the instruction set to compile for, by name; by default the best that runs here.
        progress: called with (kernels compiled, kernels to compile) when kernels are not in the cache yet.

    Raises:
        UsageError: there is no such instruction set, or so many threads are out of range.
        DeviceError: this processor does not execute the instruction set.
    """

    name = "cpu"
    page_size = PAGE
    #: Products of activations and weights below which the calling thread computes a step alone: handing it to others
    #: would take longer.
    small_step = 8 << 20

    def __init__(
        self,
        threads: int | None = None,
        isa: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.target = choose(isa)
        if threads is None:
            choice = choose_threads(self.target, progress)
            self.decode_threads, threads = choice.decode, choice.cores
        else:
            self.decode_threads = threads = _checked_threads(threads)
        self.workers, self.caller = Workers(threads), Workers(1)
        self.kernel_progress = progress
        self._loader = WeightLoader(self.workers, self.target, progress)

    def footprint(self, graph: Graph, *, n_pages: int, max_tokens: int, max_outputs: int) -> Footprint:
        sizes = {"n_pages": n_pages, "max_tokens": max_tokens, "max_outputs": max_outputs}
        return footprint(graph, target=self.target, threads=self.workers.n, **sizes)

    def compile(
        self, graph: Graph, *, n_pages: int, max_tokens: int, max_outputs: int, progress: Progress | None = None
    ) -> CPUStep:
        weights = PackedWeights()
        packed = tuple(weights.load(use, self._loader, progress) for use in weights_of(graph))
        cache = CPUCache.allocate(graph.caches, n_pages, self.workers)
        sizes = {"max_tokens": max_tokens, "max_outputs": max_outputs}
        lowered = lower(graph, weights, cache, self.target, self.workers.n, **sizes)
        return CPUStep(self, lowered, weights, packed, cache)


def footprint(
    graph: Graph, *, target: Target, threads: int, n_pages: int, max_tokens: int, max_outputs: int
) -> Footprint:
    """As `Backend.footprint`, of a CPU that is not at work: on so many threads."""
    cache = CPUCache(None, graph.caches, n_pages)
    sizes = {"max_tokens": max_tokens, "max_outputs": max_outputs}
    lowered = lower(graph, PackedWeights(), cache, target, threads, **sizes)
    caches = {layer: sum(part_bytes(kept, n_pages)) for layer, kept in graph.caches.items()}
    return Footprint(tuple(map(planned_weight, weights_of(graph))), caches, lowered.arena_bytes)


class CPUStep(Step):
    """A program in memory, with the weights and the cache that it works on."""

    cache: CPUCache

    def __init__(
        self,
        backend: CPUBackend,
        lowered: Lowered,
        weights: PackedWeights,
        packed: tuple[PackedWeight, ...],
        cache: CPUCache,
    ) -> None:
        self.weights, self.cache, self._backend = packed, cache, backend
        self._tables, self._hidden, self._n_products = lowered.tables, lowered.hidden, lowered.n_products
        arena = aligned_zeros(lowered.arena_bytes, np.uint8)
        self._tables.bind(arena)
        self._embeddings = [(weights.tables[w], scale, y.rows(arena)) for w, scale, y in lowered.embeddings]
        self._hidden_rows = None if lowered.hidden is None else lowered.hidden.rows(arena)
        self._result, self._of_tokens = lowered.result.rows(arena), lowered.result.slot == N_TOKENS
        self._width = lowered.result.width
        header = self._tables.header_numbers()
        keep = (arena, weights, cache)
        self._program = Program(
            lowered.instructions, header, backend.target, keep, backend.kernel_progress, arena.ctypes.data
        )

    def run(self, batch: Batch, hidden: Output | None = None) -> Output:
        backend, n_tokens = self._backend, len(batch.ids)
        workers = backend.workers
        if n_tokens * self._n_products < backend.small_step:
            workers.settle()
            workers = backend.caller
        threads = backend.decode_threads if n_tokens <= FEW_TOKENS else None
        self._program.run(workers, before=lambda: self._fill(batch, hidden), threads=threads)
        n_rows = n_tokens if self._of_tokens else len(batch.outputs)
        return HostOutput(self._result[:n_rows, : self._width])

    def _fill(self, batch: Batch, hidden: Output | None) -> None:
        """Puts a batch where the program reads it."""
        batch.check_size(self._tables.max_tokens, self._tables.max_outputs)
        batch.check(PAGE, self.cache.n_pages)
        for table, _, _ in self._embeddings:
            batch.check_ids(table.shape[0])
        self._tables.fill(batch)
        n_tokens = len(batch.ids)
        for table, scale, rows in self._embeddings:
            found = table.rows(batch.ids)
            rows[:n_tokens, : table.shape[1]] = found if scale == 1.0 else found * np.float32(scale)
            rows[:n_tokens, table.shape[1] :] = 0
        if self._hidden_rows is not None and self._hidden is not None:
            width = self._hidden.width
            self._hidden_rows[:n_tokens, :width] = input_rows(hidden, n_tokens, width)
            self._hidden_rows[:n_tokens, width:] = 0


def _checked_threads(threads: int) -> int:
    most = most_threads()
    if not 1 <= threads <= most:
        raise UsageError(f"threads={threads:,} is out of range: ask for 1 to {most}, or none for {default_threads()}")
    return threads
