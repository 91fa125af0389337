"""``localllm bench``: the table, the JSON line, and the calculation of the machine's limits."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm import LLM
from localllm.bench.model_speed import Measurement, measure
from localllm.bench.workload import ModelCost, Test, make_tests, products
from localllm.cli.commands import bench
from localllm.kernels.cpu.costs import OperationCost
from localllm.quant.types import GGMLType
from tests.helpers.command_line import Outcome, run_main
from tests.helpers.tiny_models import tiny_gguf

Bench = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore other programs on the machine."""
    monkeypatch.setattr(bench, "disturbance", lambda other_cpus, scatter: None)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("bench") / "tiny.gguf", type=GGMLType.Q8_0, intermediate_size=160)


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes], path: Path) -> Bench:
    return lambda *flags: run_main(capfdbinary, "bench", "-m", path, *flags)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with localllm.load(path, device="reference") as llm:
        yield llm


def test_the_table(run: Bench) -> None:
    outcome = run("--device", "reference", "-p", "8,20", "-n", "4", "-d", "0,10", "-r", "2")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert "reference (numpy), 1 thread, 31 tokens of context" in lines[0]
    assert lines[2].split() == ["test", "threads", "tok/s", "achieved", "ceiling", "share", "predicted"]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[3:]]
    assert [row[0] for row in rows] == ["pp8", "pp20", "tg4", "pp8 @ d10", "pp20 @ d10", "tg4 @ d10"]
    assert all(row[1].split()[0] == "1" for row in rows)
    assert all("±" in line and line.split()[-3:] == ["-"] * 3 for line in lines[3:])


def test_json_comes_alone(run: Bench, path: Path) -> None:
    outcome = run("--device", "reference", "-p", "6", "-n", "3", "-r", "2", "--json")
    report = json.loads(outcome.out)
    assert report["model"] == str(path)
    assert (report["device"], report["file_type"]) == ("reference", "Q8_0")
    first, last = report["results"]
    assert (first["test"], first["n_tokens"], first["depth"], first["unit"]) == ("pp", 6, 0, "MAC/s")
    assert (last["test"], last["n_tokens"], last["threads"], last["unit"]) == ("tg", 3, 1, "B/s")
    for result in (first, last):
        assert len(result["repetitions"]) == 2
        assert min(result["repetitions"]) > 0
        assert result["ceiling"] is result["share"] is None


def test_the_type_of_the_cache(run: Bench) -> None:
    flags = ("--device", "reference", "-p", "4", "-n", "0", "-r", "1", "--json", "--cache-type")
    assert json.loads(run(*flags, "q8_0").out.splitlines()[-1])["cache_type"] == "q8_0"
    assert "--cache-type: 'banana' is not one of 'f16', 'q8_0'" in run(*flags, "banana").err


def test_several_models_and_other_forms(capfdbinary: pytest.CaptureFixture[bytes], path: Path) -> None:
    flags = ("--device", "reference", "-p", "6", "-n", "0", "-pg", "5,3", "-r", "2", "-q")

    def bench(form: str) -> str:
        outcome = run_main(capfdbinary, "bench", *flags, "-o", form, path, "-m", "demo")
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.out

    names = ["pp6", "pp5+tg3"] * 2
    table = bench("table").splitlines()
    assert [line.split()[0] for line in table if line.startswith("pp")] == names
    assert [size in line for line, size in ((table[0], " kB; reference"), (table[6], " 4.57 MB; reference"))] == [
        True
    ] * 2
    head, rule, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in bench("md").splitlines())
    assert head[:4] == ["model", "size", "device", "test"]
    assert rule == ["---", *["---:"] * (len(head) - 1)]
    assert [(row[1][-2:], row[3], len(row)) for row in rows] == [
        (unit, name, len(head)) for unit, name in zip(["kB", "kB", "MB", "MB"], names, strict=True)
    ]
    lines = [json.loads(line) for line in bench("jsonl").splitlines()]
    assert [(line["test"], line["model"].rsplit("/")[-1]) for line in lines] == list(
        zip(names, [path.name] * 2 + ["demo.gguf"] * 2, strict=True)
    )
    table_of_text = list(csv.DictReader(bench("csv").splitlines()))
    assert [row["test"] for row in table_of_text] == names
    assert list(table_of_text[0]) == list(lines[0])
    assert all(float(row["tokens_per_s"]) > 0 for row in table_of_text)
    assert [json.loads(line)["results"][1]["n_tokens"] for line in bench("json").splitlines()] == [8, 8]


def test_the_file_may_be_a_word_of_its_own(capfdbinary: pytest.CaptureFixture[bytes], path: Path) -> None:
    flags = ("--device", "reference", "-p", "4", "-n", "0", "-r", "1", "--json")
    for arguments in (("bench", path, *flags), ("bench", *flags, path)):
        outcome = run_main(capfdbinary, *arguments)
        assert json.loads(outcome.out.splitlines()[-1])["model"] == str(path)


def test_ceilings_on_the_processor(run: Bench) -> None:
    outcome = run("-p", "16", "-n", "4", "-t", "1,2", "-r", "1", "--json", "-q")
    assert (outcome.code, outcome.err) == (0, "")
    results = json.loads(outcome.out.splitlines()[-1])["results"]
    assert [(r["test"], r["threads"]) for r in results] == [("pp", 1), ("tg", 1), ("pp", 2), ("tg", 2)]
    for result in results:
        assert result["share"] == pytest.approx(result["achieved"] / result["ceiling"])
        assert result["share"] > 0


def test_each_test_evaluates_what_it_says(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is new each time, but the context before it is cached; generation starts at its depth."""
    seen: list[tuple[int, int, int]] = []
    real = LLM.generate

    def generate(self: LLM, prompt: Any, **options: Any) -> Any:
        done = real(self, prompt, **options)
        seen.append((done.usage.prompt_tokens, done.usage.cached_tokens, done.usage.completion_tokens))
        return done

    monkeypatch.setattr(LLM, "generate", generate)
    measure(llm, Test("pp", 20, 0), 2)
    assert seen == [(20, 0, 0)] * 3
    seen.clear()
    measure(llm, Test("pp", 20, 30), 2)
    assert [counts for counts in seen if counts[0] == 50] == [(50, 30, 0)] * 3
    seen.clear()
    measure(llm, Test("tg", 5, 0), 2)
    assert [(prompt, new) for prompt, _, new in seen] == [(1, 6)] * 3
    seen.clear()
    measure(llm, Test("tg", 5, 30), 2)
    assert seen[1:] == [(30, 29, 6)] * 2


def test_lists_of_tests() -> None:
    assert [test.name for test in make_tests([512, 0], [128], [0, 64])] == [
        "pp512",
        "tg128",
        "pp512 @ d64",
        "tg128 @ d64",
    ]
    assert [test.name for test in make_tests([0], [0], [0, 8], [[5, 3]])] == ["pp5+tg3", "pp5+tg3 @ d8"]
    assert Test("tg", 5, 0).context == 7
    assert Test("pg", 5, 8, 3).context == 17
    assert Test("pp", 5, 100).context == 106


def test_the_work_of_a_model(llm: LLM) -> None:
    """Calculated by hand for 3 layers of width 64, 4 query and 2 key/value heads of 16, and 300 tokens.

    The matrix from width 160 to 64 is Q8_0 like all others.
    """
    work = ModelCost.of(llm.info)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160
    assert work.layer_products == (3 * layer, 0)
    assert work.head_products == (300 * 64, 0)
    assert work.kv_bytes == 3 * 2 * 2 * 16 * 2
    assert work.attention_products == 3 * 4 * 16 * 2
    assert work.weight_bytes == llm.info.placement.multiplied
    assert work.windows == {None: 1}


def test_weights_in_floats_are_float_products(tmp_path: Path) -> None:
    """In a file without an output matrix the embedding replaces it."""
    path = tiny_gguf(tmp_path / "f32.gguf", tie_word_embeddings=True)
    with localllm.load(path, device="reference") as llm:
        work = ModelCost.of(llm.info)
    assert work.layer_products[0] == work.head_products[0] == 0
    assert work.head_products[1] == 300 * 64


def test_what_counts_is_the_format_that_kernels_read() -> None:
    """An IQ4_XS matrix is converted to IQ4_NL, whose products use bytes."""

    def cost(type: GGMLType, n_products: int) -> OperationCost:
        return OperationCost("matrix", 0, type, 1, 1, n_products)

    assert products([cost(GGMLType.IQ4_XS, 512), cost(GGMLType.Q4_0, 96), cost(GGMLType.F16, 35)]) == (608, 35)


def test_a_busy_machine_is_told(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    seen: list[tuple[float, float]] = []
    monkeypatch.setattr(bench, "disturbance", lambda *given: seen.append(given) or "too much noise")
    flags = ("--device", "reference", "-p", "4", "-n", "0", "-r", "1", "--json", "-q")
    outcome = run_main(capfdbinary, "bench", path, *flags)
    assert outcome.err == "localllm: warning: too much noise\n"
    assert json.loads(outcome.out.splitlines()[-1])["other_cpus"] == seen[0][0]
    assert seen[0][1] == 1


def test_a_context_longer_than_trained_on_is_no_matter(capfdbinary: pytest.CaptureFixture[bytes], path: Path) -> None:
    """There is no flag -c to set it.  A single repetition has no spread, and -q keeps warnings of noise."""
    flags = ("--device", "reference", "-p", "200", "-n", "0", "-r", "1", "-q")
    outcome = run_main(capfdbinary, "bench", path, *flags)
    assert outcome.err == ""
    assert "±" not in outcome.out


def test_what_a_test_costs() -> None:
    work = ModelCost(
        weight_bytes=1000, kv_bytes=10, layer_products=(100, 20), head_products=(7, 0), attention_products=4
    )
    # At depth 5, the two tokens attend to 6 and 7 tokens.
    assert work.bytes_per_token(Test("tg", 2, 5)) == 1000 + 10 * 6.5
    assert work.products(Test("pp", 2, 5)) == (207, 40 + 4 * (6 + 7))
    narrow = ModelCost(1000, 10, (0, 0), (0, 0), 4, {6: 1.0})
    assert narrow.bytes_per_token(Test("tg", 2, 5)) == 1000 + 10 * 6


def test_a_share_compares_each_repetition_with_its_own_ceiling() -> None:
    measurement = Measurement(Test("tg", 8, 0), 2, "B/s", (1.0, 2.0, 4.0), (10.0, 20.0, 40.0), (20.0, 100.0, 100.0))
    assert measurement.share == 0.4
    assert measurement.scatter == 5
    assert list(measurement.cells()) == ["tg8", "2", "2.00 ± 1.53", "20 B/s", "100 B/s", "40%", "-"]
