"""Gemma 4: images with a budget of tokens, and an encoder with a rotation by column and row. For the 12B model
(``gemma4uv``), the patches are projected into the text model's space without an encoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels import operations as ops
from localllm.kernels.graph import HeadNorm, KVCache, Matrix, Rope, Rows, Tensor
from localllm.models.blocks import Layer, add, norm
from localllm.models.encoders.encoder import EncoderCheckpoint, Pixels, Prepared, VisionModel, require_same
from localllm.models.encoders.images import resized
from localllm.models.encoders.views import Diagonal, HeadsReordered, ProductOf
from localllm.models.hf_convert import GELU_TANH, Array
from localllm.models.weights import floats

BOUNDS = ("input_min", "input_max", "output_min", "output_max")

HF_NAMES = {
    "patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_embedder.pos_embedding": "v.position_embd.weight",
    "patch_embedder.input_proj": "v.patch_embd",
    "vision_embedder.patch_dense": "v.patch_embd",
    "embed_vision.patch_dense": "v.patch_embd",
    "patch_ln1": "v.patch_norm.1",
    "patch_ln2": "v.patch_norm.2",
    "pos_norm": "v.patch_norm.3",
    "vision_tower.std_bias": "v.std_bias",
    "vision_tower.std_scale": "v.std_scale",
    "embedding_projection": "mm.input_projection",
    "*.pre_feedforward_layernorm": "v.blk.*.ln2",
    "*.post_attention_layernorm": "v.blk.*.attn_post_norm",
}
HF_MEANT = {
    "do_normalize": (False,),
    "hidden_activation": GELU_TANH,
    "rope_theta": (100.0,),
    "mm_embed_dim": (),
    "mm_posemb_size": (),
    "output_proj_dims": (),
}


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    vision, budget, merge = c.vision, c.processor.get("max_soft_tokens", 280), c.vision.get("pooling_kernel_size", 3)
    require_same(c, patch_size=vision.get("patch_size", 16), pooling_kernel_size=merge)
    keys = {
        "vision.attention.layer_norm_epsilon": vision.get("rms_norm_eps", 1e-6),
        "vision.image_size": 224,  # unused, but required by llama.cpp
        "vision.projector.scale_factor": merge,
        # The default is 280 tokens.
        "vision.image_max_pixels": None if budget == 280 else budget * (vision.get("patch_size", 16) * merge) ** 2,
    }
    if c.values["model_type"] == "gemma4_unified":
        width = vision.get("mm_embed_dim", 3840)
        none = dict.fromkeys(("feed_forward_length", "block_count", "attention.head_count"), 0)
        keys |= {f"vision.{key}": value for key, value in none.items()}
        return keys | {"vision.projector_type": "gemma4uv", "vision.embedding_length": width}
    # Without use_gelu, llama.cpp computes GELU as x * sigmoid(1.702 * x).
    return keys | {"vision.projector_type": "gemma4v", "use_gelu": True}


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name.endswith(BOUNDS):
        return array.reshape(1)
    is_unified = c.values["model_type"] == "gemma4_unified"
    if name.endswith(".pos_embedding"):  # [places, 2, d]
        return array.transpose(1, 0, 2)
    if name.endswith(("input_proj.weight", "patch_dense.weight")) or ".patch_ln1." in name:
        # The pixels of a patch are stored colour by colour.
        size = math.isqrt(array.shape[-1] // 3)
        by_colour = np.moveaxis(array.reshape(*array.shape[:-1], size, size, 3), -1, -3)
        return by_colour.reshape(array.shape) if is_unified else by_colour
    return array


def clamped(at: Layer, x: Tensor, name: str, matrix: Matrix) -> Tensor:
    """Return x times a matrix, with x and the result clamped to the bounds in the file."""

    def within(x: Tensor, side: str) -> Tensor:
        bounds = [at.weights.find(f"{name}.{side}_{end}", 1) for end in ("min", "max")]
        low, high = (
            default if bound is None else float(floats(bound)[0])
            for bound, default in zip(bounds, (-math.inf, math.inf), strict=True)
        )
        return x if math.isinf(low) and math.isinf(high) else at.add(ops.Clamp(x, low, high))

    return within(at.add(ops.Linear(within(x, "input"), matrix)), "output")


def clamped_linear(at: Layer, x: Tensor, name: str, n_out: int) -> Tensor:
    """Return `clamped` with the matrix ``name``."""
    return clamped(at, x, name, at.weights.matrix(name, x.width, n_out))


class Gemma4(VisionModel):
    marker, around = "<|image|>", ("", "")
    rms = True
    #: Token budgets of the training.
    budgets = (70, 140, 280, 560, 1120)

    def read(self) -> None:
        self.merge = self.number("projector.scale_factor", 3)
        side = self.patch_size * self.merge
        self.budget = self.number("image_max_pixels", 280 * side**2) // side**2
        self.activation = "gelu"
        self.mean = self.std = (0.5,) * 3  # the model uses 2 * pixel - 1 independently of the file
        if not self.budget:
            raise ModelError("clip.vision.image_max_pixels are less than a token: the file is broken")
        if self.head_dim % 4:
            raise ModelError(f"heads of {self.head_dim} values do not turn by column and row: the file is broken")

    def record(self) -> None:
        self.position_tables = self.tables()
        x = self.layers(self.embedded(self.patch_matrix(), has_positions=True), self.rope(100.0, axes=(2, 1)))
        x = self.graph.add(ops.Outputs(x, self.merge**2, is_mean=True))
        factor, weights = self.n_embd**0.5, self.weights
        if "v.std_scale" in weights:
            bias, scale = (weights.require(f"v.std_{key}", self.n_embd) for key in ("bias", "scale"))
            matrix = Matrix(Diagonal(scale, factor), ProductOf(bias, scale, -1.0))
            x = self.graph.add(ops.Linear(x, matrix))
        else:
            x = self.graph.add(ops.Scale(x, factor))
        self.projected(x)

    def projected(self, x: Tensor) -> None:
        """Record the projection to the text model's width."""
        x = self.graph.add(ops.RMSNorm(x, None, self.eps))
        self.graph.add(ops.Linear(x, self.weights.matrix("mm.input_projection", self.n_embd, self.width)))

    def tables(self) -> Pixels:
        """Return position embeddings by column and by row: [2, places, n_embd]."""
        n = self.weights.n_rows("v.position_embd.weight")
        used = min(n, self.budgets[-1] * self.merge)
        return floats(self.weights.require("v.position_embd.weight", 2, n, self.n_embd))[:, :used].copy()

    def positions(self, rows: int, columns: int) -> Pixels:
        x, y = self.position_tables
        added: Pixels = y[:rows, None] + x[None, :columns]
        return added.reshape(rows * columns, -1)

    def layer(self, at: Layer, x: Tensor, cache: KVCache, rope: Rope | None) -> Tensor:
        y = norm(at, "ln1", x)
        # Swap the second and third quarters of heads.
        order = np.arange(self.head_dim).reshape(4, -1)[[0, 2, 1, 3]].ravel()

        q, k = (
            clamped(at, y, name, Matrix(HeadsReordered(at.weights.matrix(name, y.width, y.width).weight, order)))
            for name in ("attn_q", "attn_k")
        )
        v = clamped_linear(at, y, "attn_v", y.width)
        q_norm, k_norm = (
            HeadNorm(self.eps, HeadsReordered(at.weights.vector(name, self.head_dim), order))
            for name in ("attn_q_norm", "attn_k_norm")
        )
        q = at.add(ops.RopeAppend(q, k, v, cache, rope, q_norm, k_norm, HeadNorm(self.eps)))
        y = clamped_linear(at, at.add(ops.Attention(q, cache, 1.0, causal=False)), "attn_out", self.n_embd)
        x = add(at, norm(at, "attn_post_norm", y), x)
        y = norm(at, "ln2", x)
        gate, up = (clamped_linear(at, y, name, self.n_ff) for name in ("ffn_gate", "ffn_up"))
        y = clamped_linear(at, at.add(ops.Gated(gate, up, self.activation)), "ffn_down", self.n_embd)
        return add(at, norm(at, "ffn_post_norm", y), x)

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        budget = self.budget if max_tokens is None else max_tokens
        budget = max((n_tokens for n_tokens in self.budgets if n_tokens <= budget), default=budget)
        side = self.patch_size * self.merge
        height, width = image.height, image.width
        factor = (budget * side**2 / (height * width)) ** 0.5
        rows, columns = (int(factor * length // side) for length in (height, width))
        if not rows:
            rows, columns = 1, min(max(width // height, 1), budget)
        elif not columns:
            rows, columns = min(max(height // width, 1), budget), 1
        frame = np.asarray(resized(image, rows * side, columns * side, "bicubic"))
        return Prepared((frame,), ("<|image>", rows * columns, "<image|>"), (rows, columns))


class Gemma4Unified(Gemma4):
    """The 12B model: a patch has the size of a token, and the encoder has no layers."""

    def read(self) -> None:
        super().read()
        self.patch_size, self.merge = self.patch_size * self.merge, 1
        self.mean, self.std = (0.0,) * 3, (1.0,) * 3

    def record(self) -> None:
        self.position_tables = self.tables()
        graph, weights, d, n = self.graph, self.weights, self.n_embd, 3 * self.patch_size**2
        x = graph.add(ops.Input(Tensor(Rows.TOKENS, n), 0, n + d))
        positions = graph.add(ops.Input(Tensor(Rows.TOKENS, d), n, n + d))
        x = self.vector_norm(x, "v.patch_norm.1", 1e-5)
        x = graph.add(ops.Linear(x, weights.matrix("v.patch_embd", n, d, bias=True)))
        x = graph.add(ops.Add(self.vector_norm(x, "v.patch_norm.2", 1e-5), positions))
        x = self.vector_norm(x, "v.patch_norm.3", 1e-5)
        self.projected(graph.add(ops.Outputs(x)))
