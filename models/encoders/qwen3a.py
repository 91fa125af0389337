"""Audio encoders of Qwen 3 ASR and Qwen 3 Omni (arXiv:2509.17765): convolutions over each second, then layers whose
rows see eight seconds.

Graphs have no operation for two-dimensional convolutions. So numpy computes them, before the graph's step. Each chunk
is padded to a second; Qwen 3 Omni's code pads it to the longest chunk of the batch.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Rows, Tensor
from localllm.kernels.operations import Input, Linear
from localllm.kernels.reference import gelu_erf
from localllm.models.encoders import whisper
from localllm.models.encoders.encoder import EncoderCheckpoint, FrameRows, Pixels, Prepared, require_same
from localllm.models.encoders.sounds import HOP, RATE, Samples, convolved, log_mel
from localllm.models.encoders.whisper import SoundModel
from localllm.models.hf_convert import Array
from localllm.models.weights import floats

HF_NAMES = {
    "audio_tower.conv2d1": "a.conv2d.1",
    "audio_tower.conv2d2": "a.conv2d.2",
    "audio_tower.conv2d3": "a.conv2d.3",
    "audio_tower.conv_out": "a.conv_out",
    "audio_tower.ln_post": "a.post_ln",
    "audio_tower.proj1": "mm.a.mlp.1",
    "audio_tower.proj2": "mm.a.mlp.2",
    "multi_modal_projector.linear_1": "mm.a.mlp.1",
    "multi_modal_projector.linear_2": "mm.a.mlp.2",
}

#: Frames of a spectrogram per chunk of the convolutions, tokens per chunk, and length in seconds of a row's window.
_CHUNK, _TOKENS, _SECONDS = 100, 13, 8

HF_MEANT = whisper.HF_MEANT | {
    "n_window": (_CHUNK // 2,),
    "n_window_infer": (_CHUNK * _SECONDS,),
    "min_length": (RATE // 2,),
    "conv_chunksize": (),
    "downsample_hidden_size": (),
}


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    require_same(c, feature_size=c.vision["num_mel_bins"])
    return {"projector_type": "qwen3a", "audio.attention.layer_norm_epsilon": 1e-5}


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if ".conv2d" in name and name.endswith(".bias"):
        return array[:, None, None]  # as in llama.cpp
    if name.endswith("conv_out.weight"):
        return {"a.conv_out.weight": array, "a.position_embd.weight": whisper.sinusoids(1500, len(array))}
    return array


class Qwen3Sound(SoundModel):
    marker = "<|audio_pad|>"
    around = ("<|audio_start|>", "<|audio_end|>")

    def read(self) -> None:
        # Qwen 3 ASR's processor extends audio to half a second, Qwen 3 Omni's does not. One token needs three frames.
        self.least = 3 * HOP if self.meta.find("has_vision_encoder") else RATE // 2
        n, self.n_mels = self.weights.n_rows("a.position_embd.weight"), self.number("num_mel_bins")
        self.n_channels = (self.weights.shape("a.conv2d.1.weight") or (0,))[0]
        if n < _TOKENS or not self.n_channels:
            raise ModelError("the convolutions or positions of the audio encoder are missing: is the file complete?")
        self.position_table = self.table("a.position_embd.weight", n, self.n_embd)[:_TOKENS]
        self._stored = [
            (
                self.weights.require(f"a.conv2d.{i}.weight", self.n_channels, n_in, 3, 3),
                self.weights.require(f"a.conv2d.{i}.bias", self.n_channels, 1, 1),
            )
            for i, n_in in enumerate((1, self.n_channels, self.n_channels), 1)
        ]

    @cached_property
    def _convolutions(self) -> list[tuple[Pixels, Pixels]]:
        """Return the matrices [n_in * 9, n_out] of the three convolutions, and their biases [n_out]."""
        return [
            (floats(kernel).reshape(self.n_channels, -1).T, floats(bias).ravel()) for kernel, bias in self._stored
        ]

    def record(self) -> None:
        n = (self.n_mels + 7) // 8 * self.n_channels
        x, positions = (
            self.graph.add(Input(Tensor(Rows.TOKENS, width), first, n + self.n_embd))
            for first, width in ((0, n), (n, self.n_embd))
        )
        x = self.graph.add(Linear(x, self.weights.matrix("a.conv_out", n, self.n_embd), residual=positions))
        x = self.vector_norm(self.layers(x), "a.post_ln", self.eps)
        self.two_linears(self.joined(x), "mm.a.mlp.1", "mm.a.mlp.2")

    def rows_in_pieces(self, frame: NDArray[Any]) -> Generator[None, None, FrameRows]:
        """Return the rows of some seconds of a spectrogram [frames, n_mels]."""
        rows_of_chunks = []
        for start in range(0, len(frame), _CHUNK):
            chunk = frame[start : start + _CHUNK]
            x = np.pad(chunk, ((0, _CHUNK - len(chunk)), (0, 0))).T[:, :, None]  # [bands, time, channels]
            for kernel, bias in self._convolutions:
                x = yield from convolved(x, kernel, partial(activated, bias))
            n = _n_tokens(len(chunk))
            rows_of_chunks.append(np.hstack([x.transpose(1, 2, 0).reshape(x.shape[1], -1), self.position_table])[:n])
        rows = np.concatenate(rows_of_chunks)
        return FrameRows.in_order(rows)

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        mel = log_mel(np.pad(source, (0, max(0, self.least - len(source)))), self.n_mels)
        frames = tuple(mel[i : i + _SECONDS * _CHUNK] for i in range(0, len(mel), _SECONDS * _CHUNK))
        return Prepared(frames, (_n_tokens(len(mel)),), (0, 0), kind=self.kind)


def _n_tokens(n_frames: int) -> int:
    """Return the number of tokens of a spectrogram: complete seconds plus the remaining frames."""
    seconds, n_rest = divmod(n_frames, _CHUNK)
    return seconds * _TOKENS + -(-n_rest // 8)


def activated(bias: Pixels, y: Pixels) -> Pixels:
    values: Pixels = gelu_erf(y + bias)
    return values
