"""The comparison with llama.cpp: its verdicts, tables and journal, with made-up numbers."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localllm
from tests.benchmarks import compare_llama_cpp, measure, theirs
from tests.benchmarks.compare_llama_cpp import main
from tests.benchmarks.markdown import markdown
from tests.benchmarks.measure import agree, best_rates
from tests.benchmarks.ours import Ceilings, Ours, products_by_bits
from tests.benchmarks.results import (
    Agreement,
    Journal,
    Line,
    Memory,
    Record,
    Trial,
    best_settings,
    gap,
    program_version,
)
from tests.helpers.synthetic import SHAPES, random_gguf

LINE = Line("decode", "tiny", "Q4_0", 2, "tg64", 9.0, 6.0, "repack, flash", 0.95)


def agreement(**changes: Any) -> Agreement:
    given = {"relative_error": 1e-2, "tolerance": 2e-2, "top_equal": True, "equal_ids": 8, "n_ids": 8, "gap": 0.0}
    return Agreement("tiny", 1, "short", **(given | changes))


def memory(peak: int) -> Memory:
    return Memory("tiny", peak, cache=10_000_000, file=100_000_000)


# -- Verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checked", "words"),
    [
        (agreement(), None),
        (agreement(equal_ids=3, gap=3.9), None),
        (memory(270_000_000), None),
        (agreement(relative_error=2.1e-2), "logits differ by 2.1e-02, more than 2e-02"),
        (agreement(relative_error=float("nan")), "logits differ by nan"),
        (agreement(relative_error=3e-3, tolerance=2e-3), "more than 2e-03"),
        (agreement(equal_ids=3, gap=4.1), "greedy texts differ after 3 tokens"),
        (memory(270_000_001), "memory peaks at 270 MB, more than 270 MB"),
    ],
)
def test_faults(checked: Agreement | Memory, words: str | None) -> None:
    faults = [*checked.faults()]
    assert len(faults) == (words is not None)
    assert words is None or words in faults[0]


def test_the_gap_between_two_tokens() -> None:
    """The root mean square of the logits is 2, so at a tolerance of 1 %, a logit may differ by 0.02."""
    theirs = np.array([2.0, 2.02, -1.98, -2.0], np.float32)
    ours = np.array([2.05, 2.0, -2.0, -2.0], np.float32)
    assert gap(ours, theirs, 0, 1, 0.01) == pytest.approx(2.5, rel=1e-2)
    assert gap(theirs[::-1], ours[::-1], 2, 3, 0.01) == pytest.approx(2.5, rel=1e-2)


class Fixed:
    """A substitute for either program; its logits depend on the last token only."""

    tolerance = 2e-2

    def __init__(self, table: dict[int, list[float]]) -> None:
        self._table = {id_: np.array(row, np.float32) for id_, row in table.items()}

    def logits(self, ids: list[int]) -> Any:
        return self._table[ids[-1]]


def test_texts_that_differ() -> None:
    """Both texts have token 1 after the prompt, and different tokens after it."""
    ours: Any = Fixed({0: [0, 9, 0], 1: [5, 0, 0]})
    theirs: Any = Fixed({0: [0, 9, 0], 1: [0, 0, 5]})
    found = agree("tiny", 1, "short", ours, theirs, [2, 0], [1, 0, 0], [1, 2, 1])
    assert (found.relative_error, found.top_equal, found.equal_ids) == (0, True, 1)
    assert found.gap == pytest.approx(5 / (2e-2 * 5 / 3**0.5))
    assert [*found.faults()]
    same = agree("tiny", 1, "short", ours, ours, [2, 0], [1, 0], [1, 0])
    assert (same.equal_ids, same.gap) == (2, 0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (LINE, []),
        (replace(LINE, theirs=8.0), ["1.12 times as fast as repack, flash, not 1.2"]),
        (replace(LINE, theirs=8.0, format="Q6_K"), []),
        (replace(LINE, share=0.89), ["89% of the bandwidth"]),
        (
            replace(LINE, kind="prefill", share=0.59),
            ["1.50 times as fast as repack, flash, not 2", "59% of the peak"],
        ),
        (replace(LINE, kind="prefill", format="F16", share=0.3), []),
        (replace(LINE, kind="start"), ["0.67 times as fast"]),
        (replace(LINE, kind="start", ours=0.5, theirs=0.6), []),
    ],
)
def test_missed_goals(line: Line, words: list[str]) -> None:
    found = list(line.shortfalls())
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert text.startswith("tiny, 2 threads, tg64: ")
        assert word in text


# -- Choosing ------------------------------------------------------------------------------------------------------


def test_the_settings_worth_measuring() -> None:
    settings = (True, True, 9, 1), (True, False, 8, 2), (False, True, 7, 3), (False, False, 1, 1)
    a, b, c, d = (Trial("tiny", *setting) for setting in settings)
    assert best_settings([a, b, c, d]) == [a, c]
    assert best_settings([a, b, replace(c, decode=0.5), d]) == [a, b]
    assert best_settings([replace(a, decode=9), b, c, d]) == [replace(a, decode=9), b]
    assert best_settings([d]) == [d]


def test_the_best_round_of_the_better_setting_counts() -> None:
    contexts: Any = [SimpleNamespace(setting="a"), SimpleNamespace(setting="b")]
    assert best_rates(8, [[2.0, 4.0, 8.0], [1.0, 8.0, 2.0]], contexts) == (8.0, 4.0, "b")


# -- The tables for docs/speed.md ---------------------------------------------------------------------------------

TITLES = "| model | format | threads | prefill | llama.cpp | ratio "
TITLES += "| % of this format's peak | % of the fastest format's peak "
TITLES += "| decode | llama.cpp | ratio | % of the bandwidth |"


def prefill(model: str, format: str, threads: int, **changes: Any) -> Line:
    line = Line("prefill", model, format, threads, "pp512", 1000.0, 500.0, "repack, flash", 0.61, 0.552)
    return replace(line, **changes)


def decode(model: str, format: str, threads: int, **changes: Any) -> Line:
    return replace(Line("decode", model, format, threads, "tg64", 9.0, 6.0, "repack, flash", 0.95), **changes)


def test_a_row_holds_prefill_and_decode() -> None:
    """Missing measurements are empty, and files with the same name have separate rows."""
    found: list[Record] = [prefill("tiny-q4_0", "Q4_0", 2), decode("tiny-q4_0", "Q4_0", 2), agreement()]
    found += [prefill("tiny.F16", "F16", 1), prefill("tiny.F16", "F16", 1, ours=3.0), decode("b", "F16", 1)]
    assert markdown(found).splitlines()[:6] == [
        TITLES,
        f"{'| --- ' * 12}|",
        "| b | F16 | 1 |  |  |  |  |  | 9.00 | 6.00 | 1.50 | 95% |",
        "| tiny | Q4_0 | 2 | 1,000.0 | 500.0 | 2.00 | 61% | 55% | 9.00 | 6.00 | 1.50 | 95% |",
        "| tiny | F16 | 1 | 1,000.0 | 500.0 | 2.00 | 61% | 55% |  |  |  |  |",
        "| tiny | F16 | 1 | 3.00 | 500.0 | **0.01** | 61% | 55% |  |  |  |  |",
    ]
    titles = "| model | format | threads | decode | llama.cpp | ratio | % of the bandwidth |"
    assert markdown([decode("b", "F16", 1)]).splitlines()[0] == titles
    assert markdown([agreement()]) == ""


def test_rows_are_in_order_of_model_format_and_threads() -> None:
    formats = ["F16", "Q6_K", "Q2_K", "Q5_K_M", "Q4_K_M", "Q8_0", "Q4_0"]
    found = [
        record
        for format in formats
        for model in (f"small.{format}", f"large-{format.lower()}")
        for threads in (16, 2)
        for record in (decode(model, format, threads, theirs=1.0), prefill(model, format, threads, theirs=1.0))
    ]
    rows = [tuple(row.split(" | ")[:3]) for row in markdown(found).splitlines()[2:]]
    in_order = ["Q4_0", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K", "F16", "Q2_K"]
    assert rows == [(f"| {m}", f, t) for m in ("large", "small") for f in in_order for t in ("2", "16")]


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (prefill("a", "Q8_0", 1, ours=999.0), "| 999.0 | 500.0 | **2.00** | 61% | 55% |"),
        (prefill("a", "Q6_K", 1, ours=700.0, share=0.59), "| 700.0 | 500.0 | 1.40 | **59%** | 55% |"),
        (prefill("a", "F16", 1, ours=550.0, share=0.1), "| 550.0 | 500.0 | 1.10 | 10% | 55% |"),
        (decode("a", "Q6_K", 1, ours=6.2, share=0.89), "| 6.20 | 6.00 | **1.03** | **89%** |"),
        (decode("a", "F16", 1, ours=6.0, share=0.9), "| 6.00 | 6.00 | 1.00 | 90% |"),
    ],
)
def test_missed_goals_are_bold(line: Line, row: str) -> None:
    _, _, found, *rest = markdown([line]).splitlines()
    assert found == f"| a | {line.format} | 1 {row}"
    assert bool(rest) is ("**" in row) is bool([*line.shortfalls()])


def test_other_tests_have_separate_tables() -> None:
    deep = decode("a", "Q4_0", 1, kind="deep decode", test="tg8@99", theirs=3.0, share=0.8, note="and more")
    found: list[Record] = [
        Memory("b", peak=3 << 20, cache=1 << 20, file=1 << 20),
        replace(deep, kind="start", test="start, s", ours=0.5, theirs=0.6, share=None, note=""),
        replace(deep, kind="small", test="tg200", theirs=10.0, share=None, note=""),
        replace(deep, kind="batch", test="8 at once", theirs=2.0, against="one sequence", share=None, note=""),
        deep,
        prefill("a", "Q4_0", 1, kind="deep prefill", test="pp99", share=None, share_of_highest=None),
        decode("a", "Q4_0", 1),
    ]
    _, *tables, legend = markdown(found).split("\n\n")
    assert "\n\n".join(tables).splitlines() == [
        *("Long contexts:", ""),
        "| model | format | threads | test | localllm | llama.cpp | ratio | % of the bandwidth | note |",
        f"{'| --- ' * 9}|",
        "| a | Q4_0 | 1 | tg8@99 | 9.00 | 3.00 | 3.00 | 80% | and more |",
        "| a | Q4_0 | 1 | pp99 | 1,000.0 | 500.0 | 2.00 |  |  |",
        *("", "Several sequences at once:", ""),
        "| model | format | threads | test | localllm | one sequence | ratio |",
        f"{'| --- ' * 7}|",
        "| a | Q4_0 | 1 | 8 at once | 9.00 | 2.00 | 4.50 |",
        *("", "Small models:", ""),
        "| model | format | threads | test | localllm | llama.cpp | ratio |",
        f"{'| --- ' * 7}|",
        "| a | Q4_0 | 1 | tg200 | 9.00 | 10.0 | **0.90** |",
        *("", "Start, in seconds to the first token:", ""),
        "| model | format | threads | test | localllm | llama.cpp | ratio |",
        f"{'| --- ' * 7}|",
        "| a | Q4_0 | 1 | start, s | 0.50 | 0.60 | 1.20 |",
        *("", "Memory:", ""),
        "| model | peak, MiB | at most, MiB | times the file, without the cache |",
        f"{'| --- ' * 4}|",
        "| b | 3 | 145 | 2.00 |",
    ]
    assert legend == "Bold figures are below the goal."
    assert "| tiny | **257** | 257 | 2.60 |" in markdown([memory(270_000_001)])


# -- The journal ---------------------------------------------------------------------------------------------------


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    records: list[Record] = [LINE, agreement(), memory(1), Trial("tiny", True, False, 1.0, 2.0)]
    first = Journal(path, resume=True)
    assert first.known("a") is None
    first.finish("a", records)
    first.finish("b", [])
    with path.open("a") as file:
        file.write('{"job": "c", "rec')
    again = Journal(path, resume=True)
    assert (again.known("a"), again.known("b"), again.known("c")) == (records, [], None)
    again.finish("c", [LINE])
    assert [json.loads(line)["job"] for line in path.read_text().splitlines()] == ["a", "b", "c"]
    assert Journal(path, resume=False).known("a") is None
    assert not path.read_text()


# -- Ceilings ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = replace(SHAPES["llama-1.1b"], n_layers=8, n_embd=256, n_ff=512, n_heads=16, n_kv_heads=8, n_vocab=1000)
    return random_gguf(tmp_path_factory.mktemp("model") / "small.gguf", shape, "q5_k_m")


def test_products_by_the_width_of_codes(small_model: Path) -> None:
    """In four of eight layers (1, 4, 7 and 8), values and ffn_down are Q6_K."""
    query_key_output, value, ffn = 2 * 256 * 256 + 256 * 128, 256 * 128, 256 * 512
    layers, head = products_by_bits(small_model)
    assert layers == Counter({5: 8 * (query_key_output + 2 * ffn) + 4 * (value + ffn), 6: 4 * (value + ffn)})
    assert head == Counter({6: 1000 * 256})


@pytest.mark.ci  # compiles the measurement
def test_ceilings_sum_the_time_of_each_product(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rates:
        def __init__(self, threads: int, n_bytes: int) -> None:
            assert threads == 1

        def dot_rate(self, bits: int) -> float:
            return {4: 4e6, 5: 2e6, 6: 1e6}[bits]

        def fma_rate(self) -> float:
            return 1e5

        def close(self) -> None: ...

    monkeypatch.setattr("tests.benchmarks.ours.Roofline", Rates)
    layers, head = products_by_bits(small_model)
    with Ours(small_model, 1, 32) as ours, Ceilings(ours.info) as ceilings:
        own, highest = ceilings.prefill_seconds(10)
        attention = 10 * 5.5 * 2 * 8 * 256 / 1e5  # a token sees 5.5 positions on average, in 8 layers
        assert own == pytest.approx(10 * (layers[5] / 2e6 + layers[6] / 1e6) + head[6] / 1e6 + attention)
        assert highest == pytest.approx((10 * layers.total() + head.total()) / 4e6 + attention)
        per_token = ceilings.cache_bytes(2, 10) / (2 * 2 * 128 * 8)  # keys and values, 2 bytes, width 128, 8 layers
        assert per_token == pytest.approx(11.5)


def test_localllm_returns_logits_and_generates_together(small_model: Path) -> None:
    with Ours(small_model, 1, 64, parallel=3) as ours:
        ids = [1, 5, 9]
        prefill, decode, generated = ours.measure(ids, 4)
        assert min(prefill, decode) > 0
        assert len(generated) == 4
        assert ours.logits(ids).argmax() == generated[0]
        assert ours.measure_together([[1, 5], [1, 6], [1, 7]], 4) > 0


# -- The command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the command with made-up measurements; return its exit code and the measurements."""
    made: list[str] = []

    def run(*arguments: str, peak: int = 1, error: float = 1e-2) -> tuple[int, list[str]]:
        results: dict[str, list[Record]] = {
            "trial": [Trial("tiny", True, True, 1.0, 1.0)],
            "speed": [LINE, agreement(relative_error=error)],
            "batch": [replace(LINE, kind="batch", test="8 at once")],
            "peak_memory": [memory(peak)],
        }

        def fake(name: str) -> Any:
            def measurement(path: Path, threads: int, *_: object) -> list[Record]:
                made.append(f"{name} {path.stem} {threads}")
                return results[name]

            return measurement

        made.clear()
        for name in results:
            monkeypatch.setattr(measure, name, fake(name))
        monkeypatch.setattr(theirs, "version", lambda: "llama.cpp")
        monkeypatch.setattr(sys, "argv", ["compare", *arguments, "--results", str(tmp_path / "results.jsonl")])
        return main(), list(made)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A file in place of a model."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def test_the_command_prints_its_results(command: Any, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, made = command(tiny, "-t", "1,2", "--tests", "pp,tg,memory", "--markdown")
    assert (code, made) == (0, ["trial tiny 2", "speed tiny 1", "speed tiny 2", "peak_memory tiny 2"])
    out, err = capsys.readouterr()
    assert out.count("| tiny | Q4_0 | 2 | 9.00 | 6.00 | 1.50 | 95% |") == 2  # made-up, so the same for both
    assert "\nMemory:\n" in out
    assert "differ" not in err


def test_a_resumed_command_measures_missing_results(
    command: Any, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command(tiny, "-t", "1", "--tests", "pp,tg")
    _, made = command(tiny, "-t", "1", "--tests", "pp,tg,batch", "--resume")
    assert made == ["batch tiny 1"]
    out, _ = capsys.readouterr()
    assert out.count("tg64") == 2  # measured, then read from the journal
    assert "below the goal: tiny, 2 threads, 8 at once: 1.50 times as fast" in out
    _, made = command(tiny, "-t", "1", "--tests", "pp,tg", "-n", "7", "--resume")
    assert made == ["trial tiny 1", "speed tiny 1"]


def test_a_changed_file_is_measured_again(command: Any, tiny: str, tmp_path: Path) -> None:
    flags = ("-t", "1", "--tests", "batch")
    other = tmp_path / "other" / "tiny.gguf"
    other.parent.mkdir()
    other.write_bytes(b"GGUF")
    assert command(tiny, *flags)[1] == ["batch tiny 1"]
    assert command(tiny, *flags, "--resume")[1] == []
    assert command(str(other.parent / ".." / "tiny.gguf"), *flags, "--resume")[1] == []  # the same file
    assert command(str(other), *flags, "--resume")[1] == ["batch tiny 1"]
    Path(tiny).write_bytes(b"GGUF and more")
    assert command(tiny, str(other), *flags, "--resume")[1] == ["batch tiny 1"]
    os.utime(tiny, ns=(0, 0))
    assert command(tiny, *flags, "--resume")[1] == ["batch tiny 1"]


def test_a_changed_program_is_measured_again(command: Any, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (tiny, "-t", "1", "--tests", "batch", "--resume")
    assert command(*flags)[1] == ["batch tiny 1"]
    monkeypatch.setattr(compare_llama_cpp, "program_version", lambda: "another")
    assert command(*flags)[1] == ["batch tiny 1"]
    assert command(*flags)[1] == []


def test_the_version_of_the_program_depends_on_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout, the other packages are links inside localllm."""
    for folder in (folders := ("localllm/cli", "kernels/cpu", "models", "quant")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "code.py").write_text("x = 1\n")
    for name in ("kernels", "models", "quant"):
        (tmp_path / "localllm" / name).symlink_to(tmp_path / name)
    monkeypatch.setattr(localllm, "__file__", str(tmp_path / "localllm" / "__init__.py"))
    before = program_version()
    assert before.startswith(f"{localllm.__version__} ")
    assert program_version() == before
    for folder in folders:
        code = tmp_path / folder / "code.py"
        code.write_text("x = 2\n")
        assert program_version() != before
        code.write_text("x = 1\n")
        assert program_version() == before
        code = code.rename(code.with_name("renamed.py"))
        assert program_version() != before
        code.rename(code.with_name("code.py"))


@pytest.mark.parametrize(("changes", "words"), [({"peak": 10**9}, "memory peaks"), ({"error": 0.5}, "logits differ")])
def test_the_command_fails_on_faults(
    command: Any, tiny: str, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SystemExit, match="unknown test pq"):
        command(tiny, "--tests", "pq")
    code, _ = command(tiny, "-t", "1", "--tests", "tg,memory", **changes)
    assert code == 1
    assert words in capsys.readouterr().err
