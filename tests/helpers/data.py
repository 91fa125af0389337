"""Where tests find what does not ship with the project."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shared_data(relative: str) -> Path:
    """The path of a real file under ``../shared/data``; skips the test where it is not there."""
    path = ROOT.parent / "shared" / "data" / relative
    if not path.exists():
        pytest.skip(f"needs {relative} in ../shared/data")
    return path
