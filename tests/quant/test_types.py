"""The type table agrees with the one in the gguf package."""

from __future__ import annotations

import gguf
import pytest

from localllm.quant.types import BLOCK_SIZES, GGMLType

#: Types that ggml.h has and the gguf package may lack: name, id, values and bytes of a block.
NEWER = [("Q2_0", 42, (64, 18))]


def test_same_names_and_ids_as_gguf() -> None:
    known = {t.name: int(t) for t in gguf.GGMLQuantizationType} | {name: id_ for name, id_, _ in NEWER}
    assert {t.name: int(t) for t in GGMLType} == known


def test_same_block_sizes_as_gguf() -> None:
    ours = {int(t): (size.length, size.n_bytes) for t, size in BLOCK_SIZES.items()}
    known = {int(t): size for t, size in gguf.GGML_QUANT_SIZES.items()} | {id_: size for _, id_, size in NEWER}
    assert ours == known


@pytest.mark.parametrize(
    ("type", "n", "n_bytes"), [(GGMLType.F16, 7, 14), (GGMLType.Q4_0, 64, 36), (GGMLType.Q6_K, 512, 420)]
)
def test_row_bytes(type: GGMLType, n: int, n_bytes: int) -> None:
    assert BLOCK_SIZES[type].row_bytes(n) == n_bytes
