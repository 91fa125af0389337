"""NaN or infinite weights raise an error that says so, and never produce a token."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm.errors import ModelError
from localllm.quant.types import GGMLType
from tests.helpers.devices import DEVICES
from tests.helpers.tiny_models import config, random_weights, write_gguf

PLACES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.layers.0.input_layernorm.weight",
    "query": "model.layers.0.self_attn.q_proj.weight",
    "value": "model.layers.1.self_attn.v_proj.weight",
    "gate": "model.layers.1.mlp.gate_proj.weight",
    "down": "model.layers.2.mlp.down_proj.weight",
    "last norm": "model.norm.weight",
    "output": "lm_head.weight",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("type", [GGMLType.F32, GGMLType.F16, GGMLType.Q8_0], ids=lambda type: type.name)
@pytest.mark.parametrize("place", PLACES)
def test_nan_in_a_weight_is_an_error(place: str, type: GGMLType, device: str, tmp_path: Path) -> None:
    settings = config(intermediate_size=96)
    weights = random_weights(settings)
    weights[PLACES[place]][..., 5] = math.nan
    with np.errstate(invalid="ignore"):
        path = write_gguf(tmp_path / "nan.gguf", settings, weights, type=type)
    check(path, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", [place for place in PLACES if place != "value"])
def test_infinity_in_a_weight_is_an_error(place: str, device: str, tmp_path: Path) -> None:
    """Except values, which the cache clips to the largest float16."""
    settings = config()
    weights = random_weights(settings)
    weights[PLACES[place]][..., 5] = math.inf
    check(write_gguf(tmp_path / "inf.gguf", settings, weights), device)


def check(path: Path, device: str) -> None:
    with localllm.load(path, device=device, threads=1) as llm:
        for options in ({"temperature": 0}, {"temperature": 1.0}, {"mirostat": 2}, {"top_k": 0, "top_p": 1.0}):
            with pytest.raises(ModelError, match=r"logits (hold NaN|are infinite|are -inf).*may be damaged"):
                llm.generate([1, 40, 41], max_tokens=2, **options)  # type: ignore[arg-type]
