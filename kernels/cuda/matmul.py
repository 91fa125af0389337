"""Matrix products on CUDA devices: sizes and launches of kernels.  Pure functions.

Memory layouts are shown next to the kernels: packed weights in formats.cuh and codes.cuh, activations in
activations.cuh, the order of additions in dots.cuh.  The kernel depends on the rows of activations and the format:

===================  =============================================  ===================  ======
rows of activations  weights of integers                            F16, BF16            F32
===================  =============================================  ===================  ======
1, 2, 4              matvec: a lane is a row                        matmul_few, as of 8  matvec
8, 16, 24, 32        matmul_few: tensor cores, chunks side by side  matmul_few           matvec
more                 matmul: tensor cores, tiles in shared memory   matmul               matvec
===================  =============================================  ===================  ======

Before sm_80, integers use matvec with 2 rows at a time, F16 uses matmul_few, and BF16 is stored as F32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from localllm.errors import KernelError
from localllm.kernels.cuda.driver import MAX_BLOCK_THREADS, Launch
from localllm.quant.iquants import IQ4_VALUES
from localllm.quant.lut import LUT_IQ1_16, LUT_IQ2_16, KernelType, LUTType, block_size
from localllm.quant.packing import LAYOUTS
from localllm.quant.types import GGMLType

#: Rows of weights per group, columns per run of codes, and columns that share a scale of activations.
GROUP, RUN, BLOCK = 32, 128, 32
#: Consecutive bytes of a row.
UNIT = 16
#: Maximum chunks of columns with separate sums: the warps of a block.
MAX_CHUNKS = 16
#: First compute capability whose tensor cores support the operands of matmul_few and matmul.
TENSOR_CORES = (8, 0)
#: Rows of activations that matvec processes at once; maximum rows for matmul_few; maximum matrices per launch.
VECTOR_ROWS, FEW_ROWS, MAX_MATRICES = (1, 2, 4), 32, 3
#: matmul's warps along the rows; rows of activations per block, in descending order; maximum stages.
ROW_WARPS, TILE_ROWS, MAX_STAGES = 4, (128, 64), 4
#: Time to unpack the weights of a tile of matmul, in units of the time for one row's products (Q4_K, from the SASS).
_UNPACK_ROWS = 40

#: Formats for which matmul_few processes 8 rows at once instead of 16, because their scales and codes need registers.
#: Q2_K, which has the most scales, uses matvec instead.
_FEW_AT_ONCE: set[KernelType] = {GGMLType.Q3_K, GGMLType.Q5_K, GGMLType.Q6_K, LUT_IQ1_16, LUT_IQ2_16}
#: Formats for which matmul uses 64 rows instead of 128, because ptxas spills registers on some architecture: formats
#: with a scale per 16 columns, and most formats with minima.
_SMALL_TILES = {GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q4_1, GGMLType.Q5_1, GGMLType.Q5_K, GGMLType.Q6_K}
#: Formats for which ptxas spills registers of matmul_few_experts on some architectures.  matmul_experts is used for
#: few rows instead; it takes about as long as reading the weights.
_FEW_EXPERTS_SPILL = {GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q5_K, GGMLType.Q6_K}
#: Launch bounds of matvec by FORMAT and rows, if the result of `_vector_bounds` is not good.
_BOUNDS: dict[tuple[int | str, int], int | str] = {
    ("Q5_0", 4): "512,1",
    ("Q8_0", 1): 640,
    ("LUT_32", 2): 640,
    ("LUT3_16", 2): 640,
}

#: Formats whose `matvec` of one token fits a block's registers twice, as in `matvec_gated`.  With experts it needs
#: more
#: registers: only half the threads fit.
_GATED = {GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q4_K}
#: Maximum chunks of columns that `matvec_experts_summed` adds, over all experts of a token, and its launch bounds.
MAX_SUMMED, _SUMMED_BOUNDS = 128, 768
#: Formats of the first and the last matrices of a launch of matvec: formats that files combine in a layer.
_MIXED = {
    (GGMLType.Q4_K, GGMLType.Q6_K),
    (GGMLType.Q5_K, GGMLType.Q6_K),
    (GGMLType.Q3_K, GGMLType.Q4_K),
    (GGMLType.Q3_K, GGMLType.Q5_K),
    (GGMLType.Q4_K, GGMLType.Q5_K),
}

_WARP = 32
_PACK_WARPS, _EMBED_THREADS, _MATMUL_THREADS = 4, 256, 256
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


@dataclass(frozen=True)
class PackedFormat:
    """A format of weights, as read by kernels."""

    type: KernelType  # result of `localllm.quant.repack.repack_target`
    columns: int  # columns of a tile
    # code_bytes, scale_bytes: bytes of a group's codes in 128 columns, and of its scales in a tile
    code_bytes: int
    scale_bytes: int
    input_columns: int  # columns in a unit of activations
    defines: Mapping[str, int | str]  # macros that select the format

    @property
    def name(self) -> str:
        return self.type.name

    @property
    def is_float(self) -> bool:
        return self.type in _FLOATS

    @property
    def tile_bytes(self) -> int:
        return self.columns // RUN * self.code_bytes + self.scale_bytes

    def n_tiles(self, n_in: int) -> int:
        """Tiles along a row."""
        return -(-n_in // self.columns)

    def n_chunks(self, n_in: int) -> int:
        """Return the number of chunks of columns with separate sums, which is the same for all kernels."""
        return min(MAX_CHUNKS, self.n_tiles(n_in))

    def packed_bytes(self, n_out: int, n_in: int) -> int:
        """Return the bytes of a packed matrix.  Groups of rows are contiguous."""
        return n_groups(n_out) * self.n_tiles(n_in) * self.tile_bytes

    # -- Activations -----------------------------------------------------------------------------------------------

    @property
    def input_kind(self) -> str:
        """Kind of the activations; formats of one kind read the same activations."""
        return self.name if self.is_float else GGMLType.Q8_0.name

    def input_rows(self, n_tokens: int) -> int:
        """Return the rows in the layout of activations of up to ``n_tokens`` tokens."""
        if not self.is_tensor_float:
            for rows in VECTOR_ROWS:
                if n_tokens <= rows:
                    return rows
        return -(-n_tokens // 8) * 8

    def unit_bytes(self, n_in: int, n_rows: int) -> int:
        return -(-n_in // RUN) * (RUN // self.input_columns) * UNIT * n_rows

    def input_scale_bytes(self, n_in: int, n_rows: int) -> int:
        """Return the bytes of the scales of activations; at least 1, so that they can be allocated."""
        return 4 * n_rows if self.is_float else -(-n_in // RUN) * (RUN // BLOCK) * 8 * n_rows

    @property
    def is_tensor_float(self) -> bool:
        """Whether tensor cores multiply this format as floats."""
        return self.is_float and self.type is not GGMLType.F32


def _table_defines(table: Sequence[int]) -> dict[str, int | str]:
    words = np.array(table, np.int8).view("<u4").tolist()
    return {f"TABLE_{i}": f"0x{word:08x}u" for i, word in enumerate(words)}


def _packed_format(type: KernelType) -> PackedFormat:
    size = block_size(type)
    if type in _FLOATS:
        return PackedFormat(type, RUN, GROUP * RUN * size.n_bytes, 0, UNIT // size.n_bytes, {"FORMAT": type.name})
    columns = max(RUN, size.length)
    bits = 8 * size.n_bytes // size.length  # the scales need less than one bit per column
    scale_bytes = size.n_bytes * columns // size.length - bits * columns // 8
    defines: dict[str, int | str] = {"FORMAT": type.name}
    if isinstance(type, LUTType):
        kind = "LUT" if type.bits == 4 else "LUT3"
        defines = {"FORMAT": f"{kind}_{type.scale_length}", **_table_defines(type.table)}
    elif type is GGMLType.IQ4_NL:
        defines = {"FORMAT": "LUT_32", **_table_defines(IQ4_VALUES.tolist())}
    return PackedFormat(type, columns, GROUP * RUN * bits // 8, GROUP * scale_bytes, UNIT, defines)


#: All formats that kernels read.
PACKED_FORMATS: dict[KernelType, PackedFormat] = {type: _packed_format(type) for type in LAYOUTS}


def packed_format(type: KernelType, capability: tuple[int, int]) -> PackedFormat:
    """Return the format that a device uses for weights of ``type``, which kernels must support."""
    if type is GGMLType.BF16 and capability < TENSOR_CORES:
        return PACKED_FORMATS[GGMLType.F32]
    return PACKED_FORMATS[type]


def n_groups(n_out: int) -> int:
    """Return the number of groups of rows of a matrix."""
    return -(-n_out // GROUP)


# -- Launches ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProductLimits:
    """Properties of a device that launches of products depend on."""

    # capability, shared_bytes: of the device
    capability: tuple[int, int]
    shared_bytes: int
    # rows of activations per block of matmul, in descending order; multiples of 16
    tile_rows: tuple[int, ...] = TILE_ROWS
    n_multiprocessors: int = 1  # of the device


@dataclass(frozen=True)
class Product:
    """One matrix of a launch, as kernel arguments: addresses in memory, or in buffers."""

    weights: Any  # packed weights
    y: Any  # float32 [T, stride], result
    n_out: int
    stride: int
    bias: Any = None  # float32 [n_out]
    residual: Any = None  # float32 [T, stride], added to the result; may be ``y``


_NO_PRODUCT = Product(None, None, 0, 0)


def pack_launch(format: PackedFormat, n_rows: int, n_in: int) -> Launch:
    """Return a launch of `pack` for ``n_rows`` rows; the first one starts a group."""
    blocks = -(-format.n_tiles(n_in) // _PACK_WARPS)
    return Launch("pack", "pack", format.defines, (blocks, n_groups(n_rows)), (_PACK_WARPS * _WARP,))


def quantise_launch(format: PackedFormat, n_in: int, n_rows: int) -> Launch:
    """Return a launch of `quantise` for activations of ``n_in`` columns; a warp processes 128 columns.

    ``n_rows``: rows of the layout.
    """
    threads = min(_WARP * -(-n_in // RUN), MAX_BLOCK_THREADS)
    return Launch("quantise", "quantise", {"FORMAT": format.input_kind}, (n_rows,), (threads,))


def embed_launch(format: PackedFormat, n_rows: int) -> Launch:
    return Launch("embed", "embed", format.defines, (n_rows,), (_EMBED_THREADS,))


def product_launch(
    format: PackedFormat, n_outs: Sequence[int], n_in: int, n_rows: int, limits: ProductLimits, n_heads: int = 1
) -> Launch:
    """Return a launch of activations times up to `MAX_MATRICES` matrices.

    ``n_rows``: rows of the layout (`PackedFormat.input_rows`).  With ``n_heads``, each head of the activations is
    multiplied with a separate matrix.
    """
    if n_heads > 1:
        one_head = product_launch(format, n_outs, n_in, n_rows, limits)
        # Without the bounds ptxas spills registers, for sm_86 and sm_120.
        bounds = {"BOUNDS": "512,1"} if format.defines["FORMAT"] in ("F32", "LUT_32") else {}
        return replace(one_head, grid=(*one_head.grid, n_heads), defines={**one_head.defines, "HEADS": 1, **bounds})
    capability = limits.capability
    if not 1 <= len(n_outs) <= MAX_MATRICES:
        raise KernelError(
            f"{len(n_outs)} matrices in one launch, but the maximum is {MAX_MATRICES}: use several launches"
        )
    if n_rows > FEW_ROWS and capability >= TENSOR_CORES and format.type is not GGMLType.F32:
        return _matmul_launch(format, n_outs, n_rows, limits)
    uses_lanes = not format.is_tensor_float and (
        n_rows in VECTOR_ROWS or format.type in (GGMLType.F32, GGMLType.Q2_K) or capability < TENSOR_CORES
    )
    if uses_lanes:  # for sm_75 ptxas spills registers with more than two rows
        kernel, rows = "matvec", min(n_rows, 2 if capability < TENSOR_CORES else 8)
        launch_bounds = _vector_bounds(format, rows)
    else:
        kernel, rows = "matmul_few", 16 if n_rows % 16 == 0 and format.type not in _FEW_AT_ONCE else 8
        launch_bounds = _few_bounds(format, rows)
    grid = (-(-n_rows // rows), sum(map(n_groups, n_outs)))
    # For few rows, the number and therefore the addresses are known at compile time.
    defines = {**format.defines, "TOKENS": rows, "ROWS": n_rows if n_rows <= FEW_ROWS else 0, "BOUNDS": launch_bounds}
    return Launch(kernel, kernel, defines, grid, (_WARP * format.n_chunks(n_in),))


def gated_launch(format: PackedFormat, launch: Launch) -> Launch | None:
    """Return the launch that computes two products and then their gate; None if there is no such kernel."""
    threads, is_expert = 2 * launch.block[0], launch.kernel == "matvec_experts"
    is_one = launch.kernel == "matvec" and launch.defines["TOKENS"] == 1
    if format.type not in _GATED or not (is_one or (is_expert and threads <= MAX_BLOCK_THREADS // 2)):
        return None
    bounds = launch.defines["BOUNDS"] if is_expert else MAX_BLOCK_THREADS
    defines = {**launch.defines, "GATED": 1, "BOUNDS": bounds}
    grid = (launch.grid[0], launch.grid[1] // 2)
    return replace(launch, kernel=launch.kernel + "_gated", defines=defines, grid=grid, block=(threads,))


def mixed_launch(format: PackedFormat, launch: Launch, last: PackedFormat) -> Launch | None:
    """Return a `product_launch` whose last matrix has another format; None if there is no such kernel."""
    if (
        launch.kernel != "matvec"
        or launch.defines["ROWS"] not in VECTOR_ROWS
        or (format.type, last.type) not in _MIXED
    ):
        return None
    return replace(launch, defines={**launch.defines, "LAST_FORMAT": last.name})


def gate_arguments(gate: Product, up: Product, activation: int, codes: Mapping[str, Any]) -> dict[str, Any]:
    """Return GATE_PARAMETERS of gate.cuh; ``codes``: units, scales and n_rows, the rows of their layout."""
    weights = {"gates": gate.weights, "gate_bias": gate.bias, "ups": up.weights, "up_bias": up.bias}
    gated = {"gated": codes["units"], "gated_scales": codes["scales"], "gated_rows": codes["n_rows"]}
    return {**weights, "kind": activation, **gated}


def expert_launch(
    format: PackedFormat,
    n_outs: Sequence[int],
    n_in: int,
    n_tokens: int,
    n_pairs: int,
    n_products: int,
    product_rows: int,
    limits: ProductLimits,
) -> Launch:
    """Return a `product_launch` of rows with the matrices of their experts; tokens of one expert are adjacent.

    The ``n_pairs`` pairs of tokens and experts are divided into ``n_products`` products of rows of one expert, with
    at most
    ``product_rows`` rows: 8, or the last of ``tile_rows``.
    """
    groups, kernel = sum(map(n_groups, n_outs)), expert_kernel(format, n_tokens, product_rows, limits.capability)
    if kernel == "matmul_experts":
        rows = limits.tile_rows[-1]
        launch = _matmul_launch(format, n_outs, rows, replace(limits, tile_rows=(rows,)))
        grid, defines = (n_products, launch.grid[1]), {**launch.defines, "EXPERTS": 1}
        return replace(launch, kernel=kernel, defines=defines, grid=grid)
    is_few = kernel == "matmul_few_experts"
    bounds = _few_bounds(format, 8) if is_few else _vector_bounds(format, 1)
    grid = (n_products if is_few else n_pairs, groups)
    defines = {**format.defines, "EXPERTS": 1, "BOUNDS": bounds}
    module = kernel.removesuffix("_experts")
    return Launch(module, kernel, defines, grid, (_WARP * format.n_chunks(n_in),))


def summed_launch(format: PackedFormat, n_out: int, n_in: int, n_tokens: int, k: int) -> Launch | None:
    """Return `matvec_experts_summed` for up to ``n_tokens`` tokens, or None; warps get equal shares of the chunks."""
    if (n := k * format.n_chunks(n_in)) > MAX_SUMMED:
        return None
    warps = -(-n // -(-n // (_SUMMED_BOUNDS // _WARP)))
    defines = {**format.defines, "EXPERTS": 1, "SUMMED": 1, "BOUNDS": _SUMMED_BOUNDS}
    return Launch("matvec", "matvec_experts_summed", defines, (n_tokens, n_groups(n_out)), (_WARP * warps,))


def expert_kernel(format: PackedFormat, n_tokens: int, product_rows: int, capability: tuple[int, int]) -> str:
    """Return the kernel: single rows for few tokens, 8 rows at once for few tokens per expert, otherwise tiles."""
    has_few = not format.is_float and n_tokens <= VECTOR_ROWS[-1]
    if has_few or format.type is GGMLType.F32 or (capability < TENSOR_CORES and not format.is_tensor_float):
        return "matvec_experts"
    if product_rows == 8 and format.type not in _FEW_EXPERTS_SPILL:
        return "matmul_few_experts"
    return "matmul_experts"


def size_arguments(kernel: str, format: PackedFormat, n_in: int) -> dict[str, int]:
    """Return the arguments of a kernel of products that depend on the number of columns."""
    sizes = {"n_tiles": format.n_tiles(n_in)}
    return {**sizes, "n_chunks": format.n_chunks(n_in)} if kernel in ("matmul", "matmul_experts") else sizes


def matrix_arguments(products: Sequence[Product]) -> dict[str, Any]:
    """Return MATRIX_PARAMETERS of dots.cuh for up to `MAX_MATRICES` matrices."""
    arguments: dict[str, Any] = {}
    for i, p in enumerate([*products, *[_NO_PRODUCT] * (MAX_MATRICES - len(products))]):
        arguments |= {f"weights{i}": p.weights, f"bias{i}": p.bias, f"residual{i}": p.residual}
        arguments |= {f"y{i}": p.y, f"n_out{i}": p.n_out, f"stride{i}": p.stride}
    return arguments


def _vector_bounds(format: PackedFormat, rows: int) -> int | str:
    """Return the launch bounds of matvec.

    Blocks have up to 512 threads.  With this bound, ptxas spills registers so that two blocks fit a multiprocessor
    with 64 registers per thread.  With these experimentally determined bounds it does not spill.
    """
    if format.is_float:
        return 512
    return _BOUNDS.get((format.defines["FORMAT"], rows), 704 if rows < 4 else 640)


def _few_bounds(format: PackedFormat, rows: int) -> int | str:
    return "512,1" if format.type is GGMLType.Q4_0 and rows == 8 else 512


def stage_bytes(format: PackedFormat, tile_rows: int) -> int:
    """Return the shared memory of a matmul stage: codes of 4 groups in 128 columns, a tile's scales, activations."""
    scales = 0 if format.is_float else RUN // BLOCK * 8 * tile_rows
    units = RUN // format.input_columns * UNIT * tile_rows
    return ROW_WARPS * (format.code_bytes + format.scale_bytes) + units + scales


def _matmul_launch(format: PackedFormat, n_outs: Sequence[int], n_rows: int, limits: ProductLimits) -> Launch:
    shared_bytes, tile_rows = limits.shared_bytes, limits.tile_rows
    is_small = format.type in _SMALL_TILES or (isinstance(format.type, LUTType) and format.type.n_scales > 1)
    most = min(tile_rows[0], 64) if is_small else tile_rows[0]
    fitting = [rows for rows in tile_rows if rows <= most and 2 * stage_bytes(format, rows) <= shared_bytes]
    row_blocks = sum(-(-n_groups(n_out) // ROW_WARPS) for n_out in n_outs)

    def seconds(rows: int) -> int:  # in arbitrary units; each multiprocessor runs one block at a time
        return -(-n_rows // rows * row_blocks // limits.n_multiprocessors) * (rows + _UNPACK_ROWS)

    rows = min(fitting, key=seconds)
    stages = min(MAX_STAGES, shared_bytes // stage_bytes(format, rows))
    return Launch(
        "matmul",
        "matmul",
        {**format.defines, "TOKENS": rows, "STAGES": stages},
        (-(-n_rows // rows), row_blocks),
        (_MATMUL_THREADS,),
        stages * stage_bytes(format, rows),
    )
