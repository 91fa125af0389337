"""Transitional: runs a graph on a backend of the old `Ops` protocol, until all of them take graphs themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from localllm.errors import KernelError, NotEnoughMemoryError
from localllm.kernels import graph as g
from localllm.kernels.backend import weights_of
from localllm.kernels.graph import Layer, Weight
from localllm.kernels.ops import CacheShape, Loader, Ops
from localllm.models.config import ModelConfig
from localllm.models.registry import read_model
from localllm.models.weights import ModelFile

#: Called with the bytes packed so far and the bytes of all tensors.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedWeight:
    """A tensor as a backend holds it.

    Attributes:
        name: in the file.
        place: in the model.
        file_type: its format there, such as "IQ2_XS".
        kernel_type: the format that kernels read, such as "LUT_IQ2_16".
        n_bytes: what it takes in memory.
        planned_bytes: what was counted on; less where the format planned on cannot hold its values.
    """

    name: str
    place: Layer
    file_type: str
    kernel_type: str
    n_bytes: int
    planned_bytes: int

    @property
    def unplanned_bytes(self) -> int:
        """What it takes beyond that."""
        return max(0, self.n_bytes - self.planned_bytes)


@dataclass
class OpsModel:
    """A graph with its weights as the backend holds them."""

    config: ModelConfig
    graph: g.Graph
    spare_bytes: int | None
    held: dict[Weight, Any] = field(default_factory=dict)
    tables: dict[Weight, Any] = field(default_factory=dict)
    loaded: list[LoadedWeight] = field(default_factory=list)

    @property
    def weights(self) -> tuple[LoadedWeight, ...]:
        return tuple(self.loaded)

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.config.n_layers, self.config.n_kv_heads, self.config.head_dim)

    def load(self, ops: Ops, progress: Progress | None, n_bytes: int) -> None:
        """Loads what the graph refers to."""
        done = 0
        biases = {
            matrix.weight: matrix.bias
            for node in self.graph.nodes
            for matrix in _matrices(node.operation)
            if matrix.bias is not None
        }
        of_bias = set(biases.values())
        for use in weights_of(self.graph):
            weight, loader = use.weight, ops.at(use.layer)
            if weight in of_bias:
                self._hold(weight, use.layer, "F32", loader.packed_bytes(weight), loader)
            elif not use.is_operand:
                self.tables[weight] = loader.load_embedding(weight)
                self.loaded.append(
                    LoadedWeight(
                        weight.name,
                        use.layer,
                        weight.type.name,
                        weight.type.name,
                        weight.data.nbytes,
                        weight.data.nbytes,
                    )
                )
            elif len(weight.shape) == 1:
                self.held[weight] = loader.load_vector(weight)
                self._hold(weight, use.layer, "F32", loader.packed_bytes(weight), loader)
            else:
                widen = partial(self._widen, loader)
                if len(weight.shape) == 2:
                    packed: Any = loader.load_linear(weight, biases.get(weight), widening=widen)
                else:
                    packed = loader.load_experts(weight, widening=widen)
                self.held[weight] = packed
                self._hold(weight, use.layer, packed.format, packed.n_bytes, loader)
            weight.drop_pages()
            done += weight.data.nbytes
            if progress is not None:
                progress(done, n_bytes)
        for node in self.graph.nodes:
            if isinstance(node.operation, g.Embed) and (table := node.operation.table) not in self.tables:
                loader = ops.at("embedding")
                if loader is ops.at("output"):
                    self.tables[table] = loader.load_embedding(table, self.held[table])
                else:
                    self.tables[table] = loader.load_embedding(table)
                    size = table.data.nbytes
                    self.loaded.append(
                        LoadedWeight(table.name, "embedding", table.type.name, table.type.name, size, size)
                    )

    def _hold(self, weight: Weight, layer: Layer, kernel_type: str, n_bytes: int, loader: Loader) -> None:
        planned = loader.packed_bytes(weight)
        self.loaded.append(LoadedWeight(weight.name, layer, weight.type.name, kernel_type, n_bytes, planned))

    def _widen(self, loader: Loader, weight: Weight, kernel_type: str, n_bytes: int) -> None:
        """Takes what a weight needs beyond the plan from the bytes to spare."""
        if self.spare_bytes is None:
            return
        planned = loader.packed_bytes(weight)
        if n_bytes - planned > self.spare_bytes:
            raise NotEnoughMemoryError(
                f"tensor {weight.name} has scales beyond the range of float16, in which {weight.type.name} is read: "
                f"it would have to be kept in {kernel_type} and take {n_bytes / 1e9:.2f} GB instead of "
                f"{planned / 1e9:.2f} GB, but {max(0, self.spare_bytes) / 1e9:.2f} GB is to spare: close other "
                "programs, choose a smaller context, or another quantisation of the model"
            )
        self.spare_bytes -= n_bytes - planned

    def forward(self, ops: Ops) -> Any:
        """Logits [N, n_vocab] of the batch that ``ops`` is running."""
        values: dict[g.Value, Any] = {}
        last = self.graph.last_uses()
        result: Any = None
        for i, node in enumerate(self.graph.nodes):
            op = node.operation
            result = self._run(ops, op, values)
            values.update(zip(op.results, result if isinstance(op.result, tuple) else [result], strict=True))
            for x in {*op.inputs, *op.results}:
                if last[x] == i:
                    del values[x]
        return result

    def _run(self, ops: Ops, op: g.Operation[Any], v: dict[g.Value, Any]) -> Any:
        w = self.held
        match op:
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
                given = v[op.q], v[op.k], v[op.v], op.rope, op.cache.layer
                return ops.rope_append(*given, q_norm=q_norm, k_norm=k_norm, eps=op.eps)
            case g.Attention():
                sinks = None if op.sinks is None else w[op.sinks]
                return ops.attention(
                    v[op.q], op.cache.layer, scale=op.scale, window=op.window, softcap=op.softcap, sinks=sinks
                )
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
        raise KernelError(f"there is no operation {type(op).__name__} here")


def _matrices(op: g.Operation[Any]) -> tuple[g.Matrix, ...]:
    if isinstance(op, g.Linear):
        return (op.matrix,)
    return op.matrices if isinstance(op, g.Linears) else ()


def load_model(
    file: ModelFile,
    ops: Ops,
    config: ModelConfig,
    context: int,
    *,
    spare_bytes: int | None = None,
    progress: Progress | None = None,
) -> OpsModel:
    """Packs a model's weights for the backend ``ops``."""
    graph = read_model(file, context).graph
    model = OpsModel(config, graph, spare_bytes)
    model.load(ops, progress, sum(use.weight.data.nbytes for use in weights_of(graph)))
    return model
