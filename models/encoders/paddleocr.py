"""PaddleOCR-VL (arXiv:2510.14528): SigLIP's encoder, with an additional rotation by row and column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.models.encoders.encoder import EncoderCheckpoint, Pixels, require, require_same
from localllm.models.encoders.images import interpolated
from localllm.models.encoders.qwen import QwenVision, pixel_limits
from localllm.models.encoders.siglip import ENCODER_NAMES
from localllm.models.hf_convert import Array

HF_NAMES = ENCODER_NAMES | {"mlp_AR.pre_norm": "mm.input_norm", "mlp_AR.linear_1": "mm.1", "mlp_AR.linear_2": "mm.2"}


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    merge = c.vision.get("spatial_merge_size", 2)
    require(c, "spatial_merge_size", merge, (2,))
    require_same(c, patch_size=c.vision["patch_size"], merge_size=merge, temporal_patch_size=1)
    return {
        "projector_type": "paddleocr",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": c.vision.get("layer_norm_eps", 1e-6),
    } | pixel_limits(c)


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    return {} if ".head." in name or "packing_position_embedding" in name else array


class PaddleOCR(QwenVision):
    marker, around = "<|IMAGE_PLACEHOLDER|>", ("<|IMAGE_START|>", "<|IMAGE_END|>")
    limits = 384 * 384, 1536 * 1536

    def record(self) -> None:
        n = self.weights.n_rows("v.position_embd.weight")
        self.position_table = self.table("v.position_embd.weight", n, self.n_embd)
        x = self.layers(self.embedded(self.patch_matrix(), has_positions=True), self.rope(1e4))
        x = self.vector_norm(self.vector_norm(x, "v.post_ln", self.eps), "mm.input_norm", 1e-5)
        self.two_linears(self.joined(x), "mm.1", "mm.2")

    def positions(self, rows: int, columns: int) -> Pixels:
        return interpolated(self.position_table, rows, columns, has_antialiasing=False)

    def enlarged(self, height: int, width: int) -> tuple[int, int]:
        side = self.patch_size * self.merge
        if height < side:
            height, width = side, round(width * side / height)
        if width < side:
            height, width = round(height * side / width), side
        return height, width
