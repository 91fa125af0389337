"""The `Ops` protocol on a CUDA device.

Nothing runs while a forward pass is recorded: each operation takes buffers, adds to a list, and returns the buffer
that will be written.  `localllm.kernels.cuda.program` runs the list for batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from localllm.errors import KernelError
from localllm.kernels.checks import (
    check_append,
    check_choice,
    check_experts,
    check_gate,
    check_norm,
    check_product,
    check_queries,
    check_residual,
    check_routing,
    check_sinks,
    check_softcap,
    check_tensors,
)
from localllm.kernels.cuda.attention import NO_WINDOW, Heads
from localllm.kernels.cuda.batch import N_OUTPUTS, N_PLACES, N_TOKENS
from localllm.kernels.cuda.cache import PAGE, CacheLayout, CUDACache
from localllm.kernels.cuda.driver import CompileProgress, Driver
from localllm.kernels.cuda.experts import AddExperts, ChosenExperts, MultiplyExperts, Route
from localllm.kernels.cuda.experts import Gather as GatherExperts
from localllm.kernels.cuda.matmul import TILE_ROWS, PackedFormat
from localllm.kernels.cuda.operations import (
    MOST_CHOICES,
    Attention,
    Embed,
    Gate,
    Gather,
    Multiply,
    Norm,
    Quantise,
    RopeAppend,
    SoftCap,
)
from localllm.kernels.cuda.program import Program
from localllm.kernels.cuda.recording import (
    Buffer,
    Inputs,
    Mixture,
    Operation,
    Recording,
    Rows,
    input_bytes,
    input_kind,
    inputs_in,
)
from localllm.kernels.cuda.sizes import activation_bytes, logits_bytes
from localllm.kernels.cuda.weights import CHUNK_BYTES, CUDAExperts, CUDALinear, CUDAVector, WeightLoader
from localllm.kernels.ops import (
    Backend,
    CacheShape,
    Experts,
    KVCache,
    Linear,
    Part,
    Rope,
    Routing,
    Step,
    StepSizes,
    Tensor,
    Weight,
    WholeStep,
    Widening,
)

_GATES = {"silu": "gated_silu", "gelu": "gated_gelu"}
_ROWS = {N_TOKENS: "each token", N_OUTPUTS: "each output", N_PLACES: "each expert of a token"}


class CUDAOps(Backend):
    """The backend of one CUDA device.

    Args:
        driver: the devices.
        device: which of them.
        progress: called with (kernels compiled, kernels to compile) when kernels are not in the cache yet.
        compiles_ahead: whether `compile` compiles the kernels that batches of all sizes take.  Else they are compiled
            when they are first used.
        tile_rows: rows of activations that a block of a matrix product may take, the larger first.
        chunk_bytes: of weights that are uploaded at once.

    Raises:
        DeviceError: there is no such device, or it is too old.
    """

    name = "cuda"
    page_size = PAGE
    most_choices = MOST_CHOICES

    def __init__(
        self,
        driver: Driver,
        device: int,
        *,
        progress: CompileProgress | None = None,
        compiles_ahead: bool = True,
        tile_rows: Sequence[int] = TILE_ROWS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.driver, self.device = driver, device
        self._progress = progress
        self._compiles_ahead = compiles_ahead
        self._tile_rows = tuple(tile_rows)
        self._loader = WeightLoader(driver, device, chunk_bytes)
        self._recording: Recording | None = None

    # -- Loading ---------------------------------------------------------------------------------------------------

    def load_linear(
        self, weight: Weight, bias: Weight | None = None, *, widening: Widening | None = None
    ) -> CUDALinear:
        return self._loader.linear(weight, bias, widening)

    def load_experts(self, weight: Weight, *, widening: Widening | None = None) -> CUDAExperts:
        return self._loader.experts(weight, widening)

    def packed_bytes(self, weight: Weight) -> int:
        return self._loader.packed_bytes(weight)

    def load_vector(self, weight: Weight) -> CUDAVector:
        return self._loader.vector(weight)

    def load_embedding(self, weight: Weight, packed: Linear | None = None) -> CUDALinear:
        """A packed matrix, of which rows are decoded on the device."""
        if len(weight.shape) != 2:
            raise KernelError(f"an embedding table has rows and columns, not the shape {list(weight.shape)}")
        return packed if isinstance(packed, CUDALinear) else self._loader.linear(weight, None, None)

    def new_cache(self, shape: CacheShape, n_pages: int) -> CUDACache:
        layout = CacheLayout(shape, n_pages)
        memory, stream = self.driver.allocate(self.device, max(1, layout.n_bytes)), self.driver.stream(self.device)
        self.driver.fill(memory, 0, stream)
        self.driver.synchronize(stream)
        return CUDACache(memory, layout, self.driver, stream)

    def cache_bytes(self, shape: CacheShape, n_pages: int) -> int:
        return CacheLayout(shape, n_pages).n_bytes

    def step_bytes(self, sizes: StepSizes) -> tuple[int, int]:
        properties = self.driver.properties(self.device)
        return activation_bytes(sizes, properties), logits_bytes(sizes, properties)

    def close(self) -> None:
        """Ends the threads that read files."""
        self._loader.close()

    # -- Compiling -------------------------------------------------------------------------------------------------

    def compile(self, forward: Callable[[], Tensor], cache: KVCache, *, max_tokens: int, max_outputs: int) -> Step:
        def logits() -> Buffer:
            result: Buffer = forward()
            self._check_tensors(result, slot=N_OUTPUTS)
            return result

        return WholeStep(self._program(logits, cache, max_tokens, max_outputs))

    def compile_part(
        self, forward: Callable[[], Tensor], cache: KVCache, *, max_tokens: int, max_outputs: int
    ) -> Part:
        return self._program(forward, cache, max_tokens, max_outputs)

    def _program(self, forward: Callable[[], Tensor], cache: KVCache, max_tokens: int, max_outputs: int) -> Program:
        if not isinstance(cache, CUDACache) or cache.memory.device != self.device:
            raise KernelError(f"CUDA device {self.device} cannot use a {type(cache).__name__} that is not its own")
        self._loader.close()
        recording = Recording(self.driver, self.device, cache, max_tokens, max_outputs, self._tile_rows)
        self._recording = recording
        try:
            result: Buffer = forward()
            self._check_tensors(result)
            # The weights live as long as what refers to them: the forward function.
            program = Program(recording, result, forward)
        finally:
            self._recording = None
            # They refer to the recording: memory shall go with the last reference, not when cycles are collected.
            recording.operations.clear()
        if self._compiles_ahead:
            program.compile(self._progress)
        return program

    @property
    def _now(self) -> Recording:
        if self._recording is None:
            raise KernelError("operations of the CUDA backend run only inside a forward pass: see compile()")
        return self._recording

    def _add(self, operation: Operation) -> None:
        self._now.operations.append(operation)

    # -- Checks ----------------------------------------------------------------------------------------------------

    def _check_tensors(self, *tensors: Buffer, slot: int | None = None) -> None:
        check_tensors(tensors, Buffer, self._now, _ROWS, slot)

    def _check_linear(self, x: Buffer, weight: Linear) -> CUDALinear:
        if not isinstance(weight, CUDALinear) or weight.memory.device != self.device:
            raise KernelError(f"CUDA device {self.device} cannot use a {type(weight).__name__} that is not its own")
        check_product(weight, x.width, weight.n_out)
        return weight

    # -- Operations ------------------------------------------------------------------------------------------------

    def embed(self, table: CUDALinear, scale: float = 1.0) -> Buffer:
        recording = self._now
        x = Buffer(recording, N_TOKENS, table.n_in)
        recording.operands.append(table)
        recording.vocabularies.append(table.n_out)
        self._add(Embed(recording.batch, table, scale, x.written))
        return x

    def hidden(self, width: int) -> Buffer:
        x = Buffer(self._now, N_TOKENS, width)
        self._now.hidden = x.written
        return x

    def rms_norm(self, x: Buffer, weight: CUDAVector, eps: float) -> Buffer:
        recording = self._now
        self._check_tensors(x)
        check_norm(weight.n, x.width)
        y = Buffer(recording, x.slot, x.width, sources=[x])
        recording.operands.append(weight)
        self._add(Norm(recording.batch, x.read(), weight, eps, y.written))
        return y

    def linear(self, x: Buffer, weight: Linear, residual: Buffer | None = None) -> Buffer:
        self._check_tensors(x, *([] if residual is None else [residual]))
        w = self._check_linear(x, weight)
        if residual is None:
            y = Buffer(self._now, x.slot, w.n_out)
        else:
            check_residual(residual.width, w.n_out)
        inputs = self._inputs(x, w.packed)
        if residual is not None:
            residual.read()
            y = residual.changed()  # products read inputs, never the rows themselves: also if these are x
        self._multiply(x, inputs, [w], [y], residual=residual is not None)
        return y

    def linears(self, x: Buffer, weights: Sequence[Linear]) -> list[Buffer]:
        self._check_tensors(x)
        matrices = [self._check_linear(x, weight) for weight in weights]
        results = [Buffer(self._now, x.slot, w.n_out) for w in matrices]
        inputs = {w.packed.name: self._inputs(x, w.packed) for w in matrices}
        pairs = sorted(zip(matrices, results, strict=True), key=lambda pair: pair[0].packed.name)
        for name, group in groupby(pairs, key=lambda pair: pair[0].packed.name):
            ws, ys = zip(*group, strict=True)
            self._multiply(x, inputs[name], ws, ys, residual=False)
        return results

    def _inputs(self, x: Buffer, format: PackedFormat) -> Inputs:
        batch = self._now.batch

        def quantise(rows: Rows, inputs: Inputs) -> Operation:
            return Quantise(batch, format, rows, inputs)

        return x.inputs(format, quantise)

    def _multiply(
        self, x: Buffer, inputs: Inputs, weights: Sequence[CUDALinear], results: Sequence[Buffer], *, residual: bool
    ) -> None:
        recording = self._now
        recording.operands += weights
        self._add(Multiply(recording, x.slot, inputs, weights, [y.written for y in results], residual))

    def rope_append(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        rope: Rope | None,
        layer: int,
        *,
        q_norm: CUDAVector | None = None,
        k_norm: CUDAVector | None = None,
        eps: float = 0.0,
    ) -> Buffer:
        recording = self._now
        shape, norms = recording.cache.layout.shape, (q_norm, k_norm)
        self._check_tensors(q, k, v, slot=N_TOKENS)
        check_queries(q.width, layer, shape)
        check_append(k.width, v.width, rope, [norm.n for norm in norms if norm is not None], shape)
        recording.operands += [norm for norm in norms if norm is not None]
        if rope is not None:
            recording.phases(rope)  # uploaded now
        rows = q.read(), k.read(), v.read()
        self._add(RopeAppend(recording, *rows, rope, layer, norms, eps))
        return q.changed()

    def attention(
        self,
        q: Buffer,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: CUDAVector | None = None,
    ) -> Buffer:
        recording = self._now
        shape = recording.cache.layout.shape
        self._check_tensors(q, slot=N_TOKENS)
        check_queries(q.width, layer, shape)
        check_softcap(softcap)
        if sinks is not None:
            check_sinks(sinks.n, q.width // shape.head_dim)
            recording.operands.append(sinks)
        group_size = q.width // shape.head_dim // shape.n_kv_heads
        heads = Heads(shape.n_kv_heads, group_size, NO_WINDOW if window is None else min(window, NO_WINDOW))
        variant = replace(recording.use_heads(heads), soft_cap=softcap is not None, sinks=sinks is not None)
        y = Buffer(recording, N_TOKENS, q.width)
        self._add(Attention(recording, heads, variant, layer, scale, softcap, sinks, q.read(), y.written))
        return y

    def gated(self, gate: Buffer, up: Buffer, activation: str) -> Buffer:
        recording = self._now
        self._check_tensors(gate, up)
        check_gate(gate.width, up.width, activation, _GATES)
        y = Buffer(recording, gate.slot, gate.width, sources=[gate, up])
        self._add(Gate(recording.batch, gate.read(), up.read(), _GATES[activation], y.written))
        return y

    def route(self, logits: Buffer, k: int, *, normalise: bool, scale: float = 1.0) -> ChosenExperts:
        self._check_tensors(logits, slot=N_TOKENS)
        check_choice(k, logits.width)
        chosen = ChosenExperts(self._now, Mixture(logits.width, k))
        self._add(Route(logits.read(), normalise, scale, chosen))
        return chosen

    def expert_linears(self, x: Buffer, weights: Sequence[Experts], routing: Routing) -> list[Buffer]:
        recording = self._now
        self._check_tensors(x, slot=N_TOKENS)
        matrices = [self._check_experts(x, weight, routing) for weight in weights]
        inputs, taken, n_places = dict[str, Inputs](), [], recording.most_rows(N_PLACES)
        for format in {input_kind(w.packed): w.packed for w in matrices}.values():
            memory = recording.take(input_bytes(format, n_places, x.width))
            inputs[input_kind(format)] = inputs_in(memory, format, n_places, x.width)
            taken.append(memory)
            self._add(GatherExperts(routing, format, x.read(), inputs[input_kind(format)]))
        results = self._multiply_experts(matrices, [inputs[input_kind(w.packed)] for w in matrices], routing)
        recording.free += taken
        return results

    def expert_output(self, h: Buffer, weight: Experts, routing: Routing, residual: Buffer) -> Buffer:
        self._check_tensors(h, slot=N_PLACES)
        self._check_tensors(residual, slot=N_TOKENS)
        w = self._check_experts(h, weight, routing)
        check_residual(residual.width, w.n_out)
        products = self._multiply_experts([w], [self._inputs(h, w.packed)], routing)[0]
        residual.read()
        y = residual.changed()
        self._add(AddExperts(routing, products.read(), y.written))
        return y

    def _check_experts(self, x: Buffer, weight: Experts, routing: Routing) -> CUDAExperts:
        check_routing(routing, ChosenExperts, self._now)
        if not isinstance(weight, CUDAExperts) or weight.memory.device != self.device:
            raise KernelError(f"CUDA device {self.device} cannot use a {type(weight).__name__} that is not its own")
        check_experts(weight, x.width, routing.mixture.n)
        return weight

    def _multiply_experts(
        self, weights: Sequence[CUDAExperts], inputs: Sequence[Inputs], routing: ChosenExperts
    ) -> list[Buffer]:
        """Products of rows by place, those of one format in one operation."""
        recording = self._now
        results = [Buffer(recording, N_PLACES, w.n_out) for w in weights]
        recording.operands += weights
        for name in {w.packed.name: None for w in weights}:
            own = [i for i, w in enumerate(weights) if w.packed.name == name]
            to = [results[i].written for i in own]
            self._add(MultiplyExperts(routing, inputs[own[0]], [weights[i] for i in own], to))
        return results

    def softcap(self, x: Buffer, cap: float) -> Buffer:
        check_softcap(cap)
        self._check_tensors(x)
        y = Buffer(self._now, x.slot, x.width)
        self._add(SoftCap(self._now.batch, x.read(), cap, y.written))
        return y

    def outputs(self, x: Buffer) -> Buffer:
        recording = self._now
        self._check_tensors(x, slot=N_TOKENS)
        y = Buffer(recording, N_OUTPUTS, x.width)
        self._add(Gather(recording.batch, x.read(), y.written))
        return y
