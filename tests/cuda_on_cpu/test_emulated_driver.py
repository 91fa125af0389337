"""Emulated devices detect errors of host code that a GPU would often hide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import DeviceError, DeviceLostError, KernelError
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.emulated_memory import HostFault
from tests.cuda_on_cpu.emulated_streams import StreamOrder
from tests.cuda_on_cpu.errors import KernelFault
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.kernels.cuda.conftest import SOURCES
from tests.kernels.cuda.python_kernels import KERNELS
from tests.kernels.cuda.test_driver import download, upload

N = 64
N_STEPS = 6
VALUES = np.arange(N, dtype=np.float32)
COUNT = np.int32(N)


def emulated(**options: Any) -> EmulatedDriver:
    return EmulatedDriver(kernels=KERNELS, **options)


# -- A pipeline over two devices -----------------------------------------------------------------------------------


def pipeline(driver: EmulatedDriver, forgotten: str = "", *, captured: bool = False) -> NDArray[np.float32]:
    """N_STEPS times: add 1 on device 0, copy to device 1, double there, and copy back.

    Args:
        forgotten: the wait to omit, "there" or "back".
        captured: replay a graph for each step.
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
    assert ("eager", 0) not in wrong  # a GPU may run work in this order, which hides the error


def test_a_captured_branch_that_waits_for_nothing_is_noticed() -> None:
    """Within a graph, too, the newest work runs first unless a dependency forbids it."""
    driver = emulated()
    main, branch = driver.stream(0), driver.stream(0)
    begun, done = driver.event(0), driver.event(0)
    x, module = upload(driver, VALUES, main), driver.load_module(0, "arithmetic")
    driver.begin_capture(main)
    driver.record(begun, main)
    driver.wait(branch, begun)
    driver.launch(module, "add_step", (1,), (N,), (x, x, COUNT), main)
    # Without a wait, this runs before the addition.
    driver.launch(module, "scale_and_add", (1,), (N,), (x, COUNT, np.float32(2), np.float32(0)), branch)
    driver.record(done, branch)
    driver.wait(main, done)
    driver.replay(driver.end_capture(main), main)
    np.testing.assert_array_equal(download(driver, x, main), VALUES * 2 + 1)


def test_a_long_pipeline_needs_no_deep_stack() -> None:
    driver = emulated(n_devices=1)
    streams, events = [driver.stream(0), driver.stream(0)], [driver.event(0), driver.event(0)]
    x = upload(driver, VALUES, streams[0])
    for turn in range(5000):
        driver.wait(streams[turn % 2], events[(turn + 1) % 2])
        driver.fill(x, turn % 256, streams[turn % 2])
        driver.record(events[turn % 2], streams[turn % 2])
    assert set(download(driver, x, streams[1]).view(np.uint8)) == {4999 % 256}


# -- Host memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [True, False])
def test_a_host_buffer_overwritten_too_early(pinned: bool) -> None:
    """Pinned memory is read when the copy runs, other memory possibly at once."""
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


def test_a_download_without_a_wait() -> None:
    driver = emulated()
    stream, values = driver.stream(0), np.zeros(N, np.float32)
    memory = upload(driver, VALUES, stream)
    driver.download(values, memory, stream)
    assert not values.any()
    driver.synchronize(stream)
    np.testing.assert_array_equal(values, VALUES)


def test_a_host_array_that_was_garbage_collected() -> None:
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
    x, y = upload(driver, VALUES, stream), upload(driver, VALUES, stream)
    if captured:
        driver.begin_capture(stream)
    driver.launch(module, "add_step", (1,), (N,), (x, y, COUNT), stream)
    if captured:
        graph = driver.end_capture(stream)
    part = y.at(4, 8)
    del y
    if captured:
        driver.replay(graph, stream)
    driver.synchronize(stream)  # a slice keeps the allocation
    driver.launch(module, "add_step", (1,), (N,), (x, part.at(0, 4), np.int32(1)), stream)
    if captured:
        driver.replay(graph, stream)
    del part
    with pytest.raises(HostFault, match=r"kernel add_step uses .* bytes of device 0 that were freed before it ran"):
        driver.synchronize(stream)


def test_devices_without_peers() -> None:
    driver = emulated(n_devices=2, peers=False)
    assert not driver.can_access_peer(0, 1)
    with pytest.raises(DeviceError, match="device 0 has no access to the memory of device 1"):
        driver.enable_peer_access(0, 1)


# -- Failures ------------------------------------------------------------------------------------------------------


def test_a_device_that_is_too_old_is_refused() -> None:
    driver = emulated(capability=(7, 0))
    assert driver.properties(0).capability == (7, 0)
    with pytest.raises(DeviceError, match=r"has compute capability 7\.0, but the kernels need 7\.5"):
        driver.stream(0)


@pytest.mark.parametrize("order", ["lazy", "eager", "random"])
def test_a_lost_device(order: StreamOrder) -> None:
    driver = emulated(n_devices=2, order=order)
    streams = [driver.stream(0), driver.stream(1)]
    x = [upload(driver, VALUES, stream) for stream in streams]
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
    fresh = driver.stream(1)  # the other device works
    assert download(driver, upload(driver, VALUES, fresh), fresh)[1] == 1


# -- Captures ------------------------------------------------------------------------------------------------------


def test_calls_of_the_host_that_a_capture_refuses() -> None:
    """The host can neither wait for captured work nor upload memory that is not pinned, and the capture fails."""
    driver = emulated()
    stream, event = driver.stream(0), driver.event(0)
    memory = upload(driver, VALUES, stream)
    driver.begin_capture(stream)
    graph = driver.end_capture(stream)
    for wrong, why in [
        (lambda: driver.synchronize(stream), "the host waits for a captured stream"),
        (lambda: driver.synchronize(event), "the host waits for a captured event"),
        (lambda: driver.upload(memory, VALUES, stream), "an upload of host memory that is not pinned"),
        (lambda: driver.begin_capture(stream), "it starts a second time"),
        (lambda: driver.replay(graph, stream), "a graph is replayed in it"),
    ]:
        driver.begin_capture(stream)
        driver.record(event, stream)
        for act in (wrong, lambda: driver.end_capture(stream)):
            with pytest.raises(KernelError, match=f"CUDA graph capture: {why}"):
                act()
    np.testing.assert_array_equal(download(driver, memory, stream), VALUES)  # the stream has left the capture


def test_dependencies_between_streams_that_a_capture_refuses() -> None:
    driver = emulated()
    main, other, third = (driver.stream(0) for _ in range(3))
    inside, outside = driver.event(0), driver.event(0)
    memory = upload(driver, VALUES, main)
    driver.fill(memory, 1, other)
    driver.record(outside, other)

    driver.begin_capture(main)
    with pytest.raises(KernelError, match="waits for an event outside the capture"):
        driver.wait(main, outside)
    with pytest.raises(KernelError, match="waits for an event outside the capture"):
        driver.end_capture(main)

    driver.begin_capture(main)
    driver.record(inside, main)
    driver.wait(other, inside)
    with pytest.raises(KernelError, match="it started in another stream"):
        driver.end_capture(other)
    with pytest.raises(KernelError):
        driver.end_capture(main)
    assert other.capture is None

    driver.begin_capture(main)
    driver.record(inside, main)
    driver.wait(other, inside)
    driver.fill(memory, 2, other)
    with pytest.raises(KernelError, match="the stream that started it does not wait for a fill"):
        driver.end_capture(main)

    with pytest.raises(KernelError, match="an event of a capture that has ended"):
        driver.wait(third, inside)

    driver.begin_capture(main)
    driver.begin_capture(other)
    driver.record(inside, main)
    with pytest.raises(KernelError, match="a stream of one capture waits for an event of another"):
        driver.wait(other, inside)


def test_replays_of_a_graph_run_in_order() -> None:
    """Also in streams that do not wait for each other, as in CUDA."""
    for seed in range(8):
        driver = emulated(order="random", seed=seed)
        streams = [driver.stream(0), driver.stream(0)]
        x, module = upload(driver, VALUES, streams[0]), driver.load_module(0, "arithmetic")
        driver.begin_capture(streams[0])
        driver.launch(module, "add_step", (1,), (N,), (x, x, COUNT), streams[0])
        arguments = (x, COUNT, np.float32(2), np.float32(0))
        driver.launch(module, "scale_and_add", (1,), (N,), arguments, streams[0])
        graph = driver.end_capture(streams[0])
        for turn in range(N_STEPS):
            driver.replay(graph, streams[turn % 2])
        np.testing.assert_array_equal(download(driver, x, streams[1]), expected())


# -- Kernels -------------------------------------------------------------------------------------------------------


def translated() -> EmulatedDriver:
    skip_without_tools()
    return EmulatedDriver(folder=SOURCES, mode="check")


@pytest.fixture(params=[emulated, translated], ids=["python", "translated"])
def launching(request: pytest.FixtureRequest) -> EmulatedDriver:
    driver: EmulatedDriver = request.param()
    return driver


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
    """The launch raises, before the kernel runs."""
    stream, module = launching.stream(0), launching.load_module(0, "arithmetic")
    memory = upload(launching, VALUES, stream)
    with pytest.raises(KernelError, match="scale_and_add"):
        launching.launch(module, "scale_and_add", (1,), (N,), (memory, *arguments), stream)


def test_memory_for_a_parameter_that_is_a_number(launching: EmulatedDriver) -> None:
    stream, module = launching.stream(0), launching.load_module(0, "arithmetic")
    memory = upload(launching, VALUES, stream)
    with pytest.raises(KernelError, match="add_step"):
        launching.launch(module, "add_step", (1,), (N,), (memory, memory, memory), stream)


def test_a_kernel_outside_its_memory() -> None:
    driver = translated()
    stream, module = driver.stream(0), driver.load_module(0, "arithmetic")
    memory = upload(driver, VALUES, stream)
    driver.launch(module, "add_step", (1,), (N + 1,), (memory, memory, np.int32(N + 1)), stream)
    with pytest.raises(KernelFault, match=r"out of bounds.*arithmetic\.cu:13"):
        driver.synchronize(stream)


def test_a_kernel_that_reads_uninitialised_memory() -> None:
    driver = translated()
    stream, module = driver.stream(0), driver.load_module(0, "arithmetic")
    fresh, copied = driver.allocate(0, 4 * N), driver.allocate(0, 4 * N)
    driver.copy(copied, fresh, stream)
    driver.launch(module, "add_step", (1,), (N,), (copied, fresh, COUNT), stream)
    with pytest.raises(KernelFault, match="uninitialised"):
        driver.synchronize(stream)
