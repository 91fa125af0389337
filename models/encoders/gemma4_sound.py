"""Audio of Gemma 4: a conformer (arXiv:2005.08100; ``gemma4a``), which `gemma3n_sound` shares. For the 12B model
(``gemma4ua``), pieces of 40 ms are projected into the text model's space without an encoder.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels import operations as ops
from localllm.kernels.graph import KVCache, Rope, Rows, Tensor, Weight
from localllm.models.blocks import Layer, add, norm
from localllm.models.encoders.conformer import Conformer
from localllm.models.encoders.encoder import EncoderCheckpoint, FrameRows, Pixels, Prepared, require_same
from localllm.models.encoders.gemma4 import BOUNDS, clamped_linear
from localllm.models.encoders.sounds import HOP, RATE, Samples, convolved, mel_filters, mel_spectrogram
from localllm.models.encoders.whisper import SoundModel
from localllm.models.hf_convert import SILU, Array, implied
from localllm.models.weights import FloatView, floats

HF_NAMES = {
    "embed_audio.embedding_projection": "mm.a.input_projection",
    "audio_tower.output_proj": "a.pre_encode.out",
    "subsample_conv_projection.input_proj_linear": "a.input_projection",
    "*.self_attn.per_dim_scale": "a.blk.*.per_dim_scale.weight",
}
for i in range(2):
    HF_NAMES[f"subsample_conv_projection.layer{i}.conv"] = f"a.conv1d.{i}"
    HF_NAMES[f"subsample_conv_projection.layer{i}.norm"] = f"a.conv1d.{i}.norm"

#: Number of tokens that a token sees, including itself.
_WINDOW = 12
#: Samples of a frame and of its Fourier transform, and samples per piece, as in the model's processor.
_FRAME, _FFT, _PIECE = 320, 512, 30 * RATE
#: Tokens that are computed together without an encoder.
_TOKENS = 1000
#: Settings of the encoder, then of its processor.
HF_MEANT: dict[str, tuple[Any, ...]] = {
    "hidden_act": SILU,
    "attention_chunk_size": (_WINDOW,),
    "attention_context_left": (_WINDOW + 1,),
    "attention_context_right": (0,),
    "attention_logit_cap": (50.0,),
    "conv_kernel_size": (5,),
    "residual_weight": (0.5,),
    "sampling_rate": (RATE,),
    "frame_length": (_FRAME,),
    "frame_length_ms": (20.0,),
    "fft_length": (_FFT,),
    "fft_overdrive": (False,),
    "hop_length": (HOP,),
    "hop_length_ms": (10.0,),
    "min_frequency": (0.0,),
    "max_frequency": (8000.0,),
    "preemphasis": (0.0,),
    "dither": (0.0,),
    "input_scale_factor": (1.0,),
    "mel_floor": (1e-3,),
    "per_bin_mean": (None,),
    "per_bin_stddev": (None,),
} | implied(
    "attention_invalid_logits_value gradient_clipping output_proj_dims preemphasis_htk_flavor "
    "subsampling_conv_channels audio_embed_dim audio_samples_per_token feature_size"
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    sound = c.vision
    if c.values["model_type"] == "gemma4_unified":
        size = sound.get("audio_embed_dim", 640)
        require_same(c, feature_size=size, audio_samples_per_token=size)
        none = dict.fromkeys(("feed_forward_length", "block_count", "attention.head_count"), 0)
        keys = {**none, "embedding_length": size, "num_mel_bins": size, "projector_type": "gemma4ua"}
    else:
        require_same(c, feature_size=128)
        keys = {"feed_forward_length": 4 * sound["hidden_size"], "num_mel_bins": 128, "projector_type": "gemma4a"}
    keys["attention.layer_norm_epsilon"] = sound.get("rms_norm_eps", 1e-6)
    return {f"audio.{key}": value for key, value in keys.items()}


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name.endswith(BOUNDS):
        return array.reshape(1)
    if name.endswith("per_dim_scale"):
        return np.logaddexp(0, array)  # as in llama.cpp
    return array[:, 0] if name.endswith("depthwise_conv1d.weight") else array


@dataclass(frozen=True, eq=False)
class WithDistances(FloatView):
    """Matrices [n_heads, head_dim + 32, head_dim] from a query to the scaled query and its 32 wave coefficients.

    The model adds the product of the query and a vector of the distance to each score. Over all distances, this
    product is a sum of waves. A wave of the distance is the product of two values that are rotated by position: the
    query's coefficient, and a value of the key that is the same for all positions (`ones`). So attention with longer
    heads computes the same scores.
    """

    scale: Weight  # [head_dim]
    n_heads: int
    window: int  # number of tokens that a token sees, including itself; at most 16

    @property
    def name(self) -> str:
        return f"{self.whole.name} with distances"

    @property
    def shape(self) -> tuple[int, ...]:
        dim = self.scale.shape[0]
        return self.n_heads, dim + 32, dim

    @staticmethod
    def angles(window: int) -> NDArray[np.float64]:
        """Return the angle per position of each wave: 0 to 15 periods over 2 * window - 1 positions."""
        return 2 * np.pi * np.arange(16) / (2 * window - 1)

    def values(self) -> NDArray[np.float32]:
        n_heads, _, dim = self.shape
        size, n = self.whole.shape[1], self.window
        steps = np.exp(-math.log(10_000) / max(size // 2 - 1, 1) * np.arange(size // 2))
        distances = np.arange(n)
        places = np.concatenate([np.sin(distances[:, None] * steps), np.cos(distances[:, None] * steps)], axis=1)
        vectors = (places @ floats(self.whole).T).reshape(n, n_heads, dim)
        share = np.where(np.arange(16) == 0, 1, 2) / (2 * n - 1) * (np.arange(16) < n)
        waves = distances[:, None] * self.angles(n)  # [distances, waves]
        cosines, sines = (np.einsum("nf,nhd->hfd", wave * share, vectors) for wave in (np.cos(waves), np.sin(waves)))
        scale = floats(self.scale) * dim**-0.5 / math.log(2)
        matrices = np.concatenate([np.broadcast_to(np.eye(dim), (n_heads, dim, dim)), cosines, -sines], axis=1)
        scaled: NDArray[np.float32] = (matrices * scale).astype(np.float32)
        return scaled


@dataclass(frozen=True, eq=False)
class WithRoom(FloatView):
    """Matrices [n_heads, head_dim + 32, head_dim] from a key to the scaled key and 32 zeros."""

    n_heads: int
    dim: int
    scale: float

    @property
    def name(self) -> str:
        return f"{self.whole.name} with room"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n_heads, self.dim + 32, self.dim

    def values(self) -> NDArray[np.float32]:
        matrix = np.eye(self.dim + 32, self.dim, dtype=np.float32) * self.scale
        return np.broadcast_to(matrix, self.shape)


class Gemma4Sound(Conformer):
    """A conformer with rows of 40 ms, after two convolutions that numpy computes."""

    marker = "<|audio|>"
    rms = True
    window = _WINDOW
    #: Factor of keys.
    key_scale = math.log(1 + math.e) / math.log(2)
    #: Names of the norms before and after attention, and of the distances' matrix.
    names = ("attn_pre_norm", "attn_post_norm", "attn_k_rel")

    def read(self) -> None:
        self.n_mels = self.number("num_mel_bins")
        first, second = ((self.weights.shape(f"a.conv1d.{i}.weight") or (0,))[0] for i in range(2))
        if self.head_dim % 32 or not self.n_mels or not self.n_layers:
            raise ModelError("the audio encoder's sizes are missing or not supported: the file is broken")
        self._stored = [
            (
                self.weights.require(f"a.conv1d.{i}.weight", n, n_in, 3, 3),
                self.weights.vector(f"a.conv1d.{i}.norm", n),
            )
            for i, (n, n_in) in enumerate(((first, 1), (second, first)))
        ]
        self.n_values = second * -(-self.n_mels // 4)

    @cached_property
    def _convolutions(self) -> list[tuple[Pixels, Pixels]]:
        """Return the matrices [n_in * 9, n_out] of the two convolutions, and the weights of their norms [n_out]."""
        return [(floats(kernel).reshape(len(floats(scale)), -1).T, floats(scale)) for kernel, scale in self._stored]

    def record(self) -> None:
        at = self.at()
        x = self.joined(self.conformer("a.input_projection"))
        x = at.linear(x, "a.pre_encode.out", self.weights.n_rows("a.pre_encode.out.weight"))
        x = at.add(ops.RMSNorm(x, None, self.eps))
        at.linear(x, "mm.a.input_projection", self.width)

    def conformer(self, projection: str) -> Tensor:
        """Record the input, the matrix ``projection`` and the layers."""
        n_ones = self.n_heads * (self.head_dim + 32)
        x, self.ones = (
            self.graph.add(ops.Input(Tensor(Rows.TOKENS, width), first, self.n_values + n_ones))
            for first, width in ((0, self.n_values), (self.n_values, n_ones))
        )
        x = self.at().linear(x, projection, self.n_embd)
        return self.layers(x, Rope(WithDistances.angles(self.window).astype(np.float32), False, first=self.head_dim))

    def scale(self, at: Layer) -> Weight:
        """Return the factors of a query's values, [head_dim]."""
        return at.weights.vector("per_dim_scale", self.head_dim)

    def depthwise(self, at: Layer) -> Weight:
        """Return the kernel of a layer's convolution, [n_embd, 5]."""
        return at.weights.require("conv_dw.weight", self.n_embd, 5)

    def cache(self) -> KVCache:
        return self.graph.kv_cache(self.n_heads, self.head_dim + 32, self.head_dim)

    def attend(self, at: Layer, x: Tensor, cache: KVCache, rope: Rope | None) -> Tensor:
        before, after, relative_name = self.names
        y = norm(at, before, x)
        q, k, v = (clamped_linear(at, y, name, self.n_embd) for name in ("attn_q", "attn_k", "attn_v"))
        relative = at.weights.require(f"{relative_name}.weight", self.n_embd, self.n_embd)
        q = at.add(ops.HeadLinear(q, WithDistances(relative, self.scale(at), self.n_heads, self.window)))
        room = WithRoom(relative, self.n_heads, self.head_dim, self.key_scale)
        k = at.add(ops.Add(at.add(ops.HeadLinear(k, room)), self.ones))
        q = at.add(ops.RopeAppend(q, k, v, cache, rope))
        y = clamped_linear(at, at.add(ops.Attention(q, cache, 1.0, self.window, 50.0)), "attn_out", self.n_embd)
        return add(at, norm(at, after, y), x)

    def convolution(self, at: Layer, x: Tensor) -> Tensor:
        y = clamped_linear(at, norm(at, "conv_norm", x), "conv_pw1", 2 * self.n_embd)
        state = at.graph.state("conv", 4, self.n_embd)
        y = at.add(ops.CausalConv(self.gated_halves(at, y), self.depthwise(at), state))
        y = at.add(ops.Activation(norm(at, "norm_conv", y), "silu"))
        return add(at, clamped_linear(at, y, "conv_pw2", self.n_embd), x)

    def half_mlp(self, at: Layer, x: Tensor, which: str) -> Tensor:
        y = clamped_linear(at, norm(at, f"ffn_norm{which}", x), f"ffn_up{which}", self.n_ff)
        y = clamped_linear(at, at.add(ops.Activation(y, "silu")), f"ffn_down{which}", self.n_embd)
        return add(at, norm(at, f"ffn_post_norm{which}", y), x, 0.5)

    def rows_in_pieces(self, frame: NDArray[Any]) -> Generator[None, None, FrameRows]:
        """Return the rows of a spectrogram [frames, n_mels]."""
        x = frame[:, :, None]  # [time, bands, channels]
        for kernel, scale in self._convolutions:
            x = yield from convolved(x, kernel, partial(_normed, scale, self.eps))
        return self.rows_of(x)

    def rows_of(self, x: Pixels) -> FrameRows:
        """Return the rows of the convolutions' result [time, bands, channels]."""
        ones = np.zeros((len(x), self.n_heads, self.head_dim + 32), np.float32)
        ones[:, :, self.head_dim : -16] = 1
        return FrameRows.in_order(np.hstack([x.reshape(len(x), -1), ones.reshape(len(x), -1)]))

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        pieces = (source[i : i + _PIECE] for i in range(0, len(source), _PIECE))
        frames = tuple(log_mel(piece, self.n_mels) for piece in pieces)
        n = sum(-(-len(frame) // 4) for frame in frames)
        return Prepared(frames, ("<|audio>", n, "<audio|>"), (0, 0), kind=self.kind)


def _normed(scale: Pixels, eps: float, y: Pixels) -> Pixels:
    """Return ReLU of the LayerNorm over channels."""
    y = y - y.mean(axis=-1, keepdims=True)
    normed: Pixels = np.maximum(0, y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + eps) * scale)
    return normed


def log_mel(samples: Samples, n_mels: int) -> Pixels:
    """Return the logarithmic mel spectrogram of magnitudes in HTK's bands, [frames, n_mels].

    A frame starts every `HOP` samples, if the samples contain the complete frame.

    Source: Universal Speech Model, arXiv:2303.01037.
    """
    n = max(1, (len(samples) - 1) // HOP)
    padded = np.pad(samples.astype(np.float64), (_FRAME // 2, _FRAME))
    window, filters = np.hanning(_FRAME + 1)[:-1].astype(np.float32), mel_filters(n_mels, _FFT, is_htk=True)
    bands = mel_spectrogram(padded, window, _FFT, n, filters, power=1)
    return np.log(bands + 1e-3).astype(np.float32)


class Gemma4UnifiedSound(SoundModel):
    marker = "<|audio|>"

    def read(self) -> None:
        self.meta.skip("audio.num_mel_bins")  # llama.cpp's converter writes 128, as for encoders of spectrograms
        shape = self.weights.shape("mm.a.input_projection.weight")
        if len(shape) != 2 or not 1 <= shape[1] <= 1 << 16:
            raise ModelError(
                f"tensor mm.a.input_projection.weight has the shape {list(shape)}, but must have one column per "
                "sample of a token: the file is broken"
            )
        self.n_samples = shape[-1]

    def record(self) -> None:
        x = self.graph.add(ops.Input(Tensor(Rows.TOKENS, self.n_samples), 0, self.n_samples))
        x = self.graph.add(ops.RMSNorm(self.joined(x), None, self.eps))
        self.graph.add(ops.Linear(x, self.weights.matrix("mm.a.input_projection", self.n_samples, self.width)))

    def rows(self, frame: NDArray[Any]) -> FrameRows:
        return FrameRows.in_order(frame)

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        rows = np.pad(source, (0, -len(source) % self.n_samples)).reshape(-1, self.n_samples)
        frames = tuple(rows[i : i + _TOKENS] for i in range(0, len(rows), _TOKENS))
        return Prepared(frames, ("<|audio>", len(rows), "<audio|>"), (0, 0), kind=self.kind)
