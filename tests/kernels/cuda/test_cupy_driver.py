"""CuPy's driver: its errors, the state of the calling program, and the functions that CuPy must have."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from localllm.errors import DeviceError, DeviceLostError, DeviceMemoryError, KernelError, NotEnoughMemoryError
from localllm.kernels.cuda import cupy_driver, installation
from localllm.kernels.cuda.cupy_driver import CupyDriver
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.fake_cupy import FakeCupy, FakeError, FakeNVRTC, FakeRuntime
from tests.helpers.data import ROOT
from tests.kernels.cuda.conftest import SOURCES
from tests.kernels.cuda.python_kernels import KERNELS


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    cupy = FakeCupy([1 << 20, 1 << 20], KERNELS)
    monkeypatch.setattr(cupy_driver, "import_cupy", lambda: cupy)
    return cupy


@pytest.fixture
def runtime(fake: FakeCupy) -> FakeRuntime:
    found: FakeRuntime = fake.cuda.runtime
    return found


@pytest.fixture
def driver(fake: FakeCupy) -> CupyDriver:
    return CupyDriver(SOURCES)


# -- CuPy ----------------------------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> list[str]:
    return [p for p in inspect.signature(function).parameters if p != "self"]


@pytest.mark.parametrize(
    ("fake_class", "path"), [(FakeRuntime, "runtime"), (FakeNVRTC, "nvrtc")], ids=["runtime", "nvrtc"]
)
def test_cupy_has_the_functions_of_the_fake(fake_class: type, path: str) -> None:
    """Parameters must have the names of CuPy's docstrings, such as "memcpyAsync(intptr_t dst, …)"."""
    module = getattr(pytest.importorskip("cupy").cuda, path)
    names = [name for name in vars(fake_class) if not name.startswith("_") and name != "view"]
    assert len(names) >= 7
    for name in names:
        if callable(mine := getattr(fake_class, name)) and not isinstance(mine, type):
            said = getattr(module, name).__doc__.partition("(")[2].partition(")")[0]
            assert parameters(mine) == [part.split()[-1] for part in said.split(",") if part], name
        else:
            assert hasattr(module, name), name


def test_cupy_has_the_other_functions() -> None:
    cuda = pytest.importorskip("cupy").cuda
    for owner, methods in {
        "Module": ("load", "get_function"),
        "Stream": ("begin_capture", "end_capture", "wait_event", "synchronize"),
        "Event": ("record", "synchronize"),
        "Graph": ("launch",),
    }.items():
        for method in methods:
            assert callable(getattr(getattr(cuda, owner), method)), (owner, method)
    assert isinstance(cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, int)
    assert callable(cuda.driver.funcSetAttribute)
    assert callable(cuda.get_elapsed_time)


def test_cupys_errors_have_a_status() -> None:
    cuda = pytest.importorskip("cupy").cuda
    errors: list[Any] = [cuda.runtime.CUDARuntimeError(700)]
    if installation.driver_cuda() is not None:  # this error requests its text from the driver
        errors.append(cuda.driver.CUDADriverError(700))
    for error in errors:
        assert error.status == 700
        assert "ILLEGAL_ADDRESS" in str(error) or "IllegalAddress" in str(error)
    assert issubclass(cuda.driver.CUDADriverError, RuntimeError)


def test_cuda_modules_can_be_imported_without_cupy() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "import localllm, localllm.kernels.cuda.cupy_driver as d\n"
        "d.installation = __import__('localllm.kernels.cuda.installation', fromlist=['x'])\n"
        "d.installation.driver_cuda = lambda: (12, 4)\n"
        "try: d.open_driver()\n"
        "except localllm.DeviceError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 'CuPy is not installed; pip install "localllm[cuda12]"' in done.stdout


# -- Installation --------------------------------------------------------------------------------------------------


def installed(monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int] | None) -> None:
    monkeypatch.setattr(installation, "driver_cuda", lambda: cuda)


@pytest.mark.parametrize(
    ("cuda", "says"),
    [
        (None, "NVIDIA's driver is not installed here"),
        ((11, 8), r"runs CUDA up to 11\.8, but localllm needs 12\.0: install a newer driver"),
        ((12, 9), r'CuPy is not installed; pip install "localllm\[cuda12\]"'),
        ((13, 0), r'CuPy is not installed; pip install "localllm\[cuda13\]"'),
    ],
)
def test_missing_software(monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int] | None, says: str) -> None:
    installed(monkeypatch, cuda)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=says):
        cupy_driver.open_driver()


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"), OSError("no ~/.cupy")]
)
def test_a_broken_cupy(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    installed(monkeypatch, (13, 0))
    monkeypatch.setattr("importlib.import_module", mock.Mock(side_effect=error))
    with pytest.raises(DeviceError, match=f"CuPy is installed but does not work.*{error}"):
        cupy_driver.open_driver()


@pytest.mark.parametrize(
    ("cuda", "status", "says"),
    [
        ((13, 0), 100, "finds none"),
        ((12, 4), 35, r'is for CUDA 13\.2, but .* runs up to 12\.4: .* pip install "localllm\[cuda12\]"'),
        ((13, 0), 999, r"CUDA error 999; `nvidia-smi` may show more"),
    ],
)
def test_no_devices(
    monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, cuda: tuple[int, int], status: int, says: str
) -> None:
    installed(monkeypatch, cuda)
    monkeypatch.setattr(runtime, "getDeviceCount", mock.Mock(side_effect=FakeError(status)))
    with pytest.raises(DeviceError, match=f"no CUDA device can be used: .*{says}"):
        cupy_driver.open_driver()


def test_nvrtc_is_missing(monkeypatch: pytest.MonkeyPatch, fake: FakeCupy) -> None:
    missing = mock.Mock(side_effect=RuntimeError("libnvrtc.so.13 not found"))
    monkeypatch.setattr(fake.cuda.nvrtc, "getVersion", missing)
    with pytest.raises(DeviceError, match=r'NVRTC is missing; pip install "localllm\[cuda13\]" \(libnvrtc'):
        cupy_driver.open_driver()


def test_cupy_without_its_nvrtc() -> None:
    """The real CuPy raises this error if the library is missing."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    code = (
        "import cuda.pathfinder\n"
        "def missing(name): raise cuda.pathfinder.DynamicLibNotFoundError(name)\n"
        "cuda.pathfinder.load_nvidia_dynamic_lib = missing\n"
        "import cupy\n"
        "from localllm.kernels.cuda.installation import import_nvrtc\n"
        "from localllm import DeviceError\n"
        "try: import_nvrtc(cupy)\n"
        "except DeviceError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "NVRTC is missing; pip install" in done.stdout


# -- Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (700, DeviceLostError, "device failed, here or in earlier work, and is lost to this process"),
        (719, DeviceLostError, "lost to this process"),
        (214, DeviceLostError, "faults of the hardware"),
        (3, DeviceError, "forked process"),
        (209, DeviceError, "older than the NVRTC installed"),
        (222, DeviceError, "install a newer driver"),
        (701, KernelError, "could not finish its work"),
        (901, KernelError, "could not finish its work"),
        (1, DeviceError, "CUDA device 0 could not finish its work: CUDA error 1"),
    ],
)
def test_cuda_errors(driver: CupyDriver, runtime: FakeRuntime, status: int, kind: type, says: str) -> None:
    stream = driver.stream(0)
    runtime.fail_next = status
    with pytest.raises(kind, match=says) as caught:
        driver.synchronize(stream)
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, FakeError)


def test_no_memory_for_cuda_itself(driver: CupyDriver, runtime: FakeRuntime) -> None:
    stream = driver.stream(0)
    runtime.fail_next = 2
    with pytest.raises(DeviceMemoryError, match=r"device 0 cannot allocate memory: 1,048,576 of its"):
        driver.synchronize(stream)


def test_no_memory_to_lock(driver: CupyDriver, runtime: FakeRuntime) -> None:
    runtime.fail_next = 2
    with pytest.raises(NotEnoughMemoryError, match="no 100 bytes of host memory to lock") as caught:
        driver.pinned(100)
    assert not isinstance(caught.value, DeviceMemoryError)


def test_memory_of_a_lost_device_is_freed_silently(driver: CupyDriver, runtime: FakeRuntime) -> None:
    memory = driver.allocate(1, 100)
    runtime.fail_next = 700
    del memory
    gc.collect()
    assert runtime.fail_next is None


# -- The calling program -------------------------------------------------------------------------------------------


def test_the_current_device_does_not_change(driver: CupyDriver, runtime: FakeRuntime) -> None:
    runtime.current = 0
    stream, memory, host = driver.stream(1), driver.allocate(1, 8), driver.pinned(8)
    module = driver.load_module(1, "arithmetic")
    driver.upload(memory, host, stream)
    driver.launch(module, "add_step", (1,), (1,), (memory, memory, np.int32(1)), stream)
    driver.begin_capture(stream)
    driver.replay(driver.end_capture(stream), stream)
    assert driver.memory_info(1).free == (1 << 20) - 8
    with pytest.raises(DeviceMemoryError):
        driver.allocate(1, 1 << 21)
    del memory
    gc.collect()
    assert driver.memory_info(1).free == 1 << 20
    assert runtime.current == 0


def test_peer_access_that_another_library_enabled(driver: CupyDriver, runtime: FakeRuntime) -> None:
    runtime.peers.add((0, 1))
    driver.enable_peer_access(0, 1)
    driver.copy(driver.allocate(1, 8), driver.allocate(0, 8), driver.stream(0))
