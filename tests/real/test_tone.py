"""The example of docs/look-inside.md with real weights."""

from __future__ import annotations

import re

import pytest

from localllm import LLM
from tests.helpers.data import ROOT


def test_a_vector_changes_the_tone_of_a_text(smollm2: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "look-inside.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(import numpy as np\n.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"it prints:\n\n```text\n(.*?)```", page, re.DOTALL)
    exec(program, {"llm": smollm2})
    printed = capsys.readouterr().out
    plain = smollm2.generate("The old man opened the letter and", temperature=0, max_tokens=24).text
    for text in (shown, printed):
        sad, unchanged, happy = re.split(r"^(?:-2|0|2) ", text, flags=re.MULTILINE)[1:]
        assert " ".join(unchanged.split()) == " ".join(plain.split())
        assert "smile" in happy
        assert "smile" not in sad
