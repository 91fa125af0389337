"""Attention and products with random sizes at the edges of tiles, pages and windows, and values of any magnitude.

The tests run a few seeds.  ``attend`` and ``multiply_any`` accept any seed, head size and format.
"""

from __future__ import annotations

import numpy as np
import pytest

from localllm.kernels.cuda.attention import NO_WINDOW, AttentionVariant, HeadShape
from localllm.kernels.cuda.cache import PAGE
from localllm.quant.lut import KernelType, LUTType, block_size
from localllm.quant.types import GGMLType
from tests.helpers.blocks import random_rows, values_of
from tests.helpers.cuda_sums import product, quantised
from tests.kernels.cuda.device import Device, load, multiply
from tests.kernels.cuda.test_attention import KINDS, Talk, assert_right, variant_of
from tests.kernels.cuda.test_matmul import INTEGERS, TENSOR_INTEGERS, assert_near, assert_same_bits

T = GGMLType
SEEDS = range(2)
#: Tokens before and within a sequence, near the sizes of a tile, a page and a split.
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 330)
#: Scales of weights at the limits of float16, including zero and subnormal ones.
SCALES = (0.0, 2.0**-24, 3.0 * 2.0**-20, 2.0**-14, 0.02, 1.0, 60000.0)


def random_talk(rng: np.random.Generator, device: Device, variant: AttentionVariant, most: int) -> Talk:
    """Return random sequences, heads, a window and magnitudes of queries."""
    heads = HeadShape(int(rng.integers(1, 3)), int(rng.choice([1, 2, 3, 4, 7, 8, 16])))
    in_a_tile = max(2, variant.tile_rows // heads.group_size)
    windows = (NO_WINDOW, 1, 2, PAGE - 1, PAGE, PAGE + 1, in_a_tile - 1, in_a_tile, in_a_tile + 1, 10**9)
    heads = HeadShape(heads.n_kv_heads, heads.group_size, int(rng.choice(windows)))
    edges = [n for n in EDGES if n <= most]
    lengths = []
    for _ in range(rng.integers(1, 4)):
        length = int(rng.choice(edges))
        n = int(rng.choice([n for n in edges if n <= length]))
        lengths.append((n if rng.random() < 0.6 else 1, length))
    power = int(rng.choice([-100, -20, 0, 0, 0, 20, 100]))
    talk = Talk(
        device,
        variant,
        lengths,
        heads,
        scale=float(rng.uniform(0.05, 1)) * variant.key_dim**-0.5 * 2.0**-power,
        soft_cap=float(rng.choice([0.5, 3.0, 50.0, 1e5])),
        seed=int(rng.integers(1 << 30)),
    )
    # Each token has its own magnitude, and so have its scores.
    talk.q *= np.exp2(power + rng.integers(-3, 3, (len(talk.q), 1))).astype(np.float32)
    return talk


def attend(device: Device, variant: AttentionVariant, seed: int, most: int = EDGES[-1]) -> None:
    assert_right(random_talk(np.random.default_rng(seed), device, variant, most))


def multiply_any(device: Device, type: KernelType, seed: int) -> None:
    """Compare products of weights and activations of any magnitude, including blocks of zeros, bit for bit."""
    rng = np.random.default_rng(seed)
    step = max(32, block_size(type).length)
    n_out, n_in = int(rng.choice([1, 31, 33, 65])), step * int(rng.integers(1, 1 + 1100 // step))
    rows = random_rows(type, n_out, n_in, scales=_scales(type, rng), seed=seed)
    weights = load(device, rows, type, n_in)
    x = rng.standard_normal((33, n_in)).astype(np.float32) * np.exp2(rng.integers(-20, 20, (33, 1))).astype(
        np.float32
    )
    x.reshape(33, -1, 32)[rng.random((33, n_in // 32)) < 0.2] = 0
    x[rng.integers(33)] = 0
    x[rng.integers(33)] *= np.float32(1e-20)  # the smallest scales above the subnormals, which count as zero
    expected = product(rows, type, x)
    assert_near(expected, quantised(x).values, values_of(rows, type))
    for n in (1, 2, 8, 9, 33):
        assert_same_bits(multiply(device, x[:n], [weights])[0], expected[:n])


def _scales(type: KernelType, rng: np.random.Generator) -> tuple[float, ...]:
    if isinstance(type, LUTType):
        return (0.0, 2.0**-24, 0.02, 100.0)
    return tuple(rng.choice(SCALES, 3))


# -- The tests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "kind"), KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_attention(device: Device, head_dim: int, kind: str, seed: int) -> None:
    attend(device, variant_of(head_dim, kind, device), seed, most=257)


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_with_soft_cap_and_sinks(device: Device, seed: int) -> None:
    attend(device, variant_of(8, device=device, soft_cap=True, sinks=True), seed, most=257)


# Only CI tries formats that tensor cores read like another one: each needs three modules, which take g++ seconds.
@pytest.mark.parametrize(
    "type",
    [pytest.param(t, marks=[] if t in TENSOR_INTEGERS else [pytest.mark.ci], id=t.name) for t in INTEGERS],
)
def test_products(device: Device, type: KernelType) -> None:
    multiply_any(device, type, 0)
