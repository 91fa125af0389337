"""Matrix products on CUDA devices.

Expected results of integer formats are computed in numpy with the kernels' order of additions, and must agree bit for
bit.  They are also compared with products of the gguf package's values in float64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cuda import matmul
from localllm.kernels.cuda.driver import Launch
from localllm.kernels.cuda.matmul import PACKED_FORMATS, ProductLimits, product_launch
from localllm.quant.lut import LUT_E2M1_16, LUT_E2M1_32, LUT_IQ1_16, LUT_IQ2_32, KernelType, LUTType
from localllm.quant.types import BLOCK_SIZES, GGMLType
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.cuda_on_cpu.module import ORDERS, Order
from tests.helpers.blocks import UNITS, random_rows, set_scales, values_of
from tests.helpers.cuda_sums import float_product, product, quantised
from tests.kernels.cuda.device import Device, load, multiply

T = GGMLType
Floats = NDArray[np.float32]

#: Tables of 16 and of 8 values differ in numbers only, so each kind runs with 32 and with 16 columns per scale.
INTEGERS: list[KernelType] = [
    *(t for t in PACKED_FORMATS if not PACKED_FORMATS[t].is_float and not isinstance(t, LUTType)),
    LUT_E2M1_32,
    LUT_E2M1_16,
    LUT_IQ2_32,
    LUT_IQ1_16,
]
#: One format per way of reading codes and scales for tensor cores.
TENSOR_INTEGERS = [T.Q4_0, T.Q8_0, T.Q4_K, T.Q5_K, T.Q2_K, T.Q6_K]
HALVES = [T.F16, T.BF16]
#: No multiples of the rows of a group.
N_OUT, N_IN = 37, 768
#: Tokens for matvec, matmul_few and matmul.
BATCHES = (1, 11, 45)


def name(type: KernelType) -> str:
    return type.name


def activations(n: int, k: int = N_IN, seed: int = 5) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, k), np.float32)


def assert_near(y: Floats, x: NDArray[Any], w: NDArray[np.float64], added: Any = 0.0, rounding: float = 0.0) -> None:
    """Compare y with x @ w.T + added; the bound is relative to the sum of magnitudes, as rounding errors are."""
    bound = (1e-6 + rounding) * (np.abs(x) @ np.abs(w).T + np.abs(added)) + 1e-30
    assert (np.abs(y - (x @ w.T + added)) < bound).all()


def assert_same_bits(a: Floats, b: Floats) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("type", INTEGERS, ids=name)
def test_one_token(device: Device, type: KernelType) -> None:
    rows, x = random_rows(type, N_OUT, N_IN), activations(1)
    y = multiply(device, x, [load(device, rows, type, N_IN)])[0]
    expected = product(rows, type, x)
    assert_near(expected, quantised(x).values, values_of(rows, type))
    assert_same_bits(y, expected)


@pytest.mark.parametrize("type", TENSOR_INTEGERS, ids=name)
def test_a_token_has_the_same_bits_in_any_batch(device: Device, type: KernelType) -> None:
    rows, x = random_rows(type, N_OUT, N_IN), activations(max(BATCHES))
    weights = load(device, rows, type, N_IN)
    expected = product(rows, type, x)
    for n in BATCHES:
        assert_same_bits(multiply(device, x[-n:], [weights])[0], expected[-n:])


@pytest.mark.parametrize("n_tokens", [2, 3])
def test_several_tokens_in_matvec(device: Device, n_tokens: int) -> None:
    for type in (T.Q4_K, T.F32):
        rows, x = random_rows(type, N_OUT, 512), activations(n_tokens, 512)
        y = multiply(device, x, [load(device, rows, type, 512)])[0]
        assert_same_bits(y, float_product(rows.view("<f4"), x) if type is T.F32 else product(rows, type, x))


@pytest.mark.parametrize("type", HALVES, ids=name)
def test_halves(device: Device, type: KernelType) -> None:
    rows, x = random_rows(type, N_OUT, 333), activations(max(BATCHES), 333)
    x[0] *= 1e30
    x[1] *= 1e-30
    weights, w = load(device, rows, type, 333), values_of(rows, type)
    found = [multiply(device, x[-n:], [weights])[0] for n in BATCHES]
    # The rounding of fused sums of products is not documented, but it is always the same.
    for few, many in pairwise(found):
        assert_same_bits(few, many[-len(few) :])
    assert_near(found[-1], x.astype(np.float64), w, rounding=2.0**-11 if type is T.F16 else 2.0**-8)


def test_float32(device: Device) -> None:
    for n_out, n_in in ((37, 300), (5, 1)):
        x = activations(9, n_in)
        rows = random_rows(T.F32, n_out, n_in)
        y = multiply(device, x, [load(device, rows, T.F32, n_in)])[0]
        assert_same_bits(y, float_product(rows.view("<f4"), x))
        assert_near(y, x.astype(np.float64), values_of(rows, T.F32))


@pytest.mark.parametrize("n_tokens", BATCHES)
def test_bias_and_residual(device: Device, n_tokens: int) -> None:
    rows, x = random_rows(T.Q4_0, N_OUT, N_IN), activations(n_tokens)
    weights, plain = load(device, rows, T.Q4_0, N_IN), product(rows, T.Q4_0, x)
    bias, residual = activations(1, N_OUT)[0], activations(n_tokens, N_OUT, 6)
    assert_same_bits(multiply(device, x, [weights], bias)[0], plain + bias)
    assert_same_bits(multiply(device, x, [weights], None, residual)[0], plain + residual)
    assert_same_bits(multiply(device, x, [weights], bias, residual)[0], plain + bias + residual)


@pytest.mark.parametrize("n_tokens", BATCHES)
def test_several_matrices_over_one_input(device: Device, n_tokens: int) -> None:
    """In matmul, the first matrix takes two blocks of 128 rows, and each other matrix one."""
    x = activations(n_tokens)
    matrices = [random_rows(T.Q4_0, n, N_IN, seed=n) for n in (130, 5, 33)]
    for count in (2, 3):
        weights = [load(device, rows, T.Q4_0, N_IN) for rows in matrices[:count]]
        for y, rows in zip(multiply(device, x, weights), matrices, strict=False):
            assert_same_bits(y, product(rows, T.Q4_0, x))


@pytest.mark.parametrize("n_in", [32, 96, 2080, 4000])
@pytest.mark.parametrize("n_out", [1, 31, 64, 130])
def test_any_shape(device: Device, n_in: int, n_out: int) -> None:
    """Fewer chunks than tiles and as many, and rows for one block of matmul and for two."""
    rows, x = random_rows(T.Q4_0, n_out, n_in), activations(max(BATCHES), n_in)
    weights, expected = load(device, rows, T.Q4_0, n_in), product(rows, T.Q4_0, x)
    for n in BATCHES:
        assert_same_bits(multiply(device, x[:n], [weights])[0], expected[:n])


@pytest.mark.parametrize("type", [t for t in INTEGERS if t in UNITS], ids=name)
def test_extreme_codes_times_extreme_activations(device: Device, type: GGMLType) -> None:
    """The largest products of all, with equal and with alternating signs, do not overflow."""
    fills = (0x00, 0xFF, 0x80, 0x7F, 0x0F, 0xF0, 0x55, 0xAA)
    size = BLOCK_SIZES[type]
    rows = np.repeat(np.array(fills, np.uint8), 256 // size.length * size.n_bytes).reshape(len(fills), -1)
    set_scales(rows.reshape(-1, size.n_bytes), type, [UNITS[type]], np.random.default_rng(0))
    weights = load(device, rows, type, 256)
    x = np.full((4, 256), 127, np.float32)
    x[1] = -127
    x[2, 1::2] = -127
    x[3, ::3] = -127
    for row in x:
        y = multiply(device, row[None], [weights])[0]
        assert_same_bits(y, product(rows, type, row[None]))
        assert_near(y, row[None].astype(np.float64), values_of(rows, type))


@pytest.mark.parametrize("n_tokens", BATCHES)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
def test_a_non_finite_scale_affects_only_its_row(device: Device, n_tokens: int, bits: int) -> None:
    rows, x = random_rows(T.Q4_0, N_OUT, 160), activations(n_tokens, 160)
    expected = product(rows, T.Q4_0, x)
    rows[20, 18:20] = bits & 255, bits >> 8
    y = multiply(device, x, [load(device, rows, T.Q4_0, 160)])[0]
    assert not np.isfinite(y[:, 20]).any()
    assert_same_bits(np.delete(y, 20, axis=1), np.delete(expected, 20, axis=1))


@pytest.mark.parametrize("n_tokens", [3, *BATCHES[1:]])
@pytest.mark.parametrize("type", [T.Q4_0, T.F16], ids=name)
def test_a_non_finite_activation_affects_only_its_token(device: Device, n_tokens: int, type: GGMLType) -> None:
    rows, x = random_rows(type, N_OUT, 160), activations(n_tokens, 160)
    weights = load(device, rows, type, 160)
    clean = multiply(device, x, [weights])[0]
    for value in (np.nan, np.inf, -np.inf):
        x[1, 40] = value
        y = multiply(device, x, [weights])[0]
        assert not np.isfinite(y[1]).any()
        assert_same_bits(np.delete(y, 1, axis=0), np.delete(clean, 1, axis=0))


@pytest.mark.parametrize("type", [T.Q4_0, T.F32, T.F16], ids=name)
def test_before_sm_80(type: GGMLType) -> None:
    """These devices multiply integers without tensor cores, two tokens at a time."""
    skip_without_tools()
    device = Device(EmulatedDriver(capability=(7, 5), shared_bytes=64 << 10))
    rows, x = random_rows(type, N_OUT, 256), activations(19, 256)
    y = multiply(device, x, [load(device, rows, type, 256)])[0]
    if type is T.F16:
        assert_near(y, x.astype(np.float64), values_of(rows, type), rounding=2.0**-11)
    else:
        assert_same_bits(y, product(rows, type, x) if type is T.Q4_0 else float_product(rows.view("<f4"), x))


# -- In check mode -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: f"{o.schedule}-{o.copies}-{o.seed}")
@pytest.mark.parametrize("type", [T.Q6_K, T.F16], ids=name)
def test_every_memory_access_is_valid(type: GGMLType, order: Order) -> None:
    """Checks bounds, races and uninitialised memory, with several orders of threads and copies."""
    skip_without_tools()
    device = Device(EmulatedDriver(mode="check", kernel_order=order), tile_rows=(16,))
    rows, x = random_rows(type, N_OUT, 768), activations(max(BATCHES), 768)
    weights = load(device, rows, type, 768)
    found = [multiply(device, x[:n], [weights])[0] for n in BATCHES]
    for few, many in pairwise(found):
        assert_same_bits(few, many[: len(few)])
    if type is T.Q6_K:
        assert_same_bits(found[-1], product(rows, type, x))


# -- Launches ------------------------------------------------------------------------------------------------------


H100: dict[str, Any] = {"capability": (9, 0), "shared_bytes": 227 << 10}


def launch_of(type: KernelType, n_outs: Sequence[int], n_rows: int, **device: Any) -> Launch:
    return product_launch(PACKED_FORMATS[type], n_outs, 4096, n_rows, ProductLimits(**(H100 | device)))


def test_the_kernel_of_each_number_of_tokens() -> None:
    rows = (1, 4, 8, 32, 40, 4096)
    of = {t: [launch_of(t, [64], n).kernel for n in rows] for t in (T.Q4_0, T.F32)}
    assert of[T.Q4_0] == ["matvec", "matvec", "matmul_few", "matmul_few", "matmul", "matmul"]
    assert of[T.F32] == ["matvec"] * 6
    assert [launch_of(T.BF16, [64], n).kernel for n in (8, 32, 40)] == ["matmul_few", "matmul_few", "matmul"]
    assert [launch_of(T.Q4_K, [64], n).defines["TOKENS"] for n in (8, 16, 24, 32)] == [8, 16, 8, 16]
    old = {"capability": (7, 5), "shared_bytes": 64 << 10}
    assert {launch_of(T.Q4_0, [64], n, **old).kernel for n in rows} == {"matvec"}
    assert launch_of(T.F16, [64], 64, **old).kernel == "matmul_few"
    assert matmul.packed_format(T.BF16, (7, 5)).type is T.F32
    assert matmul.packed_format(T.BF16, (8, 0)).type is T.BF16


def test_too_many_matrices_are_refused() -> None:
    assert launch_of(T.Q4_0, [64, 33, 1], 8).grid == (1, 5)
    assert launch_of(T.Q4_0, [130, 33, 1], 128).grid == (1, 4)
    for n_rows in (8, 64):
        with pytest.raises(KernelError, match="4 matrices in one launch, but the maximum is 3"):
            launch_of(T.Q4_0, [64] * 4, n_rows)


def test_tiles_are_small_if_large_ones_leave_multiprocessors_idle() -> None:
    def tile(n_rows: int, **device: Any) -> Any:
        return launch_of(T.Q4_K, [4096, 1024], n_rows, **device).defines["TOKENS"]

    assert [tile(n) for n in (40, 64, 128, 256, 2048)] == [64, 64, 128, 128, 128]
    assert [tile(n, n_multiprocessors=132) for n in (40, 128, 256, 2048)] == [64, 64, 128, 128]


@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("type", [t for t in PACKED_FORMATS if t is not T.F32], ids=name)
def test_stages_fit_into_shared_memory(type: KernelType, shared_bytes: int) -> None:
    for n_rows in (40, 64, 128, 512):
        launch = launch_of(type, [100], n_rows, shared_bytes=shared_bytes)
        tokens, stages = int(launch.defines["TOKENS"]), int(launch.defines["STAGES"])
        assert stages >= 2
        assert launch.shared_bytes == stages * matmul.stage_bytes(PACKED_FORMATS[type], tokens) <= shared_bytes
        assert launch.grid == (-(-n_rows // tokens), 1)


def test_activations_are_padded_to_the_rows_of_kernels() -> None:
    q4, f16 = PACKED_FORMATS[T.Q4_0], PACKED_FORMATS[T.F16]
    assert [q4.input_rows(n) for n in (1, 2, 3, 4, 5, 9, 33)] == [1, 2, 4, 4, 8, 16, 40]
    assert [f16.input_rows(n) for n in (1, 2, 9)] == [8, 8, 16]
    assert q4.unit_bytes(100, 4) == 128 * 4
    assert f16.unit_bytes(100, 8) == 128 * 2 * 8
    assert q4.input_scale_bytes(100, 4) == 4 * 8 * 4


@pytest.mark.parametrize("type", [T.Q4_0, T.Q4_K, T.Q6_K, T.F32], ids=lambda t: t.name)
def test_only_weights_are_read_before_the_previous_kernel_has_ended(type: T) -> None:
    """On every path through the code.  The number of tokens may be read too, because no kernel writes it."""
    if reason := nvrtc.missing():
        pytest.skip(reason)
    format, limits = PACKED_FORMATS[type], ProductLimits((9, 0), 227 << 10)
    launch = matmul.product_launch(format, [64, 64], 512, 1, limits)
    others = matmul.gated_launch(format, launch), matmul.mixed_launch(format, launch, PACKED_FORMATS[T.Q6_K])
    for each in filter(None, (launch, *others)):
        driver = EmulatedDriver(capability=(9, 0))
        lines = [line.strip() for line in driver.ptx(each.module, {**each.defines, "EARLY": 1}).splitlines()]
        places = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
        ways, seen, loads = [0], set[int](), list[str]()
        while ways:
            i = ways.pop()
            while i < len(lines) and i not in seen and not lines[i].startswith(("griddepcontrol.wait", "ret")):
                seen.add(i)
                loads += [lines[i]] * ("ld.global" in lines[i] and "no_allocate" not in lines[i])
                if branch := re.search(r"bra(?:\.uni)?\s+(\S+);", lines[i]):
                    ways.append(places[branch[1]])
                    if not lines[i].startswith("@"):
                        break
                i += 1
        assert [load.split()[0] for load in loads] == ["ld.global.nc.u32"]
