"""config.json of released checkpoints: omitted defaults, old names, and settings that a file cannot express.

`tests.benchmarks.configurations` rewrites every tiny model in every way, which takes minutes; here are a few.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import Checkpoint
from localllm.convert.config import Config
from localllm.convert.defaults import PATH
from localllm.errors import ModelError
from localllm.tokenizer import Tokenizer
from tests.helpers import tiny_models
from tests.helpers.checkpoints import write_checkpoint, write_safetensors


def test_the_table_has_the_defaults_of_transformers_classes() -> None:
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    from tests.benchmarks.class_defaults import tables

    written, installed = json.loads(PATH.read_text("utf-8")), json.loads(json.dumps(tables()))
    assert written.keys() == installed.keys()
    for name in written:
        assert written[name] == installed[name], "run python -m tests.benchmarks.class_defaults"


@pytest.mark.parametrize("name", ["llama", "gptneox", "gemma2", "qwen2moe", "olmo3", "bert"])
def test_no_rewriting_gives_a_wrong_model(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    from tests.benchmarks.configurations import TinyModel, rewritings

    tiny = TinyModel(name, tmp_path)
    results = {(each.kind, each.name): tiny.judged(each) for each in rewritings(tiny)}
    assert {each: why for each, (result, why) in results.items() if result == "wrong"} == {}
    assert sum(result in ("equal", "transformers") for result, _ in results.values()) > 20
    assert results["omit", "all defaults"][0] == "equal"


@pytest.mark.parametrize(
    ("name", "rewriting", "expected"),
    [
        ("gemma", "hidden_act = gelu", "equal"),  # which means the tanh form
        ("mamba2", "layer_norm_epsilon = 1.5000000000000002e-05", "transformers"),
        ("mimo2", "rope_parameters.sliding_attention.partial_rotary_factor", "refused"),  # all of a head, then
        ("mistral3", "rope_parameters.mscale", "transformers"),  # without which mscale_all_dim means nothing
        ("modern-bert", "layer_types = ['sliding_attention', 'sliding_attention', 'full_attention',", "transformers"),
        ("nemotron-h", "layer_norm_epsilon = 1.5000000000000002e-05", "transformers"),
        ("nemotron-h", "rms_norm_eps = 1.5000000000000002e-05", "equal"),  # which has no effect
        ("pangu-embedded", "rms_norm_eps", "equal"),  # the default is not Llama's
        ("qwen2-embedding", "is_causal", "transformers"),
        ("qwen4exp", "output_gate_type", "refused"),  # hidden_act, then
        ("qwen4exp", "seed = 1235", "refused"),  # the factors are in the checkpoint
    ],
)
def test_rewritings_that_once_gave_a_wrong_model(name: str, rewriting: str, expected: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    from tests.benchmarks.configurations import TinyModel, rewritings

    tiny = TinyModel(name, tmp_path)
    (found,) = (each for each in rewritings(tiny) if each.name == rewriting)
    assert tiny.judged(found)[0] == expected


@pytest.mark.parametrize("name", ["gemma3", "mlp", "qwen2vl_merger"])
def test_no_rewriting_gives_a_wrong_encoder(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    from tests.benchmarks.configurations import TinyEncoder, rewritings

    tiny = TinyEncoder(name, tmp_path)
    sample = [each for i, each in enumerate(rewritings(tiny)) if i % 4 == 0 or each.kind == "old"]
    results = {(each.kind, each.file, each.name): tiny.judged(each) for each in sample}
    assert {each: why for each, (result, why) in results.items() if result == "wrong"} == {}
    assert sum(result in ("equal", "transformers") for result, _ in results.values()) > 5


def without(folder: Path, *names: str, **changes: Any) -> Path:
    settings = json.loads((folder / "config.json").read_text()) | changes
    settings = {name: value for name, value in settings.items() if name not in names}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_heads_of_keys_are_by_default_as_many_as_heads(tmp_path: Path) -> None:
    whole = Checkpoint(write_checkpoint(tmp_path / "a", num_key_value_heads=4)).metadata
    folder = without(write_checkpoint(tmp_path / "b", num_key_value_heads=4), "num_key_value_heads", "rope_theta")
    assert {**Checkpoint(folder).metadata, "general.name": "a"}.keys() == whole.keys()
    assert Checkpoint(folder).metadata["llama.attention.head_count_kv"] == 4


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        # Pythia
        (
            "gpt_neox",
            {"rotary_pct": 0.5, "rotary_emb_base": 20_000},
            {"partial_rotary_factor": 0.5, "rope_theta": 2e4},
        ),
        ("gpt_neox", {}, {"partial_rotary_factor": 0.25, "rope_theta": 1e4}),
        ("qwen2_vl", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, {"rope_type": "default"}),
        (
            "phi3",
            {"rope_scaling": {"type": "su"}},
            {"rope_type": "longrope", "original_max_position_embeddings": 4096},
        ),
        ("mixtral", {}, {"rope_theta": 1e6}),
        ("PanguEmbedded", {}, {"rope_theta": 1.6e7}),
        (
            "llama",
            {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0},
        ),
        ("apertus", {"rope_scaling": None, "rope_parameters": None}, {"rope_type": "llama3", "factor": 8.0}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_old_names_of_the_rotation(kind: str, settings: dict[str, Any], expected: dict[str, Any]) -> None:
    rope = Config({"model_type": kind} | settings).rope_parameters
    assert {name: rope.get(name) for name in expected} == expected


def test_layers_without_a_window_have_a_rotation_of_their_own() -> None:
    """Gemma 3 of 2025, whose section omits the defaults of its class."""
    text = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = Config({"model_type": "gemma3", "text_config": text})
    full, local = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    assert (full.rope_theta, full.factor, local.rope_theta, local.rope_type) == (1e6, 8.0, 1e4, "default")
    assert config.layer_types == [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)


@pytest.mark.parametrize("n", [0, -1, None, "3"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("afmoe", "global_attn_every_n_layers"),
        ("cohere2_moe", "sliding_window_pattern"),
        ("gemma3_text", "sliding_window_pattern"),
        ("modernbert", "global_attn_every_n_layers"),
        ("qwen3_next", "full_attention_interval"),
    ],
)
def test_the_length_of_a_pattern_of_layers_is_positive(kind: str, name: str, n: object) -> None:
    config = Config({"model_type": kind, "num_hidden_layers": 3, name: n})
    with pytest.raises(ModelError, match=rf"{name} = {n!r}, a number of layers: set it to 1 or more"):
        config.layer_types  # noqa: B018 - worked out when read


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"attention_sink_size": 4}, "has attention_sink_size = 4, which localllm convert does not know"),
        ("llama", {"hidden_act": "gelu"}, "has hidden_act = 'gelu', but a GGUF file of this model means silu"),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "has rope_parameters.rope_type = 'ntk'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "warmth": 1}}, "rope_parameters.warmth = 1"),
        ("llama", {"n_embd": 96}, "hidden_size = 64 and n_embd = 96, two names of one setting"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2, but a GGUF file"),
    ],
)
def test_settings_that_would_be_lost_are_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    Checkpoint(write_checkpoint(tmp_path / "a", kind))
    with pytest.raises(ModelError, match=message):
        Checkpoint(write_checkpoint(tmp_path / "b", kind, **changes))


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 32}, [32, None]),
        ("mistral", {"sliding_window": 4096}, [None, None]),  # longer than the context
        ("mistral", {}, [None, None]),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 1}, [None, None]),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, [32, [0, 1, 1]]),
        ("qwen3", {"layer_types": ["full_attention"] * 3, "sliding_window": None}, [None, None]),
    ],
)
def test_windows(kind: str, changes: dict[str, Any], expected: list[Any], tmp_path: Path) -> None:
    metadata = Checkpoint(write_checkpoint(tmp_path / "a", kind, **changes)).metadata
    architecture = metadata["general.architecture"]
    names = ("attention.sliding_window", "attention.sliding_window_pattern")
    values = [metadata.get(f"{architecture}.{name}") for name in names]
    assert [value.tolist() if isinstance(value, np.ndarray) else value for value in values] == expected


def test_a_context_may_be_longer_than_the_positions_of_the_training(tmp_path: Path) -> None:
    """Command R's."""
    folder = write_checkpoint(tmp_path / "a", max_position_embeddings=128, model_max_length=4096)
    assert Checkpoint(folder).metadata["llama.context_length"] == 4096


def test_experts_weights_are_normed_as_the_configuration_says(tmp_path: Path) -> None:
    for norm, expected in ((True, None), (False, False)):
        folder = write_checkpoint(tmp_path / str(norm), "qwen3_moe", norm_topk_prob=norm)
        assert Checkpoint(folder).metadata.get("qwen3moe.expert_weights_norm") is expected


def test_weights_that_differ_are_not_tied_whatever_the_configuration_says(tmp_path: Path) -> None:
    settings = tiny_models.config()
    weights = tiny_models.random_weights(settings)
    folder = without(write_checkpoint(tmp_path / "a"), tie_word_embeddings=True)
    assert "output.weight" in Checkpoint(folder).tensors
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    write_safetensors(folder / "model.safetensors", weights)
    assert "output.weight" not in Checkpoint(folder).tensors


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<extra_3>\n{% endfor %}"


def test_every_token_that_ends_a_reply_does_so_after_conversion(tmp_path: Path) -> None:
    """Lists in config.json and generation_config.json, the tokenizer's token, and the chat template's."""
    folder = write_checkpoint(tmp_path / "a", eos_token_id=[2, 260])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [261, 262, 2]}))
    usual = Checkpoint(folder)
    settings = {
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        "added_tokens_decoder": {"299": {"content": "<extra_3>", "special": True}},
    }
    assert Tokenizer.from_gguf(usual).eog_ids == {2, 260, 261, 262}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    metadata = (checkpoint := Checkpoint(folder)).metadata
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    assert [metadata[f"tokenizer.ggml.{name}"] for name in names] == [2, 299, 261]
    assert Tokenizer.from_gguf(checkpoint).eog_ids == {2, 260, 261, 262, 299}
