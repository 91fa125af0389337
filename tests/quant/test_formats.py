"""Decoding, compared bit for bit with the gguf package, and the integer parts that kernels read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from localllm.errors import ModelError, UsageError
from localllm.quant.block_format import PackableFormat, Parts
from localllm.quant.formats import FORMATS, dequantize
from localllm.quant.types import BLOCK_SIZES, GGMLType
from tests.helpers.blocks import F16_FIELDS, gguf_values

T = GGMLType

# Bytes of the scale, or of sign and exponent, in formats without an f16 field.
SCALE_BYTES: dict[GGMLType, tuple[int, ...]] = {
    T.F32: (2, 3),
    T.BF16: (0, 1),
    T.MXFP4: (0,),
    T.NVFP4: (0, 1, 2, 3),
}

# ±0, smallest and largest subnormal, 1, largest, ±infinity, quiet and signalling NaN.
EDGE_HALVES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF]

all_formats = pytest.mark.parametrize("type", list(FORMATS), ids=lambda type: type.name)
packable_formats = pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if isinstance(f, PackableFormat)], ids=lambda fmt: fmt.type.name
)


def oracle(blocks: npt.NDArray[np.uint8], type: GGMLType) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return gguf_values(blocks, type)


def gguf_decodes(type: GGMLType) -> bool:
    try:
        oracle(np.zeros((1, BLOCK_SIZES[type].n_bytes), np.uint8), type)
    except NotImplementedError:
        return False
    return True


def assert_same_bits(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> None:
    """Compare bit for bit, including the sign of zeros; any NaN equals any other."""
    assert ours.shape == theirs.shape
    assert ours.dtype == np.float32
    differ = ours.view(np.uint32) != theirs.view(np.uint32)
    differ &= ~(np.isnan(ours) & np.isnan(theirs))
    assert not differ.any(), f"{differ.sum()} values differ, the first at {np.argwhere(differ)[0]}"


def random_blocks(type: GGMLType, n_blocks: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n_blocks, BLOCK_SIZES[type].n_bytes), np.uint8)


def payloads(type: GGMLType, n_blocks: int) -> npt.NDArray[np.uint8]:
    """Return ``n_blocks`` blocks of zeros, of ones and of random bits: uint8 [3, n_blocks, block_bytes]."""
    blocks = np.stack([random_blocks(type, n_blocks)] * 3)
    blocks[0], blocks[1] = 0, 255
    return blocks


def write_half(blocks: npt.NDArray[np.uint8], offset: int, bits: npt.NDArray[Any]) -> None:
    blocks[..., offset], blocks[..., offset + 1] = bits & 255, bits >> 8


def edge_blocks(type: GGMLType) -> npt.NDArray[np.uint8]:
    """Return every edge value (or pair) of the scales, combined with three payloads."""
    halves = np.array(EDGE_HALVES)
    if type in F16_FIELDS:
        offsets = F16_FIELDS[type]
        values = np.meshgrid(*[halves] * len(offsets))
        blocks = payloads(type, values[0].size)
        for offset, bits in zip(offsets, values, strict=True):
            write_half(blocks, offset, bits.ravel())
    elif type is T.IQ1_M:  # the f16 scale is in the upper four bits of the last four words
        blocks = payloads(type, halves.size)
        for digit in range(4):
            byte = blocks[..., 48 + 2 * digit + 1]
            byte[...] = byte & 15 | (halves >> 4 * digit & 15) << 4
    else:
        blocks = payloads(type, 256)
        for offset in SCALE_BYTES[type]:
            blocks[..., offset] = np.roll(np.arange(256), 37 * offset)
    return blocks


def test_every_type_that_gguf_decodes_is_tested() -> None:
    assert {t for t in GGMLType if gguf_decodes(t)} == set(FORMATS)


@all_formats
def test_layout_fills_the_block(type: GGMLType) -> None:
    fmt = FORMATS[type]
    assert fmt.type is type
    assert fmt.layout.itemsize == fmt.block_bytes == BLOCK_SIZES[type].n_bytes
    assert fmt.block_length == BLOCK_SIZES[type].length


@all_formats
def test_blocks_decode_as_in_gguf(type: GGMLType) -> None:
    some = random_blocks(type, 70_000 // BLOCK_SIZES[type].length + 1)  # more than one chunk
    for blocks in (some, edge_blocks(type)):
        with np.errstate(all="raise"):  # odd blocks raise no error with any caller's setting
            ours = dequantize(blocks, type)
        assert_same_bits(ours, oracle(blocks, type))


@settings(deadline=None, max_examples=60)
@given(
    type=st.sampled_from(list(FORMATS)),
    leading=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    row_blocks=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_decodes_block_by_block(type: GGMLType, leading: list[int], row_blocks: int, seed: int) -> None:
    size = BLOCK_SIZES[type]
    n_blocks = int(np.prod(leading)) * row_blocks
    blocks = random_blocks(type, n_blocks, seed)
    ours = dequantize(blocks.reshape(*leading, row_blocks * size.n_bytes), type)
    assert ours.shape == (*leading, row_blocks * size.length)
    one_by_one = [oracle(blocks[i : i + 1], type).ravel() for i in range(n_blocks)]
    assert_same_bits(ours.ravel(), np.concatenate([*one_by_one, np.empty(0, np.float32)]))


def test_any_strides_decode() -> None:
    rows = random_blocks(T.Q4_K, 12).reshape(6, -1)
    expected = oracle(rows, T.Q4_K)
    assert_same_bits(dequantize(np.asfortranarray(rows), T.Q4_K), expected)
    assert_same_bits(dequantize(rows[::-2], T.Q4_K), expected[::-2].copy())


def test_the_result_is_a_new_array() -> None:
    data = np.zeros((1, 16), np.uint8)
    data.flags.writeable = False
    values = dequantize(data, T.F32)
    values += 1
    assert not data.any()


@packable_formats
def test_parts_give_the_values(fmt: PackableFormat) -> None:
    """The documented formula in float64 on the parts of `unpack` gives gguf's values."""
    blocks = random_blocks(fmt.type, 300)
    rng = np.random.default_rng(1)
    for offset in F16_FIELDS[fmt.type]:
        write_half(blocks, offset, rng.normal(0, 0.01, 300).astype(np.float16).view(np.uint16))
    parts = fmt.unpack(blocks)
    assert parts.scale.dtype == np.float16
    n_sub = fmt.block_length // fmt.sub_length
    codes = parts.codes.astype(np.float64).reshape(300, n_sub, fmt.sub_length)
    sub_scales = np.ones((300, n_sub)) if parts.sub_scales is None else parts.sub_scales
    values = (parts.scale.astype(np.float64)[:, None] * sub_scales)[:, :, None] * (codes - fmt.offset)
    if parts.min is not None:
        minimum = parts.min.astype(np.float64)[:, None]
        values += (minimum if parts.sub_mins is None else -minimum * parts.sub_mins)[:, :, None]
    np.testing.assert_allclose(values.reshape(300, -1), oracle(blocks, fmt.type), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("type", "offset", "sub_length", "codes", "sub_scales", "sub_mins"),
    [
        (T.Q4_0, 8, 32, (np.uint8, 0, 15), None, None),
        (T.Q4_1, 0, 32, (np.uint8, 0, 15), None, None),
        (T.Q5_0, 16, 32, (np.uint8, 0, 31), None, None),
        (T.Q5_1, 0, 32, (np.uint8, 0, 31), None, None),
        (T.Q8_0, 0, 32, (np.int8, -128, 127), None, None),
        (T.Q2_K, 0, 16, (np.uint8, 0, 3), (np.uint8, 0, 15), (np.uint8, 0, 15)),
        (T.Q3_K, 4, 16, (np.uint8, 0, 7), (np.int8, -32, 31), None),
        (T.Q4_K, 0, 32, (np.uint8, 0, 15), (np.uint8, 0, 63), (np.uint8, 0, 63)),
        (T.Q5_K, 0, 32, (np.uint8, 0, 31), (np.uint8, 0, 63), (np.uint8, 0, 63)),
        (T.Q6_K, 32, 16, (np.uint8, 0, 63), (np.int8, -128, 127), None),
        (T.TQ1_0, 1, 256, (np.uint8, 0, 2), None, None),
        (T.TQ2_0, 1, 256, (np.uint8, 0, 3), None, None),
        (T.Q1_0, 1, 128, (np.uint8, 0, 2), None, None),
        (T.Q2_0, 1, 64, (np.uint8, 0, 3), None, None),
        (T.IQ4_NL, 0, 32, (np.int8, -127, 113), None, None),
        (T.IQ4_XS, 0, 32, (np.int8, -127, 113), (np.int8, -32, 31), None),
    ],
    ids=lambda value: value.name if isinstance(value, GGMLType) else "",
)
def test_ranges_of_parts(
    type: GGMLType, offset: int, sub_length: int, codes: Any, sub_scales: Any, sub_mins: Any
) -> None:
    fmt = FORMATS[type]
    assert isinstance(fmt, PackableFormat)
    parts = fmt.unpack(random_blocks(type, 1000))
    assert (fmt.offset, fmt.sub_length) == (offset, sub_length)
    for part, expected in ((parts.codes, codes), (parts.sub_scales, sub_scales), (parts.sub_mins, sub_mins)):
        found = None if part is None else (part.dtype.type, part.min(), part.max())
        assert found == expected


@packable_formats
def test_pack_inverts_unpack(fmt: PackableFormat) -> None:
    blocks = random_blocks(fmt.type, 500)
    if fmt.type is T.TQ1_0:  # several bytes encode the same five codes
        blocks = fmt.pack(fmt.unpack(blocks))
    np.testing.assert_array_equal(fmt.pack(fmt.unpack(blocks)), blocks)


def test_ternary_codes_are_packed_as_they_are_unpacked() -> None:
    fmt = FORMATS[T.TQ1_0]
    assert isinstance(fmt, PackableFormat)
    codes = np.random.default_rng(0).integers(0, 3, (50, 256), np.uint8)
    parts = Parts(codes, np.ones(50, np.float16))
    np.testing.assert_array_equal(fmt.unpack(fmt.pack(parts)).codes, codes)


@pytest.mark.parametrize("type", [t for t in GGMLType if t not in FORMATS], ids=lambda type: type.name)
def test_a_type_without_decoder_is_named(type: GGMLType) -> None:
    with pytest.raises(ModelError, match=rf"type {type.name};.* BF16, .*Q4_K"):
        dequantize(np.zeros((1, BLOCK_SIZES[type].n_bytes), np.uint8), type)


@all_formats
def test_a_truncated_row_is_refused(type: GGMLType) -> None:
    n_bytes = BLOCK_SIZES[type].n_bytes
    with pytest.raises(ModelError, match=f"row of {2 * n_bytes - 1} bytes .* {type.name} blocks"):
        dequantize(np.zeros((3, 2 * n_bytes - 1), np.uint8), type)


@pytest.mark.parametrize("data", [np.zeros((2, 18), np.int8), np.zeros((), np.uint8)])
def test_data_that_is_no_array_of_rows_is_refused(data: npt.NDArray[Any]) -> None:
    with pytest.raises(UsageError, match="uint8 array"):
        dequantize(data, T.Q4_0)


def test_formats_cannot_be_changed_from_outside() -> None:
    with pytest.raises(TypeError):
        FORMATS[T.F64] = FORMATS[T.F32]  # type: ignore[index]


def test_gguf_is_imported_only_for_codebooks() -> None:
    """The import takes a third of a second, which every start would pay."""
    code = (
        "import sys, numpy as np\n"
        "from localllm.quant.formats import GGMLType, dequantize\n"
        "dequantize(np.zeros((1, 144), np.uint8), GGMLType.Q4_K)\n"
        "before = 'gguf' in sys.modules\n"
        "dequantize(np.zeros((1, 66), np.uint8), GGMLType.IQ2_XXS)\n"
        "print(before, 'gguf' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
