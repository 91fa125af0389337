"""Whisper's audio encoder (arXiv:2212.04356), and the projectors of Voxtral (arXiv:2507.13264), Ultravox,
Qwen 2-Audio (arXiv:2407.10759), Qwen 2.5-Omni (arXiv:2503.20215), Audio Flamingo 3 (arXiv:2507.08128),
Music Flamingo (arXiv:2511.10289), GLM-ASR and MERaLiON 2 (arXiv:2412.09818).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Matrix, Rope, Rows, Tensor
from localllm.kernels.operations import (
    Activation,
    Add,
    Gated,
    HeadGate,
    Input,
    Linear,
    Linears,
    Outputs,
    RMSNorm,
    SideBySide,
)
from localllm.models.encoders.encoder import (
    EncoderCheckpoint,
    EncoderModel,
    EncoderStage,
    FrameRows,
    Pixels,
    Prepared,
    require,
    require_same,
)
from localllm.models.encoders.sounds import HOP, RATE, Samples, log_mel, open_audio
from localllm.models.encoders.views import ColumnsByPart, WithBias
from localllm.models.hf_convert import GELU, Array, implied
from localllm.models.weights import Reshaped

HF_NAMES = {
    "audio_tower.layer_norm": "a.post_ln",
    "audio_tower.embed_positions": "a.position_embd",
    "audio_tower.conv1": "a.conv1d.1",
    "audio_tower.conv2": "a.conv1d.2",
    "multi_modal_projector.ln_pre": "mm.a.norm_pre",
    "multi_modal_projector.ln_mid": "mm.a.norm_mid",
    "multi_modal_projector.linear_1": "mm.a.mlp.1",
    "multi_modal_projector.linear_2": "mm.a.mlp.2",
    "multi_modal_projector.linear": "mm.a.fc",
    "audio_tower.ln_post": "a.post_ln",
    "audio_tower.norm": "mm.a.norm_pre",
    "speech_encoder.layer_norm": "a.post_ln",
    "speech_encoder.embed_positions": "a.position_embd",
    "speech_encoder.conv1": "a.conv1d.1",
    "speech_encoder.conv2": "a.conv1d.2",
    "ln_speech": "mm.a.norm_pre",
    "speech_audio_adapter.mlp_adapter.0": "mm.a.mlp.0",
    "speech_audio_adapter.gate_proj": "mm.a.mlp.1",
    "speech_audio_adapter.pool_proj": "mm.a.mlp.2",
    "speech_audio_adapter.out_proj": "mm.a.mlp.3",
    "*.input_layernorm": "a.blk.*.ln1",
    "*.post_attention_layernorm": "a.blk.*.ln2",
    "*.self_attn.o_proj": "a.blk.*.attn_out",
    "*.mlp.fc1": "a.blk.*.ffn_up",
    "*.mlp.fc2": "a.blk.*.ffn_down",
    "audio_tower.proj": "mm.a.fc",
}
#: Projectors by ``model_type``.
_PROJECTORS = {
    "qwen2_audio": "qwen2a",
    "audioflamingo3": "musicflamingo",
    "musicflamingo": "musicflamingo_rote",
    "qwen2_5_omni": "qwen2.5o",
    "glmasr": "glma",
    "meralion2": "meralion",
}
#: Rows of a token in GLM-ASR.
_GLM_STACK = 4
#: Frames of a chunk in Qwen 2.5-Omni.
_CHUNK = 200
#: Seconds of a frame of a spectrogram in Music Flamingo.
_FRAME_STEP = 0.01

#: Settings of the encoder and the projector, then of the encoder's processor and of Whisper's decoder.
HF_MEANT: dict[str, tuple[Any, ...]] = {
    "activation_function": GELU,
    "scale_embedding": (False,),
    "projector_act": ("swiglu",),
    "sampling_rate": (RATE,),
    "hop_length": (HOP,),
    "n_fft": (400,),
    "dither": (0.0,),
    "audio_frame_step": (_FRAME_STEP,),
    "n_window": (_CHUNK // 2,),
    "hidden_act": GELU,
    "partial_rotary_factor": (0.5,),
    "speech_mlp_use_projection": (True,),
} | implied(
    # the last ones are Ultravox's
    "max_source_positions feature_size projector_bias apply_spec_augment classifier_proj_size median_filter_width "
    "max_target_positions use_weighted_layer_sum decoder_attention_heads decoder_ffn_dim decoder_layers "
    "mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks "
    "mask_time_prob audio_model_id audio_model_lora_config norm_init text_model_id text_model_lora_config"
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    kind = c.values["model_type"]
    if kind == "voxtral":
        stack = c.vision["intermediate_size"] // c.vision["hidden_size"]
    else:
        stack = None if kind in _PROJECTORS else c.values.get("stack_factor", 8)
    if kind == "glmasr":
        stack = _GLM_STACK
    elif kind == "meralion2":
        stack = c.values.get("speech_mlp_scale_factor", 15)
    if c.values.get("projector_ln_mid") is False:
        raise ModelError(
            "config.json has projector_ln_mid = false, as in Ultravox up to 0.4: localllm supports 0.5 and later"
        )
    require_same(c, feature_size=c.vision["num_mel_bins"])
    keys = {"projector_type": _PROJECTORS.get(kind, kind), "audio.projector.stack_factor": stack}
    if kind == "musicflamingo":
        rope = c.values.get("rope_parameters") or {}
        require(c, "rope_type", rope.get("rope_type", "default"), ("default",))
        theta, share = (rope.get(name, c.values.get(name)) for name in ("rope_theta", "partial_rotary_factor"))
        keys |= {
            "audio.rope.freq_base": float(theta),
            "audio.rope.dimension_count": int(c.vision["hidden_size"] * share),
        }
    return keys | {"audio.attention.layer_norm_epsilon": 1e-5}


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name.endswith("audio_bos_eos_token.weight"):  # unused
        return {}
    if name.endswith("conv1.weight") and c.values["model_type"] == "qwen2_5_omni":
        return {"a.conv1d.1.weight": array, "a.position_embd.weight": sinusoids(1500, len(array))}
    if c.values["model_type"] == "glmasr":
        if name.endswith("conv1.weight"):  # llama.cpp requires a table of positions
            return {"a.conv1d.1.weight": array, "a.position_embd.weight": np.zeros((1500, len(array)), np.float32)}
        if ".q_proj." in name or ".k_proj." in name:
            # Pairs of rotated values are neighbours in llama.cpp's files, as in the first release of the model.
            heads = array.reshape(c.vision["num_attention_heads"], -1, *array.shape[1:])
            first, second, rest = np.split(heads, (heads.shape[1] // 4, heads.shape[1] // 2), axis=1)
            pairs = np.stack([first, second], axis=2).reshape(len(heads), -1, *array.shape[1:])
            return np.concatenate([pairs, rest], axis=1).reshape(array.shape)
    return array[:, None] if name.endswith(("conv1.bias", "conv2.bias")) else array  # as in llama.cpp


def sinusoids(n: int, width: int) -> NDArray[np.float32]:
    """Return Whisper's embeddings of positions [n, width]: sines, then cosines."""
    half = width // 2
    angles = np.arange(n)[:, None] * np.exp(-np.log(10_000) / (half - 1) * np.arange(half, dtype=np.float32))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class SoundModel(EncoderModel):
    kind = "audio"
    section = "audio"
    stem = "a."

    @staticmethod
    def open(source: Any, label: str) -> Samples:
        return open_audio(source, label)

    @property
    def example(self) -> Samples:
        """Audio of 30 seconds."""
        return np.zeros(30 * RATE, np.float32)


class Whisper(SoundModel):
    """The encoder. Two convolutions over three frames convert every two frames of a spectrogram to one row.

    The input of a row contains the frames for three outputs of the first convolution, which are the input of the
    second convolution. Outside the spectrogram, these outputs must be zeros, not the bias of the first convolution.
    So its bias is a column of the matrix, with an input of 0 or 1.
    """

    #: Name of the norm after the layers.
    last_norm = "a.post_ln"

    def read(self) -> None:
        self.n_mels, self.stack = self.number("num_mel_bins"), self.number("projector.stack_factor", 1)
        n = self.weights.n_rows("a.position_embd.weight")
        if self.n_mels % 16 or not self.n_mels or self.n_embd % 16 or not self.stack or not n:
            raise ModelError("clip.audio.num_mel_bins or another size of the encoder is out of range: broken file")
        self.position_table = self.table("a.position_embd.weight", n, self.n_embd)

    @property
    def n_joined(self) -> int:
        return self.stack

    @property
    def most_frames(self) -> int:
        """Maximum number of frames of a spectrogram that are encoded together."""
        return 2 * len(self.position_table)

    def encoded(self) -> Tensor:
        """Record the layers, and return their normed output."""
        n, size, k = self.n_mels, self.n_embd, 3 * self.n_mels + 16
        self.n_inputs = 3 * k + size + 16

        def given(first: int, width: int) -> Tensor:
            return self.graph.add(Input(Tensor(Rows.TOKENS, width), first, self.n_inputs))

        first = Matrix(WithBias(self._kernel("a.conv1d.1", n), self._bias("a.conv1d.1")))
        second = Matrix(self._kernel("a.conv1d.2", size), self._bias("a.conv1d.2"))
        hidden = tuple(self._gelu(given(i * k, k), first) for i in range(3))
        x = self._gelu(self.graph.add(SideBySide(hidden)), second)
        x = self.layers(self.graph.add(Add(x, given(3 * k, size))))
        self.is_there = given(3 * k + size, 1)
        return self.vector_norm(self.pooled(x), self.last_norm, self.eps)

    def pooled(self, x: Tensor) -> Tensor:
        """Record blocks between the layers and the last norm."""
        return x

    @staticmethod
    def n_rows(n_frames: int) -> int:
        """Return the number of rows of a spectrogram."""
        return (n_frames + 1) // 2

    def _kernel(self, name: str, n_in: int) -> ColumnsByPart:
        """Return a convolution's kernel [n_embd, n_in, 3] as a matrix over three concatenated frames."""
        kernel = self.weights.require(f"{name}.weight", self.n_embd, n_in, 3)
        return ColumnsByPart(Reshaped(kernel, (self.n_embd, 3 * n_in)), 3)

    def _gelu(self, x: Tensor, matrix: Matrix) -> Tensor:
        return self.graph.add(Activation(self.graph.add(Linear(x, matrix)), "gelu_erf"))

    def _bias(self, name: str) -> Reshaped:
        return Reshaped(self.weights.require(f"{name}.bias", self.n_embd, 1), (self.n_embd,))

    def rows(self, frame: NDArray[np.float32]) -> FrameRows:
        """Return the rows of a spectrogram [frames, n_mels]. Rows after its end are zeros and ignored."""
        n, k = self.n_rows(len(frame)), 3 * self.n_mels + 16
        total = -(-n // self.stack) * self.stack
        inputs = np.zeros((total, self.n_inputs), np.float32)
        padded = np.pad(frame, ((1, 1), (0, 0)))
        windows = np.zeros((len(frame) + 2, k), np.float32)  # inputs of the first convolution, with padding
        windows[1:-1, -1] = 1
        windows[1:-1, :-16] = np.concatenate([padded[i : i + len(frame)] for i in range(3)], axis=1)
        for i in range(3):
            inputs[:n, i * k : (i + 1) * k] = windows[i : i + 2 * n - 1 : 2]
        inputs[:n, 3 * k : -16] = self.position_table[:n]
        inputs[:, -16] = np.where(np.arange(total) < n, 80, -80)
        places = np.arange(total, dtype=np.int32)
        spans = np.stack([np.where(places < n, 0, n), np.where(places < n, n, total)]).astype(np.int32)
        axes = np.zeros((3, total), np.int32)
        return FrameRows(inputs, axes, places[:: self.stack], spans)


class Voxtral(Whisper):
    """Pieces of 30 seconds. The last piece is padded with silence."""

    marker = "[AUDIO]"

    def record(self) -> None:
        self.two_linears(self.joined(self.encoded()), "mm.a.mlp.1", "mm.a.mlp.2")

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        size = self.most_frames
        mel = log_mel(np.pad(source, (0, -len(source) % (size * HOP))), self.n_mels)
        frames = tuple(mel[i : i + size] for i in range(0, len(mel), size))
        return Prepared(frames, ("[BEGIN_AUDIO]", len(frames) * (size // 2 // self.stack)), (0, 0), kind=self.kind)


class MERaLiON(Voxtral):
    """Pieces of 30 seconds. The last piece is padded with silence, which has tokens, too."""

    marker = "<SpeechHere>"

    def read(self) -> None:
        super().read()
        if len(self.position_table) % self.stack:
            raise ModelError(
                f"{len(self.position_table)} rows are not a multiple of clip.audio.projector.stack_factor, "
                f"{self.stack}: the file is broken"
            )

    def record(self) -> None:
        at, w = self.at(), self.weights
        x = self.joined(self.vector_norm(self.encoded(), "mm.a.norm_pre", self.eps))
        x = at.add(Activation(at.linear(x, "mm.a.mlp.0", w.n_rows("mm.a.mlp.0.weight")), "silu"))
        n = w.n_rows("mm.a.mlp.1.weight")
        gate, up = at.add(Linears(x, tuple(w.matrix(f"mm.a.mlp.{i}", x.width, n) for i in (1, 2))))
        at.linear(at.add(Gated(gate, up, "silu")), "mm.a.mlp.3", self.width)

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        prepared = super().prepare(source, max_tokens)
        return replace(prepared, segments=prepared.segments[1:])


class Ultravox(Whisper):
    """Pieces of 30 seconds. The last piece may be shorter."""

    marker = "<|audio|>"

    def read(self) -> None:
        super().read()
        self.windowed = range(self.n_layers)

    def record(self) -> None:
        at = self.at(eps=1e-6)
        x = self.graph.add(HeadGate(self.encoded(), self.is_there, "sigmoid"))
        x = self.joined(x)
        x = self.graph.add(RMSNorm(x, self.weights.vector("mm.a.norm_pre", x.width), at.norm_eps))
        n = self.weights.n_rows("mm.a.mlp.1.weight") // 2
        up, gate = at.add(Linears(x, self.weights.split("mm.a.mlp.1", x.width, {"up": n, "gate": n})))
        x = at.add(Gated(gate, up, "silu"))
        x = at.add(RMSNorm(x, self.weights.vector("mm.a.norm_mid", n), at.norm_eps))
        at.linear(x, "mm.a.mlp.2", self.width)

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        length = max(len(source), 2 * HOP)
        mel = log_mel(np.pad(source, (0, length + -length % HOP - len(source))), self.n_mels)
        frames = tuple(mel[i : i + self.most_frames] for i in range(0, len(mel), self.most_frames))
        n_tokens = sum(-(-len(frame) // (2 * self.stack)) for frame in frames)
        return Prepared(frames, (n_tokens,), (0, 0), kind=self.kind)


class PooledWhisper(Whisper):
    """Pieces of 30 seconds, as if padded with silence that no row sees. The means of two rows each are projected."""

    def read(self) -> None:
        super().read()
        self.stack, self.windowed = 2, range(self.n_layers)

    def pooled(self, x: Tensor) -> Tensor:
        return self.graph.add(Outputs(x, 2, is_mean=True))

    @staticmethod
    def n_rows(n_frames: int) -> int:
        """Return the number of rows of a spectrogram with one more frame, for the convolution of the last row."""
        return n_frames // 2

    def rows(self, frame: NDArray[np.float32]) -> FrameRows:
        rows = super().rows(frame)
        return replace(rows, outputs=rows.outputs[: self.n_rows(len(frame)) // 2])

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        size = self.most_frames
        frames = []
        for i in range(0, len(source), size * HOP):
            piece = source[i : i + size * HOP]
            n = -(-len(piece) // HOP)
            if n < 3 and i:  # one token needs three frames
                break
            n = max(n, 3)
            n_padded = min(n + 4, size) * HOP  # further silence does not change the spectrogram
            mel = log_mel(np.pad(piece, (0, n_padded - len(piece))), self.n_mels)
            frames.append(mel[: min((n + 1) // 2 * 2 + 1, size)])
        n_tokens = sum(self.n_rows(len(frame)) // 2 for frame in frames)
        return Prepared(tuple(frames), (n_tokens,), (0, 0), kind=self.kind)


class Qwen2Audio(PooledWhisper):
    marker, around = "<|AUDIO|>", ("<|audio_bos|>", "<|audio_eos|>")

    def record(self) -> None:
        x = self.encoded()
        self.at().linear(x, "mm.a.fc", self.width)


class AudioFlamingo(PooledWhisper):
    marker = "<sound>"

    def record(self) -> None:
        self.two_linears(self.encoded(), "mm.a.mlp.1", "mm.a.mlp.2")


class MusicFlamingo(AudioFlamingo):
    """Audio Flamingo 3 with rotary time embeddings (RoTE) of the encoder's rows, before the projector.

    An angle is the product of a row's time in seconds, a frequency, and the number of the row's piece or the row's
    number in its piece.
    """

    around = ("<|sound_bos|>", "<|sound_eos|>")

    def read(self) -> None:
        super().read()
        self.theta = self.meta.read("audio.rope.freq_base", float, low=1.0, high=1e9)
        self.n_rotated = self.number("rope.dimension_count")
        if self.n_rotated % 2 or 2 * self.n_rotated > self.n_embd:
            raise ModelError(
                f"clip.audio.rope.dimension_count is {self.n_rotated}, but must be even and at most half of "
                f"clip.audio.embedding_length, {self.n_embd}: the file is broken"
            )

    def record(self) -> None:
        self.encoded()
        first, self.graph = self.graph, Graph(rounds_floats=True)
        x = self.graph.add(Input(Tensor(Rows.TOKENS, self.n_embd), 0, self.n_embd))
        self.two_linears(self.graph.add(Outputs(x)), "mm.a.mlp.1", "mm.a.mlp.2")
        self.behind, self.graph = EncoderStage(self.graph, 1), first

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        """Prepare audio. The last column of each spectrogram is the number of the piece."""
        prepared = super().prepare(source, max_tokens)
        frames = (np.pad(frame, ((0, 0), (0, 1)), constant_values=i) for i, frame in enumerate(prepared.frames))
        return replace(prepared, frames=tuple(frames))

    def rows(self, frame: NDArray[np.float32]) -> FrameRows:
        rows = super().rows(frame[:, :-1])
        rows.inputs[:, -1] = frame[0, -1]  # in a column that the graph does not read
        return rows

    def following(self, rows: Pixels, frame: FrameRows) -> FrameRows:
        """Rotate pairs of adjacent values. The angles are rounded to float32, as in transformers."""
        one, turn, n = np.float32(1), np.float32(2 * np.pi), self.n_rotated
        piece, places = int(frame.inputs[0, -1]), np.arange(len(rows), dtype=np.float32)
        step = np.float32(4 * _FRAME_STEP)
        times = np.float32(piece * (len(self.position_table) // 2)) * step + places * step
        theta = np.float32(self.theta)
        frequencies = one / theta ** (np.arange(0, n, 2, dtype=np.float32) / np.float32(n))
        of_piece = np.tile(np.float32(piece) / theta * frequencies, (len(rows), 1))
        of_place = (places / theta * turn)[:, None] * frequencies
        angles = np.hstack([of_piece, of_place]) * (-times * turn)[:, None]
        cosine, sine = np.cos(angles), np.sin(angles)
        first, second = rows[:, 0 : 2 * n : 2], rows[:, 1 : 2 * n : 2]
        rotated = rows.copy()
        rotated[:, 0 : 2 * n : 2] = first * cosine - second * sine
        rotated[:, 1 : 2 * n : 2] = second * cosine + first * sine
        return super().following(rotated, frame)


class Qwen25OmniSound(PooledWhisper):
    """Chunks of two seconds, each with separate positions. No row sees other chunks."""

    marker, around = "<|AUDIO|>", ("<|audio_bos|>", "<|audio_eos|>")
    n_rows = staticmethod(Whisper.n_rows)

    def record(self) -> None:
        self.at().linear(self.encoded(), "mm.a.fc", self.width)

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        length = max(len(source), 3 * HOP)  # one token needs three frames
        mel = log_mel(np.pad(source, (0, length + -length % HOP - len(source))), self.n_mels)
        chunks = (mel[i : i + _CHUNK] for i in range(0, len(mel), _CHUNK))
        frames = tuple(chunk for chunk in chunks if len(chunk) > 2)  # fewer frames have no token
        n_tokens = sum(self.n_rows(len(frame)) // 2 for frame in frames)
        return Prepared(frames, (n_tokens,), (0, 0), kind=self.kind)


class GlmASR(Whisper):
    """Pieces of 30 seconds. Rows also see the silence after the last piece, but silence has no tokens.

    Positions rotate half of each head. llama.cpp adds embeddings of positions instead, which the model does not use.
    """

    marker = "<|pad|>"
    last_norm = "mm.a.norm_pre"

    def read(self) -> None:
        super().read()
        if self.head_dim % 4:
            raise ModelError(f"heads of {self.head_dim} values cannot be rotated: the file is broken")
        self.position_table = np.zeros_like(self.position_table)

    def layers(self, x: Tensor, rope: Rope | None = None, numbers: range | None = None) -> Tensor:
        n = self.head_dim // 2
        frequencies = (10_000.0 ** -(np.arange(0, n, 2) / n)).astype(np.float32)
        return super().layers(x, Rope(frequencies, True), numbers)

    def record(self) -> None:
        self.two_linears(self.joined(self.encoded()), "mm.a.mlp.1", "mm.a.mlp.2")

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        source = np.pad(source, (0, max(0, 2 * self.stack * HOP - len(source))))
        size, n_tokens, frames = self.most_frames, 0, []
        for i in range(0, len(source), size * HOP):
            piece = source[i : i + size * HOP]
            n_new = -(-len(piece) // (2 * HOP)) // self.stack
            if n_new:
                frames.append(log_mel(np.pad(piece, (0, size * HOP - len(piece))), self.n_mels))
            n_tokens += n_new
        return Prepared(tuple(frames), (n_tokens,), (0, 0), kind=self.kind)

    def arranged(self, prepared: Prepared, rows: Pixels) -> Pixels:
        return rows[: prepared.n_tokens]
