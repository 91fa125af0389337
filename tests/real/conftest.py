"""Models with real weights, each loaded once.  Tests are skipped if the packages of the models are missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm import LLM
from tests.real import models

#: Context length: enough for a chunk of perplexity and for a chat of ten turns.
CONTEXT = 1024


def _found(path: Path | None) -> Path:
    if path is None:
        pytest.skip(f"needs real weights: {models.HOW}")
    return path


def recorded(name: str) -> Any:
    """Return the data that `tests.real.record` and `tests.benchmarks.real_models` wrote."""
    return json.loads((Path(__file__).with_name("recorded") / f"{name}.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return _found(models.smollm2())


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    return _found(models.gemma())


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    return _found(models.minilm())


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[LLM]:
    """SmolLM2 135M Instruct in Q4_1, a chat model."""
    with localllm.load(smollm2_path, device="cpu", context=CONTEXT) as llm:
        yield llm


@pytest.fixture(scope="session")
def gemma(gemma_path: Path) -> Iterator[LLM]:
    """Gemma 3 270M in Q4_K_M, a base model without a template."""
    with localllm.load(gemma_path, device="cpu", context=CONTEXT) as llm:
        yield llm


@pytest.fixture(params=["smollm2", "gemma"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llm(name: str, request: pytest.FixtureRequest) -> LLM:
    """Each model in turn, with an empty cache."""
    llm: LLM = request.getfixturevalue(name)
    llm.forget()
    return llm
