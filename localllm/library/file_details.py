"""Details of a model's file: read from its header once, and kept for the next time.

Reading takes some hundredths of a second a file, most of it for the vocabulary, so a hundred files would keep people
waiting.  What was read is kept beside the compiled kernels, as long as a file's size and time stay the same; but not
that a file cannot be run, which may change with the program.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.errors import GGUFError, LocalLLMError
from localllm.kernels.code_cache import cache_root, write_aside
from localllm.nesting import parse_json
from localllm.version import __version__

if TYPE_CHECKING:
    from localllm.gguf import GGUFFile

#: To be raised when `Details` mean something else than before.
_VERSION = f"{__version__}-2"
#: Files that are remembered at most.
_MAX_KEPT = 2000


@dataclass(frozen=True)
class Details:
    """The details in a file's header."""

    error: str | None = None  # why it cannot be run; of a file that cannot be read at all the rest is unknown
    title: str | None = None  # its name for itself
    architecture: str | None = None  # "llama", …
    file_type: str | None = None  # its quantisation, such as "Q4_K_M"
    n_parameters: int | None = None  # values in all tensors
    trained_context: int | None = None  # tokens of context that it was trained on
    context: int | None = None  # those that it gets where nobody says how many
    memory: int | None = None  # bytes that it takes in all with these, on the CPU and with an f16 cache
    least_memory: int | None = None  # the same with the least context that a default is reduced to

    def fits(self, available: int) -> str | None:
        """Whether ``available`` bytes are enough: "yes", "with less context" or "no"; None if it cannot be run."""
        if self.memory is None or self.least_memory is None:
            return None
        if self.memory <= available:
            return "yes"
        return "with less context" if self.least_memory <= available else "no"


class DetailsReader:
    """Reads files' details, and remembers them, on disk too once `save` is called.

    For one thread at a time.
    """

    def __init__(self) -> None:
        root = cache_root()
        self._store = None if root is None else root / "models.json"
        self._kept: dict[str, Any] = {} if self._store is None else _read_store(self._store)
        self._is_changed = False

    def read(self, path: Path) -> Details:
        """The details of a file; of a split model's first file those of all.  A broken one's tell the error."""
        stamp, key = _stamp(path), str(path)
        if stamp is not None and (kept := _remembered(self._kept.get(key), stamp)) is not None:
            return kept
        from localllm.gguf import GGUFFile  # imported here, as all that reads files: most are remembered

        try:
            with GGUFFile.open(path) as file:
                details = _details(file)
        except GGUFError as error:
            return Details(error=str(error))
        if stamp is not None and details.error is None:
            self._kept.pop(key, None)  # so that it comes last
            self._kept[key] = {"stamp": stamp, **asdict(details)}
            self._is_changed = True
        return details

    def save(self) -> None:
        """Keeps what was read for the next program, if there is a place for it."""
        if self._store is None or not self._is_changed:
            return
        files = dict(list(self._kept.items())[-_MAX_KEPT:])
        write_aside(self._store, json.dumps({"version": _VERSION, "files": files}).encode())


def _stamp(path: Path) -> list[int] | None:
    """Size and time of a file, which change with it; None if it is not there."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]


def _read_store(path: Path) -> dict[str, Any]:
    try:
        stored = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict) or stored.get("version") != _VERSION or not isinstance(stored.get("files"), dict):
        return {}
    return dict(stored["files"])


def _remembered(entry: Any, stamp: list[int]) -> Details | None:
    """Details as they were stored; None if they are of another state of the file, or something else."""
    if not isinstance(entry, dict) or entry.get("stamp") != stamp:
        return None
    texts = {"error", "title", "architecture", "file_type"}
    values = {each.name: entry.get(each.name) for each in fields(Details)}
    for name, value in values.items():
        if value is not None and type(value) is not (str if name in texts else int):
            return None
    return Details(**values)


def _details(file: GGUFFile) -> Details:
    from localllm.loading.model_info import file_type_name

    tensors = file.tensors.values()
    known: dict[str, Any] = {
        "title": _text(file, "general.name"),
        "architecture": _text(file, "general.architecture"),
        "file_type": file_type_name(file.metadata, tensors),
        "n_parameters": sum(tensor.n_values for tensor in tensors),
    }
    try:
        return Details(**known, **_memory(file))
    except LocalLLMError as error:
        return Details(**known, error=str(error))


def _text(file: GGUFFile, key: str) -> str | None:
    try:
        value = file.metadata.get(key)
    except GGUFError:  # it is not valid UTF-8
        return None
    return value if isinstance(value, str) else None


def _memory(file: GGUFFile) -> dict[str, Any]:
    """The context that a model gets, and what it then takes."""
    from localllm.kernels.cpu.backend import CPUBackend
    from localllm.kernels.cpu.host import default_threads
    from localllm.loading.devices import Device
    from localllm.loading.load import check_runs
    from localllm.loading.placement import MIN_CONTEXT, SHORT_CONTEXT, Planner
    from localllm.models.registry import read_model

    check_runs(file)
    model = read_model(file)
    trained, threads = model.config.context_length, default_threads()
    cpu = CPUBackend(threads)  # which starts none of them before they are needed
    planner = Planner("the model", model, (Device("cpu", "", threads, threads, cpu, cpu.workers.close),))
    context = min(trained, SHORT_CONTEXT)
    memory, least = planner.at(context).total, planner.at(min(context, MIN_CONTEXT)).total
    return {"trained_context": trained, "context": context, "memory": memory, "least_memory": least}
