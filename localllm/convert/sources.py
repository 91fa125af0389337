"""Tensors of a checkpoint in any packing: floats, FP8, or integers and FP4 with scales of groups.

The names and types of neighbouring tensors determine the packing. Blocks of 32 that GGUF also has are repacked with
the same integers: GPTQ, AWQ and compressed-tensors' INT4 as Q4_0 or Q4_1, INT8 as Q8_0, and MXFP4. Other packings
(FP8, NVFP4, other numbers of bits, columns in another order) become floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert.config import Config
from localllm.convert.safetensors import FileTensor
from localllm.errors import ModelError, quoted
from localllm.models.hf_convert import floats
from localllm.quant.bits import bit_fields, join_bit_planes
from localllm.quant.block_format import Parts
from localllm.quant.floats import bfloat16
from localllm.quant.fp4 import E2M1_DOUBLED, HALF_UE4M3
from localllm.quant.legacy import Q4_0, Q4_1, Q8_0
from localllm.quant.types import GGMLType

Array = NDArray[Any]


@dataclass(frozen=True)
class Source:
    shape: tuple[int, ...]
    type: GGMLType  # F32, F16, BF16 or I32, or the type of `blocks`
    values: Callable[[], Array]  # reads the values: float32, float16, bfloat16 as uint16, or int32
    # reads blocks of ``type``, uint8 [*shape[:-1], bytes of a row]; None for tensors without blocks
    blocks: Callable[[], Array] | None = None


def find_sources(tensors: Mapping[str, FileTensor], config: Config) -> dict[str, Source]:
    """Return the tensors of a checkpoint by their unpacked names.

    Raises:
        ModelError: a tensor and its scales do not match.
    """
    sources: dict[str, Source] = {}
    settings = config.inner("quantization_config").raw() or config.inner("compression_config").raw()
    _check_packing(settings)
    # DeepSeek V4 names the scales "scale" instead of "weight_scale".
    short = {f"{name.removesuffix('weight')}scale" for name, tensor in tensors.items() if tensor.dtype in _SCALED}
    tensors = {f"{name[:-5]}weight_scale" if name in short else name: tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        beside = {other: tensors[f"{stem}.{other}"] for other in _BESIDE if f"{stem}.{other}" in tensors}
        try:
            if kind == "qweight":
                sources[f"{stem}.weight"] = _gptq_or_awq(beside, settings)
            elif kind == "weight_packed":
                sources[f"{stem}.weight"] = _packed(beside, settings)
            elif kind == "weight" and tensor.dtype in _SCALED and _SCALES & beside.keys():
                is_fp4 = tensor.dtype == "I8" and beside.get("weight_scale", tensor).dtype == "F8_E8M0"
                is_packed = is_fp4 or tensor.dtype == "U8"
                sources[name] = _packed(beside, settings) if is_packed else _scaled(beside, settings)
            elif name.endswith("_blocks") and (scales := tensors.get(name.removesuffix("blocks") + "scales")):
                sources[name] = _mxfp4(tensor, scales, (*tensor.shape[:-2], tensor.shape[-2] * 32))
            elif kind == "weight" or not (kind in _BESIDE or name.removesuffix("scales") + "blocks" in tensors):
                sources[name] = _plain(tensor)
        except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
            raise ModelError(f"tensor {quoted(name)} and its scales do not fit together ({error!s:.100})") from error
    return sources


_SCALES = {"weight_scale", "weight_scale_inv"}
_SCALED = ("F8_E4M3", "F8_E5M2", "I8", "U8")
#: Names of tensors that belong to a packed weight.
_BESIDE = (
    "weight", "weight_packed", "qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv",
    "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale",
    "input_scale_ub", "input_global_scale", "activation_scale", "k_scale", "v_scale", "q_scale", "output_scale",
)  # fmt: skip


def _check_packing(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a packing that the tensors alone do not show."""
    transforms = settings.get("transform_config") or {}
    if isinstance(transforms, dict) and (transforms.get("config_groups") or transforms.get("R1")):
        raise ModelError(
            "quantization_config has transform_config, which rotates activations: GGUF files cannot describe it"
        )
    for name, known in (("checkpoint_format", _GPTQ_FORMATS), ("packing_format", _AUTO_ROUND_FORMATS)):
        if (value := settings.get(name)) is not None and value not in known:
            raise ModelError(
                f"quantization_config has {name} = {quoted(value)}; localllm reads {', '.join(known)}: convert "
                "another release of the model"
            )


_GPTQ_FORMATS = ("gptq", "gptq_v2")
_AUTO_ROUND_FORMATS = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_gptq", "auto_awq")


def _plain(tensor: FileTensor) -> Source:
    types = {"F16": GGMLType.F16, "BF16": GGMLType.BF16}
    if tensor.dtype in ("U8", "I8", "I16", "F8_E4M3", "F8_E5M2", "F8_E8M0"):
        raise ModelError(f"tensor {quoted(tensor.name)} is {tensor.dtype} without scales, which localllm cannot read")
    if tensor.name.endswith("tid2eid"):
        return Source(tensor.shape, GGMLType.I32, lambda: tensor.read().astype(np.int32))
    type = types.get(tensor.dtype, GGMLType.F32)
    return Source(tensor.shape, type, tensor.read if type in types.values() else lambda: read_float32(tensor))


def read_float32(tensor: FileTensor) -> NDArray[np.float32]:
    """Return values of any type in float32."""
    values = tensor.read()
    if tensor.dtype == "F8_E5M2":
        return (values.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if tensor.dtype == "F8_E4M3":
        values = _E4M3[values]
    if tensor.dtype == "F8_E8M0":
        values = np.exp2(values.astype(np.float32) - 127)
    return floats(values)


def _e4m3() -> NDArray[np.float32]:
    """Return the values of E4M3: 8 bits with 4 bits of exponent, where only 0x7f and 0xff are NaN."""
    sizes = 2 * HALF_UE4M3[:128]
    sizes[127] = np.nan
    return np.concatenate([sizes, -sizes])


_E4M3 = _e4m3()
_FP4 = E2M1_DOUBLED / 2


def _bfloat16(values: NDArray[np.float32]) -> Array:
    """Return values rounded to bfloat16, including NaN, as bits."""
    rounded = bfloat16(values)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


# -- FP8 and INT8 --------------------------------------------------------------------------------------------------


def _scaled(beside: Mapping[str, FileTensor], settings: Mapping[str, Any]) -> Source:
    weight, scale = beside["weight"], beside.get("weight_scale") or beside["weight_scale_inv"]
    rows, columns = weight.shape
    names = ("weight_block_size", "block_structure")
    sizes = next((size for each in _schemes(settings) for name in names if (size := each.get(name))), (128, 128))
    per_row = scale.shape in ((rows,), (rows, 1))
    is_block = not per_row and len(scale.shape) == 2 and np.prod(scale.shape) > 1
    if is_block and scale.shape != (-(-rows // sizes[0]), -(-columns // sizes[1])):
        raise ValueError(f"scales {list(scale.shape)} for {list(weight.shape)}")

    def read_scale() -> NDArray[np.float32]:
        found = read_float32(scale)
        if is_block:
            return np.repeat(np.repeat(found, sizes[0], 0)[:rows], sizes[1], 1)[:, :columns]
        return found.reshape(-1, 1) if per_row else found.reshape(1, 1)

    def values() -> Array:
        with np.errstate(invalid="ignore"):  # writing the file detects NaN
            return _bfloat16(read_float32(weight) * read_scale())

    zero = beside.get("weight_zero_point")
    if zero is not None and weight.dtype == "I8" and not is_block and zero.read().any():
        zeros = read_float32(zero).reshape(-1, 1)
        return Source(
            weight.shape, GGMLType.F16, lambda: ((read_float32(weight) - zeros) * read_scale()).astype(np.float16)
        )
    if weight.dtype != "I8" or is_block or columns % 32:
        return Source(weight.shape, GGMLType.BF16, values)

    def blocks() -> Array:
        d = np.broadcast_to(_halves(read_scale(), weight.name), (rows, columns // 32)).ravel()
        return Q8_0().pack(Parts(weight.read().reshape(-1, 32), d)).reshape(rows, -1)

    return Source(weight.shape, GGMLType.Q8_0, values, blocks)


def _halves(scales: Array, name: str) -> NDArray[np.float16]:
    """Return scales as float16. Raises ModelError if they are not finite."""
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ModelError(
            f"tensor {quoted(name)} has scales that are NaN, infinite or too large for float16: the checkpoint is "
            "damaged; download it again"
        )
    return halves


# -- Integers of 4 and 8 bits with scales of groups ----------------------------------------------------------------


@dataclass(frozen=True)
class _Groups:
    """Rows of integers 0 … 2^bits - 1 in groups: a value is (integer - zero of its group) * scale of its group."""

    name: str
    integers: NDArray[np.uint8]  # [rows, columns]
    zeros: NDArray[np.uint8]  # [rows, groups]
    scales: NDArray[np.float32]  # [rows, groups]
    groups: NDArray[np.int32]  # [columns]: the group of each column

    def values(self) -> Array:
        centred = self.integers.astype(np.float32) - self.zeros[:, self.groups]
        return (centred * self.scales[:, self.groups]).astype(np.float16)

    def blocks(self, type: GGMLType) -> Array:
        """Return Q4_0 or Q4_1 blocks. Q4_0 requires that all zeros are 8."""
        first = self.groups[::32]
        scales = self.scales[:, first].ravel()
        minima = _halves(-scales * self.zeros[:, first].ravel(), self.name)
        parts = Parts(self.integers.reshape(-1, 32), _halves(scales, self.name), minima)
        form = Q4_1() if type is GGMLType.Q4_1 else Q4_0()
        return form.pack(parts).reshape(len(self.integers), -1)


def _grouped(
    shape: tuple[int, int], bits: int, read: Callable[[], _Groups], zeros_and_groups: tuple[Array, Array]
) -> Source:
    """Return a source of `_Groups`. Blocks need one group for every 32 columns. ``read`` reads all groups."""
    zeros, groups = zeros_and_groups
    if groups.shape != shape[1:] or groups.min() < 0 or groups.max() >= zeros.shape[1]:
        raise ValueError(f"groups {list(groups.shape)} for {shape[1]} columns")
    if bits != 4 or shape[1] % 32 or (groups.reshape(-1, 32) != groups[::32, None]).any():
        return Source(shape, GGMLType.F16, lambda: read().values())
    type = GGMLType.Q4_0 if (zeros == 8).all() else GGMLType.Q4_1
    return Source(shape, type, lambda: read().values(), lambda: read().blocks(type))


def _schemes(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings of weights: the object itself, and compressed-tensors' groups of tensors."""
    groups = settings.get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    weights = [scheme.get("weights") for scheme in schemes if isinstance(scheme, dict)]
    return [scheme for scheme in (settings, *weights) if isinstance(scheme, dict)]


def _groups(columns: int, n_groups: int, settings: Mapping[str, Any]) -> NDArray[np.int32]:
    """Return the group of each column, for the group size in config.json. The last group may have fewer columns."""
    given = (scheme.get("group_size") for scheme in _schemes(settings))
    sizes = {size for size in given if type(size) is int and size > 0}
    if not sizes:
        sizes = {1 << power for power in range(4, 24)} | ({columns // n_groups} if columns % n_groups == 0 else set())
    if n_groups == 1:
        sizes = {columns}
    fitting = [size for size in sizes if -(-columns // size) == n_groups]
    if len(fitting) != 1:
        raise ValueError(f"{n_groups} groups for {columns} columns, of which no one size is known")
    return np.arange(columns, dtype=np.int32) // fitting[0]


def _unpacked(words: Array, bits: int, order: list[int] | None = None) -> NDArray[np.uint8]:
    """Unpack [rows, words] to [rows, integers], the lowest bits first, or in ``order``."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)[slice(None) if order is None else order]
    found = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return found.astype(np.uint8).reshape(len(words), -1)


#: Positions of the first, second, … integer in a word of AWQ.
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def _gptq_or_awq(beside: Mapping[str, FileTensor], settings: Mapping[str, Any]) -> Source:
    weight, scales, packed_zeros = beside["qweight"], beside["scales"], beside["qzeros"]
    n_groups, rows = scales.shape
    is_gptq = weight.shape[1] == rows
    bits = int(settings.get("bits", 4))
    if bits not in (4, 8):
        raise ModelError(f"tensor {quoted(weight.name)} has {bits} bits: localllm converts 4 and 8")
    columns = weight.shape[0] * 32 // bits if is_gptq else weight.shape[0]
    if packed_zeros.shape != (n_groups, rows * bits // 32) or (not is_gptq and weight.shape[1] * 32 // bits != rows):
        raise ValueError(f"shapes {list(weight.shape)}, {list(packed_zeros.shape)} and {list(scales.shape)}")
    order = None if is_gptq else _AWQ_ORDER
    # GPTQ's first format stores zeros minus 1.
    more = 1 if is_gptq and settings.get("checkpoint_format", "gptq") == "gptq" else 0

    def zeros_and_groups() -> tuple[Array, Array]:
        zeros = _unpacked(packed_zeros.read(), bits, order).T + np.uint8(more)
        index = beside["g_idx"].read() if "g_idx" in beside and is_gptq else None
        return zeros, _groups(columns, n_groups, settings) if index is None else index

    def read() -> _Groups:
        words = weight.read()
        integers = _unpacked(np.ascontiguousarray(words.T), bits) if is_gptq else _unpacked(words, bits, order).T
        zeros, groups = zeros_and_groups()
        return _Groups(weight.name, np.ascontiguousarray(integers), zeros, read_float32(scales).T, groups)

    return _grouped((rows, columns), bits, read, zeros_and_groups())


def _packed(beside: Mapping[str, FileTensor], settings: Mapping[str, Any]) -> Source:
    """Return a tensor packed by compressed-tensors, or NVFP4 in ModelOpt's format."""
    weight, scale = beside.get("weight_packed") or beside["weight"], beside["weight_scale"]
    if weight.dtype in ("U8", "I8"):
        shape = (weight.shape[0], weight.shape[1] * 2)
        if scale.dtype in ("U8", "F8_E8M0"):
            return _mxfp4(weight, scale, shape)
        return _nvfp4(weight, scale, beside, shape)
    rows, columns = (int(n) for n in beside["weight_shape"].read())
    bits = 32 * weight.shape[1] // columns
    if bits not in (4, 8):
        raise ModelError(f"tensor {quoted(weight.name)} has {bits} bits: localllm converts 4 and 8")
    n_groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if weight.shape[0] != rows or scale.shape[0] != rows:
        raise ValueError(f"shapes {list(weight.shape)} and {list(scale.shape)} for {rows} rows")

    def zeros_and_groups() -> tuple[Array, Array]:
        zeros = np.full((rows, n_groups), 1 << bits - 1, np.uint8)
        if "weight_zero_point" in beside:  # packed along the rows
            words = np.ascontiguousarray(beside["weight_zero_point"].read().reshape(-1, n_groups).T)
            zeros = _unpacked(words, bits)[:, :rows].T
        if "weight_g_idx" in beside:
            return zeros, beside["weight_g_idx"].read()
        return zeros, _groups(columns, n_groups, settings)

    def read() -> _Groups:
        integers = _unpacked(weight.read(), bits)[:, :columns]
        zeros, groups = zeros_and_groups()
        scales = read_float32(scale).reshape(rows, n_groups)
        return _Groups(weight.name, np.ascontiguousarray(integers), zeros, scales, groups)

    return _grouped((rows, columns), bits, read, zeros_and_groups())


# -- FP4 -----------------------------------------------------------------------------------------------------------


def _mxfp4(weight: FileTensor, scales: FileTensor, shape: tuple[int, ...]) -> Source:
    """Blocks of 32 values with one power of two each; the lower half of a byte comes first."""
    if scales.shape != (*shape[:-1], shape[-1] // 32) or shape[-1] % 32:
        raise ValueError(f"scales {list(scales.shape)} for {list(shape)}")

    def codes() -> Array:
        return bit_fields(weight.read().view(np.uint8), 4, 2).reshape(*shape[:-1], -1, 32)

    def values() -> Array:
        powers = 2.0 ** (scales.read().astype(np.float32) - 127)
        return _bfloat16((_FP4[codes()] * powers[..., None]).reshape(shape))

    def blocks() -> Array:
        found, powers = codes(), scales.read()
        if (powers == 255).any():
            raise ModelError(f"tensor {quoted(scales.name)} has scales that are NaN: download the checkpoint again")
        planes = join_bit_planes(found.reshape(*found.shape[:-1], 2, 16), 4)
        return np.concatenate([powers[..., None], planes], axis=-1).reshape(*shape[:-1], -1)

    return Source(shape, GGMLType.MXFP4, values, blocks)


def _nvfp4(
    weight: FileTensor, scales: FileTensor, beside: Mapping[str, FileTensor], shape: tuple[int, ...]
) -> Source:
    """Blocks of 16 with FP8 scales, and one factor or divisor for the tensor."""
    factor, divisor = beside.get("weight_scale_2"), beside.get("weight_global_scale")
    if scales.shape != (shape[0], shape[1] // 16):
        raise ValueError(f"scales {list(scales.shape)} for {list(shape)}")

    def values() -> Array:
        whole = np.float32(1)
        if factor is not None:
            whole = read_float32(factor).reshape(-1)[0]
        elif divisor is not None:
            with np.errstate(divide="ignore"):  # writing the file detects infinity
                whole = 1 / read_float32(divisor).reshape(-1)[0]
        found = _FP4[bit_fields(weight.read(), 4, 2).reshape(shape[0], -1, 16)]
        with np.errstate(invalid="ignore"):
            return _bfloat16((found * (read_float32(scales) * whole)[..., None]).reshape(shape))

    return Source(shape, GGMLType.BF16, values)
