"""InternVL (arXiv:2312.14238): tiles in the grid with the nearest aspect ratio, and one with the complete image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.models.encoders.encoder import (
    EncoderCheckpoint,
    Prepared,
    VisionModel,
    require,
    require_same,
    split_qkv,
)
from localllm.models.encoders.images import nearest_grid, resized, tiles
from localllm.models.hf_convert import GELU, Array, implied
from localllm.models.weights import floats

HF_NAMES = {
    "vision_tower.embeddings.cls_token": "v.class_embd",
    "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
    "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
    "vision_tower.layernorm": "v.post_ln",
    "embeddings.class_embedding": "v.class_embd",
    "embeddings.position_embedding": "v.position_embd.weight",
    "embeddings.patch_embedding": "v.patch_embd",
    "mlp1.0": "mm.model.mlp.0",
    "mlp1.1": "mm.model.mlp.1",
    "mlp1.3": "mm.model.mlp.3",
    "multi_modal_projector.layer_norm": "mm.model.mlp.0",
    "multi_modal_projector.linear_1": "mm.model.mlp.1",
    "multi_modal_projector.linear_2": "mm.model.mlp.3",
    "*.ls1": "v.blk.*.ls1.weight",
    "*.ls2": "v.blk.*.ls2.weight",
    "*.lambda_1": "v.blk.*.ls1.weight",
    "*.lambda_2": "v.blk.*.ls2.weight",
}
HF_MEANT = {
    "hidden_act": GELU,
    "vision_feature_layer": (-1,),
    "vision_feature_select_strategy": ("default",),
    "crop_to_patches": (),  # the processor of the text and its images sets it
    # of checkpoints with the code of OpenGVLab
    "do_center_crop": (),
    "dynamic_image_size": (True,),
    "pad2square": (False,),
    "ps_version": ("v2",),
    "select_layer": (-1,),
    "use_thumbnail": (True,),
} | implied("qkv_bias system_message template use_backbone_lora use_llm_lora")


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision = c.vision

    def first(value: Any) -> Any:
        return value[0] if isinstance(value, list | tuple) else value

    side, limits = first(vision["image_size"]), (c.processor.get("min_patches"), c.processor.get("max_patches"))
    if c.values["model_type"] == "internvl_chat":
        require_same(c, size=side, crop_size=side)
        require(c, "force_image_size", c.values.get("force_image_size") or side, (side,))
        limits = c.values.get("min_dynamic_patch"), c.values.get("max_dynamic_patch")
    else:
        require_same(c, size={"height": side, "width": side})
    return {
        "projector_type": "internvl",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "vision.projector.scale_factor": int(1 / c.values.get("downsample_ratio", 0.5)),
        "vision.image_size": side,
        "vision.patch_size": first(vision["patch_size"]),
        "vision.preproc_min_tiles": limits[0],
        "vision.preproc_max_tiles": limits[1],
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name.endswith("mask_token"):
        return {}
    if ".attn.qkv." in name:
        return split_qkv(name, array, f"v.blk.{name.split('.')[-4]}.")
    if name.endswith(("cls_token", "class_embedding")):
        return array.reshape(-1)
    if name.endswith(("position_embeddings", "position_embedding")):
        return array.reshape(array.shape[-2:])
    return array


class InternVL(VisionModel):
    marker, around = "<IMG_CONTEXT>", ("<img>", "</img>")
    n_before = 1
    exact_gelu = True

    def read(self) -> None:
        self.merge = self.number("projector.scale_factor", 2)
        self.least, self.most = self.number("preproc_min_tiles", 1), self.number("preproc_max_tiles", 12)
        self.check_tiles(self.most + 1, self.image_size)
        self.rms = "v.blk.0.ln1.bias" not in self.weights

    def record(self) -> None:
        weights, n = self.weights, (self.image_size // self.patch_size) ** 2 + 1
        positions = self.table("v.position_embd.weight", n, self.n_embd)
        positions[0] += floats(weights.require("v.class_embd", self.n_embd))
        if (bias := weights.find("v.patch_embd.bias", self.n_embd)) is not None:
            positions[0] -= floats(bias)  # which is added to all rows
        self.position_table = positions
        x = self.layers(self.embedded(self.patch_matrix(), has_positions=True))
        if "v.post_ln.weight" in weights:
            x = self.vector_norm(x, "v.post_ln", self.eps)
        x = self.vector_norm(self.joined(x), "mm.model.mlp.0", 1e-5)
        self.two_linears(x, "mm.model.mlp.1", "mm.model.mlp.3")

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        size, side = self.image_size, self.image_size // self.patch_size // self.merge
        n, most = side * side, self.most
        if max_tokens is not None:
            most = max(1, min(most, max_tokens // n - 1))
        columns, rows = nearest_grid(image.width, image.height, min(self.least, most), most, size)
        frames = tiles(image, columns, rows, size, "bicubic")
        if len(frames) > 1:
            frames.append(np.asarray(resized(image, size, size, "bicubic")))
        return Prepared(tuple(frames), ("<img>", n * len(frames), "</img>"), (side, side))
