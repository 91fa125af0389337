"""Tiles: no byte is lost, and every byte is where the drawing shows it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from localllm.quant.lut import KernelType, block_size
from localllm.quant.packing import GROUP, LAYOUTS, TileLayout
from localllm.quant.types import GGMLType

all_layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.type.name)


def pack(layout: TileLayout, rows: np.ndarray, k: int) -> np.ndarray:
    """Pack rows of k columns to tiles, in memory that was not zero."""
    packed = np.full(layout.packed_bytes(len(rows), k), 0xAA, np.uint8)
    layout.pack(rows, packed)
    return packed


@all_layouts
def test_every_byte_of_a_block_is_in_the_tile_once(layout: TileLayout) -> None:
    parts = [(offset, 2) for offset in layout.halves] + list(layout.words)
    places = [offset + i for offset, length in parts for i in range(length)]
    assert sorted(places) == list(range(layout.block_bytes))
    assert layout.block_bytes == block_size(layout.type).n_bytes
    assert layout.tile_bytes == 16 * layout.block_bytes


@settings(deadline=None, max_examples=120)
@given(
    layout=st.sampled_from(list(LAYOUTS.values())),
    n=st.integers(1, 70),
    row_blocks=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_unpacking_gives_back_any_rows(layout: TileLayout, n: int, row_blocks: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (n, row_blocks * layout.block_bytes), np.uint8)
    packed = pack(layout, rows, row_blocks * layout.columns)
    assert packed.size == -(-n // GROUP) * GROUP * rows.shape[1]
    unpacked = layout.unpack_rows(packed, row_blocks * layout.columns, np.arange(-(-n // GROUP) * GROUP))
    np.testing.assert_array_equal(unpacked[:n], rows)
    np.testing.assert_array_equal(unpacked[n:], 0)  # rows that pad the last group


@all_layouts
def test_single_rows_are_unpacked_in_any_order(layout: TileLayout) -> None:
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 256, (2 * GROUP + 5, 3 * layout.block_bytes), np.uint8)
    packed = pack(layout, rows, 3 * layout.columns)
    wanted = np.array([36, 0, 17, 17, 15, 16, 31, 32], np.int32)
    np.testing.assert_array_equal(layout.unpack_rows(packed, 3 * layout.columns, wanted), rows[wanted])


@all_layouts
def test_groups_pack_by_themselves(layout: TileLayout) -> None:
    """Threads share the work, so each run of whole groups is packed to its own place."""
    rows = np.random.default_rng(1).integers(0, 256, (3 * GROUP + 5, 2 * layout.block_bytes), np.uint8)
    whole = pack(layout, rows, 2 * layout.columns)
    half = layout.packed_bytes(2 * GROUP, 2 * layout.columns)
    np.testing.assert_array_equal(whole[:half], pack(layout, rows[: 2 * GROUP], 2 * layout.columns))
    np.testing.assert_array_equal(whole[half:], pack(layout, rows[2 * GROUP :], 2 * layout.columns))


@pytest.mark.parametrize("type", [GGMLType.Q4_0, GGMLType.Q8_0], ids=lambda type: type.name)
def test_a_tile_has_the_drawn_layout(type: KernelType) -> None:
    """Sixteen scales, then each word of a block for row 0, row 1, …, in the order of the file."""
    layout = LAYOUTS[type]
    rows = np.random.default_rng(2).integers(0, 256, (GROUP, 3 * layout.block_bytes), np.uint8)
    tiles = pack(layout, rows, 96).reshape(3, -1)
    for b in range(3):
        blocks = rows[:, b * layout.block_bytes : (b + 1) * layout.block_bytes]
        words = [blocks[:, 2 + 4 * i : 6 + 4 * i].tobytes() for i in range((layout.block_bytes - 2) // 4)]
        assert tiles[b].tobytes() == blocks[:, :2].tobytes() + b"".join(words)
