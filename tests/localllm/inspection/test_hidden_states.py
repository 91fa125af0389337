"""Hidden states of generating models as embeddings: equal to transformers', and independent of other requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm import LLM, ContextLengthError, UsageError
from tests.helpers.command_line import run_main
from tests.helpers.tiny_models import tiny_gguf

Array = NDArray[np.float32]

IDS = [[int(i) for i in np.random.default_rng(seed).integers(3, 300, n)] for seed, n in enumerate((41, 1, 90, 7))]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny_gguf(tmp_path_factory.mktemp("embed") / "m.gguf", "qwen3_moe")
    with localllm.load(path, device=request.param, context=128, parallel=8) as llm:
        yield llm


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3moe", "gptneox"])
def test_vectors_are_transformers_hidden_states_pooled(name: str, device: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'reference'")
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    from tests.models.test_transformers import model_of
    from tests.models.tiny import TINY, write

    path = write(tmp_path / "m.gguf", TINY[name], model_of(name))
    with localllm.load(path, device=device, context=128, parallel=4) as llm:
        texts, n_layers = IDS[:2], llm.info.n_layers
        states: list[list[Array]] = []
        with torch.no_grad():
            for ids in texts:
                output = model_of(name)(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
                states.append([state[0].numpy() for state in output.hidden_states])
        poolings: dict[Any, Any] = {
            "mean": lambda x: x.mean(axis=0),
            "first": lambda x: x[0],
            "last": lambda x: x[-1],
        }
        layers: dict[int | str | None, int] = {0: 1, -2: n_layers - 1, "embedding": 0, "final_norm": -1, None: -1}
        for layer, number in layers.items():
            for pooling, pool in poolings.items():
                expected = np.array([pool(of_text[number]) for of_text in states])
                actual = llm.embed(texts, layer=layer, pooling=pooling, normalize=False)
                assert actual.dtype == np.float32
                error = np.abs(actual - expected).max() / np.abs(expected).max()
                assert error < 5e-3, (layer, pooling)
        rows = llm.embed(texts, layer=0, per_token=True, normalize=False)
        for row, of_text in zip(rows, states, strict=True):
            assert np.abs(row - of_text[1]).max() < 5e-3 * np.abs(of_text[1]).max()


def test_vectors_in_a_batch_have_the_bits_they_have_alone(llm: LLM) -> None:
    for pooling in ("mean", "first", "last"):
        llm.forget()
        alone = [llm.embed([ids], layer=-1, pooling=pooling)[0] for ids in IDS]
        llm.forget()
        stream = llm.stream(IDS[2][:60], max_tokens=20, temperature=0, ignore_eos=True)
        together = llm.embed(IDS * 3, layer=-1, pooling=pooling)
        np.testing.assert_array_equal(together, np.array(alone * 3))
        assert len(stream.read().ids) == 20
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_long_texts_are_evaluated_in_chunks(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", max_position_embeddings=2048)
    ids = [int(i) for i in np.random.default_rng(5).integers(3, 300, 1500)]  # a step has at most 512 tokens
    with localllm.load(path, device="cpu", context=2048) as llm:
        steps = llm.counts.steps
        mean = llm.embed([ids], layer=1, normalize=False)[0]
        assert llm.counts.steps - steps >= 3
        rows = llm.trace(ids, "layers.1.output")["layers.1.output"]
        np.testing.assert_allclose(mean, rows.mean(axis=0, dtype=np.float64), atol=1e-6)
        last = llm.embed([ids], pooling="last", normalize=False)[0]
        np.testing.assert_array_equal(last, llm.trace(ids, "final_norm", positions=-1)["final_norm"][0])


def test_other_options_apply(llm: LLM) -> None:
    text, prefix = "the cat", "query: "
    whole = llm.embed([prefix + text], layer=0, normalize=False)
    np.testing.assert_array_equal(llm.embed([text], prefix=prefix, layer=0, normalize=False), whole)
    np.testing.assert_array_equal(llm.embed([prefix + text], layer=0, dimensions=8, normalize=False), whole[:, :8])
    attention = "layers.1.attention"
    expected = llm.trace(IDS[0], attention)[attention]
    np.testing.assert_array_equal(llm.embed([IDS[0]], layer=attention, per_token=True, normalize=False)[0], expected)
    assert llm.embed([], layer=0).shape == (0, 64)
    with pytest.raises(ContextLengthError):
        llm.embed([IDS[2] * 2], layer=0)
    cut = llm.embed([IDS[2] * 2], layer=0, truncate=True)
    np.testing.assert_array_equal(cut, llm.embed([(IDS[2] * 2)[:128]], layer=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "generates text, and cannot compute vectors of texts: load an embedding model, or choose hidden states"),
        ({"layer": 3}, "^layer is 3, but must be a whole number from -3 to 2, for a model of 3 layers, or the name"),
        ({"layer": -4}, "^layer is -4, but must be"),
        ({"layer": 1.5}, "^layer is 1.5, but must be"),
        ({"layer": True}, "^layer is True, but must be"),
        (
            {"layer": "layers.3.output"},
            "^layer: the model has no value 'layers.3.output'; the nearest names are layers.\\*.output",
        ),
        ({"layer": "layers.*.output"}, "^layer is 'layers.*.output', which names 3 values: name one$"),
        ({"layer": "layers.0.experts"}, "^layer is 'layers.0.experts', .* name layers.0.router$"),
        ({"pooling": "max"}, "^pooling is 'max', but must be one of 'mean', 'first', 'last'$"),
        ({"pooling": ["mean"]}, r"^pooling is \['mean'\], but must be one of"),
        (
            {"layer": 0, "pooling": "mean", "per_token": True},
            "^pooling is not used for vectors of tokens: leave it out",
        ),
        ({"layer": 0, "dimensions": 65}, "^dimensions is 65, but must be at most 64"),
    ],
)
def test_bad_arguments(llm: LLM, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.embed(["a"], **options)


def test_embedding_models_keep_their_pooling(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    from tests.models.tiny import ENCODERS, make_model, write

    entry = ENCODERS["bert"]
    with localllm.load(write(tmp_path / "m.gguf", entry, make_model(entry)), device="cpu") as llm:
        for name, value in (("layer", -1), ("pooling", "last")):
            options: Any = {name: value}
            words = f"^{name} is for models that generate text, but m.gguf has its own pooling: leave it out$"
            with pytest.raises(UsageError, match=words):
                llm.embed(["a"], **options)


def test_the_command_prints_hidden_states(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    with localllm.load(path, device="cpu") as llm:
        expected = llm.embed(["a cat"], layer=-2, pooling="last")[0]
        of_value = llm.embed(["a cat"], layer="layers.1.mlp")[0]
    flags = ["embed", "-m", str(path), "-q", "--device", "cpu", "a cat"]
    lines = run_main(capfdbinary, *flags, "--layer", "-2", "--pooling", "last").out
    np.testing.assert_allclose(json.loads(lines), expected, atol=1e-6)
    lines = run_main(capfdbinary, *flags, "--layer", "layers.1.mlp").out
    np.testing.assert_allclose(json.loads(lines), of_value, atol=1e-6)
    assert "choose hidden states with --layer" in run_main(capfdbinary, *flags).error()
