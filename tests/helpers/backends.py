"""Backends for the tests of operations.  To test a new backend, add an entry to `BACKENDS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.errors import DeviceError
from localllm.kernels.cpu.cache_types import layouts_of
from localllm.kernels.cpu.target import Target, available
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.cupy_driver import open_driver
from localllm.kernels.cuda.driver import Driver
from tests.cuda_on_cpu import build, nvrtc
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.helpers.recorder import CPUOps, Ops, ReferenceOps


@dataclass(frozen=True)
class Backend:
    """A backend under test.

    Attributes:
        make: creates the backend's operations.
        spoil: fills every key and value of a cache with NaN.
        head_dims: head sizes to test.  Backends that compile a kernel for each size list only a few.
        scaled_head_dims: the same for a cache whose values have scales.
        large_head_dim: the largest size, tested with soft-cap and sinks.
        is_exact: whether linear operations use unrounded activations instead of 8-bit ones.
        half_error: error bound of products with float16 weights, in units of the sum of magnitudes.
        table_error: error bound of embedding rows in a format that kernels cannot read.
        attention_error: error bound of attention over values of about 1.
        is_slow: whether to skip long tests that check little more.
    """

    name: str
    make: Callable[[], Ops]
    spoil: Callable[[Any], None]
    head_dims: tuple[int, ...]
    scaled_head_dims: tuple[int, ...]
    large_head_dim: int
    is_exact: bool = False
    half_error: float = 1e-6
    table_error: float = 1e-6
    attention_error: float = 0.0
    is_slow: bool = False


#: CUDA attention, like FlashAttention, rounds weights to float16 (by at most 2**-11 each) and sums in float32.
ATTENTION_ERROR = 5e-4

ALL_HEAD_DIMS = (8, 16, 64, 80, 96, 128, 256)


def _spoil_reference(cache: Any) -> None:
    for parts in cache.layers.values():
        for part in parts:
            part[:] = np.nan


def _spoil_cpu(cache: Any) -> None:
    """Spoil everything except head padding, which stays zero: kernels rely on that."""
    for layer, parts in cache.blocks().items():
        kept = cache.layers[layer]
        for i, (blocks, layout, dim) in enumerate(
            zip(parts, layouts_of(kept), (kept.key_dim, kept.value_dim), strict=True)
        ):
            if layout.per_scale:
                blocks[..., : layout.scale_bytes(dim)] = 0xFF
            elif i == 0 and not kept.values_in_keys:
                halves = blocks.view(np.uint16).reshape(*blocks.shape[:2], layout.head(dim), -1)
                halves[:, :, :dim] = 0x7E00
            elif blocks.size:
                halves = blocks.view(np.uint16).reshape(*blocks.shape[:2], -1, layout.head(dim))
                halves[..., :dim] = 0x7E00


def shared_by_threads(ops: CPUOps) -> CPUOps:
    """Make threads share even the smallest step."""
    ops.backend.small_step = 0
    return ops


def _cpu(target: Target) -> Backend:
    """Return a backend with head sizes that need padding, fill vectors, or fill an odd number of vectors."""
    make = lambda: shared_by_threads(CPUOps(threads=2, isa=target.name))  # noqa: E731
    return Backend(f"cpu-{target.name}", make, _spoil_cpu, (8, 16, 80), (8, 80), 256)


def _spoil_cuda(cache: Any) -> None:
    """Set float16 values and scales to NaN; see `_spoil_cpu`."""
    for layer, layout in cache.layouts.items():
        kept = layout.cache
        for i, dim in enumerate((kept.key_dim,) if kept.values_in_keys else (kept.key_dim, kept.value_dim)):
            has_scales = layout.groups[i] > 0
            memory = cache.part(layer, i + 2 if has_scales else i)
            halves = np.full(memory.n_bytes // 2, 0x7E00, np.uint16)
            if not has_scales:
                halves.reshape(-1, layout.heads[i])[:, dim:] = 0
            cache.driver.upload(memory, halves, cache.stream)
            cache.driver.synchronize(cache.stream)


def emulated_cuda(driver: EmulatedDriver | None = None, device: int = 0) -> CUDABackend:
    """Return the emulated CUDA backend.  Products take few rows at once, because g++ compiles larger tiles slowly."""
    return CUDABackend(driver or EmulatedDriver(), device, compiles_ahead=False, tile_rows=(32,), chunk_bytes=1 << 16)


def no_harness() -> str | None:
    """Return why the CUDA backend cannot be emulated on this machine, or None if it can."""
    return nvrtc.missing() or build.missing()


def _cuda() -> Iterator[Backend]:
    """Yield the CUDA backend: emulated with few head sizes, and on a real device if available."""
    # Activations and the scales of repacked tables are rounded to float16 too.
    error = 2**-11
    if no_harness() is None:
        emulated = lambda: Ops(emulated_cuda())  # noqa: E731
        sizes = (16,), (16,), 16
        yield Backend(
            "cuda-emulated", emulated, _spoil_cuda, *sizes, False, error, error, ATTENTION_ERROR, is_slow=True
        )
    try:
        driver: Driver = open_driver()
    except DeviceError:
        return
    make = lambda: Ops(CUDABackend(driver, 0))  # noqa: E731
    yield Backend("cuda", make, _spoil_cuda, ALL_HEAD_DIMS, ALL_HEAD_DIMS, 256, False, error, error, ATTENTION_ERROR)


BEST, *OTHERS = available()
BACKENDS = [
    Backend("reference", ReferenceOps, _spoil_reference, ALL_HEAD_DIMS, ALL_HEAD_DIMS, 256, is_exact=True),
    _cpu(BEST),
    *_cuda(),
]
NARROW = [target for target in OTHERS if not target.wide]
#: The CPU backend for other instruction sets: the best with narrower vectors, and the baseline.  These run fewer
#: tests, because kernels are compiled for each.
OTHER_CPUS = [_cpu(target) for target in dict.fromkeys((NARROW[:1] if BEST.wide else []) + NARROW[-1:])]
