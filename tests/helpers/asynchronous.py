"""A backend that computes asynchronously, as a GPU does, for the tests of pipelining."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.backend import Batch, Footprint, HostOutput, Output, Step
from localllm.kernels.reference import ReferenceBackend


@dataclass(frozen=True)
class LaterOutput(Output):
    """Output of a pending step, with a private array; the next step waits for it on its thread."""

    future: Future[NDArray[np.float32]]

    def rows(self) -> NDArray[np.float32]:
        return self.future.result(timeout=60)


class LaterStep(Step):
    def __init__(self, backend: AsynchronousBackend, step: Step) -> None:
        self.backend, self.step, self.cache, self.weights = backend, step, step.cache, step.weights

    def run(self, batch: Batch, hidden: Output | None = None) -> Output:
        if hidden is not None and not isinstance(hidden, LaterOutput):
            hidden = HostOutput(hidden.rows().copy())  # the caller overwrites these rows

        def compute() -> NDArray[np.float32]:
            self.backend.before(batch)
            return self.step.run(batch, hidden).rows()

        return LaterOutput(self.backend.thread.submit(compute))


class AsynchronousBackend(ReferenceBackend):
    """Reference backend that computes on a separate thread.

    Attributes:
        before: called on that thread with each batch before it is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = ThreadPoolExecutor(1)
        self.before: Callable[[Batch], object] = lambda batch: None

    def footprint(self, *arguments: Any, **keywords: Any) -> Footprint:
        found = super().footprint(*arguments, **keywords)
        return replace(found, load=lambda progress: LaterStep(self, found.load(progress)))

    def close(self) -> None:
        self.thread.shutdown()
