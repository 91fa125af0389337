"""Mixtures of experts on a CUDA device: what is routed, and the launches that it takes.

experts.cu draws pairs, places and products.  Which kernel multiplies:

=====================  ====================================  ==================  ==============
rows of activations    weights of integers                   F16, BF16           F32
=====================  ====================================  ==================  ==============
of 1 to 4 tokens       matvec_experts: rows one by one       matmul_few_experts  matvec_experts
up to 8 to an expert   matmul_few_experts, 8 of one expert   matmul_few_experts  matvec_experts
more                   matmul_experts, a tile of one expert  matmul_experts      matvec_experts
=====================  ====================================  ==================  ==============

Before sm_80 integers go through matvec_experts, and F16 through matmul_few_experts.  Q2_K, Q3_K, Q5_K and Q6_K go
through matmul_experts instead of matmul_few_experts, which has no registers for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from localllm.errors import KernelError
from localllm.kernels.buffers import Buffer
from localllm.kernels.cuda import matmul
from localllm.kernels.cuda.arena import Extent, Inputs, Mixture, StepLimits, Stored
from localllm.kernels.cuda.batch import N_PLACES, N_TOKENS
from localllm.kernels.cuda.driver import Argument, DeviceMemory
from localllm.kernels.cuda.launch import Launch
from localllm.kernels.cuda.matmul import MAX_MATRICES, PackedFormat, Product
from localllm.kernels.cuda.weights import PackedMatrix
from localllm.kernels.graph import GATINGS

#: Experts of a layer that kernels know, and how many of them a token may go to.
MAX_EXPERTS, MAX_CHOSEN = 1024, 32
#: Threads, tokens and columns of a block in experts.cu.
_ROUTE_THREADS, _ROUTE_TOKENS, _GROUP_THREADS, _SUM_THREADS, _SUM_COLUMNS = 128, 4, 1024, 128, 512
_NULL = np.uint64(0)
#: Rows of a product before those that matmul takes.
_FEW_ROWS = 8


class ChosenExperts:
    """The experts that each token goes to, and what is made of that: see experts.cu.

    Raises:
        KernelError: kernels do not know so many experts.
    """

    def __init__(self, step: StepLimits, mixture: Mixture) -> None:
        if mixture.n > MAX_EXPERTS or mixture.k > MAX_CHOSEN:
            raise KernelError(
                f"{mixture.n} experts, of which a token goes to {mixture.k}, are more than CUDA kernels know, which "
                f"is {MAX_EXPERTS} and {MAX_CHOSEN}: run the model's layers on the CPU"
            )
        self.step, self.mixture = step, mixture
        n_pairs, n_places = step.max_tokens * mixture.k, step.max_rows(N_PLACES)
        # Products, how many there are, ids, expert weights, places, and the places' tokens.
        sizes = 16 * mixture.n_products(step.max_tokens, _FEW_ROWS), 16, *3 * [4 * n_pairs], 4 * n_places
        self._bounds = tuple(pairwise(accumulate(sizes, initial=0)))
        self.buffer = Buffer(sum(sizes))

    def _part(self, number: int) -> DeviceMemory:
        begin, end = self._bounds[number]
        return self.step.arena.at(self.buffer, begin, end - begin)

    @property
    def products(self) -> DeviceMemory:
        return self._part(0)

    @property
    def n_products(self) -> DeviceMemory:
        return self._part(1)

    @property
    def ids(self) -> DeviceMemory:
        return self._part(2)

    @property
    def weights(self) -> DeviceMemory:
        return self._part(3)

    @property
    def places(self) -> DeviceMemory:
        return self._part(4)

    @property
    def rows(self) -> DeviceMemory:
        return self._part(5)

    def product_rows(self, extent: Extent) -> int:
        """Rows of one expert that are multiplied at once, at most."""
        few = extent.n_tokens * self.mixture.k <= _FEW_ROWS * self.mixture.n
        if few or self.step.properties.capability < matmul.TENSOR_CORES:
            return _FEW_ROWS
        return self.step.tile_rows[-1]


@dataclass(frozen=True, eq=False)
class ExpertScores:
    """Probabilities of experts, and what they are chosen by."""

    step: StepLimits
    logits: Stored
    gating: str
    bias: DeviceMemory | None
    n_groups: int
    n_top_groups: int
    n_group_best: int
    probabilities: Stored
    scores: Stored

    def launches(self, extent: Extent) -> Iterator[Launch]:
        logits = self.logits.memory, np.int32(self.logits.stride), np.int32(self.logits.width)
        how = np.int32(GATINGS.index(self.gating)), _NULL if self.bias is None else self.bias
        groups = map(np.int32, (self.n_groups, self.n_top_groups, self.n_group_best))
        grid, to = (-(-extent.n_tokens // _ROUTE_TOKENS),), (self.probabilities.memory, self.scores.memory)
        yield _launch("expert_scores", grid, _ROUTE_THREADS, self.step.batch.header, *logits, *how, *groups, *to)


@dataclass(frozen=True, eq=False)
class Route:
    """The experts that each token goes to, their weights, and the places of all that.

    Attributes:
        logits: what they are chosen by; `ExpertScores` if there are ``probabilities``, which are then the weights.
        factors: of the weights of each expert.
    """

    logits: Stored
    probabilities: Stored | None
    norm_topk_prob: bool
    scale: float
    factors: DeviceMemory | None
    chosen: ChosenExperts

    def launches(self, extent: Extent) -> Iterator[Launch]:
        chosen, batch = self.chosen, self.chosen.step.batch
        logits = self.logits.memory, np.int32(self.logits.stride), np.int32(self.logits.width)
        k, n = np.int32(chosen.mixture.k), np.int32(chosen.mixture.n)
        probabilities = _NULL if self.probabilities is None else self.probabilities.memory
        factors = _NULL if self.factors is None else self.factors
        how = np.int32(self.norm_topk_prob), np.float32(self.scale), probabilities, factors
        grid = (-(-extent.n_tokens // _ROUTE_TOKENS),)
        yield _launch("route", grid, _ROUTE_THREADS, batch.header, *logits, k, *how, chosen.ids, chosen.weights)
        rows = np.int32(chosen.product_rows(extent))
        to = chosen.places, chosen.rows, chosen.products, chosen.n_products
        yield _launch("group_by_expert", (1,), _GROUP_THREADS, batch.header, chosen.ids, k, n, rows, *to)


@dataclass(frozen=True, eq=False)
class Gather:
    """Rows of tokens at their places, as products with weights of a format read them."""

    chosen: ChosenExperts
    format: PackedFormat
    x: Stored
    inputs: Inputs

    def launches(self, extent: Extent) -> Iterator[Launch]:
        launch = matmul.quantise_launch(self.format, self.x.width, extent.n_places)
        x = self.x.memory, np.int32(self.x.stride), np.int32(self.x.width)
        counted = self.chosen.step.batch.header_at(N_PLACES), self.chosen.rows
        to = self.inputs.units, self.inputs.scales, np.int32(extent.n_places)
        yield replace(launch, kernel="quantise_gathered").given(*x, *counted, *to)


@dataclass(frozen=True, eq=False)
class MultiplyExperts:
    """Products of the same inputs with matrices of one format, of the experts that rows go to."""

    chosen: ChosenExperts
    inputs: Inputs
    weights: Sequence[PackedMatrix]
    results: Sequence[Stored]

    def launches(self, extent: Extent) -> Iterator[Launch]:
        format = self.weights[0].packed
        rows, capability = self.chosen.product_rows(extent), self.chosen.step.properties.capability
        kernel = matmul.expert_kernel(format, extent.n_tokens, rows, capability)
        step = 1 if kernel == "matmul_experts" else MAX_MATRICES
        pairs = list(zip(self.weights, self.results, strict=True))
        for i in range(0, len(pairs), step):
            yield self._launch(pairs[i : i + step], extent, rows)

    def _launch(self, pairs: Sequence[tuple[PackedMatrix, Stored]], extent: Extent, product_rows: int) -> Launch:
        chosen, mixture, properties = self.chosen, self.chosen.mixture, self.chosen.step.properties
        first, n_tokens = pairs[0][0], extent.n_tokens
        launch = matmul.expert_launch(
            first.packed,
            [w.n_out for w, _ in pairs],
            first.n_in,
            n_tokens,
            n_tokens * mixture.k,
            mixture.n_products(n_tokens, product_rows),
            product_rows,
            capability=properties.capability,
            shared_bytes=properties.shared_bytes,
            tile_rows=chosen.step.tile_rows,
        )
        products = [Product(w.memory, y.memory, w.n_out, y.stride) for w, y in pairs]
        inputs = self.inputs.units, self.inputs.scales, np.int32(extent.n_places)
        n_tiles, n_chunks = first.packed.n_tiles(first.n_in), first.packed.n_chunks(first.n_in)
        own: dict[str, tuple[Argument, ...]] = {
            "matvec_experts": (
                *(chosen.step.batch.header_at(N_TOKENS), np.int32(n_tiles)),
                *(np.int32(mixture.k), chosen.ids, chosen.places, *matmul.matrix_arguments(products)),
            ),
            "matmul_few_experts": (
                *(chosen.n_products, np.int32(n_tiles), chosen.products),
                *matmul.matrix_arguments(products),
            ),
            "matmul_experts": (
                *(chosen.n_products, np.int32(n_tiles), np.int32(n_chunks), chosen.products),
                *products[0].arguments(),
            ),
        }
        return launch.given(*inputs, *own[launch.kernel])


@dataclass(frozen=True, eq=False)
class FinishExperts:
    """Products times the weights of their pairs, plus the biases of their experts, in place."""

    chosen: ChosenExperts
    is_weighted: bool
    biases: DeviceMemory | None
    y: Stored

    def launches(self, extent: Extent) -> Iterator[Launch]:
        chosen, y, k = self.chosen, self.y, self.chosen.mixture.k
        weights, biases = chosen.weights if self.is_weighted else _NULL, _NULL if self.biases is None else self.biases
        given = chosen.step.batch.header, chosen.places, chosen.ids, weights, biases, np.int32(k)
        grid = (-(-y.width // _SUM_COLUMNS), k * extent.n_tokens)
        rows = y.memory, np.int32(y.stride), np.int32(y.width)
        yield _launch("finish_experts", grid, _SUM_THREADS, *given, *rows)


@dataclass(frozen=True, eq=False)
class AddExperts:
    """The sum of each token's products, by their weights if it ``is_weighted``; ``adds``: to what is in its place."""

    chosen: ChosenExperts
    products: Stored
    is_weighted: bool
    adds: bool
    y: Stored

    def launches(self, extent: Extent) -> Iterator[Launch]:
        chosen, products, y = self.chosen, self.products, self.y
        weights = chosen.weights if self.is_weighted else _NULL
        given = chosen.step.batch.header, chosen.places, weights, np.int32(chosen.mixture.k)
        rows = products.memory, np.int32(products.stride), np.int32(products.width)
        grid = (-(-products.width // _SUM_COLUMNS), extent.n_tokens)
        to = y.memory, np.int32(y.stride), np.int32(self.adds)
        yield _launch("add_experts", grid, _SUM_THREADS, *given, *rows, *to)


def _launch(kernel: str, grid: tuple[int, ...], threads: int, *arguments: Argument) -> Launch:
    return Launch("experts", kernel, {}, grid, (threads,), arguments=arguments)
