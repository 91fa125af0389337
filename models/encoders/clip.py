"""CLIP's encoders (arXiv:2103.00020) and LLaVA's projector: LLaVA 1.5 (arXiv:2310.03744) and 1.6, and Yi-VL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Tensor
from localllm.kernels.operations import Activation
from localllm.models.encoders.encoder import EncoderCheckpoint, Pixels, Prepared, VisionModel, require, require_same
from localllm.models.encoders.images import cut, resized
from localllm.models.encoders.siglip import ENCODER_NAMES
from localllm.models.hf_convert import Array
from localllm.models.weights import floats

HF_NAMES = ENCODER_NAMES | {
    "embeddings.class_embedding": "v.class_embd",
    "pre_layrnorm": "v.pre_ln",
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
    "image_newline": "model.image_newline",
}
HF_MEANT = {
    "aspect_ratio_setting": ("anyres",),
    "use_image_newline_parameter": (True,),
    "vision_feature_select_strategy": ("default",),
}
#: Sizes of grids of tiles that LLaVA 1.6's class has by default.
_GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, processor, layer = c.vision, c.processor, c.values.get("vision_feature_layer", -2)
    require(c, "model_type", vision.get("model_type", "clip_vision_model"), ("clip_vision_model",))
    if not isinstance(layer, int):
        raise ModelError("config.json has several vision_feature_layer; localllm supports LLaVA's encoders with one")
    layer += (layer < 0) * (vision["num_hidden_layers"] + 1)
    activation, crop = vision.get("hidden_act", "quick_gelu"), processor.get("crop_size")
    size = crop if crop is None or isinstance(crop, int) else crop.get("height")
    if processor.get("do_center_crop", True) and size not in (None, vision["image_size"]):
        raise ModelError(f"the processor crops images to {size} pixels; the encoder needs {vision['image_size']}")
    edge = processor.get("size", vision["image_size"])
    edge = edge if isinstance(edge, int) else edge.get("shortest_edge")
    require(c, "size.shortest_edge", edge, (vision["image_size"],))
    grids = c.values.get("image_grid_pinpoints") or (_GRIDS if c.values["model_type"] == "llava_next" else None)
    require_same(c, image_grid_pinpoints=grids)
    require(c, "hidden_act", activation, ("gelu", "quick_gelu"))
    return {
        "projector_type": "mlp",
        "use_gelu": activation == "gelu",
        "vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-5),
        "vision.block_count": layer,
        "vision.feature_layer": [layer],
        "vision.image_grid_pinpoints": grids and [side for grid in grids for side in grid],
        "vision.mm_patch_merge_type": grids and "spatial_unpad",
        # Without the key, images are padded, as in LLaVA's code.
        "vision.image_aspect_ratio": "anyres" if grids else "pad" if processor.get("do_pad") else "crop",
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    layer = hf_keys(c)["vision.block_count"]
    number = name.partition("encoder.layers.")[2].partition(".")[0]
    if "post_layernorm." in name or (number and int(number) >= layer):  # after the layer whose output is used
        return {}
    return array


@dataclass(frozen=True)
class Spread(Prepared):
    """A complete image, followed by a grid of tiles."""

    tiles: tuple[int, int]  # rows and columns
    shown: tuple[slice, slice]  # rows and columns of the grid's patches without padding


class Llava(VisionModel):
    """An image as a square and, if the file defines grids of tiles, as the tiles of one of the grids."""

    marker = "<image>"
    n_before = 1
    exact_gelu = True

    @property
    def last(self) -> str:
        """Name of the last matrix."""
        return "mm.3" if "mm.3.weight" in self.weights else "mm.2"

    def read(self) -> None:
        self.width = self.weights.n_rows(f"{self.last}.weight")  # the key may describe CLIP's projection
        # llama.cpp's converter writes the layers up to the one whose output is used. Some files count one more layer.
        while self.n_layers and f"v.blk.{self.n_layers - 1}.ln1.weight" not in self.weights:
            self.n_layers -= 1
        self.aspect_ratio = self.meta.read("vision.image_aspect_ratio", str, "pad")
        self.grids = self.read_grids()
        self.meta.skip(
            "has_text_encoder", "has_llava_projector", "vision.feature_layer", "vision.mm_patch_merge_type",
            "vision.image_crop_resolution", "vision.image_split_resolution", "vision.mm_projector_type",
        )  # fmt: skip
        self.newline = None
        if "model.image_newline" in self.weights:
            self.newline = floats(self.weights.require("model.image_newline", self.width))

    def read_grids(self) -> list[tuple[int, int]]:
        """Return the rows and columns of the grids of tiles."""
        sides = self.meta.find("vision.image_grid_pinpoints") or ()
        if not isinstance(sides, list | tuple) or any(not isinstance(x, int) or not 0 < x < 1 << 16 for x in sides):
            raise ModelError("clip.vision.image_grid_pinpoints must be pairs of sizes: the file is broken")
        in_tiles = [side // self.image_size for side in sides]
        grids = [grid for grid in zip(in_tiles[::2], in_tiles[1::2], strict=False) if all(grid)]
        self.check_tiles(1 + max((rows * columns for rows, columns in grids), default=0), self.image_size)
        return grids

    def record(self) -> None:
        n = (self.image_size // self.patch_size) ** 2 + 1
        self.position_table = self.table("v.position_embd.weight", n, self.n_embd)
        self.position_table[0] += floats(self.weights.require("v.class_embd", self.n_embd))
        x = self.embedded(self.patch_matrix(), has_positions=True)
        x = self.layers(self.vector_norm(x, "v.pre_ln", self.eps))
        if "v.post_ln.weight" in self.weights:
            x = self.vector_norm(x, "v.post_ln", self.eps)
        self.record_projector(x)

    def record_projector(self, x: Tensor) -> None:
        x = self.joined(x)
        if self.last == "mm.2":
            self.two_linears(x, "mm.0", self.last)
            return
        at = self.at()  # Yi-VL, with norms
        x = self.vector_norm(at.linear(x, "mm.0", self.weights.n_rows("mm.0.weight")), "mm.1", 1e-5)
        x = at.linear(at.add(Activation(x, "gelu_erf")), self.last, self.width)
        self.vector_norm(x, "mm.4", 1e-5)

    @property
    def side(self) -> int:
        """Number of tokens in a row of the complete image or of a tile."""
        return self.image_size // self.patch_size

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        side = self.side
        if self.newline is None:
            frame = self._padded(image) if self.aspect_ratio == "pad" else self._cropped(image)
            return Prepared((frame,), (side * side,), (side, side))
        spread = [self._spread(image, *grid) for grid in self.grids]
        fitting = [layout for layout in spread if max_tokens is None or layout.n_tokens <= max_tokens]
        overview = np.asarray(resized(image, self.image_size, self.image_size, "bicubic"))
        if not fitting:
            return Prepared((overview,), (side * side + 1,), (side, side))
        best = min(fitting, key=lambda layout: self._waste(image, *layout.tiles))
        return replace(best, frames=(overview, *self._tiles(image, *best.tiles)))

    def _padded(self, image: Any) -> NDArray[np.uint8]:
        """Pad an image to a square with the mean colour, then resize it."""
        from PIL import Image

        side = max(image.size)
        square = Image.new("RGB", (side, side), tuple(int(255 * x) for x in self.mean))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return np.asarray(resized(square, self.image_size, self.image_size, "bicubic"))

    def _cropped(self, image: Any) -> NDArray[np.uint8]:
        """Resize an image by its shorter side, then crop its centre."""
        size, least = self.image_size, min(image.size)
        height, width = (int(size * length / least) for length in (image.height, image.width))
        top, left = (height - size) // 2, (width - size) // 2
        return np.asarray(resized(image, height, width, "bicubic"))[top : top + size, left : left + size]

    def _waste(self, image: Any, rows: int, columns: int) -> tuple[int, int]:
        """Return how badly a grid fits an image: lost resolution first, then the number of unused pixels."""
        height, width = rows * self.image_size, columns * self.image_size
        scale = min(width / image.width, height / image.height)
        n_pixels = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
        return -n_pixels, height * width - n_pixels

    def _spread(self, image: Any, rows: int, columns: int) -> Spread:
        """Return the layout of an image as a grid of tiles, without pixels."""
        side = self.side
        tall, wide = rows * side, columns * side
        if image.width / image.height > wide / tall:
            shown = int(round(image.height * (wide / image.width), 7))
            edge = (tall - shown) // 2, 0
        else:
            shown = int(round(image.width * (tall / image.height), 7))
            edge = 0, (wide - shown) // 2
        n = (tall - 2 * edge[0]) * (wide - 2 * edge[1] + 1)
        cut = slice(edge[0], tall - edge[0]), slice(edge[1], wide - edge[1])
        return Spread((), (side * side + n,), (side, side), (rows, columns), cut)

    def _tiles(self, image: Any, rows: int, columns: int) -> list[NDArray[np.uint8]]:
        """Resize an image without distortion, pad it with black on all sides, and cut it into tiles."""
        size = self.image_size
        height, width = rows * size, columns * size
        across, down = width / image.width, height / image.height
        if across < down:
            height = min(math.ceil(image.height * across), height)
        else:
            width = min(math.ceil(image.width * down), width)
        canvas = np.zeros((rows * size, columns * size, 3), np.uint8)
        top, left = (rows * size - height) // 2, (columns * size - width) // 2
        canvas[top : top + height, left : left + width] = np.asarray(resized(image, height, width, "bicubic"))
        return cut(canvas, size)

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        """Return the rows of the complete image, then the rows of the grid line by line, each with an end row."""
        if self.newline is None:
            return rows
        n, end = self.side**2, np.tile(self.newline, rows.shape[1]).reshape(1, 1, -1)
        if not isinstance(prepared, Spread):
            return np.concatenate([rows, end.reshape(1, *rows.shape[1:])])
        side, (tall, wide) = self.side, prepared.tiles
        grid = rows[n:].reshape(tall, wide, side, side, -1).swapaxes(1, 2).reshape(tall * side, wide * side, -1)
        grid = grid[prepared.shown]
        lines = np.concatenate([grid, np.broadcast_to(end, (len(grid), 1, grid.shape[2]))], axis=1)
        return np.concatenate([rows[:n], lines.reshape(-1, *rows.shape[1:])])
