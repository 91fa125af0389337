"""Pixtral (arXiv:2410.07073), also of Mistral Small 3.1, Ministral 3 and LightOnOCR: images of any size up to a
longest edge, with a rotation by row and column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Matrix, Rope
from localllm.kernels.operations import Linear
from localllm.models.blocks import norm
from localllm.models.encoders.encoder import EncoderCheckpoint, Prepared, VisionModel, require
from localllm.models.encoders.images import resized
from localllm.models.encoders.views import ColumnsByPart
from localllm.models.hf_convert import Array, interleave_pairs

HF_NAMES = {
    "vision_tower.patch_conv": "v.patch_embd",
    "vision_tower.ln_pre": "v.pre_ln",
    "vision_encoder.patch_conv": "v.patch_embd",
    "vision_encoder.ln_pre": "v.pre_ln",
    "vision_projection.norm": "mm.input_norm",
    "vision_projection.patch_merger.merging_layer": "mm.patch_merger",
    "vision_projection.linear_1": "mm.1",
    "vision_projection.linear_2": "mm.2",
    "multi_modal_projector.norm": "mm.input_norm",
    "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
}
HF_MEANT = {"vision_feature_layer": (-1,), "vision_feature_select_strategy": ("full",)}


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    activation = c.vision.get("hidden_act", "gelu")
    require(c, "hidden_act", activation, ("gelu", "silu"))
    is_lighton = c.values["model_type"] == "lighton_ocr"
    merge = c.values.get("spatial_merge_size", 2 if is_lighton else None)
    # The processor's limit may differ from the size of the table of positions.
    edge = (c.processor.get("size") or {}).get("longest_edge", c.vision["image_size"])
    if edge % (step := c.vision["patch_size"] * (merge or 1)):
        raise ModelError(f"the processor limits images to {edge} pixels, which is not a multiple of {step}")
    return {
        "projector_type": "lightonocr" if is_lighton else "pixtral",
        "use_silu": activation == "silu" or None,
        "use_gelu": activation == "gelu" or None,
        "vision.attention.layer_norm_epsilon": c.vision.get("layer_norm_eps", 1e-5),
        "vision.image_size": edge,
        "vision.spatial_merge_size": merge,
        "vision.rope.freq_base": float(c.vision.get("rope_theta", 1e4)),
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        return interleave_pairs(array, c.vision["num_attention_heads"])
    return array


class Pixtral(VisionModel):
    marker = "[IMG]"
    rms = True

    def read(self) -> None:
        self.merge = self.number("spatial_merge_size", 1)
        self.theta = self.meta.read("vision.rope.freq_base", float, 1e4, low=1.0, high=1e9)
        self.weights.skip("v.token_embd.img_break")  # the text model contains it

    def mixed_rope(self) -> Rope:
        """Return a rotation whose frequencies alternate between row and column."""
        f = self.theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        n = len(f[::2]), len(f[1::2])
        return Rope(np.concatenate([f[::2], f[1::2]]).astype(np.float32), True, axes=(1,) * n[0] + (2,) * n[1])

    def record(self) -> None:
        x = self.embedded(self.patch_matrix(), has_positions=False)
        x = self.layers(norm(self.at(), "v.pre_ln", x), self.mixed_rope())
        if "mm.input_norm.weight" in self.weights:
            x = norm(self.at(), "mm.input_norm", x)
        x = self.joined(x)
        if self.merge > 1:
            merger = self.weights.matrix("mm.patch_merger", x.width, self.n_embd)
            x = self.graph.add(Linear(x, Matrix(ColumnsByPart(merger.weight, self.merge**2))))
        self.two_linears(x, "mm.1", "mm.2")

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        size, edge = self.patch_size * self.merge, self.image_size
        while True:
            height, width = image.height, image.width
            ratio = max(height / edge, width / edge)
            if ratio > 1:
                height, width = int(height // ratio), int(width // ratio)
            rows, columns = (max(1, -(-side // size)) for side in (height, width))
            if max_tokens is None or rows * columns <= max_tokens or edge <= size:
                break
            edge -= size
        frame = np.asarray(resized(image, rows * size, columns * size, "bicubic"))
        return Prepared((frame,), self.segments(rows, columns), (rows, columns))

    def segments(self, rows: int, columns: int) -> tuple[str | int, ...]:
        """Return the contents of the prompt for a grid of tokens."""
        lines: list[str | int] = [columns, "[IMG_BREAK]"] * rows
        return (*lines[:-1], "[IMG_END]")


class LightOnOCR(Pixtral):
    marker = "<|image_pad|>"

    def segments(self, rows: int, columns: int) -> tuple[str | int, ...]:
        return (rows * columns,)
