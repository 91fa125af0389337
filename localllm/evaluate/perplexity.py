"""Perplexity of texts, and divergence of a model from another, as defined by llama.cpp's tool.

Texts are split into chunks of ``context`` tokens. If the model uses BOS, it replaces the first token of each chunk.
Chunks are evaluated independently. Only tokens in the second half of a chunk count, so each has at least half a
context before it. Uncertainties are standard errors of the mean.

Source: ``tools/perplexity/perplexity.cpp`` of llama.cpp.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.errors import UsageError
from localllm.evaluate.base_logits import RANGE, BaseLogits, BaseLogitsWriter, packed, rows_of_chunk
from localllm.files import read_text
from localllm.llm import LLM
from localllm.options.checks import whole_number
from localllm.parallel import in_order
from localllm.quant.bits import Floats

Doubles = NDArray[np.float64]

#: Default number of tokens per chunk.
CONTEXT = 512

#: Number of concurrent chunks: one chunk is evaluated while statistics of others are computed.
_AT_ONCE = 4

#: Characters to tokenize per token at first, and number of tokens before a cut that may differ from the whole text's.
_CHARACTERS, _CUT_TOKENS = 6, 256

#: Logits per block of the statistics, so that a block stays in the cache.
_BLOCK = 1 << 20

#: Percentiles in the result.
PERCENTILES = (0, 0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)

#: Tokens whose base log-probability is not greater do not count in a divergence.
_LEAST = np.float32(-16)

#: Called with the number of finished chunks, the total number, and the current perplexity or mean divergence.
Progress = Callable[[int, int, float], object]

_Result = TypeVar("_Result")


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float

    @classmethod
    def mean(cls, values: Doubles) -> Estimate:
        """Return the mean of independent values [n]."""
        n = len(values)
        return cls(float(values.mean()), float(values.std() / np.sqrt(n - 1)) if n > 1 else 0.0)

    def exp(self) -> Estimate:
        value = float(np.exp(self.value))
        return Estimate(value, value * self.error)


@dataclass(frozen=True, slots=True)
class Perplexity:
    perplexity: Estimate  # exponential of the mean negative log-likelihood of a token
    n_tokens: int  # number of tokens that count
    # n_chunks: number of chunks; context: tokens per chunk
    n_chunks: int
    context: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """Divergence of a model from the base model of a file of logits."""

    perplexity: Perplexity  # of the model, with numbers of tokens and chunks
    base_perplexity: Estimate  # of the base model
    log_ratio: Estimate  # natural logarithm of the ratio of perplexities
    # ratio: the model's perplexity divided by the base model's; difference: the model's minus the base model's. Both
    # are computed with the file's limit: a token's probability is at least e^-16 times the highest. `perplexity` is
    # computed without the limit.
    ratio: Estimate
    difference: Estimate
    correlation: float  # correlation of the log-likelihoods of tokens
    kl: Estimate  # mean Kullback-Leibler divergence of the base model's distribution from the model's, in nats
    kl_percentiles: dict[float, float]  # percentiles of the divergences of tokens, by percent
    probability_change: Estimate  # mean change of the probability of the text's next token
    probability_change_rms: Estimate  # root mean square of the change
    probability_change_percentiles: dict[float, float]  # percentiles of the change, by percent
    same_top: Estimate  # fraction of tokens with the same likeliest token in both models


def perplexity(
    llm: LLM,
    text: str | os.PathLike[str],
    *,
    context: int = CONTEXT,
    chunks: int | None = None,
    save_logits: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Return the perplexity of a text.

    Args:
        llm: the model.
        text: at least two chunks of tokens; or the path of a file; only its first ``chunks`` are read.
        context: tokens per chunk.
        chunks: number of chunks from the start of the text; None for all.
        save_logits: file to write for `divergence`, in llama.cpp's format.
        progress: called after each chunk.
    """
    tokens = _chunks(llm, text, context, chunks)
    nll: list[Doubles] = []
    with ExitStack() as stack:
        new = None
        if save_logits is not None:
            new = stack.enter_context(BaseLogitsWriter(Path(save_logits), tokens, llm.info.n_vocab))
        keeps_rows = new is not None

        def compute(chunk: int, logits: Floats) -> tuple[Doubles, NDArray[np.uint16]]:
            blocks = _blocks(logits)
            rows = [packed(logits[block]) for block in blocks if keeps_rows]
            came = tokens[chunk, -len(logits) :]
            token_logits = logits[np.arange(len(logits)), came]
            likelihood = np.concatenate([_log_totals(logits[block]) - token_logits[block] for block in blocks])
            return likelihood, np.concatenate(rows) if rows else np.empty(0, np.uint16)

        for likelihood, rows in _evaluated(llm, tokens, compute):
            nll.append(likelihood)
            if new is not None:
                new.add(rows)
            if progress is not None:
                progress(len(nll), len(tokens), float(np.exp(np.mean([chunk_nll.mean() for chunk_nll in nll]))))
    return _perplexity(np.concatenate(nll), tokens)


def divergence(
    llm: LLM, base: BaseLogits, *, chunks: int | None = None, progress: Progress | None = None
) -> Divergence:
    """Return the divergence of a model from the base model whose logits are in a file, on the text in the file.

    ``chunks``: number of chunks from the start; None for all.
    """
    if base.n_vocab != llm.info.n_vocab:
        raise UsageError(
            f"the base logits are of a vocabulary of {base.n_vocab:,} tokens, but the model's has "
            f"{llm.info.n_vocab:,}: compare models with the same vocabulary"
        )
    _check_context(llm, base.context)
    tokens = base.tokens[: len(base.tokens) if chunks is None else whole_number("chunks", chunks, 1)]

    def compute(chunk: int, logits: Floats) -> Doubles:
        expected, came = base.log_probabilities(chunk), tokens[chunk, -len(logits) :]
        columns = [_compared(logits[block], expected[block], came[block]) for block in _blocks(logits)]
        return np.concatenate(columns, axis=1)

    results: list[Doubles] = []
    for result in _evaluated(llm, tokens, compute):
        results.append(result)
        if progress is not None:
            progress(len(results), len(tokens), float(np.mean([result[2].mean() for result in results])))
    return _divergence(np.concatenate(results, axis=1), tokens)


def _chunks(llm: LLM, text: str | os.PathLike[str], context: int, chunks: int | None) -> NDArray[np.int32]:
    """Return the tokens of the text, int32 [n_chunks, context]."""
    whole_number("context", context, 4)
    if chunks is not None:
        whole_number("chunks", chunks, 1)
    _check_context(llm, context)
    ids = _first_tokens(llm, text, math.inf if chunks is None else max(2, chunks) * context)
    if len(ids) < 2 * context:
        raise UsageError(
            f"the text has {len(ids):,} tokens, but at least {2 * context:,} are needed for chunks of {context:,}: "
            "take a longer text, or a smaller context"
        )
    n = len(ids) // context
    n = n if chunks is None else min(n, chunks)
    return np.array(ids[: n * context], np.int32).reshape(n, context)


def _first_tokens(llm: LLM, text: str | os.PathLike[str], n: float) -> list[int]:
    """Return the first ``n`` tokens of the text, or all if there are fewer. Reads only the necessary part of it."""
    size = len(text) if isinstance(text, str) else Path(text).stat().st_size if Path(text).is_file() else 0
    n_read = _CHARACTERS * n
    while n_read < size:
        start = text[: int(n_read)] if isinstance(text, str) else read_text(text, n_bytes=int(n_read))
        ids = llm.tokenize(start)
        if len(ids) >= n + _CUT_TOKENS:
            return ids[: int(n)]
        n_read *= 2
    return llm.tokenize(text if isinstance(text, str) else read_text(text))


def _check_context(llm: LLM, context: int) -> None:
    if context > llm.info.context:
        raise UsageError(
            f"chunks of {context:,} tokens do not fit into the context of {llm.info.context:,}: load the model with "
            "a larger context"
        )


def _evaluated(llm: LLM, tokens: NDArray[np.int32], compute: Callable[[int, Floats], _Result]) -> Iterator[_Result]:
    """Call a function with the index and logits [rows_of_chunk, n_vocab] of each chunk. Yields results in order."""
    n_rows = rows_of_chunk(tokens.shape[1])

    def work(chunk: int) -> _Result:
        ids = llm.tokenizer.with_bos(tokens[chunk].tolist(), replaced=1)
        # The text does not contain the token after the last one.
        return compute(chunk, llm.logits(ids[:-1], last=n_rows))

    return in_order(work, range(len(tokens)), _AT_ONCE)


def _blocks(logits: Floats) -> Sequence[slice]:
    """Return slices of rows, of a size that is fast to compute."""
    step = max(1, _BLOCK // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _log_totals(logits: Floats) -> Doubles:
    """Return the logarithm of the sum of exponentials of each row."""
    peak = logits.max(axis=1, keepdims=True)
    totals: Doubles = np.log(np.exp(logits - peak).sum(axis=1, dtype=np.float64)) + peak[:, 0]
    return totals


def _compared(logits: Floats, expected: Floats, came: NDArray[np.int32]) -> Doubles:
    """Return float64 [6, n]: negative log-likelihoods of the model and of the base model, divergence, change of
    probability, equality of the likeliest tokens, and the model's negative log-likelihood with the file's limit.

    Args:
        logits: logits of the model, [n, n_vocab].
        expected: log-probabilities of the base model, [n, n_vocab].
        came: tokens of the text, [n].
    """
    rows = np.arange(len(logits))
    log_totals = _log_totals(logits)
    nll, base_nll = log_totals - logits[rows, came], -expected[rows, came].astype(np.float64)
    difference = expected - logits + log_totals.astype(np.float32)[:, None]
    terms = np.where(expected > _LEAST, np.exp(expected) * difference, np.float32(0))
    kl = terms.sum(axis=1, dtype=np.float64)
    same = logits.argmax(axis=1) == expected.argmax(axis=1)
    bounded_nll = np.minimum(nll, log_totals - logits.max(axis=1) + RANGE)
    return np.stack([nll, base_nll, kl, np.exp(-nll) - np.exp(-base_nll), same, bounded_nll])


def _perplexity(nll: Doubles, tokens: NDArray[np.int32]) -> Perplexity:
    return Perplexity(Estimate.mean(nll).exp(), len(nll), *tokens.shape)


def _divergence(compared: Doubles, tokens: NDArray[np.int32]) -> Divergence:
    nll, base_nll, kl, change, same, bounded_nll = compared
    # Both use the same limit, so that the ratio of a model to its own logits is 1.
    estimate, base = Estimate.mean(bounded_nll), Estimate.mean(base_nll)
    n = len(nll)
    covariance = (np.mean(bounded_nll * base_nll) - bounded_nll.mean() * base_nll.mean()) / (n - 1)
    log_ratio = Estimate(estimate.value - base.value, _root(estimate.error**2 + base.error**2 - 2 * covariance))
    model, base_perplexity = estimate.exp(), base.exp()
    square = Estimate.mean(change**2)
    rms = _root(square.value)
    return Divergence(
        perplexity=_perplexity(nll, tokens),
        base_perplexity=base_perplexity,
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        difference=Estimate(
            model.value - base_perplexity.value,
            _root(model.error**2 + base_perplexity.error**2 - 2 * covariance * model.value * base_perplexity.value),
        ),
        correlation=float(covariance / (estimate.error * base.error)) if estimate.error and base.error else 1.0,
        kl=Estimate.mean(kl),
        kl_percentiles=_percentiles(kl),
        probability_change=Estimate.mean(change),
        probability_change_rms=Estimate(rms, square.error / (2 * rms) if rms else 0.0),
        probability_change_percentiles=_percentiles(change),
        same_top=Estimate.mean(same),
    )


def _root(square: float) -> float:
    """Return the square root, or 0 for values that are negative because of rounding."""
    return float(np.sqrt(max(square, 0.0)))


def _percentiles(values: Doubles) -> dict[float, float]:
    return dict(zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True))
