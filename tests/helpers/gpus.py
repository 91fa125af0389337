"""Simulated machines with and without GPUs."""

from __future__ import annotations

import pytest

from localllm.errors import DeviceError
from localllm.kernels.cuda import cupy_driver, installation
from localllm.kernels.cuda.driver import Driver


def have_gpus(monkeypatch: pytest.MonkeyPatch, found: Driver | DeviceError | None) -> None:
    """Simulate these devices, a driver that does not work, or no driver."""

    def open_driver() -> Driver:
        if isinstance(found, DeviceError):
            raise found
        if found is None:
            raise DeviceError("no driver")
        return found

    monkeypatch.setattr(installation, "driver_cuda", lambda: None if found is None else (13, 0))
    monkeypatch.setattr(cupy_driver, "open_driver", open_driver)
