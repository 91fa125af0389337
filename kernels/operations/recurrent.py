"""Operations with a recurrent state per sequence: convolutions, linear attention and state-space models."""

from __future__ import annotations

from functools import cached_property

from localllm.errors import KernelError
from localllm.kernels import graph as g
from localllm.kernels.graph import Operation, RecurrentState, Rows, Tensor, Weight

#: Maximum kernel length of `CausalConv`.
MAX_CONV = 16


class CausalConv(Operation[Tensor]):
    """Convolution of each column of x [T, n] along its sequence. The kernel's last value applies to the token itself.

    y[t] = activation(sum over j of weight[:, j] * x[t - kernel + 1 + j] + bias), with weight [n, kernel] and zeros
    before the sequence. ``state`` [kernel - 1, n] keeps the last inputs. Source: Mamba, arXiv:2312.00752.

    With ``ahead``, the kernel also applies to this number of later tokens: y[t] is the sum over x[t + ahead - kernel
    + 1 + j], with zeros after the sequence. The whole sequence must then be in one batch.
    """

    x: Tensor
    weight: Weight
    state: RecurrentState
    bias: Weight | None = None
    silu: bool = False
    ahead: int = 0
    float_columns = ("weight",)

    @cached_property
    def result(self) -> Tensor:
        g.check_rows(Rows.TOKENS, self.x)
        g.check_dimensions(self.weight, 2)
        n, kernel = self.x.width, self.weight.shape[1]
        if not 2 <= kernel <= MAX_CONV:
            raise KernelError(f"a convolution needs kernels of 2 to {MAX_CONV} values, not of {kernel}")
        if not 0 <= self.ahead < kernel:
            raise KernelError(f"a kernel of {kernel} values cannot apply to {self.ahead} later tokens")
        g.check_shape(self.weight, n, kernel)
        g.check_shape(self.bias, n)
        if self.state.shape != (kernel - 1, n):
            raise KernelError(f"a convolution needs a state {[kernel - 1, n]}, not {list(self.state.shape)}")
        return Tensor(Rows.TOKENS, n)


class BlockConv(Operation[Tensor]):
    """Convolution of each column of x [T, n] along a sequence's tokens in the batch, with a kernel per token.

    y[t] = sum over j of (base[side, j] + factors[t, side, j]) * x[t - j], with zeros before the sequence's first
    token in the batch. ``base`` is [2 * kernel, n], and ``factors`` [T, 2 * kernel * n_groups] contains a value for
    each group of n / n_groups neighbouring columns, a multiple of 16. Unlike in other operations, a token's result
    depends on the batch, which must contain all tokens of a block. Source: llama.cpp's DFlash 2.
    """

    x: Tensor
    factors: Tensor
    base: Weight
    side: int
    float_rows = ("base",)

    @property
    def kernel(self) -> int:
        return self.base.shape[0] // 2

    @property
    def n_groups(self) -> int:
        return self.factors.width // (2 * self.kernel)

    @cached_property
    def result(self) -> Tensor:
        g.check_rows(Rows.TOKENS, self.x, self.factors)
        g.check_dimensions(self.base, 2)
        n_rows, n = self.base.shape
        if n_rows % 2 or not 1 <= n_rows // 2 <= MAX_CONV or self.side not in (0, 1):
            raise KernelError(f"a convolution of blocks needs 2 kernels of 1 to {MAX_CONV} values, not {n_rows} rows")
        g.check_shape(self.base, n_rows, self.x.width)
        if self.factors.width % n_rows or n % (16 * self.n_groups):
            raise KernelError(f"{self.factors.width} factors do not match {n} columns in groups of a multiple of 16")
        return Tensor(Rows.TOKENS, n)


class GatedDelta(Operation[Tensor]):
    """Linear attention whose state S [d_k, d_v] of each value head decays and is corrected by the delta rule.

    For each token, with q and k divided by their length, √(sum of squares + eps), and q by √d_k:

        S = exp(a · softplus(decay + dt_bias)) · S;  S += k ⊗ σ(beta) (v - Sᵀk);  result = Sᵀq

    With a negative ``bound``, the decay factor is exp(bound · σ(a · (decay + dt_bias))), at least exp(bound).

    ``qkv`` is one tensor of [queries | keys | values] with n_key_heads, n_key_heads and H heads, or three tensors.
    ``decay`` contains H values, like ``beta``, or H * d_k for a decay per channel. ``a`` [H] is negative; with a
    bound it may have either sign, and its magnitude is used. Value head h uses the keys and queries of key head
    h mod n_key_heads or, if ``is_grouped``, of h ÷ (H / n_key_heads). ``state`` is [H, d_k, d_v]; d_k and d_v must be
    multiples of 16. The result is [T, H * d_v].

    Sources: Gated DeltaNet, arXiv:2412.06464; decay per channel: Kimi Linear, arXiv:2510.26692; a bound: Ling 3.
    """

    qkv: tuple[Tensor, ...]
    decay: Tensor
    beta: Tensor
    a: Weight
    dt_bias: Weight
    state: RecurrentState
    n_key_heads: int
    is_grouped: bool = False
    eps: float = 1e-6
    bound: float = 0.0
    float_columns = ("a",)

    @property
    def is_per_channel(self) -> bool:
        return self.decay.width != self.state.shape[0]

    @cached_property
    def result(self) -> Tensor:
        g.check_rows(Rows.TOKENS, *self.qkv, self.decay, self.beta)
        n_heads, d_k, d_v = _check_heads(self.state, self.n_key_heads)
        keys = self.n_key_heads * d_k
        _check_side_by_side(self.qkv, (keys, keys, n_heads * d_v))
        if self.decay.width not in (n_heads, n_heads * d_k) or self.beta.width != n_heads:
            raise KernelError(f"decay and beta of {n_heads} heads cannot have {self.decay.width}, {self.beta.width}")
        _check_column(self.a, n_heads)
        g.check_shape(self.dt_bias, self.decay.width)
        return Tensor(Rows.TOKENS, n_heads * d_v)


class Scan(Operation[Tensor]):
    """Mamba 2's recurrence with a state S [N, P] per head.

    For each token, with Δ = softplus(dt + dt_bias):

        S = exp(a Δ) · S + B ⊗ Δ x;  result = Sᵀ C + D x

    ``xbc`` is one tensor of [x | B | C] with H, n_groups and n_groups heads, or three tensors. Head h uses B and C of
    group h ÷ (H / n_groups). ``a`` [H] is negative. ``state`` is [H, N, P]; N and P must be multiples of 16. The
    result is [T, H * P]. Source: arXiv:2405.21060.
    """

    xbc: tuple[Tensor, ...]
    dt: Tensor
    a: Weight
    dt_bias: Weight
    d: Weight
    state: RecurrentState
    n_groups: int
    float_columns = ("a", "d")

    @cached_property
    def result(self) -> Tensor:
        g.check_rows(Rows.TOKENS, *self.xbc, self.dt)
        n_heads, n, p = _check_heads(self.state, self.n_groups)
        _check_side_by_side(self.xbc, (n_heads * p, self.n_groups * n, self.n_groups * n))
        if self.dt.width != n_heads:
            raise KernelError(f"{self.dt.width} time steps do not match {n_heads} heads: give one per head")
        for weight in (self.a, self.d):
            _check_column(weight, n_heads)
        g.check_shape(self.dt_bias, n_heads)
        return Tensor(Rows.TOKENS, n_heads * p)


class ChannelScan(Operation[Tensor]):
    """Mamba's recurrence with N state values per channel, which decay independently.

    For each token, for x and dt [T, n], b and c [T, N], with Δ = softplus(dt + dt_bias):

        h_i = exp(a_i Δ) h_i + b_i Δ x;  result = sum over i of c_i h_i + d x

    ``a`` [n, N] is negative. ``state`` is [N, n]. n must be a multiple of 16 and N at most 64.
    Source: arXiv:2312.00752.
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    a: Weight
    dt_bias: Weight
    d: Weight
    state: RecurrentState
    float_columns = ("a",)

    @cached_property
    def result(self) -> Tensor:
        g.check_rows(Rows.TOKENS, self.x, self.dt, self.b, self.c)
        n, n_state = self.x.width, self.b.width
        if (
            self.dt.width != n
            or self.c.width != n_state
            or n % 16
            or n_state > 64
            or self.state.shape != (n_state, n)
        ):
            raise KernelError(f"a scan of {n} channels of {n_state} values does not match {list(self.state.shape)}")
        g.check_shape(self.a, n, n_state)
        for weight in (self.dt_bias, self.d):
            g.check_shape(weight, n)
        return Tensor(Rows.TOKENS, n)


class WKV(Operation[tuple[Tensor, ...]]):
    """RWKV's linear attention, whose state S [d, d] of each head has a decay per row.

    r, k, v and decay are [T, H * d]. With ``rate`` (RWKV 7), for each token and head:

        w = exp(-σ(decay) / √e);  a = σ(rate);  κ = k ∘ key_scale, divided by its length
        k' = k ∘ (1 + (a - 1) ∘ key_rate)
        S = diag(w) S - (κ ∘ a) ⊗ Sᵀκ + k' ⊗ v;  result = Sᵀr

    Without ``rate``, w = exp(-exp(decay)). With ``bonus`` (RWKV 6), k' = k, and the result is Sᵀr of the state before
    the token. Without ``bonus`` (gated linear attention), k' = k ∘ (1 - w), and the result includes the token.

    The second result, if there is a ``bonus`` [H * d], is v times the sum of r ∘ k' ∘ bonus over each head.
    ``state`` is [H, d, d]; d must be a multiple of 16.

    Sources: RWKV 7, arXiv:2503.14456; RWKV 6, arXiv:2404.05892; gated linear attention, arXiv:2312.06635.
    """

    r: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    state: RecurrentState
    rate: Tensor | None = None
    key_scale: Weight | None = None
    key_rate: Weight | None = None
    bonus: Weight | None = None

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        tensors = [x for x in (self.r, self.k, self.v, self.decay, self.rate) if x is not None]
        g.check_rows(Rows.TOKENS, *tensors)
        n_heads, rows, columns = _check_heads(self.state, 1)
        if rows != columns or any(x.width != n_heads * rows for x in tensors):
            raise KernelError(f"rows of {[x.width for x in tensors]} values do not match {list(self.state.shape)}")
        for weight in (self.key_scale, self.key_rate, self.bonus):
            g.check_shape(weight, n_heads * rows)
        scales = (self.key_scale, self.key_rate, self.bonus)
        if (None in scales) if self.rate is not None else scales[:2] != (None, None):
            raise KernelError("rates of keys need key_scale, key_rate and bonus, which other states do not have")
        return tuple(Tensor(Rows.TOKENS, n_heads * rows) for _ in range(1 if self.bonus is None else 2))


def side_by_side(tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> list[tuple[Tensor, int]]:
    """Return the tensor and the first column of each part with the given widths."""
    if len(tensors) == len(widths):
        return [(x, 0) for x in tensors]
    return [(tensors[0], sum(widths[:i])) for i in range(len(widths))]


def _check_side_by_side(tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> None:
    actual = tuple(x.width for x in tensors)
    if actual not in (widths, (sum(widths),)):
        raise KernelError(f"tensors have {actual} values, but need {widths}, in one tensor or one each")


def _check_heads(state: RecurrentState, n_groups: int) -> tuple[int, int, int]:
    if len(state.shape) != 3 or state.shape[1] % 16 or state.shape[2] % 16 or min(state.shape) < 1:
        raise KernelError(
            f"a state {list(state.shape)} must be [n_heads, rows, columns] with rows and columns multiples of 16"
        )
    n_heads, rows, columns = state.shape
    if n_groups < 1 or n_heads % n_groups:
        raise KernelError(f"{n_heads} heads cannot share the keys of {n_groups}")
    return n_heads, rows, columns


def _check_column(weight: Weight, n: int) -> None:
    """Raises KernelError unless the shape is [n] or [n, 1], the shapes of recurrence weights in files."""
    g.check_shape(weight, *((n, 1) if len(weight.shape) == 2 else (n,)))
