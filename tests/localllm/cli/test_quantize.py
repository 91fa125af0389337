"""``localllm quantize``: the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localllm.cli import main
from localllm.cli.parser import command_of
from localllm.errors import UsageError
from localllm.gguf import GGUFFile
from localllm.quant.types import GGMLType
from tests.helpers.command_line import Outcome, run_main
from tests.helpers.gguf_writer import write_gguf

Run = Callable[..., Outcome]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights = {
        "token_embd.weight": rng.standard_normal((32, 256)).astype(np.float32),
        "output_norm.weight": np.ones(256, np.float32),
        "blk.0.attn_v.weight": rng.standard_normal((32, 256)).astype(np.float32),
    }
    return write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama", "llama.block_count": 1}, weights)


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    return lambda *arguments: run_main(capfdbinary, "quantize", *arguments)


def test_a_table_and_a_file(run: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    outcome = run(model, target, "q4_k_m", "--tensor", "attn_v=Q3_K")
    assert (outcome.code, outcome.err) == (0, "")
    rows = [line.split() for line in outcome.out.splitlines()]
    assert rows[1] == ["output_norm.weight", "256", "F32", "1.02", "kB"]
    assert rows[2][:4] == ["token_embd.weight", "32×256", "F32", "Q6_K"]
    assert rows[3][:4] == ["blk.0.attn_v.weight", "32×256", "F32", "Q3_K"]
    assert 9 < float(rows[3][-1].removesuffix("%")) < 22
    assert " ".join(rows[4]) == "66.6 kB to 11.3 kB, 5.42 bits a weight"
    with GGUFFile.open(target) as file:
        assert [tensor.type.name for tensor in file.tensors.values()] == ["F32", "Q6_K", "Q3_K"]


def test_types_that_do_not_fit_are_told_with_what_they_cost(run: Run, tmp_path: Path) -> None:
    weights = {f"blk.{i}.attn_q.weight": np.ones((32, 576), np.float32) for i in range(2)}
    model = write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, weights)
    lines = run(model, tmp_path / "small.gguf", "Q4_K_M").out.splitlines()
    # 22 bytes for 32 values instead of 144 for 256
    assert (
        lines[-2] == "2 tensors are Q5_0, not Q4_K: their rows of 576 values are not a multiple of 256 (4.61 kB more)"
    )


def test_a_model_is_split_and_merged(capfdbinary: pytest.CaptureFixture[bytes], model: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> list[str]:
        outcome = run_main(capfdbinary, *map(str, arguments))
        assert (outcome.code, outcome.err) == (0, "")
        return [line.removeprefix(f"{tmp_path}/") for line in outcome.out.splitlines()]

    part, two = tmp_path / "part", ["part-00001-of-00002.gguf", "part-00002-of-00002.gguf"]
    sizes = [f"{two[0]}: 2 tensors, 33.8 kB", f"{two[1]}: 1 tensors, 32.8 kB"]
    assert run("split", model, part, "--max-size", "40KB", "--dry-run") == sizes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]
    assert run("gguf-split", "--split", "--split-max-tensors", 2, model, part) == sizes
    assert run("gguf-merge", tmp_path / two[1], tmp_path / "one.gguf") == ["one.gguf: 3 tensors, 66.6 kB"]
    with GGUFFile.open(model) as before, GGUFFile.open(tmp_path / "one.gguf") as after:
        assert dict(before.metadata) == {k: v for k, v in after.metadata.items() if k in before.metadata}
        assert "split.count" not in after.metadata
        for name, tensor in before.tensors.items():
            np.testing.assert_array_equal(tensor.data, after.tensors[name].data)


def test_a_dry_run_writes_nothing(run: Run, model: Path, tmp_path: Path) -> None:
    outcome = run(model, tmp_path / "small.gguf", "IQ2_XS", "--dry-run")
    assert outcome.code == 0
    assert "1 tensors need an importance matrix" not in outcome.err  # values are Q2_K there
    assert outcome.out.splitlines()[-1].startswith("66.6 kB to ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def test_json(run: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    found = json.loads(run(model, target, "Q8_0", "--json").out)
    assert (found["type"], found["files"]) == ("Q8_0", [str(target)])
    assert [tensor["to"] for tensor in found["tensors"]] == ["F32", "Q8_0", "Q8_0"]
    assert found["tensors"][0]["error"] is None
    assert 0 < found["tensors"][1]["error"] < 0.01


def test_refusals(run: Run, model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    assert "there is no type 'Q4_X': did you mean IQ4_XS? There are F32, " in run(model, small, "Q4_X").error()
    assert "is the model itself" in run(model, model, "Q8_0").error()
    outcome = run(model, small, "Q8_0", "--tensor", "Q8_0")
    assert (outcome.code, "is not REGEX=TYPE" in outcome.error()) == (2, True)
    assert run(model, small, "Q8_0", "-q").out == ""
    again = run(model, small, "Q8_0", "-q")
    assert (again.code, "already exists" in again.error()) == (1, True)
    assert "--allow-requantize" in run(small, tmp_path / "smaller.gguf", "Q4_0", "-q").error()
    assert run(small, tmp_path / "smaller.gguf", "Q4_0", "-q", "--allow-requantize").code == 0
    assert "cannot be read" in run(model, tmp_path / "new.gguf", "Q4_0", "--imatrix", tmp_path / "none").error()
    text = tmp_path / "text.txt"
    text.write_text("some words")
    late = run(model, small, "--target-size", "1GB", "-f", text)  # reported before any measurement
    assert (late.code, "already exists" in late.error()) == (1, True)
    assert "is a folder: name a file in it" in run(model, tmp_path, "Q8_0").error()


def test_an_importance_matrix_replaces_no_other_file(
    capfdbinary: pytest.CaptureFixture[bytes], model: Path, tmp_path: Path
) -> None:
    text, small = tmp_path / "text.txt", tmp_path / "small.gguf"
    text.write_text("some words")
    small.write_bytes(b"kept")

    def measure(*arguments: object) -> str:
        return run_main(capfdbinary, "imatrix", model, "-f", text, *arguments).error()

    assert "already exists" in measure("-o", small)
    assert "is the model itself" in measure("-o", model)
    assert "is a folder: name a file in it" in measure("-o", tmp_path)
    assert "--hessian needs an output file" in measure("-o", tmp_path / "i.dat", "--hessian")
    assert small.read_bytes() == b"kept"


def test_the_demo_model_by_name(run: Run, tmp_path: Path) -> None:
    assert "4.57 MB to 2" in run("demo", tmp_path / "new.gguf", "Q4_0", "--allow-requantize", "--dry-run").out
    assert "is not a regular file" in run("demo", tmp_path / "new.gguf", "Q4_0", "--imatrix", "/dev/zero").error()


NAMED = {"model": "in.gguf", "output": Path("out.gguf"), "type": "Q8_0"}


@pytest.mark.parametrize("flag", ["-o", "--output", "--outfile"])
@pytest.mark.parametrize(
    ("command", "further"),
    [
        ("convert", ["--dry-run"]),
        ("merge", ["--lora", "a.gguf"]),
        ("imatrix", ["-f", "text.txt"]),
        ("quantize", ["--pure"]),
    ],
)
def test_the_file_to_write_is_a_word_or_behind_a_flag(command: str, further: list[str], flag: str) -> None:
    declared = command_of(command).words
    assert declared is not None
    names = [name for name in declared.names if name != "threads"]
    words = [str(NAMED[name]) for name in names]
    model, _, *rest = words
    for line in (
        [*words, *further],
        [model, *further, *words[1:]],
        [model, flag, "out.gguf", *rest, *further],
        [model, *rest, *further, flag, "out.gguf"],
        [flag, "out.gguf", *further, model, *rest],
        [*further, f"{flag}=out.gguf" if flag != "-o" else "-oout.gguf", model, *rest],
    ):
        arguments = argparse.Namespace()
        main._parse([command, *line], arguments)
        assert {name: getattr(arguments, name) for name in names} == {name: NAMED[name] for name in names}, line
    for line in ([*words, flag, "other.gguf", *further], [*words, "one", "more", *further]):
        with pytest.raises(UsageError, match="too many arguments, starting with"):
            main._parse([command, *line], argparse.Namespace())
    with pytest.raises(UsageError, match="arguments are missing: write localllm"):
        main._parse([command, flag, "out.gguf", *further], argparse.Namespace())


def test_a_file_behind_a_flag_is_written(run: Run, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    assert run(model, "-o", target, "Q8_0").code == 0
    with GGUFFile.open(target) as file:
        assert file.tensors["blk.0.attn_v.weight"].type is GGMLType.Q8_0
