"""Where the command ``localllm`` begins: it is ready for Ctrl-C before it imports the rest, which takes a while."""

import os
import signal

#: The exit code of a command that Ctrl-C stopped.
INTERRUPTED = 130


def main() -> int:
    """Runs the process's own command line; returns the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody else's
        signal.signal(signal.SIGINT, end_at_once)
    from localllm.cli.main import main as run

    return run()


def end_at_once(number: int, frame: object) -> None:
    """Ends the process where there is nothing to be put in order, or no time for it."""
    os._exit(INTERRUPTED)
