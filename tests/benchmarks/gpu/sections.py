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
        share: how much of the time is its, beside those of the sections behind it, which get what it leaves.
    """

    title: str
    find: Callable[[float], Iterator[Row]]
    share: float


def run(section: Section, seconds: float, show: Callable[[Found], None]) -> Found:
    """Runs a section for so long: the row at hand is finished, then the rest is left out."""
    found, begin = Found(section.title), time.monotonic()
    if seconds <= 0:
        found.note = "left out: the time of the whole run was over"
        return found
    try:
        for row in section.find(seconds):
            if fault := row.get("fault"):
                found.faults.append(fault)
            found.rows.append(row)
            show(found)
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


def run_all(
    sections: Sequence[Section],
    seconds: float,
    show: Callable[[str], None],
    save: Callable[[Sequence[Found]], None],
) -> list[Found]:
    """Runs them one after the other, in so many seconds in all; saves what was found after each row."""
    end, results = time.monotonic() + seconds, list[Found]()

    def found_more(found: Found) -> None:
        show(line(found.rows[-1]))
        save([*results, found])

    for i, section in enumerate(sections):
        show(f"\n## {section.title}")
        part = section.share / sum(each.share for each in sections[i:])
        results.append(run(section, part * (end - time.monotonic()), found_more))
        if results[-1].note:
            show(results[-1].note)
        save(results)
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
