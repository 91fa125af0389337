"""Suggestions of models for a machine."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from localllm.catalog import suggestions as module
from localllm.catalog.file_details import Details, DetailsReader
from localllm.catalog.known_models import USES, known_models
from localllm.catalog.suggestions import MIN_TOKENS_PER_S, NEXT_SIZE, SuggestedModel, suggest
from tests.helpers.command_line import run_main

GB = 10**9


@pytest.fixture(autouse=True)
def _nothing_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "known_here", lambda model, format: None)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("available", [8 * GB, 16 * GB, 64 * GB])
def test_suggestions_fit_and_differ(use: str, available: int) -> None:
    suggestions = suggest(use, available, 40e9)
    assert 1 <= len(suggestions) <= 3
    sizes = [s.model.formats[s.format] for s in suggestions]
    for size, smaller in pairwise(sizes):
        assert smaller <= NEXT_SIZE * size
    for s in suggestions:
        assert use in s.model.uses
        assert s.format == s.model.default_format
        assert s.memory == s.model.memory(s.format) <= available
        assert s.is_estimate
        assert s.tokens_per_s == s.model.tokens_per_s(s.format, 40e9) >= MIN_TOKENS_PER_S


def test_more_memory_and_bandwidth_suggest_more_capable_models() -> None:
    def best(available: int, bandwidth: float) -> float:
        model = suggest("chat", available, bandwidth)[0].model
        return model.parameters * model.active

    assert best(4 * GB, 40e9) < best(16 * GB, 40e9) <= best(64 * GB, 40e9) < best(64 * GB, 400e9)


def test_a_slow_machine_gets_the_models_that_fit() -> None:
    assert suggest("chat", 16 * GB, 1e8)
    assert suggest("chat", 16 * GB, None)[0].tokens_per_s is None
    assert suggest("chat", 10_000_000, 40e9) == []


def test_a_downloaded_model_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    details = Details(memory=123, least_memory=100, tokens_per_s=42.0)
    monkeypatch.setattr(module, "known_here", lambda model, format: Path(model.name))
    monkeypatch.setattr(DetailsReader, "read", lambda self, path: details)
    assert all(
        (s.memory, s.tokens_per_s, s.is_estimate, s.path) == (123, 42.0, False, Path(s.model.name))
        for s in suggest("chat", 16 * GB, 40e9)
    )
    monkeypatch.setattr(DetailsReader, "read", lambda self, path: Details(error="damaged"))
    assert all(s.is_estimate and s.path is None for s in suggest("chat", 16 * GB, 40e9))


@pytest.fixture
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 16 GB and a bandwidth of 40 GB/s."""
    monkeypatch.setattr(module, "suggest_here", lambda use, progress=None: suggest(use, 16 * GB, 40e9))


@pytest.mark.usefixtures("_machine")
def test_the_command_prints_suggestions(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "models", "--suggest", "--use", "images")
    assert outcome.code == 0
    head, *rows = [line.split("\t") for line in outcome.out.splitlines()]
    assert head == ["name", "download", "format", "memory", "speed", "abilities", "licence"]
    expected = suggest("images", 16 * GB, 40e9)
    assert [row[0] for row in rows] == [s.model.name for s in expected]
    assert all(row[4].startswith("about ") and row[4].endswith(" tokens/s") and "images" in row[5] for row in rows)
    outcome = run_main(capfdbinary, "models", "--use", "embeddings", "--json")
    answer = json.loads(outcome.out)
    assert answer["use"] == "embeddings"
    for values in answer["suggestions"]:
        assert values["is_estimate"]
        assert values["path"] is None
        assert values["name"] in {model.name for model in known_models()}


@pytest.mark.usefixtures("_machine")
def test_wrong_uses_are_refused(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "models", "--use", "dancing")
    assert outcome.code == 2
    assert "'dancing' is not one of chat, code, images, audio, embeddings" in outcome.err
    outcome = run_main(capfdbinary, "models", "folder", "--suggest")
    assert "--suggest lists models of the hub: remove the folders" in outcome.err


def test_a_machine_without_memory(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: list[SuggestedModel] = []
    monkeypatch.setattr(module, "suggest_here", lambda use, progress=None: nothing)
    outcome = run_main(capfdbinary, "models", "--suggest")
    assert outcome.code == 1
    assert "no known model fits into the available memory" in outcome.err
