"""MiniMax-M3's encoder: images of any size, with a rotation of parts of the heads by row and column. Patches are
projected to the text model's width, then four patches become a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.kernels.graph import Matrix, Rope, Tensor
from localllm.kernels.operations import Linears
from localllm.models.blocks import Layer
from localllm.models.encoders.encoder import EncoderCheckpoint, require, require_same
from localllm.models.encoders.qwen import QwenVision, pixel_limits
from localllm.models.encoders.views import HeadsReordered
from localllm.models.hf_convert import GELU, Array, implied

HF_NAMES = {
    "vision_model.pre_layrnorm": "v.pre_ln",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
    "patch_merge_mlp.linear_1": "mm.merger.fc1",
    "patch_merge_mlp.linear_2": "mm.merger.fc2",
}
HF_MEANT = {"hidden_act": GELU} | implied("img_token_compression_config merged_hidden_size projector_hidden_size")


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    compression = c.vision.get("img_token_compression_config") or {}
    merge = compression.get("spatial_merge_size") or c.vision.get("spatial_merge_size", 2)
    require(c, "temporal_patch_size", c.vision.get("temporal_patch_size", 2), (2,))
    require_same(c, patch_size=c.vision["patch_size"], merge_size=merge, temporal_patch_size=2)
    # Released files state a size of 672 × 672 pixels, which the processor replaces with its limits.
    limits = {} if isinstance(c.processor.get("size"), list) else pixel_limits(c)
    return {
        "projector_type": "minimax_m3",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": c.vision.get("layer_norm_eps", 1e-5),
        "vision.spatial_merge_size": merge,
    } | limits


def part_orders(head_dim: int) -> tuple[Array, Array]:
    """Return the order of a head's values in files by their place in checkpoints, and the inverse order.

    Time, row and column rotate the same number of pairs. The first values of all pairs precede the second values in
    checkpoints: time, row, column, time, row, column. In files, both values of an axis are adjacent. The last values
    of a head do not rotate.
    """
    n = head_dim // 6
    parts = np.arange(6 * n).reshape(2, 3, n).swapaxes(0, 1).ravel()
    order = np.concatenate([parts, np.arange(6 * n, head_dim)])
    return order, np.argsort(order)


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name.endswith("patch_embedding.weight"):
        return {"v.patch_embd.weight": array[:, :, 0], "v.patch_embd.weight.1": array[:, :, 1]}
    if ".q_proj." in name or ".k_proj." in name:
        order, _ = part_orders(len(array) // c.vision["num_attention_heads"])
        return array.reshape(-1, len(order), *array.shape[1:])[:, order].reshape(array.shape)
    return array


class MiniMaxM3(QwenVision):
    marker, around = "]<]image[>[", ("", "")
    has_grid = False
    exact_gelu = True
    limits = 4 * 28 * 28, 576 * 28 * 28

    def record(self) -> None:
        self.order = part_orders(self.head_dim)[1]
        n = self.head_dim // 6
        frequencies = np.tile(1e4 ** -(np.arange(n) / n), 3).astype(np.float32)
        rope = Rope(frequencies, False, axes=(0,) * n + (1,) * n + (2,) * n)
        x = self.embedded(self.patch(), has_positions=False)
        x = self.layers(self.vector_norm(x, "v.pre_ln", self.eps), rope)
        x = self.joined(self.two_linears(x, "mm.1", "mm.2"))
        self.two_linears(x, "mm.merger.fc1", "mm.merger.fc2")

    def query_key_value(self, at: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def turned(matrix: Matrix) -> Matrix:
            parts = (part for part in (matrix.weight, matrix.bias) if part is not None)
            return Matrix(*(HeadsReordered(part, self.order) for part in parts))

        q, k, v = (at.weights.matrix(f"attn_{name}", x.width, x.width, bias=True) for name in "qkv")
        query, key, value = at.add(Linears(x, (turned(q), turned(k), v)))
        return query, key, value
