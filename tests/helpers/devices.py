"""Devices for end-to-end tests."""

from __future__ import annotations

#: Parameters for ``device``.
DEVICES = ["reference", "cpu"]
