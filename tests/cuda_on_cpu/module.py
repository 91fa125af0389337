"""A PTX module that runs on the CPU: ``EmulatedModule(ptx).launch(kernel, grid, block, arguments)``.

In the mode ``fast``, kernels only compute.  In ``check``, each memory access is checked (see runtime/checker.h), and
launches must list the memory that they may access.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tests.cuda_on_cpu import build, ptx
from tests.cuda_on_cpu.errors import KernelFault, LaunchError
from tests.cuda_on_cpu.translate import KernelSignature, Planted, Site, translate

Mode = Literal["fast", "check"]
Argument = np.generic | bytes

_SCHEDULES = ("forward", "reverse", "random")
_COPIES = ("late", "early", "random")
# Largest shared memory of a block by compute capability (CUDA programming guide, technical specifications).
_SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_MAX_THREADS = 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)
_TRAFFIC_COLUMNS = 7
# Types of arguments that are no arrays, by PTX type without its letter.
_SCALARS: dict[str, tuple[type[np.generic], ...]] = {
    "8": (np.uint8, np.int8, np.bool_),
    "16": (np.uint16, np.int16, np.float16),
    "32": (np.uint32, np.int32),
    "64": (np.uint64, np.int64),
}


@dataclass(frozen=True)
class Order:
    """A possible order of threads and copies.

    Attributes:
        schedule: ``forward`` runs warps and lanes in order, each warp until it must wait; ``reverse`` the opposite;
            ``random`` switches often.  Blocks run in the same order.
        copies: when a ``cp.async`` takes effect: ``late``, at the wait; ``early``, at once; or at ``random``.
        seed: seed of random choices.
    """

    schedule: Literal["forward", "reverse", "random"] = "forward"
    copies: Literal["late", "early", "random"] = "late"
    seed: int = 0


FORWARD = Order()
# These orders include each extreme, which exposes code that depends on the order.
ORDERS = (FORWARD, Order("reverse", "early"), Order("random", "random", 1), Order("random", "random", 2))


@dataclass(frozen=True)
class MemoryRange:
    """Memory that a launch may access.

    ``valid`` (uint8, one per byte) states which bytes were written, and check mode updates it; None: all bytes.
    """

    address: int
    n_bytes: int
    writable: bool = True
    valid: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of one instruction: sectors of 32 bytes (global) or passes over the banks (shared)."""

    site: str
    space: Literal["global", "shared"]
    is_write: bool
    bytes_per_lane: int
    requests: int
    used: int
    ideal: int


class _Range(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("n_bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint64),
        ("valid", ctypes.c_void_p),
    )


class _Launch(ctypes.Structure):
    """``Launch`` of runtime/machine.h"""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("kernel", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("static_shared_bytes", ctypes.c_uint64),
        ("dynamic_shared_bytes", ctypes.c_uint64),
        ("schedule", ctypes.c_uint32),
        ("copies", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("step_limit", ctypes.c_uint64),
        ("ranges", ctypes.POINTER(_Range)),
        ("n_ranges", ctypes.c_uint64),
        ("checking", ctypes.c_uint32),
        ("counting", ctypes.c_uint32),
        ("mutation", ctypes.c_uint32),
    )


class EmulatedModule:
    """The kernels of a module.

    Args:
        ptx_text: PTX as NVRTC returns it (see nvrtc.py).
        mode: ``fast`` or ``check``.
        folder: folder of compiled libraries; the temporary folder if None.
        step_limit: most backward jumps per thread and block; more count as an endless loop.
        planted: mistakes (mutate.py).

    Attributes:
        mutation: the number of the active mistake; 0 for none.

    Raises:
        PtxError, UnsupportedInstruction: the PTX cannot be translated.
        BuildError: g++ is missing.
    """

    def __init__(
        self,
        ptx_text: str,
        mode: Mode = "fast",
        *,
        folder: Path | None = None,
        step_limit: int = 1 << 22,
        planted: Planted | None = None,
    ) -> None:
        module = ptx.parse(ptx_text)
        translation = translate(module, planted)
        self.mode = mode
        self.mutation = 0
        self.kernels: dict[str, KernelSignature] = translation.kernels
        self._sites: list[Site] = translation.sites
        self._architecture = int(re.sub(r"\D", "", module.target))
        self._step_limit = step_limit
        path = build.build_module(translation.source, folder or build.default_folder(), checking=mode == "check")
        self._library = ctypes.CDLL(str(path))
        self._library.launch_error.restype = ctypes.c_char_p
        self._library.register_variables()

    def launch(
        self,
        kernel: str,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        arguments: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        order: Order = FORWARD,
        ranges: Sequence[MemoryRange] = (),
        count_traffic: bool = False,
    ) -> None:
        """Run a kernel to its end.

        Args:
            grid, block: up to three dimensions.
            arguments: numpy scalars of the parameters' exact types, ``np.uint64`` for addresses, ``bytes`` for
                structures.
            shared_bytes: dynamic shared memory.
            ranges: the memory that the kernel may access; only check mode uses it.
            count_traffic: see ``traffic``; only in check mode.

        Raises:
            LaunchError: CUDA would refuse the launch.
            KernelFault: the kernel did something invalid.
        """
        signature = self._signature(kernel)
        grid_size, block_size = _dimensions(grid, "grid"), _dimensions(block, "block")
        self._check_geometry(signature, grid_size, block_size, shared_bytes)
        if count_traffic and self.mode != "check":
            raise LaunchError("memory traffic is only counted in check mode")
        parameters = _pack(kernel, signature, arguments)
        c_ranges = _c_ranges(ranges)
        launch = _Launch(
            (ctypes.c_uint32 * 3)(*grid_size),
            (ctypes.c_uint32 * 3)(*block_size),
            ctypes.cast(getattr(self._library, signature.symbol), ctypes.c_void_p),
            ctypes.cast(parameters, ctypes.c_void_p),
            signature.static_shared_bytes,
            shared_bytes,
            _SCHEDULES.index(order.schedule),
            _COPIES.index(order.copies),
            order.seed,
            self._step_limit,
            c_ranges,
            len(c_ranges),
            self.mode == "check",
            count_traffic,
            self.mutation,
        )
        if self._library.run_launch(ctypes.byref(launch)):
            kind, _, text = self._library.launch_error().decode().partition("|")
            raise KernelFault(kind, f"kernel {kernel}: {self._with_sites(text)}")

    def check_arguments(self, kernel: str, arguments: Sequence[Argument]) -> None:
        """Raise LaunchError if the kernel is unknown or takes other arguments."""
        _pack(kernel, self._signature(kernel), arguments)

    def traffic(self) -> list[Traffic]:
        """Return the counts of the last launch that counted traffic, the most wasteful instruction first."""
        n = self._library.read_traffic(None, 0)
        table = np.zeros((n, _TRAFFIC_COLUMNS), np.uint64)
        self._library.read_traffic(table.ctypes.data_as(ctypes.c_void_p), n)
        rows = []
        for row in table:
            site, n_bytes, is_write, is_shared, requests, used, ideal = (int(x) for x in row.view(np.int64))
            place = str(self._sites[site if site >= 0 else -1 - site])  # negative for the shared side of a cp.async
            space: Literal["global", "shared"] = "shared" if is_shared else "global"
            rows.append(Traffic(place, space, bool(is_write), n_bytes, requests, used, ideal))
        return sorted(rows, key=lambda t: t.ideal - t.used)

    def _signature(self, kernel: str) -> KernelSignature:
        if kernel not in self.kernels:
            raise LaunchError(f"there is no kernel {kernel!r}, only {', '.join(self.kernels)}")
        return self.kernels[kernel]

    def _with_sites(self, text: str) -> str:
        return re.sub(
            r"<site (-?\d+)>", lambda m: str(self._sites[int(m[1])]) if int(m[1]) >= 0 else "its start", text
        )

    def _check_geometry(
        self, kernel: KernelSignature, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int
    ) -> None:
        threads = block[0] * block[1] * block[2]
        if any(not 1 <= n <= limit for n, limit in zip(grid, _MAX_GRID, strict=True)):
            raise LaunchError(f"a grid of {grid} blocks")
        if min(block) < 1 or threads > _MAX_THREADS or block[2] > 64:
            raise LaunchError(f"a block of {block} threads")
        if kernel.max_threads is not None and threads > kernel.max_threads:
            raise LaunchError(f"{threads} threads, but the kernel's launch bounds allow {kernel.max_threads}")
        limit = _SHARED_KIB.get(self._architecture, 48) << 10
        if shared_bytes < 0 or kernel.static_shared_bytes + shared_bytes > limit:
            raise LaunchError(
                f"{kernel.static_shared_bytes} + {shared_bytes} bytes of shared memory; "
                f"sm_{self._architecture} has {limit} for a block"
            )


def _dimensions(size: Sequence[int] | int, what: str) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, (int, np.integer)) else tuple(size)
    if not 1 <= len(sizes) <= 3:
        raise LaunchError(f"a {what} has one to three dimensions, not {len(sizes)}")
    x, y, z = (*(int(n) for n in sizes), 1, 1)[:3]
    return x, y, z


def _pack(kernel: str, signature: KernelSignature, arguments: Sequence[Argument]) -> ctypes.Array[ctypes.c_char]:
    """Return the bytes of the parameters as the kernel reads them."""
    if len(arguments) != len(signature.parameters):
        raise LaunchError(f"{kernel} takes {len(signature.parameters)} arguments, not {len(arguments)}")
    buffer = bytearray(signature.parameter_bytes)
    for i, (argument, parameter, offset) in enumerate(
        zip(arguments, signature.parameters, signature.offsets, strict=True)
    ):
        data = (
            argument
            if isinstance(argument, bytes)
            else argument.tobytes()
            if isinstance(argument, np.generic)
            else None
        )
        if data is None or len(data) != parameter.n_bytes or not _fits(argument, parameter):
            wanted = f"{parameter.n_bytes} bytes" if parameter.is_array else f"a numpy scalar for .{parameter.type}"
            raise LaunchError(f"argument {i} of {kernel} must be {wanted}, not {type(argument).__name__}")
        buffer[offset : offset + len(data)] = data
    return ctypes.create_string_buffer(bytes(buffer), max(1, len(buffer)))


def _fits(argument: Any, parameter: ptx.Parameter) -> bool:
    if parameter.is_array:
        return isinstance(argument, (bytes, np.void))
    if parameter.type in ("f32", "f64"):
        return isinstance(argument, np.float32 if parameter.type == "f32" else np.float64)
    return isinstance(argument, _SCALARS[parameter.type.lstrip("busf")])


def _c_ranges(ranges: Sequence[MemoryRange]) -> ctypes.Array[_Range]:
    """Return ranges for the runtime.  A range may appear twice; other overlaps are refused."""
    unique = sorted(
        {(r.address, r.n_bytes): r for r in sorted(ranges, key=lambda r: r.writable)}.values(),
        key=lambda r: r.address,
    )
    for one, two in itertools.pairwise(unique):
        if one.address + one.n_bytes > two.address:
            raise LaunchError("two memory ranges overlap")
    c_ranges = (_Range * len(unique))()
    for c_range, r in zip(c_ranges, unique, strict=True):
        if r.valid is not None and (
            r.valid.dtype != np.uint8 or r.valid.shape != (r.n_bytes,) or not r.valid.flags.c_contiguous
        ):
            raise LaunchError("`valid` must be one uint8 for each byte of its range")
        c_range.address, c_range.n_bytes, c_range.writable = r.address, r.n_bytes, r.writable
        c_range.valid = r.valid.ctypes.data if r.valid is not None else None
    return c_ranges
