"""Pieces of files that are larger than the context: selects the best matches, by BM25 or with an embedding model.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from localllm.tui.chat.conversation import Attachment

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Minimum length of a piece in characters, normally and for small token budgets. A piece ends at a line end.
_LENGTH, _SHORTEST = 1500, 200
#: Constants of BM25: saturation of the word count, and penalty for long pieces.
_K1, _B = 1.5, 0.75
#: Maximum number of texts to embed. Embedding is slow on a CPU.
_MAX_EMBEDDED = 100
#: Tokens for the markup around a piece in the prompt.
_AROUND = 16

#: Returns the indices of texts, best match of the question first.
Rank = Callable[[Sequence[str], str], list[int]]


class FilePiece(NamedTuple):
    """A part of a file. Its place is, for example, "line" 1 to 30 or "page" 3 to 3."""

    name: str
    unit: str
    first: int
    last: int
    text: str


def cut(name: str, text: str, length: int = _LENGTH) -> Iterator[FilePiece]:
    """Yield the pieces of a file. Pages end with a form feed; a piece never crosses the end of a page."""
    pages = text.split("\f")
    for page, content in enumerate(pages, 1):
        first, lines, size = 1, list[str](), 0
        every = content.splitlines(keepends=True)
        for number, line in enumerate(every, 1):
            lines.append(line)
            size += len(line)
            if size < length and number < len(every):
                continue
            location = ("page", page, page) if len(pages) > 1 else ("line", first, number)
            joined = "".join(lines)
            for i in range(0, len(joined), 2 * length):  # a line may be long
                yield FilePiece(name, *location, joined[i : i + 2 * length])
            first, lines, size = number + 1, [], 0


def best(
    texts: Mapping[str, str], question: str, count: Callable[[str], int], budget: int, rank: Rank
) -> list[Attachment]:
    """Return the pieces that match the question best, with at most ``budget`` tokens. Adjacent pieces are joined."""
    length = min(max(budget, _SHORTEST), _LENGTH)
    pieces = [piece for name, text in texts.items() for piece in cut(name, text, length)]
    sizes: dict[int, int] = {}
    for index in rank([piece.text for piece in pieces], question):
        n_tokens = count(pieces[index].text) + _AROUND
        if n_tokens > budget:
            break
        sizes[index] = n_tokens
        budget -= n_tokens
    groups: list[list[int]] = []
    for before, index in pairwise([-2, *sorted(sizes)]):
        if index == before + 1 and pieces[index].name == pieces[before].name:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_joined([pieces[i] for i in group], sum(sizes[i] for i in group)) for group in groups]


def _joined(pieces: Sequence[FilePiece], n_tokens: int) -> Attachment:
    first, last = pieces[0].first, pieces[-1].last
    location = f"{pieces[0].unit} {first}" if first == last else f"{pieces[0].unit}s {first}-{last}"
    return Attachment(f"{pieces[0].name}, {location}", "".join(piece.text for piece in pieces), n_tokens)


def ranked(texts: Sequence[str], question: str) -> list[int]:
    """Return the indices of texts by BM25 score, best first. Texts with equal scores stay in order."""
    question_words = set(_words(question))
    lengths, counts = list[int](), list[Counter[str]]()
    for text in texts:
        words = _words(text)
        lengths.append(len(words))
        counts.append(Counter(word for word in words if word in question_words))
    mean = max(1.0, sum(lengths) / max(1, len(texts)))
    found_in = Counter(word for counted in counts for word in counted)
    weights = {word: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in found_in.items()}

    def score(index: int) -> float:
        longer = _K1 * (1 - _B + _B * lengths[index] / mean)
        return sum(weights[word] * n * (_K1 + 1) / (n + longer) for word, n in counts[index].items())

    return sorted(range(len(texts)), key=score, reverse=True)


def ranked_by_vectors(embed: Callable[[list[str]], NDArray[np.float32]]) -> Rank:
    """Return a `Rank` by cosine similarity. Only the first texts by BM25 are embedded, at most `_MAX_EMBEDDED`.

    ``embed`` must return vectors of length 1.
    """

    def rank(texts: Sequence[str], question: str) -> list[int]:
        places = ranked(texts, question)
        embedded = places[:_MAX_EMBEDDED]
        vectors = embed([question, *(texts[index] for index in embedded)])
        cosines = dict(zip(embedded, vectors[1:] @ vectors[0], strict=True))
        return sorted(places, key=lambda index: cosines.get(index, -2.0), reverse=True)

    return rank


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
