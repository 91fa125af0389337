"""Sounds of Gemma 4 12B (``gemma4ua``): samples of 40 ms are put into the text model's space without an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Input, Linear, RMSNorm, Rows, Tensor
from localllm.models.hf_convert import Array
from localllm.models.vision.encoder import Checkpoint, FrameRows, Prepared
from localllm.models.vision.sounds import Samples
from localllm.models.vision.whisper import SoundModel

HF_NAMES = {"mm.a.input_projection": "embed_audio.embedding_projection"}

#: Tokens that are computed together.
_TOKENS = 1000


def hf_keys(c: Checkpoint) -> dict[str, Any]:
    size = c.vision.get("audio_embed_dim", 640)
    none = dict.fromkeys(("feed_forward_length", "block_count", "attention.head_count"), 0)
    keys = {**none, "embedding_length": size, "num_mel_bins": size}
    keys |= {"attention.layer_norm_epsilon": c.vision.get("rms_norm_eps", 1e-6), "projector_type": "gemma4ua"}
    return {f"audio.{key}": value for key, value in keys.items()}


def hf_tensor(name: str, array: Array, c: Checkpoint) -> Array | Mapping[str, Array]:
    return array


class Gemma4UnifiedSound(SoundModel):
    marker = "<|audio|>"

    def read(self) -> None:
        if not (n := self.number("num_mel_bins")):
            raise ModelError("clip.audio.num_mel_bins, the samples of a token, is 0: the file is broken")
        self.n_samples = n

    def record(self) -> None:
        x = self.graph.add(Input(Tensor(Rows.TOKENS, self.n_samples), 0, self.n_samples))
        x = self.graph.add(RMSNorm(self.joined(x), None, self.eps))
        self.graph.add(Linear(x, self.weights.matrix("mm.a.input_projection", self.n_samples, self.width)))

    def rows(self, frame: NDArray[Any]) -> FrameRows:
        places = np.arange(len(frame), dtype=np.int32)
        return FrameRows(frame, np.zeros((3, len(frame)), np.int32), places, np.zeros((2, 0), np.int32))

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        rows = np.pad(source, (0, -len(source) % self.n_samples)).reshape(-1, self.n_samples)
        frames = tuple(rows[i : i + _TOKENS] for i in range(0, len(rows), _TOKENS))
        return Prepared(frames, ("<|audio>", len(rows), "<audio|>"), (0, 0), kind=self.kind)
