"""Mistakes planted in attention, append and the norm: each must be caught, by its results or in check mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.kernels.cuda.attention import Heads, Variant, choose_variant
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
from tests.kernels.cuda.test_attention import Talk, smallest
from tests.kernels.cuda.test_elementwise import norm_inputs, random, row_launch

Array = NDArray[Any]
#: Small: two warps, and rows enough for two tiles.
VARIANT = replace(choose_variant(8, "f16", 99 << 10), warps=2)
#: The smallest, which fetch nothing ahead: without scales, and with.
SMALL, WIDENED = smallest(VARIANT), smallest(choose_variant(8, "q8_0", 99 << 10))
LENGTHS = ((20, 330), (1, 70))
HEADS = Heads(1, 2, 300)

BARRIERS = frozenset({"barrier"})
ORDERING = BARRIERS | {"wait"}
ALL = ORDERING | {"operands", "fragments"}


def split(device: Device, variant: Variant = VARIANT) -> Array:
    talk = Talk(device, variant, LENGTHS, HEADS)
    return talk.run(talk.work_of_bucket())


def prefill(device: Device, variant: Variant = VARIANT) -> Array:
    talk = Talk(device, variant, LENGTHS, HEADS)
    return talk.run(talk.work(0))


def append(device: Device) -> Array:
    rope = Rope(np.array([0.7, 0.01], np.float32), False, 1.3)
    out = Written(device, 24, "q8_0", rope, heads_of(24), (random(24, seed=1), random(24, seed=2)))
    return np.concatenate([out.q.view(np.uint8).ravel(), out.memory])


def norm(device: Device) -> Array:
    return row_launch(device, "rms_norm", 3, 2176, norm_inputs(device, random(3, 2176), random(2176), 1e-6), True)


@dataclass(frozen=True)
class Case:
    """A kernel, the macros of its module, what it is judged by, and the kinds of mistakes that are planted."""

    kernel: str
    module: str
    defines: Defines
    run: Callable[[Device], Array]
    kinds: frozenset[str]


CASES = {
    "split": Case("attention_split", "attention", VARIANT.defines, split, ALL),
    "split small": Case("attention_split", "attention", SMALL.defines, partial(split, variant=SMALL), ORDERING),
    "split widened": Case("attention_split", "attention", WIDENED.defines, partial(split, variant=WIDENED), BARRIERS),
    "prefill": Case("attention_prefill", "attention", VARIANT.defines, prefill, ALL),
    "prefill widened": Case(
        "attention_prefill", "attention", WIDENED.defines, partial(prefill, variant=WIDENED), BARRIERS
    ),
    "rope_append": Case("rope_append", "append", {"HEAD_DIM": 24, "Q8_0": 1}, append, BARRIERS | {"operands"}),
    "rms_norm": Case("rms_norm", "elementwise", {}, norm, BARRIERS | {"operands"}),
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


def ptx_of(name: str) -> str:
    case = CASES[name]
    options = ("--std=c++17", *(f"-D{key}={value}" for key, value in case.defines.items()))
    return nvrtc.compile_ptx(flat_source(case.module), 80, options, f"{case.module}.cu")


def mutations(name: str) -> list[mutate.Mutation]:
    """All barriers and waits; and one of each other kind that is wanted."""
    found = mutate.mutations(ptx_of(name), CASES[name].kernel)
    chosen = [m for m in found if m.kind in ORDERING]
    for kind in CASES[name].kinds - ORDERING:
        chosen += [m for m in found if m.kind == kind][:1]
    return chosen


@functools.cache
def right(name: str) -> Array:
    return CASES[name].run(Device(EmulatedDriver()))


def is_caught(name: str, ptx: str) -> bool:
    case = CASES[name]
    for order in (Order(), Order("reverse", "early")):
        try:
            out = case.run(Device(MutatedDriver(case.module, ptx, order)))
        except KernelFault:
            return True
        if not np.array_equal(out, right(name), equal_nan=out.dtype.kind == "f"):
            return True
    return False


@pytest.mark.parametrize("name", CASES)
def test_mistakes_are_caught(name: str) -> None:
    if reason := nvrtc.missing() or build.missing():
        pytest.skip(reason)
    chosen = mutations(name)
    assert {m.kind for m in chosen} == CASES[name].kinds
    assert not is_caught(name, ptx_of(name))
    missed = [m.description for m in chosen if not is_caught(name, m.ptx)]
    assert not missed
