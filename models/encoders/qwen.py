"""Qwen 2-VL (arXiv:2409.12191), 2.5-VL (arXiv:2502.13923), 3-VL, 3.5 and later, and GLM-4.1V to 4.6V: images of any
size, with a rotation by row and column. Four patches become a token.

In Qwen 3-VL, the patches of some layers are also added after the first layers of the text model ("deepstack").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Matrix, Rows, Tensor, Weight
from localllm.kernels.operations import Activation, Input, Linear, Outputs
from localllm.models.blocks import add, norm
from localllm.models.encoders.encoder import (
    EncoderCheckpoint,
    Pixels,
    Prepared,
    VisionModel,
    require,
    require_same,
    split_qkv,
)
from localllm.models.encoders.images import bicubic, bilinear, resized, smart_resize
from localllm.models.encoders.views import ColumnsByPart, SumOf
from localllm.models.hf_convert import GELU_TANH, SILU, Array
from localllm.models.weights import Reshaped

HF_NAMES = {
    "visual.patch_embed.proj.bias": "v.patch_embd.bias",
    "visual.pos_embed": "v.position_embd",
    "visual.embeddings.position_embedding": "v.position_embd",
    "visual.merger.norm": "v.post_ln",
    "visual.merger.ln_q": "v.post_ln",
    "visual.post_layernorm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.mlp.0": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
    "visual.merger.mlp.2": "mm.2",
    "visual.post_conv_layernorm": "v.norm_embd",
    "visual.downsample": "mm.patch_merger",
    "visual.merger.proj": "mm.model.fc",
    "visual.merger.post_projection_norm": "mm.post_norm",
    "visual.merger.gate_proj": "mm.gate",
    "visual.merger.up_proj": "mm.up",
    "visual.merger.down_proj": "mm.down",
}
HF_MEANT: dict[str, tuple[Any, ...]] = {"apply_vit_abs_pos_embed": (True,)}
#: Activations by the prefix of ``model_type``.
_ACTIVATIONS = {
    **dict.fromkeys(("exaone4_5", "qwen2_5", "glm"), SILU),
    **dict.fromkeys(("qwen3", "qwen4"), GELU_TANH),
    "qwen2_vl": ("quick_gelu",),
}


#: GGUF's names of a merger's parts, by Qwen 3 Omni's names.
_MERGER = {"ln_q": "norm", "mlp.0": "fc1", "mlp.2": "fc2"}
#: Side of a window in Qwen 2.5-VL, in pixels.
WINDOW_PIXELS = 112


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, is_2 = c.vision, c.values["model_type"] == "qwen2_vl"
    kind, activation = c.values["model_type"], vision.get("hidden_act")
    known = next((names for start, names in _ACTIVATIONS.items() if kind.startswith(start)), ())
    require(c, "hidden_act", activation, (None, *known))
    n_layers, tapped = vision["depth"], vision.get("deepstack_visual_indexes") or ()
    if len(set(tapped)) < len(tapped):
        raise ModelError(f"config.json has deepstack_visual_indexes = {[*tapped]}, which names a layer twice")
    merge = vision.get("spatial_merge_size", 2)
    require(c, "temporal_patch_size", vision.get("temporal_patch_size", 2), (2,))
    require_same(c, patch_size=vision["patch_size"], merge_size=merge, temporal_patch_size=2)
    keys = {
        "projector_type": "qwen2vl_merger" if is_2 else "qwen3vl_merger",
        "use_gelu": None if is_2 else True,
        "vision.spatial_merge_size": merge,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.is_deepstack_layers": None if is_2 else [i in tapped for i in range(n_layers)],
        "vision.image_size": vision.get("image_size", 560),
    } | pixel_limits(c)
    if kind.startswith("glm"):
        # The processor counts the pixels of an image twice, like two frames of a video.
        keys |= pixel_limits(c, n_frames=2)
        return keys | {
            "projector_type": "glm4v",
            "use_gelu": None,
            "use_silu": True,
            "vision.attention.layer_norm_epsilon": vision.get("rms_norm_eps", 1e-5),
            "vision.is_deepstack_layers": None,
            "vision.image_size": vision["image_size"],
        }
    if kind in ("qwen2_5_vl", "qwen2_5_omni"):
        keys |= _keys_of_windows(c)
        return keys if kind == "qwen2_5_vl" else keys | {"projector_type": "qwen2.5o"}
    if kind == "exaone4_5":
        more = {"projector_type": "exaone4_5", "vision.window_size": WINDOW_PIXELS}
        more["vision.attention.head_count_kv"] = vision["num_key_value_heads"]
        return keys | _keys_of_windows(c) | more
    if is_2:
        return keys | {
            "vision.embedding_length": vision["embed_dim"],
            "vision.feed_forward_length": int(vision["embed_dim"] * vision.get("mlp_ratio", 4)),
        }
    n_positions = vision.get("num_position_embeddings", 2304)
    return keys | {"vision.image_size": int(n_positions**0.5 * vision["patch_size"])}


def pixel_limits(c: EncoderCheckpoint, n_frames: int = 1) -> dict[str, Any]:
    """Return the keys of the least and the most pixels of an image. ``n_frames``: how often the processor counts it.

    Raises ModelError if they are so close that an enlarged image may have more pixels than the most.
    """
    size = c.processor.get("size") or {}
    low = c.processor.get("min_pixels") or size.get("shortest_edge")
    high = c.processor.get("max_pixels") or size.get("longest_edge")
    if low and high and high < 2 * low:
        raise ModelError(
            f"the processor limits images to {low} to {high} pixels: localllm needs a factor of 2 or more"
        )
    return {"vision.image_min_pixels": low and low // n_frames, "vision.image_max_pixels": high and high // n_frames}


def _keys_of_windows(c: EncoderCheckpoint) -> dict[str, Any]:
    whole = list(c.vision["fullatt_block_indexes"])
    every = whole[0] + 1
    if whole != [*range(every - 1, every * len(whole), every)]:
        raise ModelError(f"layers {whole} have no window, but GGUF files can only describe layers at equal distances")
    if c.vision.get("window_size", WINDOW_PIXELS) != WINDOW_PIXELS:
        raise ModelError(
            f"the encoder's windows must have {WINDOW_PIXELS} pixels: GGUF files have no key for other sizes"
        )
    return {
        "projector_type": "qwen2.5vl_merger",
        "use_gelu": None,
        "use_silu": True,
        "vision.is_deepstack_layers": None,
        "vision.n_wa_pattern": every,
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name.endswith("patch_embed.proj.weight"):
        return {"v.patch_embd.weight": array[:, :, 0], "v.patch_embd.weight.1": array[:, :, 1]}
    parts = name.split(".")
    if "deepstack_merger_list" in parts:
        number = c.vision["deepstack_visual_indexes"][int(parts[-3])]
        return {f"v.deepstack.{number}.{parts[-2].removeprefix('linear_')}.{parts[-1]}": array}
    if "merger_list" in parts:  # in Qwen 3 Omni
        at = parts.index("merger_list")
        number, part = c.vision["deepstack_visual_indexes"][int(parts[at + 1])], ".".join(parts[at + 2 : -1])
        return {f"v.deepstack.{number}.{_MERGER[part]}.{parts[-1]}": array}
    if c.values["model_type"] in ("qwen2_vl", "qwen2_5_vl") and ".attn.qkv." in name:
        return split_qkv(name, array, f"v.blk.{parts[-4]}.")
    return array


class QwenVision(VisionModel):
    """Base class of the encoders of Qwen and GLM."""

    marker, around = "<|image_pad|>", ("<|vision_start|>", "<|vision_end|>")
    has_grid = True
    #: Default of the minimum and maximum number of pixels.
    limits = 1 << 16, 1 << 24

    def read(self) -> None:
        self.merge = self.number("spatial_merge_size", 2)
        # The key describes the merger in GLM's files. In llama.cpp's files of Qwen 2-VL it is 0 or the text's width.
        n_up, n_down = (self.weights.n_rows(f"v.blk.0.ffn_{name}.weight") for name in ("up", "down"))
        self.n_ff = n_up if n_down == self.n_embd else n_down
        low, high = self.limits
        self.low, self.high = self.number("image_min_pixels", low), self.number("image_max_pixels", high)

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        rows, columns = self.grid(image, max_tokens)
        factor = self.patch_size * self.merge
        frame = np.asarray(resized(image, rows * factor, columns * factor, "bicubic"))
        return Prepared((frame,), (rows * columns,), (rows, columns))

    def grid(self, image: Any, max_tokens: int | None) -> tuple[int, int]:
        """Return the rows and columns of an image's tokens."""
        factor = self.patch_size * self.merge
        high = self.high if max_tokens is None else min(self.high, max_tokens * factor**2)
        height, width = self.enlarged(image.height, image.width)
        height, width = smart_resize(height, width, factor, min(self.low, high), high)
        return height // factor, width // factor

    def enlarged(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that are used as the size of an image."""
        return height, width

    def patch(self) -> Weight:
        """Return the sum of both kernels of the convolution over two frames, which are equal for an image."""
        size = self.patch_size
        first, second = (
            self.weights.require(f"v.patch_embd.weight{end}", self.n_embd, 3, size, size) for end in ("", ".1")
        )
        return Reshaped(SumOf(first, second), (self.n_embd, 3 * size * size))


class Qwen2VL(QwenVision):
    limits = 56 * 56, 28 * 28 * 16384

    def record(self) -> None:
        x = self.layers(self.embedded(self.patch(), has_positions=False), self.rope(1e4))
        x = self.joined(self.merger_norm(x))
        self.two_linears(x, "mm.0", "mm.2")

    def merger_norm(self, x: Tensor) -> Tensor:
        return self.vector_norm(x, "v.post_ln", self.eps)


class Qwen25VL(Qwen2VL):
    """RMSNorms, a gate, and windows of 112 pixels in all but some layers."""

    rms = True

    def read(self) -> None:
        super().read()
        every = self.number("n_wa_pattern")  # the last of every ``every`` layers sees the complete image
        self.window = WINDOW_PIXELS // self.patch_size
        self.windowed = [i for i in range(self.n_layers) if (i + 1) % every] if every else []

    def merger_norm(self, x: Tensor) -> Tensor:
        return norm(self.at(), "v.post_ln", x)


class Qwen25Omni(Qwen25VL):
    marker, around = "<|IMAGE|>", ("<|vision_bos|>", "<|vision_eos|>")


class Exaone45(Qwen25VL):
    """EXAONE 4.5: several heads of queries share a head of keys and values. The text model's positions are plain."""

    around = "<vision>", "</vision>"
    has_grid = False

    def read(self) -> None:
        super().read()
        self.meta.skip("vision.window_size")


class Qwen3VL(QwenVision):
    def read(self) -> None:
        super().read()
        tapped = self.meta.find("vision.is_deepstack_layers") or ()
        self.tapped = {i for i, is_tapped in enumerate(tapped) if is_tapped}

    def record(self) -> None:
        self.n_positions = self.weights.n_rows("v.position_embd.weight")
        self.position_table = self.table("v.position_embd.weight", self.n_positions, self.n_embd)
        x = self.layers(self.embedded(self.patch(), has_positions=True), self.rope(1e4))
        x = self.joined(self.vector_norm(x, "v.post_ln", self.eps))
        self.two_linears(x, "mm.0", "mm.2")

    def behind_layer(self, number: int, x: Tensor) -> None:
        if number in self.tapped:
            stem = f"v.deepstack.{number}"
            y = self.vector_norm(self.graph.add(Outputs(x, self.merge**2)), f"{stem}.norm", self.eps)
            self.further.append(self.two_linears(y, f"{stem}.fc1", f"{stem}.fc2"))

    def positions(self, rows: int, columns: int) -> Pixels:
        return bilinear(self.position_table, rows, columns)


class Glm4V(QwenVision):
    """GLM-4.1V to 4.6V: RMSNorms, positions of a table after the first norm, and a merger with a gate. GLM-OCR has no
    such norm and no positions."""

    marker, around = "<|image|>", ("<|begin_of_image|>", "<|end_of_image|>")
    limits = 112 * 112 // 2, 14 * 14 * 4 * 6144
    rms = True

    def record(self) -> None:
        graph, weights, d, n = self.graph, self.weights, self.n_embd, 3 * self.patch_size**2
        self.position_table = None
        if "v.position_embd.weight" in weights:
            self.position_table = self.table("v.position_embd.weight", weights.n_rows("v.position_embd.weight"), d)
        n_inputs = n if self.position_table is None else n + d
        pixels = graph.add(Input(Tensor(Rows.TOKENS, n), 0, n_inputs))
        x = graph.add(Linear(pixels, Matrix(self.patch(), weights.find("v.patch_embd.bias", d))))
        at, width, size = self.at(), self.width, self.merge
        if "v.norm_embd.weight" in weights:
            x = norm(at, "v.norm_embd", x)
        if self.position_table is not None:
            x = add(at, x, graph.add(Input(Tensor(Rows.TOKENS, d), n, n_inputs)))
        x = self.layers(x, self.rope(1e4))
        at = self.at()
        x = self.joined(norm(at, "v.post_ln", x))
        kernel = self.weights.require("mm.patch_merger.weight", width, d, size, size)
        merger = ColumnsByPart(Reshaped(kernel, (width, d * size**2)), size**2)
        x = graph.add(Linear(x, Matrix(merger, self.weights.find("mm.patch_merger.bias", width))))
        x = self.vector_norm(at.linear(x, "mm.model.fc", width), "mm.post_norm", 1e-5)
        x = at.add(Activation(x, "gelu_erf"))
        n_ff = self.weights.n_rows("mm.up.weight")
        y = self.gated(at, at.linear(x, "mm.gate", n_ff), at.linear(x, "mm.up", n_ff))
        at.linear(y, "mm.down", width)

    def positions(self, rows: int, columns: int) -> Pixels | None:
        return None if self.position_table is None else bicubic(self.position_table, rows, columns)

    def enlarged(self, height: int, width: int) -> tuple[int, int]:
        scale = max(1, self.patch_size * self.merge / min(height, width))
        return int(height * scale), int(width * scale)
