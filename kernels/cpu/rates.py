"""Rates of this processor by family of kernels, measured once per machine: the basis of predicted speeds.

A measurement runs the kernels of a family on zeros, with the threads of a model's steps.  Rates are stored next to
the compiled kernels.  They are measured again if the machine, its threads or the kernels change, after a month, or
soon if other programs computed during a measurement.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.kernels import operations as ops
from localllm.kernels.backend import Batch, HostOutput, weights_of
from localllm.kernels.code_cache import cache_root, write_aside
from localllm.kernels.cpu.backend import CPUBackend, CPUStep
from localllm.kernels.cpu.cache import CPUCache
from localllm.kernels.cpu.cache_types import PAGE
from localllm.kernels.cpu.compiler import fingerprint, variant
from localllm.kernels.cpu.costs import OperationCost, costs
from localllm.kernels.cpu.expert_pool import READERS
from localllm.kernels.cpu.host import OtherLoad, default_threads, last_level_cache
from localllm.kernels.cpu.lowering import CPULowered, CPULowering
from localllm.kernels.cpu.memory import PADDING
from localllm.kernels.cpu.roofline import UNIT, flush_words, timed
from localllm.kernels.cpu.target import Target
from localllm.kernels.cpu.thread_choice import is_fresh, machine_key
from localllm.kernels.cpu.weights import CPUPackedWeights, packed_bytes
from localllm.kernels.graph import Graph, HeadNorm, Matrix, Operation, Rows, Tensor
from localllm.quant.lut import block_size
from localllm.quant.repack import repack_target
from localllm.quant.types import GGMLType

#: Tokens of measured steps.  Engines evaluate prompts in steps of at least the last number of tokens.
STEPS = 1, 8, 64
#: Tokens in the cache before a measured step of one token, and of several tokens.
DEPTH, DEPTH_OF_SEVERAL = 4096, 1024
#: Columns of a measured matrix, its bytes for one token, and its rows for several tokens.
COLUMNS, MATRIX_BYTES, MATRIX_ROWS = 4096, 128 << 20, 4096
#: How many times smaller the second matrix is that is measured for one token, to find the time of a product's start.
SMALLER = 64
#: If a model is larger than the caches, data of at least `SMALL` bytes is flushed from them before each measurement.
#: Data of this many times the largest cache need not be flushed: reading it replaces the contents of the caches.
CACHES = 3
#: Bytes below which an operation is repeated in a measurement, and the number of repetitions.
SMALL, REPEATS = 1 << 20, 64
#: Minimum number and seconds of measurements of a rate.  For large data the median counts: memory changes its speed,
#: and the fastest measurement predicted up to 40% more tokens per second than models generate.  For small data the
#: fastest counts: waking the threads takes longer than the operation, and varies.
TRIES, TRY_SECONDS = 5, 0.05
#: Bytes of a read in `disk_rate`, similar to an expert's matrix, and bytes of all reads.
PIECE, DISK_BYTES = 2 << 20, 256 << 20
#: Family of programs: seconds of a step apart from its instructions, and of an instruction that threads wait for.
PROGRAM = "program"


class Rate(NamedTuple):
    """Seconds per unit of work of a family (`OperationCost`)."""

    once: float  # seconds per shared unit for one token
    base: float = 0.0  # seconds per shared unit for several tokens, without their own time: unpacking weights
    per_row: float = 0.0  # seconds per unit of a row, for several tokens
    # Matrix products only: seconds until a matrix is read at full speed, and seconds per input and output of a row.
    start: float = 0.0
    per_input: float = 0.0
    per_output: float = 0.0

    def of(self, cost: OperationCost) -> float:
        """Return the seconds of an operation, without waits that are counted separately."""
        # Products of one operation do not wait for each other.
        one = self.start * (cost.n_waits > 0) + cost.once * self.once
        if cost.n_rows <= 1:
            return one
        row = cost.per_row * self.per_row + cost.n_inputs * self.per_input + cost.n_outputs * self.per_output
        return max(one, cost.once * self.base + cost.n_rows * row)


class CPURates:
    """Rates for a number of threads.

    Args:
        threads, decode_threads: threads of steps with many tokens, and with few tokens.
        n_bytes: bytes that a token reads.  If the processor's cache holds them, it does so in measurements too.
        progress: see `CPUBackend`.
    """

    def __init__(
        self,
        target: Target,
        threads: int,
        decode_threads: int,
        n_bytes: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._cache_bytes = last_level_cache() if n_bytes <= last_level_cache() else 0
        self._test: Callable[[], _Test] = lambda: _Test(
            CPUBackend(threads, target.name, progress), decode_threads, self._cache_bytes
        )
        in_cache = ", in cache" if self._cache_bytes else ""
        self._prefix = f"{threads} threads, {decode_threads} to decode{in_cache}: "
        root = cache_root()
        self._file = None if root is None else root / f"rates-{machine_key(default_threads(), target)}.json"
        self._stored = self._read()

    def measure(self, work: Iterable[OperationCost]) -> None:
        """Measure the rates of families that are not known, and store them."""
        missing = {cost.family: cost.sample for cost in work if self._rate(cost.family) is None}
        if not missing:
            return
        other_load, test = OtherLoad(), self._test()
        try:
            rates = {PROGRAM: test.program()} | {name: test.rate(sample) for name, sample in missing.items()}
        finally:
            test.backend.workers.close()
        measured = time.time(), other_load.cpus()
        self._stored = self._read() | {self._prefix + name: (*rate, *measured) for name, rate in rates.items()}
        if self._file is not None:
            write_aside(self._file, json.dumps({"kernels": fingerprint(), "rates": self._stored}).encode())

    def seconds(self, work: Iterable[OperationCost], *, is_rough: bool = False) -> float | None:
        """Return the seconds of a step; None if a rate is not known.

        Args:
            is_rough: count operations other than matrix products whose rate is not known as one instruction.
        """
        program = self._rate(PROGRAM)
        if program is None:
            return None
        total = program.once
        for cost in work:
            rate = self._rate(cost.family)
            if rate is None and (cost.is_product or not is_rough):
                return None
            total += program.per_row if rate is None else rate.of(cost) + cost.n_waits * program.per_row
        return total

    def _rate(self, name: str) -> Rate | None:
        entry = self._stored.get(self._prefix + name)
        return Rate(*entry[:-2]) if entry is not None and is_fresh(entry[-2], entry[-1], time.time()) else None

    def _read(self) -> dict[str, tuple[float, ...]]:
        """Return the stored rates, each with the time of its measurement and the processors of other programs."""
        try:
            stored = json.loads(b"" if self._file is None else self._file.read_bytes())
            entries = stored["rates"] if stored["kernels"] == fingerprint() else {}
            n_numbers = len(Rate._fields) + 2
            return {name: tuple(map(float, entry)) for name, entry in entries.items() if len(entry) == n_numbers}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return {}


# -- Measuring -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Zeros:
    """A weight of zeros."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]

    @property
    def data(self) -> NDArray[np.uint8]:
        *n_rows, n_columns = self.shape
        row_bytes = block_size(self.type).row_bytes(n_columns)
        return np.zeros((math.prod(n_rows), row_bytes) if n_rows else row_bytes, np.uint8)

    def drop_pages(self) -> None:
        pass


class _Test:
    """Measures operations on zeros.  ``cache_bytes``: bytes of the cache with all data; 0 if data is in memory."""

    def __init__(self, backend: CPUBackend, decode_threads: int, cache_bytes: int) -> None:
        self.backend, self._decode_threads, self._cache_bytes = backend, decode_threads, cache_bytes
        self._start = self._wait = 0.0  # seconds that a program takes before its instructions, and per instruction

    def program(self) -> Rate:
        """Measure the family `PROGRAM`."""
        graph = _graph_of(ops.Scale(Tensor(Rows.TOKENS, PADDING)))
        (short, _), (long, _) = (self._run(graph, 1, 0, repeats) for repeats in (1, 1 + REPEATS))
        self._wait = max(0.0, long - short) / REPEATS
        self._start = max(0.0, short - self._wait)
        return Rate(self._start, per_row=self._wait)

    def rate(self, sample: Operation[Any] | GGMLType) -> Rate:
        """Measure a family by an operation, or by the type of a matrix."""
        if isinstance(sample, Operation):
            works, times = zip(*(self._measured(sample, n_tokens) for n_tokens in STEPS), strict=True)
            base, work = _base(*times[1:]), works[-1]
            per_row = (times[-1] - base) / (work.n_rows * work.per_row)
            return Rate(times[0] / works[0].once, base / work.once, per_row)
        return self._product_rate(sample)

    def _product_rate(self, type: GGMLType) -> Rate:
        """Measure products with matrices of a type. Matrices of several shapes separate the terms of a rate."""
        n_few, n_many = STEPS[1:]
        row_bytes = packed_bytes((PADDING, COLUMNS), repack_target(type)) // PADDING
        least = PADDING * row_bytes
        n_bytes = max(2 * least, min(MATRIX_BYTES, self._cache_bytes // 2 or MATRIX_BYTES))
        rows = [n // least * PADDING for n in (n_bytes, max(n_bytes // SMALLER, least))]
        large, small = (self._measured(_product(type, n, COLUMNS), 1) for n in rows)
        once = max(0.0, large[1] - small[1]) / (large[0].once - small[0].once)
        start = max(0.0, small[1] - small[0].once * once)
        (_, few), (whole, many) = (self._measured(_product(type, MATRIX_ROWS, COLUMNS), n) for n in (n_few, n_many))
        base = _base(few, many)
        # A product takes time per multiply-add, per input and per output: solve for these times with three shapes.
        shapes = [(MATRIX_ROWS, COLUMNS), (MATRIX_ROWS, COLUMNS // 8), (MATRIX_ROWS // 8, COLUMNS)]
        counts = np.array([(n_out * n_in, n_in, n_out) for n_out, n_in in shapes], np.float64)
        times = [many, *(self._measured(_product(type, *shape), n_many)[1] for shape in shapes[1:])]
        unpacking = base * counts[:, 0] / counts[0, 0]
        seconds = (np.array(times) - unpacking) / n_many
        per_row, per_input, per_output = np.linalg.solve(counts, seconds).clip(0).tolist()
        return Rate(once, base / whole.once, per_row, start, per_input, per_output)

    def _measured(self, op: Operation[Any], n_tokens: int) -> tuple[OperationCost, float]:
        """Return the work of an operation, and its seconds without the start of the program and the waits."""
        graph, depth = _graph_of(op), DEPTH if n_tokens == 1 else DEPTH_OF_SEVERAL
        if not isinstance(op, ops.Attention | ops.IndexSelect) or not op.causal:
            depth = 0
        (cost,) = costs(graph, n_tokens, depth, n_tokens)
        seconds, n_runs = self._run(graph, n_tokens, depth, REPEATS if n_tokens == 1 else 1)
        return cost, max(0.0, (seconds - self._start) / n_runs - cost.n_waits * self._wait)

    def _run(self, graph: Graph, n_tokens: int, depth: int, repeats: int) -> tuple[float, int]:
        """Return the seconds of a program, and how often it computes the graph: ``repeats`` if it reads little."""
        backend, n_pages = self.backend, -(-(depth + n_tokens) // PAGE)
        workers, weights = backend.workers, CPUPackedWeights()
        cache = CPUCache(graph, (n_pages,) * len(graph.windows), 1 if graph.states else 0, workers)
        limits = {"max_tokens": n_tokens, "max_outputs": n_tokens}

        def lower(graph: Graph) -> CPULowered:
            return CPULowering(graph, weights, cache, backend.target, workers.n, **limits).lower()

        lowered = lower(graph)
        packed = tuple(weights.load(use, backend.loader, None) for use in weights_of(graph))
        cache.allocate()
        cache.memory[:] = 0  # pages that were never written share one physical page
        n_bytes = cache.n_bytes + sum(weight.n_bytes for weight in packed)
        is_large = n_bytes >= SMALL
        n_runs = 1 if is_large else repeats
        repeated = replace(lowered, instructions=[*lowered.instructions] * n_runs)
        step = CPUStep(backend, repeated, weights, packed, cache, lambda graph, _: lower(graph))
        width = sum(node.operation.x.width for node in graph.nodes if isinstance(node.operation, ops.Input))
        step.run(_batch(graph, n_tokens, depth, n_pages), HostOutput(np.zeros((n_tokens, width), np.float32)))
        code, data = variant(flush_words, backend.target), [cache.memory, *weights.arrays()]
        replaces_caches = 0 < CACHES * last_level_cache() <= n_bytes  # 0: the size of the cache is not known
        flushed = data if is_large and not self._cache_bytes and not replaces_caches else []
        flush = [timed(workers, code, {"data": array}, array.nbytes // UNIT, None) for array in flushed]
        times = list[float]()
        while len(times) < TRIES or sum(times) < TRY_SECONDS:
            for flush_array in flush:
                flush_array(None)
            times.append(step.rerun(self._decode_threads if n_tokens == 1 else workers.n))
        return statistics.median(times) if is_large else min(times), n_runs


def _base(few: float, many: float) -> float:
    """Return the seconds that all tokens share, from the seconds of steps of ``STEPS[1]`` and ``STEPS[2]`` tokens."""
    _, n_few, n_many = STEPS
    return min(many, max(0.0, (few * n_many - many * n_few) / (n_many - n_few)))


def _product(type: GGMLType, n_out: int, n_in: int) -> ops.Linear:
    """Return a product with a matrix of zeros."""
    return ops.Linear(Tensor(Rows.TOKENS, n_in), Matrix(Zeros("zeros", type, (n_out, n_in))))


def _graph_of(op: Operation[Any]) -> Graph:
    """Return a graph that computes an operation from inputs, with weights of zeros."""
    tensors = {x: Tensor(Rows.TOKENS, x.width) for x in op.inputs if isinstance(x, Tensor)}
    op = replace(op, **{argument.name: _zeroed(getattr(op, argument.name), tensors) for argument in fields(op)})
    caches = [cache for name in ("cache", "entries") if (cache := getattr(op, name, None)) is not None]
    graph = Graph(caches={cache.key: cache for cache in caches}, states={s.layer: op.states for s in op.states})
    graph.windows += dict.fromkeys(cache.window for cache in caches if cache.window is not None)
    graph.layer, first = 0, 0
    inputs = [*tensors.values(), Tensor(Rows.TOKENS, PADDING)]
    total = sum(x.width for x in inputs)
    for i, x in enumerate(inputs):
        if i == len(tensors):  # the last input is only the graph's result
            graph.add(op)
        graph.add(ops.Input(x, first, total))
        first += x.width
    return graph


def _zeroed(value: Any, tensors: Mapping[Tensor, Tensor]) -> Any:
    """Return an argument of an operation with other tensors, and with weights of zeros."""
    match value:
        case tuple():
            return tuple(_zeroed(item, tensors) for item in value)
        case Matrix():
            return Matrix(_zeroed(value.weight, tensors), _zeroed(value.bias, tensors))
        case HeadNorm():
            return replace(value, weight=_zeroed(value.weight, tensors))
        case Tensor():
            return tensors[value]
        case _:
            return Zeros(value.name, value.type, value.shape) if hasattr(value, "drop_pages") else value


def _batch(graph: Graph, n_tokens: int, depth: int, n_pages: int) -> Batch:
    """Return a batch of tokens of one sequence."""
    return Batch(
        ids=np.zeros(n_tokens, np.int32),
        positions=np.arange(depth, depth + n_tokens, dtype=np.int32),
        query_starts=np.array([0, n_tokens], np.int32),
        kv_lengths=np.array([depth + n_tokens], np.int32),
        block_tables=np.tile(np.arange(n_pages, dtype=np.int32), (len(graph.windows), 1, 1)),
        outputs=np.arange(n_tokens + 1 - graph.n_joined, dtype=np.int32),
        states=np.zeros(1 if graph.states else 0, np.int32),
    )


# -- The disk ------------------------------------------------------------------------------------------------------


def disk_rate(path: Path) -> float:
    """Return the bytes per second of reading scattered pieces of a file with as many threads as for experts.

    Bypasses the system's page cache on systems with ``posix_fadvise``.
    """
    pieces = range(0, max(1, path.stat().st_size - PIECE), PIECE)
    sample = random.Random(time.monotonic_ns()).sample(pieces, min(len(pieces), DISK_BYTES // PIECE))
    with path.open("rb", buffering=0) as file:
        if sys.platform == "linux":
            for offset in sample:
                os.posix_fadvise(file.fileno(), offset, PIECE, os.POSIX_FADV_DONTNEED)

    def read(first: int) -> int:
        with path.open("rb", buffering=0) as file:
            n = 0
            for offset in sample[first::READERS]:
                file.seek(offset)
                n += len(file.read(PIECE))
            return n

    with ThreadPoolExecutor(READERS) as threads:
        begin = time.perf_counter()
        return sum(threads.map(read, range(READERS))) / (time.perf_counter() - begin)
