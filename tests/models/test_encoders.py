"""Embedding models compared with transformers in float32: token vectors, and texts in a batch and alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm import ModelError, UsageError
from localllm.compat import Llama
from localllm.convert import Checkpoint
from localllm.gguf import GGUFFile
from localllm.kernels.operations import Gated
from localllm.models.registry import ARCHITECTURES, read_model
from localllm.quantize import plan, run
from tests.helpers.backends import emulated_cuda, no_harness, shared_by_threads
from tests.helpers.recorder import CPUOps, ReferenceOps
from tests.helpers.run_model import Runner
from tests.models.tiny import ENCODERS, make_model, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]

#: Longer than bidirectional windows and than a page of a cache.
IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 41)]
TEXTS = [IDS, IDS[:7], [5], IDS[20:], IDS[:7]]


@cache
def model_of(name: str) -> Any:
    return make_model(ENCODERS[name])


def hidden(name: str, ids: list[int]) -> Array:
    """Return transformers' vectors [T, d]."""
    import torch

    with torch.no_grad():
        states: Array = model_of(name)(torch.tensor([ids])).last_hidden_state[0].numpy()
    return states


def pooled(name: str, ids: list[int]) -> Array:
    rows = hidden(name, ids)
    vector = {"qwen3-embedding": rows[-1], "neo-bert": rows[0]}.get(name, rows.mean(axis=0))
    return vector / np.linalg.norm(vector)


def error(ours: Array, theirs: Array) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", ENCODERS)
def test_the_reference_matches_transformers(name: str, tmp_path: Path) -> None:
    runner = Runner(write(tmp_path / "model.gguf", ENCODERS[name], model_of(name)), ReferenceOps(np.float32))
    assert error(runner.logits(IDS), hidden(name, IDS)) < 1e-4


@pytest.mark.parametrize("name", ENCODERS)
def test_the_cpu_matches_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS[name], model_of(name))
    runner = Runner(path, shared_by_threads(CPUOps(threads=2)))
    assert error(runner.logits(IDS), hidden(name, IDS)) < 5e-3


def test_modern_bert_takes_the_keys_that_llama_cpp_writes(tmp_path: Path) -> None:
    keys = {"attention.layer_norm_rms_epsilon": 1e-5, "hidden_activation": "silu"}
    path = write(tmp_path / "model.gguf", ENCODERS["modern-bert"], model_of("modern-bert"), **keys)
    with GGUFFile.open(path) as file:
        nodes = read_model(file).graph.nodes
    assert {node.operation.activation for node in nodes if isinstance(node.operation, Gated)} == {"silu"}


@pytest.mark.parametrize("name", ["bert", "modern-bert"])
def test_an_encoder_whose_file_says_so_is_causal(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS[name], model_of(name), **{"attention.causal": True})
    runner = Runner(path, ReferenceOps(np.float32))
    np.testing.assert_array_equal(runner.logits(IDS[:9]), runner.logits(IDS)[:9])


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
@pytest.mark.parametrize("name", ["bert", "modern-bert", "jina-bert-v2", "t5"])
def test_cuda_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS[name], model_of(name))
    runner = Runner(path, emulated_cuda(), n_pages=2, max_tokens=16)
    assert error(runner.run((IDS[:13], 0, [0])), hidden(name, IDS[:13])) < 1e-2


@pytest.mark.parametrize("name", ENCODERS)
def test_texts_together_have_the_vectors_that_each_has_alone(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS[name], model_of(name))
    with localllm.load(path, device="cpu", parallel=2) as llm:
        vectors = llm.embed(TEXTS)
        assert vectors.shape == (len(TEXTS), 64)
        for ids, vector in zip(TEXTS, vectors, strict=True):
            np.testing.assert_array_equal(llm.embed([ids])[0], vector)
            assert float(vector @ pooled(name, ids)) > 0.9999
        few = llm.embed(TEXTS[:1], dimensions=16)[0]
        np.testing.assert_allclose(few, vectors[0, :16] / np.linalg.norm(vectors[0, :16]), rtol=1e-5)
        assert np.linalg.norm(llm.embed(TEXTS[:1], normalize=False)) != pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("activation", ["Identity", "Tanh"])
def test_the_linear_layers_after_the_pooling_are_converted(activation: str, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    path = write(tmp_path / "plain.gguf", ENCODERS["gemma-embedding"], model_of("gemma-embedding"))
    rng, folder, layers = np.random.default_rng(3), path.with_suffix(".hf"), []
    for name, shape in (("2_Dense", (96, 64)), ("3_Dense", (32, 96))):
        layers.append(rng.normal(0, 0.1, shape).astype(np.float32))
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(f'{{"activation_function": "torch.nn.{activation}"}}')
        save_file({"linear.weight": layers[-1]}, folder / name / "model.safetensors")
    if activation == "Tanh":
        with pytest.raises(ModelError, match=r"2_Dense is a linear layer .* 'Tanh'"):
            Checkpoint(folder)
        return
    list(run(plan(Checkpoint(folder), tmp_path / "dense.gguf", "F32")))
    with localllm.load(path, device="cpu") as llm, localllm.load(tmp_path / "dense.gguf", device="cpu") as dense:
        expected = layers[1] @ layers[0] @ llm.embed([IDS], normalize=False)[0]
        np.testing.assert_allclose(dense.embed([IDS], normalize=False)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "pooling"), [("bert", "cls"), ("xlm-roberta", "cls"), ("modern-bert", "cls"), ("modern-bert", "mean")]
)
def test_a_reranker_scores_as_transformers_classifier(name: str, pooling: str, tmp_path: Path) -> None:
    import torch

    entry = ENCODERS[name]
    config = entry.config | {"num_labels": 1, "classifier_pooling": pooling}
    entry = replace(entry, config=config, auto="AutoModelForSequenceClassification")
    model = make_model(entry)
    keys = {"classifier.pooling_type": 0} if pooling == "mean" else {}  # older ModernBERT files omit it
    with localllm.load(write(tmp_path / "model.gguf", entry, model, **keys), device="cpu") as llm:
        scores = llm.rerank("a cat?", DOCUMENTS)
        for document, score in zip(DOCUMENTS, scores, strict=True):
            with torch.no_grad():
                expected = float(model(torch.tensor([pair(llm, document)])).logits[0, 0])
            assert score == pytest.approx(expected, abs=0.02)
        with pytest.raises(UsageError, match="scores documents"):
            llm.embed(["a"])


def test_a_classifier_keeps_its_labels_order_and_scores_whatever_pooling_is_beside_it(tmp_path: Path) -> None:
    labels = {number: f"label {number}" for number in range(12)}
    entry = replace(ENCODERS["bert"], config=ENCODERS["bert"].config | {"id2label": labels})
    entry = replace(entry, auto="AutoModelForSequenceClassification")
    folder = write(tmp_path / "model.gguf", entry, make_model(entry)).with_suffix(".hf")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    metadata = Checkpoint(folder).metadata
    assert list(metadata["bert.classifier.output_labels"]) == [*labels.values()]
    assert metadata["bert.pooling_type"] == 4


DOCUMENTS = ["the cat", "{query} in a document", "e"]


def pair(llm: localllm.LLM, document: str) -> list[int]:
    query, end = llm.tokenize("a cat?"), [int(llm.tokenizer.eos_id or 0)]
    return [*query, *end, *end, *llm.tokenize(document, add_special=False), *end]


def test_a_reranker_that_says_yes_or_no(tmp_path: Path) -> None:
    entry, output = ENCODERS["qwen3-embedding"], np.random.default_rng(3).normal(0, 0.3, (2, 64)).astype(np.float32)
    conversion = replace(ARCHITECTURES["qwen3"].conversion, extra=lambda config: {"cls.output.weight": output})
    model = model_of("qwen3-embedding")
    path = write(tmp_path / "model.gguf", replace(entry, conversion=conversion), model, pooling_type=4)
    with localllm.load(path, device="cpu") as llm:
        for document, score in zip(DOCUMENTS, llm.rerank("a cat?", DOCUMENTS), strict=True):
            yes, no = output @ hidden("qwen3-embedding", pair(llm, document))[-1]
            assert score == pytest.approx(float(1 / (1 + np.exp(no - yes))), abs=0.02)


def test_llama_cpp_pythons_way_to_embed(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS["bert"], model_of("bert"))
    llm = Llama(str(path), n_ctx=128, embedding=True)
    first, second = llm.embed(["a", "b"], normalize=True)
    np.testing.assert_allclose(llm.llm.embed(["a", "b"]), [first, second], rtol=1e-6)
    answer = llm.create_embedding("a")
    assert answer["data"][0]["embedding"] == llm.embed("a")
    assert answer["usage"]["total_tokens"] == len(llm.llm.tokenize("a"))
    llm.close()


def test_texts_that_cannot_be_embedded_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ENCODERS["bert"], model_of("bert"))
    with localllm.load(path, device="cpu") as llm:
        with pytest.raises(UsageError, match="does not generate text"):
            llm.generate("a")
        with pytest.raises(UsageError, match="is not a reranker"):
            llm.rerank("a", ["b"])
        with pytest.raises(UsageError, match="must be at most 64"):
            llm.embed(["a"], dimensions=65)
        with pytest.raises(UsageError, match="list of texts"):
            llm.embed("a")
        with pytest.raises(localllm.ContextLengthError):
            llm.embed([[5] * 129])
        assert llm.embed([[5] * 129], truncate=True).shape == (1, 64)
        assert llm.embed([]).shape == (0, 64)
    with localllm.load(device="cpu") as llm, pytest.raises(UsageError, match="cannot compute vectors"):
        llm.embed(["a"])
