"""The CuPy functions that the driver calls, on host memory, to run `CupyDriver` without a GPU.

Calls take effect at once, or when a captured graph is replayed.  A test compares names and parameters with CuPy's.
Only a GPU shows what CUDA does with the calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from localllm.kernels.cuda.driver import Defines
from tests.cuda_on_cpu.emulated_kernels import PythonKernel

_POISON = 0xFF


class FakeError(RuntimeError):
    """A substitute for CuPy's CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class FakeRuntime:
    """A substitute for cupy.cuda.runtime with devices of the given bytes.  ``fail_next``: status of the next call."""

    CUDARuntimeError = FakeError
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3
    hostAllocPortable = 1
    streamCaptureModeRelaxed = 2

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.current = 0
        self.blocks: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}
        self.streams: dict[int, FakeStream] = {}
        self.peers: set[tuple[int, int]] = set()
        self.fail_next: int | None = None

    def _may_fail(self) -> None:
        if (status := self.fail_next) is not None:
            self.fail_next = None
            raise FakeError(status)

    def getDeviceCount(self) -> int:
        return len(self.sizes)

    def runtimeGetVersion(self) -> int:
        return 13020

    def getDevice(self) -> int:
        return self.current

    def setDevice(self, device: int) -> None:
        self.current = device

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {
            "name": b"fake GPU",
            "major": 8,
            "minor": 0,
            "multiProcessorCount": 4,
            "totalGlobalMem": self.sizes[device],
            "sharedMemPerBlockOptin": 99 << 10,
        }

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:{device + 1:02x}:00.0"

    def memGetInfo(self) -> tuple[int, int]:
        used = sum(len(array) for device, array in self.blocks.values() if device == self.current)
        return self.sizes[self.current] - used, self.sizes[self.current]

    def deviceCanAccessPeer(self, device: int, peerDevice: int) -> int:
        return int(device != peerDevice)

    def deviceEnablePeerAccess(self, peerDevice: int) -> None:
        if (self.current, peerDevice) in self.peers:
            raise FakeError(704)
        self.peers.add((self.current, peerDevice))

    def malloc(self, size: int) -> int:
        self._may_fail()
        if size > self.memGetInfo()[0]:
            raise FakeError(2)
        return self._block(self.current, size)

    def hostAlloc(self, size: int, flags: int) -> int:
        self._may_fail()
        return self._block(-1, size)

    def _block(self, device: int, size: int) -> int:
        raw = np.full(size + 256, _POISON, np.uint8)
        array = raw[-raw.ctypes.data % 256 :][:size]
        self.blocks[array.ctypes.data] = (device, array)
        return int(array.ctypes.data)

    def free(self, ptr: int) -> None:
        self._may_fail()
        assert self.blocks[ptr][0] == self.current
        del self.blocks[ptr]

    def freeHost(self, ptr: int) -> None:
        del self.blocks[ptr]

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._may_fail()
        self._put(stream, lambda: ctypes.memmove(dst, src, size))

    def memcpyPeerAsync(self, dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int) -> None:
        self._may_fail()
        self._put(stream, lambda: ctypes.memmove(dst, src, size))

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        self._may_fail()
        self._put(stream, lambda: ctypes.memset(ptr, value, size))

    def _put(self, stream: int, action: Callable[[], object]) -> None:
        self.streams[stream].put(action)

    def view(self, address: int) -> np.ndarray[Any, Any]:
        """Return the memory at an address."""
        for begin, (_, array) in self.blocks.items():
            if begin <= address < begin + len(array):
                return array[address - begin :]
        raise FakeError(700)


class FakeStream:
    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime
        self.device = runtime.current
        self.ptr = id(self)
        runtime.streams[self.ptr] = self
        self.captured: list[Callable[[], object]] | None = None

    def put(self, action: Callable[[], object]) -> None:
        if self.captured is None:
            action()
        else:
            self.captured.append(action)

    def wait_event(self, event: FakeEvent) -> None:
        self.captured = self.captured if event.captured is None else event.captured

    def synchronize(self) -> None:
        self.runtime._may_fail()
        if self.captured is not None:
            raise FakeError(900)

    def begin_capture(self, mode: int) -> None:
        assert self.runtime.current == self.device
        self.captured = []

    def end_capture(self) -> SimpleNamespace:
        actions = self.captured
        if actions is None:
            raise FakeError(401)
        for stream in self.runtime.streams.values():
            if stream.captured is actions:
                stream.captured = None
        return SimpleNamespace(launch=lambda stream: [action() for action in actions])


class FakeEvent:
    def __init__(self) -> None:
        self.captured: list[Callable[[], object]] | None = None
        self.milliseconds = 0.0

    def record(self, stream: FakeStream) -> None:
        self.captured = stream.captured
        self.milliseconds = 1.0 + max((e.milliseconds for e in _EVENTS), default=0.0)
        _EVENTS.append(self)

    def synchronize(self) -> None:
        pass


_EVENTS: list[FakeEvent] = []


class FakeFunction:
    """A kernel in Python with the call signature of CuPy's kernels."""

    def __init__(self, runtime: FakeRuntime, kernel: PythonKernel) -> None:
        self.runtime, self.kernel = runtime, kernel
        self.ptr = id(self)
        self.shared_limit = 48 << 10

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int, stream: FakeStream
    ) -> None:
        if shared_mem > self.shared_limit:
            raise FakeError(1)
        pairs = list(zip(args, self.kernel.parameters, strict=True))
        given = [self.runtime.view(int(a)) if t is np.ndarray else a for a, t in pairs]
        stream.put(lambda: self.kernel.function(grid, block, *given))


class FakeNVRTC:
    """Compiles nothing: the "code" consists of the module's name and its macros."""

    NVRTCError = FakeError

    def __init__(self) -> None:
        self.programs: dict[int, list[bytes]] = {}

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def getSupportedArchs(self) -> tuple[int, ...]:
        return 75, 80, 90

    def createProgram(self, src: str, name: str, headers: tuple[str, ...], include_names: tuple[str, ...]) -> int:
        self.programs[len(self.programs)] = [name.removesuffix(".cu").encode()]
        return len(self.programs) - 1

    def compileProgram(self, prog: int, options: Sequence[str]) -> None:
        self.programs[prog] += [option[2:].encode() for option in options if option.startswith("-D")]

    def getCUBIN(self, prog: int) -> bytes:
        return b" ".join(self.programs[prog])

    def getProgramLog(self, prog: int) -> str:
        return ""

    def destroyProgram(self, prog: int) -> None:
        pass


class FakeCupy:
    """A substitute for the package cupy.

    Args:
        sizes: the memory of each device.
        kernels: modules of kernels in Python, as functions of the macros, by name.
    """

    def __init__(
        self, sizes: Sequence[int], kernels: Mapping[str, Callable[[Defines], Mapping[str, PythonKernel]]]
    ) -> None:
        runtime = FakeRuntime(sizes)
        functions: dict[int, FakeFunction] = {}

        class Module:
            def load(self, cubin: bytes) -> None:
                name, *macros = cubin.decode().split()
                self.kernels = kernels[name](dict(macro.split("=") for macro in macros))

            def get_function(self, name: str) -> FakeFunction:
                if name not in self.kernels:
                    raise FakeError(500)
                function = FakeFunction(runtime, self.kernels[name])
                functions[function.ptr] = function
                return function

        def set_attribute(f: int, attribute: int, value: int) -> None:
            functions[f].shared_limit = value

        self.cuda = SimpleNamespace(
            runtime=runtime,
            nvrtc=FakeNVRTC(),
            driver=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, funcSetAttribute=set_attribute),
            Stream=lambda non_blocking: FakeStream(runtime),
            Event=lambda disable_timing: FakeEvent(),
            Module=Module,
            get_elapsed_time=lambda start_event, end_event: end_event.milliseconds - start_event.milliseconds,
        )
