"""``localllm look``, its views, and their charts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm import LLM, Steering
from localllm.inspection import tools
from localllm.inspection.drawing import Bars, HeatMap, save_png
from tests.helpers.command_line import on_terminal, read_all, run_main
from tests.helpers.data import ROOT
from tests.helpers.tiny_models import tiny_gguf

DEMO = ROOT / "localllm" / "data" / "demo.gguf"
PROMPT = "Once upon a time there was a"
FLAGS = ["-p", PROMPT, "--device", "cpu", "-q"]

MAP = HeatMap(
    "two rows of shares",
    ["0", "1"],
    ["a", "long label", "中文"],
    np.array([[0, 0.5, 1], [0.99, 0.2, -0.3]], np.float32),
    [["", "50", "100"], ["99", "20", "-30"]],
)
BARS = Bars("falls", ["Once", "␣upon"], np.array([2, -1], np.float32))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localllm.load(DEMO, device="cpu", context=64) as llm:
        yield llm


def test_a_heat_map_has_a_cell_per_value() -> None:
    assert [line.split() for line in MAP.text(80).plain.splitlines()] == [
        ["two", "rows", "of", "shares"],
        ["a", "long", "label", "中文"],
        ["0", "50", "100"],
        ["1", "99", "20", "-30"],
    ]
    styles = {str(span.style) for span in MAP.text(80).spans}
    assert "black on #cbe6f5" in styles
    assert "" not in styles


@pytest.mark.parametrize("width", [1, 20, 30, 80])
def test_charts_fit_in_narrow_terminals(width: int) -> None:
    for chart in (MAP, BARS):
        assert max(line.cell_len for line in chart.text(width).split(allow_blank=True)) <= max(width, 20)
    narrow = MAP.text(20).plain
    assert all(label in narrow for label in ("50", "100", "-30", "中文"))


def test_bars_are_scaled_to_the_largest_value() -> None:
    title, first, second = BARS.text(27).plain.splitlines()
    assert (title, first, second) == ("falls", "Once   2 " + "█" * 18, "␣upon -1 " + "▒" * 9)


def test_a_png_file_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    from PIL import Image

    save_png(tmp_path / "chart.png", [MAP, BARS])
    with Image.open(tmp_path / "chart.png") as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(1 << 24)) > 100
    with pytest.raises(localllm.OutputError, match="cannot be written"):
        save_png(tmp_path / "missing" / "chart.png", [MAP])


def test_the_command_writes_a_png_file(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    path = tmp_path / "lens.png"
    flags = [flag for flag in FLAGS if flag != "-q"]
    outcome = run_main(capfdbinary, "look", DEMO, *flags, "--png", path)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", f"localllm: wrote {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_logit_lens_of_the_command(llm: LLM, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "look", DEMO, *FLAGS, "--last", 3)
    lines = outcome.out.splitlines()
    assert lines[0] == "most likely next token after each layer (row), shaded by its probability"
    assert lines[1].split() == ["␣there", "␣was", "␣a"]
    assert [line.split()[0] for line in lines[2:]] == [str(i) for i in range(llm.info.n_layers)]
    assert "\x1b" not in outcome.out
    report = json.loads(run_main(capfdbinary, "look", DEMO, *FLAGS, "--json").out)
    logits = llm.logits(llm.tokenize(PROMPT), last=1)[0].astype(np.float64)
    [best, *_] = report["layers"][-1][-1]
    assert best["token"] == llm.detokenize([int(logits.argmax())]).replace(" ", "␣")
    np.testing.assert_allclose(best["probability"], np.exp(logits.max()) / np.exp(logits).sum(), atol=1e-4)
    assert lines[-1].split()[-1] == best["token"]


def test_attention_of_the_command(llm: LLM, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = run_main(capfdbinary, "look", DEMO, *FLAGS, "--attention", "0.1,1.0").out.splitlines()
    assert [line for line in lines if line.startswith("layer")] == [
        f"layer {layer}, head {head}: attention of each token (row) to each token (column) in %"
        for layer, head in ((0, 1), (1, 0))
    ]
    heads = json.loads(run_main(capfdbinary, "look", DEMO, *FLAGS, "--attention", "0.1", "--json").out)["heads"]
    np.testing.assert_allclose(heads[0]["probabilities"], tools.attention(llm, PROMPT, [(0, 1)])[0], atol=1e-5)
    assert (
        "'5' is not a list of heads such as 0.3,5.1"
        in run_main(capfdbinary, "look", DEMO, *FLAGS, "--attention", "5").error()
    )
    assert "there is no head 99" in run_main(capfdbinary, "look", DEMO, *FLAGS, "--attention", "0.99").error()


def test_patching_and_attribution_of_the_command(llm: LLM, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    other = PROMPT.replace("there", "she")
    report = json.loads(run_main(capfdbinary, "look", DEMO, *FLAGS, "--patch", other, "--json").out)
    answer = int(llm.logits(llm.tokenize(PROMPT), last=1)[0].argmax())
    expected = tools.patch(llm, PROMPT, other, answer)
    np.testing.assert_allclose(report["effects"], expected, atol=1e-5)
    out = run_main(capfdbinary, "look", DEMO, *FLAGS, "--patch", other).out
    assert "␣there/␣s" in out
    assert out.rstrip().endswith("1.00")
    report = json.loads(run_main(capfdbinary, "look", DEMO, *FLAGS, "--attribution", "--token", " a", "--json").out)
    token = llm.tokenize(" a", add_special=False)[0]
    np.testing.assert_allclose(report["falls"], tools.attribution(llm, PROMPT, token), atol=1e-5)
    error = run_main(capfdbinary, "look", DEMO, *FLAGS, "--attribution", "--token", "an elephant").error()
    assert error.startswith("the token 'an elephant' must be a single token, but has ")


def test_experts_of_the_command(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "qwen3_moe")
    flags = ["-p", "the tin", "--device", "reference", "-q", "--experts"]
    report = json.loads(run_main(capfdbinary, "look", path, *flags, "--json").out)
    assert all(sum(counts) == 3 * report["n_tokens"] for counts in report["layers"].values())
    rows = run_main(capfdbinary, "look", path, *flags).out.splitlines()[-3:]
    shares = [100 * count / report["n_tokens"] for count in report["layers"]["0"]]
    assert rows[0].split() == ["0", *(f"{share:.0f}" for share in shares if share)]
    assert "the model has no experts" in run_main(capfdbinary, "look", DEMO, *FLAGS, "--experts").error()


def test_a_control_vector_is_made_from_two_files(
    llm: LLM, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    good, bad, vector = tmp_path / "good.txt", tmp_path / "bad.txt", tmp_path / "v.gguf"
    good.write_text("I am happy\nA bright day\n\n")
    bad.write_text("I am sad\nA dark day\n")
    flags = ["--control-vector-from", good, bad, "--device", "cpu", "-q"]
    run_main(capfdbinary, "look", DEMO, *flags, "-o", vector)
    pairs = [("I am happy", "I am sad"), ("A bright day", "A dark day")]
    expected = tools.control_vector(llm, pairs).vectors
    stored = Steering.from_gguf(vector).vectors
    assert stored.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(stored[name], values, atol=1e-5)
    assert "add -o FILE" in run_main(capfdbinary, "look", DEMO, *flags).error()
    bad.write_text("I am sad\n")
    assert "the files have 2 and 1 prompts" in run_main(capfdbinary, "look", DEMO, *flags, "-o", vector).error()


def test_a_missing_prompt_and_a_missing_matplotlib(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags in ([], ["-p", ""]):
        assert run_main(capfdbinary, "look", DEMO, *flags).error() == "look needs a prompt: add -p TEXT"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = run_main(capfdbinary, "look", DEMO, *FLAGS, "--png", "a.png").error()
    assert error == 'a PNG file needs matplotlib: pip install "localllm[plot]"'


def test_flags_of_another_view_are_refused(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    error = run_main(capfdbinary, "look", DEMO, *FLAGS, "--token", " a").error()
    assert error == "--token needs --patch or --attribution: add either"
    error = run_main(capfdbinary, "look", DEMO, *FLAGS, "-o", "a.gguf").error()
    assert error.startswith("-o is the file of --control-vector-from, which is missing: ")


@pytest.mark.posix(reason="a terminal")
@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}], ids=["colours", "NO_COLOR"])
def test_a_terminal_has_colours_unless_no_color_is_set(variables: dict[str, str]) -> None:
    with on_terminal(["look", DEMO, *FLAGS], COLUMNS="60", TERM="xterm-256color", **variables) as (process, master):
        screen = read_all(master).decode()
        assert process.wait() == 0
    assert ("48;" in screen) == (not variables)
    plain = re.sub(r"\x1b\[[\d;]*m", "", screen)
    assert max(map(len, plain.splitlines())) <= 60
