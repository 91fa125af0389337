"""Norms of heads, rotation, and writing to the cache, compared with formulas in float64."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.kernels.cuda.cache import PAGE, CachePart, CUDACacheLayout, append_defines
from localllm.kernels.cuda.calls import phases
from localllm.kernels.cuda.driver import Launch
from localllm.kernels.graph import CacheType, KVCache, Rope
from localllm.kernels.reference import hadamard, in_codes, in_range
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.cuda_on_cpu.module import ORDERS
from tests.helpers.weights import random
from tests.kernels.cuda.device import Device
from tests.kernels.formulas import normed, rotated

Array = NDArray[Any]
N_HEADS, N_KV_HEADS, N_TOKENS, N_PAGES = 3, 2, 5, 4
POSITIONS = np.array([0, 1, 70, 5000, 1_000_000], np.int32)
SLOTS = np.array([64, 65, 255, 3, 130], np.int32)
EPS = 0.01


class Written:
    """Outputs of the kernel: q, and the keys and values of layer 1.  All memory was 0xFF bytes before."""

    def __init__(
        self,
        device: Device,
        head_dim: int,
        cache_type: CacheType,
        rope: Rope | None,
        qkv: tuple[Array, Array, Array],
        norms: tuple[Array | None, Array | None] = (None, None),
        n_tokens: int = N_TOKENS,
    ) -> None:
        self.layout = CUDACacheLayout(KVCache(1, N_KV_HEADS, head_dim, head_dim, cache_type), N_PAGES)
        self.cache_type, self.head_dim = cache_type, head_dim
        q, k, v = (device.upload(x) for x in qkv)
        whole = np.full(2 * self.layout.n_bytes, 0xFF, np.uint8)
        memory = device.upload(whole)
        layers = [memory.at(*self.place(part)) for part in self.layout.parts]
        frequencies = np.zeros(1, np.float32) if rope is None else rope.frequencies
        weights = [device.upload(np.zeros(1, np.float32) if w is None else w) for w in (*norms, None)]
        normed = [0 if w is None else head_dim for w in (*norms, None)]
        kv_stride = N_KV_HEADS * head_dim
        norm_arguments: dict[str, Any] = {}
        for name, weight, n in zip("qkv", weights, normed, strict=True):
            norm_arguments |= {f"{name}_weight": weight, f"n_{name}_norm": n, f"{name}_eps": EPS}
        grid = (-(-(N_HEADS + 2 * N_KV_HEADS) // 4), N_TOKENS)
        device.run(
            Launch("append", "rope_append", append_defines(self.layout.cache), grid, (128,)),
            header=device.upload(np.array([n_tokens, 0, 0], np.int32)), slots=device.upload(SLOTS),
            positions=device.upload(POSITIONS), axes=None, phases=device.upload(phases(frequencies)),
            n_pairs=0 if rope is None else len(frequencies), first=0,
            interleaved=rope is not None and rope.interleaved, magnitude=1.0 if rope is None else rope.magnitude,
            q=q, q_stride=N_HEADS * head_dim, k=k, k_stride=kv_stride, v=v, v_stride=kv_stride, n_heads=N_HEADS,
            n_kv_heads=N_KV_HEADS, **norm_arguments, norm_last=False, rate=0.0, length=1, offset=0, base=0.0,
            keys=layers[0], values=layers[1], key_scales=layers[2], value_scales=layers[3],
        )  # fmt: skip
        self.q = device.download(q, np.float32, N_TOKENS, N_HEADS, head_dim)
        self.memory = device.download(memory, np.uint8, len(whole))

    def place(self, part: CachePart) -> tuple[int, int]:
        """Return the offset of a part and its bytes."""
        return self.layout.n_bytes + part.offset, part.n_bytes

    def part(self, number: int) -> Array:
        """Entries [pages, heads, PAGE, head] or scales [pages, heads, groups, PAGE] of the layer."""
        offset, n_bytes = self.place(self.layout.parts[number])
        raw = self.memory[offset : offset + n_bytes]
        if number >= 2:
            return raw.view(np.float16).reshape(N_PAGES, N_KV_HEADS, -1, PAGE)
        head = self.layout.heads[0]
        if self.cache_type in ("q5_0", "q4_0"):
            return self.unpacked(raw.reshape(N_PAGES, N_KV_HEADS, -1), head)
        raw = raw.view(np.float16 if self.cache_type == "f16" else np.int8)
        return raw.reshape(N_PAGES, N_KV_HEADS, PAGE, head)

    def unpacked(self, raw: Array, head: int) -> Array:
        """Codes of 4 or 5 bits as signed numbers."""
        low = raw[..., : PAGE * head // 2].reshape(N_PAGES, N_KV_HEADS, -1, 8)
        codes = np.concatenate([low & 15, low >> 4], axis=-1).astype(np.int8)
        if self.cache_type == "q4_0":
            return (codes - 8).reshape(N_PAGES, N_KV_HEADS, PAGE, head)
        fifths = np.unpackbits(raw[..., PAGE * head // 2 :], axis=-1, bitorder="little")
        return (codes + 16 * fifths.reshape(codes.shape).astype(np.int8) - 16).reshape(
            N_PAGES, N_KV_HEADS, PAGE, head
        )

    def held(self, number: int) -> Array:
        """Keys (0) or values (1) of the tokens, [T, heads, head], including padding."""
        entries = self.part(number)[SLOTS // PAGE, :, SLOTS % PAGE].astype(np.float64)
        if self.cache_type == "f16":
            return entries
        scales = self.part(2 + number)[SLOTS // PAGE, :, :, SLOTS % PAGE].astype(np.float64)
        return entries * np.repeat(scales, 32, axis=-1)[..., : self.layout.heads[0]]


def with_norm(x: Array, weight: Array | None) -> Array:
    return x if weight is None else normed(x, weight, EPS)


def heads_of(head_dim: int) -> tuple[Array, Array, Array]:
    return (
        random(N_TOKENS, N_HEADS * head_dim, seed=1),
        random(N_TOKENS, N_KV_HEADS * head_dim, seed=2),
        random(N_TOKENS, N_KV_HEADS * head_dim, seed=3),
    )


def split(x: Array, head_dim: int) -> Array:
    return x.reshape(N_TOKENS, -1, head_dim)


ROPES = {
    "interleaved": Rope(0.7 ** np.arange(4, dtype=np.float32), True),
    "halves": Rope(0.7 ** np.arange(4, dtype=np.float32), False),
    "partial": Rope(np.array([1, 0.01, 3e-5], np.float32), False, 1.3),
    "one pair": Rope(np.array([0.9999], np.float32), True, 0.8),
    "none": None,
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("with_norms", [(False, False), (True, True), (True, False), (False, True)])
def test_rotation_and_norms(device: Device, rope: Rope | None, with_norms: tuple[bool, bool]) -> None:
    qkv = heads_of(8)
    norms = tuple(random(8, seed=i) if given else None for i, given in enumerate(with_norms))
    out = Written(device, 8, "f16", rope, qkv, (norms[0], norms[1]))
    q, k, v = (split(x, 8) for x in qkv)
    np.testing.assert_allclose(out.q, rotated(with_norm(q, norms[0]), POSITIONS, rope), rtol=1e-5, atol=2e-6)
    keys = rotated(with_norm(k, norms[1]), POSITIONS, rope)
    np.testing.assert_allclose(out.held(0)[..., :8], keys, rtol=6e-4, atol=1e-6)
    np.testing.assert_array_equal(out.held(1)[..., :8], v.astype(np.float16))


@pytest.mark.parametrize(
    ("head_dim", "cache_type"),
    [(8, "f16"), (8, "q8_0"), (80, "q8_0"), (256, "f16"), (256, "q4_0"), (80, "q5_0"), (24, "q4_0")],
)
def test_caches_of_heads_of_any_size(device: Device, head_dim: int, cache_type: CacheType) -> None:
    """Padding of heads is zero, and slots without tokens do not change."""
    qkv = heads_of(head_dim)
    out = Written(device, head_dim, cache_type, None, qkv)
    for number in (0, 1):
        own = split(qkv[1 + number], head_dim)
        expected = in_range(own, np.dtype(np.float16)).astype(np.float16)
        if cache_type != "f16":
            expected = in_codes(hadamard(own, out.layout.cache.rotations[number]), cache_type)
        np.testing.assert_array_equal(out.held(number)[..., :head_dim], expected)
        assert (out.held(number)[..., head_dim:] == 0).all()
    changed = np.zeros(len(out.memory), bool)
    for part in out.layout.parts:
        offset, n_bytes = out.place(part)
        changed[offset : offset + n_bytes] = True
    assert (out.memory[~changed] == 0xFF).all()
    for number in {"f16": (0, 1), "q8_0": range(4)}.get(cache_type, (2, 3)):
        of_slot = np.moveaxis(out.part(number), 3 if number >= 2 else 2, 1).reshape(N_PAGES * PAGE, -1)
        assert (np.delete(of_slot, SLOTS, axis=0).view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q5_0"])
def test_nan_is_kept_and_tiny_values_become_zero(device: Device, cache_type: CacheType) -> None:
    q, k, v = heads_of(8)
    k[0, 3], v[1] = np.nan, 1e-37
    out = Written(device, 8, cache_type, None, (q, k, v))
    assert np.isnan(out.held(0)[0, 0, 3])
    assert not np.isnan(out.held(0)[1:]).any()
    assert (out.held(1)[1] == 0).all()


def test_tokens_after_the_batch_do_not_change(device: Device) -> None:
    qkv = heads_of(8)
    out = Written(device, 8, "f16", ROPES["halves"], qkv, n_tokens=2)
    np.testing.assert_array_equal(out.q[2:], split(qkv[0], 8)[2:])
    assert np.isnan(out.held(0)[2:]).all()


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q5_0", "q4_0"])
def test_every_memory_access_is_valid(cache_type: CacheType) -> None:
    skip_without_tools()
    first = None
    for order in ORDERS:
        device = Device(EmulatedDriver(mode="check", kernel_order=order))
        norms = random(8, seed=1), random(8, seed=2)
        out = Written(device, 8, cache_type, ROPES["partial"], heads_of(8), norms)
        first = first or out
        np.testing.assert_array_equal(out.memory, first.memory)
        np.testing.assert_array_equal(out.q, first.q)


def test_phases_are_exact() -> None:
    """Compared with pi by Machin's formula in integers."""

    def arctan(inverse: int) -> int:
        term = total = (1 << 320) // inverse
        for i in range(1, 300):
            term //= inverse**2
            total += (-1) ** i * (term // (2 * i + 1))
        return total

    pi = Fraction(4 * (4 * arctan(5) - arctan(239)), 1 << 320)
    frequencies = np.array([1, 0.7, 1e-6, 12345.678, 0], np.float32)
    for phase, frequency in zip(phases(frequencies), frequencies, strict=True):
        turns = Fraction(float(frequency)) / (2 * pi)
        distance = (Fraction(int(phase), 2**64) - turns) % 1
        assert min(distance, 1 - distance) < Fraction(1, 2**63)
