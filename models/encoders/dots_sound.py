"""Dots 3 Note's audio encoder: convolutions over minutes of audio, then layers that rotate half of each head."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Rope, Rows, Tensor
from localllm.kernels.operations import Input
from localllm.models.encoders import whisper
from localllm.models.encoders.encoder import EncoderCheckpoint, FrameRows, Pixels, Prepared, require
from localllm.models.encoders.qwen3a import activated
from localllm.models.encoders.sounds import HOP, RATE, WINDOW, Samples, convolved, log_mel
from localllm.models.encoders.whisper import SoundModel
from localllm.models.hf_convert import SILU, Array, implied
from localllm.models.weights import floats

HF_NAMES = {
    "speech_encoder.conv_out": "a.conv_out",
    "speech_encoder.layer_norm": "a.post_ln",
    "audio_adapter.proj.0": "mm.a.norm_pre",
    "audio_adapter.proj.1": "mm.a.mlp.1",
    "audio_adapter.proj.3": "mm.a.mlp.3",
} | {f"speech_encoder.conv2d{i}": f"a.conv2d.{i}" for i in (1, 2, 3)}

#: Seconds of audio that are encoded together, and frames of a spectrogram per token.
_SECONDS, _FRAMES = 60, 8

HF_MEANT = (
    whisper.HF_MEANT
    | {
        "hidden_act": SILU,
        "chunk_seconds": (_SECONDS,),
        "merge_factor": (1,),
        "use_causal": (False,),
        "partial_rotary_factor": (0.5,),
    }
    | implied("use_conv2d_stem use_rope use_rms_norm", True)
    | implied("adapter_output_size downsample_hidden_size whisper_adapter_in_dim whisper_adapter_out_dim")
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    sizes = c.vision["whisper_config"]
    require(c, "activation_function", sizes.get("activation_function", "swiglu"), ("swiglu",))
    names = {
        "embedding_length": "d_model",
        "feed_forward_length": "encoder_ffn_dim",
        "block_count": "encoder_layers",
        "attention.head_count": "encoder_attention_heads",
        "num_mel_bins": "num_mel_bins",
    }
    keys = {f"audio.{ours}": sizes[theirs] for ours, theirs in names.items()}
    sizes.skip_all()
    return keys | {"projector_type": "dots3note_a", "audio.attention.layer_norm_epsilon": 1e-6}


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if ".fc1." not in name:
        return array
    *_, number, _, suffix = name.split(".")
    gate, up = np.split(array, 2)
    return {f"a.blk.{number}.ffn_gate.{suffix}": gate, f"a.blk.{number}.ffn_up.{suffix}": up}


class Dots3NoteSound(SoundModel):
    marker = "<|audio_comp_pad|>"
    around = ("<|audio_comp_start|>", "<|audio_comp_end|>")
    rms = True
    activation = "silu"

    def read(self) -> None:
        self.n_mels = self.number("num_mel_bins")
        self.n_channels = (self.weights.shape("a.conv2d.1.weight") or (0,))[0]
        if not self.n_channels:
            raise ModelError("the convolutions of the audio encoder are missing: is the file complete?")
        self._stored = [
            (
                self.weights.require(f"a.conv2d.{i}.weight", self.n_channels, n_in, 3, 3),
                self.weights.require(f"a.conv2d.{i}.bias", self.n_channels),
            )
            for i, n_in in enumerate((1, self.n_channels, self.n_channels), 1)
        ]

    @cached_property
    def _convolutions(self) -> list[tuple[Pixels, Pixels]]:
        """Return the matrices [n_in * 9, n_out] of the three convolutions, and their biases [n_out]."""
        return [(floats(kernel).reshape(self.n_channels, -1).T, floats(bias)) for kernel, bias in self._stored]

    @property
    def _n_inputs(self) -> int:
        return -(-self.n_mels // _FRAMES) * self.n_channels

    def record(self) -> None:
        x = self.graph.add(Input(Tensor(Rows.TOKENS, self._n_inputs), 0, self._n_inputs))
        n = self.head_dim // 4
        rope = Rope((1e4 ** -(np.arange(n) / max(n, 1))).astype(np.float32), False)
        x = self.layers(self.at().linear(x, "a.conv_out", self.n_embd), rope)
        x = self.joined(self.norm(self.at(), "a.post_ln", x))
        self.two_linears(self.vector_norm(x, "mm.a.norm_pre", 1e-5), "mm.a.mlp.1", "mm.a.mlp.3")

    def rows_in_pieces(self, frame: NDArray[Any]) -> Generator[None, None, FrameRows]:
        """Return the rows of a spectrogram [tokens * 8, n_mels]. Rows of tokens without frames are zeros.

        Frames of NaN follow the last frame.
        """
        x = frame[~np.isnan(frame[:, 0])].T[:, :, None]  # [bands, time, channels]
        for kernel, bias in self._convolutions if x.size else ():
            x = yield from convolved(x, kernel, partial(activated, bias))
        rows = np.zeros((len(frame) // _FRAMES, self._n_inputs), np.float32)
        if x.size:
            rows[: x.shape[1]] = x.transpose(1, 2, 0).reshape(x.shape[1], -1)
        return FrameRows.in_order(rows)

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        frames: list[Samples] = []
        size = _SECONDS * RATE
        for start in range(0, len(source), size):
            chunk = source[start : start + size]
            mel = log_mel(np.pad(chunk, (0, min(WINDOW, size - len(chunk)))), self.n_mels)[: len(chunk) // HOP]
            n_tokens = -(-len(chunk) // (HOP * _FRAMES))
            missing = n_tokens * _FRAMES - len(mel)
            frames.append(np.pad(mel, ((0, missing), (0, 0)), constant_values=np.nan))
        n_tokens = sum(len(frame) for frame in frames) // _FRAMES
        return Prepared(tuple(frames), (n_tokens,), (0, 0), kind=self.kind)
