"""What drafters in files of their own take of the model that they draft for: hidden states, embedding and head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Embed, Graph, LayerTag, Linear, Outputs, SideBySide, Tensor, Weight
from localllm.models.config import Metadata
from localllm.models.weights import Weights
from localllm.quant.types import GGMLType

_CHOOSE = "choose the drafter that was made for it"


def read_layers(meta: Metadata) -> list[int]:
    """The numbers of the layers whose inputs a drafter reads; that of all layers is the output of the last one."""
    numbers = meta.find("target_layers")
    if not isinstance(numbers, list) or not numbers or any(type(n) is not int or n < 0 for n in numbers):
        key = f"{meta.architecture}.target_layers"
        raise ModelError(f"{key} is {quoted(numbers)}, but must be numbers of layers: the file is broken")
    return numbers


def check_target(config: Any, n_layers: int) -> None:
    """Makes sure, where a drafter's checkpoint is converted, that the model named with it is as wide as the one that
    it reads so many layers of."""
    names = ("fc.weight", "encoder.fc.weight")
    widths = {config.tensors[name].shape[-1] for name in names if name in config.tensors}
    if any(width != n_layers * config.target.n_embd for width in widths):
        raise ModelError(
            f"the drafter reads hidden states of {max(widths) // n_layers:,} values, and those of the model named "
            f"with --target have {config.target.n_embd:,}: name the one that it was made for"
        )


@contextmanager
def before_outputs(target: Graph) -> Iterator[None]:
    """Operations are recorded in front of the rows whose logits are wanted: of all tokens."""
    first = next(i for i, node in enumerate(target.nodes) if isinstance(node.operation, Outputs))
    behind = target.nodes[first:]
    del target.nodes[first:]
    target.layer = "output"
    yield
    target.nodes += behind


def layer_inputs(target: Graph, numbers: list[int], width: int) -> Tensor:
    """What goes into these layers, side by side [T, len(numbers) * width]: what those before them end with."""
    if max(numbers) > target.n_layers:
        raise ModelError(
            f"the draft model reads layer {max(numbers)} of a model, and this one has {target.n_layers}: {_CHOOSE}"
        )
    ends: dict[LayerTag, Any] = {node.layer: node.operation.results[-1] for node in target.nodes}
    inputs = tuple(ends[n - 1 if n else "embedding"] for n in numbers)
    if any(x.width != width for x in inputs):
        raise ModelError(
            f"the draft model reads hidden states of {width:,} values, and this model's have {inputs[0].width:,}: "
            f"{_CHOOSE}"
        )
    return target.add(SideBySide(inputs))


def embedding(target: Graph, d: int) -> Weight:
    """The model's table of embeddings."""
    table = next(node.operation.table for node in target.nodes if isinstance(node.operation, Embed))
    if table.shape[1] != d:
        raise ModelError(
            f"the draft model takes embeddings of {d:,} values, and this model's have {table.shape[1]:,}: {_CHOOSE}"
        )
    return table


def head(target: Graph, d: int, n_vocab: int) -> Weight:
    """The model's output matrix."""
    products = (node.operation for node in reversed(target.nodes) if isinstance(node.operation, Linear))
    weight = next(products).matrix.weight
    if weight.shape != (n_vocab, d):
        raise ModelError(
            f"the draft model takes a head {[n_vocab, d]}, and this model's is {list(weight.shape)}: {_CHOOSE}"
        )
    return weight


def read_token_ids(w: Weights, n_vocab: int) -> NDArray[np.int64] | None:
    """The model's ids of the tokens of a drafter's own vocabulary (``d2t``); None without one."""
    shape = w.shape("d2t")
    if not shape:
        return None
    weight = w.require("d2t", *shape)
    ids = np.array(weight.data).view("<i8") if len(shape) == 1 and weight.type is GGMLType.I64 else None
    if ids is None or ids.min() < 0 or ids.max() >= n_vocab:
        raise ModelError(f"tensor d2t does not hold ids of the vocabulary, of {n_vocab:,} tokens: the file is broken")
    return ids


def read_ends(w: Weights, d: int, n_vocab: int, target: Graph | None) -> tuple[Weight | None, Weight | None]:
    """A drafter's embedding and its head, or those of the model that it drafts for; None where neither is there."""
    ids = read_token_ids(w, n_vocab)
    table = w.find("token_embd.weight", n_vocab, d)
    output = w.find("output.weight", n_vocab if ids is None else len(ids), d)
    if output is None and ids is not None:
        raise ModelError("the file has a vocabulary of its own (d2t), but no tensor output.weight: is it complete?")
    if target is not None:
        table = embedding(target, d) if table is None else table
        output = head(target, d, n_vocab) if output is None else output
    return table, output
