"""Sections of a run.  Each yields rows of a table within its time, and its failure does not stop other sections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

#: A row of a section's table: value by column.  "fault" describes a wrong result.
Row = dict[str, Any]


@dataclass
class Found:
    """Results of a section.

    Attributes:
        seconds: duration.
        faults: wrong outputs and failed tests.
        note: why rows are missing, or empty.
        is_interrupted: whether Ctrl-C stopped the section, and so the run.
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
        find: yields rows; takes the available seconds.
        share: its share of the remaining time, relative to the following sections.
    """

    title: str
    find: Callable[[float], Iterator[Row]]
    share: float


def run(section: Section, seconds: float, show: Callable[[Found], None]) -> Found:
    """Run a section for at most ``seconds``, and finish its current row."""
    found, begin = Found(section.title), time.monotonic()
    if seconds <= 0:
        found.note = "skipped: the time of the run was over"
        return found
    try:
        for row in section.find(seconds):
            if fault := row.get("fault"):
                found.faults.append(fault)
            found.rows.append(row)
            show(found)
            if time.monotonic() - begin > seconds:
                found.note = f"stopped after {seconds:.0f} s: the rest was skipped"
                break
    except KeyboardInterrupt:
        found.note, found.is_interrupted = "stopped by Ctrl-C: the rest was skipped", True
    except Exception as error:  # other sections can still run
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
    """Run sections in order, in ``seconds`` in total; save the results after each row."""
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
    return "  ".join(f"{name} {escape_controls(value)}" for name, value in row.items() if value not in (None, ""))


def escape_controls(value: Any) -> str:
    """Format a value for a table."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
