"""Mistakes planted in attention, append and the norm: each must be caught, by its results or in check mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.kernels.cuda.attention import Heads, choose_variant
from localllm.kernels.cuda.driver import Defines
from localllm.kernels.cuda.module import flat_source
from localllm.kernels.ops import Rope
from tests.cuda_on_cpu import build, mutate, nvrtc
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.emulated_kernels import Kernels, TranslatedKernels
from tests.cuda_on_cpu.errors import KernelFault
from tests.cuda_on_cpu.module import Order
from tests.kernels.cuda.device import Device
from tests.kernels.cuda.test_append import Written, heads_of
from tests.kernels.cuda.test_attention import Talk
from tests.kernels.cuda.test_elementwise import norm_inputs, random, row_launch

Array = NDArray[Any]
#: Small: two warps, and rows enough for two tiles.
VARIANT = replace(choose_variant(8, "f16", 99 << 10), warps=2)
LENGTHS = ((20, 330), (1, 70))
HEADS = Heads(1, 2, 300)


def split(device: Device) -> Array:
    talk = Talk(device, VARIANT, LENGTHS, HEADS)
    return talk.run(talk.work_of_bucket())


def prefill(device: Device) -> Array:
    talk = Talk(device, VARIANT, LENGTHS, HEADS)
    return talk.run(talk.work(0))


def append(device: Device) -> Array:
    rope = Rope(np.array([0.7, 0.01], np.float32), False, 1.3)
    out = Written(device, 24, "q8_0", rope, heads_of(24), (random(24, seed=1), random(24, seed=2)))
    return np.concatenate([out.q.view(np.uint8).ravel(), out.memory])


def norm(device: Device) -> Array:
    return row_launch(device, "rms_norm", 3, 2176, norm_inputs(device, random(3, 2176), random(2176), 1e-6), True)


@dataclass(frozen=True)
class Case:
    """A kernel, the macros of its module, and what it is judged by."""

    module: str
    defines: Defines
    run: Callable[[Device], Array]


CASES = {
    "attention_split": Case("attention", VARIANT.defines, split),
    "attention_prefill": Case("attention", VARIANT.defines, prefill),
    "rope_append": Case("append", {"HEAD_DIM": 24, "Q8_0": 1}, append),
    "rms_norm": Case("elementwise", {}, norm),
}


class MutatedDriver(EmulatedDriver):
    """With one module's PTX replaced."""

    def __init__(self, module: str, ptx: str, order: Order) -> None:
        super().__init__(mode="check", kernel_order=order)
        self._mutated, self._ptx, self._order = module, ptx, order

    def _kernels(self, name: str, defines: Defines) -> Kernels:
        if name == self._mutated:
            return TranslatedKernels(self._ptx, "check", self._order)
        return super()._kernels(name, defines)


def ptx_of(kernel: str) -> str:
    case = CASES[kernel]
    options = ("--std=c++17", *(f"-D{key}={value}" for key, value in case.defines.items()))
    return nvrtc.compile_ptx(flat_source(case.module), 80, options, f"{case.module}.cu")


def mutations(kernel: str) -> list[mutate.Mutation]:
    """All barriers and waits; and one of each other kind."""
    found = mutate.mutations(ptx_of(kernel), kernel)
    chosen = [m for m in found if m.kind in ("barrier", "wait")]
    for kind in ("operands", "fragments"):
        chosen += [m for m in found if m.kind == kind][:1]
    return chosen


@functools.cache
def right(kernel: str) -> Array:
    return CASES[kernel].run(Device(EmulatedDriver()))


def is_caught(kernel: str, ptx: str) -> bool:
    case = CASES[kernel]
    for order in (Order(), Order("reverse", "early")):
        try:
            out = case.run(Device(MutatedDriver(case.module, ptx, order)))
        except KernelFault:
            return True
        if not np.array_equal(out, right(kernel), equal_nan=out.dtype.kind == "f"):
            return True
    return False


@pytest.mark.parametrize("kernel", CASES)
def test_mistakes_are_caught(kernel: str) -> None:
    if reason := nvrtc.missing() or build.missing():
        pytest.skip(reason)
    chosen = mutations(kernel)
    assert {"barrier", "operands"} <= {m.kind for m in chosen}
    assert ({"wait", "fragments"} <= {m.kind for m in chosen}) == kernel.startswith("attention")
    assert not is_caught(kernel, ptx_of(kernel))
    missed = [m.description for m in chosen if not is_caught(kernel, m.ptx)]
    assert not missed
