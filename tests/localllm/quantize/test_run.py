"""Quantising a file: only weights change, and an error leaves no file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf.quants
import numpy as np
import pytest

import localllm
from localllm.errors import ModelError, OutputError, UsageError
from localllm.gguf import GGUFFile
from localllm.quant.encode import quantize
from localllm.quant.types import GGMLType
from localllm.quantize import ImportanceMatrix, TensorResult, plan, run
from localllm.quantize.imatrix import ImatrixEntry
from tests.helpers.gguf_writer import write_gguf
from tests.helpers.tiny_models import tiny_gguf

T = GGMLType
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 0,
    "general.name": "tiny",
    "llama.block_count": 1,
    "llama.attention.head_count": 8,
    "tokenizer.ggml.tokens": ["a", "b"],
    "a.double": np.array([0.1], np.float64),
}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (8, 256),
        "output.weight": (8, 256),
        "output_norm.weight": (256,),
        "blk.0.attn_v.weight": (16, 256),
        "blk.0.ffn_up_exps.weight": (2, 16, 256),
        "blk.0.ffn_down.weight": (16, 96),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def importance(*names: str, n: int = 256, experts: int = 1) -> ImportanceMatrix:
    rng = np.random.default_rng(1)
    entries = {name: ImatrixEntry(rng.uniform(0.1, 10, (experts, n)), np.ones(experts)) for name in names}
    return ImportanceMatrix(Path("i.gguf"), entries, ("wiki.txt",), 3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", METADATA, tensors())


def write(source: Path, target: Path, mix: str, **options: Any) -> list[TensorResult]:
    of_run = {name: options.pop(name) for name in ("allow_nan", "progress") if name in options}
    with GGUFFile.open(source) as file:
        return list(run(plan(file, target, mix, **options), **of_run))


def types(path: Path) -> dict[str, str]:
    with GGUFFile.open(path) as file:
        return {name: tensor.type.name for name, tensor in file.tensors.items()}


def test_weights_are_quantised_and_the_rest_stays(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    results = {result.plan.name: result.error for result in write(model, target, "Q4_K_S")}
    given = tensors()
    with GGUFFile.open(model) as old, GGUFFile.open(target) as new:
        assert {name: tensor.type for name, tensor in new.tensors.items()} == {
            "output.weight": T.Q6_K,
            "output_norm.weight": T.F32,
            "token_embd.weight": T.Q4_K,
            "blk.0.attn_v.weight": T.Q5_K,
            "blk.0.ffn_down.weight": T.Q5_0,
            "blk.0.ffn_up_exps.weight": T.Q4_K,
        }
        for name, tensor in new.tensors.items():
            values = given[name]
            if name == "output_norm.weight":
                assert results[name] is None
                np.testing.assert_array_equal(tensor.data.view(np.float32), values)
                continue
            np.testing.assert_array_equal(tensor.data, quantize(values, tensor.type))
            back = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType(tensor.type))
            expected = np.linalg.norm(back - values) / np.linalg.norm(values)
            assert results[name] == pytest.approx(expected, rel=1e-6)
        changed = {"general.file_type", "general.quantization_version"}
        kept = [key for key in old.metadata if key not in changed]
        assert list(new.metadata) == [*kept, "general.quantization_version", "general.file_type"]
        assert all(new.metadata.encoded(key) == old.metadata.encoded(key) for key in kept)
        assert new.metadata["general.file_type"] == 14
        assert new.metadata["general.quantization_version"] == 2


def test_importance_is_used_and_named(model: Path, tmp_path: Path) -> None:
    names = ("blk.0.attn_v.weight", "blk.0.ffn_up_exps.weight")
    entries = {**importance(names[0]).entries, **importance(names[1], experts=2).entries}
    matrix = ImportanceMatrix(Path("i.gguf"), entries, ("wiki.txt",), 3)
    results = {r.plan.name: r.error for r in write(model, tmp_path / "small.gguf", "Q4_K_S", imatrix=matrix)}
    given = tensors()
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        for name in names:
            tensor, values = file.tensors[name], given[name]
            w = matrix.entries[name].means.reshape(-1, 256)
            if len(w) == 2:
                encoded = np.stack([quantize(values[i], tensor.type, w[i], favours_large=True) for i in range(2)])
                w = w[:, None]
            else:
                encoded = quantize(values, tensor.type, w[0], favours_large=True)
            np.testing.assert_array_equal(tensor.data, encoded)
            back = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType(tensor.type))
            expected = np.sqrt((w * (back - values) ** 2).sum() / (w * values**2).sum())
            assert results[name] == pytest.approx(expected, rel=1e-6)
        assert file.metadata["quantize.imatrix.file"] == "i.gguf"
        assert file.metadata["quantize.imatrix.dataset"] == "wiki.txt"
        assert file.metadata["quantize.imatrix.entries_count"] == 2
        assert file.metadata["quantize.imatrix.chunks_count"] == 3


def test_the_model_still_runs(tmp_path: Path) -> None:
    """8-bit activations add at most about the error of rounding the weights."""
    files = {"model": tiny_gguf(tmp_path / "model.gguf", hidden_size=256, intermediate_size=512, head_dim=64)}
    for mix in ("Q8_0", "Q4_K_M"):
        files[mix], files[f"{mix} in floats"] = tmp_path / f"{mix}.gguf", tmp_path / f"{mix}-F32.gguf"
        write(files["model"], files[mix], mix)
        write(files[mix], files[f"{mix} in floats"], "F32", allow_requantize=True)
    logits = {}
    for name, path in files.items():
        with localllm.load(path, device="cpu") as llm:
            logits[name] = llm.logits(list(range(5, 60)))
    original = logits["model"]
    errors = {name: np.linalg.norm(found - original) / np.linalg.norm(original) for name, found in logits.items()}
    assert 0 < errors["Q8_0 in floats"] < 0.03 < errors["Q4_K_M in floats"] < 0.3
    assert errors["Q8_0"] < 2.5 * errors["Q8_0 in floats"]
    assert errors["Q4_K_M"] < 1.5 * errors["Q4_K_M in floats"]


def test_a_floating_type_and_back_to_a_small_one(model: Path, tmp_path: Path) -> None:
    write(model, tmp_path / "half.gguf", "F16")
    assert set(types(tmp_path / "half.gguf").values()) == {"F16", "F32"}
    write(tmp_path / "half.gguf", tmp_path / "small.gguf", "Q8_0")
    assert set(types(tmp_path / "small.gguf").values()) == {"Q8_0", "F32"}


def test_requantising_needs_permission(model: Path, tmp_path: Path) -> None:
    write(model, tmp_path / "small.gguf", "Q8_0")
    with pytest.raises(ModelError, match=r"'output.weight' is quantised already, as Q8_0, and would lose .* Q6_K"):
        write(tmp_path / "small.gguf", tmp_path / "smaller.gguf", "Q4_K_S")
    write(tmp_path / "small.gguf", tmp_path / "smaller.gguf", "Q4_K_S", allow_requantize=True)
    assert types(tmp_path / "smaller.gguf")["token_embd.weight"] == "Q4_K"
    # Copies are exact.
    write(tmp_path / "small.gguf", tmp_path / "same.gguf", "Q8_0")
    assert (tmp_path / "same.gguf").read_bytes()[-1000:] == (tmp_path / "small.gguf").read_bytes()[-1000:]


@pytest.mark.parametrize("name", ["blk.0.attn_v.weight", "output_norm.weight"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite(tmp_path: Path, name: str, bad: float) -> None:
    values = tensors()
    values[name].flat[[3, 77]] = bad
    source, target = write_gguf(tmp_path / "model.gguf", METADATA, values), tmp_path / "small.gguf"
    with pytest.raises(ModelError, match=f"'{name}' has values that are NaN or infinite"):
        write(source, target, "Q8_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]
    cleared = {result.plan.name: result.n_cleared for result in write(source, target, "Q8_0", allow_nan=True)}
    assert {key: n for key, n in cleared.items() if n} == {name: 2}
    with GGUFFile.open(target) as file:
        tensor = file.tensors[name]
        back = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType(tensor.type)).ravel()
        assert np.isfinite(back).all()
        assert back[3] == back[77] == 0


def test_values_too_large_for_the_type(tmp_path: Path) -> None:
    values = tensors()
    values["output.weight"][2, 3] = 1e6
    source = write_gguf(tmp_path / "model.gguf", METADATA, values)
    with pytest.raises(ModelError, match=r"tensor 'output.weight': cannot encode as F16: .* too large"):
        write(source, tmp_path / "half.gguf", "F16")


def test_a_failed_part_removes_the_others(tmp_path: Path) -> None:
    values = tensors()
    names = list(values)
    values["output_norm.weight"][7] = np.nan
    source = write_split(tmp_path, [names[:2], names[2:]], values)
    with pytest.raises(ModelError, match=r"'output_norm.weight' has values that are NaN"):
        write(source, tmp_path / "new.gguf", "Q8_0", keep_split=True)
    assert not list(tmp_path.glob("new*"))


def test_types_of_no_use_without_importance(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"IQ2_XS makes 'blk.0.ffn_up_exps.weight' IQ2_XS.*give an importance"):
        write(model, tmp_path / "small.gguf", "IQ2_XS")
    matrix = importance("blk.0.attn_v.weight", "blk.0.ffn_up_exps.weight")
    write(model, tmp_path / "small.gguf", "IQ2_XS", imatrix=matrix)
    assert types(tmp_path / "small.gguf")["blk.0.ffn_up_exps.weight"] == "IQ2_XS"


def test_overrides(model: Path, tmp_path: Path) -> None:
    write(model, tmp_path / "small.gguf", "Q8_0", overrides=[("attn_v", "q2_k"), ("attn", "Q4_0")])
    assert types(tmp_path / "small.gguf")["blk.0.attn_v.weight"] == "Q2_K"
    with pytest.raises(UsageError, match="no type 'Q9' for tensors: choose one of F32"):
        write(model, tmp_path / "new.gguf", "Q8_0", overrides=[("a", "Q9")])
    for pattern in ("(", "a{99999999999999999999}", "(" * 5000 + ")" * 5000):
        with pytest.raises(UsageError, match=" is not a valid regular expression") as caught:
            write(model, tmp_path / "new.gguf", "Q8_0", overrides=[(pattern, "Q8_0")])
        assert len(str(caught.value)) < 200


def test_importance_of_another_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"another model: it is for tensors such as 'x.weight'"):
        write(model, tmp_path / "small.gguf", "Q4_K_S", imatrix=importance("x.weight"))
    with pytest.raises(ModelError, match=r"another model: 'blk.0.attn_v.weight' has 64 columns there and 256 here"):
        write(model, tmp_path / "small.gguf", "Q4_K_S", imatrix=importance("blk.0.attn_v.weight", n=64))
    assert not (tmp_path / "small.gguf").exists()


def test_places_that_are_taken(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    target.write_bytes(b"precious")
    with pytest.raises(OutputError, match=r"small\.gguf already exists"):
        write(model, target, "Q8_0")
    assert target.read_bytes() == b"precious"
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    for itself in (model, link):
        with pytest.raises(UsageError, match="is the model itself"):
            write(model, itself, "Q8_0")


def test_a_split_model_becomes_one_file_or_as_many(tmp_path: Path) -> None:
    values = tensors()
    names = list(values)
    source = write_split(tmp_path, [names[:2], names[2:]], values)
    write(source, tmp_path / "one.gguf", "Q8_0")
    write(source, tmp_path / "two.gguf", "Q8_0", keep_split=True)
    files = [tmp_path / f"two-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert sorted(tmp_path.glob("two*")) == files
    with GGUFFile.open(tmp_path / "one.gguf") as one, GGUFFile.open(files[1]) as two:
        assert "split.count" not in one.metadata
        assert [sorted(part) for part in two.parts] == [sorted(names[:2]), sorted(names[2:])]
        for name in names:
            np.testing.assert_array_equal(one.tensors[name].data, two.tensors[name].data)
        assert one.metadata["general.file_type"] == two.metadata["general.file_type"] == 7


def write_split(folder: Path, parts: Sequence[Sequence[str]], values: dict[str, np.ndarray]) -> Path:
    from tests.helpers.gguf_writer import Typed

    for number, names in enumerate(parts):
        split = {
            "split.no": Typed(gguf.GGUFValueType.UINT16, number),
            "split.count": Typed(gguf.GGUFValueType.UINT16, len(parts)),
            "split.tensors.count": Typed(gguf.GGUFValueType.INT32, len(values)),
        }
        path = folder / f"model-{number + 1:05d}-of-{len(parts):05d}.gguf"
        metadata = METADATA if number == 0 else {"general.architecture": "llama"}
        write_gguf(path, {**metadata, **split}, {name: values[name] for name in names})
    return path


def test_progress_ends_with_everything(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    write(
        model, tmp_path / "small.gguf", "Q8_0", progress=lambda tensor, *counts: seen.append((tensor.name, *counts))
    )
    total = sum(values.nbytes for values in tensors().values())
    assert seen[0] == ("output.weight", 0, total)
    assert seen[-1] == ("blk.0.ffn_up_exps.weight", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
