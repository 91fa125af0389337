"""``localllm evaluate``: the library's measurements as tables, charts and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import localllm
from localllm import UsageError
from localllm.cli.chart import Point, svg_chart, text_chart
from localllm.cli.commands.evaluate import bars
from localllm.evaluate import BaseLogits, divergence, perplexity
from tests.helpers.command_line import Outcome, run_main
from tests.helpers.tiny_models import config, random_weights, write_gguf

TEXT = "".join(chr(97 + i * i % 26) for i in range(90))

Evaluate = Callable[..., Outcome]


def tiny(path: Path, seed: int) -> Path:
    settings = config(num_hidden_layers=1)
    return write_gguf(path, settings, random_weights(settings, seed=seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate")
    for seed, name in enumerate(("one.gguf", "two.gguf")):
        tiny(path / name, seed)
    (path / "text").write_text(TEXT)
    return path


@pytest.fixture
def evaluate(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Evaluate:
    monkeypatch.chdir(folder)
    return lambda *words: run_main(capfdbinary, "evaluate", *words, "--device", "reference")


def test_perplexity_then_divergence(evaluate: Evaluate, folder: Path) -> None:
    outcome = evaluate("one.gguf", "-f", "text", "-c", 16, "--save-logits", "base", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    *lines, last = outcome.out.splitlines()
    measured = json.loads(last)
    with localllm.load(folder / "one.gguf", device="reference") as llm:
        expected = perplexity(llm, TEXT, context=16)
    assert measured["perplexity"] == expected.perplexity._asdict()
    assert (measured["n_tokens"], measured["n_chunks"], measured["context"]) == (expected.n_tokens, 5, 16)
    assert lines[1].startswith(f"perplexity              {expected.perplexity.value:.4f} ± ")
    assert lines[1].endswith("tokens in 5 chunks of 16)")

    outcome = evaluate("-m", "two.gguf", "--base-logits", "base", "--chunks", 3, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    *lines, last = outcome.out.splitlines()
    with localllm.load(folder / "two.gguf", device="reference") as llm:
        far = divergence(llm, BaseLogits.read(folder / "base"), chunks=3)
    measured = json.loads(last)
    assert measured["kl"] == far.kl._asdict()
    assert measured["kl_percentiles"]["99.9"] == far.kl_percentiles[99.9]
    assert f"KL divergence           {far.kl.value:.6f} ± {far.kl.error:.6f}" in lines
    assert any(line.startswith("same likeliest token    ") for line in lines)


def test_models_are_compared(evaluate: Evaluate, folder: Path) -> None:
    drawn = folder / "drawn.svg"
    outcome = evaluate(
        "one.gguf", "-f", "text", "-c", 16, "--compare", "two.gguf", "one.gguf", "--json", "--svg", drawn
    )
    assert "two.gguf" in drawn.read_text("utf-8")
    assert (outcome.code, outcome.err) == (0, "")
    one, two = json.loads(outcome.out.splitlines()[-1])["compared"][::-1]
    assert abs(one["kl"]["value"]) < 1e-6 < two["kl"]["value"]
    assert "  a two.gguf " in outcome.out
    assert "  b one.gguf " in outcome.out
    assert f"{two['kl']['value']:.5f}" in outcome.out
    evaluate("one.gguf", "-f", "text", "-c", 16, "--save-logits", "kept", "-q")
    outcome = evaluate("one.gguf", "-f", "text", "-c", 16, "--save-logits", "kept")
    assert "kept already exists" in outcome.error()
    outcome = evaluate("two.gguf", "--base-logits", "kept", "--compare", "one.gguf", "--json", "-q")
    compared = json.loads(outcome.out)["compared"]
    assert [Path(each["model"]).name for each in compared] == ["two.gguf", "one.gguf"]
    assert compared[0]["kl"] == two["kl"]
    assert evaluate("demo", "-f", "text", "-c", 16, "--compare", "demo", "-q").code == 0


def test_questions(evaluate: Evaluate, folder: Path) -> None:
    question: dict[str, Any] = {"prompt": "abc", "choices": ["d", "e"]}
    lines = [json.dumps(question | {"answer": answer}) for answer in (0, 1)]
    (folder / "questions").write_text("\n".join(lines))
    outcome = evaluate("one.gguf", "--choices", "questions", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert "right answers           50.00 ± 50.00 % of 2 questions" in outcome.out
    assert json.loads(outcome.out.splitlines()[-1])["accuracy"] == {"value": 0.5, "error": 0.5}


def test_quiet_without_json_says_nothing(evaluate: Evaluate) -> None:
    assert evaluate("one.gguf", "-f", "text", "-c", 16, "-q") == Outcome(0, "", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "choose exactly one of -f FILE (text), --base-logits FILE and --choices FILE"),
        (["-f", "text", "--choices", "q"], "choose exactly one of -f FILE"),
        (["--base-logits", "b", "--save-logits", "c"], "--save-logits needs text"),
        (["--choices", "q", "--compare", "two.gguf"], "--compare needs text or logits"),
        (["-f", "text", "--svg", "drawn.svg"], "--svg draws the results of --compare"),
        (
            ["-f", "text", "--compare", "two.gguf", "--svg", "no/where.svg"],
            "no/where.svg is in a folder that does not exist",
        ),
        (["-f", "nowhere"], "nowhere cannot be read (No such file or directory)"),
        (["-f", "/dev/zero"], "/dev/zero is larger than 64 MiB, the maximum for text"),
        (["-f", 9999 * "x"], "… "),
        (["--base-logits", "text"], "text is not a file of base logits"),
        (["-f", "text", "-c", "100"], "tokens, but at least 200 are needed for chunks of 100"),
        (["-f", "text", "-c", "3"], "'3' is not a whole number of at least 4"),
    ],
)
def test_what_cannot_be_done(evaluate: Evaluate, words: list[str], message: str) -> None:
    outcome = evaluate("one.gguf", *words)
    assert outcome.code == 2
    assert message in outcome.err


def test_bars_go_from_the_lowest_to_the_highest() -> None:
    assert bars([1, 2, 3, 8]) == "▁▂▃█"
    assert bars([5, 5]) == "▁▁"


def test_a_chart_has_its_points_in_the_corners_they_belong_to() -> None:
    points = [Point(1e9, 0.5), Point(4e9, 0.005, "<b>"), Point(2e9, 0.05)]
    lines = text_chart(points)
    assert lines[2] == "      0.5 │a"
    assert lines[11] == "    0.005 │" + " " * 59 + "b"
    assert [line.index("c") for line in lines if line.endswith("c")] == [11 + round(59 / 2)]
    assert lines[-1] == "           1 GB" + " " * 52 + "4 GB"
    assert text_chart([Point(1e9, 0.5), Point(2e9, 0.0)]) == []
    circles = ElementTree.fromstring(svg_chart({"": points})).findall("{*}circle")
    places = [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in circles]
    assert places == sorted(places)  # from small with much loss to large with little
    assert len({x for x, _ in places}) == len({y for _, y in places}) == 3
    assert "&lt;b&gt;" in svg_chart({"": points})
    with pytest.raises(UsageError, match="no loss to draw"):
        svg_chart({"": [Point(1e9, 0.0)]})
