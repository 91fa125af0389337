"""Images of Gemma 3n: MobileNetV5, convolutions and attention over a grid of pixels (MobileNetV4, arXiv:2404.10518),
which numpy computes. The embedder, which Gemma 3n's audio shares, projects features into the text model's space.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Rows, Tensor, Weight
from localllm.kernels.operations import Input, Linear, Outputs, RMSNorm, Scale
from localllm.kernels.reference import gelu
from localllm.models.encoders.encoder import (
    EncoderCheckpoint,
    EncoderModel,
    FrameRows,
    Pixels,
    Prepared,
    VisionModel,
    require,
    require_same,
)
from localllm.models.encoders.images import resized
from localllm.models.encoders.sounds import convolved
from localllm.models.hf_convert import Array, implied
from localllm.models.weights import Reshaped, floats


def embedder_names(part: str, prefix: str) -> dict[str, str]:
    """Return GGUF's names of the embedder of ``part``, "vision" or "audio", by Hugging Face's names."""
    return {
        f"embed_{part}.embedding": f"{prefix}.embedding",
        f"embed_{part}.hard_embedding_norm": f"{prefix}.hard_emb_norm",
        f"embed_{part}.soft_embedding_norm": f"{prefix}.soft_emb_norm",
        f"embed_{part}.embedding_projection": f"{prefix}.input_projection",
    }


HF_NAMES = embedder_names("vision", "mm")

#: Settings of images and audio, because both processors share a file.
HF_MEANT: dict[str, tuple[Any, ...]] = {
    "architecture": ("mobilenetv5_300m_enc",),
    "do_pooling": (False,),
    "model_args": (None,),
    "rms_norm_eps": (1e-6,),
    "vision_soft_tokens_per_image": (256,),
    "do_normalize": (False,),
    "resample": (2,),  # Pillow's BILINEAR
    "audio_soft_tokens_per_image": (188,),
    "audio_seq_length": (188,),
    "conf_attention_chunk_size": (12,),
    "conf_attention_context_left": (13,),
    "conf_attention_context_right": (0,),
    "conf_attention_logit_cap": (50.0,),
    "conf_conv_kernel_size": (5,),
    "conf_reduction_factor": (4,),
    "conf_residual_weight": (0.5,),
    "sscp_conv_group_norm_eps": (1e-3,),
    "sscp_conv_kernel_size": ([[3, 3], [3, 3]],),
    "sscp_conv_stride_size": ([[2, 2], [2, 2]],),
    "sampling_rate": (16_000,),
    "frame_length": (512,),
    "frame_length_ms": (32.0,),
    "fft_length": (1024,),
    "fft_overdrive": (True,),
    "hop_length": (160,),
    "hop_length_ms": (10.0,),
    "min_frequency": (125.0,),
    "max_frequency": (7600.0,),
    "preemphasis": (0.97,),
    "preemphasis_htk_flavor": (True,),
    "dither": (0.0,),
    "input_scale_factor": (1.0,),
    "mel_floor": (1e-5,),
    "per_bin_mean": (None,),
    "per_bin_stddev": (None,),
} | implied(
    "vocab_size vocab_offset label_names num_classes image_mean image_std gradient_clipping sscp_conv_channel_size "
    "feature_size"
)

#: Side of the grid of an image's tokens.
_SIDE = 16
#: Maximum number of values of an activation. Gemma 3n's largest activation has 28 million values.
_MAX_VALUES = 1 << 26
#: Rows that are multiplied at once. Between pieces the engine can process other requests.
_PIECE = 4096
#: Epsilon of all norms.
_EPS = 1e-6


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    size = (c.processor.get("size") or {}).get("height", 768)
    require_same(c, size={"height": size, "width": size})
    require(c, "eoi_token_id", c.values["eoi_token_id"], (c.vision["vocab_offset"],))  # the embedder's first row
    keys = {
        "projector_type": "gemma3nv",
        "image_size": size,
        "patch_size": max(size // _SIDE**2, 1),  # unused, as the following keys; llama.cpp requires them
        "feed_forward_length": 4 * c.vision["hidden_size"],
        "block_count": 128,
        "attention.head_count": 8,
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
        "attention.layer_norm_epsilon": 1e-6,
    }
    return {f"vision.{key}": value for key, value in keys.items()}


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    _, is_timm, rest = name.partition("timm_model.")
    if not is_timm:
        return array
    if rest.endswith(("conv_stem.conv.bias", "layer_scale.gamma")):  # as llama.cpp reads them
        array = array.reshape(1, -1, 1, 1)
    return {f"v.{rest.replace('blocks.', 'blk.', 1)}": array}


class Gemma3nEmbedder(EncoderModel):
    """The projection of rows, and of the embeddings of tokens that the text model's table lacks."""

    prefix: ClassVar[str] = "mm"

    def embed(self, x: Tensor) -> None:
        """Record the projection to the text model's width."""
        x = self.graph.add(RMSNorm(x, self.weights.vector(f"{self.prefix}.soft_emb_norm", self.n_embd), _EPS))
        matrix = self.weights.matrix(f"{self.prefix}.input_projection", self.n_embd, self.width)
        self.graph.add(RMSNorm(self.graph.add(Linear(x, matrix)), None, _EPS))
        n = self.weights.n_rows(f"{self.prefix}.embedding.weight")
        self._table = self.weights.require(f"{self.prefix}.embedding.weight", n, self.n_embd)
        self._scale = self.weights.vector(f"{self.prefix}.hard_emb_norm", self.n_embd)
        self._projection = matrix.weight

    @cached_property
    def token_rows(self) -> Pixels:
        """Rows [2, width] of the first and of the last token of the embedder's table."""
        rows: Pixels = _rms(floats(self._table)[[0, -1]]) * floats(self._scale)
        projected: Pixels = rows @ floats(self._projection).T
        return _rms(projected)


def _rms(x: Pixels) -> Pixels:
    normed: Pixels = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(_EPS))
    return normed


class Gemma3n(Gemma3nEmbedder, VisionModel):
    """The features of an image in 16 × 16 tokens, followed by the embedding of <end_of_image>."""

    marker = "<image_soft_token>"

    def read(self) -> None:
        self.side = self.image_size // 16  # of the third of four stages; each stage halves the side
        if self.side % _SIDE or not self.side:
            raise ModelError(f"clip.vision.image_size is {self.image_size}, but must be a multiple of {16 * _SIDE}")
        self._weights: dict[str, Weight] = {}
        side = self.image_size // 2
        channels = self._require("conv_stem.conv", 0, 3, 3, 3, pixels=side**2)
        self._require("conv_stem.conv.bias", channels)
        self._require("conv_stem.bn", channels)
        self._blocks: list[list[tuple[str, str, int]]] = []  # by stage: prefix, kind and stride of each block
        fused = 0
        for stage in range(4):
            blocks = list[tuple[str, str, int]]()
            while kind := self._kind(prefix := f"blk.{stage}.{len(blocks)}"):
                stride = 1 if blocks else 2
                channels = self._read_block(prefix, kind, channels, side, stride)
                blocks.append((prefix, kind, stride))
                side //= stride
            if not blocks:
                raise ModelError(f"the file has no tensors of v.blk.{stage}.0: is it complete?")
            self._blocks.append(blocks)
            fused += channels if stage > 1 else 0
        n = self._pointwise("msfa.ffn.pw_exp", fused, self.side**2)
        if self._pointwise("msfa.ffn.pw_proj", n, self.side**2) != self.n_embd:
            raise ModelError(f"clip.vision.embedding_length is {self.n_embd}, unlike the tensors: the file is broken")
        self._require("msfa.norm", self.n_embd)

    def _kind(self, prefix: str) -> str:
        """Return the tensor that only blocks of this kind have, or "" if the file has no such block."""
        kinds = ("conv_exp", "attn.query.proj", "pw_exp.conv")
        return next((kind for kind in kinds if f"v.{prefix}.{kind}.weight" in self.weights), "")

    def _require(self, name: str, *shape: int, pixels: int = 1) -> int:
        """Read the weight v.``name``, whose first dimension may be 0 for any length. Return the first dimension.

        Raises ModelError if the shape is different, or if an activation with this number of channels is too large.
        """
        key = f"v.{name}" if name.endswith((".bias", ".gamma")) else f"v.{name}.weight"
        stored = self.weights.shape(key)
        n = shape[0] or (stored[0] if stored else 0)
        if n * pixels * prod(shape[2:] if shape[1:2] != (1,) else ()) > 9 * _MAX_VALUES or n * pixels > _MAX_VALUES:
            raise ModelError(f"tensor {key} has {n:,} channels, too many for images of this size: the file is broken")
        if len(shape) == 1 and stored == (1, n, 1, 1):
            self._weights[name] = Reshaped(self.weights.require(key, *stored), shape)
        else:
            self._weights[name] = self.weights.require(key, n, *shape[1:])
        return n

    def _pointwise(self, name: str, channels: int, pixels: int) -> int:
        """Read a matrix over the channels and its norm. Return the number of output channels."""
        n = self._require(f"{name}.conv", 0, channels, 1, 1, pixels=pixels)
        self._require(f"{name}.bn", n)
        return n

    def _depthwise(self, name: str, channels: int) -> bool:
        """Read a convolution of each channel and return True, or return False if the file does not contain it."""
        shape = self.weights.shape(f"v.{name}.weight")
        if not shape:
            return False
        if shape[-1] not in (3, 5):
            raise ModelError(
                f"tensor v.{name}.weight has the shape {list(shape)}: localllm supports sides of 3 and 5"
            )
        self._require(name, channels, 1, shape[-1], shape[-1])
        return True

    def _read_block(self, prefix: str, kind: str, channels: int, side: int, stride: int) -> int:
        """Read the weights of a block with an input of side * side pixels. Return its number of output channels."""
        n_pixels = (side // stride) ** 2
        if kind == "conv_exp":
            n = self._require(f"{prefix}.conv_exp", 0, channels, 3, 3, pixels=n_pixels)
            self._require(f"{prefix}.bn1", n)
            n = self._require(f"{prefix}.conv_pwl", 0, n, 1, 1, pixels=n_pixels)
            self._require(f"{prefix}.bn2", n)
            return n
        if kind == "pw_exp.conv":
            if self._depthwise(f"{prefix}.dw_start.conv", channels):
                self._require(f"{prefix}.dw_start.bn", channels)
            n = self._pointwise(f"{prefix}.pw_exp", channels, side**2)
            if self._depthwise(f"{prefix}.dw_mid.conv", n):
                self._require(f"{prefix}.dw_mid.bn", n)
            elif stride > 1 and f"{prefix}.dw_start.conv" not in self._weights:
                raise ModelError(f"block v.{prefix} has no convolution over pixels: is the file complete?")
            n = self._pointwise(f"{prefix}.pw_proj", n, n_pixels)
        else:
            n = self._read_attention(prefix, channels, side, stride)
        if f"v.{prefix}.layer_scale.gamma" in self.weights:
            self._require(f"{prefix}.layer_scale.gamma", n)
        return n

    def _read_attention(self, prefix: str, channels: int, side: int, stride: int) -> int:
        self._require(f"{prefix}.norm", channels)
        n_keys = side**2
        for part in ("key", "value"):
            if self._depthwise(f"{prefix}.attn.{part}.down_conv", channels):
                self._require(f"{prefix}.attn.{part}.norm", channels)
                n_keys = (side // 2) ** 2
        n_query = self._require(f"{prefix}.attn.query.proj", 0, channels, 1, 1, pixels=side**2)
        dim, value_dim = (
            self._require(f"{prefix}.attn.{part}.proj", 0, channels, 1, 1, pixels=n_keys) for part in ("key", "value")
        )
        downs = [f"{prefix}.attn.{part}.down_conv" in self._weights for part in ("key", "value")]
        if stride > 1 or not dim or n_query % dim or side**2 * n_keys > _MAX_VALUES or downs[0] != downs[1]:
            raise ModelError(f"the sizes of block v.{prefix} contradict each other: the file is broken")
        name = f"{prefix}.attn.output.proj"
        return self._require(name, channels, n_query // dim * value_dim, 1, 1, pixels=side**2)

    def record(self) -> None:
        x = self.graph.add(Input(Tensor(Rows.TOKENS, self.n_embd), 0, self.n_embd))
        self.embed(self.graph.add(Scale(self.graph.add(Outputs(x)), self.n_embd**0.5)))

    def prepare(self, image: Any, max_tokens: int | None = None) -> Prepared:
        frame = np.asarray(resized(image, self.image_size, self.image_size, "bilinear"))
        # The last row is <end_of_image>.
        return Prepared((frame,), ("\n\n<start_of_image>", _SIDE**2 + 1, "\n\n"), (_SIDE, _SIDE))

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        return np.concatenate([rows, self.token_rows[:1, None]])

    # -- Computation -----------------------------------------------------------------------------------------------

    def rows_in_pieces(self, frame: NDArray[np.uint8]) -> Generator[None, None, FrameRows]:
        return FrameRows.in_order((yield from self.features(self.normalised(frame))))

    def features(self, pixels: Pixels) -> Generator[None, None, Pixels]:
        """Return the features of an image's tokens, [256, n_embd], from pixels [height, width, 3]."""
        bias = floats(self._weights["conv_stem.conv.bias"])
        x = yield from self._convolved(
            pixels, "conv_stem.conv", 2, lambda y: gelu(self._norm(y + bias, "conv_stem.bn"))
        )
        stages = []
        for blocks in self._blocks:
            for prefix, kind, stride in blocks:
                if kind == "conv_exp":
                    y = yield from self._edge(x, prefix, stride)
                elif kind == "pw_exp.conv":
                    y = yield from self._inverted(x, prefix, stride)
                else:
                    y = yield from self._attended(x, prefix)
                if f"{prefix}.layer_scale.gamma" in self._weights:
                    y *= floats(self._weights[f"{prefix}.layer_scale.gamma"])
                x = x + y if x.shape == y.shape else y
            stages.append(x)
        third, fourth = stages[2:]
        x = np.concatenate([third, fourth.repeat(2, axis=0).repeat(2, axis=1)], axis=2)
        x = yield from self._multiplied(x, "msfa.ffn.pw_exp", is_activated=True)
        x = yield from self._multiplied(x, "msfa.ffn.pw_proj")
        n = self.side // _SIDE
        x = x.reshape(_SIDE, n, _SIDE, n, -1).mean(axis=(1, 3))
        return self._norm(x, "msfa.norm").reshape(_SIDE**2, -1)

    def _norm(self, x: Pixels, name: str) -> Pixels:
        """Return the RMSNorm over channels."""
        return _rms(x) * floats(self._weights[name])

    def _multiplied(
        self, x: Pixels, name: str, norm: str | None = None, *, is_activated: bool = False
    ) -> Generator[None, None, Pixels]:
        """Return x [height, width, channels] times a matrix, then the norm over channels and the activation.

        ``norm`` names the norm; None for the norm of ``name``, and "" without norm.
        """
        matrix = "" if norm is not None else ".conv"
        weight = self._weights[f"{name}{matrix}"]
        norm, product = f"{name}.bn" if norm is None else norm, floats(weight).reshape(weight.shape[:2]).T
        rows, pieces = x.reshape(-1, x.shape[-1]), []
        for i in range(0, len(rows), _PIECE):
            y = rows[i : i + _PIECE] @ product
            y = self._norm(y, norm) if norm else y
            pieces.append(gelu(y) if is_activated else y)
            yield
        return np.concatenate(pieces).reshape(*x.shape[:2], -1)

    def _convolved(self, x: Pixels, name: str, stride: int, behind: Any) -> Generator[None, None, Pixels]:
        """Return ``behind`` of a convolution over all channels."""
        weight = self._weights[name]
        padding = ((1, 1), (1, 1)) if stride == 1 else ((0, 1), (0, 1))  # the sides are even
        kernel = floats(weight).reshape(len(floats(weight)), -1).T
        return (yield from convolved(x, kernel, behind, stride, padding))

    def _filtered(self, x: Pixels, name: str, norm: str, stride: int) -> Generator[None, None, Pixels]:
        """Return the norm of a convolution of each channel."""
        kernel = floats(self._weights[name])[:, 0]  # [channels, size, size]
        size = kernel.shape[-1]
        before = (size - stride) // 2  # the sides are even
        padded = np.pad(x, ((before, size - stride - before),) * 2 + ((0, 0),))
        height, width = (side // stride for side in x.shape[:2])
        total = np.zeros((height, width, x.shape[2]), np.float32)
        for i in range(size):
            for j in range(size):
                total += padded[i::stride, j::stride][:height, :width] * kernel[:, i, j]
            yield
        return self._norm(total, norm)

    def _edge(self, x: Pixels, prefix: str, stride: int) -> Generator[None, None, Pixels]:
        def behind(y: Pixels) -> Pixels:
            return gelu(self._norm(y, f"{prefix}.bn1"))

        y = yield from self._convolved(x, f"{prefix}.conv_exp", stride, behind)
        return (yield from self._multiplied(y, f"{prefix}.conv_pwl", f"{prefix}.bn2"))

    def _inverted(self, x: Pixels, prefix: str, stride: int) -> Generator[None, None, Pixels]:
        start, mid = (f"{prefix}.dw_{part}.conv" in self._weights for part in ("start", "mid"))
        if start:
            step = 1 if mid else stride
            x = yield from self._filtered(x, f"{prefix}.dw_start.conv", f"{prefix}.dw_start.bn", step)
        x = yield from self._multiplied(x, f"{prefix}.pw_exp", is_activated=True)
        if mid:
            x = yield from self._filtered(x, f"{prefix}.dw_mid.conv", f"{prefix}.dw_mid.bn", stride)
            x = gelu(x)
        return (yield from self._multiplied(x, f"{prefix}.pw_proj"))

    def _attended(self, x: Pixels, prefix: str) -> Generator[None, None, Pixels]:
        """Return the attention of all heads over the same keys and values, which may have half the sides."""
        x = self._norm(x, f"{prefix}.norm")
        query = yield from self._multiplied(x, f"{prefix}.attn.query.proj", "")
        inputs = []
        for part in ("key", "value"):
            y, name = x, f"{prefix}.attn.{part}"
            if f"{name}.down_conv" in self._weights:
                y = yield from self._filtered(x, f"{name}.down_conv", f"{name}.norm", 2)
            y = yield from self._multiplied(y, f"{name}.proj", "")
            inputs.append(y.reshape(-1, y.shape[-1]))
        key, value = inputs
        heads = query.reshape(-1, query.shape[-1] // key.shape[1], key.shape[1])  # [pixels, heads, dim]
        outputs = np.empty((*heads.shape[:2], value.shape[1]), np.float32)
        for i in range(heads.shape[1]):
            scores = heads[:, i] @ (key.T * np.float32(key.shape[1] ** -0.5))
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            outputs[:, i] = shares @ value / shares.sum(axis=1, keepdims=True)
            yield
        y = outputs.reshape(*x.shape[:2], -1)
        return (yield from self._multiplied(y, f"{prefix}.attn.output.proj", ""))
