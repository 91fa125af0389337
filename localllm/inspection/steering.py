"""Steering: change a model's values by vectors while it evaluates tokens.

Vectors of values of the residual stream are also called control vectors or steering vectors. Sources: activation
addition (arXiv:2308.10248), representation engineering (arXiv:2310.01405), directional ablation (arXiv:2406.11717).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from localllm.engine.probe import Edit
from localllm.errors import Argument, ModelError, UsageError, path_text, quoted
from localllm.files import expanded
from localllm.inspection.names import ValueNames
from localllm.inspection.positions import Positions, Selection, select
from localllm.options.checks import as_int, floats
from localllm.options.types import Hook

Array = NDArray[np.float32]

#: Vectors that change values, by the value's name, or as one or several `Steering`.
Steer: TypeAlias = "Mapping[str, ArrayLike] | Steering | Sequence[Steering]"

#: How a vector changes rows; see `Steering`.
SteeringKind = Literal["add", "project_out", "clamp", "replace"]
_KINDS: tuple[SteeringKind, ...] = get_args(SteeringKind)

#: Architecture of llama.cpp's files of control vectors, and the names of their tensors.
_ARCHITECTURE, _VECTOR = "controlvector", re.compile(r"direction\.([1-9][0-9]*)")


class Steering:
    """Vectors that change values of a model, for ``generate(..., steer=...)``.

    Attributes:
        vectors: float32 [width], read-only, by the name of the value. ``*`` in a name matches any layer. Vectors with
            names that match the same value are applied in order.
        kind: "add" adds the vector. "project_out" removes the component along the vector. "clamp" limits this
            component to ``low`` … ``high``. "replace" sets rows to the vector.
        scale: factor on the vector ("add", "replace"), or the share of the component to remove ("project_out").
        low, high: limits of "clamp", in units of the rows.
        positions: positions to change, as indices of the prompt. A slice without an end, and None, include generated
            tokens.
    """

    def __init__(
        self,
        vectors: Mapping[str, ArrayLike],
        kind: SteeringKind = "add",
        *,
        scale: float = 1.0,
        low: float = -math.inf,
        high: float = math.inf,
        positions: Positions = None,
    ) -> None:
        """
        Raises:
            UsageError: a vector is not one-dimensional, not finite (also times ``scale``) or zero; or another
                argument is invalid.
        """
        if not isinstance(kind, str) or kind not in _KINDS:
            raise UsageError.of("kind", kind, f"one of {', '.join(map(repr, _KINDS))}")
        if not isinstance(vectors, Mapping) or not vectors:
            raise UsageError.of("steer", vectors, "a mapping of names of values to vectors")
        self.kind, self.positions, self.scale = kind, positions, _number(scale)
        if not math.isfinite(self.scale):
            raise UsageError.of("scale", scale, "a finite number")
        self.low, self.high = _number(low), _number(high)
        if not self.low <= self.high:
            raise UsageError.of("low", low, f"at most high, {high}")
        if kind == "clamp" and self.low == -math.inf and self.high == math.inf:
            raise UsageError('"clamp" without limits changes nothing: pass low, high or both')
        if kind != "clamp" and (self.low, self.high) != (-math.inf, math.inf):
            raise UsageError(f'low and high are limits of "clamp": remove them, or pass "clamp" instead of {kind!r}')
        self.vectors = {name: _vector(name, vector, kind, self.scale) for name, vector in vectors.items()}

    @classmethod
    def from_gguf(
        cls,
        path: str | os.PathLike[str],
        scale: float = 1.0,
        *,
        layers: tuple[int, int] | None = None,
        positions: Positions = None,
    ) -> Self:
        """Return the control vector in a file of llama.cpp's format, which adds to the output of layers.

        Args:
            layers: first and last layer to change; None for all layers of the file.

        Raises:
            GGUFError, ModelError: the file is not a control vector.
            UsageError: the file has no vector for ``layers``.
        """
        from localllm.gguf import GGUFFile  # imported here: programs that do not steer need no reader
        from localllm.quant.formats import dequantize

        with GGUFFile.open(expanded(path)) as file:
            architecture = file.metadata.get("general.architecture")
            if architecture != _ARCHITECTURE:
                raise ModelError(
                    f"{path_text(file.path)} is not a control vector: its general.architecture is "
                    f"{quoted(architecture)}, not {_ARCHITECTURE!r}"
                )
            vectors: dict[int, Array] = {}
            for name, tensor in file.tensors.items():
                match = _VECTOR.fullmatch(name)
                if match is None or len(tensor.shape) != 1:
                    raise ModelError(
                        f"{path_text(file.path)} has the tensor {quoted(name)} of shape {list(tensor.shape)}, but a "
                        "control vector has vectors direction.1, direction.2, …"
                    )
                vectors[int(match[1])] = dequantize(tensor.data, tensor.type).reshape(-1).copy()
        first, last = (1, max(vectors, default=1)) if layers is None else _layer_range(layers)
        chosen = {f"layers.{i}.output": vectors[i] for i in sorted(vectors) if first <= i <= last}
        if not chosen:
            raise UsageError(f"{path_text(file.path)} has no vector for the layers {first} to {last}: choose others")
        return cls(chosen, scale=scale, positions=positions)

    def __repr__(self) -> str:
        names = [*self.vectors]
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} vectors)"
        limits = f", low={self.low:g}, high={self.high:g}" if self.kind == "clamp" else f", scale={self.scale:g}"
        positions = "" if self.positions is None else f", positions={self.positions!r:.80}"
        return f"Steering({shown}, {self.kind!r}{limits}{positions})"

    def scaled(self, factor: float) -> Steering:
        """Return the steering with another scale: ``factor`` times this one."""
        limits = {"low": self.low, "high": self.high}
        return Steering(self.vectors, self.kind, scale=self.scale * factor, **limits, positions=self.positions)

    @property
    def digest(self) -> bytes:
        """A hash of everything that changes values, without the positions."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.kind, self.scale, self.low, self.high)).encode())
        for name, vector in self.vectors.items():
            digest.update(f"{name} {len(vector)} ".encode() + vector.tobytes())
        return digest.digest()

    def edits(self, names: ValueNames, selection: Selection) -> Iterator[tuple[str, Edit]]:
        """Yield the changes of a model's values, with their names. A value that several names match has several.

        Raises:
            UsageError: the model lacks a value, or its rows have another width.
        """
        for pattern, vector in self.vectors.items():
            for name in _editable("steer", pattern, names):
                if len(vector) != names[name].width:
                    words = f" has a vector of {len(vector):,} values for {name}, whose rows have "
                    remedy = ": use a vector that was made for this model"
                    raise UsageError(Argument("steer"), words, f"{names[name].width:,}", remedy)
                yield name, partial(_edited, name, self._change(vector), selection)

    def _change(self, vector: Array) -> Callable[[Array], Array]:
        """Return the function of rows [n, width] that a vector defines. Each row is computed alone."""
        scaled = vector * np.float32(self.scale)
        if self.kind == "add":
            return lambda rows: rows + scaled
        if self.kind == "replace":
            return lambda rows: np.broadcast_to(scaled, rows.shape)
        unit = vector.astype(np.float64) / np.linalg.norm(vector.astype(np.float64))
        low, high, share = self.low, self.high, self.scale
        is_clamp = self.kind == "clamp"

        def change(rows: Array) -> Array:
            along = (rows * unit).sum(axis=1, keepdims=True)
            difference = np.clip(along, low, high) - along if is_clamp else -share * along
            changed: Array = (rows + difference * unit).astype(np.float32)
            return changed

        return change


def read_folder(folder: str | os.PathLike[str]) -> dict[str, Steering]:
    """Return the control vectors of a folder by name, the file's name without ``.gguf``.

    Raises UsageError if the folder contains none.
    """
    paths = sorted(expanded(folder).glob("*.gguf"))
    if not paths:
        raise UsageError(
            f"{path_text(folder)} contains no control vectors, which are .gguf files: name another folder"
        )
    return {path.stem: Steering.from_gguf(path) for path in paths}


def read_steer(items: Sequence[object]) -> Iterator[Steering]:
    """Yield the items of the option ``steer``, mappings of names to vectors, as `Steering`.

    Raises UsageError if an item is neither a mapping nor a `Steering`.
    """
    for item in items:
        if isinstance(item, Steering):
            yield item
        elif not isinstance(item, Mapping):
            raise UsageError.of("steer", item, "a mapping of names to vectors, a Steering, or a list of Steering")
        elif item:
            yield Steering(item)


def all_edits(
    steer: Sequence[object], hooks: Mapping[str, Hook], names: ValueNames, n_prompt: int
) -> tuple[dict[str, list[Edit]], tuple[Any, ...] | None]:
    """Return the changes of each value, steering before hooks, and their key for the cache: None without changes.

    Hooks are functions whose results can differ from call to call, so their requests share no cached prefixes.
    """
    edits: dict[str, list[Edit]] = {}
    keys: list[Any] = []
    for steering in read_steer(steer):
        selection = select(steering.positions, n_prompt)
        keys.append((steering.digest, selection))
        for name, edit in steering.edits(names, selection):
            edits.setdefault(name, []).append(edit)
    for pattern, hook in hooks.items():
        for name in _editable("hooks", pattern, names):
            edits.setdefault(name, []).append(partial(_hooked, name, hook))
    if hooks:
        keys.append(object())
    return edits, tuple(keys) or None


def _editable(argument: str, pattern: str, names: ValueNames) -> Iterator[str]:
    """Yield the names that match a pattern. Raises UsageError for unknown names and for numbers of chosen experts."""
    for name in names.matching(argument, pattern):
        if names[name].is_choice:
            words = f" names {name}, the numbers of chosen experts, which cannot be changed: change "
            raise UsageError(Argument(argument), words, name.replace("experts", "router"))
        yield name


def _edited(
    name: str, change: Callable[[Array], Array], selection: Selection, rows: Array, positions: NDArray[np.int64]
) -> Array:
    """Change the selected rows in place. Raises UsageError if finite rows become infinite."""
    selected = selection.among(positions)
    if selected.any():
        before = rows[selected]
        with np.errstate(over="ignore", invalid="ignore"):
            rows[selected] = after = change(before)
        if np.isfinite(before).all() and not np.isfinite(after).all():
            raise UsageError(Argument("steer"), f" makes {name} infinite: use a smaller vector or scale")
    return rows


def _hooked(name: str, hook: Hook, rows: Array, positions: NDArray[np.int64]) -> Array | None:
    """Return the new rows of a hook, float32 [n, width]. Raises UsageError if they are not finite rows."""
    result = hook(rows.copy(), positions.copy())
    if result is None:
        return None
    try:
        edited = floats(result)
    except TypeError as error:
        raise UsageError(
            f"the hook of {name} returned {type(result).__name__}, but must return an array of real numbers"
        ) from error
    if edited.shape != rows.shape:
        raise UsageError(
            f"the hook of {name} returned an array of shape {list(edited.shape)}, but must return {list(rows.shape)}"
        )
    if not np.isfinite(edited).all():
        raise UsageError(f"the hook of {name} returned NaN or infinity: return finite numbers")
    return edited


def _number(value: object) -> float:
    """Return a number as float, or NaN."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an integer outside the range
        return math.nan


def _vector(name: object, vector: ArrayLike, kind: SteeringKind, scale: float) -> Array:
    """Return a read-only copy of a vector. Raises UsageError; see `Steering`."""
    if not isinstance(name, str):
        raise UsageError(Argument("steer"), f" has the name {name!r:.80}, but names of values are strings")
    try:
        array = floats(vector)
    except TypeError:
        raise UsageError.of("steer", vector, f"an array of real numbers for {name:.80}") from None
    if array.ndim != 1 or not len(array):
        raise UsageError(
            Argument("steer"), f" has an array of shape {list(array.shape)} for {name!r:.80}: give a vector"
        )
    if not np.isfinite(array).all():
        raise UsageError(
            Argument("steer"), f" has NaN or infinity in the vector of {name!r:.80}: give finite numbers"
        )
    if kind in ("project_out", "clamp") and not array.any():
        raise UsageError(Argument("steer"), f" has a zero vector for {name!r:.80}, which has no direction")
    with np.errstate(over="ignore"):
        if not np.isfinite(array * np.float32(scale)).all():
            words = f" has a vector of {name!r:.80} that is infinite times the scale {scale:g}: use a smaller scale"
            raise UsageError(Argument("steer"), words)
    array.flags.writeable = False  # running requests use the vectors
    return array


def _layer_range(layers: tuple[int, int]) -> tuple[int, int]:
    match [as_int(number) for number in layers] if isinstance(layers, Sequence) else []:
        case [int(first), int(last)] if first <= last:
            return first, last
    raise UsageError.of("layers", layers, "the first and the last layer")
