"""The narrow interface to CUDA devices that the rest of the backend uses.

`localllm.kernels.cuda.cupy_driver` implements it with CuPy.  The tests have another implementation, which emulates
several devices on the CPU.  It runs streams as late, and in as unusual an order, as their events allow, and so finds
errors that a GPU usually hides.

**Asynchronous methods.**  `record`, `wait`, `upload`, `download`, `copy`, `fill`, `launch` and `replay` add work to a
stream and return.  The work of one stream runs in order.  Work of different streams, even of one device, is ordered
only by `record` of an event in one stream and then `wait` for it in the other; the host and a stream are ordered only
by `synchronize`.  All other methods have finished when they return.

**Lifetimes.**  The caller must keep some objects alive until the stream has finished the work that uses them: the
`DeviceMemory` (one slice of an allocation is enough), and the host array of an upload or download, whose contents
must not be changed or read before.  A captured graph uses the same memory in each replay: the memory and the host
arrays must outlive the graph.  The driver does not keep references.

**Threads.**  All methods can be called from several threads, but each stream by only one thread at a time.  A capture
belongs to the thread that started it.

**Errors.**  Every method that takes a device, or an object of a device, raises `DeviceError` if the device does not
exist or localllm cannot use it.  It raises `DeviceLostError` if the device failed, now or in earlier work: kernels
run asynchronously, so an illegal access is reported by a later call, usually `synchronize`.  It raises
`DeviceMemoryError` if the device has no memory left; any call may need a little memory.  Copies between sides of
different sizes are a `UsageError`.  Only the tests' driver is certain to detect other inconsistent arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ON_CPU, DeviceError, UsageError

#: Oldest supported devices: Turing, whose tensor cores multiply integers.
MINIMUM_CAPABILITY = (7, 5)
#: Threads per block that every device supports.
MAX_BLOCK_THREADS = 1024
#: Shared memory that a block can use without a request to the driver.
FREE_SHARED_BYTES = 48 << 10

#: Macros that select the variants of a module's kernels: ``-DNAME=VALUE``.
Defines = Mapping[str, int | str]
#: Called with (modules compiled, modules to compile).
CompileProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class DeviceProperties:
    name: str  #: product name, such as "NVIDIA H200"
    capability: tuple[int, int]  #: (9, 0) for sm_90
    n_multiprocessors: int
    total_bytes: int  #: size of its memory
    shared_bytes: int  #: maximum shared memory of a block
    bus_id: str  #: PCI address, "0000:17:00.0": its name in other programs


class MemoryInfo(NamedTuple):
    """A device's memory at one moment, in bytes."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A range of a device's memory.  The allocation is freed when its last slice, and therefore ``owner``, is
    garbage.

    Work that still uses freed memory fails: see above.
    """

    device: int
    address: int
    n_bytes: int
    owner: object

    def at(self, offset: int, n_bytes: int) -> DeviceMemory:
        """Return ``n_bytes`` at ``offset``.  Raises UsageError if the range exceeds this memory."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.n_bytes:
            raise UsageError(f"{n_bytes} bytes at {offset} are outside device memory of {self.n_bytes} bytes")
        return DeviceMemory(self.device, self.address + offset, n_bytes, self.owner)


#: Arguments of kernels; numpy scalars have the types of the kernel's parameters.
Argument = DeviceMemory | np.number[Any]


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel of the module ``module``.cu, compiled with ``defines``."""

    module: str
    kernel: str
    defines: Defines
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int = 0
    # kernel arguments, or places in buffers whose memory is not allocated yet; see `module.with_arguments`
    arguments: tuple[Any, ...] = ()


class Handle(Protocol):
    """An object of a device."""

    @property
    def device(self) -> int: ...


Stream = Handle  #: a queue of work
Event = Handle  #: a position in the work of a stream, once recorded; waiting for an unrecorded event does nothing
Graph = Handle  #: captured work, which a stream replays as a whole
Module = Handle  #: kernels in a device's memory


class Driver(Protocol):
    """Devices, their memory, streams and kernels.  Devices are numbered from 0."""

    @property
    def device_count(self) -> int: ...

    def properties(self, device: int) -> DeviceProperties:
        """Return the properties of a device; also works for unsupported old devices."""

    def memory_info(self, device: int) -> MemoryInfo:
        """Return the memory that is free now; other programs change it at any time."""

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Return whether ``device`` can access the memory of ``peer``."""

    def enable_peer_access(self, device: int, peer: int) -> None:
        """Allow ``device`` to access the memory of ``peer``, in this direction.  Raises DeviceError if it cannot."""

    def allocate(self, device: int, n_bytes: int) -> DeviceMemory:
        """Allocate memory with undefined contents, aligned to 256 bytes.  Not allowed while this thread captures."""

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        """Allocate page-locked host memory with undefined contents.

        Copies from and to this memory are asynchronous and run at full speed.  Other host memory might be copied
        before `upload` or `download` returns, and cannot be captured.  Not allowed while this thread captures.

        Raises:
            NotEnoughMemoryError: the system does not lock this much memory.
        """

    def stream(self, device: int) -> Stream:
        """Create a stream that is independent of CUDA's default stream."""

    def event(self, device: int, *, timing: bool = False) -> Event:
        """Create an event.  With ``timing``, it records the time for `elapsed_seconds`, at a small cost."""

    def record(self, event: Event, stream: Stream) -> None:
        """Move the event to the end of the current work of the stream, which must be of the same device."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make the stream's later work start after the event's latest record, on any device.

        If the event was recorded during a capture, the stream joins the capture.  The stream that started the capture
        must then wait for this stream before the capture ends.
        """

    def synchronize(self, work: Stream | Event) -> None:
        """Block the host until a stream or an event is finished.  Not allowed while it is captured."""

    def elapsed_seconds(self, begin: Event, end: Event) -> float:
        """Return the device time between two finished events of one device, created with ``timing``."""

    def upload(self, destination: DeviceMemory, source: NDArray[Any], stream: Stream) -> None:
        """Copy a contiguous host array to device memory of the same size."""

    def download(self, destination: NDArray[Any], source: DeviceMemory, stream: Stream) -> None:
        """Copy device memory to a contiguous host array of the same size."""

    def copy(self, destination: DeviceMemory, source: DeviceMemory, stream: Stream) -> None:
        """Copy between non-overlapping device memory of the same size.

        The stream must be of one of the two devices, and this device must have access to the other one
        (`enable_peer_access`).  Without access, copy through pinned host memory.
        """

    def fill(self, destination: DeviceMemory, byte: int, stream: Stream) -> None:
        """Set every byte to ``byte``, 0 … 255."""

    def compile_modules(
        self, device: int, modules: Iterable[tuple[str, Defines]], progress: CompileProgress | None = None
    ) -> None:
        """Compile the modules (name, defines) that are not in the cache, so that `load_module` is fast."""

    def load_module(self, device: int, name: str, defines: Defines | None = None) -> Module:
        """Return the kernels of ``name``.cu with these macros.

        The same arguments return the same module.  While this thread captures, only modules that are already loaded
        are allowed.

        Raises:
            KernelError: the module does not compile, or does not exist.
        """

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Sequence[Argument],
        stream: Stream,
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel.

        Args:
            grid, block: number of blocks, and of threads per block, along x, y, z; missing numbers are 1.
            arguments: device memory, and numpy scalars of exactly the types of the kernel's parameters, because the
            bytes
                are passed unchanged.  Memory of another device requires `enable_peer_access`.
            stream: a stream of the module's device.
            shared_bytes: dynamic shared memory per block, at most the device's limit.
        """

    def begin_capture(self, stream: Stream) -> None:
        """Record later work of the stream, and of streams that join it, for a graph instead of running it.

        Until the capture ends, this thread must not allocate memory or load new modules: this raises KernelError.  It
        must
        not wait for one of the streams or their events, or copy host memory that is not pinned: this ends the
        capture, with a KernelError at once or when it ends (emulated devices detect all of these).  Run the work once
        before capturing it, because CUDA loads kernels on first use.
        """

    def end_capture(self, stream: Stream) -> Graph:
        """Return the graph captured on a stream since `begin_capture`.  The capture ends even if this method raises.

        Raises KernelError if some work cannot be captured, or if a stream that joined was not waited for.
        """

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Add the graph's work to this stream; replays of one graph run one at a time."""


# -- Checks shared by all drivers ----------------------------------------------------------------------------------


def check_device(device: int, count: int) -> None:
    """Raise DeviceError if there is no device with this number."""
    if not 0 <= device < count:
        here = "there is only device 0" if count == 1 else f"there are {count}, 0 to {count - 1}"
        raise DeviceError(
            f"there is no CUDA device {device}: {here} (the environment variable CUDA_VISIBLE_DEVICES hides others)"
        )


def check_capability(device: int, properties: DeviceProperties) -> None:
    """Raise DeviceError if a device is older than `MINIMUM_CAPABILITY`."""
    if properties.capability < MINIMUM_CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (properties.capability, MINIMUM_CAPABILITY))
        raise DeviceError(
            f"CUDA device {device}, {properties.name}, has compute capability {have}, but the kernels need {need} "
            "(a GPU of 2018 or later): use another device, or ",
            ON_CPU,
        )


def check_sizes(destination: int, source: int) -> None:
    """Raise UsageError if the two sides of a copy have different sizes."""
    if destination != source:
        raise UsageError(f"a copy of {source} bytes to {destination} bytes: the sizes must be equal")


def host_array(array: NDArray[Any], *, written: bool) -> NDArray[Any]:
    """Return a host array for a copy.  Raises UsageError if it has gaps, or is read-only but ``written``."""
    if not array.flags.c_contiguous:
        raise UsageError(
            f"an array of strides {array.strides} is not contiguous, and cannot be copied to or from a device"
        )
    if written and not array.flags.writeable:
        raise UsageError("the array that a download writes to is read-only")
    return array
