"""Tiny models of each family of operations, compared with the CPU's recorded logits, and the kernels to compile.

`record` writes the models and logits with the CPU, and `families` reads them on a machine that lacks torch and
transformers.  Each model is checked in a process of its own, because an illegal access of one kernel would make CUDA
unusable for the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.cpu.host import usable_cpus
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.driver import Defines
from localllm.kernels.cuda.module import ModuleCompiler
from tests.benchmarks.gpu.machine import Machine, emulated, real
from tests.benchmarks.gpu.sections import Row
from tests.helpers.data import ROOT
from tests.helpers.run_model import Runner, largest_error

#: Operations of each model of `tests.models.tiny.TINY`, and the types of its matrices.
FAMILIES: dict[str, tuple[str, str, str]] = {
    "llama F16": ("llama", "F16", "float weights"),
    "llama Q8_0": ("llama", "Q8_0", "weights of 8 bits"),
    "llama Q4_0": ("llama", "Q4_0", "weights of 4 bits"),
    "qwen3moe": ("qwen3moe", "Q4_0", "experts"),
    "gemma3": ("gemma3", "F16", "windows, norms of queries and keys"),
    "gemma4-e2b": ("gemma4-e2b", "F16", "shared caches, soft-caps, values per layer"),
    "gpt-oss": ("gpt-oss", "F16", "sinks, biases of experts"),
    "bloom": ("bloom", "F16", "ALiBi, layer norms"),
    "deepseek-v3.2": ("deepseek-v3.2", "F16", "latent attention, an indexer"),
    "deepseek-v4": ("deepseek-v4", "F16", "compressed entries, hyper-connections"),
    "minimax-m3": ("minimax-m3", "F16", "selected blocks"),
    "qwen3next": ("qwen3next", "F16", "gated delta net"),
    "kimi-linear": ("kimi-linear", "F16", "delta net by channel"),
    "nemotron-h-latent": ("nemotron-h-latent", "F16", "Mamba 2, latent experts"),
    "mamba": ("mamba", "F16", "Mamba 1"),
    "rwkv6": ("rwkv6", "F16", "RWKV 6"),
    "rwkv7": ("rwkv7", "F16", "RWKV 7"),
    "lfm2": ("lfm2", "F16", "short convolutions"),
    "minimax-01": ("minimax-01", "F16", "lightning attention"),
}
#: Files of the models and of the list of kernels.
MODELS, MODULES = "models.zip", "modules.json"
#: Largest |ours - the CPU's| / |the CPU's|: the errors of the CPU and of a GPU in comparisons with transformers.
LIMIT = 1.5e-2
#: Tokens of the texts, of the part that they share, and of texts in the emulator, which is slow.
N_TOKENS, CUT, N_OTHER, FEW = 41, 20, 9, 13
#: Most models that are checked at once.
_PROCESSES = 6
#: The seconds of one model's process.
_SECONDS = 60


def texts() -> tuple[list[int], list[int]]:
    """Return the ids of a text, and of one that starts with the same CUT tokens."""
    ids, others = (
        [int(i) for i in np.random.default_rng(seed).integers(3, 300, n)] for seed, n in ((1, N_TOKENS), (2, N_OTHER))
    )
    return ids, ids[:CUT] + others


# -- Recording -----------------------------------------------------------------------------------------------------


def record(folder: Path, names: Sequence[str] = tuple(FAMILIES)) -> None:
    """Write the models and the CPU's logits for both texts.  Needs torch and transformers.

    Args:
        folder: gets the models NAME.gguf, and their logits as NAME.npz.
    """
    from tests.helpers.recorder import CPUOps
    from tests.models.tiny import TINY, make_model, write

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        key, type, _ = FAMILIES[name]
        with tempfile.TemporaryDirectory() as scratch:
            path = write(Path(scratch) / "model.gguf", TINY[key], make_model(TINY[key]), type)
            target = folder / f"{name.replace(' ', '-')}.gguf"
            target.write_bytes(path.read_bytes())
        runner = Runner(target, CPUOps(threads=2))
        whole, other = (runner.logits(ids) for ids in texts())
        np.savez(target.with_suffix(".npz"), whole=whole, other=other)


# -- Checking ------------------------------------------------------------------------------------------------------


def families(machine: Machine, packages: Path, seconds: float) -> Iterator[Row]:
    """Check each model of ``packages``/models.zip in a process of its own, in ``seconds`` in total."""
    with ZipFile(packages / MODELS) as archive:
        archive.extractall(machine.scratch / "models")
    models = sorted((machine.scratch / "models").glob("*.gguf"))
    words = ("--emulated",) if machine.is_emulated else ()
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(min(_PROCESSES, usable_cpus())) as pool:
        checks = [pool.submit(_check_in_process, path, words, end) for path in models]
        for check in as_completed(checks):
            yield check.result()


def _check_in_process(path: Path, words: Sequence[str], end: float) -> Row:
    row: Row = {"model": path.stem, "error": None}
    seconds = min(_SECONDS, end - time.monotonic())
    if seconds <= 0:
        return row | {"fault": f"{path.stem}: not checked, because the time was over"}
    command = (sys.executable, "-m", "tests.benchmarks.gpu.families", str(path), *words)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return row | {"fault": f"{path.stem}: stopped after {seconds:.0f} s"}
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        print(f"{path.stem}: exit code {done.returncode}\n{done.stderr}", file=sys.stderr)
        return row | {"fault": f"{path.stem}: {said[:400]}"}
    row |= json.loads(done.stdout.splitlines()[-1])
    if not row["error"] <= LIMIT:
        row["fault"] = f"{path.stem}: the error is {row['error']:.1e}, more than {LIMIT:g}"
    return row


def check(path: Path, backend: CUDABackend, n: int = N_TOKENS) -> float:
    """Return the error of a model's logits.  Raises AssertionError if chunks change the bits."""
    ids, other = texts()
    recorded = np.load(path.with_suffix(".npz"))
    if n < N_TOKENS:
        runner = Runner(path, backend, n_pages=2, max_tokens=16)
        ours = np.concatenate([runner.run((ids[: n - 1], 0, [0])), runner.run((ids[n - 1 : n], n - 1, [0]))])
        return _error(ours, recorded["whole"][:n])
    return largest_error(
        Runner(path, backend), ids, other, CUT, lambda ids: recorded["whole" if ids == texts()[0] else "other"]
    )


def _error(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def main(path: Path, *, is_emulated: bool) -> None:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, (emulated if is_emulated else real)(Path(scratch)) as machine:
        backend = machine.make_backend(machine.driver, 0)
        backend.compiles_ahead = False
        error = check(path, backend, FEW if is_emulated else N_TOKENS)
    print(json.dumps({"error": error, "s": time.monotonic() - begin}))


# -- Compiling -----------------------------------------------------------------------------------------------------


def compile_modules(machine: Machine, packages: Path) -> Iterator[Row]:
    """Compile all listed kernels to the cache on the disk, in a process per processor."""
    modules: list[tuple[str, Defines]] = json.loads((packages / MODULES).read_text(encoding="utf-8"))
    capability, begin = machine.driver.properties(0).capability, time.monotonic()
    n_processes = min(usable_cpus(), max(1, len(modules)))
    seconds, faults = list[float](), list[str]()
    # Processes, because older versions of NVRTC compile one module per process at a time.
    with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn")) as pool:
        tasks = {pool.submit(_compile, name, defines, capability): (name, defines) for name, defines in modules}
        for task in as_completed(tasks):
            try:
                seconds.append(task.result())
            except Exception as error:  # the others can still be compiled
                name, defines = tasks[task]
                faults.append(f"{name} {defines}: {type(error).__name__}: {str(error)[:400]}")
    row: Row = {"modules": len(modules), "processes": n_processes, "s": time.monotonic() - begin}
    if seconds:
        row |= {"s of all processes": sum(seconds), "slowest, s": max(seconds)}
    yield row
    for fault in faults:
        yield {"fault": fault}


@cache
def _compiler() -> ModuleCompiler:
    import cupy

    return ModuleCompiler(cupy)


def _compile(name: str, defines: Defines, capability: tuple[int, int]) -> float:
    begin = time.monotonic()
    compiler = _compiler()
    compiler.binary(name, defines, compiler.architecture(capability))
    return time.monotonic() - begin


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main(Path(sys.argv[1]), is_emulated="--emulated" in sys.argv)
