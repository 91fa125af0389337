"""A backend whose host multiplies with some of the matrices."""

from __future__ import annotations

from typing import Any

from localllm.kernels.backend import Backend
from localllm.kernels.graph import Graph
from localllm.kernels.offload import OffloadedStep, OffloadRule, offloaded_footprint
from localllm.loading.overrides import Overrides
from tests.helpers.recorder import CPUOps

#: Routed experts of all layers.
EXPERTS = Overrides(n_layers=None)


class OffloadingBackend:
    """A device, and the CPU for the matrices that ``overrides`` selects."""

    def __init__(self, device: Backend, overrides: Overrides = EXPERTS, *, threads: int = 2) -> None:
        self.device, self.page_size = device, device.page_size
        host = CPUOps(threads=threads).backend
        host.small_step = 0  # threads share even the smallest step
        self.rule = OffloadRule(host, overrides.is_on_host)

    def compile(self, graph: Graph, **sizes: Any) -> OffloadedStep:
        step = offloaded_footprint(self.device, self.rule, graph, **sizes).load(None)
        assert isinstance(step, OffloadedStep)
        return step
