"""Ctrl-C ends a command, and the loop of a shell that runs it."""

import os
import signal
from typing import NoReturn

#: Result of `main` after Ctrl-C, and the exit code that shells report for a program ended by SIGINT.
INTERRUPTED = 130


def end_at_once(*_: object) -> NoReturn:
    """Ends the process by SIGINT, so that the shell also ends its script or loop."""
    if os.name == "posix":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(INTERRUPTED)  # on systems with other signals, or if SIGINT is blocked
