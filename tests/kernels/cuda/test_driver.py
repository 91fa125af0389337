"""Behaviour that all drivers share: emulated devices, `CupyDriver` on a fake CuPy, and real devices."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import DeviceError, DeviceMemoryError, KernelError, UsageError
from localllm.kernels.cuda.driver import DeviceMemory, Driver, Stream
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver

N = 1000
GRID, BLOCK = (8,), (128,)


def upload(driver: Driver, values: NDArray[np.float32], stream: Stream) -> DeviceMemory:
    memory = driver.allocate(stream.device, values.nbytes)
    driver.upload(memory, values, stream)
    driver.synchronize(stream)
    return memory


def download(driver: Driver, memory: DeviceMemory, stream: Stream) -> NDArray[np.float32]:
    values = np.zeros(memory.n_bytes // 4, np.float32)
    driver.download(values, memory, stream)
    driver.synchronize(stream)
    return values


@pytest.fixture
def values() -> NDArray[np.float32]:
    return np.arange(N, dtype=np.float32)


@pytest.fixture
def stream(driver: Driver) -> Stream:
    return driver.stream(0)


# -- Devices and memory --------------------------------------------------------------------------------------------


def test_properties(driver: Driver) -> None:
    for device in range(driver.device_count):
        properties = driver.properties(device)
        assert properties.name
        assert properties.capability >= (7, 5)
        assert properties.shared_bytes >= 64 << 10
        assert properties.n_multiprocessors > 0
        assert len(properties.bus_id.split(":")) == 3
        assert 0 < driver.memory_info(device).free <= driver.memory_info(device).total <= properties.total_bytes


def test_unknown_devices_are_refused(driver: Driver) -> None:
    for wrong in (driver.device_count, -1):
        for use in (driver.properties, driver.memory_info, driver.stream, driver.event):
            with pytest.raises(DeviceError, match=f"there is no CUDA device {wrong}: there (is only|are) "):
                use(wrong)
        with pytest.raises(DeviceError, match="there is no CUDA device"):
            driver.allocate(wrong, 1)


def test_memory_is_freed(driver: Driver) -> None:
    before = driver.memory_info(0).free
    memory = driver.allocate(0, 64 << 20)
    part = memory.at(1 << 20, 4096)
    assert part.address == memory.address + (1 << 20)
    assert part.n_bytes == 4096
    assert memory.address % 256 == 0
    assert driver.memory_info(0).free <= before - (64 << 20)
    del memory
    gc.collect()
    assert driver.memory_info(0).free <= before - (64 << 20)  # a slice keeps the allocation
    del part
    gc.collect()
    assert driver.memory_info(0).free >= before - (16 << 20)  # other programs may use the device


def test_slices_stay_inside(driver: Driver) -> None:
    memory = driver.allocate(0, 100).at(10, 50)
    assert memory.at(50, 0).n_bytes == 0
    for offset, n_bytes in ((-1, 1), (0, -1), (0, 51), (50, 1)):
        with pytest.raises(UsageError, match="are outside device memory of 50 bytes"):
            memory.at(offset, n_bytes)


def test_allocations_larger_than_the_device_are_refused(driver: Driver) -> None:
    total = driver.memory_info(0).total
    with pytest.raises(DeviceMemoryError, match=f"device 0 cannot allocate {total + 1:,} bytes") as caught:
        driver.allocate(0, total + 1)
    assert caught.value.device == 0
    assert caught.value.n_bytes == total + 1
    assert 0 < caught.value.free_bytes <= total
    driver.allocate(0, 1000)  # the device still works


@pytest.mark.parametrize("n_bytes", [0, -1])
def test_allocations_of_no_bytes_are_refused(driver: Driver, n_bytes: int) -> None:
    for take in (lambda: driver.allocate(0, n_bytes), lambda: driver.pinned(n_bytes)):
        with pytest.raises(UsageError, match="at least 1 byte"):
            take()


# -- Copies --------------------------------------------------------------------------------------------------------


def test_uploads_copies_and_downloads(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    first, second = upload(driver, values, stream), driver.allocate(0, values.nbytes)
    driver.copy(second.at(0, 400), first.at(400, 400), stream)
    driver.copy(second.at(400, 3600), first.at(0, 3600), stream)
    driver.fill(second.at(800, 4), 0, stream)
    driver.fill(second.at(804, 4), 0xFF, stream)
    expected = np.concatenate([values[100:200], values[:900]])
    expected[200] = 0
    expected.view(np.int32)[201] = -1
    np.testing.assert_array_equal(download(driver, second, stream).view(np.int32), expected.view(np.int32))


def test_pinned_memory(driver: Driver, stream: Stream) -> None:
    source, destination = driver.pinned(100), driver.pinned(50)
    source[:] = np.arange(100)
    memory = driver.allocate(0, 100)
    driver.upload(memory, source, stream)
    driver.download(destination, memory.at(30, 50), stream)
    driver.synchronize(stream)
    np.testing.assert_array_equal(destination, np.arange(30, 80))
    view = source[10:20]
    del source
    gc.collect()
    np.testing.assert_array_equal(view, np.arange(10, 20))  # a view keeps the memory


def test_copies_are_checked(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    memory = driver.allocate(0, values.nbytes)
    with pytest.raises(UsageError, match="3996 bytes to 4000"):
        driver.upload(memory, values[1:], stream)
    with pytest.raises(UsageError, match="4000 bytes to 3996"):
        driver.download(values[1:], memory, stream)
    with pytest.raises(UsageError, match="4 bytes to 8"):
        driver.copy(memory.at(0, 8), memory.at(8, 4), stream)
    with pytest.raises(UsageError, match="not contiguous"):
        driver.upload(memory.at(0, 2000), values[::2], stream)
    values.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        driver.download(values, memory, stream)
    if isinstance(driver, EmulatedDriver):
        with pytest.raises(UsageError, match="256"):
            driver.fill(memory, 256, stream)


def test_peers(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    assert not driver.can_access_peer(0, 0)
    if driver.device_count < 2 or not (driver.can_access_peer(0, 1) and driver.can_access_peer(1, 0)):
        pytest.skip("needs two devices that reach each other")
    here, there = upload(driver, values, stream), driver.allocate(1, values.nbytes)
    module = driver.load_module(0, "arithmetic")
    if isinstance(driver, EmulatedDriver):
        with pytest.raises(DeviceError, match="stream of CUDA device 0 was given memory of device 1"):
            driver.copy(there, here, stream)
        with pytest.raises(DeviceError, match="was given memory of device 1"):
            driver.launch(module, "add_step", GRID, BLOCK, (there, here, np.int32(N)), stream)
    for _ in range(2):
        driver.enable_peer_access(0, 1)
    driver.copy(there, here, stream)
    driver.launch(module, "add_step", GRID, BLOCK, (there, here, np.int32(N)), stream)
    np.testing.assert_array_equal(download(driver, here, stream), values + 1)
    if isinstance(driver, EmulatedDriver):
        with pytest.raises(DeviceError, match="stream of CUDA device 1 was given memory of device 0"):
            driver.copy(there, here, driver.stream(1))  # access works in one direction only


# -- Kernels -------------------------------------------------------------------------------------------------------


def test_launch(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    memory = upload(driver, values, stream)
    module = driver.load_module(0, "arithmetic")
    assert module.device == 0
    arguments = (memory, np.int32(N - 1), np.float32(2), np.float32(0.5))
    driver.launch(module, "scale_and_add", GRID, BLOCK, arguments, stream)
    expected = values * 2 + 0.5
    expected[-1] = values[-1]
    np.testing.assert_array_equal(download(driver, memory, stream), expected)


def test_macros(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    source, destination = upload(driver, values, stream), driver.allocate(0, values.nbytes)
    for step in (5, 7):
        module = driver.load_module(0, "arithmetic", {"STEP": step})
        assert driver.load_module(0, "arithmetic", {"STEP": step}) is module
        driver.launch(module, "add_step", GRID, BLOCK, (source, destination, np.int32(N)), stream)
        np.testing.assert_array_equal(download(driver, destination, stream), values + step)


@pytest.mark.parametrize("n", [1000, 15 << 10])  # 60 KiB must be requested
def test_shared_memory(driver: Driver, stream: Stream, n: int) -> None:
    values = np.arange(n, dtype=np.float32)
    source, destination = upload(driver, values, stream), driver.allocate(0, values.nbytes)
    module = driver.load_module(0, "arithmetic")
    for _ in range(2):
        driver.launch(module, "reverse", (1,), (64,), (source, destination, np.int32(n)), stream, 4 * n)
    np.testing.assert_array_equal(download(driver, destination, stream), values[::-1])


def test_launches_are_checked(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    """Only emulated devices check launches; CUDA finds some of these errors later or not at all."""
    if not isinstance(driver, EmulatedDriver):
        pytest.skip("only emulated devices check this")
    memory = upload(driver, values, stream)
    module = driver.load_module(0, "arithmetic")
    arguments = (memory, memory, np.int32(N))
    most = driver.properties(0).shared_bytes
    for grid, block, shared in [
        ((0,), (32,), 0),
        ((1,), (1025,), 0),
        ((1,), (32, 64), 0),
        ((1, 65536), (32,), 0),
        ((1,), (1, 1, 65), 0),
        ((1,), (32,), most + 1),
    ]:
        with pytest.raises(KernelError, match="add_step cannot be launched with grid"):
            driver.launch(module, "add_step", grid, block, arguments, stream, shared)
    with pytest.raises(KernelError, match="argument 2 of kernel add_step is a int: kernels take"):
        driver.launch(module, "add_step", GRID, BLOCK, (memory, memory, 3), stream)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="no_such_kernel"):
        driver.launch(module, "no_such_kernel", GRID, BLOCK, arguments, stream)
    if driver.device_count > 1:
        with pytest.raises(UsageError, match="device 0 launched in a stream of device 1"):
            driver.launch(module, "add_step", GRID, BLOCK, arguments, driver.stream(1))


def test_compiling_is_reported_once(driver: Driver, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    steps: list[tuple[int, int]] = []
    modules = [("arithmetic", {"STEP": 11}), ("arithmetic", {"STEP": 12}), ("arithmetic", {"STEP": 11})]
    driver.compile_modules(0, modules, lambda done, total: steps.append((done, total)))
    assert steps == [(0, 2), (1, 2), (2, 2)]
    driver.load_module(0, "arithmetic", {"STEP": 11})
    driver.compile_modules(0, modules, lambda done, total: steps.append((done, total)))
    assert len(steps) == 3


# -- Order ---------------------------------------------------------------------------------------------------------


def test_events_order_streams(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    memory, other = upload(driver, values, stream), driver.stream(0)
    module = driver.load_module(0, "arithmetic")
    event = driver.event(0)
    for turn in range(10):
        here, there = (stream, other) if turn % 2 else (other, stream)
        driver.wait(here, event)
        driver.launch(
            module, "scale_and_add", GRID, BLOCK, (memory, np.int32(N), np.float32(2), np.float32(turn)), here
        )
        driver.record(event, here)
    driver.synchronize(event)
    driver.synchronize(event)
    expected = values.copy()
    for turn in range(10):
        expected = expected * 2 + turn
    np.testing.assert_array_equal(download(driver, memory, there), expected)


def test_time_between_events(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    begin, end = driver.event(0, timing=True), driver.event(0, timing=True)
    memory = upload(driver, values, stream)
    driver.record(begin, stream)
    driver.fill(memory, 0, stream)
    driver.record(end, stream)
    driver.synchronize(end)
    assert 0 < driver.elapsed_seconds(begin, end) < 1
    if isinstance(driver, EmulatedDriver):
        with pytest.raises(UsageError, match="timing=True"):
            driver.elapsed_seconds(begin, driver.event(0))


def test_an_event_of_another_device_is_refused(driver: Driver, stream: Stream) -> None:
    if not isinstance(driver, EmulatedDriver):
        pytest.skip("only emulated devices check this")
    with pytest.raises(UsageError, match="an event of device 1 recorded in a stream of device 0"):
        driver.record(driver.event(1), stream)


# -- Graphs --------------------------------------------------------------------------------------------------------


def test_capture_and_replay(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    memory = upload(driver, values, stream)
    module = driver.load_module(0, "arithmetic")
    host = driver.pinned(values.nbytes)
    driver.begin_capture(stream)
    driver.upload(memory, host, stream)
    for _ in range(3):
        driver.launch(module, "add_step", GRID, BLOCK, (memory, memory, np.int32(N)), stream)
    graph = driver.end_capture(stream)
    assert graph.device == 0
    np.testing.assert_array_equal(download(driver, memory, stream), values)  # captured work does not run
    for turn in range(3):
        host.view(np.float32)[:] = values * turn  # each replay reads the host's memory
        driver.replay(graph, stream)
        driver.launch(module, "add_step", GRID, BLOCK, (memory, memory, np.int32(N)), stream)
        np.testing.assert_array_equal(download(driver, memory, stream), values * turn + 4)


def test_a_capture_that_forks(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    first, second = upload(driver, values, stream), driver.allocate(0, values.nbytes)
    module = driver.load_module(0, "arithmetic")
    branch, forked, joined = driver.stream(0), driver.event(0), driver.event(0)
    driver.begin_capture(stream)
    driver.record(forked, stream)
    driver.wait(branch, forked)
    driver.launch(module, "add_step", GRID, BLOCK, (first, second, np.int32(N)), branch)
    driver.record(joined, branch)
    driver.wait(stream, joined)
    driver.launch(module, "add_step", GRID, BLOCK, (second, first, np.int32(N)), stream)
    graph = driver.end_capture(stream)
    for _ in range(2):
        driver.replay(graph, stream)
    np.testing.assert_array_equal(download(driver, first, stream), values + 4)
    np.testing.assert_array_equal(download(driver, second, branch), values + 3)  # the branch has left the capture


def test_calls_that_a_capture_refuses(driver: Driver, values: NDArray[np.float32], stream: Stream) -> None:
    memory = upload(driver, values, stream)
    driver.begin_capture(stream)
    for what in (
        lambda: driver.allocate(0, 10),
        lambda: driver.pinned(10),
        lambda: driver.load_module(0, "arithmetic"),
    ):
        with pytest.raises(KernelError, match=r"capture: .* in the thread that captures"):
            what()
    driver.fill(memory, 0, stream)
    driver.replay(driver.end_capture(stream), stream)  # the capture is still valid
    assert not download(driver, memory, stream).any()
    with pytest.raises(KernelError, match="capture"):
        driver.end_capture(stream)


def test_memory_released_during_a_capture(driver: Driver, stream: Stream) -> None:
    """Releasing memory must not invalidate the capture."""
    memory, garbage = driver.allocate(0, 400), driver.allocate(0, 64 << 20)
    before = driver.memory_info(0).free
    driver.begin_capture(stream)
    driver.fill(memory, 0, stream)
    del garbage
    gc.collect()
    driver.replay(driver.end_capture(stream), stream)
    assert not download(driver, memory, stream).any()
    assert driver.memory_info(0).free >= before + (48 << 20)
