"""Operations on rows: embeddings, norms, matrix products, activations, and selections of rows and columns."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels import graph as g
from localllm.kernels.graph import Matrix, Operation, RecurrentState, Rows, SameShape, Tensor, Value, Weight

#: Activation functions of `Activation`, and of `Gated`.
UNGATED = ("silu", "gelu", "gelu_erf", "gelu_quick", "relu", "relu2", "tanh")
ACTIVATIONS = (*UNGATED, "sigmoid", "identity", "clamped_swiglu", "softplus")
#: Activation functions of `HeadGate`.
HEAD_GATES = ("sigmoid", "softplus")


class Input(Operation[Tensor]):
    """Rows passed to a step: the result of another device, which a part of a graph starts with.

    Several tensors may be concatenated: this one is the columns of ``total`` starting at ``first``.
    """

    x: Tensor
    first: int = 0
    total: int | None = None

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        return ()

    @cached_property
    def result(self) -> Tensor:
        return self.x


class Embed(Operation[Tensor]):
    """Rows of a table [n_vocab, d] for the batch's ids, times a scale: [T, d].

    ``columns`` selects columns of the table, because layers may have separate columns, as in Gemma 3n. With
    ``by_position``, the rows of the tokens' positions are selected; the table must cover all positions. With
    ``takes_rows``, rows of the batch's ``embedded`` tokens are its ``embeddings``, not scaled.
    """

    table: Weight
    scale: float = 1.0
    columns: range | None = None
    by_position: bool = False
    takes_rows: bool = False

    @cached_property
    def result(self) -> Tensor:
        g.check_dimensions(self.table, 2)
        width = self.table.shape[1]
        if self.columns is not None and not 0 <= self.columns.start < self.columns.stop <= width:
            raise KernelError(
                f"a table of {width} columns has no columns {self.columns.start} to {self.columns.stop}"
            )
        return Tensor(Rows.TOKENS, width if self.columns is None else len(self.columns))


class NgramEmbed(Operation[Tensor]):
    """Rows of a table [., d] selected by hashes of the n-grams that end with each token: [T, heads * d].

    The first two of the n ``multipliers`` are for n-grams of two tokens, and so on. Ids, starting with the token
    itself, are multiplied by the multipliers in 64 bits and joined by XOR. The row numbers are the results modulo the
    ``sizes`` of the n-gram's heads, plus their ``offsets``. Each n has the same number of heads. Positions before the
    sequence count as the token ``end``, and so do positions before such a token. ``state`` [n - 1] keeps the last
    ids.

    The table is larger than memory, so the host reads rows from its file. Source: Qwen 3.8 Flash Next.
    """

    table: Weight
    state: RecurrentState
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Empty: the table stays in its file."""
        return ()

    @cached_property
    def result(self) -> Tensor:
        g.check_dimensions(self.table, 2)
        n, n_heads, (n_rows, width) = len(self.multipliers), len(self.sizes), self.table.shape
        if n < 2 or n_heads != len(self.offsets) or n_heads % (n - 1) or self.state.shape != (n - 1,):
            raise KernelError(f"{n_heads} heads and a state {list(self.state.shape)} do not fit n-grams of up to {n}")
        ranges = [(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True)]
        if not all(0 <= first < stop <= n_rows for first, stop in ranges) or not all(
            0 <= x < 1 << 64 for x in self.multipliers
        ):
            raise KernelError(
                f"n-grams are hashed to rows that tensor {self.table.name}, of {n_rows:,}, does not have"
            )
        return Tensor(Rows.TOKENS, n_heads * width)

    def numbers(self, before: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.int64]:
        """Return the row numbers [T, heads] of ``ids``, which follow the tokens ``before``."""
        n = len(self.multipliers)
        history = np.concatenate([np.full(n - 1, self.end), before, ids]).astype(np.int64)
        is_end = history == self.end
        positions = np.arange(len(history) - len(ids), len(history))
        mixed, cut = history[positions].astype(np.uint64) * np.uint64(self.multipliers[0]), np.zeros(len(ids), bool)
        numbers, per_n = [], len(self.sizes) // (n - 1)
        for i in range(1, n):
            cut |= is_end[positions - i]
            previous_ids = np.where(cut, self.end, history[positions - i]).astype(np.uint64)
            mixed = mixed ^ (previous_ids * np.uint64(self.multipliers[i]))
            heads = slice((i - 1) * per_n, i * per_n)
            sizes, offsets = (np.array(x[heads], np.uint64) for x in (self.sizes, self.offsets))
            numbers.append(mixed[:, None] % sizes + offsets)
        return np.concatenate(numbers, axis=1).astype(np.int64)


class AdapterWeights(Operation[Tensor]):
    """Weight of each adapter for each token, [T, sum of widths].

    The values between an adapter's two matrices are multiplied by its weight. ``adapters`` lists, for each adapter,
    its number in the batch and the number of these values.

    Source: LoRA, arXiv:2106.09685.
    """

    adapters: tuple[tuple[int, int], ...]

    @cached_property
    def result(self) -> Tensor:
        return Tensor(Rows.TOKENS, sum(width for _, width in self.adapters))

    def rows(self, weights: NDArray[np.float32], n_tokens: int) -> NDArray[np.float32]:
        """Return the result for a batch's weights [T, adapters]; zeros for [0, 0]."""
        numbers, widths = zip(*self.adapters, strict=True)
        if not weights.size:
            return np.zeros((n_tokens, sum(widths)), np.float32)
        if len(weights) != n_tokens or weights.shape[1] <= max(numbers):
            raise KernelError(f"a batch of {n_tokens} tokens has weights {list(weights.shape)} of adapters")
        return np.repeat(weights[:, list(numbers)], widths, axis=1)


def _check_groups(width: int, n_groups: int) -> None:
    if n_groups < 1 or width % n_groups or (n_groups > 1 and width // n_groups % 16):
        raise KernelError(f"{width} values are not {n_groups} groups of a multiple of 16 values")


class RMSNorm(SameShape):
    """x / sqrt(mean(x²) + eps) * weight over the last axis, or over ``n_groups`` equal parts.

    The weight contains a value per value of x, or per value of a group, shared by all groups. None: no weight. With
    several groups, their width must be a multiple of 16. Source: arXiv:1910.07467.
    """

    weight: Weight | None
    eps: float
    n_groups: int = 1

    def check(self) -> None:
        width, n_groups = self.x.width, self.n_groups
        _check_groups(width, n_groups)
        if self.weight is not None and self.weight.shape != (width // n_groups,):
            g.check_shape(self.weight, width)


class LayerNorm(SameShape):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over each row, or over ``n_groups`` equal parts of a row.

    Weight and bias contain a value per value of x. With several groups, their width must be a multiple of 16.
    Source: arXiv:1607.06450.
    """

    weight: Weight
    bias: Weight | None
    eps: float
    n_groups: int = 1

    def check(self) -> None:
        _check_groups(self.x.width, self.n_groups)
        g.check_shape(self.weight, self.x.width)
        g.check_shape(self.bias, self.x.width)


class Add(SameShape):
    """residual + scale * x or, with ``gate`` [rows, 1], residual + scale * σ(gate) * x.

    The gate belongs to a shared expert (Qwen2-MoE). `Linear` adds an unscaled product to a residual itself.
    """

    residual: Tensor
    scale: float = 1.0
    gate: Tensor | None = None
    overwrites = "residual"

    def check(self) -> None:
        g.check_residual(self.residual, self.x.rows, self.x.width)
        if self.gate is not None:
            g.check_rows(self.x.rows, self.gate)
            if self.gate.width != 1:
                raise KernelError(f"rows are added with one gate each, not with {self.gate.width}")


class AddRows(SameShape):
    """x [T, d] plus, for a batch's ``embedded`` tokens, further embedding ``index`` (from 1) of ``embeddings``.

    Source: DeepStack, arXiv:2406.04334, as used by Qwen3-VL.
    """

    index: int
    consumes = ("x",)

    def check(self) -> None:
        g.check_rows(Rows.TOKENS, self.x)
        if self.index < 1:
            raise KernelError(f"the index of further embeddings must be at least 1, not {self.index}")


class Columns(Operation[Tensor]):
    """A range of columns of x. Its start and its length must be multiples of 16."""

    x: Tensor
    columns: range

    @cached_property
    def result(self) -> Tensor:
        first, stop = self.columns.start, self.columns.stop
        if not 0 <= first < stop <= self.x.width or first % 16 or stop % 16:
            raise KernelError(f"columns {first} to {stop} of {self.x.width} cannot be selected: use multiples of 16")
        return Tensor(self.x.rows, stop - first)


class SideBySide(Operation[Tensor]):
    """Several tensors concatenated along the columns. Each must have a multiple of 16 columns."""

    tensors: tuple[Tensor, ...]

    @cached_property
    def result(self) -> Tensor:
        g.check_rows(self.tensors[0].rows, *self.tensors)
        if any(x.width % 16 for x in self.tensors):
            raise KernelError(f"rows of {[x.width for x in self.tensors]} columns must all be multiples of 16")
        return Tensor(self.tensors[0].rows, sum(x.width for x in self.tensors))


class RootMeanSquare(Operation[Tensor]):
    """√mean(x²) of each row: [rows, 1]."""

    x: Tensor

    @cached_property
    def result(self) -> Tensor:
        return Tensor(self.x.rows, 1)


class AboveDeviation(SameShape):
    """max(0, x - mean(x) - factor * √var(x)), over the last axis.

    Source: Gemma 3n's sparse activations, after Spark Transformer, arXiv:2506.06644.
    """

    factor: float


class Scale(SameShape):
    """factor * x, or factor * weight * x for a weight of one value."""

    factor: float = 1.0
    weight: Weight | None = None
    overwrites = "x"

    def check(self) -> None:
        g.check_shape(self.weight, 1)


class Linear(Operation[Tensor]):
    """x @ W.T + bias (+ residual): [rows, n_out]."""

    x: Tensor
    matrix: Matrix
    residual: Tensor | None = None
    overwrites = "residual"

    @cached_property
    def result(self) -> Tensor:
        g.check_shape(self.matrix.weight, self.matrix.n_out, self.x.width)
        if self.residual is not None:
            g.check_residual(self.residual, self.x.rows, self.matrix.n_out)
        return Tensor(self.x.rows, self.matrix.n_out)


class Linears(Operation[tuple[Tensor, ...]]):
    """Products of several matrices with one input, such as query, key and value, or gate and up."""

    x: Tensor
    matrices: tuple[Matrix, ...]

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        for matrix in self.matrices:
            g.check_shape(matrix.weight, matrix.n_out, self.x.width)
        return tuple(Tensor(self.x.rows, matrix.n_out) for matrix in self.matrices)


class HeadLinear(Operation[Tensor]):
    """Each head of x [rows, H * dim] times its own matrix: [rows, H * n] for weight [H, n_out, n_in].

    Only the first n_in values of a head are multiplied. The remaining values are appended unchanged to the n_out
    results: n = n_out + dim - n_in. n_out, n_in and dim - n_in must be multiples of 32.

    Attention over latents (MLA) uses it to project queries, except their rotated part, into the latent space, and to
    project the result back. Source: DeepSeek-V2, arXiv:2405.04434 ("absorb").
    """

    x: Tensor
    weight: Weight

    @property
    def n_rest(self) -> int:
        """Values of each head that are not multiplied."""
        return self.x.width // self.weight.shape[0] - self.weight.shape[2]

    @cached_property
    def result(self) -> Tensor:
        g.check_dimensions(self.weight, 3)
        n_heads, n_out, n_in = self.weight.shape
        if self.x.width % n_heads or self.n_rest < 0 or n_in % 32 or n_out % 32 or self.n_rest % 32:
            raise KernelError(
                f"matrices {[n_out, n_in]} cannot multiply {n_heads} heads in rows of {self.x.width} values: those "
                "have at least as many, and all sizes are multiples of 32"
            )
        return Tensor(self.x.rows, n_heads * (n_out + self.n_rest))


class Gated(Operation[Tensor]):
    """activation(gate) * up; ``activation`` is one of `ACTIVATIONS`.

    "gelu" is the tanh approximation, and "relu2" is relu(gate)². "clamped_swiglu" is gpt-oss's
    g * σ(1.702 g) * (u + 1) with g at most 7 and u within ±7. Source: arXiv:2002.05202.
    """

    gate: Tensor
    up: Tensor
    activation: str
    overwrites = "gate"

    @cached_property
    def result(self) -> Tensor:
        g.check_choice("activation", self.activation, ACTIVATIONS)
        g.check_rows(self.gate.rows, self.up)
        if self.gate.width != self.up.width:
            raise KernelError(f"a gate of {self.gate.width} values does not fit {self.up.width} values")
        return Tensor(self.gate.rows, self.gate.width)


class HeadGate(SameShape):
    """Each head of x [T, H * dim] times activation(gate [T, H]), one of `HEAD_GATES`; dim is a multiple of 16.

    Source: gated attention, arXiv:2505.06708, per head.
    """

    gate: Tensor
    activation: str
    overwrites = "x"

    def check(self) -> None:
        g.check_choice("gate of heads", self.activation, HEAD_GATES)
        g.check_rows(self.x.rows, self.gate)
        if self.x.width % (16 * self.gate.width):
            raise KernelError(f"{self.x.width} values are not {self.gate.width} heads of a multiple of 16 values")


class Activation(SameShape):
    """activation(x), one of `UNGATED`, or "sigmoid" for rows of a multiple of 32 values.

    Rows are padded with zeros to a multiple of 32 values, and σ(0) is not 0.
    """

    activation: str
    overwrites = "x"

    def check(self) -> None:
        g.check_choice("activation without a gate", self.activation, (*UNGATED, "sigmoid"))
        if self.activation == "sigmoid" and self.x.width % 32:
            raise KernelError(f"a sigmoid of {self.x.width} values needs a multiple of 32")


class Clamp(SameShape):
    """x clipped to ``low`` … ``high``, a range with 0; infinities mean no bound."""

    low: float
    high: float
    overwrites = "x"

    def check(self) -> None:
        if not (self.low < self.high and self.low <= 0 <= self.high):  # the padding of rows stays 0
            raise KernelError(f"values cannot be clamped to {self.low:g} … {self.high:g}: the range must contain 0")


class XIELU(SameShape):
    """p x² + β x if x > 0, else n (exp(min(x, ε)) - 1 - x) + β x. Source: arXiv:2411.13010."""

    p: float
    n: float
    beta: float
    eps: float
    overwrites = "x"


class Softcap(SameShape):
    """cap * tanh(x / cap), for logits. Source: Gemma 2, arXiv:2408.00118."""

    cap: float
    overwrites = "x"

    def check(self) -> None:
        g.check_softcap(self.cap)


class Outputs(Operation[Tensor]):
    """The rows of x [T, d] whose logits are computed: [N, d].

    With ``n_joined``, each row is concatenated with the following n_joined - 1 rows: [N, n_joined * d]. With
    ``is_mean``, their mean is computed: [N, d]. Image encoders merge neighbouring patches in this way.
    """

    x: Tensor
    n_joined: int = 1
    is_mean: bool = False

    @cached_property
    def result(self) -> Tensor:
        g.check_rows(Rows.TOKENS, self.x)
        if self.n_joined < 1:
            raise KernelError(f"{self.n_joined} rows cannot be joined: give at least 1")
        return Tensor(Rows.OUTPUTS, self.x.width * (1 if self.is_mean else self.n_joined))


class HostEdit(SameShape):
    """x after the host changed it (`localllm.kernels.backend.Batch.edit`), while the program waits.

    ``base`` is the residual stream before a block whose output is x - base.
    """

    name: str  # name of the value, for the host
    base: Tensor | None = None
    consumes = ("x",)

    def check(self) -> None:
        if self.base is not None:
            g.check_residual(self.base, self.x.rows, self.x.width)
