"""``localllm compare`` finds the first value with a planted fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.inspection.compare import FLOAT_ROUNDING, INTEGER_ROUNDING, Difference, differences, first_jump, table
from localllm.quant.types import GGMLType
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.command_line import run_main
from tests.helpers.tiny_models import config, random_weights, write_gguf

Array = NDArray[np.float32]

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 30)]
SETTINGS = config("qwen2")
WEIGHTS = random_weights(SETTINGS)


def swapped_heads(rows: Array) -> Array:
    heads = rows.reshape(-1, 16, *rows.shape[1:])
    return np.concatenate([heads[[1, 0]], heads[2:]]).reshape(rows.shape)


def swapped_columns(matrix: Array) -> Array:
    return np.ascontiguousarray(swapped_heads(np.ascontiguousarray(matrix.T)).T)


#: Changes of weights, and the first value that they change.
FAULTS: dict[str, tuple[str, Callable[[Array], Array], str]] = {
    "a norm without weights": ("input_layernorm.weight", np.ones_like, "queries"),
    "swapped heads of queries": ("self_attn.q_proj.weight", swapped_heads, "queries"),
    "queries without a bias": ("self_attn.q_proj.bias", np.zeros_like, "queries"),
    "swapped heads of keys": ("self_attn.k_proj.weight", swapped_heads, "keys"),
    "values without a bias": ("self_attn.v_proj.bias", np.zeros_like, "values"),
    "swapped columns of the output": ("self_attn.o_proj.weight", swapped_columns, "attention"),
    "a norm that adds one": ("post_attention_layernorm.weight", lambda w: w + 1, "mlp"),
    "a gate of one sign": ("mlp.gate_proj.weight", np.abs, "mlp"),
}
#: Faults outside the layers: names of weights or keys.
OUTSIDE: dict[str, str] = {"model.norm.weight": "final_norm", "lm_head.weight": "logits"}


def traced(path: Path, device: str) -> dict[str, Array]:
    with localllm.load(path, device=device, context=64, threads=1) as llm:
        return llm.trace(IDS, [*llm.graph])


@pytest.mark.parametrize(
    ("type", "rounding"), [(GGMLType.F32, FLOAT_ROUNDING), (GGMLType.Q8_0, INTEGER_ROUNDING)], ids=["F32", "Q8_0"]
)
def test_planted_faults_are_found_at_their_layer(tmp_path: Path, type: GGMLType, rounding: float) -> None:
    path = tmp_path / "m.gguf"
    expected = traced(write_gguf(path, SETTINGS, WEIGHTS, type=type), "reference")

    def jump(changes: dict[str, Array], **settings: Any) -> str | None:
        """Return the first value that jumps on the CPU in a model with changed weights or settings."""
        write_gguf(path, SETTINGS | settings, WEIGHTS | changes, type=type)
        found = first_jump(differences(expected, traced(path, "cpu")), rounding)
        return None if found is None else found.name

    assert jump({}) is None
    for layer in (0, 1, 2):
        for fault, (weight, change, value) in FAULTS.items():
            name = f"model.layers.{layer}.{weight}"
            assert jump({name: change(WEIGHTS[name])}) == f"layers.{layer}.{value}", fault
    for name, value in OUTSIDE.items():
        assert jump({name: WEIGHTS[name][::-1].copy()}) == value
    assert jump({}, rms_norm_eps=0.3) == "layers.0.queries"
    assert jump({}, rope_theta=3.0) == "layers.0.attention"


def test_errors_that_grow_gradually_are_no_jump() -> None:
    errors = [Difference(f"layers.{i}.output", 0.001 * 1.5**i) for i in range(12)]
    assert first_jump(errors) is None
    assert first_jump([*errors, Difference("logits", np.inf)]) == Difference("logits", np.inf)
    assert [line.split() for line in table(errors)][:2] == [["layer", "output"], ["0", "1.0e-03"]]


def test_the_command_compares_devices(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = write_gguf(tmp_path / "m.gguf", SETTINGS, WEIGHTS)
    flags = ["-p", "the tin", "--device", "cpu", "-q"]
    lines = run_main(capfdbinary, "compare", str(path), *flags).out.splitlines()
    assert lines[0] == "embedding: 0.0e+00"
    assert lines[1].split() == ["layer", "input", "queries", "keys", "values", "attention", "mlp", "output"]
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "2"]
    assert lines[-1] == "no value jumps: the errors grow gradually, as rounding errors do"
    equal = run_main(capfdbinary, "compare", str(path), *flags, "--with", "cpu").out
    assert equal.splitlines()[-1] == "all values are equal"
    report = json.loads(run_main(capfdbinary, "compare", str(path), *flags, "--with", "cpu", "--json").out)
    assert set(report["errors"].values()) == {0}
    assert report["first_jump"] is None
    assert "compare needs a prompt: add -p TEXT" in run_main(capfdbinary, "compare", str(path)).error()


def test_another_checkpoint_has_no_values_to_compare(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"logits": np.zeros((2, 7), np.float32)}
    monkeypatch.setattr("localllm.inspection.transformers_values.transformers_values", lambda *_: other)
    path = write_gguf(tmp_path / "m.gguf", SETTINGS, WEIGHTS)
    error = run_main(capfdbinary, "compare", str(path), "-p", "the", "-q", "--with", "transformers:other").error()
    assert error == "transformers:other has no values of the same shapes: name the checkpoint of this model"


def test_the_command_compares_with_transformers(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS | {"architectures": ["Qwen2ForCausalLM"]}))
    write_safetensors(folder / "model.safetensors", WEIGHTS)
    flags = ["-p", "the tin", "--device", "reference", "-q", "--with", f"transformers:{folder}"]
    path = write_gguf(tmp_path / "m.gguf", SETTINGS, WEIGHTS)
    assert "no value jumps" in run_main(capfdbinary, "compare", str(path), *flags).out
    name = "model.layers.1.mlp.down_proj.weight"
    write_gguf(path, SETTINGS, WEIGHTS | {name: -WEIGHTS[name]})
    assert (
        "layers.1.mlp is the first value that jumps: 2.0e+00"
        in run_main(capfdbinary, "compare", str(path), *flags).out
    )
    embeddings = {"model.embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"][:5]}
    write_safetensors(
        folder / "model.safetensors", WEIGHTS | embeddings | {"lm_head.weight": WEIGHTS["lm_head.weight"][:5]}
    )
    (folder / "config.json").write_text(
        json.dumps(SETTINGS | {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 5})
    )
    assert "name the checkpoint of this model" in run_main(capfdbinary, "compare", str(path), *flags).err
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert "transformers cannot load" in run_main(capfdbinary, "compare", str(path), *flags).error()
    (folder / "config.json").unlink()
    error = run_main(capfdbinary, "compare", str(path), *flags).error()
    assert error == f"{folder} is not a checkpoint: name a folder with config.json and weights"
