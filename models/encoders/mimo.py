"""MiMo V2.5's encoder: images of any size. Four patches become a token. In most layers, a patch sees the patches that
precede and follow it at a distance up to the window: by rows of tokens in some layers, by columns in others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels import operations as ops
from localllm.kernels.graph import Graph, KVCache, Rope, Rows, Tensor, Weight
from localllm.models.blocks import Layer
from localllm.models.encoders.encoder import (
    EncoderCheckpoint,
    EncoderStage,
    FrameRows,
    Pixels,
    require,
    require_same,
)
from localllm.models.encoders.qwen import QwenVision, pixel_limits
from localllm.models.hf_convert import SILU, Array, implied

HF_NAMES = {
    "visual.merger.ln_q": "v.post_ln",
    "visual.merger.mlp.0": "mm.0",
    "visual.merger.mlp.2": "mm.2",
    "*.attn.sinks": "v.blk.*.attn_sinks",
}
HF_MEANT = {"hidden_act": SILU, "vision_model_type": ("mimovl",)} | implied(
    "num_query_groups processor_config window_size"
)

#: Values of ``wa_pattern_mode``: the complete image, a window by rows, and a window by columns.
_FULL, _ROWS, _COLUMNS = -1, 0, 1


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, merge = c.vision, c.vision["spatial_merge_size"]
    modes = list(vision.get("vit_window_attn_types") or [_FULL] * vision["depth"])
    full = [i for i, mode in enumerate(modes) if mode == _FULL]
    require(c, "fullatt_block_indexes", list(vision.get("fullatt_block_indexes") or full), (full,))
    require(c, "temporal_patch_size", vision.get("temporal_patch_size", 2), (2,))
    require(c, "use_sink", vision.get("use_sink", False), (True,))
    require_same(c, patch_size=vision["patch_size"], merge_size=merge, temporal_patch_size=2)
    vision.get("qk_channels")  # follows from the tensors
    return {
        "projector_type": "mimovl",
        "use_silu": True,
        "vision.attention.head_count_kv": vision["num_key_value_heads"],
        "vision.attention.layer_norm_epsilon": vision.get("rms_norm_eps", 1e-6),
        "vision.image_size": vision.get("image_size", 560),
        "vision.spatial_merge_size": merge,
        "vision.wa_pattern_mode": modes,
        "vision.window_size": vision["visual_token_window_size"],
    } | pixel_limits(c)


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name.startswith("speech_embeddings."):
        return {}
    if name.endswith("patch_embed.proj.weight"):
        return {"v.patch_embd.weight": array[:, :, 0], "v.patch_embd.weight.1": array[:, :, 1]}
    return array


@dataclass(frozen=True)
class _StageRows(FrameRows):
    number: int = 0  # number of the stage
    grid: tuple[int, int] = (0, 0)  # rows and columns of tokens


class MiMoVL(QwenVision):
    """Each run of layers by rows or by columns is a stage. Between stages, the patches are reordered."""

    rms = True
    has_grid = False

    def read(self) -> None:
        super().read()
        modes = self.meta.find("vision.wa_pattern_mode")
        if (
            not isinstance(modes, list)
            or not modes
            or len(modes) != self.n_layers
            or not all(mode in (_FULL, _ROWS, _COLUMNS) for mode in modes)
        ):
            raise ModelError("clip.vision.wa_pattern_mode must be -1, 0 or 1 for each layer: the file is broken")
        self.modes: list[int] = modes
        self.reach = self.number("window_size")
        self.head_dim = self.weights.n_rows("v.blk.0.attn_qkv.weight") // (self.n_heads + 2 * self.n_kv)

    def record(self) -> None:
        runs = [(is_column, [*run]) for is_column, run in groupby(self.modes, lambda mode: mode == _COLUMNS)]
        self.by_column = [is_column for is_column, _ in runs]
        self.parts: list[EncoderStage] = []
        x, first = self.embedded(self.patch(), has_positions=False), 0
        for number, (_, run) in enumerate(runs):
            if number:
                self.graph.add(ops.Outputs(x))
                self.parts.append(EncoderStage(self.graph, 1))
                self.graph = Graph(rounds_floats=True)
                x = self.graph.add(ops.Input(Tensor(Rows.TOKENS, self.n_embd), 0, self.n_embd))
            x = self.layers(x, self.rope(1e4), range(first, first := first + len(run)))
        x = self.joined(self.vector_norm(x, "v.post_ln", 1e-6))
        self.two_linears(x, "mm.0", "mm.2")
        self.parts.append(EncoderStage(self.graph, self.n_joined))
        self.graph = self.parts[0].graph

    def attention(
        self, at: Layer, x: Tensor, cache: KVCache, rope: Rope | None, *, residual: Tensor | None
    ) -> Tensor:
        q, k, v = self.query_key_value(at, x)
        q = at.add(ops.RopeAppend(q, k, v, cache, rope))
        window: int | None = None
        sinks: Weight | None = None
        if self.modes[int(self.graph.layer)] != _FULL:
            window, sinks = self.reach + 1, at.weights.require("attn_sinks", self.n_heads)
        y = at.add(ops.Attention(q, cache, self.head_dim**-0.5, window, sinks=sinks, causal=False))
        return self.project(at, y, "attn_out", "ls1", residual)

    @property
    def stages(self) -> list[EncoderStage]:
        return self.parts

    def rows(self, frame: NDArray[np.uint8]) -> FrameRows:
        rows = super().rows(frame)
        size = self.patch_size * self.merge
        grid = frame.shape[0] // size, frame.shape[1] // size
        order = self._patches(grid, by_column=self.by_column[0])
        return self._stage(0, grid, rows.inputs[order], rows.axes[:, order])

    def following(self, rows: Pixels, frame: FrameRows) -> FrameRows:
        assert isinstance(frame, _StageRows)
        return self._stage(frame.number + 1, frame.grid, rows, frame.axes[:, frame.outputs])

    def _stage(self, number: int, grid: tuple[int, int], inputs: Pixels, axes: NDArray[np.int32]) -> FrameRows:
        """Return the rows of a stage. Outputs are in the order of the next stage. In the last, they are tokens."""
        is_last, by_column = number == len(self.parts) - 1, self.by_column[number]
        places = np.argsort(self._patches(grid, by_column=by_column))  # of the patches by rows of tokens
        order = places if is_last or by_column else places[self._patches(grid, by_column=True)]
        outputs = order[:: self.n_joined] if is_last else order
        spans = np.zeros((2, 0), np.int32)
        return _StageRows(inputs, axes, outputs.astype(np.int32), spans, number=number, grid=grid)

    def _patches(self, grid: tuple[int, int], *, by_column: bool) -> NDArray[np.int64]:
        """Return the patches, numbered by rows of tokens, in the order of a stage."""
        tokens = np.arange(grid[0] * grid[1])
        if by_column:
            tokens = tokens.reshape(grid).T.ravel()
        return (tokens[:, None] * self.n_joined + np.arange(self.n_joined)).ravel()
