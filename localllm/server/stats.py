"""The live table of ``localllm serve --stats``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.engine.engine import Counts
from localllm.errors import ClosedError
from localllm.llm import LLM
from localllm.server.models import Models

if TYPE_CHECKING:
    from rich.table import Table


class Stats:
    """Activity of each loaded model since the last look."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, Counts]] = {}
        self._read_speeds: dict[str, float] = {}

    def measure(self, llm: LLM) -> None:
        """Measures how fast this machine reads memory, before a model that is on the CPU has anything to do."""
        if llm.info.device == "cpu":
            from localllm.kernels.cpu.roofline import Roofline
            from localllm.kernels.cpu.target import choose

            with Roofline(llm.info.decode_threads, choose(None), 1 << 28) as roofline:
                self._read_speeds[str(llm.info.path)] = roofline.read_bandwidth()

    @contextmanager
    def shown(self, models: Models) -> Iterator[None]:
        """Shows a table on standard error until the end."""
        from rich.console import Console
        from rich.live import Live

        has_ended = threading.Event()
        with Live(self.table(models), console=Console(stderr=True), auto_refresh=False) as live:

            def show() -> None:
                while not has_ended.wait(1.0):
                    live.update(self.table(models), refresh=True)

            thread = threading.Thread(target=show, name="localllm-stats", daemon=True)
            thread.start()
            try:
                yield
            finally:
                has_ended.set()
                thread.join()

    def table(self, models: Models) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("model", "running", "waiting", "cache", "prompt t/s", "reply t/s", "cached", "of reading speed"):
            table.add_column(name, justify="left" if name == "model" else "right")
        for row in self.rows(models):
            table.add_row(*row)
        return table

    def rows(self, models: Models) -> Iterator[tuple[str, ...]]:
        """A row for each model that is loaded, or being loaded."""
        for served in list(models.served.values()):
            llm = served.llm
            if served.load_progress is not None:
                yield served.name, f"loading {served.load_progress:.0%}"
            if llm is None:
                continue
            try:
                now, counts, n_waiting = time.monotonic(), replace(llm.counts), llm.n_waiting
            except ClosedError:  # just now
                continue
            then, before = self._before.get(served.name, (now - 1.0, Counts()))
            self._before[served.name] = now, counts
            new, seconds = counts.since(before), max(1e-3, now - then)
            read_speed, share = self._read_speeds.get(str(llm.info.path)), "-"
            if new.step_s > 0 and read_speed is not None:
                share = f"{llm.info.placement.multiplied * new.steps / new.step_s / read_speed:.0%}"
            yield (
                served.name,
                str(counts.running),
                str(n_waiting),
                f"{counts.n_pages_used / max(1, counts.n_pages):.0%}",
                f"{new.prompt_tokens / seconds:,.0f}",
                f"{new.generated_tokens / seconds:,.1f}",
                f"{new.cached_tokens / max(1, new.prompt_tokens + new.cached_tokens):.0%}",
                share,
            )
