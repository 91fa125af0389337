"""Norms, gates and the choice of tokens, compared with formulas in float64 and with numpy's order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.kernels.cuda import matmul
from localllm.kernels.cuda.driver import DeviceMemory
from localllm.kernels.operations.dense import ACTIVATIONS
from localllm.quant.types import GGMLType
from localllm.sampling import Sampler, Sampling
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.cuda_on_cpu.module import ORDERS, Order
from tests.helpers.weights import random
from tests.kernels.cuda.device import NULL, Device, padded, quantise

Array = NDArray[Any]
T = GGMLType
ROW_THREADS, SORTED = 512, 2048
#: Stride between the weights of groups, for norms of whole rows.
NO_STEP = np.int32(0)
#: Values outside the range of exp.
LARGE = np.array([0, -0.0, 1e-30, -1e-30, 20, -20, 87, -87, 89, -89, 104, -104, 1e4, -1e4], np.float32)


@pytest.fixture(params=[None, *ORDERS], ids=str)
def checked(request: pytest.FixtureRequest) -> Device:
    """A device in fast mode, and in check mode with every order of threads."""
    skip_without_tools()
    order: Order | None = request.param
    return Device(EmulatedDriver() if order is None else EmulatedDriver(mode="check", kernel_order=order))


def launch(device: Device, kernel: str, grid: tuple[int, ...], threads: int, arguments: list[Any]) -> None:
    module = device.driver.load_module(0, "elementwise")
    device.driver.launch(module, kernel, grid, (threads,), arguments, device.stream)
    device.driver.synchronize(device.stream)


def header(device: Device, n_tokens: int = 0, n_outputs: int = 0) -> DeviceMemory:
    return device.upload(np.array([n_tokens, n_outputs, 0], np.int32))


def row_launch(device: Device, kernel: str, n_rows: int, width: int, inputs: list[Any], is_norm: bool) -> Array:
    """Return the rows that a kernel writes.  The last row is not in the batch and must stay NaN."""
    grid = (n_rows,) if is_norm else (-(-width // 512), n_rows)
    stride = -(-width // 4) * 4
    y = device.upload(np.full((n_rows, stride), np.nan, np.float32))
    head = header(device, n_rows - 1)
    codes = [] if kernel == "softcap" else [NULL, NULL, np.int32(0)]
    launch(device, kernel, grid, ROW_THREADS if is_norm else 128, [head, *inputs, y, np.int32(stride), *codes])
    out = device.download(y, np.float32, n_rows, stride)[:, :width]
    assert np.isnan(out[-1]).all()
    return out[:-1]


def quantised_launch(
    device: Device, kernel: str, x: Array, width: int, inputs: list[Any], is_norm: bool
) -> tuple[Array, Array]:
    """Return the codes and scales that a kernel writes, and the results of `quantise` for the rows ``x``."""
    format = matmul.PACKED_FORMATS[T.Q4_0]
    n_rows = format.input_rows(len(x))
    sizes = format.unit_bytes(width, n_rows), format.input_scale_bytes(width, n_rows)
    units, scales = (device.upload(np.zeros(n, np.uint8)) for n in sizes)
    grid = (n_rows,) if is_norm else (-(-width // 512), n_rows)
    head = header(device, len(x))
    arguments = [head, *inputs, NULL, np.int32(0), units, scales, np.int32(n_rows)]
    launch(device, kernel, grid, ROW_THREADS if is_norm else 128, arguments)
    plain = quantise(device, x, format, n_rows)[:2]
    found: list[Array] = []
    wanted: list[Array] = []
    for memory, other, n in zip((units, scales), plain, sizes, strict=True):
        for result, m in ((found, memory), (wanted, other)):
            rows = device.download(m, np.uint8, n).reshape(-1, n_rows, 16 if m in (units, plain[0]) else 8)
            result.append(rows[:, : len(x)].ravel())
    return np.concatenate(found), np.concatenate(wanted)


def norm_inputs(device: Device, x: Array, weight: Array, eps: float) -> list[Any]:
    wide, weights = padded(x), device.upload(padded(weight[None]))
    sizes = np.int32(wide.shape[1]), np.int32(x.shape[1])
    return [device.upload(wide), *sizes, weights, np.float32(eps)]


@pytest.mark.parametrize("width", [1, 5, 100, 2176])
def test_rms_norm(checked: Device, width: int) -> None:
    x, weight = random(3, width), random(width, seed=1)
    x[1] *= 1e-4
    out = row_launch(checked, "rms_norm", 3, width, [*norm_inputs(checked, x, weight, 1e-6), NO_STEP], True)
    wide = x[:-1].astype(np.float64)
    expected = wide / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(out, expected, rtol=2e-6)


@pytest.mark.parametrize("width", [32, 173, 2176])
def test_a_norm_writes_the_codes_of_quantise(device: Device, width: int) -> None:
    x, weight = random(3, width), random(width, seed=1)
    inputs = norm_inputs(device, np.concatenate([x, x[:1]]), weight, 1e-6)
    y = row_launch(device, "rms_norm", 4, width, [*inputs, NO_STEP], True)
    np.testing.assert_array_equal(*quantised_launch(device, "rms_norm", y, width, [*inputs, NO_STEP], True))


def cap_inputs(device: Device, x: Array, cap: float) -> list[Any]:
    wide = padded(x)
    return [device.upload(wide), np.int32(wide.shape[1]), np.int32(x.shape[1]), np.float32(cap)]


@pytest.mark.parametrize("width", [5, 700])
def test_softcap(checked: Device, width: int) -> None:
    x = 40 * random(3, width)
    out = row_launch(checked, "softcap", 3, width, cap_inputs(checked, x, 30), False)
    np.testing.assert_allclose(out, 30 * np.tanh(x[:-1].astype(np.float64) / 30), rtol=1e-6)


def gate_inputs(device: Device, activation: str, gate: Array, up: Array) -> list[Any]:
    wide, kind = padded(gate), np.int32(ACTIVATIONS.index(activation))
    return [kind, device.upload(wide), device.upload(padded(up)), np.int32(wide.shape[1]), np.int32(gate.shape[1])]


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("width", [14, 521])
def test_gated(checked: Device, activation: str, width: int) -> None:
    gate, up = 3 * random(3, width), random(3, width, seed=1)
    gate[0, :14] = LARGE
    out = row_launch(checked, "gated", 3, width, gate_inputs(checked, activation, gate, up), False)
    wide, other = gate[:-1].astype(np.float64), up[:-1]
    if activation == "silu":
        with np.errstate(over="ignore"):
            expected = wide / (1 + np.exp(-wide)) * other
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-30)
    else:
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
        np.testing.assert_allclose(out, 0.5 * wide * (1 + np.tanh(inner)) * other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gate_writes_the_codes_of_quantise(device: Device, activation: str) -> None:
    gate, up = 3 * random(4, 653), random(4, 653, seed=1)
    inputs = gate_inputs(device, activation, gate, up)
    y = row_launch(device, "gated", 4, 653, inputs, False)
    np.testing.assert_array_equal(*quantised_launch(device, "gated", y, 653, inputs, False))


def gathered(device: Device, x: Array, rows: Array) -> Array:
    """Gather three of four rows of 530 values, as float32 [4, 532]."""
    y = device.upload(np.full((4, 532), np.nan, np.float32))
    inputs = [device.upload(rows), device.upload(padded(x)), np.int32(532), np.int32(530)]
    launch(device, "gather_rows", (2, 4), 128, [header(device, 5, 3), *inputs, y, np.int32(532)])
    return device.download(y, np.float32, 4, 532)


def joined(device: Device, x: Array, rows: Array, *, is_mean: bool) -> Array:
    """Join two pairs of neighbouring rows of 530 values, as float32 [3, 2 * 532]."""
    y = device.upload(np.full((3, 2 * 532), np.nan, np.float32))
    inputs = [device.upload(rows), np.int32(2), np.int32(is_mean), device.upload(padded(x))]
    values = [header(device, len(x), 2), *inputs, np.int32(532), np.int32(530), y, np.int32(2 * 532)]
    launch(device, "join_rows", (2, 3), 128, values)
    return device.download(y, np.float32, 3, 2 * 532)


@pytest.mark.parametrize("is_mean", [False, True])
def test_rows_are_joined(checked: Device, is_mean: bool) -> None:
    x = random(5, 530)
    out = joined(checked, x, np.array([3, 0, 1], np.int32), is_mean=is_mean)
    pairs = np.stack([x[3:5], x[0:2]])
    if is_mean:
        np.testing.assert_array_equal(out[:2, :530], pairs.sum(axis=1) * np.float32(0.5))
    else:
        np.testing.assert_array_equal(out[:2, : 2 * 530], pairs.reshape(2, -1))
    assert np.isnan(out[2]).all()


def test_rows_are_gathered(checked: Device) -> None:
    x, rows = random(5, 530), np.array([4, 0, 0, 1], np.int32)
    out = gathered(checked, x, rows)
    np.testing.assert_array_equal(out[:3, :530], x[rows[:3]])
    assert np.isnan(out[3]).all()


def logits(n: int) -> Array:
    """Rows with ties, with the largest value at the end, with zeros of both signs, NaN and infinities."""
    x = np.random.default_rng(n).integers(-20, 20, (6, n)).astype(np.float32)
    x[1, -1] = 1e30
    x[2], x[2, n // 2] = -0.0, 0.0
    x[3] = -np.inf
    x[4, ::2], x[4, 1] = np.nan, -1e30
    x[5] = np.random.default_rng(n).standard_normal(n)
    return x


def best(x: Array, k: int) -> Array:
    """Return the first k ids of each row in Python's order, with NaN first."""
    rows = [sorted(range(x.shape[1]), key=lambda i, r=row: (not np.isnan(r[i]), -r[i], i)) for row in x]
    return np.array(rows)[:, :k]


def largest(device: Device, x: Array) -> tuple[Array, Array]:
    """Return ids and values of the largest logits, and check that the kernel writes nothing after them."""
    n_rows, n = x.shape
    found = device.upload(np.full(2 * n_rows + 2, -7, np.int32))
    wide = padded(np.concatenate([x, x[:1]]))
    arguments = [header(device, 0, n_rows), device.upload(wide), np.int32(wide.shape[1]), np.int32(n), found]
    launch(device, "argmax", (n_rows + 1,), 1024, arguments)
    *numbers, rest, last = np.split(
        device.download(found, np.int32, 2 * n_rows + 2), [n_rows, 2 * n_rows, 2 * n_rows + 1]
    )
    assert rest == last == -7
    return numbers[0], numbers[1].view(np.float32)


@pytest.mark.parametrize("n", [2, 31, 5000])
def test_argmax(checked: Device, n: int) -> None:
    x = logits(n)
    found, values = largest(checked, x)
    np.testing.assert_array_equal(found, best(x, 1)[:, 0])
    np.testing.assert_array_equal(values, x[range(6), found])


def top(device: Device, x: Array, k: int, draws: Array | None = None) -> tuple[Array, Array, Array]:
    """Return ids and values of the largest logits, [rows, k], and the next token of each row."""
    n_rows, n = x.shape
    wide, chunks = padded(x), -(-n // SORTED)
    head, rows, stride = header(device, 0, n_rows), device.upload(wide), np.int32(wide.shape[1])
    parts = device.empty(8 * n_rows * chunks * k)
    found, chosen = device.empty(8 * n_rows * k + 4 * n_rows), device.empty(4 * n_rows)
    given = device.upload(np.zeros((n_rows, 5), np.float32) if draws is None else draws)
    launch(device, "top_parts", (chunks, n_rows), 1024, [head, rows, stride, np.int32(n), np.int32(k), parts])
    sizes = np.int32(chunks * k), np.int32(k)
    launch(device, "top_merge", (n_rows,), 1024, [head, parts, *sizes, rows, stride, given, found, chosen])
    ids, values = device.download(found, np.int32, 2, n_rows, k)
    going_on = device.download(chosen, np.int32, n_rows)
    np.testing.assert_array_equal(device.download(found, np.int32, (2 * k + 1) * n_rows)[-n_rows:], going_on)
    return ids, values.view(np.float32), going_on


@pytest.mark.parametrize(("n", "k"), [(2, 1), (5000, 3), (5000, 700), (2049, 1024)])
def test_top_k(device: Device, n: int, k: int) -> None:
    x = logits(n)
    found, values, chosen = top(device, x, k)
    np.testing.assert_array_equal(found, best(x, k))
    np.testing.assert_array_equal(values, np.take_along_axis(x, found, 1))
    np.testing.assert_array_equal(chosen, found[:, 0])


def test_fewer_than_k(device: Device) -> None:
    x = random(1, 3)
    found, _, _ = top(device, x, 5)
    np.testing.assert_array_equal(found[0, :3], best(x, 3)[0])
    np.testing.assert_array_equal(found[0, 3:], -1)


WITHOUT = {"top_p": 1.0, "min_p": 0.0, "temperature": 2.0}


@pytest.mark.parametrize("settings", [{}, WITHOUT, {"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.5}], ids=str)
def test_the_device_draws_the_tokens_of_a_sampler(checked: Device, settings: dict[str, float]) -> None:
    """With the sampler's random numbers and logits.  The last row takes its largest logit."""
    sampling, x = Sampling(**({"top_k": 40, "seed": 5} | settings)), 3 * random(8, 3000)
    sampler = Sampler(sampling, 3000)
    draws = np.array([*sampler.draws(7), (0.0,) * 5], np.float32)
    ids, values, chosen = top(checked, x, sampler.n_enough, draws)
    expected = [sampler.among(*row).id for row in zip(ids[:7], values[:7], strict=True)]
    assert chosen.tolist() == [*expected, ids[7, 0]]
