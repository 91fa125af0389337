"""Hyper-parameters that are missing, of the wrong type, out of range, or contradictory."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from localllm.errors import ModelError
from localllm.kernels.graph import KVCache, Operation
from localllm.kernels.operations import Attention, RMSNorm, RopeAppend, Route
from localllm.models.config import ModelConfig
from localllm.models.registry import Model, read_model
from localllm.quant.types import GGMLType

GOOD: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 172,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 8,
    "tokenizer.ggml.tokens": ["a"] * 512,
}


@dataclass
class FakeTensor:
    """A tensor with the attributes that are checked against hyper-parameters."""

    shape: tuple[int, ...]
    name: str = ""
    type: GGMLType = GGMLType.F32
    data: Any = None


SHAPES: dict[str, tuple[int, ...]] = {
    "attn_norm": (64,),
    "attn_q": (64, 64),
    "attn_k": (32, 64),
    "attn_v": (32, 64),
    "attn_output": (64, 64),
    "ffn_norm": (64,),
    "ffn_gate": (172, 64),
    "ffn_up": (172, 64),
    "ffn_down": (64, 172),
}
TENSORS: dict[str, Any] = {
    "token_embd.weight": FakeTensor((512, 64)),
    "output_norm.weight": FakeTensor((64,)),
    **{f"blk.{i}.{name}.weight": FakeTensor(shape) for i in range(2) for name, shape in SHAPES.items()},
}


@dataclass
class FakeFile:
    metadata: dict[str, Any]
    tensors: dict[str, Any]


def read(changes: dict[str, Any], tensors: dict[str, Any] | None = None) -> Model:
    """Return the model of `GOOD` with changed keys (None removes a key) and tensors instead of `TENSORS`."""
    metadata = {key: value for key, value in (GOOD | changes).items() if value is not None}
    return read_model(FakeFile(metadata, TENSORS | (tensors or {})))


def operations(model: Model, kind: type[Operation[Any]]) -> list[Any]:
    return [node.operation for node in model.graph.nodes if type(node.operation) is kind]


def shapes(**changes: tuple[int, ...]) -> dict[str, Any]:
    """Return tensors of both layers with these shapes."""
    return {f"blk.{i}.{name}.weight": FakeTensor(shape) for i in range(2) for name, shape in changes.items()}


def test_a_whole_configuration() -> None:
    model = read({})
    assert model.config == ModelConfig("llama", 2, 2048, 2048, 64, 512)
    assert model.graph.caches == {i: KVCache(i, 4, 8, 8) for i in range(2)}
    for append, attention in zip(operations(model, RopeAppend), operations(model, Attention), strict=True):
        np.testing.assert_allclose(append.rope.frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-6)
        assert (attention.n_heads, attention.window, attention.scale) == (8, None, 8**-0.5)


def test_optional_keys() -> None:
    wide = shapes(attn_q=(256, 64), attn_k=(256, 64), attn_v=(256, 64), attn_output=(64, 256))
    model = read(
        {
            "llama.attention.key_length": 32,
            "llama.attention.value_length": 32,
            "llama.attention.head_count_kv": None,
            "llama.attention.sliding_window": 128,
            "llama.rope.dimension_count": None,
            "llama.rope.freq_base": 5e5,
        },
        wide,
    )
    assert model.graph.caches == {i: KVCache(i, 8, 32, 32, window=128) for i in range(2)}
    frequencies = operations(model, RopeAppend)[0].rope.frequencies
    np.testing.assert_allclose(frequencies, 5e5 ** -(np.arange(16) / 16), rtol=1e-6)


def test_keys_and_values_may_differ_in_length() -> None:
    tensors = shapes(attn_q=(128, 64), attn_k=(64, 64), attn_v=(32, 64), attn_output=(64, 64))
    model = read({"llama.attention.key_length": 16, "llama.attention.value_length": 8}, tensors)
    assert model.graph.caches[0] == KVCache(0, 4, 16, 8)


@pytest.mark.parametrize("value", [[4, 4], (4, 4), np.array([4, 4], np.int32), np.uint32(4), np.int64(4)])
def test_integers_may_be_numpys_and_equal_in_all_layers(value: Any) -> None:
    n_heads = read({"llama.attention.head_count_kv": value}).graph.caches[0].n_heads
    assert type(n_heads) is int
    assert n_heads == 4


def test_an_integer_will_do_for_a_float() -> None:
    frequencies = operations(read({"llama.rope.freq_base": 10_000}), RopeAppend)[0].rope.frequencies
    np.testing.assert_allclose(frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-6)


#: Bad values by key.
BAD: dict[str, list[Any]] = {
    "block_count": [None, 0, 1, 3, 10**6, 2**63, "2", 2.0, -2],
    "context_length": [None, 0, 1 << 32],
    "embedding_length": [None, 0, 2**40, True, 65],
    "feed_forward_length": [None, 0, [172, 172, 172], [172, 100], [True, True], ["172", "172"]],
    "attention.head_count": [0, None, np.array([8, 16])],
    "attention.head_count_kv": [3, 16, 0, [4, 2], []],
    "attention.key_length": [0, 2**31, 520],
    "attention.value_length": [1],
    "attention.sliding_window": [-1],
    "attention.layer_norm_rms_epsilon": [None, math.nan, math.inf, -1e-6, np.float32(math.nan), "1e-5"],
    "rope.dimension_count": [7, 10, 0],
    "rope.freq_base": [0.0, math.nan, math.inf],
    "rope.scaling.type": ["dynamic", 1],
    "rope.scaling.factor": [-1.0, 1e-30, math.nan],
    "rope.scaling.original_context_length": [0],
    "rope.scaling.attn_factor": [0.0],
    "rope.scaling.yarn_beta_fast": [0.0],
    "rope.scaling.alpha": [1000.0],
    "expert_count": [-1, 4097],
    "attention.causal": [0],
    "attention.clamp_kqv": [8.0],
    "final_logit_softcapping": [np.float32(30.0)],
    "attention.sliding_window_pattern": [[True, False]],
    "embedding_scale": [12.0],
}


@pytest.mark.parametrize(("key", "value"), [(f"llama.{key}", value) for key in BAD for value in BAD[key]])
def test_bad_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        read({key: value})
    assert key in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("key", "largest"),
    [
        ("context_length", 2**31 - 1),
        ("feed_forward_length", 1 << 24),
        ("attention.key_length", 512),
        ("attention.sliding_window", 2**32 - 1),
        ("rope.scaling.original_context_length", 2**31 - 1),
        ("rope.scaling.factor", 1e6),
    ],
)
def test_the_largest_value_is_accepted_and_the_next_is_refused(key: str, largest: float) -> None:
    # The model has no tensors of these shapes.
    is_shape = key in ("feed_forward_length", "attention.key_length")
    with pytest.raises(ModelError, match=r"^tensor blk\.0\.") if is_shape else nullcontext():
        read({f"llama.{key}": largest})
    with pytest.raises(ModelError, match=rf"^llama\.{key} is "):
        read({f"llama.{key}": largest + 1})


@pytest.mark.parametrize("key", ["llama.expert_count", "llama.attention.scale", "llama.final_logit_softcapping"])
def test_unsupported_keys_may_have_values_that_change_nothing(key: str) -> None:
    read({key: 0})


EXPERTS = {"llama.expert_count": 8, "llama.expert_used_count": 2}


def mixture(width: int = 172) -> dict[str, Any]:
    """Tensors of experts."""
    names = {"ffn_gate_exps": (8, width, 64), "ffn_up_exps": (8, width, 64), "ffn_down_exps": (8, 64, width)}
    return shapes(ffn_gate_inp=(8, 64), **names)


def read_mixture(changes: dict[str, Any], width: int = 172) -> Model:
    tensors = {name: tensor for name, tensor in (TENSORS | mixture(width)).items() if not re.search(DENSE, name)}
    metadata = {key: value for key, value in (GOOD | EXPERTS | changes).items() if value is not None}
    return read_model(FakeFile(metadata, tensors))


DENSE = r"ffn_(gate|up|down)\.weight"


def test_experts() -> None:
    assert not operations(read({"llama.expert_count": 0}), Route)
    plain = operations(read_mixture({}), Route)[0]
    assert (plain.logits.width, plain.k, plain.scale, plain.gating, plain.norm_topk_prob) == (
        8,
        2,
        1,
        "softmax",
        True,
    )
    more = {
        "llama.expert_feed_forward_length": 24,
        "llama.expert_weights_scale": 2.5,
        "llama.expert_gating_func": 2,
        "llama.expert_weights_norm": False,
        "llama.expert_group_count": 4,
        "llama.expert_group_used_count": 2,
    }
    route = operations(read_mixture(more, 24), Route)[0]
    assert (route.scale, route.gating, route.norm_topk_prob) == (2.5, "sigmoid", False)
    assert (route.n_groups, route.n_top_groups) == (4, 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_count", None),
        ("llama.expert_used_count", 0),
        ("llama.expert_used_count", 9),
        ("llama.expert_used_count", None),
        ("llama.expert_feed_forward_length", 0),
        ("llama.expert_weights_scale", math.nan),
        ("llama.expert_gating_func", 5),
        ("llama.expert_weights_norm", 1),
    ],
)
def test_bad_numbers_of_experts_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key):
        read_mixture({key: value})


def test_hyper_parameters_that_no_operation_takes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"8 experts cannot be 3 groups.*contradict each other"):
        read_mixture({"llama.expert_group_count": 3})


def test_experts_of_an_architecture_that_has_none_are_refused() -> None:
    keys = {key.replace("llama.", "qwen2."): value for key, value in (GOOD | EXPERTS).items()}
    biases = {f"blk.{i}.attn_{x}.bias": FakeTensor((64 if x == "q" else 32,)) for i in range(2) for x in "qkv"}
    with pytest.raises(ModelError, match=r"qwen2\.expert_count = 8, which localllm does not support yet"):
        read_model(FakeFile(keys | {"general.architecture": "qwen2"}, TENSORS | biases))


def test_keys_of_a_part_that_the_file_lacks_change_nothing() -> None:
    """Converters write these keys for a whole family: for experts, Mamba layers and a rotation."""
    keys = {"expert_shared_count": 0, "expert_weights_norm": False, "expert_feed_forward_length": 64}
    keys |= {"ssm.conv_kernel": 4, "ssm.state_size": 128}
    read_model(FakeFile(GOOD | {f"llama.{key}": value for key, value in keys.items()}, TENSORS))
    for key, tensor in (("expert_feed_forward_length", "blk.0.ffn_up_exps.weight"), ("ssm.rank", "blk.0.ssm_a")):
        with pytest.raises(ModelError, match=rf"llama\.{key} = 64, which localllm does not support yet"):
            read_model(FakeFile(GOOD | {f"llama.{key}": 64}, TENSORS | {tensor: FakeTensor((64,))}))


def test_a_model_that_sees_both_ways_is_for_vectors() -> None:
    model = read_model(FakeFile(GOOD | {"llama.attention.causal": False}, TENSORS))
    assert not model.graph.is_causal
    assert model.pooling is not None
    assert model.pooling.kind == "mean"


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ModelError) as caught:
        read({"llama.context_length": "x" * 100_000})
    assert len(str(caught.value)) < 250


def test_an_unknown_rope_scaling_is_named_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'dynamic'.*none, linear, yarn, longrope"):
        read({"llama.rope.scaling.type": "dynamic"})


def test_all_layers_must_be_present() -> None:
    tensors = {name: tensor for name, tensor in TENSORS.items() if "blk.0" not in name}
    with pytest.raises(ModelError, match=r"block_count is 2, but the file has tensors of 1 layers"):
        read_model(FakeFile(GOOD, tensors))


def test_a_layer_is_not_mistaken_for_a_prediction_block() -> None:
    with pytest.raises(ModelError, match=r"nextn_predict_layers is 1, but layer 1 has no tensor blk\.1\.nextn"):
        read({"llama.nextn_predict_layers": 1})


def test_the_vocabulary_must_be_as_long_as_the_embedding() -> None:
    with pytest.raises(ModelError, match=r"512 rows.*511 tokens"):
        read({"tokenizer.ggml.tokens": ["a"] * 511})


def test_without_tokens_the_vocabulary_size_must_match() -> None:
    assert read({"tokenizer.ggml.tokens": None}).config.n_vocab == 512
    assert read({"tokenizer.ggml.tokens": None, "llama.vocab_size": 512}).config.n_vocab == 512
    with pytest.raises(ModelError, match=r"vocab_size"):
        read({"tokenizer.ggml.tokens": None, "llama.vocab_size": 513})


def test_a_file_without_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        read_model(FakeFile(GOOD, {name: tensor for name, tensor in TENSORS.items() if name.startswith("blk")}))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.sampled_from(["", "none", "yarn", "longrope", "2"]),
    st.floats(width=32).map(np.float32),
    st.lists(st.integers(0, 10), max_size=3),
    st.lists(st.integers(0, 10), max_size=3).map(lambda values: np.array(values, np.uint32)),
    st.lists(st.lists(st.integers(0, 1), max_size=2), max_size=2),
)
KEYS = st.sampled_from(sorted({*GOOD, *(f"llama.{key}" for key in BAD)} - {"general.architecture"}))


@given(st.dictionaries(KEYS, VALUES, max_size=3))
def test_any_value_gives_a_configuration_or_a_model_error(changes: dict[str, Any]) -> None:
    try:
        model = read(changes)
    except ModelError:
        return
    for append, attention in zip(operations(model, RopeAppend), operations(model, Attention), strict=True):
        assert attention.n_heads % attention.cache.n_heads == 0
        assert np.isfinite(append.rope.frequencies).all()
        assert math.isfinite(append.rope.magnitude)
    assert all(math.isfinite(norm.eps) for norm in operations(model, RMSNorm))


@pytest.mark.parametrize("shape", [(), (512,), (2, 512, 64)])
def test_an_embedding_that_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight has the shape.*must be a matrix"):
        read({}, TENSORS | {"token_embd.weight": FakeTensor(shape)})


def test_a_file_without_an_architecture_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no general\.architecture"):
        read({"general.architecture": None})
