"""HunyuanOCR and HunyuanVL (arXiv:2511.19575): images of any size. Four patches become a token. An additional token
ends each row of the image, one precedes the image, and one follows it. In Hunyuan 4, only rows have such a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Matrix, Tensor
from localllm.kernels.operations import Activation, Linear, RMSNorm
from localllm.models.encoders.encoder import EncoderCheckpoint, Pixels, Prepared, require_same
from localllm.models.encoders.images import interpolated
from localllm.models.encoders.qwen import QwenVision, pixel_limits
from localllm.models.encoders.views import ColumnsByPart
from localllm.models.hf_convert import GELU, Array, implied
from localllm.models.weights import Reshaped, floats

HF_NAMES = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "perceive.proj.0": "mm.0",
    "patch_merger.proj_conv": "mm.0",
    "perceive.proj.2": "mm.2",
    "patch_merger.proj_out": "mm.2",
}
for merger in ("perceive", "patch_merger"):
    HF_NAMES |= {
        f"{merger}.before_rms": "mm.pre_norm",
        f"{merger}.norm": "mm.pre_norm",
        f"{merger}.mlp": "mm.model.fc",
        f"{merger}.after_rms": "mm.post_norm",
        f"{merger}.image_newline": "v.image_newline",
        f"{merger}.image_begin": "mm.image_begin",
        f"{merger}.image_end": "mm.image_end",
        f"{merger}.image_sep": "v.view_seperator",  # llama.cpp's spelling
    }
HF_MEANT = {"hidden_act": GELU, "interpolate_mode": ("bilinear",)} | implied(
    "add_patchemb_bias anyres_vit_max_image_size anyres_vit_two_views cat_extra_token img_max_size im_start_id "
    "im_end_id im_newline_id"
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision = c.vision
    merge = vision.get("spatial_merge_size", 2)
    require_same(c, patch_size=vision["patch_size"], merge_size=merge, temporal_patch_size=1)
    is_4 = c.values["model_type"] == "hy_v4_vl"
    return {
        "projector_type": "hunyuanvl4" if is_4 else "hunyuanvl",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": vision.get("rms_norm_eps", 1e-5),
        "vision.image_size": vision.get("max_image_size", 2048),
        "vision.spatial_merge_size": merge,
    } | pixel_limits(c)


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    return array[1:] if name.endswith("position_embedding.weight") else array  # without the row of a class token


class HunyuanVL(QwenVision):
    marker = "<｜hy_place▁holder▁no▁102｜>"
    around = "<｜hy_place▁holder▁no▁100｜>", "<｜hy_place▁holder▁no▁101｜>"
    is_numbered = exact_gelu = True
    limits = 512 * 512, 2048 * 2048
    #: Number of additional tokens before and after the image.
    n_marks = 2
    #: The grid is this much longer when positions are interpolated.
    excess = 0.0

    def record(self) -> None:
        x, n_wide = self.record_merger()
        weights = self.weights
        self.last = weights.matrix("mm.model.fc", n_wide, self.width)
        self.last_norm = weights.vector("mm.post_norm", self.width)
        self.marks = [weights.require(f"mm.image_{end}", self.width) for end in ("begin", "end")]
        self.newline = weights.require("v.image_newline", n_wide)
        weights.skip("v.view_seperator")  # for videos
        self.graph.add(RMSNorm(self.graph.add(Linear(x, self.last)), self.last_norm, self.eps))

    def record_merger(self) -> tuple[Tensor, int]:
        """Record the layers and the merger. Returns its output and the output's width."""
        d, size, weights = self.n_embd, self.merge, self.weights
        side = self.image_size // self.patch_size
        self.position_table = self.table("v.position_embd.weight", side**2, d)
        x = self.layers(self.embedded(self.patch_matrix(), has_positions=True))
        x = self.joined(self.graph.add(RMSNorm(x, weights.vector("mm.pre_norm", d), self.eps)))
        n, n_wide = ((weights.shape(f"mm.{i}.weight") or (0,))[0] for i in (0, 2))
        kernel = Reshaped(weights.require("mm.0.weight", n, d, size, size), (n, d * size**2))
        x = self.graph.add(Linear(x, Matrix(ColumnsByPart(kernel, size**2), weights.find("mm.0.bias", n))))
        last = weights.require("mm.2.weight", n_wide, n, 1, 1)
        x = self.graph.add(Activation(x, "gelu_erf"))
        x = self.graph.add(Linear(x, Matrix(Reshaped(last, (n_wide, n)), weights.find("mm.2.bias", n_wide))))
        return x, n_wide

    def positions(self, rows: int, columns: int) -> Pixels:
        return interpolated(self.position_table, rows, columns, has_antialiasing=False, excess=self.excess)

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        prepared = super().prepare(image, max_tokens)
        rows, columns = prepared.grid
        return replace(prepared, segments=(rows * (columns + 1) + self.n_marks,), grid=(rows, columns + 1))

    def grid(self, image: Any, max_tokens: int | None) -> tuple[int, int]:
        """Return the grid. ``max_tokens`` includes the additional tokens."""
        most = max_tokens
        while True:
            rows, columns = super().grid(image, most)
            if max_tokens is None or rows * (columns + 1) + self.n_marks <= max_tokens or rows * columns == 1:
                return rows, columns
            most = rows * columns - 1

    @cached_property
    def marking(self) -> Pixels:
        """Return the rows before the image, after each row of the image, and after the image: [3, width]."""
        newline = floats(self.last.weight) @ floats(self.newline)
        if self.last.bias is not None:
            newline = newline + floats(self.last.bias)
        begin, end = map(floats, self.marks)
        x = np.stack([begin, newline, end])
        rows: Pixels = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.eps)) * floats(self.last_norm)
        return rows

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        begin, newline, end = self.marking[:, None, None]
        return np.concatenate([begin, with_newlines(prepared, rows, newline), end])


class HunyuanVL4(HunyuanVL):
    marker, around = "<|image_pad|>", ("", "")
    is_numbered = False
    n_marks, excess = 0, 0.1

    def record(self) -> None:
        _, n_wide = self.record_merger()
        if n_wide != self.width:
            raise ModelError(f"mm.2 has {n_wide} rows instead of {self.width}: the file is broken")
        self.newline = self.weights.require("v.image_newline", self.width)

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        return with_newlines(prepared, rows, floats(self.newline))


def with_newlines(prepared: Prepared, rows: Pixels, newline: Pixels) -> Pixels:
    """Return the rows of an image with an additional row at the end of each row of tokens."""
    n, columns = prepared.grid
    lines = rows.reshape(n, columns - 1, 1, -1)
    lines = np.concatenate([lines, np.broadcast_to(newline, (n, 1, 1, lines.shape[3]))], axis=1)
    return lines.reshape(-1, 1, lines.shape[3])
