"""Mixtures of experts: scaled weights, loading and planning."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

import localllm
from localllm.gguf import GGUFFile
from localllm.models.registry import read_model
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.backends import shared_by_threads
from tests.helpers.recorder import CPUOps, ReferenceOps
from tests.helpers.run_model import Runner

T = GGMLType
IDS = [int(i) for i in np.random.default_rng(3).integers(3, 300, 60)]


@cache
def cpu() -> CPUOps:
    return shared_by_threads(CPUOps(threads=2))


def test_expert_weights_are_scaled(tmp_path: Path) -> None:
    """Double the experts' output."""
    settings = tiny_models.config("qwen3_moe", num_hidden_layers=1)
    weights = tiny_models.random_weights(settings)
    scaled = tiny_models.write_gguf(
        tmp_path / "scaled.gguf", settings, weights, metadata={"qwen3moe.expert_weights_scale": 2.0}
    )
    doubled = {name: 2 * array if name.endswith("down_proj") else array for name, array in weights.items()}
    large = tiny_models.write_gguf(tmp_path / "large.gguf", settings, doubled)
    ours, expected = (Runner(path, ReferenceOps()).logits(IDS[:5]) for path in (scaled, large))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_mixture_is_loaded_and_planned_as_other_models_are(tmp_path: Path) -> None:
    path = tiny_models.tiny_gguf(tmp_path / "model.gguf", "qwen3_moe", type=T.Q4_0)
    with localllm.load(path, context=64) as llm:
        assert len(llm.generate(IDS[:20], max_tokens=5, ignore_eos=True).ids) == 5
        placed = llm.info.placement
    weights = {weight.name: weight for weight in Runner(path, cpu()).step.weights}
    for i in range(3):
        assert weights[f"blk.{i}.ffn_up_exps.weight"].layer == i
    experts = sum(weight.n_bytes for name, weight in weights.items() if "_exps" in name)
    others = sum(weight.n_bytes for name, weight in weights.items() if name != "token_embd.weight") - experts
    assert placed.multiplied == others + experts - experts * 6 // 9
    assert placed.on("cpu").multiplied == placed.multiplied


def test_the_plan_has_room_for_the_output_of_experts(tmp_path: Path) -> None:
    """A token needs a row of gates and a row of products per selected expert."""
    sizes = []
    for k in (1, 9):
        path = tiny_models.tiny_gguf(tmp_path / f"{k}.gguf", "qwen3_moe", num_experts_per_tok=k)
        with GGUFFile.open(path) as file:
            footprint = cpu().footprint(read_model(file).graph, n_pages=(1,), max_tokens=64, max_outputs=1)
            sizes.append(footprint.buffers)
    assert sizes[1] - sizes[0] >= 4 * 64 * 8 * 2 * 96
