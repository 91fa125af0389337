"""Vectors of texts, and scores of documents, by models that are made for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.generation.scoring import Evaluation, evaluate_all
from localllm.models.pooling import Pooling
from localllm.tokenizer import Tokenizer


class Embedder:
    """Makes a text's vector of those that the engine gives for its tokens."""

    def __init__(self, pooling: Pooling, metadata: Mapping[str, Any]) -> None:
        """Reads the weights behind the graph."""
        # width: values of a vector
        # is_reranker: whether that is a score of a query and a document
        self.width, self.is_reranker = pooling.width, pooling.kind == "rank"
        self._rows, self._head = pooling.rows, pooling.head()
        template = metadata.get("tokenizer.chat_template.rerank")
        self._template = template if isinstance(template, str) else None

    def pair(self, tokenizer: Tokenizer, query: str, document: str) -> list[int]:
        """The tokens of a query and a document, as rerankers are trained on them."""
        if self._template is not None:
            # Cut first: "{query}" in a document is its own text.
            before, _, after = self._template.partition("{document}")
            text = before.replace("{query}", query) + document + after.replace("{query}", query)
            return tokenizer.encode(text, add_special=False, parse_special=True)
        ids, end = tokenizer.encode(query), [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        if ids[-1:] != end:
            ids += end
        if end and tokenizer.token_text(end[0]) == "</s>":  # RoBERTa and its kin have two between the texts
            ids += end
        return ids + tokenizer.encode(document, add_special=False) + end

    def vectors(self, engine: Engine, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The vectors [n, width] of texts, given as tokens: evaluated together, without padding."""
        vectors = evaluate_all(lambda ids: _TextVectors(engine, ids, self._rows), self._vector, texts)
        return np.array(vectors, np.float32).reshape(-1, self.width)

    def _vector(self, rows: _TextVectors) -> NDArray[np.float32]:
        rows.wait()
        return self._head(rows.total / np.float32(rows.n))


class _TextVectors(Evaluation):
    """Adds up the vectors of a text's tokens, or takes the first or the last one, as they come."""

    def __init__(self, engine: Engine, ids: Sequence[int], which: str) -> None:
        self.total = np.zeros(engine.width, np.float32)
        self.n = len(ids) if which == "mean" else 1
        self._is_first = which == "cls"
        super().__init__(engine, ids, len(ids) - 1 if which == "last" else 0, self._add)

    def _add(self, position: int, rows: NDArray[np.float32]) -> None:
        if not self._is_first:
            self.total += rows.sum(axis=0)
        elif position == 0:
            self.total += rows[0]
