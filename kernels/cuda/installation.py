"""Checks that everything a CUDA device needs is installed, and reports missing software.

Three things are needed: NVIDIA's driver, which belongs to the system; CuPy, which binds it; and NVRTC, NVIDIA's
compiler as a library.  CuPy and NVRTC come with ``pip install "localllm[cuda13]"``, or ``[cuda12]`` for older
drivers.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from typing import Any

from localllm.errors import ON_CPU, Argument, DeviceError

#: The oldest version of CUDA that CuPy supports.
OLDEST_CUDA = (12, 0)
# Errors of cudaGetDeviceCount.
_NO_DEVICE = 100


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest version of CUDA that NVIDIA's driver supports; None without a driver."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    version = ctypes.c_int()
    try:
        if ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def import_cupy() -> Any:
    """Return the package cupy.  Raises DeviceError if it cannot be used."""
    cuda = driver_cuda()
    if cuda is None:
        raise _no_device("NVIDIA's driver is not installed here; install it, or use ", ON_CPU)
    if cuda < OLDEST_CUDA:
        needed = f"but localllm needs {_dotted(OLDEST_CUDA)}: install a newer driver, or use "
        raise _no_device(f"NVIDIA's driver here runs CUDA up to {_dotted(cuda)}, {needed}", ON_CPU)
    try:
        return importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise _broken(error) from error
        install = f'CuPy is not installed; pip install "localllm[{extra(cuda)}]", or use '
        raise _no_device(install, ON_CPU) from error
    except Exception as error:  # a library that it needs, a folder that it cannot make, …
        raise _broken(error) from error


def count_devices(cupy: Any) -> int:
    """Return the number of CUDA devices.  Raises DeviceError if there is no usable device."""
    runtime = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        if error.status != _NO_DEVICE:
            raise _unusable(runtime, error) from error
        count = 0
    if count == 0:
        advice = "`nvidia-smi` lists them, the environment variable CUDA_VISIBLE_DEVICES hides them"
        raise _no_device(f"NVIDIA's driver finds none ({advice}); use ", ON_CPU)
    return count


def _unusable(runtime: Any, error: Exception) -> DeviceError:
    """Return the error for a driver that fails to count its devices."""
    cuda, built = driver_cuda(), _version(runtime.runtimeGetVersion())
    if cuda is not None and cuda[0] < built[0]:
        return DeviceError(
            f"no CUDA device can be used: the CuPy installed is for CUDA {_dotted(built)}, but NVIDIA's driver here "
            f"runs up to {_dotted(cuda)}: install a newer driver, or pip uninstall cupy-cuda{built[0]}x and "
            f'pip install "localllm[{extra(cuda)}]"'
        )
    return _no_device(f"{error}; `nvidia-smi` may show more; or use ", ON_CPU)


def import_nvrtc(cupy: Any) -> Any:
    """Return CuPy's binding of NVRTC, which needs no driver."""
    nvrtc = cupy.cuda.nvrtc
    try:
        nvrtc.getVersion()
    except Exception as error:
        raise DeviceError(
            f"CUDA kernels cannot be compiled: NVRTC is missing; pip install "
            f'"localllm[{extra(_version(cupy.cuda.runtime.runtimeGetVersion()))}]" ({error})'
        ) from error
    return nvrtc


def extra(cuda: tuple[int, int]) -> str:
    """Return localllm's extra for a version of CUDA."""
    return "cuda13" if cuda >= (13, 0) else "cuda12"


def _broken(error: Exception) -> DeviceError:
    again = "CuPy is installed but does not work; install localllm's extra again, or use "
    return _no_device(again, ON_CPU, f" ({error})")


def _no_device(*why: str | Argument) -> DeviceError:
    return DeviceError("no CUDA device can be used: ", *why)


def _version(number: int) -> tuple[int, int]:
    """Convert CUDA's version number: 13020 is 13.2."""
    return number // 1000, number % 1000 // 10


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
