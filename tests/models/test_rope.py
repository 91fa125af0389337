"""Rotary frequencies compared with transformers and with the papers' formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.errors import ModelError
from localllm.gguf import GGUFFile
from localllm.kernels.graph import Rope
from localllm.models.config import Header, ModelMetadata, read_general
from localllm.models.rope import make_rope
from localllm.models.weights import Weights
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 64.0,
        "beta_slow": 2.0,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 0.8,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    # The whole ramp is below the lowest frequency, or has no width.
    "yarn-short": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
}


def rope_of(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    context: int | None = None,
    interleaved: bool = False,
    **changes: Any,
) -> Rope:
    """Return the rope of a tiny model with additional metadata and tensors."""
    settings = tiny_models.config(**({"head_dim": 64} | changes))
    arrays = tiny_models.gguf_tensors(settings, tiny_models.random_weights(settings)) | (tensors or {})
    encoded = {name: tiny_models.encode(array, GGMLType.F32) for name, array in arrays.items()}
    keys = tiny_models.gguf_metadata(settings) | (metadata or {})
    tiny_models.write_file(path / "rope.gguf", "llama", keys, encoded)
    with GGUFFile.open(path / "rope.gguf") as file:
        meta = ModelMetadata(file.metadata, "llama")
        config = read_general(meta, file.tensors)
        header = Header(meta, config, Weights(file), context or config.context_length, "f16")
        return make_rope(header, settings["head_dim"], interleaved=interleaved)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies_are_those_of_transformers(name: str, theta: float, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    transformers = pytest.importorskip("transformers", reason="needs the extra 'reference'")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # Newer transformers read theta from the scaling's parameters, older versions next to them.
    scaling = SCALINGS[name] | {"rope_theta": theta}
    settings = {"rope_scaling": scaling, "rope_theta": theta, "max_position_embeddings": 1 << 17}
    rope = rope_of(tmp_path, **settings)
    config = transformers.AutoConfig.for_model(**tiny_models.config(head_dim=64, **settings))
    theirs = LlamaRotaryEmbedding(config)
    np.testing.assert_allclose(rope.frequencies, theirs.inv_freq.numpy(), rtol=2e-6)
    assert rope.magnitude == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_plain_frequencies_are_powers_of_theta(tmp_path: Path) -> None:
    rope = rope_of(tmp_path, rope_theta=10_000.0, head_dim=8, interleaved=True)
    np.testing.assert_allclose(rope.frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-6)
    assert rope.frequencies.dtype == np.float32
    assert rope.interleaved
    assert rope.magnitude == 1


def test_part_of_a_head_can_be_rotated(tmp_path: Path) -> None:
    rope = rope_of(tmp_path, {"llama.rope.dimension_count": 16})
    np.testing.assert_allclose(rope.frequencies, 10_000.0 ** -(np.arange(8) / 8), rtol=1e-6)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling_divides_frequencies(metadata: dict[str, Any], tmp_path: Path) -> None:
    np.testing.assert_allclose(rope_of(tmp_path, metadata).frequencies * 4, rope_of(tmp_path).frequencies, rtol=1e-6)


def test_scaling_none_ignores_the_factor(tmp_path: Path) -> None:
    rope = rope_of(tmp_path, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0})
    np.testing.assert_array_equal(rope.frequencies, rope_of(tmp_path).frequencies)


def test_yarn_keeps_high_frequencies_and_scales_low_ones(tmp_path: Path) -> None:
    """The ends of the ramp in section 3.2 of the paper: 32 turns and 1 turn in 4,096 tokens."""
    rope = rope_of(tmp_path, rope_scaling=SCALINGS["yarn"] | {"original_max_position_embeddings": 4096})
    plain = rope_of(tmp_path).frequencies
    turns = 4096 * plain / (2 * math.pi)
    kept, scaled = turns > 40, turns < 0.8  # with a margin, because the ramp ends at whole dimensions
    assert kept.any()
    assert scaled.any()
    np.testing.assert_allclose(rope.frequencies[kept], plain[kept], rtol=1e-6)
    np.testing.assert_allclose(rope.frequencies[scaled], plain[scaled] / 4, rtol=1e-6)
    between = ~kept & ~scaled
    assert (rope.frequencies[between] <= plain[between] * (1 + 1e-6)).all()
    assert (rope.frequencies[between] >= plain[between] / 4 * (1 - 1e-6)).all()
    assert rope.magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_the_ramp_of_yarn_starts_at_the_first_frequency(tmp_path: Path) -> None:
    """No dimension turns 32 times in 16 tokens; the fifth is the first that turns less than once."""
    rope = rope_of(tmp_path, rope_scaling=SCALINGS["yarn"] | {"original_max_position_embeddings": 16})
    kept = np.clip(1 - np.arange(32) / 4, 0, 1)
    np.testing.assert_allclose(rope.frequencies, rope_of(tmp_path).frequencies * (kept + (1 - kept) / 4), rtol=1e-6)


def test_yarn_without_extrapolation_is_linear_scaling(tmp_path: Path) -> None:
    yarn = rope_of(
        tmp_path,
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.yarn_ext_factor": 0.0,
        },
    )
    np.testing.assert_allclose(yarn.frequencies, rope_of(tmp_path).frequencies / 4, rtol=1e-6)


def test_attn_factor_scales_the_magnitude(tmp_path: Path) -> None:
    assert rope_of(tmp_path, {"llama.rope.scaling.attn_factor": 1.25}).magnitude == 1.25


def test_explicit_factors_divide_frequencies(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 32).astype(np.float32)
    rope = rope_of(tmp_path, tensors={"rope_freqs.weight": factors})
    np.testing.assert_allclose(rope.frequencies, rope_of(tmp_path).frequencies / factors, rtol=1e-6)


@pytest.mark.parametrize(("context", "name"), [(4096, "short"), (4097, "long"), (None, "long")])
def test_longrope_takes_the_factors_of_the_context_in_use(context: int | None, name: str, tmp_path: Path) -> None:
    factors = {
        "short": np.linspace(1, 2, 32).astype(np.float32),
        "long": np.linspace(1, 60, 32).astype(np.float32),
    }
    metadata = {
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.original_context_length": 4096,
        "llama.rope.scaling.attn_factor": 1.19,
        "llama.context_length": 131072,
    }
    tensors = {f"rope_factors_{key}.weight": array for key, array in factors.items()}
    rope = rope_of(tmp_path, metadata, tensors, context=context)
    np.testing.assert_allclose(rope.frequencies, rope_of(tmp_path).frequencies / factors[name], rtol=1e-6)
    assert rope.magnitude == pytest.approx(1.19)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_factor_that_is_no_positive_number_is_refused(bad: float, tmp_path: Path) -> None:
    factors = np.ones(32, np.float32)
    factors[5] = bad
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        rope_of(tmp_path, tensors={"rope_freqs.weight": factors})


def test_factors_of_the_wrong_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rope_freqs\.weight has the shape \[31\].*\[32\]"):
        rope_of(tmp_path, tensors={"rope_freqs.weight": np.ones(31, np.float32)})


def test_longrope_without_factors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rope_factors_long\.weight"):
        rope_of(tmp_path, {"llama.rope.scaling.type": "longrope"})
