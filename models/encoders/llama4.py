"""Llama 4's encoder: tiles of an image, whose aspect ratio is kept, and one tile with the complete image."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.graph import Tensor
from localllm.kernels.operations import Activation
from localllm.models.blocks import Layer
from localllm.models.encoders.encoder import EncoderCheckpoint, FrameRows, Pixels, Prepared, VisionModel, require_same
from localllm.models.encoders.images import cut, normalised, resized
from localllm.models.hf_convert import GELU
from localllm.models.weights import floats
from localllm.quant.floats import bfloat16

HF_NAMES = {
    "vision_model.class_embedding": "v.class_embd",
    "patch_embedding.linear": "v.patch_embd",
    "positional_embedding_vlm": "v.position_embd.weight",
    "layernorm_pre": "v.pre_ln",
    "layernorm_post": "v.post_ln",
    "vision_adapter.mlp.fc1": "mm.model.mlp.1",
    "vision_adapter.mlp.fc2": "mm.model.mlp.2",
    "multi_modal_projector.linear_1": "mm.model.fc",
}
HF_MEANT = {
    "hidden_act": GELU,
    "resample": (2,),
    "resize_to_max_canvas": (False,),
    "vision_feature_layer": (-1,),
    "vision_feature_select_strategy": ("default",),
}

#: Default of the maximum number of tiles of an image.
_TILES = 16


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    side, most = c.vision["image_size"], c.processor.get("max_patches", _TILES)
    require_same(c, size={"height": side, "width": side})
    return {
        "projector_type": "llama4",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": c.vision.get("norm_eps", 1e-5),
        "vision.projector.scale_factor": int(1 / c.vision.get("pixel_shuffle_ratio", 0.5)),
        "vision.preproc_max_tiles": None if most == _TILES else most,
    }


class Llama4(VisionModel):
    marker = "<|image|>"
    n_before = 1
    exact_gelu = True

    def read(self) -> None:
        self.merge = self.number("projector.scale_factor", 2)
        self.most = self.number("preproc_max_tiles", _TILES)
        self.check_tiles(self.most + 1, self.image_size)

    def record(self) -> None:
        weights, n, d = self.weights, 3 * self.patch_size**2, self.n_embd
        table = self.table("v.position_embd.weight", (self.image_size // self.patch_size) ** 2 + 1, d)
        self.position_table = np.roll(table, 1, axis=0)  # the class token has the last position
        self.position_table[0] += floats(weights.require("v.class_embd", d))
        x = self.embedded(weights.require("v.patch_embd.weight", d, n), has_positions=True)
        x = self.layers(self.vector_norm(x, "v.pre_ln", self.eps), self.rope(1e4, interleaved=True, axes=(2, 1)))
        x, at = self.joined(self.vector_norm(x, "v.post_ln", self.eps)), self.at()
        for name in ("mm.model.mlp.1", "mm.model.mlp.2"):
            x = at.add(Activation(at.linear(x, name, weights.n_rows(f"{name}.weight")), "gelu_erf"))
        at.linear(x, "mm.model.fc", self.width)

    def norm(self, at: Layer, name: str, x: Tensor) -> Tensor:
        # llama.cpp's converter of 2026 uses the name of Gemma 4's norm after attention.
        return super().norm(at, name if f"{name}.weight" in at.weights else "attn_post_norm", x)

    def rows(self, frame: NDArray[np.uint8]) -> FrameRows:
        rows = super().rows(frame)
        rows.axes[1:, 1:] += 1  # only the class token is not rotated
        return rows

    def normalised(self, frame: NDArray[np.uint8]) -> Pixels:
        """Return normalised pixels. The model's processor rounds to bfloat16 after each step."""
        shades = np.arange(256, dtype=np.uint8)[:, None].repeat(3, 1)
        steps = _rounded(normalised(shades, (0.0,) * 3, (1.0,) * 3)) - _rounded(np.array(self.mean, np.float32))
        table = _rounded(_rounded(steps) / _rounded(np.array(self.std, np.float32)))
        return table[frame, np.arange(3)]

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        size, side = self.image_size, self.image_size // self.patch_size // self.merge
        n, most = side * side, self.most
        if max_tokens is not None:
            most = max(1, min(most, max_tokens // n - 1))
        rows, columns = _canvas(image.height, image.width, most, size)
        frames = cut(self._fitted(image, rows * size, columns * size), size)
        segments: list[str | int] = ["<|image_start|>"]
        if len(frames) > 1:
            line: list[str | int] = [n, "<|tile_x_separator|>"] * columns
            segments += [*line[:-1], "<|tile_y_separator|>"] * rows
            frames.append(np.asarray(resized(image, size, size, "bilinear")))
        return Prepared(tuple(frames), (*segments, "<|image|>", n, "<|image_end|>"), (side, side))

    def _fitted(self, image: Any, height: int, width: int) -> NDArray[np.uint8]:
        """Resize an image to fit into height × width without distortion, and pad it with black at the bottom right.

        An image is enlarged at most to the size of a tile.
        """

        def factor(side: int, edge: int) -> Any:
            target = max(side, self.image_size)
            return target / side if target <= edge else np.float32(edge) / np.float32(side)

        def least(side: int, scale: Any, edge: int) -> int:
            return max(1, min(int(side * scale), max(side, self.image_size), edge))

        tall, wide = image.height, image.width
        down, across = factor(tall, height), factor(wide, width)
        if across < down:
            new = least(tall, across, height), min(max(wide, self.image_size), width)
        else:
            new = min(max(tall, self.image_size), height), least(wide, down, width)
        black = np.zeros((height, width, 3), np.uint8)
        black[: new[0], : new[1]] = np.asarray(resized(image, *new, "bilinear"))
        return black


def _rounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return (bfloat16(x).astype(np.uint32) << 16).view(np.float32)


def _canvas(height: int, width: int, most: int, side: int) -> tuple[int, int]:
    """Return rows and columns of tiles.

    The best grid has the nearest size that does not shrink the image, or else the largest size. Of several such
    grids, the one with the fewest tiles is used.

    Source: Llama 4's ``get_best_fit``, whose ratios are float32.
    """
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for n in range(most, 0, -1):
        for rows in (i for i in range(1, n + 1) if n % i == 0):
            by_ratio.setdefault(rows / (n // rows), []).append((rows, n // rows))
    grids = [grid for group in by_ratio.values() for grid in group]
    scales = [
        min(np.float32(rows * side) / np.float32(height), np.float32(columns * side) / np.float32(width))
        for rows, columns in grids
    ]
    best = min((scale for scale in scales if scale >= 1), default=max(scales))
    fitting = [grid for grid, scale in zip(grids, scales, strict=True) if scale == best]
    return min(fitting, key=lambda grid: grid[0] * grid[1])
