"""Text for people: escaping of control characters, messages on stderr, progress."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from localllm.loading.model_info import ModelInfo
    from localllm.loading.placement import Placement

#: Seconds between two updates of a status line, and before the first update, because quick work needs no progress.
_UPDATE_SECONDS = 0.1
_PATIENCE_SECONDS = 0.4

_CONTROLS = {i: f"\\x{i:02x}" for i in (*range(0x20), *range(0x7F, 0xA0)) if i not in b"\t\n"}
# Line separators, and marks that change the direction of text.
_IN_A_LINE = _CONTROLS | {
    **{i: f"\\u{i:04x}" for i in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))},
    ord("\t"): "\\t",
    ord("\n"): "\\n",
    ord("\r"): "\\r",
}


def visible(text: str) -> str:
    """Return ``text`` with escaped control characters (ESC as ``\\x1b``), so that a terminal does not execute them.

    Tabs and line feeds are not escaped.
    """
    return text.translate(_CONTROLS)


def visible_line(text: str) -> str:
    """Like `visible`, but also escape tabs, line feeds and marks of direction, so that the text stays on one line."""
    return text.translate(_IN_A_LINE)


def prepare_streams() -> None:
    """Sets stdout and stderr to UTF-8 with unchanged line ends, independent of the locale.

    Also switches them to blocking mode, because text for a slow reader would be lost otherwise.
    """
    for stream in (sys.stdout, sys.stderr):
        # They may be replaced by other objects, or be None (pythonw.exe).
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="")
            with contextlib.suppress(OSError, ValueError):  # no file
                if sys.platform != "win32" or sys.version_info >= (3, 12):
                    os.set_blocking(stream.fileno(), True)


#: Receives messages, and whether they are warnings, instead of stderr; set by `messages_to`.
_receive: Callable[[str, bool], object] | None = None


@contextlib.contextmanager
def messages_to(receive: Callable[[str, bool], object]) -> Iterator[None]:
    """Pass the messages of all threads to ``receive``, with whether they are warnings, instead of printing them."""
    global _receive
    before, _receive = _receive, receive
    try:
        yield
    finally:
        _receive = before


def say(text: str) -> None:
    """Prints a message on stderr.  A message that cannot be written is dropped."""
    if _receive is not None:
        _receive(text, False)
    elif sys.stderr is not None:
        try:
            print(text, file=sys.stderr, flush=True)
        except (OSError, ValueError):  # the disk is full, or the pipe or stream is closed
            discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Redirects a broken stream to the null device, so that the interpreter reports no error at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def warn(text: str) -> None:
    if _receive is not None:
        _receive(text, True)
    else:
        say(f"localllm: warning: {visible_line(text)}")


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


class StatusLine:
    """Progress as a line at the bottom of a terminal, which is rewritten at each update.  No output elsewhere.

    As a context manager, it clears the line at the end of the block.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._stream = sys.stderr if enabled and is_terminal(sys.stderr) else None
        self._shown = ""
        self._due = time.monotonic() + _PATIENCE_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    @property
    def live(self) -> bool:
        """Whether progress is shown."""
        return self._stream is not None

    def show(self, text: str) -> None:
        """Shows ``text``, unless the last update was less than `_UPDATE_SECONDS` ago."""
        if self._stream is not None and time.monotonic() >= self._due:
            self._write(text[: shutil.get_terminal_size().columns - 1])
            self._due = time.monotonic() + _UPDATE_SECONDS

    def clear(self) -> None:
        """Clears the line.  The next `show` waits again."""
        self._write("")
        self._due = time.monotonic() + _PATIENCE_SECONDS

    def _write(self, text: str) -> None:
        if self._stream is not None and (text or self._shown):
            try:
                self._stream.write("\r" + text.ljust(len(self._shown)) + ("" if text else "\r"))
                self._stream.flush()
                self._shown = text
            except OSError:  # the terminal is gone
                discard(self._stream)
                self._stream = None


class LoadStatus:
    """Progress of `localllm.load` on a terminal: kernels compiled for the first time, weights packed.

    Kernels are compiled in several lots; the progress counts the rest of the current lot.
    As a context manager, it is closed at the end of the block.

    Attributes:
        formats: the formats of the model's weights; see `localllm.loading.progress.ShowsFormats`.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._status = StatusLine(enabled=enabled)
        self._is_cached: bool | None = None  # whether compiled kernels are cached; None before the first kernel
        self._start = self._seconds = 0.0
        self._compiled = 0
        self.formats = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, stage: str, n_done: int, total: int) -> None:
        if stage == "weights":
            self._status.show(f"loading weights: {100 * n_done // max(1, total)} %")
        elif self._enabled:
            self._compiling(n_done, total)

    def _compiling(self, n_done: int, total: int) -> None:
        is_first = self._is_cached is None
        if self._is_cached is None:
            from localllm.kernels.code_cache import cache_fault

            self._is_cached = cache_fault() is None
        purpose = f"for {self.formats or 'this processor'}"
        if is_first and not self._status.live:
            note = ", which later runs reuse" if self._is_cached else ""
            say(f"localllm: compiling {_kernels(total)} {purpose}{note}")
        if n_done == 0:
            self._start = time.monotonic()
        if n_done < total:
            self._status.show(f"compiling kernels {purpose}: {total - n_done} left")
        else:
            self._compiled += total
            self._seconds += time.monotonic() - self._start

    def close(self) -> None:
        """Clears the progress.  If no progress was visible, prints a summary."""
        self._status.clear()
        if self._compiled and not self._status.live:
            say(f"localllm: compiled {_kernels(self._compiled)} in {self._seconds:.0f} s")
        self._compiled = 0


def _kernels(n: int) -> str:
    return f"{n} kernel{'s' * (n != 1)}"


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with aligned columns as plain text, also into files and pipes."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str]) -> None:
    """Print a table on a terminal. ``numbers``: names of the columns that contain numbers."""
    # Imported here, because files and pipes do not need it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        is_number = name in numbers
        table.add_column(name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def quantity(n: float, unit: str) -> str:
    """Return a quantity with three digits and a decimal prefix: 1.23 GB."""
    return "{} {}{}".format(*_scaled(n, ("", "k", "M", "G", "T", "P")), unit)


def short_count(n: int) -> str:
    """Return a number with three digits in the style of model names: 1.24B."""
    return "{}{}".format(*_scaled(n, ("", "K", "M", "B", "T")))


def rounded(n: float) -> str:
    """Return a number such as a speed in three digits, or as a whole number: "14.2", "1,234"."""
    return f"{n:,.0f}" if n >= 999.5 else f"{n:.3g}"


def _scaled(n: float, prefixes: Sequence[str]) -> tuple[str, str]:
    power = 0
    while abs(n) >= 999.5 and power < len(prefixes) - 1:
        n, power = n / 1000, power + 1
    return f"{n:.3g}", prefixes[power]


def model_line(info: ModelInfo, threads: Sequence[int] = ()) -> str:
    """Return device, kernels and threads of a model in one line.  ``threads``: the thread counts, if they vary."""
    name = visible_line(info.name or info.path.name)
    shown = f"{info.threads} thread{'s' * (info.threads != 1)}"
    if info.decode_threads != info.threads:
        shown += f" ({info.decode_threads} to decode)"
    if len(threads) > 1:
        shown = f"{', '.join(map(str, threads))} threads"
    return (
        f"{name}: {info.architecture}, {short_count(info.n_parameters)} parameters, {info.file_type}, "
        f"{quantity(info.n_bytes, 'B')}; {info.device} ({info.kernels}), {shown}, {info.context:,} tokens of context"
    )


def detail(name: str, text: str) -> str:
    """Return a line of a list of facts."""
    return f"{name:<20} {text}"


def placement_lines(placement: Placement, free: Mapping[str, int] | None = None) -> Iterator[str]:
    """Yield lines with the memory per device, without the total.

    ``free``: available bytes per device; None after the model is loaded.
    """
    for group in placement.groups:
        items = _parts(("weights", group.weights), (f"{placement.cache_type} KV cache", group.kv_cache))
        yield detail(group.name, f"{group.device} ({group.kernels}): {items}")
    if placement.cache is not None:
        yield detail("cache", str(placement.cache))
    if placement.pool:
        yield detail("experts", experts_in_file(placement))
    yield detail("scratch", quantity(placement.scratch, "B"))
    devices = dict.fromkeys((*placement.devices, *(free or ())))
    if list(devices) == [placement.host]:
        return
    for device in devices:
        usage = placement.on(device)
        capacity = f" of {quantity(free[device], 'B')} free" if free else ""
        kinds = (
            ("weights", usage.weights),
            ("experts", usage.pool),
            ("KV cache", usage.kv_cache),
            ("scratch", usage.scratch),
        )
        items = _parts(*kinds)
        yield detail(f"on {device}", f"{quantity(usage.total, 'B')}{capacity}{': ' * bool(items)}{items}")


def experts_in_file(placement: Placement) -> str:
    """Describe the part of a model that stays in its file, and its cost."""
    n_bytes, pool = placement.experts_in_file, placement.pool
    missing = round(n_bytes * placement.used_experts * (1 - pool / n_bytes))
    return (
        f"{quantity(n_bytes, 'B')} stay in the file, at most {quantity(pool, 'B')} in memory: a token reads "
        f"about {quantity(missing, 'B')} if the router selects all experts equally often"
    )


def _parts(*items: tuple[str, int]) -> str:
    return ", ".join(f"{quantity(n_bytes, 'B')} {name}" for name, n_bytes in items if n_bytes)
