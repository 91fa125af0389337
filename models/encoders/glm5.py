"""GLM-5.3 Flash's encoder: GLM-4V's, with norms of queries and keys, limits of the gates and no positions. Images are
not enlarged to complete tokens, but padded with black at the bottom right.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from localllm.kernels.graph import Tensor
from localllm.kernels.operations import Clamp
from localllm.models.blocks import Layer
from localllm.models.encoders import qwen
from localllm.models.encoders.encoder import EncoderCheckpoint, Prepared, require, require_same
from localllm.models.encoders.images import resized
from localllm.models.encoders.qwen import Glm4V
from localllm.models.hf_convert import SILU, implied

HF_NAMES = qwen.HF_NAMES
HF_MEANT = {"hidden_act": SILU, "patch_expand_factor": (1,)} | implied("image_size projection_intermediate_size")
hf_tensor = qwen.hf_tensor


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, merge = c.vision, c.vision["spatial_merge_size"]
    require(c, "temporal_patch_size", vision["temporal_patch_size"], (2,))
    require_same(c, patch_size=vision["patch_size"], merge_size=merge, temporal_patch_size=2)
    area = (vision["patch_size"] * merge) ** 2
    return {
        "projector_type": "glm5v",
        "use_silu": True,
        "vision.attention.layer_norm_epsilon": vision["rms_norm_eps"],
        "vision.spatial_merge_size": merge,
        "vision.swiglu_clamp": float(vision["swiglu_limit"]),
        "vision.image_min_pixels": c.processor["min_image_tokens"] * area,
        "vision.image_max_pixels": c.processor["max_image_tokens"] * area,
    }


class Glm5V(Glm4V):
    has_grid = False
    limits = 16 * 28 * 28, 8000 * 28 * 28

    def read(self) -> None:
        super().read()
        self.limit = self.meta.read("vision.swiglu_clamp", float, low=1e-6, high=1e6)

    def gated(self, at: Layer, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = at.add(Clamp(gate, -math.inf, self.limit)), at.add(Clamp(up, -self.limit, self.limit))
        return super().gated(at, gate, up)

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        side = self.patch_size * self.merge
        rows, columns = self.grid(image, max_tokens)
        scale = min(rows * side / image.height, columns * side / image.width)
        if image.height * image.width >= self.low:
            scale = min(1.0, scale)
        height = max(1, min(rows * side, math.floor(image.height * scale)))
        width = max(1, min(columns * side, math.floor(image.width * scale)))
        frame = np.zeros((rows * side, columns * side, 3), np.uint8)
        frame[:height, :width] = np.asarray(resized(image, height, width, "bicubic"))
        return Prepared((frame,), (rows * columns,), (rows, columns))

    def grid(self, image: Any, max_tokens: int | None) -> tuple[int, int]:
        """Return the rows and columns of an image's tokens. Source: transformers' ``smart_resize`` of the model."""
        side, (height, width) = self.patch_size * self.merge, (image.height, image.width)
        high = self.high // side**2
        high = max(1, high if max_tokens is None else min(high, max_tokens))

        def tokens(*lengths: float) -> tuple[int, int]:
            rows, columns = (math.ceil(max(1, math.ceil(length)) / side) for length in lengths)
            return rows, columns

        grid = tokens(height, width)
        if grid[0] * grid[1] * side**2 < self.low:
            scale = math.sqrt(self.low / (height * width))
            grid = tokens(height * scale, width * scale)
        if grid[0] * grid[1] > high:  # the tallest image that fits
            least, most, grid = 1, height, (1, 1)
            while least <= most:
                tall = (least + most) // 2
                rows, columns = tokens(tall, max(1, width * tall // height))
                if rows * columns <= high:
                    grid, least = (rows, columns), tall + 1
                else:
                    most = tall - 1
        return grid
