"""The blocks that architectures are assembled from.

A block is given the layer that is recorded and its input, finds its weights under the names that GGUF files give
them, and adds its operations in execution order.  It adds no norm before itself and none behind: architectures
differ there most.  With ``residual``, its output is added to that.  Shapes as in `localllm.kernels.graph`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from localllm.errors import ModelError
from localllm.kernels import graph as g
from localllm.kernels.graph import Graph, Tensor
from localllm.models.config import Experts, FeedForward, Header, Heads, Metadata
from localllm.models.mtp import record_block
from localllm.models.weights import Reshaped, Weights, slopes, split_rows
from localllm.quant.types import GGMLType

R = TypeVar("R", bound=Any)


@dataclass(frozen=True)
class Layer:
    """The layer that is being recorded, or what stands before or behind all of them: number -1."""

    number: int  # counted from 0
    graph: Graph
    weights: Weights  # its tensors, found by their names behind ``blk.{number}.``
    n_embd: int
    norm_eps: float  # of its norms
    embedding: Tensor  # what goes into the first layer [T, d]
    causal: bool = True  # whether tokens attend to earlier tokens only

    def add(self, operation: g.Operation[R]) -> R:
        """Records an operation, and gives what it computes."""
        return self.graph.add(operation)

    def linear(self, x: Tensor, name: str, n_out: int, *, residual: Tensor | None = None) -> Tensor:
        """x times the matrix ``name``, with its bias if there is one."""
        return self.add(g.Linear(x, self.weights.matrix(name, x.width, n_out), residual=residual))


#: Records one layer: is given it and x [T, d], and gives the next x.
RecordLayer = Callable[[Layer, Tensor], Tensor]
#: Records a norm of a name.
RecordNorm = Callable[[Layer, str, Tensor], Tensor]
#: Chooses the positions that tokens see: is given a layer and the input of its attention, and gives what
#: `localllm.kernels.graph.IndexSelect` makes, and whether each key/value head has its own; None for all positions.
Select = Callable[[Layer, Tensor], "tuple[Tensor, bool] | None"]


def norm(at: Layer, name: str, x: Tensor) -> Tensor:
    """RMSNorm of whole rows."""
    return at.add(g.RMSNorm(x, at.weights.vector(name, x.width), at.norm_eps))


def layer_norm(at: Layer, name: str, x: Tensor, n_heads: int = 1) -> Tensor:
    """LayerNorm of whole rows, or of ``n_heads`` heads with separate weights; the bias is optional."""
    bias = at.weights.find(f"{name}.bias", x.width)
    weight = at.weights.vector(name, x.width, n_heads)
    return at.add(g.LayerNorm(x, weight, bias, at.norm_eps, n_heads))


def add(at: Layer, x: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
    """residual + scale * x."""
    return at.add(g.Add(x, residual, scale))


def read_softcap(m: Header, key: str) -> float | None:
    """The soft cap of scores or logits that a key gives; None without one."""
    return m.meta.read(key, float, 0.0, low=0.0, high=1e6) or None


def read_q_scale(m: Header) -> g.PositionScale | None:
    """How queries grow with the logarithm of their position, in Mistral's models; None where they do not."""
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
    n_deepstack: int = 0,
) -> Graph:
    """Embedding, layers, final norm and head: from ids to logits [N, n_vocab].

    Of a model that embeds (`Header.pooling`), without the head: to what is pooled, [N, d].  Behind each of the first
    ``n_deepstack`` layers, further embeddings of pictures are added, if it sees any.
    """
    config, weights, graph = m.config, m.weights, Graph(m.cache_type)
    d, eps = config.n_embd, m.norm_eps if norm_eps is None else norm_eps
    if m.is_block:

        def block(number: int, graph: Graph, e: Tensor, x: Tensor) -> Tensor:
            return record_layer(Layer(number, graph, weights.layer(number), d, eps, e, m.is_causal), x)

        return record_block(m, block, embedding_scale, eps)
    table = weights.require("token_embd.weight", config.n_vocab, d)
    x = embedding = graph.add(g.Embed(table, embedding_scale, takes_rows=m.sees))
    if change_embedding is not None:
        x = embedding = change_embedding(Layer(-1, graph, weights, d, eps, x), x)
    for i in range(config.n_layers):
        graph.layer = i
        x = record_layer(Layer(i, graph, weights.layer(i), d, eps, embedding, m.is_causal), x)
        if m.sees and i < n_deepstack:
            x = graph.add(g.AddRows(x, i + 1))
    graph.layer = "output"
    at = Layer(-1, graph, weights, d, eps, embedding)
    x = at.add(g.Outputs(x))  # [N, d]
    if output_norm is not None:
        x = output_norm(at, "output_norm", x)
    if m.pooling is not None:
        weights.skip("output.weight")
        return graph
    logits = at.add(g.Linear(x, weights.matrix("output", d, config.n_vocab, tied_to="token_embd")))
    if logit_scale != 1:
        logits = at.add(g.Scale(logits, logit_scale))
    if softcap is not None:
        at.add(g.Softcap(logits, softcap))
    return graph


def position_embedding(m: Header) -> RecordLayer:
    """Adds the learnt vector of each token's position to its embedding."""
    n_positions = m.config.context_length
    if m.context > n_positions:
        raise ModelError(f"the model has no positions beyond {n_positions}: a context of {m.context} is too long")
    positions = m.weights.require("position_embd.weight", n_positions, m.config.n_embd)
    return lambda at, x: add(at, at.add(g.Embed(positions, by_position=True)), x)


def llama_like(
    m: Header, rope: g.Rope | Sequence[g.Rope | None], experts: Experts | None = None, **options: Any
) -> Graph:
    """A model of Llama's layers; ``options`` as `llama_layer` has them."""
    return decoder(m, llama_layer(m, rope, experts, **options))


def llama_layer(
    m: Header,
    rope: g.Rope | Sequence[g.Rope | None],
    experts: Experts | None = None,
    *,
    windows: tuple[int | None, ...] | None = None,
    ffn_norm: str = "ffn_norm",
    activation: str = "silu",
    post_norm_eps: float | None = None,
    limits: Sequence[tuple[float, float]] | None = None,
    **attention_options: Any,
) -> RecordLayer:
    """Llama's layer: attention and feed-forward one behind the other, an RMSNorm before each.

    Args:
        rope: of query and key in every layer, or of each layer.
        experts: None for an MLP in every layer.
        windows: of each layer, as `Header.windows` gives them; none by default.
        ffn_norm: the name of the second norm.
        post_norm_eps: where there is a norm behind each as well (``post_attention_norm``, ``post_ffw_norm``), its
            epsilon.
        limits: of the gates of experts in each layer, as `mixture` has them.
        attention_options: what else `attention` is given.
    """
    heads, ffn = m.heads_of_layers(), m.feed_forward(experts)

    def layer(at: Layer, x: Tensor) -> Tensor:
        number = min(at.number, m.config.n_layers - 1)  # a block behind the last layer is as that
        window = windows[number] if windows else None
        ffn_options: Any = {"activation": activation, "limits": limits[number] if limits else (0.0, 0.0)}
        own_heads, own_rope = heads[number], rope if isinstance(rope, g.Rope) else rope[number]
        y = norm(at, "attn_norm", x)
        if post_norm_eps is None:
            x = attention(at, y, own_heads, own_rope, residual=x, window=window, **attention_options)
            return feed_forward(at, norm(at, ffn_norm, x), ffn, residual=x, **ffn_options)
        behind = replace(at, norm_eps=post_norm_eps)
        y = attention(at, y, own_heads, own_rope, window=window, **attention_options)
        x = add(at, norm(behind, "post_attention_norm", y), x)
        y = feed_forward(at, norm(at, ffn_norm, x), ffn, **ffn_options)
        return add(at, norm(behind, "post_ffw_norm", y), x)

    return layer


# -- Attention -----------------------------------------------------------------------------------------------------


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
    qk_norm: Literal["head", "row", "layer", "layer by head", "unweighted"] | None = None,
    norm_last: bool = False,
    q_scale: g.PositionScale | None = None,
    has_sinks: bool = False,
    has_gate: bool = False,
    gate_activation: str = "sigmoid",
    clamp: float = 0.0,
    max_bias: float = 0.0,
    has_spans: bool = False,
    select: Select | None = None,
) -> Tensor:
    """Grouped-query attention with rotary positions.

    Args:
        rope: None where nothing is rotated.
        window, chunk: what a token sees, as `localllm.kernels.graph.Attention` has it.
        scale: of scores; by default 1 / √key_dim.
        qkv_bias: whether query, key and value must have biases; else they may.
        qkv_by_head: whether rows of ``attn_qkv`` are those of query, key and value for each head.
        qk_norm: an RMSNorm of each head of query and key, of their whole rows, or one of heads without weights;
            "layer" for a LayerNorm of whole rows; or "layer by head" for a LayerNorm of each head, with separate
            weights.
        norm_last: whether heads are normed behind the rotation.
        has_sinks: a further score for each head, ``attn_sinks``.
        has_gate: whether there is a gate, whose σ or other activation the output is multiplied with: ``attn_gate``,
            of each value or of each head, or in ``attn_q`` behind the query of each head.
        clamp: what queries, keys and values are clamped to, ±; 0 for nothing.
        max_bias: of the slopes by which scores fall with the distance (`localllm.models.weights.slopes`); 0 for none.
        has_spans: whether those of a picture see each other.
        select: chooses the positions that tokens see.
    """
    q, k, v, gate = query_key_value(at, x, heads, qkv_bias=qkv_bias, qkv_by_head=qkv_by_head, has_gate=has_gate)
    if clamp:
        q, k, v = (at.add(g.Clamp(each, -clamp, clamp)) for each in (q, k, v))
    cache = at.graph.kv_cache(
        heads.n_kv, heads.key_dim, heads.value_dim, window=(window or chunk) if at.causal else None
    )
    q_norm = k_norm = None
    if qk_norm == "row":
        q, k = norm(at, "attn_q_norm", q), norm(at, "attn_k_norm", k)
    elif qk_norm in ("layer", "layer by head"):
        n, n_kv = (heads.n, heads.n_kv) if qk_norm == "layer by head" else (1, 1)
        q, k = layer_norm(at, "attn_q_norm", q, n), layer_norm(at, "attn_k_norm", k, n_kv)
    elif qk_norm:
        q_norm, k_norm = (
            g.HeadNorm(at.norm_eps, at.weights.vector(f"attn_{x}_norm", heads.key_dim) if qk_norm == "head" else None)
            for x in "qk"
        )
    q = at.add(g.RopeAppend(q, k, v, cache, rope, q_norm, k_norm, norm_last=norm_last, q_scale=q_scale))
    scale = heads.key_dim**-0.5 if scale is None else scale
    sinks = at.weights.vector("attn_sinks", heads.n) if has_sinks else None
    falls = slopes(heads.n, max_bias) if max_bias else None
    more: dict[str, Any] = {"slopes": falls}
    selected = select(at, x) if select is not None else None
    if selected is not None:
        more |= {"selected": selected[0], "selected_by_head": selected[1]}
    y = at.add(g.Attention(q, cache, scale, window, softcap, sinks, chunk, at.causal, has_spans, **more))
    if gate is not None:
        by_head = gate.width == heads.n
        y = at.add(g.HeadGate(y, gate, gate_activation) if by_head else g.Gated(gate, y, gate_activation))
    return at.linear(y, "attn_output", at.n_embd, residual=residual)


def query_key_value(
    at: Layer, x: Tensor, heads: Heads, *, qkv_bias: bool = False, qkv_by_head: bool = False, has_gate: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key and value, of matrices of their own or of ``attn_qkv``; and the gate, if there is one."""
    w, d = at.weights, x.width
    q, k, v = heads.n * heads.key_dim, heads.n_kv * heads.key_dim, heads.n_kv * heads.value_dim
    is_apart = has_gate and "attn_gate.weight" in w
    widths = {"attn_q": 2 * q if has_gate and not is_apart else q, "attn_k": k, "attn_v": v}
    if "attn_qkv.weight" in w:
        matrices = w.split("attn_qkv", d, widths, n_groups=heads.n if qkv_by_head else 1)
    else:
        matrices = tuple(w.matrix(name, d, n, bias=qkv_bias) for name, n in widths.items())
    if not has_gate:
        query, key, value = at.add(g.Linears(x, matrices))
        return query, key, value, None
    if is_apart:
        n_gates = heads.n if w.n_rows("attn_gate.weight") == heads.n else heads.n * heads.value_dim
        query, key, value, gate = at.add(g.Linears(x, (*matrices, w.matrix("attn_gate", d, n_gates))))
        return query, key, value, gate
    queries = split_rows(matrices[0], {"query": q, "gate": q}, n_groups=heads.n)
    query, gate, key, value = at.add(g.Linears(x, (*queries, *matrices[1:])))
    return query, key, value, gate


# -- What stands between attentions --------------------------------------------------------------------------------


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
    """down(activation(gate(x)) * up(x)); ``suffix`` stands behind the names of its matrices.

    ``limit``, ``limits_input``: as `gated` has them.

    Without a matrix for the gate, it is the first rows of ``ffn_up``.
    """
    w, d = at.weights, at.n_embd
    if f"ffn_gate{suffix}.weight" not in w and w.n_rows(f"ffn_up{suffix}.weight") == 2 * n_ff:
        matrices = w.split(f"ffn_up{suffix}", d, {"gate": n_ff, "up": n_ff})
    else:
        matrices = w.matrix(f"ffn_gate{suffix}", d, n_ff), w.matrix(f"ffn_up{suffix}", d, n_ff)
    gate, up = at.add(g.Linears(x, matrices))  # [T, n_ff]
    return at.linear(
        gated(at, gate, up, activation, limit, limits_input=limits_input), f"ffn_down{suffix}", d, residual=residual
    )


def gated(
    at: Layer, gate: Tensor, up: Tensor, activation: str, limit: float = 0.0, *, limits_input: bool = False
) -> Tensor:
    """activation(gate) * up; with a ``limit``, the first is at most that, and the other within ± it.

    With ``limits_input``, it is the gate that is at most that, before the activation.
    """
    if limit and limits_input:
        gate, up = at.add(g.Clamp(gate, -math.inf, limit)), at.add(g.Clamp(up, -limit, limit))
    elif limit:
        gate = at.add(g.Clamp(at.add(g.Activation(gate, activation)), -math.inf, limit))
        up, activation = at.add(g.Clamp(up, -limit, limit)), "identity"
    return at.add(g.Gated(gate, up, activation))


def mlp(
    at: Layer, x: Tensor, n_ff: int, *, residual: Tensor | None = None, activation: str, suffix: str = ""
) -> Tensor:
    """down(activation(up(x))); ``suffix`` stands behind the names of its matrices."""
    up = at.linear(x, f"ffn_up{suffix}", n_ff)
    return at.linear(at.add(g.Activation(up, activation)), f"ffn_down{suffix}", at.n_embd, residual=residual)


def feed_forward(
    at: Layer,
    x: Tensor,
    ffn: FeedForward,
    *,
    residual: Tensor | None = None,
    activation: str = "silu",
    limits: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """The layer's experts, or its gated MLP; ``limits`` as `mixture` has them."""
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
    chosen: Tensor | None = None,
) -> Tensor:
    """An MLP for each of several experts, of which every token goes to a few: their weighted sum.

    Gates, biases of the router and of the experts, a bias of the selection (``exp_probs_b``), an expert that every
    token goes to, perhaps weighed by a gate, and matrices into and out of narrower rows that the experts are given
    (``ffn_latent_down`` and ``ffn_latent_up``) are taken where the file has them.  All is added to ``residual``, if
    there is one, times ``residual_scale``.  ``is_weighted_first``: it is what experts are given that is weighed.
    ``limits``: of the gates of chosen and of shared experts, as `gated` has them.  ``chosen``: as `route` has it.
    Sources: arXiv:2401.04088 (Mixtral), arXiv:2401.06066 (DeepSeekMoE).
    """
    w = at.weights
    routing = route(at, x, experts, residual_scale, chosen)
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
            weight = at.add(g.Linear(x, w.row("ffn_gate_inp_shexp", at.n_embd)))
        if residual is not None:
            residual = at.add(g.Add(shared, residual, residual_scale, weight))
        else:
            residual = shared if weight is None else at.add(g.HeadGate(shared, weight, "sigmoid"))
    n_latent = w.n_rows("ffn_latent_down.weight")
    if not n_latent:
        return chosen_experts(
            at, x, experts, routing, activation, residual, is_weighted_first=is_weighted_first, limit=limits[0]
        )
    x = at.linear(x, "ffn_latent_down", n_latent)
    y = chosen_experts(at, x, experts, routing, activation, is_weighted_first=is_weighted_first, limit=limits[0])
    return at.linear(y, "ffn_latent_up", at.n_embd, residual=residual)


def route(at: Layer, x: Tensor, experts: Experts, scale: float = 1.0, chosen: Tensor | None = None) -> g.Routing:
    """Which experts each token goes to, by default as the router chooses; their weights times ``scale``."""
    w, n, bias = at.weights, experts.n, None
    is_nvfp4 = w.type_of("ffn_down_exps.weight") is GGMLType.NVFP4
    if chosen is None:
        bias = w.find("exp_probs_b" if "exp_probs_b" in w else "exp_probs_b.bias", n)
    return at.add(
        g.Route(
            at.linear(x, "ffn_gate_inp", n),  # [T, E]
            k=experts.n_used,
            norm_topk_prob=experts.norm_topk_prob,
            scale=experts.scale * scale,
            gating=experts.gating,
            selection_bias=bias,
            n_groups=experts.n_groups,
            n_top_groups=experts.n_top_groups,
            n_group_best=1 if experts.gating == "softmax" else 2,  # as DeepSeek V2, and V3
            # `Weights.experts` multiplies matrices in NVFP4.
            expert_scales=None if is_nvfp4 else w.find("ffn_down_exps.scale", n),
            chosen=chosen,
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
    """The weighted sum of what each token's experts make of x."""
    w, n, n_ff, width = at.weights, experts.n, experts.n_ff, x.width
    if "ffn_gate_up_exps.weight" in w:
        matrices = w.split_experts("ffn_gate_up_exps", n, width, {"gate": n_ff, "up": n_ff})
    else:
        names = ("ffn_gate_exps", "ffn_up_exps") if "ffn_gate_exps.weight" in w else ("ffn_up_exps",)
        matrices = tuple(w.experts(name, n, width, n_ff) for name in names)
    biases = tuple(b for b in (w.find(f"ffn_{x}_exps.bias", n, n_ff) for x in ("gate", "up")) if b is not None)
    hs = at.add(g.ExpertLinears(x, matrices, routing, biases, is_weighted_first))  # [T * k, n_ff]
    h = (
        gated(at, *hs, activation, limit, limits_input=experts.limits_input)
        if len(hs) == 2
        else at.add(g.Activation(hs[0], activation))
    )
    down, bias = w.experts("ffn_down_exps", n, n_ff, width), w.find("ffn_down_exps.bias", n, width)
    return at.add(g.ExpertOutput(h, down, routing, residual, bias, not is_weighted_first))


@dataclass(frozen=True)
class Mamba:
    """A layer of Mamba 2: ``n`` heads of ``dim`` values, with states of ``n_state`` rows; and its convolution."""

    n: int
    dim: int
    n_groups: int
    n_state: int
    kernel: int

    @classmethod
    def read(cls, meta: Metadata) -> Mamba:
        """From the keys that llama.cpp has for it."""
        n, n_groups, n_state, inner, kernel = (
            meta.read(f"ssm.{key}", int, low=1, high=1 << 20)
            for key in ("time_step_rank", "group_count", "state_size", "inner_size", "conv_kernel")
        )
        meta.check_multiple("ssm.inner_size", inner, "ssm.time_step_rank", n)
        return cls(n, inner // n, n_groups, n_state, kernel)


def mamba(at: Layer, x: Tensor, net: Mamba, *, residual: Tensor | None = None) -> Tensor:
    """Mamba 2: a convolution and a scan, times a gate, and normed in groups if there is a norm; arXiv:2405.21060."""
    w, d, n = at.weights, at.n_embd, net.n
    inner = n * net.dim
    width = inner + 2 * net.n_groups * net.n_state
    gate, xbc, dt = at.add(g.Linears(x, w.split("ssm_in", d, {"gate": inner, "xbc": width, "dt": n})))
    conv, state = w.require("ssm_conv1d.weight", width, net.kernel), at.graph.state("conv", net.kernel - 1, width)
    xbc = at.add(g.CausalConv(xbc, conv, state, w.find("ssm_conv1d.bias", width), silu=True))
    a, bias, skip = w.require("ssm_a", n, 1), w.require("ssm_dt.bias", n), w.require("ssm_d", n, 1)
    y = at.add(g.Scan((xbc,), dt, a, bias, skip, at.graph.state("S", n, net.n_state, net.dim), net.n_groups))
    y = at.add(g.Gated(gate, y, "silu"))
    weight = w.find("ssm_norm.weight", net.n_groups, inner // net.n_groups)
    if weight is not None:
        y = at.add(g.RMSNorm(y, Reshaped(weight, (inner,)), at.norm_eps, net.n_groups))
    return at.linear(y, "ssm_out", d, residual=residual)


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net: ``n_keys`` heads of queries and keys, ``n_values`` of values, and its convolution."""

    n_keys: int
    n_values: int
    key_dim: int
    value_dim: int
    kernel: int

    @classmethod
    def read(cls, meta: Metadata) -> DeltaNet:
        """From the keys that llama.cpp has for it."""
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
    """Linear attention by the gated delta rule, behind a convolution and before a gated norm.

    The matrices ``ssm_alpha`` and ``ssm_beta`` give decay and β.  A file may contain both in ``ssm_ba``, with their
    rows grouped by key head.  In the same way, ``ssm_in`` may contain ``attn_qkv`` and ``attn_gate``.
    ``is_grouped``: see `localllm.kernels.graph.GatedDelta`; ``activation``: of the gate.  Source: arXiv:2412.06464.
    """
    w, d, n = at.weights, at.n_embd, net.n_values
    keys, values = net.n_keys * net.key_dim, n * net.value_dim
    width = 2 * keys + values
    if "ssm_ba.weight" in w:
        beta_alpha = w.split("ssm_ba", d, {"beta": n, "alpha": n}, n_groups=net.n_keys)
    else:
        beta_alpha = w.matrix("ssm_beta", d, n), w.matrix("ssm_alpha", d, n)
    if "ssm_in.weight" in w:  # llama.cpp's converter wrote Qwen 3 Next so in 2025
        widths = {"query": keys, "key": keys, "value": values, "gate": values}
        matrices = w.split("ssm_in", d, widths, n_groups=net.n_keys)
        *parts, gate, beta, alpha = at.add(g.Linears(x, (*matrices, *beta_alpha)))
        qkv = at.add(g.SideBySide(tuple(parts)))
    else:
        matrices = w.matrix("attn_qkv", d, width), w.matrix("attn_gate", d, values)
        qkv, gate, beta, alpha = at.add(g.Linears(x, (*matrices, *beta_alpha)))
    conv = w.require("ssm_conv1d.weight", width, net.kernel)
    qkv = at.add(g.CausalConv(qkv, conv, at.graph.state("conv", net.kernel - 1, width), silu=True))
    state = at.graph.state("S", n, net.key_dim, net.value_dim)
    a, bias = w.require("ssm_a", n), w.require("ssm_dt.bias", n)
    y = at.add(g.GatedDelta((qkv,), alpha, beta, a, bias, state, net.n_keys, is_grouped, at.norm_eps))
    y = at.add(g.RMSNorm(y, w.vector("ssm_norm", net.value_dim), at.norm_eps, n))
    return at.linear(at.add(g.Gated(gate, y, activation)), "ssm_out", d, residual=residual)
