"""Transitional: graphs on `CUDAOps`, which records forward passes by itself, until it lowers graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels import graph as g
from localllm.kernels.backend import (
    Backend,
    Batch,
    Cache,
    Footprint,
    Output,
    PackedWeight,
    Progress,
    Step,
    TopK,
    WeightUse,
    weights_of,
)
from localllm.kernels.cuda.cache import PAGE
from localllm.kernels.cuda.matmul import packed_format
from localllm.kernels.cuda.operations import MOST_CHOICES
from localllm.kernels.cuda.ops import CUDAOps
from localllm.kernels.graph import Graph, Weight
from localllm.kernels.ops import CacheShape, Hidden, HostHidden, StepSizes
from localllm.quant.repack import repack_target


class CUDABackend(Backend):
    """One CUDA device."""

    name = "cuda"
    page_size = PAGE

    def __init__(self, ops: CUDAOps) -> None:
        self.ops = ops

    def close(self) -> None:
        """Ends the threads that read files."""
        self.ops.close()

    def footprint(self, graph: Graph, *, n_pages: int, max_tokens: int, max_outputs: int) -> Footprint:
        weights = tuple(map(self._planned, weights_of(graph)))
        caches = {n: self.ops.cache_bytes(_shape([cache]), n_pages) for n, cache in graph.caches.items()}
        activations, logits = self.ops.step_bytes(_sizes(graph, n_pages, max_tokens, max_outputs))
        has_output = any(node.layer == "output" for node in graph.nodes)
        return Footprint(weights, caches, activations + (logits if has_output else 0))

    def _planned(self, use: WeightUse) -> PackedWeight:
        weight, kernel_type = use.weight, "F32"
        if len(weight.shape) > 1:
            capability = self.ops.driver.properties(self.ops.device).capability
            kernel_type = packed_format(repack_target(weight.type), capability).name
        return use.packed(kernel_type, self.ops.packed_bytes(weight))

    def compile(
        self, graph: Graph, *, n_pages: int, max_tokens: int, max_outputs: int, progress: Progress | None = None
    ) -> CUDAStep:
        model = _Loaded(graph)
        model.load(self.ops, progress)
        cache = self.ops.new_cache(_shape([*graph.caches.values()]), n_pages)
        part = self.ops.compile_part(
            lambda: model.forward(self.ops), cache, max_tokens=max_tokens, max_outputs=max_outputs
        )
        return CUDAStep(part, cache, tuple(model.packed))


def _shape(caches: Sequence[g.KVCache]) -> CacheShape:
    if not caches:
        return CacheShape(0, 1, 16)
    if len({(c.n_heads, c.head_dim, c.type) for c in caches}) > 1:
        raise KernelError("CUDA kernels keep heads of one kind: run the model's layers on the CPU")
    return CacheShape(len(caches), caches[0].n_heads, caches[0].head_dim, caches[0].type)


def _sizes(graph: Graph, n_pages: int, max_tokens: int, max_outputs: int) -> StepSizes:
    operations = [node.operation for node in graph.nodes]
    attention = next((op for op in operations if isinstance(op, g.Attention)), None)
    shape = _shape([*graph.caches.values()])
    routers = {op.logits for op in operations if isinstance(op, g.Route)}
    types = {
        weight.type
        for op in operations
        if isinstance(op, g.Linear | g.Linears | g.ExpertLinears | g.ExpertOutput) and op.result not in routers
        for weight in op.weights
        if len(weight.shape) > 1
    }
    routes = [op.result for op in operations if isinstance(op, g.Route)]
    result = graph.result
    hidden = next(op.result.width for op in operations if isinstance(op, g.Embed | g.Input))
    return StepSizes(
        n_embd=hidden,
        n_ff=max((op.gate.width for op in operations if isinstance(op, g.Gated)), default=hidden),
        n_vocab=result.width if result.rows is g.Rows.OUTPUTS else hidden,
        n_heads=shape.n_kv_heads if attention is None else attention.q.width // shape.head_dim,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        cache_type=shape.type,
        n_tokens=max_tokens,
        n_outputs=max_outputs,
        n_pages=n_pages,
        n_experts=max((r.n_experts for r in routes), default=0),
        n_chosen=graph.n_chosen(),
        types=frozenset(types),
    )


class CUDAStep(Step):
    """A program on the device."""

    max_top_k = MOST_CHOICES

    def __init__(self, part: Any, cache: Cache, weights: tuple[PackedWeight, ...]) -> None:
        self.program, self.cache, self.weights = part, cache, weights

    def run(self, batch: Batch, hidden: Output | None = None) -> Output:
        given: Hidden | None = None
        if isinstance(hidden, _CUDAOutput):
            given = hidden.hidden
        elif hidden is not None:
            given = HostHidden(hidden.rows())
        return _CUDAOutput(self.program(batch, given))


@dataclass(frozen=True)
class _CUDAOutput(Output):
    hidden: Hidden

    def rows(self) -> NDArray[Any]:
        return self.hidden.host()

    def top_k(self, k: int) -> TopK:
        return self.hidden.best(k)


@dataclass
class _Loaded:
    """A graph with its weights as the backend holds them."""

    graph: Graph
    held: dict[Weight, Any] = field(default_factory=dict)
    tables: dict[Weight, Any] = field(default_factory=dict)
    packed: list[PackedWeight] = field(default_factory=list)

    def load(self, ops: CUDAOps, progress: Progress | None) -> None:
        """Loads what the graph refers to."""
        matrices = [matrix for node in self.graph.nodes for matrix in _matrices(node.operation)]
        biases = {matrix.weight: matrix.bias for matrix in matrices if matrix.bias is not None}
        for use in weights_of(self.graph):
            weight, kernel_type, n_bytes = use.weight, "F32", ops.packed_bytes(use.weight)
            if weight not in biases.values():
                if len(weight.shape) == 1:
                    self.held[weight] = ops.load_vector(weight)
                elif len(weight.shape) == 2:
                    self.held[weight] = ops.load_linear(weight, biases.get(weight))
                else:
                    self.held[weight] = ops.load_experts(weight)
                if len(weight.shape) > 1:
                    kernel_type, n_bytes = self.held[weight].format, self.held[weight].n_bytes
            if use.is_table:
                self.tables[weight] = ops.load_embedding(weight, self.held[weight])
            weight.drop_pages()
            self.packed.append(use.packed(kernel_type, n_bytes))
            if progress is not None:
                progress(weight)

    def forward(self, ops: CUDAOps) -> Any:
        """Records what the graph does."""
        values: dict[g.Value, Any] = {}
        last = self.graph.last_uses()
        layers = {layer: i for i, layer in enumerate(sorted(self.graph.caches))}
        result: Any = None
        for i, node in enumerate(self.graph.nodes):
            op = node.operation
            result = self._run(ops, op, values, layers)
            values.update(zip(op.results, result if isinstance(op.result, tuple) else [result], strict=True))
            for x in {*op.inputs, *op.results}:
                if last[x] == i:
                    del values[x]
        return result

    def _run(self, ops: CUDAOps, op: g.Operation[Any], v: dict[g.Value, Any], layers: dict[int, int]) -> Any:
        w = self.held
        match op:
            case g.Input():
                return ops.hidden(op.x.width)
            case g.Embed():
                return ops.embed(self.tables[op.table], op.scale)
            case g.RMSNorm():
                return ops.rms_norm(v[op.x], w[op.weight], op.eps)
            case g.Linear():
                return ops.linear(v[op.x], w[op.matrix.weight], None if op.residual is None else v[op.residual])
            case g.Linears():
                return ops.linears(v[op.x], [w[matrix.weight] for matrix in op.matrices])
            case g.RopeAppend():
                q_norm, k_norm = (None if n is None else w[n] for n in (op.q_norm, op.k_norm))
                given = v[op.q], v[op.k], v[op.v], op.rope, layers[op.cache.layer]
                return ops.rope_append(*given, q_norm=q_norm, k_norm=k_norm, eps=op.eps)
            case g.Attention():
                sinks, layer = None if op.sinks is None else w[op.sinks], layers[op.cache.layer]
                settings: dict[str, Any] = {"window": op.window, "softcap": op.softcap, "sinks": sinks}
                return ops.attention(v[op.q], layer, scale=op.scale, **settings)
            case g.Gated():
                return ops.gated(v[op.gate], v[op.up], op.activation)
            case g.Route():
                return ops.route(v[op.logits], op.k, normalise=op.norm_topk_prob, scale=op.scale)
            case g.ExpertLinears():
                return ops.expert_linears(v[op.x], [w[e] for e in op.experts], v[op.routing])
            case g.ExpertOutput():
                return ops.expert_output(v[op.h], w[op.experts], v[op.routing], v[op.residual])
            case g.Softcap():
                return ops.softcap(v[op.x], op.cap)
            case g.Outputs():
                return ops.outputs(v[op.x])
        raise KernelError(f"the cuda backend cannot compute {type(op).__name__}: run the model on the CPU")


def _matrices(op: g.Operation[Any]) -> tuple[g.Matrix, ...]:
    if isinstance(op, g.Linear):
        return (op.matrix,)
    return op.matrices if isinstance(op, g.Linears) else ()
