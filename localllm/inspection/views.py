"""Views of a prompt: charts of the values that `localllm.inspection.tools` returns, for ``localllm look``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from localllm.console import visible_line
from localllm.errors import UsageError
from localllm.inspection import tools
from localllm.inspection.drawing import Bars, Drawing, HeatMap
from localllm.options.types import Progress

#: Most likely tokens of each layer and position in a report.
_N_TOP = 5


class TextModel(tools.TracedModel, Protocol):
    """A `localllm.LLM`."""

    def tokenize(self, text: str, add_special: bool = ...) -> list[int]: ...
    def detokenize(self, ids: Sequence[int], *, special: bool = ...) -> str: ...
    def logits(self, ids: Sequence[int], *, last: int | None = ...) -> tools.Array: ...


class View(NamedTuple):
    """Charts, and their data as JSON values."""

    drawings: Sequence[Drawing]
    report: dict[str, Any]


def logit_lens(llm: TextModel, prompt: str, last: int = 8) -> View:
    """Return the most likely next token after each layer, for the last tokens of a prompt.

    Args:
        last: number of tokens.
    """
    ids = llm.tokenize(prompt)
    first = max(0, len(ids) - last)
    logits = tools.logit_lens(llm, ids, slice(first, None))
    best = np.argsort(-logits, axis=-1)[..., :_N_TOP]  # [n_layers, n_tokens, _N_TOP]
    scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = np.take_along_axis(scores, best, axis=-1) / scores.sum(axis=-1, keepdims=True)
    texts = {id_: _token_text(llm, id_) for id_ in np.unique(best).tolist()}
    columns = [_token_text(llm, id_) for id_ in ids[first:]]
    layers = [
        [
            [{"token": texts[id_], "probability": round(p, 6)} for id_, p in zip(*token, strict=True)]
            for token in zip(*layer, strict=True)
        ]
        for layer in zip(best.tolist(), probabilities.tolist(), strict=True)
    ]
    cells = [[top[0]["token"] for top in layer] for layer in layers]
    title = "most likely next token after each layer (row), shaded by its probability"
    chart = HeatMap(title, _numbers(len(layers)), columns, probabilities[..., 0], cells)
    return View([chart], {"tokens": columns, "positions": [*range(first, len(ids))], "layers": layers})


def attention(llm: TextModel, prompt: str, heads: Sequence[tuple[int, int]]) -> View:
    """Return the attention probabilities of heads, pairs of a layer and a head."""
    ids = llm.tokenize(prompt)
    tokens = [_token_text(llm, id_) for id_ in ids]
    rows = [f"{i} {token}" for i, token in enumerate(tokens)]
    charts, reports = [], []
    for (layer, head), values in zip(heads, tools.attention(llm, ids, heads), strict=True):
        title = f"layer {layer}, head {head}: attention of each token (row) to each token (column) in %"
        charts.append(HeatMap(title, rows, _numbers(len(ids)), values, _percents(values)))
        reports.append({"layer": layer, "head": head, "probabilities": _rounded(values)})
    return View(charts, {"tokens": tokens, "heads": reports})


def patch(
    llm: TextModel, prompt: str, corrupted: str, token: str | None = None, progress: Progress | None = None
) -> View:
    """Return the effect of each stream of a prompt in a second prompt; see `localllm.inspection.tools.patch`.

    Args:
        token: text of the token whose probability is compared; by default the most likely token after the prompt.
    """
    pair = [llm.tokenize(text) for text in (prompt, corrupted)]
    answer = _answer(llm, pair[0], token)
    effects = tools.patch(llm, pair[0], pair[1], answer, progress)
    tokens = [[_token_text(llm, id_) for id_ in ids] for ids in pair]
    columns = [a if a == b else f"{a}/{b}" for a, b in zip(*tokens, strict=True)]
    cells = [[f"{effect:.2f}" for effect in row] for row in effects.tolist()]
    name = _token_text(llm, answer)
    title = f"effect on {name!r} of each stream of the first prompt in the second (0 to 1)"
    chart = HeatMap(title, _numbers(len(effects)), columns, effects, cells)
    return View([chart], {"token": name, "tokens": tokens, "effects": _rounded(effects)})


def attribution(llm: TextModel, prompt: str, token: str | None = None) -> View:
    """Return the fall of a token's log-probability without each token of a prompt; see `patch` for ``token``."""
    ids = llm.tokenize(prompt)
    answer = _answer(llm, ids, token)
    falls = tools.attribution(llm, ids, answer)
    tokens, name = [_token_text(llm, id_) for id_ in ids], _token_text(llm, answer)
    chart = Bars(f"fall of the log-probability of {name!r} without each token", tokens, falls)
    return View([chart], {"token": name, "tokens": tokens, "falls": _rounded(falls)})


def experts(llm: TextModel, prompt: str) -> View:
    """Return the share of a prompt's tokens that chose each expert of each layer."""
    ids = llm.tokenize(prompt)
    usage = {name.split(".")[1]: counts for name, counts in tools.expert_usage(llm, [ids]).items()}
    most = max(map(len, usage.values()))
    counts = np.array([np.pad(layer, (0, most - len(layer))) for layer in usage.values()])
    shares = (counts / len(ids)).astype(np.float32)
    title = "share of the tokens that chose each expert (column) of each layer (row) in %"
    chart = HeatMap(title, [*usage], _numbers(most), shares, _percents(shares))
    return View([chart], {"n_tokens": len(ids), "layers": {name: layer.tolist() for name, layer in usage.items()}})


def _percents(shares: tools.Array) -> list[list[str]]:
    """Return whole percents; empty below 0.5%."""
    return [[f"{100 * share:.0f}" if share >= 0.005 else "" for share in row] for row in shares.tolist()]


def _numbers(n: int) -> list[str]:
    return [str(i) for i in range(n)]


def _rounded(values: tools.Array) -> Any:
    return values.astype(np.float64).round(6).tolist()


def _token_text(llm: TextModel, id_: int) -> str:
    """Return a token's text on one line, with visible spaces."""
    return visible_line(llm.detokenize([id_], special=True)).replace(" ", "␣")


def _answer(llm: TextModel, ids: Sequence[int], text: str | None) -> int:
    """Return the token with this text, or the most likely token after a prompt if ``text`` is None."""
    if text is None:
        return int(llm.logits(ids, last=1)[0].argmax())
    tokens = llm.tokenize(text, add_special=False)
    if len(tokens) != 1:
        pieces = ", ".join(repr(_token_text(llm, id_)) for id_ in tokens)
        raise UsageError(f"the token {text!r:.80} must be a single token, but has {len(tokens)} ({pieces:.200})")
    return tokens[0]
