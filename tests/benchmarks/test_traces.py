"""The benchmark of traces runs with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import traces
from tests.helpers.tiny_models import tiny_gguf


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, Any]]:
    path = tiny_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(sys, "argv", ["traces", str(path), "--prompt", "40", "-n", "4", "-r", "2", *flags])
    code = traces.main()
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_table_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run(tmp_path, monkeypatch, capsys, "--without-transformers")
    assert code == 0
    assert {traces.PROMPT, traces.TRACE, traces.DECODE} < report.keys()
    assert report[traces.PROMPT]["ratio"] == 1
    assert all(report[name]["tokens_per_s"] > 0 for name in (traces.PROMPT, traces.TRACE, traces.DECODE))


def test_the_outputs_agree_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    code, report = run(tmp_path, monkeypatch, capsys)
    assert code == 0
    assert len(report["errors"]) == 3
    assert max(report["errors"]) < 5e-3
    assert report[traces.THEIR_DECODE]["tokens_per_s"] > 0
