"""Limits of processors' time and of memory that Linux's control groups (containers, services) set for this process.

A process is in one group of each hierarchy, ``/proc/self/cgroup`` says in which.  That group's limit holds, and so do
those of all groups that it lies in: the smallest counts.  Inside a container its own group may be all there is to
see, under another path: then the path is not found, and what is at the top counts.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def text_of(path: Path) -> str:
    """A small file in which the system tells of itself; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_quota() -> float | None:
    """How many processors' time this process is granted; None if nothing says."""
    quotas = []
    for folder in _folders("cpu"):
        version_2 = text_of(folder / "cpu.max").split()
        version_1 = [text_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        for numbers in (version_2, version_1):
            # "max" or -1 is no limit.
            if len(numbers) == 2 and all(number.isdigit() for number in numbers) and int(numbers[1]):
                quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def memory_left() -> int | None:
    """Bytes of memory left under the limits; None if there are none."""
    files = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    left = [_bytes_left(folder, *names) for folder in _folders("memory") for names in files]
    return min((n for n in left if n is not None), default=None)


def _bytes_left(folder: Path, limit: str, use: str, prefix: str) -> int | None:
    """Bytes left in one group, with the file pages that the system can take back."""
    numbers = [text_of(folder / name).strip() for name in (limit, use)]
    if not all(number.isdigit() for number in numbers):
        return None
    pairs = [line.split() for line in text_of(folder / "memory.stat").splitlines()]
    statistics = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    most, used = map(int, numbers)
    return max(0, most - used + int(statistics.get(f"{prefix}inactive_file", 0)))


def _folders(controller: str) -> Iterator[Path]:
    """The folders of the groups that this process is in and of those around them, for one controller."""
    for line in text_of(_MEMBERSHIP).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2, alone or beside version 1
            tops = [_ROOT, _ROOT / "unified"]
        elif controller in controllers.split(","):
            tops = [_ROOT / controller]
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts:  # a group beside that of this container
            inner = PurePosixPath()
        for top in tops:
            yield from (top / level for level in (inner, *inner.parents))
