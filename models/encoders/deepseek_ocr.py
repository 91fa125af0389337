"""Encoders of DeepSeek-OCR (arXiv:2510.18234), Unlimited-OCR and DeepSeek-OCR 2: SAM, then CLIP's layers, or Qwen 2's
layers with learnt queries. An image becomes tiles and one complete view.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Rope, Rows, Tensor
from localllm.kernels.operations import Add, Input, Outputs, SideBySide
from localllm.models.blocks import norm
from localllm.models.encoders.encoder import EncoderCheckpoint, EncoderStage, FrameRows, Pixels, Prepared, require
from localllm.models.encoders.images import bicubic, nearest_grid, resized, tiles
from localllm.models.encoders.sam import SamVision
from localllm.models.hf_convert import GELU, Array, implied
from localllm.models.weights import floats

HF_NAMES = {
    "embeddings.class_embedding": "v.class_embd",
    "embeddings.position_embedding": "v.position_embd",
    "vision_model.pre_layrnorm": "v.pre_ln",
    "projector.layers": "mm.model.fc",
    "image_newline": "v.image_newline",
    "qwen2_model.model.model.norm": "v.post_ln",
    "query_768": "v.resample_query_768",
    "query_1024": "v.resample_query_1024",
    "*.input_layernorm": "v.blk.*.ln1",
    "*.post_attention_layernorm": "v.blk.*.ln2",
    "*.self_attn.qkv_proj": "v.blk.*.attn_qkv",
    "*.self_attn.o_proj": "v.blk.*.attn_out",
}
#: Names of SAM's tensors.
_SAM_NAMES = {
    r"blocks\.(\d+)\.norm1": r"blk.\1.pre_ln",
    r"blocks\.(\d+)\.norm2": r"blk.\1.post_ln",
    r"blocks\.(\d+)\.attn\.proj": r"blk.\1.attn.out",
    r"blocks\.(\d+)\.attn\.rel_pos_([hw])": r"blk.\1.attn.pos_\2.weight",
    r"blocks\.": "blk.",
    r"patch_embed\.proj": "patch_embd",
    "pos_embed": "pos_embd.weight",
}
HF_MEANT = {"hidden_act": (*GELU, "quick_gelu", "silu"), "crop_to_patches": (True,)} | implied(
    "background_color candidate_resolutions cls encoder_config global_view_pos image_size max_patches "
    "maximum_pad_value min_patches mlp_ratio model_name projector_config sam_config size tile_size tile_tag width"
)

#: Side in pixels of a tile in files without the key, and most tiles.
_TILE, _TILE_2 = 640, 768
#: Rotation of the second version's layers.
_THETA = 1e6


def _parts(c: EncoderCheckpoint) -> tuple[Any, Any]:
    """Return the settings of SAM and of the second encoder, by transformers' names.

    Published checkpoints with DeepSeek's code contain some sizes only. The others are constants of the code.
    """
    if (sizes := c.vision.get("width")) is None:
        return c.vision["sam_config"], c.vision["encoder_config"]

    def shape(part: Any) -> dict[str, Any]:
        names = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
        return {ours: part[theirs] for ours, theirs in names.items()}

    sam = shape(sizes["sam_vit_b"]) | {"image_size": c.vision["image_size"], "patch_size": 16, "window_size": 14}
    if "qwen2-0-5b" in sizes:
        qwen = {"hidden_size": sizes["qwen2-0-5b"]["dim"], "intermediate_size": 4864, "num_hidden_layers": 24}
        return sam, qwen | {"num_attention_heads": 14, "num_key_value_heads": 2}
    clip = sizes["clip-l-14-224"]
    sides = {"image_size": clip["image_size"], "patch_size": clip["patch_size"]}
    return sam, shape(clip) | sides | {"intermediate_size": 4 * clip["width"]}


def _tiling(c: EncoderCheckpoint, family: type[DeepSeekOCR]) -> dict[str, Any]:
    """Return the keys of the tiles of an image."""
    if c.vision.get("width") is None:
        tile, least, most = (c.processor[name] for name in ("tile_size", "min_patches", "max_patches"))
    else:  # constants of DeepSeek's and Baidu's code
        tile, least, most = family.tile_size, 2, family.most_tiles
        if "UnlimitedOCRForCausalLM" in (c.values.get("architectures") or ()):
            most = 32
    return {
        "vision.preproc_min_tiles": least,
        "vision.preproc_max_tiles": most,
        "vision.preproc_image_size": None if tile == family.tile_size else tile,
    }


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    (sam, encoder), side = _parts(c), (c.processor.get("size") or {}).get("height", 1024)
    require(c, "size.height", side, (sam["image_size"],))
    require(c, "background_color", c.processor.get("background_color", [127] * 3), ([127] * 3,))
    require(c, "use_abs_pos", sam.get("use_abs_pos", True) and sam.get("use_rel_pos", True), (True,))
    family = DeepSeekOCR2 if "num_key_value_heads" in encoder else DeepSeekOCR
    keys = {
        "use_gelu": True,
        "vision.image_size": encoder.get("image_size") or sam["image_size"],
        "vision.patch_size": encoder.get("patch_size") or sam["patch_size"],
        "vision.embedding_length": encoder["hidden_size"],
        "vision.feed_forward_length": encoder["intermediate_size"],
        "vision.block_count": encoder["num_hidden_layers"],
        "vision.attention.head_count": encoder["num_attention_heads"],
        "vision.window_size": sam["window_size"],
        "vision.sam.block_count": sam["num_hidden_layers"],
        "vision.sam.embedding_length": sam["hidden_size"],
        "vision.sam.head_count": sam["num_attention_heads"],
        **_tiling(c, family),
    }
    if family is DeepSeekOCR:
        eps = encoder.get("layer_norm_eps", 1e-5)
        return keys | {"projector_type": "deepseekocr", "vision.attention.layer_norm_epsilon": eps}
    rope = encoder.get("rope_parameters") or {"rope_theta": encoder.get("rope_theta", _THETA)}
    require(c, "encoder_config.rope_theta", rope["rope_theta"], (_THETA,))
    return keys | {
        "projector_type": "deepseekocr2",
        "vision.attention.layer_norm_epsilon": encoder.get("rms_norm_eps", 1e-6),
        "vision.attention.head_count_kv": encoder["num_key_value_heads"],
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if (start := name.find("sam_model.")) >= 0:
        name = name[start + len("sam_model.") :]
        for pattern, replacement in _SAM_NAMES.items():
            name = re.sub(f"^{pattern}", replacement, name)
        return {f"v.sam.{name}": array}
    if name.endswith("view_seperator"):
        return {"v.view_seperator": array[None]}
    return {} if name.endswith("patch_embedding.weight") else array  # unused


@dataclass(frozen=True)
class Tiled(Prepared):
    """The tiles of an image, followed by the complete view."""

    tiles: tuple[int, int]  # rows and columns


class DeepSeekOCR(SamVision):
    """DeepSeek-OCR and Unlimited-OCR: CLIP's layers over SAM's features, which are also input of the projector."""

    marker, around = "<image>", ("", "\n")
    tile_size, most_tiles = _TILE, 9

    def read(self) -> None:
        super().read()
        self.activation = "gelu_quick"
        self.n_ff = self.weights.n_rows("v.blk.0.ffn_up.weight")  # the key of llama.cpp's files has another value
        self.least = self.number("preproc_min_tiles", 2)
        self.most = self.number("preproc_max_tiles", self.most_tiles)
        self.tile, self.base = self.number("preproc_image_size", self.tile_size), self.side * self.patch_size
        if any(side % (4 * self.patch_size) or not 0 < side <= 8192 for side in (self.tile, self.base)):
            raise ModelError(
                f"tiles of {self.tile} pixels and views of {self.base} pixels must be multiples of "
                f"{4 * self.patch_size}: the file is broken"
            )
        self.check_tiles(self.most, self.tile)
        self.check_tiles(1, self.base)
        self.weights.skip("v.patch_embd.weight")

    def record(self) -> None:
        self.record_sam(sorted({self.base // self.patch_size, self.tile // self.patch_size}))
        self.graph = Graph(rounds_floats=True)
        self.record_second()
        self.behind = EncoderStage(self.graph, 1)
        self.separator = self.weights.require("v.view_seperator", 1, self.width)

    def record_second(self) -> None:
        weights, d = self.weights, self.n_embd
        if self.channels[-1] % 16 or d != self.channels[-1]:
            raise ModelError(f"SAM's {self.channels[-1]} features do not fit {d} values: the file is broken")
        table = self.table("v.position_embd.weight", weights.n_rows("v.position_embd.weight"), d)
        self.position_table = table[1:]
        self.class_row = table[0] + floats(weights.require("v.class_embd", d))
        features, positions = (self.graph.add(Input(Tensor(Rows.TOKENS, d), first, 2 * d)) for first in (0, d))
        x = self.graph.add(Add(features, positions))
        x = self.layers(self.vector_norm(x, "v.pre_ln", self.eps))
        x = self.joined(self.graph.add(SideBySide((x, features))))
        self.at().linear(x, "mm.model.fc", self.width)
        self.newline = weights.require("v.image_newline", self.width)

    def following_in_pieces(self, rows: Pixels, frame: FrameRows) -> Generator[None, None, FrameRows]:
        features = yield from self.joined_patches(rows)
        side, _, d = features.shape
        inputs = np.zeros((side**2 + 1, 2 * d), np.float32)
        inputs[0, d:] = self.class_row
        inputs[1:, :d] = features.reshape(-1, d)
        inputs[1:, d:] = bicubic(self.position_table, side, side, has_antialiasing=True)
        return FrameRows.in_order(inputs, first=1)

    def n_tokens(self, rows: int, columns: int, side: int) -> int:
        """Return the number of tokens of a grid of tiles, or of the complete view."""
        return rows * side * (columns * side + 1)

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        joined, most = 4 * self.patch_size, self.most
        frames, n, grid = [], self.n_tokens(1, 1, self.base // joined) + 1, (0, 0)
        while max(image.size) > self.tile and most >= max(self.least, 1):
            columns, rows = nearest_grid(image.width, image.height, self.least, most, self.tile)
            n_tiles = self.n_tokens(rows, columns, self.tile // joined)
            if max_tokens is None or n + n_tiles <= max_tokens:
                frames, n, grid = tiles(image, columns, rows, self.tile, "bicubic"), n + n_tiles, (rows, columns)
                break
            most -= 1
        scale = self.base / max(image.size)
        height, width = (max(1, round(side * scale)) for side in (image.height, image.width))
        view = np.full((self.base, self.base, 3), 127, np.uint8)
        top, left = (self.base - height) // 2, (self.base - width) // 2
        view[top : top + height, left : left + width] = np.asarray(resized(image, height, width, "bicubic"))
        return Tiled((*frames, view), (n,), (self.base // joined, self.base // joined), grid)

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        """Return the rows of the tiles line by line, then of the complete view, each line with an end row."""
        assert isinstance(prepared, Tiled)
        joined, width = 4 * self.patch_size, rows.shape[2]
        end, parts, at = floats(self.newline), [], 0
        for (down, across), side in ((prepared.tiles, self.tile // joined), ((1, 1), self.base // joined)):
            n = down * across * side**2
            lines = np.empty((down * side, across * side + 1, width), np.float32)
            lines[:, :-1] = (
                rows[at : at + n]
                .reshape(down, across, side, side, width)
                .swapaxes(1, 2)
                .reshape(down * side, across * side, width)
            )
            lines[:, -1] = end
            parts.append(lines.reshape(-1, 1, width))
            at += n
        return np.concatenate([*parts, floats(self.separator).reshape(1, 1, -1)])


class DeepSeekOCR2(DeepSeekOCR):
    """DeepSeek-OCR 2: Qwen 2's layers. Learnt queries follow SAM's features, and each sees the features and the
    queries before it."""

    tile_size, most_tiles = _TILE_2, 6
    rms = True

    def record_second(self) -> None:
        d, self.activation = self.n_embd, "silu"
        if self.channels[-1] != d:
            raise ModelError(f"SAM's {self.channels[-1]} features do not fit {d} values: the file is broken")
        names = (f"v.resample_query_{side}.weight" for side in (768, 1024))
        self.queries = [self.weights.require(name, self.weights.n_rows(name), d) for name in names]
        self.windowed = range(self.n_layers)
        x = self.graph.add(Input(Tensor(Rows.TOKENS, d), 0, d))
        n = self.head_dim // 2
        rope = Rope((_THETA ** -(np.arange(n) / n)).astype(np.float32), False, axes=(0,) * n)
        x = self.graph.add(Outputs(norm(self.at(), "v.post_ln", self.layers(x, rope))))
        self.at().linear(x, "mm.model.fc", self.width)

    def queries_of(self, n: int) -> Any:
        """Return the queries for a number of features."""
        few, many = self.queries
        return few if n <= few.shape[0] else many

    def following_in_pieces(self, rows: Pixels, frame: FrameRows) -> Generator[None, None, FrameRows]:
        features = yield from self.joined_patches(rows)
        features = features.reshape(-1, features.shape[2])
        n, queries = len(features), floats(self.queries_of(len(features)))
        places = np.arange(n + len(queries), dtype=np.int32)
        spans = np.stack([places * 0, np.maximum(places + 1, n)]).astype(np.int32)
        axes = np.stack([places, places * 0, places * 0])
        return FrameRows(np.concatenate([features, queries]), axes, places[n:], spans)

    def n_tokens(self, rows: int, columns: int, side: int) -> int:
        return rows * columns * int(self.queries_of(side**2).shape[0])

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        return np.concatenate([rows, floats(self.separator).reshape(1, 1, -1)])
