"""Parakeet, a FastConformer (arXiv:2305.05084): NVIDIA's audio encoder of Nemotron models."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Rows, Tensor, Weight
from localllm.kernels.operations import Activation, HeadGate, Input, RMSNorm
from localllm.models.blocks import Layer
from localllm.models.encoders.conformer import BatchBias, BatchScale, Conformer, WavesOfMatrix
from localllm.models.encoders.encoder import EncoderCheckpoint, FrameRows, Pixels, Prepared, require
from localllm.models.encoders.sounds import HOP, RATE, WINDOW, Samples, mel_filters, mel_spectrogram
from localllm.models.encoders.views import RowsScaled
from localllm.models.hf_convert import Array, floats, implied
from localllm.models.weights import Weights, floats as decoded

HF_NAMES = {
    "subsampling.layers.0": "a.conv1d.0",
    "subsampling.layers.2": "a.conv1d.2",
    "subsampling.layers.3": "a.conv1d.3",
    "subsampling.layers.5": "a.conv1d.5",
    "subsampling.layers.6": "a.conv1d.6",
    "subsampling.linear": "a.pre_encode.out",
    "sound_projection.linear1": "mm.a.mlp.1",
    "sound_projection.linear2": "mm.a.mlp.2",
    "*.self_attn.o_proj": "a.blk.*.attn_out",
    "*.self_attn.relative_k_proj": "a.blk.*.linear_pos",
    "*.self_attn.bias_u": "a.blk.*.pos_bias_u",
    "*.self_attn.bias_v": "a.blk.*.pos_bias_v",
    "*.conv.norm": "a.blk.*.conv_norm",
    "*.conv.norm.running_mean": "a.blk.*.conv_norm_mean",
    "*.conv.norm.running_var": "a.blk.*.conv_norm_var",
}
#: Samples of a Fourier transform.
_FFT = 512
#: Factor of the previous sample, which is subtracted from a sample.
_PREEMPHASIS = 0.97
#: Frames of a row: three convolutions with stride 2.
_FRAMES = 8
#: Rows whose convolutions are computed at once.
_ROWS = 128
#: In audio of more rows than the first number, a row sees the second number of rows on each side, as in llama.cpp.
_MOST, _SIDE = 8192, 128

HF_MEANT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scale_input": (False,),
    "subsampling_conv_kernel_size": (3,),
    "subsampling_conv_stride": (2,),
    "sampling_rate": (RATE,),
    "hop_length": (HOP,),
    "n_fft": (_FFT,),
    "win_length": (WINDOW,),
    "preemphasis": (_PREEMPHASIS,),
} | implied(
    "attention_bias convolution_bias projection_bias projection_hidden_size subsampling_conv_channels feature_size "
    "sound_context_token sound_config"
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    require(c, "sound_config.num_mel_bins", c.processor.get("feature_size"), (None, c.vision["num_mel_bins"]))
    return {
        "projector_type": "parakeet",
        "audio.attention.layer_norm_epsilon": 1e-5,
        "audio.conv_kernel_size": c.vision["conv_kernel_size"],
        "audio.subsampling_factor": c.vision["subsampling_factor"],
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if ".featurizer." in name:  # computed below
        return {}
    if name.endswith("sound_projection.norm.weight"):
        filters = mel_filters(c.vision["num_mel_bins"], _FFT).astype(np.float32)
        return {"mm.a.norm_pre.weight": array, "a.mel_filters": filters, "a.window": _window().astype(np.float32)}
    if ".conv.pointwise_conv" in name and name.endswith(".weight"):
        return array[:, :, 0]
    if name.endswith(".conv.depthwise_conv.weight"):
        return floats(array[:, 0])  # llama.cpp requires float32 for these convolutions
    if ".subsampling.layers." in name and name.endswith(".weight"):
        return floats(array)
    if ".subsampling.layers." in name and name.endswith(".bias"):
        return array.reshape(1, -1, 1, 1)  # as in llama.cpp
    return array


def _window() -> NDArray[np.float64]:
    return np.hanning(WINDOW)


class Parakeet(Conformer):
    """A conformer with rows of 80 ms, after five convolutions that numpy computes.

    A frame of zeros follows the spectrogram. If it is the only frame of a row, this row attends to all rows equally,
    and the other rows do not attend to it.
    """

    marker = "<so_embedding>"

    def read(self) -> None:
        self.check_heads()
        self.n_mels = self.number("num_mel_bins")
        self.number("subsampling_factor")
        self.number("conv_kernel_size")  # the tensors contain it
        self.windowed = range(self.n_layers)
        w = self.weights
        n = (w.shape("a.conv1d.0.weight") or (0,))[0]
        if self.n_mels % _FRAMES or not n:
            raise ModelError("the convolutions of the audio encoder are missing or not supported: a broken file")
        shapes = {0: (n, 1, 3, 3), 2: (n, 1, 3, 3), 3: (n, n, 1, 1), 5: (n, 1, 3, 3), 6: (n, n, 1, 1)}
        self._stored = [
            (w.require(f"a.conv1d.{i}.weight", *shape), w.require(f"a.conv1d.{i}.bias", n, 1, 1))
            for i, shape in shapes.items()
        ]
        self.filters = self.table("a.mel_filters", self.n_mels, _FFT // 2 + 1).astype(np.float64)
        self.window_values = self.table("a.window", WINDOW).astype(np.float64)
        self.n_values = n * (self.n_mels // _FRAMES)

    # -- Graph -----------------------------------------------------------------------------------------------------

    def record(self) -> None:
        total, at = self.n_values + 16, self.at()
        x, self.is_audio = (
            self.graph.add(Input(Tensor(Rows.TOKENS, width), first, total))
            for first, width in ((0, self.n_values), (self.n_values, 1))
        )
        x = self.joined(self.layers(at.linear(x, "a.pre_encode.out", self.n_embd)))
        x = self.graph.add(RMSNorm(x, self.weights.vector("mm.a.norm_pre", self.n_embd), 1e-5))
        x = at.add(Activation(at.linear(x, "mm.a.mlp.1", self.weights.n_rows("mm.a.mlp.1.weight")), "relu2"))
        at.linear(x, "mm.a.mlp.2", self.width)

    def masked(self, at: Layer, x: Tensor) -> Tensor:
        return at.add(HeadGate(x, self.is_audio, "sigmoid"))

    def waves(self, w: Weights) -> WavesOfMatrix:
        return WavesOfMatrix(w.require("linear_pos.weight", self.n_embd, self.n_embd), self.n_heads)

    def kernel(self, w: Weights, n: int, size: int) -> tuple[Weight, Weight]:
        scale = BatchScale(w.require("conv_norm.weight", n), w.require("conv_norm_var", n))
        bias = w.require("conv_norm.bias", n), scale, w.require("conv_norm_mean", n), w.find("conv_dw.bias", n)
        return RowsScaled(w.require("conv_dw.weight", n, size), scale), BatchBias(*bias)

    # -- Rows ------------------------------------------------------------------------------------------------------

    @cached_property
    def _convolutions(self) -> list[tuple[Pixels, Pixels]]:
        """Return the kernels [9, n] or matrices [n, n] of the convolutions, and their biases [n]."""
        pairs = ((decoded(kernel), decoded(bias).ravel()) for kernel, bias in self._stored)
        return [(kernel.reshape(len(bias), -1).T, bias) for kernel, bias in pairs]

    def rows_in_pieces(self, frame: NDArray[np.float32]) -> Generator[None, None, FrameRows]:
        """Return the rows of a spectrogram [frames, n_mels], whose last frame is padding."""
        n_frames = len(frame) - 1
        n, n_audio = n_frames // _FRAMES + 1, -(-n_frames // _FRAMES)
        rows = np.zeros((n, self.n_values + 16), np.float32)
        for start in range(0, n_audio, _ROWS):
            end = min(start + _ROWS, n_audio)
            x = self._convolved(frame[:n_frames], start, end)
            rows[start:end, : self.n_values] = x.swapaxes(1, 2).reshape(end - start, -1)
            yield
        places = np.arange(n, dtype=np.int32)
        is_audio = places < n_audio
        rows[:, self.n_values] = np.where(is_audio, 80, -80)
        firsts, ends = np.zeros(n, np.int32), np.where(is_audio, n_audio, n)
        if n > _MOST:
            firsts, ends = np.maximum(places - _SIDE, 0), np.minimum(places + _SIDE + 1, ends)
        spans = np.stack([firsts, ends]).astype(np.int32)
        return FrameRows(rows, np.zeros((3, n), np.int32), places, spans)

    def _convolved(self, frame: Pixels, start: int, end: int) -> Pixels:
        """Return rows [start, end) of the convolutions' result, [rows, bands / 8, n]."""
        n_frames, (first, *pairs) = len(frame), self._convolutions
        low, high = _FRAMES * start - (_FRAMES - 1), _FRAMES * end  # frames
        x = np.pad(frame[max(low, 0) : high], ((max(-low, 0), max(high - n_frames, 0)), (0, 0)))[:, :, None]
        for (kernel, bias), matrix in zip((first, pairs[0], pairs[2]), (None, pairs[1], pairs[3]), strict=True):
            padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
            height, width = len(x) // 2, x.shape[1] // 2
            x = np.broadcast_to(bias, (height, width, len(bias))).copy()
            for i, weights in enumerate(kernel):
                rows, columns = divmod(i, 3)
                x += padded[rows : rows + 2 * height : 2, columns : columns + 2 * width : 2] * weights
            if matrix is not None:
                x = x @ matrix[0] + matrix[1]
            np.maximum(x, 0, out=x)
            low, n_frames = (low + 1) // 2, -(-n_frames // 2)
            places = np.arange(low, low + height)
            x[(places < 0) | (places >= n_frames)] = 0  # padding of the next convolution
        return x

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        samples = np.pad(source, (0, max(0, 2 * HOP - len(source)))).astype(np.float64)
        samples[1:] -= _PREEMPHASIS * samples[:-1]
        n = len(samples) // HOP
        padded = np.pad(samples, WINDOW // 2)
        frame = np.log(mel_spectrogram(padded, self.window_values, _FFT, n, self.filters) + 2**-24)
        frame = (frame - frame.mean(axis=0)) / (frame.std(axis=0, ddof=1) + 1e-5)
        frame = np.pad(frame, ((0, 1), (0, 0))).astype(np.float32)
        return Prepared((frame,), ("<so_start>", n // _FRAMES + 1, "<so_end>"), (0, 0), kind=self.kind)
