"""Where the command ``localllm`` begins: it is ready for Ctrl-C before it imports the rest, which takes a while."""

import gc
import signal

from localllm.cli.interrupt import INTERRUPTED, end_at_once


def main() -> int:
    """Runs the process's own command line; returns the exit code, or ends by SIGINT where Ctrl-C stopped it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody else's
        signal.signal(signal.SIGINT, end_at_once)
    # Modules and vocabularies are hundreds of thousands of objects that stay: Python would look through all of them
    # for circles again and again, a tenth of the time to the first token.
    gc.set_threshold(100_000)
    from localllm.cli.main import main as run

    code = run()
    if code == INTERRUPTED:
        end_at_once()
    return code
