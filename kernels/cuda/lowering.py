"""A graph as calls of the CUDA kernels: for each operation those that compute it.

Nothing is launched here, and no memory is needed: `lower` also tells what a step will take before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from localllm.errors import KernelError
from localllm.kernels import graph as g
from localllm.kernels.backend import check_operations
from localllm.kernels.buffers import Buffer, assign
from localllm.kernels.cuda import calls
from localllm.kernels.cuda import experts as expert_calls
from localllm.kernels.cuda import recurrent as recurrent_calls
from localllm.kernels.cuda.arena import (
    Call,
    Inputs,
    Mixture,
    StepLimits,
    Stored,
    buffers_of,
    input_kind,
    new_inputs,
    padded,
)
from localllm.kernels.cuda.batch import N_OUTPUTS, N_PLACES, N_TOKENS
from localllm.kernels.cuda.calls import TopK
from localllm.kernels.cuda.experts import ChosenExperts
from localllm.kernels.cuda.matmul import PackedFormat
from localllm.kernels.cuda.weights import PackedMatrix, PackedWeights
from localllm.kernels.graph import Graph, Rows, Tensor, Value, Weight

_SLOTS = {Rows.TOKENS: N_TOKENS, Rows.OUTPUTS: N_OUTPUTS, Rows.CHOSEN: N_PLACES}


@dataclass(frozen=True)
class Lowered:
    """Calls whose buffers have their offsets.

    Attributes:
        limits: what the calls have in common.
        hidden: where hidden states that another device computed are put, if the graph begins with them.
        embeds: what is looked up in tables.
        top_k: what finds the largest of the result, if that is logits.
        arena_bytes: what all buffers take.
    """

    limits: StepLimits
    calls: list[Call]
    hidden: Stored | None
    result: Stored
    embeds: list[g.Embed]
    top_k: TopK | None
    arena_bytes: int


def lower(graph: Graph, weights: PackedWeights, limits: StepLimits) -> Lowered:
    """The calls of a graph.

    Raises:
        KernelError: there are no kernels for an operation, or for a weight's type.
    """
    check_operations(graph, _LOWERINGS, "cuda")
    return _Lowering(graph, weights, limits).lower()


class _Lowering:
    def __init__(self, graph: Graph, weights: PackedWeights, limits: StepLimits) -> None:
        self.graph, self.weights, self.limits = graph, weights, limits
        self.last_uses = graph.last_uses()
        self.node = 0
        self.calls: list[Call] = []
        self.stored: dict[Value, Any] = {}
        #: Rows as products with weights of a kind of formats read them.
        self.inputs: dict[tuple[Tensor, str], Inputs] = {}
        self.hidden: Stored | None = None
        self.embeds: list[g.Embed] = []

    def lower(self) -> Lowered:
        for i, node in enumerate(self.graph.nodes):
            self.node, operation = i, node.operation
            result = _LOWERINGS[type(operation)](self, operation)
            results = result if isinstance(result, tuple) else (result,)
            self.stored.update(zip(operation.results, results, strict=True))
        result = self.stored[self.graph.result]
        found = calls.fused(self.calls, result)
        is_logits = self.graph.result.rows is Rows.OUTPUTS
        top_k = TopK.of(self.limits, result) if is_logits else None
        # What a step begins with is there before its calls; what finds the largest logits comes behind them.
        begin = [] if self.hidden is None else [self.hidden.buffer]
        end = [result.buffer] if top_k is None else buffers_of(top_k)
        kept = [self.limits.batch.buffer, *(buffer for _, buffer in self.limits.ropes)]
        n_bytes = assign([begin, *map(buffers_of, found), end], kept)
        return Lowered(self.limits, found, self.hidden, result, self.embeds, top_k, n_bytes)

    # -- Memory ----------------------------------------------------------------------------------------------------

    def new(self, rows: Rows, width: int) -> Stored:
        """Memory for a tensor."""
        slot = _SLOTS[rows]
        return Stored(self.limits.arena, Buffer(4 * padded(width) * self.limits.max_rows(slot)), width, slot)

    def in_place(self, op: g.Linear | g.ExpertOutput) -> Stored:
        """Memory for a sum: that of the residual, if nothing reads it any more."""
        if op.residual is None or self.last_uses[op.residual] > self.node:
            return self.new(op.result.rows, op.result.width)
        return _same_place(self.stored[op.residual])

    def inputs_of(self, x: Tensor, format: PackedFormat) -> Inputs:
        """The rows of a tensor as products with weights of a format read them; added by the first that does."""
        key = x, input_kind(format)
        if key not in self.inputs:
            rows: Stored = self.stored[x]
            inputs = new_inputs(self.limits.arena, format, self.limits.max_rows(rows.slot), rows.width)
            self.inputs[key] = inputs
            self.calls.append(calls.Quantise(self.limits.batch, format, rows, inputs))
        return self.inputs[key]

    def vector(self, weight: Weight) -> Any:
        return self.weights.vector(weight)

    # -- Rows ------------------------------------------------------------------------------------------------------

    def input(self, op: g.Input) -> Stored:
        self.hidden = self.new(Rows.TOKENS, op.x.width)
        return self.hidden

    def embed(self, op: g.Embed) -> Stored:
        y, table = self.new(Rows.TOKENS, op.result.width), self.weights.matrix(op.table)
        self.embeds.append(op)
        columns = op.columns or range(table.n_in)
        self.calls.append(calls.Embed(self.limits.batch, table, columns, op.scale, op.by_position, y))
        return y

    def rms_norm(self, op: g.RMSNorm) -> Stored:
        y = self.new(op.x.rows, op.x.width)
        step = 0 if op.weight is None or op.weight.shape != (op.x.width,) else op.x.width // op.n_groups
        x, weight = self.stored[op.x], self.weights.vector(op.weight)
        self.calls.append(calls.Norm(self.limits.batch, x, weight, op.eps, op.n_groups, step, y))
        return y

    def layer_norm(self, op: g.LayerNorm) -> Stored:
        y = self.new(op.x.rows, op.x.width)
        weights = self.vector(op.weight), self.weights.vector(op.bias)
        self.calls.append(calls.LayerNorm(self.limits.batch, self.stored[op.x], *weights, op.eps, y))
        return y

    def gated(self, op: g.Gated) -> Stored:
        gate, up, y = self.stored[op.gate], self.stored[op.up], self.new(op.gate.rows, op.gate.width)
        self.calls.append(calls.Gate(self.limits.batch, gate, up, op.activation, y))
        return y

    def activation(self, op: g.Activation) -> Stored:
        y = self.new(op.x.rows, op.x.width)
        self.calls.append(calls.Gate(self.limits.batch, self.stored[op.x], None, op.activation, y))
        return y

    def add(self, op: g.Add) -> Stored:
        y = self.new(op.x.rows, op.x.width)
        x, residual = self.stored[op.x], self.stored[op.residual]
        gate = None if op.gate is None else self.stored[op.gate]
        self.calls.append(calls.Add(self.limits.batch, x, op.scale, None, gate, residual, y))
        return y

    def scale(self, op: g.Scale) -> Stored:
        y = self.new(op.x.rows, op.x.width)
        weight = self.weights.vector(op.weight)
        self.calls.append(calls.Add(self.limits.batch, self.stored[op.x], op.factor, weight, None, None, y))
        return y

    def softcap(self, op: g.Softcap) -> Stored:
        y = self.new(op.x.rows, op.x.width)
        self.calls.append(calls.SoftCap(self.limits.batch, self.stored[op.x], op.cap, y))
        return y

    def outputs(self, op: g.Outputs) -> Stored:
        y = self.new(Rows.OUTPUTS, op.x.width)
        self.calls.append(calls.Gather(self.limits.batch, self.stored[op.x], y))
        return y

    # -- Products --------------------------------------------------------------------------------------------------

    def linear(self, op: g.Linear) -> Stored:
        matrix = self.weights.matrix(op.matrix.weight)
        inputs = self.inputs_of(op.x, matrix.packed)  # products read these, never the rows: also if those are changed
        y = self.in_place(op)
        residual = None if op.residual is None else self.stored[op.residual]
        self._multiply(op.x, inputs, [(op.matrix, matrix, y)], residual)
        return y

    def linears(self, op: g.Linears) -> tuple[Stored, ...]:
        results = tuple(self.new(op.x.rows, matrix.n_out) for matrix in op.matrices)
        matrices = [self.weights.matrix(matrix.weight) for matrix in op.matrices]
        inputs = {matrix.format: self.inputs_of(op.x, matrix.packed) for matrix in matrices}
        products = sorted(zip(op.matrices, matrices, results, strict=True), key=lambda product: product[1].format)
        for format, group in groupby(products, key=lambda product: product[1].format):
            self._multiply(op.x, inputs[format], list(group))
        return results

    def head_linear(self, op: g.HeadLinear) -> Stored:
        x, y, matrix = self.stored[op.x], self.new(op.x.rows, op.result.width), self.weights.matrix(op.weight)
        n_rows, (n_heads, _, n_in) = self.limits.max_rows(x.slot), op.weight.shape
        inputs = new_inputs(self.limits.arena, matrix.packed, n_rows, n_in, n_heads)
        self.calls.append(calls.MultiplyHeads(self.limits, op, x, inputs, matrix, y))
        return y

    def _multiply(
        self,
        x: Tensor,
        inputs: Inputs,
        products: Sequence[tuple[g.Matrix, PackedMatrix, Stored]],
        residual: Stored | None = None,
    ) -> None:
        biases = [self.weights.vector(matrix.bias) for matrix, _, _ in products]
        packed, results = [p for _, p, _ in products], [y for _, _, y in products]
        slot = _SLOTS[x.rows]
        self.calls.append(calls.Multiply(self.limits, slot, inputs, packed, biases, results, residual))

    # -- Attention -------------------------------------------------------------------------------------------------

    def rope_append(self, op: g.RopeAppend) -> Stored:
        q: Stored = self.stored[op.q]
        k, v = (None if x is None else self.stored[x] for x in (op.k, op.v))
        has_pairs = op.rope is not None and len(op.rope.frequencies)
        frequencies = self.limits.frequencies(op.rope) if op.rope is not None and has_pairs else None
        norms = [None if norm is None else self.weights.vector(norm.weight) for norm in op.norms]
        self.calls.append(calls.RopeAppend(self.limits, op, q, k, v, frequencies, norms))
        return _same_place(q)

    def attention(self, op: g.Attention) -> Stored:
        limits, y = self.limits, self.new(Rows.TOKENS, op.result.width)
        kind, sinks = limits.kind(op), self.weights.vector(op.sinks)
        variant = replace(kind.variant, soft_cap=op.softcap is not None, sinks=sinks is not None)
        settings = op.scale, op.softcap, sinks
        rows = self.stored[op.q], y, limits.new_partials()
        self.calls.append(calls.Attention(limits, kind, variant, op.cache, *settings, *rows))
        return y

    # -- Recurrent states ------------------------------------------------------------------------------------------

    def causal_conv(self, op: g.CausalConv) -> Stored:
        x, y = self.stored[op.x], self.new(Rows.TOKENS, op.x.width)
        weights = self.vector(op.weight), self.weights.vector(op.bias)
        self.calls.append(recurrent_calls.CausalConv(self.limits, x, *weights, op.state, op.silu, y))
        return y

    def gated_delta(self, op: g.GatedDelta) -> Stored:
        n_heads, d_k, d_v = op.state.shape
        keys, y = op.n_key_heads * d_k, self.new(Rows.TOKENS, n_heads * d_v)
        parts = g.side_by_side(op.qkv, (keys, keys, n_heads * d_v))
        per_group = n_heads // op.n_key_heads if op.is_grouped else 0
        rows = *(self.stored[x] for x, _ in parts), self.stored[op.decay], y, self.stored[op.beta]
        weights = self.vector(op.a), self.vector(op.dt_bias), None
        how = op.n_key_heads, per_group, op.is_per_channel, op.eps, d_k**-0.5
        self._recurrence(op.state, rows, parts, weights, how)
        return y

    def scan(self, op: g.Scan) -> Stored:
        n_heads, n, p = op.state.shape
        y = self.new(Rows.TOKENS, n_heads * p)
        x, b, c = g.side_by_side(op.xbc, (n_heads * p, op.n_groups * n, op.n_groups * n))
        rows = *(self.stored[part] for part, _ in (c, b, x)), self.stored[op.dt], y
        weights = self.vector(op.a), self.vector(op.dt_bias), self.vector(op.d)
        self._recurrence(op.state, rows, [c, b, x], weights, (op.n_groups, n_heads // op.n_groups, False, 0.0, 1.0))
        return y

    def _recurrence(self, state: Any, rows: Any, parts: Any, weights: Any, how: Any) -> None:
        places = tuple(first for _, first in parts)
        self.calls.append(recurrent_calls.Recurrence(self.limits, state, rows, places, *weights, *how))

    # -- Experts ---------------------------------------------------------------------------------------------------

    def route(self, op: g.Route) -> ChosenExperts:
        chosen = ChosenExperts(self.limits, Mixture(op.logits.width, op.k))
        scores, probabilities = self.stored[op.logits], None
        if not op.is_by_logits:
            logits, bias = scores, self.weights.vector(op.selection_bias)
            scores, probabilities = (self.new(Rows.TOKENS, logits.width) for _ in range(2))
            how = op.gating, bias, op.n_groups, op.n_top_groups, op.n_group_best
            self.calls.append(expert_calls.ExpertScores(self.limits, logits, *how, probabilities, scores))
        factors = self.weights.vector(op.expert_scales)
        self.calls.append(expert_calls.Route(scores, probabilities, op.norm_topk_prob, op.scale, factors, chosen))
        return chosen

    def expert_linears(self, op: g.ExpertLinears) -> tuple[Stored, ...]:
        chosen, x = self.stored[op.routing], self.stored[op.x]
        matrices = [self.weights.matrix(weight) for weight in op.experts]
        inputs = dict[str, Inputs]()
        for format in {input_kind(matrix.packed): matrix.packed for matrix in matrices}.values():
            rows = new_inputs(self.limits.arena, format, self.limits.max_rows(N_PLACES), x.width)
            inputs[input_kind(format)] = rows
            self.calls.append(expert_calls.Gather(chosen, format, x, rows))
        results = self._multiply_experts(chosen, matrices, [inputs[input_kind(matrix.packed)] for matrix in matrices])
        for i, y in enumerate(results):
            if op.biases or op.is_weighted:  # a weight counts before the bias: after the product it is the same
                bias = self.weights.vector(op.biases[i]) if op.biases else None
                self.calls.append(expert_calls.FinishExperts(chosen, op.is_weighted, bias, y))
        return results

    def expert_output(self, op: g.ExpertOutput) -> Stored:
        if op.residual is not None and self.last_uses[op.residual] > self.node:
            raise KernelError("the cuda backend adds what experts compute in place: nothing else may read that")
        chosen, matrix = self.stored[op.routing], self.weights.matrix(op.experts)
        [products] = self._multiply_experts(chosen, [matrix], [self.inputs_of(op.h, matrix.packed)])
        y = self.in_place(op)
        if op.bias is not None:
            self.calls.append(expert_calls.FinishExperts(chosen, False, self.weights.vector(op.bias), products))
        self.calls.append(expert_calls.AddExperts(chosen, products, op.is_weighted, op.residual is not None, y))
        return y

    def _multiply_experts(
        self, chosen: ChosenExperts, matrices: Sequence[PackedMatrix], inputs: Sequence[Inputs]
    ) -> tuple[Stored, ...]:
        """Products of rows by place, those of one format in one call."""
        results = tuple(self.new(Rows.CHOSEN, matrix.n_out) for matrix in matrices)
        for format in dict.fromkeys(matrix.format for matrix in matrices):
            own = [i for i, matrix in enumerate(matrices) if matrix.format == format]
            to = [results[i] for i in own]
            self.calls.append(expert_calls.MultiplyExperts(chosen, inputs[own[0]], [matrices[i] for i in own], to))
        return results


def _same_place(rows: Stored) -> Stored:
    """Rows that a call writes over others."""
    return replace(rows)


_LOWERINGS: dict[type[g.Operation[Any]], Callable[[_Lowering, Any], Any]] = {
    g.Input: _Lowering.input,
    g.Embed: _Lowering.embed,
    g.RMSNorm: _Lowering.rms_norm,
    g.LayerNorm: _Lowering.layer_norm,
    g.Add: _Lowering.add,
    g.Scale: _Lowering.scale,
    g.Activation: _Lowering.activation,
    g.CausalConv: _Lowering.causal_conv,
    g.GatedDelta: _Lowering.gated_delta,
    g.Scan: _Lowering.scan,
    g.Linear: _Lowering.linear,
    g.Linears: _Lowering.linears,
    g.HeadLinear: _Lowering.head_linear,
    g.RopeAppend: _Lowering.rope_append,
    g.Attention: _Lowering.attention,
    g.Gated: _Lowering.gated,
    g.Route: _Lowering.route,
    g.ExpertLinears: _Lowering.expert_linears,
    g.ExpertOutput: _Lowering.expert_output,
    g.Softcap: _Lowering.softcap,
    g.Outputs: _Lowering.outputs,
}
