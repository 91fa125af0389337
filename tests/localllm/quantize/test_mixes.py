"""Mixes: llama.cpp's choices of types.

The expected types are those of files that its ``llama_model_quantize`` wrote; `tests/benchmarks/quantizers.py`
compares all mixes on many models with the library itself.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from localllm.errors import ModelError, UsageError
from localllm.quant.types import GGMLType
from localllm.quantize.mixes import (
    MIXES,
    chooser_for,
    fitting,
    is_quantizable,
    layer_order,
    mix_named,
    needs_importance,
)

T = GGMLType


def names_of(n_layers: int, *, tied: bool = False) -> list[str]:
    parts = ["attn_k", "attn_norm", "attn_output", "attn_q", "attn_v", "ffn_down", "ffn_gate", "ffn_norm", "ffn_up"]
    blocks = [f"blk.{i}.{part}.weight" for i in range(n_layers) for part in parts]
    return sorted(
        ["token_embd.weight", "output_norm.weight", *([] if tied else ["output.weight"]), *blocks], key=layer_order
    )


def choose(
    mix: str,
    n_layers: int = 16,
    *,
    width: int = 256,
    kv_heads: int = 8,
    architecture: str = "llama",
    tied: bool = False,
    importance: bool = False,
    experts: int = 0,
    overrides: Any = (),
) -> dict[str, GGMLType]:
    metadata = {
        f"{architecture}.block_count": n_layers,
        f"{architecture}.attention.head_count": 8,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.expert_count": experts,
    }
    names = names_of(n_layers, tied=tied)
    chooser = chooser_for(mix, architecture, metadata, names, importance, overrides)
    shape = {name: (width,) if "norm" in name else (64, width) for name in names}
    return {name: fitting(chooser.wanted_type(name, shape[name], T.F32), shape[name][-1]) for name in names}


def layers(types: dict[str, GGMLType], part: str, type: GGMLType) -> list[int]:
    return [i for i in range(len(types)) if types.get(f"blk.{i}.{part}.weight") is type]


@pytest.mark.parametrize("value", ["x", [], ["x"], 2.5])
def test_an_invalid_number_of_heads_is_refused(value: Any) -> None:
    metadata = {"llama.attention.head_count": 8, "llama.attention.head_count_kv": value}
    with pytest.raises(ModelError, match=r"llama.attention.head_count_kv is .* must be of type int"):
        chooser_for("Q4_K_M", "llama", metadata, [], False)


def test_the_first_layer_has_the_heads_that_count() -> None:
    metadata = {"llama.attention.head_count": 8, "llama.attention.head_count_kv": np.array([2, 8], np.int32)}
    assert chooser_for("Q4_K_M", "llama", metadata, [], False).n_groups == 4


def test_q4_k_m() -> None:
    types = choose("Q4_K_M", 32)
    better = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert layers(types, "attn_v", T.Q6_K) == layers(types, "ffn_down", T.Q6_K) == better
    assert types["output.weight"] is T.Q6_K
    assert types["token_embd.weight"] is types["blk.4.attn_v.weight"] is types["blk.0.attn_q.weight"] is T.Q4_K
    assert types["blk.0.attn_norm.weight"] is types["output_norm.weight"] is T.F32


def test_q3_k_m() -> None:
    types = choose("Q3_K_M", 32)
    assert layers(types, "attn_v", T.Q5_K) == layers(types, "ffn_down", T.Q5_K) == [0, 1]
    assert len(layers(types, "ffn_down", T.Q4_K)) == 30
    assert len(layers(types, "attn_output", T.Q4_K)) == 32
    assert types["blk.3.ffn_up.weight"] is types["token_embd.weight"] is T.Q3_K


def test_iq3_xs() -> None:
    types = choose("IQ3_XS", 16, importance=True)
    assert layers(types, "ffn_up", T.IQ3_S) == layers(types, "ffn_gate", T.IQ3_S) == [0, 1, 14, 15]
    assert len(layers(types, "attn_q", T.IQ3_XXS)) == len(layers(types, "attn_k", T.IQ3_XXS)) == 16
    assert types["blk.0.attn_v.weight"] is T.IQ3_S


def test_iq2_m() -> None:
    types = choose("IQ2_M", 16, importance=True)
    assert layers(types, "ffn_down", T.IQ3_S) == [0, 1]
    assert len(layers(types, "attn_v", T.IQ3_S)) == len(layers(types, "attn_output", T.IQ3_S)) == 16
    assert (types["output.weight"], types["token_embd.weight"]) == (T.Q5_K, T.IQ3_S)
    assert types["blk.5.ffn_up.weight"] is T.IQ2_S


def test_grouped_heads_make_values_small_and_precious() -> None:
    assert choose("Q2_K", kv_heads=8)["blk.0.attn_v.weight"] is T.Q3_K
    assert choose("Q2_K", kv_heads=2)["blk.0.attn_v.weight"] is T.Q4_K
    assert choose("IQ4_XS", kv_heads=2)["blk.9.attn_v.weight"] is T.Q5_K


def test_importance_changes_choices() -> None:
    assert layers(choose("IQ4_XS"), "ffn_down", T.Q5_K) == [0, 1]
    assert layers(choose("IQ4_XS", importance=True), "ffn_down", T.Q5_K) == []
    assert layers(choose("Q4_0", importance=True), "ffn_down", T.Q4_1) == [0, 1]
    assert layers(choose("Q4_0"), "ffn_down", T.Q4_0) == list(range(16))


def test_eight_experts_are_mixtral() -> None:
    types = choose("Q4_K_M", experts=8)
    assert types["blk.3.attn_k.weight"] is types["blk.3.attn_v.weight"] is T.Q8_0
    assert types["blk.3.attn_output.weight"] is T.Q5_K


def test_embeddings_that_are_the_output_too_are_treated_as_it() -> None:
    assert choose("Q4_K_M", tied=True)["token_embd.weight"] is T.Q6_K
    assert choose("Q8_0", tied=True)["token_embd.weight"] is T.Q8_0


@pytest.mark.parametrize(
    ("mix", "width", "expected"),
    [
        ("Q4_K_S", 192, T.Q5_0),
        ("Q5_K_S", 192, T.Q5_1),
        ("Q6_K", 192, T.Q8_0),
        ("Q3_K_S", 192, T.Q4_0),
        ("IQ3_S", 192, T.IQ4_NL),
        ("Q4_K_S", 80, T.F16),
        ("Q8_0", 80, T.F16),
    ],
)
def test_rows_that_do_not_fill_blocks(mix: str, width: int, expected: GGMLType) -> None:
    assert choose(mix, width=width)["blk.9.ffn_up.weight"] is expected


def test_overrides_count_before_the_mix_but_not_before_the_shape() -> None:
    overrides = [(re.compile("ffn_down"), T.Q8_0), (re.compile(r"blk\.1\."), T.Q2_K), (re.compile("norm"), T.Q8_0)]
    types = choose("Q4_K_M", overrides=overrides)
    assert types["blk.1.ffn_down.weight"] is T.Q8_0
    assert types["blk.1.ffn_up.weight"] is T.Q2_K
    assert types["blk.2.ffn_up.weight"] is T.Q4_K
    assert types["blk.2.ffn_norm.weight"] is T.F32
    assert choose("Q4_K_M", width=192, overrides=overrides)["blk.1.ffn_up.weight"] is T.Q4_0


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.0.ffn_up.weight", (4, 4), True),
        ("blk.0.ffn_up_exps.weight", (2, 4, 4), True),
        ("blk.0.ffn_up.weight", (1, 4), False),
        ("blk.0.ffn_up.bias", (4, 4), False),
        ("blk.0.attn_q_norm.weight", (4, 4), False),
        ("blk.0.ffn_gate_inp.weight", (4, 4), False),
        ("blk.0.ssm_conv1d.weight", (4, 4), False),
        ("position_embd.weight", (4, 4), False),
        ("blk.0.time_mix_w1.weight", (4, 4), False),
    ],
)
def test_tensors_that_are_quantised(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_quantizable(name, shape) is expected


def test_types_that_need_an_importance_matrix() -> None:
    assert needs_importance("blk.0.ffn_up.weight", T.IQ2_XS, "IQ2_XS")
    assert needs_importance("blk.0.ffn_up.weight", T.Q2_K, "Q2_K_S")
    assert not needs_importance("blk.0.ffn_up.weight", T.Q2_K, "Q2_K")
    assert not needs_importance("output.weight", T.IQ2_XS, "IQ2_XS")


def test_names() -> None:
    assert (mix_named("q4_k_m"), mix_named("Q4_K"), mix_named("mxfp4")) == ("Q4_K_M", "Q4_K_M", "MXFP4_MOE")
    with pytest.raises(UsageError, match=r"there is no type 'Q4_K_X': did you mean Q4_K_S\? .* F32, .*Q4_K_M, "):
        mix_named("Q4_K_X")
    assert len({number for number, _ in MIXES.values()}) == len(MIXES)
