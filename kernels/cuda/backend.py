"""CUDA backend: packs weights, creates caches, and runs the calls of a lowered graph."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.kernels.backend import Backend, Footprint, Progress, check_cache, weights_of
from localllm.kernels.cuda.cache import PAGE, CUDACache
from localllm.kernels.cuda.calls import StepLimits
from localllm.kernels.cuda.driver import CompileProgress, Driver
from localllm.kernels.cuda.lowering import CUDALowered, CUDALowering
from localllm.kernels.cuda.matmul import TILE_ROWS, ProductLimits
from localllm.kernels.cuda.roofline import Stopwatch
from localllm.kernels.cuda.step import CUDAStep, graph_bytes
from localllm.kernels.cuda.weights import CHUNK_BYTES, CUDAPackedWeights, CUDAWeightLoader
from localllm.kernels.graph import Graph

#: Bytes of a measured copy, and the number of copies.
COPIED_BYTES, COPIES = 32 << 20, 5


class CUDABackend(Backend):
    """One CUDA device.

    With ``compiles_ahead``, `compile` compiles the kernels for batches of all sizes; otherwise each kernel is
    compiled on first use.  ``tile_rows``: rows of activations per block of a matrix product, in descending order.
    """

    name = "cuda"
    page_size = PAGE
    step_tokens = 2048  # so that narrow matrices have tiles for all multiprocessors

    def __init__(
        self,
        driver: Driver,
        device: int,
        *,
        progress: CompileProgress | None = None,
        compiles_ahead: bool = True,
        tile_rows: Sequence[int] = TILE_ROWS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.driver, self.device = driver, device
        self.progress = progress
        self.compiles_ahead = compiles_ahead
        self._tile_rows = tuple(tile_rows)
        self.loader = CUDAWeightLoader(driver, device, chunk_bytes)

    def footprint(
        self, graph: Graph, *, n_pages: tuple[int, ...], max_tokens: int, max_outputs: int, n_states: int = 0
    ) -> Footprint:
        check_cache(graph, n_pages, n_states)
        weights, cache, uses = CUDAPackedWeights(self.loader), CUDACache(graph, n_pages, n_states), weights_of(graph)

        def lower(graph: Graph, n_tokens: int | None = None) -> CUDALowered:
            return CUDALowering(
                graph, weights, self.limits(graph, cache, n_tokens or max_tokens, max_outputs)
            ).lower()

        planned = lower(graph)

        def load(progress: Progress | None) -> CUDAStep:
            packed = tuple(weights.load(use, progress) for use in uses)
            self.loader.close()
            cache.allocate(self.driver, self.device)
            # Lower again: calls contain addresses of the weights, which are known only now.
            step = CUDAStep(self.driver, self.device, lower(graph), packed, weights, lower)
            if self.compiles_ahead:
                step.compile_kernels(self.progress)
            return step

        buffers = planned.arena_bytes + graph_bytes(planned)
        return Footprint(tuple(map(weights.planned, uses)), cache.layer_bytes(), buffers, load)

    def limits(self, graph: Graph, cache: CUDACache, max_tokens: int, max_outputs: int) -> StepLimits:
        properties = self.driver.properties(self.device)
        products = ProductLimits(
            properties.capability, properties.shared_bytes, self._tile_rows, properties.n_multiprocessors
        )
        return StepLimits(graph, properties, cache, max_tokens, max_outputs, products)

    def measured_copies(self) -> dict[str, float]:
        """Measure the bytes per second of copies: "memory" on the device, read and written, and "link" to it."""
        driver = self.driver
        stream = driver.stream(self.device)
        source, target = (driver.allocate(self.device, COPIED_BYTES) for _ in range(2))
        pinned = driver.pinned(COPIED_BYTES)
        driver.fill(source, 0, stream)
        stopwatch = Stopwatch(driver, stream, COPIES)
        memory_s = stopwatch.seconds(lambda: driver.copy(target, source, stream))
        link_s = stopwatch.seconds(lambda: driver.upload(source, pinned, stream))
        driver.synchronize(stream)
        return {"memory": 2 * COPIED_BYTES / memory_s, "link": COPIED_BYTES / link_s}

    def close(self) -> None:
        """Stop the threads that read files."""
        self.loader.close()
