"""Emulated devices that record calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.cuda import driver as interface
from localllm.kernels.cuda.driver import CompileProgress, Defines, DeviceMemory
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver, EmulatedModule, check_arguments, launch_shape
from tests.cuda_on_cpu.emulated_kernels import Kernels, PythonKernels

#: A module: its name and macros.
Key = tuple[str, frozenset[tuple[str, int | str]]]


class WatchedDriver(EmulatedDriver):
    """Counts calls.

    Attributes:
        calls: number of calls by method.
        kernels: number of launches by kernel.
        pinned_bytes: allocated pinned memory.
        downloaded_bytes, uploaded_bytes: bytes copied from and to devices.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.pinned_bytes = self.downloaded_bytes = self.uploaded_bytes = 0

    def forget(self) -> None:
        self.calls.clear()
        self.kernels.clear()
        self.downloaded_bytes = self.uploaded_bytes = 0

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        self.pinned_bytes += n_bytes
        return super().pinned(n_bytes)

    def upload(self, destination: DeviceMemory, source: NDArray[Any], stream: interface.Stream) -> None:
        self.calls["upload"] += 1
        self.uploaded_bytes += destination.n_bytes
        super().upload(destination, source, stream)

    def download(self, destination: NDArray[Any], source: DeviceMemory, stream: interface.Stream) -> None:
        self.calls["download"] += 1
        self.downloaded_bytes += source.n_bytes
        super().download(destination, source, stream)

    def launch(self, module: interface.Module, kernel: str, *more: Any, **options: Any) -> None:
        self.calls["launch"] += 1
        self.kernels[kernel] += 1
        super().launch(module, kernel, *more, **options)

    def replay(self, graph: interface.Graph, stream: interface.Stream) -> None:
        self.calls["replay"] += 1
        super().replay(graph, stream)


class KernellessDriver(WatchedDriver):
    """Devices whose kernels do nothing and are not compiled.

    Attributes:
        compiled, loaded: modules.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.compiled: set[Key] = set()
        self.loaded: set[Key] = set()

    def compile_modules(
        self, device: int, modules: Iterable[tuple[str, Defines]], progress: CompileProgress | None = None
    ) -> None:
        self.compiled |= {(name, frozenset(defines.items())) for name, defines in modules}

    def load_module(self, device: int, name: str, defines: Defines | None = None) -> EmulatedModule:
        self.loaded.add((name, frozenset((defines or {}).items())))
        return EmulatedModule(device, name, _NOTHING)

    def download(self, destination: NDArray[Any], source: DeviceMemory, stream: interface.Stream) -> None:
        destination[...] = 0  # memory of the device has no meaning

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
        self.calls["launch"] += 1
        self.kernels[kernel] += 1
        launch_shape(kernel, grid, block, shared_bytes, self.properties(stream.device))
        check_arguments(kernel, arguments)


_NOTHING: Kernels = PythonKernels("nothing", {})
