"""Muse Glimmer's encoder: images of any size, with a rotation by row and column, and windows in three of four layers.
Four patches become a token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Matrix, Tensor
from localllm.kernels.operations import Activation, Linear
from localllm.models.encoders.encoder import (
    EncoderCheckpoint,
    Pixels,
    Prepared,
    VisionModel,
    require,
    require_same,
)
from localllm.models.encoders.images import interpolated, resized
from localllm.models.encoders.views import ColumnsByPart
from localllm.models.hf_convert import GELU, Array, floats, implied, interleave_pairs

HF_NAMES = {
    "patch_embedder.position_embedding_table": "v.position_embd",
    "vision_adapter.fc1": "mm.0",
    "vision_adapter.fc2": "mm.1",
    "model.vision_projection": "mm.2",
    "vision_tower.ln_pre": "v.pre_ln",
    "vision_tower.ln_post": "v.post_ln",
    "patch_embedder.patch_embedding": "v.patch_embd",
    "*.attn.q_proj": "v.blk.*.attn_q",
    "*.attn.k_proj": "v.blk.*.attn_k",
    "*.attn.v_proj": "v.blk.*.attn_v",
}
HF_MEANT = {"hidden_act": GELU, "resample": (1,), "layer_types": ()} | implied("projector_hidden_size")

#: Every fourth layer, and the last one, see the complete image.
_PERIOD = 4
#: Default of the maximum number of tokens of an image.
_TOKENS = 4096


def has_window(layer: int, n_layers: int) -> bool:
    """Return whether patches see only their window in a layer, counted from 0."""
    return (layer + 1) % _PERIOD > 0 and layer < n_layers - 1


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, n = c.vision, c.vision["num_hidden_layers"]
    side, merge, n_frames = vision["pos_emb_height"], vision["merge_size"], vision["patch_temporal"]
    require(c, "pos_emb_width", vision["pos_emb_width"], (side,))
    kinds = ["window_attention" if has_window(i, n) else "full_attention" for i in range(n)]
    require(c, "layer_types", vision.get("layer_types") or kinds, (kinds,))
    require_same(c, patch_size=vision["patch_size"], merge_size=merge, temporal_patch_size=n_frames)
    most = c.processor.get("max_image_tokens", _TOKENS)
    return {
        "projector_type": "muse-glimmer",
        "vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
        "vision.spatial_merge_size": merge,
        "vision.image_size": side * merge * vision["patch_size"],
        "vision.image_max_pixels": None if most == _TOKENS else most * (vision["patch_size"] * merge) ** 2,
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name.endswith("patch_embedding.weight"):  # an image is used as all frames of a patch
        size = c.vision["patch_size"]
        total: Array = floats(array).reshape(len(array), -1, 3, size, size).sum(1)
        return total
    if ".q_proj." in name or ".k_proj." in name:
        return interleave_pairs(array, c.vision["num_attention_heads"])
    return array


class MuseGlimmer(VisionModel):
    marker = "<|patch|>"

    def read(self) -> None:
        self.activation = "gelu_erf"
        self.merge = self.number("spatial_merge_size", 2)
        size = (self.patch_size * self.merge) ** 2
        self.most = self.number("image_max_pixels", _TOKENS * size) // size
        if not self.most:
            raise ModelError("clip.vision.image_max_pixels are less than a token: the file is broken")
        self.windowed = [i for i in range(self.n_layers) if has_window(i, self.n_layers)]

    def record(self) -> None:
        n, at = self.weights.n_rows("v.position_embd.weight"), self.at()
        self.position_table, self.window = self.table("v.position_embd.weight", n, self.n_embd), math.isqrt(n)
        if self.window % self.merge:
            raise ModelError(f"windows of {self.window} patches are not complete tokens: the file is broken")
        x = self.vector_norm(self.embedded(self.patch_matrix(), has_positions=True), "v.pre_ln", self.eps)
        x = self.layers(x, self.rope(1e4, interleaved=True, axes=(2, 1)))
        x = self.joined(self.vector_norm(x, "v.post_ln", self.eps))
        first = self.weights.matrix("mm.0", x.width, self.weights.n_rows("mm.0.weight"))
        x = self.active(at.add(Linear(x, Matrix(ColumnsByPart(first.weight, self.merge**2)))))
        x = self.active(at.linear(x, "mm.1", self.weights.n_rows("mm.1.weight")))
        at.linear(x, "mm.2", self.width)  # the text model norms all embeddings

    def active(self, x: Tensor) -> Tensor:
        return self.graph.add(Activation(x, "gelu_erf"))

    def positions(self, rows: int, columns: int) -> Pixels:
        # The model's code exchanges rows and columns.
        return interpolated(self.position_table, columns, rows, has_antialiasing=False, repeats_edges=False)

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        side, most = self.patch_size * self.merge, self.most if max_tokens is None else min(self.most, max_tokens)
        rows, columns = self.grid(image.height, image.width, most)
        frame = np.asarray(resized(image, rows * side, columns * side, "lanczos"))
        return Prepared((frame,), ("<|image_start|>", rows * columns, "<|image_end|>"), (rows, columns))

    def grid(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Return rows and columns of at most ``most`` tokens with the nearest aspect ratio.

        Source: transformers' ``smart_resize`` of the model. In its set, the first of equally good grids is used.
        """
        side = self.patch_size * self.merge
        tall, wide = height / side, width / side
        if tall * wide > most:
            ratio = wide / tall
            tall = (most / ratio) ** 0.5
            wide = tall * ratio
        grids = {*itertools.product((math.floor(tall), math.ceil(tall)), (math.floor(wide), math.ceil(wide)))}
        fitting = [(rows, columns) for rows, columns in grids if rows and columns and rows * columns <= most]
        if fitting:
            return min(fitting, key=lambda grid: abs(grid[0] / grid[1] - height / width))
        rows = min(max(1, round(tall)), most)
        return rows, min(max(1, round(wide)), most // rows)
