"""The ceilings' kernels do the work that they are timed for: their sums are those that numpy gets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from localllm.kernels.cpu.program import Workers
from localllm.kernels.cpu.roofline import (
    DOTS,
    LANES,
    PERIOD,
    ROUNDS,
    UNIT,
    UNITS,
    MultiplyTest,
    ReadTest,
    Roofline,
)
from localllm.kernels.cpu.target import Target, choose


@pytest.fixture
def target() -> Target:
    """The best instruction set; products of bytes of all are in test_simd.py."""
    return choose()


@pytest.fixture
def workers() -> Iterator[Workers]:
    two = Workers(2)
    yield two
    two.close()


@pytest.mark.parametrize("n_bytes", [1, 3 * UNIT, 5 * UNIT + 1])
def test_all_words_are_read(target: Target, workers: Workers, n_bytes: int) -> None:
    test = ReadTest(workers, target, n_bytes)
    test.data[:] = np.random.default_rng(0).integers(0, 1 << 32, len(test.data), np.uint32)
    assert test.bandwidth() > 0
    assert test.data.nbytes == -(-n_bytes // UNIT) * UNIT
    assert test.total() == int(test.data.sum(dtype=np.uint64)) % (1 << 32)


def test_what_is_flushed_from_the_caches_is_read_nevertheless(target: Target, workers: Workers) -> None:
    test = ReadTest(workers, target, 3 * UNIT, flushed=True)
    for seed in range(2):
        test.data[:] = np.random.default_rng(seed).integers(0, 1 << 32, len(test.data), np.uint32)
        assert test.bandwidth() > 0
        assert test.total() == int(test.data.sum(dtype=np.uint64)) % (1 << 32)


@pytest.mark.parametrize("bits", DOTS)
def test_all_bytes_are_multiplied(target: Target, workers: Workers, bits: int) -> None:
    test = MultiplyTest(workers, target, bits=bits)
    assert test.rate() > 0
    assert len(np.unique(test.weights)) == 1 << bits
    weights = test.weights.astype(np.int64).reshape(8, LANES, 4).transpose(1, 0, 2).reshape(LANES, 32)
    x = test.x.astype(np.int64).reshape(PERIOD * test.chains, 32)
    expected = (x @ weights.T).sum() * (ROUNDS // PERIOD)
    assert test.sums.shape == (UNITS * workers.n,)
    np.testing.assert_array_equal(test.sums, expected.astype(np.int32))


def test_all_floats_are_multiplied(target: Target, workers: Workers) -> None:
    test = MultiplyTest(workers, target, bits=None)
    assert test.rate() > 0
    expected = test.weights.astype(np.float64).sum() * test.x.astype(np.float64).sum() * (ROUNDS // PERIOD)
    np.testing.assert_array_equal(test.sums, np.float32(expected))


def test_a_roofline_measures_all_of_them() -> None:
    with Roofline(1, n_bytes=UNIT) as roofline:
        assert roofline.target == choose()
        assert min(roofline.read_bandwidth(), roofline.dot_rate(8), roofline.dot_rate(), roofline.fma_rate()) > 0
