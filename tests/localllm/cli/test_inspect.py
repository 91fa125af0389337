"""``localllm inspect``: the file's metadata, abbreviated, without terminal control sequences."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.quant.types import GGMLType
from tests.helpers.command_line import Outcome, run_main, run_on_terminal
from tests.helpers.data import shared_data
from tests.helpers.gguf_writer import write_gguf

Inspect = Callable[..., Outcome]

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 2,
    "a.bool": True,
    "a.float": 1e-5,
    "a.infinity": float("inf"),
    "a.text": "one\ntwo \x1b[2J",
    "a.bad_text": b"caf\xe9",
    "a.long_text": "x" * 100,
    "a.numbers": np.arange(20, dtype=np.int32),
    "a.texts": [f"word {i}" for i in range(12)],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {
        "token_embd.weight": np.zeros((48, 64), np.float32),
        "blk.0.attn_q.weight": (GGMLType.Q4_0, (64, 64), bytes(64 * 36)),
        "blk.0.attn_norm.weight": np.ones(64, np.float32),
    }
    return write_gguf(tmp_path_factory.mktemp("inspect") / "model.gguf", METADATA, tensors)


@pytest.fixture
def inspect(capfdbinary: pytest.CaptureFixture[bytes], path: Path) -> Inspect:
    def run(*flags: object) -> Outcome:
        outcome = run_main(capfdbinary, "inspect", path, *flags)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome

    return run


@pytest.mark.parametrize("words", [["inspect"], ["inspect", "demo"], ["inspect", "-m", "demo", "--plan"]])
def test_the_demo_model(capfdbinary: pytest.CaptureFixture[bytes], words: list[str]) -> None:
    outcome = run_main(capfdbinary, *words)
    assert (outcome.code, outcome.err) == (0, "")
    assert "demo.gguf: GGUF version 3" in outcome.out.splitlines()[0]


def test_metadata_and_tensors(inspect: Inspect, path: Path) -> None:
    lines = inspect().out.splitlines()
    assert lines[0] == f"{path}: GGUF version 3, {path.stat().st_size / 1000:.3g} kB"
    assert lines[1] == "llama, 7.23K parameters (7,232), Q4_0"
    found = {" ".join(line.split()) for line in lines}
    assert {
        "a.bool bool: true",
        "a.float float: 1e-05",
        'a.infinity float: "inf"',
        r'a.text text: "one\ntwo \u001b[2J"',
        r'a.bad_text text, not valid UTF-8: "caf\\xe9"',
        f'a.long_text text: "{"x" * 80}" … 20 more',
        "a.numbers array of 20 int32: [0, 1, 2, 3, 4, 5, 6, 7] … 12 more",
        'a.texts array of 12 texts: ["word 0", "word 1", "word 2", "word 3", "word 4", "word 5", "word 6", '
        '"word 7"] … 4 more',
        "token_embd.weight F32 48 × 64 12.3 kB",
        "blk.0.attn_q.weight Q4_0 64 × 64 2.3 kB",
        "blk.0.attn_norm.weight F32 64 256 B",
        "F32 2 tensors 3.14K values 12.5 kB 32.000 bits a value",
        "Q4_0 1 tensors 4.1K values 2.3 kB 4.500 bits a value",
    } <= found


def test_one_half_only(inspect: Inspect) -> None:
    both, metadata, tensors = (inspect(*flags).out for flags in ([], ["--metadata"], ["--tensors"]))
    assert both == f"{metadata}\n{tensors}"
    assert "attn_q" not in metadata
    assert "a.float" not in tensors


def test_full(inspect: Inspect) -> None:
    out = inspect("--full").out
    assert "more" not in out
    assert f'"{"x" * 100}"' in out
    assert '"word 11"]' in out


def test_json(inspect: Inspect, path: Path) -> None:
    found = json.loads(inspect("--json").out, parse_constant=pytest.fail)
    assert found["files"] == [str(path)]
    assert (found["version"], found["n_bytes"]) == (3, path.stat().st_size)
    assert (found["n_tensors"], found["n_parameters"], found["file_type"]) == (3, 7232, "Q4_0")
    assert found["n_tensor_bytes"] == 4 * (48 * 64 + 64) + 64 * 36
    metadata = found["metadata"]
    assert list(metadata) == list(METADATA)
    assert metadata["a.text"] == {"type": "text", "value": METADATA["a.text"], "left_out": 0}
    assert metadata["a.float"]["value"] == 1e-5
    assert metadata["a.numbers"] == {"type": "array of 20 int32", "value": list(range(8)), "left_out": 12}
    q = found["tensors"][1]
    assert (q["name"], q["type"], q["shape"], q["n_bytes"]) == ("blk.0.attn_q.weight", "Q4_0", [64, 64], 64 * 36)
    full = json.loads(inspect("--json", "--full", "--metadata").out)
    assert full["metadata"]["a.texts"]["value"] == METADATA["a.texts"]
    assert "tensors" not in full
    assert "metadata" not in json.loads(inspect("--json", "--tensors").out)


def test_files_that_are_no_models(capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    bare = write_gguf(tmp_path / "bare.gguf", {"general.name": "bare"})
    assert "no general.architecture: not a model" in run_main(capfdbinary, "inspect", bare).out
    other = write_gguf(tmp_path / "other.gguf", {"general.architecture": "not-there"})
    assert "not-there, which localllm cannot run, 0 parameters" in run_main(capfdbinary, "inspect", other).out


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_no_control_characters(tmp_path: Path) -> None:
    hostile = "a\x1b[2J\x07\x9b\u202e"
    path = write_gguf(
        tmp_path / "hostile.gguf",
        {"general.architecture": hostile, f"key{hostile}": hostile},
        {f"tensor{hostile}": np.zeros(4, np.float32)},
    )
    code, text = run_on_terminal(["inspect", path])
    assert code == 0
    assert text.count(r"\x1b[2J\x07\x9b\u202e") >= 3
    assert not any((c < " " and c not in "\r\n") or "\x7f" <= c < "\xa0" or c == "\u202e" for c in text)


def test_the_file_may_stand_behind_a_flag(capfdbinary: pytest.CaptureFixture[bytes], path: Path) -> None:
    bare = run_main(capfdbinary, "inspect", path, "--metadata")
    assert bare.code == 0
    assert run_main(capfdbinary, "inspect", "--metadata", "-m", path) == bare


def test_a_real_file(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = shared_data("models/story656K/TinyStories-656K-Q8_0.gguf")
    found = json.loads(run_main(capfdbinary, "inspect", path, "--json").out)
    assert found["n_parameters"] == 656_000
    assert found["metadata"]["tokenizer.ggml.tokens"]["left_out"] == 2040
    assert found["metadata"]["llama.attention.layer_norm_rms_epsilon"]["value"] == 1e-6
