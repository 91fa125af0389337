"""MiniCPM-V 2.5 to 4.5 and MiniCPM-o (arXiv:2408.01800): learnt queries attend to the patches of an image and of its
slices. Each image or slice becomes one token per query.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Matrix, Rows, Tensor
from localllm.kernels.operations import Add, Attention, Input, Linear, Outputs, RopeAppend
from localllm.models.encoders.encoder import (
    EncoderCheckpoint,
    EncoderStage,
    FrameRows,
    Pixels,
    Prepared,
    require_same,
)
from localllm.models.encoders.minicpm import MAX_SLICES, MiniCPMV
from localllm.models.encoders.siglip import ENCODER_NAMES
from localllm.models.hf_convert import Array, implied
from localllm.models.weights import floats

HF_NAMES = ENCODER_NAMES | {
    "resampler.query": "resampler.query",
    "resampler.kv_proj": "resampler.kv",
    "resampler.attn.out_proj": "resampler.attn.out",
    **{f"resampler.{name}": f"resampler.{name}" for name in ("ln_q", "ln_kv", "ln_post")},
}

#: ``clip.minicpmv_version`` by ``model_type`` and ``version`` in config.json.
_VERSIONS = {
    "minicpmv/None": 2,
    "minicpmv/2.5": 2,
    "minicpmv/2.6": 3,
    "minicpmo/2.6": 4,
    "minicpmv/4.0": 5,
    "minicpmv/4.5": 6,
    "minicpmo/4.5": 100045,
}
#: Width of the resampler's heads.
_HEAD_DIM = 128

HF_MEANT = implied(
    "batch_3d_resampler batch_vision_input image_size init_audio init_tts init_vision resampler_attn_implementation "
    "slice_config slice_mode use_image_id vision_batch_size"
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    version = _VERSIONS.get(f"{c.values['model_type']}/{c.values.get('version')}")
    if version is None:
        raise ModelError(
            f"config.json has version = {c.values.get('version')}; for {c.values['model_type']}, localllm supports "
            f"{', '.join(name.partition('/')[2] for name in _VERSIONS if name.startswith(c.values['model_type']))}"
        )
    require_same(c, patch_size=c.vision["patch_size"])
    slices = c.processor.get("max_slice_nums", MAX_SLICES) if c.processor.get("slice_mode", True) else 1
    return {
        "projector_type": "resampler",
        "minicpmv_version": np.int32(version),  # the type that llama.cpp requires
        "minicpmv_query_num": c.values["query_num"],
        "use_gelu": True,
        "vision.attention.layer_norm_epsilon": c.vision.get("layer_norm_eps", 1e-6),
        "vision.image_size": c.processor.get("scale_resolution", 448),
        "vision.block_count": c.vision["num_hidden_layers"] - bool(c.values.get("drop_vision_last_layer")),
        "vision.preproc_max_tiles": None if slices == MAX_SLICES else slices,
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name == "resampler.pos_embed":  # computed
        return {}
    if name == "resampler.proj":
        # llama.cpp requires a table of positions, but ignores its values.
        return {"resampler.proj.weight": array.T, "resampler.pos_embed_k": np.zeros((1, len(array)), np.float32)}
    if ".in_proj_" in name:
        suffix = name.rpartition("_")[2]
        return {f"resampler.attn.{k}.{suffix}": part for k, part in zip("qkv", np.split(array, 3), strict=True)}
    return array


class Resampler(MiniCPMV):
    marker, around = "(<image>./</image>)", ("", "\n")

    def read(self) -> None:
        self.most = self.number("preproc_max_tiles", MAX_SLICES)
        self.check_tiles(self.most + 1, self.image_size)
        version = self.meta.read("minicpmv_version", int, 2)
        if version not in _VERSIONS.values():
            raise ModelError(
                f"clip.minicpmv_version is {version}; localllm supports "
                f"{', '.join(map(str, sorted({*_VERSIONS.values()})))}"
            )
        self.meta.skip("has_minicpmv_projector", "has_text_encoder")
        self.weights.skip("resampler.pos_embed_k")
        if version == 2:
            self.numbered, self.slice_marks = "", ("<slice>", "<image>", "</image>", "</slice>")
        self.n_queries = self.weights.n_rows("resampler.query")
        if not self.n_queries:
            raise ModelError("the file has no tensor resampler.query: is it complete?")
        if self.meta.read("minicpmv_query_num", int, 0) not in (0, self.n_queries):
            raise ModelError(
                f"clip.minicpmv_query_num is not {self.n_queries}, the number of queries: the file is broken"
            )
        self.width = self.weights.n_rows("resampler.proj.weight")  # projection_dim is missing or 0 in files
        if not self.width or self.width % _HEAD_DIM:
            raise ModelError(
                f"resampler.proj.weight has {self.width} rows, not a multiple of {_HEAD_DIM}: the file is broken"
            )

    def record(self) -> None:
        n, d = self.weights.n_rows("v.position_embd.weight"), self.width
        self.position_table = self.table("v.position_embd.weight", n, self.n_embd)
        self.query = self.weights.require("resampler.query", self.n_queries, d)
        self.query_norm = [self.weights.require(f"resampler.ln_q.{suffix}", d) for suffix in ("weight", "bias")]
        self.query_matrix = self.weights.matrix("resampler.attn.q", d, d, bias=True)
        x = self.layers(self.embedded(self.patch_matrix(), has_positions=True))
        x = self.vector_norm(x, "v.post_ln", self.eps)
        x = self.vector_norm(self.at().linear(x, "resampler.kv", d), "resampler.ln_kv", self.eps)
        self.graph.add(Outputs(x))
        first, self.graph = self.graph, Graph(rounds_floats=True)
        self._attention()
        self.behind, self.graph = EncoderStage(self.graph, 1), first

    def _attention(self) -> None:
        """Record attention of queries to patches, over the rows from `following`."""
        d, at = self.width, self.at()
        x = at.add(Input(Tensor(Rows.TOKENS, d), 0, 2 * d))
        y = at.add(Input(Tensor(Rows.TOKENS, d), d, 2 * d))
        self.graph.layer = self.n_layers
        cache = self.graph.kv_cache(d // _HEAD_DIM, _HEAD_DIM)
        k = at.add(Linear(at.add(Add(x, y)), self.weights.matrix("resampler.attn.k", d, d, bias=True)))
        v = at.add(Linear(x, self.weights.matrix("resampler.attn.v", d, d, bias=True)))
        q = at.add(RopeAppend(y, k, v, cache, None, None, None))
        z = at.add(Attention(q, cache, _HEAD_DIM**-0.5, causal=False, has_spans=True))
        self.graph.layer = "output"
        z = at.add(Outputs(z))
        z = at.add(Linear(z, self.weights.matrix("resampler.attn.out", d, d, bias=True)))
        z = self.vector_norm(z, "resampler.ln_post", self.eps)
        at.add(Linear(z, Matrix(self.weights.require("resampler.proj.weight", d, d))))

    @cached_property
    def queries(self) -> Pixels:
        """Return the queries [n_queries, width], which are the same for every image."""
        x = floats(self.query)
        x = x - x.mean(-1, keepdims=True)
        weight, bias = map(floats, self.query_norm)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.eps)) * weight + bias
        assert self.query_matrix.bias is not None
        queries: Pixels = x @ floats(self.query_matrix.weight).T + floats(self.query_matrix.bias)
        return queries

    @property
    def n_joined(self) -> int:
        return 1

    def following(self, rows: Pixels, frame: FrameRows) -> FrameRows:
        """Return the queries, followed by the patches with their positions, which are added to the keys.

        Spans must not decrease from row to row. So a patch, whose output is unused, sees the patches from itself on.
        """
        n, d = self.n_queries, self.width
        inputs = np.zeros((n + len(rows), 2 * d), np.float32)
        inputs[:n, d:] = self.queries
        inputs[n:, :d] = rows
        inputs[n:, d:] = np.hstack([_waves(places, d // 2) for places in frame.axes[:0:-1]])
        numbers = np.arange(len(inputs), dtype=np.int32)
        spans = np.stack([np.maximum(numbers, n), np.full_like(numbers, len(inputs))])
        return FrameRows(inputs, np.zeros((3, len(inputs)), np.int32), numbers[:n], spans)

    def places(self, n: int, bounds: Pixels) -> Array:
        """Return the indices as in SigLIP's code for images of any size. MiniCPM-V 4.6's code rounds differently."""
        return np.searchsorted(bounds, np.arange(n, dtype=np.float32) * (np.float32(1) / np.float32(n)), side="right")

    def n_rows(self, height: int, width: int) -> int:
        return self.n_queries

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        slices = self.most
        if max_tokens is not None:  # the complete image has the same number of tokens as a slice
            slices = min(slices, max_tokens // self.n_queries - 1)
        return self.sliced(image, *self.layout(image, slices, self.image_size))


def _waves(places: Array, width: int) -> Pixels:
    """Return sines and cosines of places for decreasing frequencies: [n, width]."""
    n = width // 2
    frequencies = (1 / 10000 ** (np.arange(n, dtype=np.float32) / np.float32(n))).astype(np.float32)
    angles = np.multiply.outer(places.astype(np.float32), frequencies)
    return np.hstack([np.sin(angles), np.cos(angles)])
