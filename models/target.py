"""Access of drafters in separate files to their target model: hidden states, embedding and head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, LayerTag, Tensor, Weight
from localllm.kernels.operations import Embed, HyperWeights, Linear, MixStreams, Outputs, SideBySide
from localllm.models.config import ModelMetadata
from localllm.models.weights import Weights
from localllm.quant.types import GGMLType

_CHOOSE = "choose the drafter that was made for it"


def read_layers(meta: ModelMetadata) -> list[int]:
    """Return the numbers of the layers whose inputs a drafter reads. n_layers means the output of the last layer."""
    numbers = meta.find("target_layers")
    if not isinstance(numbers, list) or not numbers or any(type(n) is not int or n < 0 for n in numbers):
        key = f"{meta.architecture}.target_layers"
        raise ModelError(f"{key} is {quoted(numbers)}, but must be a list of layer numbers: the file is broken")
    return numbers


def check_target(config: Any, n_layers: int) -> None:
    """Raise ModelError if the target model has a different hidden width than a drafter's checkpoint expects.

    Used in conversions. ``n_layers`` is the number of layers that the drafter reads.
    """
    names = ("fc.weight", "encoder.fc.weight")
    widths = {config.tensors[name].shape[-1] for name in names if name in config.tensors}
    if any(width != n_layers * config.target.n_embd for width in widths):
        raise ModelError(
            f"the drafter reads hidden states of {max(widths) // n_layers:,} values, but the model named with "
            f"--target has hidden states of {config.target.n_embd:,}: name the model that the drafter was made for"
        )


@contextmanager
def before_outputs(target: Graph) -> Iterator[None]:
    """Record operations before the selection of the rows whose logits are computed, so that they get all tokens."""
    first = next(i for i, node in enumerate(target.nodes) if isinstance(node.operation, Outputs))
    behind = target.nodes[first:]
    del target.nodes[first:]
    target.layer = "output"
    yield
    target.nodes += behind


def layer_inputs(target: Graph, numbers: list[int], width: int) -> Tensor:
    """Return the inputs of these layers, concatenated [T, len(numbers) * width]: the outputs of the layers before."""
    if max(numbers) > target.n_layers:
        raise ModelError(
            f"the draft model reads layer {max(numbers)}, but this model has {target.n_layers} layers: {_CHOOSE}"
        )
    ends: dict[LayerTag, Any] = {node.layer: node.operation.results[-1] for node in target.nodes}
    inputs = tuple(ends[n - 1 if n else "embedding"] for n in numbers)
    n_streams = next((node.operation.n for node in target.nodes if isinstance(node.operation, HyperWeights)), 1)
    if n_streams > 1:  # drafters read the mean of several streams
        inputs = tuple(target.add(MixStreams(x, None, n_streams, offset=1 / n_streams)) for x in inputs)
    if any(x.width != width for x in inputs):
        raise ModelError(
            f"the draft model reads hidden states of {width:,} values, but this model's have {inputs[0].width:,}: "
            f"{_CHOOSE}"
        )
    return target.add(SideBySide(inputs))


def embedding(target: Graph, d: int) -> Weight:
    table = next(node.operation.table for node in target.nodes if isinstance(node.operation, Embed))
    if table.shape[1] != d:
        raise ModelError(
            f"the draft model needs embeddings of {d:,} values, but this model's have {table.shape[1]:,}: {_CHOOSE}"
        )
    return table


def head(target: Graph, d: int, n_vocab: int) -> Weight:
    products = (node.operation for node in reversed(target.nodes) if isinstance(node.operation, Linear))
    weight = next(products).matrix.weight
    if weight.shape != (n_vocab, d):
        raise ModelError(
            f"the draft model needs a head {[n_vocab, d]}, but this model's is {list(weight.shape)}: {_CHOOSE}"
        )
    return weight


def read_token_ids(w: Weights, n_vocab: int) -> NDArray[np.int64] | None:
    """Return the target's ids of the tokens in a drafter's separate vocabulary (``d2t``), or None without one."""
    shape = w.shape("d2t")
    if not shape:
        return None
    weight = w.require("d2t", *shape)
    ids = np.array(weight.data).view("<i8") if len(shape) == 1 and weight.type is GGMLType.I64 else None
    if ids is None or ids.min() < 0 or ids.max() >= n_vocab:
        raise ModelError(f"tensor d2t must contain ids of a vocabulary of {n_vocab:,} tokens: the file is broken")
    return ids


def read_ends(w: Weights, d: int, n_vocab: int, target: Graph | None) -> tuple[Weight | None, Weight | None]:
    """Return a drafter's embedding and head, or its target's; None if neither file contains the tensor."""
    ids = read_token_ids(w, n_vocab)
    table = w.find("token_embd.weight", n_vocab, d)
    output = w.find("output.weight", n_vocab if ids is None else len(ids), d)
    if output is None and ids is not None:
        raise ModelError("the file has a separate vocabulary (d2t), but no tensor output.weight: is it complete?")
    if target is not None:
        table = embedding(target, d) if table is None else table
        output = head(target, d, n_vocab) if output is None else output
    return table, output
