"""Predicted speed of a model before it is loaded: the work of its graph, at rates measured on this machine.

Reads the header of the file, and no weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from localllm.engine.engine import STEP_S
from localllm.engine.runner import max_step_tokens
from localllm.engine.scheduler import MIN_CHUNK_ALONE
from localllm.errors import DeviceError
from localllm.gguf import GGUFFile
from localllm.kernels.cpu.backend import CPUBackend
from localllm.kernels.cpu.costs import costs
from localllm.kernels.cpu.rates import CPURates, disk_rate
from localllm.kernels.cpu.target import choose
from localllm.kernels.cpu.thread_choice import choose_threads, known_threads
from localllm.kernels.graph import Graph
from localllm.kernels.split import graph_part
from localllm.loading.placement import Placement
from localllm.models.registry import read_model

if TYPE_CHECKING:
    from localllm.kernels.cuda.driver import Driver

#: Seconds of Python for each generated token, in addition to the step.
PYTHON_S = 300e-6
#: Tokens of the prompt in a summary, and tokens before generated tokens, as far as the context reaches.
PROMPT, DEPTHS = 512, (0, 4096, 32_768)


class _DevicePart(Protocol):
    """Layers on one device."""

    step_tokens: int  # maximum tokens of a step

    def seconds(self, n_tokens: int, depth: int, n_outputs: int) -> float | None:
        """Return the seconds of a step of ``n_tokens`` tokens after ``depth`` tokens; None if a rate is missing."""


@dataclass(frozen=True)
class _CPUPart:
    graph: Graph
    rates: CPURates
    step_tokens = CPUBackend.step_tokens

    def seconds(self, n_tokens: int, depth: int, n_outputs: int) -> float | None:
        return self.rates.seconds(costs(self.graph, n_tokens, depth, n_outputs), is_rough=n_tokens == 1)


class _GPUPart:
    """Layers on a GPU, whose copies and products were timed, but no kernel of the model.

    Args:
        graph: the layers.
        device: number of the GPU.
        context: maximum tokens of a sequence.
    """

    def __init__(self, graph: Graph, driver: Driver, device: int, context: int) -> None:
        # Imported here because most machines have no GPU.
        from localllm.kernels.cuda.backend import CUDABackend
        from localllm.kernels.cuda.prediction import DeviceRates, planned_step
        from localllm.kernels.cuda.roofline import CUDARoofline

        backend = CUDABackend(driver, device)
        self.step_tokens = CUDABackend.step_tokens
        self._graph, self._properties = graph, driver.properties(device)
        self._step = planned_step(backend, graph, context, max_step_tokens(graph, context, self.step_tokens))
        backend.close()
        self._rates = DeviceRates.measured(CUDARoofline(driver, device))

    def seconds(self, n_tokens: int, depth: int, n_outputs: int) -> float | None:
        from localllm.kernels.cuda.prediction import HANDOVER, one_sequence, predicted

        batch = one_sequence(self._graph, n_tokens, depth, n_outputs)
        calls = predicted(self._step, batch, self._properties, self._rates)
        return HANDOVER + sum(cost.seconds for cost in calls.values())


@dataclass(frozen=True)
class Predictor:
    """Predicts the time of a model's steps.

    On the CPU, from the rates of the model's kernels on this machine. On GPUs, from the speed of copies and products.
    """

    graph: Graph
    placement: Placement
    parts: tuple[_DevicePart, ...]  # in execution order
    disk: float = 0.0  # bytes per second of reading experts that stay in the file

    @classmethod
    def of(cls, path: Path, placement: Placement, threads: int | None = None, **options: Any) -> Self | None:
        """Return a predictor for a file.

        None for the reference, for layers that several devices share, and for models whose prompts an encoder reads.

        Measures the rates that are not known, in a few seconds.

        Args:
            threads: see `CPUBackend`; defaults to the threads that loading chooses.
            options: further arguments of `known`.
        """
        known = all(re.fullmatch(r"cpu|cuda:\d+", device) for device in placement.devices)
        if not known or any(group.is_offloaded for group in placement.groups):
            return None
        if threads is None and "cpu" in placement.devices:  # measured once per machine
            choose_threads(choose(options.get("isa")), options.get("progress"))
        with GGUFFile.open(path) as file:
            graph = read_model(file, placement.context, placement.cache_type).graph
        if graph.prompt is not None:
            return None
        if placement.devices == ("cpu",):
            predictor = cls.known(graph, placement, threads, **options)
        else:
            predictor = cls._of_gpus(graph, placement, threads, **options)
        for part in () if predictor is None else predictor.parts:
            if isinstance(part, _CPUPart):
                part.rates.measure(costs(part.graph, 1, 0))
        return replace(predictor, disk=disk_rate(path)) if predictor and placement.pool else predictor

    @classmethod
    def _of_gpus(cls, graph: Graph, placement: Placement, threads: int | None, **options: Any) -> Self | None:
        from localllm.kernels.cuda.cupy_driver import open_driver

        driver, parts = open_driver(), list[_DevicePart]()
        for group in placement.groups:
            if not group.layers:  # the embedding or output of a part
                continue
            part = graph_part(graph, group.layers)
            if group.device != "cpu":
                try:
                    parts.append(_GPUPart(part, driver, int(group.device.partition(":")[2]), placement.context))
                except DeviceError:  # no memory is left for a measurement, or the compiler is missing
                    return None
            elif (rates := _cpu_rates(part, placement, threads, **options)) is not None:
                parts.append(_CPUPart(part, rates))
            else:
                return None
        return cls(graph, placement, tuple(parts))

    @classmethod
    def known(cls, graph: Graph, placement: Placement, threads: int | None = None, **options: Any) -> Self | None:
        """Return a predictor that measures nothing; None if the number of threads is not known.  See `of`.

        Args:
            options: further arguments of `_cpu_rates`.
        """
        if placement.devices != ("cpu",) or graph.prompt is not None:
            return None
        rates = _cpu_rates(graph, placement, threads, **options)
        return None if rates is None else cls(graph, placement, (_CPUPart(graph, rates),))

    def step_tokens(self, depth: int) -> int:
        """Return the tokens of a prompt that an engine evaluates in a step; see `localllm.engine.scheduler`."""
        step_tokens = min(part.step_tokens for part in self.parts)
        most = max_step_tokens(self.graph, self.placement.context, step_tokens)
        if self.placement.pool or not self.graph.is_causal:
            return most
        n = least = min(most, MIN_CHUNK_ALONE)
        for _ in range(4):  # a longer step takes less time per token, so the engine chooses an even longer step
            seconds = self.step_s(n, depth) or math.inf
            n = max(least, min(most, int(n * STEP_S / seconds)))
        return n

    def step_s(self, n_tokens: int, depth: int, n_outputs: int = 1) -> float | None:
        """Return the seconds of a step of ``n_tokens`` tokens after ``depth`` tokens; None if a rate is missing."""
        times = [part.seconds(n_tokens, depth, n_outputs) for part in self.parts]
        if None in times:
            return None
        seconds = sum(time for time in times if time is not None)
        if not self.placement.pool:
            return seconds
        if not self.disk:
            return None
        read_s = self._read_bytes(n_tokens) / self.disk
        # A prompt computes long enough to read the next layer's experts ahead.
        return seconds + read_s if n_tokens == 1 else max(seconds, read_s)

    def _read_bytes(self, n_tokens: int) -> float:
        """Return the bytes of experts that a step reads from the file, if all experts are equally likely.

        A step that uses more experts than memory holds finds no expert there: each was dropped for a later one.
        """
        n_bytes, pool = self.placement.experts_in_file, self.placement.pool
        used = (1 - (1 - self.placement.used_experts) ** n_tokens) * n_bytes
        return used if used > pool else used * (1 - pool / n_bytes)

    def prompt_s(self, n_tokens: int, depth: int = 0) -> float | None:
        """Return the seconds from a request to its first token, for a prompt after ``depth`` tokens in the cache."""
        total = PYTHON_S
        size = self.step_tokens(depth + n_tokens // 2)
        for first in range(0, n_tokens, size):
            n = min(size, n_tokens - first)
            seconds = self.step_s(n, depth + first, first + n == n_tokens)
            if seconds is None:
                return None
            total += seconds
        return total

    def decode_s(self, depth: int) -> float | None:
        """Return the seconds per generated token after ``depth`` tokens."""
        seconds = self.step_s(1, depth)
        return None if seconds is None else seconds + PYTHON_S

    def speed(self) -> dict[str, Any] | None:
        """Return a summary as JSON values; None if a rate is not known."""
        n_prompt = min(PROMPT, self.placement.context)
        depths = [depth for depth in DEPTHS if depth < self.placement.context] if self.graph.is_causal else []
        first_token_s, token_s = self.prompt_s(n_prompt), {depth: self.decode_s(depth) for depth in depths}
        if first_token_s is None or None in token_s.values():
            return None
        return {
            "kernels_measured": all(isinstance(part, _CPUPart) for part in self.parts),
            "prompt_tokens": n_prompt,
            "first_token_s": first_token_s,
            "decode": [{"depth": depth, "tokens_per_s": 1 / s} for depth, s in token_s.items() if s is not None],
        }


def _cpu_rates(
    graph: Graph,
    placement: Placement,
    threads: int | None = None,
    decode_threads: int | None = None,
    isa: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CPURates | None:
    """Return the CPU's rates for a graph; None if the number of threads is not known.

    Args:
        decode_threads: threads for generating tokens; defaults to ``threads``.
        progress: called with the numbers of compiled kernels and of kernels to compile.
    """
    target = choose(isa)
    if threads is None:
        if (choice := known_threads(target)) is None:
            return None
        threads, decode_threads = choice.cores, choice.decode
    n_products = sum(cost.per_row for cost in costs(graph, 1, 0) if cost.is_product)
    if n_products < CPUBackend.small_step:
        decode_threads = 1
    return CPURates(target, threads, decode_threads or threads, placement.multiplied, progress)
