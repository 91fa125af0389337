"""Speed of experts that stay in the file: the fraction in memory, and the speed of reading the others."""

from __future__ import annotations

import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm.console import quantity
from localllm.kernels.backend import ExpertReads
from localllm.kernels.cpu.expert_pool import READERS

#: Bytes per read, similar to an expert's matrix, and bytes of all reads of a measurement.
_PIECE, _IN_ALL = 2 << 20, 256 << 20


@dataclass(frozen=True)
class ExpertSpeed:
    hits: float  # fraction of the experts' bytes that were in memory when they were needed
    read_bytes: int
    rate: float  # bytes per second from the file during reads
    busy: float  # fraction of the time with reads
    disk: float  # bytes per second of the disk

    @classmethod
    def of(cls, before: ExpertReads, after: ExpertReads, seconds: float, disk: float) -> ExpertSpeed:
        needed, read, read_s = after.needed - before.needed, after.read - before.read, after.read_s - before.read_s
        hits = max(0.0, 1 - read / max(1, needed))
        return cls(hits, read, read / read_s if read_s else 0.0, min(1.0, read_s / seconds), disk)

    def __str__(self) -> str:
        return (
            f"{self.hits:.0%} of experts were in memory; {quantity(self.read_bytes, 'B')} were read at "
            f"{quantity(self.rate, 'B/s')}, {self.busy:.0%} of the time; the disk gives {quantity(self.disk, 'B/s')}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def disk_rate(path: Path) -> float:
    """Return the bytes per second of reading scattered pieces of a file with as many threads as for experts.

    Bypasses the system's page cache on systems with ``posix_fadvise``.
    """
    pieces = range(0, max(1, path.stat().st_size - _PIECE), _PIECE)
    sample = random.Random(time.monotonic_ns()).sample(pieces, min(len(pieces), _IN_ALL // _PIECE))
    with path.open("rb", buffering=0) as file:
        if sys.platform == "linux":
            for offset in sample:
                os.posix_fadvise(file.fileno(), offset, _PIECE, os.POSIX_FADV_DONTNEED)

    def read(first: int) -> int:
        with path.open("rb", buffering=0) as file:
            n = 0
            for offset in sample[first::READERS]:
                file.seek(offset)
                n += len(file.read(_PIECE))
            return n

    with ThreadPoolExecutor(READERS) as threads:
        begin = time.perf_counter()
        return sum(threads.map(read, range(READERS))) / (time.perf_counter() - begin)
