"""Limits on processor time and memory that Linux control groups (containers, services) set for this process.

A process is in one group of each hierarchy, listed in ``/proc/self/cgroup``.  The limits of this group and of all its
parent groups apply: the smallest one counts.  A container may see only its own group, under a different path.  If the
path does not exist, the top of the hierarchy is used.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def text_of(path: Path) -> str:
    """Return the text of a small system file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_quota() -> float | None:
    """Return the number of processors whose time this process may use; None without a quota."""
    quotas = []
    for folder in _folders("cpu"):
        version_2 = text_of(folder / "cpu.max").split()
        version_1 = [text_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        for numbers in (version_2, version_1):
            # "max" or -1 means no limit.
            if len(numbers) == 2 and all(number.isdigit() for number in numbers) and int(numbers[1]):
                quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def memory_left() -> int | None:
    """Return the bytes of memory left under the limits; None without limits."""
    files = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    bytes_left = [_bytes_left(folder, *names) for folder in _folders("memory") for names in files]
    return min((n for n in bytes_left if n is not None), default=None)


def _bytes_left(folder: Path, limit: str, use: str, prefix: str) -> int | None:
    """Return the bytes left in one group, counting file pages that the system can reclaim."""
    numbers = [text_of(folder / name).strip() for name in (limit, use)]
    if not all(number.isdigit() for number in numbers):
        return None
    pairs = [line.split() for line in text_of(folder / "memory.stat").splitlines()]
    statistics = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    most, used = map(int, numbers)
    return max(0, most - used + int(statistics.get(f"{prefix}inactive_file", 0)))


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups and their parents, for one controller."""
    for line in text_of(_MEMBERSHIP).splitlines():
        _, _, groups = line.partition(":")
        controllers, _, path = groups.partition(":")
        if not controllers:  # version 2, alone or in addition to version 1
            tops = [_ROOT, _ROOT / "unified"]
        elif controller in controllers.split(","):
            tops = [_ROOT / controller]
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts:  # the group is outside this container's
            inner = PurePosixPath()
        for top in tops:
            yield from (top / level for level in (inner, *inner.parents))
