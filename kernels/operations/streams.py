"""Operations on models with several parallel residual streams: hyper-connections and AltUp."""

from __future__ import annotations

from functools import cached_property

from localllm.errors import KernelError
from localllm.kernels.graph import Operation, Tensor, Weight, check_residual, check_rows, check_shape


class MixStreams(Operation[Tensor]):
    """Weighted sums of the n streams of x [rows, n * d], concatenated.

    Stream j is sum over i of (mixing[:, j * n + i] + offset) * x_i, plus stream j of the residual. d must be a
    multiple of 16. Without ``mixing``, all weights are the offset, and the number of results is the residual's number
    of streams, or 1. Streams before number ``first`` are the residual's.

    Sources: AltUp, arXiv:2301.13310; hyper-connections, arXiv:2409.19606.
    """

    x: Tensor
    mixing: Tensor | None
    n: int
    residual: Tensor | None = None
    offset: float = 0.0
    first: int = 0

    @property
    def size(self) -> int:
        """Values per stream."""
        return self.x.width // self.n

    @cached_property
    def result(self) -> Tensor:
        if self.n < 1 or self.x.width % (16 * self.n):
            raise KernelError(f"{self.x.width} values are not {self.n} streams of a multiple of 16")
        check_rows(self.x.rows, self.mixing, self.residual)
        added = 0 if self.residual is None else self.residual.width // self.size
        n_results = (added or 1) if self.mixing is None else self.mixing.width // self.n
        if (
            (self.mixing is not None and self.mixing.width != n_results * self.n)
            or not 0 <= self.first <= added
            or not n_results
        ):
            raise KernelError(
                f"weights of {n_results} streams do not match {self.n} input streams and {added} residual streams"
            )
        if self.residual is not None:
            check_residual(self.residual, self.x.rows, n_results * self.size)
        return Tensor(self.x.rows, n_results * self.size)


class HyperWeights(Operation[tuple[Tensor, ...]]):
    """The weights of hyper-connections over n streams, from x [rows, n], [rows, 2 n] or [rows, 2 n + n²].

    Computed from x times ``scale``, with a factor per part, plus ``bias``:

    - read [rows, n]: σ(first part) + eps, the weights of the streams in the input of the layer.
    - write [rows, n]: write_scale σ(second part) + write_offset, the weights of the layer's result in each stream.
    - mix [rows, n²]: the weights that mix the streams. softmax(third part) + eps over the rows of [n, n], then
      columns divided by their sum + eps, then ``n_rounds`` - 1 times rows and columns. The result is ordered by
      target stream, as required by `MixStreams`.

    Sources: mHC, arXiv:2512.24880; without the third part: Hunyuan 4.
    """

    x: Tensor
    scale: Weight
    bias: Weight
    n: int
    eps: float
    write_scale: float = 2.0
    write_offset: float = 0.0
    n_rounds: int = 1

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        n, n_parts = self.n, self.scale.shape[0]
        widths = [n, n, n * n][:n_parts]
        if not 1 <= n <= 16 or not 1 <= n_parts <= 3 or self.x.width != sum(widths) or self.n_rounds < 1:
            raise KernelError(f"{self.x.width} values are not {n_parts} kinds of weights of {n} streams")
        check_shape(self.bias, self.x.width)
        return tuple(Tensor(self.x.rows, width) for width in widths)


class StreamGate(Operation[Tensor]):
    """The weights of n streams, from keys and queries [rows, n * d]: [rows, n].

    The weight is σ(sign(s) √max(|s|, 1e-6)) with s = key · query / √d of the stream. d must be a multiple of 16.
    Source: Qwen 3.8 Flash Next.
    """

    key: Tensor
    query: Tensor
    n: int

    @property
    def size(self) -> int:
        """Values per stream."""
        return self.key.width // self.n

    @cached_property
    def result(self) -> Tensor:
        check_rows(self.key.rows, self.query)
        if self.n < 1 or self.key.width % (16 * self.n) or self.query.width != self.key.width:
            raise KernelError(
                f"keys of {self.key.width} values and queries of {self.query.width} are not {self.n} streams of a "
                "multiple of 16"
            )
        return Tensor(self.key.rows, self.n)
