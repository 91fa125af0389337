"""Embeddings of texts, and relevance scores of documents, from embedding models and rerankers."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.generation.scoring import Evaluation, evaluate_all
from localllm.models.pooling import Pooling
from localllm.tokenizer import Tokenizer

#: Marker tokens of queries and documents in late-interaction models: PyLate's, Jina's, and unused BERT tokens that
#: ColBERT uses. The first pair in the vocabulary is used.
_MARKERS = (("[Q] ", "[D] "), ("[Q]", "[D]"), ("[QueryMarker]", "[DocumentMarker]"), ("[unused0]", "[unused1]"))


class Embedder:
    """Computes embeddings of texts or of tokens from the engine's output rows."""

    def __init__(self, pooling: Pooling, metadata: Mapping[str, Any]) -> None:
        """Load the weights of the pooling head."""
        # width: dimensions of an embedding. is_reranker: the embedding is a score of a query and a document.
        # is_late: queries and documents are compared by token embeddings.
        self.width, self.is_reranker, self.is_late = pooling.width, pooling.kind == "rank", pooling.kind == "tokens"
        self._rows, self._head = pooling.rows, pooling.head()
        template = metadata.get("tokenizer.chat_template.rerank")
        self._template = template if isinstance(template, str) else None
        tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ()) if self.is_late else ()
        positions = {token: i for i, token in enumerate(tokens)}
        markers = [marker for marker in _MARKERS if positions.keys() >= set(marker)]
        # Token that marks queries, and token that marks documents
        self._query_marker, self._document_marker = (
            ([positions[marker]] for marker in markers[0]) if markers else ([], [])
        )
        self._punctuation = {positions[mark] for mark in string.punctuation if mark in positions}

    def pair(self, tokenizer: Tokenizer, query: str, document: str) -> list[int]:
        """Return tokens of a query and a document, in the format that rerankers are trained on."""
        if self._template is not None:
            # Split first, because a document may contain "{query}".
            before, _, after = self._template.partition("{document}")
            text = before.replace("{query}", query) + document + after.replace("{query}", query)
            return tokenizer.encode(text, add_special=False, parse_special=True)
        ids, end = tokenizer.encode(query), [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        if ids[-1:] != end:
            ids += end
        if end and tokenizer.token_text(end[0]) == "</s>":  # RoBERTa models separate the texts by two end tokens
            ids += end
        return ids + tokenizer.encode(document, add_special=False) + end

    def vectors(self, engine: Engine, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return embeddings [n, width] of tokenized texts. Texts are batched without padding."""
        vectors = evaluate_all(lambda ids: _TextVectors(engine, ids, self._rows), self._vector, texts)
        return np.array(vectors, np.float32).reshape(-1, self.width)

    def token_vectors(self, engine: Engine, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return token embeddings [n_tokens, width] for each text."""

        def finish(rows: _TokenVectors) -> NDArray[np.float32]:
            rows.wait()
            return np.asarray(self._head(rows.all), np.float32)

        return evaluate_all(lambda ids: _TokenVectors(engine, ids), finish, texts)

    def late_interaction(
        self, engine: Engine, tokenizer: Tokenizer, query: str, documents: Sequence[str]
    ) -> NDArray[np.float32]:
        """Return each document's relevance: the sum, over query tokens, of the largest cosine to a document token.

        Punctuation in documents is excluded. Queries are not padded with mask tokens. Source: "MaxSim" in
        arXiv:2004.12832 (ColBERT).
        """
        ids = [self._marked(tokenizer, query, self._query_marker)]
        ids += [self._marked(tokenizer, document, self._document_marker) for document in documents]
        rows = [unit_length(vectors) for vectors in self.token_vectors(engine, ids)]
        counts = [np.array([id_ not in self._punctuation for id_ in document], bool) for document in ids[1:]]
        best = [
            (rows[0] @ vectors[counted].T).max(axis=1, initial=-1.0)
            for vectors, counted in zip(rows[1:], counts, strict=True)
        ]
        return np.array([cosines.sum() for cosines in best], np.float32)

    def _marked(self, tokenizer: Tokenizer, text: str, marker: list[int]) -> list[int]:
        """Return tokens with the marker after the beginning-of-text token, if any."""
        ids = tokenizer.encode(text)
        n = int(bool(ids) and ids[0] == tokenizer.bos_id)
        return [*ids[:n], *marker, *ids[n:]]

    def _vector(self, rows: _TextVectors) -> NDArray[np.float32]:
        rows.wait()
        return self._head(rows.total / np.float32(rows.n))


class _TextVectors(Evaluation):
    """Sums output rows, or selects the first or the last row, as rows arrive."""

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


class _TokenVectors(Evaluation):
    """Stores output rows as they arrive."""

    def __init__(self, engine: Engine, ids: Sequence[int]) -> None:
        self.all = np.empty((len(ids), engine.width), np.float32)
        super().__init__(engine, ids, 0, self._keep)

    def _keep(self, position: int, rows: NDArray[np.float32]) -> None:
        self.all[position : position + len(rows)] = rows


def unit_length(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors [n, width] scaled to length 1. Vectors of length 0 are unchanged."""
    lengths = np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(1e-12))
    return np.asarray(vectors / lengths, np.float32)
