"""Prompts with images compared with transformers in float32, with precomputed image embeddings."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.engine.media import Embeddings, MediaTokens, PreparedMedia, PromptMedia
from localllm.engine.runner import ModelRunner
from localllm.kernels.backend import Batch
from localllm.kernels.cuda.row_split import RowSplitBackend
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.helpers.backends import emulated_cuda, no_harness, shared_by_threads
from tests.helpers.recorder import CPUOps, ReferenceOps, SplitOps
from tests.helpers.requests import SteppedEngine, results, writing
from tests.helpers.run_model import Runner, make_batch
from tests.models.tiny import TINY, make_model, write

torch: Any = pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]

#: Two images of odd sizes: the second is larger than a window, and crosses pages.
FIRST, SECOND = PreparedMedia(b"one" * 11, 6, (2, 3)), PreparedMedia(b"other" * 7, 15, (5, 3))
N_TOKENS, N_DECODED = 39, 4


@dataclass(frozen=True)
class Prompt:
    """Ids (0 at image positions), the images' positions, and a mask of image tokens."""

    ids: tuple[int, ...]
    pictures: PromptMedia

    @property
    def mask(self) -> NDArray[np.bool_]:
        places = [i for each in self.pictures.placed for i in range(each.start, each.stop)]
        return np.isin(np.arange(len(self.ids)), places)

    @property
    def named(self) -> list[int]:
        """Ids as in requests."""
        ids = list(self.ids)
        for each in self.pictures.placed:
            ids[each.start : each.stop] = each.media.ids
        return ids


def prompt(first: int = 5, between: int = 4, seed: int = 1, n: int = N_TOKENS) -> Prompt:
    """Return a prompt of ``n`` tokens, with ``first`` before the first image and ``between`` between the images."""
    placed = MediaTokens(first, FIRST), MediaTokens(first + 6 + between, SECOND)
    ids = np.random.default_rng(seed).integers(3, 300, n)
    for each in placed:
        ids[each.start : each.stop] = 0
    return Prompt(tuple(ids.tolist()), PromptMedia(placed))


PROMPT = prompt()
NAMES = ["qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "gemma3", "gemma4-dense", "gemma4-moe"]
NAMES += ["gemma4-e2b", "llama", "mistral3", "lfm2", "qwen2", "qwen3"]


@cache
def model_of(name: str) -> Any:
    return make_model(TINY[name])


@cache
def rows_of(name: str) -> Array:
    """Return embeddings of the image tokens, and the embeddings added in later layers: [21, k, d]."""
    n = 2 if name.startswith("qwen3vl") else 1
    return np.random.default_rng(2).normal(0, 1, (FIRST.n_tokens + SECOND.n_tokens, n, 64)).astype(np.float32)


@cache
def expected(name: str, prompt: Prompt = PROMPT) -> Array:
    """Return transformers' logits [T, n_vocab]."""
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.gemma4 import modeling_gemma4

    model, rows = model_of(name), torch.from_numpy(rows_of(name))
    ids, mask = torch.tensor(prompt.ids)[None], torch.from_numpy(prompt.mask)[None]
    options: dict[str, Any] = {}
    body = getattr(model.model, "language_model", model.model)
    positions = torch.arange(len(prompt.ids))[None]
    with torch.no_grad():
        embeddings = body.embed_tokens(ids)
        if name == "gemma4-e2b":
            options["per_layer_inputs"] = body.get_per_layer_inputs(ids, embeddings)
        embeddings = embeddings.masked_scatter(mask[..., None], rows[:, 0])
        if name.startswith("qwen3vl"):
            deeper = [rows[:, i].contiguous() for i in range(1, rows.shape[1])]
            options |= {"visual_pos_masks": mask, "deepstack_visual_embeds": deeper}
        if name.startswith(("qwen2vl", "qwen3vl", "qwen35")):
            qwen = model_of("qwen3vl" if name.startswith("qwen35") else name).model
            grid = torch.tensor([[1, 2 * p.grid[0], 2 * p.grid[1]] for p in (FIRST, SECOND)])
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
    """Runs ranges of the prompt."""

    name: str
    runner: Runner

    def batch(self, start: int, stop: int) -> Batch:
        graph, own, pictures, mask = self.runner.model.graph, slice(start, stop), PROMPT.pictures, PROMPT.mask
        pages = range(min(8, self.runner.cache.n_pages[0]))
        batch = make_batch([(PROMPT.ids[own], start, pages)])
        tables = np.repeat(batch.block_tables, len(self.runner.cache.windows), axis=0)
        numbers = np.cumsum(mask) - 1
        return replace(
            batch,
            block_tables=tables,
            embedded=np.flatnonzero(mask[own]).astype(np.int32),
            embeddings=rows_of(self.name)[numbers[own][mask[own]]],
            axes=pictures.axes(start, stop) if graph.has_axes else batch.axes,
            ends=pictures.ends(start, stop) if graph.has_spans else batch.ends,
        )

    def run(self, start: int, stop: int) -> Array:
        return self.runner.step(self.batch(start, stop)).copy()


def check(seeing: Seeing, limit: float) -> None:
    theirs = expected(seeing.name)
    whole = seeing.run(0, N_TOKENS - N_DECODED)
    whole = np.concatenate([whole, *(seeing.run(i, i + 1) for i in range(N_TOKENS - N_DECODED, N_TOKENS))])
    assert np.abs(whole - theirs).max() < limit * np.abs(theirs).max()
    # Cut before, between and after images, and inside them if allowed.
    cuts = [0, 3, 5, 11, 13, 30, 33, N_TOKENS]
    if not seeing.runner.model.graph.has_spans:
        cuts = sorted({*cuts, 7, 20, 21})
    parts = [seeing.run(*ends) for ends in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", NAMES)
def test_images_on_the_reference_match_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    check(Seeing(name, Runner(path, ReferenceOps(np.float32), sees=True)), 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_images_on_the_cpu_match_transformers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    check(Seeing(name, Runner(path, shared_by_threads(CPUOps(threads=2)), sees=True)), 5e-3)


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
@pytest.mark.parametrize("name", ["qwen3vl", "gemma3", "gemma4-e2b"])
def test_images_on_cuda_match_transformers(name: str, tmp_path: Path) -> None:
    """Run in the emulator, in two steps, the second with one token."""
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    seeing = Seeing(name, Runner(path, emulated_cuda(), n_pages=2, max_tokens=40, sees=True))
    ours = np.concatenate([seeing.run(0, 38), seeing.run(38, 39)])
    theirs = expected(name)
    assert np.abs(ours - theirs).max() < 1e-2 * np.abs(theirs).max()


@dataclass
class GivenEncoder:
    """An encoder that returns precomputed embeddings."""

    name: str
    encoded: list[bytes] = field(default_factory=list)

    def encode(self, pictures: Sequence[PreparedMedia]) -> Generator[None, None, list[Embeddings]]:
        yield
        self.encoded += [picture.key for picture in pictures]
        of = {FIRST.key: rows_of(self.name)[:6], SECOND.key: rows_of(self.name)[6:]}
        return [of[picture.key] for picture in pictures]  # type: ignore[misc]


def greedy(name: str, begin: Prompt, n: int = 4) -> list[int]:
    """Return the tokens that transformers generates."""
    for _ in range(n):
        id_ = int(expected(name, begin)[-1].argmax())
        begin = Prompt((*begin.ids, id_), begin.pictures)
    return list(begin.ids[-n:])


@pytest.mark.parametrize(
    ("name", "max_tokens"), [("qwen3vl", 16), ("qwen35", 16), ("gemma3", 16), ("gemma4-moe", 64)]
)
def test_the_engine_generates_the_tokens_of_transformers(name: str, max_tokens: int, tmp_path: Path) -> None:
    """Evaluate in small steps or one step, from the cache, and after edits before, between and after images.

    Every image is encoded once.
    """
    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    seen = Runner(path, ReferenceOps(np.float32), max_tokens=max_tokens, sees=True, n_states=8)
    graph, encoder = seen.model.graph, GivenEncoder(name)
    sizes = {"n_vocab": 300, "context": 96, "max_tokens": max_tokens}
    runner = ModelRunner(seen.step, **sizes, has_axes=graph.has_axes, has_spans=graph.has_spans)
    engine = SteppedEngine(runner=runner, encoder=encoder)
    edits = prompt(), prompt(), prompt(7), prompt(5, 6), prompt(n=44), prompt(7, seed=3)
    for each in edits:
        request = writing(each.named, 4, n_vocab=300, media=each.pictures)
        engine.run(request)
        assert results(request).error is None
        assert results(request).ids == greedy(name, each)
    assert encoder.encoded == [FIRST.key, SECOND.key]


@pytest.mark.skipif(no_harness() is not None, reason=no_harness() or "")
def test_a_model_split_by_rows_sees(tmp_path: Path) -> None:
    path, driver = write(tmp_path / "model.gguf", TINY["qwen3vl"], model_of("qwen3vl")), EmulatedDriver(2)
    gpus = RowSplitBackend([emulated_cuda(driver, i) for i in range(2)])
    ours = Seeing("qwen3vl", Runner(path, gpus, n_pages=2, max_tokens=40, sees=True)).run(0, 30)
    theirs = expected("qwen3vl")[:30]
    assert np.abs(ours - theirs).max() < 1e-2 * np.abs(theirs).max()


@pytest.mark.parametrize("name", ["qwen3vl", "gemma3"])
def test_a_model_split_over_devices_sees(name: str, tmp_path: Path) -> None:
    """Micro-batches must not divide an image span."""
    path, cpu = write(tmp_path / "model.gguf", TINY[name], model_of(name)), shared_by_threads(CPUOps(threads=2))
    n_layers = TINY[name].config.get("num_hidden_layers", 4)
    whole = Seeing(name, Runner(path, cpu, sees=True)).run(0, N_TOKENS)
    parts = SplitOps([(cpu, 1), (cpu, n_layers - 1)], micro_batch=8)
    np.testing.assert_array_equal(Seeing(name, Runner(path, parts, sees=True)).run(0, N_TOKENS), whole)
