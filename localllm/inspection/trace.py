"""Traces: the values of a model's forward pass at the tokens of prompts."""

from __future__ import annotations

import json
import queue
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.engine.probe import Probe
from localllm.engine.request import Request
from localllm.errors import NotEnoughMemoryError, OutputError, QueueFullError, UsageError, path_text
from localllm.files import NewFile
from localllm.inspection.names import ValueNames
from localllm.inspection.positions import Positions, Selection
from localllm.inspection.steering import Steer, Steering
from localllm.kernels.cpu.host import available_memory
from localllm.options.types import Hook, Progress
from localllm.sampling import Choice

#: Most prompts that are evaluated at the same time, and most unread pieces of a prompt, which then pauses.
_AT_ONCE, _MAX_UNREAD = 8, 4
#: Length of the header at the start of a safetensors file.
_LENGTH = struct.Struct("<Q")


class TraceOptions(TypedDict, total=False):
    """Keywords of `LLM.trace`, `stream_trace` and `save_trace`.

    Attributes:
        positions: positions of the prompt to read, as indices of a list: a number, a list, a slice or a range. By
            default all positions. Rows are in ascending order of positions.
        steer, hooks: changes of values, as in `localllm.Options`. Values are read after them. For a list of prompts,
            ``steer`` can be a list with a list of `Steering` for each prompt.
        adapters: scales of loaded adapters, as in `localllm.Options`.
        add_special, parse_special: how strings are tokenized; see `LLM.tokenize`.
    """

    positions: Positions
    steer: Steer | Sequence[Sequence[Steering]]
    hooks: Mapping[str, Hook] | None
    adapters: Mapping[str, float] | None
    add_special: bool
    parse_special: bool


@dataclass(frozen=True, slots=True)
class TracePiece:
    """Values of some tokens of a prompt.

    Attributes:
        prompt: index of the prompt.
        positions: positions of the tokens in the prompt, int64 [n], ascending.
        values: float32 [n, width] by name; int32 for the numbers of chosen experts.
    """

    prompt: int
    positions: NDArray[np.int64]
    values: dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class TracedPrompt:
    """A prompt of a trace."""

    ids: list[int]
    selection: Selection  # positions to read
    probe: Probe
    adapters: tuple[float, ...] = ()  # scale of each loaded adapter; empty: base model

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Selected positions, int64 [n], ascending."""
        positions = np.arange(len(self.ids))
        return positions[self.selection.among(positions)]


class _Output:
    """Sends the values of one prompt to the reader of a trace (`localllm.engine.request.RequestOutput`)."""

    def __init__(self, index: int, prompt: TracedPrompt, items: queue.SimpleQueue[Any]) -> None:
        self.index, self.prompt, self._items = index, prompt, items
        self._n_sent = self._n_read = 0  # pieces; the engine thread writes the first, the reader the second
        prompt.probe.on_values = self._values

    @property
    def is_full(self) -> bool:
        return self._n_sent - self._n_read >= _MAX_UNREAD

    def count_read(self) -> bool:
        """Count a piece as read. Return whether the engine may have paused the prompt before."""
        self._n_read += 1
        # Checked after counting, because the engine may send a piece and find the output full between the two.
        return self._n_sent - self._n_read >= _MAX_UNREAD - 1

    def _values(self, positions: NDArray[np.int64], values: dict[str, NDArray[Any]]) -> None:
        selected = self.prompt.selection.among(positions)
        if selected.any():
            self._n_sent += 1
            pieces = {name: rows if selected.all() else rows[selected] for name, rows in values.items()}
            self._items.put((self, TracePiece(self.index, positions[selected], pieces)))

    def progress(self, n_evaluated: int) -> None: ...

    def token(self, choice: Choice) -> bool:
        raise AssertionError("a trace received a token")

    def logits(self, position: int, rows: NDArray[np.float32]) -> None: ...

    def flush(self) -> None: ...

    def end(self, error: BaseException | None) -> None:
        self._items.put((self, error))


@dataclass(frozen=True)
class Trace:
    """Prompts whose values are read."""

    engine: Engine
    prompts: Sequence[TracedPrompt]
    names: ValueNames
    is_list: bool  # whether the caller gave a list of prompts

    def pieces(self) -> Iterator[TracePiece]:
        """Yield the values, of each prompt in the order of its tokens. Several prompts are evaluated at once."""
        items: queue.SimpleQueue[tuple[_Output, TracePiece | BaseException | None]] = queue.SimpleQueue()
        running: dict[_Output, Request] = {}
        waiting = [*enumerate(self.prompts)][::-1]
        try:
            while waiting or running:
                while waiting and len(running) < _AT_ONCE:
                    output = _Output(*waiting[-1], items)
                    request = self._request(output)
                    try:
                        self.engine.submit(request)
                    except QueueFullError:
                        if not running:
                            raise
                        break
                    waiting.pop()
                    running[output] = request
                output, item = self.engine.wait_for(items)
                if isinstance(item, TracePiece):
                    if output.count_read():
                        self.engine.wake()
                    yield item
                    continue
                del running[output]
                if item is not None:
                    raise item
        finally:
            for request in running.values():
                self.engine.cancel(request)

    def _request(self, output: _Output) -> Request:
        prompt, is_causal = output.prompt, self.engine.graph.is_causal
        # Tokens that see later tokens must be evaluated in one step.
        prompt.probe.values_from = first = int(prompt.positions[0]) if is_causal else 0
        needs_outputs = any(self.names[name].rows == "n_outputs" for name in prompt.probe.watched)
        logits_from = first if needs_outputs or not is_causal else len(prompt.ids)
        return Request([*prompt.ids], output, logits_from=logits_from, probe=prompt.probe, adapters=prompt.adapters)

    def arrays(self) -> list[dict[str, NDArray[Any]]]:
        """Return the values of each prompt, [n_positions, width] by name.

        Raises NotEnoughMemoryError if they do not fit in memory.
        """
        n_bytes, available = sum(place.n_bytes for place in self._places.values()), available_memory()
        if n_bytes > available:
            raise NotEnoughMemoryError(
                f"the values take {n_bytes / 1e9:.2f} GB, but {available / 1e9:.2f} GB of memory is available: name "
                "fewer values or positions, or use stream_trace or save_trace"
            )
        rows = {key: np.empty(place.shape, place.dtype) for key, place in self._places.items()}
        for key, first, values in self._rows():
            rows[key][first : first + len(values)] = values
        return [{name: rows[i, name] for name in prompt.probe.watched} for i, prompt in enumerate(self.prompts)]

    def save(self, path: Path, progress: Progress | None = None) -> None:
        """Write the values to a ``.safetensors`` or ``.npz`` file; see `localllm.LLM.save_trace`."""
        if path.suffix not in (".safetensors", ".npz"):
            raise UsageError.of("path", path.name, "the name of a .safetensors or .npz file")
        places = {f"{i}/{name}" if self.is_list else name: place for (i, name), place in self._places.items()}
        if path.suffix == ".npz":
            _save_npz(path, places, lambda put: self._write(put, 0, progress))
            return
        header = json.dumps({name: place.entry for name, place in places.items()}).encode()
        begin = _LENGTH.size + len(header)
        with NewFile(path, begin + sum(place.n_bytes for place in places.values())) as file:
            file.put(_LENGTH.pack(len(header)) + header)
            self._write(file.put, begin, progress)

    def _write(self, put: Callable[[bytes, int], object], begin: int, progress: Progress | None) -> None:
        """Write all rows to a file whose arrays start at ``begin``. ``put`` writes bytes at an offset."""
        n_written, n_total = 0, sum(len(prompt.positions) for prompt in self.prompts)
        for (i, name), first, values in self._rows():
            place = self._places[i, name]
            data = np.ascontiguousarray(values, place.dtype).tobytes()
            put(data, begin + place.offset + first * place.row_bytes)
            if progress is not None and name == self.prompts[i].probe.watched[-1]:
                n_written += len(values)
                progress(n_written, n_total)

    def _rows(self) -> Iterator[tuple[tuple[int, str], int, NDArray[Any]]]:
        """Yield (index of the prompt, name), the first row, and rows of a value."""
        n_done = [0] * len(self.prompts)
        for piece in self.pieces():
            for name, values in piece.values.items():
                yield (piece.prompt, name), n_done[piece.prompt], values
            n_done[piece.prompt] += len(piece.positions)

    @cached_property
    def _places(self) -> dict[tuple[int, str], _FileArray]:
        """The arrays of all prompts by (index of the prompt, name), in the order of a file."""
        places: dict[tuple[int, str], _FileArray] = {}
        offset = 0
        for i, prompt in enumerate(self.prompts):
            for name in prompt.probe.watched:
                shape = self.names[name]
                dtype = np.int32 if shape.is_choice else np.float32
                places[i, name] = _FileArray(dtype, (len(prompt.positions), shape.width), offset)
                offset += places[i, name].n_bytes
        return places


@dataclass(frozen=True)
class _FileArray:
    """An array in a file."""

    dtype: type[np.int32 | np.float32]
    shape: tuple[int, int]
    offset: int

    @property
    def row_bytes(self) -> int:
        return 4 * self.shape[1]

    @property
    def n_bytes(self) -> int:
        return self.shape[0] * self.row_bytes

    @property
    def entry(self) -> dict[str, Any]:
        """Entry in the header of a safetensors file."""
        dtype = "I32" if self.dtype is np.int32 else "F32"
        return {"dtype": dtype, "shape": self.shape, "data_offsets": [self.offset, self.offset + self.n_bytes]}


def _save_npz(
    path: Path, places: Mapping[str, _FileArray], write: Callable[[Callable[[bytes, int], object]], object]
) -> None:
    """Write a .npz file, whose arrays must be contiguous: a temporary file collects the rows first."""
    n_bytes = 2 * sum(place.n_bytes for place in places.values())
    try:
        with NewFile(path, n_bytes) as file, tempfile.TemporaryFile(dir=path.parent) as raw:

            def put(data: bytes, at: int) -> None:
                raw.seek(at)
                raw.write(data)

            write(put)
            raw.flush()
            arrays = {name: np.memmap(raw, p.dtype, "r", p.offset, p.shape) for name, p in places.items()}
            np.savez(file.stream, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise OutputError(
            f"{path_text(path)} cannot be written ({error.strerror or error}): choose another folder"
        ) from error
