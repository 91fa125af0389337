"""localllm through its Python API, and the ceilings for comparison."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import localllm
from localllm.bench.workload import ModelCost, Test
from localllm.gguf import GGUFFile
from localllm.kernels.cpu.roofline import DOTS, Roofline
from localllm.kernels.cpu.tiles import TILES
from localllm.kernels.graph import CacheType, Weight
from localllm.loading.model_info import ModelInfo
from localllm.quant.repack import repack_target
from tests.benchmarks.results import FLOAT_FORMATS, FLOAT_TOLERANCE, QUANTISED_TOLERANCE, Array

#: Bytes that a measurement of the bandwidth reads.
READ_BYTES = 1 << 28


class Ours:
    """A model in localllm; a context manager."""

    def __init__(
        self, path: Path, threads: int, n_tokens: int, *, parallel: int = 1, cache_type: CacheType = "f16"
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a context longer than the model was trained on
            self._llm = localllm.load(
                path, threads=threads, context=n_tokens, parallel=parallel, cache_type=cache_type
            )

    @property
    def info(self) -> ModelInfo:
        return self._llm.info

    @property
    def tolerance(self) -> float:
        """Tolerated relative error of the logits."""
        return FLOAT_TOLERANCE if self.info.file_type in FLOAT_FORMATS else QUANTISED_TOLERANCE

    def measure(self, ids: Sequence[int], n: int, *, forget: bool = True) -> tuple[float, float, list[int]]:
        """Return seconds for the uncached part of the prompt, seconds for n further tokens, and the tokens."""
        if forget:
            self._llm.forget()
        done = self._llm.generate(ids, max_tokens=n + 1, temperature=0.0, ignore_eos=True)
        return done.timings.prefill_s, done.timings.decode_s, list(done.ids[:n])

    def measure_together(self, prompts: Sequence[Sequence[int]], n: int) -> float:
        return seconds_together(self._llm, prompts, n)

    def tokenize(self, text: str) -> list[int]:
        return self._llm.tokenize(text)

    def all_logits(self, ids: Sequence[int]) -> Array:
        """Return the logits after each token: [T, n_vocab]."""
        return self._llm.logits(list(ids))

    def logits(self, ids: Sequence[int]) -> Array:
        """Return the logits after the last token, using the cache: [n_vocab]."""
        seen: list[Array] = []

        def look(_: object, logits: Array) -> Array:
            seen.append(logits.copy())
            return logits

        self._llm.generate(ids, max_tokens=1, temperature=0.0, processors=(look,))
        return seen[0]

    def close(self) -> None:
        self._llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ceilings:
    """Ceilings of this machine for a model, measured at each call; a context manager."""

    def __init__(self, info: ModelInfo) -> None:
        self._work = ModelCost.of(info)
        self._layers, self._head = products_by_bits(info.path)
        self._roofline = Roofline(info.threads, n_bytes=min(READ_BYTES, info.placement.multiplied))

    def bandwidth(self) -> float:
        """Return the bytes per second that the threads can read."""
        return self._roofline.read_bandwidth()

    def all(self, n: int) -> tuple[float, float, float]:
        """Return `prefill_seconds` of n tokens, and the bandwidth."""
        return *self.prefill_seconds(n), self.bandwidth()

    def decode_bytes(self, n: int, depth: int) -> float:
        """Return the mean bytes that a decoded token reads, for n tokens after ``depth`` others."""
        return self._work.bytes_per_token(Test("tg", n, depth))

    def cache_bytes(self, n: int, depth: int) -> float:
        """Return the bytes of the cache among `decode_bytes`."""
        return self.decode_bytes(n, depth) - self._work.weight_bytes

    def prefill_seconds(self, n: int) -> tuple[float, float]:
        """Return the seconds of the products of a prompt.

        The first value uses the peak of each product's own kind, the second the highest peak for all integer
        products.
        """
        floats = self._work.products(Test("pp", n, 0))[1] / self._roofline.fma_rate()
        work = {bits: n * self._layers[bits] + self._head[bits] for bits in DOTS}
        rates = {bits: self._roofline.dot_rate(bits) for bits in DOTS if work[bits] or bits == min(DOTS)}
        own = sum(work[bits] / rate for bits, rate in rates.items())
        highest = sum(work.values()) / max(rates.values())
        return own + floats, highest + floats

    def close(self) -> None:
        self._roofline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def seconds_together(llm: localllm.LLM, prompts: Sequence[Sequence[int]], n: int) -> float:
    """Return the seconds to generate n tokens per prompt, with one thread per prompt."""
    llm.forget()
    ready = threading.Barrier(len(prompts) + 1)

    def generate(ids: Sequence[int]) -> None:
        ready.wait()
        llm.generate(ids, max_tokens=n, temperature=0.0, ignore_eos=True)

    callers = [threading.Thread(target=generate, args=(ids,)) for ids in prompts]
    for caller in callers:
        caller.start()
    ready.wait()
    start = time.perf_counter()
    for caller in callers:
        caller.join()
    return time.perf_counter() - start


def products_by_bits(path: Path) -> tuple[Counter[int], Counter[int]]:
    """Count integer products of one token with the matrices of the layers, and with the output matrix.

    Counts are by the width of the weights' codes; see `localllm.kernels.cpu.roofline.DOTS`.
    """
    layers: Counter[int] = Counter()
    with GGUFFile.open(path) as file:
        for tensor in file.tensors.values():
            if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
                layers += _products(tensor)
        return layers, _products(file.tensors.get("output.weight", file.tensors["token_embd.weight"]))


def _products(matrix: Weight) -> Counter[int]:
    kernel_type = repack_target(matrix.type)
    if kernel_type not in TILES:
        return Counter()
    n_out, n_in = matrix.shape
    bits = max(4, TILES[kernel_type].bits)  # narrower codes take the same instructions
    return Counter({bits: n_out * n_in})
