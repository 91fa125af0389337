"""Late-interaction models (ColBERT): token vectors and document scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm import ModelError, UsageError
from localllm.convert import Checkpoint
from localllm.gguf.writer import read_back
from localllm.quantize import plan, run
from tests.helpers.command_line import run_main
from tests.models.tiny import ENCODERS, TINY, Tiny, make_model, save, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]

TEXTS = ["the cat", "a dog, and another one", "e"]
LINEAR = np.random.default_rng(5).normal(0, 0.2, (24, 64)).astype(np.float32)
ENTRIES = {
    "modern-bert": ENCODERS["modern-bert"],
    "bert": ENCODERS["bert"],
    "jina": ENCODERS["jina-bert-v3"],
    "lfm2": replace(TINY["lfm2"], auto="AutoModel"),  # causal
}


def converted(folder: Path, entry: Tiny, model: Any, tokens: dict[int, str] | None = None, **config: Any) -> Path:
    """Convert a model with a linear layer in PyLate's format (ColBERT's for BERT); ``tokens`` renames tokens."""
    from safetensors.numpy import save_file

    path = save(folder, model)
    if entry.model_type in ("bert", "jina_embeddings_v3"):
        settings = json.loads((path / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
        if entry.model_type != "bert":  # Jina ColBERT v2
            settings |= {"model_type": "xlm-roberta", "position_embedding_type": "rotary"}
        (path / "config.json").write_text(json.dumps(settings))
        file = path / "extra.safetensors"
        save_file({"linear.weight": LINEAR}, file)
        (path / "model.safetensors").rename(path / "rest.safetensors")
        names = {name: each.name for each in (file, path / "rest.safetensors") for name in _names(each)}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        (path / "1_Dense").mkdir()
        settings = {"activation_function": "torch.nn.modules.linear.Identity", "use_residual": False} | config
        (path / "1_Dense" / "config.json").write_text(json.dumps(settings))
        save_file({"linear.weight": LINEAR}, path / "1_Dense" / "model.safetensors")
    checkpoint = Checkpoint(path)
    spelled = list(checkpoint.metadata["tokenizer.ggml.tokens"])
    for token, text in (tokens or {}).items():
        spelled[token] = text
    checkpoint.metadata = read_back(path, dict(checkpoint.metadata) | {"tokenizer.ggml.tokens": spelled}, ())
    list(run(plan(checkpoint, folder / "model.gguf", "F32")))
    return folder / "model.gguf"


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return list(file.keys())


def vectors(model: Any, ids: list[int]) -> Array:
    import torch

    with torch.no_grad():
        rows: Array = model(torch.tensor([ids])).last_hidden_state[0].numpy() @ LINEAR.T
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("name", ENTRIES)
def test_vectors_of_tokens_are_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(ENTRIES[name])
    with localllm.load(converted(tmp_path, ENTRIES[name], model), device="cpu") as llm:
        assert llm.is_late
        found = llm.embed(TEXTS, per_token=True)
        for text, rows in zip(TEXTS, found, strict=True):
            expected = vectors(model, llm.tokenize(text))
            assert rows.shape == expected.shape
            np.testing.assert_allclose(rows, expected, atol=0.01)
            np.testing.assert_array_equal(llm.embed([text], per_token=True)[0], rows)
        (few,) = llm.embed(TEXTS[:1], per_token=True, dimensions=8)
        np.testing.assert_allclose(
            few, found[0][:, :8] / np.linalg.norm(found[0][:, :8], axis=1, keepdims=True), 1e-4
        )
        scores = llm.rerank("a cat?", TEXTS)
        query = vectors(model, llm.tokenize("a cat?"))
        expected = [(query @ vectors(model, llm.tokenize(text)).T).max(axis=1).sum() for text in TEXTS]
        np.testing.assert_allclose(scores, expected, atol=0.02)
        assert llm.rerank("a cat?", []).shape == (0,)
        with pytest.raises(UsageError, match=r"vector per token .* per_token=True"):
            llm.embed(TEXTS)


def test_texts_get_markers_and_punctuation_does_not_count(tmp_path: Path) -> None:
    entry = ENTRIES["modern-bert"]
    model = make_model(entry)
    path = converted(tmp_path, entry, model, {290: "[Q] ", 291: "[D] ", 292: "!"})
    with localllm.load(path, device="cpu") as llm:
        query, document = llm.tokenize("a cat?"), llm.tokenize("dog!")
        n = int(query[0] == llm.tokenizer.bos_id)
        rows = vectors(model, [*query[:n], 290, *query[n:]])
        document = [*document[:n], 291, *document[n:]]
        counts = [llm.tokenizer.token_text(token) != "!" for token in document]
        assert not all(counts)
        expected = (rows @ vectors(model, document)[counts].T).max(axis=1).sum()
        assert llm.rerank("a cat?", ["dog!"])[0] == pytest.approx(expected, abs=0.02)


def test_models_that_pool_give_the_vectors_of_tokens_too(tmp_path: Path) -> None:
    with localllm.load(write(tmp_path / "model.gguf", ENCODERS["bert"], make_model(ENCODERS["bert"]))) as llm:
        (rows,) = llm.embed(TEXTS[:1], per_token=True, normalize=False)
        np.testing.assert_allclose(rows.mean(axis=0), llm.embed(TEXTS[:1], normalize=False)[0], rtol=1e-4, atol=1e-5)
        assert not llm.is_late


def test_a_linear_layer_that_adds_its_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"1_Dense adds its input"):
        converted(tmp_path, ENTRIES["lfm2"], make_model(ENTRIES["lfm2"]), use_residual=True)


def test_the_command_line(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = str(converted(tmp_path, ENTRIES["modern-bert"], make_model(ENTRIES["modern-bert"])))
    done = run_main(capfdbinary, "embed", "-q", "-m", path, "a", "b c")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [np.shape(each)[1:] for each in lines] == [(24,), (24,)]
    done = run_main(capfdbinary, "embed", "-q", "-m", path, "--query", "a", "a", "b c")
    scores = [json.loads(line)["score"] for line in done.out.splitlines()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 2
