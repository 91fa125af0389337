"""SigLIP's encoders (arXiv:2303.15343) with a table of positions: Gemma 3, Idefics 3 and SmolVLM, LFM2-VL,
Janus-Pro (arXiv:2501.17811), Phi-4 reasoning vision, and GLM-Edge-V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Matrix
from localllm.kernels.operations import Activation, Gated, Linear, Outputs, RMSNorm
from localllm.models.encoders.encoder import EncoderCheckpoint, Pixels, Prepared, VisionModel, require, require_same
from localllm.models.encoders.images import interpolated, nearest_grid, resized, tiles
from localllm.models.encoders.views import ColumnsByPart, Transposed
from localllm.models.hf_convert import Array, floats, implied
from localllm.models.weights import Reshaped

#: Minimum side in pixels of an image in Janus-Pro.
_JANUS_SIDE = 14
#: Names of the encoder's tensors before and after its layers.
ENCODER_NAMES = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
}
HF_NAMES = ENCODER_NAMES | {
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    "multi_modal_projector.layer_norm": "mm.input_norm",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
    "connector.modality_projection.proj": "mm.model.fc",
    "aligner.fc1": "mm.0",
    "aligner.hidden_layers.0": "mm.1",
    "*.projection_layer": "v.blk.*.attn_out",
    "mm_projector.0": "mm.0",
    "mm_projector.2": "mm.2",
    "adapter.linear.linear_proj": "adapter.linear.linear",
    "adapter.linear.gate_proj": "adapter.linear.gate",
    "adapter.boi": "adapter.boi",
    "adapter.eoi": "adapter.eoi",
    "adapter.conv": "adapter.conv",
    "adapter.linear.norm1": "adapter.linear.norm1",
    "adapter.linear.dense_h_to_4h": "adapter.linear.dense_h_to_4h",
    "adapter.linear.dense_4h_to_h": "adapter.linear.dense_4h_to_h",
}

HF_MEANT = {
    "do_pan_and_scan": (False,),
    "do_image_splitting": (True,),
    "use_thumbnail": (True,),
    "max_pixels_tolerance": (2.0,),
    "vision_feature_layer": (-1,),
    "mm_projector_type": ("mlp2x_gelu",),
    "mm_vision_select_layer": (-2,),
    "use_s2": (False,),
} | implied(
    "encoder_patch_size max_image_size max_image_tokens max_num_patches max_tiles min_image_tokens min_tiles "
    "pan_and_scan_max_num_crops pan_and_scan_min_crop_size pan_and_scan_min_ratio_to_activate projector_bias "
    "projector_hidden_size projector_use_layernorm tile_size use_base_siglip use_image_special_tokens "
    "num_image_tokens vq_config mm_hidden_size mm_vision_tower s2_scales"
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, kind = c.vision, c.values["model_type"]
    if kind == "janus":
        return _janus_keys(c)
    default = 2 if kind in ("gemma3", "glm", "lfm2_vl", "phi4-siglip") else 1  # Pillow's BILINEAR and LANCZOS
    usual = 3 if kind == "glm" else default  # BICUBIC
    require(c, "resample", c.processor.get("resample", default), (usual,))
    keys = {"use_gelu": True, "vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6)}
    if kind == "gemma3":
        require_same(c, size={"height": vision["image_size"], "width": vision["image_size"]})
        side = math.isqrt(c.values.get("mm_tokens_per_image", 256))
        factor = vision["image_size"] // vision["patch_size"] // side
        return keys | {"projector_type": "gemma3", "vision.projector.scale_factor": None if factor == 4 else factor}
    if kind == "lfm2_vl":
        return keys | {"projector_type": "lfm2"} | _lfm2_keys(c)
    if kind == "phi4-siglip":
        return keys | _phi4_keys(c)
    if kind == "glm":
        require_same(c, size={"height": vision["image_size"], "width": vision["image_size"]})
        require(c, "max_image_tiles", c.processor.get("max_image_tiles", 4), (1,))
        return keys | {"projector_type": "adapter"}
    require_same(c, max_image_size={"longest_edge": vision["image_size"]})
    longest = (c.processor.get("size") or {}).get("longest_edge", vision["image_size"])
    factor = c.values.get("scale_factor", 2)
    return keys | {
        "projector_type": "idefics3",
        "vision.projector.scale_factor": factor,
        "vision.preproc_image_size": longest,
    }


def _lfm2_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    """Return the processor's settings that differ from all published models."""
    factor, least = c.values.get("downsample_factor", 2), c.processor.get("min_tiles", 2)
    most = c.processor.get("max_tiles", 10) if c.processor.get("do_image_splitting", True) else 1
    require_same(c, encoder_patch_size=c.vision["patch_size"], downsample_factor=factor)
    area = (c.vision["patch_size"] * factor) ** 2
    given = {
        "image_min_pixels": (c.processor.get("min_image_tokens", 64) * area, 64 * area),
        "image_max_pixels": (c.processor.get("max_image_tokens", 256) * area, 256 * area),
        "preproc_image_size": (c.processor.get("tile_size", 512), 512),
        "preproc_min_tiles": (least, 2),
        "preproc_max_tiles": (most, 10),
    }
    keys = {f"vision.{key}": value for key, (value, default) in given.items() if value != default}
    return keys | {"vision.projector.scale_factor": factor, "vision.image_size": 256}


def _phi4_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    """Return the keys of Phi-4, whose projector reads the output of the layer before the last one."""
    size, values = c.vision["patch_size"], c.values
    require_same(c, patch_size=size)
    least, most = (c.processor.get(f"{end}_num_patches", values.get(f"{end}_num_patches")) for end in ("min", "max"))
    return {
        "projector_type": "phi4",
        "vision.block_count": c.vision["num_hidden_layers"] - 1,
        "vision.image_size": math.isqrt(c.vision["num_patches"]) * size,
        "vision.image_min_pixels": least * size**2,
        "vision.image_max_pixels": most * size**2,
    }


def _janus_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, side = c.vision, c.vision.get("image_size", 384)
    require(c, "hidden_act", vision.get("hidden_act", "gelu"), ("gelu",))
    require(c, "depth", vision.get("depth", 2), (2,))
    require(c, "use_qk_norm", vision.get("use_qk_norm", False), (False,))
    require(c, "min_size", c.processor.get("min_size", _JANUS_SIDE), (_JANUS_SIDE,))
    require(c, "do_pad", c.processor.get("do_pad", True), (True,))
    grey = [int(255 * x) for x in c.processor["image_mean"]]
    require(c, "background_color", list(c.processor.get("background_color", grey)), (grey,))
    require_same(c, size={"height": side, "width": side})
    return {
        "projector_type": "janus_pro",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "vision.feed_forward_length": round(vision["hidden_size"] * vision.get("mlp_ratio", 4.0)),
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if ".head." in name:  # SigLIP's pooling
        return {}
    if c.values["model_type"] == "phi4-siglip":
        last = f"encoder.layers.{c.vision['num_hidden_layers'] - 1}."
        if "post_layernorm." in name or last in name:
            return {}
    if name.endswith(("adapter.boi", "adapter.eoi")):
        return array.reshape(-1)
    if "vqmodel." in name or "generation_" in name:  # Janus-Pro's output of images
        return {}
    if name.endswith("patch_embedding.weight") and array.ndim == 2:  # stored pixel by pixel, not colour by colour
        size = math.isqrt(array.shape[1] // 3)
        return array.reshape(-1, size, size, 3).transpose(0, 3, 1, 2)
    return floats(array) + 1 if name.endswith("mm_soft_emb_norm.weight") else array


class Siglip(VisionModel):
    #: Whether the grids of images or tiles can differ from the grid of the position table.
    any_size = False
    has_last_norm = True

    def encoded(self) -> Any:
        """Record the layers, and return their normed output."""
        self.side = self.image_size // self.patch_size
        if not self.side:
            raise ModelError("clip.vision.image_size is less than a patch: the file is broken")
        n = self.weights.n_rows("v.position_embd.weight") if self.any_size else self.side**2
        if math.isqrt(n) ** 2 != n:
            raise ModelError(f"v.position_embd.weight has {n} rows, which are not a square: the file is broken")
        self.position_table = self.table("v.position_embd.weight", n, self.n_embd)
        x = self.layers(self.embedded(self.patch_matrix(), has_positions=True))
        return self.vector_norm(x, "v.post_ln", self.eps) if self.has_last_norm else x


class Gemma3(Siglip):
    marker = "<start_of_image>"

    def read(self) -> None:
        self.merge = self.number("projector.scale_factor", 4)
        self.check_tiles(1, self.image_size)

    def record(self) -> None:
        x = self.graph.add(Outputs(self.encoded(), self.merge**2, is_mean=True))
        x = self.graph.add(RMSNorm(x, self.weights.vector("mm.soft_emb_norm", self.n_embd), self.eps))
        stored = self.weights.require("mm.input_projection.weight", self.n_embd, self.width)
        self.graph.add(Linear(x, Matrix(Transposed(stored))))

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        side = self.image_size // self.patch_size // self.merge
        frame = np.asarray(resized(image, self.image_size, self.image_size, "bilinear"))
        return Prepared((frame,), ("\n\n<start_of_image>", side * side, "<end_of_image>\n\n"), (side, side))


class Janus(Siglip):
    """A resized image, padded to a square with the mean colour."""

    marker = "<image_placeholder>"
    around = "<begin_of_image>", "<end_of_image>"
    exact_gelu = True

    def read(self) -> None:
        self.check_tiles(1, self.image_size)

    def record(self) -> None:
        self.two_linears(self.joined(self.encoded()), "mm.0", "mm.1")

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        from PIL import Image

        size, scale = self.image_size, self.image_size / max(image.size)
        height, width = (max(round(side * scale), _JANUS_SIDE) for side in (image.height, image.width))
        square = Image.new("RGB", (size, size), tuple(int(255 * x) for x in self.mean))
        square.paste(resized(image, height, width, "bicubic"), ((size - width) // 2, (size - height) // 2))
        side = size // self.patch_size
        return Prepared((np.asarray(square),), (side * side,), (side, side))


class GlmEdge(Siglip):
    """An image in the top left of a square. A convolution joins four patches, and two more rows enclose the image."""

    marker = "<|begin_of_image|>"
    merge = 2

    def read(self) -> None:
        self.width = self.weights.n_rows("adapter.linear.linear.weight")  # the key is 0 in llama.cpp's files
        self.ends = [self.table(f"adapter.{name}", self.width) for name in ("boi", "eoi")]
        self.check_tiles(1, self.image_size)
        self.meta.skip("has_text_encoder", "has_glm_projector")

    def record(self) -> None:
        at, weights, n_in = self.at(), self.weights, 4 * self.n_embd
        x = self.joined(self.encoded())
        n = (weights.shape("adapter.conv.weight") or (0,))[0]
        kernel = Reshaped(weights.require("adapter.conv.weight", n, self.n_embd, 2, 2), (n, n_in))
        x = at.add(Linear(x, Matrix(ColumnsByPart(kernel, 4), weights.require("adapter.conv.bias", n))))
        x = self.vector_norm(at.linear(x, "adapter.linear.linear", self.width), "adapter.linear.norm1", 1e-5)
        x, n_ff = at.add(Activation(x, "gelu_erf")), weights.n_rows("adapter.linear.gate.weight")
        gate, up = (at.linear(x, f"adapter.linear.{name}", n_ff) for name in ("gate", "dense_h_to_4h"))
        at.linear(at.add(Gated(gate, up, "silu")), "adapter.linear.dense_4h_to_h", self.width)

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        size, side = self.image_size, self.image_size // self.patch_size // self.merge
        scale = min(size / image.height, size / image.width)
        height, width = (max(1, min(int(n * scale), size)) for n in (image.height, image.width))
        height, width = (size, width) if image.height >= image.width else (height, size)
        frame = np.zeros((size, size, 3), np.uint8)
        frame[:height, :width] = np.asarray(resized(image, height, width, "bicubic"))
        return Prepared((frame,), (side * side + 2,), (side, side))

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        first, last = (end.reshape(1, 1, -1) for end in self.ends)
        return np.concatenate([first, rows, last])


class Idefics3(Siglip):
    """Tiles of a large image, row by row, and the complete image in one tile."""

    marker = "<image>"
    #: Maximum side of an image in pixels.
    longest = 4096

    def read(self) -> None:
        self.merge = self.number("projector.scale_factor", 2)
        self.edge = self.number("preproc_image_size", self.image_size)
        self.check_tiles(1 + (-(-self.edge // self.image_size)) ** 2, self.image_size)

    def record(self) -> None:
        x = self.joined(self.encoded())
        self.graph.add(Linear(x, self.weights.matrix("mm.model.fc", x.width, self.width)))

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        tile, n = self.image_size, (self.image_size // self.patch_size // self.merge) ** 2
        edge = self.edge
        while max_tokens is not None and edge > tile and ((edge // tile) ** 2 + 1) * n > max_tokens:
            edge -= tile
        scaled = resized(image, *self._to_edge(image.height, image.width, edge), "lanczos")
        ratio = scaled.width / scaled.height
        if scaled.width >= scaled.height:
            width = math.ceil(scaled.width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(scaled.height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        scaled = resized(scaled, height, width, "lanczos")
        grid = int(n**0.5), int(n**0.5)
        around, overview = "<fake_token_around_image>", "<global-img>"
        if height <= tile and width <= tile:
            return Prepared((np.asarray(scaled),), (f"{around}{overview}", n, around), grid)
        pixels = np.asarray(scaled)
        frames: list[NDArray[np.uint8]] = []
        segments: list[str | int] = []
        for row in range(height // tile):
            for column in range(width // tile):
                frames.append(pixels[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile])
                line = "\n" if row and not column else ""
                segments += [f"{line}{around}<row_{row + 1}_col_{column + 1}>", n]
        frames.append(np.asarray(resized(scaled, tile, tile, "lanczos")))
        segments += [f"\n\n{around}{overview}", n, around]
        return Prepared(tuple(frames), tuple(segments), grid)

    def _to_edge(self, height: int, width: int, edge: int) -> tuple[int, int]:
        """Return a size whose longer side is ``edge`` and whose other side is even, limited to `longest`."""
        ratio = width / height
        if width >= height:
            width, height = edge, int(edge / ratio)
            height += height % 2
        else:
            height, width = edge, int(edge * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > self.longest:
            width, height = self.longest, int(self.longest / ratio)
        elif height > width and height > self.longest:
            height, width = self.longest, int(self.longest * ratio)
        return max(height, 1), max(width, 1)


class Lfm2(Siglip):
    """An image with a budget of tokens; for a much larger image, its tiles row by row, and the complete image."""

    marker = "<image>"
    any_size = True

    def read(self) -> None:
        self.merge = self.number("projector.scale_factor", 2)
        self.token = self.patch_size * self.merge
        area = self.token**2
        self.least = self.number("image_min_pixels", 64 * area) // area
        self.most = self.number("image_max_pixels", 256 * area) // area
        self.tile = self.number("preproc_image_size", 512)
        self.least_tiles, self.most_tiles = self.number("preproc_min_tiles", 2), self.number("preproc_max_tiles", 10)
        self.check_tiles(self.most_tiles, self.tile)
        if not self.most:
            raise ModelError("clip.vision.image_max_pixels are less than a token: the file is broken")

    def record(self) -> None:
        x = self.joined(self.encoded())
        if "mm.input_norm.weight" in self.weights:
            x = self.vector_norm(x, "mm.input_norm", 1e-5)
        self.two_linears(x, "mm.1", "mm.2")

    def positions(self, rows: int, columns: int) -> Pixels:
        return interpolated(self.position_table, rows, columns)

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        most, side, most_tiles = self.most, self.token, self.most_tiles
        per_tile = (self.tile // side) ** 2
        if max_tokens is not None:
            most = min(most, max_tokens)
            most_tiles = min(most_tiles, (max_tokens - most) // per_tile)
        height, width = image.height, image.width
        tall, wide = (max(1, round(length / side)) for length in (height, width))
        is_large = tall * wide > 2 * self.most
        if tall * wide > most:
            beta = math.sqrt(height * width / (most * side**2))
            tall, wide = (min(max(1, math.floor(length / beta / side)), most) for length in (height, width))
        elif tall * wide < min(self.least, most):
            beta = math.sqrt(min(self.least, most) * side**2 / (height * width))
            tall, wide = (math.ceil(length * beta / side) for length in (height, width))
        thumbnail = np.asarray(resized(image, tall * side, wide * side, "bilinear"))
        grid, n = (tall, wide), tall * wide
        if not is_large or most_tiles < max(self.least_tiles, 2):
            return Prepared((thumbnail,), ("<|image_start|>", n, "<|image_end|>"), grid)
        columns, rows = nearest_grid(width, height, self.least_tiles, most_tiles, self.tile)
        segments: list[str | int] = ["<|image_start|>"]
        for row in range(rows):
            for column in range(columns):
                segments += [f"<|img_row_{row + 1}_col_{column + 1}|>", per_tile]
        frames = (*tiles(image, columns, rows, self.tile, "bilinear"), thumbnail)
        return Prepared(frames, (*segments, "<|img_thumbnail|>", n, "<|image_end|>"), grid)


class Phi4(Siglip):
    """An image in its own size, rounded to complete patches, within limits of the number of patches."""

    marker = "<image>"
    any_size = True
    has_last_norm = False

    def read(self) -> None:
        area = self.patch_size**2
        self.least, self.most = (self.number(f"image_{end}_pixels") // area for end in ("min", "max"))
        if not 0 < self.least <= self.most:
            raise ModelError(
                "clip.vision.image_min_pixels is less than a patch or more than clip.vision.image_max_pixels: the "
                "file is broken"
            )

    def record(self) -> None:
        self.two_linears(self.encoded(), "mm.0", "mm.2")

    def positions(self, rows: int, columns: int) -> Pixels:
        return interpolated(self.position_table, rows, columns)

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        size = self.patch_size
        n = min(max((image.height // size) * (image.width // size), self.least), self.most)
        rows, columns = _largest_grid(image.height, image.width, size, min(n, max_tokens or n))
        frame = np.asarray(resized(image, rows * size, columns * size, "bilinear"))
        return Prepared((frame,), (rows * columns,), (rows, columns))


def _largest_grid(height: int, width: int, size: int, most: int) -> tuple[int, int]:
    """Return rows and columns of the largest scaled image with at most ``most`` patches of ``size`` pixels.

    Source: SigLIP 2's ``get_image_size_for_max_num_patches``.
    """

    def grid(scale: float) -> tuple[int, int]:
        return max(1, math.ceil(height * scale / size)), max(1, math.ceil(width * scale / size))

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        low, high = (scale, high) if math.prod(grid(scale)) <= most else (low, scale)
    return grid(low)
