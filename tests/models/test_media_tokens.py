"""Prompts with precomputed image embeddings: every device compared with the reference.

test_seeing.py in ``encoders`` compares the reference with transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine.media import MediaTokens, PreparedMedia, PromptMedia
from localllm.kernels.backend import Batch
from localllm.kernels.cuda.row_split import RowSplitBackend
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.helpers.backends import emulated_cuda, no_harness, shared_by_threads
from tests.helpers.recorder import CPUOps, ReferenceOps, SplitOps
from tests.helpers.run_model import Runner, make_batch
from tests.models.tiny import TINY, make_model, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]

N_TOKENS, N_DECODED = 39, 4
#: Positions and sizes of two images: the second is larger than a window, and crosses pages.
IMAGES = PromptMedia(
    [MediaTokens(5, PreparedMedia(b"one", 6, (2, 3))), MediaTokens(15, PreparedMedia(b"other", 15, (5, 3)))]
)
IS_IMAGE = np.isin(np.arange(N_TOKENS), [*range(5, 11), *range(15, 30)])
IDS = np.where(IS_IMAGE, 0, np.random.default_rng(1).integers(3, 300, N_TOKENS))
NAMES = ["qwen2vl", "qwen3vlmoe", "qwen35", "qwen35moe", "gemma3", "gemma4-dense", "gemma4-moe", "gemma4-e2b"]
NAMES += ["llama", "lfm2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def rows_of(name: str) -> Array:
    """Return embeddings of the image tokens, and the embeddings added in later layers: [21, k, d]."""
    n = 2 if name.startswith("qwen3vl") else 1
    return np.random.default_rng(2).normal(0, 1, (IS_IMAGE.sum(), n, 64)).astype(np.float32)


@dataclass
class Seeing:
    """Runs ranges of the prompt."""

    name: str
    runner: Runner

    def batch(self, start: int, stop: int) -> Batch:
        graph, rows = self.runner.model.graph, slice(start, stop)
        pages = range(min(8, self.runner.cache.n_pages[0]))
        batch = make_batch([(IDS[rows], start, pages)])
        tables = np.repeat(batch.block_tables, len(self.runner.cache.windows), axis=0)
        numbers = np.cumsum(IS_IMAGE) - 1
        return replace(
            batch,
            block_tables=tables,
            embedded=np.flatnonzero(IS_IMAGE[rows]).astype(np.int32),
            embeddings=rows_of(self.name)[numbers[rows][IS_IMAGE[rows]]],
            axes=IMAGES.axes(start, stop) if graph.has_axes else batch.axes,
            ends=IMAGES.ends(start, stop) if graph.has_spans else batch.ends,
        )

    def run(self, start: int, stop: int) -> Array:
        return self.runner.step(self.batch(start, stop)).copy()


@cache
def path_of(name: str, folder: Path) -> Path:
    return write(folder / f"{name}.gguf", TINY[name], make_model(TINY[name]))


@cache
def expected(path: Path) -> Array:
    """Return the reference's logits [T, n_vocab]; test_seeing.py compares the reference with transformers."""
    return Seeing(path.stem, Runner(path, ReferenceOps(np.float32), sees=True)).run(0, N_TOKENS)


def assert_close(ours: Array, theirs: Array, limit: float) -> None:
    assert np.abs(ours - theirs).max() < limit * np.abs(theirs).max()


@pytest.mark.parametrize("name", NAMES)
def test_images_on_the_cpu_match_the_reference(name: str, folder: Path) -> None:
    """Tokens one by one, and cuts before, between and after images, and inside them if allowed."""
    path = path_of(name, folder)
    seeing = Seeing(name, Runner(path, shared_by_threads(CPUOps(threads=2)), sees=True))
    whole = seeing.run(0, N_TOKENS - N_DECODED)
    whole = np.concatenate([whole, *(seeing.run(i, i + 1) for i in range(N_TOKENS - N_DECODED, N_TOKENS))])
    assert_close(whole, expected(path), 5e-3)
    cuts = [0, 3, 5, 11, 13, 30, 33, N_TOKENS]
    if not seeing.runner.model.graph.has_spans:
        cuts = sorted({*cuts, 7, 20, 21})
    parts = [seeing.run(*ends) for ends in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
@pytest.mark.parametrize("name", ["qwen3vl", "gemma3", "gemma4-e2b"])
def test_images_on_cuda_match_the_reference(name: str, folder: Path) -> None:
    """Run in the emulator, in two steps, the second with one token."""
    path = path_of(name, folder)
    seeing = Seeing(name, Runner(path, emulated_cuda(), n_pages=2, max_tokens=40, sees=True))
    assert_close(np.concatenate([seeing.run(0, 38), seeing.run(38, 39)]), expected(path), 1e-2)


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
def test_a_model_split_by_rows_sees(folder: Path) -> None:
    path, driver = path_of("qwen3vl", folder), EmulatedDriver(2)
    gpus = RowSplitBackend([emulated_cuda(driver, i) for i in range(2)])
    ours = Seeing("qwen3vl", Runner(path, gpus, n_pages=2, max_tokens=40, sees=True)).run(0, 30)
    assert_close(ours, expected(path)[:30], 1e-2)


@pytest.mark.parametrize("name", ["qwen3vl", "gemma3"])
def test_a_model_split_over_devices_sees(name: str, folder: Path) -> None:
    """Micro-batches must not divide an image span."""
    path, cpu = path_of(name, folder), shared_by_threads(CPUOps(threads=2))
    n_layers = TINY[name].config.get("num_hidden_layers", 4)
    whole = Seeing(name, Runner(path, cpu, sees=True)).run(0, N_TOKENS)
    parts = SplitOps([(cpu, 1), (cpu, n_layers - 1)], micro_batch=8)
    np.testing.assert_array_equal(Seeing(name, Runner(path, parts, sees=True)).run(0, N_TOKENS), whole)
