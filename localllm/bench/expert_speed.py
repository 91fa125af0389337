"""Speed of experts that stay in the file: the fraction in memory, and the speed of reading the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from localllm.console import quantity
from localllm.kernels.backend import ExpertReads


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
