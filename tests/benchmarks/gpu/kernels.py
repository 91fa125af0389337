"""Single kernels: the floor, the goal, the measured time and the error.

A kernel is timed as in a profile, in a graph of several launches that read different memory.  The goal is the floor
divided by the share of the device that localllm should use.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.backend import Batch, HostOutput
from localllm.kernels.cuda.cache import CUDACache
from localllm.kernels.cuda.calls import BatchSizes, Cost, Extent
from localllm.kernels.cuda.profile import call_seconds, hidden_states_kept, total_cost, watching
from localllm.kernels.cuda.step import CUDAStep
from localllm.kernels.graph import CacheType, KVCache, Matrix
from localllm.kernels.reference import hadamard
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType
from tests.benchmarks.gpu.machine import Machine
from tests.benchmarks.gpu.sections import Row
from tests.helpers.blocks import random_rows
from tests.helpers.recorder import CacheShape, Ops
from tests.helpers.run_model import make_batch
from tests.helpers.weights import NO_CACHE, blocks
from tests.kernels.formulas import attended

PAGE = 64
#: Rows of random weights; larger matrices repeat them.
POOL = 512
#: Distinct rows of inputs; more rows repeat them.
DIFFERENT = 64
#: Checked rows and columns of products, and checked heads of attention; and the largest ‖error‖ / ‖reference‖.
CHECKED, CHECKED_HEADS = 48, 2
TOLERANCES = {"F16": 2e-3, "BF16": 1e-2}
TOLERANCE, ATTENTION_TOLERANCE = 1e-3, {"f16": 2e-3, "q8_0": 1e-2}

#: Goals for the used share of a device: decoding, prompts, and attention.
DECODE, FLOAT_DECODE, PREFILL, ATTENTION_DECODE, ATTENTION_PREFILL = 0.7, 0.85, 0.45, 0.8, 0.5


@dataclass
class Timed:
    """Watches a step: times all calls whose names start with ``begins``, then computes the batch."""

    machine: Machine
    begins: str
    seconds: float = 0.0
    cost: Cost = field(default_factory=Cost)
    n: int = 0

    def run(self, step: CUDAStep, batch: Batch, extent: Extent) -> None:
        chosen = [call for call in step.calls if call.name.startswith(self.begins)]
        machine = self.machine
        self.n, self.cost = len(chosen), total_cost(chosen, BatchSizes.of(batch))
        with hidden_states_kept(step):
            step.launch(extent)
            self.seconds = call_seconds(
                step, chosen, extent, repetitions=machine.repetitions, least_launches=machine.least_launches
            )
        step.launch(extent)

    def row(self, wanted: float, error: float, tolerance: float, what: dict[str, Any]) -> Row:
        ceilings = self.machine.ceilings(0)
        cost = self.cost
        floor, seconds = (value / self.n for value in (cost.seconds(ceilings.copy, ceilings.rates), self.seconds))
        row = {
            **what,
            "floor, us": 1e6 * floor,
            "hoped for, us": 1e6 * floor / wanted,
            "us": 1e6 * seconds,
            "of floor": f"{floor / seconds:.0%}",
            "B/s": cost.n_bytes / self.seconds,
            "FLOP/s": cost.n_operations / self.seconds,
            "error": error,
        }
        if not error <= tolerance:
            name = ", ".join(map(str, what.values()))
            row["fault"] = f"{name}: the error is {error:.1e}, more than {tolerance:g}"
        return row


# -- Products ------------------------------------------------------------------------------------------------------


def products(machine: Machine) -> Iterator[Row]:
    """Measure products with matrices of every format and shape, for all numbers of rows."""
    for format in machine.sizes.formats:
        for name, n_outs, n_in in machine.sizes.products:
            yield from _products(machine, format, name, n_outs, n_in)
            gc.collect()  # frees memory of the device


def _products(machine: Machine, format: GGMLType, name: str, n_outs: Sequence[int], n_in: int) -> Iterator[Row]:
    ops = Ops(machine.make_backend(machine.driver, 0))
    pool = random_rows(format, POOL, n_in)
    rows = [_repeated(pool, n) for n in n_outs]
    n_bytes = sum(ops.loader.planned(blocks(part, format, n_in)).n_bytes for part in rows)
    # Enough sets to exceed the caches.
    n_sets = 1 + max(1, -(-machine.sizes.copied // n_bytes))
    sets = [[Matrix(blocks(part, format, n_in)) for part in rows] for _ in range(n_sets)]

    def forward() -> Any:
        x = ops.hidden(n_in)
        for weights in sets:
            y = ops.linears(x, weights)[-1]
        return y

    most = max(machine.sizes.rows)
    cache = ops.new_cache(NO_CACHE, -(-most // PAGE))
    step = ops.compile(forward, cache, max_tokens=most, max_outputs=1)
    for n in machine.sizes.rows:
        x = _repeated(np.random.default_rng(n).normal(0, 1, (min(n, DIFFERENT), n_in)).astype(np.float32), n)
        timed = Timed(machine, "linear")
        with watching(timed):
            y = step.run(make_batch([([0] * n, 0, range(cache.n_pages))], [0]), HostOutput(x)).rows()
        error = _product_error(y, x, pool, format)
        what = {"kernel": f"linear {name}", "format": format.name, "rows": n}
        decode = FLOAT_DECODE if format in (GGMLType.F16, GGMLType.BF16) else DECODE
        yield timed.row(decode if n <= 8 else PREFILL, error, TOLERANCES.get(format.name, TOLERANCE), what)


def _repeated(pool: NDArray[Any], n: int) -> NDArray[Any]:
    return np.ascontiguousarray(np.resize(pool, (n, pool.shape[1])))


def _product_error(y: NDArray[Any], x: NDArray[Any], pool: NDArray[np.uint8], format: GGMLType) -> float:
    """Return the error of some columns of the last product, whose matrix repeats the rows of the pool."""
    columns = np.random.default_rng(1).choice(y.shape[1], min(CHECKED, y.shape[1]), replace=False)
    weights = dequantize(pool[columns % POOL], format).astype(np.float64)
    tokens = np.random.default_rng(2).choice(len(x), min(CHECKED, len(x)), replace=False)
    x, y = x[tokens], y[tokens]
    is_float = format in (GGMLType.F16, GGMLType.BF16)
    expected = (x.astype(np.float64) if is_float else _rounded(x)) @ weights.T
    return _relative_error(y[:, columns], expected)


def _rounded(x: NDArray[Any]) -> NDArray[np.float64]:
    """Round rows as products with integer weights do: to eight bits, with a scale per 32 values."""
    parts = x.astype(np.float64).reshape(len(x), -1, 32)
    scales = np.abs(parts).max(axis=2, keepdims=True) / 127
    return (np.rint(parts / scales) * scales).reshape(x.shape)


def _relative_error(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# -- Attention -----------------------------------------------------------------------------------------------------


def attention(machine: Machine) -> Iterator[Row]:
    """Measure attention of single tokens with long caches, and of prompts."""
    for cache_type in ("f16", "q8_0"):
        for n_sequences, length in machine.sizes.decode:
            yield _attention(machine, cache_type, n_sequences, 1, length)
        for n, length in (*((n, n) for n in machine.sizes.prefill), *machine.sizes.chunks):
            yield _attention(machine, cache_type, 1, n, length)
        gc.collect()


def _attention(machine: Machine, cache_type: CacheType, n_sequences: int, n: int, length: int) -> Row:
    n_heads, n_kv_heads, head_dim = machine.sizes.heads
    ops, pages = Ops(machine.make_backend(machine.driver, 0)), -(-length // PAGE)
    # Enough layers to exceed the caches; prompts are limited by products.
    n_bytes = KVCache(0, n_kv_heads, head_dim, head_dim, cache_type).bytes_per_token() * pages * PAGE * n_sequences
    n_layers = max(1, min(8, -(-machine.sizes.copied // n_bytes))) if n == 1 else 1
    cache = ops.new_cache(CacheShape(n_layers, n_kv_heads, head_dim, cache_type), pages * n_sequences)
    scale = head_dim**-0.5

    def forward() -> Any:
        q = ops.hidden(n_heads * head_dim)
        for layer in range(n_layers):
            y = ops.attention(q, layer, scale=scale)
        return y

    n_tokens = n * n_sequences
    step = ops.compile(forward, cache, max_tokens=n_tokens, max_outputs=1)
    keys, values = _fill(cache.made)
    q = np.random.default_rng(3).normal(0, 1, (n_tokens, n_heads * head_dim)).astype(np.float32)
    parts = [([0] * n, length - n, range(s * pages, (s + 1) * pages)) for s in range(n_sequences)]
    timed = Timed(machine, "attention")
    with watching(timed):
        y = step.run(make_batch(parts, [0]), HostOutput(q)).rows()
    last = n_tokens - 1
    of_heads = [head * n_kv_heads // n_heads for head in range(CHECKED_HEADS)]
    # Rows of the last sequence, [length, heads, head_dim].
    seen = [
        x[-pages:, of_heads, :, :head_dim].swapaxes(1, 2).reshape(-1, CHECKED_HEADS, head_dim)[:length]
        for x in (keys, values)
    ]
    expected = attended(q[last:].reshape(1, n_heads, -1)[:, :CHECKED_HEADS], *seen, scale)[0]
    error = _relative_error(y[last, : CHECKED_HEADS * head_dim], expected)
    name = f"attention, {n_sequences} x 1 at {length}" if n == 1 else f"attention, {n} tokens up to {length}"
    what = {"kernel": name, "format": cache_type, "rows": n_tokens}
    wanted = ATTENTION_DECODE if n == 1 else ATTENTION_PREFILL
    return timed.row(wanted, error, ATTENTION_TOLERANCE[cache_type], what)


def _fill(cache: CUDACache) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Fill all layers with random keys and values; return the last layer's, [pages, key heads, PAGE, head]."""
    layout = cache.layouts[0]
    random, n_heads = np.random.default_rng(5), layout.cache.n_heads
    size, found = (cache.n_pages[0], n_heads, PAGE, layout.heads[0]), []
    for entries in (0, 1):
        values: NDArray[Any]
        if layout.groups[0]:
            values = random.integers(-127, 128, size, np.int8)
            by_group = np.full((cache.n_pages[0], n_heads, layout.groups[0], PAGE), 2**-6, np.float16)
            found.append(values.astype(np.float32) * np.float32(2**-6))
        else:
            values = random.standard_normal(size, np.float32).astype(np.float16)
            by_group = np.empty(0, np.float16)
            found.append(values.astype(np.float32))
        for layer in cache.layouts:
            for part, array in ((entries, values), (2 + entries, by_group)):
                if array.size:
                    cache.driver.upload(cache.part(layer, part), array.reshape(-1), cache.stream)
        cache.driver.synchronize(cache.stream)
    return found[0], hadamard(found[1], layout.cache.rotations[1])  # queries reach the kernel rotated
