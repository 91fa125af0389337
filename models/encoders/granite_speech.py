"""Granite Speech's encoder (arXiv:2505.08699): a conformer whose rows see their block, with the symbols that it
recognises after half of its layers, and a Q-Former over windows. Some models use the outputs of further layers.

Graphs have no softmax over rows. So numpy computes the symbols, between two graphs.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Rows, Tensor
from localllm.kernels.operations import Input, Outputs, SideBySide
from localllm.kernels.reference import softmax
from localllm.models.blocks import layer_norm
from localllm.models.encoders import qformer
from localllm.models.encoders.conformer import Conformer, WavesOfTable, folded_norm
from localllm.models.encoders.encoder import EncoderCheckpoint, EncoderStage, FrameRows, Pixels, Prepared, require
from localllm.models.encoders.sounds import HOP, RATE, WINDOW, Samples, mel_filters, mel_spectrogram, whisper_scale
from localllm.models.hf_convert import Array, implied
from localllm.models.weights import Weights, floats

HF_NAMES = {
    "encoder.input_linear": "a.input_projection",
    "encoder.out": "a.enc_ctc_out",
    "encoder.out_mid": "a.enc_ctc_out_mid",
    "*.attn.rel_pos_emb.weight": "a.blk.*.attn_rel_pos_emb",
    "projector.query": "a.proj_query",
    "projector.linear": "a.proj_linear",
    "projector.qformer.layernorm": "a.proj_norm",
}

#: Samples of a Fourier transform.
_FFT = 512
#: Layers of the Q-Former, as in llama.cpp.
_FORMER_LAYERS = 2
#: Rows whose symbols are computed at once.
_ROWS = 2048

HF_MEANT: dict[str, tuple[Any, ...]] = {
    "sampling_rate": (RATE,),
    "melspec_kwargs": ({"sample_rate": RATE, "n_fft": _FFT, "win_length": WINDOW, "hop_length": HOP, "n_mels": 80},),
    "n_fft": (_FFT,),
    "win_length": (WINDOW,),
    "hop_length": (HOP,),
    "n_mels": (80,),
    "use_qformer_text_input": (False,),
    "position_embedding_type": ("absolute",),
} | implied(
    "dim_head conv_expansion_factor output_dim feature_size has_lora_adapter feedforward_mult encoder_hidden_size"
)


def hf_keys(c: EncoderCheckpoint) -> dict[str, Any]:
    sound, former = c.vision, c.values["projector_config"]
    require(c, "projector_config.num_hidden_layers", former["num_hidden_layers"], (_FORMER_LAYERS,))
    require(c, "projector_config.cross_attention_frequency", former.get("cross_attention_frequency", 2), (1,))
    require(c, "projector_config.hidden_act", former.get("hidden_act", "gelu"), ("gelu",))
    require(c, "projector_config.layer_norm_eps", former.get("layer_norm_eps", qformer.EPS), (qformer.EPS,))
    require(c, "projector_config.hidden_size", former["hidden_size"], (sound["hidden_dim"],))
    require(c, "encoder_config.dim_head", sound.get("dim_head"), (None, sound["hidden_dim"] // sound["num_heads"]))
    require(c, "encoder_config.input_dim", sound["input_dim"], (160,))
    for name, ours in (("projector_window_size", "window_size"), ("projector_downsample_rate", "downsample_rate")):
        require(c, name, c.processor.get(name, c.values[ours]), (c.values[ours],))
    return {
        "projector_type": "granite_speech",
        "audio.feed_forward_length": sound["hidden_dim"] * sound.get("feedforward_mult", 4),
        "audio.attention.layer_norm_epsilon": 1e-5,
        "audio.chunk_size": sound["context_size"],
        "audio.conv_kernel_size": sound["conv_kernel_size"],
        "audio.max_pos_emb": sound["max_pos_emb"],
        "audio.feature_layer": sound.get("cat_hidden_layers") or None,
        "audio.projector.window_size": c.values["window_size"],
        "audio.projector.downsample_rate": c.values["downsample_rate"],
        "audio.projector.head_count": former["num_attention_heads"],
    }


def hf_tensor(name: str, array: Array, c: EncoderCheckpoint) -> Array | Mapping[str, Array]:
    if name.endswith("attention_dists") or ".batch_norm." in name:
        is_kept = name.endswith(("batch_norm.weight", "batch_norm.bias"))
        return folded_norm(name, array, c) if is_kept else {}
    if match := re.search(r"qformer\.encoder\.layer\.(\d+)\.(.*?)(\.weight|\.bias)$", name):
        return {f"a.proj_blk.{match[1]}.{qformer.NAMES[match[2]]}{match[3]}": array}
    if match := re.search(r"layers\.(\d+)\.attn\.to_kv\.weight$", name):
        pairs = zip("kv", np.split(array, 2), strict=True)
        return {f"a.blk.{match[1]}.attn_{part}.weight": rows for part, rows in pairs}
    if name.endswith(("up_conv.weight", "down_conv.weight")):
        return array[:, :, 0]
    return array[:, 0] if name.endswith("depth_conv.conv.weight") else array


class GraniteSpeech(Conformer):
    marker = "<|audio|>"

    def read(self) -> None:
        number, n = self.number, self.n_layers
        self.check_heads()
        self.n_mels, self.side, self.max_distance = map(number, ("num_mel_bins", "chunk_size", "max_pos_emb"))
        self.size, rate = number("projector.window_size"), number("projector.downsample_rate")
        self.former_heads, self.n_queries = number("projector.head_count"), self.size // rate
        self.tapped = self.meta.find("audio.feature_layer") or []
        if not isinstance(self.tapped, list) or any(not 0 <= x < n for x in self.tapped):
            raise ModelError(f"clip.audio.feature_layer must be numbers between 0 and {n - 1}: the file is broken")
        is_divided = self.n_queries and self.n_mels % 32 == 0 and n > 1 and self.side <= self.max_distance
        if not is_divided or self.n_embd % self.former_heads:
            raise ModelError("the sizes of the audio encoder contradict each other: the file is broken")
        number("conv_kernel_size")  # the tensors contain it
        self.windowed = range(n)
        n_symbols = self.weights.n_rows("a.enc_ctc_out.weight")
        self._stored = [
            self.weights.matrix(name, n_in, n_out, bias=True)
            for name, n_in, n_out in (
                ("a.enc_ctc_out", self.n_embd, n_symbols),
                ("a.enc_ctc_out_mid", n_symbols, self.n_embd),
            )
        ]

    def waves(self, w: Weights) -> WavesOfTable:
        table = w.require("attn_rel_pos_emb", 2 * self.max_distance + 1, self.head_dim)
        return WavesOfTable(table, self.n_heads, self.side)

    # -- Graphs ----------------------------------------------------------------------------------------------------

    def record(self) -> None:
        d, half = self.n_embd, self.n_layers // 2
        self._outputs: list[Tensor] = []
        x = self._input(0, self.n_mels, self.n_mels)
        x = self.at().linear(x, "a.input_projection", d)
        self.behind_layer(-1, x)
        self._finish(self.layers(x, numbers=range(half)))
        first, self.graph, n_before = self.graph, Graph(rounds_floats=True), len(self._outputs) * d
        self._outputs = [self._input(0, n_before, n_before + d)] if n_before else []
        x = self._input(n_before, d, n_before + d)
        if half in self.tapped:  # with the symbols
            self._outputs.append(x)
        self._finish(self.layers(x, numbers=range(half, self.n_layers)))
        second, self.graph = self.graph, Graph(rounds_floats=True)
        self._record_former(d * (1 + len({*self.tapped})))
        self.behind, self.graph = EncoderStage(self.graph, 1), first
        self._stages = [EncoderStage(first, 1), EncoderStage(second, 1), self.behind]

    def _input(self, first: int, width: int, total: int) -> Tensor:
        return self.graph.add(Input(Tensor(Rows.TOKENS, width), first, total))

    def behind_layer(self, number: int, x: Tensor) -> None:
        if number + 1 in self.tapped and number + 1 != self.n_layers // 2:
            self._outputs.append(x)

    def _finish(self, x: Tensor) -> None:
        self.graph.add(Outputs(self.graph.add(SideBySide((*self._outputs, x))) if self._outputs else x))

    def _record_former(self, n: int) -> None:
        """Record the Q-Former over rows of n values, and its projection."""
        d = self.n_embd
        total = n + d + 2 * qformer.FLAGS
        self.queries = np.zeros((1, self.n_queries, n + d), np.float32)
        self.queries[:, :, n:] = self.table("a.proj_query", 1, self.n_queries, d)
        x, y, is_of_window, is_query = (
            self._input(first, width, total)
            for first, width in ((0, n), (n, d), (n + d, qformer.FLAGS), (n + d + qformer.FLAGS, qformer.FLAGS))
        )
        y = layer_norm(self.at(eps=qformer.EPS), "a.proj_norm", y)
        self.graph.layer = 0
        cache = qformer.make_cache(self.graph, d, d // self.former_heads)
        for i in range(_FORMER_LAYERS):
            self.graph.layer = i
            at = self.at(self.weights.under(f"a.proj_blk.{i}."), qformer.EPS)
            y = qformer.layer(at, y, x, is_of_window, is_query, cache)
        self.graph.layer = "output"
        self.at().linear(self.graph.add(Outputs(y)), "a.proj_linear", self.width)

    @property
    def stages(self) -> list[EncoderStage]:
        return self._stages

    # -- Rows ------------------------------------------------------------------------------------------------------

    def rows(self, frame: NDArray[np.float32]) -> FrameRows:
        """Return the rows of a spectrogram, each with two frames, [n, n_mels]."""
        places = np.arange(len(frame), dtype=np.int32)
        starts = places - places % self.side
        spans = np.stack([starts, np.minimum(starts + self.side, len(frame))]).astype(np.int32)
        return FrameRows(frame, np.stack([places * 0, places - starts, places * 0]), places, spans)

    @cached_property
    def _symbols(self) -> list[tuple[Pixels, Pixels]]:
        """Return the matrices [n_in, n_out] to symbols and back, and their biases."""
        return [(floats(m.weight).T, floats(m.bias)) for m in self._stored if m.bias is not None]

    def following_in_pieces(self, rows: Pixels, frame: FrameRows) -> Generator[None, None, FrameRows]:
        """Add the symbols to the rows of the first graph, or return the windows of the rows of the second one."""
        if frame.stage == 0:
            rows = rows.copy()
            x = rows[:, -self.n_embd :]
            for i in range(0, len(rows), _ROWS):
                (matrix, bias), (back, back_bias) = self._symbols
                x[i : i + _ROWS] += softmax(x[i : i + _ROWS] @ matrix + bias) @ back + back_bias
                yield
            return FrameRows(rows, frame.axes, frame.outputs, frame.spans, stage=1)
        n = -(-len(rows) // self.size)
        padded = np.pad(rows, ((0, n * self.size - len(rows)), (0, self.n_embd)))
        windows = padded.reshape(n, self.size, -1)
        return qformer.window_rows(windows, np.broadcast_to(self.queries, (n, *self.queries.shape[1:])))

    def prepare(self, source: Samples, max_tokens: int | None = None) -> Prepared:
        samples = np.pad(source, (0, max(0, _FFT - len(source)))).astype(np.float64)
        padded = np.pad(samples, WINDOW // 2, mode="reflect")
        n = (len(samples) // HOP + 1) // 2 * 2
        filters, window = mel_filters(self.n_mels // 2, _FFT, is_htk=True), np.hanning(WINDOW + 1)[:-1]
        bands = mel_spectrogram(padded, window, _FFT, len(samples) // HOP + 1, filters)
        frame = whisper_scale(bands)[:n].reshape(-1, self.n_mels)
        n_tokens = -(-len(frame) // self.size) * self.n_queries
        return Prepared((frame,), (n_tokens,), (0, 0), kind=self.kind)
