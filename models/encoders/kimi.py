"""Encoders of Kimi-VL (arXiv:2504.07491) and Kimi K2.5 (MoonViT): images of any size, padded at the bottom right to
complete tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.kernels.graph import Rope
from localllm.models.encoders.encoder import (
    EncoderCheckpoint,
    Pixels,
    Prepared,
    VisionModel,
    require,
    require_same,
    split_qkv,
)
from localllm.models.encoders.images import bicubic, resized
from localllm.models.hf_convert import Array, implied

HF_NAMES = {
    "patch_embed.proj": "v.patch_embd",
    "patch_embed.pos_emb.weight": "v.position_embd.weight",
    "encoder.final_layernorm": "v.post_ln",
    "mm_projector.proj.0": "mm.1",
    "mm_projector.proj.2": "mm.2",
    "*.norm0": "v.blk.*.ln1",
    "*.norm1": "v.blk.*.ln2",
    "*.mlp.fc0": "v.blk.*.ffn_up",
    "*.mlp.fc1": "v.blk.*.ffn_down",
}

for projector in ("mm_projector", "multi_modal_projector"):
    HF_NAMES |= {
        f"{projector}.pre_norm": "mm.input_norm",
        f"{projector}.linear_1": "mm.1",
        f"{projector}.linear_2": "mm.2",
    }

#: Maximum side of an image in patches.
_LONGEST = 512
#: Epsilon of all norms.
_EPS = 1e-5
HF_MEANT = {
    "size": ({"max_height": _LONGEST, "max_width": _LONGEST},),
    "patch_limit_on_one_side": (_LONGEST,),
    "fixed_output_tokens": (None,),
    "merge_type": ("sd2_tpool",),
    "mm_projector_type": ("patchmerger",),
    "pos_emb_type": ("divided_fixed",),
    "projection_layer_norm_eps": (_EPS,),
    "projector_ln_eps": (_EPS,),
} | implied("mm_hidden_size num_pooled_tokens projection_hidden_size use_unified_vision_chunk video_attn_type")


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, processor = c.vision, c.processor
    size, merge = vision["patch_size"], vision.get("merge_kernel_size", (2, 2))[0]
    if c.values["model_type"] == "kimi_vl":
        require_same(c, patch_size=size, merge_kernel_size=[merge, merge])
        require(c, "pad_input", c.processor.get("pad_input", False), (True,))
        most, side = c.processor.get("in_token_limit", KimiVL.limit), vision.get("init_pos_emb_height", 64)
        require(c, "init_pos_emb_width", vision.get("init_pos_emb_width", 64), (side,))
        return {
            "projector_type": "kimivl",
            "use_gelu": True,
            "vision.attention.layer_norm_epsilon": _EPS,
            "vision.image_size": side * size,
            "vision.projector.scale_factor": merge,
            "vision.image_max_pixels": None if most == KimiVL.limit else most * size**2,
        }
    require_same(c, patch_size=size, merge_size=merge, merge_kernel_size=merge)
    most = processor.get("max_patches", processor.get("in_patch_limit", 1 << 14))
    return {
        "projector_type": "kimik25",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": _EPS,
        "vision.image_size": vision.get("pos_emb_height", 64) * size,
        "vision.projector.scale_factor": merge,
        "vision.image_min_pixels": 8 * size**2,
        "vision.image_max_pixels": most * size**2,
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    is_vl = c.values["model_type"] == "kimi_vl"
    if ".wqkv." not in name:
        if is_vl and name.endswith("pos_emb.weight"):
            return array.reshape(-1, array.shape[-1])
        return {} if name.endswith("time_weight") else array
    if is_vl:
        return split_qkv(name, array, f"v.blk.{name.split('.')[-3]}.")
    # Rotary pairs of queries and keys alternate between column and row. Reorder to column pairs, then row pairs.
    n = c.vision["num_attention_heads"]
    q, k, v = np.split(array, 3)
    q, k = (each.reshape(n, -1, 2, 2, *each.shape[1:]).swapaxes(1, 2).reshape(each.shape) for each in (q, k))
    return np.concatenate([q, k, v])


class Kimi(VisionModel):
    marker, around = "<|media_pad|>", ("<|media_begin|>image<|media_content|>", "<|media_end|>")

    #: Default of the maximum number of patches.
    limit = 1 << 14

    def read(self) -> None:
        self.merge = self.number("projector.scale_factor", 2)
        self.most = self.number("image_max_pixels", self.patch_size**2 * self.limit) // self.patch_size**2
        self.meta.skip("vision.image_min_pixels")  # not used by the model's processor

    def record(self) -> None:
        self.position_table = self.places()
        x = self.layers(self.embedded(self.patch_matrix(), has_positions=True), self.turn())
        x = self.vector_norm(self.vector_norm(x, "v.post_ln", self.eps), "mm.input_norm", self.eps)
        self.two_linears(self.joined(x), "mm.1", "mm.2")

    def places(self) -> Pixels:
        """Return the table of positions, [side * side, n_embd]."""
        side = self.weights.n_rows("v.position_embd.weight")
        return self.table("v.position_embd.weight", side, side, self.n_embd).reshape(side**2, -1)

    def turn(self) -> Rope:
        """Return the rotation of pairs in the order of the file."""
        return self.rope(1e4, interleaved=True, axes=(2, 1))

    def positions(self, rows: int, columns: int) -> Pixels:
        return bicubic(self.position_table, rows, columns)

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        size, step, most = self.patch_size, self.patch_size * self.merge, float(self.most)
        while True:
            area = max(1, image.height // size) * max(1, image.width // size)
            scale = min(1, math.sqrt(most / area), *(_LONGEST * size / side for side in image.size))
            height, width = (min(max(1, int(side * scale)), _LONGEST * size) for side in (image.height, image.width))
            rows, columns = -(-height // step), -(-width // step)
            if max_tokens is None or rows * columns <= max_tokens:
                break
            most = min(most, area) * 0.9
        frame = np.zeros((rows * step, columns * step, 3), np.uint8)
        frame[:height, :width] = np.asarray(resized(image, height, width, "bicubic"))
        return Prepared((frame,), (rows * columns,), (rows, columns))


class KimiVL(Kimi):
    """Kimi-VL, whose rotary pairs alternate between column and row in files, as in the checkpoint."""

    around = "<|media_start|>image<|media_content|>", "<|media_end|>"
    limit = 1 << 12

    def places(self) -> Pixels:
        return self.table("v.position_embd.weight", self.weights.n_rows("v.position_embd.weight"), self.n_embd)

    def turn(self) -> Rope:
        frequencies = self.rope(1e4).frequencies[: self.head_dim // 4]
        return Rope(np.repeat(frequencies, 2), True, axes=(2, 1) * len(frequencies))
