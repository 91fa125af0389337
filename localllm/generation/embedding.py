"""Vectors of texts, and scores of documents, by models that are made for them."""

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

#: Markers of queries and documents in models of late interaction; the first that a vocabulary has are used:
#: PyLate's, Jina's, and those of BERT that ColBERT gave this meaning.
_MARKERS = (("[Q] ", "[D] "), ("[Q]", "[D]"), ("[QueryMarker]", "[DocumentMarker]"), ("[unused0]", "[unused1]"))


class Embedder:
    """Makes a text's vector of those that the engine gives for its tokens, or keeps these."""

    def __init__(self, pooling: Pooling, metadata: Mapping[str, Any]) -> None:
        """Reads the weights behind the graph."""
        # width: values of a vector
        # is_reranker: whether that is a score of a query and a document
        # is_late: whether it keeps vectors of tokens, which queries and documents are compared by
        self.width, self.is_reranker, self.is_late = pooling.width, pooling.kind == "rank", pooling.kind == "tokens"
        self._rows, self._head = pooling.rows, pooling.head()
        template = metadata.get("tokenizer.chat_template.rerank")
        self._template = template if isinstance(template, str) else None
        tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ()) if self.is_late else ()
        places = {token: i for i, token in enumerate(tokens)}
        found = [each for each in _MARKERS if places.keys() >= set(each)]
        # tokens that tell queries and documents apart
        self._query_marker, self._document_marker = ([places[each]] for each in found[0]) if found else ([], [])
        self._punctuation = {places[mark] for mark in string.punctuation if mark in places}

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

    def token_vectors(self, engine: Engine, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Of each text, the vectors [n_tokens, width] of its tokens."""

        def finish(rows: _TokenVectors) -> NDArray[np.float32]:
            rows.wait()
            return np.asarray(self._head(rows.all), np.float32)

        return evaluate_all(lambda ids: _TokenVectors(engine, ids), finish, texts)

    def late_interaction(
        self, engine: Engine, tokenizer: Tokenizer, query: str, documents: Sequence[str]
    ) -> NDArray[np.float32]:
        """How well each document answers a query: each token of the query counts with its largest cosine.

        Punctuation in documents does not count, and queries are not filled up with mask tokens.  Source:
        arXiv:2004.12832 (ColBERT), "MaxSim".
        """
        ids = [self._marked(tokenizer, query, self._query_marker)]
        ids += [self._marked(tokenizer, document, self._document_marker) for document in documents]
        rows = [unit_length(each) for each in self.token_vectors(engine, ids)]
        counts = [np.array([token not in self._punctuation for token in each], bool) for each in ids[1:]]
        best = [
            (rows[0] @ each[counted].T).max(axis=1, initial=-1.0)
            for each, counted in zip(rows[1:], counts, strict=True)
        ]
        return np.array([each.sum() for each in best], np.float32)

    def _marked(self, tokenizer: Tokenizer, text: str, marker: list[int]) -> list[int]:
        """A text's tokens with the marker behind the token that begins them, if one does."""
        ids = tokenizer.encode(text)
        n = int(bool(ids) and ids[0] == tokenizer.bos_id)
        return [*ids[:n], *marker, *ids[n:]]

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


class _TokenVectors(Evaluation):
    """Keeps the vectors of a text's tokens, as they come."""

    def __init__(self, engine: Engine, ids: Sequence[int]) -> None:
        self.all = np.empty((len(ids), engine.width), np.float32)
        super().__init__(engine, ids, 0, self._keep)

    def _keep(self, position: int, rows: NDArray[np.float32]) -> None:
        self.all[position : position + len(rows)] = rows


def unit_length(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors [n, width] at the length 1, but for those of length 0."""
    lengths = np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(1e-12))
    return np.asarray(vectors / lengths, np.float32)
