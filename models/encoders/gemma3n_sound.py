"""Audio of Gemma 3n: Gemma 4's conformer with a larger window and other norms of the convolutions, over all preceding
frames. Every clip of up to 30 seconds becomes 188 tokens.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.graph import Weight
from localllm.models.blocks import Layer
from localllm.models.encoders.encoder import EncoderCheckpoint, FrameRows, Pixels, Prepared, require, require_same
from localllm.models.encoders.gemma3n import HF_MEANT, Gemma3nEmbedder, embedder_names
from localllm.models.encoders.gemma4_sound import Gemma4Sound
from localllm.models.encoders.sounds import HOP, RATE, Samples, convolved, mel_filters
from localllm.models.weights import FloatView, Reshaped, floats

__all__ = ["HF_MEANT", "HF_NAMES", "Gemma3nSound", "hf_keys"]

HF_NAMES = embedder_names("audio", "mm.a") | {"subsample_conv_projection.input_proj_linear": "a.pre_encode.out"}
for i in range(2):
    HF_NAMES[f"subsample_conv_projection.conv_{i}.conv"] = f"a.conv1d.{i}"
    HF_NAMES[f"subsample_conv_projection.conv_{i}.norm"] = f"a.conv1d.{i}.norm"

#: Samples of a frame and of its Fourier transform, and samples per clip.
_FRAME, _FFT, _CLIP = 512, 1024, 30 * RATE
#: Tokens of a clip, and rows of the encoder for one token.
_TOKENS, _REDUCTION = 188, 4
#: Epsilon of the convolutions' norms.
_EPS = 1e-3


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    sound = c.vision
    require_same(c, feature_size=sound["input_feat_size"])
    # Rows of the embedder for the token after a clip and for the padding of clips.
    require(c, "eoa_token_id", c.values["eoa_token_id"], (sound["vocab_offset"],))
    require(c, "vocab_size", c.text.vocab_size, (sound["vocab_offset"] + sound["vocab_size"],))
    keys = {
        "projector_type": "gemma3na",
        "block_count": sound["conf_num_hidden_layers"],
        "attention.head_count": sound["conf_num_attention_heads"],
        "feed_forward_length": 4 * sound["hidden_size"],
        "num_mel_bins": sound["input_feat_size"],
        "attention.layer_norm_epsilon": sound["rms_norm_eps"],
    }
    return {f"audio.{key}": value for key, value in keys.items()}


@dataclass(frozen=True, eq=False)
class Softplus(FloatView):
    """log(1 + exp(x)) of a weight."""

    def values(self) -> NDArray[np.float32]:
        return np.logaddexp(0, floats(self.whole))


class Gemma3nSound(Gemma3nEmbedder, Gemma4Sound):
    marker = "<audio_soft_token>"
    window = 13
    key_scale = 1.0
    names = ("ln1", "ln2", "linear_pos")
    last_norm = "layer_pre_norm"
    prefix = "mm.a"

    def read(self) -> None:
        super().read()
        # llama.cpp's converter writes constants: 1e-5, which the model does not use, and the width of the 2B model.
        self.eps, self.n_ff = 1e-6, 4 * self.n_embd

    def record(self) -> None:
        self.embed(self.joined(self.conformer("a.pre_encode.out")))

    def scale(self, at: Layer) -> Weight:
        return Softplus(at.weights.require("per_dim_scale", self.head_dim))

    def depthwise(self, at: Layer) -> Weight:
        return Reshaped(at.weights.require("conv_dw.weight", self.n_embd, 1, 5), (self.n_embd, 5))

    def rows_in_pieces(self, frame: NDArray[Any]) -> Generator[None, None, FrameRows]:
        """Return the rows of a spectrogram [frames, n_mels]."""
        x = frame[:, :, None]  # [time, bands, channels]
        for kernel, scale in self._convolutions:
            x = yield from convolved(x, kernel, _same, padding=((0, 2), (1, 1)))
            x = _normed(x, scale)
        rows = self.rows_of(x)
        return replace(rows, outputs=rows.outputs[::_REDUCTION])

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        clips = (source[i : i + _CLIP] for i in range(0, len(source), _CLIP))
        frames = tuple(log_mel(clip, self.n_mels) for clip in clips)
        segments = ("\n\n<start_of_audio>", _TOKENS + 1, "\n\n") * len(frames)  # the last row is <end_of_audio>
        return Prepared(frames, segments, (0, 0), kind=self.kind)

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        """Return the rows of clips, each padded to 188 rows and followed by the embedding of <end_of_audio>."""
        counts = [-(-len(frame) // (4 * _REDUCTION)) for frame in prepared.frames]
        last, padding = self.token_rows[:1], self.token_rows[-1:]
        clips = np.split(rows[:, 0], np.cumsum(counts)[:-1])
        padded = [part for clip in clips for part in (clip, *[padding] * (_TOKENS - len(clip)), last)]
        return np.concatenate(padded)[:, None]


def _same(x: Samples) -> Samples:
    return x


def _normed(x: Pixels, scale: Pixels) -> Pixels:
    """Return ReLU of x [time, bands, channels], normed by the mean and variance of all values up to each time."""
    n = x[0].size * np.arange(1, len(x) + 1)
    centred = x - (x.sum((1, 2), np.float64).cumsum() / n).astype(np.float32)[:, None, None]
    variance = (np.square(centred).sum((1, 2), np.float64).cumsum() / n + _EPS).astype(np.float32)
    normed: Pixels = np.maximum(0, centred / np.sqrt(variance)[:, None, None] * scale)
    return normed


def log_mel(samples: Samples, n_mels: int) -> Pixels:
    """Return the logarithmic mel spectrogram of magnitudes in HTK's bands from 125 to 7,600 Hz, [frames, n_mels].

    The samples are padded to a multiple of 128. A frame starts every `HOP` samples, if the samples contain the
    complete frame and one more sample. Each sample but the first of a frame is reduced by 97% of the preceding one.
    Spectra are computed in float32, as in the model's processor.

    Source: Universal Speech Model, arXiv:2303.01037.
    """
    n = max(len(samples), _FRAME + 1)
    padded = np.pad(samples.astype(np.float32), (0, n + -n % 128 - len(samples)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME + 1)[::HOP, :_FRAME]
    frames = np.concatenate([frames[:, :1] * (1 - 0.97), frames[:, 1:] - 0.97 * frames[:, :-1]], axis=1)
    window = 0.5 * (1 - np.cos(2 * np.pi * np.arange(_FRAME, dtype=np.float32) / _FRAME))
    magnitudes = np.abs(np.fft.rfft(frames * window, _FFT))
    filters = mel_filters(n_mels, _FFT, 125, 7600, is_htk=True).T
    return np.log(np.maximum(magnitudes @ filters, 1e-5)).astype(np.float32)
