"""`localllm.kernels.cuda.driver.Driver` based on CuPy: a thin layer, because CUDA does the work.

Only CuPy's binding of the CUDA runtime is used, not its memory pool, arrays and compiler.  Memory is allocated with
cudaMalloc and freed at once, all streams are created here, and the calling program's current device is restored.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    KernelError,
    LocalLLMError,
    NotEnoughMemoryError,
    UsageError,
)
from localllm.kernels.cuda import driver as interface
from localllm.kernels.cuda.driver import CompileProgress, Defines, DeviceMemory, DeviceProperties, MemoryInfo
from localllm.kernels.cuda.installation import count_devices, import_cupy
from localllm.kernels.cuda.module import FOLDER, ModuleCompiler

# CUDA's error numbers (cudaError_t; the driver API uses the same numbers).
_OUT_OF_MEMORY = 2
_INITIALISATION = 3
_NO_BINARY = {200, 209, 218, 222}
_NOT_FOUND = 500
_PEER_ACCESS_ALREADY_ENABLED = 704
_LAUNCH_OUT_OF_RESOURCES = 701
_ILLEGAL_STATE = 401
_CAPTURE = {_ILLEGAL_STATE, *range(900, 911)}
#: Errors that make CUDA unusable in this process: hardware memory errors, illegal accesses and instructions,
#: assertions, time limits, a device that is no longer on its bus.
_LOST = {214, 219, 220, 226, 700, 702, 710, 713, 714, 715, 716, 717, 718, 719, 721}


@dataclass(frozen=True, eq=False)
class _Handle:
    """An object of CuPy and its device."""

    device: int
    cupy: Any


@dataclass(frozen=True, eq=False)
class _Module(_Handle):
    name: str
    #: Functions by kernel, and the dynamic shared memory that the driver allows each.
    functions: dict[str, Any] = field(default_factory=dict)
    shared_bytes: dict[str, int] = field(default_factory=dict)


class CupyDriver:
    """The CUDA devices of this machine."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._cupy = import_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._count = count_devices(self._cupy)
        self._compiler = ModuleCompiler(self._cupy, folder)
        #: The device last used, for calls that belong to no device: on another device, CUDA would create a context.
        self._home = 0
        self._properties: dict[int, DeviceProperties] = {}
        self._modules: dict[tuple[int, str, frozenset[tuple[str, int | str]]], _Module] = {}
        #: Pairs (device, peer) with peer access.
        self._peers: set[tuple[int, int]] = set()
        #: Threads that capture, and objects to free afterwards: freeing memory would break a capture.
        self._capturing: list[int] = []
        self._garbage: deque[tuple[int, Callable[[int], None], int]] = deque()

    # -- Devices ---------------------------------------------------------------------------------------------------

    @property
    def device_count(self) -> int:
        return self._count

    def properties(self, device: int) -> DeviceProperties:
        interface.check_device(device, self._count)
        if device not in self._properties:
            with self._calls(device, "read its properties"):
                properties = self._runtime.getDeviceProperties(device)
                bus_id = self._runtime.deviceGetPCIBusId(device)
            self._properties[device] = DeviceProperties(
                properties["name"].decode(errors="replace"),
                (properties["major"], properties["minor"]),
                properties["multiProcessorCount"],
                properties["totalGlobalMem"],
                properties["sharedMemPerBlockOptin"],
                bus_id,
            )
        return self._properties[device]

    def memory_info(self, device: int) -> MemoryInfo:
        interface.check_device(device, self._count)
        with self._on(device, "report its free memory"):
            return MemoryInfo(*self._runtime.memGetInfo())

    def can_access_peer(self, device: int, peer: int) -> bool:
        for number in (device, peer):
            interface.check_device(number, self._count)
        if device == peer:
            return False
        with self._calls(device, "ask about peers"):
            return bool(self._runtime.deviceCanAccessPeer(device, peer))

    def enable_peer_access(self, device: int, peer: int) -> None:
        if not self.can_access_peer(device, peer):
            raise DeviceError(f"CUDA device {device} has no access to the memory of device {peer}")
        if (device, peer) in self._peers:
            return
        with self._on(device, f"get access to device {peer}"):
            try:
                self._runtime.deviceEnablePeerAccess(peer)
            except self._runtime.CUDARuntimeError as error:
                if error.status != _PEER_ACCESS_ALREADY_ENABLED:  # another library in this process enabled it
                    raise
        self._peers.add((device, peer))

    # -- Memory ----------------------------------------------------------------------------------------------------

    def allocate(self, device: int, n_bytes: int) -> DeviceMemory:
        self._check(device)
        self._not_capturing("memory is allocated")
        if n_bytes <= 0:
            raise UsageError(f"an allocation of {n_bytes} bytes of device memory: it must be at least 1 byte")
        with self._on(device, "allocate memory", n_bytes):
            address = int(self._runtime.malloc(n_bytes))
        owner = _Owner()
        self._free_with(owner, device, self._runtime.free, address)
        return DeviceMemory(device, address, n_bytes, owner)

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        self._not_capturing("host memory is locked")
        if n_bytes <= 0:
            raise UsageError(f"an allocation of {n_bytes} bytes of pinned memory: it must be at least 1 byte")
        runtime = self._runtime
        try:
            with self._on(self._home, "lock host memory"):
                address = int(runtime.hostAlloc(n_bytes, runtime.hostAllocPortable))
        except DeviceMemoryError as error:
            raise NotEnoughMemoryError(
                f"the system has no {n_bytes:,} bytes of host memory to lock for copies to CUDA devices"
            ) from error
        buffer = (ctypes.c_uint8 * n_bytes).from_address(address)
        self._free_with(buffer, self._home, runtime.freeHost, address)
        return np.ctypeslib.as_array(buffer)

    def _free_with(self, owner: object, device: int, free: Callable[[int], None], address: int) -> None:
        """Free memory when its owner is garbage; at the end of the process the system frees it."""
        weakref.finalize(owner, self._free, device, free, address).atexit = False

    def _free(self, device: int, free: Callable[[int], None], address: int) -> None:
        if self._capturing:
            self._garbage.append((device, free, address))
            return
        try:
            with self._on(device, "free memory"):
                free(address)
        except LocalLLMError:
            pass  # the device and its memory are lost

    # -- Streams and events ----------------------------------------------------------------------------------------

    def stream(self, device: int) -> _Handle:
        self._check(device)
        with self._on(device, "make a stream"):
            return _Handle(device, self._cupy.cuda.Stream(non_blocking=True))

    def event(self, device: int, *, timing: bool = False) -> _Handle:
        self._check(device)
        with self._on(device, "make an event"):
            return _Handle(device, self._cupy.cuda.Event(disable_timing=not timing))

    def record(self, event: interface.Event, stream: interface.Stream) -> None:
        with self._calls(stream.device, "record an event"):
            _cupy(event).record(_cupy(stream))

    def wait(self, stream: interface.Stream, event: interface.Event) -> None:
        with self._calls(stream.device, "wait for an event"):
            _cupy(stream).wait_event(_cupy(event))

    def synchronize(self, work: interface.Stream | interface.Event) -> None:
        with self._calls(work.device, "finish its work"):
            _cupy(work).synchronize()

    def elapsed_seconds(self, begin: interface.Event, end: interface.Event) -> float:
        with self._calls(end.device, "take the time"):
            return float(self._cupy.cuda.get_elapsed_time(_cupy(begin), _cupy(end))) / 1000

    # -- Copies ----------------------------------------------------------------------------------------------------

    def upload(self, destination: DeviceMemory, source: NDArray[Any], stream: interface.Stream) -> None:
        interface.check_sizes(destination.n_bytes, interface.host_array(source, written=False).nbytes)
        direction = self._runtime.memcpyHostToDevice
        with self._on(stream.device, "copy to it"):
            self._runtime.memcpyAsync(
                destination.address, source.ctypes.data, source.nbytes, direction, _cupy(stream).ptr
            )

    def download(self, destination: NDArray[Any], source: DeviceMemory, stream: interface.Stream) -> None:
        interface.check_sizes(interface.host_array(destination, written=True).nbytes, source.n_bytes)
        direction = self._runtime.memcpyDeviceToHost
        with self._on(stream.device, "copy from it"):
            self._runtime.memcpyAsync(
                destination.ctypes.data, source.address, source.n_bytes, direction, _cupy(stream).ptr
            )

    def copy(self, destination: DeviceMemory, source: DeviceMemory, stream: interface.Stream) -> None:
        interface.check_sizes(destination.n_bytes, source.n_bytes)
        runtime, to, n_bytes, queue = self._runtime, destination, source.n_bytes, _cupy(stream).ptr
        with self._on(stream.device, "copy"):
            if to.device == source.device:
                runtime.memcpyAsync(to.address, source.address, n_bytes, runtime.memcpyDeviceToDevice, queue)
            else:
                runtime.memcpyPeerAsync(to.address, to.device, source.address, source.device, n_bytes, queue)

    def fill(self, destination: DeviceMemory, byte: int, stream: interface.Stream) -> None:
        with self._on(stream.device, "fill memory"):
            self._runtime.memsetAsync(destination.address, byte, destination.n_bytes, _cupy(stream).ptr)

    # -- Kernels ---------------------------------------------------------------------------------------------------

    def compile_modules(
        self, device: int, modules: Iterable[tuple[str, Defines]], progress: CompileProgress | None = None
    ) -> None:
        self._compiler.compile(modules, self._architecture(device), progress)

    def load_module(self, device: int, name: str, defines: Defines | None = None) -> _Module:
        key = (device, name, frozenset((defines or {}).items()))
        if key not in self._modules:
            self._not_capturing("a module is loaded")
            code = self._compiler.binary(name, defines or {}, self._architecture(device))
            with self._on(device, f"load the kernels of {name}"):
                module = self._cupy.cuda.Module()
                module.load(code)
            self._modules[key] = _Module(device, module, name)
        return self._modules[key]

    def _architecture(self, device: int) -> str:
        self._check(device)
        return self._compiler.architecture(self.properties(device).capability)

    def launch(
        self,
        module: interface.Module,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[DeviceMemory | np.number[Any]],
        stream: interface.Stream,
        shared_bytes: int = 0,
    ) -> None:
        values = tuple(np.uint64(a.address) if isinstance(a, DeviceMemory) else a for a in arguments)
        with self._on(stream.device, f"launch the kernel {kernel}"):
            function = self._function(module, kernel, shared_bytes)
            sizes = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
            function(*sizes, values, shared_mem=shared_bytes, stream=_cupy(stream))

    def _function(self, module: interface.Module, kernel: str, shared_bytes: int) -> Any:
        """Return a kernel, with at least ``shared_bytes`` of dynamic shared memory allowed."""
        if not isinstance(module, _Module):
            raise UsageError(f"{module!r} is not a module of this driver")
        if kernel not in module.functions:
            module.functions[kernel] = module.cupy.get_function(kernel)
        function = module.functions[kernel]
        if shared_bytes > module.shared_bytes.get(kernel, interface.FREE_SHARED_BYTES):
            driver = self._cupy.cuda.driver
            attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(function.ptr, attribute, shared_bytes)
            module.shared_bytes[kernel] = shared_bytes
        return function

    # -- Graphs ----------------------------------------------------------------------------------------------------

    def begin_capture(self, stream: interface.Stream) -> None:
        with self._on(stream.device, "begin a capture"):
            # Relaxed, so that modules loaded by the driver, and other threads of the program, do not break the
            # capture.
            _cupy(stream).begin_capture(self._runtime.streamCaptureModeRelaxed)
        self._capturing.append(threading.get_ident())

    def end_capture(self, stream: interface.Stream) -> _Handle:
        if threading.get_ident() not in self._capturing:
            raise KernelError("CUDA graph capture: the thread that ends it did not start it")
        try:
            with self._on(stream.device, "end a capture"):
                return _Handle(stream.device, _cupy(stream).end_capture())
        finally:
            self._capturing.remove(threading.get_ident())
            while self._garbage and not self._capturing:
                self._free(*self._garbage.popleft())

    def replay(self, graph: interface.Graph, stream: interface.Stream) -> None:
        with self._on(stream.device, "replay a graph"):
            _cupy(graph).launch(_cupy(stream))

    # -- Checks and errors -----------------------------------------------------------------------------------------

    def _check(self, device: int) -> None:
        interface.check_capability(device, self.properties(device))
        self._home = device

    def _not_capturing(self, action: str) -> None:
        if threading.get_ident() in self._capturing:
            raise KernelError(f"CUDA graph capture: {action} in the thread that captures")

    def _memory(self, device: int) -> MemoryInfo:
        """Return the free memory; empty if the driver does not report it."""
        runtime = self._runtime
        try:
            previous = runtime.getDevice()
            runtime.setDevice(device)
            info = MemoryInfo(*runtime.memGetInfo())
            runtime.setDevice(previous)
        except RuntimeError:
            return MemoryInfo(0, self.properties(device).total_bytes)
        return info

    @contextlib.contextmanager
    def _calls(self, device: int, doing: str, n_bytes: int | None = None) -> Iterator[None]:
        """Convert CUDA's errors to exceptions of localllm."""
        try:
            yield
        except RuntimeError as error:  # CuPy's errors of the CUDA runtime and driver have a status
            if not hasattr(error, "status"):
                raise
            raise self._error(error, device, doing, n_bytes) from error

    @contextlib.contextmanager
    def _on(self, device: int, doing: str, n_bytes: int | None = None) -> Iterator[None]:
        """Like `_calls`, with ``device`` as CUDA's current device, which is restored afterwards."""
        with self._calls(device, doing, n_bytes):
            previous = self._runtime.getDevice()
            self._runtime.setDevice(device)
            try:
                yield
            finally:
                self._runtime.setDevice(previous)

    def _error(self, error: Any, device: int, doing: str, n_bytes: int | None = None) -> LocalLLMError:
        status = getattr(error, "status", None)
        failed = f"CUDA device {device} could not {doing}: {error}"
        if status == _OUT_OF_MEMORY:
            return DeviceMemoryError(device, n_bytes, *self._memory(device))
        if status in _LOST:
            return DeviceLostError(
                f"{failed}; the device failed, here or in earlier work, and is lost to this process: start it again "
                f"(if that repeats, `nvidia-smi -q` shows faults of the hardware; else please report it)"
            )
        if status == _INITIALISATION:
            return DeviceError(f"{failed}; CUDA does not work in a forked process: start processes by spawning them")
        if status in _NO_BINARY:
            return DeviceError(f"{failed}; NVIDIA's driver is older than the NVRTC installed: install a newer driver")
        if status in (_NOT_FOUND, _LAUNCH_OUT_OF_RESOURCES) or status in _CAPTURE:
            return KernelError(failed)
        return DeviceError(failed)


def open_driver(folder: Path = FOLDER) -> interface.Driver:
    """Return the driver of this machine's CUDA devices; see `CupyDriver`."""
    return CupyDriver(folder)


class _Owner:
    """The owner of an allocation, which is freed when the owner is garbage."""

    __slots__ = ("__weakref__",)


def _cupy(handle: object) -> Any:
    """Return the CuPy object of a handle."""
    if not isinstance(handle, _Handle):
        raise UsageError(f"{handle!r} is not of this driver")
    return handle.cupy
