"""Tensors of a model file, by name. Their shapes are checked against the hyper-parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Matrix, Weight, WeightView
from localllm.quant.formats import dequantize
from localllm.quant.lut import LUT_E2M1_16
from localllm.quant.repack import scaled_nvfp4
from localllm.quant.types import BLOCK_SIZES, GGMLType

#: Rotary frequencies, which old converters wrote as tensors. The hyper-parameters define them as well.
_NEEDLESS = re.compile(r"(blk\.\d+\.)?(attn_rot_embd|rope\.freqs|attn\.rotary_emb\.inv_freq)(\.weight)?")


class ModelFile(Protocol):
    """File that contains a model, such as `localllm.gguf.GGUFFile`."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Weight]:
        """Tensors by name."""


@dataclass(frozen=True)
class FileWeight:
    """A tensor of a file. Its data is looked up in the file at each access, so that a closed file stays unmapped.

    Two objects for the same tensor are equal, so that the tensor is packed only once.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    _file: ModelFile = field(hash=False)

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._file.tensors[self.name].data

    def drop_pages(self) -> None:
        self._file.tensors[self.name].drop_pages()


def floats(weight: Weight) -> NDArray[np.float32]:
    """Return the decoded values of a weight."""
    return dequantize(weight.data, weight.type).reshape(weight.shape)


@dataclass(frozen=True, eq=False)
class FloatView(WeightView):
    """A float32 weight that is computed from another weight."""

    type = GGMLType.F32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    def values(self) -> NDArray[np.float32]:
        """Return the computed values, in any shape."""
        raise NotImplementedError

    @property
    def data(self) -> NDArray[np.uint8]:
        values = np.ascontiguousarray(self.values(), np.float32).reshape(self.shape)
        return values.view(np.uint8)


@dataclass(frozen=True, eq=False)
class RowsOf(WeightView):
    """A matrix, or its bias, that is stored in some rows of a tensor with several matrices.

    The rows of each expert (or all rows, without experts) form ``n_groups`` groups of equal size. The matrix consists
    of the rows with numbers ``rows`` in every group.
    """

    label: str
    rows: range
    n_groups: int

    @property
    def name(self) -> str:
        return f"{self.whole.name}[{self.label}]"

    @property
    def shape(self) -> tuple[int, ...]:
        axis = self._row_axis
        return (*self.whole.shape[:axis], self.n_groups * len(self.rows), *self.whole.shape[axis + 1 :])

    @property
    def _row_axis(self) -> int:
        return max(0, len(self.whole.shape) - 2)

    @property
    def data(self) -> NDArray[np.uint8]:
        """A view if the rows are contiguous, else a copy."""
        leading, n_rows = self.whole.shape[: self._row_axis], self.whole.shape[self._row_axis]
        grouped = self.whole.data.reshape(*leading, self.n_groups, n_rows // self.n_groups, -1)
        rows = grouped[..., self.rows.start : self.rows.stop, :]
        return rows.reshape(-1 if len(self.shape) == 1 else (*self.shape[:-1], rows.shape[-1]))


@dataclass(frozen=True, eq=False)
class HeadsOf(FloatView):
    """The rows with numbers ``rows`` of each head of a matrix [n_heads * n, columns].

    The result is float32 [n_heads, rows, columns], or [n_heads, columns, rows] if ``is_transposed``.
    """

    n_heads: int
    rows: range
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return f"{self.whole.name}[{self.rows.start}:{self.rows.stop}]"

    @property
    def shape(self) -> tuple[int, ...]:
        n, columns = len(self.rows), self.whole.shape[1]
        return (self.n_heads, columns, n) if self.is_transposed else (self.n_heads, n, columns)

    def values(self) -> NDArray[np.float32]:
        rows = floats(self.whole).reshape(self.n_heads, -1, self.whole.shape[1])
        heads = rows[:, self.rows.start : self.rows.stop]
        return heads.swapaxes(1, 2) if self.is_transposed else heads


@dataclass(frozen=True, eq=False)
class Numbers(FloatView):
    """A table of integers from 0 to n - 1, as float32. Reading it raises ModelError for other numbers."""

    n: int

    def values(self) -> NDArray[np.float32]:
        numbers = self.whole.data.view(np.int32)
        if numbers.min() < 0 or numbers.max() >= self.n:
            raise ModelError(
                f"tensor {self.name} has numbers that are not from 0 to {self.n - 1}: the file is broken"
            )
        return numbers.astype(np.float32)


@dataclass(frozen=True, eq=False)
class PositionTable:
    """Embeddings of ``n`` positions: a row of ``table`` plus the first row of ``types``. Either table may be None."""

    n: int
    table: Weight | None
    types: Weight | None

    type = GGMLType.F32

    @property
    def name(self) -> str:
        return " + ".join(table.name for table in (self.table, self.types) if table is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n, next(table.shape[1] for table in (self.table, self.types) if table is not None)

    @property
    def data(self) -> NDArray[np.uint8]:
        total = np.zeros(self.shape, np.float32)
        for table in (self.table, self.types):
            if table is not None:
                rows = floats(table)
                total += rows[: self.n] if table is self.table else rows[0]
        return total.view(np.uint8)

    def drop_pages(self) -> None:
        for table in (self.table, self.types):
            if table is not None:
                table.drop_pages()


@dataclass(frozen=True, eq=False)
class Dilated(FloatView):
    """Weight [n, kernel] of a convolution with dilation ``step``, with zeros between its values."""

    step: int

    @property
    def shape(self) -> tuple[int, ...]:
        n, kernel = self.whole.shape
        return n, (kernel - 1) * self.step + 1

    def values(self) -> NDArray[np.float32]:
        values = np.zeros(self.shape, np.float32)
        values[:, :: self.step] = floats(self.whole)
        return values


@dataclass(frozen=True, eq=False)
class TokenShift(FloatView):
    """Kernel [n, 2] of a convolution that adds a share of the previous token's values and the rest of the token's.

    The shares [n] are row ``row`` of the whole weight.
    """

    row: int

    @property
    def name(self) -> str:
        return f"{self.whole.name}[{self.row}]"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[-1], 2

    def values(self) -> NDArray[np.float32]:
        shares = floats(self.whole).reshape(-1, self.whole.shape[-1])[self.row]
        return np.stack([shares, 1 - shares], axis=1)


@dataclass(frozen=True, eq=False)
class ArrayWeight:
    """A float32 weight in memory instead of a file."""

    name: str
    values: NDArray[np.float32]
    type = GGMLType.F32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def data(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.values).view(np.uint8)

    def drop_pages(self) -> None:
        """Do nothing, because no file is mapped."""


@dataclass(frozen=True, eq=False)
class Repeated(FloatView):
    """A vector that repeats each value of a weight [n, 1] ``times`` times in a row."""

    times: int

    @property
    def name(self) -> str:
        return f"{self.whole.name}, repeated"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.whole.shape[0] * self.times,)

    def values(self) -> NDArray[np.float32]:
        return np.repeat(floats(self.whole).reshape(-1), self.times)


@dataclass(frozen=True, eq=False)
class RepeatedExperts(WeightView):
    """Matrices of groups of ``times`` experts [n, …], repeated for each expert of a group: [n * times, …]."""

    times: int

    @property
    def name(self) -> str:
        return f"{self.whole.name}, repeated"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.whole.shape[0] * self.times, *self.whole.shape[1:])

    @property
    def data(self) -> NDArray[np.uint8]:
        return np.repeat(self.whole.data, self.times, axis=0)


def slopes(n: int, max_bias: float) -> ArrayWeight:
    """Return the ALiBi slopes [n]: the decrease of each head's scores per position between query and key.

    P is the largest power of two up to ``n``. The slopes of the first P heads are the powers 1 … P of
    2^(-max_bias / P). The slopes of the remaining heads are the odd powers of the square root of this base.

    Source: arXiv:2108.12409.
    """
    power, heads = 1 << (n.bit_length() - 1), np.arange(n)
    exponents = np.where(heads < power, heads + 1, heads - power + 0.5) / power
    return ArrayWeight("slopes", (2.0 ** (-max_bias * exponents)).astype(np.float32))


@dataclass(frozen=True)
class DistanceBiases(FloatView):
    """Biases of scores per head and distance, from a table [buckets, heads] of buckets of distances.

    The biases are constant for distances above ``reach`` tokens. One half of the buckets is for earlier tokens, the
    other half for later tokens; if attention ``is_causal``, all buckets are for earlier tokens. In each direction,
    the first half of the buckets contain one distance each. The sizes of the remaining buckets grow by equal factors
    up to 128 tokens.

    Source: T5, arXiv:1910.10683.
    """

    name = "attn_rel_b"
    reach = 128
    is_causal: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.whole.shape[1] * (2 * self.reach + 1),)

    def values(self) -> NDArray[np.float32]:
        table = floats(self.whole)
        half = len(table) if self.is_causal else len(table) // 2
        exact, ahead = half // 2, np.arange(-self.reach, self.reach + 1)
        far = np.log(np.maximum(np.abs(ahead), 1).astype(np.float32) / np.float32(exact))
        # T5's code computes in float32, and the borders between buckets depend on the rounding.
        far = far / np.float32(math.log(self.reach / exact)) * np.float32(half - exact)
        bucket = np.where(np.abs(ahead) < exact, np.abs(ahead), np.minimum(exact + far.astype(int), half - 1))
        if self.is_causal:
            bucket[ahead > 0] = 0  # never read
        biases: NDArray[np.float32] = table[bucket + half * (not self.is_causal) * (ahead > 0)].T
        return biases


@dataclass(frozen=True, eq=False)
class Scaled(WeightView):
    """A weight in NVFP4 times one factor, or times one factor per expert, in the kernels' format for NVFP4.

    llama.cpp's converter writes the factors of NVFP4 checkpoints as separate tensors.
    """

    factors: Weight  # [1], or [n_experts]

    @property
    def type(self) -> Any:
        return LUT_E2M1_16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    @property
    def data(self) -> NDArray[np.uint8]:
        data, factors = self.whole.data, floats(self.factors).reshape(-1)
        matrices = data.reshape(len(factors), -1, data.shape[-1])
        scaled = [scaled_nvfp4(matrix, factor) for matrix, factor in zip(matrices, factors, strict=True)]
        return np.concatenate(scaled).reshape(*data.shape[:-1], -1)


class Weights:
    """Looks up a model's tensors, and records which tensors were used. Only `values` reads data."""

    def __init__(self, file: ModelFile, prefix: str = "") -> None:
        """``prefix`` is prepended to every name."""
        self._file, self._prefix = file, prefix
        self._found: dict[str, FileWeight] = {}
        #: Optional tensors by name without prefix: an existing name with prefix (True), and a missing one (False).
        self._optional: dict[str, dict[bool, str]] = {}

    def layer(self, i: int, before: str = "") -> Weights:
        """Return the weights of layer ``i``, whose names start with ``{before}blk.{i}.``."""
        return self.under(f"{before}blk.{i}.")

    def under(self, prefix: str) -> Weights:
        """Return the weights whose names start with ``prefix``, under their names without the prefix."""
        some = Weights(self._file, self._prefix + prefix)
        some._found, some._optional = self._found, self._optional
        return some

    def __contains__(self, name: str) -> bool:
        is_there = self._prefix + name in self._file.tensors
        if self._prefix:
            self._optional.setdefault(name, {})[is_there] = self._prefix + name
        return is_there

    def type_of(self, name: str) -> GGMLType | None:
        """Return the type of a tensor, or None if the file has no tensor of that name."""
        tensor = self._file.tensors.get(self._prefix + name)
        return None if tensor is None else tensor.type

    @property
    def has_experts(self) -> bool:
        """Return whether a layer of the file has experts."""
        return any("_exps." in name for name in self._file.tensors)

    def n_rows(self, name: str) -> int:
        """Return the number of rows of a matrix, or 0 if the file has no matrix of that name."""
        shape = self.shape(name)
        return shape[-2] if len(shape) > 1 else 0

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, or () if the file has no tensor of that name."""
        tensor = self._file.tensors.get(self._prefix + name)
        return () if tensor is None else tensor.shape

    def find(self, name: str, *shape: int) -> Weight | None:
        """Return the tensor ``name``, or None if the file has no such tensor.

        If one layer has an optional tensor, all layers must have it: `check_all_used` checks this. Leading
        dimensions of size 1 are ignored when shapes are compared.
        """
        return self._find(name, *shape) if name in self else None

    def _find(self, name: str, *shape: int) -> Weight | None:
        name = self._prefix + name
        tensor = self._file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.shape[-len(shape) :] != shape or prod(tensor.shape) != prod(shape):
            raise ModelError(
                f"tensor {name} has the shape {list(tensor.shape)}, but the hyper-parameters require "
                f"{list(shape)}: the file's metadata and tensors disagree"
            )
        weight = self._found.setdefault(name, FileWeight(name, tensor.type, tensor.shape, self._file))
        return weight if tensor.shape == shape else Reshaped(weight, shape)

    def require(self, name: str, *shape: int) -> Weight:
        """Return the tensor ``name``. Raises ModelError if the file does not contain it."""
        tensor = self._find(name, *shape)
        if tensor is None:
            raise ModelError(f"the file has no tensor {self._prefix}{name}: is it complete?")
        return tensor

    def vector(self, name: str, n: int, n_groups: int = 1) -> Weight:
        """Return the vector ``{name}.weight`` [n], or the concatenated rows of a matrix [n_groups, n / n_groups].

        In Falcon-H1's files, the vector's name is ``name`` without the suffix.
        """
        name = name if name in self else f"{name}.weight"
        if n_groups == 1:
            return self.require(name, n)
        return Reshaped(self.require(name, n_groups, n // n_groups), (n,))

    def matrix(self, name: str, n_in: int, n_out: int, *, bias: bool = False, tied_to: str | None = None) -> Matrix:
        """Return the matrix ``{name}.weight`` [n_out, n_in], with ``{name}.bias`` [n_out] if the file contains it.

        With ``bias``, the bias is required. If the file does not contain the matrix, ``{tied_to}.weight`` is used.
        """
        weight = self._find(f"{name}.weight", n_out, n_in)
        if weight is None:
            weight = self.require(f"{tied_to or name}.weight", n_out, n_in)
        weight = self._scaled(name, weight, 1)
        return Matrix(weight, (self.require if bias else self.find)(f"{name}.bias", n_out))

    def split(self, name: str, n_in: int, widths: Mapping[str, int], *, n_groups: int = 1) -> tuple[Matrix, ...]:
        """Return several matrices that are stored in the matrix ``name``: see `split_rows`."""
        return split_rows(self.matrix(name, n_in, sum(widths.values())), widths, n_groups=n_groups)

    def split_experts(self, name: str, n_experts: int, n_in: int, widths: Mapping[str, int]) -> tuple[Weight, ...]:
        """Return the matrices of all experts, split in the same way as in `split`."""
        return _split(self.experts(name, n_experts, n_in, sum(widths.values())), widths, 1)

    def row(self, name: str, n_in: int) -> Matrix:
        """Return ``{name}.weight`` as a matrix [1, n_in]. The file may store it as a vector."""
        tensor = self._file.tensors.get(f"{self._prefix}{name}.weight")
        if tensor is None or len(tensor.shape) != 1:
            return self.matrix(name, n_in, 1)
        return Matrix(Reshaped(self.vector(name, n_in), (1, n_in)))

    def experts(self, name: str, n_experts: int, n_in: int, n_out: int) -> Weight:
        """Return the matrices ``{name}.weight`` [n_experts, n_out, n_in]."""
        return self._scaled(name, self.require(f"{name}.weight", n_experts, n_out, n_in), n_experts)

    def _scaled(self, name: str, weight: Weight, n: int) -> Weight:
        """Return the weight, times its ``n`` factors if the type is NVFP4. Factors of inputs are ignored."""
        if weight.type is not GGMLType.NVFP4:
            return weight
        self.skip(f"{name}.input_scale")
        factors = self._find(f"{name}.scale", n)
        return weight if factors is None else Scaled(weight, factors)

    def names(self, start: str) -> list[str]:
        """Return the names of the tensors that start with ``start``."""
        start = self._prefix + start
        return [name.removeprefix(self._prefix) for name in self._file.tensors if name.startswith(start)]

    def skip(self, *names: str) -> None:
        """Mark tensors as used, if the file contains them."""
        for name in {self._prefix + name for name in names} & {*self._file.tensors}:
            self._find(name.removeprefix(self._prefix), *self._file.tensors[name].shape)

    def skip_layers(self, first: int) -> None:
        """Mark the tensors of layer ``first`` and all later layers as used."""
        numbers = ((re.match(r"blk\.(\d+)\.", name), name) for name in self._file.tensors)
        self.skip(*(name for match, name in numbers if match and int(match[1]) >= first))

    def values(self, name: str, n: int) -> NDArray[np.float64]:
        """Read the values of the small tensor ``name`` [n]."""
        return floats(self.require(name, n)).astype(np.float64)

    def check_all_used(self) -> None:
        """Raise ModelError if a tensor was not used, or if only some layers have an optional tensor.

        Call it last. Such a tensor means that the file contains a different model than the recorded graph computes.
        """
        for names in self._optional.values():
            if len(names) == 2:
                raise ModelError(f"the file has no tensor {names[False]}, but has {names[True]}: is it complete?")
        unused = [name for name in self._file.tensors if name not in self._found and not _NEEDLESS.fullmatch(name)]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ModelError(
                f"the file has a tensor {quoted(unused[0])}{more} that a model of its architecture does not use, "
                "so its output would be wrong: localllm does not support this variant"
            )


@dataclass(frozen=True, eq=False)
class Reshaped(WeightView):
    """A tensor in a different shape: a vector as a matrix of one row, or groups of values as a vector."""

    shape: tuple[int, ...]

    @property
    def data(self) -> NDArray[np.uint8]:
        return self.whole.data.reshape(*self.shape[:-1], -1)


def split_rows(matrix: Matrix, widths: Mapping[str, int], *, n_groups: int = 1) -> tuple[Matrix, ...]:
    """Split a matrix, and its bias if any, into several matrices [n_out, n_in].

    Args:
        widths: name and n_out of each matrix, in the order of the rows.
        n_groups: the rows form this number of equal groups, and every group contains the same number of rows of each
            matrix.
    """
    biases = [None] * len(widths) if matrix.bias is None else _split(matrix.bias, widths, n_groups)
    return tuple(map(Matrix, _split(matrix.weight, widths, n_groups), biases))


def split_columns(weight: Weight) -> tuple[Weight, Weight]:
    """Return the left and the right half of a matrix [n_out, n_in]."""
    n = weight.shape[1] // 2
    if n % BLOCK_SIZES[weight.type].length:
        raise ModelError(
            f"tensor {weight.name} is in {weight.type.name}, whose blocks cross the border between the halves"
        )
    return _Half(weight, 0), _Half(weight, 1)


@dataclass(frozen=True, eq=False)
class _Half(WeightView):
    """The left (``side`` 0) or right half of a matrix's columns."""

    side: int

    @property
    def name(self) -> str:
        return f"{self.whole.name}[{'right' if self.side else 'left'}]"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[0], self.whole.shape[1] // 2

    @property
    def data(self) -> NDArray[np.uint8]:
        data = self.whole.data
        return np.ascontiguousarray(data.reshape(len(data), 2, -1)[:, self.side])


def _split(weight: Weight, widths: Mapping[str, int], n_groups: int) -> tuple[RowsOf, ...]:
    if len(weight.shape) == 1 and BLOCK_SIZES[weight.type].length > 1:
        raise ModelError(f"tensor {weight.name} is a vector in {weight.type.name}, whose blocks cannot be cut")
    ends = [0, *accumulate(n // n_groups for n in widths.values())]
    return tuple(
        RowsOf(weight, name, range(*rows), n_groups) for name, rows in zip(widths, pairwise(ends), strict=True)
    )
