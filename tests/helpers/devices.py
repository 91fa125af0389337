"""The devices that tests of the whole way run on."""

from __future__ import annotations

#: Parameters for ``device``.
DEVICES = ["reference", "cpu"]
