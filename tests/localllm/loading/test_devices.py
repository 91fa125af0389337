"""Device names on machines with and without GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.errors import DeviceError, UsageError
from localllm.kernels.cuda.driver import DeviceProperties, Driver
from localllm.loading.devices import GPU_OVERHEAD_BYTES, gpu_memory, open_devices
from localllm.loading.load import LoadOptions, plan_file
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.helpers import tiny_models
from tests.helpers.gpus import have_gpus

Machine = Callable[[Driver | DeviceError | None], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Simulate these devices, a driver that does not work, or no driver."""
    return lambda found: have_gpus(monkeypatch, found)


class MixedDriver(EmulatedDriver):
    """Three devices, the first of them too old."""

    def __init__(self) -> None:
        super().__init__(3, memory=1 << 34)

    def properties(self, device: int) -> DeviceProperties:
        found = super().properties(device)
        old = DeviceProperties("old GPU", (6, 1), 4, found.total_bytes, 48 << 10, found.bus_id)
        return old if device == 0 else found


def names(device: str) -> list[str]:
    opened = open_devices(device, threads=1)
    for each in opened:
        each.close()
    return [each.name for each in opened]


def test_without_a_driver(machine: Machine) -> None:
    machine(None)
    assert names("auto") == ["cpu"]
    assert open_devices("auto", threads=1)[0].note is None
    for device in ("cuda", "gpu", "cuda:0"):
        with pytest.raises(DeviceError, match="no driver"):
            open_devices(device)


def test_with_devices(machine: Machine) -> None:
    machine(EmulatedDriver(3))
    for device in ("auto", "cuda", "gpu", "CUDA"):
        assert names(device) == ["cpu", "cuda:0", "cuda:1", "cuda:2"]
    assert names("cuda:2,0") == ["cpu", "cuda:2", "cuda:0"]
    assert names("cpu") == ["cpu"]
    with pytest.raises(DeviceError, match="there is no CUDA device 3: there are 3, 0 to 2"):
        open_devices("cuda:3")
    for name in ("cuda:", "cuda:-1", "cuda_0", "cuda:0,", "cuda:" + 5000 * "9", "cuda:\N{ARABIC-INDIC DIGIT ONE}"):
        with pytest.raises(DeviceError, match=r"there is no device 'cuda"):
            open_devices(name)


def test_a_driver_that_does_not_work_is_spoken_of(machine: Machine, tmp_path: Path) -> None:
    machine(DeviceError("no CUDA device can be used: CuPy is not installed"))
    (cpu,) = open_devices("auto", threads=1)
    assert str(cpu.note) == "the model runs on the CPU: no CUDA device can be used: CuPy is not installed"
    with pytest.raises(DeviceError, match="CuPy is not installed"):
        open_devices("cuda")
    path = tiny_models.tiny_gguf(tmp_path / "tiny.gguf")
    options = LoadOptions(
        path,
        device="auto",
        n_gpu_layers=None,
        tensor_split=None,
        context=None,
        threads=1,
        isa=None,
        parallel=1,
        cache_type="f16",
        chat_template=None,
        draft_model=None,
        progress=None,
        planned=None,
    )
    plan = plan_file(options)
    assert plan.placement.devices == ("cpu",)
    assert [*map(str, plan.notices)] == [str(cpu.note)]
    assert not plan.has_gpus
    with pytest.raises(UsageError, match=r"n_gpu_layers is 3, but the model runs on the CPU: .* not installed"):
        plan_file(replace(options, n_gpu_layers=3))


def test_devices_that_are_too_old(machine: Machine) -> None:
    machine(MixedDriver())
    assert names("cuda") == names("auto") == ["cpu", "cuda:1", "cuda:2"]
    with pytest.raises(DeviceError, match=r"old GPU, has compute capability 6\.1, but the kernels need 7\.5"):
        open_devices("cuda:0")
    machine(EmulatedDriver(2, capability=(7, 0)))
    assert names("auto") == ["cpu"]
    with pytest.raises(DeviceError, match=r"compute capability 7\.0"):
        open_devices("cuda")


def test_properties_of_a_device(machine: Machine) -> None:
    driver = EmulatedDriver(memory=GPU_OVERHEAD_BYTES + 1000)
    machine(driver)
    _, gpu = open_devices("cuda", threads=1)
    assert (gpu.name, gpu.kernels, gpu.threads) == ("cuda:0", "CUDA kernels for emulated GPU", 1)
    assert gpu.free_memory is not None
    assert gpu.free_memory() == 1000
    kept = driver.allocate(0, 2000)
    assert gpu.free_memory() == 0
    del kept


def test_memory_of_gpus_that_work(machine: Machine) -> None:
    machine(None)
    assert gpu_memory("auto") == 0
    machine(DeviceError("broken"))
    assert gpu_memory("cuda") == 0
    machine(MixedDriver())
    of_one = (1 << 34) - GPU_OVERHEAD_BYTES
    assert gpu_memory("auto") == gpu_memory("cuda") == 2 * of_one
    assert gpu_memory("cuda:0,2") == of_one
    assert gpu_memory("cuda:1,7") == of_one
    assert gpu_memory("cpu") == gpu_memory("reference") == 0
