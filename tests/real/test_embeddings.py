"""A sentence encoder with real weights, converted from its checkpoint, compared with transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm import LLM
from localllm.cli.main import main
from tests.helpers.command_line import run_main
from tests.real.conftest import recorded
from tests.real.record import SENTENCES


@pytest.fixture(scope="module")
def converted(minilm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that ``localllm convert`` writes."""
    path = tmp_path_factory.mktemp("minilm") / "minilm.gguf"
    assert main(["convert", str(minilm_path), "-q", "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def minilm(converted: Path) -> Iterator[LLM]:
    with localllm.load(converted, device="cpu") as llm:
        yield llm


def test_embeddings_equal_those_of_transformers(minilm: LLM) -> None:
    expected = np.array(recorded("transformers")["embeddings"], np.float32)
    found = minilm.embed(SENTENCES)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    near = found @ found.T
    # A sentence about a meal is nearer to a man who eats than to physics.
    assert near[0, 1] > 0.5 > near[0, 2]


def test_the_command_writes_the_same_vectors(
    minilm: LLM, converted: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    done = run_main(capfdbinary, "embed", "-q", "-m", converted, "--device", "cpu", SENTENCES[0])
    assert done.code == 0, done.err
    np.testing.assert_allclose(json.loads(done.out), minilm.embed(SENTENCES[:1])[0], atol=1e-6)
