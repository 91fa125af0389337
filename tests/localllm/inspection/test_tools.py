"""Tools over traces and steering: logit lens, patching, attribution, usage of experts, control vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM, NotEnoughMemoryError, Steering, UsageError
from localllm.inspection import tools
from tests.helpers.tiny_models import tiny_gguf

CLEAN = [1, 40, 41, 42, 43, 44]
CORRUPTED = [1, 40, 99, 42, 43, 44]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny_gguf(tmp_path_factory.mktemp("tools") / "m.gguf", "qwen3_moe")
    with localllm.load(path, device="reference", context=64, parallel=4) as llm:
        yield llm


def test_the_logit_lens_ends_with_the_logits(llm: LLM) -> None:
    lens = tools.logit_lens(llm, CLEAN)
    assert lens.shape == (3, len(CLEAN), 300)
    np.testing.assert_array_equal(lens[-1], llm.trace(CLEAN, "logits")["logits"])
    assert not np.array_equal(lens[0], lens[-1])


def test_attention_of_chosen_heads(llm: LLM) -> None:
    probabilities = tools.attention(llm, CLEAN, [(2, 3), (0, 1), (2, 0)])
    assert probabilities.shape == (3, len(CLEAN), len(CLEAN))
    np.testing.assert_allclose(probabilities.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(np.triu(probabilities, 1), 0)
    np.testing.assert_array_equal(tools.attention(llm, CLEAN, [(0, 1)])[0], probabilities[1])
    edited = {"layers.0.keys": np.zeros(llm.graph["layers.0.keys"].width)}
    equal = tools.attention(llm, CLEAN, [(0, 1)], steer=Steering(edited, "replace"))[0]
    np.testing.assert_allclose(equal[-1], 1 / len(CLEAN), atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([(3, 0)], "layer 3 does not exist: the layers are 0 to 2"),
        ([(0, 0), (1, 4)], "layer 1 has the heads 0 to 3: there is no head 4"),
        ([], "heads is [], but must be a list of pairs of a layer and a head"),
        ((0, 1), "heads is (0, 1), but must be a list of pairs of a layer and a head"),
        ("01", "heads is '01', but must be a list of pairs of a layer and a head"),
        ([(0, 0, 0)], "heads is [(0, 0, 0)], but must be a list of pairs of a layer and a head"),
        ([(True, 0)], "heads is [(True, 0)], but must be a list of pairs of a layer and a head"),
        ([([], 0)], "heads is [([], 0)], but must be a list of pairs of a layer and a head"),
        (3, "heads is 3, but must be a list of pairs of a layer and a head"),
    ],
    ids=["layer", "head", "none", "numbers", "text", "triple", "bool", "list", "number"],
)
def test_bad_heads(llm: LLM, heads: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        tools.attention(llm, CLEAN, heads)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: tools.logit_lens(llm, [CLEAN]),
            "^prompt is .*, but must be text or a list of token ids, not a l",
        ),
        (
            lambda llm: tools.attention(llm, [CLEAN], [(0, 0)]),
            "^prompt is .*, but must be text or a list of token id",
        ),
        (lambda llm: tools.attention(llm, CLEAN, [(0, 0)], positions=-1), "^positions cannot be chosen, because att"),
        (lambda llm: tools.expert_usage(llm, "abc"), "^prompts is 'abc', but must be a list of prompts$"),
        (lambda llm: tools.expert_usage(llm, CLEAN), "^prompts is .*, but must be a list of prompts$"),
    ],
)
def test_bad_arguments(llm: LLM, call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(llm)


def test_attention_larger_than_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "available_memory", lambda: 100)
    with pytest.raises(NotEnoughMemoryError, match=r"^the attention of 1 heads takes 0.00 GB, but 0.00 GB of memory"):
        tools.attention(llm, CLEAN, [(0, 0)])


def test_patching_finds_where_prompts_differ(llm: LLM) -> None:
    effects = tools.patch(llm, CLEAN, CORRUPTED, token=50)
    assert effects.shape == (3, len(CLEAN))
    # The first two tokens do not differ, and the last token's last stream decides the logits.
    np.testing.assert_allclose(effects[:, :2], 0, atol=1e-6)
    np.testing.assert_allclose(effects[-1], [0, 0, 0, 0, 0, 1], atol=1e-5)
    assert abs(effects[0, 2]) > 1e-4
    with pytest.raises(UsageError, match=r"^the prompts have 6 and 5 tokens, but must have the same"):
        tools.patch(llm, CLEAN, CORRUPTED[:-1], token=50)
    with pytest.raises(UsageError, match=r"^both prompts give the token the same probability: "):
        tools.patch(llm, CLEAN, CLEAN, token=50)


def test_evaluations_in_one_trace_equal_single_ones(llm: LLM) -> None:
    n_calls = list[tuple[int, int]]()
    effects = tools.patch(llm, CLEAN, CORRUPTED, 50, lambda *n: n_calls.append(n))
    # Layer 0 is the first with attention, so the streams from the third token on differ after each layer.
    assert n_calls == [(i, 12) for i in range(1, 13)]

    def logprob(ids: list[int], **options: Any) -> float:
        logits = llm.trace(ids, "logits", positions=-1, **options)["logits"][0].astype(np.float64)
        return float(logits[50] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))

    high, low = logprob(CLEAN), logprob(CORRUPTED)
    for layer, name in enumerate(llm.graph.matching("names", "layers.*.output")):
        for position in range(2, len(CLEAN)):
            row = llm.trace(CLEAN, name, positions=position)[name][0]
            patched = logprob(CORRUPTED, steer=Steering({name: row}, "replace", positions=position))
            assert effects[layer, position] == np.float32((patched - low) / (high - low))


def test_attribution_removes_tokens(llm: LLM) -> None:
    falls = tools.attribution(llm, CLEAN, token=50)
    logits = llm.trace(CLEAN, "logits", positions=-1)["logits"][0].astype(np.float64)
    zero = Steering({"embedding": np.zeros(64)}, "replace", positions=3)
    without = llm.trace(CLEAN, "logits", positions=-1, steer=zero)["logits"][0].astype(np.float64)
    before, after = (x[50] - np.log(np.exp(x).sum()) for x in (logits, without))
    np.testing.assert_allclose(falls[3], before - after, atol=1e-5)


def test_usage_of_experts(llm: LLM) -> None:
    usage = tools.expert_usage(llm, [CLEAN, CORRUPTED])
    assert [*usage] == [f"layers.{i}.experts" for i in range(3)]
    assert all(counts.shape == (9,) and counts.sum() == 3 * 2 * len(CLEAN) for counts in usage.values())
    with pytest.raises(UsageError, match=r"^the list of prompts is empty: give at least one prompt$"):
        tools.expert_usage(llm, [])


@pytest.mark.parametrize("method", ["mean", "pca"])
def test_a_control_vector_is_written_and_read(llm: LLM, tmp_path: Path, method: str) -> None:
    pairs = [(CLEAN, CORRUPTED), (CLEAN[:4], CORRUPTED[:4])]
    steering = tools.control_vector(llm, pairs, method)  # type: ignore[arg-type]
    name = "layers.2.output"
    differences = [llm.trace(a, name, positions=-1)[name] - llm.trace(b, name, positions=-1)[name] for a, b in pairs]
    rows = np.concatenate(differences)
    expected = mean = rows.mean(axis=0)
    if method == "pca":
        expected = np.linalg.eigh(rows.T @ rows)[1][:, -1] * np.linalg.norm(mean)
        expected *= np.sign(expected @ mean)
    np.testing.assert_allclose(steering.vectors[name], expected, atol=1e-5)
    tools.save_control_vector(tmp_path / "v.gguf", steering.scaled(0.5), llm.info.architecture)
    stored = Steering.from_gguf(tmp_path / "v.gguf")
    assert [*stored.vectors] == ["layers.1.output", "layers.2.output"]
    np.testing.assert_array_equal(stored.vectors[name], 0.5 * steering.vectors[name])


@pytest.mark.parametrize("token", [300, -1, " dog"])
def test_tokens_that_do_not_exist(llm: LLM, token: Any) -> None:
    with pytest.raises(
        UsageError, match=r"^token is .*, but must be a token id from 0 to 299, as LLM.tokenize returns$"
    ):
        tools.attribution(llm, CLEAN, token)
    with pytest.raises(UsageError, match=r"^token is"):
        tools.patch(llm, CLEAN, CORRUPTED, token)


@pytest.mark.parametrize("pairs", [[], ["ab"], [(CLEAN, CLEAN, CLEAN)]], ids=["none", "text", "three"])
def test_prompts_that_are_not_pairs(llm: LLM, pairs: Any) -> None:
    with pytest.raises(UsageError, match=r"^pairs is .*, but must be a list of pairs of prompts$"):
        tools.control_vector(llm, pairs)


def test_an_unknown_method(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"^method is 'median', but must be 'mean' or 'pca'$"):
        tools.control_vector(llm, [(CLEAN, CORRUPTED)], "median")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "steering",
    [
        Steering({"layers.0.output": [1.0]}),
        Steering({"layers.*.output": [1.0]}),
        Steering({"layers.1.mlp": [1.0]}),
        Steering({"logits": [1.0]}),
        Steering({"layers.1.output": [1.0]}, "project_out"),
        Steering({"layers.1.output": [1.0]}, positions=[0]),
    ],
    ids=["first layer", "pattern", "mlp", "logits", "kind", "positions"],
)
def test_what_a_control_vector_cannot_contain(tmp_path: Path, steering: Steering) -> None:
    with pytest.raises(UsageError, match=r"^a control vector adds to the outputs of layers from 1 on, "):
        tools.save_control_vector(tmp_path / "v.gguf", steering, "llama")
    assert not [*tmp_path.iterdir()]
