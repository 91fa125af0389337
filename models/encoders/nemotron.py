"""Nemotron Nano 2 VL (arXiv:2511.03929): InternVL's tiles, and the encoder RADIO 2.5 (arXiv:2412.07679)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.kernels.operations import Activation, RMSNorm
from localllm.models.encoders.encoder import EncoderCheckpoint, require, require_same
from localllm.models.encoders.images import interpolated
from localllm.models.encoders.internvl import InternVL
from localllm.models.hf_convert import Array, floats, implied

HF_NAMES = {
    "patch_generator.embedder": "v.patch_embd",
    "patch_generator.pos_embed": "v.position_embd.weight",
    "patch_generator.cls_token.token": "v.class_embd",
    "mlp1.0": "mm.model.mlp.0",
    "mlp1.1": "mm.model.mlp.1",
    "mlp1.3": "mm.model.mlp.3",
}
_TILES = 12
HF_MEANT = {
    "image_tag_type": ("internvl",),
    "ps_version": ("v2",),
    "use_thumbnail": (True,),
    "vitdet_window_size": (None,),
    "feature_normalizer_config": (None,),
} | implied(
    "adaptor_configs adaptor_names args img_context_token img_end_token img_start_token "
    "inter_feature_normalizer_config max_resolution num_image_token preferred_resolution projector_hidden_size "
    "separate_video_embedder template vit_hidden_size norm_mean norm_std"
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    side, ratio, most = c.values["force_image_size"], c.values["downsample_ratio"], c.processor.get("max_num_tiles")
    require(c, "image_size", c.processor.get("image_size", 512), (side,))
    require_same(c, patch_size=c.vision["patch_size"], downsample_ratio=ratio)
    for name in ("norm_mean", "norm_std"):
        require(c, name, c.values.get(name, c.processor[name]), (c.processor[name],))
    return {
        "projector_type": "nemotron_v2_vl",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.image_size": side,
        "vision.projector.scale_factor": int(1 / ratio),
        "vision.preproc_max_tiles": None if most == _TILES else most,
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if "input_conditioner." in name or name.endswith(("summary_idxs", "patch_generator.video_embedder.weight")):
        return {}
    size = c.vision["patch_size"]
    if name.endswith("embedder.weight"):
        return array.reshape(-1, 3, size, size)
    if name.endswith("pos_embed"):  # positions of the largest image, for a tile
        side, n = c.values["force_image_size"] // size, array.shape[1]
        if side == math.isqrt(n):
            return array
        return interpolated(floats(array[0]), side, side, has_antialiasing=False)[None]
    return array


class NemotronVL(InternVL):
    """InternVL with further rows before the patches, and a projector with RMSNorm and squared ReLU."""

    marker = "<image>"

    def read(self) -> None:
        super().read()
        self.n_before = self.weights.n_rows("v.class_embd")

    def record(self) -> None:
        n, shape = (self.image_size // self.patch_size) ** 2, self.weights.shape("v.position_embd.weight")
        before = self.table("v.class_embd", self.n_before, self.n_embd)
        positions = self.table("v.position_embd.weight", *(1,) * (len(shape) == 3), n, self.n_embd)
        self.position_table = np.concatenate([before, positions.reshape(n, -1)])
        x = self.joined(self.layers(self.embedded(self.patch_matrix(), has_positions=True)))
        x = self.graph.add(RMSNorm(x, self.weights.vector("mm.model.mlp.0", x.width), 1e-5))
        at, n_ff = self.at(), self.weights.n_rows("mm.model.mlp.1.weight")
        x = at.add(Activation(at.linear(x, "mm.model.mlp.1", n_ff), "relu2"))
        at.linear(x, "mm.model.mlp.3", self.width)
