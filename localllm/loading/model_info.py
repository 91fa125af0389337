"""Facts about a loaded model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from localllm.kernels.graph import CacheType, Weight
from localllm.loading.placement import EncoderInfo, Format, Placement, sum_formats
from localllm.models.config import ModelConfig
from localllm.version import __version__

#: Names of ``general.file_type`` (llama.cpp's ``enum llama_ftype``), in order; "-" for removed types.
_FILE_TYPES = """
F32 F16 Q4_0 Q4_1 - - - Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS
IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 - - - TQ1_0 TQ2_0
MXFP4_MOE NVFP4 Q1_0 Q2_0
"""

#: Added to ``general.file_type`` if the converter guessed the type.
_GUESSED = 1024


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model.

    Attributes:
        path: the file, or the first file of a split model.
        name: name in the metadata; None if the file has no name.
        architecture: "llama", …
        n_parameters: number of values in all tensors.
        file_type: quantisation, such as "Q4_K_M".
        n_bytes: bytes of all tensors in the file.
        n_vocab: number of tokens in the vocabulary.
        n_layers: number of layers.
        trained_context: tokens of context in training.
        context: maximum tokens of a sequence.
        device: "cpu", "reference", or all devices with layers: "cpu + cuda:0".
        kernels: description of the kernels.
        threads: number of threads for steps of many tokens (prefill).
        decode_threads: number of threads for steps of few tokens (decode).
        placement: device, kernels and bytes of every group of layers, and the total bytes.
        config: hyperparameters.
        fingerprint: hash that identifies the model (`localllm.gguf.GGUFFile.fingerprint`).
        draft: the draft model, if any.
        encoder: the image and audio encoder, if any.
    """

    path: Path
    name: str | None
    architecture: str
    n_parameters: int
    file_type: str
    n_bytes: int
    n_vocab: int
    n_layers: int
    trained_context: int
    context: int
    device: str
    kernels: str
    threads: int
    decode_threads: int
    placement: Placement
    config: ModelConfig
    fingerprint: str
    draft: ModelInfo | None = None
    encoder: EncoderInfo | None = None

    def __str__(self) -> str:
        """Describe the model, its devices, formats and memory in a few lines."""
        threads = f"{self.threads} threads, {self.decode_threads} to decode"
        lines = [
            f"{self.title}: {self.architecture}, {self.n_parameters:,} parameters, {self.file_type}",
            f"  {self.device} ({self.kernels}), {threads}, {self.context:,} tokens of context",
        ]
        for group in self.placement.groups:
            cache = f", {self.cache_type} KV cache {_megabytes(group.kv_cache)}" if group.kv_cache else ""
            lines.append(f"  {group.name} on {group.device}: weights {_megabytes(group.weights)}{cache}")
        if self.encoder is not None:
            lines.append(f"  encoder {self.encoder}")
        included = ", Python and kernels included" if self.placement.overhead else ""  # a draft model adds none
        is_lazy = all(group.device == "cpu" for group in self.placement.groups)  # GPU memory is allocated at once
        grows = "; the cache takes its memory as texts grow" if is_lazy else ""
        lines.append(f"  total {_megabytes(self.placement.total)}{included}{grows}")
        return "\n".join(lines if self.draft is None else [*lines, f"draft model {self.draft}"])

    def _repr_html_(self) -> str:
        """Describe the model in HTML for Jupyter, with a table of the groups of layers."""
        head, running, *_ = str(self).split("\n")
        rows = [("layers", "device", "weights", f"{self.cache_type} KV cache")]
        for group in self.placement.groups:
            cache = _megabytes(group.kv_cache) if group.kv_cache else ""
            rows.append((group.name, group.device, _megabytes(group.weights), cache))
        rows.append(("in all", "", _megabytes(self.placement.total), ""))
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        draft = "" if self.draft is None else f"<p>draft model</p>{self.draft._repr_html_()}"
        return f"<p><b>{escape(head)}</b><br>{escape(running.strip())}</p><table>{table}</table>{draft}"

    @property
    def title(self) -> str:
        """The file's name; the model's name for Ollama's files, whose names are hashes."""
        file = self.path.name
        return self.name or file if file.startswith("sha256-") else file

    @property
    def cache_type(self) -> CacheType:
        """The type of keys and values in the cache."""
        return self.placement.cache_type

    @property
    def prompts_key(self) -> str:
        """A hash of everything that determines the cache of a prompt: model, version, devices, kernels, type."""
        is_long = self.context > self.config.original_context  # some models rotate differently then
        devices = [(group.name, group.device, group.kernels) for group in self.placement.groups]
        text = f"{self.fingerprint} {__version__} {self.kernels} {devices} {self.cache_type} {is_long}"
        # The cache also stores the keys and values of a DFlash drafter.
        if self.draft is not None and self.draft.architecture == "dflash":
            text += f" {self.draft.fingerprint}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def gpu_bytes(self) -> int:
        """Bytes of GPU memory for weights, KV cache and activations, including the draft model."""
        groups = [group for group in self.placement.groups if group.device != self.placement.host]
        n_bytes = sum(group.weights + group.kv_cache + group.scratch for group in groups)
        return n_bytes + (0 if self.draft is None else self.draft.gpu_bytes)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats of the weights in the file and in memory, with their bytes, largest first.

        ``placement.groups`` contain the formats of each group of layers.
        """
        return sum_formats(weight for group in self.placement.groups for weight in group.packed)


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"


def file_type_name(metadata: Mapping[str, Any], tensors: Iterable[Weight]) -> str:
    """Return the name of ``general.file_type``; without that key, the type with the most bytes of tensors."""
    number = metadata.get("general.file_type")
    if isinstance(number, int):
        number &= ~_GUESSED
        name = dict(enumerate(_FILE_TYPES.split())).get(number, "-")
        return f"type {number}" if name == "-" else name
    n_bytes: Counter[str] = Counter()
    for tensor in tensors:
        n_bytes[tensor.type.name] += tensor.data.nbytes
    return max(n_bytes, key=n_bytes.__getitem__, default="unknown")
