"""Collect importance matrices: run a model on pieces of text, and sum the squared inputs of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from localllm.engine.runner import n_cache_pages
from localllm.errors import UsageError
from localllm.gguf import GGUFFile
from localllm.kernels.backend import Backend, Batch, Step
from localllm.kernels.cpu.host import check_memory
from localllm.kernels.graph import Graph, Routing, Rows, Tensor
from localllm.kernels.operations import ExpertLinears, ExpertOutput, Linear, Linears
from localllm.models.registry import read_model
from localllm.quantize.imatrix import ImatrixEntry, ImportanceMatrix
from localllm.tokenizer import Tokenizer

#: Tokens of an independent piece of text.
CONTEXT = 512
#: Tokens per step: the watched tensors of all layers for these tokens are in memory.
_STEP = 128


@dataclass(frozen=True)
class _Product:
    """Rows that weights multiply, and the routing if the weights are experts."""

    x: Tensor
    weights: tuple[str, ...]
    routing: Routing | None = None


def _products(graph: Graph) -> Iterator[_Product]:
    """Yield the products of a graph's layers, without the output's: llama.cpp omits it, because it stays precise."""
    for node in graph.nodes:
        operation = node.operation
        if node.layer == "output":
            continue
        match operation:
            case Linear():
                yield _Product(operation.x, (operation.matrix.weight.name,))
            case Linears():
                yield _Product(operation.x, tuple(matrix.weight.name for matrix in operation.matrices))
            case ExpertLinears():
                names = tuple(weight.name for weight in operation.experts)
                yield _Product(operation.x, names, operation.routing)
            case ExpertOutput():
                yield _Product(operation.h, (operation.experts.name,), operation.routing)


def chunks(tokenizer: Tokenizer, text: str, context: int = CONTEXT) -> list[list[int]]:
    """Return the text in pieces of ``context`` tokens. Pieces start with BOS if the model's prompts do. Remaining
    tokens are not used.
    """
    ids = tokenizer.encode(text)
    n = len(ids) // context
    if not n:
        raise UsageError(f"the text has {len(ids):,} tokens, but {context:,} are needed: give a longer one")
    return [tokenizer.with_bos(ids[i * context : (i + 1) * context], replaced=1) for i in range(n)]


def collect(
    file: GGUFFile, pieces: Sequence[Sequence[int]], backend: Backend, *, hessians: bool = False
) -> Iterator[ImportanceMatrix]:
    """Collect the inputs of a model's weights on independent pieces of text. Yields the sums after each piece.

    Args:
        file: the model; it may be quantised.
        pieces: token ids; all pieces have the same length.
        backend: the CPU or the reference.
        hessians: also collect XᵀX of each matrix's input rows X, without experts: 4 n² bytes of memory for n columns.
    """
    context = len(pieces[0])
    graph = read_model(file, context).graph
    products = list(_products(graph))
    graph.watched = {product.x for product in products} | {p.routing for p in products if p.routing is not None}
    n_pages, n_tokens = n_cache_pages(graph, context, 1, backend.page_size), min(_STEP, context)
    needed = backend.footprint(graph, n_pages=n_pages, max_tokens=n_tokens, max_outputs=1, n_states=1)
    squares = sum(4 * product.x.width**2 for product in products if hessians and product.routing is None)
    check_memory(needed.n_bytes + squares, "the model with the collected sums")
    step = needed.load(None)
    file.check_unchanged()
    sums: dict[_Product, ImatrixEntry] = {}
    for n_pieces, piece in zip(count(1), pieces, strict=False):
        for start in range(0, context, n_tokens):
            step.run(step_batch(piece, start, min(start + n_tokens, context), n_pages, backend.page_size))
            for product in products:
                entry = _entry(step, product, hessians)
                sums[product] = sums[product] + entry if product in sums else entry
        entries = {name: entry for product, entry in sums.items() for name in product.weights}
        yield ImportanceMatrix(None, entries, n_chunks=n_pieces, chunk_size=context)


def _entry(step: Step, product: _Product, hessians: bool) -> ImatrixEntry:
    """Return the sums of one step, separately for each expert."""
    x = step.value(product.x)
    rows = np.square(x, dtype=np.float64)
    if product.routing is None:
        return ImatrixEntry(rows.sum(axis=0)[None], np.array([len(rows)]), x.T @ x if hessians else None)
    ids = step.value(product.routing)
    if product.x.rows is not Rows.CHOSEN:
        rows = np.repeat(rows, ids.shape[1], axis=0)
    is_chosen = ids.reshape(-1) == np.arange(product.routing.n_experts)[:, None]
    return ImatrixEntry(is_chosen.astype(np.float64) @ rows, is_chosen.sum(axis=1))


def step_batch(
    piece: Sequence[int], start: int, stop: int, n_pages: tuple[int, ...], page_size: int, *, outputs: bool = False
) -> Batch:
    """Return a batch of tokens start : stop of a sequence at the first page of the cache, with or without logits."""
    n_blocks = -(-len(piece) // page_size)
    tables: NDArray[np.int32] = np.zeros((len(n_pages), 1, n_blocks), np.int32)
    for table, n in zip(tables, n_pages, strict=True):
        table[0] = np.arange(n_blocks) % n
    return Batch(
        ids=np.array(piece[start:stop], np.int32),
        positions=np.arange(start, stop, dtype=np.int32),
        query_starts=np.array([0, stop - start], np.int32),
        kv_lengths=np.array([stop], np.int32),
        block_tables=tables,
        outputs=np.arange(stop - start if outputs else 0, dtype=np.int32),
        states=np.zeros(1, np.int32),
    )
