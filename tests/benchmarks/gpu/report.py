"""The results of a run as Markdown tables, and as JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.sections import Found, Row, escape_controls


def markdown(head: dict[str, str], results: Sequence[Found]) -> str:
    """Format a run: its description, then a table per section."""
    parts = ["# localllm on a GPU", "\n".join(f"- {name}: {value}" for name, value in head.items())]
    for found in results:
        parts.append(f"## {found.title} ({found.seconds:.0f} s)")
        if found.rows:
            parts.append(table(found.rows))
        if found.note:
            parts.append(found.note)
    faults = [fault for found in results for fault in found.faults]
    parts.append("## Faults\n\n" + "\n".join(f"- {fault}" for fault in faults) if faults else "No faults.")
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [["" if row.get(name) is None else escape_controls(row[name]) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def lines(head: dict[str, str], results: Sequence[Found]) -> Iterator[dict[str, Any]]:
    """Yield the run's description, a line per row, and a line at the end of each section."""
    yield head
    for found in results:
        yield from ({"section": found.title, "row": row} for row in found.rows)
        yield {
            "section": found.title,
            "seconds": round(found.seconds, 2),
            "note": found.note,
            "faults": found.faults,
        }


def write(folder: Path, head: dict[str, str], results: Sequence[Found]) -> None:
    """Write gpu.md and gpu.jsonl.  Readers, and a program that is killed, never leave or see half of a file."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "gpu.md": markdown(head, results),
        "gpu.jsonl": "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines(head, results)),
    }
    for name, text in texts.items():
        (folder / f"{name}.new").write_text(text, encoding="utf-8")
        os.replace(folder / f"{name}.new", folder / name)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of gpu.jsonl; empty if it does not exist yet."""
    try:
        text = (folder / "gpu.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]
