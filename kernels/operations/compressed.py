"""Attention to fewer entries: selection of positions by an indexer, and compression of tokens to single entries."""

from __future__ import annotations

from functools import cached_property

from localllm.errors import KernelError
from localllm.kernels.cache_rounding import CODE_BITS
from localllm.kernels.graph import KVCache, Operation, Rows, Tensor, Weight, check_dimensions, check_rows, check_shape

#: Maximum number of positions in a run of `IndexSelect`. The length of a run must divide it.
MOST_RUN = 1024


class IndexSelect(Operation[Tensor]):
    """The k positions that a token attends to, ascending: numbers [T, k], padded with -1 if it sees fewer.

    For a cache with several tokens per entry (`KVCache.stride`), the numbers are indices of entries.

    The positions with the largest scores are selected, the first of equal ones. The score is the sum over heads of
    weight * max(0, q · key), for queries [T, H * dim], ``head_weights`` [T, H] (None: all 1) and the keys of an
    indexer, which `RopeAppend` writes into its cache.

    With a ``run`` of n > 1 positions, k / n whole runs are selected among the complete runs that a token sees, by the
    key of each run's last position. Positions after the last complete run are added, at most n - 1.

    With ``pool`` [n, dim], the key of a run is a weighted sum of the keys of its positions. The weights of each
    channel are the softmax of the positions' gates plus the pool's values. The cache stores [key | gate | key of the
    run that ends here] per token, without codes. `RopeAppend` receives a placeholder for the third part.

    With ``n_last``, each head selects separately, [T, H * k]: the runs with the largest q · key of any position. The
    token's own run counts up to the token. The last ``n_last`` runs, the token's own included, are always
    selected.

    Sources: DeepSeek-V3.2, arXiv:2512.02556; runs: GLM-5.3; the largest product of a run: MiniMax-M3.
    """

    q: Tensor
    head_weights: Tensor | None
    cache: KVCache
    k: int
    run: int = 1
    pool: Weight | None = None
    n_last: int = 0
    float_rows = ("pool",)

    @property
    def dim(self) -> int:
        """Values per key."""
        return self.cache.key_dim // (1 if self.pool is None else 3)

    @property
    def n_heads(self) -> int:
        return self.q.width // self.dim

    @property
    def n_choices(self) -> int:
        """Heads that select separately; 1 if all select together."""
        return self.n_heads if self.n_last else 1

    @cached_property
    def result(self) -> Tensor:
        cache, run = self.cache, self.run
        check_rows(Rows.TOKENS, self.q, self.head_weights)
        if cache.n_heads != 1 or not cache.values_in_keys or cache.window is not None or self.k < 1:
            raise KernelError("an indexer must keep one key per token and choose at least one position")
        if cache.stride > 1 and (64 % cache.stride or run > 1 or self.n_last or cache.key_dim % 16):
            raise KernelError(
                f"an indexer with an entry per {cache.stride} tokens needs a divisor of 64, keys of a multiple of 16 "
                "values, and no runs"
            )
        if run < 1 or MOST_RUN % run or self.k % run:
            raise KernelError(
                f"runs of {run} positions must divide {MOST_RUN}, and the {self.k} positions that are chosen"
            )
        if self.pool is not None:
            check_shape(self.pool, run, self.dim)
            if cache.key_dim != 3 * self.dim:
                raise KernelError(f"a cache of {cache.key_dim} values has no gates and keys of runs of {self.dim}")
        if run > 1 and not self.n_last and (self.dim % 16 or 64 % run or cache.types[0] in CODE_BITS):
            raise KernelError(f"keys of {run} positions must be floats, a multiple of 16, in runs that divide 64")
        if self.q.width % self.dim:
            raise KernelError(f"{self.q.width} values are not an indexer's queries, of {self.dim} each")
        if self.head_weights is not None and self.head_weights.width != self.n_heads:
            raise KernelError(f"{self.head_weights.width} weights do not fit {self.n_heads} heads of an indexer")
        if self.n_last == 0:
            return Tensor(Rows.TOKENS, self.k + run - 1)
        if not 1 <= self.n_last <= self.k // run or self.head_weights is not None or self.pool is not None:
            raise KernelError(f"{self.n_last} of {self.k // run} runs cannot be the last ones, which heads choose")
        return Tensor(Rows.TOKENS, self.n_heads * self.k)


class Compress(Operation[Tensor]):
    """One row per n tokens, stored at the last of them: [T, dim]; other rows are zero.

    ``cache`` stores dim values and dim gates per token, [values | gates], or twice as many of both, [values | more
    values | gates | more gates]. A row is the weighted sum of its run's values. The weights of each channel are the
    softmax of the gates plus ``biases`` [n, dim]. With twice as many values, ``biases`` are [n, 2 dim], and the sum
    covers 2 n entries: the first values of the previous run (none for the first run), and the second values of the
    current run. x is the result of the `RopeAppend` that appended the tokens to the cache.

    Source: DeepSeek V4.
    """

    x: Tensor
    cache: KVCache
    biases: Weight
    float_rows = ("biases",)

    @property
    def run(self) -> int:
        """Tokens per run."""
        return self.biases.shape[0]

    @property
    def n_series(self) -> int:
        """Number of value series per token, which belong to different runs."""
        return self.cache.n_heads // 2

    @cached_property
    def result(self) -> Tensor:
        cache = self.cache
        check_rows(Rows.TOKENS, self.x)
        check_dimensions(self.biases, 2)
        if (
            cache.n_heads not in (2, 4)
            or not cache.values_in_keys
            or cache.types[0] in CODE_BITS
            or cache.key_dim % 16
        ):
            raise KernelError(
                f"{cache.n_heads} heads are not values and gates, of one kind or two, of a multiple of 16 channels, "
                "without codes"
            )
        check_shape(self.biases, self.run, self.n_series * cache.key_dim)
        if self.run & (self.run - 1) or (cache.window or self.run * self.n_series) < self.run * self.n_series:
            raise KernelError(
                f"runs of {self.run} tokens must be a power of two, and fit into a cache of {cache.window} tokens"
            )
        return Tensor(Rows.TOKENS, cache.key_dim)
