"""Layers assembled of operations, against transformers' own modules with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.kernels import graph as g
from localllm.kernels import operations
from localllm.kernels.graph import Graph, Matrix
from localllm.quant.types import GGMLType
from tests.helpers.backends import Backend
from tests.helpers.recorder import Ops
from tests.helpers.run_model import make_batch
from tests.helpers.weights import Tensor, f32, random

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Array = NDArray[Any]
#: Tokens: more than two of the chunks that modules compute at once.
N = 150


def of_module(module: Any) -> tuple[dict[str, Array], Callable[[str], Tensor]]:
    """A module's weights, which become random; and those as tensors."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (*module.parameters(), *module.buffers()):
            weight.normal_(0, 0.3, generator=generator)
    values = {name: weight.numpy() for name, weight in module.state_dict().items()}
    return values, lambda name: f32(values[name])


def experts_of(matrices: Array) -> Tensor:
    """[E, n_out, n_in]."""
    return Tensor(
        GGMLType.F32, matrices.shape, f32(matrices.reshape(len(matrices), -1)).data.reshape(*matrices.shape[:2], -1)
    )


def check(
    backend: Backend,
    ops: Ops,
    module: Any,
    d: int,
    build: Callable[[Graph, g.Tensor], g.Tensor],
    error: float = 1e-5,
) -> None:
    """That a graph over rows [T, d] computes what the module does, to ``error`` of the largest value."""
    x = random(N, d)
    with torch.no_grad():
        found = module(torch.tensor(x)[None])
    expected = (found[0] if isinstance(found, tuple) else found).numpy().reshape(N, -1)
    graph = Graph()
    rows = graph.add(operations.Embed(f32(x)))
    graph.layer = 0
    graph.add(operations.Outputs(build(graph, rows)))
    n_pages = -(-N // ops.page_size)
    step = ops.backend.compile(graph, n_pages=(n_pages,), n_states=1, max_tokens=N, max_outputs=N)
    out = step(make_batch([(range(N), 0, range(n_pages))]))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=error * np.abs(expected).max())


def test_gated_delta_net_of_qwen_3_5(backend: Backend, ops: Ops) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    n_keys, n_heads, d_k, d_v = 2, 4, 32, 48
    sizes = {"linear_num_key_heads": n_keys, "linear_num_value_heads": n_heads, "linear_conv_kernel_dim": 4}
    sizes |= {"linear_key_head_dim": d_k, "linear_value_head_dim": d_v, "hidden_size": 64}
    config = transformers.Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"], **sizes)
    module = qwen.Qwen3_5GatedDeltaNet(config, 0)
    values, weight = of_module(module)

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        matrices = tuple(Matrix(weight(f"in_proj_{name}.weight")) for name in ("qkv", "z", "a", "b"))
        qkv, z, decay, beta = graph.add(operations.Linears(x, matrices))
        state = graph.state("conv", 3, qkv.width)
        qkv = graph.add(operations.CausalConv(qkv, f32(values["conv1d.weight"][:, 0]), state, silu=True))
        a, state = f32(-np.exp(values["A_log"])), graph.state("delta", n_heads, d_k, d_v)
        y = graph.add(
            operations.GatedDelta((qkv,), decay, beta, a, weight("dt_bias"), state, n_keys, is_grouped=True)
        )
        y = graph.add(operations.RMSNorm(y, weight("norm.weight"), config.rms_norm_eps, n_heads))
        return graph.add(
            operations.Linear(graph.add(operations.Gated(z, y, "silu")), Matrix(weight("out_proj.weight")))
        )

    check(backend, ops, module, 64, build)


def test_mixer_of_mamba_2(backend: Backend, ops: Ops) -> None:
    mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    n_heads, p, n_state, n_groups = 6, 16, 32, 2
    sizes = {"num_heads": n_heads, "head_dim": p, "state_size": n_state, "n_groups": n_groups, "conv_kernel": 4}
    config = transformers.Mamba2Config(hidden_size=48, expand=2, chunk_size=16, use_conv_bias=True, **sizes)
    module = mamba.Mamba2Mixer(config, 0)
    values, weight = of_module(module)

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        parts = np.split(values["in_proj.weight"], [96, 192 + 2 * n_groups * n_state])
        z, xbc, dt = graph.add(operations.Linears(x, tuple(Matrix(f32(part)) for part in parts)))
        kernels, state = f32(values["conv1d.weight"][:, 0]), graph.state("conv", 3, xbc.width)
        xbc = graph.add(operations.CausalConv(xbc, kernels, state, weight("conv1d.bias"), silu=True))
        a, state = f32(-np.exp(values["A_log"])), graph.state("scan", n_heads, n_state, p)
        y = graph.add(operations.Scan((xbc,), dt, a, weight("dt_bias"), weight("D"), state, n_groups))
        y = graph.add(operations.Gated(z, y, "silu"))
        y = graph.add(operations.RMSNorm(y, weight("norm.weight"), config.layer_norm_epsilon, n_groups))
        return graph.add(operations.Linear(y, Matrix(weight("out_proj.weight"))))

    check(backend, ops, module, 48, build)


def test_experts_of_gpt_oss(backend: Backend, ops: Ops) -> None:
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_local_experts=8, num_experts_per_tok=3, num_hidden_layers=1
    )
    module = gpt_oss.GptOssMLP(config)
    values, weight = of_module(module)

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        logits = graph.add(operations.Linear(x, Matrix(weight("router.weight"), weight("router.bias"))))
        routing = graph.add(operations.Route(logits, 3, norm_topk_prob=True))
        both, biases = values["experts.gate_up_proj"], values["experts.gate_up_proj_bias"]
        own = tuple(experts_of(both[:, :, i::2].swapaxes(1, 2)) for i in range(2))
        h = graph.add(operations.ExpertLinears(x, own, routing, tuple(f32(biases[:, i::2]) for i in range(2))))
        h = graph.add(operations.Gated(*h, "clamped_swiglu"))
        down, bias = experts_of(values["experts.down_proj"].swapaxes(1, 2)), weight("experts.down_proj_bias")
        return graph.add(operations.ExpertOutput(h, down, routing, graph.add(operations.Scale(x, 0.0)), bias))

    check(backend, ops, module, 64, build)


def test_experts_of_deepseek_v3(backend: Backend, ops: Ops) -> None:
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = transformers.DeepseekV3Config(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_shared_experts=2,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_hidden_layers=1,
    )
    module = deepseek.DeepseekV3MoE(config)
    values, weight = of_module(module)

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        logits = graph.add(operations.Linear(x, Matrix(weight("gate.weight"))))
        bias = weight("gate.e_score_correction_bias")
        routing = graph.add(operations.Route(logits, 4, True, 2.5, "sigmoid", bias, n_groups=4, n_top_groups=2))
        own = tuple(experts_of(half) for half in np.split(values["experts.gate_up_proj"], 2, axis=1))
        h = graph.add(operations.Gated(*graph.add(operations.ExpertLinears(x, own, routing)), "silu"))
        matrices = (Matrix(weight(f"shared_experts.{name}_proj.weight")) for name in ("gate", "up", "down"))
        gate, up, down = matrices
        shared = graph.add(operations.Gated(*graph.add(operations.Linears(x, (gate, up))), "silu"))
        y = graph.add(operations.Linear(shared, down))
        return graph.add(operations.ExpertOutput(h, experts_of(values["experts.down_proj"]), routing, y))

    check(backend, ops, module, 64, build)


def test_experts_of_deepseek_v2(backend: Backend, ops: Ops) -> None:
    """Groups by their best expert."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    config = transformers.DeepseekV2Config(
        hidden_size=64,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
        num_hidden_layers=1,
    )
    module = deepseek.DeepseekV2Moe(config)
    values, weight = of_module(module)

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        logits = graph.add(operations.Linear(x, Matrix(weight("gate.weight"))))
        routing = graph.add(operations.Route(logits, 4, False, 1.5, n_groups=4, n_top_groups=2, n_group_best=1))
        own = tuple(experts_of(half) for half in np.split(values["experts.gate_up_proj"], 2, axis=1))
        h = graph.add(operations.Gated(*graph.add(operations.ExpertLinears(x, own, routing)), "silu"))
        gate, up, down = (Matrix(weight(f"shared_experts.{name}_proj.weight")) for name in ("gate", "up", "down"))
        shared = graph.add(operations.Gated(*graph.add(operations.Linears(x, (gate, up))), "silu"))
        y = graph.add(operations.Linear(shared, down))
        return graph.add(operations.ExpertOutput(h, experts_of(values["experts.down_proj"]), routing, y))

    check(backend, ops, module, 64, build)


@pytest.mark.parametrize("version", [2, 3])
def test_latent_attention_of_deepseek(backend: Backend, ops: Ops, version: int) -> None:
    """Over latents, of which transformers makes keys and values first: "absorbed", it is the same."""
    name = f"deepseek_v{version}"
    deepseek = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    n_heads, nope, rot, n_values, latent = 4, 64, 32, 32, 64
    config = getattr(transformers, f"DeepseekV{version}Config")(
        hidden_size=64,
        num_attention_heads=n_heads,
        num_key_value_heads=n_heads,
        q_lora_rank=48,
        kv_lora_rank=latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rot,
        v_head_dim=n_values,
        num_hidden_layers=1,
    )
    config._attn_implementation = "eager"
    module = getattr(deepseek, f"DeepseekV{version}Attention")(config, 0)
    values, weight = of_module(module)
    eps = module.kv_a_layernorm.variance_epsilon
    rotary = getattr(deepseek, f"DeepseekV{version}RotaryEmbedding")(config)
    mask = torch.full((1, 1, N, N), -torch.inf).triu(1)
    where = {"position_embeddings": rotary(torch.zeros(1), torch.arange(N)[None]), "attention_mask": mask}
    of_keys, of_values = np.split(
        values["kv_b_proj.weight"].reshape(n_heads, nope + n_values, latent), [nope], axis=1
    )

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        graph.cache_type = "f32" if backend.name == "reference" else "f16"
        cache = graph.kv_cache(1, latent + rot, latent, values_in_keys=True)
        matrices = (Matrix(weight(f"{name}.weight")) for name in ("q_a_proj", "kv_a_proj_with_mqa"))
        q, kv = graph.add(operations.Linears(x, tuple(matrices)))
        q = graph.add(operations.RMSNorm(q, weight("q_a_layernorm.weight"), eps))
        q = graph.add(operations.Linear(q, Matrix(weight("q_b_proj.weight"))))
        q = graph.add(operations.HeadLinear(q, experts_of(of_keys.swapaxes(1, 2))))
        rope = g.Rope(rotary.inv_freq.numpy(), interleaved=True, first=latent)
        norm = g.HeadNorm(eps, weight("kv_a_layernorm.weight"))
        q = graph.add(operations.RopeAppend(q, kv, None, cache, rope, k_norm=norm))
        y = graph.add(operations.Attention(q, cache, scale=(nope + rot) ** -0.5))
        y = graph.add(operations.HeadLinear(y, experts_of(of_values)))
        return graph.add(operations.Linear(y, Matrix(weight("o_proj.weight"))))

    error = 1e-5 if backend.name == "reference" else 2e-3
    check(backend, ops, lambda x: module(x, **where), 64, build, error)


def test_experts_of_llama_4(backend: Backend, ops: Ops) -> None:
    """Weights count before the experts."""
    llama = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = transformers.Llama4TextConfig(
        hidden_size=64,
        intermediate_size=96,
        intermediate_size_mlp=96,
        num_hidden_layers=1,
        num_local_experts=4,
        num_experts_per_tok=1,
    )
    module = llama.Llama4TextMoe(config)
    values, weight = of_module(module)

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        logits = graph.add(operations.Linear(x, Matrix(weight("router.weight"))))
        routing = graph.add(operations.Route(logits, 1, norm_topk_prob=False, gating="sigmoid"))
        own = tuple(experts_of(half.swapaxes(1, 2)) for half in np.split(values["experts.gate_up_proj"], 2, axis=2))
        h = graph.add(
            operations.Gated(*graph.add(operations.ExpertLinears(x, own, routing, is_weighted=True)), "silu")
        )
        gate, up, down = (Matrix(weight(f"shared_expert.{name}_proj.weight")) for name in ("gate", "up", "down"))
        shared = graph.add(operations.Gated(*graph.add(operations.Linears(x, (gate, up))), "silu"))
        y = graph.add(operations.Linear(shared, down))
        matrices = experts_of(values["experts.down_proj"].swapaxes(1, 2))
        return graph.add(operations.ExpertOutput(h, matrices, routing, y, is_weighted=False))

    check(backend, ops, module, 64, build)
