"""Mistakes planted in the kernels for matrix products: each must be caught, by its results or in check mode."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import pytest

from localllm.kernels.cuda import matmul
from localllm.kernels.cuda.driver import Defines
from localllm.kernels.cuda.matmul import PACKED_FORMATS
from localllm.kernels.cuda.module import flat_source
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu import build, mutate, nvrtc
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.emulated_kernels import Kernels, TranslatedKernels
from tests.cuda_on_cpu.errors import KernelFault
from tests.cuda_on_cpu.module import Order
from tests.helpers.blocks import random_rows, values_of
from tests.helpers.cuda_sums import product
from tests.kernels.cuda.device import Device, load, multiply

T = GGMLType

#: Of each kernel a small variant: its format, and tokens.
CASES: dict[str, tuple[GGMLType, int]] = {
    "quantise": (T.F16, 8),
    "matvec": (T.Q8_0, 1),
    "matmul_few": (T.Q4_0, 16),
    "matmul": (T.Q4_0, 40),
}
N_OUT, N_IN, TILE_ROWS = 37, 768, 16


def defines(kernel: str) -> Mapping[str, int | str]:
    type, n_tokens = CASES[kernel]
    format = PACKED_FORMATS[type]
    if kernel == "quantise":
        return matmul.quantise_launch(format, n_tokens).defines
    launch = matmul.product_launch(
        format, [N_OUT], N_IN, n_tokens, capability=(8, 0), shared_bytes=99 << 10, tile_rows=(TILE_ROWS,)
    )
    assert launch.kernel == kernel
    return launch.defines


def ptx_of(kernel: str) -> str:
    options = ("--std=c++17", *(f"-D{key}={value}" for key, value in defines(kernel).items()))
    return nvrtc.compile_ptx(flat_source(kernel), 80, options, f"{kernel}.cu")


@functools.cache
def mutations(kernel: str) -> list[mutate.Mutation]:
    """All barriers and waits; and one of each other kind."""
    found = mutate.mutations(ptx_of(kernel), kernel)
    chosen = [m for m in found if m.kind in ("barrier", "wait")]
    for kind in ("operands", "fragments"):
        chosen += [m for m in found if m.kind == kind][:1]
    return chosen


class MutatedDriver(EmulatedDriver):
    """With one module's PTX replaced."""

    def __init__(self, kernel: str, ptx: str, order: Order) -> None:
        super().__init__(mode="check", kernel_order=order)
        self._kernel, self._ptx, self._order_of_threads = kernel, ptx, order

    def _kernels(self, name: str, defines: Defines) -> Kernels:
        if name == self._kernel:
            return TranslatedKernels(self._ptx, "check", self._order_of_threads)
        return super()._kernels(name, defines)


def is_caught(kernel: str, ptx: str) -> bool:
    type, n_tokens = CASES[kernel]
    rows = random_rows(type, N_OUT, N_IN)
    x = np.random.default_rng(5).standard_normal((n_tokens, N_IN), np.float32)
    for order in (Order(), Order("reverse", "early")):
        device = Device(MutatedDriver(kernel, ptx, order), tile_rows=(TILE_ROWS,))
        try:
            y = multiply(device, x, [load(device, rows, type, N_IN)])[0]
        except KernelFault:
            return True
        if type is T.F16:
            w = values_of(rows, type)
            if not (np.abs(y - x @ w.T) < 2.0**-10 * (np.abs(x) @ np.abs(w).T)).all():
                return True
        elif not np.array_equal(y, product(rows, type, x)):
            return True
    return False


@pytest.mark.parametrize("kernel", CASES)
def test_mistakes_are_caught(kernel: str) -> None:
    if reason := nvrtc.missing() or build.missing():
        pytest.skip(reason)
    missed = [m.description for m in mutations(kernel) if not is_caught(kernel, m.ptx)]
    assert not missed


@pytest.mark.parametrize("kernel", CASES)
def test_there_are_mistakes_to_make(kernel: str) -> None:
    if reason := nvrtc.missing():
        pytest.skip(reason)
    kinds = {m.kind for m in mutations(kernel)}
    assert {"barrier", "operands"} <= kinds
    assert ("fragments" in kinds) == kernel.startswith("matmul")
    assert ("wait" in kinds) == (kernel == "matmul")


@pytest.mark.parametrize("kernel", CASES)
def test_no_mistake_is_seen_where_there_is_none(kernel: str) -> None:
    if reason := nvrtc.missing() or build.missing():
        pytest.skip(reason)
    assert not is_caught(kernel, ptx_of(kernel))
