"""The verdicts of the comparison with llama.cpp, on numbers made up for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks import compare_llama_cpp
from tests.benchmarks.compare_llama_cpp import Agreement, Line, Memory, agree, gap, main, markdown


def agreement(**changes: Any) -> Agreement:
    given = {"relative_error": 1e-2, "tolerance": 2e-2, "top_equal": True, "equal_ids": 8, "n_ids": 8, "gap": 0.0}
    return Agreement("tiny", 1, **(given | changes))


def memory(peak: int) -> Memory:
    return Memory("tiny", peak, cache=10_000_000, file=100_000_000)


def test_what_is_no_fault() -> None:
    assert not list(agreement().faults())
    assert not list(agreement(equal_ids=3, gap=3.9).faults())
    assert not list(memory(330_000_000).faults())


@pytest.mark.parametrize(
    ("checked", "words"),
    [
        (agreement(relative_error=2.1e-2), "logits differ by 2.1e-02, more than 2e-02"),
        (agreement(relative_error=float("nan")), "logits differ by nan"),
        (agreement(relative_error=3e-3, tolerance=2e-3), "more than 2e-03"),
        (agreement(equal_ids=3, gap=4.1), "greedy texts part after 3 tokens"),
        (memory(330_000_001), "memory peaks at 330 MB, more than 330 MB"),
    ],
)
def test_faults(checked: Agreement | Memory, words: str) -> None:
    [fault] = checked.faults()
    assert words in fault


def test_the_gap_between_two_tokens() -> None:
    """The logits' root mean square is 2, so that one of them may differ by 0.02 at a tolerance of 1%."""
    theirs = np.array([2.0, 2.02, -1.98, -2.0], np.float32)
    ours = np.array([2.05, 2.0, -2.0, -2.0], np.float32)
    assert gap(ours, theirs, 0, 1, 0.01) == pytest.approx(2.5, rel=1e-2)
    assert gap(theirs[::-1], ours[::-1], 2, 3, 0.01) == pytest.approx(2.5, rel=1e-2)


class Fixed:
    """Stands for either program: its logits depend on the last token alone."""

    tolerance = 2e-2

    def __init__(self, table: dict[int, list[float]]) -> None:
        self._table = {id_: np.array(row, np.float32) for id_, row in table.items()}
        self._last = 0

    def prefill(self, ids: list[int]) -> None:
        self._last = ids[-1]

    def logits(self, ids: list[int] | None = None) -> Any:
        return self._table[ids[-1] if ids else self._last]


def test_texts_that_part() -> None:
    """After the prompt both take 1; after it they differ, widely."""
    ours: Any = Fixed({0: [0, 9, 0], 1: [5, 0, 0]})
    theirs: Any = Fixed({0: [0, 9, 0], 1: [0, 0, 5]})
    found = agree("tiny", 1, ours, theirs, [2, 0], [1, 0, 0], [1, 2, 1])
    assert (found.relative_error, found.top_equal, found.equal_ids) == (0, True, 1)
    assert found.gap == pytest.approx(5 / (2e-2 * 5 / 3**0.5))
    same = agree("tiny", 1, ours, ours, [2, 0], [1, 0], [1, 0])
    assert (same.equal_ids, same.gap) == (2, 0)


def test_the_table_for_the_readme() -> None:
    lines = [Line("tiny", 2, "pp512", 100.0, 50.0, True), Line("tiny", 2, "tg64", 9.0, 10.0, False, 8.04, 0.84)]
    assert markdown(lines).splitlines() == [
        "| model | threads | test | localllm, tok/s | llama.cpp, tok/s | ratio | GB/s | of the bandwidth |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| tiny | 2 | pp512 | 100.0 | 50.0 | 2.00 |  |  |",
        "| tiny | 2 | tg64 | 9.0 | 10.0 | 0.90 | 8.0 | 84% |",
    ]


@pytest.mark.parametrize(("peak", "code"), [(330_000_000, 0), (340_000_000, 1)])
def test_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peak: int, code: int
) -> None:
    measured: dict[str, Callable[..., object]] = {
        "compare": lambda path, threads, args: ([Line("tiny", threads, "pp8", 2.0, 1.0, False)], agreement()),
        "peak_memory": lambda path, context, prompt: memory(peak),
    }
    for name, function in measured.items():
        monkeypatch.setattr(compare_llama_cpp, name, function)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.3")
    monkeypatch.setattr(sys, "argv", ["compare", str(Path("tiny.gguf")), "-t", "1", "--markdown"])
    assert main() == code
    out, err = capsys.readouterr()
    assert "| tiny | 1 | pp8 | 2.0 | 1.0 | 2.00 |  |  |" in out
    assert ("memory peaks" in err) == bool(code)
