"""Qwen 2-VL (arXiv:2409.12191), Qwen 3-VL and Qwen 3.5 and later: pictures of any size, whose patches turn by row and
column; four patches become a token.

Qwen 3-VL also adds the patches of some layers behind the first layers of the text model ("deepstack").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.kernels.graph import Outputs, Tensor, Weight
from localllm.models.hf_convert import Array
from localllm.models.vision.encoder import Checkpoint, Pixels, Prepared, VisionModel, split_qkv
from localllm.models.vision.pictures import bilinear, resized, smart_resize
from localllm.models.vision.views import SumOf
from localllm.models.weights import Reshaped

HF_NAMES = {
    "v.patch_embd.bias": "visual.patch_embed.proj.bias",
    "v.position_embd.weight": "visual.pos_embed.weight",
    "v.post_ln": "visual.merger.norm visual.merger.ln_q",
    "mm.0": "visual.merger.linear_fc1 visual.merger.mlp.0",
    "mm.2": "visual.merger.linear_fc2 visual.merger.mlp.2",
    "v.blk.*.ln1": "visual.blocks.*.norm1",
    "v.blk.*.ln2": "visual.blocks.*.norm2",
    "v.blk.*.attn_qkv": "visual.blocks.*.attn.qkv",
    "v.blk.*.attn_out": "visual.blocks.*.attn.proj",
    "v.blk.*.ffn_up": "visual.blocks.*.mlp.linear_fc1 visual.blocks.*.mlp.fc1",
    "v.blk.*.ffn_down": "visual.blocks.*.mlp.linear_fc2 visual.blocks.*.mlp.fc2",
}


def hf_keys(c: Checkpoint) -> dict[str, Any]:
    vision, is_2 = c.vision, c.values["model_type"] == "qwen2_vl"
    size = c.processor.get("size") or {}
    n_layers, tapped = vision["depth"], vision.get("deepstack_visual_indexes") or ()
    keys = {
        "projector_type": "qwen2vl_merger" if is_2 else "qwen3vl_merger",
        "use_gelu": None if is_2 else True,
        "vision.spatial_merge_size": vision.get("spatial_merge_size", 2),
        "vision.attention.layer_norm_epsilon": c.text.get("rms_norm_eps", 1e-6),
        "vision.is_deepstack_layers": None if is_2 else [i in tapped for i in range(n_layers)],
        "vision.image_min_pixels": c.processor.get("min_pixels") or size.get("shortest_edge"),
        "vision.image_max_pixels": c.processor.get("max_pixels") or size.get("longest_edge"),
        "vision.image_size": vision.get("image_size", 560),
    }
    if is_2:
        return keys | {
            "vision.embedding_length": vision["embed_dim"],
            "vision.feed_forward_length": int(vision["embed_dim"] * vision.get("mlp_ratio", 4)),
        }
    n_positions = vision.get("num_position_embeddings", 2304)
    return keys | {"vision.image_size": int(n_positions**0.5 * vision["patch_size"])}


def hf_tensor(name: str, array: Array, c: Checkpoint) -> Array | Mapping[str, Array]:
    if name.endswith("patch_embed.proj.weight"):
        return {"v.patch_embd.weight": array[:, :, 0], "v.patch_embd.weight.1": array[:, :, 1]}
    parts = name.split(".")
    if "deepstack_merger_list" in parts:
        number = c.vision["deepstack_visual_indexes"][int(parts[-3])]
        return {f"v.deepstack.{number}.{parts[-2].removeprefix('linear_')}.{parts[-1]}": array}
    if c.values["model_type"] == "qwen2_vl" and ".attn.qkv." in name:
        return split_qkv(name, array, f"v.blk.{parts[-4]}.")
    return array


class QwenVision(VisionModel):
    """What both have in common."""

    marker, around = "<|image_pad|>", ("<|vision_start|>", "<|vision_end|>")
    has_grid = True
    #: Fewest and most pixels, where the file does not say.
    limits = 1 << 16, 1 << 24

    def read(self) -> None:
        self.merge = self.number("spatial_merge_size", 2)
        low, high = self.limits
        self.low, self.high = self.number("image_min_pixels", low), self.number("image_max_pixels", high)

    def prepare(self, picture: Any, max_tokens: int | None = None) -> Prepared:
        factor = self.patch_size * self.merge
        high = self.high if max_tokens is None else min(self.high, max_tokens * factor**2)
        height, width = smart_resize(picture.height, picture.width, factor, min(self.low, high), high)
        frame = np.asarray(resized(picture, height, width, "bicubic"))
        rows, columns = height // factor, width // factor
        return Prepared((frame,), (rows * columns,), (rows, columns))

    def patch(self) -> Weight:
        """Both kernels of the convolution over two pictures: a still one is both."""
        size = self.patch_size
        first, second = (
            self.weights.require(f"v.patch_embd.weight{end}", self.n_embd, 3, size, size) for end in ("", ".1")
        )
        return Reshaped(SumOf(first, second), (self.n_embd, 3 * size * size))


class Qwen2VL(QwenVision):
    limits = 56 * 56, 28 * 28 * 1280

    def record(self) -> None:
        x = self.layers(self.embedded(self.patch(), has_positions=False), self.rope(1e4))
        x = self.joined(self.vector_norm(x, "v.post_ln", self.eps))
        self.two_linears(x, "mm.0", "mm.2", "gelu_erf")


class Qwen3VL(QwenVision):
    def read(self) -> None:
        super().read()
        tapped = self.meta.find("vision.is_deepstack_layers") or ()
        self.tapped = {i for i, is_tapped in enumerate(tapped) if is_tapped}

    def record(self) -> None:
        self.n_positions = self.weights.n_rows("v.position_embd.weight")
        self.position_table = self.table("v.position_embd.weight", self.n_positions, self.n_embd)
        x = self.layers(self.embedded(self.patch(), has_positions=True), self.rope(1e4))
        x = self.joined(self.vector_norm(x, "v.post_ln", self.eps))
        self.two_linears(x, "mm.0", "mm.2", "gelu_erf")

    def behind_layer(self, number: int, x: Tensor) -> None:
        if number in self.tapped:
            stem = f"v.deepstack.{number}"
            y = self.vector_norm(self.graph.add(Outputs(x, self.merge**2)), f"{stem}.norm", self.eps)
            self.further.append(self.two_linears(y, f"{stem}.fc1", f"{stem}.fc2", "gelu_erf"))

    def positions(self, rows: int, columns: int) -> Pixels:
        return bilinear(self.position_table, rows, columns)
