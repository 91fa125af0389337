"""``pytest -p tests.arm.time_limit`` leaves out the tests that are not begun by the time that `TIME_VARIABLE` names.

It says how many, and ends with status 77 where those that ran have passed.
"""

from __future__ import annotations

import os
import time

import pytest

TIME_VARIABLE = "TESTS_END_AT"  # seconds since 1970
SKIPPED = 77

END = float(os.environ[TIME_VARIABLE])
_left_out = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    global _left_out
    if time.time() > END:
        _left_out += 1
        pytest.skip("time is up")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.write_line(f"time is up: {_left_out} tests left out")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _left_out and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = SKIPPED
