"""Youtu-VL (arXiv:2601.19798): SigLIP 2 with a rotation by row and column instead of positions, and windows in most
layers. Four patches become a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.operations import RMSNorm
from localllm.models.encoders.encoder import EncoderCheckpoint, Prepared, VisionModel, require, require_same
from localllm.models.encoders.images import resized
from localllm.models.encoders.siglip import ENCODER_NAMES
from localllm.models.encoders.views import ColumnsByPart
from localllm.models.hf_convert import Array

HF_NAMES = ENCODER_NAMES | {"merger.ln_q": "mm.input_norm", "merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2"}
HF_MEANT = {"resample": (2,), "max_num_patches": ()}
#: Default of the maximum number of patches, as in llama.cpp.
_LIMIT = 250_000
#: Patches per side of a token.
_MERGE = 2


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, size = c.vision, c.vision["patch_size"]
    require(c, "spatial_merge_size", vision.get("spatial_merge_size", _MERGE), (_MERGE,))
    require_same(c, patch_size=size)
    most = c.processor["max_num_patches"]
    return {
        "projector_type": "youtuvl",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "vision.image_size": vision.get("image_size", 560),
        "vision.spatial_merge_size": _MERGE,
        "vision.window_size": vision["window_size"],
        "vision.wa_layer_indexes": list(vision["fullatt_block_indexes"]),
        "vision.image_max_pixels": most * size**2 if most < _LIMIT else None,
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    return {} if "position_embedding" in name or ".head." in name else array


class YoutuVL(VisionModel):
    marker, around = "<|image_pad|>", ("<|vision_start|>", "<|vision_end|>")
    has_size = False

    def read(self) -> None:
        self.meta.skip("vision.image_size")
        self.merge = self.number("spatial_merge_size", _MERGE)
        area = self.patch_size**2
        self.most = self.number("image_max_pixels", min(_LIMIT * area, 1 << 26)) // area
        self.window = self.number("window_size") // self.patch_size // self.merge * self.merge
        complete = self.meta.find("vision.wa_layer_indexes")
        if not isinstance(complete, list | tuple) or any(not isinstance(i, int) for i in complete):
            raise ModelError("clip.vision.wa_layer_indexes must be numbers of layers: the file is broken")
        if self.merge != _MERGE or not self.window or self.most < _MERGE**2:
            raise ModelError(
                "clip.vision.spatial_merge_size, window_size or image_max_pixels is out of range: the file is broken"
            )
        self.windowed = set(range(self.n_layers)).difference(complete) if complete else set()

    def record(self) -> None:
        n = 3 * self.patch_size**2
        patch = ColumnsByPart(self.weights.require("v.patch_embd.weight", self.n_embd, n), 3)
        x = self.layers(self.embedded(patch, has_positions=False), self.rope(1e4))
        x = self.vector_norm(x, "v.post_ln", self.eps)
        x = self.graph.add(RMSNorm(x, self.weights.vector("mm.input_norm", self.n_embd), 1e-6))
        self.two_linears(self.joined(x), "mm.0", "mm.2")

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        side = self.patch_size * self.merge
        most = self.most // self.merge**2
        most = most if max_tokens is None else min(most, max_tokens)
        scale = 1.0
        while True:
            rows, columns = (max(1, math.ceil(n * scale / side)) for n in (image.height, image.width))
            if rows * columns <= most:
                break
            scale -= 0.02
        frame = np.asarray(resized(image, rows * side, columns * side, "bilinear"))
        return Prepared((frame,), (rows * columns,), (rows, columns))
