"""Large random models for measurements: shapes of real models, every block format, written in seconds.

    python -m tests.helpers.synthetic llama-1.1b q4_0 model.gguf

Blocks are random in their quantised form: random codes, and scales that give each matrix a standard deviation that
keeps the magnitude of activations through all layers.  A file mixes formats as llama.cpp's quantiser does, and
llama.cpp can load its vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from localllm.quant.formats import dequantize
from localllm.quant.types import BLOCK_SIZES, GGMLType
from tests.helpers.blocks import set_scales

Blocks = NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    architecture: str  # "llama" or "qwen2"
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    n_vocab: int
    context_length: int
    rope_theta: float
    norm_eps: float
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_heads


SHAPES = {
    "llama-1.1b": Shape("llama", 22, 2048, 5632, 32, 4, 32_000, 2048, 10_000.0, 1e-5, tied=False),
    "llama-8b": Shape("llama", 32, 4096, 14_336, 32, 8, 128_256, 131_072, 500_000.0, 1e-5, tied=False),
    "qwen2-0.5b": Shape("qwen2", 24, 896, 4864, 14, 2, 151_936, 32_768, 1_000_000.0, 1e-6, tied=True),
}


@dataclass(frozen=True)
class FileType:
    """A file type of llama.cpp's quantiser: its id, and the formats of most tensors and of important tensors."""

    id: int
    base: GGMLType
    better: GGMLType | None = None


FILE_TYPES = {
    "f16": FileType(1, GGMLType.F16),
    "bf16": FileType(32, GGMLType.BF16),
    "q4_0": FileType(2, GGMLType.Q4_0),
    "q4_1": FileType(3, GGMLType.Q4_1),
    "q8_0": FileType(7, GGMLType.Q8_0),
    "q5_0": FileType(8, GGMLType.Q5_0),
    "q5_1": FileType(9, GGMLType.Q5_1),
    "q4_k_m": FileType(15, GGMLType.Q4_K, GGMLType.Q6_K),
    "q5_k_m": FileType(17, GGMLType.Q5_K, GGMLType.Q6_K),
    "q6_k": FileType(18, GGMLType.Q6_K),
    "iq1_s": FileType(24, GGMLType.IQ1_S),
    "iq1_m": FileType(31, GGMLType.IQ1_M),
    "iq2_xxs": FileType(19, GGMLType.IQ2_XXS),
    "iq2_xs": FileType(20, GGMLType.IQ2_XS),
    "iq2_s": FileType(28, GGMLType.IQ2_S),
    "iq3_xxs": FileType(23, GGMLType.IQ3_XXS),
    "iq3_s": FileType(26, GGMLType.IQ3_S),
    "iq4_nl": FileType(25, GGMLType.IQ4_NL),
    "iq4_xs": FileType(30, GGMLType.IQ4_XS),
}

#: llama.cpp's format for rows that are not a multiple of a K block's 256 values.
_FALLBACK = {
    GGMLType.Q4_K: GGMLType.Q5_0,
    GGMLType.Q5_K: GGMLType.Q5_1,
    GGMLType.Q6_K: GGMLType.Q8_0,
    **{type: GGMLType.IQ4_NL for type in GGMLType if type.name.startswith("IQ")},
}


def gguf_bytes(shape: Shape, file_type: str) -> int:
    """Return the approximate size of the file that `random_gguf` writes: the bytes of its tensors."""
    kind = FILE_TYPES[file_type]
    return sum(
        BLOCK_SIZES[tensor_type(name, size, shape, kind)].row_bytes(math.prod(size))
        for name, size in tensor_shapes(shape)
    )


def random_gguf(
    path: Path, shape: Shape, file_type: str, seed: int = 0, *, repeat_layers: bool = False, holes: bool = False
) -> Path:
    """Write a random model.  Uses about twice the memory of the largest tensor.

    Args:
        file_type: one of `FILE_TYPES`.
        repeat_layers: whether tensors of one name, size and format are equal in all layers.  Then writing is as fast
            as the disk, and memory holds one layer.
        holes: with ``repeat_layers``, matrices that repeat an earlier one are holes in the file, which read as zeros
            and take no space.
    """
    kind = FILE_TYPES[file_type]
    types = {name: tensor_type(name, size, shape, kind) for name, size in tensor_shapes(shape)}
    writer = gguf.GGUFWriter(path, shape.architecture)
    _add_metadata(writer, shape, kind)
    for name, size in tensor_shapes(shape):
        n_bytes = BLOCK_SIZES[types[name]].row_bytes(int(np.prod(size)))
        writer.add_tensor_info(name, size, np.dtype(np.float32), n_bytes, gguf.GGMLQuantizationType(types[name]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.Generator(np.random.SFC64(seed))
    known: dict[tuple[str, GGMLType], NDArray[Any]] = {}
    for name, size in tensor_shapes(shape):
        same = (name.split(".", 2)[-1], types[name])
        if holes and repeat_layers and same in known and len(size) > 1:
            _skip_tensor(writer)
            continue
        data = known[same] if same in known else _random_tensor(rng, name, size, types[name], shape)
        if repeat_layers and name.startswith("blk."):
            known[same] = data
        writer.write_tensor_data(data)
    writer.close()
    return path


def _skip_tensor(writer: gguf.GGUFWriter) -> None:
    """Let a hole be the data of the next tensor; a later tensor must have data."""
    assert writer.fout is not None
    tensors = writer.tensors[0]
    info = tensors.pop(next(iter(tensors)))
    writer.fout[0].seek(writer.ggml_pad(info.nbytes, writer.data_alignment), os.SEEK_CUR)


def made_gguf(folder: Path, shape: str, file_type: str) -> Path:
    """Return a random model of `SHAPES` or `real_shapes.REAL_SHAPES` in a folder; writes it if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{shape}-{file_type}.gguf"
    if not path.exists() and shape in SHAPES:
        random_gguf(path, SHAPES[shape], file_type)
    elif not path.exists():
        from tests.helpers.real_shapes import REAL_SHAPES, real_shape_gguf  # imported here: it needs transformers

        real_shape_gguf(path, REAL_SHAPES[shape], file_type)
    return path


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return every tensor's name and shape, in the order of the file."""
    d, f, kv = shape.n_embd, shape.n_ff, shape.n_kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.n_vocab, d)
    for i in range(shape.n_layers):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (d,),
            "attn_q.weight": (d, d),
            "attn_k.weight": (kv, d),
            "attn_v.weight": (kv, d),
            "attn_output.weight": (d, d),
            "ffn_norm.weight": (d,),
            "ffn_gate.weight": (f, d),
            "ffn_up.weight": (f, d),
            "ffn_down.weight": (d, f),
        }
        if shape.architecture == "qwen2":
            layer |= {"attn_q.bias": (d,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        yield from ((f"blk.{i}.{name}", size) for name, size in layer.items())
    yield "output_norm.weight", (d,)
    if not shape.tied:
        yield "output.weight", (shape.n_vocab, d)


def tensor_type(name: str, size: tuple[int, ...], shape: Shape, file_type: FileType) -> GGMLType:
    """Return the format that llama.cpp's quantiser chooses for a tensor (``llama_tensor_get_type``)."""
    if len(size) == 1:
        return GGMLType.F32
    chosen = file_type.base
    is_head = name == ("token_embd.weight" if shape.tied else "output.weight")
    if is_head and chosen not in (GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0):
        chosen = GGMLType.Q6_K
    elif file_type.better and name.endswith(("attn_v.weight", "ffn_down.weight")):
        chosen = file_type.better if _is_important(int(name.split(".")[1]), shape.n_layers) else chosen
    return chosen if size[-1] % BLOCK_SIZES[chosen].length == 0 else _FALLBACK[chosen]


def _is_important(layer: int, n_layers: int) -> bool:
    """Return whether a layer is in the first or last eighth, or every third between (``use_more_bits``)."""
    first = n_layers // 8
    return layer < first or layer >= 7 * n_layers // 8 or (layer - first) % 3 == 2


def _random_tensor(
    rng: np.random.Generator, name: str, size: tuple[int, ...], type: GGMLType, shape: Shape
) -> NDArray[Any]:
    if name == "output_norm.weight":
        # Both signs: if the head is the embedding, every token would otherwise predict itself.
        values = _signed(rng, rng.uniform(0.8, 1.2, size))
        # A tied embedding has larger values than a separate head.
        factor = shape.n_embd**-0.5 / _deviation("token_embd.weight", size, shape) if shape.tied else 1.0
        return (factor * values).astype(np.float32)
    if name.endswith("norm.weight"):
        return rng.uniform(0.8, 1.2, size).astype(np.float32)
    if name.endswith(".bias"):
        return rng.normal(0, 0.2, size).astype(np.float32)
    return random_blocks(rng, type, int(np.prod(size)) // BLOCK_SIZES[type].length, _deviation(name, size, shape))


def _deviation(name: str, size: tuple[int, ...], shape: Shape) -> float:
    """Return the standard deviation of a matrix's values.

    All layers together add somewhat less to the residual stream than the embedding, so that rounding errors stay
    nearly as small as in trained models.  The embedding is large instead of the layers being small, because some
    formats cannot represent deviations below a thousandth (a scale in Q6_K and IQ4_XS is 1,800 times smaller).
    """
    if name == "token_embd.weight":
        return float((2 * shape.n_layers) ** 0.5)
    unit = float(size[-1] ** -0.5)  # keeps the magnitude of the input
    # Attention focuses on a few tokens with very different weights.
    return 1.4 * unit if name.endswith(("attn_q.weight", "attn_k.weight")) else unit


def random_blocks(rng: np.random.Generator, type: GGMLType, n_blocks: int, deviation: float) -> Blocks:
    """Return blocks [n_blocks, block_bytes] whose values have mean 0 and the standard deviation ``deviation``."""
    size = BLOCK_SIZES[type]
    out = np.empty((n_blocks, size.n_bytes), np.uint8)
    step = (1 << 22) // size.n_bytes
    for start in range(0, n_blocks, step):
        chunk = out[start : start + step]
        chunk[:] = (
            rng.integers(0, 1 << 64, -(-chunk.size // 8), np.uint64).view(np.uint8)[: chunk.size].reshape(chunk.shape)
        )
        _MAKERS[type](rng, chunk, deviation)
    return out


def _put_half(chunk: Blocks, at: int, values: NDArray[Any]) -> None:
    chunk[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _scales(rng: np.random.Generator, n: int, deviation: float, mean_square: float) -> NDArray[np.float64]:
    """Return positive scales for codes of the given mean square; they supply the rest of the variance."""
    spread: NDArray[np.float64] = rng.uniform(0.8, 1.2, n)
    spread *= deviation / math.sqrt(mean_square * (0.8**2 + 0.8 * 1.2 + 1.2**2) / 3)
    return spread


def _signed(rng: np.random.Generator, scales: NDArray[Any]) -> NDArray[Any]:
    """Return scales of both signs, so that codes from -8 to 7 have mean 0."""
    signed: NDArray[Any] = scales * rng.choice([-1, 1], len(scales))
    return signed


def _uniform_variance(n_codes: int) -> float:
    return (n_codes**2 - 1) / 12


def _make_f16(rng: np.random.Generator, chunk: Blocks, deviation: float) -> None:
    # Random bytes select from 65,536 normal values, which is much faster than sampling each value.
    codes = chunk.view("<u2")
    codes[:] = (rng.standard_normal(1 << 16) * deviation).astype("<f2").view("<u2")[codes]


def _make_bf16(rng: np.random.Generator, chunk: Blocks, deviation: float) -> None:
    codes = chunk.view("<u2")
    values = (rng.standard_normal(1 << 16) * deviation).astype("<f4").view("<u4") >> 16
    codes[:] = values.astype("<u2")[codes]


def _make_q8_0(rng: np.random.Generator, chunk: Blocks, deviation: float) -> None:
    codes = chunk[:, 2:].view(np.int8)
    np.maximum(codes, -127, out=codes)  # quantisers never produce -128
    _put_half(chunk, 0, _scales(rng, len(chunk), deviation, _uniform_variance(255)))


def _make_symmetric(n_codes: int) -> Callable[[np.random.Generator, Blocks, float], None]:
    """Q4_0 and Q5_0: a scale, then codes around n_codes / 2."""

    def make(rng: np.random.Generator, chunk: Blocks, deviation: float) -> None:
        mean_square = _uniform_variance(n_codes) + 0.25
        _put_half(chunk, 0, _signed(rng, _scales(rng, len(chunk), deviation, mean_square)))

    return make


def _make_with_min(n_codes: int) -> Callable[[np.random.Generator, Blocks, float], None]:
    """Q4_1 and Q5_1: a scale and a minimum, then codes from 0."""

    def make(rng: np.random.Generator, chunk: Blocks, deviation: float) -> None:
        scales = _scales(rng, len(chunk), deviation, _uniform_variance(n_codes))
        _put_half(chunk, 0, scales)
        _put_half(chunk, 2, -(n_codes - 1) / 2 * scales)

    return make


def _make_k_with_min(n_codes: int) -> Callable[[np.random.Generator, Blocks, float], None]:
    """Q4_K and Q5_K: scale and minimum of the block, 8 sub-scales and 8 sub-minima of 6 bits, codes from 0."""

    def make(rng: np.random.Generator, chunk: Blocks, deviation: float) -> None:
        sub_scales = rng.integers(24, 64, (4096, 8), np.uint8)
        mean_square = float(np.mean(sub_scales.astype(float) ** 2)) * _uniform_variance(n_codes)
        scales = _scales(rng, len(chunk), deviation, mean_square)
        _put_half(chunk, 0, scales)
        _put_half(chunk, 2, (n_codes - 1) / 2 * scales)
        # Each sub-minimum equals its sub-scale, so that every sub-block has the mean 0.
        low, high = sub_scales[:, :4], sub_scales[:, 4:]
        top = low | high >> 4 << 6
        packed = np.concatenate([top, top, high & 15 | high << 4], axis=1)
        chunk[:, 4:16] = packed[rng.integers(0, len(packed), len(chunk))]

    return make


def _make_q6_k(rng: np.random.Generator, chunk: Blocks, deviation: float) -> None:
    sub_scales = _signed(rng, rng.integers(64, 128, len(chunk) * 16)).astype(np.int8)
    chunk[:, 192:208] = sub_scales.view(np.uint8).reshape(-1, 16)
    mean_square = float(np.mean(sub_scales.astype(float) ** 2)) * (_uniform_variance(64) + 0.25)
    _put_half(chunk, 208, _scales(rng, len(chunk), deviation, mean_square))


def _make_by_scale(type: GGMLType) -> Callable[[np.random.Generator, Blocks, float], None]:
    """Codebook formats: random codes and inner scales, and scales of both signs that set the standard deviation."""

    def make(rng: np.random.Generator, chunk: Blocks, deviation: float) -> None:
        some = chunk[:512].copy()
        set_scales(some, type, [1.0], rng)
        scale = deviation / float(dequantize(some, type).std())
        set_scales(chunk, type, [scale, -scale], rng)

    return make


_MAKERS: dict[GGMLType, Callable[[np.random.Generator, Blocks, float], None]] = {
    GGMLType.F16: _make_f16,
    GGMLType.BF16: _make_bf16,
    GGMLType.Q4_0: _make_symmetric(16),
    GGMLType.Q4_1: _make_with_min(16),
    GGMLType.Q5_0: _make_symmetric(32),
    GGMLType.Q5_1: _make_with_min(32),
    GGMLType.Q8_0: _make_q8_0,
    GGMLType.Q4_K: _make_k_with_min(16),
    GGMLType.Q5_K: _make_k_with_min(32),
    GGMLType.Q6_K: _make_q6_k,
    **{kind.base: _make_by_scale(kind.base) for kind in FILE_TYPES.values() if kind.base.name.startswith("IQ")},
}


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape, file_type: FileType) -> None:
    writer.add_name(f"random {shape.architecture}")
    writer.add_file_type(file_type.id)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.n_vocab)
    if shape.architecture == "qwen2":
        _add_bpe_vocabulary(writer, shape.n_vocab)
    else:
        _add_spm_vocabulary(writer, shape.n_vocab)


def _add_spm_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Return 3 special tokens, 256 bytes, and words of up to 4 letters, shorter words first."""
    letters = "etaoinshrdlucmfwygpbvkxqjz"
    words = ("".join(word) for n in (1, 2, 3, 4) for word in itertools.product(letters, repeat=n))
    pieces = itertools.chain(["▁"], (piece for word in words for piece in (word, f"▁{word}")))
    words_wanted = n_vocab - 259
    filler = list(itertools.islice(pieces, words_wanted))
    if len(filler) < words_wanted:
        raise ValueError(f"the vocabulary is limited to {259 + len(filler)} tokens")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *filler])
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(filler))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(filler))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def _add_bpe_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Return the byte alphabet, merges of 2 and 3 bytes, 3 special tokens and 290 unused ones, as in Qwen 2.5."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    unused = [f"[PAD{i}]" for i in range(290)] if n_vocab > 1000 else []
    n_merges = n_vocab - 256 - len(specials) - len(unused)
    alphabet = byte_alphabet()
    pairs = list(itertools.product(alphabet, repeat=2))
    triples = (("".join(pair), last) for pair, last in itertools.product(pairs, alphabet))
    merges = list(itertools.islice(itertools.chain(pairs, triples), n_merges))
    tokens = [*alphabet, *("".join(merge) for merge in merges), *specials, *unused]
    first_special = 256 + n_merges
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * first_special + [3] * len(specials) + [5] * len(unused))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(first_special)
    writer.add_eos_token_id(first_special + 2)
    writer.add_pad_token_id(first_special)
    writer.add_add_bos_token(False)


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each byte: the byte's own if printable, otherwise one above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random model in the shape of a real one.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file_type", choices=FILE_TYPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="fewer layers than the real model has")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.layers:
        shape = replace(shape, n_layers=arguments.layers)
    random_gguf(arguments.path, shape, arguments.file_type, arguments.seed)
    print(f"{arguments.path}: {arguments.path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
