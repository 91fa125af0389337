"""A model that sees or hears, loaded and served.  A module's fixture ``files`` has the folder of its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import localllm
from localllm import LLM
from localllm.server.http import Limits
from tests.helpers.http_server import Serving, demo, serving


@pytest.fixture(scope="module")
def llm(files: Path) -> Iterator[LLM]:
    with localllm.load(files / "model.gguf", device="cpu", context=512, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[Serving]:
    limits = Limits(image_hosts=("127.0.0.1",), max_body=4 << 20)
    with serving(demo(path=files / "model.gguf", context=512), limits=limits) as started:
        yield started
