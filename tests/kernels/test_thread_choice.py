"""The number of decoding threads: found on made-up curves, stored, and measured again if it may be wrong."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.kernels.cpu import thread_choice
from localllm.kernels.cpu.target import Target, choose
from localllm.kernels.cpu.thread_choice import DISTURBED_SECONDS, KEPT_SECONDS, ThreadChoice, choose_threads, knee
from tests.helpers.recorder import CPUOps

HOUR = 3600.0


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 24, 96])
@pytest.mark.parametrize("bend", [1, 2, 5, 13, 40, 200])
def test_the_knee_is_where_the_curve_bends(cores: int, bend: int) -> None:
    asked: list[int] = []

    def bandwidth(n: int) -> float:
        asked.append(n)
        return 1e10 * min(n, bend)

    threads, curve = knee(bandwidth, cores)
    assert threads == next(n for n in range(1, cores + 1) if min(n, bend) >= 0.95 * min(cores, bend))
    assert curve == {n: 1e10 * min(n, bend) for n in asked}
    assert len(asked) == len(set(asked)) <= 2 * cores.bit_length() + 1


def test_threads_that_slow_decoding_down_are_not_used() -> None:
    assert knee(lambda n: {1: 10.0, 2: 18.0, 3: 20.0, 4: 19.5, 8: 12.0}[n], 8)[0] == 3


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A machine of eight cores whose curve bends at three threads, and a clock."""
    state: dict[str, Any] = {"now": 1e9, "busy": 0.0, "measured": 0, "cpu": "a processor"}

    def measure(cores: int, *_: object) -> ThreadChoice:
        state["measured"] += 1
        decode, curve = knee(lambda n: 1e10 * min(n, 3), cores)
        return ThreadChoice(decode, cores, tuple(sorted(curve.items())), state["now"], state["busy"])

    monkeypatch.setattr(thread_choice, "default_threads", lambda *_: 8)
    monkeypatch.setattr(thread_choice, "cpu_model", lambda: state["cpu"])
    monkeypatch.setattr(thread_choice, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(thread_choice, "_measure", measure)
    monkeypatch.setattr(thread_choice, "_choices", {})
    monkeypatch.setattr(thread_choice.time, "time", lambda: state["now"])
    return state


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the measurement, as in a new process."""
    monkeypatch.setattr(thread_choice, "_choices", {})


def test_a_machine_is_measured_once(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = choose_threads(choose())
    assert (first.decode, first.cores) == (3, 8)
    for _ in range(2):
        forget(monkeypatch)
        assert choose_threads(choose()) == first
    assert machine["measured"] == 1
    machine["cpu"] = "another processor"
    choose_threads(choose())
    assert machine["measured"] == 2


@pytest.mark.parametrize(
    ("busy", "seconds", "again"),
    [
        (0.0, KEPT_SECONDS - HOUR, False),
        (0.0, KEPT_SECONDS + HOUR, True),
        (0.0, -HOUR, True),  # the clock was wrong then, or is wrong now
        (2.0, DISTURBED_SECONDS / 2, False),
        (2.0, DISTURBED_SECONDS + HOUR, True),
    ],
)
@pytest.mark.parametrize("new_process", [False, True])
def test_old_and_disturbed_measurements_are_made_again(
    machine: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    busy: float,
    seconds: float,
    again: bool,
    new_process: bool,
) -> None:
    machine["busy"] = busy
    choose_threads(choose())
    machine["now"] += seconds
    if new_process:
        forget(monkeypatch)
    choose_threads(choose())
    assert machine["measured"] == 1 + again


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"no json",
        b"[]",
        b"[" * 100_000,
        b"{}",
        {"decode": 0},
        {"decode": 9},
        {"decode": "x"},
        {"curve": [1]},
        {"measured": []},
    ],
)
def test_a_damaged_file_is_replaced_by_a_measurement(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: bytes | dict[str, Any]
) -> None:
    first = choose_threads(choose())
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage if isinstance(damage, bytes) else json.dumps(json.loads(whole) | damage).encode())
    forget(monkeypatch)
    assert choose_threads(choose()) == first
    assert machine["measured"] == 2
    assert file.read_bytes() == whole


@pytest.mark.parametrize("place", ["nowhere", "a file"])
def test_a_cache_that_cannot_be_written(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    if place == "nowhere":
        monkeypatch.setattr(thread_choice, "cache_root", lambda: None)
    assert choose_threads(choose()).decode == choose_threads(choose()).decode == 3
    assert machine["measured"] == 1


def test_one_core_leaves_nothing_to_choose(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_choice, "default_threads", lambda *_: 1)
    assert choose_threads(choose()) == ThreadChoice(1, 1)
    assert machine["measured"] == 0


@pytest.mark.parametrize("others", [0.0, 1.5])
def test_a_real_measurement(monkeypatch: pytest.MonkeyPatch, others: float) -> None:
    """Any result is valid; under other load, all fast cores are used."""
    monkeypatch.setattr(thread_choice, "N_BYTES", 1 << 20)
    monkeypatch.setattr(thread_choice.OtherLoad, "cpus", lambda _: others)
    choice = thread_choice._measure(4, choose(), 3)
    assert [n for n, _ in choice.curve][-1] == 3
    assert all(rate > 0 for _, rate in choice.curve)
    assert choice.is_disturbed == (others > 0)
    assert choice.decode == 3 if others else 1 <= choice.decode <= 3


@pytest.mark.parametrize(("available", "taken"), [(1 << 40, thread_choice.N_BYTES), (640 << 20, 64 << 20)])
def test_a_measurement_takes_little_memory(monkeypatch: pytest.MonkeyPatch, available: int, taken: int) -> None:
    """At most a tenth of the free memory, for caches of any size."""
    asked: list[int] = []

    class Test:
        def __init__(self, workers: object, target: Target, n_bytes: int) -> None:
            asked.append(n_bytes)

        def bandwidth(self, threads: int = 1) -> float:
            return 1e10

    monkeypatch.setattr(thread_choice, "available_memory", lambda: available)
    monkeypatch.setattr(thread_choice, "last_level_cache", lambda: 480 << 20)
    monkeypatch.setattr("localllm.kernels.cpu.roofline.DecodeTest", Test)
    thread_choice._measure(2, choose(), 2)
    assert asked == [taken]
    assert taken < 100 << 20


def test_progress_may_wait_for_a_thread_that_chooses_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program can load a second model in another thread while kernels of the first model compile."""
    measured: list[ThreadChoice] = []
    real = thread_choice._measure

    def measure(cores: int, target: Target, fast_cores: int) -> ThreadChoice:
        measured.append(real(cores, target, fast_cores))
        return measured[-1]

    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(thread_choice, "default_threads", lambda *_: 2)
    monkeypatch.setattr(thread_choice, "N_BYTES", 1 << 20)
    monkeypatch.setattr(thread_choice, "_measure", measure)
    monkeypatch.setattr(thread_choice, "_choices", {})
    target = replace(choose(), name=f"{choose().name}-{tmp_path.name}")  # a new name without compiled code
    others: list[ThreadChoice] = []

    def progress(done: int, total: int) -> None:
        other = threading.Thread(target=lambda: others.append(choose_threads(target)), daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive(), "the thread waits for the caller of this function"

    choice = choose_threads(target, progress)
    assert others, "nothing was compiled"
    assert measured == [choice]
    assert set(others) == {choice}


def test_requested_threads_are_used_for_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.kernels.cpu.backend.choose_threads", lambda *_: ThreadChoice(2, 5))
    chosen, given = CPUOps(), CPUOps(threads=4)
    assert (chosen.workers.n, chosen.decode_threads) == (5, 2)
    assert (given.workers.n, given.decode_threads) == (4, 4)
