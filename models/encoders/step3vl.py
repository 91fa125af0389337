"""Step 3.7 Flash: tiles of a large image, and the complete image. The encoder has learnt positions
and a rotation by column and row. Two convolutions then join 16 patches.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Matrix, Rows, Tensor
from localllm.kernels.operations import Input, Linear, Outputs
from localllm.models.encoders.encoder import (
    EncoderCheckpoint,
    EncoderStage,
    FrameRows,
    Pixels,
    Prepared,
    VisionModel,
    require,
)
from localllm.models.encoders.images import cut, interpolated, resized
from localllm.models.hf_convert import Array
from localllm.models.weights import Reshaped

HF_NAMES = {
    "vision_model.conv1": "v.patch_embd",
    "vision_model.positional_embedding": "v.position_embd.weight",
    "vision_model.ln_pre": "v.pre_ln",
    "vision_model.vit_downsampler1": "mm.0",
    "vision_model.vit_downsampler2": "mm.1",
    "vit_large_projector": "mm.model.fc",
    "*.ls_1.gamma": "v.blk.*.ls1.weight",
    "*.ls_2.gamma": "v.blk.*.ls2.weight",
    "*.attn.in_proj_weight": "v.blk.*.attn_qkv.weight",
    "*.attn.in_proj_bias": "v.blk.*.attn_qkv.bias",
}
#: Side of a tile, and longest side of an image, in pixels.
_TILE, _LONGEST = 504, 3024
HF_MEANT = {
    "understand_projector_stride": (2,),
    "patch_size": (_TILE,),
    "hidden_act": ("quick_gelu",),
    "resample": (2,),
    "projector_bias": (),  # the tensors show it
}


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision = c.vision
    side = vision.get("image_size", 728)
    require(c, "size", c.processor.get("size", {"height": side, "width": side}), ({"height": side, "width": side},))
    return {
        "projector_type": "step3vl",
        "vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-5),
        "vision.feed_forward_length": int(vision["hidden_size"] * vision.get("mlp_ratio", 8960 / 1536)),
        "vision.projector.scale_factor": 4,
        "vision.preproc_image_size": c.processor.get("max_image_size", _LONGEST),
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    return array


class Step3VL(VisionModel):
    marker = "<im_patch>"

    def read(self) -> None:
        self.longest = self.number("preproc_image_size", _LONGEST)
        if self.number("projector.scale_factor", 4) != 4 or min(self.image_size, _TILE) < self.patch_size:
            raise ModelError("clip.vision.projector.scale_factor or image_size is out of range: the file is broken")
        self.check_tiles(1 + (-(-self.longest // _TILE)) ** 2, max(self.image_size, _TILE))

    def record(self) -> None:
        d = self.n_embd
        n = (self.image_size // self.patch_size) ** 2
        self.position_table = self.table("v.position_embd.weight", n, d)
        x = self.embedded(self.patch_matrix(), has_positions=True)
        x = self.layers(self.vector_norm(x, "v.pre_ln", self.eps), self.rope(1e4, interleaved=True, axes=(2, 1)))
        self.joined(x)
        first, second = Graph(rounds_floats=True), Graph(rounds_floats=True)
        self.convolution(first, "mm.0", d)
        x = self.convolution(second, "mm.1", 2 * d)
        second.add(Linear(x, self.weights.matrix("mm.model.fc", 4 * d, self.width)))
        self.convolutions = [EncoderStage(first, 1), EncoderStage(second, 1)]

    def convolution(self, graph: Graph, name: str, n_in: int) -> Tensor:
        """Record a convolution of 3 × 3 over rows with the values of nine patches."""
        kernel = Reshaped(self.weights.require(f"{name}.weight", 2 * n_in, n_in, 3, 3), (2 * n_in, 9 * n_in))
        x = graph.add(Outputs(graph.add(Input(Tensor(Rows.TOKENS, 9 * n_in), 0, 9 * n_in))))
        return graph.add(Linear(x, Matrix(kernel, self.weights.find(f"{name}.bias", 2 * n_in))))

    @property
    def stages(self) -> list[EncoderStage]:
        return [EncoderStage(self.graph, 1), *self.convolutions]

    def positions(self, rows: int, columns: int) -> Pixels:
        return interpolated(self.position_table, rows, columns, has_antialiasing=False)

    def following_in_pieces(self, rows: Pixels, frame: FrameRows) -> Generator[None, None, FrameRows]:
        """Return the values of nine patches for every second row and column of a square."""
        side = int(len(rows) ** 0.5)
        padded = np.pad(rows.reshape(side, side, -1), ((1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(0, 1))[::2, ::2]
        yield
        inputs = np.ascontiguousarray(windows.reshape(windows.shape[0] ** 2, -1))
        return FrameRows.in_order(inputs)

    def n_tokens(self, side: int) -> int:
        """Return the number of tokens of a square of pixels."""
        return (-(-(side // self.patch_size) // 4)) ** 2

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        from PIL import Image

        width, height = image.size
        if min(width, height) < 32 and max(width, height) > 4 * min(width, height):
            square = Image.new("RGB", (max(width, height),) * 2)
            square.paste(image, (0, 0))
            image, width, height = square, *square.size
        if max(width, height) > self.longest:
            scale = self.longest / max(width, height)
            width, height = (max(1, int(side * scale)) for side in (width, height))
        n, n_tile = self.n_tokens(self.image_size), self.n_tokens(_TILE)
        frames, columns = [], 1
        if (window := self.window_side(width, height)) != 0:
            wide, tall = (snapped(side, window) for side in (width, height))
            columns = -(-wide // window)
            if max_tokens is None or n + columns * -(-tall // window) * n_tile <= max_tokens:
                pieces = cut(np.asarray(resized(image, tall, wide, "bilinear")), window)
                frames = [np.asarray(resized(Image.fromarray(each), _TILE, _TILE, "bilinear")) for each in pieces]
        segments: list[str | int] = []
        for i in range(1, len(frames) + 1):
            has_end = i % columns == 0 and i < len(frames)
            segments += ["<patch_start>", n_tile, "<patch_end><patch_newline>" if has_end else "<patch_end>"]
        view = resized(resized(image, height, width, "bilinear"), self.image_size, self.image_size, "bilinear")
        side = int(n**0.5)
        return Prepared((*frames, np.asarray(view)), (*segments, "<im_start>", n, "<im_end>"), (side, side))

    def window_side(self, width: int, height: int) -> int:
        """Return the side in pixels of the squares that become tiles, or 0 for images without tiles."""
        short, long = sorted((width, height))
        if long <= self.image_size:
            return short if long > 1.5 * short else 0
        return min(short, _TILE) if long > 4 * short else _TILE


def snapped(side: int, window: int) -> int:
    """Return a multiple of a window's side, which is larger than ``side`` if more than a fifth of a window remains.

    Sides below the window are unchanged.
    """
    return window * (side // window + (side % window > 0.2 * window)) if side >= window else side
