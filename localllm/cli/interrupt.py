"""Ctrl-C ends a command, and the loop of a shell that runs it."""

import os
import signal
from typing import NoReturn

#: What `main` of a command line returns after Ctrl-C, and what shells report of a program that SIGINT ended.
INTERRUPTED = 130


def end_at_once(*_: object) -> NoReturn:
    """Ends the process by SIGINT, so that a script or a loop of the shell that runs it ends too."""
    if os.name == "posix":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(INTERRUPTED)  # where signals are others, or this one is blocked
