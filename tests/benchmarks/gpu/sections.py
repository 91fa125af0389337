"""Sections of a run: each finds rows of a table within its time, and none takes the others down with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

#: A row of a section's table: what stands in which column.  "fault" is what is wrong with what was computed.
Row = dict[str, Any]


@dataclass
class Found:
    """What a section found.

    Attributes:
        seconds: that it took.
        faults: outputs that are wrong, and tests that fail.
        note: why something is missing, if it is.
        is_interrupted: whether that is Ctrl-C: nothing comes after it.
    """

    title: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    note: str = ""
    is_interrupted: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the run.

    Attributes:
        find: yields rows; called with the seconds that it may take.
        seconds: that it may take.  The row at hand is finished, then the rest is left out.
    """

    title: str
    find: Callable[[float], Iterator[Row]]
    seconds: float


def run(section: Section, seconds_left: float, show: Callable[[str], None]) -> Found:
    """Runs a section for as long as it may."""
    found, begin = Found(section.title), time.monotonic()
    seconds = min(section.seconds, seconds_left)
    if seconds <= 0:
        found.note = "left out: the time of the whole run was over"
        return found
    try:
        for row in section.find(seconds):
            if fault := row.get("fault"):
                found.faults.append(fault)
            found.rows.append(row)
            show(line(row))
            if time.monotonic() - begin > seconds:
                found.note = f"stopped after {seconds:.0f} s: the rest was left out"
                break
    except KeyboardInterrupt:
        found.note, found.is_interrupted = "stopped by Ctrl-C: the rest was left out", True
    except Exception as error:  # whatever it is, the other sections are of use
        found.note = f"failed: {type(error).__name__}: {error}"
        found.faults.append(f"{section.title}: {found.note}")
    found.seconds = time.monotonic() - begin
    return found


def run_all(sections: Sequence[Section], seconds: float, show: Callable[[str], None]) -> list[Found]:
    """Runs them one after the other, in so many seconds in all."""
    end, results = time.monotonic() + seconds, []
    for section in sections:
        show(f"\n## {section.title}")
        results.append(run(section, end - time.monotonic(), show))
        if results[-1].note:
            show(results[-1].note)
        if results[-1].is_interrupted:
            break
    return results


def line(row: Row) -> str:
    """A row for the terminal."""
    return "  ".join(f"{name} {escape_controls(value)}" for name, value in row.items() if value not in (None, ""))


def escape_controls(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
