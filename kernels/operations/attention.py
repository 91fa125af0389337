"""Attention over a layer's cache, and the operation that rotates queries and keys and appends to the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from localllm.errors import KernelError
from localllm.kernels import graph as g
from localllm.kernels.graph import HeadNorm, KVCache, Operation, PositionScale, Rope, Rows, Tensor, Weight


class RopeAppend(Operation[Tensor]):
    """Normalise the heads of q, k and v, rotate the heads of q and k, and append k and v to the layer's cache.

    q is [T, H * key_dim], k [T, G * key_dim] and v [T, G * value_dim]. The result is the rotated q. Norms are applied
    before the rotation or, with ``norm_last``, after it. A norm over whole rows is a separate `RMSNorm` before this
    operation. k and v may be the same tensor, which is then normalised in both ways.

    Without v, values are part of the keys. Without both k and v, the cache belongs to another layer, which has
    already appended to it. A cache with several tokens per entry (`KVCache.stride`) takes the keys of tokens that
    complete an entry. If q is k, the operation only appends.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    cache: KVCache
    rope: Rope | None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None
    norm_last: bool = False
    q_scale: PositionScale | None = None
    consumes = ("q", "k", "v")

    @property
    def _norms(self) -> tuple[tuple[str, HeadNorm | None, int], ...]:
        """The name of each tensor, its norm, and the values of a head."""
        key_dim, value_dim = self.cache.key_dim, self.cache.value_dim
        return ("q", self.q_norm, key_dim), ("k", self.k_norm, key_dim), ("v", self.v_norm, value_dim)

    def norm_arguments(self, vector: Callable[[Weight | None], Any]) -> dict[str, Any]:
        """Return the norms as arguments of a kernel: weights, the number of values (0 without a norm), and eps.

        Args:
            vector: converts weights to an argument.
        """
        arguments: dict[str, Any] = {}
        for name, norm, dim in self._norms:
            weight = None if norm is None else norm.weight
            n = 0 if norm is None else dim if weight is None else weight.shape[0]
            eps = 0.0 if norm is None else float(norm.eps)
            arguments |= {f"{name}_weight": vector(weight), f"n_{name}_norm": n, f"{name}_eps": eps}
        return arguments

    @property
    def has_axes(self) -> bool:
        return self.rope is not None and bool(self.rope.axes)

    @cached_property
    def result(self) -> Tensor:
        cache, key_dim = self.cache, self.cache.key_dim
        g.check_rows(Rows.TOKENS, self.q, self.k, self.v)
        _check_queries(self.q, cache)
        if (self.v is None) != (self.k is None or cache.values_in_keys):
            raise KernelError("keys need values unless the keys contain the values, and values need keys")
        for description, x, dim in (("keys", self.k, key_dim), ("values", self.v, cache.value_dim)):
            if x is not None and x.width != cache.n_heads * dim:
                raise KernelError(
                    f"{x.width} values of {description} do not fit a cache of {cache.n_heads} heads of {dim}"
                )
        if self.rope is not None and self.rope.first + 2 * len(self.rope.frequencies) > key_dim:
            raise KernelError(
                f"{len(self.rope.frequencies)} pairs of values from {self.rope.first} on cannot be rotated in heads "
                f"of {key_dim}"
            )
        for _, norm, dim in self._norms:
            shape = () if norm is None or norm.weight is None else norm.weight.shape
            if shape and (len(shape) > 1 or shape[0] > dim):
                raise KernelError(f"a norm of {list(shape)} weights cannot be taken of {dim} values of a head")
        if self.rope is not None and self.rope.axes:
            axes = self.rope.axes
            if len(axes) != len(self.rope.frequencies) or not {*axes} <= {0, 1, 2, 3}:
                raise KernelError(f"{len(self.rope.frequencies)} pairs of values cannot turn by the axes {axes}")
        if self.q_scale is not None and self.q_scale.length < 1:
            raise KernelError(f"queries cannot be scaled every {self.q_scale.length} positions")
        return Tensor(Rows.TOKENS, self.q.width)


def n_visible(reach: int | None, depth: int, n_tokens: int) -> float:
    """Return the mean number of positions that ``n_tokens`` tokens after ``depth`` others see.

    Args:
        reach: maximum of a token, including its own position; None sees all.
    """
    n = depth + n_tokens
    reach = n if reach is None else reach
    n_growing = min(max(reach - depth, 0), n_tokens)  # tokens that see all positions up to their own
    return (n_growing * (depth + (n_growing + 1) / 2) + (n_tokens - n_growing) * reach) / n_tokens


def _check_queries(q: Tensor, cache: KVCache) -> None:
    """Raises KernelError unless queries are whole heads, with equally many query heads per key/value head."""
    if q.width == 0 or q.width % (cache.n_heads * cache.key_dim):
        raise KernelError(
            f"{q.width} values of queries are not a multiple of {cache.n_heads} heads of {cache.key_dim}"
        )


class Attention(Operation[Tensor]):
    """Attention of q [T, H * key_dim] over a layer's cache: [T, H * value_dim].

    A token at position p sees the positions of its sequence up to p: all, the last ``window`` (max(0, p - window + 1)
    … p), or its ``chunk`` (p - p % chunk … p). If attention is not ``causal``, a token sees the same distance ahead,
    as far as positions are in the cache; the whole sequence must then be in one batch. With ``has_spans``, a token
    also sees later positions up to its end in the batch's ``ends``, as tokens of an image see each other. If
    attention is not causal either, it sees only that span, which starts at the batch's ``begins``.

    With a ``part``, a token sees only one part of the sequence, which is divided at the batch's `begins`: the
    positions before the division, at least the first one ("prompt"), as a decoder sees the output of an encoder, or
    the positions from there up to its own ("reply").

    With ``selected`` [T, k], the result of `IndexSelect`, a token sees only those positions. With [T, G * k], each
    key/value head uses a separate selection. With ``entries``, a second cache, a token also sees the compressed
    entries that end at its position or before, or the selected ones, in the same softmax.

    With ``softcap``, scaled scores s become softcap * tanh(s / softcap). With ``sinks`` [H], the softmax of each
    query head gets an additional score, which adds no value. With ``slopes`` [H], each score decreases by its head's
    slope per position of distance (ALiBi). With ``biases`` [H * (2 n + 1)], the bias of the head and the distance is
    added to each score, for positions up to n before and after the token. Larger distances use the last bias.

    Sources: arXiv:2205.14135; slopes: arXiv:2108.12409; biases: T5, arXiv:1910.10683; soft-cap: Gemma 2,
    arXiv:2408.00118; sinks: gpt-oss, after arXiv:2309.17453; chunks: Llama 4.
    """

    q: Tensor
    cache: KVCache
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Weight | None = None
    chunk: int | None = None
    causal: bool = True
    has_spans: bool = False
    selected: Tensor | None = None
    slopes: Weight | None = None
    biases: Weight | None = None
    entries: KVCache | None = None
    selected_by_head: bool = False
    part: Literal["all", "prompt", "reply"] = "all"

    @property
    def has_part(self) -> bool:
        return self.part != "all"

    @property
    def n_selected(self) -> int:
        """Maximum number of selected positions per key/value head; 0 without selection."""
        n_choices = self.cache.n_heads if self.selected_by_head else 1
        return 0 if self.selected is None else self.selected.width // n_choices

    @property
    def bias_width(self) -> int:
        """Number of distances with a bias per head; 0 without biases."""
        return 0 if self.biases is None else self.biases.shape[0] // self.n_heads

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.q.width // self.cache.key_dim

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.n_heads // self.cache.n_heads

    @cached_property
    def result(self) -> Tensor:
        g.check_rows(Rows.TOKENS, self.q)
        _check_queries(self.q, self.cache)
        cache_window, reach = self.cache.window, self.window or self.chunk
        if cache_window is not None and (reach is None or reach > cache_window):
            raise KernelError(f"attention must look no further back than a cache of {cache_window} tokens keeps")
        g.check_softcap(self.softcap)
        if self.chunk is not None and (self.window is not None or not self.causal):
            raise KernelError("attention in chunks must be causal and without a window")
        if self.has_spans and (self.chunk is not None or not (self.causal or self.window is None)):
            raise KernelError("attention with spans must be without chunks, and without a window if it is not causal")
        if self.has_part and (reach is not None or self.has_spans or self.selected is not None or not self.causal):
            raise KernelError(
                "attention to a part of the sequence must be causal, without window, spans or selection"
            )
        if self.selected is not None:
            g.check_rows(Rows.TOKENS, self.selected)
            has_reach = reach is not None and self.entries is None
            if has_reach or self.softcap or self.has_spans or not self.causal:
                raise KernelError("positions cannot be selected in attention with a window, spans or a soft-cap")
            if self.selected_by_head and self.selected.width % self.cache.n_heads:
                raise KernelError(f"{self.selected.width} positions do not fit {self.cache.n_heads} heads of keys")
        if self.entries is not None:
            first, second = (replace(c, layer=0, number=0, window=None, stride=1) for c in (self.cache, self.entries))
            if first != second or self.entries.stride == 1 or self.cache.stride > 1 or not first.values_in_keys:
                raise KernelError("entries of runs must be keys like keys of the window, which contain the values")
            if self.window is None or not self.causal or self.softcap or self.has_spans or first.n_heads > 1:
                raise KernelError("entries of runs need a window and one key head, without spans or soft-cap")
            if self.slopes is not None or self.biases is not None:
                raise KernelError("entries of runs cannot be combined with slopes or biases")
        g.check_shape(self.sinks, self.n_heads)
        g.check_shape(self.slopes, self.n_heads)
        if self.biases is not None:
            g.check_shape(self.biases, self.n_heads * (self.bias_width // 2 * 2 + 1))
        by_distance = (self.slopes is not None) + (self.biases is not None)
        if by_distance and (by_distance > 1 or self.softcap or self.has_spans or self.selected is not None):
            raise KernelError("slopes or biases must be used alone, without soft-cap, spans or selection")
        return Tensor(Rows.TOKENS, self.n_heads * self.cache.value_dim)
