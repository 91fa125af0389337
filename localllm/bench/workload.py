"""The tests of `localllm bench`, and the minimum cost of a test for a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from localllm.errors import UsageError
from localllm.gguf import GGUFFile
from localllm.kernels.cpu.costs import OperationCost, costs
from localllm.kernels.cpu.tiles import TILES
from localllm.kernels.graph import Operation
from localllm.kernels.operations import Attention
from localllm.kernels.operations.attention import n_visible
from localllm.loading.model_info import ModelInfo
from localllm.models.registry import read_model
from localllm.options.checks import whole_number
from localllm.quant.repack import repack_target


@dataclass(frozen=True)
class Test:
    __test__ = False  # so that pytest does not collect the class

    kind: str  # "pp", "tg", or "pg" for both in order
    n: int  # tokens to evaluate, or to generate
    depth: int  # tokens before the test
    n_after: int = 0  # tokens that "pg" generates after evaluating ``n``

    @property
    def name(self) -> str:
        name = f"pp{self.n}+tg{self.n_after}" if self.kind == "pg" else f"{self.kind}{self.n}"
        return name + (f" @ d{self.depth}" if self.depth else "")

    @property
    def context(self) -> int:
        """Necessary tokens of context."""
        return max(self.depth, 1) + self.n + self.n_after + 1


def make_tests(
    prompts: Sequence[int], generations: Sequence[int], depths: Sequence[int], pairs: Sequence[Sequence[int]] = ()
) -> list[Test]:
    """Return the tests for lists of numbers, and for pairs of numbers of both kinds. Omits tests of 0 tokens."""
    if wrong := [pair for pair in pairs if len(pair) != 2 or min(pair) < 1]:
        raise UsageError(
            f"-pg is {','.join(map(str, wrong[0]))}, but must be two whole numbers of at least 1, as 512,128"
        )
    tests = [
        Test(test_kind, whole_number(flag, n, 0), whole_number("-d", depth, 0))
        for depth in depths
        for test_kind, flag, counts in (("pp", "-p", prompts), ("tg", "-n", generations))
        for n in counts
    ]
    tests += [Test("pg", n, depth, after) for depth in depths for n, after in pairs]
    tests = [test for test in tests if test.n]
    if not tests:
        raise UsageError("no test is left to measure: give -p or -n a number above 0")
    return tests


@dataclass(frozen=True)
class ModelCost:
    """Bytes and multiplications that a model needs."""

    weight_bytes: int  # read per generated token
    kv_bytes: float  # keys and values of one token
    # multiplications of a token's activations with the layers' weights: of bytes, of floats
    layer_products: tuple[float, float]
    head_products: tuple[float, float]  # the same for the output matrix, which runs once per prompt
    attention_products: float  # multiplications of floats per token and visible token
    # maximum number of visible tokens including the token, None for all, and the fraction of the layers' keys and
    # values with this window
    windows: Mapping[int | None, float] = field(default_factory=lambda: {None: 1.0})

    @classmethod
    def of(cls, info: ModelInfo) -> Self:
        with GGUFFile.open(info.path) as file:
            graph = read_model(file, cache_type=info.cache_type).graph
        work = [*costs(graph, 1, 0)]
        attentions = [node.operation for node in graph.nodes if isinstance(node.operation, Attention)]
        windows: Counter[int | None] = Counter()
        for attention in attentions:
            windows[attention.window or attention.chunk] += attention.cache.bytes_per_token()
            if attention.entries is not None:
                windows[None] += attention.entries.bytes_per_token()
        kv_bytes = windows.total()
        return cls(
            weight_bytes=info.placement.multiplied,
            kv_bytes=kv_bytes,
            layer_products=products(cost for cost in work if cost.layer != "output"),
            head_products=products(cost for cost in work if cost.layer == "output"),
            attention_products=sum(a.n_heads * (a.cache.key_dim + a.cache.value_dim) for a in attentions),
            windows={window: n / kv_bytes for window, n in windows.items()},
        )

    def on(self, device: str, info: ModelInfo) -> ModelCost:
        """Return the part of one device. Layers have equal costs."""
        placement = info.placement
        share = placement.layers_on(device) / info.n_layers
        has_head = device == placement.devices[-1]
        of_bytes, of_floats = self.layer_products
        return replace(
            self,
            weight_bytes=placement.on(device).multiplied,
            kv_bytes=share * self.kv_bytes,
            layer_products=(share * of_bytes, share * of_floats),
            head_products=self.head_products if has_head else (0, 0),
            attention_products=share * self.attention_products,
        )

    def seen(self, test: Test) -> float:
        """Return the mean number of visible tokens of a token in the test."""
        return sum(share * n_visible(window, test.depth, test.n) for window, share in self.windows.items())

    def bytes_per_token(self, test: Test) -> float:
        """Return the bytes read per generated token of the test."""
        return self.weight_bytes + self.kv_bytes * self.seen(test)

    def products(self, test: Test) -> tuple[float, float]:
        """Return the multiplications of bytes and of floats for the test's prompt."""
        of_bytes, of_floats = (test.n * a + b for a, b in zip(self.layer_products, self.head_products, strict=True))
        return of_bytes, of_floats + test.n * self.attention_products * self.seen(test)


def products(work: Iterable[OperationCost]) -> tuple[float, float]:
    """Return multiplications of a token's activations with matrices, of bytes and of floats.

    The format that kernels read counts, which can differ from the file's format.
    """
    n_bytes = n_floats = 0.0
    for cost in work:
        if not isinstance(cost.sample, Operation):
            if repack_target(cost.sample) in TILES:
                n_bytes += cost.per_row
            else:
                n_floats += cost.per_row
    return n_bytes, n_floats
