"""Tests ignore the user's settings, have no time limits, and run tests marked ``ci`` only if CI is set."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

if system := os.environ.get("TEST_AS"):
    from tests.helpers.other_system import simulate

    simulate(system)

import sys

from localllm.options.settings import CONFIG_VARIABLE
from tests.helpers.windows import keep_files_in_use, windows as windows

# Make NumPy, which is imported later, compute in the calling thread: with threads, it hangs if another thread forks
# the process during a computation, as some tests do.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ[CONFIG_VARIABLE] = str(Path(__file__).with_name("no-settings.toml"))

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the number of processors: many tests wait for a process, a socket or a screen."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    try:
        return (yield)
    except OSError as error:
        if getattr(error, "winerror", None) == 1314:  # ERROR_PRIVILEGE_NOT_HELD
            pytest.skip("this user cannot create symbolic links")
        raise


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ci") and not os.environ.get("CI"):
        pytest.skip("runs in CI: set the environment variable CI")
    for name, has_it in {"posix": sys.platform != "win32", "linux": sys.platform == "linux"}.items():
        if not has_it and (mark := item.get_closest_marker(name)):
            pytest.skip(mark.args[0])


@pytest.fixture(autouse=True)
def no_models_in_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make listings independent of the packages installed next to localllm."""
    monkeypatch.setattr("localllm.catalog.other_programs.import_path", list)


@pytest.fixture(autouse=system == "win32")
def files_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate Windows' file locks if the tests run as on Windows."""
    keep_files_in_use(monkeypatch)


@pytest.fixture(autouse=True)
def no_measurements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no rates of this machine, which takes a second, except in tests with the fixture `measures`."""
    if "measures" not in request.fixturenames:
        monkeypatch.setattr("localllm.kernels.cpu.rates.CPURates.measure", lambda *_: None)


@pytest.fixture
def measures() -> None:
    """Let `CPURates` measure; see `no_measurements`."""
