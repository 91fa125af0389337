"""Warnings of the command line about the machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from localllm.cli.machine_warnings import disturbance, too_many_threads
from localllm.kernels.cpu import host
from localllm.kernels.cpu.host import OtherLoad, usable_cpus


def test_threads() -> None:
    assert too_many_threads(usable_cpus()) is None
    complaint = too_many_threads(usable_cpus() + 1)
    assert complaint is not None
    assert complaint.startswith(f"-t {usable_cpus() + 1} is more than the {usable_cpus()} processor")


@pytest.mark.parametrize(
    ("other_cpus", "scatter", "words"),
    [
        (0.2, 1.2, None),
        (1.26, 1.0, "other programs kept 1.3 processors busy: the results are unreliable"),
        (0.0, 2.0, "the machine's speed varied by a factor of 2.0: the results are unreliable"),
        (1.0, 2.0, "other programs kept 1.0 processors busy and the machine's speed varied by a factor of 2.0"),
    ],
)
def test_disturbances(other_cpus: float, scatter: float, words: str | None) -> None:
    found = disturbance(other_cpus, scatter)
    assert found is None if words is None else found is not None and found.startswith(words)


def test_the_load_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds in which the processors worked for fifteen seconds, and this program for five."""
    now = {"clock": 100.0, "own": 1.0, "busy": 50.0}

    class Times:
        def _asdict(self) -> dict[str, float]:
            return {"user": now["busy"] / 2, "steal": now["busy"] / 2, "idle": 1e6}

    clock: Any = SimpleNamespace(monotonic=lambda: now["clock"], process_time=lambda: now["own"])
    monkeypatch.setattr(host, "time", clock)
    monkeypatch.setattr(psutil, "cpu_times", Times)
    others = OtherLoad()
    now.update(clock=110.0, own=6.0, busy=65.0)
    assert others.cpus() == pytest.approx(1.0)
