"""Prompts with pictures against transformers, in float32: their embeddings are given, so no encoder is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine.pictures import Picture, Pictures, Placed
from localllm.kernels.backend import Batch
from tests.helpers.backends import emulated_cuda, no_harness, shared_by_threads
from tests.helpers.recorder import CPUOps, ReferenceOps
from tests.helpers.run_model import Runner, make_batch
from tests.models.tiny import TINY, make_model, write

torch: Any = pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]

#: Two pictures of odd sizes: the second is larger than the window of models that have one, and crosses pages.
FIRST, SECOND = Picture(b"one" * 11, 6, (2, 3)), Picture(b"other" * 7, 15, (5, 3))
PLACED = Pictures((Placed(5, FIRST), Placed(15, SECOND)))
N_TOKENS, N_DECODED = 39, 4
IDS = np.random.default_rng(1).integers(3, 300, N_TOKENS)
IS_PICTURE = np.isin(np.arange(N_TOKENS), [i for p in PLACED.placed for i in range(p.start, p.stop)])

NAMES = ["qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "gemma3", "gemma4-dense", "gemma4-moe"]
NAMES += ["gemma4-e2b", "llama", "mistral3", "lfm2", "qwen2", "qwen3"]


@cache
def model_of(name: str) -> Any:
    return make_model(TINY[name])


@cache
def rows_of(name: str) -> Array:
    """Embeddings of the pictures' tokens, and those that are added in layers: [21, k, d]."""
    n = 2 if name.startswith("qwen3vl") else 1
    return np.random.default_rng(2).normal(0, 1, (IS_PICTURE.sum(), n, 64)).astype(np.float32)


@cache
def expected(name: str) -> Array:
    """Logits [T, n_vocab] of transformers."""
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.gemma4 import modeling_gemma4

    model, rows = model_of(name), torch.from_numpy(rows_of(name))
    ids, mask = torch.from_numpy(np.where(IS_PICTURE, 0, IDS))[None], torch.from_numpy(IS_PICTURE)[None]
    options: dict[str, Any] = {}
    body = getattr(model.model, "language_model", model.model)
    positions = torch.arange(N_TOKENS)[None]
    with torch.no_grad():
        embeddings = body.embed_tokens(ids)
        if name == "gemma4-e2b":
            options["per_layer_inputs"] = body.get_per_layer_inputs(ids, embeddings)
        embeddings = embeddings.masked_scatter(mask[..., None], rows[:, 0])
        if name.startswith("qwen3vl"):
            deeper = [rows[:, i].contiguous() for i in range(1, rows.shape[1])]
            options |= {"visual_pos_masks": mask, "deepstack_visual_embeds": deeper}
        if name in ("qwen2vl", "qwen3vl", "qwen3vlmoe"):
            grid = torch.tensor([[1, 2 * p.picture.grid[0], 2 * p.picture.grid[1]] for p in PLACED.placed])
            positions, _ = model.model.get_rope_index(ids, mask.int(), image_grid_thw=grid)
        elif name.startswith("qwen35"):
            qwen = model_of("qwen3vl").model
            grid = torch.tensor([[1, 2 * p.picture.grid[0], 2 * p.picture.grid[1]] for p in PLACED.placed])
            positions, _ = qwen.get_rope_index(ids, mask.int(), image_grid_thw=grid)
        if name.startswith(("gemma3", "gemma4")) and name != "gemma4-e2b":
            own = modeling_gemma3 if name == "gemma3" else modeling_gemma4
            blocks = own.get_block_sequence_ids_for_mask(mask.long(), embeddings.device)
            settings = {"config": model.config, "inputs_embeds": embeddings, "attention_mask": None, "cache": None}
            options["attention_mask"] = own.create_masks_for_vision_model(
                **settings, position_ids=positions, block_sequence_ids=blocks
            )
        hidden = body(inputs_embeds=embeddings, position_ids=positions, use_cache=False, **options).last_hidden_state
        logits = model.lm_head(hidden)[0]
        cap = getattr(model.config, "final_logit_softcapping", None)
        return (logits if cap is None else cap * torch.tanh(logits / cap)).numpy()  # type: ignore[no-any-return]


@dataclass
class Seeing:
    """Runs parts of the prompt."""

    name: str
    runner: Runner

    def batch(self, start: int, stop: int) -> Batch:
        graph, own = self.runner.model.graph, slice(start, stop)
        pages = range(min(8, self.runner.cache.n_pages[0]))
        batch = make_batch([(np.where(IS_PICTURE, 0, IDS)[own].tolist(), start, pages)])
        tables = np.repeat(batch.block_tables, len(self.runner.cache.windows), axis=0)
        numbers = np.cumsum(IS_PICTURE) - 1
        return replace(
            batch,
            block_tables=tables,
            embedded=np.flatnonzero(IS_PICTURE[own]).astype(np.int32),
            embeddings=rows_of(self.name)[numbers[own][IS_PICTURE[own]]],
            axes=PLACED.axes(start, stop) if graph.has_axes else batch.axes,
            ends=PLACED.ends(start, stop) if graph.has_spans else batch.ends,
        )

    def run(self, start: int, stop: int) -> Array:
        return self.runner.step(self.batch(start, stop)).copy()


def check(seeing: Seeing, limit: float) -> None:
    theirs = expected(seeing.name)
    whole = seeing.run(0, N_TOKENS - N_DECODED)
    whole = np.concatenate([whole, *(seeing.run(i, i + 1) for i in range(N_TOKENS - N_DECODED, N_TOKENS))])
    assert np.abs(whole - theirs).max() < limit * np.abs(theirs).max()
    # Cut before, between and behind pictures; and where they may, in them.
    cuts = [0, 3, 5, 11, 13, 30, 33, N_TOKENS]
    if not seeing.runner.model.graph.has_spans:
        cuts = sorted({*cuts, 7, 20, 21})
    parts = [seeing.run(*ends) for ends in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_sees_what_transformers_does(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    check(Seeing(name, Runner(path, ReferenceOps(np.float32), sees=True)), 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_sees_what_transformers_does(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    check(Seeing(name, Runner(path, shared_by_threads(CPUOps(threads=2)), sees=True)), 5e-3)


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
@pytest.mark.parametrize("name", ["qwen3vl", "gemma3", "gemma4-e2b"])
def test_cuda_sees_what_transformers_does(name: str, tmp_path: Path) -> None:
    """In the emulator, in two steps of which the second is one token."""
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    seeing = Seeing(name, Runner(path, emulated_cuda(), n_pages=2, max_tokens=40, sees=True))
    ours = np.concatenate([seeing.run(0, 38), seeing.run(38, 39)])
    theirs = expected(name)
    assert np.abs(ours - theirs).max() < 1e-2 * np.abs(theirs).max()
