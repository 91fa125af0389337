"""Granite 4 Vision's encoder: SigLIP, and several Q-Formers (arXiv:2301.12597) over different layers. Its queries are
averages or corners of patches, and see the patches of their window. The text model adds each Q-Former's output before
another layer.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Rows, Tensor
from localllm.kernels.operations import Input, Outputs, SideBySide
from localllm.models.blocks import layer_norm
from localllm.models.encoders import qformer
from localllm.models.encoders.clip import Llava
from localllm.models.encoders.encoder import EncoderCheckpoint, EncoderStage, FrameRows, Pixels, require, require_same
from localllm.models.encoders.siglip import ENCODER_NAMES
from localllm.models.granite import deepstack_layers
from localllm.models.hf_convert import GELU_TANH, Array, implied
from localllm.models.weights import floats

HF_NAMES = ENCODER_NAMES | {"image_newline": "v.image_newline"}
#: Names of a Q-Former's tensors.
_NAMES = qformer.NAMES | {
    "image_positions": "img_pos",
    "query": "query",
    "out_linear": "linear",
    "norm": "norm",
    "qformer.layernorm": "post_norm",
}
HF_MEANT = {
    "hidden_act": GELU_TANH,
    "do_center_crop": (),
    "use_image_newline_parameter": (True,),
    "vision_feature_select_strategy": ("full",),
} | implied("projector_dropout qformer_config vision_feature_layer")

#: Width of a Q-Former's heads.
_HEAD_DIM = 64


def _projectors(c: EncoderCheckpoint) -> list[tuple[int, str, int, int]]:
    """Return layer of the text model, kind, number in the checkpoint and layer of the encoder of each Q-Former."""
    n, n_text = c.vision["num_hidden_layers"], c.text.num_hidden_layers
    tapped, targets = c.values.get("spatial_vision_layer", -1), c.values["spatial_target_layers"]
    kinds = (("layerwise", c.values["deepstack_layer_map"]), ("spatial", [(tapped, layer) for layer in targets]))
    return sorted(
        (int(layer) % n_text, kind, i, int(source) + n if int(source) < 0 else int(source) - 1)
        for kind, pairs in kinds
        for i, (source, layer) in enumerate(pairs)
    )


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, former = c.vision, c.values["qformer_config"]
    deepstack_layers(c.text)
    require(c, "model_type", vision.get("model_type"), ("siglip_vision_model",))
    require(c, "qformer_config.num_hidden_layers", former["num_hidden_layers"], (1,))
    require(c, "qformer_config.hidden_act", former.get("hidden_act", "gelu"), ("gelu",))
    require(c, "qformer_config.layer_norm_eps", former.get("layer_norm_eps", qformer.EPS), (qformer.EPS,))
    query, window = map(int, c.values["downsample_rate"].split("/"))
    grids, projectors = c.values["image_grid_pinpoints"], _projectors(c)
    square = {"height": vision["image_size"], "width": vision["image_size"]}
    require_same(c, image_grid_pinpoints=grids, size=square, crop_size=square)
    return {
        "projector_type": "granite4_vision",
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "vision.preproc_image_size": vision["image_size"],
        "vision.projector.query_side": query,
        "vision.projector.window_side": window,
        "vision.feature_layer": [layer for *_, layer in projectors],
        "vision.projector.spatial_offsets": [i if kind == "spatial" else -1 for _, kind, i, _ in projectors],
        "vision.image_grid_pinpoints": [side for height, width in grids for side in (width, height)],
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if ".head." in name:  # SigLIP's pooling
        return {}
    if not (match := re.search(r"(layerwise|spatial)_projectors\.(\d+)\.(.*?)(\.weight|\.bias)?$", name)):
        return array
    which = [(kind, i) for _, kind, i, _ in _projectors(c)].index((match[1], int(match[2])))
    ours = _NAMES[match[3].removeprefix("qformer.encoder.layer.0.")]
    return {f"v.proj_blk.{which}.{ours}{match[4] or ''}": array}


class Granite4Vision(Llava):
    n_before = 0
    exact_gelu = False

    def read(self) -> None:
        self.aspect_ratio, self.newline = "anyres", floats(self.weights.require("v.image_newline", self.width))
        self.grids = [(rows, columns) for columns, rows in self.read_grids()]
        self.query_side, self.window_side = (self.number(f"projector.{name}_side") for name in ("query", "window"))
        keys = ("vision.feature_layer", "vision.projector.spatial_offsets")
        self.tapped, self.corners = (self.meta.find(key) for key in keys)
        n, side = self.n_layers, self.image_size // self.patch_size
        for key, values, low, high in zip(keys, (self.tapped, self.corners), (0, -1), (n - 1, 3), strict=True):
            if not isinstance(values, list) or not values or any(not low <= x <= high for x in values):
                raise ModelError(f"clip.{key} must be numbers between {low} and {high}: the file is broken")
        shrinks = side % self.window_side == 0 and self.window_side % self.query_side == 0
        is_half = 2 * self.query_side == self.window_side or max(self.corners) < 0
        if len(self.tapped) != len(self.corners) or not side or not shrinks or not is_half or not self.grids:
            raise ModelError("the sizes of the encoder's windows contradict each other: the file is broken")
        self.meta.skip("vision.preproc_image_size")
        self.weights.skip("v.post_ln.weight", "v.post_ln.bias")

    @property
    def side(self) -> int:
        return self.image_size // self.patch_size // self.window_side * self.query_side

    def record(self) -> None:
        n, d, k = (self.image_size // self.patch_size) ** 2, self.n_embd, len(self.tapped)
        self.position_table = self.table("v.position_embd.weight", n, d)
        self.outputs: dict[int, Tensor] = {}
        self.layers(self.embedded(self.patch_matrix(), has_positions=True))
        normed = tuple(
            self.vector_norm(self.outputs[layer], f"v.proj_blk.{i}.norm", 1e-6) for i, layer in enumerate(self.tapped)
        )
        self.graph.add(Outputs(self.graph.add(SideBySide(normed))))
        sizes = (("query", self.query_side), ("img_pos", self.window_side))
        self.learnt = {
            name: np.stack(
                [self.table(f"v.proj_blk.{i}.{name}", 1, side**2, d).reshape(-1, d) for i in range(k)], axis=1
            )
            for name, side in sizes
        }  # [rows of a window, k, n_embd]
        first, self.graph = self.graph, Graph(rounds_floats=True)
        results = [self._former(i) for i in (*range(1, k), 0)]  # a graph's result is recorded last
        self.further = results[:-1]
        self.behind, self.graph = EncoderStage(self.graph, 1), first

    def behind_layer(self, number: int, x: Tensor) -> None:
        self.outputs[number] = x

    def _former(self, i: int) -> Tensor:
        """Record a Q-Former over the rows from `following_in_pieces`, and the projection of its queries."""
        d, k = self.n_embd, len(self.tapped)
        total = k * d + 2 * qformer.FLAGS
        x, is_patch, is_query = (
            self.graph.add(Input(Tensor(Rows.TOKENS, width), first, total))
            for first, width in ((i * d, d), (k * d, qformer.FLAGS), (k * d + qformer.FLAGS, qformer.FLAGS))
        )
        at = self.at(self.weights.under(f"v.proj_blk.{i}."), qformer.EPS)
        self.graph.layer = i
        cache = qformer.make_cache(self.graph, d, _HEAD_DIM)
        y = qformer.layer(at, layer_norm(at, "post_norm", x), x, is_patch, is_query, cache)
        self.graph.layer = "output"
        return at.linear(at.add(Outputs(y)), "linear", self.width)

    def following_in_pieces(self, rows: Pixels, frame: FrameRows) -> Generator[None, None, FrameRows]:
        """Return the patches of each window, followed by the queries of the window."""
        yield from ()
        k, d, window, query = len(self.tapped), self.n_embd, self.window_side, self.query_side
        side = round(len(rows) ** 0.5)
        n, grid = side // window, rows.reshape(side, side, k, d)
        means = grid.reshape(self.side, window // query, self.side, window // query, k, d).mean((1, 3))
        chosen = [
            means[:, :, i] if corner < 0 else grid[corner >> 1 :: 2, corner & 1 :: 2, i]
            for i, corner in enumerate(self.corners)
        ]

        def by_window(x: Pixels, size: int) -> Pixels:
            return x.reshape(n, size, n, size, k, d).swapaxes(1, 2).reshape(n * n, size * size, k, d)

        def flat(x: Pixels) -> Pixels:
            return x.reshape(*x.shape[:2], -1)

        queries = by_window(np.stack(chosen, axis=2), query) + self.learnt["query"]
        patches = by_window(grid, window) + self.learnt["img_pos"]
        given = qformer.window_rows(flat(patches), flat(queries))
        outputs = given.outputs.reshape(n, n, query, query).swapaxes(1, 2).ravel()
        return replace(given, outputs=np.ascontiguousarray(outputs))
