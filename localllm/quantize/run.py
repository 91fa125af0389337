"""Quantise a file: plan the types of its tensors, then encode and write them part by part."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from localllm.errors import ModelError, UsageError, path_text, quoted
from localllm.files import check_is_new
from localllm.gguf import Metadata
from localllm.gguf.metadata import ValueType
from localllm.gguf.writer import GGUFWriter, TensorSpec, encode_value
from localllm.kernels.graph import Weight
from localllm.parallel import in_order
from localllm.quant.bits import Floats
from localllm.quant.encode import ENCODABLE, FEEDBACK, Feedback, quantize
from localllm.quant.formats import FORMATS, dequantize
from localllm.quant.types import GGMLType
from localllm.quantize.imatrix import ImportanceMatrix
from localllm.quantize.mixes import (
    MIXES,
    chooser_for,
    fitting,
    is_quantizable,
    layer_order,
    mix_named,
    needs_importance,
)
from localllm.version import __version__

# Values that a thread decodes and encodes at a time, and values per tensor for measuring the error.
_PIECE = 1 << 17
_SAMPLE = 1 << 17
# Maximum number of factorised Hessians in memory.
_KEPT_FEEDBACKS = 3
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


class SourceTensor(Weight, Protocol):
    """A tensor of a source: `localllm.gguf.TensorInfo` describes it."""

    @property
    def n_values(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    def parts(self) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
        """Yield the data in order, in one or several parts."""


class SourceFile(Protocol):
    """The source: a `GGUFFile` or a `localllm.convert.Checkpoint`."""

    @property
    def architecture(self) -> str: ...
    @property
    def metadata(self) -> Metadata: ...
    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...
    @property
    def paths(self) -> Sequence[Path]: ...
    @property
    def parts(self) -> Sequence[Sequence[str]]: ...
    def check_unchanged(self) -> None: ...


@dataclass(frozen=True)
class TensorPlan:
    """The types of a tensor before and after quantisation; ``new`` equals ``old`` for a copied tensor."""

    source: SourceTensor
    new: GGMLType
    replaced: GGMLType | None = None  # the type that ``new`` replaces because its blocks do not fit the rows

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def old(self) -> GGMLType:
        return self.source.type

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.source.shape, self.new)

    @property
    def is_copied(self) -> bool:
        return self.new is self.old


@dataclass(frozen=True)
class TensorResult:
    plan: TensorPlan
    # root of the weighted squared error divided by the root of the weighted squares, of some hundred thousand values;
    # with a Hessian, of the products with its inputs.  None for a copied tensor.
    error: float | None
    n_cleared: int = 0  # number of values that were not finite and became 0


@dataclass(frozen=True)
class QuantizePlan:
    file: SourceFile
    mix: str  # a name in `MIXES`
    imatrix: ImportanceMatrix | None
    tensors: Sequence[TensorPlan]  # in writing order
    files: Sequence[tuple[Path, Sequence[TensorPlan]]]  # output files, and the tensors of each file
    # tensors whose type needs an importance matrix, but that lack one
    missing_importance: Sequence[TensorPlan]
    search: bool = False  # search for the best scales also without importance

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors after quantisation."""
        return sum(tensor.spec.n_bytes for tensor in self.tensors)


def plan(
    file: SourceFile,
    target: Path,
    mix: str | None,
    *,
    types: Mapping[str, GGMLType] | None = None,
    imatrix: ImportanceMatrix | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    keep_split: bool = False,
    allow_requantize: bool = False,
    search: bool = False,
) -> QuantizePlan:
    """Choose a type for every tensor.

    Args:
        file: an open model.
        target: the file to write; with ``keep_split``, the start of the files' names.
        mix: a name in `MIXES`, case-insensitive; None keeps the types of all tensors that are not in ``types``.
        types: types by tensor.
        imatrix: importance of columns.
        overrides: regular expressions, and types of tensors with matching names. The first match counts.
        keep_split: write as many files as the source has.
        allow_requantize: accept tensors that are already quantised, with a further loss.
        search: see `localllm.quant.encode.quantize`.
    """
    names = sorted(file.tensors, key=layer_order)
    if imatrix is not None:
        imatrix.check_is_of(names)
    if mix is None:
        tensors = [TensorPlan(file.tensors[name], (types or {}).get(name, file.tensors[name].type)) for name in names]
        mix = _mix_of(tensors)
    else:
        mix = mix_named(mix)
        patterns = [_override(pattern, type) for pattern, type in overrides]
        chooser = chooser_for(mix, file.architecture, file.metadata, names, imatrix is not None, patterns)
        sources = [file.tensors[name] for name in names]
        tensors = [_fitted(source, chooser.wanted_type(source.name, source.shape, source.type)) for source in sources]
    missing = []
    for tensor in tensors:
        if not tensor.is_copied:
            _check_source(tensor.source, tensor.new, allow_requantize)
            importance = None if imatrix is None else imatrix.of(tensor.name, tensor.source.shape)
            if importance is None and needs_importance(tensor.name, tensor.new, mix):
                missing.append(tensor)
    return QuantizePlan(file, mix, imatrix, tensors, _files(file, target, tensors, keep_split), missing, search)


def _fitted(source: SourceTensor, type: GGMLType) -> TensorPlan:
    new = type if type is source.type else fitting(type, source.shape[-1])
    return TensorPlan(source, new, None if new is type else type)


def _mix_of(tensors: Sequence[TensorPlan]) -> str:
    """Return the mix of the type with the most bytes of quantisable tensors; F32 if there are no such tensors."""
    n_bytes: Counter[GGMLType] = Counter()
    for tensor in tensors:
        if is_quantizable(tensor.name, tensor.source.shape):
            n_bytes[tensor.new] += tensor.spec.n_bytes
    ((most, _),) = n_bytes.most_common(1) or [(GGMLType.F32, 0)]
    return next((name for name, (_, type) in MIXES.items() if type is most), "F32")


def _override(pattern: str, type: str) -> tuple[re.Pattern[str], GGMLType]:
    ggml_type = GGMLType.__members__.get(type.upper())
    if ggml_type not in ENCODABLE:
        raise UsageError(
            f"there is no type {type!r} for tensors: choose one of {', '.join(t.name for t in ENCODABLE)}"
        )
    try:
        return re.compile(pattern), ggml_type
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{pattern!r:.80} is not a valid regular expression: {error}") from None


def _check_source(source: SourceTensor, new: GGMLType, allow_requantize: bool) -> None:
    if source.type not in FORMATS:
        raise ModelError(f"tensor {quoted(source.name)} is {source.type.name}, which cannot be decoded")
    if source.type not in _FLOATS and new not in _FLOATS and not allow_requantize:
        raise ModelError(
            f"tensor {quoted(source.name)} is quantised already, as {source.type.name}, and would lose again as "
            f"{new.name}: start from the F16, BF16 or F32 file, or allow it (--allow-requantize)"
        )


def _files(
    file: SourceFile, target: Path, tensors: Sequence[TensorPlan], keep_split: bool
) -> list[tuple[Path, Sequence[TensorPlan]]]:
    if not keep_split or len(file.parts) == 1:
        return [(target, tensors)]
    tensor_names = [set(names) for names in file.parts]
    return _numbered(target, [[tensor for tensor in tensors if tensor.name in names] for names in tensor_names])


def _numbered(target: Path, groups: Sequence[Sequence[TensorPlan]]) -> list[tuple[Path, Sequence[TensorPlan]]]:
    """Return the files of a split model with llama.cpp's names."""
    stem = re.sub(r"(-\d{5}-of-\d{5})?(\.gguf)?$", "", target.name)
    names = [f"{stem}-{number:05d}-of-{len(groups):05d}.gguf" for number in range(1, len(groups) + 1)]
    return [(target.with_name(name), group) for name, group in zip(names, groups, strict=True)]


def split_files(
    tensors: Sequence[TensorPlan], target: Path, max_tensors: int, max_bytes: int | None = None
) -> list[tuple[Path, Sequence[TensorPlan]]]:
    """Return files of at most ``max_bytes`` of tensors, or one larger tensor; by default of ``max_tensors`` tensors.

    Their names start with the name of ``target``.
    """
    groups: list[list[TensorPlan]] = [[]]
    n_bytes = 0
    for tensor in tensors:
        is_full = len(groups[-1]) == max_tensors if max_bytes is None else n_bytes + tensor.spec.n_bytes > max_bytes
        if groups[-1] and is_full:
            groups.append([])
            n_bytes = 0
        groups[-1].append(tensor)
        n_bytes += tensor.spec.n_bytes
    return _numbered(target, groups)


def run(
    plan: QuantizePlan,
    *,
    allow_nan: bool = False,
    progress: Callable[[TensorPlan, int, int], object] | None = None,
    threads: int | None = None,
) -> Iterator[TensorResult]:
    """Write the files of a plan. Yields each tensor after writing it.

    After Ctrl-C or a kill, the same call continues there and does not yield tensors that are already written.

    Args:
        allow_nan: set values that are not finite to 0 instead of raising ModelError.
        progress: called with the current tensor, the finished bytes and the total bytes of the source.
        threads: number of threads; one per processor by default.
    """
    if plan.missing_importance:
        first = plan.missing_importance[0]
        raise ModelError(
            f"{plan.mix} makes {quoted(first.name)} {first.new.name}, which is of no use without the importance of "
            f"its columns ({len(plan.missing_importance)} such tensors): give an importance matrix, or choose a "
            "larger type"
        )
    for path, _ in plan.files:
        check_is_new(path, plan.file.paths)
    total = sum(tensor.source.n_bytes for tensor in plan.tensors)
    n_done, feedbacks = 0, dict[int, Feedback]()
    with ExitStack() as files:  # all files get their names together at the end
        origin = _origin(plan, allow_nan)
        writers = [
            GGUFWriter(path, _metadata(plan, number), [tensor.spec for tensor in tensors], origin)
            for number, (path, tensors) in enumerate(plan.files)
        ]
        for writer, (_, tensors) in zip(writers, plan.files, strict=True):
            files.enter_context(writer)
            n_done += sum(tensor.source.n_bytes for tensor in tensors[: writer.n_kept])
            for tensor in tensors[writer.n_kept :]:
                if progress:
                    progress(tensor, n_done, total)
                work = TensorWork(tensor, plan.imatrix, feedbacks, allow_nan, threads, plan.search)
                for n_done_of_tensor, piece in work.pieces():
                    writer.write(piece)
                    if progress:
                        progress(tensor, n_done + n_done_of_tensor, total)
                tensor.source.drop_pages()
                n_done += tensor.source.n_bytes
                yield work.result()
        plan.file.check_unchanged()


def _origin(plan: QuantizePlan, allow_nan: bool) -> str:
    """Return the inputs and options that the tensors' bytes depend on; empty if the importance matrix has no file."""
    inputs = [*plan.file.paths]
    if plan.imatrix is not None:
        if plan.imatrix.path is None or not plan.imatrix.path.exists():
            return ""
        inputs.append(plan.imatrix.path)
    stats = [path.stat() for path in inputs]
    files = [(os.fspath(path.resolve()), s.st_size, s.st_mtime_ns) for path, s in zip(inputs, stats, strict=True)]
    return f"{__version__} {allow_nan} {plan.search} {files}"


def _metadata(plan: QuantizePlan, number: int) -> dict[str, bytes]:
    """Return the keys of an output file: keys of the input, and the keys that llama.cpp's quantiser adds."""
    source = plan.file.metadata
    split = {
        "split.no": encode_value(number, ValueType.UINT16),
        "split.count": encode_value(len(plan.files), ValueType.UINT16),
        "split.tensors.count": encode_value(len(plan.tensors), ValueType.INT32),
    }
    if number:
        return split
    new = {
        "general.quantization_version": encode_value(_QUANTIZATION_VERSION),
        "general.file_type": encode_value(MIXES[plan.mix][0]),
    }
    if "general.file_type" in source and all(tensor.is_copied for tensor in plan.tensors):
        new = {}
    if plan.imatrix is not None:
        if plan.imatrix.path is not None:
            new["quantize.imatrix.file"] = encode_value(path_text(plan.imatrix.path)[:127])
        if plan.imatrix.datasets:
            new["quantize.imatrix.dataset"] = encode_value(plan.imatrix.datasets[0][:127])
        new["quantize.imatrix.entries_count"] = encode_value(len(plan.imatrix.entries))
        if plan.imatrix.n_chunks > 0:
            new["quantize.imatrix.chunks_count"] = encode_value(plan.imatrix.n_chunks)
    copied = {key: source.encoded(key) for key in source if key not in new and key not in _SPLIT_KEYS}
    return copied | new | (split if len(plan.files) > 1 else {})


class _Piece(NamedTuple):
    """Encoded rows, squared error and squares of a sample, and the number of values that were not finite."""

    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    error: float = 0.0
    square: float = 0.0
    n_cleared: int = 0


class TensorWork:
    """Encodes a tensor in threads, some rows at a time, and measures the error.

    ``feedbacks``: `Feedback` by the id of its Hessian, shared by the tensors of one file.
    """

    def __init__(
        self,
        tensor: TensorPlan,
        imatrix: ImportanceMatrix | None,
        feedbacks: dict[int, Feedback],
        allow_nan: bool,
        threads: int | None,
        search: bool,
    ) -> None:
        self.tensor = tensor
        self.n_cleared = 0  # number of values that were not finite
        self._importance: Floats | None = None
        self._hessian: Floats | None = None
        if imatrix is not None and not tensor.is_copied:
            self._importance = imatrix.of(tensor.name, tensor.source.shape)
            if tensor.new in FEEDBACK and self._importance is not None:
                self._hessian = imatrix.entries[tensor.name].hessian
        self._feedback = None if self._hessian is None else self._feedback_of(self._hessian, feedbacks)
        self._allow_nan = allow_nan
        self._threads = threads or os.cpu_count() or 1
        self._search = search
        self._error = self._squares = 0.0

    def _feedback_of(self, hessian: Floats, feedbacks: dict[int, Feedback]) -> Feedback:
        """Return the feedback of a Hessian. Cached for weights with the same input, which are close in a file."""
        if id(hessian) not in feedbacks:
            if len(feedbacks) == _KEPT_FEEDBACKS:
                del feedbacks[next(iter(feedbacks))]
            try:
                feedbacks[id(hessian)] = Feedback.of(hessian)
            except ModelError as error:
                raise ModelError(f"tensor {quoted(self.tensor.name)}: {error}") from None
        return feedbacks[id(hessian)]

    def pieces(self) -> Iterator[tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]:
        """Yield the bytes of the source that are done, and the next encoded rows."""
        source = self.tensor.source
        n = source.shape[-1] if source.shape else 1
        per_expert = self._importance is not None and self._importance.ndim == 2
        groups = source.shape[0] if per_expert else 1
        step, every = max(_PIECE // n, 1), max(source.n_values // _SAMPLE, 1)

        def encode(at: tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], int, int]) -> tuple[int, _Piece]:
            data, group, first = at
            rows = data[group, first : first + step]
            weights = self._importance if self._importance is None or not per_expert else self._importance[group]
            return rows.nbytes, self._encode(rows, weights, slice(-first % every, None, every))

        n_done = 0
        for data in source.parts():  # a checkpoint reads the data here
            data = data.reshape(groups, -1, data.shape[-1] if data.ndim else 1)
            slices = [(data, group, first) for group in range(groups) for first in range(0, data.shape[1], step)]
            for n_bytes, piece in map(encode, slices) if len(slices) < 2 else in_order(encode, slices, self._threads):
                n_done += n_bytes
                self._error += piece.error
                self._squares += piece.square
                self.n_cleared += piece.n_cleared
                yield n_done, piece.data

    def _encode(
        self, rows: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], weights: Floats | None, sample: slice
    ) -> _Piece:
        """Encode rows, and measure the error of a ``sample``."""
        old, new = self.tensor.old, self.tensor.new
        if self.tensor.is_copied and old not in _FLOATS:
            return _Piece(rows)
        values, n_cleared = dequantize(rows, old), 0
        if not -np.inf < values.min() <= values.max() < np.inf:  # also True for NaN
            values, n_cleared = self._cleared(values)
        if self.tensor.is_copied and not n_cleared:
            return _Piece(rows)
        try:
            encoded = quantize(values, new, weights, 1, self._feedback, favours_large=True, search=self._search)
        except ModelError as error:
            raise ModelError(f"tensor {quoted(self.tensor.name)}: {error}") from None
        was = values[sample]
        lost = self._square(was - dequantize(encoded[sample], new), weights)
        return _Piece(encoded, lost, self._square(was, weights), n_cleared)

    def _cleared(self, values: Floats) -> tuple[Floats, int]:
        """Return values with 0 in place of NaN and infinity, and the number of replaced values."""
        finite = np.isfinite(values)
        if not (self._allow_nan or finite.all()):
            raise ModelError(
                f"tensor {quoted(self.tensor.name)} has values that are NaN or infinite: the model is damaged; get "
                "it again, or let them become 0 (--allow-nan)"
            )
        values[~finite] = 0
        return values, int((~finite).sum())

    def _square(self, rows: Floats, weights: Floats | None) -> float:
        """Return the weighted sum of squares of rows; with a Hessian, of their products with its inputs."""
        if self._hessian is not None:
            return float(((rows @ self._hessian) * rows).sum(dtype=np.float64))
        return float((rows.astype(np.float64) ** 2 * (1.0 if weights is None else weights)).sum())

    def result(self) -> TensorResult:
        error = None if self.tensor.is_copied else (self._error / self._squares) ** 0.5 if self._squares else 0.0
        return TensorResult(self.tensor, error, self.n_cleared)
