"""Matrices that the host multiplies for layers on a GPU: rules for names of tensors, as in llama.cpp."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from localllm.kernels.graph import Weight

#: Names of the matrices of routed experts, without the prefix of the layer.
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
_LAYER = re.compile(r"blk\.([0-9]+)\.")


@dataclass(frozen=True)
class Overrides:
    """Rules for matrices of layers on GPUs. The first rule that matches a matrix counts.

    Attributes:
        rules: "PATTERN=CPU" or "PATTERN=CUDA0"; patterns are regular expressions. A matrix with a rule for a GPU is
            on the GPU of its layer.
        n_layers: number of first layers whose routed experts are on the host; None for all layers.
    """

    rules: tuple[str, ...] = ()
    n_layers: int | None = 0

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], bool]]:
        pairs = (rule.split("=", 1) for rule in self.rules)
        return [(re.compile(pattern), device == "CPU") for pattern, device in pairs]

    def __bool__(self) -> bool:
        return bool(self.rules) or self.n_layers != 0

    def is_on_host(self, weight: Weight) -> bool:
        for pattern, is_on_host in self._patterns:
            if pattern.search(weight.name):
                return is_on_host
        if not _EXPERTS.search(weight.name) or (layer := _LAYER.match(weight.name)) is None:
            return False
        return self.n_layers is None or int(layer[1]) < self.n_layers


#: All matrices are on the device of their layer.
NO_OVERRIDES = Overrides()
