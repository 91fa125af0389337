"""``localllm pull``: a model from the hub into its cache on this machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from localllm.cli.main import DONE
from localllm.cli.terminal import StatusLine, quantity, say, visible_line
from localllm.library.pull import PullProgress, pull


def run(arguments: argparse.Namespace) -> int:
    """Downloads the model that the command line names, and prints its path."""
    path = download(arguments.model, quiet=arguments.quiet)
    print(visible_line(str(path)))
    if not arguments.quiet:
        say(f"localllm generate -m {visible_line(arguments.model)} runs it")
    return DONE


def download(name: str, *, quiet: bool, pull: Callable[[str, PullProgress], Path] = pull) -> Path:
    """Downloads a model, or with `pull_checkpoint` what one is made of, and shows how far it is.

    Raises:
        UsageError, HubError: see `localllm.library.pull.pull`.
    """
    progress = _Progress(enabled=not quiet)
    try:
        return pull(name, progress)
    except KeyboardInterrupt:
        progress.close()
        if progress.fetched:
            say(f"localllm: stopped; {progress.fetched} are kept, and the same command goes on from there")
        raise
    finally:
        progress.close()


class _Progress:
    """What was fetched, shown on a terminal."""

    def __init__(self, *, enabled: bool) -> None:
        self._status = StatusLine(enabled=enabled)
        self._began: tuple[float, int] | None = None
        self.fetched = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        share = f"{quantity(done, 'B')} of {quantity(total, 'B')}"
        if stage == "check":
            self._status.show(f"checking {share}")
            return
        now = time.monotonic()
        self._began = self._began or (now, done)
        seconds, n_bytes = now - self._began[0], done - self._began[1]
        rate = f", {quantity(n_bytes / seconds, 'B/s')}" if seconds > 1 else ""
        self._status.show(f"downloading {share}{rate}")
        self.fetched = share

    def close(self) -> None:
        self._status.clear()
