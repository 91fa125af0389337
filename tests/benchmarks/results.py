"""Results of the comparison: records, goals, rows for the terminal, and the journal of a run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import localllm

Array = NDArray[np.float32]

Kind = Literal["prefill", "decode", "deep prefill", "deep decode", "batch", "small", "start"]

#: Largest ‖ours - theirs‖ / ‖theirs‖ of the logits, for float weights and for quantised weights.  With quantised
#: weights, both programs round activations to eight bits, in different ways.
FLOAT_TOLERANCE, QUANTISED_TOLERANCE = 2e-3, 2e-2
#: Two tokens are a near tie if their logits differ by less than this number of tolerated errors.
NEAR_TIE = 4.0

FLOAT_FORMATS = ("F32", "F16", "BF16")

#: Goals: the ratio to llama.cpp's speed by test and format ("" for other formats).
RATIOS: dict[Kind, dict[str, float]] = {
    "prefill": {"Q4_0": 2.0, "Q8_0": 2.0, "F16": 1.1, "": 1.4},
    "decode": {"Q6_K": 1.05, "F16": 1.0, "": 1.2},
    "deep prefill": {"": 2.0},
    "deep decode": {"": 2.5},
    "batch": {"": 4.0},
    "small": {"": 1.0},
    "start": {"": 1.0},
}
#: Goals: the share of the bandwidth, and of the integer peak for quantised weights.
DECODE_SHARE, PREFILL_SHARE = 0.9, 0.6


@dataclass(frozen=True)
class Line:
    """One row of the table.

    Attributes:
        format: format of the file, such as "Q4_K_M".
        test: name in the table, such as "pp512".
        ours, theirs: tokens per second; seconds for "start".
        against: llama.cpp's best setting, or a description of ``theirs``.
        share: used share of the bandwidth (decode), or of the peak of the format's own products (prefill).
        share_of_highest: used share of the highest peak (prefill).
        note: further remarks.
    """

    kind: Kind
    model: str
    format: str
    threads: int
    test: str
    ours: float
    theirs: float
    against: str
    share: float | None = None
    share_of_highest: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        """Speed of localllm relative to the other program."""
        return self.theirs / self.ours if self.kind == "start" else self.ours / self.theirs

    @property
    def wanted(self) -> float:
        """The goal for the ratio."""
        ratios = RATIOS[self.kind]
        return ratios.get(self.format, ratios[""])

    @property
    def wanted_share(self) -> float:
        """The goal for the share; 0 for no goal."""
        if self.kind == "prefill":
            return 0.0 if self.format in FLOAT_FORMATS else PREFILL_SHARE
        return DECODE_SHARE if self.kind == "decode" else 0.0

    @property
    def ratio_is_short(self) -> bool:
        return self.ratio < self.wanted

    @property
    def share_is_short(self) -> bool:
        return self.share is not None and self.share < self.wanted_share

    def shortfalls(self) -> Iterator[str]:
        place = f"{self.model}, {self.threads} threads, {self.test}"
        if self.ratio_is_short:
            yield f"{place}: {self.ratio:.2f} times as fast as {self.against}, not {self.wanted:g}"
        if self.share_is_short:
            ceiling = "peak" if self.kind == "prefill" else "bandwidth"
            yield f"{place}: {self.share:.0%} of the {ceiling}, not {self.wanted_share:.0%}"

    def cells(self) -> list[str]:
        share = "" if self.share is None else f"{self.share:.0%}"
        if self.share_of_highest is not None:
            share += f" / {self.share_of_highest:.0%}"
        return [
            self.model,
            str(self.threads),
            self.test,
            figure(self.ours),
            figure(self.theirs),
            f"{self.ratio:.2f}",
            f"{self.wanted:g}",
            share,
            ", ".join(filter(None, (self.against, self.note))),
        ]


@dataclass(frozen=True)
class Agreement:
    """Agreement of the outputs: logits after the prompt, and greedy ids.

    Attributes:
        relative_error: ‖ours - theirs‖ / ‖theirs‖ of the logits.
        tolerance: tolerated relative error.
        top_equal: whether the most likely token is the same.
        equal_ids: number of equal greedy tokens before the first difference.
        gap: at the first difference, the larger difference between the logits of the two tokens, in tolerated errors;
        0
            if there is no difference.
    """

    model: str
    threads: int
    test: str
    relative_error: float
    tolerance: float
    top_equal: bool
    equal_ids: int
    n_ids: int
    gap: float

    def line(self) -> str:
        part = f", a difference with a gap of {self.gap:.1f} tolerated errors" if self.gap else ""
        return (
            f"logits differ by {self.relative_error:.1e}, top token {'equal' if self.top_equal else 'DIFFERENT'}, "
            f"first {self.equal_ids} of {self.n_ids} greedy tokens equal{part}"
        )

    def faults(self) -> Iterator[str]:
        if not self.relative_error <= self.tolerance:  # also true for NaN
            yield f"logits differ by {self.relative_error:.1e}, more than {self.tolerance:.0e}"
        if not self.gap <= NEAR_TIE:
            yield f"greedy texts differ after {self.equal_ids} tokens, at a gap of {self.gap:.1f} tolerated errors"


@dataclass(frozen=True)
class Memory:
    """Bytes of the peak resident memory, the KV cache and the file."""

    model: str
    peak: int
    cache: int
    file: int

    @property
    def times_the_file(self) -> float:
        """Return the memory without the cache, relative to the file."""
        return (self.peak - self.cache) / self.file

    def line(self) -> str:
        limit = memory_limit(self.file, self.cache) / 2**20
        return (
            f"peak {self.peak / 2**20:,.0f} MiB = {self.times_the_file:.2f} x file + {self.cache / 2**20:,.0f} MiB "
            f"cache (at most {limit:,.0f} MiB)"
        )

    def faults(self) -> Iterator[str]:
        limit = memory_limit(self.file, self.cache)
        if self.peak > limit:
            yield f"memory peaks at {self.peak / 1e6:,.0f} MB, more than {limit / 1e6:,.0f} MB"


@dataclass(frozen=True)
class Trial:
    """A short measurement of one of llama.cpp's settings, in tokens per second."""

    model: str
    repack: bool
    flash: bool
    prefill: float
    decode: float

    def line(self) -> str:
        words = f"repacking {'on' if self.repack else 'off'}, flash attention {'on' if self.flash else 'off'}"
        return f"llama.cpp's trial with {words}: {self.prefill:.1f} and {self.decode:.1f} tok/s"


Record = Line | Agreement | Memory | Trial
_RECORDS: dict[str, type[Record]] = {kind.__name__: kind for kind in (Line, Agreement, Memory, Trial)}


def figure(value: float) -> str:
    """Format a rate or seconds for tables."""
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def memory_limit(file: int, cache: int) -> float:
    """Return the allowed bytes of a process: 1.1 times the file, plus the cache, plus 150 MB."""
    return 1.1 * file + cache + 150e6


def relative_error(ours: Array, theirs: Array) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def gap(ours: Array, theirs: Array, our_id: int, their_id: int, tolerance: float) -> float:
    """Return how far two tokens are from a tie; see `Agreement`."""
    tolerated = tolerance * float(np.linalg.norm(theirs)) / math.sqrt(len(theirs))  # of one logit
    return float(max(ours[our_id] - ours[their_id], theirs[their_id] - theirs[our_id])) / tolerated


def best_settings(trials: Sequence[Trial]) -> list[Trial]:
    """Return at most two settings: the fastest in prefill and in decoding, or the next one in prefill."""
    by_prefill = sorted(trials, key=lambda trial: -trial.prefill)
    fastest = [by_prefill[0], max(trials, key=lambda trial: trial.decode), *by_prefill[1:]]
    return [trial for i, trial in enumerate(fastest) if trial not in fastest[:i]][:2]


def program_version() -> str:
    """Return localllm's version, and a hash of the source that determines its speed."""
    package = Path(localllm.__file__).parent
    digest = hashlib.sha256()
    # In a checkout, these folders are links, which rglob on the package does not follow.
    for folder in (package, *(package / name for name in ("kernels", "models", "quant"))):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return f"{localllm.__version__} {digest.hexdigest()[:16]}"


def file_version(path: Path) -> str:
    """Return the path of a file, its size, and the time of its last change."""
    found = path.stat()
    return f"{path.resolve()} {found.st_size} {found.st_mtime_ns}"


class Journal:
    """Finished jobs and their records, one JSON value per line, so that an interrupted run can continue."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Start a new file, or with ``resume`` continue an existing one."""
        self._path = path
        self._done: dict[str, list[Record]] = {}
        if resume and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    job = json.loads(line)
                except ValueError:  # the run was interrupted while writing the line
                    continue
                self._done[job["job"]] = [_RECORDS[r.pop("record")](**r) for r in job["records"]]
        path.write_text("", encoding="utf-8")
        for name, records in self._done.items():
            self._write(name, records)

    def known(self, job: str) -> list[Record] | None:
        """Return the records of a finished job, or None."""
        return self._done.get(job)

    def finish(self, job: str, records: Sequence[Record]) -> None:
        self._done[job] = list(records)
        self._write(job, records)

    def _write(self, job: str, records: Iterable[Record]) -> None:
        found = [{"record": type(record).__name__, **asdict(record)} for record in records]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": job, "records": found}) + "\n")


TITLES = ("model", "threads", "test", "localllm", "llama.cpp", "ratio", "goal", "share", "best setting")
_COLUMNS = "{:20} {:>7} {:>14} {:>9} {:>9} {:>6} {:>6} {:>10}  {}"


def table_line(cells: Sequence[str]) -> str:
    return _COLUMNS.format(*cells)


def even_line(cells: Sequence[str]) -> str:
    """Return a line of a table whose columns are equally wide."""
    return "".join(f"{cell:>16}" for cell in cells)
