"""How a text's vector, or a score, is made of what a model that embeds gives for its tokens.

Keys and tensors are llama.cpp's: ``pooling_type``, ``cls*`` of classifiers, ``dense_2`` and ``dense_3`` of
sentence-transformers.  A model of late interaction (ColBERT, arXiv:2004.12832) pools nothing: it keeps a vector of
each token.
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
from localllm.models.config import Metadata
from localllm.models.weights import Weights
from localllm.quant.formats import dequantize

Array = NDArray[Any]

#: ``pooling_type``: "rank" is a score of a query and a document.
KINDS = (None, "mean", "cls", "last", "rank")


def read_kind(meta: Metadata, weights: Weights) -> str | None:
    """The kind that the file names; None without one, as of generative models.

    "tokens" is that of late interaction: files that pool nothing, but say how wide the vectors of tokens become.
    """
    kind = KINDS[meta.read("pooling_type", int, 0, low=0, high=len(KINDS) - 1)]
    width = meta.read("embedding_length_out", int, 0, low=0, high=1 << 20)
    return "tokens" if kind is None and width and "dense_2.weight" in weights else kind


@dataclass(frozen=True)
class Pooling:
    """The pooling behind the graph of a model that embeds."""

    kind: str  # as `read_kind` gives it
    rows: str  # which tokens' vectors go into it: "mean" of all, "cls", the first, or "last"; "tokens" for no pooling
    width: int  # values of the result
    is_causal: bool  # whether no token sees one behind it
    weights: dict[str, Weight]  # by name; a few matrices at most
    is_gelu: bool = False
    is_softmax: bool = False

    @classmethod
    def read(cls, meta: Metadata, weights: Weights, kind: str, graph: Graph) -> Pooling:
        """From a file's keys and tensors."""
        rank, causal, width = kind == "rank", graph.is_causal, graph.result.width
        widths = (f"dense_{i}_feat_{side}" for i in (2, 3) for side in ("in", "out"))
        meta.skip("classifier.output_labels", *widths)  # as the tensors say
        is_modern = meta.architecture == "modern-bert"
        rows = kind if not rank else "last" if causal else "mean" if is_modern else "cls"
        of_class = meta.read("classifier.pooling_type", int, 0, low=0, high=len(KINDS) - 1)
        if rank and of_class:
            rows = KINDS[of_class] or rows
        found: dict[str, Weight] = {}
        for name in ("dense_2", "dense_3", "cls", "cls.norm", "cls.output"):
            n_out = width if name.startswith("cls") and name != "cls.output" else weights.n_rows(f"{name}.weight")
            shape = (width,) if name == "cls.norm" else (n_out, width)
            weight, bias = weights.find(f"{name}.weight", *shape), weights.find(f"{name}.bias", shape[0])
            if weight is not None and (rank or not name.startswith("cls")):
                found |= {name: weight} | ({} if bias is None else {f"{name}.bias": bias})
                width = shape[0]
        if rank and not any(name.startswith("cls") for name in found):
            raise ModelError("the file says that it is a reranker, but has no classifier (cls.output.weight)")
        is_qwen = meta.architecture.startswith("qwen3")
        return cls(kind, rows, width, causal, found, is_modern, rank and is_qwen)

    def head(self) -> Callable[[Array], Array]:
        """Reads the weights; what it gives makes of a text's vector, or of each of its tokens' [..., d], the result
        [..., width]."""
        values = {name: dequantize(w.data, w.type).reshape(w.shape) for name, w in self.weights.items()}

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
