"""Models that write by diffusion: logits, and texts compared with the released loops, written in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM
from tests.helpers import diffusion as plain, plain_transformer, tiny_models
from tests.helpers.backends import shared_by_threads
from tests.helpers.recorder import CPUOps, ReferenceOps
from tests.helpers.run_model import Runner
from tests.models.tiny import DIFFUSION, make_model, write

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 290, 41)]
PROMPT = IDS[:9]


@pytest.mark.parametrize("name", DIFFUSION)
def test_converted_models_match_transformers(name: str, tmp_path: Path) -> None:
    """The models have other names in transformers, whose tokens then see each other."""
    torch = pytest.importorskip("torch", reason="needs the extra 'reference'")
    pytest.importorskip("transformers", reason="needs the extra 'reference'")
    model = make_model(DIFFUSION[name])
    with torch.no_grad():
        expected = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    path = write(tmp_path / "model.gguf", DIFFUSION[name], model)
    for ops, limit in ((ReferenceOps(np.float32), 1e-4), (shared_by_threads(CPUOps(threads=2)), 5e-3)):
        assert np.abs(Runner(path, ops).logits(IDS) - expected).max() < limit * np.abs(expected).max()


@dataclass
class Written:
    """A loaded tiny model, and its file."""

    name: str
    llm: LLM
    path: Path

    def generate(self, n: int = 12, **options: Any) -> list[int]:
        return list(self.llm.generate(PROMPT, max_tokens=n, ignore_eos=True, **options).ids)

    def expected(self, *arguments: Any, **options: Any) -> list[int]:
        return plain.write_text(plain.predictor(self.name, self.path), PROMPT, 12, *arguments, ends=[2], **options)


@pytest.fixture(scope="module", params=plain.MODELS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    path = plain.write(tmp_path_factory.mktemp(request.param) / "model.gguf", request.param)
    with localllm.load(path, device="cpu", parallel=3) as llm:
        yield Written(request.param, llm, path)


@pytest.mark.parametrize("name", plain.MODELS)
@pytest.mark.parametrize(("backend", "limit"), [("reference", 1e-3), ("cpu", 5e-3)])
def test_logits_are_those_of_the_papers_formulas(name: str, backend: str, limit: float, tmp_path: Path) -> None:
    settings = plain.settings_of(name)
    expected = plain_transformer.logits(settings, tiny_models.random_weights(settings), IDS)
    ops = ReferenceOps(np.float32) if backend == "reference" else shared_by_threads(CPUOps(threads=2))
    ours = Runner(plain.write(tmp_path / "model.gguf", name), ops).logits(IDS)
    assert np.abs(ours - expected).max() < limit * np.abs(expected).max()


@pytest.mark.parametrize("algorithm", ["confidence", "entropy", "margin", "random", "origin"])
def test_greedy_texts_in_blocks(algorithm: Any, written: Written) -> None:
    options: dict[str, Any] = {"diffusion_block_length": 4, "diffusion_steps": 6, "diffusion_algorithm": algorithm}
    ours = written.generate(temperature=0, seed=3, **options)
    assert ours == written.expected(plain.in_blocks(12, 6, 4), algorithm, seed=3)


@pytest.mark.parametrize("algorithm", ["confidence", "origin"])
@pytest.mark.parametrize("steps", [5, 12])
def test_greedy_texts_with_dreams_schedule(algorithm: Any, steps: int, written: Written) -> None:
    options: dict[str, Any] = {"diffusion_block_length": 0, "diffusion_steps": steps, "diffusion_eps": 0.01}
    ours = written.generate(temperature=0, seed=3, diffusion_algorithm=algorithm, **options)
    assert ours == written.expected(plain.by_time(12, steps, 0.01), algorithm, seed=3)


@pytest.mark.parametrize("algorithm", ["confidence", "entropy", "margin"])
def test_drawn_texts(algorithm: Any, written: Written) -> None:
    """Temperature and truncation change the confidence in Dream and RND1, but not in LLaDA."""
    options: dict[str, Any] = {"temperature": 1.3, "top_k": 20, "seed": 7}
    more: dict[str, Any] = {"top_p": 1, "diffusion_algorithm": algorithm, "diffusion_steps": 4}
    ours = written.generate(**options, **more)
    schedule = plain.by_time(12, 4) if written.name == "dream" else plain.in_blocks(12, 4, 12)
    assert ours == written.expected(schedule, algorithm, **options, tempers=not written.name.startswith("llada"))
    assert ours != written.generate(**options | {"seed": 8}, **more)
