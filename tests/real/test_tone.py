"""The examples of docs/look-inside.md with real weights, whose texts and numbers the page shows."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm import LLM
from tests.helpers.command_line import run_main
from tests.helpers.data import ROOT

PAGE = (ROOT / "docs" / "look-inside.md").read_text("utf-8")


def block(language: str, contents: str) -> str:
    """Return the only block of the page in this language that has these contents."""
    (text,) = (text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if contents in text)
    return text


def test_a_vector_changes_the_tone_of_a_reply(smollm2: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"llm": smollm2}
    exec(block("python", "tools.control_vector(llm, pairs)\n"), names)
    printed = capsys.readouterr().out
    assert printed == block("text", "typical Monday")
    plain = smollm2.chat(names["question"], temperature=0, max_tokens=24).text
    assert printed.startswith(f"0 {plain}\n")


def test_the_commands_change_the_tone_of_a_reply(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    (pairs,) = re.findall(r"pairs = (\[.*?^\])", block("python", "pairs = ["), re.DOTALL | re.MULTILINE)
    for name, texts in zip(("happy.txt", "sad.txt"), zip(*ast.literal_eval(pairs), strict=True), strict=True):
        Path(name).write_text("\n".join(texts), "utf-8")
    look, *generate = block("sh", "--control-vector-from").replace("\\\n", " ").splitlines()
    run_command(look, smollm2_path, capfdbinary)
    replies = [run_command(line, smollm2_path, capfdbinary) for line in generate]
    assert "\n".join(replies) + "\n" == block("text", "loss of a friend")


def test_patching_finds_the_layer_that_moves_an_answer(
    smollm2_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = run_command(block("sh", "The capital of France"), smollm2_path, capfdbinary)
    title, columns, *rows = out.splitlines()
    shown_title, shown_columns, *shown = block("text", "effect on '␣Paris'").splitlines()
    assert (title, columns.split()) == (shown_title, shown_columns.split())
    for line in shown:
        layer, *effects = line.split()
        # The effects depend on the instruction set in the second decimal.
        np.testing.assert_allclose(np.array(rows[int(layer)].split()[1:], float), np.array(effects, float), atol=0.05)


def run_command(line: str, model: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> str:
    """Run a command line of the page with a real model, and return its output."""
    _, *words = shlex.split(line)
    words = [str(model) if word == "model.gguf" else word for word in words]
    outcome = run_main(capfdbinary, *words, "--device", "cpu", "-c", "1024")
    assert outcome.code == 0, outcome.err
    return outcome.out.rstrip("\n")
