"""Paths of test data that is not part of the project."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shared_data(relative: str) -> Path:
    """Return the path of a file in ``../shared/data``; skip the test if it does not exist."""
    path = ROOT.parent / "shared" / "data" / relative
    if not path.exists():
        pytest.skip(f"needs {relative} in ../shared/data")
    return path
