"""Compare the quantisers of localllm and llama.cpp: files, times, types of tensors, and divergence.

    python -m tests.benchmarks.quantizers files [TYPE …] --model f16.gguf
    python -m tests.benchmarks.quantizers mixes
    python -m tests.benchmarks.quantizers divergence --model f16.gguf --text calibration.txt --test other.txt

``files`` quantises a file without importance, in turn, and compares the seconds and the bytes of each tensor of the
type.  ``mixes`` compares the type of every tensor for every mix with files that ``llama_model_quantize`` writes for
many kinds of models; the exit code is 1 if a type differs.  ``divergence`` quantises a real model with the same
importance, and prints the Kullback-Leibler divergence from the original for llama.cpp's file, for localllm's, and for
localllm's with error feedback.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import localllm
from localllm.cli.chart import Point, svg_chart
from localllm.evaluate import BaseLogits, divergence as divergence_of, perplexity
from localllm.gguf import GGUFFile
from localllm.kernels.cpu.backend import CPUBackend
from localllm.quant.encode import ROUNDED
from localllm.quant.types import GGMLType
from localllm.quantize import MIXES, plan, run
from localllm.quantize.imatrix_collection import chunks, collect
from localllm.quantize.mixes import chooser_for, fitting, layer_order, needs_importance
from localllm.tokenizer import Tokenizer
from tests.benchmarks.theirs import _binding
from tests.helpers.gguf_writer import write_gguf

Floats = npt.NDArray[np.float32]
REPETITIONS = 3


# -- Files ---------------------------------------------------------------------------------------------------------


def files(folder: Path, model: Path, types: Sequence[GGMLType], threads: int) -> int:
    n_different = 0
    print(f"{'type':<8} {'ours s':>8} {'theirs s':>8} {'ratio':>6}  tensors with different bytes")
    for type in types:
        ours, other = folder / "ours.gguf", folder / "theirs.gguf"
        mix = next(name for name, (_, of_mix) in MIXES.items() if of_mix is type)
        times: list[list[float]] = [[], []]
        for _ in range(REPETITIONS):
            for path in (ours, other):
                path.unlink(missing_ok=True)
            begin = time.perf_counter()
            with GGUFFile.open(model) as file:
                list(run(plan(file, ours, mix, allow_requantize=True), threads=threads))
            middle = time.perf_counter()
            if not their_file(model, other, MIXES[mix][0], None, threads):
                raise SystemExit(f"llama.cpp does not write {mix}")
            times[0].append(middle - begin)
            times[1].append(time.perf_counter() - middle)
        mine, its = map(min, times)
        with GGUFFile.open(ours) as a, GGUFFile.open(other) as b:
            found = [name for name, tensor in a.tensors.items() if tensor.type is type]
            differ = [name for name in found if not np.array_equal(a.tensors[name].data, b.tensors[name].data)]
        n_different += len(differ)
        print(f"{type.name:<8} {mine:8.2f} {its:8.2f} {mine / its:6.2f}  {len(differ)} of {len(found)}", flush=True)
    return int(n_different > 0)


# -- Types of tensors ----------------------------------------------------------------------------------------------

#: Architecture, layers, width, feed-forward width, heads, key-value heads, experts, whether embeddings are tied,
#: names of the attention tensors, and further keys.
MODELS: tuple[tuple[Any, ...], ...] = (
    ("llama", 32, 256, 512, 8, 8, 0, False, "q k v", {}),
    ("llama", 33, 256, 512, 8, 2, 0, False, "q k v", {}),
    ("llama", 5, 256, 512, 8, 2, 0, True, "q k v", {}),
    ("llama", 16, 192, 320, 6, 2, 0, False, "q k v", {}),
    ("llama", 4, 48, 80, 2, 2, 0, False, "q k v", {}),
    ("llama", 6, 256, 512, 8, 2, 8, False, "q k v", {}),
    ("llama", 80, 256, 512, 8, 1, 0, False, "q k v", {}),
    ("qwen2", 80, 256, 256, 8, 4, 0, True, "q k v", {}),
    ("qwen3moe", 12, 256, 256, 8, 2, 16, False, "q k v", {"attention.key_length": 32}),
    ("falcon", 32, 256, 1024, 8, 1, 0, False, "qkv", {}),
    ("phi3", 16, 256, 512, 8, 8, 0, False, "qkv", {"attention.sliding_window": 32}),
    ("gpt2", 12, 256, 1024, 8, 8, 0, True, "qkv", {}),
    ("gemma2", 18, 256, 512, 8, 4, 0, True, "q k v", {"attention.sliding_window": 32, "attention.key_length": 32}),
)


def make_model(path: Path, model: tuple[Any, ...]) -> Path:
    """Write a file with the keys and names of a model, and few rows per matrix."""
    arch, n_layers, width, ff_width, heads, kv_heads, experts, tied, attention, more = model
    keys = {
        "block_count": n_layers, "context_length": 64, "embedding_length": width, "feed_forward_length": ff_width,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "rope.dimension_count": width // heads,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5, "vocab_size": 32, **more,
    }  # fmt: skip
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": ff_width}
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (32, width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (32, width)
    for i in range(n_layers):
        shapes |= {f"blk.{i}.attn_norm.weight": (width,), f"blk.{i}.attn_output.weight": (4, width)}
        shapes |= {f"blk.{i}.attn_{part}.weight": (4, width) for part in attention.split()}
        suffix, lead = ("_exps", (2,)) if experts else ("", ())
        shapes |= {f"blk.{i}.ffn_{part}{suffix}.weight": (*lead, 4, width) for part in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down{suffix}.weight"] = (*lead, 4, ff_width)
    metadata = {"general.architecture": arch, "tokenizer.ggml.model": "none"}
    metadata |= {f"{arch}.{key}": value for key, value in keys.items()}
    return write_gguf(path, metadata, {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()})


class _Importance(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


def their_file(
    source: Path, target: Path, file_type: int, importance: dict[str, Floats] | None, threads: int = 0
) -> bool:
    """Call ``llama_model_quantize``; return whether it wrote the file."""
    api = _binding()
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread, parameters.allow_requantize = file_type, threads, True
    entries = (_Importance * (len(importance or {}) + 1))()
    for i, (name, values) in enumerate((importance or {}).items()):
        entries[i] = _Importance(name.encode(), values.ctypes.data, values.size)
    if importance:
        parameters.imatrix = ctypes.cast(entries, type(parameters.imatrix))
    return not api.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))


def mixes(folder: Path) -> int:
    n = n_different = 0
    for number, model in enumerate(MODELS):
        source = make_model(folder / f"{number}.gguf", model)
        with GGUFFile.open(source) as file:
            names = sorted(file.tensors, key=layer_order)
            shapes = {name: tensor.shape for name, tensor in file.tensors.items() if len(tensor.shape) > 1}
            sizes = {name: s[-1] * (s[0] if len(s) == 3 else 1) for name, s in shapes.items()}
            for mix, (file_type, _) in MIXES.items():
                for importance in (None, {name: np.ones(size, np.float32) for name, size in sizes.items()}):
                    chooser = chooser_for(mix, file.architecture, file.metadata, names, importance is not None)
                    ours = {}
                    for name in names:
                        shape = file.tensors[name].shape
                        ours[name] = fitting(chooser.wanted_type(name, shape, GGMLType.F32), shape[-1])
                    blind = importance is None and any(
                        needs_importance(name, kind, mix) and kind is not GGMLType.F32 for name, kind in ours.items()
                    )
                    n += 1
                    if their_file(source, folder / "out.gguf", file_type, importance) == blind:
                        n_different += 1
                        print(f"{model[:7]} {mix}: one of us wants an importance matrix")
                    elif not blind:
                        with GGUFFile.open(folder / "out.gguf") as out:
                            found = {name: tensor.type for name, tensor in out.tensors.items()}
                        if list(found.items()) != list(ours.items()):
                            n_different += 1
                            print(f"{model[:7]} {mix}:", {k: v for k, v in ours.items() if found.get(k) != v})
    print(f"{n - n_different} of {n} files have the types that llama.cpp chooses")
    return int(n_different > 0)


# -- Divergence from the original ----------------------------------------------------------------------------------


def divergence(
    folder: Path, model: Path, text: Path, test: Path, context: int, threads: int, svg: Path | None
) -> int:
    def loaded(path: Path) -> localllm.LLM:
        return localllm.load(path, device="cpu", context=context, threads=threads, parallel=4)

    with loaded(model) as llm:
        perplexity(llm, test.read_text(encoding="utf-8"), context=context, save_logits=folder / "base")
    base = BaseLogits.read(folder / "base")
    with GGUFFile.open(model) as file:
        pieces = chunks(Tokenizer.from_gguf(file), text.read_text(encoding="utf-8"), context)
        *_, with_hessians = collect(file, pieces, CPUBackend(threads), hessians=True)
    entries = with_hessians.entries
    importance = replace(
        with_hessians, entries={name: replace(entry, hessian=None) for name, entry in entries.items()}
    )
    means = {name: entry.means for name, entry in entries.items()}
    line = "{:<8} {:>19} {:>19} {:>7} {:>19} {:>7}"
    print(line.format("mix", "llama.cpp", "ours", "ratio", "error feedback", "ratio"))
    series: dict[str, list[Point]] = {"llama.cpp": [], "localllm": [], "localllm, --hessian": []}
    for mix in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_XS"):
        files = [folder / f"{mix}-{i}.gguf" for i in range(3)]
        their_file(model, files[0], MIXES[mix][0], means)
        for target, matrix in zip(files[1:], (importance, with_hessians), strict=True):
            with GGUFFile.open(model) as file:
                list(run(plan(file, target, mix, imatrix=matrix), threads=threads))
        sums = []
        for path in files:
            with loaded(path) as llm:
                sums.append(divergence_of(llm, base).kl)
        for points, path, kl, name in zip(series.values(), files, sums, (mix, "", ""), strict=True):
            points.append(Point(path.stat().st_size, kl.value, name))
        first, *others = [f"{kl.value:.5f} ± {kl.error:.5f}" for kl in sums]
        ratios = [f"{kl.value / sums[0].value:.3f}" for kl in sums[1:]]
        print(line.format(mix, first, others[0], ratios[0], others[1], ratios[1]), flush=True)
    if svg is not None:
        svg.write_text(svg_chart(series), "utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("files", "mixes", "divergence"))
    parser.add_argument("types", nargs="*", type=GGMLType.__getitem__, metavar="TYPE")
    parser.add_argument("--model", type=Path, help="a GGUF file of floats")
    parser.add_argument("--text", type=Path, help="text for the measurement of importance")
    parser.add_argument("--test", type=Path, help="text for the measurement of divergence")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="file for a chart of divergence over file size")
    parser.add_argument("-c", "--context", type=int, default=256)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "mixes":
            return mixes(Path(folder))
        if arguments.what == "files":
            return files(Path(folder), arguments.model, arguments.types or ROUNDED, arguments.threads)
        given = arguments.model, arguments.text, arguments.test, arguments.context, arguments.threads
        return divergence(Path(folder), *given, arguments.svg)


if __name__ == "__main__":
    sys.exit(main())
