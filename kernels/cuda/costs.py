"""What calls of a step cost at least: bytes that must cross a device's memory, and multiplications.

Each input is counted once, and each result.  Whatever reads a thing twice, or multiplies more than it must, shows as
time beyond the floor.  Which experts tokens go to is not known: all are taken to be as likely.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from localllm.kernels.backend import Batch
from localllm.kernels.cuda import calls
from localllm.kernels.cuda import experts as expert_calls
from localllm.kernels.cuda import recurrent as recurrent_calls
from localllm.kernels.cuda.arena import Call, Mixture, Stored
from localllm.kernels.cuda.attention import NO_WINDOW
from localllm.kernels.cuda.batch import N_OUTPUTS, N_PLACES, N_TOKENS
from localllm.kernels.cuda.matmul import EIGHT_BITS, PackedFormat
from localllm.kernels.cuda.roofline import Kind
from localllm.kernels.cuda.weights import PackedMatrix

_KINDS: dict[str, Kind | None] = {"F16": "f16", "BF16": "bf16", "F32": None}
_LAYER = re.compile(r"blk\.\d+\.")


@dataclass(frozen=True)
class Cost:
    """What something costs at least.

    Attributes:
        n_bytes: read and written.
        n_operations: a multiplication and an addition are two.
        kind: what is multiplied; None for what no tensor core does.
    """

    n_bytes: float = 0.0
    n_operations: float = 0.0
    kind: Kind | None = None

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.n_bytes + other.n_bytes, self.n_operations + other.n_operations, self.kind or other.kind)

    def seconds(self, bandwidth: float, rates: Mapping[Kind, float]) -> float:
        """The floor: nothing does it in less, on a device that moves and multiplies so much a second.

        Args:
            rates: operations a second, of every kind that there is.
        """
        products = 0.0 if self.kind is None else self.n_operations / rates[self.kind]
        return max(self.n_bytes / bandwidth, products)


@dataclass(frozen=True)
class BatchSizes:
    """The numbers of a batch that costs depend on.

    Attributes:
        n_tokens, n_outputs: of all sequences.
        sequences: of each, its tokens in the batch and its length in the cache with them.
        n_chosen: experts that a token goes to.
    """

    n_tokens: int
    n_outputs: int
    sequences: tuple[tuple[int, int], ...]
    n_chosen: int = 0

    @classmethod
    def of(cls, batch: Batch, mixture: Mixture | None = None) -> Self:
        sequences = tuple((stop - start, length) for start, stop, length in batch.sequences())
        return cls(len(batch.ids), len(batch.outputs), sequences, 0 if mixture is None else mixture.k)

    def rows(self, slot: int) -> int:
        """Rows of a tensor whose rows ``slot`` counts."""
        return {N_TOKENS: self.n_tokens, N_OUTPUTS: self.n_outputs, N_PLACES: self.n_tokens * self.n_chosen}[slot]

    def seen(self, window: int) -> tuple[int, int]:
        """Positions that tokens see, each token's own; and those that any token of a sequence sees."""
        pairs = positions = 0
        for n, length in self.sequences:
            first = length - n
            pairs += sum(min(position + 1, window) for position in range(first, length))
            positions += length - max(0, first + 1 - window)
        return pairs, positions


def describe(call: Call) -> str:
    """What a call is called in a profile; the same for that of each layer."""
    match call:
        case calls.Multiply(weights=weights):
            return f"linear {_names(weights)} {weights[0].format}"
        case calls.MultiplyHeads(weight=weight):
            return f"heads {_names([weight])} {weight.format}"
        case expert_calls.MultiplyExperts(weights=weights):
            return f"experts {_names(weights)} {weights[0].format}"
        case expert_calls.Gather():
            return "gather for experts"
        case expert_calls.AddExperts():
            return "add experts"
        case calls.Norm(y=Stored()) | calls.Gate(y=Stored()):
            return type(call).__name__.lower()
        case calls.Norm() | calls.Gate():
            return f"{type(call).__name__.lower()} + quantise"
        case calls.RopeAppend():
            return "rope + append"
        case calls.Attention(kind=kind) if kind.heads.window < NO_WINDOW:
            return f"attention, window {kind.heads.window}"
    return type(call).__name__.lower()


def _names(weights: Sequence[PackedMatrix]) -> str:
    return "+".join(dict.fromkeys(_LAYER.sub("", w.name).removesuffix(".weight") or "?" for w in weights))


def cost(call: Call, sizes: BatchSizes) -> Cost | None:
    """What a call costs for a batch; None where that is not known."""
    match call:
        case calls.Multiply(slot=slot):
            return _product(call, sizes.rows(slot))
        case calls.MultiplyHeads(weight=weight, x=x, y=y):
            n, format = sizes.rows(x.slot), weight.packed
            n_heads, n_out, n_in = call.op.weight.shape
            n_bytes = weight.n_bytes + n * (_row(x) + _row(y)) + 2 * n_heads * _input_bytes(format, n_in, n)
            return Cost(n_bytes, 2 * n * n_heads * n_out * n_in, _KINDS.get(format.name, "int8"))
        case calls.Attention():
            return _attention(call, sizes)
        case calls.RopeAppend(op=op, q=q, k=k, v=v):
            read = 2 * _row(q) + sum(_row(x) for x in (k, v) if x is not None)
            return Cost(sizes.n_tokens * (read + (op.cache.bytes_per_token() if k is not None else 0)))
        case calls.Embed(table=table, y=y):
            return Cost(sizes.n_tokens * (table.n_bytes / table.n_out + _row(y)))
        case calls.Gather(x=x, y=y):
            return Cost(sizes.n_outputs * (_row(x) + _row(y)))
        case calls.Norm(x=x):
            return Cost(sizes.rows(x.slot) * (_row(x) + _result(call, x)) + _row(x))
        case calls.Gate(gate=gate, up=up):
            return Cost(sizes.rows(gate.slot) * ((1 + (up is not None)) * _row(gate) + _result(call, gate)))
        case calls.LayerNorm(x=x) | calls.Add(x=x, residual=None):
            return Cost(sizes.rows(x.slot) * 2 * _row(x))
        case calls.Add(x=x):
            return Cost(sizes.rows(x.slot) * 3 * _row(x))
        case recurrent_calls.CausalConv(x=x, state=state):
            return Cost(sizes.n_tokens * 2 * _row(x) + len(sizes.sequences) * 8 * state.n_values)
        case recurrent_calls.Recurrence(state=state):  # a state is read and written
            n_heads, n_rows, n_columns = state.shape
            rows = 4 * (2 * n_heads * n_columns + 2 * call.n_groups * n_rows)
            return Cost(sizes.n_tokens * rows + len(sizes.sequences) * 8 * state.n_values)
        case calls.Quantise(x=x, format=format):
            n = sizes.rows(x.slot)
            return Cost(n * _row(x) + _input_bytes(format, x.width, n))
        case calls.SoftCap(x=x, y=y):
            return Cost(sizes.rows(x.slot) * (_row(x) + _row(y)))
        case expert_calls.MultiplyExperts():
            return _expert_product(call, sizes)
        case expert_calls.Route(logits=logits):  # ids, weights, places, and the tokens of these
            return Cost(sizes.n_tokens * _row(logits) + sizes.rows(N_PLACES) * 4 * 4)
        case expert_calls.Gather(x=x, format=format):
            n = sizes.rows(N_PLACES)
            return Cost(sizes.n_tokens * _row(x) + 4 * n + _input_bytes(format, x.width, n))
        case expert_calls.ExpertScores(logits=logits):
            return Cost(sizes.n_tokens * 3 * _row(logits))
        case expert_calls.FinishExperts(y=y):
            return Cost(sizes.rows(N_PLACES) * 2 * _row(y))
        case expert_calls.AddExperts(products=products, y=y):  # with places and weights
            return Cost(sizes.rows(N_PLACES) * (_row(products) + 8) + 2 * sizes.n_tokens * _row(y))
    return None


def _row(rows: Stored) -> int:
    """Bytes of a row of float32."""
    return 4 * rows.width


def _input_bytes(format: PackedFormat, n_in: int, n_rows: int) -> int:
    """Bytes of rows as products with weights of a format read them."""
    return format.unit_bytes(n_in, n_rows) + format.input_scale_bytes(n_in, n_rows)


def _result(call: calls.Norm | calls.Gate, x: Stored) -> int:
    """Bytes of a row of as many values as x has, written in float32 or in eight bits."""
    return _row(x) if isinstance(call.y, Stored) else _input_bytes(EIGHT_BITS, x.width, 1)


def _product(call: calls.Multiply, n: int) -> Cost:
    weights: list[PackedMatrix] = list(call.weights)
    format, n_in = weights[0].packed, weights[0].n_in
    n_out = sum(w.n_out for w in weights)
    results = 4 * n * n_out * (1 if call.residual is None else 2)
    n_bytes = sum(w.n_bytes for w in weights) + _input_bytes(format, n_in, n) + results
    return Cost(n_bytes, 2 * n * n_in * n_out, _KINDS.get(format.name, "int8"))


def _expert_product(call: expert_calls.MultiplyExperts, sizes: BatchSizes) -> Cost:
    weights, mixture, n = list(call.weights), call.chosen.mixture, sizes.rows(N_PLACES)
    format, n_in = weights[0].packed, weights[0].n_in
    n_out = sum(w.n_out for w in weights)
    used = 1 - (1 - mixture.k / mixture.n) ** sizes.n_tokens  # that of all experts: the others are not read
    n_bytes = used * sum(w.n_bytes for w in weights) + _input_bytes(format, n_in, n) + 4 * n * n_out
    return Cost(n_bytes, 2 * n * n_in * n_out, _KINDS.get(format.name, "int8"))


def _attention(call: calls.Attention, sizes: BatchSizes) -> Cost:
    pairs, positions = sizes.seen(call.kind.heads.window)
    n_bytes = sizes.n_tokens * (_row(call.q) + _row(call.y))
    n_bytes += positions * call.kept.bytes_per_token()
    return Cost(n_bytes, 4 * pairs * call.q.width, "f16")  # query times key, and weight times value
