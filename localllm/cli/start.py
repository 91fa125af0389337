"""Where the command ``localllm`` begins: it is ready for Ctrl-C before it imports the rest, which takes a while."""

import os
import signal
from typing import NoReturn

#: What `main` of a command line returns after Ctrl-C, and what shells report of a program that SIGINT ended.
INTERRUPTED = 130


def main() -> int:
    """Runs the process's own command line; returns the exit code, or ends by SIGINT where Ctrl-C stopped it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody else's
        signal.signal(signal.SIGINT, end_at_once)
    from localllm.cli.main import main as run

    code = run()
    if code == INTERRUPTED:
        end_at_once()
    return code


def end_at_once(*_: object) -> NoReturn:
    """Ends the process by SIGINT, so that a script or a loop of the shell that runs it ends too."""
    if os.name == "posix":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(INTERRUPTED)  # where signals are others, or this one is blocked
