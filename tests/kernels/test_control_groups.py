"""Limits of control groups, read from files in the layout of Linux."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.kernels.cpu import control_groups


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without limits, on which the process is in the group /a/b of every hierarchy."""
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("5:memory:/a/b\n3:cpu,cpuacct:/a/b\n1:name=systemd:/else\n0::/a/b\n")
    return tmp_path


def write(machine: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = machine / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": ""}, None),
        ({"cpu.max": "100000 0"}, None),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000", "cpu.max": "400000 100000"}, 3.0),
        ({"a/b/cpu.max": "200000 100000", "a/cpu.max": "300000 100000"}, 2.0),
        ({"else/cpu.max": "100000 100000"}, None),  # a group without this process
        ({"unified/a/cpu.max": "100000 100000"}, 1.0),  # versions 1 and 2 together
        ({"cpu/a/b/cpu.cfs_quota_us": "50000", "cpu/a/b/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "70000", "cpu/cpu.cfs_period_us": "10000"}, 7.0),
    ],
)
def test_the_smallest_quota_of_all_levels_counts(
    machine: Path, files: dict[str, str], processors: float | None
) -> None:
    write(machine, files)
    assert control_groups.cpu_quota() == processors


def memory(group: str, limit: str, *, version: int = 2) -> dict[str, str]:
    """Files of a group that uses 700 bytes; the system can reclaim 150."""
    if version == 2:
        files = {"memory.max": limit, "memory.current": "700", "memory.stat": "anon 5\ninactive_file 150"}
    else:
        files = {
            "memory.limit_in_bytes": limit,
            "memory.usage_in_bytes": "700",
            "memory.stat": "inactive_file 1\ntotal_inactive_file 150",
        }
        group = f"memory/{group}"
    return {f"{group}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, None),
        (memory("a/b", "1000"), 450),
        (memory("a/b", "max"), None),
        (memory("a/b", "600"), 50),
        (memory("a/b", "500"), 0),
        (memory("a/b", "2000") | memory("a", "1500") | memory(".", "max"), 950),
        (memory("a/b", "1000", version=1), 450),
        (memory(".", "1000", version=1) | memory("a/b", "9223372036854771712", version=1), 450),
        ({"a/b/memory.max": "1000"}, None),  # the usage is unknown
        ({"a/b/memory.max": "1000", "a/b/memory.current": "10", "a/b/memory.stat": "what is this"}, 990),
    ],
)
def test_the_smallest_room_of_all_levels_counts(machine: Path, files: dict[str, str], room: int | None) -> None:
    write(machine, files)
    assert control_groups.memory_left() == room


@pytest.mark.parametrize("path", ["/docker/0123/not/seen/in/here", "/../beside", "/"])
def test_in_a_container_the_root_group_counts(machine: Path, path: str) -> None:
    (machine / "membership").write_text(f"0::{path}\n")
    write(machine, {"cpu.max": "250000 100000"} | memory(".", "1000"))
    write(machine, {"../beside/cpu.max": "1 100000"})  # a group outside the container
    assert control_groups.cpu_quota() == 2.5
    assert control_groups.memory_left() == 450


def test_systems_without_control_groups(machine: Path) -> None:
    (machine / "membership").unlink()
    assert control_groups.cpu_quota() is None
    assert control_groups.memory_left() is None
