"""Devices for tests of CUDA code: emulated devices, and real ones if there are any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.errors import DeviceError
from localllm.kernels.cuda import cupy_driver
from localllm.kernels.cuda.cupy_driver import CupyDriver
from localllm.kernels.cuda.driver import Driver
from localllm.llm import LLM
from localllm.loading import devices
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.fake_cupy import FakeCupy
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.helpers.data import ROOT
from tests.helpers.recorder import CPUOps, backend_of
from tests.kernels.cuda.device import Device
from tests.kernels.cuda.python_kernels import KERNELS

#: CUDA sources that only tests use.
SOURCES = ROOT / "tests" / "kernels" / "cuda" / "sources"
PLENTY = 1 << 40


@pytest.fixture(params=["lazy", "eager", "random", "translated", "cupy without CUDA", "real"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Devices with the kernels of ``sources``.

    Emulated devices with different orders of work and with Python or translated kernels, simulated devices for
    `CupyDriver`, and the devices of this machine.
    """
    kind = request.param
    if kind in ("lazy", "eager", "random"):
        return EmulatedDriver(2, order=kind, kernels=KERNELS)
    if kind == "translated":
        skip_without_tools()
        return EmulatedDriver(2, folder=SOURCES, mode="check")
    if kind == "cupy without CUDA":
        monkeypatch.setattr(cupy_driver, "import_cupy", lambda: FakeCupy([1 << 30] * 2, KERNELS))
        monkeypatch.setattr(cupy_driver, "FOLDER", SOURCES)
    try:
        return CupyDriver(SOURCES)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["emulated", "real"])
def device(request: pytest.FixtureRequest) -> Device:
    """A device with the kernels of localllm."""
    if request.param == "emulated":
        skip_without_tools()
        return Device(EmulatedDriver(), tile_rows=(16,))
    try:
        return Device(CupyDriver())
    except DeviceError as error:
        pytest.skip(str(error))


@cache
def cpu() -> CPUOps:
    return CPUOps(threads=1)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Load a model on the CPU and on other backends."""
    opened: list[LLM] = []

    def load_on(path: Path, *backends: Any, **options: Any) -> LLM:
        host = devices.Device("cpu", "kernels", 1, 1, cpu().backend, lambda: None)
        gpus = [
            devices.Device(f"cuda:{i}", "kernels", 1, 1, backend_of(ops), lambda: None, lambda: PLENTY)
            for i, ops in enumerate(backends)
        ]
        monkeypatch.setattr("localllm.loading.load.open_devices", lambda *_, **__: (host, *gpus))
        opened.append(localllm.load(path, **options))
        return opened[-1]

    yield load_on
    for llm in opened:
        llm.close()
