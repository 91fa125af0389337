"""Complete models in the reference backend, compared with implementations that share no code with it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.quant.types import GGMLType
from tests.helpers import plain_transformer, tiny_models
from tests.helpers.data import shared_data
from tests.helpers.recorder import ReferenceOps
from tests.helpers.run_model import Runner

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

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
SCALED: dict[str, dict[str, Any]] = {
    "llama-llama3": {"model_type": "llama", "rope_scaling": LLAMA3},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama-yarn": {"model_type": "llama", "rope_scaling": YARN},
    "llama-yarn-settings": {
        "model_type": "llama",
        "rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
    },
    "qwen2-yarn": {"model_type": "qwen2", "rope_scaling": YARN},
    "qwen3-yarn": {"model_type": "qwen3", "rope_scaling": YARN},
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


@pytest.mark.parametrize("name", PLAIN | SCALED)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'reference'")
    transformers = pytest.importorskip("transformers", reason="needs the extra 'reference'")
    settings = tiny_models.config(**(PLAIN | SCALED)[name])
    weights = tiny_models.random_weights(settings)
    # Its eager attention respects a sliding window on a CPU without fused kernels.
    config = transformers.AutoConfig.for_model(**settings, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = {key: torch.from_numpy(array) for key, array in weights.items()}
    if settings["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)  # strict: names must match exactly
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert relative_error(our_logits(tmp_path, settings, weights), expected) < 1e-5


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_cached_decode_equals_prefill(model_type: str, tmp_path: Path) -> None:
    path = tiny_models.tiny_gguf(tmp_path / "model.gguf", model_type, type=GGMLType.Q8_0)
    runner = Runner(path, ReferenceOps())
    pages = [5, 0, 9]
    at_once = runner.run((IDS, 0, pages))
    other_pages = [3, 8, 1]
    decoded = [runner.run((IDS[:17], 0, other_pages))]
    decoded += [runner.run(([token], 17 + i, other_pages)) for i, token in enumerate(IDS[17:])]
    np.testing.assert_array_equal(np.concatenate(decoded), at_once)


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


def test_sequences_in_one_batch_do_not_see_each_other(tmp_path: Path) -> None:
    runner = Runner(tiny_models.tiny_gguf(tmp_path / "model.gguf", sliding_window=None), ReferenceOps())
    a, b = IDS[:20], IDS[20:]
    alone_a, alone_b = runner.logits(a), runner.logits(b)
    # First the start of both, then the rest of each: 3 tokens of one and 1 of the other.
    first = runner.run((a[:17], 0, [1, 3]), (b[:20], 0, [2, 0]))
    second = runner.run((a[17:], 17, [1, 3]), (b[20:], 20, [2, 0]))
    np.testing.assert_array_equal(np.concatenate([first[:17], second[:3]]), alone_a)
    np.testing.assert_array_equal(np.concatenate([first[17:], second[3:]]), alone_b)


def test_shared_pages_serve_two_sequences(tmp_path: Path) -> None:
    runner = Runner(tiny_models.tiny_gguf(tmp_path / "model.gguf"), ReferenceOps())
    prefix, a, b = IDS[:16], IDS[16:20], IDS[20:30]
    expected_a, expected_b = runner.logits(prefix + a)[16:], runner.logits(prefix + b)[16:]
    runner.run((prefix, 0, [7]))
    logits = runner.run((a, 16, [7, 2]), (b, 16, [7, 4]))
    np.testing.assert_array_equal(logits, np.concatenate([expected_a, expected_b]))


def test_a_copied_page_continues_like_its_source(tmp_path: Path) -> None:
    runner = Runner(tiny_models.tiny_gguf(tmp_path / "model.gguf"), ReferenceOps())
    runner.run((IDS[:10], 0, [4]))
    runner.cache.copy(0, 4, 6)
    runner.run((IDS[20:26], 10, [4]))  # the source sequence continues separately
    np.testing.assert_array_equal(runner.run((IDS[10:12], 10, [6])), runner.logits(IDS[:12])[10:])


def test_only_wanted_rows_come_back(tmp_path: Path) -> None:
    runner = Runner(tiny_models.tiny_gguf(tmp_path / "model.gguf"), ReferenceOps())
    everything = runner.logits(IDS)
    some = runner.run((IDS, 0, range(3)), outputs=[40, 3])
    np.testing.assert_array_equal(some, everything[[40, 3]])


def test_stories260k_gives_its_published_logits() -> None:
    runner = Runner(shared_data("models/stories260K/stories260K.gguf"), exact_ops())
    logits = runner.logits([1, 403, 407, 261, 378])[-1]  # "Once upon a time"
    assert list(np.argsort(-logits)[:2]) == [432, 383]
    np.testing.assert_allclose(logits[[432, 383]], [17.7994, 14.2813], atol=1e-4)


STORY656K_IDS = [1, 80, 147, 201, 282, 57]  # "Once upon a time"


def test_story656k_in_q8_0_gives_its_known_logit() -> None:
    runner = Runner(shared_data("models/story656K/TinyStories-656K-Q8_0.gguf"), exact_ops())
    logits = runner.logits(STORY656K_IDS)[-1]
    assert logits.argmax() == 313
    assert logits[313] == pytest.approx(17.2792, abs=1e-4)


def test_story656k_from_hugging_face_gives_its_known_logit(tmp_path: Path) -> None:
    folder = shared_data("models/story656K")
    settings = json.loads((folder / "config.json").read_text())
    settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    weights = read_safetensors(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"]  # stored once, with this name
    path = tiny_models.write_gguf(tmp_path / "model.gguf", settings, weights)
    logits = Runner(path, exact_ops()).logits(STORY656K_IDS)[-1]
    assert logits.argmax() == 313
    assert logits[313] == pytest.approx(17.3808, abs=1e-4)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a file with a header length, a JSON header and data."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "F32"
            start, stop = entry["data_offsets"]
            data = np.frombuffer(content[8 + length + start : 8 + length + stop], np.float32)
            tensors[name] = data.reshape(entry["shape"])
    return tensors
