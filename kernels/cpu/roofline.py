"""Performance limits of this machine: the memory bandwidth and multiply rate of its threads.

A result is meaningful only next to a limit measured in the same minute with the same threads, because clock rates and
other programs' load change.  Therefore create a `Roofline` once, and measure with it in turn with the judged code.

Source of the name: Williams, Waterman and Patterson, Roofline (Communications of the ACM 52, 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Self

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.cpu.compiler import Variant, kernel, variant
from localllm.kernels.cpu.dots import dot32_s8, dot32_u4, dot32_u5, dot32_u6
from localllm.kernels.cpu.matmul import REST_SUMS, few_tokens
from localllm.kernels.cpu.memory import aligned_zeros
from localllm.kernels.cpu.program import Instruction, Program, Workers
from localllm.kernels.cpu.simd import *
from localllm.kernels.cpu.target import Target, choose
from localllm.kernels.cpu.templates import device, static_range
from localllm.kernels.cpu.tiles import FETCH_AHEAD, SLAB, TILES, x_tile_bytes
from localllm.quant.packing import LAYOUTS
from localllm.quant.types import GGMLType

#: Bytes that a thread reads in one unit of work.
UNIT = 1 << 16
#: Parts of a unit that are read in parallel.  Processors prefetch each part separately: several are a tenth faster
#: than one.
STREAMS = 4
#: Vectors read in turn from each part.
VECTORS = 2
#: Columns of the matrix in `DecodeTest`.
DECODED_COLUMNS = 4096
#: Bytes of the stack in `copy_through_frame`.
FRAME = 1 << 15
#: Minimum bytes per measurement of bandwidth: smaller buffers are read several times.
MIN_READ = 1 << 26

#: Rounds of multiplications in a unit of work.
ROUNDS = 1 << 12
#: Rounds before the activations repeat: few enough to stay in the first-level cache.
PERIOD = 16
#: Units of work per thread in one measurement of a multiply rate.
UNITS = 64

#: Measurements of a rate; the best one counts, because every disturbance makes a measurement slower.
READ_TRIES, MULTIPLY_TRIES = 3, 5

LANES = 16


@kernel
def read_words(begin, end, data, sums):
    """Read units of ``UNIT`` bytes, and store the sum of each unit's int32 words, modulo 2^32."""
    for unit in range(begin, end):
        address = data + unit * UNIT
        for s in static_range(STREAMS):
            for v in static_range(VECTORS):
                total[s, v] = zero_i32x16()
        for _ in range(UNIT // (64 * STREAMS * VECTORS)):
            for s in static_range(STREAMS):
                for v in static_range(VECTORS):
                    prefetch(address + (UNIT // STREAMS * s + 64 * v + FETCH_AHEAD))
                    total[s, v] = total[s, v] + load_i32x16(address + (UNIT // STREAMS * s + 64 * v))
            address += 64 * VECTORS
        for s in static_range(STREAMS):
            for v in static_range(VECTORS - 1):
                total[s, 0] = total[s, 0] + total[s, v + 1]
        for s in static_range(STREAMS - 1):
            total[0, 0] = total[0, 0] + total[s + 1, 0]
        store_i32(sums + 4 * unit, sum_int_lanes(total[0, 0]))


@kernel
def multiply_rows(begin, end, weights, x, y):
    """Multiply units of sixteen rows, in ``N_TILES`` tiles, with one token, in the same way as `matmul_quantised`."""
    sums, slab = stack(2 * REST_SUMS), stack(SLAB * BLOCK_BYTES)
    for unit in range(begin, end):
        few_tokens(1, weights + unit * (N_TILES * TILE_BYTES), N_TILES, slab, x, sums)
        store_f32x16(y + 64 * unit, load_f32x16(sums))


@kernel
def flush_words(begin, end, data):
    """Flush units of ``UNIT`` bytes from all caches, if the processor allows this for user programs."""
    for line in range(begin * (UNIT // 64), end * (UNIT // 64)):
        flush_line(data + 64 * line)


@kernel
def copy_through_frame(begin, end, source, target):
    """Copy units of ``FRAME`` bytes through the stack, in a frame of several pages."""
    frame = stack(FRAME)
    for unit in range(begin, end):
        for i in range(FRAME // 64):
            store_i8x64(frame + 64 * i, load_i8x64(source + unit * FRAME + 64 * i))
        for i in range(FRAME // 64):
            store_i8x64(target + unit * FRAME + 64 * i, load_i8x64(frame + 64 * i))


@device
def dot32_s8_of_sum_0(total, w0, w1, w2, w3, w4, w5, w6, w7, x):
    """`dot32_s8` for activations whose sum is 0."""
    return dot32_s8(total, w0, w1, w2, w3, w4, w5, w6, w7, x, zero_i32x16())


#: Dot products by the bits of the codes.  8-bit codes are signed.
DOTS = {4: dot32_u4, 5: dot32_u5, 6: dot32_u6, 8: dot32_s8_of_sum_0}


@kernel
def multiply_integers(begin, end, weights, x, sums):
    """Compute ``ROUNDS * CHAINS`` products of 16 rows and 32 columns per unit.

    weights: codes, eight vectors of bytes.  x: int8 [PERIOD, CHAINS, 32]; each 32 values have the sum 0.  sums:
    int32, one per unit.  DOT: one of `DOTS`.
    """
    for v in static_range(8):
        w[v] = load_i8x64(weights + 64 * v)
    for unit in range(begin, end):
        for c in static_range(CHAINS):
            total[c] = zero_i32x16()
        for i in range(ROUNDS):
            row = x + i % PERIOD * (32 * CHAINS)
            for c in static_range(CHAINS):
                total[c] = DOT(total[c], *w[0:8], row + 32 * c)
        for c in static_range(CHAINS - 1):
            total[0] = total[0] + total[c + 1]
        store_i32(sums + 4 * unit, sum_int_lanes(total[0]))


@kernel
def multiply_floats(begin, end, weights, x, sums):
    """Compute ``ROUNDS * CHAINS`` fused multiply-adds of 16 lanes per unit.

    weights: float32 [CHAINS, 16].  x: float32 [PERIOD].  sums: float32, one per unit.
    """
    for c in static_range(CHAINS):
        w[c] = load_f32x16(weights + 64 * c)
    for unit in range(begin, end):
        for c in static_range(CHAINS):
            total[c] = zero_f32x16()
        for i in range(ROUNDS):
            value = load_splat_f32(x + i % PERIOD * 4)
            for c in static_range(CHAINS):
                total[c] = fma(w[c], value, total[c])
        for c in static_range(CHAINS - 1):
            total[0] = total[0] + total[c + 1]
        store_f32(sums + 4 * unit, sum_lanes(total[0]))


def timed(
    workers: Workers,
    code: Variant,
    arrays: Mapping[str, NDArray[np.generic]],
    n_units: int,
    progress: Callable[[int, int], None] | None,
    n_passes: int = 1,
) -> Callable[[int | None], float]:
    """Return a function that runs a kernel ``n_passes`` times on all or some threads, and returns the seconds."""
    arguments = code.kernel.arguments(**{name: array.ctypes.data for name, array in arrays.items()})
    instruction = Instruction(code, arguments, n_units, 0, wait=False)
    program = Program([instruction] * n_passes, np.ones(1, np.int64), code.target, arrays, progress)

    def seconds(threads: int | None = None) -> float:
        begin = time.perf_counter()
        program.run(workers, threads=threads)
        return time.perf_counter() - begin

    return seconds


class ReadTest:
    """Reads a buffer from memory, or from the caches that it fits.

    The buffer has the size of the judged code's data (``n_bytes``), so that the same caches serve both.
    """

    def __init__(
        self, workers: Workers, target: Target, n_bytes: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        n_units = max(1, -(-n_bytes // UNIT))
        self.data, self._sums = aligned_zeros(n_units * UNIT // 4, np.uint32), np.zeros(n_units, np.uint32)
        # Pages that were never written share one physical page.
        self.data.reshape(n_units, -1)[:] = np.arange(UNIT // 4, dtype=np.uint32)
        n_passes = -(-MIN_READ // self.data.nbytes)
        self._n_bytes = n_passes * self.data.nbytes
        arrays = {"data": self.data, "sums": self._sums}
        self._seconds = timed(workers, variant(read_words, target), arrays, n_units, progress, n_passes)

    def bandwidth(self) -> float:
        """Measure the bandwidth in bytes per second."""
        return self._n_bytes / self._seconds(None)

    def total(self) -> int:
        """Return the sum of the buffer's words modulo 2^32, as read by the last measurement."""
        return int(self._sums.sum(dtype=np.uint32))


class DecodeTest:
    """Multiplies a matrix in Q4_K with one token, as decoding does.

    The matrix is flushed from all caches before each measurement, which therefore reads memory for any cache size
    (not on Arm).  ``n_bytes``: size of the matrix.
    """

    def __init__(
        self, workers: Workers, target: Target, n_bytes: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        layout = LAYOUTS[GGMLType.Q4_K]
        n_tiles, blocks = DECODED_COLUMNS // layout.columns, layout.columns // 32
        row_bytes = n_tiles * layout.tile_bytes  # bytes of sixteen rows
        n_units = max(1, n_bytes // row_bytes)
        self.weights = aligned_zeros(-(-n_units * row_bytes // UNIT) * UNIT, np.uint8)
        self.weights[:] = 0x11  # pages that were never written share one physical page
        self.x = aligned_zeros(x_tile_bytes.function(n_tiles * blocks), np.uint8)
        self.y = np.zeros(16 * n_units, np.float32)
        constants = {"TILE_BYTES": layout.tile_bytes, "BLOCKS": blocks, **TILES[GGMLType.Q4_K].constants}
        code = variant(multiply_rows, target, N_TILES=n_tiles, **constants)
        self._n_bytes, arrays = n_units * row_bytes, {"weights": self.weights, "x": self.x, "y": self.y}
        self._seconds = timed(workers, code, arrays, n_units, progress)
        n_flushed = len(self.weights) // UNIT
        self._flush = timed(workers, variant(flush_words, target), {"data": self.weights}, n_flushed, progress)

    def bandwidth(self, threads: int | None = None) -> float:
        """Measure the bandwidth in bytes of weights per second, with all threads or with ``threads`` threads."""
        self._flush(None)
        return self._n_bytes / self._seconds(threads)


def frames_work(workers: Workers, target: Target, progress: Callable[[int, int], None] | None = None) -> bool:
    """Return whether kernels can have frames of several pages, which need special code on Windows and Arm."""
    source = np.arange(workers.n * FRAME // 4, dtype=np.uint32)
    copied = np.zeros_like(source)
    arrays = {"source": source, "target": copied}
    timed(workers, variant(copy_through_frame, target), arrays, workers.n, progress)(None)
    return bool((source == copied).all())


class MultiplyTest:
    """Multiplies codes of ``bits`` bits (`DOTS`) with bytes, or float32, in registers and the first-level cache."""

    def __init__(
        self,
        workers: Workers,
        target: Target,
        *,
        bits: int | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        n_units = UNITS * workers.n
        self.sums: NDArray[np.generic]  # sum of each unit of work in the last measurement
        if bits is None:
            self.chains = 10 if target.wide else 5
            self.weights = np.arange(1, self.chains * LANES + 1, dtype=np.float32)
            self.x = np.arange(-PERIOD // 2 + 1, PERIOD // 2 + 1, dtype=np.float32)
            code, self.sums = variant(multiply_floats, target, CHAINS=self.chains), np.zeros(n_units, np.float32)
        else:
            self.chains = 12 if target.wide else 4  # a product waits four or five cycles for the sum before
            self.weights = (np.arange(512) % (1 << bits)).astype(np.uint8).view(np.int8)
            half = (np.arange(PERIOD * self.chains * 16) % 255 - 127).astype(np.int8).reshape(-1, 16)
            self.x = np.concatenate([half, -half], axis=1)  # each 32 values have the sum 0
            code = variant(multiply_integers, target, CHAINS=self.chains, DOT=DOTS[bits])
            self.sums = np.zeros(n_units, np.int32)
        self._n_products = n_units * ROUNDS * self.chains * (LANES if bits is None else LANES * 32)
        arrays = {"weights": self.weights, "x": self.x, "sums": self.sums}
        self._seconds = timed(workers, code, arrays, n_units, progress)

    def rate(self) -> float:
        """Return multiply-adds per second: the best of several new measurements."""
        return self._n_products / min(self._seconds(None) for _ in range(MULTIPLY_TRIES))


class Roofline:
    """Performance limits of this machine for a number of threads; a context manager."""

    def __init__(
        self,
        threads: int,
        target: Target | None = None,
        n_bytes: int = 1 << 28,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.target = target or choose()
        self._workers = Workers(threads)
        self._progress = progress
        self._read = ReadTest(self._workers, self.target, n_bytes, progress)
        self._multiply: dict[int | None, MultiplyTest] = {}

    def read_bandwidth(self) -> float:
        """Measure the memory bandwidth of the threads in bytes per second."""
        return max(self._read.bandwidth() for _ in range(READ_TRIES))

    def dot_rate(self, bits: int = 4) -> float:
        """Measure the products of bytes, each added to a sum, per second.

        ``bits`` is the width of the weights' codes, one of `DOTS`.  Processors without an instruction for the whole
        dot
        product need more instructions for wider codes: the rate is highest for four bits.
        """
        return self._rate(bits)

    def fma_rate(self) -> float:
        """Measure the products of float32, each added to a sum, per second."""
        return self._rate(None)

    def _rate(self, bits: int | None) -> float:
        if bits not in self._multiply:  # compiled on first use, because no caller needs all kernels
            self._multiply[bits] = MultiplyTest(self._workers, self.target, bits=bits, progress=self._progress)
        return self._multiply[bits].rate()

    def close(self) -> None:
        self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
