"""A backend that computes after it was called, as a GPU does, for the tests of pipelining."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.ops import Batch, Hidden, HostHidden, Part
from localllm.kernels.reference import ReferenceOps


@dataclass(frozen=True)
class LaterHidden:
    """What a part will end with, in an array of its own; the next part of the kind waits for it on its thread."""

    future: Future[NDArray[np.float32]]

    def host(self) -> NDArray[np.float32]:
        return self.future.result(timeout=60)


class AsynchronousOps(ReferenceOps):
    """The reference, on a thread of its own.

    Attributes:
        before: called on that thread with each batch before it is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1)
        self.before: Callable[[Batch], object] = lambda batch: None

    def compile_part(self, *arguments: Any, **keywords: Any) -> Part:
        part = super().compile_part(*arguments, **keywords)

        def compute(batch: Batch, hidden: Hidden | None) -> NDArray[np.float32]:
            self.before(batch)
            return part(batch, None if hidden is None else HostHidden(hidden.host())).host()

        def later(batch: Batch, hidden: Hidden | None) -> LaterHidden:
            if hidden is not None and not isinstance(hidden, LaterHidden):
                hidden = HostHidden(hidden.host().copy())  # which will be overwritten
            return LaterHidden(self._thread.submit(compute, batch, hidden))

        return later

    def close(self) -> None:
        self._thread.shutdown()
