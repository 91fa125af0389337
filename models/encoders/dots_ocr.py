"""dots.ocr's encoder: images of any size, RMSNorms, gates, and a rotation by row and column. Four patches become a
token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.models.blocks import norm
from localllm.models.encoders.encoder import EncoderCheckpoint, require, require_same
from localllm.models.encoders.qwen import QwenVision, pixel_limits
from localllm.models.hf_convert import SILU, Array, implied

HF_NAMES = {
    "patchifier.proj": "v.patch_embd",
    "patchifier.norm": "v.pre_ln",
    "post_trunk_norm": "mm.post_norm",
    "merger.ln_q": "mm.input_norm",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
    "*.mlp.fc1": "v.blk.*.ffn_gate",
    "*.mlp.fc2": "v.blk.*.ffn_down",
    "*.mlp.fc3": "v.blk.*.ffn_up",
}
HF_MEANT = {"hidden_act": SILU, "post_norm": (True,), "is_causal": (False,)} | implied(
    "embed_dim init_merger_std use_bias"
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    merge, n_frames = c.vision.get("spatial_merge_size", 2), c.vision.get("temporal_patch_size", 1)
    require(c, "temporal_patch_size", n_frames, (1,))
    require_same(c, patch_size=c.vision["patch_size"], merge_size=merge)
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
        self.merge = self.number("projector.scale_factor", 2)
        self.meta.skip("vision.image_size")

    def record(self) -> None:
        at = self.at()
        x = norm(at, "v.pre_ln", self.embedded(self.patch_matrix(), has_positions=False))
        x = norm(self.at(), "mm.post_norm", self.layers(x, self.rope(1e4)))
        x = self.joined(self.vector_norm(x, "mm.input_norm", 1e-6))
        self.two_linears(x, "mm.0", "mm.2")
