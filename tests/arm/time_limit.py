"""``pytest -p tests.arm.time_limit`` skips tests that have not started by the time in `TIME_VARIABLE`.

It prints the number of skipped tests, and exits with status 77 if all other tests passed.
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
        terminalreporter.write_line(f"time is up: {_left_out} tests skipped")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _left_out and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = SKIPPED
