"""Properties of the machine, compared with other sources, and on machines simulated by files."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import psutil
import pytest

from localllm.cli.commands.doctor import FEATURES, UNUSED_FEATURES
from localllm.errors import NotEnoughMemoryError
from localllm.kernels.cpu import host
from localllm.kernels.cpu.memory import aligned_zeros
from localllm.kernels.cpu.target import TARGETS
from tests.helpers.windows import elsewhere

#: Words of the auxiliary vector, feature numbers of Windows and names on macOS, from their documentation.
CORTEX_A72 = {16: 0x8FF, 26: 0}
NEOVERSE_N1 = {16: 0x119FFF, 26: 0}
NEOVERSE_N2 = {16: 0x11DFFF | 1 << 22, 26: 1 << 1 | 1 << 13 | 1 << 14}


class Auxiliary:
    """The C function that looks up words."""

    def __init__(self, words: dict[int, int]) -> None:
        self.words = words

    def __call__(self, word: int) -> int:
        return self.words.get(word, 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (CORTEX_A72, {"neon"}),
        (NEOVERSE_N1, {"neon", "lse", "fullfp16", "dotprod"}),
        (NEOVERSE_N2, {"neon", "lse", "fullfp16", "dotprod", "sve", "sve2", "i8mm", "bf16"}),
        (None, {"neon"}),
    ],
)
def test_features_of_arm_processors_on_linux(
    words: dict[int, int] | None, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch, "linux")
    libc = SimpleNamespace() if words is None else SimpleNamespace(getauxval=Auxiliary(words))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    assert host._arm_features() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="needs an auxiliary vector")
def test_the_auxiliary_vector_is_read() -> None:
    """The page size is in the vector of every processor."""
    assert ctypes.CDLL(None).getauxval(6) == mmap.PAGESIZE  # AT_PAGESZ
    assert "neon" in host._arm_features()


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({34, 43}, {"neon", "lse", "dotprod"}),
        ({34, 43, 66, 67, 68}, {"neon", "lse", "dotprod", "i8mm", "fullfp16", "bf16"}),
    ],
)
def test_features_of_arm_processors_on_windows(
    numbers: set[int], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch, "win32")
    kernel32 = SimpleNamespace(IsProcessorFeaturePresent=lambda number: number in numbers)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    assert host._arm_features() == expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, {"neon", "dotprod"}),  # macOS 11
        ({"DotProd": 1, "FP16": 1, "LSE": 1, "I8MM": 0, "BF16": 0}, {"neon", "dotprod", "fullfp16", "lse"}),  # M1
        ({"FP16": 1, "LSE": 1, "I8MM": 1, "BF16": 1}, {"neon", "dotprod", "fullfp16", "lse", "i8mm", "bf16"}),  # M2
    ],
)
def test_features_of_arm_processors_on_macos(
    known: dict[str, int], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sysctlbyname(name: bytes, value: Any, size: Any, *_: object) -> int:
        feature = name.decode().removeprefix("hw.optional.arm.FEAT_")
        if feature not in known:
            return -1
        assert size._obj.value == 4
        value._obj.value = known[feature]
        return 0

    elsewhere(monkeypatch, "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(sysctlbyname=sysctlbyname))
    assert host._arm_features() == expected


def test_this_processor() -> None:
    assert host.cpu_model().strip()
    assert host.family() == {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    told = {name for name, present in llvm.get_host_cpu_features().items() if present}
    needed = {name for target in TARGETS for name in target.needs} | {*FEATURES, *UNUSED_FEATURES}
    if host.family() == "x86_64":
        assert needed & host.features() == needed & told
    assert host.family() == llvm.get_process_triple().split("-")[0].replace("arm64", "aarch64")
    n_cores = len(host.core_speeds())
    assert 1 <= n_cores <= host.usable_cpus() <= (os.cpu_count() or 1)
    assert n_cores <= (psutil.cpu_count(logical=False) or host.usable_cpus())


# -- Machines simulated by files -----------------------------------------------------------------------------------


def make_machine(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    siblings: dict[int, str],
    allowed: set[int],
    quota: float | None = None,
) -> None:
    """A machine whose processors share cores, and on which the process may use some processors."""
    for cpu, names in siblings.items():
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(names + "\n")
    elsewhere(monkeypatch, "linux")
    monkeypatch.setattr(host, "_CPUS", folder)
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed, raising=False)


FOUR_CORES = {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"}


@pytest.mark.parametrize(
    ("allowed", "quota", "threads"),
    [
        (set(range(8)), None, 4),  # two processors per core
        ({0, 4}, None, 1),  # two processors of one core
        ({0, 1, 5}, None, 2),
        (set(range(8)), 1.5, 2),  # a quota is rounded up
        (set(range(8)), 2.0, 2),
        (set(range(8)), 0.1, 1),
        ({3}, 8.0, 1),
    ],
)
def test_default_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: set[int], quota: float | None, threads: int
) -> None:
    make_machine(monkeypatch, tmp_path, FOUR_CORES, allowed, quota)
    assert host.default_threads() == threads


def test_the_largest_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_CPUS", tmp_path)
    assert host.last_level_cache() == 0
    for i, size in enumerate(("32K", "1024K", "33792K", "", "12 apples")):
        folder = tmp_path / "cpu0" / "cache" / f"index{i}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert host.last_level_cache() == 33792 << 10


def make_speeds(folder: Path, file: str, speeds: list[int], atoms: str = "") -> Path:
    """A folder of processors as in /sys, with a file for each processor's speed."""
    cpus = folder / "system" / "cpu"
    for n, speed in enumerate(speeds):
        for name, text in ((file, str(speed)), ("topology/thread_siblings_list", str(n))):
            path = cpus / f"cpu{n}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    if atoms:
        (folder / "cpu_atom").mkdir()
        (folder / "cpu_atom" / "cpus").write_text(atoms + "\n")
    return cpus


UNEQUAL = {
    "Snapdragon 8 Gen 3": ("cpu_capacity", [1024, 912, 912, 860, 860, 860, 336, 336], "", (8, 6, True)),
    "big and LITTLE": ("cpu_capacity", [1024, 1024, 1024, 1024, 220, 220, 220, 220], "", (4, 4, True)),
    "Core i5": ("cpufreq/cpuinfo_max_freq", [4_600_000] * 2 + [3_400_000] * 4, "2-5", (6, 2, True)),
    "favoured cores": ("cpufreq/cpuinfo_max_freq", [5_200_000] * 2 + [4_900_000] * 6, "", (8, 8, False)),
    "not told": ("other", [0, 0], "", (2, 2, False)),
}


@pytest.mark.parametrize(("file", "speeds", "atoms", "expected"), UNEQUAL.values(), ids=UNEQUAL)
def test_unequal_cores_on_linux(
    file: str,
    speeds: list[int],
    atoms: str,
    expected: tuple[int, int, bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    elsewhere(monkeypatch, "linux")
    make_machine(monkeypatch, tmp_path, {}, set(range(len(speeds))))
    monkeypatch.setattr(host, "_CPUS", make_speeds(tmp_path, file, speeds, atoms))
    assert (host.default_threads(), host.default_threads(host.DECODES), host.has_unequal_cores()) == expected


def test_unequal_cores_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch, "darwin")
    monkeypatch.setattr(host, "cpu_quota", lambda: None)
    known = {"hw.nperflevels": 2, "hw.perflevel0.physicalcpu": 4, "hw.perflevel1.physicalcpu": 6}
    monkeypatch.setattr(host, "_sysctl_int", lambda name: known.get(name, 0))
    assert (host.default_threads(), host.default_threads(host.DECODES), host.has_unequal_cores()) == (10, 4, True)


def test_unequal_cores_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two P cores with two processors each, and four E cores."""
    cores = [(0, 1), (0, 1), (1, 1), (1, 1), (2, 0), (3, 0), (4, 0), (5, 0)]
    data = b"".join(struct.pack("<IIIHBBBBB13x", 32, 0, i, 0, i, core, 0, 0, e) for i, (core, e) in enumerate(cores))

    def information(into: Any, length: Any, size: Any, process: Any, flags: int) -> int:
        size._obj.value = len(data)
        if into is None:
            return 0
        assert len(into) == length.value == len(data)
        into[:] = data
        return 1

    elsewhere(monkeypatch, "win32")
    monkeypatch.setattr(host, "cpu_quota", lambda: None)
    kernel32 = SimpleNamespace(GetSystemCpuSetInformation=information)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    assert (host.default_threads(), host.default_threads(host.DECODES), host.has_unequal_cores()) == (6, 2, True)


def test_default_threads_without_information_on_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_machine(monkeypatch, tmp_path, {}, set(range(8)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 3)
    assert host.default_threads() == 3
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    assert host.default_threads() == 8


def test_available_memory_is_not_more_than_the_system_has() -> None:
    assert 0 < host.available_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(("room", "expected"), [(None, 5 << 20), (1 << 20, 1 << 20), (9 << 20, 5 << 20)])
def test_available_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: int | None, expected: int) -> None:
    """The memory of the system, or the remaining memory of a control group if that is less."""
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemFree: 100 kB\nMemAvailable:    5120 kB\n")
    monkeypatch.setattr(host, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(host, "memory_left", lambda: room)
    assert host.available_memory() == expected


def test_available_memory_of_systems_other_than_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(host, "memory_left", lambda: None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12345))
    assert host.available_memory() == 12345


def test_available_memory_counts_the_limit_of_the_address_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "statm").write_text(f"{(3 << 20) // mmap.PAGESIZE} 20 10 1 0 5 0\n")
    monkeypatch.setattr(host, "_OWN_MEMORY", tmp_path / "statm")
    monkeypatch.setattr(host, "address_space_limit", lambda: 8 << 20)
    assert host.available_memory() == 5 << 20
    assert host.memory_advice() == "raise the limit of the address space, which is 0.01 GB (ulimit -v)"
    monkeypatch.setattr(host, "address_space_limit", lambda: 2 << 20)
    assert host.available_memory() == 0


@pytest.mark.parametrize(
    ("granted", "advice"), [(None, "close other programs"), (0, "raise the memory limit of the container")]
)
def test_advice_if_memory_is_short(monkeypatch: pytest.MonkeyPatch, granted: int | None, advice: str) -> None:
    monkeypatch.setattr(host, "_system_memory", lambda: 5_000_000)
    monkeypatch.setattr(host, "memory_left", lambda: granted)
    monkeypatch.setattr(host, "address_space_limit", lambda: None)
    available = host.available_memory()
    host.check_memory(available, "this")
    with pytest.raises(
        NotEnoughMemoryError,
        match=f"^this takes 6 MB of memory, but {available // 1_000_000} MB is available: {advice}",
    ):
        host.check_memory(6_000_000, "this")


def test_output_of_failed_programs_is_ignored() -> None:
    assert host.program_output("no-such-program-anywhere") == ""
    assert host.program_output(sys.executable, "-I", "-S", "-c", "print('fine')") == "fine"
    assert host.program_output(sys.executable, "-I", "-S", "-c", "print('no'); raise SystemExit(3)") == ""


def test_more_threads_than_processors_are_allowed_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, most in ((1, 64), (2, 64), (16, 64), (64, 256)):
        monkeypatch.setattr(host, "usable_cpus", lambda cpus=cpus: cpus)
        assert host.most_threads() == most


def test_used_memory_is_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # garbage of earlier tests would be freed in between
    before = host.used_memory()
    data = aligned_zeros(256 << 20, np.uint8)  # not memory that the allocator keeps of earlier tests
    data[:] = 1
    assert 240 << 20 < host.used_memory() - before < 280 << 20
    del data
    statm = tmp_path / "statm"
    statm.write_text("900 300 100 1 0 5 0\n")
    monkeypatch.setattr(host, "_OWN_MEMORY", statm)
    assert host.used_memory() == 200 * mmap.PAGESIZE
    monkeypatch.setattr(host, "_OWN_MEMORY", tmp_path / "missing")
    assert host.used_memory() > 10 << 20
