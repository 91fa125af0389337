"""Run work in a forked child process and report its exceptions."""

from __future__ import annotations

import os
import select
import signal
import traceback
import warnings
from collections.abc import Callable

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_forked_child(work: Callable[[], object], timeout: float = 60) -> None:
    """Run the work in a child process; fails the test if it raises or takes more than ``timeout`` seconds."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the tests fork with running threads
        child = os.fork()
    if child == 0:
        try:
            work()
            message = "done"
        except BaseException:
            message = traceback.format_exc()
        os.write(writer, message.encode()[-4000:])
        os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], timeout)
        said = os.read(reader, 5000).decode() if ready else "it hangs"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
    assert said == "done", said
