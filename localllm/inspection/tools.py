"""Short tools over traces, steering and hooks.

Sources: logit lens, nostalgebraist (2020); activation patching, arXiv:2202.05262; control vectors, arXiv:2310.01405.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localllm.errors import Argument, NotEnoughMemoryError, UsageError
from localllm.files import expanded
from localllm.gguf import GGUFFile
from localllm.gguf.writer import GGUFWriter, TensorSpec, encode_value
from localllm.inspection.attention import AttentionLayer
from localllm.inspection.names import ValueNames
from localllm.inspection.positions import Positions
from localllm.inspection.steering import Steering
from localllm.inspection.trace import TracePiece
from localllm.kernels.cpu.host import available_memory
from localllm.loading.model_info import ModelInfo
from localllm.models.registry import read_model
from localllm.options.checks import as_int
from localllm.options.types import Progress
from localllm.quant.types import GGMLType

Array = NDArray[np.float32]
Prompt: TypeAlias = "str | Sequence[int]"


class TracedModel(Protocol):
    """A `localllm.LLM`."""

    @property
    def graph(self) -> ValueNames: ...
    @property
    def info(self) -> ModelInfo: ...
    @property
    def trace(self) -> Callable[..., Any]: ...
    @property
    def stream_trace(self) -> Callable[..., Iterator[TracePiece]]: ...
    def unembed(self, streams: Any) -> Array: ...


def _outputs(llm: TracedModel) -> list[str]:
    """Return the names of the residual stream after each layer."""
    return [*llm.graph.matching("names", "layers.*.output")]


def _values(llm: TracedModel, prompt: Prompt, names: Sequence[str], **options: Any) -> dict[str, Array]:
    """Return values at a single prompt. Raises UsageError for a list of prompts."""
    values = llm.trace(prompt, names, **options)
    if not isinstance(values, dict):
        raise UsageError.of("prompt", prompt, "text or a list of token ids, not a list of prompts")
    return values


def logit_lens(llm: TracedModel, prompt: Prompt, positions: Positions = None) -> Array:
    """Return the logits of the stream after each layer, as if it were the last one: [n_layers, n_tokens, n_vocab].

    Args:
        positions: positions of the prompt, as in `localllm.LLM.trace`; all by default.
    """
    names = _outputs(llm)
    streams = _values(llm, prompt, names, positions=positions)
    logits = llm.unembed(np.concatenate([streams[name] for name in names]))
    return logits.reshape(len(names), -1, logits.shape[1])


def attention(llm: TracedModel, prompt: Prompt, heads: Sequence[tuple[int, int]], **options: Any) -> Array:
    """Return the attention probabilities of heads, [n_heads, n_tokens, n_tokens]: a row per query, a column per key.

    The rows of a head with a sink sum to less than 1. Keys have the exact values before the rounding of the cache.

    Args:
        heads: layer and query head of each head, counted from 0.
        options: ``steer``, ``hooks`` and others of `localllm.inspection.trace.TraceOptions`, except ``positions``.

    Raises:
        UsageError: a layer has no such head, or its attention cannot be computed; see
            `localllm.inspection.attention.AttentionLayer.find`.
        NotEnoughMemoryError: the probabilities do not fit in memory.
    """
    pairs = _heads(heads)
    if "positions" in options:
        words = " cannot be chosen, because attention needs the keys of all tokens: select rows of the result"
        raise UsageError(Argument("positions"), words)
    # Backends pack the weights of norms, sinks and biases, so the file is read again.
    with GGUFFile.open(llm.info.path) as file:
        graph = read_model(file, llm.info.context).graph
        layers = {layer: AttentionLayer.find(graph, layer) for layer, _ in pairs}
        for layer, head in pairs:
            n_heads = layers[layer].attention.n_heads
            if not 0 <= head < n_heads:
                raise UsageError(f"layer {layer} has the heads 0 to {n_heads - 1}: there is no head {head}")
        names = {name for layer in layers.values() for name in (layer.queries, layer.keys)}
        values = _values(llm, prompt, sorted(names), **options)
        n_tokens = len(next(iter(values.values())))
        n_bytes, available = 4 * len(pairs) * n_tokens**2, available_memory()
        if n_bytes > available:
            raise NotEnoughMemoryError(
                f"the attention of {len(pairs)} heads takes {n_bytes / 1e9:.2f} GB, but {available / 1e9:.2f} GB of "
                "memory is available: choose fewer heads, or a shorter prompt"
            )
        probabilities = np.empty((len(pairs), n_tokens, n_tokens), np.float32)
        for i, (number, head) in enumerate(pairs):
            of_layer = layers[number]
            probabilities[i] = of_layer.probabilities(values[of_layer.queries], values[of_layer.keys], head)
    return probabilities


def _heads(heads: object) -> list[tuple[int, int]]:
    """Return pairs of a layer and a head. Raises UsageError for other values, or without a pair."""
    rule = "a list of pairs of a layer and a head"
    pairs = list[tuple[int, int]]()
    for pair in heads if isinstance(heads, Iterable) else ():
        numbers = [as_int(number) for number in pair] if isinstance(pair, Iterable) else []
        if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
            raise UsageError.of("heads", heads, rule)
        pairs.append((numbers[0], numbers[1]))
    if not pairs:
        raise UsageError.of("heads", heads, rule)
    return pairs


def patch(llm: TracedModel, clean: Prompt, corrupted: Prompt, token: int, progress: Progress | None = None) -> Array:
    """Return the effect of each stream on the log-probability of ``token`` after the prompt: [n_layers, n_tokens].

    The stream of the clean prompt replaces the stream of the corrupted one at a single layer and position. 1 is the
    clean prompt's log-probability, 0 the corrupted one's.

    Args:
        progress: called with the number of replaced streams, and the number of streams that differ.

    Raises:
        UsageError: the prompts differ in length, or give the token the same probability; or the token does not exist.
    """
    _check_token(llm, token)
    names = _outputs(llm)
    # [n_layers, n_tokens, width]
    streams, corrupted_streams = (np.stack([*_values(llm, x, names).values()]) for x in (clean, corrupted))
    high, low = (_logprob(llm, prompt, token) for prompt in (clean, corrupted))
    if streams.shape != corrupted_streams.shape:
        raise UsageError(
            f"the prompts have {streams.shape[1]} and {corrupted_streams.shape[1]} tokens, but must have the same "
            "number: replace words by words of as many tokens"
        )
    if high == low:
        raise UsageError("both prompts give the token the same probability: choose another token")
    effects = np.zeros(streams.shape[:2], np.float32)
    # Equal streams have no effect. In order of layers, because requests that change the same value share steps.
    cells = [(int(i), int(at)) for i, at in np.argwhere((streams != corrupted_streams).any(axis=2))]
    steers = [Steering({names[i]: streams[i, at]}, "replace", positions=at) for i, at in cells]
    for n, (cell, logprob) in enumerate(_logprobs(llm, corrupted, token, steers), 1):
        effects[cells[cell]] = (logprob - low) / (high - low)
        if progress is not None:
            progress(n, len(cells))
    return effects


def attribution(llm: TracedModel, prompt: Prompt, token: int) -> Array:
    """Return by how much the log-probability of ``token`` after the prompt falls without each token, [n_tokens].

    A token is removed by setting its embedding to zero.

    Raises UsageError if ``token`` does not exist.
    """
    _check_token(llm, token)
    embeddings = _values(llm, prompt, ["embedding"])["embedding"]
    zero, before = np.zeros(embeddings.shape[1], np.float32), _logprob(llm, prompt, token)
    steers = [Steering({"embedding": zero}, "replace", positions=i) for i in range(len(embeddings))]
    falls = np.empty(len(steers), np.float32)
    for i, logprob in _logprobs(llm, prompt, token, steers):
        falls[i] = before - logprob
    return falls


def expert_usage(llm: TracedModel, prompts: Sequence[Prompt]) -> dict[str, NDArray[np.int64]]:
    """Return how many tokens chose each expert, int64 [n_experts] by the name of the layer's value.

    Raises UsageError if the model has no experts, or ``prompts`` is not a list of prompts.
    """
    if not prompts:
        raise UsageError("the list of prompts is empty: give at least one prompt")
    if not any(name.endswith(".experts") for name in llm.graph):
        raise UsageError("the model has no experts that a router chooses: load a mixture of experts")
    names = llm.graph.matching("names", "layers.*.experts")
    traces = llm.trace(prompts, names)
    if not isinstance(traces, list):
        raise UsageError.of("prompts", prompts, "a list of prompts")
    n_experts = {name: llm.graph[name.replace("experts", "router")].width for name in names}
    return {
        name: sum((np.bincount(trace[name].ravel(), minlength=n) for trace in traces), np.zeros(n, np.int64))
        for name, n in n_experts.items()
    }


def control_vector(
    llm: TracedModel, pairs: Sequence[tuple[Prompt, Prompt]], method: Literal["mean", "pca"] = "mean"
) -> Steering:
    """Return vectors that lead from the second prompts of pairs to the first, for the stream after each layer.

    Args:
        method: "mean" is the mean difference of the streams at the last token. "pca" is the first principal component
            of these differences, with the length of their mean.

    The effects of the vectors of all layers add up: scale them to about 1 divided by the number of layers, or use the
    vector of one layer.

    Raises UsageError if ``pairs`` or ``method`` is invalid.
    """
    if not isinstance(method, str) or method not in ("mean", "pca"):
        raise UsageError.of("method", method, "'mean' or 'pca'")
    if not pairs or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise UsageError.of("pairs", pairs, "a list of pairs of prompts")
    names = _outputs(llm)[1:]  # llama.cpp's control vectors start at layer 1
    sides = [llm.trace([pair[i] for pair in pairs], names, positions=-1) for i in (0, 1)]
    vectors: dict[str, Any] = {}
    for name in names:
        differences = np.concatenate([a[name] - b[name] for a, b in zip(*sides, strict=True)])
        mean = differences.mean(axis=0)
        if method == "pca":
            component = np.linalg.svd(np.concatenate([differences, -differences]), full_matrices=False)[2][0]
            mean = component * np.sign(component @ mean) * np.linalg.norm(mean)
        vectors[name] = mean
    return Steering(vectors)


def save_control_vector(path: str | os.PathLike[str], steering: Steering, model: str) -> None:
    """Write vectors of the streams after layers as a control vector of llama.cpp.

    Args:
        model: architecture of the model (`ModelInfo.architecture`).

    Raises:
        UsageError: the format cannot contain the steering.
        OutputError: the file cannot be written.
    """
    matches = [re.fullmatch(r"layers\.([1-9]\d*)\.output", name) for name in steering.vectors]
    if steering.kind != "add" or steering.positions is not None or None in matches:
        raise UsageError(
            "a control vector adds to the outputs of layers from 1 on, at all positions: "
            "save a Steering of such vectors, named layers.1.output, layers.2.output, …"
        )
    scale = np.float32(steering.scale)
    numbers = {int(match[1]): steering.vectors[match[0]] * scale for match in matches if match is not None}
    keys: dict[str, Any] = {"general.architecture": "controlvector", "controlvector.model_hint": model}
    keys["controlvector.layer_count"] = len(numbers)
    specs = [TensorSpec(f"direction.{i}", vector.shape, GGMLType.F32) for i, vector in numbers.items()]
    with GGUFWriter(expanded(path), {key: encode_value(value) for key, value in keys.items()}, specs) as writer:
        for vector in numbers.values():
            writer.write(vector.view(np.uint8))


def _check_token(llm: TracedModel, token: int) -> None:
    """Raise UsageError if a token is not in the vocabulary."""
    n_vocab, number = llm.graph["logits"].width, as_int(token)
    if number is None or not 0 <= number < n_vocab:
        raise UsageError.of("token", token, f"a token id from 0 to {n_vocab - 1:,}, as LLM.tokenize returns")


def _logprobs(
    llm: TracedModel, prompt: Prompt, token: int, steers: Sequence[Steering]
) -> Iterator[tuple[int, float]]:
    """Yield the index of a steering, and the log-probability of ``token`` after the prompt with it; in any order."""
    prompts = [prompt if isinstance(prompt, str) else [*prompt]] * len(steers)
    changes = [[steering] for steering in steers]
    for piece in llm.stream_trace(prompts, "logits", positions=-1, steer=changes):
        yield piece.prompt, _token_logprob(piece.values["logits"][0], token)


def _logprob(llm: TracedModel, prompt: Prompt, token: int) -> float:
    """Return the log-probability of ``token`` after the prompt."""
    return _token_logprob(_values(llm, prompt, ["logits"], positions=-1)["logits"][0], token)


def _token_logprob(logits: Array, token: int) -> float:
    """Return the log-probability of a token."""
    logits = logits.astype(np.float64)
    return float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
