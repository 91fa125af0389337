"""The blocks that architectures are assembled from.

A block takes the current layer and the block's input. It finds its weights by their names in GGUF files and adds its
operations in execution order. It adds no norm before or after itself, because architectures differ there most. With
``residual``, the block adds its output to that tensor. `localllm.kernels.graph` defines the letters of shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from localllm.errors import ModelError
from localllm.kernels import graph as g, operations as ops
from localllm.kernels.graph import Graph, Tensor, Weight
from localllm.models.config import Experts, FeedForward, Header, Heads, ModelMetadata
from localllm.models.mtp import record_block
from localllm.models.rope import make_rope
from localllm.models.weights import Repeated, Reshaped, Weights, slopes, split_rows
from localllm.quant.types import GGMLType

R = TypeVar("R", bound=Any)

#: Names of the outputs of attention, of recurrent blocks and of MLPs (`localllm.kernels.graph.Graph.names`), by the
#: last matrix of the block.
OUTPUT_MATRICES = {
    **dict.fromkeys(("attn_output", "attn_output_b", "attn_o"), "attention"),
    **dict.fromkeys(("ssm_out", "shortconv.out_proj", "time_mix_output"), "recurrent"),
    **dict.fromkeys(("ffn_down", "channel_mix_value"), "mlp"),
}


@dataclass(frozen=True)
class Layer:
    """The layer that is being recorded. Number -1 is the part of the model before or after all layers."""

    number: int  # counted from 0
    graph: Graph
    weights: Weights  # tensors of the layer, by their names without ``blk.{number}.``
    n_embd: int
    norm_eps: float
    embedding: Tensor  # input of the first layer [T, d]
    causal: bool = True  # whether tokens attend to earlier tokens only

    def add(self, operation: g.Operation[R]) -> R:
        """Record an operation, and return its result. Name its queries, keys, values, or its choice of experts."""
        result = self.graph.add(operation)
        recorded: g.Operation[Any] = operation
        match recorded:
            case ops.RopeAppend(q=q, k=k, v=v, cache=cache) if q is not k and not cache.is_index and not cache.number:
                for name, tensor in (("queries", q), ("keys", k), ("values", v)):
                    if tensor is not None:
                        self.graph.name(name, tensor)
            case ops.Route(logits=logits, result=routing):
                self.graph.name("router", logits)
                self.graph.name("experts", routing)
        return result

    def linear(self, x: Tensor, name: str, n_out: int, *, residual: Tensor | None = None) -> Tensor:
        """Return x times the matrix ``name``, plus the matrix's bias, if any.

        The product is named if the matrix is the last one of a block.
        """
        result = self.add(ops.Linear(x, self.weights.matrix(name, x.width, n_out), residual=residual))
        if name in OUTPUT_MATRICES:
            self.graph.name(OUTPUT_MATRICES[name], result, residual)
        return result


#: Records one layer with the input x [T, d], and returns the layer's output [T, d].
RecordLayer = Callable[[Layer, Tensor], Tensor]
#: Records the norm with this name.
RecordNorm = Callable[[Layer, str, Tensor], Tensor]
#: Selects the positions that tokens see, from a layer and the input of its attention. Returns the result of
#: `localllm.kernels.operations.IndexSelect` and whether each key/value head has a separate selection. None: all
#: positions.
Select = Callable[[Layer, Tensor], "tuple[Tensor, bool] | None"]


def norm(at: Layer, name: str, x: Tensor) -> Tensor:
    """RMSNorm of complete rows."""
    return at.add(ops.RMSNorm(x, at.weights.vector(name, x.width), at.norm_eps))


def layer_norm(at: Layer, name: str, x: Tensor, n_heads: int = 1) -> Tensor:
    """LayerNorm of complete rows, or of ``n_heads`` heads with separate weights. The bias is optional."""
    shape = (x.width,) if n_heads == 1 else (n_heads, x.width // n_heads)
    bias, weight = at.weights.find(f"{name}.bias", *shape), at.weights.vector(name, x.width, n_heads)
    if bias is not None and n_heads > 1:
        bias = Reshaped(bias, (x.width,))
    return at.add(ops.LayerNorm(x, weight, bias, at.norm_eps, n_heads))


def norm_by_head(at: Layer, name: str, x: Tensor, n_heads: int) -> Tensor:
    """RMSNorm of heads with separate weights [n_heads, dim], or with one weight per head [n_heads, 1], or without."""
    weight: Weight | None = None
    if f"{name}.weight" in at.weights:
        full = f"{name}.weight"
        if at.weights.shape(full)[-1:] == (1,):
            weight = Repeated(at.weights.require(full, n_heads, 1), x.width // n_heads)
        else:
            weight = at.weights.vector(name, x.width, n_heads)
    return at.add(ops.RMSNorm(x, weight, at.norm_eps, n_heads))


def add(at: Layer, x: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
    """Return residual + scale * x."""
    return at.add(ops.Add(x, residual, scale))


def read_softcap(m: Header, key: str) -> float | None:
    """Return the soft-cap of scores or logits from a metadata key, or None if the file has no soft-cap."""
    return m.meta.read(key, float, 0.0, low=0.0, high=1e6) or None


def read_q_scale(m: Header) -> g.PositionScale | None:
    """Return the factor on queries that grows with the logarithm of the position (Mistral), or None if unused."""
    rate = m.meta.read("attention.temperature_scale", float, 0.0, low=0.0, high=1e3)
    length = m.meta.read("attention.temperature_length", int, m.config.original_context, low=1, high=1 << 31)
    return g.PositionScale(rate, length) if rate else None


def decoder(
    m: Header,
    record_layer: RecordLayer,
    *,
    embedding_scale: float = 1.0,
    change_embedding: RecordLayer | None = None,
    output_norm: RecordNorm | None = norm,
    norm_eps: float | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    deepstack: Mapping[int, int] | None = None,
    n_loops: int = 1,
    norms_loops: bool = False,
    logit_bias: Weight | None = None,
) -> Graph:
    """Record a decoder: embedding, layers, final norm and head, from token ids to logits [N, n_vocab].

    An embedding model (`Header.pooling`) has no head, and its graph ends with the pooling's input [N, d]. If batches
    contain images, further embeddings of the images are added after the layers in ``deepstack``, which has the number
    of the embedding by layer. All layers run ``n_loops`` times with the same weights and with separate caches. With
    ``norms_loops``, the final norm follows each loop. ``logit_bias`` [n_vocab] is added to the logits.
    """
    config, weights, graph = m.config, m.weights, Graph(m.cache_type)
    d, eps = config.n_embd, m.norm_eps if norm_eps is None else norm_eps
    if m.is_block:

        def block(number: int, graph: Graph, e: Tensor, x: Tensor) -> Tensor:
            return record_layer(Layer(number, graph, weights.layer(number), d, eps, e, m.is_causal), x)

        return record_block(m, block, embedding_scale, eps)
    table = weights.require("token_embd.weight", config.n_vocab, d)
    x = embedding = graph.add(ops.Embed(table, embedding_scale, takes_rows=m.sees))
    if change_embedding is not None:
        x = embedding = change_embedding(Layer(-1, graph, weights, d, eps, x), x)
    graph.name("embedding", x)
    for place in range(config.n_layers * n_loops):
        i = place % config.n_layers
        graph.layer = place
        graph.name("input", x)
        if norms_loops and place and not i:
            x = norm(Layer(i, graph, weights, d, eps, embedding), "output_norm", x)
        x = record_layer(Layer(i, graph, weights.layer(i), d, eps, embedding, m.is_causal), x)
        graph.name("output", x)
        if m.sees and deepstack and place in deepstack:
            x = graph.add(ops.AddRows(x, deepstack[place]))
    graph.layer = "output"
    at = Layer(-1, graph, weights, d, eps, embedding)
    x = at.add(ops.Outputs(x))  # [N, d]
    if output_norm is not None:
        x = output_norm(at, "output_norm", x)
    graph.name("final_norm", x)
    if m.pooling is not None:
        weights.skip("output.weight")
        return graph
    head = weights.matrix("output", d, config.n_vocab, tied_to="token_embd")
    logits = at.add(ops.Linear(x, head if logit_bias is None else replace(head, bias=logit_bias)))
    if logit_scale != 1:
        logits = at.add(ops.Scale(logits, logit_scale))
    if softcap is not None:
        logits = at.add(ops.Softcap(logits, softcap))
    graph.name("logits", logits)
    return graph


def position_embedding(m: Header) -> RecordLayer:
    """Return a function that adds the learnt vector of each token's position to the token's embedding."""
    n_positions = m.config.context_length
    if m.context > n_positions:
        raise ModelError(f"the model has only {n_positions} positions: a context of {m.context} is too long")
    positions = m.weights.require("position_embd.weight", n_positions, m.config.n_embd)
    return lambda at, x: add(at, at.add(ops.Embed(positions, by_position=True)), x)


def llama_like(
    m: Header, rope: g.Rope | Sequence[g.Rope | None] | None = None, experts: Experts | None = None, **options: Any
) -> Graph:
    """Record a decoder with Llama's layers. `llama_layer` documents ``options``."""
    return decoder(m, llama_layer(m, rope, experts, **options))


def llama_layer(
    m: Header,
    rope: g.Rope | Sequence[g.Rope | None] | None = None,
    experts: Experts | None = None,
    *,
    interleaved: bool = False,
    windows: tuple[int | None, ...] | None = None,
    ffn_norm: str = "ffn_norm",
    activation: str = "silu",
    pre_norms: bool = True,
    post_norm_eps: float | None = None,
    limits: Sequence[tuple[float, float]] | None = None,
    **attention_options: Any,
) -> RecordLayer:
    """Llama's layer: attention, then feed-forward, with an RMSNorm before each.

    Args:
        rope: rotation of query and key, of all layers or one per layer; by default, `make_rope` with ``interleaved``.
        experts: None if every layer has an MLP.
        windows: window of each layer, from `Header.windows`; by default, no layer has a window.
        ffn_norm: name of the second norm.
        pre_norms: False for a layer that has only post-norms.
        post_norm_eps: epsilon of the norms after attention and feed-forward (``post_attention_norm``,
            ``post_ffw_norm``); None for a layer without post-norms.
        limits: limits of experts' gates in each layer, for `mixture`.
        attention_options: other arguments of `attention`.
    """
    heads, ffn = m.heads_of_layers(), m.feed_forward(experts)
    rope = make_rope(m, m.heads().key_dim, interleaved=interleaved) if rope is None else rope

    def layer(at: Layer, x: Tensor) -> Tensor:
        number = min(at.number, m.config.n_layers - 1)  # a block after the last layer uses its settings
        window = windows[number] if windows else None
        ffn_options: Any = {"activation": activation, "limits": limits[number] if limits else (0.0, 0.0)}
        own_heads, own_rope = heads[number], rope if isinstance(rope, g.Rope) else rope[number]
        y = norm(at, "attn_norm", x) if pre_norms else x
        if post_norm_eps is None:
            x = attention(at, y, own_heads, own_rope, residual=x, window=window, **attention_options)
            return feed_forward(at, norm(at, ffn_norm, x), ffn, residual=x, **ffn_options)
        behind = replace(at, norm_eps=post_norm_eps)
        y = attention(at, y, own_heads, own_rope, window=window, **attention_options)
        x = add(at, norm(behind, "post_attention_norm", y), x)
        y = feed_forward(at, norm(at, ffn_norm, x) if pre_norms else x, ffn, **ffn_options)
        return add(at, norm(behind, "post_ffw_norm", y), x)

    return layer


def gpt_like(
    m: Header,
    rope: g.Rope | None,
    *,
    activation: str,
    change_embedding: RecordLayer | None = None,
    is_parallel: bool = False,
    **attention_options: Any,
) -> Graph:
    """Record a decoder whose layers have LayerNorms and MLPs without a gate, as in GPT-2.

    ``is_parallel``: whether the MLP reads the normed input of attention.
    """
    heads, n_ff = m.heads(), m.mlp_width()

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = layer_norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, residual=x, **attention_options)
        return mlp(at, y if is_parallel else layer_norm(at, "ffn_norm", x), n_ff, activation=activation, residual=x)

    return decoder(m, layer, change_embedding=change_embedding, output_norm=layer_norm, norm_eps=m.layer_norm_eps)


# -- Attention -----------------------------------------------------------------------------------------------------


#: Norm of query and key, see `attention`.
QKNorm = Literal["head", "by head", "row", "layer", "layer by head", "unweighted"]


def attention(
    at: Layer,
    x: Tensor,
    heads: Heads,
    rope: g.Rope | None,
    *,
    residual: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    qkv_bias: bool = False,
    qkv_by_head: bool = False,
    qk_norm: QKNorm | None = None,
    norm_last: bool = False,
    q_scale: g.PositionScale | None = None,
    has_sinks: bool = False,
    has_gate: bool = False,
    gate_activation: str = "sigmoid",
    clamp: float = 0.0,
    max_bias: float = 0.0,
    has_spans: bool = False,
    select: Select | None = None,
    sub_norm: str | None = None,
) -> Tensor:
    """Grouped-query attention with rotary positions.

    Args:
        rope: None if query and key are not rotated.
        window, chunk: limits of the positions that a token sees, see `localllm.kernels.operations.Attention`.
        scale: factor on scores; by default 1 / √key_dim.
        qkv_bias: whether query, key and value must have biases; by default, biases are optional.
        qkv_by_head: whether ``attn_qkv`` contains the rows of query, key and value head by head.
        qk_norm: norm of query and key. "head": an RMSNorm of each head; "by head": an RMSNorm of each head, with
            separate weights (`norm_by_head`); "row": an RMSNorm of complete rows;
            "unweighted": an RMSNorm of each head without weights; "layer": a LayerNorm of complete rows; "layer by
            head": a LayerNorm of each head, with separate weights.
        norm_last: whether heads are normed after the rotation.
        has_sinks: whether each head has an additional score, ``attn_sinks``.
        has_gate: whether the output is multiplied with the activation of a gate. The gate is ``attn_gate``, with one
            row per value or per head, or its rows follow the query's rows of each head in ``attn_q``.
        gate_activation: activation function of the gate.
        clamp: queries, keys and values are clamped to ± this value; 0 for no limit.
        max_bias: largest bias of the ALiBi slopes (`localllm.models.weights.slopes`); 0 for no slopes.
        has_spans: whether tokens of an image see each other.
        select: selects the positions that tokens see.
        sub_norm: name of an RMSNorm before the last matrix; None for no norm.
    """
    q, k, v, gate = query_key_value(at, x, heads, qkv_bias=qkv_bias, qkv_by_head=qkv_by_head, has_gate=has_gate)
    if clamp:
        q, k, v = (at.add(ops.Clamp(tensor, -clamp, clamp)) for tensor in (q, k, v))
    cache = at.graph.kv_cache(
        heads.n_kv, heads.key_dim, heads.value_dim, window=(window or chunk) if at.causal else None
    )
    q, k, q_norm, k_norm = _normed_query_key(at, q, k, heads, qk_norm)
    q = at.add(ops.RopeAppend(q, k, v, cache, rope, q_norm, k_norm, norm_last=norm_last, q_scale=q_scale))
    scale = heads.key_dim**-0.5 if scale is None else scale
    sinks = at.weights.vector("attn_sinks", heads.n) if has_sinks else None
    falls = slopes(heads.n, max_bias) if max_bias else None
    more: dict[str, Any] = {"slopes": falls}
    selected = select(at, x) if select is not None else None
    if selected is not None:
        more |= {"selected": selected[0], "selected_by_head": selected[1]}
    y = at.add(ops.Attention(q, cache, scale, window, softcap, sinks, chunk, at.causal, has_spans, **more))
    if gate is not None:
        by_head = gate.width == heads.n
        y = at.add(ops.HeadGate(y, gate, gate_activation) if by_head else ops.Gated(gate, y, gate_activation))
    if sub_norm is not None:
        y = norm(at, sub_norm, y)
    return at.linear(y, "attn_output", at.n_embd, residual=residual)


def _normed_query_key(
    at: Layer, q: Tensor, k: Tensor, heads: Heads, qk_norm: QKNorm | None
) -> tuple[Tensor, Tensor, g.HeadNorm | None, g.HeadNorm | None]:
    """Return query and key, and the norms that remain to be applied to their heads (None without such norms)."""
    if qk_norm is None:
        return q, k, None, None
    if qk_norm == "row":
        return norm(at, "attn_q_norm", q), norm(at, "attn_k_norm", k), None, None
    if qk_norm == "by head":
        return norm_by_head(at, "attn_q_norm", q, heads.n), norm_by_head(at, "attn_k_norm", k, heads.n_kv), None, None
    if qk_norm in ("layer", "layer by head"):
        n, n_kv = (heads.n, heads.n_kv) if qk_norm == "layer by head" else (1, 1)
        return layer_norm(at, "attn_q_norm", q, n), layer_norm(at, "attn_k_norm", k, n_kv), None, None
    q_norm, k_norm = (
        g.HeadNorm(at.norm_eps, at.weights.vector(f"attn_{x}_norm", heads.key_dim) if qk_norm == "head" else None)
        for x in "qk"
    )
    return q, k, q_norm, k_norm


def query_key_value(
    at: Layer, x: Tensor, heads: Heads, *, qkv_bias: bool = False, qkv_by_head: bool = False, has_gate: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return query, key and value, from separate matrices or from ``attn_qkv``, and the gate (None without one)."""
    w, d = at.weights, x.width
    q, k, v = heads.n * heads.key_dim, heads.n_kv * heads.key_dim, heads.n_kv * heads.value_dim
    is_apart = has_gate and "attn_gate.weight" in w
    widths = {"attn_q": 2 * q if has_gate and not is_apart else q, "attn_k": k, "attn_v": v}
    if "attn_qkv.weight" in w:
        matrices = w.split("attn_qkv", d, widths, n_groups=heads.n if qkv_by_head else 1)
    else:
        matrices = tuple(w.matrix(name, d, n, bias=qkv_bias) for name, n in widths.items())
    if not has_gate:
        query, key, value = at.add(ops.Linears(x, matrices))
        return query, key, value, None
    if is_apart:
        n_gates = heads.n if w.n_rows("attn_gate.weight") == heads.n else heads.n * heads.value_dim
        query, key, value, gate = at.add(ops.Linears(x, (*matrices, w.matrix("attn_gate", d, n_gates))))
        return query, key, value, gate
    queries = split_rows(matrices[0], {"query": q, "gate": q}, n_groups=heads.n)
    query, gate, key, value = at.add(ops.Linears(x, (*queries, *matrices[1:])))
    return query, key, value, gate


# -- Feed-forward and recurrent blocks -----------------------------------------------------------------------------


def gated_mlp(
    at: Layer,
    x: Tensor,
    n_ff: int,
    *,
    residual: Tensor | None = None,
    activation: str = "silu",
    suffix: str = "",
    limit: float = 0.0,
    limits_input: bool = False,
) -> Tensor:
    """Return down(activation(gate(x)) * up(x)). ``suffix`` is appended to the names of the matrices.

    If the file has no matrix for the gate, the first half of the rows of ``ffn_up`` is the gate. `gated` documents
    ``limit`` and ``limits_input``.
    """
    w, d = at.weights, at.n_embd
    if f"ffn_gate{suffix}.weight" not in w and w.n_rows(f"ffn_up{suffix}.weight") == 2 * n_ff:
        matrices = w.split(f"ffn_up{suffix}", d, {"gate": n_ff, "up": n_ff})
    else:
        matrices = w.matrix(f"ffn_gate{suffix}", d, n_ff), w.matrix(f"ffn_up{suffix}", d, n_ff)
    gate, up = at.add(ops.Linears(x, matrices))  # [T, n_ff]
    return at.linear(
        gated(at, gate, up, activation, limit, limits_input=limits_input), f"ffn_down{suffix}", d, residual=residual
    )


def gated(
    at: Layer, gate: Tensor, up: Tensor, activation: str, limit: float = 0.0, *, limits_input: bool = False
) -> Tensor:
    """Return activation(gate) * up.

    With ``limit``, activation(gate) is at most ``limit``, and up is clamped to ± ``limit``. With ``limits_input``,
    the gate itself is limited instead, before the activation.
    """
    if limit and limits_input:
        gate, up = at.add(ops.Clamp(gate, -math.inf, limit)), at.add(ops.Clamp(up, -limit, limit))
    elif limit:
        gate = at.add(ops.Clamp(at.add(ops.Activation(gate, activation)), -math.inf, limit))
        up, activation = at.add(ops.Clamp(up, -limit, limit)), "identity"
    return at.add(ops.Gated(gate, up, activation))


def mlp(
    at: Layer, x: Tensor, n_ff: int, *, residual: Tensor | None = None, activation: str, suffix: str = ""
) -> Tensor:
    """Return down(activation(up(x))). ``suffix`` is appended to the names of the matrices."""
    up = at.linear(x, f"ffn_up{suffix}", n_ff)
    return at.linear(at.add(ops.Activation(up, activation)), f"ffn_down{suffix}", at.n_embd, residual=residual)


def feed_forward(
    at: Layer,
    x: Tensor,
    ffn: FeedForward,
    *,
    residual: Tensor | None = None,
    activation: str = "silu",
    limits: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """Record the layer's experts, or the gated MLP of a layer without experts. `mixture` documents ``limits``."""
    experts = ffn.experts_of(at.number)
    if experts is not None:
        return mixture(at, x, experts, residual=residual, activation=activation, limits=limits)
    return gated_mlp(at, x, ffn.n_ff, residual=residual, activation=activation)


def mixture(
    at: Layer,
    x: Tensor,
    experts: Experts,
    *,
    residual: Tensor | None = None,
    residual_scale: float = 1.0,
    activation: str = "silu",
    is_weighted_first: bool = False,
    limits: tuple[float, float] = (0.0, 0.0),
    expert_ids: Tensor | None = None,
) -> Tensor:
    """Mixture of experts: each token uses k of the experts' MLPs. Return the weighted sum of their outputs.

    These parts are optional: gates; biases of the router and of the experts; a bias of the selection
    (``exp_probs_b``); a shared expert for all tokens, with or without a gate; and projections from x to the narrower
    input of the experts (``ffn_latent_down``) and back (``ffn_latent_up``).

    Args:
        residual: the result times ``residual_scale`` is added to this tensor.
        is_weighted_first: whether the weights multiply the experts' inputs instead of their outputs.
        limits: limits of the gates of selected and of shared experts, see `gated`.
        expert_ids: see `route`.

    Sources: arXiv:2401.04088 (Mixtral), arXiv:2401.06066 (DeepSeekMoE).
    """
    w, stream = at.weights, residual
    routing = route(at, x, experts, residual_scale, expert_ids)
    if experts.n_ff_shared:
        options: Any = {"activation": activation, "suffix": "_shexp"}
        is_gated = "ffn_gate_shexp.weight" in w or w.n_rows("ffn_up_shexp.weight") == 2 * experts.n_ff_shared
        if is_gated:
            shared = gated_mlp(
                at, x, experts.n_ff_shared, limit=limits[1], limits_input=experts.limits_input, **options
            )
        else:
            shared = mlp(at, x, experts.n_ff_shared, **options)
        weight = None  # [T, 1]
        if "ffn_gate_inp_shexp.weight" in w:
            weight = at.add(ops.Linear(x, w.row("ffn_gate_inp_shexp", at.n_embd)))
        if residual is not None:
            residual = at.add(ops.Add(shared, residual, residual_scale, weight))
        else:
            residual = shared if weight is None else at.add(ops.HeadGate(shared, weight, "sigmoid"))
    n_latent = w.n_rows("ffn_latent_down.weight")
    if n_latent:
        x = at.linear(x, "ffn_latent_down", n_latent)
    added = None if n_latent else residual
    y = chosen_experts(
        at, x, experts, routing, activation, added, is_weighted_first=is_weighted_first, limit=limits[0]
    )
    if n_latent:
        y = at.linear(y, "ffn_latent_up", at.n_embd, residual=residual)
    at.graph.name("mlp", y, stream)
    return y


def route(at: Layer, x: Tensor, experts: Experts, scale: float = 1.0, expert_ids: Tensor | None = None) -> g.Routing:
    """Return the experts of each token, and their weights times ``scale``.

    The router selects the experts, unless ``expert_ids`` [T, k] names them.
    """
    w, n, bias = at.weights, experts.n, None
    is_nvfp4 = w.type_of("ffn_down_exps.weight") is GGMLType.NVFP4
    if expert_ids is None:
        names = (name for end in ("", ".bias", ".weight") if (name := f"exp_probs_b{end}") in w)
        bias = w.find(next(names, "exp_probs_b"), n)
    return at.add(
        ops.Route(
            at.linear(x, "ffn_gate_inp", n),  # [T, E]
            k=experts.n_used,
            norm_topk_prob=experts.norm_topk_prob,
            scale=experts.scale * scale,
            gating=experts.gating,
            selection_bias=bias,
            n_groups=experts.n_groups,
            n_top_groups=experts.n_top_groups,
            n_group_best=1 if experts.gating == "softmax" else 2,  # DeepSeek V2: 1, V3: 2
            # `Weights.experts` applies the scales of matrices in NVFP4.
            expert_scales=None if is_nvfp4 else w.find("ffn_down_exps.scale", n),
            expert_ids=expert_ids,
        )
    )


def chosen_experts(
    at: Layer,
    x: Tensor,
    experts: Experts,
    routing: g.Routing,
    activation: str,
    residual: Tensor | None = None,
    *,
    is_weighted_first: bool = False,
    limit: float = 0.0,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts."""
    w, n, n_ff, width = at.weights, experts.n, experts.n_ff, x.width
    if "ffn_gate_up_exps.weight" in w:
        matrices = w.split_experts("ffn_gate_up_exps", n, width, {"gate": n_ff, "up": n_ff})
    else:
        names = ("ffn_gate_exps", "ffn_up_exps") if "ffn_gate_exps.weight" in w else ("ffn_up_exps",)
        matrices = tuple(w.experts(name, n, width, n_ff) for name in names)
    biases = tuple(b for b in (w.find(f"ffn_{x}_exps.bias", n, n_ff) for x in ("gate", "up")) if b is not None)
    hs = at.add(ops.ExpertLinears(x, matrices, routing, biases, is_weighted_first))  # [T * k, n_ff]
    h = (
        gated(at, *hs, activation, limit, limits_input=experts.limits_input)
        if len(hs) == 2
        else at.add(ops.Activation(hs[0], activation))
    )
    down, bias = w.experts("ffn_down_exps", n, n_ff, width), w.find("ffn_down_exps.bias", n, width)
    return at.add(ops.ExpertOutput(h, down, routing, residual, bias, not is_weighted_first))


@dataclass(frozen=True)
class Mamba:
    """Sizes of a Mamba 2 layer: ``n`` heads of ``dim`` values, with states of ``n_state`` rows, and a convolution."""

    n: int
    dim: int
    n_groups: int
    n_state: int
    kernel: int

    @classmethod
    def read(cls, meta: ModelMetadata) -> Mamba:
        n, n_groups, n_state, inner, kernel = (
            meta.read(f"ssm.{key}", int, low=1, high=1 << 20)
            for key in ("time_step_rank", "group_count", "state_size", "inner_size", "conv_kernel")
        )
        meta.check_multiple("ssm.inner_size", inner, "ssm.time_step_rank", n)
        return cls(n, inner // n, n_groups, n_state, kernel)


def mamba(at: Layer, x: Tensor, net: Mamba, *, residual: Tensor | None = None) -> Tensor:
    """Mamba 2: a convolution and a scan, times a gate, then, if the file contains it, a norm of each group.

    Source: arXiv:2405.21060.
    """
    w, d, n = at.weights, at.n_embd, net.n
    inner = n * net.dim
    width = inner + 2 * net.n_groups * net.n_state
    gate, xbc, dt = at.add(ops.Linears(x, w.split("ssm_in", d, {"gate": inner, "xbc": width, "dt": n})))
    conv, state = w.require("ssm_conv1d.weight", width, net.kernel), at.graph.state("conv", net.kernel - 1, width)
    xbc = at.add(ops.CausalConv(xbc, conv, state, w.find("ssm_conv1d.bias", width), silu=True))
    a, bias, skip = w.require("ssm_a", n, 1), w.require("ssm_dt.bias", n), w.require("ssm_d", n, 1)
    y = at.add(ops.Scan((xbc,), dt, a, bias, skip, at.graph.state("S", n, net.n_state, net.dim), net.n_groups))
    y = at.add(ops.Gated(gate, y, "silu"))
    weight = w.find("ssm_norm.weight", net.n_groups, inner // net.n_groups)
    if weight is not None:
        y = at.add(ops.RMSNorm(y, Reshaped(weight, (inner,)), at.norm_eps, net.n_groups))
    return at.linear(y, "ssm_out", d, residual=residual)


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a gated delta net: ``n_keys`` heads of queries and keys, ``n_values`` of values, and a convolution."""

    n_keys: int
    n_values: int
    key_dim: int
    value_dim: int
    kernel: int

    @classmethod
    def read(cls, meta: ModelMetadata) -> DeltaNet:
        n_keys, n_values, dim, inner, kernel = (
            meta.read(f"ssm.{key}", int, low=1, high=1 << 20)
            for key in ("group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel")
        )
        meta.check_multiple("ssm.time_step_rank", n_values, "ssm.group_count", n_keys)
        meta.check_multiple("ssm.inner_size", inner, "ssm.time_step_rank", n_values)
        return cls(n_keys, n_values, dim, inner // n_values, kernel)


def delta_net(
    at: Layer,
    x: Tensor,
    net: DeltaNet,
    *,
    residual: Tensor | None = None,
    is_grouped: bool = False,
    activation: str = "silu",
) -> Tensor:
    """Linear attention by the gated delta rule, after a convolution and before a gated norm.

    The matrices ``ssm_alpha`` and ``ssm_beta`` compute decay and β. A file may contain both in ``ssm_ba``, with their
    rows grouped by key head. In the same way, ``ssm_in`` may contain ``attn_qkv`` and ``attn_gate``.
    `localllm.kernels.operations.GatedDelta` documents ``is_grouped``. ``activation`` is the gate's activation
    function.

    Source: arXiv:2412.06464.
    """
    w, d, n = at.weights, at.n_embd, net.n_values
    keys, values = net.n_keys * net.key_dim, n * net.value_dim
    width = 2 * keys + values
    if "ssm_ba.weight" in w:
        beta_alpha = w.split("ssm_ba", d, {"beta": n, "alpha": n}, n_groups=net.n_keys)
    else:
        beta_alpha = w.matrix("ssm_beta", d, n), w.matrix("ssm_alpha", d, n)
    if "ssm_in.weight" in w:  # in files of Qwen 3 Next that llama.cpp's converter wrote in 2025
        widths = {"query": keys, "key": keys, "value": values, "gate": values}
        matrices = w.split("ssm_in", d, widths, n_groups=net.n_keys)
        *separate, gate, beta, alpha = at.add(ops.Linears(x, (*matrices, *beta_alpha)))
        qkv = at.add(ops.SideBySide(tuple(separate)))
    else:
        matrices = w.matrix("attn_qkv", d, width), w.matrix("attn_gate", d, values)
        qkv, gate, beta, alpha = at.add(ops.Linears(x, (*matrices, *beta_alpha)))
    conv = w.require("ssm_conv1d.weight", width, net.kernel)
    qkv = at.add(ops.CausalConv(qkv, conv, at.graph.state("conv", net.kernel - 1, width), silu=True))
    state = at.graph.state("S", n, net.key_dim, net.value_dim)
    a, bias = w.require("ssm_a", n), w.require("ssm_dt.bias", n)
    y = at.add(ops.GatedDelta((qkv,), alpha, beta, a, bias, state, net.n_keys, is_grouped, at.norm_eps))
    y = at.add(ops.RMSNorm(y, w.vector("ssm_norm", net.value_dim), at.norm_eps, n))
    return at.linear(at.add(ops.Gated(gate, y, activation)), "ssm_out", d, residual=residual)
