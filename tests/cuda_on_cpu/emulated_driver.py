"""`localllm.kernels.cuda.driver.Driver` without a GPU: several devices in host memory.

The devices run work in an order that exposes missing waits (`tests.cuda_on_cpu.emulated_streams`), and raise CUDA's
errors for calls that CUDA refuses.  A `HostFault` reports errors that CUDA would not notice.  Kernels are translated
from CUDA (`tests.cuda_on_cpu.module`), or functions in Python.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import DeviceError, KernelError, UsageError
from localllm.kernels.cuda import driver as interface
from localllm.kernels.cuda.driver import (
    MAX_BLOCK_THREADS,
    CompileProgress,
    Defines,
    DeviceMemory,
    DeviceProperties,
    MemoryInfo,
    check_capability,
    check_device,
    check_sizes,
    host_array,
)
from localllm.kernels.cuda.module import FOLDER, ModuleCompiler
from tests.cuda_on_cpu import module as emulator
from tests.cuda_on_cpu.emulated_kernels import (
    Arguments,
    Kernels,
    PythonKernel,
    PythonKernels,
    TranslatedKernels,
    translated,
)
from tests.cuda_on_cpu.emulated_memory import HostMemory, Memories, Slice
from tests.cuda_on_cpu.emulated_streams import (
    Capture,
    EmulatedEvent,
    EmulatedGraph,
    EmulatedStream,
    Scheduler,
    StreamOrder,
    lost_error,
)
from tests.cuda_on_cpu.module import Mode, Order

FORWARD = Order()
#: Limits of the threads in a block and of the blocks in a grid, per dimension.
MAX_BLOCK, MAX_GRID = (1024, 1024, 64), (2**31 - 1, 65535, 65535)


@dataclass(frozen=True, eq=False)
class EmulatedModule:
    device: int
    name: str
    kernels: Kernels


class EmulatedDriver:
    """Emulated devices.

    Args:
        n_devices: number of devices.
        memory: bytes of each device.
        capability: compute capability of all devices.
        shared_bytes: largest shared memory of a block.
        peers: whether devices can access one another's memory.
        order: when work runs; ``seed`` is used by "random".
        kernels: modules of kernels in Python, as functions of the macros, by name.  Other modules are translated.
        folder: folder of the CUDA sources.
        mode: "fast", or "check" to check each memory access of kernels.
        kernel_order: the order of threads and asynchronous copies in a kernel.

    Attributes:
        memories: memory of the devices; `Memories.fail_allocation` makes an allocation fail.
    """

    def __init__(
        self,
        n_devices: int = 1,
        *,
        memory: int = 1 << 30,
        capability: tuple[int, int] = (8, 0),
        shared_bytes: int = 99 << 10,
        peers: bool = True,
        order: StreamOrder = "lazy",
        seed: int = 0,
        kernels: Mapping[str, Callable[[Defines], Mapping[str, PythonKernel]]] | None = None,
        folder: Path = FOLDER,
        mode: Mode = "fast",
        kernel_order: Order = FORWARD,
    ) -> None:
        self.memories = Memories([memory] * n_devices)
        self._n_devices = n_devices
        self._capability = capability
        self._shared_bytes = shared_bytes
        self._has_peers = peers
        self._scheduler = Scheduler(order, seed)
        self._python = dict(kernels or {})
        self._folder = folder
        self._mode: Mode = mode
        self._kernel_order = kernel_order
        self._peers: set[tuple[int, int]] = set()
        self._modules: dict[tuple[int, str, frozenset[tuple[str, int | str]]], EmulatedModule] = {}
        self._captures: list[Capture] = []
        self._pinned: weakref.WeakValueDictionary[int, NDArray[np.uint8]] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    # -- Planted faults --------------------------------------------------------------------------------------------

    def lose(self, device: int, after: int = 0) -> None:
        """Let the device fail after ``after`` more pieces of work."""
        self._scheduler.failing[device] = after

    # -- Devices ---------------------------------------------------------------------------------------------------

    @property
    def device_count(self) -> int:
        return self._n_devices

    def properties(self, device: int) -> DeviceProperties:
        check_device(device, self._n_devices)
        total = self.memories.sizes[device]
        return DeviceProperties(
            "emulated GPU", self._capability, 4, total, self._shared_bytes, f"0000:{device + 1:02x}:00.0"
        )

    def memory_info(self, device: int) -> MemoryInfo:
        check_device(device, self._n_devices)
        self._alive(device)
        return self.memories.info(device)

    def can_access_peer(self, device: int, peer: int) -> bool:
        for each in (device, peer):
            check_device(each, self._n_devices)
        return self._has_peers and device != peer

    def enable_peer_access(self, device: int, peer: int) -> None:
        if not self.can_access_peer(device, peer):
            raise DeviceError(f"CUDA device {device} has no access to the memory of device {peer}")
        self._peers.add((device, peer))

    # -- Memory ----------------------------------------------------------------------------------------------------

    def allocate(self, device: int, n_bytes: int) -> DeviceMemory:
        self._usable(device)
        self._not_capturing("memory is allocated")
        with self._lock:
            return self.memories.allocate(device, n_bytes)

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        self._not_capturing("host memory is locked")
        if n_bytes <= 0:
            raise UsageError(f"an allocation of {n_bytes} bytes of pinned memory: it must be at least 1 byte")
        array = np.full(n_bytes, 0xFF, np.uint8)
        self._pinned[array.ctypes.data] = array
        return array

    def _is_pinned(self, array: NDArray[Any]) -> bool:
        begin = array.ctypes.data
        return any(
            start <= begin and begin + array.nbytes <= start + whole.nbytes
            for start, whole in list(self._pinned.items())
        )

    # -- Streams and events ----------------------------------------------------------------------------------------

    def stream(self, device: int) -> EmulatedStream:
        self._usable(device)
        return EmulatedStream(device)

    def event(self, device: int, *, timing: bool = False) -> EmulatedEvent:
        self._usable(device)
        return EmulatedEvent(device, timing=timing)

    def record(self, event: interface.Event, stream: interface.Stream) -> None:
        event, stream = _event(event), _stream(stream)
        self._alive(stream.device)
        if event.device != stream.device:
            raise UsageError(f"an event of device {event.device} recorded in a stream of device {stream.device}")
        with self._lock:
            if stream.capture is not None:
                event.work, event.captured, event.seconds = None, (stream.capture, stream.tail), None
                return

            def came() -> None:
                event.seconds = self._scheduler.seconds

            event.captured, event.seconds = None, None
            event.work = self._scheduler.put(stream, "an event", came)

    def wait(self, stream: interface.Stream, event: interface.Event) -> None:
        stream, event = _stream(stream), _event(event)
        self._alive(stream.device)
        with self._lock:
            if event.captured is not None:
                self._join(stream, *event.captured)
            elif event.work is not None:
                if stream.capture is not None:
                    raise stream.capture.refuse("a captured stream waits for an event outside the capture")
                stream.after = [*stream.after, event.work]

    def _join(self, stream: EmulatedStream, capture: Capture, after: list[Any]) -> None:
        if capture.has_ended:
            raise KernelError("CUDA graph capture: a stream waits for an event of a capture that has ended")
        if stream.capture not in (None, capture):
            raise capture.refuse("a stream of one capture waits for an event of another")
        capture.join(stream, after)

    def synchronize(self, work: interface.Stream | interface.Event) -> None:
        with self._lock:
            if isinstance(work, EmulatedEvent):
                self._finish_event(work)
            else:
                self._finish_stream(_stream(work))
        self._alive(work.device)

    def _finish_event(self, event: EmulatedEvent) -> None:
        if event.captured is not None:
            raise event.captured[0].refuse("the host waits for a captured event")
        if event.work is not None:
            self._scheduler.finish(event.work)

    def _finish_stream(self, stream: EmulatedStream) -> None:
        if stream.capture is not None:
            raise stream.capture.refuse("the host waits for a captured stream")
        for work in stream.after:
            self._scheduler.finish(work)

    def elapsed_seconds(self, begin: interface.Event, end: interface.Event) -> float:
        first, last = _event(begin), _event(end)
        if not (first.has_timing and last.has_timing):
            raise UsageError("the time between events that were made without timing=True")
        if first.seconds is None or last.seconds is None:
            raise DeviceError("the time between events that have not come")
        return last.seconds - first.seconds

    # -- Copies ----------------------------------------------------------------------------------------------------

    def upload(self, destination: DeviceMemory, source: NDArray[Any], stream: interface.Stream) -> None:
        check_sizes(destination.n_bytes, host_array(source, written=False).nbytes)
        to = self._slice(destination, stream, "an upload")
        host = HostMemory(source)

        def upload() -> None:
            to.valid()[:] = 1
            to.bytes()[:] = host.bytes("an upload")  # reads the host's memory when the copy runs

        self._host_copy(source, "an upload", upload, _stream(stream))

    def download(self, destination: NDArray[Any], source: DeviceMemory, stream: interface.Stream) -> None:
        check_sizes(host_array(destination, written=True).nbytes, source.n_bytes)
        of = self._slice(source, stream, "a download")
        host = HostMemory(destination)

        def download() -> None:
            host.bytes("a download")[:] = of.bytes()

        self._host_copy(destination, "a download", download, _stream(stream))

    def _host_copy(self, array: NDArray[Any], name: str, action: Callable[[], None], stream: EmulatedStream) -> None:
        """Copy host memory that is not pinned, either at once or later."""
        with self._lock:
            is_pinned = self._is_pinned(array)
            if stream.capture is not None and not is_pinned:
                raise stream.capture.refuse(f"{name} of host memory that is not pinned")
            work = self._put(stream, name, action)
            if work is not None and not is_pinned and self._scheduler.throws_heads():
                self._scheduler.finish(work)

    def copy(self, destination: DeviceMemory, source: DeviceMemory, stream: interface.Stream) -> None:
        check_sizes(destination.n_bytes, source.n_bytes)
        to, of = (self._slice(memory, stream, "a copy") for memory in (destination, source))

        def copy() -> None:
            to.valid()[:] = of.valid()
            to.bytes()[:] = of.bytes()

        self._put(_stream(stream), "a copy", copy)

    def fill(self, destination: DeviceMemory, byte: int, stream: interface.Stream) -> None:
        if not 0 <= byte <= 255:
            raise UsageError(f"memory cannot be filled with {byte}: it is no byte")
        to = self._slice(destination, stream, "a fill")

        def fill() -> None:
            to.valid()[:] = 1
            to.bytes()[:] = byte

        self._put(_stream(stream), "a fill", fill)

    # -- Kernels ---------------------------------------------------------------------------------------------------

    def compile_modules(
        self, device: int, modules: Iterable[tuple[str, Defines]], progress: CompileProgress | None = None
    ) -> None:
        self._usable(device)
        wanted = {(name, frozenset(defines.items())): (name, defines) for name, defines in modules}
        missing = [module for key, module in wanted.items() if (device, *key) not in self._modules]
        for done, (name, defines) in enumerate(missing):
            if progress:
                progress(done, len(missing))
            self.load_module(device, name, defines)
        if missing and progress:
            progress(len(missing), len(missing))

    def load_module(self, device: int, name: str, defines: Defines | None = None) -> EmulatedModule:
        self._usable(device)
        key = (device, name, frozenset((defines or {}).items()))
        with self._lock:
            if key not in self._modules:
                self._not_capturing("a module is loaded")
                self._modules[key] = EmulatedModule(device, name, self._kernels(name, defines or {}))
            return self._modules[key]

    def _kernels(self, name: str, defines: Defines) -> Kernels:
        if name in self._python:
            return PythonKernels(name, self._python[name](defines))
        return TranslatedKernels(self._translated(self.ptx(name, defines)), self._kernel_order)

    def ptx(self, name: str, defines: Defines) -> str:
        """Return the code of a module for devices of this capability."""
        architecture = f"compute_{self._capability[0] * 10 + self._capability[1]}"
        return _compiler(self._folder).binary(name, defines, architecture).decode().rstrip("\0")

    def _translated(self, ptx: str) -> emulator.EmulatedModule:
        return translated(ptx, self._mode)

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
        if module.device != stream.device:
            raise UsageError(f"kernels of device {module.device} launched in a stream of device {stream.device}")
        if not isinstance(module, EmulatedModule):
            raise UsageError(f"{module!r} is not a module of this driver")
        shape = launch_shape(kernel, grid, block, shared_bytes, self.properties(stream.device))
        check_arguments(kernel, arguments)
        kernels = module.kernels
        kernels.check(kernel, arguments)
        # The arguments of a launch are fixed at the call.
        values: Arguments = [
            self._slice(a, stream, f"the kernel {kernel}") if isinstance(a, DeviceMemory) else a for a in arguments
        ]
        device = stream.device

        def launch() -> None:
            reach = {device, *(peer for whose, peer in self._peers if whose == device)}
            kernels.launch(kernel, *shape, values, shared_bytes, self.memories.ranges(reach))

        self._put(_stream(stream), f"the kernel {kernel}", launch)

    # -- Graphs ----------------------------------------------------------------------------------------------------

    def begin_capture(self, stream: interface.Stream) -> None:
        stream = _stream(stream)
        self._alive(stream.device)
        with self._lock:
            if stream.capture is not None:
                raise stream.capture.refuse("it starts a second time")
            capture = Capture(stream)
            capture.join(stream, [])
            self._captures.append(capture)

    def end_capture(self, stream: interface.Stream) -> EmulatedGraph:
        stream = _stream(stream)
        with self._lock:
            if stream.capture is None:
                raise KernelError("CUDA graph capture: the stream in which it ends does not capture")
            capture = stream.capture
            try:
                return capture.end(stream)
            finally:
                if capture.has_ended:
                    self._captures.remove(capture)

    def replay(self, graph: interface.Graph, stream: interface.Stream) -> None:
        if not isinstance(graph, EmulatedGraph):
            raise UsageError(f"{graph!r} is no graph of this driver")
        self._alive(stream.device)
        if graph.device != stream.device:
            raise UsageError(f"a graph of device {graph.device} replayed in a stream of device {stream.device}")
        with self._lock:
            self._scheduler.replay(graph, _stream(stream))

    # -- Checks ----------------------------------------------------------------------------------------------------

    def _usable(self, device: int) -> None:
        check_capability(device, self.properties(device))
        self._alive(device)

    def _alive(self, device: int) -> None:
        if device in self._scheduler.lost:
            raise lost_error(device)

    def _not_capturing(self, what: str) -> None:
        here = threading.get_ident()
        for capture in self._captures:
            if capture.thread == here:
                raise KernelError(f"CUDA graph capture: {what} in the thread that captures")

    def _put(self, stream: EmulatedStream, name: str, action: Callable[[], None]) -> Any:
        self._alive(stream.device)
        with self._lock:
            return self._scheduler.put(stream, name, action)

    def _slice(self, memory: DeviceMemory, stream: interface.Stream, use: str) -> Slice:
        if memory.device != stream.device and (stream.device, memory.device) not in self._peers:
            raise DeviceError(
                f"a stream of CUDA device {stream.device} was given memory of device {memory.device} without access "
                "to it: see enable_peer_access"
            )
        return Slice(memory, use)


@functools.cache
def _compiler(folder: Path) -> ModuleCompiler:
    import cupy

    return ModuleCompiler(cupy, folder)


def _stream(stream: object) -> EmulatedStream:
    if not isinstance(stream, EmulatedStream):
        raise UsageError(f"{stream!r} is no stream of this driver")
    return stream


def _event(event: object) -> EmulatedEvent:
    if not isinstance(event, EmulatedEvent):
        raise UsageError(f"{event!r} is no event of this driver")
    return event


# -- Arguments that real devices do not check ----------------------------------------------------------------------


def launch_shape(
    kernel: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, properties: DeviceProperties
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return grid and block in three dimensions; raise KernelError if the device cannot run them."""
    (gx, gy, gz), (bx, by, bz) = ((*shape, 1, 1)[:3] for shape in (grid, block))
    full_grid, full_block = (gx, gy, gz), (bx, by, bz)
    fits = (
        all(1 <= n <= limit for n, limit in zip(full_grid, MAX_GRID, strict=True))
        and all(1 <= n <= limit for n, limit in zip(full_block, MAX_BLOCK, strict=True))
        and math.prod(full_block) <= MAX_BLOCK_THREADS
        and 0 <= shared_bytes <= properties.shared_bytes
    )
    if not fits:
        raise KernelError(
            f"kernel {kernel} cannot be launched with grid {grid}, block {block} and {shared_bytes} bytes of shared "
            f"memory on {properties.name}, which gives a block {properties.shared_bytes} bytes"
        )
    return full_grid, full_block


def check_arguments(kernel: str, arguments: Sequence[object]) -> None:
    """Raise KernelError if an argument is neither device memory nor a numpy number."""
    for i, argument in enumerate(arguments):
        if not isinstance(argument, (DeviceMemory, np.number)):
            raise KernelError(
                f"argument {i} of kernel {kernel} is a {type(argument).__name__}: kernels take DeviceMemory and "
                f"numpy numbers of their parameters' types, such as numpy.int32(3)"
            )
