"""The devices that tests of the whole way run on."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

#: Parameters for ``device``: the CPU backend where this checkout has it, and the reference.
DEVICES = [
    "reference",
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(find_spec("localllm.kernels.cpu.backend") is None, reason="no CPU backend here"),
    ),
]
