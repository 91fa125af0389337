"""Encoders of dots.ocr and of Dots 3 Note: images of any size, RMSNorms, gates, and a rotation by row and column.
Four patches become a token. The last layers of Dots 3 Note's encoder have experts instead of an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Tensor
from localllm.models.blocks import Layer, mixture, norm
from localllm.models.config import Experts
from localllm.models.encoders.encoder import EncoderCheckpoint, require, require_same
from localllm.models.encoders.qwen import QwenVision, pixel_limits
from localllm.models.hf_convert import SILU, Array, implied

HF_NAMES = {
    "patchifier.proj": "v.patch_embd",
    "patchifier.norm": "v.pre_ln",
    "post_trunk_norm": "mm.post_norm",
    "patch_embed.proj": "v.patch_embd",
    "patch_embed.norm": "v.pre_ln",
    "*.norm_1": "v.blk.*.ln1",
    "*.norm_2": "v.blk.*.ln2",
    "*.mlp.gate_weight": "v.blk.*.ffn_gate_inp.weight",
    "*.mlp.router_bias": "v.blk.*.exp_probs_b.weight",
}
for merger in ("merger", "adapter"):
    HF_NAMES |= {f"{merger}.ln_q": "mm.input_norm", f"{merger}.mlp.0": "mm.0", f"{merger}.mlp.2": "mm.2"}
for theirs, ours in (("fc1", "gate"), ("fc2", "down"), ("fc3", "up")):
    HF_NAMES |= {f"*.mlp.{theirs}": f"v.blk.*.ffn_{ours}", f"*.mlp.experts.{theirs}": f"v.blk.*.ffn_{ours}_exps"}
HF_MEANT = (
    {"hidden_act": SILU, "post_norm": (True,), "is_causal": (False,), "adapter_type": ("patch_merger",)}
    | {"pre_pixel_shuffle": (True,), "router_scoring_func": ("sigmoid",), "router_scale": (1.0,)}
    | {"use_qk_norm": (True,)}
    | implied("embed_dim init_merger_std use_bias adapter_in_dim adapter_out_dim moe_intermediate_size")
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    merge, n_frames = c.vision.get("spatial_merge_size", 2), c.vision.get("temporal_patch_size", 1)
    require(c, "temporal_patch_size", n_frames, (1,))
    require_same(c, patch_size=c.vision["patch_size"], merge_size=merge)
    if c.values["model_type"] == "dots3_note":
        require(c, "adapter_merge_size", c.vision.get("adapter_merge_size", merge), (merge,))
        return {
            "projector_type": "dots3note_v",
            "use_silu": True,
            "vision.attention.layer_norm_epsilon": c.vision.get("rms_norm_eps", 1e-5),
            "vision.embedding_length": c.vision["embed_dim"],
            "vision.spatial_merge_size": merge,
            "vision.expert_count_per_layer": [max(n, 0) for n in c.vision["pyramid_num_routed"]],
            "vision.expert_used_count": int(c.vision.get("capacity_factor", 2)),
            "vision.image_size": 0,  # as in llama.cpp
        } | pixel_limits(c)
    return {
        "projector_type": "dots_ocr",
        "use_silu": True,
        "vision.attention.layer_norm_epsilon": c.vision.get("rms_norm_eps", 1e-5),
        "vision.projector.scale_factor": merge,
        "vision.image_size": 0,  # as in llama.cpp
    } | pixel_limits(c)


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    return array


class DotsOCR(QwenVision):
    marker, around = "<|imgpad|>", ("<|img|>", "<|endofimg|>")
    has_grid = has_size = False
    rms = True
    limits = 3136, 11_289_600

    def read(self) -> None:
        super().read()
        self.read_merge()
        self.meta.skip("vision.image_size")

    def read_merge(self) -> None:
        self.merge = self.number("projector.scale_factor", 2)

    def record(self) -> None:
        at = self.at()
        x = norm(at, "v.pre_ln", self.embedded(self.patch_matrix(), has_positions=False))
        x = norm(self.at(), "mm.post_norm", self.layers(x, self.rope(1e4)))
        x = self.joined(self.vector_norm(x, "mm.input_norm", 1e-6))
        self.two_linears(x, "mm.0", "mm.2")


class Dots3Note(DotsOCR):
    def read_merge(self) -> None:
        self.n_used = self.number("expert_used_count")
        self.n_experts = self.meta.read_each("vision.expert_count_per_layer", self.n_layers, int, low=0, high=1 << 12)

    def mlp(self, at: Layer, x: Tensor, residual: Tensor | None) -> Tensor:
        n = self.n_experts[int(self.graph.layer)]
        if not n:
            return super().mlp(at, x, residual)
        shape = at.weights.shape("ffn_up_exps.weight") or ()
        if len(shape) != 3:
            raise ModelError(f"layer {self.graph.layer} of the encoder has no experts: is the file complete?")
        experts = Experts(n, min(self.n_used, n), shape[1], 0, "sigmoid", True, 1.0, 1, 1)
        return mixture(at, x, experts, residual=residual)
