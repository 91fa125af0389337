"""Mixtures of experts on CUDA devices: the places of (token, expert) pairs, and every memory access.

`tests.kernels.test_operation_formulas` and `tests.kernels.test_routing` test the values on all backends.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cuda import matmul
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.calls import Mixture
from localllm.kernels.cuda.lowering import MAX_CHOSEN, MAX_EXPERTS
from localllm.kernels.cuda.matmul import PACKED_FORMATS, ProductLimits
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.cuda_on_cpu.module import ORDERS, Order
from tests.helpers.backends import emulated_cuda
from tests.helpers.blocks import random_rows
from tests.helpers.recorder import Ops
from tests.helpers.weights import Tensor, f32, one_sequence, run
from tests.kernels.cuda.device import Device
from tests.kernels.cuda.watched import WatchedDriver

T = GGMLType
ALIGNMENT = 8


@pytest.fixture(autouse=True)
def harness() -> None:
    skip_without_tools()


# -- Grouping ------------------------------------------------------------------------------------------------------


def group(driver: EmulatedDriver, ids: NDArray[np.int32], mixture: Mixture, product_rows: int) -> None:
    """Run the kernel on ids [T, k], and check all of its outputs."""
    device, n_tokens = Device(driver), len(ids)
    n_places, n_products = mixture.n_places(n_tokens), mixture.n_products(n_tokens, product_rows)
    header = device.upload(np.array([n_tokens, 0, 0, -1], np.int32))
    sizes = ids.size, n_places, 4 * n_products, 1
    places, rows, products, count = (device.upload(np.full(n, -7, np.int32)) for n in sizes)
    module = driver.load_module(0, "experts")
    numbers = [np.int32(n) for n in (mixture.k, mixture.n, product_rows)]
    arguments = [header, device.upload(ids), *numbers, places, rows, products, count]
    driver.launch(module, "group_by_expert", (1,), (1024,), arguments, device.stream)
    driver.synchronize(device.stream)

    used = int(device.download(header, np.int32, 4)[3])
    assert used <= n_places
    assert used % ALIGNMENT == 0
    at, of = device.download(places, np.int32, ids.size), device.download(rows, np.int32, n_places)[:used]
    assert len(set(at.tolist())) == ids.size  # the pairs have distinct places
    np.testing.assert_array_equal(of[at], np.arange(ids.size) // mixture.k)  # a place stores its token
    assert (of == -1).sum() == used - ids.size  # the other places are empty
    cut = device.download(products, np.int32, n_products, 4)[: int(device.download(count, np.int32, 1)[0])]
    covered = {place: expert for expert, first, stop, _ in cut.tolist() for place in range(first, stop)}
    assert covered == dict(zip(at.tolist(), ids.reshape(-1).tolist(), strict=True))
    assert sum(stop - first for _, first, stop, _ in cut.tolist()) == ids.size  # no place is covered twice
    for _, first, stop, _ in cut.tolist():
        assert first % ALIGNMENT == 0
        assert 0 < stop - first <= product_rows


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_pairs_of_one_expert_have_adjacent_places(order: Order) -> None:
    driver = EmulatedDriver(mode="check", kernel_order=order)
    rng = np.random.default_rng(0)
    cases = ((1, 4, 2, 8), (1, 1, 1, 8), (37, 40, 3, 8), (200, 33, 2, 16), (9, 1024, 32, 8))
    for n_tokens, n, k, product_rows in cases:
        ids = np.array([rng.permutation(n)[:k] for _ in range(n_tokens)], np.int32)
        group(driver, ids, Mixture(n, k), product_rows)


def test_all_pairs_of_one_expert() -> None:
    group(EmulatedDriver(mode="check"), np.full((50, 1), 3, np.int32), Mixture(7, 1), 16)


def test_places_and_products_fit_their_buffers() -> None:
    """The worst case: each expert's rows are one more than a product's."""
    for product_rows in (8, 64):
        for n in (1, 5, 128):
            counts = np.full(n, product_rows + 1)
            mixture, n_tokens = Mixture(n, 1), int(counts.sum())
            assert (-(-counts // 8) * 8).sum() <= mixture.n_places(n_tokens)
            assert (-(-counts // product_rows)).sum() <= mixture.n_products(n_tokens, product_rows)


@pytest.mark.parametrize(("n", "k"), [(MAX_EXPERTS + 1, 1), (64, MAX_CHOSEN + 1)])
def test_more_experts_than_kernels_support_are_refused(n: int, k: int) -> None:
    ops = Ops(emulated_cuda())
    table = ops.load_embedding(f32(np.zeros((1, n))))

    def forward() -> Any:
        x = ops.embed(table)
        ops.route(x, k, norm_topk_prob=True)
        return ops.outputs(x)

    with pytest.raises(KernelError, match=f"{n} experts with {k} per token are too many"):
        run(ops, forward, one_sequence(1))


# -- Whole mixtures in check mode ----------------------------------------------------------------------------------

N_EXPERTS, N_FF, D, K = 3, 64, 256, 2
#: Numbers of tokens that use each kernel for products.
BATCHES = {"matvec_experts": 2, "matmul_few_experts": 7, "matmul_experts": 20}


def mixed(ops: Ops, type: GGMLType, n: int, n_ff: int = N_FF) -> NDArray[np.float32]:
    rng = np.random.default_rng(1)

    def experts(type: GGMLType, n_out: int, n_in: int) -> Any:
        rows = random_rows(type, N_EXPERTS * n_out, n_in)
        return ops.load_experts(Tensor(type, (N_EXPERTS, n_out, n_in), rows.reshape(N_EXPERTS, n_out, -1)))

    gate, up, down = experts(type, n_ff, D), experts(type, n_ff, D), experts(T.Q8_0, 40, n_ff)
    x, logits, residual = (rng.standard_normal((20, width), np.float32)[:n] for width in (D, N_EXPERTS, 40))
    tables = [ops.load_embedding(f32(a)) for a in (x, logits, residual)]

    def forward() -> Any:
        x, logits, residual = (ops.embed(table) for table in tables)
        x = ops.rms_norm(x, f32(np.ones(D)), 1e-6)
        routing = ops.route(logits, K, norm_topk_prob=True)
        h = ops.gated(*ops.expert_linears(x, [gate, up], routing), "silu")
        return ops.outputs(ops.expert_output(h, down, routing, residual))

    return run(ops, forward, one_sequence(n))


@functools.cache
def expected(n: int) -> NDArray[np.float32]:
    return mixed(ops_of(EmulatedDriver()), T.Q4_0, n)


def ops_of(driver: EmulatedDriver) -> Ops:
    return Ops(CUDABackend(driver, 0, compiles_ahead=False, tile_rows=(16,)))


@pytest.mark.parametrize("n", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("order", [Order(), Order("reverse", "early")], ids=str)
def test_every_memory_access_is_valid(n: int, order: Order) -> None:
    found = mixed(ops_of(EmulatedDriver(mode="check", kernel_order=order)), T.Q4_0, n)
    np.testing.assert_array_equal(found, expected(n))


def test_products_of_few_tokens_read_and_add_rows_directly() -> None:
    """Rows are not gathered.  A kernel does not sum more experts than fit into a block."""
    driver = WatchedDriver(mode="check")
    mixed(ops_of(driver), T.Q4_0, 4)
    for kernel in ("group_by_expert", "quantise", "add_experts"):
        assert driver.kernels[kernel] == 0
    assert (driver.kernels["matvec_experts"], driver.kernels["matvec_experts_summed"]) == (1, 1)
    assert matmul.summed_launch(PACKED_FORMATS[T.Q4_0], 64, 4096, 1, 9) is None


def test_products_compute_their_gate() -> None:
    """More tokens, whose gate is a separate launch, give the same bits."""
    driver = WatchedDriver(mode="check")
    found = mixed(ops_of(driver), T.Q4_K, 2, n_ff=256)
    assert (driver.kernels["matvec_experts_gated"], driver.kernels["gated"]) == (1, 0)
    np.testing.assert_array_equal(found[0], mixed(ops_of(EmulatedDriver()), T.Q4_K, 20, n_ff=256)[0])


@pytest.mark.parametrize("type", [T.Q4_0, T.F16], ids=lambda t: t.name)
def test_before_sm_80(type: GGMLType) -> None:
    """Rows are multiplied one by one, or in small tiles on the tensor cores for F16."""
    old = mixed(ops_of(EmulatedDriver(capability=(7, 5), shared_bytes=64 << 10)), type, 20)
    new = mixed(ops_of(EmulatedDriver()), type, 20)
    if type is T.F16:  # the older tensor cores add half as many products at once
        np.testing.assert_allclose(old, new, rtol=1e-3, atol=1e-3 * np.abs(new).max())
    else:
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("type", [t for t in PACKED_FORMATS if isinstance(t, GGMLType)], ids=lambda t: t.name)
def test_a_format_has_a_kernel_for_any_number_of_tokens(type: GGMLType) -> None:
    """The kernel reads the format."""
    format = PACKED_FORMATS[type]
    for n_tokens, product_rows in ((1, 8), (4, 8), (5, 8), (100, 8), (500, 64), (4, 64)):
        launch = matmul.expert_launch(
            format, [64], 256, n_tokens, 2 * n_tokens, 99, product_rows, ProductLimits((9, 0), 227 << 10)
        )
        if type is T.F32 or (n_tokens <= 4 and not format.is_tensor_float):
            assert (launch.kernel, launch.grid) == ("matvec_experts", (2 * n_tokens, 2))
        elif product_rows == 8 and type not in (T.Q2_K, T.Q3_K, T.Q5_K, T.Q6_K):
            assert (launch.kernel, launch.grid) == ("matmul_few_experts", (99, 2))
        else:
            assert (launch.kernel, launch.grid) == ("matmul_experts", (99, 1))
            assert launch.defines["TOKENS"] == 64
