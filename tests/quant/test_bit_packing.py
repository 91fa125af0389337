"""Bit-packed codes: no bit is lost, and each code is where `BIT_RUNS` states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from localllm.quant.bit_packing import BIT_PACKINGS, BIT_RUNS
from localllm.quant.types import GGMLType

Codes = list[int]


def q5_0(block: bytes) -> Codes:
    """Return the codes in the bytes of a block, as ggml's dequantize_row functions read them."""
    fifth = int.from_bytes(block[:4], "little")
    low = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [code | (fifth >> i & 1) << 4 for i, code in enumerate(low)]


def q5_k(block: bytes) -> Codes:
    qh, ql, codes = block[:32], block[32:], []
    for j in range(4):
        run = ql[32 * j : 32 * j + 32]
        codes += [run[i] & 15 | (qh[i] >> 2 * j & 1) << 4 for i in range(32)]
        codes += [run[i] >> 4 | (qh[i] >> 2 * j + 1 & 1) << 4 for i in range(32)]
    return codes


def q6_k(block: bytes) -> Codes:
    codes = []
    for half in range(2):
        ql, qh = block[64 * half :], block[128 + 32 * half :]
        codes += [ql[i] & 15 | (qh[i] & 3) << 4 for i in range(32)]
        codes += [ql[i + 32] & 15 | (qh[i] >> 2 & 3) << 4 for i in range(32)]
        codes += [ql[i] >> 4 | (qh[i] >> 4 & 3) << 4 for i in range(32)]
        codes += [ql[i + 32] >> 4 | (qh[i] >> 6) << 4 for i in range(32)]
    return codes


def q3_k(block: bytes) -> Codes:
    mask, codes = block[:32], []
    for half in range(2):
        qs = block[32 + 32 * half :]
        for j in range(4):
            codes += [qs[i] >> 2 * j & 3 | (mask[i] >> 4 * half + j & 1) << 2 for i in range(32)]
    return codes


READERS: dict[GGMLType, Callable[[bytes], Codes]] = {
    GGMLType.Q5_0: q5_0,
    GGMLType.Q5_1: q5_0,
    GGMLType.Q5_K: q5_k,
    GGMLType.Q6_K: q6_k,
    GGMLType.Q3_K: q3_k,
}


@pytest.mark.parametrize("bits", BIT_RUNS)
def test_every_bit_of_a_word_has_one_use(bits: int) -> None:
    pieces = [piece for code in BIT_RUNS[bits] for piece in code]
    places = [(word, first + i) for word, first, n in pieces for i in range(n)]
    assert sorted(places) == [(word, bit) for word in range(bits) for bit in range(8)]
    assert [sum(n for _, _, n in code) for code in BIT_RUNS[bits]] == [bits] * 8


def test_every_folded_format_is_tested() -> None:
    assert set(READERS) == set(BIT_PACKINGS)


@pytest.mark.parametrize("type", BIT_PACKINGS, ids=lambda type: type.name)
def test_codes_have_the_drawn_positions(type: GGMLType) -> None:
    packing = BIT_PACKINGS[type]
    block = np.random.default_rng(4).integers(0, 256, packing.columns * packing.bits // 8, np.uint8)
    packed = packing.pack(block)
    wanted = READERS[type](block.tobytes())
    assert len(wanted) == packing.columns
    for column, code in enumerate(wanted):
        v, byte = divmod(column % 32, 4)
        words = packed.reshape(-1, packing.bits, 4)[column // 32, :, byte]
        found = up = 0
        for word, first, n in BIT_RUNS[packing.bits][v]:
            found |= (int(words[word]) >> first & (1 << n) - 1) << up
            up += n
        assert found == code, column
    np.testing.assert_array_equal(packing.unpack(packed), block)
