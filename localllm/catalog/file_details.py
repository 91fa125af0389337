"""Details of a model's file, read from its header and cached.

Reading takes some hundredths of a second per file, most of it for the vocabulary, so a list of a hundred files would
take seconds. Details are stored next to the compiled kernels and valid while a file's size and time stay the same.
Errors are not stored, because another version of localllm may support the file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.console import rounded
from localllm.errors import GGUFError, LocalLLMError
from localllm.kernels.code_cache import cache_root, write_aside
from localllm.nesting import parse_json
from localllm.version import __version__

if TYPE_CHECKING:
    from localllm.gguf import GGUFFile

#: To be increased when the meaning of `Details` changes.
_VERSION = f"{__version__}-3"
#: Maximum number of cached files.
_MAX_KEPT = 2000


@dataclass(frozen=True)
class Details:
    error: str | None = None  # why it cannot be run; other fields are None if the file cannot be read
    title: str | None = None  # name in the metadata
    architecture: str | None = None  # "llama", …
    file_type: str | None = None  # quantisation, such as "Q4_K_M"
    n_parameters: int | None = None  # values in all tensors
    trained_context: int | None = None  # tokens of context in training
    context: int | None = None  # tokens of the default context
    memory: int | None = None  # bytes of memory with the default context, on the CPU and with an f16 cache
    least_memory: int | None = None  # the same with the smallest default context
    # predicted tokens per second on the CPU with an empty context; None before rates of the formats are measured
    tokens_per_s: float | None = None

    def fits(self, available: int) -> str | None:
        """Return whether ``available`` bytes suffice: "yes", "with less context", "no", or None if it cannot run."""
        if self.memory is None or self.least_memory is None:
            return None
        if self.memory <= available:
            return "yes"
        return "with less context" if self.least_memory <= available else "no"

    def verdict(self, available: int) -> str:
        """Return `fits` with the predicted speed, such as "yes, 14.2 tokens/s"; empty if the model cannot run."""
        fits = self.fits(available) or ""
        return (
            f"{fits}, {rounded(self.tokens_per_s)} tokens/s" if fits not in ("", "no") and self.tokens_per_s else fits
        )


class DetailsReader:
    """Reads details of files and caches them, in memory and, after `save`, on disk.

    Not thread-safe.
    """

    def __init__(self) -> None:
        root = cache_root()
        self._store = None if root is None else root / "models.json"
        self._entries: dict[str, Any] = {} if self._store is None else _read_store(self._store)
        self._is_changed = False

    def read(self, path: Path) -> Details:
        """Return the details of a model by its first file. Details of a damaged file contain the error."""
        stamp, key = _stamp(path), str(path)
        if stamp is not None and (details := _remembered(self._entries.get(key), stamp)) is not None:
            return details
        from localllm.gguf import GGUFFile  # imported here because most files are cached

        try:
            with GGUFFile.open(path) as file:
                details = _details(file)
        except GGUFError as error:
            return Details(error=str(error))
        if stamp is not None and details.error is None:
            self._entries.pop(key, None)  # so that the entry moves to the end
            self._entries[key] = {"stamp": stamp, **asdict(details)}
            self._is_changed = True
        return details

    def save(self) -> None:
        """Write the cache to disk, if there is a cache folder."""
        if self._store is None or not self._is_changed:
            return
        files = dict(list(self._entries.items())[-_MAX_KEPT:])
        write_aside(self._store, json.dumps({"version": _version(self._store), "files": files}).encode())


def _stamp(path: Path) -> list[int] | None:
    """Return the size and the time of a file, which change when it changes; None if it does not exist."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]


def _version(store: Path) -> str:
    """Return the version of the details in a store. New rates of this machine change predicted speeds."""
    try:
        newest = max((path.stat().st_mtime_ns for path in store.parent.glob("rates-*.json")), default=0)
    except OSError:  # a file that has just been removed
        newest = 0
    return f"{_VERSION} {newest}"


def _read_store(path: Path) -> dict[str, Any]:
    try:
        stored = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if (
        not isinstance(stored, dict)
        or stored.get("version") != _version(path)
        or not isinstance(stored.get("files"), dict)
    ):
        return {}
    return dict(stored["files"])


def _remembered(entry: Any, stamp: list[int]) -> Details | None:
    """Return stored details; None if they are of another state of the file, or invalid."""
    if not isinstance(entry, dict) or entry.get("stamp") != stamp:
        return None
    texts = {"error", "title", "architecture", "file_type"}
    values = {field.name: entry.get(field.name) for field in fields(Details)}
    for name, value in values.items():
        expected = str if name in texts else float if name == "tokens_per_s" else int
        if value is not None and type(value) is not expected:
            return None
    return Details(**values)


def _details(file: GGUFFile) -> Details:
    from localllm.loading.model_info import file_type_name

    tensors = file.tensors.values()
    metadata: dict[str, Any] = {
        "title": _text(file, "general.name"),
        "architecture": _text(file, "general.architecture"),
        "file_type": file_type_name(file.metadata, tensors),
        "n_parameters": sum(tensor.n_values for tensor in tensors),
    }
    try:
        return Details(**metadata, **_memory(file))
    except LocalLLMError as error:
        return Details(**metadata, error=str(error))


def _text(file: GGUFFile, key: str) -> str | None:
    try:
        value = file.metadata.get(key)
    except GGUFError:  # invalid UTF-8
        return None
    return value if isinstance(value, str) else None


def _memory(file: GGUFFile) -> dict[str, Any]:
    """Return the default context of a model, and its memory."""
    from localllm.kernels.cpu.backend import CPUBackend
    from localllm.kernels.cpu.host import default_threads
    from localllm.loading.devices import Device
    from localllm.loading.load import check_runs
    from localllm.loading.placement import MIN_CONTEXT, SHORT_CONTEXT, Planner
    from localllm.loading.prediction import Predictor
    from localllm.models.registry import read_model

    check_runs(file)
    model = read_model(file)
    trained, threads = model.config.context_length, default_threads()
    cpu = CPUBackend(threads)  # starts threads only when they are needed
    planner = Planner("the model", model, (Device("cpu", "", threads, threads, cpu, cpu.workers.close),))
    context = min(trained, SHORT_CONTEXT)
    placement, least = planner.at(context), planner.at(min(context, MIN_CONTEXT)).total
    predictor = Predictor.known(model.graph, placement)
    token_s = None if predictor is None or not model.graph.is_causal else predictor.decode_s(0)
    return {
        "trained_context": trained,
        "context": context,
        "memory": placement.total,
        "least_memory": least,
        "tokens_per_s": None if token_s is None else 1 / token_s,
    }
