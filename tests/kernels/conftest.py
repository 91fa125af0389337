"""Fixtures for tests that run on every backend."""

from __future__ import annotations

from functools import cache

import pytest

from tests.helpers.backends import BACKENDS, Backend
from tests.helpers.recorder import Ops


# In module scope, tests of one backend follow each other, so that one pytest-xdist worker compiles it.
@pytest.fixture(params=BACKENDS, ids=lambda b: b.name, scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@cache
def _ops(backend: Backend) -> Ops:
    return backend.make()


@pytest.fixture
def ops(backend: Backend) -> Ops:
    return _ops(backend)
