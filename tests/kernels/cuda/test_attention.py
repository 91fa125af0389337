"""Attention over the paged cache, compared with the formula in float64 for the values that the cache stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cuda import attention
from localllm.kernels.cuda.attention import AttentionVariant, HeadShape, Work, choose_variant
from localllm.kernels.cuda.cache import PAGE, CUDACacheLayout
from localllm.kernels.cuda.driver import DeviceMemory
from localllm.kernels.graph import CACHE_TYPES, KVCache
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.errors import KernelFault
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.cuda_on_cpu.module import ORDERS, Order
from tests.helpers.backends import ATTENTION_ERROR
from tests.kernels import formulas
from tests.kernels.cuda.device import Device

Floats = NDArray[Any]
#: New tokens of each sequence, and its length in the cache including them.
Lengths = Sequence[tuple[int, int]]
#: Whole and partial tiles, splits and pages; one token and many; with and without a past.
RAGGED: Lengths = ((5, 700), (1, 300), (70, 70), (1, 1), (3, 260))
PARTIALS = 1 << 24


def variant_of(head_dim: int, kind: str = "f16", device: Device | None = None, **more: Any) -> AttentionVariant:
    shared = 99 << 10 if device is None else device.shared_bytes
    return choose_variant(AttentionVariant(head_dim, head_dim, "q8_0" if kind == "q8_0" else "f16", **more), shared)


def smallest(variant: AttentionVariant) -> AttentionVariant:
    """Return the variant with the least shared memory."""
    return replace(variant, warps=2, prefill_ahead=0, split_ahead=0)


@dataclass
class Talk:
    """Sequences with random queries, and a cache that is NaN in all other positions."""

    device: Device
    variant: AttentionVariant
    lengths: Lengths = RAGGED
    heads: HeadShape = field(default_factory=lambda: HeadShape(2, 3))
    scale: float = 0.3
    soft_cap: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        dim, n_kv = self.variant.key_dim, self.heads.n_kv_heads
        n_pages = [-(-length // PAGE) for _, length in self.lengths]
        shape = KVCache(0, n_kv, dim, dim, self.variant.cache_type)
        self.layout = CUDACacheLayout(shape, sum(n_pages) + 1)
        pages = rng.permutation(self.layout.n_pages)
        self.tables = np.full((len(n_pages), max(n_pages)), -1, np.int32)
        self.starts = np.cumsum([0, *(n for n, _ in self.lengths)], dtype=np.int32)
        self.q = rng.standard_normal((self.starts[-1], n_kv * self.heads.group_size * dim), np.float32)
        self.q = self.q.astype(np.float16).astype(np.float32)
        self.sinks = rng.standard_normal(n_kv * self.heads.group_size).astype(np.float32)
        whole = (self.layout.n_pages, n_kv)
        self.entries, self.scales, self.held = [], [], []
        for _ in range(2):
            entries, scales, held = (self._f16 if shape.type == "f16" else self._q8_0)(whole, rng)
            self.entries.append(entries)
            self.scales.append(scales)
            self.held.append(held)
        seen = np.zeros((*whole, PAGE), bool)
        for s, (_, length) in enumerate(self.lengths):
            first = sum(n_pages[:s])
            self.tables[s, : n_pages[s]] = pages[first : first + n_pages[s]]
            for p in range(length):
                seen[self.tables[s, p // PAGE], :, p % PAGE] = True
        for entries, scales in zip(self.entries, self.scales, strict=True):
            if shape.type == "f16":
                entries[~seen] = np.nan
            else:
                scales.transpose(0, 1, 3, 2)[~seen] = np.nan
                entries[~seen] = -128

    def _f16(self, whole: tuple[int, int], rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
        held = rng.standard_normal((*whole, PAGE, self.variant.key_dim)).astype(np.float16)
        pad = self.variant.key_head - self.variant.key_dim
        return np.pad(held, [(0, 0)] * 3 + [(0, pad)]), np.zeros(1, np.float16), held.astype(np.float64)

    def _q8_0(self, whole: tuple[int, int], rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
        """Codes with scales over a wide range of float16, including zero."""
        dim = self.variant.key_dim
        codes = rng.integers(-127, 128, (*whole, PAGE, dim)).astype(np.int8)
        scales = (2.0 ** rng.uniform(-9, -5, (*whole, self.layout.groups[0], PAGE))).astype(np.float16)
        scales[:, :, :, 3::17] = 0
        scales[:, :, :, 5::17] = 2.0**-24
        scales[:, :, -1, 6::17] = 3.0**-9
        held = codes * np.repeat(scales.transpose(0, 1, 3, 2).astype(np.float64), 32, axis=3)[..., :dim]
        return np.pad(codes, [(0, 0)] * 3 + [(0, self.variant.key_head - dim)]), scales, held

    @property
    def n_tokens(self) -> int:
        return int(self.starts[-1])

    def work_of_bucket(self) -> Work:
        return attention.work_of_bucket(self.n_tokens, max(n for _, n in self.lengths), self.heads)

    def work(self, partial_bytes: int) -> Work:
        return attention.work_of_batch(self.lengths, self.heads, self.variant, partial_bytes)

    def run(self, work: Work) -> Floats:
        """Return float32 [T, query heads, head_dim]; NaN where the kernels wrote nothing."""
        device, heads = self.device, self.heads
        lengths = np.array([length for _, length in self.lengths], np.int32)
        header = np.array([self.n_tokens, 0, len(lengths)], np.int32)
        q, out = device.upload(self.q), device.upload(np.full_like(self.q, np.nan))
        sums, states = (device.empty(max(16, 4 * n)) for n in work.partial_floats(heads, self.variant))
        tables = {"header": header, "starts": self.starts, "kv_lengths": lengths, "ends": header}
        shared: dict[str, Any] = {name: device.upload(array) for name, array in tables.items()}
        shared |= {"block_tables": device.upload(self.tables), "block_stride": self.tables.shape[1]}
        shared |= {"n_kv_heads": heads.n_kv_heads, "group_size": heads.group_size, "window": heads.window}
        cache: dict[str, DeviceMemory] = {}
        for name, entries, scales in zip(("key", "value"), self.entries, self.scales, strict=True):
            cache |= {f"{name}s": device.upload(entries), f"{name}_scales": device.upload(scales)}
        read = {**cache, "q": q, "q_stride": self.q.shape[1], "scale": self.scale, "soft_cap": self.soft_cap}
        read |= {"by_distance": None}
        splits = {"partial_sums": sums, "partial_states": states}
        splits |= {"max_splits": work.max_splits, "partial_rows": work.partial_rows}
        written = {"out": out, "out_stride": self.q.shape[1], "sinks": device.upload(self.sinks)}
        own: dict[str, dict[str, Any]] = {
            "attention_prefill": {**read, **written},
            "attention_split": {**read, **splits},
            "attention_merge": {**splits, **written, "units": None, "scales": None, "n_rows": 0},
        }
        for launch in attention.launches(work, heads, self.variant, n_multiprocessors=4):
            device.run(launch, **shared, **attention.token_range(launch, work), **own[launch.kernel])
        return device.download(out, np.float32, self.n_tokens, len(self.sinks), self.variant.value_dim)

    def expected(self) -> Floats:
        q = self.q.reshape(self.n_tokens, -1, self.variant.key_dim)
        options: dict[str, Any] = {
            "window": self.heads.window,
            "softcap": self.soft_cap if self.variant.soft_cap else None,
            "sinks": self.sinks if self.variant.sinks else None,
        }
        rows = []
        for s, (n, length) in enumerate(self.lengths):
            at = np.arange(length)
            keys, values = (held[self.tables[s, at // PAGE], :, at % PAGE] for held in self.held)
            rows.append(formulas.attended(q[self.starts[s] :][:n], keys, values, self.scale, **options))
        return np.concatenate(rows).reshape(q.shape)


def assert_close(out: Floats, expected: Floats) -> None:
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=ATTENTION_ERROR)


def assert_right(talk: Talk) -> Floats:
    """Run with splits, without, and mixed.  All must give the same bits, close to the formula."""
    out = talk.run(talk.work_of_bucket())
    assert_close(out, talk.expected())
    for partial_bytes in (0, PARTIALS):
        np.testing.assert_array_equal(talk.run(talk.work(partial_bytes)), out)
    return out


#: Variants: queries in registers; scales and groups of 16 values; two warps that share rows.  Each takes g++ seconds.
KINDS = [(8, "f16"), (72, "q8_0"), (136, "f16")]
#: Head sizes and cache types with their windows.
WINDOWS = {8: (None, 1, 65, 300), 72: (None, 65), 136: (65, 300)}


@pytest.mark.parametrize(("head_dim", "kind", "window"), [(*each, w) for each in KINDS for w in WINDOWS[each[0]]])
def test_ragged_batches(device: Device, head_dim: int, kind: str, window: int | None) -> None:
    heads = HeadShape(2, 3, window or attention.NO_WINDOW)
    assert_right(Talk(device, variant_of(head_dim, kind, device), heads=heads, scale=head_dim**-0.5))


@pytest.mark.parametrize("group_size", [1, 2, 7, 8, 16])
def test_groups_of_any_size(device: Device, group_size: int) -> None:
    assert_right(Talk(device, variant_of(8, device=device), ((9, 150), (1, 70)), HeadShape(2, group_size)))


def test_soft_cap_and_sinks(device: Device) -> None:
    variant = variant_of(8, device=device, soft_cap=True, sinks=True)
    talk = Talk(device, variant, ((20, 300), (1, 10)), scale=1.0)
    assert_right(talk)
    plain = Talk(device, variant_of(8, device=device), talk.lengths, scale=1.0)
    assert np.abs(plain.expected() - talk.expected()).max() > 0.1


def test_one_token_gives_the_bits_of_a_batch(device: Device) -> None:
    whole = Talk(device, variant_of(8, device=device), ((400, 400), (30, 60)))
    expected = whole.run(whole.work(0))
    for t in (0, 15, 255, 256, 399):
        one = replace(whole, lengths=((400, 400), (30, 60)))
        one.lengths, one.starts, one.q = ((1, t + 1), (1, 31)), np.array([0, 1, 2], np.int32), one.q[[t, 400]]
        np.testing.assert_array_equal(one.run(one.work_of_bucket()), expected[[t, 400]])


@pytest.mark.parametrize("window", [attention.NO_WINDOW, 300])
def test_splits_of_one_page_and_of_several(device: Device, window: int) -> None:
    lengths = ((1, 1), (2, 1300), (1, 1025), (40, 1024))
    assert_right(Talk(device, variant_of(8, device=device), lengths, HeadShape(1, 2, window)))


def test_one_launch_serves_every_length(device: Device) -> None:
    """A captured launch also serves shorter contexts and fewer sequences."""
    work = attention.work_of_bucket(4, 2000, HeadShape(2, 3))
    for lengths in (((1, 1), (1, 1900), (2, 3)), ((1, 255),), ((4, 600),)):
        talk = Talk(device, variant_of(8, device=device), lengths)
        assert_close(talk.run(work), talk.expected())


@pytest.mark.parametrize(("head_dim", "kind"), [(8, "f16"), (256, "q8_0")])
def test_turing(head_dim: int, kind: str) -> None:
    skip_without_tools()
    device = Device(EmulatedDriver(capability=(7, 5), shared_bytes=64 << 10))
    variant = variant_of(head_dim, kind, device)
    assert_right(Talk(device, variant, ((5, 300), (1, 10)), HeadShape(1, 3), scale=head_dim**-0.5))


CHECKED: Lengths = ((20, 330), (1, 70), (1, 1))


@pytest.mark.parametrize(
    ("head_dim", "kind", "fetches_ahead", "order"),
    [
        pytest.param(*case, order, id=f"{case}-{order}")
        for i, order in enumerate(ORDERS)
        for case in ((8, "f16", i % 2 == 0), (24, "q8_0", i % 2 == 1))
    ],
)
def test_every_memory_access_is_valid(head_dim: int, kind: str, order: Order, fetches_ahead: bool) -> None:
    """Checks bounds, initialised memory and races, with every order of threads and copies."""
    skip_without_tools()
    device = Device(EmulatedDriver(mode="check", kernel_order=order))
    variant = variant_of(head_dim, kind, device)
    talk = Talk(device, variant if fetches_ahead else smallest(variant), CHECKED, HeadShape(1, 2, 200))
    assert_right(talk)


# -- The plan ------------------------------------------------------------------------------------------------------

SHARED = {(7, 5): 64 << 10, (8, 0): 163 << 10, (8, 6): 99 << 10, (9, 0): 227 << 10, (12, 0): 99 << 10}


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("cache_type", [*CACHE_TYPES, "q8_0/q4_0", "f16/q5_0", "q4_0/f16"])
def test_variants_fit_into_every_device(capability: tuple[int, int], cache_type: Any) -> None:
    for head_dim in (8, 16, 64, 80, 96, 128, 256):
        variant = choose_variant(AttentionVariant(head_dim, head_dim, cache_type), SHARED[capability])
        assert variant.largest_block_bytes <= SHARED[capability]
        assert variant.tile_rows >= 16


def test_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(KernelError, match=r"256 values in a f16 cache needs 58816 bytes .* gives 49152"):
        choose_variant(AttentionVariant(256, 256, "f16"), 48 << 10)


def test_latents_too_large_in_q8_0_fit_in_f16() -> None:
    """The latents of DeepSeek, on a device with 99 KiB of shared memory."""
    latents = {"key_dim": 576, "value_dim": 512, "values_in_keys": True}
    assert choose_variant(AttentionVariant(cache_type="f16", **latents), 99 << 10).largest_block_bytes <= 99 << 10
    with pytest.raises(KernelError, match=r"needs 102720 bytes .* gives 101376: use cache_type='f16', device='cpu'"):
        choose_variant(AttentionVariant(cache_type="q8_0", **latents), 99 << 10)


@pytest.mark.parametrize("dims", [(0, 16), (16, 0), (641, 16), (16, 513)])
def test_heads_of_other_sizes_are_refused(dims: tuple[int, int]) -> None:
    with pytest.raises(KernelError, match=f"640 values in keys and 512 in values, not {dims[0]} and {dims[1]}"):
        choose_variant(AttentionVariant(*dims, "f16"), 227 << 10)


def test_blocks_share_short_caches() -> None:
    """One page per block for up to 1,024 positions, then up to four pages, if the GPU has room for the blocks."""
    heads, variant = HeadShape(8, 4), choose_variant(AttentionVariant(128, 128, "f16"), 227 << 10)
    grids = []
    for longest in (64, 512, 1024, 1280, 32768):
        split, merge = attention.launches(attention.work_of_bucket(1, longest, heads), heads, variant, 132)
        grids.append(split.grid)
        assert merge.grid == (2, 8, 1)
    assert grids == [(1, 8, 1), (8, 8, 1), (16, 8, 1), (17, 8, 1), (66, 8, 1)]


def test_partials_that_do_not_fit_are_prefilled() -> None:
    heads, variant = HeadShape(8, 4), choose_variant(AttentionVariant(128, 128, "f16"), 227 << 10)
    lengths = [(1, 32768)] * 4 + [(20, 1000), (600, 600)]
    roomy, tight, none = (attention.work_of_batch(lengths, heads, variant, n) for n in (1 << 30, 1 << 24, 1 << 10))
    assert (roomy.split_tokens, roomy.prefill_tiles, roomy.split_tiles) == (64, 19, 9)
    assert 1 <= tight.split_tokens < 20
    assert 4 * sum(tight.partial_floats(heads, variant)) <= 1 << 24
    assert (none.split_tokens, none.split_tiles, none.prefill_tiles) == (0, 0, 4 + 1 + 19)


def test_check_mode_finds_an_invalid_page() -> None:
    skip_without_tools()
    device = Device(EmulatedDriver(mode="check"))
    talk = Talk(device, variant_of(8, device=device), CHECKED, HeadShape(1, 2))
    talk.tables[1, 0] = 1000
    with pytest.raises(KernelFault):
        talk.run(talk.work_of_bucket())
