"""Packed checkpoints: the values of their integers, scales and zeros, which the blocks must keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.convert.config import Config
from localllm.convert.safetensors import read_folder
from localllm.convert.sources import Source, find_sources
from localllm.errors import ModelError
from localllm.models.hf_convert import floats
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType
from tests.helpers.checkpoints import write_safetensors

Array = NDArray[Any]
ROWS, COLUMNS, GROUP = 16, 128, 64
RNG = np.random.default_rng(0)
INTEGERS = RNG.integers(0, 16, (ROWS, COLUMNS))
ZEROS = RNG.integers(1, 16, (ROWS, COLUMNS // GROUP))
SCALES = RNG.uniform(0.5, 2, (ROWS, COLUMNS // GROUP)).astype(np.float16)
EIGHTS = np.full_like(ZEROS, 8)


def source(tmp_path: Path, tensors: dict[str, Any], name: str = "x.weight", **settings: Any) -> Source:
    write_safetensors(tmp_path / "model.safetensors", tensors)
    found = find_sources(read_folder(tmp_path), Config({"quantization_config": settings}))
    assert list(found) == [name]
    return found[name]


def packed(integers: Array, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> NDArray[np.int32]:
    """Pack [rows, n] into words [rows, n * bits / 32]; ``order`` lists the integers of a word, lowest bits first."""
    per_word = 32 // bits
    groups = integers.reshape(len(integers), -1, per_word)[:, :, list(order)[:per_word]].astype(np.uint64)
    return (
        (groups << (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))).sum(2).astype(np.uint32).view(np.int32)
    )


def expected(zeros: Array, integers: Array = INTEGERS) -> Array:
    every = np.arange(COLUMNS) // GROUP
    return (integers - zeros[:, every]) * SCALES[:, every].astype(np.float64)


def check(found: Source, zeros: Array) -> None:
    """Compare values up to float16's rounding, and blocks exactly except for the product of scale and zero."""
    assert found.shape == (ROWS, COLUMNS)
    np.testing.assert_allclose(floats(found.values()), expected(zeros), rtol=1e-3)
    assert found.type is (GGMLType.Q4_0 if (zeros == 8).all() else GGMLType.Q4_1)
    assert found.blocks is not None
    blocks = dequantize(found.blocks(), found.type)
    every = np.arange(COLUMNS) // GROUP
    steps = blocks / SCALES[:, every] + zeros[:, every]
    np.testing.assert_array_equal(np.round(steps), INTEGERS)
    np.testing.assert_allclose(steps, INTEGERS, atol=0.01)
    if found.type is GGMLType.Q4_0:
        np.testing.assert_array_equal(blocks, expected(zeros).astype(np.float32))


def gptq(zeros: Array, less: int = 1) -> dict[str, Array]:
    return {
        "x.qweight": np.ascontiguousarray(packed(INTEGERS).T),
        "x.qzeros": packed(zeros.T - less),
        "x.scales": np.ascontiguousarray(SCALES.T),
        "x.g_idx": (np.arange(COLUMNS) // GROUP).astype(np.int32),
    }


@pytest.mark.parametrize("zeros", [ZEROS, EIGHTS], ids=["zeros", "symmetric"])
def test_gptq(zeros: Array, tmp_path: Path) -> None:
    check(source(tmp_path, gptq(zeros), quant_method="gptq", bits=4), zeros)
    check(source(tmp_path, gptq(zeros, less=0), quant_method="gptq", bits=4, checkpoint_format="gptq_v2"), zeros)


def test_gptq_with_columns_in_another_order_becomes_floats(tmp_path: Path) -> None:
    order = RNG.permutation(COLUMNS // GROUP * GROUP) // GROUP
    tensors = gptq(ZEROS) | {"x.g_idx": order.astype(np.int32)}
    found = source(tmp_path, tensors, bits=4)
    assert found.type is GGMLType.F16
    assert found.blocks is None
    wanted = (INTEGERS - ZEROS[:, order]) * SCALES[:, order].astype(np.float64)
    np.testing.assert_allclose(found.values(), wanted, rtol=1e-3)


def test_gptq_of_8_bits_becomes_floats(tmp_path: Path) -> None:
    integers = RNG.integers(0, 256, (ROWS, COLUMNS))
    zeros = np.full_like(ZEROS, 128)
    tensors = gptq(ZEROS) | {
        "x.qweight": np.ascontiguousarray(packed(integers, bits=8).T),
        "x.qzeros": packed(zeros.T - 1, bits=8),
    }
    found = source(tmp_path, tensors, bits=8)
    assert found.blocks is None
    np.testing.assert_allclose(found.values(), expected(zeros, integers), rtol=1e-3)


@pytest.mark.parametrize("zeros", [ZEROS, EIGHTS], ids=["zeros", "symmetric"])
def test_awq(zeros: Array, tmp_path: Path) -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "x.qweight": packed(np.ascontiguousarray(INTEGERS.T), order),
        "x.qzeros": packed(np.ascontiguousarray(zeros.T), order),
        "x.scales": np.ascontiguousarray(SCALES.T),
    }
    check(source(tmp_path, tensors, quant_method="awq", bits=4), zeros)


@pytest.mark.parametrize("zeros", [ZEROS, EIGHTS], ids=["zeros", "symmetric"])
def test_compressed_tensors(zeros: Array, tmp_path: Path) -> None:
    tensors = {
        "x.weight_packed": packed(INTEGERS),
        "x.weight_scale": SCALES,
        "x.weight_shape": np.array([ROWS, COLUMNS], np.int32),
    }
    if zeros is ZEROS:
        tensors["x.weight_zero_point"] = np.ascontiguousarray(packed(zeros.T).T)
    check(source(tmp_path, tensors, quant_method="compressed-tensors"), zeros)


def test_int8_keeps_its_integers(tmp_path: Path) -> None:
    integers = RNG.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)
    scales = SCALES[:, :1]
    found = source(tmp_path, {"x.weight": integers, "x.weight_scale": scales})
    assert found.type is GGMLType.Q8_0
    assert found.blocks is not None
    wanted = integers * scales.astype(np.float32)
    np.testing.assert_array_equal(dequantize(found.blocks(), GGMLType.Q8_0), wanted)
    np.testing.assert_allclose(floats(found.values()), wanted, rtol=4e-3)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_fp8(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'reference'")
    dtype = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[kind]
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(3, 0)
    values = torch.from_numpy(codes).view(dtype).float().numpy()
    scales = np.float32([[2, 4], [8, 16]])
    tensors = {"x.weight": (kind, codes), "x.weight_scale_inv": scales}
    found = source(tmp_path, tensors, weight_block_size=[2, 128])
    every = scales[np.array([0, 0, 1])][:, np.arange(256) // 128]
    np.testing.assert_array_equal(floats(found.values()), values * every)
    found = source(tmp_path, {"x.weight": (kind, codes), "x.weight_scale": np.float32([2.0])})
    np.testing.assert_array_equal(floats(found.values()), values * 2)
    powers = np.array([[128, 129], [130, 131]], np.uint8)  # 2, 4, 8, 16, in DeepSeek V4's format
    named = {"x.weight": (kind, codes), "x.scale": ("F8_E8M0", powers)}
    found = source(tmp_path, named, weight_block_size=[2, 128])
    np.testing.assert_array_equal(floats(found.values()), values * every)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CODES = RNG.integers(0, 16, (ROWS, COLUMNS)).astype(np.uint8)
HALVES = CODES[:, ::2] | CODES[:, 1::2] << 4


@pytest.mark.parametrize("kind", ["gpt-oss", "compressed-tensors", "DeepSeek V4"])
def test_mxfp4(kind: str, tmp_path: Path) -> None:
    powers = RNG.integers(120, 135, (ROWS, COLUMNS // 32)).astype(np.uint8)
    if kind == "gpt-oss":
        tensors = {"x_blocks": HALVES.reshape(ROWS, -1, 16), "x_scales": powers}
        found = source(tmp_path, tensors, name="x_blocks")
    elif kind == "DeepSeek V4":
        found = source(tmp_path, {"x.weight": HALVES.view(np.int8), "x.scale": ("F8_E8M0", powers)})
    else:
        found = source(tmp_path, {"x.weight_packed": HALVES, "x.weight_scale": powers})
    assert found.type is GGMLType.MXFP4
    assert found.blocks is not None
    wanted = FP4[CODES] * 2.0 ** (powers.astype(float) - 127).repeat(32, 1)
    np.testing.assert_array_equal(dequantize(found.blocks(), GGMLType.MXFP4), wanted)
    np.testing.assert_array_equal(floats(found.values()), wanted)


def test_nvfp4(tmp_path: Path) -> None:
    scales = RNG.integers(0x30, 0x40, (ROWS, COLUMNS // 16)).astype(np.uint8)  # 0.5 … 1.875
    sizes = (1 + (scales & 7) / 8) * 2.0 ** ((scales >> 3) - 7.0)
    wanted = (FP4[CODES] * sizes.repeat(16, 1)) / 4
    theirs = {
        "x.weight_packed": HALVES,
        "x.weight_scale": ("F8_E4M3", scales),
        "x.weight_global_scale": np.float32([4]),
    }
    np.testing.assert_array_equal(floats(source(tmp_path, theirs).values()), wanted)
    modelopt = {"x.weight": HALVES, "x.weight_scale": ("F8_E4M3", scales), "x.weight_scale_2": np.float32([0.25])}
    np.testing.assert_array_equal(floats(source(tmp_path, modelopt).values()), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x.scales": None}, "'x.qweight' and its scales do not fit"),
        ({"x.scales": SCALES.T[:, :8].copy()}, "'x.qweight' and its scales do not fit"),
        ({"x.qzeros": np.zeros((1, 1), np.int32)}, "'x.qweight' and its scales do not fit"),
    ],
)
def test_scales_of_another_tensor_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = {name: array for name, array in (gptq(ZEROS) | change).items() if array is not None}
    with pytest.raises(ModelError, match=message):
        source(tmp_path, tensors, bits=4)


@pytest.mark.parametrize("group", [-1, COLUMNS // GROUP])
def test_groups_that_are_not_there_are_refused(group: int, tmp_path: Path) -> None:
    groups = np.full(COLUMNS, group, np.int32)
    packs = {"x.weight_packed": packed(INTEGERS), "x.weight_shape": np.array([ROWS, COLUMNS], np.int32)}
    for tensors in (gptq(ZEROS) | {"x.g_idx": groups}, packs | {"x.weight_scale": SCALES, "x.weight_g_idx": groups}):
        with pytest.raises(ModelError, match="its scales do not fit"):
            source(tmp_path, tensors, bits=4)


def test_other_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has 3 bits"):
        source(tmp_path, gptq(ZEROS), bits=3)


def grouped(columns: int, size: int) -> tuple[dict[str, Array], Array]:
    """Return a compressed-tensors pack in groups of ``size`` columns, the last possibly shorter, and its values."""
    rng = np.random.default_rng(columns + size)
    integers = rng.integers(0, 16, (ROWS, columns))
    scales = rng.uniform(0.5, 2, (ROWS, -(-columns // size))).astype(np.float16)
    tensors = {
        "x.weight_packed": packed(integers),
        "x.weight_scale": scales,
        "x.weight_shape": np.array([ROWS, columns], np.int32),
    }
    return tensors, (integers - 8) * scales[:, np.arange(columns) // size].astype(np.float64)


@pytest.mark.parametrize(("columns", "size"), [(96, 64), (96, 48), (192, 96), (192, 128), (96, 24), (160, 64)])
def test_groups_have_the_size_that_the_configuration_gives(columns: int, size: int, tmp_path: Path) -> None:
    """96 columns in two groups are 64 and 32, or 48 and 48."""
    tensors, values = grouped(columns, size)
    settings = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": size}}}}
    found = source(tmp_path, tensors, **settings)
    np.testing.assert_allclose(floats(found.values()), values, rtol=1e-3)
    assert (found.blocks is None) == (size % 32 > 0)
    if found.blocks is not None:
        np.testing.assert_array_equal(dequantize(found.blocks(), GGMLType.Q4_0), values.astype(np.float32))
    packs = {"x.qweight": tensors["x.weight_packed"].T.copy(), "x.scales": tensors["x.weight_scale"].T.copy()}
    packs["x.qzeros"] = packed(np.full((len(packs["x.scales"]), ROWS), 7))
    found = source(tmp_path, packs, quant_method="gptq", bits=4, group_size=size)
    np.testing.assert_allclose(floats(found.values()), values, rtol=1e-3)


def test_groups_of_a_size_that_is_not_known_are_refused(tmp_path: Path) -> None:
    for columns, size, settings in ((192, 96, {}), (96, 64, {}), (128, 64, {"group_size": 32})):
        with pytest.raises(ModelError, match="of which no one size is known"):
            source(tmp_path, grouped(columns, size)[0], **settings)
    tensors, values = grouped(160, 64)  # only 64 divides them into three groups
    np.testing.assert_allclose(floats(source(tmp_path, tensors).values()), values, rtol=1e-3)


def test_int8_with_zero_points(tmp_path: Path) -> None:
    integers = RNG.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)
    zeros = RNG.integers(-128, 128, (ROWS, 1)).astype(np.int8)
    tensors = {"x.weight": integers, "x.weight_scale": SCALES[:, :1], "x.weight_zero_point": zeros}
    wanted = (integers - zeros.astype(np.float32)) * SCALES[:, :1]
    np.testing.assert_allclose(floats(source(tmp_path, tensors).values()), wanted, rtol=1e-3)
    found = source(tmp_path, tensors | {"x.weight_zero_point": np.zeros_like(zeros)})
    assert found.type is GGMLType.Q8_0


@pytest.mark.parametrize("odd", [np.nan, np.inf, 1e6])
def test_scales_that_float16_does_not_hold_are_refused(odd: float, tmp_path: Path) -> None:
    odd_scales = SCALES.astype(np.float32)
    odd_scales[3, 1] = odd
    int8 = {"x.weight": INTEGERS.astype(np.int8), "x.weight_scale": odd_scales[:, 1:].copy()}
    for tensors in (
        gptq(ZEROS) | {"x.scales": odd_scales.T.copy()},
        gptq(EIGHTS) | {"x.scales": odd_scales.T.copy()},
        int8,
    ):
        found = source(tmp_path, tensors, bits=4)
        assert found.blocks is not None
        with pytest.raises(ModelError, match="has scales that are NaN, infinite or too large"):
            found.blocks()
    powers = np.full((ROWS, COLUMNS // 32), 255, np.uint8)
    found = source(tmp_path, {"x.weight_packed": HALVES, "x.weight_scale": powers})
    assert found.blocks is not None
    with pytest.raises(ModelError, match="has scales that are NaN"):
        found.blocks()


def test_a_divisor_of_0_is_found(tmp_path: Path) -> None:
    scales = np.full((ROWS, COLUMNS // 16), 0x38, np.uint8)
    tensors = {"x.weight_packed": HALVES, "x.weight_scale": ("F8_E4M3", scales)}
    values = floats(source(tmp_path, tensors | {"x.weight_global_scale": np.float32([0])}).values())
    assert not np.isfinite(values).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transform_config": {"config_groups": {"R1": {}}}}, "has transform_config, which rotates activations"),
        ({"checkpoint_format": "marlin"}, "has checkpoint_format = 'marlin'; localllm reads gptq, gptq_v2"),
        ({"packing_format": "auto_round:tritonv2_zp"}, "has packing_format = 'auto_round:tritonv2_zp'"),
    ],
)
def test_packings_that_tensors_do_not_show_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        source(tmp_path, gptq(EIGHTS), bits=4, **settings)
    usual = {"transform_config": {}, "checkpoint_format": "gptq", "packing_format": "auto_round:auto_gptq"}
    check(source(tmp_path, gptq(EIGHTS), bits=4, **usual), EIGHTS)


def test_integers_with_scales_of_an_unknown_name_are_refused(tmp_path: Path) -> None:
    tensors = {"x.weight": INTEGERS.astype(np.int8), "x.weight_scales": SCALES[:, 0].copy()}  # EETQ
    with pytest.raises(ModelError, match=r"'x.weight' is I8 without scales"):
        source(tmp_path, tensors, quant_method="eetq")
    tensors.pop("x.weight")
    source(tmp_path, tensors, name="x.weight_scales")


def test_blocks_of_fp8_have_the_size_that_compressed_tensors_gives(tmp_path: Path) -> None:
    codes = np.full((3, 192), 0x38, np.uint8)  # 1
    tensors = {"x.weight": ("F8_E4M3", codes), "x.weight_scale": np.float32([[2, 4], [8, 16]])}
    groups = {"group_0": {"weights": {"strategy": "block", "block_structure": [2, 96]}}}
    values = floats(source(tmp_path, tensors, config_groups=groups).values())
    np.testing.assert_array_equal(values[:, ::96], [[2, 4], [2, 4], [8, 16]])
    np.testing.assert_array_equal(values[:, 95::96], [[2, 4], [2, 4], [8, 16]])
