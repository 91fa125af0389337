"""The devices that tests of CUDA code run on: emulated ones always, real ones where there are any."""

from __future__ import annotations

import pytest

from localllm.errors import DeviceError
from localllm.kernels.cuda import cupy_driver
from localllm.kernels.cuda.cupy_driver import CupyDriver
from localllm.kernels.cuda.driver import Driver
from tests.cuda_on_cpu import build, nvrtc
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.fake_cupy import FakeCupy
from tests.helpers.data import ROOT
from tests.kernels.cuda.device import Device
from tests.kernels.cuda.python_kernels import KERNELS

#: CUDA sources of the tests' own.
SOURCES = ROOT / "tests" / "kernels" / "cuda" / "sources"


@pytest.fixture(params=["lazy", "eager", "random", "translated", "cupy without CUDA", "real"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Devices with the kernels of ``sources``.

    Two emulated ones, whose work runs in one order or another and whose kernels are in Python, or translated; two
    that `CupyDriver` takes for real; and the machine's own.
    """
    kind = request.param
    if kind in ("lazy", "eager", "random"):
        return EmulatedDriver(2, order=kind, kernels=KERNELS)
    if kind == "translated":
        if reason := nvrtc.missing():
            pytest.skip(reason)
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
    """A device with the project's kernels."""
    if request.param == "emulated":
        if reason := nvrtc.missing() or build.missing():
            pytest.skip(reason)
        return Device(EmulatedDriver(), tile_rows=(16,))
    try:
        return Device(CupyDriver())
    except DeviceError as error:
        pytest.skip(str(error))
