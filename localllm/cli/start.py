"""Entry point of the command ``localllm``.  Handles Ctrl-C before it imports the other modules, which is slow."""

import gc
import signal

from localllm.cli.interrupt import INTERRUPTED, end_at_once


def main() -> int:
    """Runs the process's command line and returns the exit code.  Ctrl-C ends the process by SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored or replaced
        signal.signal(signal.SIGINT, end_at_once)
    # Modules and vocabularies are hundreds of thousands of permanent objects.  Repeated garbage collections would
    # scan them all, which takes a tenth of the time to the first token.
    gc.set_threshold(100_000)
    from localllm.cli.main import main as run

    code = run()
    if code == INTERRUPTED:
        end_at_once()
    return code
