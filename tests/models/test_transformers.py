"""Every architecture compared with transformers in float32: a prompt at once and in chunks, decoded tokens, and a
text continued differently after a cut.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.backends import BACKENDS, emulated_cuda, no_harness, shared_by_threads
from tests.helpers.offloading import OffloadingBackend
from tests.helpers.recorder import CPUOps, ReferenceOps
from tests.helpers.run_model import Runner, largest_error
from tests.models.tiny import TINY, make_model, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]

#: Longer than two pages of a cache, than a window, and than the context before scaling.
IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 41)]
#: A text that continues the first CUT tokens of the first text.
CUT, OTHER_IDS = 20, [int(i) for i in np.random.default_rng(2).integers(3, 300, 9)]


@cache
def model_of(name: str) -> Any:
    return make_model(TINY[name])


@cache
def expected(name: str, ids: tuple[int, ...]) -> Array:
    """Return transformers' logits [T, n_vocab]."""
    import torch

    with torch.no_grad():
        logits: Array = model_of(name)(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def check(name: str, runner: Runner, limit: float) -> None:
    assert largest_error(runner, IDS, IDS[:CUT] + OTHER_IDS, CUT, lambda ids: expected(name, tuple(ids))) < limit


@pytest.mark.parametrize("name", TINY)
def test_the_reference_matches_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    check(name, Runner(path, ReferenceOps(np.float32)), 1e-4)


@pytest.mark.parametrize("name", TINY)
def test_the_cpu_matches_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    check(name, Runner(path, shared_by_threads(CPUOps(threads=2))), 5e-3)


@pytest.mark.parametrize("name", TINY)
def test_a_gpu_matches_transformers(name: str, tmp_path: Path) -> None:
    gpu = next((backend for backend in BACKENDS if backend.name == "cuda"), None)
    if gpu is None:
        pytest.skip("needs a GPU")
    check(name, Runner(write(tmp_path / "model.gguf", TINY[name], model_of(name)), gpu.make()), 1e-2)


#: Models of 2026 with operations that the other models tested here do not use.
ON_CUDA_TOO = (
    *("apertus", "bailingmoe3", "bloom", "deepseek-ocr", "deepseek-v3.2", "deepseek-v4", "exaone-moe", "glm-5.3"),
    *("granite-swa", "granite-swa-moe", "hunyuan-vl", "hy-v3", "kimi-linear", "laguna", "lfm3", "maincoder"),
    *("mamba", "mimo2", "minicpm3", "minimax-m3", "mistral4", "muse-glimmer", "nemotron-h-latent", "openelm"),
    *("qwen4exp", "rwkv6", "rwkv6qwen2", "rwkv7", "step35"),
)


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
@pytest.mark.parametrize(
    "name",
    [
        *("olmo3", "qwen35", "qwen35moe", "gemma3", "gemma4-e2b", "gpt-oss", "mistral3", "qwen3next", "glm-5"),
        *("gemma3n", "hy-v4"),
        *(pytest.param(name, marks=pytest.mark.ci) for name in ON_CUDA_TOO),
    ],
)
def test_cuda_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    """Run a short text in the emulator in two steps, because it is slow."""
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    runner = Runner(path, emulated_cuda(), n_pages=2, max_tokens=16)
    ids = IDS[:13]
    ours = np.concatenate([runner.run((ids[:12], 0, [0])), runner.run((ids[12:], 12, [0]))])
    theirs = expected(name, tuple(ids))
    assert np.abs(ours - theirs).max() < 1e-2 * np.abs(theirs).max()


#: Further mixtures of experts, whose routing, experts or shared experts differ.
WITH_EXPERTS = ("deepseek-v4", "gemma4-moe", "grovemoe", "hy-v4", "llama4", "nemotron-h-latent", "smallthinker")


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
@pytest.mark.parametrize(
    "name",
    [
        *("gpt-oss", "qwen35moe", "glm4moe"),
        *(pytest.param(name, marks=pytest.mark.ci) for name in WITH_EXPERTS),
    ],
)
def test_a_gpu_and_experts_on_the_cpu_compute_what_transformers_does(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    runner = Runner(path, OffloadingBackend(emulated_cuda()), n_pages=2, max_tokens=16)
    ids = IDS[:13]
    ours = np.concatenate([runner.run((ids[:12], 0, [0])), runner.run((ids[12:], 12, [0]))])
    theirs = expected(name, tuple(ids))
    assert np.abs(ours - theirs).max() < 1e-2 * np.abs(theirs).max()
