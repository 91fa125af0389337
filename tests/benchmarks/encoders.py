"""Compare image encoders of localllm and llama.cpp (mtmd), in turn on the same files with random weights.

    python -m tests.benchmarks.encoders                      # three encoders, F16 and Q8_0, two threads: minutes
    python -m tests.benchmarks.encoders --only smolvlm -t 4

The shapes are from the encoders of Qwen 3.5 4B, Gemma 3 and SmolVLM 500M, with fewer layers for ``--layers``.
Each file prints a line: the best time to encode an image in seconds, the relative norm of the difference of the
results, and localllm's peak memory in addition to the weights in the file.  Images have the encoder's size, so that
llama.cpp's method of resizing does not matter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from localllm.kernels.cpu.backend import CPUBackend
from localllm.loading.media_encoder import MediaEncoder
from tests.benchmarks.theirs import Mtmd
from tests.helpers.gguf_writer import finish
from tests.helpers.synthetic import SHAPES, random_gguf

Floats = npt.NDArray[np.float32]
REPETITIONS = 3


@dataclass(frozen=True)
class Shape:
    projector: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    patch: int
    width: int  # width of the text model
    merge: int
    picture: tuple[int, int]  # height and width
    image_size: int

    @property
    def n_patches(self) -> int:
        return self.picture[0] * self.picture[1] // self.patch**2


ENCODERS = {
    "qwen3.5-4b": Shape("qwen3vl_merger", 24, 1024, 4096, 16, 16, 2560, 2, (1024, 1024), 768),
    "gemma3": Shape("gemma3", 27, 1152, 4304, 16, 14, 2560, 4, (896, 896), 896),
    "smolvlm": Shape("idefics3", 12, 768, 3072, 12, 16, 960, 4, (512, 512), 512),
}


def tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors by name."""
    d, ff, p, merged = shape.n_embd, shape.n_ff, shape.patch, shape.n_embd * shape.merge**2
    is_qwen = shape.projector == "qwen3vl_merger"
    found: dict[str, tuple[int, ...]] = {"v.patch_embd.weight": (d, 3, p, p), "v.patch_embd.bias": (d,)}
    found["v.position_embd.weight"] = ((shape.image_size // p) ** 2, d)
    for i in range(shape.n_layers):
        parts = {"attn_qkv": (3 * d, d)} if is_qwen else {f"attn_{x}": (d, d) for x in "qkv"}
        for name, (n, k) in {**parts, "attn_out": (d, d), "ffn_up": (ff, d), "ffn_down": (d, ff)}.items():
            found |= {f"v.blk.{i}.{name}.weight": (n, k), f"v.blk.{i}.{name}.bias": (n,)}
        for name in ("ln1", "ln2"):
            found |= {f"v.blk.{i}.{name}.{end}": (d,) for end in ("weight", "bias")}
    found |= {f"v.post_ln.{end}": (d,) for end in ("weight", "bias")}
    if is_qwen:
        found["v.patch_embd.weight.1"] = (d, 3, p, p)
        for name, size in (("mm.0", (merged, merged)), ("mm.2", (shape.width, merged))):
            found |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
    elif shape.projector == "gemma3":
        found |= {"mm.input_projection.weight": (d, shape.width), "mm.soft_emb_norm.weight": (d,)}
    else:
        found["mm.model.fc.weight"] = (shape.width, merged)
    return found


def write_encoder(path: Path, shape: Shape, kind: str) -> None:
    """Write a file with random weights."""
    writer = GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", shape.projector)
    writer.add_bool("clip.use_gelu", True)
    numbers = {"embedding_length": shape.n_embd, "feed_forward_length": shape.n_ff, "block_count": shape.n_layers}
    numbers |= {"attention.head_count": shape.n_heads, "projection_dim": shape.width, "patch_size": shape.patch}
    numbers |= {"image_size": shape.image_size}
    if shape.projector == "qwen3vl_merger":
        numbers |= {"spatial_merge_size": shape.merge, "image_min_pixels": 1 << 16, "image_max_pixels": 1 << 24}
        writer.add_array("clip.vision.is_deepstack_layers", [False] * shape.n_layers)
    else:
        numbers |= {"projector.scale_factor": shape.merge}
    if shape.projector == "idefics3":
        numbers |= {"preproc_image_size": shape.image_size}
    for key, value in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5] * 3)
    rng = np.random.default_rng(0)
    for name, size in tensors(shape).items():
        values = rng.standard_normal(size, np.float32) * np.float32(0.02 if len(size) == 1 else size[-1] ** -0.5)
        if len(size) == 1 and ("ln" in name or "norm" in name) and name.endswith("weight"):
            values += 1
        if len(size) == 1 or "position" in name:
            writer.add_tensor(name, values)
        elif kind == "q8_0" and size[-1] % 32 == 0 and len(size) == 2 and "input_projection" not in name:
            type = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, type), raw_dtype=type)
        else:
            writer.add_tensor(name, values.astype(np.float16))
    finish(writer)


def picture_of(shape: Shape) -> npt.NDArray[np.uint8]:
    """Return an image uint8 [height, width, 3]."""
    return np.random.default_rng(1).integers(0, 256, (*shape.picture, 3), np.uint8)


class Ours:
    def __init__(self, path: Path, threads: int) -> None:
        self._encoder = MediaEncoder.open(path)
        self._encoder.backend = CPUBackend(threads=threads)

    def encode(self, pixels: npt.NDArray[np.uint8]) -> Floats:
        """Encode an image to float32 [n_tokens, width]."""
        work = self._encoder.encode([self._encoder.as_media(self._encoder.prepare(pixels))])
        while True:
            try:
                next(work)
            except StopIteration as done:
                return np.asarray(done.value[0][:, 0])


def encode_with(mtmd: Mtmd, pixels: npt.NDArray[np.uint8]) -> Floats:
    """Encode the first media chunk.  For SmolVLM, mtmd would encode the whole image in addition to its only tile."""
    return mtmd.encode(next(chunk for chunk in mtmd.chunks(mtmd.image(pixels)) if mtmd.tokens(chunk) is None))


def timed(encode: Callable[[npt.NDArray[np.uint8]], Floats], pixels: npt.NDArray[np.uint8]) -> tuple[float, Floats]:
    begin = time.perf_counter()
    found = encode(pixels)
    return time.perf_counter() - begin, found


def peak_bytes(path: Path, shape: Shape, threads: int) -> int:
    """Return the peak memory of a process that encodes an image, without the memory after its start."""
    code = (
        "import sys, resource; from pathlib import Path; from tests.benchmarks import encoders as e\n"
        "shape = e.ENCODERS[sys.argv[2]]; pixels = e.picture_of(shape)\n"
        "engine = e.Ours(Path(sys.argv[1]), int(sys.argv[3]))\n"
        "size = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10\n"
        "before = size(); engine.encode(pixels); print(size() - before)"
    )
    name = next(name for name, each in ENCODERS.items() if each.projector == shape.projector)
    done = subprocess.run(
        [sys.executable, "-c", code, path, name, str(threads)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def compare(name: str, kind: str, threads: int, n_layers: int | None, folder: Path) -> dict[str, Any]:
    shape = ENCODERS[name]
    shape = replace(shape, n_layers=n_layers or shape.n_layers)
    path, text = folder / f"{name}-{kind}.gguf", folder / f"text-{shape.width}.gguf"
    write_encoder(path, shape, kind)
    ours, pixels = Ours(path, threads), picture_of(shape)
    found: dict[str, Any] = {"encoder": name, "type": kind, "patches": shape.n_patches, "threads": threads}
    encoders: dict[str, Callable[[npt.NDArray[np.uint8]], Floats]] = {"ours": ours.encode}
    if find_spec("llama_cpp") is not None:
        if not text.exists():
            small = replace(SHAPES["llama-1.1b"], n_layers=1, n_embd=shape.width, n_heads=shape.width // 64)
            random_gguf(text, replace(small, n_kv_heads=small.n_heads, n_ff=256, n_vocab=1000), "q8_0")
        encoders["llama.cpp"] = partial(encode_with, Mtmd(text, path, threads=threads, repack=True))
    times: dict[str, list[float]] = {name: [] for name in encoders}
    results: dict[str, Floats] = {}
    ours.encode(pixels)
    for _ in range(REPETITIONS):
        for engine, encode in encoders.items():
            seconds, results[engine] = timed(encode, pixels)
            times[engine].append(seconds)
    found |= {engine: round(min(seconds), 3) for engine, seconds in times.items()}
    if "llama.cpp" in results:
        ratio = np.linalg.norm(results["ours"] - results["llama.cpp"]) / np.linalg.norm(results["llama.cpp"])
        found |= {"ratio": round(found["llama.cpp"] / found["ours"], 2), "apart": float(f"{ratio:.2g}")}
    found["extra_mb"] = round((peak_bytes(path, shape, threads) - path.stat().st_size) / 1e6)
    path.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=ENCODERS)
    parser.add_argument("--types", nargs="+", choices=("f16", "q8_0"), default=("f16", "q8_0"))
    parser.add_argument("--layers", type=int, help="fewer layers than the real encoders")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in [given.only] if given.only else ENCODERS:
            for kind in given.types:
                print(json.dumps(compare(name, kind, given.threads, given.layers, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
