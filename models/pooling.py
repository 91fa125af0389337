"""Pooling of an embedding model's token vectors into one vector or a score.

Keys and tensors are in llama.cpp's format: ``pooling_type``, ``cls*`` of classifiers, ``dense_2`` and ``dense_3`` of
sentence-transformers. A late-interaction model (ColBERT, arXiv:2004.12832) has no pooling: its result is one vector
per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Weight
from localllm.kernels.reference import gelu_erf, softmax
from localllm.models.config import ModelMetadata
from localllm.models.weights import Weights, floats

Array = NDArray[Any]

#: Kinds by the number in ``pooling_type``. "rank" is a score of a query and a document.
KINDS = (None, "mean", "cls", "last", "rank")


def read_kind(meta: ModelMetadata, weights: Weights) -> str | None:
    """Return the file's kind of pooling, or None if it has no pooling, as in generative models.

    "tokens" means late interaction: the file names no pooling, but contains the width of a projection of the token
    vectors.
    """
    kind = KINDS[meta.read("pooling_type", int, 0, low=0, high=len(KINDS) - 1)]
    width = meta.read("embedding_length_out", int, 0, low=0, high=1 << 20)
    return "tokens" if kind is None and width and "dense_2.weight" in weights else kind


@dataclass(frozen=True)
class Pooling:
    """Pooling of the output of an embedding model's graph."""

    kind: str  # result of `read_kind`
    rows: str  # "mean" of all tokens' vectors, vector of the first token ("cls") or "last" token, or all ("tokens")
    width: int  # number of values of the result
    is_causal: bool  # whether tokens see earlier tokens only
    weights: dict[str, Weight]  # by name; a few matrices at most
    is_gelu: bool = False
    is_softmax: bool = False

    @classmethod
    def read(cls, meta: ModelMetadata, weights: Weights, kind: str, graph: Graph) -> Pooling:
        """Read the pooling from a file's keys and tensors."""
        rank, causal, width = kind == "rank", graph.is_causal, graph.result.width
        widths = (f"dense_{i}_feat_{side}" for i in (2, 3) for side in ("in", "out"))
        meta.skip("classifier.output_labels", *widths)  # the shapes of the tensors contain the same sizes
        is_modern = meta.architecture == "modern-bert"
        rows = kind if not rank else "last" if causal else "mean" if is_modern else "cls"
        of_class = meta.read("classifier.pooling_type", int, 0, low=0, high=len(KINDS) - 1)
        if rank and of_class:
            rows = KINDS[of_class] or rows
        tensors: dict[str, Weight] = {}
        for name in ("dense_2", "dense_3", "cls", "cls.norm", "cls.output"):
            n_out = width if name.startswith("cls") and name != "cls.output" else weights.n_rows(f"{name}.weight")
            shape = (width,) if name == "cls.norm" else (n_out, width)
            weight, bias = weights.find(f"{name}.weight", *shape), weights.find(f"{name}.bias", shape[0])
            if weight is not None and (rank or not name.startswith("cls")):
                tensors |= {name: weight} | ({} if bias is None else {f"{name}.bias": bias})
                width = shape[0]
        if rank and not any(name.startswith("cls") for name in tensors):
            raise ModelError("the file is for a reranker (pooling_type), but has no classifier (cls.output.weight)")
        is_qwen = meta.architecture.startswith("qwen3")
        return cls(kind, rows, width, causal, tensors, is_modern, rank and is_qwen)

    def head(self) -> Callable[[Array], Array]:
        """Read the weights, and return a function from the pooled vectors, or token vectors [..., d], to the result
        [..., width].
        """
        values = {name: floats(w) for name, w in self.weights.items()}

        def compute(x: Array) -> Array:
            for name in ("dense_2", "dense_3", "cls", "cls.norm", "cls.output"):
                if name not in values:
                    continue
                if name == "cls.norm":
                    x = x - x.mean(axis=-1, keepdims=True)
                    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-5)) * values[name]
                    continue
                x = x @ values[name].T + values.get(f"{name}.bias", np.float32(0))
                if name == "cls":
                    x = gelu_erf(x) if self.is_gelu else np.tanh(x)
            return softmax(x) if self.is_softmax else x

        return compute
