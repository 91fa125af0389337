"""The notebook of docs/look-inside.md runs, and is stored without outputs."""

from __future__ import annotations

import json
from typing import Any

from tests.helpers.data import ROOT

NOTEBOOK: dict[str, Any] = json.loads((ROOT / "docs" / "look-inside.ipynb").read_text("utf-8"))


def test_the_notebook_has_no_outputs() -> None:
    assert NOTEBOOK["nbformat"] == 4
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_the_cells_run_in_order() -> None:
    names: dict[str, Any] = {}
    for number, cell in enumerate(NOTEBOOK["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert len(set(names["texts"].values())) > 1, "steering changes the text"
