"""Kernels of a device's ceilings do the work that is timed: their sums equal numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import DeviceError, KernelError
from localllm.kernels.cuda.cupy_driver import open_driver
from localllm.kernels.cuda.module import flat_source
from localllm.kernels.cuda.prediction import DeviceRates
from localllm.kernels.cuda.roofline import CHAINS, KINDS, PERIOD, CUDARoofline, Kind, Stopwatch, operands
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.kernels import skip_without_tools

#: Bytes to read; the last load of a thread is out of bounds.
N_BYTES = 4 * 256 * 16 * 3 + 16 * 5
ROUNDS = 3


@pytest.fixture(params=["emulated", "real"], scope="module")
def roofline(request: pytest.FixtureRequest) -> CUDARoofline:
    if request.param == "emulated":
        skip_without_tools()
        return CUDARoofline(EmulatedDriver(mode="check"), 0, n_bytes=N_BYTES, rounds=ROUNDS)
    try:
        return CUDARoofline(open_driver(), 0, n_bytes=N_BYTES, rounds=ROUNDS)
    except DeviceError as error:
        pytest.skip(str(error))


def test_all_words_are_read(roofline: CUDARoofline) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, N_BYTES // 4, np.uint32)
    assert roofline.total() == int(words.sum(dtype=np.uint64)) % (1 << 32)
    assert roofline.read_bandwidth() > 0


def test_all_bytes_are_copied(roofline: CUDARoofline) -> None:
    assert roofline.copy_bandwidth() > 0
    before, after = (np.zeros(N_BYTES, np.uint8) for _ in range(2))
    for array, memory in ((before, roofline._data), (after, roofline._copy)):
        roofline._driver.download(array, memory, roofline._stream)
    roofline._driver.synchronize(roofline._stream)
    np.testing.assert_array_equal(before, after)
    assert len(np.unique(before)) == 256


def matrices(kind: Kind) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the operands as matrices, [CHAINS, 16, K] and [PERIOD, K, 8], in the layout of the PTX manual.

    A lane is (row g, position t); a word holds neighbours along K.
    """
    words = operands(kind)
    if kind == "int8":
        values = words.view(np.int8).astype(np.float64)
    elif kind == "f16":
        values = words.view(np.float16).astype(np.float64)
    else:
        values = (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    per_word = len(values) // len(words)
    left, right = np.split(values, [CHAINS * 32 * 4 * per_word])
    # Axes: chain, g, t, half of K, row g or g + 8, neighbour.
    a = left.reshape(CHAINS, 8, 4, 2, 2, per_word).transpose(0, 4, 1, 3, 2, 5).reshape(CHAINS, 16, -1)
    b = right.reshape(PERIOD, 8, 4, 2, per_word).transpose(0, 3, 2, 4, 1).reshape(PERIOD, -1, 8)
    return a, b


@pytest.mark.parametrize("kind", KINDS)
def test_all_numbers_are_multiplied(roofline: CUDARoofline, kind: Kind) -> None:
    if kind not in roofline.kinds:
        pytest.skip(f"the device does not multiply {kind}")
    a, b = matrices(kind)
    expected = ROUNDS * (a.sum(axis=0) @ b.sum(axis=0)).sum()
    sums = roofline.sums(kind)
    assert len(sums) > 0
    assert expected != 0
    if kind == "int8" and roofline._properties.capability >= (8, 0):
        np.testing.assert_array_equal(sums, np.int64(expected) % (1 << 32))
    elif kind != "int8":
        np.testing.assert_array_equal(sums, np.float32(expected))
    assert roofline.rate(kind) > 0


def test_turing() -> None:
    """Turing multiplies bytes without tensor cores, and does not support bfloat16."""
    skip_without_tools()
    roofline = CUDARoofline(EmulatedDriver(capability=(7, 5)), 0, n_bytes=N_BYTES, rounds=ROUNDS)
    left, right = np.split(operands("int8"), [CHAINS * 32 * 4])
    a = left.view(np.int8).astype(np.int64).reshape(CHAINS, 32, 2, 2, 4)  # words 0 and 1 go with the first operand
    b = right.view(np.int8).astype(np.int64).reshape(PERIOD, 32, 2, 4)
    expected = ROUNDS * np.einsum("clhwb,plhb->", a, b)
    np.testing.assert_array_equal(roofline.sums("int8"), expected % (1 << 32))
    with pytest.raises(KernelError, match="does not multiply bf16"):
        roofline.rate("bf16")


@pytest.mark.parametrize("architecture", [75, 80, 90, 120])
def test_products_stay_in_registers(architecture: int) -> None:
    """A spill would time memory instead of products."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    for name, found in nvrtc.resources(flat_source("ceilings"), architecture, ["--std=c++17"]).items():
        assert found.spill_bytes == found.stack_bytes == 0, name
        assert found.registers <= 128, name  # two blocks of 256 threads per multiprocessor


def test_a_stopwatch_takes_the_median() -> None:
    """Emulated work takes a microsecond, and so does the event after it."""
    driver = EmulatedDriver()
    stream, memory = driver.stream(0), driver.allocate(0, 16)
    lengths = iter([9, 1, 2, 3, 4, 50])

    def work() -> None:
        for _ in range(next(lengths)):
            driver.fill(memory, 0, stream)

    assert Stopwatch(driver, stream, repetitions=5).seconds(work) == pytest.approx(4e-6)
    assert next(lengths, None) is None


def test_a_prediction_takes_the_rates_of_all_kinds(roofline: CUDARoofline) -> None:
    rates = DeviceRates.measured(roofline)
    assert rates.copy > 0
    assert set(rates.products) == set(roofline.kinds)
    assert min(rates.products.values()) > 0
