"""The results of a run as Markdown tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
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


def write(folder: Path, head: dict[str, str], results: Sequence[Found]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.md").write_text(markdown(head, results), encoding="utf-8")
    content: dict[str, Any] = {**head, "sections": [asdict(found) for found in results]}
    (folder / "gpu.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
