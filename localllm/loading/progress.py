"""Progress callbacks of loading."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from localllm.options.types import LoadProgress

if TYPE_CHECKING:
    from localllm.loading.placement import Plan

#: Called once with the plan, before a model is loaded.
LoadPlan = Callable[["Plan"], object]

#: Seconds of compiling before a terminal shows the notice.
NOTICE_SECONDS = 2.0


@runtime_checkable
class ShowsFormats(Protocol):
    """A progress callback that shows for which formats kernels are compiled."""

    formats: str  # the formats of the model's weights, such as "Q4_K, Q6_K"; empty if they are not known yet


def formats_text(plan: Plan) -> str:
    """Return at most three formats of a model's weights, largest first."""
    formats = [weight.kernel_type for weight in plan.placement.formats]
    return ", ".join([*dict.fromkeys(formats)][:3])


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        print(text, file=sys.stderr, flush=True)


class CompileNotice:
    """Prints one line to standard error if compiling the kernels takes long.

    A library should be silent, but half a minute without output, once on each machine, looks like a hang.
    So the notice is only for terminals, and only without another progress callback.

    ``write``: prints the line, by default to standard error.
    """

    def __init__(self, write: Callable[[str], object] = _print) -> None:
        self._write = write
        self._start: float | None = None
        self._is_printed = False

    def __call__(self, stage: str, n_done: int, total: int) -> None:
        if stage != "kernels" or self._is_printed or n_done == total:
            return
        now = time.monotonic()
        if self._start is None:
            self._start = now
        if now - self._start >= NOTICE_SECONDS:
            self._is_printed = True
            self._write(f"localllm: compiling kernels for this processor, {total - n_done} left")


def default_progress() -> LoadProgress | None:
    """Return the default progress callback of `localllm.load`: a `CompileNotice` on a terminal, otherwise None."""
    stderr = sys.stderr
    # pythonw has no stderr, and a program may have closed it.
    is_terminal = stderr is not None and not stderr.closed and stderr.isatty()
    return CompileNotice() if is_terminal else None


def of_stage(progress: LoadProgress | None, stage: str) -> Callable[[int, int], None] | None:
    """Return ``progress`` for one stage of loading."""
    if progress is None:
        return None

    def report(n_done: int, total: int) -> None:
        progress(stage, n_done, total)

    return report
