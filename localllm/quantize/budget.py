"""Choose a type for each tensor to reach a file size, or the smallest file with a given loss.

The sensitivity of a tensor is measured once: the Kullback-Leibler divergence from the original model if only this
tensor is quantised to about three bits. For other types, the loss is assumed to be proportional to the square of the
tensor's error, and losses of tensors are assumed to add up. Bytes are then spent on the tensors that reduce the sum
most. At the end, the divergence of the result is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.engine.runner import n_cache_pages
from localllm.errors import UsageError
from localllm.gguf import GGUFFile, TensorInfo
from localllm.kernels.backend import Backend
from localllm.kernels.cpu.host import check_memory
from localllm.models.registry import read_model
from localllm.quant.encode import Feedback
from localllm.quant.types import GGMLType
from localllm.quantize.imatrix import ImportanceMatrix
from localllm.quantize.imatrix_collection import step_batch
from localllm.quantize.mixes import fitting, is_quantizable
from localllm.quantize.run import TensorPlan, TensorWork

#: Candidate types, and the type that sensitivity is measured with.
LADDER = (GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.IQ4_XS, GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.Q8_0)
_MEASURED = GGMLType.Q3_K
#: Values per tensor for measuring the error of each type.
_SAMPLE = 1 << 17
#: Tokens per piece of text, and number of pieces per measurement.
CONTEXT, PIECES = 256, 8
#: Maximum number of corrections after measuring the divergence.
_ROUNDS = 6

#: Called with the number of finished measurements and the total number.
Progress = Callable[[int, int], object]


class TypeOption(NamedTuple):
    """The size and the loss of a tensor at a type."""

    n_bytes: int
    loss: float
    type: GGMLType


@dataclass(frozen=True)
class _Replaced:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


class _DivergenceMeter:
    """Measures divergence from the original model on pieces of text; the second half of each piece counts."""

    def __init__(self, file: GGUFFile, pieces: Sequence[Sequence[int]], backend: Backend) -> None:
        self._file, self._pieces, self._backend = file, pieces, backend
        self._base = self._log_probabilities({})

    def divergence(self, tensors: Mapping[str, TensorInfo]) -> float:
        """Return the mean Kullback-Leibler divergence, in nats, of the model with these tensors replaced."""
        log_probabilities = self._log_probabilities(tensors)
        means = [(np.exp(p) * (p - q)).sum(axis=1).mean() for p, q in zip(self._base, log_probabilities, strict=True)]
        return max(0.0, float(np.mean(means)))

    def _log_probabilities(self, tensors: Mapping[str, TensorInfo]) -> list[NDArray[np.float32]]:
        n, backend = len(self._pieces[0]), self._backend
        graph = read_model(_Replaced(self._file.metadata, {**self._file.tensors, **tensors}), n).graph
        n_pages = n_cache_pages(graph, n, 1, backend.page_size)
        needed = backend.footprint(graph, n_pages=n_pages, max_tokens=n // 2, max_outputs=n // 2, n_states=1)
        check_memory(needed.n_bytes, "the model")
        step, log_probabilities = needed.load(None), []
        for piece in self._pieces:
            step.run(step_batch(piece, 0, n // 2, n_pages, backend.page_size))
            logits = step(step_batch(piece, n // 2, n, n_pages, backend.page_size, outputs=True)).copy()
            logits -= logits.max(axis=1, keepdims=True)
            log_probabilities.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
        return log_probabilities


def allot(
    options: Mapping[str, Sequence[TypeOption]], *, n_bytes: float = np.inf, loss: float = 0.0
) -> dict[str, TypeOption]:
    """Choose an option for each tensor so that the file has at most ``n_bytes``, or the loss is at most ``loss``.

    Tensors start at their smallest option and take steps along the lower convex hull of their options. Steps that
    reduce the loss most per byte come first.

    Raises:
        UsageError: the smallest options take more than ``n_bytes``.
    """
    steps: list[tuple[float, str, TypeOption]] = []
    selection: dict[str, TypeOption] = {}
    for name, type_options in options.items():
        hull: list[TypeOption] = []
        for option in sorted(type_options):
            if hull and option.loss >= hull[-1].loss:
                continue
            while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], option):
                hull.pop()
            hull.append(option)
        selection[name] = hull[0]
        steps += [(_gain(a, b), name, b) for a, b in pairwise(hull)]
    size, cost = (sum(column) for column in zip(*((o.n_bytes, o.loss) for o in selection.values()), strict=True))
    if size > n_bytes:
        raise UsageError(f"the smallest file would still be {size - n_bytes:,.0f} bytes larger: give a larger size")
    for _, name, option in sorted(steps, key=lambda step: -step[0]):
        grown = size + option.n_bytes - selection[name].n_bytes
        if cost > loss and grown <= n_bytes:
            size, cost = grown, cost + option.loss - selection[name].loss
            selection[name] = option
    return selection


def _gain(a: TypeOption, b: TypeOption) -> float:
    return (a.loss - b.loss) / (b.n_bytes - a.n_bytes)


@dataclass(frozen=True)
class TypeChoice:
    """Types by tensor, and the measured divergence from the original model."""

    types: Mapping[str, GGMLType]
    divergence: float


def choose_types(
    file: GGUFFile,
    pieces: Sequence[Sequence[int]],
    backend: Backend,
    *,
    n_bytes: int | None = None,
    divergence: float | None = None,
    imatrix: ImportanceMatrix | None = None,
    search: bool = False,
    progress: Progress | None = None,
) -> TypeChoice:
    """Choose a type for each tensor that is worth quantising.

    Args:
        file: the model, in float types.
        pieces: token ids of a text; all pieces have the same even length.
        n_bytes: maximum bytes of the quantised file.
        divergence: alternative to ``n_bytes``: maximum Kullback-Leibler divergence on the text, in nats.
        imatrix, search: options of the quantisation.
    """
    meter = _DivergenceMeter(file, pieces, backend)
    feedbacks: dict[int, Feedback] = {}

    def encoded(tensor: TensorInfo, type: GGMLType) -> tuple[TensorInfo, float]:
        plan = TensorPlan(tensor, type)
        work = TensorWork(plan, imatrix, feedbacks, allow_nan=False, threads=None, search=search)
        data = np.concatenate([piece.reshape(-1, piece.shape[-1]) for _, piece in work.pieces()])
        return replace(tensor, type=type, data=data.reshape(*tensor.shape[:-1], -1)), work.result().error or 0.0

    options: dict[str, list[TypeOption]] = {}
    names = [name for name, tensor in file.tensors.items() if is_quantizable(name, tensor.shape)]
    for n_done, name in enumerate(names):
        if progress is not None:
            progress(n_done, len(names))
        tensor = file.tensors[name]
        some = _sampled(tensor)
        types = dict.fromkeys(fitting(type, tensor.shape[-1]) for type in LADDER)
        squares = {type: encoded(some, type)[1] ** 2 for type in types}
        measured = fitting(_MEASURED, tensor.shape[-1])
        loss = meter.divergence({name: encoded(tensor, measured)[0]}) / (squares[measured] or 1.0)
        options[name] = [
            TypeOption(TensorPlan(tensor, type).spec.n_bytes, loss * square, type) for type, square in squares.items()
        ]
        tensor.drop_pages()

    def measured_with(selection: Mapping[str, TypeOption]) -> TypeChoice:
        types = {name: option.type for name, option in selection.items()}
        return TypeChoice(
            types, meter.divergence({name: encoded(file.tensors[name], type)[0] for name, type in types.items()})
        )

    if n_bytes is not None:
        rest_bytes = sum(path.stat().st_size for path in file.paths) - sum(
            file.tensors[name].n_bytes for name in names
        )
        return measured_with(allot(options, n_bytes=n_bytes - rest_bytes))
    assert divergence is not None
    goal, best = divergence, None
    for _ in range(_ROUNDS):
        choice = measured_with(allot(options, loss=goal))
        if choice.divergence <= divergence and (best is None or choice.divergence > best.divergence):
            best = choice
        if 0.9 * divergence <= choice.divergence <= divergence:
            break
        goal *= 0.95 * divergence / max(choice.divergence, divergence / 8)
    if best is None:
        raise UsageError(
            f"the divergence stays at {choice.divergence:.5f}, more than {divergence:.5f}: allow a larger one"
        )
    return best


def _sampled(tensor: TensorInfo) -> TensorInfo:
    """Return some rows of a tensor, from each expert's matrix."""
    every = max(tensor.n_values // _SAMPLE, 1)
    data = tensor.data[..., ::every, :]
    return replace(tensor, data=data, shape=(*data.shape[:-1], tensor.shape[-1]))
