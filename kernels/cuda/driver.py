"""The narrow interface to CUDA devices that the rest of the backend is written against.

`localllm.kernels.cuda.cupy_driver` is it over CuPy.  The tests have another one, which emulates several devices on
the CPU, runs streams as late or in as odd an order as their events allow, and so finds what a GPU hides mostly.

**What is asynchronous.**  `record`, `wait`, `upload`, `download`, `copy`, `fill`, `launch` and `replay` put work into
a stream and return.  The work of one stream is done in order.  Between streams, also of one device, nothing is
ordered but by `record` of an event in one and then `wait` for it in the other; between the host and a stream nothing
but by `synchronize`.  All other methods have done their work when they return.

**What must be kept alive.**  Until a stream is known to be past the work that uses it: the `DeviceMemory` (one slice
of an allocation is enough), and the host array of an upload or download, whose contents must not change, or be read,
until then.  A captured graph uses the same memory at each replay: it and the host arrays must outlive the graph.
Nothing here keeps them.

**Threads.**  All methods may be called from several threads, but one stream from one thread at a time, and a capture
belongs to the thread that began it.

**Errors.**  Every method that takes a device, or something of one, raises `DeviceError` where there is no such device
or localllm cannot use it; `DeviceLostError` where it failed, now or in earlier work: kernels run behind the host's
back, so an illegal access shows at some later call, mostly at `synchronize`; and `DeviceMemoryError` where it has no
memory left, which any call may need a little of.  Copies between sides of different sizes are a `UsageError`; other
arguments that contradict each other only the tests' driver is sure to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ON_CPU, DeviceError, UsageError

#: The oldest devices that the kernels are written for: Turing, whose tensor cores multiply integers.
MINIMUM_CAPABILITY = (7, 5)
#: Threads of a block that every device has.
MAX_BLOCK_THREADS = 1024
#: Shared memory that a block may have without asking the driver first.
FREE_SHARED_BYTES = 48 << 10

#: Macros that choose the variants of a module's kernels: ``-DNAME=VALUE``.
Defines = Mapping[str, int | str]
#: Called with (modules compiled, modules to compile).
CompileProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a device."""

    name: str  #: the product's, as "NVIDIA H200"
    capability: tuple[int, int]  #: (9, 0) for sm_90
    n_multiprocessors: int
    total_bytes: int  #: of its memory
    shared_bytes: int  #: the shared memory that one block can have
    bus_id: str  #: where it is plugged in, "0000:17:00.0": its name to other programs


class MemoryInfo(NamedTuple):
    """A device's memory at one moment, in bytes."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A stretch of a device's memory; the allocation is given back when its last slice, and so ``owner``, is garbage.

    Where work still uses it then, that work goes wrong: see above.
    """

    device: int
    address: int
    n_bytes: int
    owner: object

    def at(self, offset: int, n_bytes: int) -> DeviceMemory:
        """``n_bytes`` of it that begin ``offset`` bytes in.  UsageError where that leaves it."""
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.n_bytes:
            raise UsageError(f"{n_bytes} bytes at {offset} do not lie in device memory of {self.n_bytes} bytes")
        return DeviceMemory(self.device, self.address + offset, n_bytes, self.owner)


#: Of a kernel; numpy's numbers are of the types of its parameters.
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
    # the kernel's, or places in buffers whose memory is not there yet; none until they are `given`
    arguments: tuple[Any, ...] = ()

    def given(self, *arguments: Any) -> Launch:
        """The same with arguments."""
        return replace(self, arguments=arguments)


class Handle(Protocol):
    """Something of a device's."""

    @property
    def device(self) -> int: ...


Stream = Handle  #: a queue of work
Event = Handle  #: a place in the work of a stream, once it is recorded; waiting for one that never was is no wait
Graph = Handle  #: captured work, which a stream replays as a whole
Module = Handle  #: kernels in a device's memory


class Driver(Protocol):
    """Devices, their memory, streams and kernels.  Devices are numbered from 0."""

    @property
    def device_count(self) -> int: ...

    def properties(self, device: int) -> DeviceProperties:
        """Also of a device that is too old to be used."""

    def memory_info(self, device: int) -> MemoryInfo:
        """Free memory now; other programs change it at any time."""

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether ``device`` can reach into the memory of ``peer``."""

    def enable_peer_access(self, device: int, peer: int) -> None:
        """Lets ``device`` reach into the memory of ``peer``, one way; DeviceError where it cannot."""

    def allocate(self, device: int, n_bytes: int) -> DeviceMemory:
        """New memory, at a multiple of 256 bytes; what is in it is undefined.  Not while this thread captures."""

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, undefined contents; NotEnoughMemoryError where the system does not lock so much.

        Copies from and to it are asynchronous and at full speed; other host memory may, or may not, be copied before
        `upload` or `download` returns, and cannot be captured.  Not while this thread captures.
        """

    def stream(self, device: int) -> Stream:
        """A new stream, which takes no part in the order of CUDA's default stream."""

    def event(self, device: int, *, timing: bool = False) -> Event:
        """A new event.  ``timing``: it takes the time, for `elapsed_seconds`, which costs a little."""

    def record(self, event: Event, stream: Stream) -> None:
        """From here on the event means: what the stream was given up to now.  They are of one device."""

    def wait(self, stream: Stream, event: Event) -> None:
        """The stream's later work begins after the event as it was recorded last; of any device.

        The stream joins the capture in which the event was recorded, and must be waited for in turn, in the stream
        that began it, before that ends.
        """

    def synchronize(self, what: Stream | Event) -> None:
        """Waits, on the host, for a stream's work or for an event.  Not while it is captured."""

    def elapsed_seconds(self, begin: Event, end: Event) -> float:
        """Device time between two events of one device that were made with ``timing`` and that have come."""

    def upload(self, destination: DeviceMemory, source: NDArray[Any], stream: Stream) -> None:
        """Host to device; as many bytes as the destination has, contiguous."""

    def download(self, destination: NDArray[Any], source: DeviceMemory, stream: Stream) -> None:
        """Device to host; as many bytes as the source has, contiguous."""

    def copy(self, destination: DeviceMemory, source: DeviceMemory, stream: Stream) -> None:
        """Device to device, as many bytes in both, which do not overlap.

        The stream is of one of the two devices.  Between two, that one must have access to the other
        (`enable_peer_access`); without, the way leads through pinned host memory.
        """

    def fill(self, destination: DeviceMemory, byte: int, stream: Stream) -> None:
        """Sets every byte, to 0 … 255."""

    def compile_modules(
        self, device: int, modules: Iterable[tuple[str, Defines]], progress: CompileProgress | None = None
    ) -> None:
        """Compiles those (name, defines) that are not in the cache, so that `load_module` of them takes no time."""

    def load_module(self, device: int, name: str, defines: Defines | None = None) -> Module:
        """The kernels of ``name``.cu with these macros; KernelError where it does not compile, or is not there.

        The same again for the same again; that also while this thread captures, but nothing new.
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
        """Runs a kernel.

        Args:
            grid, block: blocks, and threads of each, along x, y, z; one where they say nothing.
            arguments: device memory, and numpy scalars of the very types of the kernel's parameters: a device takes
                what it is given byte by byte.  Memory of another device only with `enable_peer_access`.
            stream: of the module's device.
            shared_bytes: dynamic shared memory of each block, up to the device's.
        """

    def begin_capture(self, stream: Stream) -> None:
        """From now on, work given to the stream, and to those that join it, is recorded for a graph, not run.

        Until it ends this thread must not allocate, or load a module that was not loaded before: KernelError.  Nor
        must it wait for one of the streams or their events, or copy host memory that is not pinned: that is the end
        of the capture, with a KernelError here or where it ends (emulated devices notice all of it).  To run the
        work once before capturing it is wise: CUDA loads kernels when they are first used.
        """

    def end_capture(self, stream: Stream) -> Graph:
        """The graph captured on a stream since `begin_capture`, which ends even on error.

        Raises KernelError if something was done that cannot be captured, or a stream that joined was not waited for.
        """

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Does the graph's work in the place where it stands in this stream, one replay at a time."""


# -- What all drivers check ----------------------------------------------------------------------------------------


def check_device(device: int, count: int) -> None:
    """Raises DeviceError where there is no device of that number."""
    if not 0 <= device < count:
        here = "there is only device 0" if count == 1 else f"there are {count}, 0 to {count - 1}"
        raise DeviceError(
            f"there is no CUDA device {device}: {here} (the environment variable CUDA_VISIBLE_DEVICES hides others)"
        )


def check_capability(device: int, properties: DeviceProperties) -> None:
    """Raises DeviceError where a device is older than `MINIMUM_CAPABILITY`."""
    if properties.capability < MINIMUM_CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (properties.capability, MINIMUM_CAPABILITY))
        raise DeviceError(
            f"CUDA device {device}, {properties.name}, has compute capability {have}, but the kernels need {need} "
            "(a GPU of 2018 or later): use another device, or ",
            ON_CPU,
        )


def check_sizes(destination: int, source: int) -> None:
    """Raises UsageError where a copy's two sides differ."""
    if destination != source:
        raise UsageError(f"a copy of {source} bytes to a place of {destination}")


def host_array(array: NDArray[Any], *, written: bool) -> NDArray[Any]:
    """A host array that a device may copy; UsageError where it has gaps, or would be written but must not be."""
    if not array.flags.c_contiguous:
        raise UsageError(
            f"an array of strides {array.strides} is not contiguous, and cannot be copied to or from a device"
        )
    if written and not array.flags.writeable:
        raise UsageError("the array that a download writes to is read-only")
    return array
