"""That the emulated devices notice what they are for: host code that a GPU would forgive, until it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import DeviceError, DeviceLostError, DeviceMemoryError, KernelError
from localllm.kernels.cuda.driver import DeviceMemory
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.emulated_memory import HostFault
from tests.cuda_on_cpu.emulated_streams import EmulatedStream, StreamOrder
from tests.cuda_on_cpu.errors import KernelFault
from tests.kernels.cuda.conftest import SOURCES
from tests.kernels.cuda.python_kernels import KERNELS

N = 64
N_STEPS = 6
VALUES = np.arange(N, dtype=np.float32)
COUNT = np.int32(N)


def emulated(**options: Any) -> EmulatedDriver:
    return EmulatedDriver(kernels=KERNELS, **options)


def upload(driver: EmulatedDriver, stream: EmulatedStream) -> DeviceMemory:
    memory = driver.allocate(stream.device, VALUES.nbytes)
    driver.upload(memory, VALUES, stream)
    driver.synchronize(stream)
    return memory


def download(driver: EmulatedDriver, memory: DeviceMemory, stream: EmulatedStream) -> NDArray[np.float32]:
    values = np.zeros(N, np.float32)
    driver.download(values, memory, stream)
    driver.synchronize(stream)
    return values


# -- A pipeline over two devices -----------------------------------------------------------------------------------


def pipeline(driver: EmulatedDriver, forgotten: str = "", *, captured: bool = False) -> NDArray[np.float32]:
    """N_STEPS times: add 1 on device 0, hand on, double on device 1, hand back.

    Args:
        forgotten: a wait that is left out, "there" or "back".
        captured: as a graph, replayed for each step.
    """
    for device, peer in ((0, 1), (1, 0)):
        driver.enable_peer_access(device, peer)
    streams = [driver.stream(0), driver.stream(1)]
    handed, returned = driver.event(0), driver.event(1)
    modules = [driver.load_module(device, "arithmetic") for device in (0, 1)]
    x = [driver.allocate(device, VALUES.nbytes) for device in (0, 1)]
    driver.upload(x[0], VALUES, streams[0])

    def step() -> None:
        driver.launch(modules[0], "add_step", (1,), (N,), (x[0], x[0], COUNT), streams[0])
        driver.record(handed, streams[0])
        if forgotten != "there":
            driver.wait(streams[1], handed)
        driver.copy(x[1], x[0], streams[1])
        arguments = (x[1], COUNT, np.float32(2), np.float32(0))
        driver.launch(modules[1], "scale_and_add", (1,), (N,), arguments, streams[1])
        driver.copy(x[0], x[1], streams[1])
        driver.record(returned, streams[1])
        if forgotten != "back":
            driver.wait(streams[0], returned)

    if captured:
        driver.begin_capture(streams[0])
        step()
        graph = driver.end_capture(streams[0])
    for _ in range(N_STEPS):
        if captured:
            driver.replay(graph, streams[0])
        else:
            step()
    last = 0 if forgotten != "back" else 1
    return download(driver, x[last], streams[last])


def expected() -> NDArray[np.float32]:
    values = VALUES
    for _ in range(N_STEPS):
        values = (values + 1) * 2
    return values


ORDERS: list[tuple[StreamOrder, int]] = [("lazy", 0), ("eager", 0), *(("random", seed) for seed in range(8))]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_a_pipeline_in_order(order: StreamOrder, seed: int, captured: bool) -> None:
    np.testing.assert_array_equal(
        pipeline(emulated(n_devices=2, order=order, seed=seed), captured=captured), expected()
    )


@pytest.mark.parametrize("forgotten", ["there", "back"])
def test_a_forgotten_wait_is_noticed(forgotten: str) -> None:
    results = {
        (order, seed): pipeline(emulated(n_devices=2, order=order, seed=seed), forgotten) for order, seed in ORDERS
    }
    wrong = {key for key, values in results.items() if not np.array_equal(values, expected())}
    assert ("lazy", 0) in wrong
    assert len([key for key in wrong if key[0] == "random"]) >= 4
    assert ("eager", 0) not in wrong  # which is why a GPU may not show it


def test_a_captured_branch_that_waits_for_nothing_is_noticed() -> None:
    """Also within a graph, the newest work runs first where nothing forbids it."""
    driver = emulated()
    main, branch = driver.stream(0), driver.stream(0)
    begun, done = driver.event(0), driver.event(0)
    x, module = upload(driver, main), driver.load_module(0, "arithmetic")
    driver.begin_capture(main)
    driver.record(begun, main)
    driver.wait(branch, begun)
    driver.launch(module, "add_step", (1,), (N,), (x, x, COUNT), main)
    # It should come after the addition.
    driver.launch(module, "scale_and_add", (1,), (N,), (x, COUNT, np.float32(2), np.float32(0)), branch)
    driver.record(done, branch)
    driver.wait(main, done)
    driver.replay(driver.end_capture(main), main)
    np.testing.assert_array_equal(download(driver, x, main), VALUES * 2 + 1)


def test_a_long_pipeline_needs_no_deep_stack() -> None:
    driver = emulated(n_devices=1)
    streams, events = [driver.stream(0), driver.stream(0)], [driver.event(0), driver.event(0)]
    x = upload(driver, streams[0])
    for turn in range(5000):
        driver.wait(streams[turn % 2], events[(turn + 1) % 2])
        driver.fill(x, turn % 256, streams[turn % 2])
        driver.record(events[turn % 2], streams[turn % 2])
    assert set(download(driver, x, streams[1]).view(np.uint8)) == {4999 % 256}


# -- Host memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [True, False])
def test_a_host_buffer_overwritten_too_early(pinned: bool) -> None:
    """Pinned memory is read when the stream gets there; other memory possibly at once."""
    seen = set()
    for order, seed in ORDERS:
        driver = emulated(order=order, seed=seed)
        host = driver.pinned(8) if pinned else np.zeros(8, np.uint8)
        memory, stream = driver.allocate(0, 8), driver.stream(0)
        host[:] = 1
        driver.upload(memory, host, stream)
        host[:] = 2
        driver.synchronize(stream)
        got = np.zeros(8, np.uint8)
        driver.download(got, memory, stream)
        driver.synchronize(stream)
        seen.add((order, int(got[0])))
    assert {("lazy", 2), ("eager", 1), ("random", 1), ("random", 2)} == seen


def test_a_download_that_is_not_waited_for() -> None:
    driver = emulated()
    stream, values = driver.stream(0), np.zeros(N, np.float32)
    memory = upload(driver, stream)
    driver.download(values, memory, stream)
    assert not values.any()
    driver.synchronize(stream)
    np.testing.assert_array_equal(values, VALUES)


def test_a_host_array_that_is_garbage() -> None:
    driver = emulated()
    stream = driver.stream(0)
    memory = driver.allocate(0, 400)
    driver.upload(memory, np.zeros(400, np.uint8), stream)
    with pytest.raises(HostFault, match="an upload uses 400 bytes of the host's that were freed"):
        driver.synchronize(stream)


# -- Device memory -------------------------------------------------------------------------------------------------


def test_new_memory_is_poisoned() -> None:
    driver = emulated()
    assert np.isnan(download(driver, driver.allocate(0, 4 * N), driver.stream(0))).all()


@pytest.mark.parametrize("captured", [False, True])
def test_use_after_free(captured: bool) -> None:
    driver = emulated()
    stream, module = driver.stream(0), driver.load_module(0, "arithmetic")
    x, y = upload(driver, stream), upload(driver, stream)
    if captured:
        driver.begin_capture(stream)
    driver.launch(module, "add_step", (1,), (N,), (x, y, COUNT), stream)
    if captured:
        graph = driver.end_capture(stream)
    part = y.at(4, 8)
    del y
    if captured:
        driver.replay(graph, stream)
    driver.synchronize(stream)  # a part keeps the whole
    driver.launch(module, "add_step", (1,), (N,), (x, part.at(0, 4), np.int32(1)), stream)
    if captured:
        driver.replay(graph, stream)
    del part
    with pytest.raises(HostFault, match=r"kernel add_step uses .* bytes of device 0 that were freed before it ran"):
        driver.synchronize(stream)


def test_memory_is_limited() -> None:
    driver = emulated(n_devices=2, memory=[1000, 500])
    first = driver.allocate(0, 600)
    with pytest.raises(
        DeviceMemoryError, match=r"device 0 has no room for 401 bytes: 400 of its 1,000 bytes are free"
    ):
        driver.allocate(0, 401)
    driver.allocate(1, 500)
    del first
    assert driver.memory_info(0) == (1000, 1000)
    driver.allocate(0, 1000)


def test_an_allocation_that_fails() -> None:
    driver = emulated()
    driver.memories.fail_allocation = 3
    kept = [driver.allocate(0, 100) for _ in range(2)]
    with pytest.raises(DeviceMemoryError) as caught:
        driver.allocate(0, 100)
    assert caught.value.free_bytes == (1 << 30) - 200
    kept.append(driver.allocate(0, 100))


def test_devices_without_peers() -> None:
    driver = emulated(n_devices=2, peers=False)
    assert not driver.can_access_peer(0, 1)
    with pytest.raises(DeviceError, match="device 0 has no access to the memory of device 1"):
        driver.enable_peer_access(0, 1)


# -- Failures ------------------------------------------------------------------------------------------------------


def test_a_device_too_old() -> None:
    driver = emulated(capability=(7, 0))
    assert driver.properties(0).capability == (7, 0)
    with pytest.raises(DeviceError, match=r"has compute capability 7\.0, but the kernels need 7\.5"):
        driver.stream(0)


@pytest.mark.parametrize("order", ["lazy", "eager", "random"])
def test_a_lost_device(order: StreamOrder) -> None:
    driver = emulated(n_devices=2, order=order)
    streams = [driver.stream(0), driver.stream(1)]
    x = [upload(driver, stream) for stream in streams]
    event = driver.event(0)
    driver.lose(0, after=1)

    def work() -> None:
        for byte in range(3):
            driver.fill(x[0], byte, streams[0])
        driver.record(event, streams[0])
        driver.wait(streams[1], event)
        driver.fill(x[1], 7, streams[1])
        driver.synchronize(streams[1])

    with pytest.raises(DeviceLostError, match="device 0 is lost"):
        work()
    for use in (lambda: driver.synchronize(streams[0]), lambda: driver.allocate(0, 1), lambda: driver.stream(0)):
        with pytest.raises(DeviceLostError, match="device 0 is lost"):
            use()
    fresh = driver.stream(1)  # the other one works
    assert download(driver, upload(driver, fresh), fresh)[1] == 1


# -- Captures ------------------------------------------------------------------------------------------------------


def test_host_and_capture() -> None:
    """The host cannot wait for what is captured, or hand over memory that moves; the capture fails with it."""
    driver = emulated()
    stream, event = driver.stream(0), driver.event(0)
    memory = upload(driver, stream)
    driver.begin_capture(stream)
    graph = driver.end_capture(stream)
    for wrong, why in [
        (lambda: driver.synchronize(stream), "the host waits for a stream of it"),
        (lambda: driver.synchronize(event), "the host waits for an event of it"),
        (lambda: driver.upload(memory, VALUES, stream), "an upload of host memory that is not pinned"),
        (lambda: driver.begin_capture(stream), "it begins a second time"),
        (lambda: driver.replay(graph, stream), "a graph is replayed in it"),
    ]:
        driver.begin_capture(stream)
        driver.record(event, stream)
        for act in (wrong, lambda: driver.end_capture(stream)):
            with pytest.raises(KernelError, match=f"CUDA graph capture: {why}"):
                act()
    np.testing.assert_array_equal(download(driver, memory, stream), VALUES)  # the stream is free again


def test_streams_and_capture() -> None:
    driver = emulated()
    main, other, third = (driver.stream(0) for _ in range(3))
    inside, outside = driver.event(0), driver.event(0)
    memory = upload(driver, main)
    driver.fill(memory, 1, other)
    driver.record(outside, other)

    driver.begin_capture(main)
    with pytest.raises(KernelError, match="waits for an event that is not of it"):
        driver.wait(main, outside)
    with pytest.raises(KernelError, match="waits for an event that is not of it"):
        driver.end_capture(main)

    driver.begin_capture(main)
    driver.record(inside, main)
    driver.wait(other, inside)
    with pytest.raises(KernelError, match="not begun in the stream in which it ends"):
        driver.end_capture(other)
    with pytest.raises(KernelError):
        driver.end_capture(main)
    assert other.capture is None

    driver.begin_capture(main)
    driver.record(inside, main)
    driver.wait(other, inside)
    driver.fill(memory, 2, other)
    with pytest.raises(KernelError, match="the stream that began it does not wait for a fill"):
        driver.end_capture(main)

    with pytest.raises(KernelError, match="an event of a capture that has ended"):
        driver.wait(third, inside)

    driver.begin_capture(main)
    driver.begin_capture(other)
    driver.record(inside, main)
    with pytest.raises(KernelError, match="a stream of one capture waits for an event of another"):
        driver.wait(other, inside)


def test_replays_follow_one_another() -> None:
    """Also in different streams that do not wait for each other, as CUDA orders the replays of one graph."""
    for seed in range(8):
        driver = emulated(order="random", seed=seed)
        streams = [driver.stream(0), driver.stream(0)]
        x, module = upload(driver, streams[0]), driver.load_module(0, "arithmetic")
        driver.begin_capture(streams[0])
        driver.launch(module, "add_step", (1,), (N,), (x, x, COUNT), streams[0])
        arguments = (x, COUNT, np.float32(2), np.float32(0))
        driver.launch(module, "scale_and_add", (1,), (N,), arguments, streams[0])
        graph = driver.end_capture(streams[0])
        for turn in range(N_STEPS):
            driver.replay(graph, streams[turn % 2])
        np.testing.assert_array_equal(download(driver, x, streams[1]), expected())


# -- Kernels -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["python", "translated"])
def launching(request: pytest.FixtureRequest) -> EmulatedDriver:
    if request.param == "python":
        return emulated()
    if reason := nvrtc.missing():
        pytest.skip(reason)
    return EmulatedDriver(folder=SOURCES, mode="check")


@pytest.mark.parametrize(
    "arguments",
    [
        (np.int64(N), np.float32(1), np.float32(0)),
        (np.float32(N), np.float32(1), np.float32(0)),
        (COUNT, np.float64(1), np.float32(0)),
        (COUNT, np.int32(1), np.float32(0)),
        (COUNT, np.float32(1)),
        (COUNT, np.float32(1), np.float32(0), np.float32(0)),
    ],
)
def test_arguments_of_other_types(launching: EmulatedDriver, arguments: tuple[Any, ...]) -> None:
    """At the launch, not when it runs."""
    stream, module = launching.stream(0), launching.load_module(0, "arithmetic")
    memory = upload(launching, stream)
    with pytest.raises(KernelError, match="scale_and_add"):
        launching.launch(module, "scale_and_add", (1,), (N,), (memory, *arguments), stream)


def test_memory_where_a_number_is_wanted(launching: EmulatedDriver) -> None:
    stream, module = launching.stream(0), launching.load_module(0, "arithmetic")
    memory = upload(launching, stream)
    with pytest.raises(KernelError, match="add_step"):
        launching.launch(module, "add_step", (1,), (N,), (memory, memory, memory), stream)


def test_a_kernel_outside_its_memory() -> None:
    if reason := nvrtc.missing():
        pytest.skip(reason)
    driver = EmulatedDriver(folder=SOURCES, mode="check")
    stream, module = driver.stream(0), driver.load_module(0, "arithmetic")
    memory = upload(driver, stream)
    driver.launch(module, "add_step", (1,), (N + 1,), (memory, memory, np.int32(N + 1)), stream)
    with pytest.raises(KernelFault, match=r"out of bounds.*arithmetic\.cu:13"):
        driver.synchronize(stream)


def test_a_kernel_that_reads_what_nobody_wrote() -> None:
    if reason := nvrtc.missing():
        pytest.skip(reason)
    driver = EmulatedDriver(folder=SOURCES, mode="check")
    stream, module = driver.stream(0), driver.load_module(0, "arithmetic")
    fresh, copied = driver.allocate(0, 4 * N), driver.allocate(0, 4 * N)
    driver.copy(copied, fresh, stream)
    driver.launch(module, "add_step", (1,), (N,), (copied, fresh, COUNT), stream)
    with pytest.raises(KernelFault, match="uninitialised"):
        driver.synchronize(stream)
