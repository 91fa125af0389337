"""Complete models in the reference backend, compared with implementations that share no code with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import plain_transformer, tiny_models
from tests.helpers.data import shared_data
from tests.helpers.recorder import ReferenceOps
from tests.helpers.run_model import Runner

#: Changes to `tiny_models.CONFIG`, as entries of Hugging Face's ``config.json``.
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-one-kv-head": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-no-groups": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-wide-heads": {"model_type": "llama", "head_dim": 32, "rope_theta": 500_000.0},
    "mistral-window": {"model_type": "mistral", "sliding_window": 7},
    "mistral-no-window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "rope_theta": 1_000_000.0},
    "mixtral": {"model_type": "mixtral"},
    "qwen3moe": {"model_type": "qwen3_moe", "head_dim": 24, "rope_theta": 1_000_000.0},
    "qwen3moe-one-expert": {"model_type": "qwen3_moe", "num_experts_per_tok": 1},
    "qwen3moe-all-experts": {"model_type": "qwen3_moe", "num_experts_per_tok": 9},
}
#: Longer than two pages of the cache, and than a window.
IDS = [int(i) for i in np.random.default_rng(1).integers(0, 300, 41)]


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def exact_ops() -> ReferenceOps:
    """Return a backend with an unrounded cache, for comparison with models that do not round theirs."""
    return ReferenceOps(np.float32)


def our_logits(path: Path, settings: dict[str, Any], weights: dict[str, Any]) -> np.ndarray:
    file = tiny_models.write_gguf(path / "model.gguf", settings, weights)
    return Runner(file, exact_ops()).logits(IDS)


@pytest.mark.parametrize("name", PLAIN)
def test_logits_are_those_of_the_papers_formulas(name: str, tmp_path: Path) -> None:
    settings = tiny_models.config(**PLAIN[name])
    weights = tiny_models.random_weights(settings)
    expected = plain_transformer.logits(settings, weights, IDS)
    assert relative_error(our_logits(tmp_path, settings, weights), expected) < 1e-5


def test_tokens_before_a_window_have_no_effect(tmp_path: Path) -> None:
    """In a model of one layer the last token's logits depend on the last ``sliding_window`` tokens only."""
    path = tiny_models.tiny_gguf(tmp_path / "m.gguf", "mistral", sliding_window=5, num_hidden_layers=1)
    runner = Runner(path, ReferenceOps())
    last = runner.logits(IDS)[-1]
    before_window, in_window = [*IDS], [*IDS]
    before_window[-6] += 1
    in_window[-5] += 1
    np.testing.assert_array_equal(runner.logits(before_window)[-1], last)
    assert relative_error(runner.logits(in_window)[-1], last) > 1e-3


STORY656K_IDS = [1, 80, 147, 201, 282, 57]  # "Once upon a time"


def test_story656k_in_q8_0_gives_its_known_logit() -> None:
    runner = Runner(shared_data("models/story656K/TinyStories-656K-Q8_0.gguf"), exact_ops())
    logits = runner.logits(STORY656K_IDS)[-1]
    assert logits.argmax() == 313
    assert logits[313] == pytest.approx(17.2792, abs=1e-4)
